package spiffetest_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// hello greets its client.
var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	peer, err := spiffetls.PeerFromRequest(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	}
	fmt.Fprint(w, "hello ", peer.ID())
})

// A handler is tested without a connection.
func ExampleCA_RequestFrom() {
	ca := spiffetest.NewCA(t, "example.org")
	for _, r := range []*http.Request{
		ca.RequestFrom("/web", httptest.NewRequest("GET", "/", nil)),
		httptest.NewRequest("GET", "/", nil),
	} {
		w := httptest.NewRecorder()
		hello.ServeHTTP(w, r)
		fmt.Println(w.Code, w.Body)
	}
	// Output:
	// 200 hello spiffe://example.org/web
	// 403 spiffetls: no proven client: the request came without TLS, or to a server without ConfigureServer; serve with ServeTLS or ListenAndServeTLS, see PeerFromState for servers of other packages, and make requests for tests by RequestFrom of package spiffetest
}

// An httptest.Server with mutual TLS.
func Example_httptestServer() {
	ca := spiffetest.NewCA(t, "example.org")
	server := httptest.NewUnstartedServer(hello)
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())})
	if err != nil {
		log.Fatal(err)
	}
	if err := endpoint.ConfigureServer(server.Config); err != nil {
		log.Fatal(err)
	}
	server.TLS = server.Config.TLSConfig
	server.StartTLS()
	defer server.Close()

	client, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())})
	if err != nil {
		log.Fatal(err)
	}
	transport, err := client.Transport()
	if err != nil {
		log.Fatal(err)
	}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Get(server.URL)
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status, resp.Proto)
	// Output: 200 OK HTTP/2.0
}

// serverOf is a server under test, with the metrics that say what it refuses.
func serverOf(source *spiffetest.Source, failures *spiffetls.Metrics) *httptest.Server {
	server := httptest.NewUnstartedServer(hello)
	endpoint, err := spiffetls.New(spiffetls.Config{Self: source, Peers: source, Allow: spiffe.AllowAnyPeer(), Metrics: failures})
	if err != nil {
		log.Fatal(err)
	}
	config, err := endpoint.ServerConfig()
	if err != nil {
		log.Fatal(err)
	}
	spiffetest.StartTLS(server, config)
	return server
}

// connect connects to a server, and reports what the server says about that.
func connect(server *httptest.Server, failures *spiffetls.Metrics, config *tls.Config) {
	conn, err := tls.Dial("tcp", server.Listener.Addr().String(), config)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	_, err = conn.Read(make([]byte, 1))
	refusal, _ := errors.AsType[*spiffe.VerifyError](failures.Report().Problems[0])
	fmt.Println(err, "|", refusal.Stage, refusal.Rule, refusal.ID)
}

// A client of a trust domain whose bundle the server does not have.
func Example_anotherTrustDomain() {
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	var failures spiffetls.Metrics
	server := serverOf(ca.Source("/db"), &failures)
	defer server.Close()
	connect(server, &failures, spiffetest.TLSConfig(other.Certificate("/web")))
	// Output: remote error: tls: bad certificate | bundle X5-38 spiffe://other.test/web
}

// A client with an SVID that has expired. A client of spiffetls would not present it.
func Example_expired() {
	ca := spiffetest.NewCA(t, "example.org")
	var failures spiffetls.Metrics
	server := serverOf(ca.Source("/db"), &failures)
	defer server.Close()
	connect(server, &failures, spiffetest.TLSConfig(ca.Broken("Expired")))
	// Output: remote error: tls: bad certificate | chain X5-30 spiffe://example.org/broken
}

// A client with an SVID of a root that the bundle has no more.
func Example_rotatedAway() {
	ca := spiffetest.NewCA(t, "example.org")
	source := ca.Source("/db")
	var failures spiffetls.Metrics
	server := serverOf(source, &failures)
	defer server.Close()

	chain, key := ca.Certificate("/web")
	ca.Rotate()
	ca.DropOldRoots()
	source.Renew() // the server is told
	connect(server, &failures, spiffetest.TLSConfig(chain, key))
	// Output: remote error: tls: bad certificate | chain X5-31 spiffe://example.org/web
}

// cleanTB is a testing.TB for fixtures that need an end.
type cleanTB struct {
	testing.TB
	cleanups []func()
}

func (*cleanTB) Helper() {}

func (t *cleanTB) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *cleanTB) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}

// An agent that hangs when the service starts, and is there again later.
func Example_hangingAgent() {
	t := new(cleanTB) // in a test: its own t
	defer t.end()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	api.Hang()

	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := workloadapi.Start(ctx, api.Config())
	fmt.Println("while it hangs:", errors.Is(err, spiffe.ErrNotReady))

	api.Mend()
	source, err := workloadapi.Start(context.Background(), api.Config())
	if err != nil {
		log.Fatal(err)
	}
	defer source.Close()
	svid, err := source.SVID()
	fmt.Println("after that:", svid, err)
	// Output:
	// while it hangs: true
	// after that: spiffe://example.org/web <nil>
}
