package internal_test

import (
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/peerkey"
)

func TestPeerKeyWithRequest(t *testing.T) {
	t.Parallel()
	for remote, want := range map[string]string{
		"192.0.2.1:4711": "192.0.2.1", "[2001:db8::1]:1": "2001:db8::1", "[::ffff:192.0.2.1]:1": "192.0.2.1", "[fe80::1%eth0]:1": "fe80::1%eth0",
		"": "", "@": "", "pipe": "", "192.0.2.1": "", "host:1": "",
	} {
		r := httptest.NewRequest(http.MethodGet, "https://example.org/", nil)
		r.RemoteAddr = remote
		assert.Equal(t, want, peerkey.FromContext(peerkey.WithRequest(r.Context(), r)), remote)
		known := peerkey.NewContext(r.Context(), "uid 7")
		r.TLS = nil
		assert.Empty(t, peerkey.FromContext(peerkey.WithRequest(r.Context(), r)), "the address of a proxy, perhaps")
		assert.Equal(t, "uid 7", peerkey.FromContext(peerkey.WithRequest(known, r)), "the server knows better")
	}
}

type peerConn struct {
	net.Conn
	remote net.Addr
}

func (c peerConn) RemoteAddr() net.Addr { return c.remote }

func TestPeerKeyAddress(t *testing.T) {
	t.Parallel()
	a, ok := peerkey.Address(peerConn{remote: &net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 1}})
	assert.True(t, ok)
	assert.Equal(t, "192.0.2.1", a.String())
	_, ok = peerkey.Address(peerConn{remote: &net.UnixAddr{Name: "@"}})
	assert.False(t, ok)
}
