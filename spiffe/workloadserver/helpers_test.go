package workloadserver_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

type (
	domain     = workloadtest.Domain
	syncBuffer = workloadtest.Log
)

const (
	service = workloadtest.Service
	patient = workloadtest.Patient
)

// inMemory serves h in memory, so that a synctest bubble stops while all wait, and returns a client.
func inMemory(t testing.TB, h http.Handler) *workloadapi.Client {
	t.Helper()
	return must.Get(workloadapi.NewClient("", http2(t, h)))(t)
}

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// dial returns a client of the server at address.
func dial(t testing.TB, address string) *workloadapi.Client {
	t.Helper()
	c := must.Get(workloadapi.NewClient(address, nil))(t)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// listen runs a server until the test ends, on a socket of its own unless it has a Path or a Listener, and
// returns its address.
func listen(t testing.TB, s *unixsocket.Server) (address string) {
	t.Helper()
	if s.Path == "" && s.Listener == nil {
		s.Path = filepath.Join(workloadtest.SocketDir(t), "s")
	}
	start(t, s)
	if s.Listener != nil {
		return "tcp://" + s.Listener.Addr().String()
	}
	return "unix://" + s.Path
}

func start(t testing.TB, s *unixsocket.Server) (stop func() error) {
	t.Helper()
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel(workloadtest.ErrStop)
		select {
		case err := <-done:
			return err
		case <-time.After(patient):
			return errors.New("the server did not stop")
		}
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

type rpc = workloadtest.RPC

func post(t testing.TB, c *http.Client, path string, body []byte, headers ...string) *rpc {
	t.Helper()
	return postContext(t.Context(), t, c, path, body, headers...)
}

func postContext(ctx context.Context, t testing.TB, c *http.Client, path string, body []byte, headers ...string) *rpc {
	t.Helper()
	return workloadtest.Post(ctx, t, c, "http://localhost"+path, body, headers...)
}

const header = "Workload.spiffe.io" // as net/http spells it inside

// frame is a message with its prefix.
func frame(m proto.Message) []byte { return workloadtest.Frame(m) }

// http2 returns a bare client of a handler in memory.
func http2(t testing.TB, h http.Handler) *http.Client {
	t.Helper()
	l := memconn.Listen()
	stop := workloadtest.ServeOn(l, h, unixsocket.ConnContext)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &protocols, DialContext: l.DialContext}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		stop()
	})
	return &http.Client{Transport: transport}
}

// updatesOf returns how many good responses a stream of s has brought: x509 or jwt.
func updatesOf(s *workloadapi.Source, stream string) int { return sample(s, "updates_total", stream) }

// isOpen reports whether the X.509 stream of s is open and has brought something.
func isOpen(s *workloadapi.Source) bool { return sample(s, "stream_open", "x509") == 1 }

// sample returns a metric of a stream of s.
func sample(s *workloadapi.Source, name, stream string) (n int) {
	var page strings.Builder
	if err := s.Report().Metrics(&page); err != nil {
		panic(err)
	}
	_, after, _ := strings.Cut(page.String(), fmt.Sprintf("\nsvidkit_workloadapi_%s{stream=%q} ", name, stream))
	if _, err := fmt.Sscan(after, &n); err != nil {
		panic(err)
	}
	return n
}

// source returns a source that runs.
func source(t testing.TB, cfg workloadapi.Config) *workloadapi.Source {
	t.Helper()
	s := must.Get(workloadapi.New(cfg))(t)
	workloadtest.Run(t, s)
	return s
}

// readySource returns a source that runs and has what it is to have.
func readySource(t testing.TB, cfg workloadapi.Config) *workloadapi.Source {
	t.Helper()
	s := source(t, cfg)
	require.NoError(t, s.Ready(t.Context()))
	return s
}
