package main

import (
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// An application that answers HTTP/2 with HTTP/1 is not asked by HTTP/2 again for a second, and by HTTP/1 all the time.
func TestApplicationOfHTTP1(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var opened atomic.Int64
	app := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	app.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	app.Start()
	t.Cleanup(app.Close)
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application = app.Listener.Addr().String() })
	ask := func(http2 bool) int {
		resp := must.Get(browser(t, at, http2, nil).Get("http://app.test/"))(t)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	assert.Equal(t, http.StatusBadGateway, ask(true))
	first := opened.Load()
	assert.Positive(t, first)
	for begun := time.Now(); time.Since(begun) < 500*time.Millisecond; {
		assert.Equal(t, http.StatusBadGateway, ask(true))
	}
	assert.LessOrEqual(t, opened.Load(), first+1, "a machine that stands still for a second has another one")
	assert.Equal(t, http.StatusOK, ask(false))
	time.Sleep(1100 * time.Millisecond)
	before := opened.Load()
	assert.Equal(t, http.StatusBadGateway, ask(true))
	assert.Greater(t, opened.Load(), before, "it is asked again")
}
