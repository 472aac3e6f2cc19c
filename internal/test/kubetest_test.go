package test_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

const (
	secrets = "/api/v1/namespaces/default/secrets"
	csrs    = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
)

type object = map[string]any

func clientOf(t *testing.T, s *kubetest.Server) *kube.Client {
	t.Helper()
	return must.Get(kube.New(kube.Options{URL: s.URL(), Client: s.Client()}))(t)
}

// result is what a request came to, such as "409 Conflict".
func result(err error) string {
	if e, ok := errors.AsType[*kube.StatusError](err); ok {
		text, _, _ := strings.Cut(e.Error(), ":")
		return text
	}
	if err != nil {
		return err.Error()
	}
	return "ok"
}

func named(name string, members ...any) object {
	o := object{"metadata": object{"name": name}}
	for i := 0; i < len(members); i += 2 {
		o[members[i].(string)] = members[i+1]
	}
	return o
}

// TestRefused has requests that an API server does not carry out.
func TestKubetestRefused(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	s := kubetest.Start(t)
	c, ctx := clientOf(t, s), t.Context()
	s.Put(secrets+"/a", object{"type": "x", "data": object{"k": "AAAA"}})
	create := func(path string, o object) func() error {
		return func() error { return c.Create(ctx, path, o, nil) }
	}
	update := func(path string, o object) func() error {
		return func() error { return c.Update(ctx, path, o, nil) }
	}
	get := func(path string) func() error { return func() error { return c.Get(ctx, path, nil, nil) } }
	for _, x := range []struct {
		want string
		do   func() error
	}{
		{"404 NotFound", get(secrets + "/b")},
		{"404 NotFound", get("/api/v1/namespaces/other/secrets/a")},
		{"404 NotFound", get("/api/v1/namespaces/default/things")},
		{"404 NotFound", get("/api/v2/namespaces/default/secrets")},
		{"404 NotFound", get("/x")},
		{"405 MethodNotAllowed", create("/api/v1/secrets", named("b"))},
		{"405 MethodNotAllowed", update(secrets+"/a/status", named("a"))},
		{"409 AlreadyExists", create(secrets, named("a"))},
		{"422 Invalid", create(secrets, object{})},
		{"422 Invalid", create(secrets, named("A"))},
		{"500 Internal Server Error", create(secrets, object{"metadata": object{"name": "b", "resourceVersion": "1"}})},
		{"400 BadRequest", create(secrets, object{"metadata": object{"name": "b", "namespace": "other"}})},
		{"400 BadRequest", create(secrets, named("b", "kind", "Pod"))},
		{"400 BadRequest", create(secrets, named("b", "apiVersion", "v2"))},
		{"400 BadRequest", create(secrets, named("b", "data", object{"k": "?"}))},
		{"422 Invalid", create(secrets, named("b", "data", object{"k/l": ""}))},
		{"422 Invalid", create(secrets, named("b", "data", object{"k": make([]byte, 1<<20), "l": []byte{1}}))},
		{"413 RequestEntityTooLarge", create(secrets, object{"metadata": object{"name": "b", "annotations": object{"k": strings.Repeat("x", 3<<20)}}})},
		{"404 NotFound", update(secrets+"/b", named("b"))},
		{"400 BadRequest", update(secrets+"/a", named("b"))},
		{"422 Invalid", update(secrets+"/a", named("a", "type", "y"))},
		{"409 Conflict", update(secrets+"/a", object{"metadata": object{"name": "a", "uid": "u"}, "type": "x"})},
		{"ok", update(secrets+"/a", named("a", "type", "x"))},
	} {
		assert.Equal(t, x.want, result(x.do()))
	}
	var answers []int
	for _, r := range s.Requests() {
		answers = append(answers, r.Code)
	}
	assert.NotContains(t, answers, 0)
	r := must.Get(http.NewRequestWithContext(ctx, http.MethodPatch, s.URL()+secrets+"/a", strings.NewReader("{}")))(t)
	response := must.Get(s.Client().Do(r))(t)
	require.NoError(t, response.Body.Close())
	assert.Equal(t, http.StatusUnsupportedMediaType, response.StatusCode)
}

// TestSigningRequests shows which subresource changes what.
func TestKubetestSigningRequests(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	c, ctx := clientOf(t, s), t.Context()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	der := must.Get(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key))(t)
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	spec := func(edit ...any) object {
		o := object{"request": request, "signerName": "example.com/istio", "usages": []string{"client auth"}, "expirationSeconds": 600}
		for i := 0; i < len(edit); i += 2 {
			o[edit[i].(string)] = edit[i+1]
		}
		return o
	}
	for _, bad := range []object{
		spec("request", der), spec("request", []byte{}), spec("signerName", "istio"), spec("signerName", "example.com/"), spec("usages", []string{}),
		spec("usages", []string{"everything"}), spec("usages", []string{"any", "any"}), spec("expirationSeconds", 599),
	} {
		assert.Equal(t, "422 Invalid", result(c.Create(ctx, csrs, named("bad", "spec", bad), nil)))
	}
	condition := func(kind, status string) object { return object{"type": kind, "status": status, "reason": "x"} }
	with := func(certificate any, conditions ...object) object {
		st := object{"conditions": conditions}
		if certificate != nil {
			st["certificate"] = certificate
		}
		return named("a", "spec", object{"signerName": "another.com/x"}, "status", st)
	}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte{1}})
	approved, denied, failed := condition("Approved", "True"), condition("Denied", "True"), condition("Failed", "True")
	require.NoError(t, c.Create(ctx, csrs, named("a", "spec", spec(), "status", object{"certificate": certificate}), nil))
	for _, x := range []struct {
		subresource string
		o           object
		want        string
		conditions  []string
		issued      bool
	}{
		{"", with(certificate, approved), "ok", nil, false},
		{"/status", with(nil, approved), "422 Invalid", nil, false},
		{"/approval", with(nil, condition("Approved", "False")), "422 Invalid", nil, false},
		{"/approval", with(nil, condition("Approved", "")), "422 Invalid", nil, false},
		{"/approval", with(nil, approved, denied), "422 Invalid", nil, false},
		{"/approval", with(certificate, approved), "ok", []string{"Approved"}, false},
		{"/approval", with(nil), "422 Invalid", []string{"Approved"}, false},
		{"/status", with([]byte("x"), approved), "422 Invalid", []string{"Approved"}, false},
		{"/status", with(certificate), "422 Invalid", []string{"Approved"}, false},
		{"/status", with(certificate, approved), "ok", []string{"Approved"}, true},
		{"/status", with(nil, approved), "422 Invalid", []string{"Approved"}, true},
		{"/status", with(certificate, approved, failed), "ok", []string{"Approved", "Failed"}, true},
		{"", named("a"), "ok", []string{"Approved", "Failed"}, true},
	} {
		assert.Equal(t, x.want, result(c.Update(ctx, csrs+"/a"+x.subresource, x.o, nil)), "%s %v", x.subresource, x.o)
		var got struct {
			Spec   struct{ SignerName string }
			Status struct {
				Certificate []byte
				Conditions  []struct{ Type, LastUpdateTime string }
			}
		}
		require.True(t, s.Get(csrs+"/a", &got))
		var types []string
		for _, c := range got.Status.Conditions {
			types = append(types, c.Type)
			assert.NotEmpty(t, c.LastUpdateTime)
		}
		assert.Equal(t, x.conditions, types)
		assert.Equal(t, x.issued, got.Status.Certificate != nil)
		assert.Equal(t, "example.com/istio", got.Spec.SignerName)
	}
}

// TestFaults checks the answers to requests that a test makes fail.
func TestKubetestFaults(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := kubetest.StartOn(t, 1, memconn.Listen())
		c, ctx := clientOf(t, s), t.Context()
		posts := func(r *http.Request) bool { return r.Method == http.MethodPost }
		for i, x := range []struct {
			fault  kubetest.Fault
			want   string
			landed bool
		}{
			{kubetest.Fault{Code: 503}, "503", false},
			{kubetest.Fault{Code: 500, Reason: "InternalError", Message: "100%s", Landed: true}, "500 InternalError: 100%s", true},
			{kubetest.Fault{}, "EOF", false},
			{kubetest.Fault{Landed: true}, "EOF", true},
			{kubetest.Fault{Hang: true}, "deadline", false},
			{kubetest.Fault{Hang: true, Landed: true}, "deadline", true},
			{kubetest.Fault{Code: 429, RetryAfter: 3 * time.Second}, "429", false},
		} {
			name := string(rune('a' + i))
			s.FailNext(1, x.fault, posts)
			require.NoError(t, c.Get(ctx, secrets, nil, nil), "not a POST")
			err := c.Create(ctx, secrets, named(name), nil)
			require.ErrorContains(t, err, x.want)
			if e, ok := errors.AsType[*kube.StatusError](err); ok {
				assert.Equal(t, x.fault.RetryAfter, e.RetryAfter)
			}
			assert.Equal(t, x.landed, s.Get(secrets+"/"+name, &object{}), x.want)
			assert.Equal(t, x.landed, kube.AlreadyExists(c.Create(ctx, secrets, named(name), nil)), "the next one goes well")
		}
	})
}
