package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
)

const (
	web       = meshtest.Web
	voting    = meshtest.Voting
	certifier = meshtest.Certifier
)

// member is a workload of a mesh.
type member struct {
	name string
	*linkerdproxy.Identity
}

// certified returns a member that has a certificate.
func certified(t testing.TB, c *meshtest.Controller, name string, edit ...func(*linkerdproxy.Config)) *member {
	t.Helper()
	return &member{name, c.Certified(t, name, edit...)}
}

// uncertified returns a member that asks for its first certificate until the test ends.
func uncertified(t testing.TB, c *meshtest.Controller, name string) *member {
	t.Helper()
	id := must.Get(linkerdproxy.New(c.Config(t, name)))(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- id.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return &member{name, id}
}

// dial connects to an endpoint.
func (m *member) dial(ctx context.Context, e endpoint) (net.Conn, error) {
	p, err := newProxy(config{name: m.name, identity: m.Identity, application: e.addr})
	if err != nil {
		return nil, err
	}
	return p.dial(ctx, e, &connections{over: context.Background()}, 0)
}

// get returns the status and the body of an answer.
func get(t testing.TB, h http.Handler, path string) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
}

// eventually waits until f is true.
func eventually(t testing.TB, f func() bool, what string) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not come: " + what)
		}
	}
}

// together runs subtests that mostly wait for real time at once: parallel ones would wait for a free processor.
func together(t *testing.T, tests map[string]func(*testing.T)) {
	t.Helper()
	var wg sync.WaitGroup
	for name, f := range tests {
		wg.Go(func() { t.Run(name, f) })
	}
	wg.Wait()
}

// quietLog keeps what is logged.
type quietLog = logtest.Buffer
