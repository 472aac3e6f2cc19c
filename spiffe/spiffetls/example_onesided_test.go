package spiffetls_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// listen serves s on a free port, and returns its URL by name: its certificate is for localhost.
func listen(s *http.Server) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go s.ServeTLS(l, "", "")
	return fmt.Sprintf("https://localhost:%d/", l.Addr().(*net.TCPAddr).Port)
}

// ask prints the answer to one request.
func ask(t *http.Transport, url string) {
	defer t.CloseIdleConnections()
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		_, port, _ := net.SplitHostPort(addr)
		return new(net.Dialer).DialContext(ctx, network, "127.0.0.1:"+port)
	}
	resp, err := (&http.Client{Transport: t}).Get(url)
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(body))
}

// A workload without an identity asks a CA for its first one, and shows it from then on.
func ExampleConfig_optionalIdentity() {
	ca := spiffetest.NewCA(t, "example.org")
	caID := spiffe.MustParseID("spiffe://example.org/ca")
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if peer, ok := spiffetls.PeerFromContext(r.Context()); ok {
			fmt.Fprint(w, "renewal for ", peer.ID())
			return
		}
		fmt.Fprint(w, "a token, please") // what a CA would ask for
	})}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/ca"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain()), AllowAnonymousClients: true})
	if err != nil {
		log.Fatal(err)
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		log.Fatal(err)
	}
	url := listen(server)
	defer server.Close()

	var self identity // a secretcache.Manager, for example
	client, err := spiffetls.New(spiffetls.Config{OptionalIdentity: true, Self: &self, Peers: ca.Bundle(), Allow: spiffe.AllowIDs(caID)})
	if err != nil {
		log.Fatal(err)
	}
	transport, err := client.Transport()
	if err != nil {
		log.Fatal(err)
	}
	ask(transport, url)
	self.svid = ca.SVID("/web")
	ask(transport, url)
	// Output:
	// a token, please
	// renewal for spiffe://example.org/web
}

// identity is a source without an identity until it has one.
type identity struct{ svid *spiffe.SVID }

func (i *identity) SVID() (*spiffe.SVID, error) {
	if i.svid == nil {
		return nil, errors.New("no identity yet")
	}
	return i.svid, nil
}

// A web server has the certificate that browsers expect, and knows the workloads among its clients.
func ExampleConfig_webCertificate() {
	ca, pki := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "web.test")
	certificate := webLeaf(pki, nil, "localhost")
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if peer, ok := spiffetls.PeerFromContext(r.Context()); ok {
			fmt.Fprint(w, "hello ", peer.ID())
			return
		}
		fmt.Fprint(w, "hello world")
	})}
	endpoint, err := spiffetls.New(spiffetls.Config{WebCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate, nil }, Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain()), AllowAnonymousClients: true})
	if err != nil {
		log.Fatal(err)
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		log.Fatal(err)
	}
	url := listen(server)
	defer server.Close()

	roots := pki.Bundle().CertPool()
	client, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), WebRoots: func() (*x509.CertPool, error) { return roots, nil }})
	if err != nil {
		log.Fatal(err)
	}
	workload, err := client.Transport()
	if err != nil {
		log.Fatal(err)
	}
	ask(workload, url)
	ask(&http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}, url) // a browser
	// Output:
	// hello spiffe://example.org/web
	// hello world
}

// A client that has nothing but a token verifies the server before it sends that.
func ExampleConfig_noIdentity() {
	ca := spiffetest.NewCA(t, "example.org")
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Header.Get("Authorization"))
	})}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/impostor"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), AllowAnonymousClients: true})
	if err != nil {
		log.Fatal(err)
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		log.Fatal(err)
	}
	url := listen(server)
	defer server.Close()

	client, err := spiffetls.New(spiffetls.Config{OptionalIdentity: true, Peers: ca.Bundle(), Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/ca"))})
	if err != nil {
		log.Fatal(err)
	}
	transport, err := client.Transport()
	if err != nil {
		log.Fatal(err)
	}
	r, err := http.NewRequest("GET", url, nil)
	if err != nil {
		log.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer token")
	if _, err = transport.RoundTrip(r); err != nil {
		fmt.Println("not sent:", err)
	}
	// Output: not sent: spiffetls: the server is refused: verify peer "spiffe://example.org/impostor": policy: not allowed by policy, which allows spiffe://example.org/ca
}
