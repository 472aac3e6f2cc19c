package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

const (
	many     = 100              // workloads
	under    = 15 * time.Second // load
	rotation = 3 * time.Second  // of all certificates
	lifetime = 4 * rotation     // of a certificate
	outage   = time.Second      // of the agent, and of the proxy
)

// node is a machine with an agent, the proxy and an Envoy, each a program of its own, and clients of its workloads.
type node struct {
	t         testing.TB
	dir       string
	ca        *spiffetest.CA
	api       *workloadapitest.Server // where the agent gets identities
	workloads []*process
	programs  string // their directory
	agent     *programtest.Program
	proxy     *programtest.Program
	logs      *programtest.Log // of the proxy
	envoy     *envoytest.Envoy
	addr      string
}

// process is a workload: each has an executable of its own, so that each has an ID of its own.
type process struct {
	path string
	to   *spiffetls.Endpoint // for a client that expects its ID alone

	mu   sync.RWMutex // held by those who need it to live; guards the rest
	cmd  *exec.Cmd
	name string
}

func (p *process) start(t testing.TB) {
	p.cmd = &exec.Cmd{Path: p.path, Args: []string{"sleep", "1000"}}
	require.NoError(t, p.cmd.Start())
	p.name = fmt.Sprint(p.cmd.Process.Pid, ".pid")
}

func (p *process) stop() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// rule gives an executable of this user an identity.
const rule = `{"match": {"uid": %d, "executable": %q}, "identities": [{"id": "spiffe://example.org/%s"}]}`

func startNode(t testing.TB, n int) *node {
	dir := envoytest.Dir(t)
	d := &node{t: t, dir: dir, programs: programtest.Build(t, "workload-agent", "node-proxy"),
		ca: spiffetest.NewCA(t, "example.org"), logs: new(programtest.Log)}
	ids := []string{"/agent", "/proxy"}
	rules := []string{fmt.Sprintf(rule, os.Getuid(), filepath.Join(d.programs, "node-proxy"), "proxy")}
	client, first := d.ca.Source("/client"), filepath.Join(d.dir, "w-0")
	sleep := must.Get(os.ReadFile(must.Get(exec.LookPath("sleep"))(t)))(t)
	require.NoError(t, os.WriteFile(first, sleep, 0o700))
	for i := range n {
		name := fmt.Sprint("w/", i)
		p := &process{path: filepath.Join(d.dir, fmt.Sprint("w-", i))}
		if p.path != first {
			require.NoError(t, os.Link(first, p.path))
		}
		id := spiffe.MustParseID("spiffe://example.org/" + name)
		p.to = must.Get(spiffetls.New(spiffetls.Config{Self: client, Peers: client, Allow: spiffe.AllowIDs(id)}))(t)
		ids, rules = append(ids, "/"+name), append(rules, fmt.Sprintf(rule, os.Getuid(), p.path, name))
		d.workloads = append(d.workloads, p)
		p.start(t)
		t.Cleanup(func() { p.stop() })
	}
	d.api = workloadapitest.NewServer(t, d.ca, ids...)
	d.api.ExpireIn(lifetime)
	require.NoError(t, os.WriteFile(d.dir+"/workloads.json", fmt.Appendf(nil, `{"workloads": [%s], "brokers": [{"id": `+
		`"spiffe://example.org/proxy", "references": ["pid"], "identities": ["spiffe://example.org/w/*"]}]}`,
		strings.Join(rules, ",")), 0o600))
	d.startAgent()
	d.startProxy()
	d.startEnvoy()
	return d
}

func (d *node) startAgent() {
	d.agent = programtest.Start(d.t, filepath.Join(d.programs, "workload-agent"), nil, nil, "-ca",
		"spire:"+d.api.Config().Address, "-file", d.dir+"/workloads.json", "-socket", d.dir+"/a", "-broker",
		"unix://"+d.dir+"/b", "-broker-id", "spiffe://example.org/agent", "-admin", "")
	d.agent.Addr("ready")
}

func (d *node) startProxy() {
	d.proxy = programtest.Start(d.t, filepath.Join(d.programs, "node-proxy"), d.logs, []string{
		workloadapi.SocketEnv + "=unix://" + d.dir + "/a", broker.SocketEnv + "=unix://" + d.dir + "/b"},
		"-server-id", "spiffe://example.org/agent", "-socket", d.dir+"/s", "-admin", "127.0.0.1:0")
	d.proxy.Addr("ready")
}

// startEnvoy starts an Envoy with the configuration for operators, before an application that says "ok".
func (d *node) startEnvoy() {
	app := serveApp(d.t)
	config := string(must.Get(os.ReadFile("envoy.yaml"))(d.t))
	for old, with := range map[string]string{"/run/node-proxy/sds.sock": "./s", "9901": "0", "8443": "0", "8080": app} {
		require.Equal(d.t, 1, strings.Count(config, old))
		config = strings.Replace(config, old, with, 1)
	}
	d.envoy = envoytest.StartConfig(d.t, envoytest.Binary(d.t), d.dir, "node", config)
	d.envoy.WaitLive(patient)
	d.addr = d.envoy.ListenerAddr("node", patient)
}

func serveApp(t testing.TB) (port string) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok")
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// ask makes a request to a name, with a handshake in which the server proves the ID of p.
func (d *node) ask(p *process, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	below, err := new(net.Dialer).DialContext(ctx, "tcp", d.addr)
	if err != nil {
		return err
	}
	conn, err := p.to.Client(ctx, below, name)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: "+name+"\r\nConnection: close\r\n\r\n")
	if err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(resp.Body)
	if err == nil && string(body) != "ok" {
		err = fmt.Errorf("%s: %q", resp.Status, body)
	}
	return err
}

// load makes requests to workloads that live until stop is called, which returns how many were made and what failed.
func (d *node) load() (stop func() (done int64, failed []string)) {
	ctx, cancel := context.WithCancel(context.Background())
	d.t.Cleanup(cancel)
	var wg sync.WaitGroup
	var done atomic.Int64
	var mu sync.Mutex
	var failed []string
	for range 3 {
		wg.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(often) { // it is not to measure itself
				p := d.workloads[rand.IntN(len(d.workloads))]
				p.mu.RLock()
				err := d.ask(p, p.name)
				if done.Add(1); err != nil {
					mu.Lock()
					failed = append(failed, fmt.Sprintf("%s %s: %v", time.Now().Format(time.TimeOnly), p.name, err))
					mu.Unlock()
				}
				p.mu.RUnlock()
			}
		})
	}
	return func() (int64, []string) {
		cancel()
		wg.Wait()
		return done.Load(), failed
	}
}

// replace ends a workload and starts it again. It returns after how long its name has failed.
func (d *node) replace(p *process) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.name
	p.stop()
	begin := time.Now()
	d.gone(p, old)
	took := time.Since(begin)
	p.start(d.t)
	require.NoError(d.t, d.ask(p, p.name), "the first request to a new workload")
	return took
}

// gone waits until new handshakes for a name fail.
func (d *node) gone(p *process, name string) {
	d.t.Helper()
	var err error
	require.Eventually(d.t, func() bool { err = d.ask(p, name); return err != nil }, patient, often)
	require.ErrorContains(d.t, err, "handshake failure")
}

// served returns how many names the proxy serves to Envoys, the roots among them.
func (d *node) served() int {
	_, page := programtest.Page(d.t, regexp.MustCompile(`^http://[^/]+`).FindString(d.proxy.Addr("health"))+"/metrics")
	m := regexp.MustCompile(`(?m)^svidkit_sds_names{part="sds",state="served"} (\d+)$`).FindStringSubmatch(page)
	require.NotNil(d.t, m, page)
	return must.Get(strconv.Atoi(m[1]))(d.t)
}

func share(d []time.Duration, percent int) time.Duration {
	slices.Sort(d)
	return d[(len(d)-1)*percent/100].Round(time.Millisecond)
}

// TestEnvoy has one Envoy end TLS for 100 processes that come and go, with certificates that last for seconds. Each
// process has an ID of its own, and no access to the Envoy, the proxy or the agent.
func TestEnvoy(t *testing.T) {
	t.Parallel()
	d := startNode(t, many)
	first := make([]time.Duration, 0, many)
	for _, p := range d.workloads {
		begin := time.Now()
		require.NoError(t, d.ask(p, p.name))
		first = append(first, time.Since(begin))
	}
	assert.Equal(t, many+1, d.served())

	// All certificates are replaced again and again, and so are the processes, the agent and the proxy.
	stop := d.load()
	var gone []time.Duration
	begin, rotations, replaced := time.Now(), 0, 0
	var restarted time.Time
	restarts := []func(){
		func() { d.agent.Stop(); time.Sleep(outage); d.startAgent() },
		func() { d.proxy.Stop(); time.Sleep(outage); d.startProxy() },
	}
	for time.Since(begin) < under {
		if len(restarts) > 0 && time.Since(begin) > under/time.Duration(1+len(restarts)) {
			d.api.ExpireIn(lifetime) // an outage is to be shorter
			restarts[0]()
			restarts, restarted = restarts[1:], time.Now()
		}
		if time.Since(begin) > time.Duration(rotations)*rotation {
			d.api.ExpireIn(lifetime)
			rotations++
		}
		settled := time.Since(restarted) > 2*outage // else an Envoy may still wait to ask the proxy again
		if took := d.replace(d.workloads[rand.IntN(many)]); settled {
			gone = append(gone, took)
		}
		replaced++
	}
	done, failed := stop()
	assert.Empty(t, failed, "of %d requests", done)
	assert.GreaterOrEqual(t, time.Since(begin), lifetime, "the first certificates have ended")
	assert.Less(t, share(gone, 50), time.Second)
	assert.Equal(t, many+1, d.served(), "the secrets of those that ended were withdrawn")
	t.Logf("%d requests, %d failed; %d rotations of %d certificates; %d workloads ended; first handshakes: p50 %v, "+
		"p99 %v; gone after: p50 %v, p99 %v, longest %v", done, len(failed), rotations, many, replaced, share(first, 50),
		share(first, 99), share(gone, 50), share(gone, 99), share(gone, 100))

	// Names of no workload fail at once, and so does a process for which the proxy may not speak.
	for _, name := range []string{"4194304.pid", "0.pid", "01.pid", "-1.pid", "web.shop.pod", "web", "none", "a..pod",
		fmt.Sprint(os.Getpid(), ".pid"), fmt.Sprint(d.proxy.PID(), ".pid")} {
		begin := time.Now()
		require.ErrorContains(t, d.ask(d.workloads[0], name), "handshake failure", name)
		assert.Less(t, time.Since(begin), 3*time.Second, name)
	}
	assert.Equal(t, many+1, d.served())

	// What no Envoy asks for is not followed, and the next Envoy gets it again.
	d.envoy.Stop()
	require.Eventually(t, func() bool {
		return strings.Count(d.logs.String(), errUnused.Error()) >= many
	}, patient, 100*time.Millisecond)
	d.startEnvoy()
	require.NoError(t, d.ask(d.workloads[0], d.workloads[0].name))
	assert.Equal(t, 2, d.served())

	// A process that ends is gone even if there is no agent to say so.
	d.agent.Stop()
	d.workloads[0].stop()
	d.gone(d.workloads[0], d.workloads[0].name)
	assert.NotContains(t, d.logs.String(), "level=ERROR")
}

// TestOtherUser: an Envoy of another user gets nothing.
func TestOtherUser(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "n")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	api := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/proxy")
	for uid, want := range map[int]string{
		os.Getuid() + 1: "secrets are for user", os.Getuid(): "a name has no certificate",
	} {
		log, out := new(programtest.Log), new(programtest.Log)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		socket := filepath.Join(dir, fmt.Sprint(uid))
		go func() {
			done <- run(ctx, []string{"-workload-api", api.Config().Address, "-broker", "unix://" + dir + "/none", "-server-id",
				"spiffe://example.org/agent", "-socket", socket, "-admin=", "-envoy-uid", fmt.Sprint(uid)}, out, log)
		}()
		require.Eventually(t, func() bool { return strings.Contains(out.String(), "ready: unix://"+socket) }, patient, often)
		client := sds.UnixClient(socket)
		roots := make(chan bool, 1)
		var streams sync.WaitGroup
		streams.Go(func() {
			for range sds.NewClient(client, "http://localhost").Watch(ctx, "default") {
			}
		})
		streams.Go(func() {
			for range sds.NewClient(client, "http://localhost").Watch(ctx, "ROOTCA") {
				roots <- true
				return
			}
		})
		require.Eventually(t, func() bool { return strings.Contains(log.String(), want) }, patient, often)
		if uid == os.Getuid() {
			<-roots
		} else {
			assert.Empty(t, roots)
		}
		cancel()
		streams.Wait()
		client.CloseIdleConnections()
		assert.NoError(t, <-done)
	}
}
