package linkerd_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

func realAuthority(t testing.TB) *ca.Authority {
	t.Helper()
	return must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")}))(t)
}

func anchorsOf(a *ca.Authority) []*x509.Certificate {
	return slices.Collect(a.Bundle().X509Authorities())
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
	reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: api.URL(), HTTPClient: api.Client()}))(t)
	authority := realAuthority(t)
	s := serve(t, linkerd.Options{Signer: authority, Review: reviewer.Review})
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
	assert.Equal(t, grpchttp.Internal, codeOf(must.Err(s.certify(t, r))))
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
	reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: api.URL(), HTTPClient: api.Client()}))(t)
	s := serve(t, linkerd.Options{Review: reviewer.Review})
	certify := func(token string) error {
		r := goodRequest(t)
		r.Token = []byte(token)
		return must.Err(s.certify(t, r))
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
	audit := must.Get(auditlog.Open(path, nil))(t)
	authority := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local"), Auditor: audit}))(t)
	s := serve(t, linkerd.Options{Signer: authority, Review: func(context.Context, string, []string) (*spiffe.Pod, error) {
		return &spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web", ServiceAccountUID: "account", Name: "web-0", UID: "u-1", Node: "n1"}, nil
	}})
	must.Get(s.certify(t, goodRequest(t)))(t)
	require.NoError(t, audit.Close())
	text := must.Get(os.ReadFile(path))(t)
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
	longName := must.Get(mesh.Name("emojivoto", long))(t)
	for _, c := range []struct {
		empty                  bool // of the authority
		account, name, subject string
	}{
		{false, "web", web, "CN=" + web},
		{true, "web", web, "CN=" + web},
		{false, long, longName, "O=svidkit"},
		{true, long, longName, ""},
	} {
		authority := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local"), EmptySubject: c.empty}))(t)
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
	reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: api.URL(), HTTPClient: api.Client()}))(t)
	s := serve(t, linkerd.Options{Review: reviewer.Review})
	r := goodRequest(t)
	begin := time.Now()
	answers := map[grpchttp.Code]int{}
	for i := range 100 {
		r.Token = fmt.Appendf(nil, "bad-%d", i)
		_, err := s.certify(t, r)
		answers[codeOf(err)]++
		if e, ok := errors.AsType[*grpchttp.Error](err); ok && e.Code == grpchttp.Unavailable {
			assert.Positive(t, e.RetryAfter, "when to come back")
		}
	}
	most := 64 + int(time.Since(begin).Seconds()) + 1
	assert.LessOrEqual(t, api.Count(http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews"), most)
	assert.GreaterOrEqual(t, answers[grpchttp.Unavailable], 100-most, "%v", answers)
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
		must.Get(authority.Rotate(t.Context()))(t)
		for range 10 {
			resp := must.Get(s.call(t.Context(), goodRequest(t)))(t)
			accept(t, resp, anchorsOf(authority), web, time.Now())
			issuers[fmt.Sprintf("%x", resp.GetIntermediateCertificates()[0])] = true
			time.Sleep(10 * time.Millisecond)
		}
	}
	assert.Greater(t, len(issuers), 1)
}

// frame puts a message into gRPC's envelope.
func frame(flags byte, msg []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(msg))), msg...)
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	return must.Get(proto.Marshal(m))(t)
}

// post sends a body and returns the status of gRPC, or of HTTP after "HTTP ".
func (s *service) post(t testing.TB, body []byte, edit ...func(*http.Request)) string {
	t.Helper()
	status, _ := s.exchange(t, body, edit...)
	return status
}

func (s *service) exchange(t testing.TB, body []byte, edit ...func(*http.Request)) (status string, answer []byte) {
	t.Helper()
	req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.addr+linkerd.Certify, bytes.NewReader(body)))(t)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	for _, f := range edit {
		f(req)
	}
	resp := must.Get(s.http.Do(req))(t)
	defer resp.Body.Close()
	answer = must.Get(io.ReadAll(resp.Body))(t)
	if resp.StatusCode != http.StatusOK {
		return "HTTP " + resp.Status[:3], answer
	}
	if st := resp.Trailer.Get("Grpc-Status"); st != "" {
		return st, answer
	}
	return resp.Header.Get("Grpc-Status"), answer
}

// direct is a client of a Server without a socket between.
func direct(t testing.TB, o linkerd.Options) *rpcClient {
	t.Helper()
	if o.Mesh == (linkerdname.Mesh{}) {
		o.Mesh = mesh
	}
	if o.Review == nil {
		o.Review = review
	}
	return newClient(caservertest.Direct(must.Get(linkerd.New(o))(t)), "http://certifier")
}

// TestBytes speaks to the server with bytes made by hand, both ways.
func TestBytes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-3.1-1", "LNK-3.1-2", "LNK-3.1-3", "LNK-3.2-1")
	s := serve(t, linkerd.Options{})
	der := csr(t, newKey(t), nil)
	require.Less(t, len(der), 1<<14)
	msg := "\x0a" + string([]byte{byte(len(web))}) + web + "\x12" + string([]byte{byte(len(webToken))}) + webToken +
		"\x1a" + string([]byte{byte(len(der)&0x7f | 0x80), byte(len(der) >> 7)}) + string(der)
	status, body := s.exchange(t, frame(0, []byte(msg)))
	require.Equal(t, "0", status)
	require.Equal(t, byte(0), body[0])
	require.Len(t, body[5:], int(binary.BigEndian.Uint32(body[1:])))
	var out wire.CertifyResponse
	require.NoError(t, proto.Unmarshal(body[5:], &out))
	assert.Equal(t, body[5:], marshal(t, &out), "the one encoding")
	assert.Equal(t, byte(0x0a), body[5])
	assert.Equal(t, byte(0x30), out.GetLeafCertificate()[0], "DER")
}

func TestHostileBodies(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-1")
	s := serve(t, linkerd.Options{})
	good := marshal(t, goodRequest(t))
	for name, test := range map[string]struct {
		body   []byte
		status string
	}{
		"good":                       {frame(0, good), "0"},
		"good with unknown fields":   {frame(0, append(bytes.Clone(good), "\x22\x01x"...)), "0"},
		"empty message":              {frame(0, nil), "3"},
		"garbage":                    {frame(0, []byte("\xff\xff\xff\xff")), "3"},
		"group that does not end":    {frame(0, []byte("\x0b")), "3"},
		"length over the end":        {frame(0, []byte("\x0a\x7fa")), "3"},
		"a tag of zero":              {frame(0, []byte{0}), "3"},
		"fields of another type":     {frame(0, []byte("\x08\x01\x10\x01\x18\x01")), "3"},
		"identity that is not UTF-8": {frame(0, []byte("\x0a\x01\xff")), "3"},
		"a message over the limit":   {frame(0, make([]byte, 192<<10+1)), "8"},
		"a MiB of empty fields":      {frame(0, bytes.Repeat([]byte("\x0a\x00"), 90<<10)), "3"},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.status, s.post(t, test.body))
			assert.NotContains(t, s.logs.String(), webToken)
		})
	}
	assert.Equal(t, "0", s.post(t, frame(0, good)), "it is alive")
}

// FuzzCertify sends messages to a handler: the answer is a certificate for the one name that its token
// proves, or a status with a code that has been chosen.
func FuzzCertify(f *testing.F) {
	good := goodRequest(f)
	f.Add(marshal(f, good))
	f.Add([]byte("\x0a\x01a\x12\x01t\x1a\x01\x30"))
	f.Add([]byte{})
	f.Add([]byte("\x0b"))
	f.Add(marshal(f, &wire.CertifyRequest{Identity: web, Token: []byte("voting"), CertificateSigningRequest: good.GetCertificateSigningRequest()}))
	sig := newSigner(f)
	srv := must.Get(linkerd.New(linkerd.Options{Mesh: mesh, Signer: sig, Review: review}))(f)
	s := &service{addr: "certifier", http: caservertest.Direct(srv)}
	f.Fuzz(func(t *testing.T, msg []byte) {
		status, answer := s.exchange(t, frame(0, msg))
		switch status {
		case "0":
			var out wire.CertifyResponse
			require.NoError(t, proto.Unmarshal(answer[5:], &out))
			var in wire.CertifyRequest
			require.NoError(t, proto.Unmarshal(msg, &in))
			require.NotEmpty(t, out.GetLeafCertificate())
			require.NotEmpty(t, out.GetIntermediateCertificates())
			require.Contains(t, string(out.GetLeafCertificate()), in.GetIdentity())
		case "3", "8", "9", "13":
		default:
			t.Fatalf("status %q", status)
		}
	})
}
