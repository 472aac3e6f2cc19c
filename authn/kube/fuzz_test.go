package kube_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/must"
)

// The rules of Kubernetes for names, as slow as they are obvious.
var (
	label     = regexp.MustCompile(`\A[a-z0-9]([-a-z0-9]*[a-z0-9])?\z`)
	subdomain = regexp.MustCompile(`\A[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\z`)
)

// reviewed is a connection to an API server that answers a review with these bytes.
type reviewed []byte

func (a reviewed) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(bytes.NewReader(a)), Request: r}, nil
}

// Whatever an API server answers: either an account whose every part is sound, for an audience that
// was asked for, or an error of one kind that does not hold the token.
func FuzzJudge(f *testing.F) {
	const tok = "sesame-sesame-sesame-sesame"
	status := good("a")
	whole, err := json.Marshal(map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	for _, s := range []string{
		`{}`, `null`, `[]`, `{"status":null}`, `{"status":{"authenticated":true}}`, `{"status":{"error":"` + tok + `"}}`,
		`{"status":{"authenticated":true,"audiences":["a"],"user":{"username":"system:serviceaccount:p:w","groups":["system:serviceaccounts"],"extra":{"authentication.kubernetes.io/pod-name":["../x"]}}}}`,
		`{"status":{"authenticated":true,"audiences":["b"],"user":{"username":"system:serviceaccount:p:w","groups":["system:serviceaccounts"]}}}`,
		`{"STATUS":{"authenticated":true,"Audiences":["a"],"user":{"username":"system:serviceaccount:p:w","groups":["system:serviceaccounts"]}}}`,
	} {
		f.Add([]byte(strings.Replace(s, `{"`, `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","`, 1)))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		client := &http.Client{Transport: reviewed(answer)}
		r := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: "https://api.test", HTTPClient: client}))(t)
		a, err := r.Review(t.Context(), tok, []string{"a", "z"})
		if err != nil {
			if a != nil {
				t.Fatal("an account with an error")
			}
			if said := "the API server says"; strings.Contains(err.Error(), said) && strings.Contains(err.Error(), tok) {
				t.Fatalf("the token is in %q", err)
			}
			return
		}
		var raw struct {
			Status struct {
				Authenticated bool
				Error         string
				Audiences     []string
				User          struct{ Groups []string }
			}
		}
		if err := json.Unmarshal(answer, &raw); err != nil {
			t.Fatal(err)
		}
		s := raw.Status
		if !s.Authenticated || s.Error != "" || !slices.Contains(s.Audiences, "a") && !slices.Contains(s.Audiences, "z") || !slices.Contains(s.User.Groups, "system:serviceaccounts") {
			t.Fatalf("%s was accepted", answer)
		}
		for _, v := range []struct {
			text     string
			re       *regexp.Regexp
			optional bool
		}{{a.Namespace, label, false}, {a.ServiceAccount, subdomain, false}, {a.Name, subdomain, true}, {a.Node, subdomain, true}} {
			if !v.re.MatchString(v.text) && (v.text != "" || !v.optional) {
				t.Fatalf("%q was accepted", v.text)
			}
		}
		for _, uid := range []string{a.UID, a.ServiceAccountUID} {
			if len(uid) > 128 || strings.ContainsFunc(uid, func(c rune) bool { return c <= ' ' || c > '~' }) {
				t.Fatalf("the UID %q was accepted", uid)
			}
		}
	})
}
