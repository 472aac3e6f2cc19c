package internal_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/loopback"
)

func TestLoopbackHost(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]bool{
		"localhost": true, "LOCALHOST:80": true, "127.0.0.1": true, "127.0.0.1:15021": true, "[::1]": true, "[::1]:80": true, "10.0.0.7:1": true, "::1": true,
		"": false, "localhost.": false, "localhost.evil.test": false, "evil.test": false, "evil.test:80": false, "127.0.0.1.evil.test": false,
		"127.0.0.1:80:90": false, "0x7f000001": false, "2130706433": false, "127.1": false, "[::1": true, "user@localhost": false, "localhost/": false,
	} {
		assert.Equal(t, want, loopback.Host(host), "%q", host)
	}
}

func TestLoopbackReached(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		at   net.Addr
		want bool
	}{
		{&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, true},
		{&net.TCPAddr{IP: net.IPv4(127, 9, 9, 9)}, true},
		{&net.TCPAddr{IP: net.IPv6loopback}, true},
		{&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1)}, false},
		{&net.TCPAddr{}, false},
		{&net.UnixAddr{Name: "/run/s", Net: "unix"}, false},
		{nil, false},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		if c.at != nil {
			r = r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, c.at))
		}
		assert.Equal(t, c.want, loopback.Reached(r), "%v", c.at)
	}
}

func TestLoopbackOtherSite(t *testing.T) {
	t.Parallel()
	for site, want := range map[string]bool{"": false, "none": false, "same-origin": false, "same-site": true, "cross-site": true, "None": true} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		if site != "" {
			r.Header.Set("Sec-Fetch-Site", site)
		}
		assert.Equal(t, want, loopback.OtherSite(r), "%q", site)
	}
	for origin, want := range map[string]bool{
		"": false, "http://localhost:15020": false, "http://localhost": true, "http://localhost:8080": true, "https://evil.test": true,
		"http://evil.test:15020": true, "null": true, "localhost:15020": true, "http://%zz": true,
	} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Host = "localhost:15020"
		if origin != "" {
			r.Header.Set("Origin", origin)
		}
		assert.Equal(t, want, loopback.OtherSite(r), "%q", origin)
		r.Header.Set("Sec-Fetch-Site", "same-origin") // behind a proxy with another name
		assert.False(t, loopback.OtherSite(r), "%q", origin)
	}
}

func TestLoopbackLocal(t *testing.T) {
	t.Parallel()
	here, outside := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 15020}, &net.TCPAddr{IP: net.IPv4(10, 0, 0, 7), Port: 15020}
	for name, c := range map[string]struct {
		remote, host, origin, site string
		at                         net.Addr
		says                       string // nothing: it is let through
	}{
		"program":                   {remote: "127.0.0.1:999", host: "localhost:15020", at: here},
		"program by the address":    {remote: "127.0.0.1:999", host: "127.0.0.1:15020", at: here},
		"program, IPv6":             {remote: "[::1]:999", host: "[::1]:15020", at: &net.TCPAddr{IP: net.IPv6loopback}},
		"Unix socket":               {remote: "@", host: "localhost", at: &net.UnixAddr{Name: "/run/s", Net: "unix"}},
		"page of this port":         {remote: "127.0.0.1:999", host: "localhost:15020", origin: "http://localhost:15020", at: here},
		"another host":              {remote: "10.0.0.9:999", host: "10.0.0.7:15020", at: outside, says: "clients on the same host"},
		"another host, as loopback": {remote: "10.0.0.9:999", host: "localhost", at: here, says: "clients on the same host"},
		"no address":                {remote: "web.test:999", host: "localhost", at: here, says: "clients on the same host"},
		"not over loopback":         {remote: "127.0.0.1:999", host: "localhost", at: outside, says: "over loopback only"},
		"name that leads here":      {remote: "127.0.0.1:999", host: "evil.test", at: here, says: "Host"},
		"the same, Unix socket":     {remote: "@", host: "evil.test", says: "Host"},
		"page of another site":      {remote: "127.0.0.1:999", host: "localhost:15020", site: "cross-site", at: here, says: "other sites"},
		"the same, older browser":   {remote: "127.0.0.1:999", host: "localhost:15020", origin: "https://evil.test", at: here, says: "other sites"},
	} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr, r.Host = c.remote, c.host
		for header, value := range map[string]string{"Origin": c.origin, "Sec-Fetch-Site": c.site} {
			if value != "" {
				r.Header.Set(header, value)
			}
		}
		if c.at != nil {
			r = r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, c.at))
		}
		if err := loopback.Local(r); c.says == "" {
			assert.NoError(t, err, name)
		} else {
			assert.ErrorContains(t, err, c.says, name)
		}
	}
}
