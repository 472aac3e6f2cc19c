package prometheus_test

import (
	"encoding/json"

	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// demo is a program of the folder examples as prometheus.yaml has it.
type demo struct {
	args    []string // beside those for free ports
	named   string   // how the program prints where its metrics are
	address string   // what prometheus.yaml has
	at      string
}

// demos starts the programs of prometheus.yaml, on free ports.
func demos(t *testing.T) map[string]*demo {
	dir := programtest.Build(t, "ca", "agent", "workload-agent", "service")
	home := t.TempDir()
	all := map[string]*demo{
		"ca": {
			[]string{"-state-dir", filepath.Join(home, "ca"), "-create", "-istio-addr", "127.0.0.1:0", "-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0"},
			"metrics, health", "127.0.0.1:15014", "",
		},
		"agent":          {[]string{"-demo", "-admin", "127.0.0.1:0"}, "status page", "127.0.0.1:15020", ""},
		"workload-agent": {[]string{"-demo", "-admin", "127.0.0.1:0"}, "health", "127.0.0.1:15024", ""},
		"service":        {[]string{"-requests", "0", "-health-addr", "127.0.0.1:0"}, "health", "127.0.0.1:15026", ""},
	}
	for name, d := range all {
		p := programtest.Start(t, filepath.Join(dir, name), nil, []string{"HOME=" + home, "TMPDIR=" + t.TempDir()}, d.args...)
		d.at = address(t, p, d.named)
	}
	return all
}

// address returns the address in the URL that a program has printed with a name.
func address(t *testing.T, p *programtest.Program, name string) string {
	_, rest, found := strings.Cut(p.Addr(name), "http://")
	require.True(t, found)
	at, _, _ := strings.Cut(rest, "/")
	return at
}

// TestServer: a Prometheus with prometheus.yaml scrapes the demos, evaluates the rules, and has nothing to tell.
func TestServer(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	path := tool(t, "prometheus")
	all := demos(t)
	data := must.Get(os.ReadFile("prometheus.yaml"))(t)
	config := strings.ReplaceAll(string(data), ": 15s", ": 1s")
	require.NotEqual(t, string(data), config)
	for name, d := range all {
		resp := must.Get(http.Get("http://"+d.at+"/metrics"))(t, name)
		page := must.Get(io.ReadAll(resp.Body))(t)
		_ = resp.Body.Close()
		_, err := metricstest.Page(string(page))
		assert.NoError(t, err, name)
		require.Equal(t, 1, strings.Count(config, `"`+d.address+`"`), name)
		config = strings.ReplaceAll(config, `"`+d.address+`"`, `"`+d.at+`"`)
	}
	dir := t.TempDir()
	text := must.Get(os.ReadFile("rules.yaml"))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rules.yaml"), text, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prometheus.yaml"), []byte(config), 0o600))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	at := l.Addr().String()
	require.NoError(t, l.Close())
	log := new(programtest.Log)
	cmd := exec.Command(path, "--config.file="+filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+at)
	cmd.Stderr = log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	get := func(path string, into any) error {
		resp, err := http.Get("http://" + at + "/api/v1/" + path)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		return json.NewDecoder(resp.Body).Decode(into)
	}
	query := func(expr string) (results int) {
		var answer struct {
			Data struct{ Result []any }
		}
		_ = get("query?query="+url.QueryEscape(expr), &answer)
		return len(answer.Data.Result)
	}
	for _, expr := range []string{
		`count(up{job=~"svidkit-.+"} == 1) == 4`, `count(count by (job) (svidkit_ready == 1)) == 4`, `svidkit_ca_signing{job="svidkit-ca"} == 1`,
		`svidkit:identity_life_left:ratio{job="svidkit-service"} > 0`, `svidkit:identity_life_left:ratio{job="svidkit-agent"} > 0`,
		`svidkit:bundle_life_left:ratio{job="svidkit-workload-agent"} > 0`, `svidkit:connection_descriptors_used:ratio{job="svidkit-ca"} < 0.5`,
		`increase(svidkit_secretcache_attempts_total{outcome="good"}[10s])`,
	} {
		require.Eventually(t, func() bool { return query(expr) > 0 }, time.Minute, 200*time.Millisecond, expr)
	}
	time.Sleep(3 * time.Second) // three evaluations more
	assert.Zero(t, query("ALERTS"))
	var answer struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
	}
	require.NoError(t, get("rules", &answer))
	n := 0
	for _, g := range answer.Data.Groups {
		for _, r := range g.Rules {
			n++
			assert.Equal(t, "ok", r.Health, "%s: %s", r.Name, r.LastError)
		}
	}
	assert.Len(t, rules(t), n)
}

// TestDescriptors: one user holds all connections of a CA that he gets, who has few descriptors.
func TestDescriptors(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	tool(t, "promtool")
	if runtime.GOOS != "linux" {
		t.Skip("the limit is set by sh")
	}
	dir := programtest.Build(t, "ca")
	home := t.TempDir()
	p := programtest.Start(t, "/bin/sh", nil, []string{"HOME=" + home}, "-c", `ulimit -n 128; exec "$0" "$@"`, filepath.Join(dir, "ca"),
		"-state-dir", filepath.Join(home, "ca"), "-create", "-istio-addr", "127.0.0.1:0", "-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0")
	admin := address(t, p, "metrics, health")
	scraped := fetched("svidkit-ca", &http.Client{Timeout: 10 * time.Second}, "http://"+admin+"/metrics") // a connection that was there before
	r := record(t)
	each := func(n int, also func()) {
		for range n {
			also()
			r.scrape(scraped)
		}
	}
	each(8, func() {})
	var held []net.Conn
	drop := func() {
		for _, c := range held {
			_ = c.Close()
		}
		held = nil
	}
	defer drop()
	each(40, func() {
		for len(held) < 100 {
			held = append(held, must.Get(net.Dial("tcp", admin))(t))
		}
		if r.n%2 == 0 { // those that were closed at once come again
			for _, c := range held[80:] {
				_ = c.Close()
			}
			held = held[:80]
		}
	})
	drop()
	require.Eventually(t, func() bool {
		page, err := scraped.page()
		return err == nil && strings.Contains(page, `svidkit_connection_descriptors{state="used"} 1`+"\n")
	}, time.Minute, 50*time.Millisecond)
	each(48, func() {})
	r.require(t, map[string]window{"SvidkitDescriptorsUsedUp": minutes(6.5, 8), "SvidkitLimitReached": minutes(6.5, 8)})
}
