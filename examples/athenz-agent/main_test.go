package main

import (
	"context"
	"flag"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
)

var update = flag.Bool("update", false, "write the table in README.md")

// environ returns a good environment with changes: names with their values, of which "" takes one away.
func environ(p *athenztest.Place, changes ...string) []string {
	return athenztest.Environ(map[string]string{
		"HEALTH_ADDR": "127.0.0.1:0", "PROVIDER_SERVICE": athenztest.Provider().String(), "ZTS_ENDPOINT": p.ZTS.Endpoint().URL, "SIGNING_ENDPOINT": "https://127.0.0.1:1",
		"CERT_FILE": p.Path("node.pem"), "KEY_FILE": p.Path("node.key"), "SERVER_CA_CERT": p.Path("roots.pem"), "SERVICE_CA_CERT": p.Path("roots.pem"),
		"KUBELET_ENDPOINT": "http://127.0.0.1:1", "VOLUMES_DIR": p.Path("made/volumes"), "AGENT_SOCKET": p.Path("made/agent.sock"),
	}, changes...)
}

func TestCommand(t *testing.T) {
	t.Parallel()
	programtest.Command(t, run, "athenz-agent", variables, *update)
}

// Each bad value is told by its variable, before anything is made.
func TestRefuses(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	busy := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer busy.Close()
	p.Write("bad", []byte("TOP-SECRET"))
	for _, c := range []struct{ changes, want []string }{
		{[]string{"PROVIDER_SERVICE=", "ZTS_ENDPOINT=", "KEY_FILE="}, []string{"PROVIDER_SERVICE", "ZTS_ENDPOINT", "KEY_FILE", "not set"}},
		{[]string{"SERVER_CA_CERT=", "SERVICE_CA_CERT=", "SIGNING_ENDPOINT=", "CERT_FILE="}, []string{"SERVER_CA_CERT", "SERVICE_CA_CERT", "SIGNING_ENDPOINT", "CERT_FILE"}},
		{[]string{"PROVIDER_SERVICE=nodots"}, []string{"PROVIDER_SERVICE", "k8s.admin.athenz-callback"}},
		{[]string{"ZTS_ENDPOINT=http://zts:4443"}, []string{"ZTS_ENDPOINT", "https"}},
		{[]string{"ZTS_ENDPOINT=https://zts:4443/zts/v1"}, []string{"ZTS_ENDPOINT", "without a path"}},
		{[]string{"SIGNING_ENDPOINT=signing:4444"}, []string{"SIGNING_ENDPOINT", "https"}},
		{[]string{"KUBELET_ENDPOINT=http://10.0.0.1:10255"}, []string{"KUBELET_ENDPOINT", "http is for addresses of this machine"}},
		{[]string{"KUBELET_ENDPOINT=http://kubelet:10255"}, []string{"KUBELET_ENDPOINT"}},
		{[]string{"CERT_FILE=" + p.Path("none")}, []string{"CERT_FILE", "KEY_FILE", "no such file"}},
		{[]string{"KEY_FILE=" + p.Path("provider.key")}, []string{"CERT_FILE", "key"}},
		{[]string{"KEY_FILE=" + p.Path("bad")}, []string{"CERT_FILE"}},
		{[]string{"SERVER_CA_CERT=" + p.Path("bad"), "SERVICE_CA_CERT=" + p.Path("none")}, []string{"SERVER_CA_CERT", "SERVICE_CA_CERT"}},
		{[]string{"ADMIN_DOMAIN=UP"}, []string{"ADMIN_DOMAIN", "k8s.admin"}},
		{[]string{"SYSTEM_NAMESPACES=a,B"}, []string{"SYSTEM_NAMESPACES"}},
		{[]string{"DNS_SUFFIX=.x"}, []string{"DNS_SUFFIX"}},
		{[]string{"SPIFFE_TRUST_DOMAIN=Up"}, []string{"SPIFFE_TRUST_DOMAIN"}},
		{[]string{"AGENT_SOCKET=agent.sock"}, []string{"AGENT_SOCKET", "slash"}},
		{[]string{"HEALTH_ADDR=127.0.0.1"}, []string{"HEALTH_ADDR", "HOST:PORT"}},
		{[]string{"HEALTH_ADDR=127.0.0.1:70000"}, []string{"HEALTH_ADDR"}},
		{[]string{"HEALTH_ADDR=" + busy.Addr().String()}, []string{"HEALTH_ADDR", "in use"}},
		{[]string{"LOG_LEVEL=loud"}, []string{"LOG_LEVEL", "debug, info, warn, error"}},
		{[]string{"LOG_LEVEL=loud", "HEALTH_ADDR=x", "DNS_SUFFIX=.x"}, []string{"LOG_LEVEL", "HEALTH_ADDR", "DNS_SUFFIX"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // for a program that does not refuse it
		err := run(ctx, nil, environ(p, c.changes...), io.Discard, io.Discard)
		cancel()
		require.Error(t, err, c.changes)
		for _, want := range c.want {
			require.ErrorContains(t, err, want, c.changes)
		}
		assert.NotContains(t, err.Error(), "TOP-SECRET", c.changes)
		assert.NoDirExists(t, p.Path("made"), c.changes)
	}
}

func TestAgent(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	at := programtest.Serve(t, run, environ(p, "SPIFFE_TRUST_DOMAIN=athenz.io"), io.Discard, 1)
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", p.Path("made/agent.sock"))
	}, DisableKeepAlives: true}}
	var answer *http.Response
	require.Eventually(t, func() (ok bool) {
		var err error
		answer, err = client.Post("http://agent/v1/init/none", "application/json", nil)
		return err == nil
	}, time.Minute, time.Millisecond)
	require.NoError(t, answer.Body.Close())
	assert.Equal(t, http.StatusBadRequest, answer.StatusCode)
	_, text := programtest.Get(t, at, "/metrics")
	metricstest.Require(t, text)
	assert.Contains(t, text, `svidkit_athenz_agent_requests_total{part="agent",code="400"} 1`)
	code, _ := programtest.Get(t, at, "/ready")
	assert.Equal(t, http.StatusOK, code)
	require.NoError(t, os.Remove(p.Path("node.pem")))
	code, text = programtest.Get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "CERT_FILE")

	// Another agent on the same socket.
	err := run(t.Context(), nil, environ(p, "CERT_FILE="+p.Path("provider.pem"), "KEY_FILE="+p.Path("provider.key")), io.Discard, io.Discard)
	require.ErrorContains(t, err, "AGENT_SOCKET")
}
