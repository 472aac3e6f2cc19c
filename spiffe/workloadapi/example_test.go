package workloadapi_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// A workload takes its identity from the endpoint that its operator names.
func Example() {
	address, stop := agentForExample()
	defer stop()

	src, err := workloadapi.Start(context.Background(), workloadapi.Config{Address: address}) // os.Getenv(workloadapi.SocketEnv)
	if err != nil {
		log.Fatal(err) // no server answers, or the workload is not registered
	}
	defer src.Close()

	svid, err := src.SVID()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("I am", svid.ID())
	for _, name := range []string{"example.org", "other.test", "unknown.test"} {
		_, err := src.Bundle(spiffe.MustParseTrustDomain(name))
		fmt.Println(name, "is known:", err == nil)
	}
	// Output:
	// I am spiffe://example.org/web
	// example.org is known: true
	// other.test is known: true
	// unknown.test is known: false
}

// A server that takes its identity from the agent of its machine, and admits the members of its trust domain.
func Example_server() {
	serve := func(ctx context.Context, td spiffe.TrustDomain, handler http.Handler) error {
		me, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
		if err != nil {
			return err
		}
		defer me.Close()
		srv := &http.Server{Addr: ":8443", Handler: handler}
		endpoint, err := spiffetls.New(spiffetls.Config{Self: me, Peers: me, Allow: spiffe.AllowMembersOf(td)})
		if err != nil {
			return err
		}
		if err := endpoint.ConfigureServer(srv); err != nil {
			return err
		}
		return srv.ListenAndServeTLS("", "")
	}

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := serve(ctx, spiffe.MustParseTrustDomain("example.org"), http.NotFoundHandler()); err != nil {
		log.Print(err)
	}
}

// A common mistake in an address, and what to write instead.
func ExampleNew() {
	_, err := workloadapi.New(workloadapi.Config{Address: "unix://run/spire/api.sock"})
	fmt.Println(err)
	// Output:
	// workloadapi: address "unix://run/spire/api.sock": "run" is in the place of a host, because a path begins with a slash of its own; write unix:///run/spire/api.sock
}

// What a program sees that is not registered.
func ExampleSource_Ready() {
	ca := spiffetest.NewCA(workloadtest.ExampleTB{}, "example.org")
	handler, err := workloadserver.NewHandler(fixed{spiffe.NewSnapshot(ca.SVID("/agent"), ca.Bundles())}, &workloadserver.Options{
		Identities: func(context.Context) ([]workloadserver.Identity, error) { return nil, nil },
	})
	if err != nil {
		log.Fatal(err)
	}
	defer handler.Close()
	address, stop := workloadtest.ServeOnSocket(handler, nil)
	defer stop()

	src, err := workloadapi.New(workloadapi.Config{Address: address})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- src.Run(ctx) }()
	for src.Status().X509.Failures == 0 { // only here, so that the example is quick
		time.Sleep(time.Millisecond)
	}
	patience, done := context.WithTimeout(ctx, 10*time.Millisecond)
	defer done()
	err = src.Ready(patience)
	cancel()
	<-ended
	fmt.Println(errors.Is(err, spiffe.ErrNotReady), errors.Is(err, workloadapi.ErrDenied))
	e, _ := errors.AsType[*workloadapi.Error](err)
	fmt.Println(e.Err)
	// Output:
	// true true
	// no identity for this caller: "workloadserver: there is no identity for this caller; register the workload, or try again later"
}

// agentForExample serves one identity at an address.
func agentForExample() (address string, stop func()) {
	ca, other := spiffetest.NewCA(workloadtest.ExampleTB{}, "example.org"), spiffetest.NewCA(workloadtest.ExampleTB{}, "other.test")
	handler, err := workloadserver.NewHandler(fixed{spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles().With(other.Bundle()))}, nil)
	if err != nil {
		log.Fatal(err)
	}
	return workloadtest.ServeOnSocket(handler, nil)
}

// fixed is a Provider that always has the same snapshot.
type fixed struct{ snap *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixed) Changed() <-chan struct{}            { return nil }
