package test_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/faulty"
	"github.com/svidkit/svidkit/internal/test/memconn"
)

func say(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, text)
		if r.URL.Path == "/stream" {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	})
}

// get asks for a path, and returns what came or "error".
func get(ctx context.Context, c *http.Client, url string) string {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err.Error()
	}
	resp, err := c.Do(r)
	if err != nil {
		return "error"
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return string(b) + " error"
	}
	return string(b)
}

func TestFaulty(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := memconn.Listen()
		var opened atomic.Int64
		s := faulty.Start(t, faulty.Config{
			Listener: l, Handler: say("good"), Deny: say("no"), Garble: say("%&"),
			ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
				opened.Add(1)
				return ctx
			},
		})
		transport := &http.Transport{Protocols: new(http.Protocols), DialContext: l.DialContext}
		transport.Protocols.SetUnencryptedHTTP2(true)
		defer transport.CloseIdleConnections()
		c := &http.Client{Transport: transport}

		assert.Equal(t, faulty.Good, faulty.PositionOf(s))
		assert.Equal(t, "good", get(t.Context(), c, "http://x/"))
		s.Deny()
		assert.Equal(t, faulty.Deny, faulty.PositionOf(s))
		assert.Equal(t, "no", get(t.Context(), c, "http://x/"))
		s.Garble()
		synctest.Wait() // for the client to see that its connection is cut
		assert.Equal(t, "%&", get(t.Context(), c, "http://x/"))
		assert.Equal(t, 3, s.Requests())

		// A request that hangs is answered when the dial moves, unless its client has gone.
		s.Hang()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		assert.Equal(t, "error", get(ctx, c, "http://x/"))
		assert.Equal(t, time.Minute, time.Since(start))
		answer := make(chan string)
		go func() { answer <- get(t.Context(), c, "http://x/") }()
		time.Sleep(time.Hour)
		s.Mend()
		assert.Equal(t, "good", <-answer)

		// Drop and Garble cut what is open.
		for _, turn := range []func(){s.Drop, s.Garble} {
			s.Mend()
			go func() { answer <- get(t.Context(), c, "http://x/stream") }()
			synctest.Wait()
			turn()
			assert.Equal(t, "good error", <-answer)
		}
		s.Drop()
		before := opened.Load()
		assert.Equal(t, "error", get(t.Context(), c, "http://x/"))
		assert.Greater(t, opened.Load(), before, "a connection that comes is cut")
		s.Mend()
		assert.Equal(t, "good", get(t.Context(), c, "http://x/"))
	})
}
