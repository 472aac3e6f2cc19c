package spiffetls_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// t is what a test function is given; an example has none, and these do not fail.
var t testing.TB = exampleTB{}

type exampleTB struct{ testing.TB }

func (exampleTB) Helper() {}

// A server and a client that know each other by their SPIFFE IDs. In a program the identities and
// bundles come from a source that keeps them fresh; a test mints them.
func Example() {
	ca := spiffetest.NewCA(t, "example.org")
	web, db := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/db")

	// The server is /db and serves /web.
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if peer, ok := spiffetls.PeerFromContext(r.Context()); ok {
			fmt.Fprintf(w, "hello %s, over %s", peer.ID(), r.Proto)
		}
	})}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(web)})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		fmt.Println(err)
		return
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	go server.ServeTLS(l, "", "")
	defer server.Close()

	// The client is /web and talks to /db, whatever host that is on.
	client, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(db)})
	if err != nil {
		fmt.Println(err)
		return
	}
	transport, err := client.Transport()
	if err != nil {
		fmt.Println(err)
		return
	}
	https := &http.Client{Transport: transport}
	resp, err := https.Get("https://" + l.Addr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)
	// Output: hello spiffe://example.org/web, over HTTP/2.0 <nil>
}

// A client meets a server that it did not mean.
func ExampleEndpoint_ClientConfig() {
	ca := spiffetest.NewCA(t, "example.org")
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/impostor"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()})
	if err != nil {
		fmt.Println(err)
		return
	}
	serverConfig, err := endpoint.ServerConfig()
	if err != nil {
		fmt.Println(err)
		return
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", serverConfig)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()

	client, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db"))})
	if err != nil {
		fmt.Println(err)
		return
	}
	config, err := client.ClientConfig()
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = tls.Dial("tcp", l.Addr().String(), config)
	if e, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		fmt.Println(e.ID, "was refused at the stage", e.Stage)
	}
	// Output: spiffe://example.org/impostor was refused at the stage policy
}
