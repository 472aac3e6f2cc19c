//go:build linux

// Package soak runs a CA, an SDS server and a Workload API server together, under local and remote clients that take
// what they can, beside clients that behave well. There is no code to import here.
package soak

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	clientistioca "github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

var (
	long  = flag.Bool("long", false, "run for 30 minutes, and TestFaults for -lasts")
	lasts = flag.Duration("lasts", 2*time.Hour, "how long TestFaults lasts with -long, and TestQuantum at least a quarter of it")
)

const (
	roleKey = "SVIDKIT_SOAK_ROLE" // the processes of the test are this test binary
	dirKey  = "SVIDKIT_SOAK_DIR"

	goodUser, badUser = 65533, 65534 // of the clients; the servers have the user of the test
	descriptors       = 512          // of the servers' process

	goodToken = "good"
)

var (
	td  = spiffe.MustParseTrustDomain("example.org")
	web = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
)

func TestMain(m *testing.M) {
	flag.Parse()
	role, dir := os.Getenv(roleKey), os.Getenv(dirKey)
	roles := map[string]func(ctx context.Context, dir string, in *bufio.Scanner) error{
		"servers": serve, "client": behave, "idle": idle, "names": names, "streams": streams, "tokens": tokens, "siege": siege, "flood": flood,
	}
	run := roles[role]
	if run == nil {
		os.Exit(m.Run())
	}
	ctx, cancel := context.WithCancel(context.Background())
	err := run(ctx, dir, bufio.NewScanner(os.Stdin))
	cancel()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", role, err)
		os.Exit(1)
	}
}

// usage is what the servers' process holds.
type usage struct {
	Goroutines, Descriptors int
	Heap                    uint64 // bytes
	PeakHeap                uint64 // since the last question
}

// latencies are what a client that behaves well measured.
type latencies struct {
	Failed []string
	P50    map[string]time.Duration
	P99    map[string]time.Duration
	Count  map[string]int
}

// process is one of the processes, which answers a line with a line of JSON.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(t *testing.T, binary, dir, role string, user uint32) *process {
	t.Helper()
	cmd := exec.Command(binary)
	cmd.Env = append(os.Environ(), roleKey+"="+role, dirKey+"="+dir)
	cmd.Stderr = os.Stderr
	cmd.Dir = dir
	if user != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	}
	in := must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	p := &process{cmd: cmd, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(func() { p.stop() })
	return p
}

func (p *process) ask(t *testing.T, question string, answer any) {
	t.Helper()
	must.Get(io.WriteString(p.in, question+"\n"))(t)
	require.True(t, p.out.Scan(), "the process has ended")
	require.NoError(t, json.Unmarshal(p.out.Bytes(), answer))
}

func (p *process) stop() {
	_ = p.in.Close()
	done := time.AfterFunc(20*time.Second, func() { _ = p.cmd.Process.Kill() })
	defer done.Stop()
	for p.out.Scan() {
	}
	_ = p.cmd.Wait()
}

func say(v any) {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(data))
}

// TestSoak measures well-behaved clients in quiet, then beside clients that take all they can get, and again in quiet.
// Those that behave lose nothing, and the servers give back what the others took.
//
//	go -C internal/checks test -v ./soak -long
func TestSoak(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("the clients run as other users, which takes root")
	}
	quiet, attack := 2*time.Second, 5*time.Second
	if *long {
		quiet, attack = time.Minute, 28*time.Minute
	} else {
		rounds.Slow(t)
	}
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) { // the clients are other users
		require.NoError(t, os.Chmod(d, 0o755))
	}
	data := must.Get(os.ReadFile(must.Get(os.Executable())(t)))(t)
	binary := filepath.Join(dir, "soak")
	require.NoError(t, os.WriteFile(binary, data, 0o755))

	servers := start(t, binary, dir, "servers", 0)
	var before, during, after usage
	servers.ask(t, "usage", &before)
	client := start(t, binary, dir, "client", goodUser)
	var calm, busy, again latencies
	client.ask(t, quiet.String(), &calm)
	require.Empty(t, calm.Failed)
	servers.ask(t, "usage", &before)

	attackers := []*process{}
	for _, role := range []string{"idle", "names", "streams", "tokens"} {
		attackers = append(attackers, start(t, binary, dir, role, badUser))
	}
	client.ask(t, attack.String(), &busy)
	servers.ask(t, "usage", &during)
	for _, p := range attackers {
		p.stop()
	}
	t.Logf("quiet: %v of %v, p99 %v", calm.P50, calm.Count, calm.P99)
	t.Logf("under attack: %v of %v, p99 %v", busy.P50, busy.Count, busy.P99)
	t.Logf("the servers: before %+v, under attack %+v", before, during)
	assert.Empty(t, busy.Failed)
	assert.Less(t, during.Heap, uint64(96<<20))
	assert.Less(t, during.PeakHeap, uint64(256<<20), "with what is not collected yet")
	assert.LessOrEqual(t, during.Descriptors, descriptors)

	client.ask(t, quiet.String(), &again)
	assert.Empty(t, again.Failed)
	assert.EventuallyWithT(t, func(c *assert.CollectT) {
		servers.ask(t, "usage", &after)
		assert.LessOrEqual(c, after.Goroutines, before.Goroutines+20)
		assert.LessOrEqual(c, after.Descriptors, before.Descriptors+10)
		assert.LessOrEqual(c, after.Heap, before.Heap+8<<20)
	}, time.Minute, 500*time.Millisecond)
	t.Logf("after: %+v", after)
	if *long {
		for kind, p99 := range busy.P99 {
			assert.LessOrEqual(t, p99, 2*calm.P99[kind]+2*time.Millisecond, "%s", kind)
		}
	}
}

// serve runs the servers: an agent with SDS and the Workload API on one socket, and a CA with Istio's API, whose callers
// are judged by a fake Kubernetes.
func serve(ctx context.Context, dir string, in *bufio.Scanner) error {
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: descriptors, Max: descriptors}); err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	api := kubetest.New(1)
	api.Latency(5 * time.Millisecond)
	api.TokenReviews(func(q kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		if q.Token != goodToken {
			return kubetest.TokenReviewStatus{Error: "unknown token"}
		}
		return kubetest.TokenReviewStatus{Authenticated: true, Audiences: q.Audiences, User: kubetest.UserInfo{
			Username: "system:serviceaccount:prod:web", Groups: []string{"system:serviceaccounts", "system:serviceaccounts:prod", "system:authenticated"},
		}}
	})
	apiServer := httptest.NewServer(api)
	defer apiServer.Close()
	authority := must.Do(ca.New(ca.Config{TrustDomain: td, Logger: log}))
	reviewer := must.Do(kube.NewReviewer(&kube.ReviewerOptions{APIServer: apiServer.URL, HTTPClient: apiServer.Client()}))
	tokens := must.Do(kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: td}))
	ready := make(chan struct{})
	serverID, localhost := spiffe.MustParseID("spiffe://example.org/ca"), pki.DNSSAN("localhost")
	own := must.Do(local.NewServer(authority, serverID, localhost))
	identity, err := secretcache.Start(ctx, secretcache.Config{ID: serverID, CA: own, Names: []pki.SAN{localhost}, Logger: log})
	if err != nil {
		return err
	}
	defer identity.Close()
	server := must.Do(caserver.New(caserver.Options{
		CA: authority, TrustDomain: td, Identity: identity,
		Istio: &istioca.Options{Authenticator: tokens}, RootsFile: filepath.Join(dir, "roots.pem"), Ready: func() { close(ready) }, Logger: log,
	}))
	l := must.Do(net.Listen("tcp", "127.0.0.1:0"))
	if err := os.WriteFile(filepath.Join(dir, "ca"), []byte(l.Addr().String()), 0o644); err != nil {
		return err
	}
	forWeb := must.Do(local.New(authority, web))
	manager := must.Do(secretcache.New(secretcache.Config{ID: web, CA: forWeb, Lifetime: time.Minute, Logger: log}))
	entitled := func(ctx context.Context) error {
		if peer, ok := unixsocket.PeerFromContext(ctx); !ok || peer.UID != goodUser {
			return errors.New("no entry for this user")
		}
		return nil
	}
	secrets, err := sds.NewHandler(manager, &sds.Options{Logger: log, Resolve: func(ctx context.Context, name string) (string, error) { return name, entitled(ctx) }})
	if err != nil {
		return err
	}
	defer secrets.Close()
	workloads, err := workloadserver.NewHandler(manager, &workloadserver.Options{Logger: log, Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
		if entitled(ctx) != nil {
			return nil, nil
		}
		svid, err := manager.SVID()
		return []workloadserver.Identity{{SVID: svid}}, err
	}})
	if err != nil {
		return err
	}
	defer workloads.Close()
	mux := http.NewServeMux()
	mux.Handle("/SpiffeWorkloadAPI/", workloads)
	mux.Handle("/", secrets)
	socket := &unixsocket.Server{Path: filepath.Join(dir, "agent.sock"), SocketMode: 0o666, Handler: mux, Logger: log}
	if err := socket.Listen(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	failed := make(chan error, 3)
	wg.Go(func() { failed <- server.Run(ctx, caserver.Listeners{Istio: l}) })
	wg.Go(func() { failed <- manager.Run(ctx) })
	wg.Go(func() { failed <- socket.Run(ctx) })
	if _, err := manager.GenerateSecret(ctx, "default"); err != nil {
		return err
	}
	select {
	case <-ready:
	case err := <-failed:
		return err
	}
	var mu sync.Mutex
	var peak uint64
	wg.Go(func() {
		for ctx.Err() == nil {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			mu.Lock()
			peak = max(peak, m.HeapAlloc)
			mu.Unlock()
			time.Sleep(200 * time.Millisecond)
		}
	})
	for in.Scan() {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		open := must.Do(os.ReadDir("/proc/self/fd"))
		mu.Lock()
		say(usage{Goroutines: runtime.NumGoroutine(), Descriptors: len(open), Heap: m.HeapAlloc, PeakHeap: max(peak, m.HeapAlloc)})
		peak = 0
		mu.Unlock()
	}
	return nil
}

func socketPath(dir string) string { return filepath.Join(dir, "agent.sock") }

// caClient returns a client of the CA with a token. Its connections come from that address.
func caClient(dir, token string, from net.IP) (*clientistioca.CA, error) {
	addr := must.Do(os.ReadFile(filepath.Join(dir, "ca")))
	roots := must.Do(os.ReadFile(filepath.Join(dir, "roots.pem")))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(roots)
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}
	transport := &http.Transport{DialContext: dialer.DialContext, ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: "localhost"}}
	return clientistioca.New(clientistioca.Options{Endpoint: caclient.Endpoint{
		URL: "https://" + string(addr), HTTPClient: &http.Client{Transport: transport}, TrustDomain: td, RootsFile: filepath.Join(dir, "roots.pem"),
		Token: func(context.Context) (string, error) { return token, nil },
	}})
}

func newCSR() (*pki.CSR, error) {
	key := must.Do(pki.NewKey("ecdsa-p256"))
	return pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(web)}})
}

// behave is a node's worth of clients that behave: each line of input is for how long they work, and the answer is
// what they measured.
func behave(ctx context.Context, dir string, in *bufio.Scanner) error {
	agent := sds.NewClient(sds.UnixClient(socketPath(dir)), "http://localhost")
	api := must.Do(workloadapi.NewClient("unix://"+socketPath(dir), nil))
	defer api.CloseIdleConnections()
	authority := must.Do(caClient(dir, goodToken, net.IPv4(127, 0, 0, 1)))
	csr := must.Do(newCSR())
	work := map[string]func(ctx context.Context) error{
		"SDS": func(ctx context.Context) error {
			for _, err := range agent.Watch(ctx, "default") {
				return err
			}
			return ctx.Err()
		},
		"Workload API": func(ctx context.Context) error {
			for _, err := range api.WatchX509SVIDs(ctx) {
				return err
			}
			return ctx.Err()
		},
		"CA": func(ctx context.Context) error {
			_, err := authority.Sign(ctx, csr, 0)
			return err
		},
	}
	for in.Scan() {
		d := must.Do(time.ParseDuration(in.Text()))
		result := latencies{P50: map[string]time.Duration{}, P99: map[string]time.Duration{}, Count: map[string]int{}}
		var mu sync.Mutex
		var wg sync.WaitGroup
		end := time.Now().Add(d)
		for kind, f := range work {
			wg.Go(func() {
				var took []time.Duration
				for time.Now().Before(end) {
					begin := time.Now()
					ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
					err := f(ctx)
					cancel()
					took = append(took, time.Since(begin))
					if err != nil {
						mu.Lock()
						result.Failed = append(result.Failed, kind+": "+err.Error())
						mu.Unlock()
					}
					time.Sleep(50 * time.Millisecond)
				}
				slices.Sort(took)
				mu.Lock()
				defer mu.Unlock()
				result.P50[kind], result.P99[kind], result.Count[kind] = took[len(took)/2], took[len(took)*99/100], len(took)
			})
		}
		wg.Wait()
		result.Failed = result.Failed[:min(len(result.Failed), 10)]
		say(result)
	}
	return nil
}

// until ends the context when there is no more input.
func until(ctx context.Context, in *bufio.Scanner) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		for in.Scan() {
		}
		cancel()
	}()
	return ctx
}

// idle holds 600 connections to the agent, on which nothing is asked.
func idle(ctx context.Context, dir string, in *bufio.Scanner) error {
	ctx = until(ctx, in)
	for range 600 {
		go func() {
			for ctx.Err() == nil {
				if c, err := net.Dial("unix", socketPath(dir)); err == nil {
					_, _ = io.Copy(io.Discard, c) // until the server closes it
					c.Close()
				}
				time.Sleep(500 * time.Millisecond)
			}
		}()
	}
	<-ctx.Done()
	return nil
}

// names asks on 1,500 streams for 240 names of 4 KB each that this user may not have.
func names(ctx context.Context, dir string, in *bufio.Scanner) error {
	ctx = until(ctx, in)
	list := make([]string, 240)
	for i := range list {
		list[i] = fmt.Sprint(i, strings.Repeat("x", 4000))
	}
	for range 15 {
		agent := sds.NewClient(sds.UnixClient(socketPath(dir)), "http://localhost")
		for range 100 {
			go func() {
				for ctx.Err() == nil {
					for range agent.Watch(ctx, list...) {
					}
				}
			}()
			time.Sleep(5 * time.Millisecond)
		}
	}
	<-ctx.Done()
	return nil
}

// streams opens 2,000 streams of the Workload API for a user without an identity, over and over.
func streams(ctx context.Context, dir string, in *bufio.Scanner) error {
	ctx = until(ctx, in)
	for range 20 {
		api := must.Do(workloadapi.NewClient("unix://"+socketPath(dir), nil))
		defer api.CloseIdleConnections()
		for range 100 {
			go func() {
				for ctx.Err() == nil {
					for _, err := range api.WatchX509Bundles(ctx) {
						if err != nil {
							break
						}
					}
					time.Sleep(time.Second)
				}
			}()
		}
	}
	<-ctx.Done()
	return nil
}

// tokens asks the CA for certificates, with 100 tokens a second that are good for nothing.
func tokens(ctx context.Context, dir string, in *bufio.Scanner) error {
	ctx = until(ctx, in)
	csr := must.Do(newCSR())
	for n := range 20 {
		authority := must.Do(caClient(dir, fmt.Sprint("bad", n), net.IPv4(127, 0, 0, 2)))
		go func() {
			for ctx.Err() == nil {
				_, _ = authority.Sign(ctx, csr, 0)
				time.Sleep(200 * time.Millisecond)
			}
		}()
	}
	<-ctx.Done()
	return nil
}
