package spiffetls_test

import (
	"bufio"
	"context"
	"crypto/tls"
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
	if err := spiffetls.ConfigureServer(server, ca.SVID("/db"), ca.Bundle(), &allow, &spiffetls.Options{Governor: governor}); err != nil {
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

	config, err := spiffetls.ClientConfig(ca.SVID("/web"), ca.Bundle(), spiffe.AllowAnyPeer(), nil)
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

// A page for operators, and what it shows of a client that the server does not know.
func ExampleFailureLog() {
	ca, stranger := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	var failures spiffetls.FailureLog // an http.Handler, to be mounted where only operators come
	config, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer(), &spiffetls.Options{Failures: &failures})
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
	client, err := spiffetls.ClientConfig(stranger.SVID("/web"), ca.Bundle(), spiffe.AllowAnyPeer(), nil)
	if err != nil {
		log.Fatal(err)
	}
	if conn, err := tls.Dial("tcp", l.Addr().String(), client); err == nil {
		_, err = conn.Read(make([]byte, 1))
		fmt.Println("client:", err)
		_ = conn.Close()
	}
	server.Wait()
	kept, total := failures.Failures()
	fmt.Println("server:", total, kept[0].Stage, kept[0].Rule, kept[0].ID, kept[0].OtherSees)
	// Output:
	// client: remote error: tls: bad certificate
	// server: 1 bundle X5-38 spiffe://other.test/web remote error: tls: bad certificate
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
	if err := spiffetls.ConfigureServer(server, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), nil); err != nil {
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
		transport, err := spiffetls.Transport(ca.SVID(path), ca.Bundle(), spiffe.AllowAnyPeer(), nil)
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
