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
func ExampleHosts() {
	ca := spiffetest.NewCA(t, "example.org")
	server := &http.Server{Handler: http.NotFoundHandler()}
	if err := spiffetls.ConfigureServer(server, ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer(), nil); err != nil {
		log.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go server.ServeTLS(l, "", "")
	defer server.Close()

	transport, err := spiffetls.Transport(ca.SVID("/web"), ca.Bundle(), spiffetls.Hosts{
		"billing.example": spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/billing")),
		"db.example:8443": spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db")),
	}, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer transport.CloseIdleConnections()
	transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) { // in place of a name server
		return new(net.Dialer).DialContext(ctx, network, l.Addr().String())
	}
	client := &http.Client{Transport: transport}
	for _, url := range []string{"https://db.example:8443/", "https://billing.example/", "https://other.example/"} {
		resp, err := client.Get(url)
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
func ExampleNewListener() {
	ca := spiffetest.NewCA(t, "example.org")
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	l, err := spiffetls.NewListener(inner, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), nil)
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

	dialer, err := spiffetls.NewDialer(ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db")), nil)
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
func ExamplePeerFromState() {
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

	config, err := spiffetls.ClientConfig(ca.SVID("/web"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), nil)
	if err != nil {
		log.Fatal(err)
	}
	conn, err := tls.Dial("tcp", server.Addr().String(), config) // or a driver
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	peer, err := spiffetls.PeerFromState(config, conn.ConnectionState())
	fmt.Println(peer, err)
	// Output: spiffe://example.org/db <nil>
}
