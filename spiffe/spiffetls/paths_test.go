package spiffetls_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// TestPaths: each path has its policy, whatever way a client writes it. The handler behind names the pattern that has run.
func TestPaths(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ops, web := ca.SVID("/ops"), ca.SVID("/web")
	live := new(spiffe.LivePolicy)
	allow, err := spiffetls.Paths(map[string]spiffe.PolicySource{
		"/":           spiffe.AllowIDs(web.ID(), ops.ID()),
		"/admin/":     spiffe.AllowIDs(ops.ID()),
		"DELETE /x":   spiffe.AllowIDs(ops.ID()),
		"/live":       live,
		"/admin/any/": spiffe.AllowAnyPeer(),
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	for _, pattern := range []string{"/", "/admin/", "/admin/any/", "/live"} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, pattern) })
	}
	h, err := spiffetls.RequirePeer(allow, mux)
	require.NoError(t, err)
	var failures spiffetls.FailureLog
	s := &http.Server{Handler: h}
	require.NoError(t, spiffetls.ConfigureServer(s, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), &spiffetls.Options{Failures: &failures}))
	url := serve(t, s, nil)
	for _, opts := range []*spiffetls.Options{nil, http1} {
		webClient, opsClient := clientOf(t, ca, "/web", opts), clientOf(t, ca, "/ops", opts)
		request := func(c *http.Client, method, path, want string) {
			t.Helper()
			req, err := http.NewRequest(method, url+path, nil)
			require.NoError(t, err)
			resp, err := c.Do(req)
			require.NoError(t, err)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			if want == "" {
				assert.Equal(t, http.StatusForbidden, resp.StatusCode, path)
				return
			}
			assert.Equal(t, want, string(body), path)
		}
		request(webClient, "GET", "/", "/")
		request(webClient, "GET", "/x/y", "/")
		request(webClient, "DELETE", "/x", "")
		request(opsClient, "DELETE", "/x", "/")
		request(webClient, "GET", "/admin/x", "")
		request(webClient, "GET", "/admin/any/x", "/admin/any/")
		request(opsClient, "GET", "/admin/x", "/admin/")
		request(opsClient, "GET", "/admin", "") // which a ServeMux redirects
		for _, path := range []string{"//admin/x", "/./admin/x", "/x/../admin/x", "/%61dmin/x", "/x/%2e%2e/admin/x", "/x%2f..%2fadmin/x", "/admin%2fx", "/admin/any/../x"} {
			request(webClient, "GET", path, "")
		}
		request(webClient, "GET", "/live", "")
		require.NoError(t, live.Set(spiffe.AllowIDs(web.ID())))
		request(webClient, "GET", "/live", "/live")
		require.NoError(t, live.Set(spiffe.AllowIDs(ca.SVID("/other").ID())))
	}
	kept, _ := failures.Failures()
	require.NotEmpty(t, kept)
	for _, f := range kept {
		assert.Equal(t, "request", f.Stage)
		assert.Regexp(t, `not allowed by policy, which allows |no policy is for the path "`, f.Reason)
	}

	// The target of a request to a proxy, and what no client of net/http sends.
	config, err := spiffetls.ClientConfig(web, ca.Bundle(), spiffe.AllowIDs(ca.SVID("/db").ID()), http1)
	require.NoError(t, err)
	for _, line := range []string{"GET http://web.test/admin/x", "GET http://web.test//admin/x", "OPTIONS /admin/x", "get /admin/x", "CONNECT /admin/x"} {
		c, err := tls.Dial("tcp", url[len("https://"):], config)
		require.NoError(t, err)
		_, err = fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: web.test\r\n\r\n", line)
		require.NoError(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(net.Conn(c)), nil)
		require.NoError(t, err)
		assert.Equal(t, http.StatusForbidden, resp.StatusCode, line)
		require.NoError(t, c.Close())
	}
}

func TestPathsMistakes(t *testing.T) {
	t.Parallel()
	some := spiffe.AllowAnyPeer()
	fine, err := spiffetls.Paths(map[string]spiffe.PolicySource{"/": some})
	require.NoError(t, err)
	for _, c := range []struct {
		allow map[string]spiffe.PolicySource
		want  string
	}{
		{nil, "there is no path"},
		{map[string]spiffe.PolicySource{"admin": some}, "http.ServeMux does not take it"},
		{map[string]spiffe.PolicySource{"/": nil}, `"/": no policy`},
		{map[string]spiffe.PolicySource{"/": spiffe.Policy{}}, "the policy is zero"},
		{map[string]spiffe.PolicySource{"/": spiffetls.Hosts{"a": some}}, "Hosts and HostsFunc are for clients"},
		{map[string]spiffe.PolicySource{"/": fine}, "is for spiffetls.RequirePeer alone"},
	} {
		allow, err := spiffetls.Paths(c.allow)
		assert.Nil(t, allow)
		assert.ErrorContains(t, err, "spiffetls: paths: ")
		assert.ErrorContains(t, err, c.want)
	}
	assert.True(t, fine.Policy().IsZero())

	ca := spiffetest.NewCA(t, "example.org")
	_, err = spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), fine, nil)
	require.ErrorContains(t, err, "is for spiffetls.RequirePeer alone")
	_, err = spiffetls.ClientConfig(ca.SVID("/db"), ca.Bundle(), fine, nil)
	require.ErrorContains(t, err, "is for spiffetls.RequirePeer alone")
	_, err = spiffetls.Transport(ca.SVID("/db"), ca.Bundle(), spiffetls.Hosts{"db.test": fine}, nil)
	require.ErrorContains(t, err, "is for spiffetls.RequirePeer alone")
}
