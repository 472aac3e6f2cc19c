//go:build unix

package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// TestDrain: after SIGTERM a client that looks at /ready each 20 ms, and stops when that says 503, has not one request that
// fails. Then the program ends with 0, and connections are refused.
func TestDrain(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())(t)
	err := withAgent(t.Context(), func(ctx context.Context, socket string) error {
		cmd := exec.CommandContext(ctx, self, "-socket", socket, "-health-addr", "127.0.0.1:0", "-requests", "0", "-interval", "1h", "-drain", "1s")
		cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + t.TempDir()}
		cmd.Stderr = os.Stderr
		out := must.Get(cmd.StdoutPipe())(t)
		require.NoError(t, cmd.Start())
		var url, healthURL string
		lines := bufio.NewScanner(out)
		for lines.Scan() && !strings.HasPrefix(lines.Text(), "request 1:") {
			if text, ok := strings.CutPrefix(lines.Text(), "serving: "); ok {
				url = text
			}
			if text, ok := strings.CutPrefix(lines.Text(), "health: "); ok {
				healthURL, _, _ = strings.Cut(text, ",")
			}
		}
		require.NotEmpty(t, url)
		src := must.Get(workloadapi.Start(ctx, workloadapi.Config{Address: socket}))(t)
		defer src.Close()
		endpoint, err := spiffetls.New(spiffetls.Config{Self: src, Peers: src, Allow: spiffe.AllowMembersOf(spiffe.MustParseID("spiffe://example.org/x").TrustDomain())})
		require.NoError(t, err)
		transport := must.Get(endpoint.Transport())(t)
		transport.DisableKeepAlives = true // a new connection each time is the hard case
		client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
		ready := func() (int, string) {
			resp := must.Get(http.Get(healthURL))(t)
			defer resp.Body.Close()
			body := must.Get(io.ReadAll(resp.Body))(t)
			return resp.StatusCode, string(body)
		}
		code, _ := ready()
		require.Equal(t, http.StatusOK, code)
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		requests, asked := 0, time.Now()
		for {
			resp := must.Get(client.Get(url))(t, "request %d", requests)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, http.StatusOK, resp.StatusCode)
			requests++
			if time.Since(asked) < 20*time.Millisecond {
				continue
			}
			asked = time.Now()
			if code, text := ready(); code == http.StatusServiceUnavailable {
				assert.Equal(t, "service: draining\n", text)
				break
			}
		}
		resp, err := client.Get(url) // of a client that has not asked /ready yet
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		rest := must.Get(io.ReadAll(out))(t)
		require.NoError(t, cmd.Wait(), "%s", rest)
		require.ErrorIs(t, must.Err(client.Get(url)), syscall.ECONNREFUSED)
		return nil
	})
	require.NoError(t, err)
}
