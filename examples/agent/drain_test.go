package main

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds/istioagent"
)

// A sidecar turns away those that come in, and what the application sends out goes on; a gateway has nothing but those that come in, by all its
// listeners. Neither ends the Envoy at once.
func TestDrainByRole(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]url.Values{
		"sidecar": {"inboundonly": {""}, "graceful": {""}, "skip_exit": {""}},
		"router":  {"graceful": {""}, "skip_exit": {""}},
	} {
		asked := make(chan *http.Request, 2)
		server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r }))
		t.Cleanup(server.Close)
		var cfg istioagent.Config
		cfg.Envoy.AdminPort = server.Listener.Addr().(*net.TCPAddr).Port
		p := must.Get(app(t, cfg, role))(t)
		p.drain(t.Context())
		require.Len(t, asked, 1, role)
		r := <-asked
		assert.Equal(t, http.MethodPost, r.Method, role)
		assert.Equal(t, "/drain_listeners", r.URL.Path, role)
		assert.Equal(t, want, r.URL.Query(), role)
	}
}
