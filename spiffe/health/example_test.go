package health_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"testing"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// A service with an identity from an agent, and its health on a second port, which answers from the start: before there
// is an identity, too.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	source, err := workloadapi.New(workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
	if err != nil {
		log.Fatal(err)
	}
	defer source.Close()
	governor := &spiffetls.Governor{}
	var handshakes spiffetls.Metrics

	h, err := health.New(
		health.Part{Name: "identity", Source: source},
		health.Part{Name: "tls", Source: &handshakes},
		health.Part{Name: "connections", Source: governor},
	)
	if err != nil {
		log.Fatal(err)
	}
	go func() { // /ready, /live and /metrics
		log.Fatal((&http.Server{Addr: "127.0.0.1:9090", Handler: h, ReadHeaderTimeout: 10 * time.Second}).ListenAndServe())
	}()
	go func() {
		if err := source.Run(ctx); err != nil {
			log.Fatal(err)
		}
	}()
	go governor.Run(ctx)

	server := &http.Server{Addr: ":8443", ReadHeaderTimeout: 10 * time.Second}
	web := spiffe.MustParseID("spiffe://example.org/web")
	endpoint, err := spiffetls.New(spiffetls.Config{
		Self: source, Peers: source, Allow: spiffe.AllowIDs(web), Metrics: &handshakes, Governor: governor,
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		log.Fatal(err)
	}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	if err := server.ListenAndServeTLS("", ""); !errors.Is(err, http.ErrServerClosed) {
		log.Fatal(err)
	}
}

// t is what a test function is given; an example has none, and these do not fail.
var t testing.TB = exampleTB{}

type exampleTB struct{ testing.TB }

func (exampleTB) Helper() {}

// What an orchestrator sees of a service whose agent does not know it.
func ExampleHandler() {
	ca := spiffetest.NewCA(t, "example.org")
	source := ca.Source("/web")
	h, err := health.New(health.Part{Name: "identity", Source: health.FromSources(source, source)})
	if err != nil {
		fmt.Println(err)
		return
	}
	probe := func() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/ready", nil))
		fmt.Print(w.Code, " ", w.Body)
	}
	probe()
	source.Fail(errors.New("the workload is not registered"))
	probe()
	// Output:
	// 200 ok
	// 503 identity: the workload is not registered
}
