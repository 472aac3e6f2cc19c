package sds_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

func run(t testing.TB, s *unixsocket.Server) (stop func() error) {
	t.Helper()
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel(errStop)
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

var errStop = errors.New("stop")

// Streams end with a reason when the server stops; requests under way get time, but not for ever.
func TestDrain(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	_, src, _ := withPair(t, "default")
	h := handler(t, src, nil)
	entered, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	mux := http.NewServeMux()
	mux.Handle("/", h)
	mux.HandleFunc("/short", func(w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		<-r.Context().Done()
		_, _ = io.WriteString(w, "done")
	})
	mux.HandleFunc("/hangs", func(http.ResponseWriter, *http.Request) {
		entered <- struct{}{}
		<-release
	})
	path := filepath.Join(socketDir(t), "s")
	stop := run(t, &unixsocket.Server{Path: path, Handler: mux})
	s := asking(t, dial(t, path), "default")
	s.recv()
	get := func(path2 string) chan string {
		c := make(chan string, 1)
		client := http1(t, path)
		go func() {
			resp, err := client.Get("http://localhost" + path2)
			if err != nil {
				c <- "cut"
				return
			}
			b, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			c <- string(b)
		}()
		<-entered
		return c
	}
	short, hangs := get("/short"), get("/hangs")
	start := time.Now()
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	s.ends(codeUnavailable)
	assert.Equal(t, "done", <-short)
	assert.Equal(t, "cut", <-hangs)
	assert.NoError(t, <-stopped)
	assert.Less(t, time.Since(start), 30*time.Second)
	assert.GreaterOrEqual(t, time.Since(start), 2*time.Second)
}
