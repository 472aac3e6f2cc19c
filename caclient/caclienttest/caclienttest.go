// Package caclienttest gives tests a certificate authority that is called over the network: each of the APIs that the
// packages below caclient speak, on a TLS socket of 127.0.0.1, with faults that the test injects.
//
//	ca := spiffetest.NewCA(t, "example.org")
//	istiod := caclienttest.NewIstio(t, ca, "/ns/default/sa/web")
//	client, err := istioca.New(istioca.Options{Endpoint: istiod.Endpoint()})
//
// What is signed, and what goes wrong with it, is up to the [spiffetest.CA]: it fails (FailNext), is slow (Delay), changes its
// root (Rotate), and gives wrong answers (EditTemplates, EditAnswers), which the [Fake] sends as they are, whatever a real
// server would check first. The way to it is up to the dial of the Fake: Deny, Hang, Garble, Drop and Mend, and [Fake.Refuse].
//
// # Rules
//
// [NewIstio] and [NewLinkerd] are the servers of packages pki/caserver/istioca and pki/caserver/linkerd. The others are
// handlers with the rules of their API: tokens and what they are good for, names that are not granted, lifetimes. [NewZTS]
// asks the provider of an instance, too, and revokes instances by serial numbers.
//
// # A suite for clients
//
// [Run] checks that a client keeps what [caclient.CA] promises, whatever the CA answers.
//
// # What it does not do
//
// It does not show that a client works with the real CA. It signs whatever it is asked to sign with the right token, and
// is for tests only.
package caclienttest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/test/faulty"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Fake is a CA behind one API, which serves until the test is over. Its methods are safe for concurrent use.
//
// Beside those below it has methods that turn a dial:
//
//	Deny()          // refuses every request: the caller may not
//	Hang()          // answers nothing, until Mend
//	Garble()        // answers every request with success and nonsense
//	Drop()          // cuts the connections, open and new ones
//	Mend()          // turns the dial back: the CA works
//	Requests() int  // how many requests have come so far, whatever became of them
type Fake struct {
	t      testing.TB
	ca     *spiffetest.CA
	id     spiffe.ID
	want   pki.Expectation
	url    string
	wire   wire
	memory *memconn.Listener // nil if it has a socket
	*dial

	mu       sync.Mutex
	refusal  *caclient.Error                             // of every request; nil for none
	editBody func(body []byte) []byte                    // of answers to requests for certificates; nil for none
	tokens   []string                                    // that clients were given
	override func(*caclient.Endpoint)                    // of the suite; nil for none
	instead  http.HandlerFunc                            // of the suite, answers every request; nil for none
	serving  *tls.Certificate                            // of the server
	vouched  *x509.Certificate                           // the root that vouches for serving
	servedAs func(*tls.ClientHelloInfo) *tls.Certificate // of the suite, in the place of serving; nil for none
}

type dial = faulty.Dial

// wire is one API. The function that makes a Fake fills it in and calls [Fake.serve].
type wire struct {
	name string // such as "Vault"

	// handler answers when nothing is wrong. One of our own signs with [Fake.sign] and reports its errors with refuse. One
	// of package caserver signs with honest{f}, and needs replace.
	handler http.Handler

	// signs reports whether a request is for a certificate.
	signs func(*http.Request) bool

	// refuse answers as the API does for the kind of e, with its RetryAfter if that is not 0, and the text of e.Err.
	refuse func(http.ResponseWriter, *http.Request, *caclient.Error)

	// garbled answers with success and nonsense.
	garbled http.Handler

	// replace returns the body of an answer of handler with another chain. Nil for a handler that calls sign.
	replace func(body []byte, chain []*x509.Certificate) []byte

	grpc bool // the body of an answer is one message of gRPC, which editBody and replace see without its prefix

	// kinds are the failures that the API has no word for, and what its client sees in their place.
	kinds map[error]error

	ownLife bool // lifetimes are the CA's choice
	ownTLS  bool // clients make TLS connections by themselves

	// token returns a token that handler accepts.
	token func() string

	// endpoint completes the Endpoint for clients, whose URL, HTTPClient, TrustDomain and Token are set. It may be nil.
	endpoint func(*caclient.Endpoint)

	tls      func(*tls.Config) // of the server; may be nil
	dnsNames []string          // of the server's certificate, in the place of "localhost"
}

// newFake returns a Fake that has no wire yet: [Fake.serve] adds it. path is that of a workload's ID.
func newFake(t testing.TB, authority *spiffetest.CA, path string) *Fake {
	t.Helper()
	id, err := spiffe.ParseID(authority.TrustDomain().ID().String() + path)
	if err == nil && (id.Path() != path || path == "") {
		err = errors.New("it begins with a slash, such as /web")
	}
	if err != nil {
		t.Fatalf("caclienttest: the path %q of the workload: %v", path, err)
	}
	return &Fake{t: t, ca: authority, id: id, want: pki.ExpectID(id)}
}

// serve starts the server.
func (f *Fake) serve(w wire) {
	f.t.Helper()
	f.wire = w
	l := f.listen()
	cfg := &tls.Config{
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) { return f.certificate(hello), nil },
		NextProtos:     []string{"h2", "http/1.1"},
	}
	if w.tls != nil {
		w.tls(cfg)
	}
	f.certificate(nil) // on the test's own goroutine, as it may fail
	denial := &caclient.Error{Kind: caclient.ErrDenied, Err: errors.New("denied by the test")}
	f.dial = faulty.Start(f.t, faulty.Config{
		Listener: l,
		Handler:  http.HandlerFunc(f.answer),
		Deny:     http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { f.refuse(rw, r, denial) }),
		Garble:   w.garbled,
		Serve: func(ctx context.Context, l net.Listener, h http.Handler) error {
			if f.plaintext() {
				return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: h, Plaintext: true})
			}
			return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: h, TLS: cfg})
		},
	})
}

// plaintext reports whether there is no TLS.
func (f *Fake) plaintext() bool {
	return isInMemory(f.t) && f.wire.ownTLS
}

func isInMemory(t testing.TB) bool {
	_, ok := t.(inMemory)
	return ok
}

func (f *Fake) listen() net.Listener {
	f.t.Helper()
	if isInMemory(f.t) {
		f.memory, f.url = memconn.Listen(), "https://localhost"
		if f.plaintext() {
			f.url = "http://localhost"
		}
		return f.memory
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatalf("caclienttest: %v", err)
	}
	f.url = "https://" + l.Addr().String()
	return l
}

// InMemory returns t for a function of this package that is to make a Fake without a socket, as a testing/synctest bubble
// needs. Only the HTTPClient of its Endpoint reaches it. That of [NewLinkerd] is then without TLS, as for a
// proxy on the same host, because its clients make TLS connections by themselves.
func InMemory(t testing.TB) testing.TB { return inMemory{t} }

type inMemory struct{ testing.TB }

// certificate returns that of the server, which is below the root that signs now.
func (f *Fake) certificate(hello *tls.ClientHelloInfo) *tls.Certificate {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.servedAs != nil && hello != nil {
		return f.servedAs(hello)
	}
	if root := f.ca.Root(); f.serving == nil || !f.vouched.Equal(root) {
		chain, key := f.ca.Certificate("/certificate-authority", func(c *x509.Certificate) {
			c.NotAfter = c.NotBefore.AddDate(1, 0, 0)
			c.URIs, c.DNSNames, c.IPAddresses = nil, []string{serverName}, []net.IP{net.IPv4(127, 0, 0, 1)}
			if f.wire.dnsNames != nil {
				c.DNSNames, c.IPAddresses = f.wire.dnsNames, nil
			}
		})
		cert := &tls.Certificate{PrivateKey: key, Leaf: chain[0]}
		for _, c := range chain {
			cert.Certificate = append(cert.Certificate, c.Raw)
		}
		f.serving, f.vouched = cert, root
	}
	return f.serving
}

const serverName = "localhost"

// Endpoint returns what a client needs to reach the CA and to be recognised by it as the workload: the URL, an HTTP client
// that trusts the server, the trust domain, and tokens.
func (f *Fake) Endpoint() caclient.Endpoint {
	t := &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{
		MinVersion:         tls.VersionTLS12,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it with the roots of the moment
		VerifyConnection: func(state tls.ConnectionState) error {
			above := x509.NewCertPool() // of a CA that is an intermediate
			for _, c := range state.PeerCertificates[1:] {
				above.AddCert(c)
			}
			_, err := state.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: f.ca.Bundle().CertPool(), Intermediates: above, DNSName: serverName})
			if err != nil {
				return &tls.CertificateVerificationError{UnverifiedCertificates: state.PeerCertificates, Err: err}
			}
			return nil
		},
	}}
	if f.memory != nil {
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return f.memory.Dial(ctx) }
	}
	f.t.Cleanup(t.CloseIdleConnections)
	e := caclient.Endpoint{
		URL:         f.url,
		HTTPClient:  &http.Client{Transport: t},
		TrustDomain: f.ca.TrustDomain(),
		Token:       func(context.Context) (string, error) { return f.newToken(), nil },
	}
	if f.wire.endpoint != nil {
		f.wire.endpoint(&e)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.override != nil {
		f.override(&e)
	}
	return e
}

// Expectation returns what a certificate for the workload has to be for: its SPIFFE ID, or its DNS name in a mesh of
// Linkerd.
func (f *Fake) Expectation() pki.Expectation { return f.want }

// Refuse has every request refused as the API says the kind of e, with its RetryAfter and the text of its Err, until
// Refuse(nil). An API that has no word for a kind says the nearest: Vault denies what it cannot authenticate.
func (f *Fake) Refuse(e *caclient.Error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refusal = e
}

// Signer returns the CA as the servers of package caserver and caclient/local take it, with its faults.
func (f *Fake) Signer() *Signer { return &Signer{f.ca} }

// String names the API and the address, and no token.
func (f *Fake) String() string { return "caclienttest.Fake(" + f.wire.name + " at " + f.url + ")" }

// GoString is String: the verb %#v must not walk to tokens.
func (f *Fake) GoString() string { return f.String() }

// LogValue is String as a log value.
func (f *Fake) LogValue() slog.Value { return slog.StringValue(f.String()) }

// newToken returns a token and notes that a client has it.
func (f *Fake) newToken() string {
	token := f.wire.token()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tokens = append(f.tokens, token)
	return token
}

// sign has the CA certify names, which the handler has decided, with its faults. The error has a kind.
func (f *Fake) sign(ctx context.Context, csr *pki.CSR, names []pki.SAN, lifetime time.Duration) ([]*x509.Certificate, *caclient.Error) {
	chain, err := f.ca.Certify(ctx, csr, names, lifetime)
	if err == nil {
		return chain, nil
	}
	if e, ok := errors.AsType[*caclient.Error](err); ok && e.Kind != nil {
		return nil, e
	}
	return nil, &caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: err}
}

// roots returns the roots in the bundle.
func (f *Fake) roots() []*x509.Certificate { return slices.Collect(f.ca.Bundle().X509Authorities()) }

// outcome is what the signer of a real server wants to be sent, whatever that server sends.
type outcome struct {
	set   bool
	chain []*x509.Certificate
}

type outcomeKey struct{}

// answer answers a request when the dial is good.
func (f *Fake) answer(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	refusal, edit, instead := f.refusal, f.editBody, f.instead
	f.mu.Unlock()
	if instead != nil {
		instead(w, r)
		return
	}
	if refusal != nil {
		f.refuse(w, r, refusal)
		return
	}
	if !f.wire.signs(r) {
		f.wire.handler.ServeHTTP(w, r)
		return
	}
	o := new(outcome)
	rec := httptest.NewRecorder()
	f.wire.handler.ServeHTTP(rec, r.WithContext(context.WithValue(r.Context(), outcomeKey{}, o)))
	body := rec.Body.Bytes()
	if len(body) > 0 && (!f.wire.grpc || len(body) >= grpcPrefix) {
		if f.wire.grpc {
			body = body[grpcPrefix:]
		}
		if o.set {
			body = f.wire.replace(body, o.chain)
		}
		if edit != nil && rec.Code < 300 {
			body = edit(body)
		}
		if f.wire.grpc {
			body = framed(body)
		}
	}
	maps.Copy(w.Header(), rec.Header()) // those of trailers, too
	w.Header().Del("Content-Length")
	w.WriteHeader(rec.Code)
	_, _ = w.Write(body)
}

// refuse reads the request first, or the client may see that its connection is reset.
func (f *Fake) refuse(w http.ResponseWriter, r *http.Request, e *caclient.Error) {
	if !f.wire.grpc { // which reads it
		_, _ = io.Copy(io.Discard, r.Body)
	}
	f.wire.refuse(w, r, e)
}

const grpcPrefix = 5 // bytes before a message

func framed(message []byte) []byte {
	n := len(message)
	return append([]byte{0, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, message...)
}

// Signer is a [ca.Signer] over a [spiffetest.CA], and what caclient/local takes. [Fake.Signer] makes one. It
// is safe for concurrent use.
type Signer struct{ ca *spiffetest.CA }

// TrustDomain returns that of the CA.
func (s *Signer) TrustDomain() spiffe.TrustDomain { return s.ca.TrustDomain() }

// Bundle returns that of the CA.
func (s *Signer) Bundle() *spiffe.Bundle { return s.ca.Bundle() }

// CallerBundle is Bundle.
func (s *Signer) CallerBundle() *spiffe.Bundle { return s.ca.Bundle() }

// Proven returns zero, for "not known".
func (s *Signer) Proven(*x509.Certificate) time.Time { return time.Time{} }

// Sign implements [ca.Signer]. An error of FailNext that is a [*caclient.Error] comes as a [*ca.SignError] of the kind that
// is nearest.
func (s *Signer) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	chain, err := s.ca.Certify(ctx, r.CSR, names(r), max(r.TTL, 0))
	if err == nil || ctx.Err() != nil {
		return chain, err
	}
	kind := spiffe.ErrNotReady
	e, _ := errors.AsType[*caclient.Error](err)
	if e == nil {
		e = new(caclient.Error)
	}
	switch e.Kind {
	case caclient.ErrInvalid:
		kind = ca.ErrCSR
	case caclient.ErrDenied, caclient.ErrUnauthenticated:
		kind = ca.ErrIdentity
	}
	return nil, &ca.SignError{Kind: kind, ID: r.ID, Err: err, RetryAfter: e.RetryAfter}
}

// honest is a [ca.Signer] for a real server, which checks what it is given: an answer that the server would refuse or change
// is kept for the wire, and the server gets a good one.
type honest struct {
	*Signer
	f *Fake
}

func (h honest) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	chain, err := h.Signer.Sign(ctx, r)
	if err != nil || h.unremarkable(chain, r.CSR) {
		return chain, err
	}
	good, err := h.f.ca.Intermediate().Certify(ctx, r.CSR, names(r), max(r.TTL, 0))
	if o, ok := ctx.Value(outcomeKey{}).(*outcome); ok && err == nil {
		o.set, o.chain = true, chain
	}
	return good, err
}

// unremarkable reports whether a server sends chain as it is.
func (h honest) unremarkable(chain []*x509.Certificate, csr *pki.CSR) bool {
	if caclient.Check(chain, csr, h.f.want, h.Bundle(), time.Now()) != nil {
		return false
	}
	return slices.EqualFunc(chain, certchain.Tidy(chain, csr.PublicKey()), (*x509.Certificate).Equal)
}

// names returns what a request grants.
func names(r ca.Request) []pki.SAN {
	var out []pki.SAN
	if !r.ID.IsZero() {
		out = append(out, pki.IDSAN(r.ID))
	}
	for _, name := range r.DNSNames {
		out = append(out, pki.DNSSAN(name))
	}
	for _, ip := range r.IPs {
		out = append(out, pki.IPSAN(ip))
	}
	return out
}
