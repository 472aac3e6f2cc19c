package kube_test

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

const reviews = "/apis/authentication.k8s.io/v1/tokenreviews"

// good is what an API server says about the token of a pod.
func good(audiences ...string) kubetest.TokenReviewStatus {
	return kubetest.TokenReviewStatus{
		Authenticated: true,
		Audiences:     audiences,
		User: kubetest.UserInfo{
			Username: "system:serviceaccount:prod:web",
			UID:      "account-uid",
			Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:prod", "system:authenticated"},
			Extra: map[string][]string{
				"authentication.kubernetes.io/pod-name":  {"web-0"},
				"authentication.kubernetes.io/pod-uid":   {"pod-uid"},
				"authentication.kubernetes.io/node-name": {"node-1.example.org"},
			},
		},
	}
}

// token is one as Kubernetes makes them, as far as its payload goes.
func token(payload string) string {
	enc := base64.RawURLEncoding
	return enc.EncodeToString([]byte(`{"alg":"RS256"}`)) + "." + enc.EncodeToString([]byte(payload)) + "." + enc.EncodeToString([]byte("signature"))
}

func reviewer(t testing.TB, s *kubetest.Server, o kube.ReviewerOptions) *kube.Reviewer {
	t.Helper()
	o.APIServer, o.HTTPClient = s.URL(), s.Client()
	r := must.Get(kube.NewReviewer(&o))(t)
	return r
}

// answering is a reviewer whose API server has one answer.
func answering(t *testing.T, status kubetest.TokenReviewStatus) *kube.Reviewer {
	t.Helper()
	s := kubetest.Start(t)
	s.TokenReviews(func(kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return status })
	return reviewer(t, s, kube.ReviewerOptions{})
}

func TestReview(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	var asked kubetest.TokenReviewSpec
	s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		asked = spec
		return good("istio-ca")
	})
	r := reviewer(t, s, kube.ReviewerOptions{})
	tok := token(`{"exp":4102444800}`)
	a := must.Get(r.Review(t.Context(), tok+"\n", []string{"istio-ca", "other"}))(t)
	assert.Equal(t, kubetest.TokenReviewSpec{Token: tok, Audiences: []string{"istio-ca", "other"}}, asked)
	assert.Equal(t, &spiffe.Pod{
		Namespace: "prod", ServiceAccount: "web", ServiceAccountUID: "account-uid", Name: "web-0", UID: "pod-uid", Node: "node-1.example.org",
	}, a)
	assert.Equal(t, 1, s.Count(http.MethodPost, reviews))

	// each question is a review
	require.NoError(t, must.Err(r.Review(t.Context(), tok, []string{"istio-ca"})))
	assert.Equal(t, 2, s.Count(http.MethodPost, reviews))
}

// What a token need not say: pod, node, UIDs, its end.
func TestReviewLess(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.3-5")
	for name, extra := range map[string]map[string][]string{
		"no extra":     nil,
		"empty values": {"authentication.kubernetes.io/pod-name": {}, "authentication.kubernetes.io/pod-uid": {""}},
		"other extra":  {"authentication.kubernetes.io/credential-id": {"JTI=1"}, "Authentication.kubernetes.io/pod-name": {"web-0"}},
	} {
		status := good("a")
		status.User.Extra, status.User.UID = extra, ""
		for _, tok := range []string{"opaque", token(`{}`), token(`{"exp":"4102444800"}`), token(`{"exp":1,"exp":1}`), token(`{"exp":4102444800`), token(`[4102444800]`)} {
			a := must.Get(answering(t, status).Review(t.Context(), tok, []string{"a"}))(t, name)
			assert.Equal(t, &spiffe.Pod{Namespace: "prod", ServiceAccount: "web"}, a, name)
		}
	}
}

// Each answer has one thing wrong.
func TestReviewRefused(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.3-4", "IST-5.3-6")
	type answer = kubetest.TokenReviewStatus
	user := func(name string) func(*answer) { return func(a *answer) { a.User.Username = name } }
	extra := func(name, value string) func(*answer) {
		return func(a *answer) { a.User.Extra["authentication.kubernetes.io/"+name] = []string{value} }
	}
	for _, c := range []struct {
		name string
		edit func(*answer)
		kind error
		text string
	}{
		{"an error", func(a *answer) { a.Error = "token has expired" }, kube.ErrInvalidToken, "the API server says: token has expired"},
		{"an error and nothing else", func(a *answer) { *a = answer{Error: "[invalid bearer token, unknown]"} }, kube.ErrInvalidToken, "[invalid bearer token, unknown]"},
		{"not authenticated", func(a *answer) { a.Authenticated = false }, kube.ErrNotAuthenticated, "does not know it"},
		{"nothing at all", func(a *answer) { *a = answer{} }, kube.ErrNotAuthenticated, "does not know it"},
		{"no audience confirmed", func(a *answer) { a.Audiences = nil }, kube.ErrNotAuthenticated, "does not confirm any of the audiences"},
		{"another audience", func(a *answer) { a.Audiences = []string{"https://kubernetes.default.svc"} }, kube.ErrNotAuthenticated, `["a" "b"]`},
		{"an empty audience", func(a *answer) { a.Audiences = []string{""} }, kube.ErrNotAuthenticated, "audiences"},
		{"part of an audience", func(a *answer) { a.Audiences = []string{"a,b", "a b", "A"} }, kube.ErrNotAuthenticated, "audiences"},
		{"no groups", func(a *answer) { a.User.Groups = nil }, kube.ErrInvalidToken, "not in the group system:serviceaccounts"},
		{"only the group of the namespace", func(a *answer) { a.User.Groups = []string{"system:serviceaccounts:prod"} }, kube.ErrInvalidToken, "not in the group"},
		{"no user", user(""), kube.ErrInvalidToken, "not a service account"},
		{"an admin", user("kubernetes-admin"), kube.ErrInvalidToken, "not a service account"},
		{"five parts", user("system:serviceaccount:prod:web:x"), kube.ErrInvalidToken, "not a service account"},
		{"no namespace", user("system:serviceaccount::web"), kube.ErrInvalidToken, "not a namespace"},
		{"long name", user("system:serviceaccount:prod:" + strings.Repeat("a", 254)), kube.ErrInvalidToken, "not a service account's name"},
		{"huge name", user(strings.Repeat("a:", 100_000)), kube.ErrInvalidToken, "not a service account"},
		{"pod name with a slash", extra("pod-name", "a/b"), kube.ErrInvalidToken, "not the name of a pod"},
		{"upper case node", extra("node-name", "Node"), kube.ErrInvalidToken, "not the name of a node"},
		{"UID with a line break", func(a *answer) { a.User.UID = "a\nb" }, kube.ErrInvalidToken, "UID"},
		{"long UID of the pod", extra("pod-uid", strings.Repeat("a", 129)), kube.ErrInvalidToken, "UID"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			status := good("a")
			c.edit(&status)
			a, err := answering(t, status).Review(t.Context(), "sesame", []string{"a", "b"})
			must.Fail(t, err, c.kind, c.text)
			assert.Nil(t, a)
			assert.Less(t, len(err.Error()), 700)
			only(t, err, c.kind)
		})
	}
}

// only tests that an error is of one kind.
func only(t *testing.T, err, kind error) {
	t.Helper()
	for _, other := range []error{kube.ErrInvalidToken, kube.ErrNotAuthenticated, kube.ErrReviewFailed} {
		assert.Equal(t, other == kind, errors.Is(err, other), "%v is %v", err, other)
	}
}

// Names at the edge of what Kubernetes allows.
func TestReviewNames(t *testing.T) {
	t.Parallel()
	for _, c := range [][2]string{
		{"a", "b"}, {"0", "0-0"}, {"kube-system", "web.v1"}, {strings.Repeat("a", 63), strings.Repeat("a", 253)},
		{"system", "serviceaccount"},
	} {
		status := good("a")
		status.User.Username = "system:serviceaccount:" + c[0] + ":" + c[1]
		a := must.Get(answering(t, status).Review(t.Context(), "sesame", []string{"a"}))(t)
		assert.Equal(t, c, [2]string{a.Namespace, a.ServiceAccount})
	}
}

// What is refused without asking anybody.
func TestReviewNotAsked(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return good(spec.Audiences...) })
	r := reviewer(t, s, kube.ReviewerOptions{AnyAudience: true})
	for _, c := range []struct {
		name, token string
		audiences   []string
		kind        error
	}{
		{"no audiences", "sesame", nil, kube.ErrReviewFailed},
		{"empty list of audiences", "sesame", []string{}, kube.ErrReviewFailed},
		{"empty audience", "sesame", []string{"a", ""}, kube.ErrReviewFailed},
		{"no token", "", []string{"a"}, kube.ErrInvalidToken},
		{"a line break", "\n", []string{"a"}, kube.ErrInvalidToken},
		{"a blank in it", "ses ame", []string{"a"}, kube.ErrInvalidToken},
		{"a line break in it", "ses\name", []string{"a"}, kube.ErrInvalidToken},
		{"a line break in front", "\nsesame", []string{"a"}, kube.ErrInvalidToken},
		{"not ASCII", "sesamé", []string{"a"}, kube.ErrInvalidToken},
		{"not UTF-8", "ses\xffame", []string{"a"}, kube.ErrInvalidToken},
		{"NUL", "sesame\x00", []string{"a"}, kube.ErrInvalidToken},
		{"too long", strings.Repeat("ses", 16<<10), []string{"a"}, kube.ErrInvalidToken},
	} {
		_, err := r.Review(t.Context(), c.token, c.audiences)
		require.ErrorIs(t, err, c.kind, c.name)
		assert.NotContains(t, err.Error(), "ses", c.name)
		only(t, err, c.kind)
	}
	assert.Empty(t, s.Requests())

	require.NoError(t, must.Err(r.Review(t.Context(), strings.Repeat("t", 16<<10), []string{"a"})))
}

// The API server that cannot be asked, or does not let us.
func TestReviewFailed(t *testing.T) {
	t.Parallel()
	secret := token(`{"sub":"a secret that is long enough to be seen"}`)
	for _, c := range []struct {
		name  string
		fault kubetest.Fault
		texts []string
	}{
		{"forbidden", kubetest.Fault{Code: 403, Reason: "Forbidden", Message: "cannot create"}, []string{"403 Forbidden", "system:auth-delegator", "bind"}},
		{"unauthorized", kubetest.Fault{Code: 401, Reason: "Unauthorized"}, []string{"401"}},
		{"no such API", kubetest.Fault{Code: 404}, []string{"404"}},
		{"too many", kubetest.Fault{Code: 429, RetryAfter: 3 * time.Second}, []string{"429"}},
		{"broken", kubetest.Fault{Code: 500, Reason: "InternalError", Message: "etcd: " + secret}, []string{"500", "etcd"}},
		{"cut", kubetest.Fault{}, []string{"POST"}},
	} {
		s := kubetest.Start(t)
		s.FailNext(1, c.fault, nil)
		_, err := reviewer(t, s, kube.ReviewerOptions{}).Review(t.Context(), secret, []string{"a"})
		require.ErrorIs(t, err, kube.ErrReviewFailed, c.name)
		for _, text := range c.texts {
			require.ErrorContains(t, err, text)
		}
		for part := range strings.SplitSeq(secret, ".") {
			assert.NotContains(t, err.Error(), part, c.name)
		}
		only(t, err, kube.ErrReviewFailed)
	}
}

// What answers need not be an API server.
func TestReviewOddAnswers(t *testing.T) {
	t.Parallel()
	whole := `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","status":{"authenticated":true,"audiences":["a"],` +
		`"user":{"username":"system:serviceaccount:prod:web","groups":["system:serviceaccounts"]}}}`
	for _, c := range []struct {
		name, kind, body string
		err              error
	}{
		{"whole", "application/json", whole, nil},
		{"with a charset", "application/json; charset=utf-8", whole, nil},
		{"empty", "application/json", ``, kube.ErrReviewFailed},
		{"null", "application/json", `null`, kube.ErrReviewFailed},
		{"no object", "application/json", `{}`, kube.ErrReviewFailed},
		{"a page", "text/html", `<html>` + whole, kube.ErrReviewFailed},
		{"cut", "application/json", whole[:len(whole)-1], kube.ErrReviewFailed},
		{"followed by something", "application/json", whole + `x`, kube.ErrReviewFailed},
		{"other kind", "application/json", strings.Replace(whole, `"TokenReview"`, `"SubjectAccessReview"`, 1), kube.ErrReviewFailed},
		{"other version", "application/json", strings.Replace(whole, `k8s.io/v1`, `k8s.io/v1beta1`, 1), kube.ErrReviewFailed},
		{"a Status", "application/json", `{"apiVersion":"v1","kind":"Status","status":"Success"}`, kube.ErrReviewFailed},
		{"authenticated is a text", "application/json", strings.Replace(whole, `true`, `"true"`, 1), kube.ErrReviewFailed},
		{"groups are a text", "application/json", strings.Replace(whole, `["system:serviceaccounts"]`, `"system:serviceaccounts"`, 1), kube.ErrReviewFailed},
		{"huge", "application/json", `{"x":"` + strings.Repeat("x", 5<<20) + `",` + whole[1:], kube.ErrReviewFailed},
		{"not authenticated", "application/json", strings.Replace(whole, `true`, `false`, 1), kube.ErrNotAuthenticated},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", c.kind)
				_, _ = w.Write([]byte(c.body))
			}))
			t.Cleanup(srv.Close)
			r := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: srv.URL, HTTPClient: srv.Client()}))(t)
			_, err := r.Review(t.Context(), "sesame", []string{"a"})
			if c.err == nil {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, c.err)
			assert.Less(t, len(err.Error()), 600)
		})
	}
}

// What the API server quotes of a token is not repeated.
func TestReviewErrorWithoutToken(t *testing.T) {
	t.Parallel()
	tok := token(`{"exp":4102444800,"sub":"system:serviceaccount:prod:web"}`)
	middle := strings.Split(tok, ".")[1]
	for _, text := range []string{
		"invalid: " + tok, "invalid:" + tok + ".", tok, "token=" + tok + "&x", "claims " + middle, "claims " + middle[3:25], middle[:16] + "!" + middle[20:40],
		strings.Repeat("x", 290) + tok, strings.Repeat("x", 490) + tok,
	} {
		_, err := answering(t, kubetest.TokenReviewStatus{Error: text}).Review(t.Context(), tok, []string{"a"})
		require.ErrorIs(t, err, kube.ErrInvalidToken)
		for i := range len(tok) - 16 {
			require.NotContains(t, err.Error(), tok[i:i+16], text)
		}
	}
	_, err := answering(t, kubetest.TokenReviewStatus{Error: "sésame\r\nis\x00 not " + strings.Repeat("ö", 10_000)}).Review(t.Context(), "sesame", []string{"a"})
	require.ErrorContains(t, err, "says: sésame  is  not öö")
	assert.Less(t, len(err.Error()), 600)
	assert.NotContains(t, err.Error(), "\n")
}

// The fallback to any audience is off unless asked for, and follows one error only.
func TestAnyAudience(t *testing.T) {
	t.Parallel()
	const wrong = `[invalid bearer token, token audiences ["k8s"] is invalid for the target audiences ["a"]]`
	for _, c := range []struct {
		name   string
		any    bool
		first  kubetest.TokenReviewStatus
		second kubetest.TokenReviewStatus
		asked  int
		kind   error
	}{
		{"off", false, kubetest.TokenReviewStatus{Error: wrong}, good(), 1, kube.ErrInvalidToken},
		{"on", true, kubetest.TokenReviewStatus{Error: wrong}, good("k8s"), 2, nil},
		{"on, no audiences", true, kubetest.TokenReviewStatus{Error: wrong}, good(), 2, nil},
		{"other error", true, kubetest.TokenReviewStatus{Error: "expired"}, good(), 1, kube.ErrInvalidToken},
		{"not authenticated", true, kubetest.TokenReviewStatus{}, good(), 1, kube.ErrNotAuthenticated},
		{"no echo", true, good(), good(), 1, kube.ErrNotAuthenticated},
		{"the second is refused", true, kubetest.TokenReviewStatus{Error: wrong}, kubetest.TokenReviewStatus{Error: wrong}, 2, kube.ErrInvalidToken},
		{"the second does not know it", true, kubetest.TokenReviewStatus{Error: wrong}, kubetest.TokenReviewStatus{}, 2, kube.ErrNotAuthenticated},
	} {
		s := kubetest.Start(t)
		s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
			if len(spec.Audiences) > 0 {
				return c.first
			}
			return c.second
		})
		_, err := reviewer(t, s, kube.ReviewerOptions{AnyAudience: c.any}).Review(t.Context(), "sesame", []string{"a"})
		require.ErrorIs(t, err, c.kind, c.name)
		assert.Equal(t, c.asked, s.Count(http.MethodPost, reviews), c.name)
	}

	s := kubetest.Start(t)
	s.TokenReviews(func(kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		return kubetest.TokenReviewStatus{Error: wrong}
	})
	var n atomic.Int32
	s.Faults(func(*http.Request) *kubetest.Fault {
		if n.Add(1) == 2 {
			return &kubetest.Fault{Code: 503}
		}
		return nil
	})
	_, err := reviewer(t, s, kube.ReviewerOptions{AnyAudience: true}).Review(t.Context(), "sesame", []string{"a"})
	only(t, err, kube.ErrReviewFailed)
}

// inBubble has a server and a reviewer in a synctest bubble.
func inBubble(t *testing.T) (*kubetest.Server, *kube.Reviewer) {
	s := kubetest.StartOn(t, 1, memconn.Listen())
	s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return good(spec.Audiences...) })
	return s, reviewer(t, s, kube.ReviewerOptions{})
}

// An API server that does not answer blocks callers for no longer than the timeout.
func TestReviewTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, r := inBubble(t)
		s.FailNext(1, kubetest.Fault{Hang: true}, nil)
		start := time.Now()
		must.Fail(t, must.Err(r.Review(t.Context(), "sesame", []string{"a"})), kube.ErrReviewFailed, "no answer within 10s")
		assert.Equal(t, 10*time.Second, time.Since(start))

		s.FailNext(1, kubetest.Fault{Hang: true}, nil)
		start = time.Now()
		gone := errors.New("the caller has gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Millisecond, func() { cancel(gone) })
		must.Fail(t, must.Err(r.Review(ctx, "sesame", []string{"a"})), kube.ErrReviewFailed, gone)
		assert.Equal(t, time.Millisecond, time.Since(start))

		require.NoError(t, must.Err(r.Review(t.Context(), "sesame", []string{"a"})))
		s.Client().CloseIdleConnections()
	})
}

func TestNewReviewer(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]kube.ReviewerOptions{
		"plain http":        {APIServer: "http://api.example.org", HTTPClient: http.DefaultClient},
		"not a URL":         {APIServer: "api.example.org"},
		"user and password": {APIServer: "https://a:sesame@api.example.org"},
	} {
		_, err := kube.NewReviewer(&o)
		require.ErrorContains(t, err, "authn/kube: new reviewer: ", name)
		assert.NotContains(t, err.Error(), "sesame")
	}
	require.NoError(t, must.Err(kube.NewReviewer(&kube.ReviewerOptions{APIServer: "https://api.example.org"})))
}

func TestCheck(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	r := reviewer(t, s, kube.ReviewerOptions{})
	var asked kubetest.AccessReviewSpec
	s.AccessReviews(func(spec kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
		asked = spec
		return kubetest.AccessReviewStatus{Allowed: true}
	})
	require.NoError(t, r.Check(t.Context()))
	assert.Equal(t, &kubetest.ResourceAttributes{Verb: "create", Group: "authentication.k8s.io", Version: "v1", Resource: "tokenreviews"}, asked.ResourceAttributes)
	assert.Equal(t, 1, s.Count(http.MethodPost, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"))

	s.AccessReviews(func(kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
		return kubetest.AccessReviewStatus{Reason: "no rule\nmatches"}
	})
	err := r.Check(t.Context())
	require.EqualError(t, err, "authn/kube: this program may not create tokenreviews: the API server says: no rule matches; "+
		"bind the ClusterRole system:auth-delegator, or one that may create tokenreviews in the group authentication.k8s.io, to the service account of this program")

	s.AccessReviews(nil)
	require.ErrorContains(t, r.Check(t.Context()), "may not create tokenreviews; bind the ClusterRole")

	s.FailNext(1, kubetest.Fault{Code: 503}, nil)
	err = r.Check(t.Context())
	require.ErrorContains(t, err, "authn/kube: check: ")
	assert.NotContains(t, err.Error(), "bind", "the answer is not known yet")
}
