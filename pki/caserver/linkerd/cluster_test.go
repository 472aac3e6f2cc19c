package linkerd_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/hostilecsr"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/spiffe"
)

func realAuthority(t testing.TB) *ca.Authority {
	t.Helper()
	a, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")})
	require.NoError(t, err)
	return a
}

func anchorsOf(a *ca.Authority) []*x509.Certificate {
	return slices.Collect(a.Bundle().X509Authorities())
}

// issuerOf is for the option of that name.
func issuerOf(a *ca.Authority) func() []*x509.Certificate {
	return func() []*x509.Certificate {
		for _, r := range a.Status().Roots {
			if r.Phase == ca.Active {
				return []*x509.Certificate{r.Certificate}
			}
		}
		return nil
	}
}

// TestCluster has an authority of ours and an API server behind the service.
func TestCluster(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-5-5", "LNK-5-6", "LNK-5-10", "LNK-16-3", "LNK-17-3", "LNK-17-4", "LNK-17-5")
	api := kubetest.Start(t)
	api.TokenReviews(func(r kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		user, ok := map[string]string{
			"web": "system:serviceaccount:emojivoto:web", "node": "system:node:worker-1", "admin": "kubernetes-admin",
			"dotted": "system:serviceaccount:emojivoto:web.v1", "deaf": "system:serviceaccount:emojivoto:web",
			"voting": "system:serviceaccount:emojivoto:voting",
		}[r.Token]
		switch {
		case r.Token == "expired":
			return kubetest.TokenReviewStatus{Error: "token has expired: expired"}
		case !ok:
			return kubetest.TokenReviewStatus{}
		}
		s := kubetest.TokenReviewStatus{Authenticated: true, User: kubetest.UserInfo{Username: user, Groups: []string{"system:serviceaccounts"}}}
		if r.Token != "deaf" { // an API server that knows nothing of audiences
			s.Audiences = r.Audiences
		}
		return s
	})
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: api.URL(), HTTPClient: api.Client()})
	require.NoError(t, err)
	authority := realAuthority(t)
	s := serve(t, linkerd.Options{Signer: authority, Review: reviewer.Review, Issuer: issuerOf(authority)})
	r := goodRequest(t)
	for token, code := range map[string]grpchttp.Code{
		"web\n": 0, "node": grpchttp.InvalidArgument, "admin": grpchttp.InvalidArgument, "dotted": grpchttp.InvalidArgument,
		"expired": grpchttp.InvalidArgument, "unknown": grpchttp.FailedPrecondition, "deaf": grpchttp.FailedPrecondition,
		"voting": grpchttp.FailedPrecondition,
	} {
		r.Token = []byte(token)
		resp, err := s.certify(t, r)
		if code == 0 {
			require.NoError(t, err)
			leaf := accept(t, resp, anchorsOf(authority), web, time.Now())
			assert.Equal(t, web, leaf.Subject.CommonName)
			assert.GreaterOrEqual(t, leaf.SerialNumber.BitLen(), 64)
			continue
		}
		assert.Equal(t, code, codeOf(err), "%s: %v", token, err)
	}
	api.FailNext(1, kubetest.Fault{Code: http.StatusForbidden}, nil)
	r.Token = []byte("web")
	_, err = s.certify(t, r)
	assert.Equal(t, grpchttp.Internal, codeOf(err))
	var m strings.Builder
	require.NoError(t, s.Report().Metrics(&m))
	assert.Contains(t, m.String(), "linkerd_identity_certify_total{code=\"ok\"} 1\n")
	assert.NotContains(t, m.String(), "issuer_cert_ttl_seconds 0\n")
}

// TestTokenAudience has an API server that knows tokens for one audience each, as those that the kubelet rotates.
func TestTokenAudience(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-5-11")
	var expired atomic.Bool // the first token
	api := kubetest.Start(t)
	api.TokenReviews(func(r kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		assert.Equal(t, []string{"identity.l5d.io"}, r.Audiences)
		audience, known := map[string]string{
			"first": "identity.l5d.io", "second": "identity.l5d.io", "api": "https://kubernetes.default.svc", "istio": "istio-ca",
		}[r.Token]
		switch {
		case r.Token == "first" && expired.Load():
			return kubetest.TokenReviewStatus{Error: "token has expired"}
		case !known || !slices.Contains(r.Audiences, audience):
			return kubetest.TokenReviewStatus{Error: "token audiences are not those of the request"}
		}
		user := kubetest.UserInfo{Username: "system:serviceaccount:emojivoto:web", Groups: []string{"system:serviceaccounts"}}
		return kubetest.TokenReviewStatus{Authenticated: true, User: user, Audiences: []string{audience}}
	})
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: api.URL(), HTTPClient: api.Client()})
	require.NoError(t, err)
	s := serve(t, linkerd.Options{Review: reviewer.Review})
	certify := func(token string) error {
		r := goodRequest(t)
		r.Token = []byte(token)
		_, err := s.certify(t, r)
		return err
	}
	require.NoError(t, certify("first"))
	for _, other := range []string{"api", "istio"} {
		assert.Equal(t, grpchttp.InvalidArgument, codeOf(certify(other)), "a token for others than this service: %s", other)
	}
	expired.Store(true)
	assert.Equal(t, grpchttp.InvalidArgument, codeOf(certify("first")))
	assert.NoError(t, certify("second"), "the next token of the same pod")
}

// TestAuditRecord reads the audit record back, which has all of the caller.
func TestAuditRecord(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	audit, err := auditlog.Open(path, nil)
	require.NoError(t, err)
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local"), Auditor: audit})
	require.NoError(t, err)
	s := serve(t, linkerd.Options{Signer: authority, Review: func(context.Context, string, []string) (*spiffe.Pod, error) {
		return &spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web", ServiceAccountUID: "account", Name: "web-0", UID: "u-1", Node: "n1"}, nil
	}})
	_, err = s.certify(t, goodRequest(t))
	require.NoError(t, err)
	require.NoError(t, audit.Close())
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var records []*ca.Issuance
	for line := range bytes.Lines(text) {
		i := new(ca.Issuance)
		require.NoError(t, json.Unmarshal(line, i))
		if i.Kind != "" { // and no change of keys
			records = append(records, i)
		}
	}
	require.Len(t, records, 1)
	assert.Equal(t, web, records[0].Caller)
	assert.Equal(t, "kubernetes-token", records[0].Method)
	assert.Equal(t, spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web", ServiceAccountUID: "account", Name: "web-0", UID: "u-1", Node: "n1"}, records[0].Pod)
	assert.Equal(t, []string{web}, records[0].DNSNames)
}

// TestSAN has certificates of a real authority: the extension is critical only when the subject is empty (RFC 5280, 4.2.1.6).
func TestSAN(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-7-7")
	long := strings.Repeat("a", 63) // its name has no room in a common name
	longName, err := mesh.Name("emojivoto", long)
	require.NoError(t, err)
	for _, c := range []struct {
		empty                  bool // of the authority
		account, name, subject string
	}{
		{false, "web", web, "CN=" + web},
		{true, "web", web, "CN=" + web},
		{false, long, longName, "O=svidkit"},
		{true, long, longName, ""},
	} {
		authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local"), EmptySubject: c.empty})
		require.NoError(t, err)
		s := serve(t, linkerd.Options{Signer: authority, Review: func(_ context.Context, token string, _ []string) (*spiffe.Pod, error) {
			return &spiffe.Pod{Namespace: "emojivoto", ServiceAccount: token}, nil
		}})
		resp, err := s.certify(t, &wire.CertifyRequest{Identity: c.name, Token: []byte(c.account), CertificateSigningRequest: csr(t, newKey(t), func(r *x509.CertificateRequest) {
			r.Subject.CommonName, r.DNSNames = c.name, []string{c.name}
		})})
		require.NoError(t, err)
		leaf := accept(t, resp, anchorsOf(authority), c.name, time.Now())
		assert.Equal(t, c.subject, leaf.Subject.String())
		var sans []pkix.Extension
		for _, e := range leaf.Extensions {
			if e.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) {
				sans = append(sans, e)
			}
		}
		require.Len(t, sans, 1)
		assert.Equal(t, c.subject == "", sans[0].Critical, c.name)
	}
}

// TestTokenFlood has a client that sends bad tokens as fast as it can: the reviewer learns from the context whose they
// are, and stops asking.
func TestTokenFlood(t *testing.T) {
	t.Parallel()
	api := kubetest.Start(t)
	api.TokenReviews(func(kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return kubetest.TokenReviewStatus{} })
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: api.URL(), HTTPClient: api.Client()})
	require.NoError(t, err)
	s := serve(t, linkerd.Options{Review: reviewer.Review})
	r := goodRequest(t)
	begin := time.Now()
	answers := map[grpchttp.Code]int{}
	for i := range 200 {
		r.Token = fmt.Appendf(nil, "bad-%d", i)
		_, err := s.certify(t, r)
		answers[codeOf(err)]++
		if e, ok := errors.AsType[*grpchttp.Error](err); ok && e.Code == grpchttp.Unavailable {
			assert.Positive(t, e.RetryAfter, "when to come back")
		}
	}
	most := 64 + int(time.Since(begin).Seconds()) + 1
	assert.LessOrEqual(t, api.Count(http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews"), most)
	assert.GreaterOrEqual(t, answers[grpchttp.Unavailable], 200-most, "%v", answers)
}

// TestRealAuthorityHostile is TestHostile with what signs in earnest.
func TestRealAuthorityHostile(t *testing.T) {
	t.Parallel()
	authority := realAuthority(t)
	s := direct(t, linkerd.Options{Signer: authority})
	signed := 0
	for _, c := range hostilecsr.Cases(t) {
		if c.DER == nil {
			continue
		}
		resp, err := s.call(t.Context(), &wire.CertifyRequest{Identity: web, Token: []byte(webToken), CertificateSigningRequest: c.DER})
		if err != nil {
			continue
		}
		signed++
		require.True(t, c.Signable, c.Name)
		leaf := accept(t, resp, anchorsOf(authority), web, time.Now())
		assert.True(t, pki.PublicKeysEqual(c.Key, leaf.PublicKey), c.Name)
		assert.Equal(t, "O=svidkit", leaf.Subject.String(), c.Name)
		assert.False(t, leaf.IsCA, c.Name)
		assert.Zero(t, leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign), c.Name)
		assert.ElementsMatch(t, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, leaf.ExtKeyUsage, c.Name)
		for _, e := range leaf.Extensions {
			assert.Contains(t, []string{"2.5.29.14", "2.5.29.15", "2.5.29.17", "2.5.29.19", "2.5.29.35", "2.5.29.37"}, e.Id.String(), c.Name)
		}
	}
	assert.Greater(t, signed, 60)
}

// TestRotation rotates the root under the service: each answer is good under the anchors of its moment.
func TestRotation(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	authority, err := ca.New(ca.Config{
		TrustDomain: spiffe.MustParseTrustDomain("cluster.local"), RefreshHint: time.Second, Rotation: ca.Rotation{Propagation: 50 * time.Millisecond},
	})
	require.NoError(t, err)
	s := direct(t, linkerd.Options{Signer: authority})
	issuers := map[string]bool{}
	for range 3 {
		_, err := authority.Rotate(t.Context())
		require.NoError(t, err)
		for range 10 {
			resp, err := s.call(t.Context(), goodRequest(t))
			require.NoError(t, err)
			accept(t, resp, anchorsOf(authority), web, time.Now())
			issuers[fmt.Sprintf("%x", resp.GetIntermediateCertificates()[0])] = true
			time.Sleep(10 * time.Millisecond)
		}
	}
	assert.Greater(t, len(issuers), 1)
}
