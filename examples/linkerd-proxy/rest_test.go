package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// TestRestOfBody: what an application leaves of a body, as it has answered before, is taken for no further request: the connection
// ends. A client's proxy sends the requests of others on it, too.
func TestRestOfBody(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var hidden atomic.Int64
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hidden" {
			hidden.Add(1)
		}
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusRequestEntityTooLarge)
	}))
	t.Cleanup(app.Close)
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application = app.Listener.Addr().String() })
	begin, rest := strings.Repeat("x", 8<<10), strings.Repeat("GET /hidden HTTP/1.1\r\nHost: app.test\r\n\r\n", 20_000)
	for header, sent := range map[string][2]string{
		fmt.Sprint("Content-Length: ", len(begin)+len(rest)): {begin, rest},
		"Transfer-Encoding: chunked":                         {fmt.Sprintf("%x\r\n%s\r\n", len(begin), begin), fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(rest), rest)},
	} {
		c := must.Get(net.Dial("tcp", at))(t)
		require.NoError(t, c.SetDeadline(time.Now().Add(20*time.Second)))
		must.Get(io.WriteString(c, "POST / HTTP/1.1\r\nHost: app.test\r\n"+header+"\r\n\r\n"+sent[0]))(t)
		go func() { _, _ = io.WriteString(c, sent[1]) }() // net/http may wait for more of it before it answers
		r := bufio.NewReader(c)
		answer := must.Get(http.ReadResponse(r, nil))(t)
		require.NoError(t, answer.Body.Close())
		assert.Equal(t, http.StatusRequestEntityTooLarge, answer.StatusCode, header)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Second))) // it stays open if all of the body was read in time
		_, err := r.ReadByte()
		require.Error(t, err, header)
		_ = c.Close()
	}
	assert.Zero(t, hidden.Load())
}
