package spiffetls_test

import (
	"context"
	"crypto/tls"
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

// A client calls billing and db. Each is allowed, and neither may answer for the other.
func ExampleConfig_hosts() {
	ca := spiffetest.NewCA(t, "example.org")
	server := &http.Server{Handler: http.NotFoundHandler()}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()})
	if err != nil {
		log.Fatal(err)
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		log.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go server.ServeTLS(l, "", "")
	defer server.Close()

	client, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Hosts: map[string]spiffe.PolicySource{
		"billing.example": spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/billing")),
		"db.example:8443": spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db")),
	}})
	if err != nil {
		log.Fatal(err)
	}
	transport, err := client.Transport()
	if err != nil {
		log.Fatal(err)
	}
	defer transport.CloseIdleConnections()
	transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) { // in place of a name server
		return new(net.Dialer).DialContext(ctx, network, l.Addr().String())
	}
	https := &http.Client{Transport: transport}
	for _, url := range []string{"https://db.example:8443/", "https://billing.example/", "https://other.example/"} {
		resp, err := https.Get(url)
		if e, ok := errors.AsType[*spiffe.VerifyError](err); ok {
			fmt.Println(url, "was answered by", e.ID)
		} else if err != nil {
			fmt.Println(url, "was not dialled:", errors.Is(err, spiffe.ErrDenied))
		} else {
			_ = resp.Body.Close()
			fmt.Println(url, resp.Status)
		}
	}
	// Output:
	// https://db.example:8443/ 404 Not Found
	// https://billing.example/ was answered by spiffe://example.org/db
	// https://other.example/ was not dialled: true
}

// A server and a client with a protocol of their own.
func ExampleEndpoint_Listener() {
	ca := spiffetest.NewCA(t, "example.org")
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())})
	if err != nil {
		log.Fatal(err)
	}
	l, err := endpoint.Listener(inner)
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if peer, err := spiffetls.PeerFromConn(conn); err == nil {
					fmt.Fprint(conn, "hello ", peer.ID())
				}
			}()
		}
	}()

	dialer, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db"))})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := dialer.DialContext(context.Background(), "tcp", l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	answer, err := io.ReadAll(conn)
	fmt.Println(string(answer), err)
	// Output: hello spiffe://example.org/web <nil>
}

// A package that takes a *tls.Config hands out the state of its connections.
func ExampleEndpoint_PeerFromState() {
	ca := spiffetest.NewCA(t, "example.org")
	server, err := tls.Listen("tcp", "127.0.0.1:0", spiffetest.TLSConfig(ca.Certificate("/db")))
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	go func() {
		if conn, err := server.Accept(); err == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
	}()

	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())})
	if err != nil {
		log.Fatal(err)
	}
	config, err := endpoint.ClientConfig()
	if err != nil {
		log.Fatal(err)
	}
	conn, err := tls.Dial("tcp", server.Addr().String(), config) // or a driver
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	peer, err := endpoint.PeerFromState(spiffe.ServerRole, conn.ConnectionState())
	fmt.Println(peer, err)
	// Output: spiffe://example.org/db <nil>
}
