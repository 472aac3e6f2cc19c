// Package federationtest gives tests a bundle endpoint whose faults the test injects.
//
//	partner := federationtest.NewEndpoint(t, spiffetest.NewCA(t, "partner.test"))
//	m, err := federation.New(federation.Config{
//		Relationships: []federation.Relationship{partner.Relationship()},
//		DialContext:   federationtest.Dial(partner),
//	})
//	…
//	partner.Rotate()
//	partner.Garble() // answers, but not with a bundle
//	partner.Mend()
//
// The methods Deny, Hang, Garble and Drop of an [Endpoint] each inject one fault, replacing the last, and Mend ends
// it.
//
// Consumers fetch bundles every few minutes. [NewInMemory] makes an endpoint without a socket, so that in a
// testing/synctest bubble those minutes take no time.
//
// The endpoint's certificate is both an SVID and a website's certificate. The certificate of a real endpoint should
// not be both.
package federationtest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/test/faulty"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// path is the endpoint's own identity.
const path = "/bundle-endpoint"

// Endpoint is a bundle endpoint that serves the bundle of a CA. [NewEndpoint] and [NewInMemory] make one, which
// serves until the test is over. Its methods are safe for concurrent use; those that mint certificates call t.Fatal
// if they fail and must be called from the test's own goroutine.
//
// It also has these methods, which it shares with a workloadapitest.Server:
//
//	Deny()          // answers every request with the status 403
//	Hang()          // answers nothing, until Mend
//	Garble()        // answers every request with the status 200 and something that is not a bundle
//	Drop()          // cuts the connections, open and new ones
//	Mend()          // ends the fault
//	Requests() int  // the number of requests so far, whatever their answer
type Endpoint struct {
	redacted
	t      testing.TB
	ca     *spiffetest.CA
	host   string // with a port, if it has a socket
	memory *memconn.Listener
	*dial

	mu   sync.Mutex
	svid *spiffe.SVID
}

// Aliases, so that the embedded fields are not exported.
type (
	dial     = faulty.Dial
	redacted = redact.Text
)

// NewEndpoint serves the bundle of ca as it changes, on a port of 127.0.0.1. Its certificate lasts an
// hour.
func NewEndpoint(t testing.TB, ca *spiffetest.CA) *Endpoint {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("federationtest: %v", err)
	}
	e := &Endpoint{t: t, ca: ca, host: l.Addr().String()}
	e.start(l)
	return e
}

// NewInMemory is [NewEndpoint] without a socket: only clients with the [Dial] of the endpoint reach it, by the
// name of the trust domain. Call it inside the bubble.
func NewInMemory(t testing.TB, ca *spiffetest.CA) *Endpoint {
	t.Helper()
	e := &Endpoint{t: t, ca: ca, host: ca.TrustDomain().String(), memory: memconn.Listen()}
	e.start(e.memory)
	return e
}

func (e *Endpoint) start(l net.Listener) {
	e.t.Helper()
	e.redacted = redact.New("federationtest.Endpoint(" + e.url() + ")")
	e.mint(func(*x509.Certificate) {})
	handler, err := federation.NewHandler(source{e.ca}, e.ca.TrustDomain())
	if err != nil {
		e.t.Fatalf("federationtest: %v", err)
	}
	// The configuration of a real endpoint, but for an expired certificate, which is presented.
	config, err := federation.ServerConfig(e.svid)
	if err != nil {
		e.t.Fatalf("federationtest: %v", err)
	}
	config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.svid.TLSCertificate(), nil
	}
	e.dial = faulty.Start(e.t, faulty.Config{
		Listener: l, Handler: handler, Deny: denied, Garble: garbled, TLS: config,
	})
}

// source is the bundle of the CA as it is now.
type source struct{ ca *spiffetest.CA }

func (s source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return s.ca.Bundle().Bundle(td)
}

func (e *Endpoint) url() string { return "https://" + e.host + "/" }

// Relationship returns the configuration of a consumer: the endpoint authenticates itself with its SVID, and the CA's
// present bundle is the initial one. For a consumer that knows the endpoint by its host name, set the Profile to
// federation.Web with the roots of the CA:
//
//	r := partner.Relationship()
//	r.Profile = federation.Web{Roots: ca.Bundle().CertPool()}
func (e *Endpoint) Relationship() federation.Relationship {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := e.svid.ID()
	return federation.Relationship{
		TrustDomain: e.ca.TrustDomain(),
		URL:         e.url(),
		Profile:     federation.SPIFFE{EndpointID: id, Initial: e.ca.Bundle()},
	}
}

// Dial returns the DialContext of a consumer that reaches these endpoints, in memory or not, and all others by the
// network.
func Dial(endpoints ...*Endpoint) func(ctx context.Context, network, addr string) (net.Conn, error) {
	memory := map[string]*memconn.Listener{}
	for _, e := range endpoints {
		if e.memory != nil {
			memory[net.JoinHostPort(e.host, "443")] = e.memory
		}
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if l := memory[addr]; l != nil {
			return l.Dial(ctx)
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
}

// Rotate adds a root to the CA, which signs with it from now on. The bundle gets the root and a higher sequence
// number. The endpoint gets a new certificate from the previous root, so that consumers with the last bundle can
// verify it.
func (e *Endpoint) Rotate() {
	e.t.Helper()
	e.mint(func(*x509.Certificate) {})
	e.ca.Rotate()
}

// ExpireIn replaces the certificate of the endpoint by one that ends in d, which may be negative. The endpoint
// presents it even after its end, until [Endpoint.Rotate].
func (e *Endpoint) ExpireIn(d time.Duration) {
	e.t.Helper()
	e.mint(faulty.Ending(d))
}

// mint replaces the endpoint's certificate.
func (e *Endpoint) mint(edit func(*x509.Certificate)) {
	e.t.Helper()
	svid := e.ca.SVID(path, func(c *x509.Certificate) {
		c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
		c.DNSNames = []string{"localhost", e.ca.TrustDomain().String()}
		edit(c)
	})
	e.mu.Lock()
	defer e.mu.Unlock()
	e.svid = svid
}

var denied = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "told to deny", http.StatusForbidden)
})

var garbled = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"keys":"not a bundle`)
})
