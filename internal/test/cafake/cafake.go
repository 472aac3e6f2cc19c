// Package cafake makes certificate authorities for tests, which are called over the network by the API of a system,
// with faults that the test injects: [NewVault], [NewStepCA], [NewGoogleCAS] and [NewZTS]. Package
// caclient/caclienttest, which users see, makes those of Istio and Linkerd by [Fake] and [API], and has the suite
// [Run] for clients.
package cafake

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/test/faulty"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Fake is a CA behind one API, which serves until the test is over. Its methods are safe for concurrent use.
// Beside those below it has the methods of [faulty.Dial].
type Fake struct {
	redacted
	t      testing.TB
	ca     *spiffetest.CA
	id     spiffe.ID
	want   pki.Expectation
	url    string
	api    API
	memory *memconn.Listener // nil if it has a socket
	*dial

	mu       sync.Mutex
	refusal  *caclient.Error          // of every request; nil for none
	editBody func(body []byte) []byte // of answers to requests for certificates; nil for none
	tokens   []string                 // that clients were given
	override func(*caclient.Endpoint) // of the suite; nil for none
	instead  http.HandlerFunc         // of the suite, answers every request; nil for none
	serving  *tls.Certificate         // of the server
	vouched  *x509.Certificate        // the root that vouches for serving
}

type (
	dial     = faulty.Dial
	redacted = redact.Text
)

// API is one API of a CA, as a Fake speaks it.
type API struct {
	Name string // such as "Vault"

	// Handler answers when nothing is wrong. One made for tests signs with the Fake and reports its errors with
	// Refuse. One of package caserver signs with [Fake.HonestSigner], and needs Replace.
	Handler http.Handler

	// Signs reports whether a request is for a certificate.
	Signs func(*http.Request) bool

	// Refuse answers as the API does for the kind of e, with its RetryAfter if that is not 0, and the text of e.Err.
	Refuse func(http.ResponseWriter, *http.Request, *caclient.Error)

	// Garbled answers with success and nonsense.
	Garbled http.Handler

	// Replace returns the body of an answer of Handler with another chain. Nil for a handler made for tests.
	Replace func(body []byte, chain []*x509.Certificate) []byte

	GRPC bool // the body of an answer is one message of gRPC, which Replace and edits see without its prefix

	OwnLife bool // lifetimes are the CA's choice
	OwnTLS  bool // clients make TLS connections by themselves

	// Token returns a token that Handler accepts.
	Token func() string

	// Endpoint completes the Endpoint for clients, whose URL, HTTPClient, TrustDomain and Token are set. It may be
	// nil.
	Endpoint func(*caclient.Endpoint)

	TLS      func(*tls.Config) // of the server; may be nil
	DNSNames []string          // of the server's certificate, in the place of "localhost"
}

// Text returns what is printed instead of f.
func (f *Fake) Text() redact.Text { return f.redacted }

// New returns a Fake for the workload whose ID has the path. It has no API until [Fake.Serve].
func New(t testing.TB, authority *spiffetest.CA, path string) *Fake {
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

// Serve starts the server of an API.
func (f *Fake) Serve(api API) {
	f.t.Helper()
	f.api = api
	l := f.listen()
	f.redacted = redact.New("caclienttest.Fake(" + api.Name + " at " + f.url + ")")
	cfg := &tls.Config{
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.certificate(), nil },
		NextProtos:     []string{"h2", "http/1.1"},
	}
	if api.TLS != nil {
		api.TLS(cfg)
	}
	f.certificate() // on the test's own goroutine, as it may fail
	denial := &caclient.Error{Kind: caclient.ErrDenied, Err: errors.New("denied by the test")}
	f.dial = faulty.Start(f.t, faulty.Config{
		Listener: l,
		Handler:  http.HandlerFunc(f.answer),
		Deny:     http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { f.refuse(rw, r, denial) }),
		Garble:   api.Garbled,
		Serve: func(ctx context.Context, l net.Listener, h http.Handler) error {
			if f.Plaintext() {
				return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: h, Plaintext: true})
			}
			return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: h, TLS: cfg})
		},
	})
}

// Plaintext reports whether there is no TLS.
func (f *Fake) Plaintext() bool { return IsInMemory(f.t) && f.api.OwnTLS }

// IsInMemory reports whether t is a result of [InMemory].
func IsInMemory(t testing.TB) bool {
	_, ok := t.(inMemory)
	return ok
}

func (f *Fake) listen() net.Listener {
	f.t.Helper()
	if IsInMemory(f.t) {
		f.memory, f.url = memconn.Listen(), "https://localhost"
		if f.Plaintext() {
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

// InMemory returns t for [New], which then makes a Fake without a socket, as a testing/synctest bubble needs. Only the
// HTTPClient of its Endpoint reaches it. A Fake whose clients make TLS connections by themselves is then without TLS.
func InMemory(t testing.TB) testing.TB { return inMemory{t} }

type inMemory struct{ testing.TB }

// certificate returns that of the server, which is below the root that signs now.
func (f *Fake) certificate() *tls.Certificate {
	f.mu.Lock()
	defer f.mu.Unlock()
	if root := f.ca.Root(); f.serving == nil || !f.vouched.Equal(root) {
		chain, key := f.ca.Certificate("/certificate-authority", func(c *x509.Certificate) {
			c.NotAfter = c.NotBefore.AddDate(1, 0, 0)
			c.URIs, c.DNSNames, c.IPAddresses = nil, []string{serverName}, []net.IP{net.IPv4(127, 0, 0, 1)}
			if f.api.DNSNames != nil {
				c.DNSNames, c.IPAddresses = f.api.DNSNames, nil
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

// Endpoint returns what a client needs to reach the CA and to be recognised by it as the workload: the URL, an HTTP
// client that trusts the server, the trust domain, and tokens.
func (f *Fake) Endpoint() caclient.Endpoint {
	t := &http.Transport{ForceAttemptHTTP2: true, HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 256 << 10},
		TLSClientConfig: &tls.Config{
			MinVersion:         tls.VersionTLS12,
			InsecureSkipVerify: true, // VerifyConnection does it with the roots of the moment
			VerifyConnection: func(state tls.ConnectionState) error {
				above := x509.NewCertPool() // of a CA that is an intermediate
				for _, c := range state.PeerCertificates[1:] {
					above.AddCert(c)
				}
				_, err := state.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: f.ca.Bundle().CertPool(),
					Intermediates: above, DNSName: serverName})
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
	if f.api.Endpoint != nil {
		f.api.Endpoint(&e)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.override != nil {
		f.override(&e)
	}
	return e
}

// Expectation returns what a certificate for the workload has to be for.
func (f *Fake) Expectation() pki.Expectation { return f.want }

// Expect replaces the result of Expectation, which is the SPIFFE ID at first. It comes before Serve.
func (f *Fake) Expect(want pki.Expectation) { f.want = want }

// ID returns that of the workload.
func (f *Fake) ID() spiffe.ID { return f.id }

// Roots returns the bundle of the CA as it is at each moment.
func (f *Fake) Roots() spiffe.BundleSource { return bundle{f.ca} }

// Refuse has every request refused as the API says the kind of e, with its RetryAfter and the text of its Err, until
// Refuse(nil). An API that has no word for a kind says the nearest: Vault denies what it cannot authenticate.
func (f *Fake) Refuse(e *caclient.Error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refusal = e
}

// newToken returns a token and notes that a client has it.
func (f *Fake) newToken() string {
	token := f.api.Token()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tokens = append(f.tokens, token)
	return token
}

// sign has the CA certify names, which the handler has decided, with its faults. The error has a kind.
func (f *Fake) sign(ctx context.Context, csr *pki.CSR, names []pki.SAN, lifetime time.Duration) ([]*x509.Certificate,
	*caclient.Error) {
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
	if !f.api.Signs(r) {
		f.api.Handler.ServeHTTP(w, r)
		return
	}
	o := new(outcome)
	rec := httptest.NewRecorder()
	f.api.Handler.ServeHTTP(rec, r.WithContext(context.WithValue(r.Context(), outcomeKey{}, o)))
	body := rec.Body.Bytes()
	if len(body) > 0 && (!f.api.GRPC || len(body) >= grpcPrefix) {
		if f.api.GRPC {
			body = body[grpcPrefix:]
		}
		if o.set {
			body = f.api.Replace(body, o.chain)
		}
		if edit != nil && rec.Code < 300 {
			body = edit(body)
		}
		if f.api.GRPC {
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
	if !f.api.GRPC { // which reads it
		_, _ = io.Copy(io.Discard, r.Body)
	}
	f.api.Refuse(w, r, e)
}

const grpcPrefix = 5 // bytes before a message

func framed(message []byte) []byte {
	n := len(message)
	return append([]byte{0, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, message...)
}
