package linkerd_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
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

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var (
	_  caclient.CA = (*linkerd.CA)(nil)
	td             = spiffe.MustParseTrustDomain("cluster.local")

	mesh = linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
)

const (
	certify   = "/io.linkerd.proxy.identity.Identity/Certify"
	certifier = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"
	web       = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	secret    = "a-token-that-is-secret"
)

func newCSR(t testing.TB, sans ...pki.SAN) *pki.CSR {
	return cafake.NewCSR(t, pki.CSROptions{SANs: sans})
}

// roots is the bundle of a CA as it is now.
type roots struct{ *spiffetest.CA }

func (r roots) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return r.CA.Bundle().Bundle(td) }

// server is a certifier whose answers and whose TLS a test decides.
type server struct {
	ca  *spiffetest.CA
	url string

	mu       sync.Mutex
	requests []request
	hello    *tls.ClientHelloInfo
	state    *tls.ConnectionState
	header   http.Header
}

type request struct {
	name, token string
	csr         []byte
}

// serve answers with what answer makes of a good chain.
func serve(t testing.TB, edit func(*tls.Config), answer func([]*x509.Certificate) ([]byte, error)) *server {
	t.Helper()
	s := &server{ca: spiffetest.NewCA(t, "cluster.local")}
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s.url = "https://" + l.Addr().String()
	method := grpchttp.Unary(func(ctx context.Context, message []byte) ([]byte, error) {
		var r request
		var token []byte
		err := protofield.Read(message, func(f *protofield.Field) {
			switch f.Number {
			case 1:
				f.Text(&r.name)
			case 2:
				f.Bytes(&token)
			case 3:
				f.Bytes(&r.csr)
			}
		})
		if err != nil {
			return nil, err
		}
		r.token = string(token)
		s.mu.Lock()
		s.requests = append(s.requests, r)
		s.mu.Unlock()
		csr, err := pki.ParseCSR(r.csr)
		if err != nil {
			return nil, err
		}
		chain, err := s.ca.Certify(ctx, csr, csr.SANs(), time.Hour)
		if err != nil {
			return nil, err
		}
		return answer(chain)
	})
	h := &grpchttp.Handler{Methods: map[string]grpchttp.Method{certify: method}, MaxMessage: 1 << 20}
	cfg := &tls.Config{
		Certificates: []tls.Certificate{certificate(s.ca, func(c *x509.Certificate) { c.DNSNames = []string{certifier} })},
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.hello = hello
			return nil, nil
		},
	}
	if edit != nil {
		edit(cfg)
	}
	caservertest.ServeOn(t, l, caserver.ServeOptions{TLS: cfg, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.state, s.header = r.TLS, r.Header.Clone()
		s.mu.Unlock()
		h.ServeHTTP(w, r)
	})})
	return s
}

func certificate(ca *spiffetest.CA, edit ...func(*x509.Certificate)) tls.Certificate {
	chain, key := ca.Certificate("/certifier", append([]func(*x509.Certificate){func(c *x509.Certificate) { c.URIs = nil }}, edit...)...)
	cert := tls.Certificate{PrivateKey: key}
	for _, c := range chain {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	return cert
}

func good(chain []*x509.Certificate) ([]byte, error) { return response(chain, chain[0].NotAfter) }

func response(chain []*x509.Certificate, until time.Time) ([]byte, error) {
	return protofield.Write(func(w *protofield.Writer) {
		for i, c := range chain {
			w.AddBytes(protofield.Number(min(i+1, 2)), c.Raw)
		}
		w.Message(3, func(w *protofield.Writer) {
			w.Varint(1, uint64(until.Unix()))
			w.Varint(2, uint64(until.Nanosecond()))
		})
	})
}

// sign requests a certificate of a certifier that answers with a message.
func sign(t testing.TB, ca *spiffetest.CA, csr *pki.CSR, message []byte) ([]*x509.Certificate, error) {
	t.Helper()
	return must.Get(linkerd.New(linkerd.Options{Mesh: mesh, Endpoint: caclient.Endpoint{
		URL: "http://127.0.0.1:8080", AllowPlaintext: true, TrustDomain: td, Roots: roots{ca}, Token: cafake.Give(secret),
		HTTPClient: &http.Client{Transport: cafake.Message(message)},
	}}))(t).Sign(t.Context(), csr, 0)
}

func (s *server) client(t testing.TB, edit ...func(*linkerd.Options)) *linkerd.CA {
	t.Helper()
	o := linkerd.Options{Mesh: mesh, Endpoint: caclient.Endpoint{
		URL: s.url, TrustDomain: td, Roots: roots{s.ca}, Token: cafake.Give(secret),
	}}
	for _, e := range edit {
		e(&o)
	}
	return must.Get(linkerd.New(o))(t)
}

func (s *server) seen() []request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests
}

func requireKind(t testing.TB, err, kind error) *caclient.Error {
	t.Helper()
	e := must.As[*caclient.Error](err)(t)
	require.Equal(t, kind, e.Kind, "%v", err)
	require.NotContains(t, err.Error(), secret)
	return e
}

// The request on the wire, and the connection that it comes on.
func TestWire(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-2", "LNK-3-1", "LNK-3-2", "LNK-3.1-1", "LNK-3.1-3", "LNK-10-5", "LNK-11-1", "LNK-11-11")
	s := serve(t, nil, good)
	c := s.client(t)
	csr := newCSR(t, pki.DNSSAN(web))
	chain := must.Get(c.Sign(t.Context(), csr, time.Hour))(t)
	assert.NoError(t, cafake.Check(chain, csr, pki.ExpectDNSName(td, web), s.ca.Bundle()))
	assert.Equal(t, []request{{web, secret, csr.DER()}}, s.seen())

	s.mu.Lock()
	defer s.mu.Unlock()
	assert.Equal(t, certifier, s.hello.ServerName, "the SNI is the certifier's name, whatever the URL says")
	assert.Empty(t, s.hello.SupportedProtos, "no ALPN")
	assert.Equal(t, []uint16{tls.VersionTLS13}, s.hello.SupportedVersions)
	assert.Empty(t, s.state.NegotiatedProtocol)
	assert.Empty(t, s.state.PeerCertificates)
	for name, values := range s.header {
		assert.NotContains(t, strings.Join(values, " "), secret, "the token is in the body, and not in %s", name)
	}
}

// Each request has what the token file has now, which the kubelet rotates, byte for byte but for white space around it.
func TestTokenRotates(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-3.1-2", "LNK-5-11")
	file := filepath.Join(t.TempDir(), "token")
	s := serve(t, nil, good)
	c := s.client(t, func(o *linkerd.Options) { o.Token, o.TokenFile = nil, file })
	for _, text := range []string{secret, "Bearer-is.no-Prefix_+/=~", secret + "-next\n"} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		must.Get(c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0))(t)
	}
	var got []string
	for _, r := range s.seen() {
		got = append(got, r.token)
	}
	assert.Equal(t, []string{secret, "Bearer-is.no-Prefix_+/=~", secret + "-next"}, got)
}

// Each server is right but for one thing, and gets no token.
func TestCertifierIsVerified(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-4", "LNK-11-7", "LNK-11-9", "LNK-11-16")
	stranger := spiffetest.NewCA(t, "cluster.local")
	named := func(names ...string) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.DNSNames = names }
	}
	for name, tt := range map[string]struct {
		ca   *spiffetest.CA // nil for that of the mesh
		edit func(*x509.Certificate)
		says string
	}{
		"a workload":            {nil, named(web), "and not the certifier"},
		"the destination":       {nil, named("linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local"), "and not the certifier"},
		"another control plane": {nil, named(strings.ReplaceAll(certifier, "linkerd.cluster", "linkerd2.cluster")), "and not the certifier"},
		"a wildcard":            {nil, named("*.linkerd.serviceaccount.identity.linkerd.cluster.local"), "and not the certifier"},
		"a dot at the end":      {nil, named(certifier + "."), "and not the certifier"},
		"in capitals":           {nil, named(strings.ToUpper(certifier)), "and not the certifier"},
		"the common name alone": {nil, func(c *x509.Certificate) { c.Subject.CommonName, c.DNSNames = certifier, []string{"localhost"} }, "and not the certifier"},
		"only as a URI":         {nil, func(c *x509.Certificate) { c.DNSNames, c.URIs = nil, mustURIs(t, "spiffe://"+certifier+"/x") }, "and not the certifier"},
		"the host of the URL":   {nil, func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }, "and not the certifier"},
		"another root":          {stranger, named(certifier), "unknown authority"},
		"expired": {nil, func(c *x509.Certificate) {
			named(certifier)(c)
			c.NotBefore, c.NotAfter = c.NotBefore.Add(-2*time.Hour), c.NotBefore.Add(-time.Hour)
		}, "expired"},
		"of tomorrow": {nil, func(c *x509.Certificate) {
			named(certifier)(c)
			c.NotBefore, c.NotAfter = c.NotBefore.Add(24*time.Hour), c.NotAfter.Add(24*time.Hour)
		}, "not yet valid"},
		"for clients alone": {nil, func(c *x509.Certificate) {
			named(certifier)(c)
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		}, "key usage"},
		"a CA": {nil, func(c *x509.Certificate) { named(certifier)(c); c.IsCA = true }, "is a CA"},
		"a key that does not sign": {nil, func(c *x509.Certificate) {
			named(certifier)(c)
			c.KeyUsage = x509.KeyUsageKeyEncipherment
		}, "digitalSignature"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, nil, good)
			signer := tt.ca
			if signer == nil {
				signer = s.ca
			}
			cert := certificate(signer, tt.edit)
			bad := serve(t, func(cfg *tls.Config) { cfg.Certificates = []tls.Certificate{cert} }, good)
			c := s.client(t, func(o *linkerd.Options) { o.URL = bad.url })
			_, err := c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
			requireKind(t, err, caclient.ErrUnavailable)
			assert.ErrorContains(t, err, tt.says)
			assert.Empty(t, bad.seen(), "the token went to a server that is not the certifier")
		})
	}
	t.Run("one of several names", func(t *testing.T) {
		t.Parallel()
		s := serve(t, nil, good)
		cert := certificate(s.ca, named("localhost", certifier))
		other := serve(t, func(cfg *tls.Config) { cfg.Certificates = []tls.Certificate{cert} }, good)
		other.ca = s.ca
		_, err := s.client(t, func(o *linkerd.Options) { o.URL = other.url }).Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
		require.NoError(t, err)
	})
	t.Run("TLS 1.2", func(t *testing.T) {
		t.Parallel()
		s := serve(t, func(cfg *tls.Config) { cfg.MaxVersion = tls.VersionTLS12 }, good)
		_, err := s.client(t).Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
		requireKind(t, err, caclient.ErrUnavailable)
		assert.Empty(t, s.seen())
	})
	t.Run("no TLS", func(t *testing.T) {
		t.Parallel()
		s := serve(t, nil, good)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		asked := make(chan struct{}, 1)
		caservertest.ServeOn(t, l, caserver.ServeOptions{Plaintext: true, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked <- struct{}{} })})
		_, err = s.client(t, func(o *linkerd.Options) { o.URL = "https://" + l.Addr().String() }).Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
		requireKind(t, err, caclient.ErrUnavailable)
		assert.Empty(t, asked)
	})
}

// An answer is judged by what it says of itself.
func TestResponses(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "cluster.local")
	csr := newCSR(t, pki.DNSSAN(web))
	chain := must.Get(ca.Intermediate().Certify(t.Context(), csr, csr.SANs(), time.Hour))(t)
	end, now := chain[0].NotAfter, time.Now()
	write := func(f func(*protofield.Writer)) []byte { return must.Get(protofield.Write(f))(t) }
	certs := func(w *protofield.Writer) {
		w.AddBytes(1, chain[0].Raw)
		w.AddBytes(2, chain[1].Raw)
	}
	at := func(until time.Time) []byte { return must.Get(response(chain, until))(t) }
	for name, message := range map[string][]byte{
		"as it should be":          at(end),
		"a second later":           at(end.Add(time.Second)),
		"a second earlier":         at(end.Add(-time.Second)),
		"with a fraction":          at(end.Add(999 * time.Millisecond)),
		"a field that nobody asks": append(at(end), 0x22, 1, 'x'),
	} {
		got := must.Get(sign(t, ca, csr, message))(t, name)
		assert.Equal(t, chain, got, name)
	}
	for _, tt := range []struct {
		name    string
		message []byte
		says    string
	}{
		{"nothing", nil, "no certificate"},
		{"no protobuf", []byte("\xff\xff\xff"), "malformed"},
		{"no leaf", write(func(w *protofield.Writer) { w.AddBytes(2, chain[1].Raw); w.Message(3, func(*protofield.Writer) {}) }), "no certificate"},
		{"an empty leaf", write(func(w *protofield.Writer) { w.AddBytes(1, nil) }), "no certificate"},
		{"no time", write(certs), "does not say until when"},
		{"a time that is a number", write(func(w *protofield.Writer) { certs(w); w.AddVarint(3, uint64(end.Unix())) }), "does not say until when"},
		{"an empty time", write(func(w *protofield.Writer) { certs(w); w.Message(3, func(*protofield.Writer) {}) }), "valid until 1970-01-01"},
		{"a time before 1970", write(func(w *protofield.Writer) {
			certs(w)
			w.Message(3, func(w *protofield.Writer) { w.Varint(1, 1<<63) })
		}), "compare the clocks"},
		{"the end of time", write(func(w *protofield.Writer) {
			certs(w)
			w.Message(3, func(w *protofield.Writer) { w.Varint(1, 1<<62) })
		}), "and the certificate says"},
		{"now", at(now), "compare the clocks"},
		{"a second ago", at(now.Add(-time.Second)), "compare the clocks"},
		{"two seconds later", at(end.Add(2 * time.Second)), "and the certificate says"},
		{"two seconds earlier", at(end.Add(-2 * time.Second)), "and the certificate says"},
		{"a leaf in PEM", write(func(w *protofield.Writer) { w.AddBytes(1, pki.MarshalCertificatesPEM(chain[0])) }), "certificate 1 of 1 is not X.509 in DER"},
		{"an issuer in PEM", write(func(w *protofield.Writer) {
			w.AddBytes(1, chain[0].Raw)
			w.AddBytes(2, pki.MarshalCertificatesPEM(chain[1]))
		}), "certificate 2 of 2 is not X.509 in DER"},
		{"two leaves in one field", write(func(w *protofield.Writer) {
			w.AddBytes(1, append(chain[0].Raw[:len(chain[0].Raw):len(chain[0].Raw)], chain[1].Raw...))
		}), "certificate 1 of 1"},
		{"a cut leaf", write(func(w *protofield.Writer) { w.AddBytes(1, chain[0].Raw[:100]) }), "certificate 1 of 1"},
		{"17 certificates", write(func(w *protofield.Writer) {
			for i := range 17 {
				w.AddBytes(protofield.Number(min(i+1, 2)), chain[min(i, 1)].Raw)
			}
		}), "more than 16 certificates"},
	} {
		got, err := sign(t, ca, csr, tt.message)
		assert.ErrorContains(t, err, tt.says, tt.name)
		assert.Nil(t, got, tt.name)
	}
}

// What the codes mean in this API.
func TestStatuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-16-4", "LNK-16-10")
	var code grpchttp.Code
	s := serve(t, nil, func([]*x509.Certificate) ([]byte, error) {
		return nil, &grpchttp.Error{Code: code, Message: "about " + secret}
	})
	c := s.client(t)
	for _, tt := range []struct {
		code    grpchttp.Code
		kind    error
		mayPass bool
	}{
		{grpchttp.InvalidArgument, caclient.ErrInvalid, true},
		{grpchttp.FailedPrecondition, caclient.ErrInvalid, true},
		{grpchttp.Unknown, caclient.ErrUnavailable, true},
		{grpchttp.Unavailable, caclient.ErrUnavailable, true},
		{grpchttp.Internal, caclient.ErrUnavailable, true},
		{grpchttp.DeadlineExceeded, caclient.ErrUnavailable, true},
		{grpchttp.ResourceExhausted, caclient.ErrUnavailable, true},
		{grpchttp.Unauthenticated, caclient.ErrUnauthenticated, false},
		{grpchttp.PermissionDenied, caclient.ErrDenied, false},
		{grpchttp.Unimplemented, caclient.ErrInvalid, false},
	} {
		code = tt.code
		_, err := c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
		_, ok := requireKind(t, err, tt.kind).Retryable()
		assert.Equal(t, tt.mayPass, ok, "%v", err)
		assert.ErrorContains(t, err, `"about [redacted]"`)
	}
}

// A token that the cluster does not know yet is asked with again.
func TestInvalidArgumentIsRepeated(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-10-3", "LNK-16-10")
	var mu sync.Mutex
	refusals := 2
	s := serve(t, nil, func(chain []*x509.Certificate) ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		if refusals--; refusals >= 0 {
			return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "the token is invalid")
		}
		return good(chain)
	})
	name := filepath.Join(t.TempDir(), "token")
	c := s.client(t, func(o *linkerd.Options) { o.Token, o.TokenFile = nil, name })
	_, err := c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
	requireKind(t, err, caclient.ErrUnauthenticated)
	assert.ErrorIs(t, err, os.ErrNotExist)
	assert.Empty(t, s.seen())

	// The file is read for each call.
	require.NoError(t, os.WriteFile(name, []byte("one\n"), 0o600))
	_, err = c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
	requireKind(t, err, caclient.ErrInvalid)
	require.NoError(t, os.WriteFile(name, []byte("two"), 0o600))
	m, err := secretcache.Start(t.Context(), secretcache.Config{Expect: pki.ExpectDNSName(td, web), CA: c, RenewIn: func(_ time.Duration, failures int) time.Duration {
		if failures > 0 {
			return time.Millisecond
		}
		return time.Hour
	}})
	require.NoError(t, err)
	require.NoError(t, m.Close())
	var tokens []string
	for _, r := range s.seen() {
		tokens = append(tokens, r.token)
	}
	assert.Equal(t, []string{"one", "two", "two"}, tokens)
}

// What the certifier refuses anyway does not leave this process, and takes no token along.
func TestRequestsThatAreNotSent(t *testing.T) {
	t.Parallel()
	s := serve(t, nil, good)
	c := s.client(t)
	named := func(cn string) *pki.CSR {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		return must.Get(pki.NewCSR(key, pki.CSROptions{CommonName: cn, SANs: []pki.SAN{pki.DNSSAN(web)}}))(t)
	}
	for says, csr := range map[string]*pki.CSR{
		"want one DNS name":                newCSR(t),
		"DNS:web.emojivoto":                newCSR(t, pki.DNSSAN(web), pki.DNSSAN(certifier)),
		"spiffe://cluster.local/web":       newCSR(t, pki.IDSAN(spiffe.MustParseID("spiffe://cluster.local/web"))),
		"192.0.2.1":                        newCSR(t, pki.IPSAN(net.IPv4(192, 0, 2, 1))),
		"web.emojivoto.svc.cluster.local":  newCSR(t, pki.DNSSAN("web.emojivoto.svc.cluster.local")),
		strings.ReplaceAll(web, "cl", "x"): newCSR(t, pki.DNSSAN(strings.ReplaceAll(web, "cl", "x"))),
		"the common name":                  named("admin"),
	} {
		_, err := c.Sign(t.Context(), csr, 0)
		requireKind(t, err, caclient.ErrInvalid)
		assert.ErrorContains(t, err, says)
	}
	assert.Empty(t, s.seen())
	require.NoError(t, must.Err(c.Sign(t.Context(), named(web), 0)), "the DNS name as the common name")
}

// The trust anchors are read again, for the bundle and for each connection.
func TestAnchorsChange(t *testing.T) {
	t.Parallel()
	s := serve(t, nil, good)
	stranger := spiffetest.NewCA(t, "cluster.local")
	name := filepath.Join(t.TempDir(), "ca-bundle.crt")
	write := func(ca *spiffetest.CA) {
		require.NoError(t, os.WriteFile(name, pki.MarshalCertificatesPEM(ca.Root()), 0o600))
	}
	write(stranger)
	c := s.client(t, func(o *linkerd.Options) { o.Roots, o.RootsFile = nil, name })
	_, err := c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
	requireKind(t, err, caclient.ErrUnavailable)
	assert.Empty(t, s.seen())
	write(s.ca)
	must.Get(c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0))(t)
	set := must.Get(c.FetchBundles(t.Context()))(t)
	assert.True(t, must.Get(set.Bundle(td))(t).Equal(mustBundle(t, s.ca)))
	require.NoError(t, os.Remove(name))
	set = must.Get(c.FetchBundles(t.Context()))(t, "what is known stays")
	assert.NotNil(t, set)
	_, err = s.client(t, func(o *linkerd.Options) { o.Roots, o.RootsFile = nil, name }).FetchBundles(t.Context())
	requireKind(t, err, caclient.ErrUnavailable)
}

func mustBundle(t testing.TB, ca *spiffetest.CA) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.ParseBundlePEM(td, pki.MarshalCertificatesPEM(ca.Root())))(t)
}

// The proxy on the same host takes clear text, over a client of the caller's if it likes.
func TestPlaintext(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "cluster.local")
	fake := caclienttest.NewLinkerd(t, ca, "/ns/emojivoto/sa/web")
	through := fake.Endpoint() // what the proxy does
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	asked := make(chan string, 10)
	caservertest.ServeOn(t, l, caserver.ServeOptions{Plaintext: true, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Proto
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", "14")
	})})
	o := linkerd.Options{Mesh: mesh, Endpoint: caclient.Endpoint{
		URL: "http://" + l.Addr().String(), TrustDomain: td, Roots: through.Roots, Token: through.Token, AllowPlaintext: true,
	}}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	own := &http.Transport{Protocols: protocols}
	defer own.CloseIdleConnections()
	for _, client := range []*http.Client{nil, {Transport: own}} {
		o.HTTPClient = client
		c, err := linkerd.New(o)
		require.NoError(t, err)
		_, err = c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)
		requireKind(t, err, caclient.ErrUnavailable)
		assert.Equal(t, "HTTP/2.0", <-asked)
	}
}

// A server gets no token once it would not be accepted any more: with its root gone from the trust anchors, or its
// certificate expired.
func TestDistrust(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	s := serve(t, nil, good)
	file := filepath.Join(t.TempDir(), "roots.pem")
	require.NoError(t, os.WriteFile(file, s.ca.Bundle().MarshalPEM(), 0o600))
	for _, c := range []*linkerd.CA{s.client(t, func(o *linkerd.Options) { o.Roots, o.RootsFile = nil, file }), s.client(t)} {
		for range 2 {
			must.Get(c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0))(t)
		}
	}
	c := s.client(t, func(o *linkerd.Options) { o.Roots, o.RootsFile = nil, file })
	sign := func() error { return must.Err(c.Sign(t.Context(), newCSR(t, pki.DNSSAN(web)), 0)) }
	require.NoError(t, sign())
	require.NoError(t, os.WriteFile(file, spiffetest.NewCA(t, "cluster.local").Bundle().MarshalPEM(), 0o600))
	n := len(s.seen())
	err := sign()
	requireKind(t, err, caclient.ErrUnavailable)
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	assert.True(t, untrusted, "%v", err)
	assert.Len(t, s.seen(), n)
	require.NoError(t, os.WriteFile(file, s.ca.Bundle().MarshalPEM(), 0o600))
	require.NoError(t, sign())

	var end time.Time
	s = serve(t, nil, good)
	old := serve(t, func(cfg *tls.Config) {
		cfg.Certificates = []tls.Certificate{certificate(s.ca, func(c *x509.Certificate) {
			c.DNSNames, c.NotAfter = []string{certifier}, time.Now().Add(2500*time.Millisecond).Truncate(time.Second)
			end = c.NotAfter
		})}
	}, good)
	c = s.client(t, func(o *linkerd.Options) { o.URL = old.url })
	require.NoError(t, sign())
	time.Sleep(time.Until(end.Add(time.Millisecond)))
	requireKind(t, sign(), caclient.ErrUnavailable)
	assert.Len(t, old.seen(), 1)
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "cluster.local")
	for says, edit := range map[string]func(*linkerd.Options){
		"URL has to be":            func(o *linkerd.Options) { o.URL = "" },
		"without TLS":              func(o *linkerd.Options) { o.URL = "http://127.0.0.1:8080" },
		"TrustDomain":              func(o *linkerd.Options) { o.TrustDomain = spiffe.TrustDomain{} },
		"neither Roots nor":        func(o *linkerd.Options) { o.Roots = nil },
		"both Roots and RootsFile": func(o *linkerd.Options) { o.RootsFile = "roots.pem" },
		"both Token and TokenFile": func(o *linkerd.Options) { o.TokenFile = "token" },
		"HTTPClient is set":        func(o *linkerd.Options) { o.HTTPClient = http.DefaultClient },
		"invalid name":             func(o *linkerd.Options) { o.Mesh = linkerdname.Mesh{} },
		"more than a scheme":       func(o *linkerd.Options) { o.URL += "/path" },
	} {
		o := linkerd.Options{Mesh: mesh, Endpoint: caclient.Endpoint{
			URL: "https://ca.test", TrustDomain: td, Roots: roots{ca}, Token: cafake.Give(secret),
		}}
		must.Get(linkerd.New(o))(t)
		edit(&o)
		c, err := linkerd.New(o)
		assert.ErrorContains(t, err, says)
		assert.ErrorContains(t, err, "linkerd: invalid Options: ")
		assert.Nil(t, c)
	}
}

// The vector of the contract, byte by byte.
func TestVector(t *testing.T) {
	t.Parallel()
	message, err := hex.DecodeString("1a020801")
	require.NoError(t, err)
	_, err = sign(t, spiffetest.NewCA(t, "cluster.local"), newCSR(t, pki.DNSSAN(web)), message)
	assert.ErrorContains(t, err, "no certificate", "a response with nothing but valid_until, which is read")
}

func mustURIs(t testing.TB, s string) []*url.URL {
	t.Helper()
	return []*url.URL{spiffe.MustParseID(s).URL()}
}

func FuzzResponse(f *testing.F) {
	ca := spiffetest.NewCA(f, "cluster.local")
	csr := newCSR(f, pki.DNSSAN(web))
	chain := must.Get(ca.Intermediate().Certify(f.Context(), csr, csr.SANs(), time.Hour))(f)
	message := must.Get(good(chain))(f)
	f.Add(message)
	f.Add(message[:len(message)-4])
	f.Add([]byte{0x1a, 2, 8, 1})
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, message []byte) {
		now := time.Now()
		chain, err := sign(t, ca, csr, message)
		if (err == nil) == (len(chain) == 0) {
			t.Fatalf("%d certificates and the error %v", len(chain), err)
		}
		if len(chain) > 16 {
			t.Fatalf("%d certificates", len(chain))
		}
		if err == nil && !chain[0].NotAfter.Add(time.Second).After(now) {
			t.Fatalf("it ends at %v", chain[0].NotAfter)
		}
	})
}

func TestConformance(t *testing.T) {
	cafake.Fewer(t) // package local takes all
	t.Parallel()
	caclienttest.Run(t, caclienttest.NewLinkerd, func(f *caclienttest.Fake) (caclient.CA, error) {
		e := f.Endpoint()
		return linkerd.New(linkerd.Options{Endpoint: e, Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: e.TrustDomain.String()}})
	})
}
