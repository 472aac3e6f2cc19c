package main

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// TestAlert: a proxy that the server refuses says so in its answer, however quick it is to write, and whatever it writes.
func TestAlert(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	server, client := certified(t, s, web), certified(t, s, voting)
	config := server.ServerConfig().Clone()
	config.VerifyConnection = func(tls.ConnectionState) error { return errors.New("not of this mesh") }
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				_ = tls.Server(c, config).HandshakeContext(t.Context())
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		serving.Wait()
	})
	var wg sync.WaitGroup
	for _, http2 := range []bool{false, true} {
		for i := range rounds.Of(20) {
			// Of requests that share a connection of HTTP/2, net/http tries those again that had not begun, and fails for their bodies.
			size := []int{0, 1, 1 << 10}[i%3] // of HTTP/1 one write
			c := browser(t, outbound(t, client, endpoint{addr: l.Addr().String(), identity: web}), http2, nil)
			wg.Go(func() {
				resp, err := c.Post("http://app.test/", "", strings.NewReader(strings.Repeat("x", size)))
				if !assert.NoError(t, err) {
					return
				}
				defer resp.Body.Close()
				said, _ := io.ReadAll(resp.Body)
				assert.Equal(t, http.StatusBadGateway, resp.StatusCode)
				assert.Contains(t, string(said), "remote error: tls: bad certificate", "by HTTP/2: %v, %d bytes", http2, size)
			})
		}
	}
	wg.Wait()
}
