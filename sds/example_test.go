package sds_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// An identity that renews itself, served on a Unix socket, and a client that takes it from there as
// Envoy would.
func Example() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}
	id := spiffe.MustParseID("spiffe://example.org/ns/shop/sa/web")
	issuer, err := local.New(authority, id)
	if err != nil {
		panic(err)
	}
	manager, err := secretcache.New(secretcache.Config{ID: id, CA: issuer})
	if err != nil {
		panic(err)
	}
	dir, err := os.MkdirTemp("", "sds")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)

	handler, err := sds.NewHandler(manager, nil)
	if err != nil {
		panic(err)
	}
	defer handler.Close()
	server := &unixsocket.Server{Path: filepath.Join(dir, "sds.sock"), Handler: handler}
	if err := server.Listen(); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = manager.Run(ctx) })
	wg.Go(func() { _ = server.Run(ctx) })

	client := sds.NewClient(sds.UnixClient(server.Path), "http://localhost")
	for secret, err := range client.Watch(ctx, "default") {
		if err != nil {
			panic(err)
		}
		chainPEM, _, _ := secret.KeyPair()
		chain, err := pki.ParseCertificatesPEM(chainPEM)
		if err != nil {
			panic(err)
		}
		fmt.Println(secret.Name(), "is", chain[0].URIs[0])
		break // a program would go on, and get each renewal
	}
	cancel()
	wg.Wait()
	// Output: default is spiffe://example.org/ns/shop/sa/web
}

// In an http.Server of your own, the handler needs HTTP/2, many streams on a connection, and no
// timeout that ends them. Serve it with TLS and client certificates, or on a Unix socket.
func ExampleNewHandler() {
	var manager *secretcache.Manager // made with secretcache.New
	handler, err := sds.NewHandler(manager, nil)
	if err != nil {
		panic(err)
	}
	defer handler.Close()

	mux := http.NewServeMux()
	mux.Handle("/envoy.service.secret.v3.SecretDiscoveryService/", handler)
	mux.Handle("/envoy.service.discovery.v3.AggregatedDiscoveryService/", handler) // for Envoys with one stream
	server := &http.Server{
		Handler: mux,
		HTTP2:   &http.HTTP2Config{MaxConcurrentStreams: 100_000},
	}
	panic(server.ListenAndServeTLS("server.pem", "server-key.pem"))
}

// requestKey finds the request in its own context.
type requestKey struct{}

// Resolve gets the context of the request. What is not in it by itself, such as the state of TLS, a handler
// in front puts there. When the answer would be another one, Refresh has all streams ask again.
func ExampleOptions() {
	var manager *secretcache.Manager // made with secretcache.New
	handler, err := sds.NewHandler(manager, &sds.Options{Resolve: func(ctx context.Context, name string) (string, error) {
		r, ok := ctx.Value(requestKey{}).(*http.Request)
		if !ok || r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
			return "", errors.New("only clients with a certificate may have secrets")
		}
		leaf := r.TLS.VerifiedChains[0][0]
		switch {
		case name == "ROOTCA":
			return name, nil
		case name == "default" && len(leaf.URIs) == 1:
			return leaf.URIs[0].String(), nil
		}
		return "", errors.New("a client may have the secret of its own identity, as default")
	}})
	if err != nil {
		panic(err)
	}
	front := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, r)))
	})
	http.Handle("/envoy.service.secret.v3.SecretDiscoveryService/", front)

	handler.Refresh() // after a registration has changed
}

// The identities of a SPIFFE agent for two Envoys. Each asks for "default", on a socket that is mounted into its
// container, and gets its own.
func ExampleOptions_callers() {
	address, stop := agentForExample("/ns/shop/sa/web", "/ns/shop/sa/db")
	defer stop()
	agent, err := workloadapi.New(workloadapi.Config{Address: address}) // os.Getenv(workloadapi.SocketEnv)
	if err != nil {
		panic(err)
	}
	type callerKey struct{}
	handler, err := sds.NewHandler(sdssource.FromIdentity(agent), &sds.Options{Resolve: func(ctx context.Context, name string) (string, error) {
		if name == "default" {
			return "spiffe://example.org/ns/shop/sa/" + ctx.Value(callerKey{}).(string), nil
		}
		return "", errors.New("there is only default")
	}})
	if err != nil {
		panic(err)
	}
	defer handler.Close()

	dir, err := os.MkdirTemp("", "sds")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = agent.Run(ctx) })
	for _, caller := range []string{"web", "db"} {
		server := &unixsocket.Server{
			Path: filepath.Join(dir, caller+".sock"), Handler: handler,
			ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
				return context.WithValue(ctx, callerKey{}, caller)
			},
		}
		if err := server.Listen(); err != nil {
			panic(err)
		}
		wg.Go(func() { _ = server.Run(ctx) })

		client := sds.NewClient(sds.UnixClient(server.Path), "http://localhost") // in the place of Envoy
		for secret, err := range client.Watch(ctx, "default") {
			if err != nil {
				panic(err)
			}
			chainPEM, _, _ := secret.KeyPair()
			chain, err := pki.ParseCertificatesPEM(chainPEM)
			if err != nil {
				panic(err)
			}
			fmt.Println(caller+":", secret.Name(), "is", chain[0].URIs[0])
			break
		}
	}
	cancel()
	wg.Wait()
	// Output:
	// web: default is spiffe://example.org/ns/shop/sa/web
	// db: default is spiffe://example.org/ns/shop/sa/db
}

// An Envoy that takes a certificate for each connection asks for the server names of its clients; examples/ENVOY.md has its
// configuration. Resolve maps such a name to the SPIFFE ID of the workload, here that of a Kubernetes service to the ID of the
// service account with the same name, and decides whether this Envoy may speak for it. Clients choose these names, so Resolve
// refuses by itself what cannot be one: that costs the source nothing, and the client hears of it at once.
func ExampleOptions_serverNames() {
	address, stop := agentForExample("/ns/shop/sa/web", "/ns/shop/sa/db")
	defer stop()
	agent, err := workloadapi.New(workloadapi.Config{Address: address}) // os.Getenv(workloadapi.SocketEnv)
	if err != nil {
		panic(err)
	}
	td := spiffe.MustParseTrustDomain("example.org")
	resolve := func(_ context.Context, name string) (string, error) { // the context has the caller
		if name == "ROOTCA" {
			return name, nil
		}
		service, ok := strings.CutSuffix(name, ".svc.cluster.local")
		account, namespace, dot := strings.Cut(service, ".")
		if !ok || !dot || namespace != "shop" {
			return "", errors.New("this Envoy speaks for the services of the namespace shop")
		}
		id, err := td.WorkloadID("ns", namespace, "sa", account)
		if err != nil {
			return "", err
		}
		return id.String(), nil
	}
	handler, err := sds.NewHandler(sdssource.FromIdentity(agent), &sds.Options{Resolve: resolve, MaxNames: 10_000}) // all on one stream
	if err != nil {
		panic(err)
	}
	defer handler.Close()

	dir, err := os.MkdirTemp("", "sds")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	server := &unixsocket.Server{Path: filepath.Join(dir, "sds.sock"), Handler: handler}
	if err := server.Listen(); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = agent.Run(ctx) })
	wg.Go(func() { _ = server.Run(ctx) })

	client := sds.NewClient(sds.UnixClient(server.Path), "http://localhost") // in the place of Envoy
	for _, name := range []string{"web.shop.svc.cluster.local", "db.shop.svc.cluster.local"} {
		for secret, err := range client.Watch(ctx, name) {
			if err != nil {
				panic(err)
			}
			chainPEM, _, _ := secret.KeyPair()
			chain, err := pki.ParseCertificatesPEM(chainPEM)
			if err != nil {
				panic(err)
			}
			fmt.Println(secret.Name(), "is", chain[0].URIs[0])
			break
		}
	}
	cancel()
	wg.Wait()
	// Output:
	// web.shop.svc.cluster.local is spiffe://example.org/ns/shop/sa/web
	// db.shop.svc.cluster.local is spiffe://example.org/ns/shop/sa/db
}

// agentForExample is a SPIFFE agent that has these identities for its callers.
func agentForExample(paths ...string) (address string, stop func()) {
	t := &exampleTB{}
	return workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), paths...).Config().Address, t.end
}

// exampleTB is what a test function is given; an example has none, and these do not fail.
type exampleTB struct {
	testing.TB
	cleanups []func()
}

func (*exampleTB) Helper() {}

func (t *exampleTB) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *exampleTB) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}
