package linkerd_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/hostilecsr"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

func TestNew(t *testing.T) {
	t.Parallel()
	good := linkerd.Options{Mesh: mesh, Signer: newSigner(t), Review: review}
	must.Get(linkerd.New(good))(t)
	for what, edit := range map[string]func(*linkerd.Options){
		"Mesh":      func(o *linkerd.Options) { o.Mesh = linkerdname.Mesh{} },
		"Signer":    func(o *linkerd.Options) { o.Signer = nil },
		"Review":    func(o *linkerd.Options) { o.Review = nil },
		"Lifetime":  func(o *linkerd.Options) { o.Lifetime = -1 },
		"ClockSkew": func(o *linkerd.Options) { o.ClockSkew = -1 },
		"whole":     func(o *linkerd.Options) { o.Lifetime = time.Second - 1 },
		"too long":  func(o *linkerd.Options) { o.Lifetime, o.ClockSkew = 1<<62, 1<<62 },
	} {
		o := good
		edit(&o)
		assert.ErrorContains(t, must.Err(linkerd.New(o)), what)
	}
}

func TestCertify(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-4", "LNK-1-5", "LNK-3.2-2", "LNK-3.3-13", "LNK-6.2-5", "LNK-7-3", "LNK-7-4")
	s := serve(t, linkerd.Options{})
	key := newKey(t)
	before := time.Now().Truncate(time.Second)
	resp, err := s.certify(t, &wire.CertifyRequest{Identity: web, Token: []byte(webToken), CertificateSigningRequest: csr(t, key, nil)})
	require.NoError(t, err)
	after := time.Now()
	leaf := accept(t, resp, s.signer.anchors, web, after)
	assert.True(t, key.PublicKey.Equal(leaf.PublicKey))
	assert.Equal(t, web, leaf.Subject.CommonName)
	assert.WithinRange(t, leaf.NotBefore, before.Add(-11*time.Second), after.Add(-10*time.Second))
	assert.WithinRange(t, leaf.NotAfter, before.Add(24*time.Hour+10*time.Second), after.Add(24*time.Hour+10*time.Second))
	assert.Equal(t, [][]byte{s.signer.anchors[0].Raw}, resp.GetIntermediateCertificates(), "the issuer follows, also when it is the anchor")

	asked := s.signer.requests()
	require.Len(t, asked, 1)
	assert.Equal(t, ca.Request{
		CSR: asked[0].CSR, Profile: ca.DNSOnly, DNSNames: []string{web}, CommonName: web,
		TTL: 24*time.Hour + 10*time.Second, Backdate: 10 * time.Second, Caller: web, Method: "kubernetes-token",
		Pod: spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web"},
	}, asked[0])
	assert.NotContains(t, s.logs.String(), webToken)
	assert.Contains(t, s.logs.String(), web)
}

func TestLifetime(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-3.2-3", "LNK-6.2-5", "LNK-7-4", "LNK-17-10")
	s := serve(t, linkerd.Options{Lifetime: 24 * time.Hour, ClockSkew: 20 * time.Second})
	resp := must.Get(s.certify(t, goodRequest(t)))(t)
	leaf := accept(t, resp, s.signer.anchors, web, time.Now())
	assert.InDelta(t, 24*time.Hour+40*time.Second, leaf.NotAfter.Sub(leaf.NotBefore), float64(time.Second))

	// An issuer that ends earlier is the end of the leaf.
	key := newKey(t)
	root := authority(t, "root", key, nil, nil, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(time.Hour) })
	short := serve(t, linkerd.Options{Signer: &signer{anchors: []*x509.Certificate{root}, chain: []*x509.Certificate{root}, key: key}})
	resp = must.Get(short.certify(t, goodRequest(t)))(t)
	assert.Equal(t, root.NotAfter.Unix(), resp.GetValidUntil().GetSeconds())
}

// chained has a root, two intermediates under it, and signs with the lower one.
func chained(t testing.TB) *signer {
	t.Helper()
	rootKey, upperKey, lowerKey := newKey(t), newKey(t), newKey(t)
	root := authority(t, "root", rootKey, nil, nil, nil)
	upper := authority(t, "upper", upperKey, rootKey, root, nil)
	lower := authority(t, "lower", lowerKey, upperKey, upper, nil)
	return &signer{anchors: []*x509.Certificate{root}, chain: []*x509.Certificate{lower, upper}, inChain: 2, key: lowerKey}
}

func TestChain(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-5", "LNK-3.2-2", "LNK-7-13", "LNK-17-11")
	s := serve(t, linkerd.Options{Signer: chained(t)})
	resp := must.Get(s.certify(t, goodRequest(t)))(t)
	accept(t, resp, s.signer.anchors, web, time.Now())
	assert.Equal(t, [][]byte{s.signer.chain[0].Raw, s.signer.chain[1].Raw}, resp.GetIntermediateCertificates(), "issuer, parent, and no anchor")

	// Of several anchors the one that signed is sent.
	two := newSigner(t)
	two.anchors = append([]*x509.Certificate{newSigner(t).anchors[0]}, two.anchors...)
	s = serve(t, linkerd.Options{Signer: two})
	resp = must.Get(s.certify(t, goodRequest(t)))(t)
	accept(t, resp, two.anchors, web, time.Now())
	assert.Equal(t, [][]byte{two.anchors[1].Raw}, resp.GetIntermediateCertificates())
}

func TestAccepted(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-4-3", "LNK-16-2", "LNK-17-7")
	s := serve(t, linkerd.Options{})
	for name, test := range map[string]struct {
		der []byte
		cn  string
	}{
		"no common name": {csr(t, newKey(t), func(r *x509.CertificateRequest) { r.Subject = pkix.Name{} }), ""},
		"other parts of the subject": {csr(t, newKey(t), func(r *x509.CertificateRequest) {
			r.Subject.Organization = []string{"system:masters"}
			r.Subject.OrganizationalUnit = []string{"admins"}
		}), web},
		"P-384": {csr(t, p384(t), nil), web},
	} {
		resp, err := s.certify(t, &wire.CertifyRequest{Identity: web, Token: []byte(webToken), CertificateSigningRequest: test.der})
		require.NoError(t, err, name)
		leaf := accept(t, resp, s.signer.anchors, web, time.Now())
		assert.Equal(t, pkix.Name{CommonName: test.cn}.String(), leaf.Subject.String(), name)
	}
}

func p384(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	return must.Get(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))(t)
}

func TestFirstDesign(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-2-2", "LNK-17-2")
	const name = "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local"
	s := serve(t, linkerd.Options{Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local", FirstDesign: true}})
	r := &wire.CertifyRequest{Identity: name, Token: []byte(webToken), CertificateSigningRequest: csr(t, newKey(t), func(r *x509.CertificateRequest) {
		r.Subject, r.DNSNames = pkix.Name{}, []string{name}
	})}
	resp := must.Get(s.certify(t, r))(t)
	accept(t, resp, s.signer.anchors, name, time.Now())
	_, err := s.certify(t, goodRequest(t))
	assert.Equal(t, grpchttp.FailedPrecondition, codeOf(err), "the other form is another name")
}

// faults are what can be wrong, in the order in which it is found.
type fault struct {
	name   string
	code   grpchttp.Code
	edit   func(*wire.CertifyRequest)
	signer func(*signer)
}

func faults(t testing.TB) []fault {
	t.Helper()
	bad := newSigner(t)
	ofRSA := must.Get(os.ReadFile("testdata/rsa-2048.csr"))(t)
	_, edKey := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	request := func(edit func(*x509.CertificateRequest)) func(*wire.CertifyRequest) {
		der := csr(t, newKey(t), edit)
		return func(r *wire.CertifyRequest) { r.CertificateSigningRequest = der }
	}
	token := func(s string) func(*wire.CertifyRequest) {
		return func(r *wire.CertifyRequest) { r.Token = []byte(s) }
	}
	broken := csr(t, newKey(t), nil)
	broken[len(broken)-1] ^= 1
	good := csr(t, newKey(t), nil)
	return []fault{
		// 1
		{"no anchors", grpchttp.Unavailable, nil, func(s *signer) { s.anchors = nil }},
		// 2 to 4
		{"no identity", grpchttp.InvalidArgument, func(r *wire.CertifyRequest) { r.Identity = "" }, nil},
		{"no token", grpchttp.InvalidArgument, func(r *wire.CertifyRequest) { r.Token = nil }, nil},
		{"no CSR", grpchttp.InvalidArgument, func(r *wire.CertifyRequest) { r.CertificateSigningRequest = nil }, nil},
		// 5
		{"CSR that is text", grpchttp.InvalidArgument, func(r *wire.CertifyRequest) { r.CertificateSigningRequest = []byte("text") }, nil},
		{"CSR in PEM", grpchttp.InvalidArgument, func(r *wire.CertifyRequest) {
			c := must.Get(pki.ParseCSR(good))(t)
			r.CertificateSigningRequest = c.PEM()
		}, nil},
		{"CSR with bytes behind", grpchttp.InvalidArgument, func(r *wire.CertifyRequest) { r.CertificateSigningRequest = append(bytes.Clone(good), 0) }, nil},
		{"CSR of 65 KiB", grpchttp.InvalidArgument, func(r *wire.CertifyRequest) { r.CertificateSigningRequest = make([]byte, 64<<10+1) }, nil},
		// 6
		{"anchor has expired", grpchttp.Unavailable, nil, func(s *signer) {
			s.anchors = []*x509.Certificate{authority(t, "root", s.key, nil, nil, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })}
		}},
		{"anchor is not valid yet", grpchttp.Unavailable, nil, func(s *signer) {
			s.anchors = []*x509.Certificate{authority(t, "root", s.key, nil, nil, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) })}
		}},
		// 7
		{"no DNS name", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.DNSNames = nil }), nil},
		{"two DNS names", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.DNSNames = []string{web, "b"} }), nil},
		{"the DNS name twice", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.DNSNames = []string{web, web} }), nil},
		{"another DNS name", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.DNSNames = []string{"x" + web} }), nil},
		{"the DNS name in upper case", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.DNSNames = []string{strings.ToUpper(web)} }), nil},
		{"a URI", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) {
			r.URIs = []*url.URL{{Scheme: "spiffe", Host: "cluster.local", Path: "/a"}}
		}), nil},
		{"an address", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }), nil},
		{"an email", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"a@b"} }), nil},
		{"another common name", grpchttp.FailedPrecondition, request(func(r *x509.CertificateRequest) { r.Subject.CommonName = "admin" }), nil},
		{"bad signature", grpchttp.FailedPrecondition, func(r *wire.CertifyRequest) { r.CertificateSigningRequest = broken }, nil},
		{"RSA key", grpchttp.FailedPrecondition, func(r *wire.CertifyRequest) { r.CertificateSigningRequest = ofRSA }, nil},
		{"Ed25519 key", grpchttp.FailedPrecondition, func(r *wire.CertifyRequest) { r.CertificateSigningRequest = csr(t, edKey, nil) }, nil},
		// 8
		{"token not authenticated", grpchttp.FailedPrecondition, token("unknown"), nil},
		// 9
		{"token invalid", grpchttp.InvalidArgument, token("garbage"), nil},
		{"service account with a dot", grpchttp.InvalidArgument, token("dotted"), nil},
		{"service account in upper case", grpchttp.InvalidArgument, token("upper"), nil},
		{"empty account", grpchttp.InvalidArgument, token("empty"), nil},
		// 10
		{"review fails", grpchttp.Internal, token("unreviewable"), nil},
		{"review without an answer", grpchttp.Internal, token("nothing"), nil},
		// 11
		{"token of another", grpchttp.FailedPrecondition, token("voting"), nil},
		// 12
		{"signing fails", grpchttp.Internal, nil, func(s *signer) { s.err = &ca.SignError{Kind: ca.ErrGeneration, Err: errors.New("x")} }},
		{"signer knows no more", grpchttp.Internal, nil, func(s *signer) { s.err = errors.New("x") }},
		{"lifetime is not granted", grpchttp.Internal, nil, func(s *signer) { s.err = &ca.SignError{Kind: ca.ErrTTL, Err: errors.New("x")} }},
		{"name is not granted", grpchttp.Internal, nil, func(s *signer) { s.err = &ca.SignError{Kind: ca.ErrIdentity, Err: errors.New("x")} }},
		{"signer is not ready", grpchttp.Unavailable, nil, func(s *signer) { s.err = &ca.SignError{Kind: spiffe.ErrNotReady, Err: errors.New("x")} }},
		{"no audit record", grpchttp.Unavailable, nil, func(s *signer) { s.err = &ca.SignError{Kind: ca.ErrAudit, Err: errors.New("x")} }},
		{"limit", grpchttp.ResourceExhausted, nil, func(s *signer) { s.err = &ca.SignError{Kind: ca.ErrLimit, Err: errors.New("x")} }},
		{"key is not accepted", grpchttp.FailedPrecondition, nil, func(s *signer) { s.err = &ca.SignError{Kind: ca.ErrCSR, Err: errors.New("x")} }},
		{"issuer under another root", grpchttp.Unavailable, nil, func(s *signer) { s.anchors = bad.anchors }},
		{"leaf with another name", grpchttp.Internal, nil, func(s *signer) { s.edit = func(c *x509.Certificate) { c.DNSNames = []string{"admin"} } }},
		{"leaf with two names", grpchttp.Internal, nil, func(s *signer) { s.edit = func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, "admin") } }},
		{"leaf with a URI", grpchttp.Internal, nil, func(s *signer) {
			s.edit = func(c *x509.Certificate) { c.URIs = []*url.URL{{Scheme: "spiffe", Host: "a", Path: "/b"}} }
		}},
		{"leaf with an address", grpchttp.Internal, nil, func(s *signer) {
			s.edit = func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }
		}},
		{"leaf with an email", grpchttp.Internal, nil, func(s *signer) {
			s.edit = func(c *x509.Certificate) { c.EmailAddresses = []string{"a@b"} }
		}},
		{"leaf that is a CA", grpchttp.Internal, nil, func(s *signer) {
			s.edit = func(c *x509.Certificate) { c.BasicConstraintsValid, c.IsCA = true, true }
		}},
		{"leaf for clients only", grpchttp.Unavailable, nil, func(s *signer) {
			s.edit = func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }
		}},
		{"no chain", grpchttp.Internal, nil, func(s *signer) { s.swap = func([]*x509.Certificate) []*x509.Certificate { return nil } }},
		{"a hole in the chain", grpchttp.Internal, nil, func(s *signer) {
			s.swap = func(c []*x509.Certificate) []*x509.Certificate { return append(c, nil) }
		}},
		{"the leaf of another key", grpchttp.Internal, nil, func(s *signer) {
			s.swap = func(c []*x509.Certificate) []*x509.Certificate {
				tmpl := *c[0]
				return []*x509.Certificate{create(t, &tmpl, s.chain[0], newKey(t).Public(), s.key)}
			}
		}},
		{"chain with a foreign root", grpchttp.Unavailable, nil, func(s *signer) {
			s.swap = func(c []*x509.Certificate) []*x509.Certificate { return append(c, bad.anchors[0]) }
		}},
	}
}

// TestCodes has each fault alone.
func TestCodes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-3.3-1", "LNK-3.3-2", "LNK-3.3-3", "LNK-3.3-4", "LNK-3.3-5", "LNK-3.3-7", "LNK-3.3-8", "LNK-3.3-9", "LNK-3.3-10", "LNK-3.3-11", "LNK-3.3-12", "LNK-4-1", "LNK-4-2", "LNK-4-4", "LNK-4-6", "LNK-4-10", "LNK-16-1", "LNK-17-6", "LNK-17-8")
	for _, f := range faults(t) {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			sig := newSigner(t)
			if f.signer != nil {
				f.signer(sig)
			}
			s := serve(t, linkerd.Options{Signer: sig})
			r := goodRequest(t)
			if f.edit != nil {
				f.edit(r)
			}
			resp, err := s.certify(t, r)
			require.Nil(t, resp)
			assert.Equal(t, f.code, codeOf(err), "%v", err)
			if token := string(r.GetToken()); token != "" && f.name != "token invalid" {
				assert.NotContains(t, err.Error(), token)
			}
			assert.NotContains(t, s.logs.String(), webToken)
			assert.NotContains(t, s.logs.String(), "panic")
			var m strings.Builder
			require.NoError(t, s.Report().Metrics(&m))
			assert.Contains(t, m.String(), fmt.Sprintf("linkerd_identity_certify_total{code=%q} 1\n", f.code.String()))
			assert.Contains(t, m.String(), "linkerd_identity_certify_total{code=\"ok\"} 0\n")
		})
	}
}

// TestOrder has each two faults of different steps together: the earlier one decides.
func TestOrder(t *testing.T) {
	t.Parallel()
	all := faults(t)
	step := map[string]int{}
	steps := [][]string{
		{"no anchors"},
		{"no identity"}, {"no token"}, {"no CSR"},
		{"anchor has expired", "anchor is not valid yet"},
		{"CSR that is text"},
		{"two DNS names", "RSA key", "bad signature"},
		{"token not authenticated", "token invalid", "service account with a dot", "review fails"},
		{"token of another"},
		{"signing fails", "signer is not ready"},
	}
	for i, names := range steps {
		for _, n := range names {
			step[n] = i
		}
	}
	pairs := 0
	for _, early := range all {
		for _, late := range all {
			i, ok := step[early.name]
			j, ok2 := step[late.name]
			if !ok || !ok2 || i >= j {
				continue
			}
			pairs++
			sig := newSigner(t)
			r := goodRequest(t)
			for _, f := range []fault{late, early} { // where both want the same field, the earlier one has it
				if f.signer != nil {
					f.signer(sig)
				}
				if f.edit != nil {
					f.edit(r)
				}
			}
			srv := direct(t, linkerd.Options{Signer: sig})
			_, err := srv.call(t.Context(), r)
			assert.Equal(t, early.code, codeOf(err), "%s, and %s: %v", early.name, late.name, err)
		}
	}
	assert.Greater(t, pairs, 50)
}

func TestUnreadableMessage(t *testing.T) {
	t.Parallel()
	// In its turn, which is after the first check.
	for _, test := range []struct {
		signer func(*signer)
		code   grpchttp.Code
	}{{nil, grpchttp.InvalidArgument}, {func(s *signer) { s.anchors = nil }, grpchttp.Unavailable}} {
		sig := newSigner(t)
		if test.signer != nil {
			test.signer(sig)
		}
		s := serve(t, linkerd.Options{Signer: sig})
		assert.Equal(t, fmt.Sprint(uint32(test.code)), s.post(t, frame(0, []byte("\x0a\x02a\xff\x12\x07a-token"))))
		assert.NotContains(t, s.logs.String(), "a-token")
	}
}

func TestEventsAndMetrics(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-13.1-1", "LNK-13.1-2", "LNK-13.1-4")
	var mu sync.Mutex
	var events []linkerd.Event
	taken := func() []linkerd.Event {
		mu.Lock()
		defer mu.Unlock()
		out := events
		events = nil
		return out
	}
	sig := newSigner(t)
	second := newSigner(t)
	sig.anchors = append(sig.anchors, second.anchors...)
	s := serve(t, linkerd.Options{Signer: sig, Events: func(_ context.Context, e linkerd.Event) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, e)
	}})
	ttl := func() (seconds float64) {
		var m strings.Builder
		require.NoError(t, s.Report().Metrics(&m))
		for line := range strings.Lines(m.String()) {
			if _, err := fmt.Sscanf(line, "issuer_cert_ttl_seconds %g", &seconds); err == nil {
				return seconds
			}
		}
		t.Fatal("no gauge")
		return 0
	}
	assert.Zero(t, ttl())
	resp := must.Get(s.certify(t, goodRequest(t)))(t)
	assert.Equal(t, []linkerd.Event{{
		Reason: "IssuedLeafCertificate", Namespace: "emojivoto", ServiceAccount: "web",
		Message: fmt.Sprintf("issued certificate for %s until %s: %x", web, resp.GetValidUntil().AsTime().Format(time.RFC3339), sha256.Sum256(resp.GetLeafCertificate())),
	}}, taken(), "the first issuer is no update")
	assert.InDelta(t, (100 * 24 * time.Hour).Seconds(), ttl(), 60)

	sig.mu.Lock()
	sig.chain, sig.key = second.chain, second.key
	sig.mu.Unlock()
	must.Get(s.certify(t, goodRequest(t)))(t)
	got := taken()
	require.Len(t, got, 2)
	assert.Equal(t, linkerd.Event{
		Reason:  "IssuerUpdated",
		Message: fmt.Sprintf("the issuer is now %q until %s: %x", second.chain[0].Subject, second.chain[0].NotAfter.Format(time.RFC3339), sha256.Sum256(second.chain[0].Raw)),
	}, got[0])
	must.Get(s.certify(t, goodRequest(t)))(t)
	assert.Len(t, taken(), 1)

	third := newSigner(t)
	sig.mu.Lock()
	sig.chain, sig.key = third.chain, third.key
	sig.mu.Unlock()
	require.Equal(t, grpchttp.Unavailable, codeOf(must.Err(s.certify(t, goodRequest(t)))))
	got = taken()
	require.Len(t, got, 1)
	assert.Regexp(t, `^no certificate for "`+web+`": the issuer does not verify against the trust anchors: x509: `, got[0].Message)
	got[0].Message = ""
	assert.Equal(t, linkerd.Event{Reason: "IssuerValidationFailed", Warning: true}, got[0])
	var m strings.Builder
	require.NoError(t, s.Report().Metrics(&m))
	assert.Contains(t, m.String(), "linkerd_identity_certify_total{code=\"ok\"} 3\n")
	assert.Contains(t, m.String(), "linkerd_identity_certify_total{code=\"unavailable\"} 1\n")
}

func TestRetryInfo(t *testing.T) {
	t.Parallel()
	sig := newSigner(t)
	sig.err = &ca.SignError{Kind: ca.ErrLimit, Err: errors.New("x"), RetryAfter: 1500 * time.Millisecond}
	s := serve(t, linkerd.Options{Signer: sig})
	_, err := s.certify(t, goodRequest(t))
	require.Equal(t, grpchttp.ResourceExhausted, codeOf(err))
	assert.Equal(t, 1501*time.Millisecond, must.As[*grpchttp.Error](err)(t).RetryAfter)
}

// passing is an error of a signer that knows that it passes.
type passing struct{ ok bool }

func (passing) Error() string                      { return "passing" }
func (p passing) Retryable() (time.Duration, bool) { return 0, p.ok }

func TestRetryable(t *testing.T) {
	t.Parallel()
	for ok, code := range map[bool]grpchttp.Code{true: grpchttp.Unavailable, false: grpchttp.Internal} {
		sig := newSigner(t)
		sig.err = fmt.Errorf("wrapped: %w", passing{ok})
		_, err := direct(t, linkerd.Options{Signer: sig}).call(t.Context(), goodRequest(t))
		assert.Equal(t, code, codeOf(err))
	}
}

func TestTokensAreNotShown(t *testing.T) {
	t.Parallel()
	s := serve(t, linkerd.Options{Review: func(_ context.Context, token string, _ []string) (*spiffe.Pod, error) {
		switch token {
		case "panic-token":
			panic("about " + token)
		case "trim-token\n":
			return nil, fmt.Errorf("%s: %w", strings.TrimSpace(token), kube.ErrNotAuthenticated)
		}
		return nil, fmt.Errorf("never heard of %s: %w", token, kube.ErrNotAuthenticated)
	}})
	for token, code := range map[string]grpchttp.Code{
		"panic-token": grpchttp.Internal, "loud-token\n": grpchttp.FailedPrecondition,
		"trim-token\n": grpchttp.FailedPrecondition,
	} {
		r := goodRequest(t)
		r.Token = []byte(token)
		_, err := s.certify(t, r)
		assert.Equal(t, code, codeOf(err), token)
		assert.NotContains(t, err.Error(), strings.TrimSpace(token))
		assert.NotContains(t, s.logs.String(), strings.TrimSpace(token))
	}
	assert.Contains(t, s.logs.String(), "never heard of [redacted]")
	assert.Contains(t, s.logs.String(), "about [redacted]")
}

// A call ends when the server's time for it is over, or the client's.
func TestDeadlines(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		logs := new(programtest.Log)
		slow := func(ctx context.Context, token string, _ []string) (*spiffe.Pod, error) {
			<-ctx.Done()
			return nil, fmt.Errorf("slow with %s: %w", token, ctx.Err())
		}
		s := direct(t, linkerd.Options{Signer: newSigner(t), Logger: caservertest.Logger(logs), Review: slow})
		for within, code := range map[time.Duration]grpchttp.Code{
			time.Hour: grpchttp.Unavailable, time.Second: grpchttp.DeadlineExceeded,
		} {
			ctx, cancel := context.WithTimeout(t.Context(), within)
			began := time.Now()
			_, err := s.call(ctx, goodRequest(t))
			cancel()
			assert.Equal(t, code, codeOf(err))
			assert.Contains(t, logs.String(), "code="+code.String())
			assert.Equal(t, min(within, 75*time.Second), time.Since(began))
			assert.NotContains(t, err.Error()+logs.String(), webToken)
		}
	})
}

// Linkerd's proxies send their whole name as the common name, however long it is. A certificate has no
// room for one of more than 64 bytes, and needs none.
func TestLongName(t *testing.T) {
	t.Parallel()
	name := must.Get(mesh.Destination())(t)
	require.Greater(t, len(name), 64)
	s := serve(t, linkerd.Options{Review: func(context.Context, string, []string) (*spiffe.Pod, error) {
		return &spiffe.Pod{Namespace: "linkerd", ServiceAccount: "linkerd-destination"}, nil
	}})
	resp, err := s.certify(t, &wire.CertifyRequest{Identity: name, Token: []byte("token"), CertificateSigningRequest: csr(t, newKey(t), func(r *x509.CertificateRequest) {
		r.Subject.CommonName, r.DNSNames = name, []string{name}
	})})
	require.NoError(t, err)
	assert.Empty(t, accept(t, resp, s.signer.anchors, name, time.Now()).Subject.String())

	// The longest one that fits is there.
	account := strings.Repeat("a", 64-len(".n.serviceaccount.identity.linkerd.cluster.local"))
	name = must.Get(mesh.Name("n", account))(t)
	require.Len(t, name, 64)
	s = serve(t, linkerd.Options{Review: func(context.Context, string, []string) (*spiffe.Pod, error) {
		return &spiffe.Pod{Namespace: "n", ServiceAccount: account}, nil
	}})
	resp, err = s.certify(t, &wire.CertifyRequest{Identity: name, Token: []byte("token"), CertificateSigningRequest: csr(t, newKey(t), func(r *x509.CertificateRequest) {
		r.Subject.CommonName, r.DNSNames = name, []string{name}
	})})
	require.NoError(t, err)
	assert.Equal(t, name, accept(t, resp, s.signer.anchors, name, time.Now()).Subject.CommonName)
}

// A request that is too long is not read, and not only refused.
func TestLongCSR(t *testing.T) {
	t.Parallel()
	s := direct(t, linkerd.Options{Signer: newSigner(t)})
	key := newKey(t)
	for size, code := range map[int]grpchttp.Code{60 << 10: 0, 65 << 10: grpchttp.InvalidArgument} {
		r := &wire.CertifyRequest{Identity: web, Token: []byte(webToken), CertificateSigningRequest: csr(t, key, func(r *x509.CertificateRequest) {
			r.Subject.Organization = []string{strings.Repeat("a", size)}
		})}
		_, err := s.call(t.Context(), r)
		if code == 0 {
			require.NoError(t, err)
			continue
		}
		assert.Equal(t, code, codeOf(err))
	}
}

// TestHostile has every hostile request as itself: whatever it says, a certificate is for the one name
// that the token proved, and has nothing else of it but the key.
func TestHostile(t *testing.T) {
	t.Parallel()
	require.Equal(t, web, hostilecsr.Name)
	s := serve(t, linkerd.Options{})
	cases, signed := 0, 0
	for _, c := range hostilecsr.Some(t) {
		if c.DER == nil {
			continue
		}
		cases++
		resp, err := s.certify(t, &wire.CertifyRequest{Identity: web, Token: []byte(webToken), CertificateSigningRequest: c.DER})
		if err != nil {
			code := codeOf(err)
			assert.True(t, code == grpchttp.InvalidArgument || code == grpchttp.FailedPrecondition || code == grpchttp.ResourceExhausted && len(c.DER) > 128<<10,
				"%s: %v", c.Name, err)
			continue
		}
		signed++
		require.True(t, c.Signable, c.Name)
		leaf := accept(t, resp, s.signer.anchors, web, time.Now())
		assert.True(t, pki.PublicKeysEqual(c.Key, leaf.PublicKey), c.Name)
		assert.Empty(t, leaf.Subject.String(), c.Name)
		for _, e := range leaf.Extensions {
			switch e.Id.String() {
			case "2.5.29.15", "2.5.29.17", "2.5.29.35", "2.5.29.37": // key usage, names, authority, extended key usage
			default:
				t.Errorf("%s: the leaf has extension %s", c.Name, e.Id)
			}
		}
	}
	assert.Greater(t, cases, rounds.Of(112))
	assert.Greater(t, signed, rounds.Of(15))
	for _, r := range s.signer.requests() {
		assert.Equal(t, []string{web}, r.DNSNames)
		assert.Empty(t, r.CommonName)
		assert.Empty(t, r.IPs)
		assert.Equal(t, spiffe.ID{}, r.ID)
	}
}

func TestCertifyWithALPN(t *testing.T) {
	t.Parallel()
	s := serve(t, linkerd.Options{})
	c := newClient(caservertest.ALPNClient(t), "https://"+s.addr)
	resp := must.Get(c.call(t.Context(), goodRequest(t)))(t)
	accept(t, resp, s.signer.anchors, web, time.Now())
}

// A token is not read from a connection that others can read, unless that was allowed.
func TestPlaintext(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for allow, want := range map[bool]grpchttp.Code{false: grpchttp.Unauthenticated, true: grpchttp.OK} {
		asked := 0
		srv := must.Get(linkerd.New(linkerd.Options{
			Mesh: mesh, Signer: newSigner(t), AllowPlaintext: allow,
			Review: func(ctx context.Context, token string, audiences []string) (*spiffe.Pod, error) {
				asked++
				return review(ctx, token, audiences)
			},
		}))(t)
		addr := caservertest.Serve(t, caserver.ServeOptions{Handler: srv, Plaintext: true})
		tr := &http.Transport{Protocols: new(http.Protocols)}
		tr.Protocols.SetUnencryptedHTTP2(true)
		defer tr.CloseIdleConnections()
		_, err := newClient(&http.Client{Transport: tr}, "http://"+addr).call(t.Context(), goodRequest(t))
		assert.Equal(t, want, codeOf(err), err)
		assert.Equal(t, allow, asked == 1)
	}
	dir := t.TempDir()
	l := must.Get(net.Listen("unix", filepath.Join(dir, "ca.sock")))(t)
	srv := must.Get(linkerd.New(linkerd.Options{Mesh: mesh, Signer: newSigner(t), Review: review}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- caserver.Serve(ctx, l, caserver.ServeOptions{Handler: srv, Plaintext: true}) }()
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
	}}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	_, err := newClient(&http.Client{Transport: tr}, "http://ca").call(t.Context(), goodRequest(t))
	require.NoError(t, err, "a Unix socket is as good as TLS")
	cancel()
	require.NoError(t, <-done)
}

// However often a caller is refused, the log has a line for each reason. The limits count for the pod.
func TestRefusalsAreCounted(t *testing.T) {
	t.Parallel()
	l := new(programtest.Log)
	s := newSigner(t)
	srv, err := linkerd.New(linkerd.Options{Mesh: mesh, Signer: s, Logger: slog.New(slog.NewTextHandler(l, nil)), Review: func(ctx context.Context, token string, audiences []string) (*spiffe.Pod, error) {
		a, err := review(ctx, token, audiences)
		if a != nil {
			a.UID = "uid-7"
		}
		return a, err
	}})
	require.NoError(t, err)
	c := newClient(caservertest.ProxyClient(t), "http://"+caservertest.Serve(t, caserver.ServeOptions{Handler: srv}))
	must.Get(c.call(t.Context(), goodRequest(t)))(t)
	require.Equal(t, "uid-7", s.asked[0].LimitKey)
	require.Equal(t, web, s.asked[0].Caller, "the record names the caller")
	r := goodRequest(t)
	for range rounds.Of(25) {
		for _, token := range []string{"voting", "unknown", "garbage"} {
			r.Token = []byte(token)
			require.Error(t, must.Err(c.call(t.Context(), r)))
		}
	}
	assert.Equal(t, 3, strings.Count(l.String(), "\n"), l.String())
}
