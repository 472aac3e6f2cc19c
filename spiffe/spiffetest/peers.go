package spiffetest

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/provenpeer"
)

// peer returns the verified peer of a client, and its certificates.
func (ca *CA) peer(path string, edit []func(*x509.Certificate)) (*spiffe.Peer, []*x509.Certificate) {
	ca.t.Helper()
	chain, _ := ca.Certificate(path, edit...)
	verifier, err := spiffe.NewVerifier(ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), nil)
	if err != nil {
		ca.t.Fatalf("spiffetest: peer %q: %v", path, err)
	}
	peer, err := verifier.VerifyChain(chain, spiffe.ClientRole)
	if err != nil {
		ca.t.Fatalf("spiffetest: peer %q: %v", path, err)
	}
	return peer, chain
}

// RequestFrom returns r, for example from httptest.NewRequest, in the form that a handler gets from a client whose ID
// is the trust domain followed by path: the functions of package spiffetls return that peer, RequirePeer checks it,
// and r.TLS has its certificates. A request that did not pass through RequestFrom has no peer.
//
// A [spiffe.Verifier] verifies the peer, with a new identity as from [CA.SVID] and the current bundle. The test fails
// if the verifier refuses the identity, for example because of the edits, or if the program was not built by "go
// test".
func (ca *CA) RequestFrom(path string, r *http.Request, edit ...func(*x509.Certificate)) *http.Request {
	ca.t.Helper()
	if !testing.Testing() {
		ca.t.Fatalf("spiffetest: request from %q: this is not a test", path)
		return r // a testing.TB that was made for this may go on
	}
	peer, chain := ca.peer(path, edit)
	r = r.WithContext(provenpeer.With(r.Context(), peer))
	r.TLS = &tls.ConnectionState{
		Version: tls.VersionTLS13, HandshakeComplete: true, CipherSuite: tls.TLS_AES_128_GCM_SHA256,
		PeerCertificates: chain,
	}
	return r
}

// TLSConfig returns a configuration, for a client or a server, that presents any chain, leaf first: expired, of
// another trust domain, broken. It verifies nothing, so that only the other side can refuse:
//
//	conn, err := tls.Dial("tcp", addr, spiffetest.TLSConfig(ca.Broken("Expired")))
//
// As a server it asks for a certificate and serves clients without one. The key must be the leaf's key. The caller may
// change the configuration.
func TLSConfig(chain []*x509.Certificate, key crypto.Signer) *tls.Config {
	cert := tls.Certificate{PrivateKey: key}
	for _, c := range chain {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert},
		// Certificates of a client are left out if the server names authorities that are not theirs.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil },
		ClientAuth:           tls.RequestClientCert,
		InsecureSkipVerify:   true,
	}
}

// StartTLS starts an httptest.Server with a configuration such as the TLSConfig that a spiffetls.Endpoint has
// given its Config. The server's own method StartTLS would add a certificate, which crypto/tls prefers for
// clients that dial an IP address. The server speaks HTTP/2 if it has EnableHTTP2. The server's own client does
// not trust it; make one with the Transport of an Endpoint.
func StartTLS(server *httptest.Server, config *tls.Config) {
	if config == nil {
		panic("spiffetest: StartTLS: no configuration; spiffetls.New returns what makes one, or an error")
	}
	config = config.Clone() // before it is used
	if server.EnableHTTP2 && !slices.Contains(config.NextProtos, "h2") {
		config.NextProtos = append([]string{"h2", "http/1.1"}, config.NextProtos...)
	}
	inner := config.GetConfigForClient
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (c *tls.Config, err error) {
		if inner != nil {
			c, err = inner(hello)
		}
		switch {
		case err != nil:
			return nil, err
		case c == nil:
			c = config
		}
		c = c.Clone()
		c.GetConfigForClient, c.NextProtos = nil, config.NextProtos
		return c, nil
	}
	server.Config.TLSConfig, server.TLS = config, config
	server.StartTLS()
}

// Serve serves with TLS at a free port of 127.0.0.1 until the test ends, and returns the URL. The server may come from
// a spiffetls.Endpoint, for example. It logs no failed handshakes unless it has an ErrorLog.
func Serve(t testing.TB, server *http.Server) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("spiffetest: serve: %v", err)
	}
	if server.ErrorLog == nil {
		server.ErrorLog = log.New(io.Discard, "", 0)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.ServeTLS(l, "", "") }()
	t.Cleanup(func() {
		_ = server.Close() // the listener is its own
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("spiffetest: serve: %v", err)
		}
	})
	return "https://" + l.Addr().String()
}
