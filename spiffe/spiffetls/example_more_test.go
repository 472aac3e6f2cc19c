package spiffetls_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"sync"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// An operator takes a client out of the policy while its connection is open.
func ExampleGovernor() {
	ca := spiffetest.NewCA(t, "example.org")
	web, ops := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/ops")
	var allow spiffe.LivePolicy
	if err := allow.Set(spiffe.AllowIDs(web)); err != nil {
		log.Fatal(err)
	}

	governor := &spiffetls.Governor{Grace: -1, Jitter: -1} // ends a connection at once
	server := &http.Server{}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: &allow, Governor: governor})
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
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { _ = governor.Run(ctx) })
	defer cancel()
	running.Go(func() { _ = server.ServeTLS(l, "", "") })
	defer server.Close()

	client, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()})
	if err != nil {
		log.Fatal(err)
	}
	config, err := client.ClientConfig()
	if err != nil {
		log.Fatal(err)
	}
	conn, err := tls.Dial("tcp", l.Addr().String(), config)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: db\r\n\r\n")
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		log.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	fmt.Println(resp.Proto)

	if err := allow.Set(spiffe.AllowIDs(ops)); err != nil {
		log.Fatal(err)
	}
	_, err = in.ReadByte()
	fmt.Println(err)
	// Output:
	// HTTP/1.1
	// EOF
}

// What a report says of a client that the server does not know.
func ExampleMetrics() {
	ca, stranger := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	var metrics spiffetls.Metrics
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: &metrics})
	if err != nil {
		log.Fatal(err)
	}
	config, err := endpoint.ServerConfig()
	if err != nil {
		log.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	var server sync.WaitGroup
	server.Go(func() {
		if conn, err := l.Accept(); err == nil {
			_ = conn.(*tls.Conn).Handshake()
			_ = conn.Close()
		}
	})
	client, err := spiffetls.New(spiffetls.Config{Self: stranger.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()})
	if err != nil {
		log.Fatal(err)
	}
	config, err = client.ClientConfig()
	if err != nil {
		log.Fatal(err)
	}
	if conn, err := tls.Dial("tcp", l.Addr().String(), config); err == nil {
		_, err = conn.Read(make([]byte, 1))
		fmt.Println("client:", err)
		_ = conn.Close()
	}
	server.Wait()
	for _, problem := range metrics.Report().Problems {
		if e, ok := errors.AsType[*spiffe.VerifyError](problem); ok {
			fmt.Println("server:", e.Stage, e.Rule, e.ID)
		}
	}
	// Output:
	// client: remote error: tls: bad certificate
	// server: bundle X5-38 spiffe://other.test/web
}

// A route for operators, on a server that lets more peers in.
func ExampleRequirePeer() {
	ca := spiffetest.NewCA(t, "example.org")
	ops := spiffe.MustParseID("spiffe://example.org/ops")
	admin, err := spiffetls.RequirePeer(spiffe.AllowIDs(ops), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "welcome")
	}))
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/admin", admin)

	server := &http.Server{Handler: mux}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())})
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
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { _ = server.ServeTLS(l, "", "") })
	defer server.Close()
	for _, path := range []string{"/ops", "/web"} {
		client, err := spiffetls.New(spiffetls.Config{Self: ca.SVID(path), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()})
		if err != nil {
			log.Fatal(err)
		}
		transport, err := client.Transport()
		if err != nil {
			log.Fatal(err)
		}
		resp, err := (&http.Client{Transport: transport}).Get("https://" + l.Addr().String() + "/admin")
		if err != nil {
			log.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		transport.CloseIdleConnections()
		fmt.Printf("%s: %d %q\n", path, resp.StatusCode, body)
	}
	// Output:
	// /ops: 200 "welcome"
	// /web: 403 "forbidden\n"
}
