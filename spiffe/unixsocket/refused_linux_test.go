package unixsocket_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// A second user whose connections are refused is seen in the log.
func TestRefusedUsersAreNamed(t *testing.T) {
	t.Parallel()
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var log lines
	serve(t, &unixsocket.Server{Listener: inner, Handler: says("hello"), Logger: log.logger(), MaxConnsPerUser: 1})
	for _, from := range []string{"127.0.0.2", "127.0.0.3"} {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		for i := range 3 {
			c := must.Get(d.Dial("tcp", inner.Addr().String()))(t)
			t.Cleanup(func() { _ = c.Close() })
			if i > 0 {
				require.True(t, cut(c, 5*time.Second))
			}
		}
	}
	refused := log.with("closed at once")
	require.Len(t, refused, 2)
	assert.Contains(t, refused[0], "peer=127.0.0.2:")
	assert.Contains(t, refused[1], "peer=127.0.0.3:")
}
