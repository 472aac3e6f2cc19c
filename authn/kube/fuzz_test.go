package kube_test

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/spiffe"
)

// The rules of Kubernetes for names, as slow as they are obvious.
var (
	label     = regexp.MustCompile(`\A[a-z0-9]([-a-z0-9]*[a-z0-9])?\z`)
	subdomain = regexp.MustCompile(`\A[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\z`)
)

func FuzzParseUsername(f *testing.F) {
	for _, s := range []string{
		"system:serviceaccount:prod:web", "system:serviceaccount:prod:web.v1", "system:serviceaccount:prod:web:", "system:serviceaccount::",
		"system:node:worker-1", "", ":::", "system:serviceaccount:" + strings.Repeat("a", 64) + ":b", "system:serviceaccount:a:b\n",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		namespace, name, err := kube.ParseUsername(s)
		parts := strings.Split(s, ":")
		want := len(parts) == 4 && parts[0] == "system" && parts[1] == "serviceaccount" &&
			label.MatchString(parts[2]) && len(parts[2]) <= 63 && subdomain.MatchString(parts[3]) && len(parts[3]) <= 253
		if (err == nil) != want {
			t.Fatalf("%q: %v; the reference disagrees", s, err)
		}
		if err != nil {
			if namespace != "" || name != "" || len(err.Error()) > 2000 {
				t.Fatalf("%q: %q, %q with an error of %d bytes", s, namespace, name, len(err.Error()))
			}
			return
		}
		if "system:serviceaccount:"+namespace+":"+name != s {
			t.Fatalf("%q came back as %q and %q", s, namespace, name)
		}
		id, err := spiffe.MustParseTrustDomain(strings.Repeat("t", 255)).KubernetesID(namespace, name)
		if err != nil {
			t.Fatalf("%q makes no SPIFFE ID: %v", s, err)
		}
		if ns, sa, ok := id.Kubernetes(); !ok || ns != namespace || sa != name {
			t.Fatalf("%s is %q and %q", id, ns, sa)
		}
	})
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
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		a, err := kube.Judge(answer, tok, []string{"a", "z"})
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
		}{{a.Namespace, label, false}, {a.ServiceAccount, subdomain, false}, {a.PodName, subdomain, true}, {a.NodeName, subdomain, true}} {
			if !v.re.MatchString(v.text) && (v.text != "" || !v.optional) {
				t.Fatalf("%q was accepted", v.text)
			}
		}
		for _, uid := range []string{a.UID, a.PodUID} {
			if len(uid) > 128 || strings.ContainsFunc(uid, func(c rune) bool { return c <= ' ' || c > '~' }) {
				t.Fatalf("the UID %q was accepted", uid)
			}
		}
	})
}

func FuzzExpiry(f *testing.F) {
	for _, s := range []string{`{"exp":1}`, `{"exp":1e400}`, `{"exp":-1.5}`, `{"exp":"1"}`, `{"exp":1,"exp":2}`, `{"a":{"exp":1}}`, `[]`, ``, `{"exp":1}x`} {
		f.Add(token(s))
	}
	f.Add("a.b.c")
	f.Add("...")
	f.Fuzz(func(t *testing.T, tok string) {
		if end := kube.Expiry(tok); !end.IsZero() && (end.Year() < -1 || end.Year() > 10000) {
			t.Fatalf("%q ends at %v", tok, end)
		}
	})
}

func TestExpiry(t *testing.T) {
	t.Parallel()
	for payload, want := range map[string]int64{
		`{"exp":4102444800}`: 4102444800, `{"iat":1,"exp":2.5e1}`: 25, `{"exp":0}`: 0, `{"kubernetes.io":{"exp":7},"exp":8}`: 8,
		`{}`: -1, `{"exp":"1"}`: -1, `{"exp":null}`: -1, `{"exp":[1]}`: -1, `{"EXP":1}`: -1, `{"exp":1,"exp":1}`: -1, `{"exp":1}{}`: -1,
		`{"kubernetes.io":{"exp":7}}`: -1, `[{"exp":1}]`: -1, `{"exp":1`: -1,
	} {
		end := kube.Expiry(token(payload))
		if want < 0 {
			if !end.IsZero() {
				t.Errorf("%s ends at %v", payload, end)
			}
		} else if !end.Equal(time.Unix(want, 0)) {
			t.Errorf("%s ends at %v", payload, end)
		}
	}
}

// A text for a log is one short line, and has no sixteen bytes of the token.
func FuzzRedact(f *testing.F) {
	f.Add("token has expired", "sesame")
	f.Add("bad: abcdefghijklmnopqrstuvwxyz!", "0abcdefghijklmnopqrstuvwxyz0")
	f.Add("\xff\x00\r\n", "\xff")
	f.Add(strings.Repeat("é", 300), "x")
	f.Add("aaaa", "")
	f.Fuzz(func(t *testing.T, text, tok string) {
		out := kube.Redact(text, tok)
		if len(out) > 320 || !utf8.ValidString(out) || strings.ContainsFunc(out, func(c rune) bool { return !unicode.IsPrint(c) && c != ' ' }) {
			t.Fatalf("%q", out)
		}
		if len(tok) < 16 || !printableASCII(tok) {
			return
		}
		for i := range len(tok) - 15 {
			// with a bracket it may come about where something was taken out
			if piece := tok[i : i+16]; strings.Contains(out, piece) && !strings.ContainsAny(piece, "[]") {
				t.Fatalf("%q has %q of the token", out, piece)
			}
		}
	})
}

func printableASCII(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' })
}
