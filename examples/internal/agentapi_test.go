package internal_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

type object = map[string]any

func mustKey(t testing.TB) []byte {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return must.Get(pki.MarshalPrivateKeyPEM(key))(t)
}

func TestAgentClient(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-1", "ATH-7.1-2", "ATH-8-10")
	for _, args := range [][2]string{{"", "/x"}, {"/x", ""}} {
		require.ErrorContains(t, must.Err(agentapi.NewClient(args[0], args[1])), "is empty")
	}
	dir := t.TempDir()
	socket, id := filepath.Join(dir, "agent.sock"), filepath.Join(dir, "id")
	c := must.Get(agentapi.NewClient(socket, id))(t)
	require.ErrorIs(t, must.Err(c.Init(t.Context())), os.ErrNotExist)
	require.NoError(t, os.WriteFile(id, []byte("x"), 0o600))
	require.ErrorContains(t, must.Err(c.Init(t.Context())), "43 letters")
	handle := agentapi.Handle(make([]byte, 32), "/x")
	require.NoError(t, os.WriteFile(id, []byte(handle+"\n"), 0o600))
	_, err := c.Init(t.Context())
	require.ErrorContains(t, err, "connect:")
	assert.NotContains(t, err.Error(), handle)

	var answer atomic.Value
	l := must.Get(net.Listen("unix", socket))(t)
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := new(bytes.Buffer)
		_, _ = body.ReadFrom(r.Body)
		text := answer.Load().(string)
		if text == "echo" {
			w.WriteHeader(http.StatusInternalServerError)
			text = r.URL.Path + body.String()
		}
		_, _ = w.Write([]byte(text))
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() { _ = server.Close(); wg.Wait() })
	if os.Geteuid() != 0 { // whom no mode stops
		require.NoError(t, os.Chmod(socket, 0))
		require.ErrorContains(t, must.Err(c.Init(t.Context())), "this user may not connect to the agent")
		require.NoError(t, os.Chmod(socket, 0o700))
	}
	cluster := cafake.NewZTS(t, spiffetest.NewCA(t, "athenz.example"), "/ns/a/sa/b")
	good := cluster.Credential("a.b")
	certs, key := must.Get2(good.MarshalPEM())(t)
	body := func(edit func(object)) string {
		o := object{"ntoken": "v=S1;s=secret", "keyPEM": key, "certPEM": certs, "caCertPEM": certs}
		edit(o)
		return string(must.Get(json.Marshal(o))(t))
	}
	answer.Store(body(func(object) {}))
	i := must.Get(c.Init(t.Context()))(t)
	assert.True(t, i.Credential.Leaf().Equal(good.Leaf()))
	assert.Equal(t, "v=S1;s=secret", i.Token())
	assert.NotContains(t, fmt.Sprintf("%v %+v %#v", i, i, i), "secret")
	for name, text := range map[string]string{
		"nothing": "", "noise": "x", "a list": "[]", "no fields": "{}", "another's key": body(func(o object) { o["keyPEM"] = mustKey(t) }),
		"no key": body(func(o object) { delete(o, "keyPEM") }), "not base64": body(func(o object) { o["certPEM"] = "?" }), "roots": body(func(o object) { o["caCertPEM"] = key }),
		"2 MiB": body(func(o object) { o["x"] = strings.Repeat("x", 2<<20) }), "echo": "echo",
	} {
		answer.Store(text)
		require.Error(t, must.Err(c.Init(t.Context())), name)
		_, err = c.Refresh(t.Context(), good)
		require.Error(t, err, name)
		assert.NotContains(t, err.Error(), string(key)[40:80], name)
		assert.NotContains(t, err.Error(), base64.StdEncoding.EncodeToString(key)[40:80], name)
		assert.NotContains(t, err.Error(), handle, name)
	}
}
