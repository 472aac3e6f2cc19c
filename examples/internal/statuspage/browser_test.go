package statuspage_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// browser returns the path of a Chromium.
func browser(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("CHROMIUM_PATH"); path != "" {
		return path
	}
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skip("there is no Chromium in CHROMIUM_PATH or PATH; Debian has it in the package chromium")
	return ""
}

// tab is a page in a headless Chromium, over the DevTools protocol.
type tab struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
	id   int
}

// open starts a Chromium that ends with the test.
func open(t *testing.T, address string) *tab {
	t.Helper()
	dir := t.TempDir()
	log := must.Get(os.Create(filepath.Join(dir, "log")))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, browser(t), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0",
		"--remote-debugging-address=127.0.0.1", "--user-data-dir="+filepath.Join(dir, "profile"), "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+dir)
	cmd.Stdout, cmd.Stderr = log, log
	prepare(cmd)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
		_ = log.Close()
	})

	var port string
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(filepath.Join(dir, "profile", "DevToolsActivePort"))
		port, _, _ = strings.Cut(string(b), "\n")
		return err == nil && port != ""
	}, time.Minute, 10*time.Millisecond, "Chromium does not start")
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPut, "http://127.0.0.1:"+port+"/json/new?about:blank", nil))(t)
	resp := must.Get(http.DefaultClient.Do(r))(t)
	defer resp.Body.Close()
	var target struct {
		URL string `json:"webSocketDebuggerUrl"`
	}
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&target))
	tb := dial(t, target.URL)
	tb.call("Page.enable", nil)
	tb.call("Runtime.enable", nil)
	tb.call("Page.navigate", map[string]any{"url": address})
	tb.until("document.readyState === 'complete' && location.href !== 'about:blank'")
	return tb
}

// dial opens a WebSocket.
func dial(t *testing.T, address string) *tab {
	t.Helper()
	u := must.Get(url.Parse(address))(t)
	conn := must.Get(net.Dial("tcp", u.Host))(t)
	t.Cleanup(func() { _ = conn.Close() })
	key := make([]byte, 16)
	_, _ = rand.Read(key)
	_, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n",
		u.Path, u.Host, base64.StdEncoding.EncodeToString(key))
	require.NoError(t, err)
	in := bufio.NewReader(conn)
	require.Equal(t, http.StatusSwitchingProtocols, must.Get(http.ReadResponse(in, nil))(t).StatusCode)
	return &tab{t: t, conn: conn, in: in}
}

// call calls a method and returns its result.
func (b *tab) call(method string, params any) (result json.RawMessage) {
	b.t.Helper()
	b.id++
	message, err := json.Marshal(map[string]any{"id": b.id, "method": method, "params": params})
	require.NoError(b.t, err)
	require.NoError(b.t, b.conn.SetDeadline(time.Now().Add(time.Minute)))
	frame := []byte{0x81, 0x80 | 127}
	frame = binary.BigEndian.AppendUint64(frame, uint64(len(message)))
	frame = append(append(frame, 0, 0, 0, 0), message...) // masked with zeros
	require.NoError(b.t, must.Err(b.conn.Write(frame)))
	for {
		message := must.Get(b.receive())(b.t, method)
		var answer struct {
			ID     int
			Result json.RawMessage
			Error  any
		}
		require.NoError(b.t, json.Unmarshal(message, &answer))
		if answer.ID == b.id {
			require.Nil(b.t, answer.Error, method)
			return answer.Result
		}
	}
}

// receive returns the next message.
func (b *tab) receive() ([]byte, error) {
	var message []byte
	for {
		var head [2]byte
		if _, err := io.ReadFull(b.in, head[:]); err != nil {
			return nil, err
		}
		n := uint64(head[1])
		switch n {
		case 126, 127:
			size := make([]byte, 2+6*(n-126))
			if _, err := io.ReadFull(b.in, size); err != nil {
				return nil, err
			}
			n = binary.BigEndian.Uint64(append(make([]byte, 8-len(size)), size...))
		}
		part := make([]byte, n)
		if _, err := io.ReadFull(b.in, part); err != nil {
			return nil, err
		}
		if op := head[0] & 0xf; op > 2 {
			if op == 8 {
				return nil, errors.New("the WebSocket was closed")
			}
			continue
		}
		if message = append(message, part...); head[0]&0x80 != 0 {
			return message, nil
		}
	}
}

// eval returns the value of an expression of JavaScript.
func (b *tab) eval(expression string) (value any) {
	b.t.Helper()
	var answer struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	require.NoError(b.t, json.Unmarshal(b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}), &answer))
	require.Empty(b.t, string(answer.ExceptionDetails), expression)
	return answer.Result.Value
}

// until waits until an expression is true.
func (b *tab) until(expression string) {
	b.t.Helper()
	for end := time.Now().Add(30 * time.Second); b.eval(expression) != true; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			require.Fail(b.t, "does not become true", "%s\n%v", expression, b.eval("document.body.innerText"))
		}
	}
}

// shot writes a picture of the page, if SVIDKIT_SCREENSHOTS names a directory.
func (b *tab) shot(name string, width int, dark bool) {
	b.t.Helper()
	dir := os.Getenv("SVIDKIT_SCREENSHOTS")
	if dir == "" {
		return
	}
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]any{"name": "prefers-color-scheme", "value": scheme}}})
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500})
	var answer struct{ Data []byte }
	require.NoError(b.t, json.Unmarshal(b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}), &answer))
	require.NoError(b.t, os.WriteFile(filepath.Join(dir, name+".png"), answer.Data, 0o600))
}

func TestBrowser(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	browser(t) // or skip
	ca := spiffetest.NewCA(t, "example.org")
	me, err := secretcache.Start(t.Context(), secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca, Lifetime: time.Hour})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, me.Close()) })
	renewed := ca.Source("/db")
	secrets := must.Get(sds.NewHandler(me, nil))(t)
	t.Cleanup(func() { require.NoError(t, secrets.Close()) })
	start, fine := time.Now(), new(atomic.Bool)
	h := newPage(t,
		statuspage.Part{Name: "identity", Source: me},
		statuspage.Part{Name: "db", Source: health.FromSources(renewed, renewed)},
		statuspage.Part{Name: "sds", Source: secrets},
		statuspage.Part{Name: "ca", Source: fixed(report.Report{Bundles: []report.Bundle{{
			TrustDomain: "long.test", Origin: strings.Repeat("root 420cf579146dc02985b6bd8ce6aa5646: active since 2026-11-27T17:14:30Z ", 2),
			X509: slices.Collect(spiffetest.NewCA(t, "long.test").Bundle().X509Authorities()),
		}}})},
		statuspage.Part{Name: "sample", Source: reporter(func() (r report.Report) {
			if !fine.Load() {
				r = sample(start)
			}
			return r
		})},
	)
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	t.Cleanup(func() { _ = h.Close() })

	b := open(t, server.URL)
	b.until("document.getElementById('live').textContent === 'live'")
	require.Contains(t, b.eval("document.getElementById('identities').innerText"), "spiffe://example.org/web")
	require.Zero(t, b.eval("window.loaded = (window.loaded || 0)"))
	b.eval("window.loaded = 1") // is gone if the page is loaded again

	// A rotation of the root, an error and a renewal arrive.
	have := b.eval("document.querySelectorAll('#roots tbody tr').length").(float64)
	ca.Rotate()
	renewed.Renew()
	b.until(fmt.Sprintf("document.querySelectorAll('#roots tbody tr').length > %v", have))
	renewed.Fail(errors.New("<img src=x onerror=window.hacked=1>"))
	b.until("document.getElementById('problems').innerText.includes('<img src=x')")
	require.Equal(t, float64(1), b.eval("window.loaded"), "the page was loaded again")
	require.Nil(t, b.eval("window.hacked"))

	// Its own policy is in force, and nothing of the page breaks it.
	require.Equal(t, true,
		b.eval(`(() => { const s = document.createElement('script'); s.textContent = 'window.inline = 1'; document.body.append(s); return window.inline === undefined })()`))

	// Text that an operator has selected is not replaced under him.
	b.eval("document.getSelection().selectAllChildren(document.getElementById('problems'))")
	renewed.Fail(errors.New("another failure"))
	time.Sleep(1500 * time.Millisecond)
	require.NotContains(t, b.eval("document.getElementById('problems').innerText"), "another failure")
	b.eval("document.getSelection().removeAllRanges()")
	b.until("document.getElementById('problems').innerText.includes('another failure')")

	for _, width := range []int{1280, 360} {
		b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false})
		require.Equal(t, true, b.eval("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than a window of %d", width)
	}
	// No cell is cut off, at no width.
	for _, width := range []int{1920, 1280, 1100, 1024, 961, 960, 900, 800, 768, 641, 640, 500, 360} {
		b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false})
		assert.Equal(t, "", b.eval(`[...document.querySelectorAll('.scroll tbody td, .scroll tbody th')].filter(c => c.getBoundingClientRect().right > c.closest('.scroll').getBoundingClientRect().right + 1).map(c => c.closest('.scroll').id + ': ' + c.innerText).join('; ')`), "at %d", width)
	}
	b.shot("light", 1280, false)
	b.shot("dark", 1280, true)
	b.shot("middle", 800, false)
	b.shot("narrow", 360, false)

	// Problems that have passed go away, without a trace.
	fine.Store(true)
	renewed.Fail(nil)
	b.until("document.getElementById('problems').innerHTML === '' && document.getElementById('summary').innerText === 'No problems'")

	// The page says that it is not live any more.
	require.NoError(t, h.Close())
	b.until("document.body.classList.contains('stale')")
	b.until("document.getElementById('live').textContent === 'not live: reload'") // once it has tried to connect again
}
