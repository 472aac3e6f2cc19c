package soak

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// The programs are built with two changes, which no file of the module has: a wall clock that the test sets, and a file
// that says what the process holds.
const (
	clockKey, usageKey = "SVIDKIT_SOAK_CLOCK", "SVIDKIT_SOAK_USAGE"

	clockSource = `package time

import (
	"syscall"
	"unsafe"
)

// set is how far the wall clock is ahead, in seconds, in memory that is shared with the test.
var set = func() *int64 {
	if path, ok := syscall.Getenv("` + clockKey + `"); ok {
		fd, err := syscall.Open(path, syscall.O_RDONLY, 0)
		if err != nil {
			panic("open " + path + ": " + err.Error())
		}
		page, err := syscall.Mmap(fd, 0, 8, syscall.PROT_READ, syscall.MAP_SHARED)
		if err != nil {
			panic("map " + path + ": " + err.Error())
		}
		syscall.Close(fd)
		return (*int64)(unsafe.Pointer(&page[0]))
	}
	return new(int64)
}()
`

	usageSource = `package main

import (
	"encoding/json"
	"os"
	"runtime"
	"time"
)

func init() {
	path := os.Getenv("` + usageKey + `")
	if path == "" {
		return
	}
	go func() {
		for range time.Tick(2 * time.Second) {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			open, _ := os.ReadDir("/proc/self/fd")
			text, _ := json.Marshal(map[string]any{"Goroutines": runtime.NumGoroutine(), "Descriptors": len(open), "Heap": m.HeapAlloc, "PeakHeap": m.Sys})
			_ = os.WriteFile(path, append(text, '\n'), 0o600)
		}
	}()
}
`
)

// buildWatched builds programs with these changes; that of the clock, for which the whole standard library is compiled,
// only with clock.
func buildWatched(t *testing.T, dir string, clock bool, names ...string) {
	t.Helper()
	replaced := map[string]string{}
	put := func(at, name, source string) {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(source), 0o600))
		replaced[at] = path
	}
	root := must.Get(filepath.Abs("../../../examples"))(t)
	args := []string{"build", "-ldflags=-s -w", "-overlay", filepath.Join(dir, "overlay.json"), "-o", dir + "/"}
	for _, name := range names {
		put(filepath.Join(root, name, "usage_of_the_soak.go"), "usage.go", usageSource)
		args = append(args, "github.com/svidkit/svidkit/examples/"+name)
	}
	if clock {
		goroot := must.Get(exec.Command("go", "env", "GOROOT").Output())(t)
		std := filepath.Join(strings.TrimSpace(string(goroot)), "src/time")
		text := must.Get(os.ReadFile(filepath.Join(std, "time.go")))(t)
		const now = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
		require.Contains(t, string(text), now)
		put(filepath.Join(std, "time.go"), "time.go", strings.Replace(string(text), now, now+"\tsec += *set\n", 1))
		put(filepath.Join(std, "clock_of_the_soak.go"), "clock.go", clockSource)
	}
	text := must.Get(json.Marshal(map[string]any{"Replace": replaced}))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), text, 0o600))
	out, err := exec.Command("go", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// watched is a program that is stopped, killed and started again.
type watched struct {
	t         *testing.T
	name, dir string
	path      string
	env, args []string
	clock     *os.File // the seconds that the wall clock is ahead
	cmd       *exec.Cmd
	usage     []usage
}

func newWatched(t *testing.T, dir, name string, env []string, args ...string) *watched {
	t.Helper()
	clock := must.Get(os.OpenFile(filepath.Join(dir, name+".clock"), os.O_CREATE|os.O_RDWR, 0o600))(t)
	t.Cleanup(func() { _ = clock.Close() })
	w := &watched{t: t, name: name, dir: dir, path: filepath.Join(dir, name), args: args, clock: clock}
	w.env = append(slices.Clone(env), "PATH=/bin:/usr/bin", clockKey+"="+clock.Name(), usageKey+"="+filepath.Join(dir, name+".usage"))
	w.ahead(0)
	w.start()
	t.Cleanup(func() {
		w.kill()
		if text, err := os.ReadFile(filepath.Join(dir, name+".log")); err == nil && t.Failed() {
			t.Logf("the end of the log of %s:\n%s", name, text[max(0, len(text)-8<<10):])
		}
	})
	return w
}

func (w *watched) start() {
	log := must.Do(os.OpenFile(filepath.Join(w.dir, w.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600))
	defer log.Close()
	w.cmd = exec.Command("/bin/sh", append([]string{"-c", fmt.Sprint("ulimit -n ", descriptors, ` && exec "$0" "$@"`), w.path}, w.args...)...)
	w.cmd.Env, w.cmd.Stderr = w.env, log
	require.NoError(w.t, w.cmd.Start())
}

func (w *watched) kill() {
	_ = w.cmd.Process.Kill()
	_ = w.cmd.Wait()
}

func (w *watched) signal(s os.Signal) {
	assert.NoError(w.t, w.cmd.Process.Signal(s), "%s has ended", w.name)
}

// ahead sets the wall clock of the program.
func (w *watched) ahead(seconds int64) {
	must.Do(w.clock.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(seconds)), 0))
}

// sample reads what the program has last written of itself.
func (w *watched) sample() {
	text, err := os.ReadFile(filepath.Join(w.dir, w.name+".usage"))
	var u usage
	if err != nil || json.Unmarshal(text, &u) != nil {
		return
	}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.cmd.Process.Pid))
	if _, rest, ok := strings.Cut(string(status), "VmRSS:"); ok {
		kB, _ := strconv.ParseUint(strings.Fields(rest)[0], 10, 64)
		u.PeakHeap = kB << 10
	}
	w.usage = append(w.usage, u)
}

// relay passes connections on, as well or as badly as its mode says.
type relay struct {
	to   string
	addr string
	mode atomic.Int32

	mu    sync.Mutex
	conns map[net.Conn]bool
}

const (
	open   int32 = iota
	shut         // connections are closed at once
	silent       // nothing is passed on
	slow         // all is late by a third of a second
)

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	r := &relay{to: to, addr: l.Addr().String(), conns: map[net.Conn]bool{}}
	t.Cleanup(func() { _ = l.Close(); r.cut() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go r.pass(c)
		}
	}()
	return r
}

func (r *relay) pass(c net.Conn) {
	defer c.Close()
	if r.mode.Load() == shut {
		return
	}
	d, err := net.Dial("tcp", r.to)
	if err != nil {
		return
	}
	defer d.Close()
	r.mu.Lock()
	r.conns[c] = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(r.conns, c)
		r.mu.Unlock()
	}()
	through := func(to, from net.Conn) {
		defer to.Close()
		for buf := make([]byte, 16<<10); ; {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			for r.mode.Load() == silent {
				time.Sleep(50 * time.Millisecond)
			}
			if r.mode.Load() == slow {
				time.Sleep(time.Second / 3)
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
	}
	go through(d, c)
	through(c, d)
}

func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		_ = c.Close()
	}
}

// TestFaults runs a CA and an agent with 512 descriptors each, under 600 connections to each of their ports, while the CA is
// killed and held, its disk full and gone, their clocks set and the network between them cut, silent and slow. The agent's
// identity is never late, no request of another user fails, and what the programs hold does not grow.
//
//	go -C internal/checks test -v ./soak -run TestFaults -long -timeout 3h
func TestFaults(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("there is no other user")
	}
	last := 40 * time.Second
	if *long {
		last = *lasts
	} else {
		rounds.Slow(t)
	}
	const life = 30 * time.Second
	dir := must.Get(os.MkdirTemp("", "svidkit-faults"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	buildWatched(t, dir, *long, "ca", "agent")
	disk := filepath.Join(dir, "disk")
	require.NoError(t, os.Mkdir(disk, 0o755))
	full := filepath.Join(disk, "full") // a file that takes all that is free
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=64m"); err != nil {
		t.Logf("the disk is never full, as there is no other to be had: %v", err)
		full = ""
	} else {
		t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	}
	ports := free(t, 6)
	state := filepath.Join(disk, "state")
	ca := newWatched(t, dir, "ca", nil, "-trust-domain", "example.org", "-state-dir", state, "-create", "-default-ttl", life.String(), "-istio-addr", ports[0],
		"-linkerd-addr", ports[1], "-bundle-addr", ports[2], "-admin-addr", ports[3], "-caller-rate", "0")
	caReady := get("http://" + ports[3] + "/ready")
	require.Eventually(t, func() bool { return caReady(t.Context()) == nil }, time.Minute, 50*time.Millisecond)
	network := newRelay(t, ports[0])

	root := filepath.Join(dir, "root")
	token := filepath.Join(root, "var/run/secrets/tokens/istio-token")
	require.NoError(t, os.MkdirAll(filepath.Dir(token), 0o755))
	writeToken := func() { // of a CA without Kubernetes, which has another secret at each start
		secret := must.Get(os.ReadFile(filepath.Join(state, "token-secret")))(t)
		require.NoError(t, os.WriteFile(token, fmt.Appendf(nil, "%s:demo/web", secret), 0o600))
	}
	writeToken()
	roots := must.Get(os.ReadFile(filepath.Join(state, "root-cert.pem")))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "roots.pem"), roots, 0o600))
	_, debug, err := net.SplitHostPort(ports[4])
	require.NoError(t, err)
	agent := newWatched(t, dir, "agent", []string{
		"TRUST_DOMAIN=example.org", "POD_NAMESPACE=demo", "SERVICE_ACCOUNT=web", "CA_ADDR=" + network.addr, "CA_ROOT_CA=" + filepath.Join(dir, "roots.pem"),
		"SECRET_TTL=" + life.String(), "ECC_SIGNATURE_ALGORITHM=ECDSA", "MINIMUM_DRAIN_DURATION=0s", "PROXY_XDS_DEBUG_VIA_AGENT_PORT=" + debug,
		`PROXY_CONFIG={"discoveryAddress":"` + free(t, 1)[0] + `"}`, "XDS_ROOT_CA=" + filepath.Join(dir, "roots.pem"), "OUTPUT_CERTS=" + filepath.Join(disk, "certs"),
	}, "-root", root, "-admin", ports[5])
	socket := filepath.Join(root, "var/run/secrets/workload-spiffe-uds/socket")
	for _, folder := range []string{root, filepath.Join(root, "var"), filepath.Join(root, "var/run"), filepath.Join(root, "var/run/secrets")} {
		require.NoError(t, os.Chmod(folder, 0o755))
	}
	require.Eventually(t, func() bool { return os.Chmod(filepath.Dir(socket), 0o755) == nil && os.Chmod(socket, 0o666) == nil }, time.Minute, 50*time.Millisecond)
	live := get("http://" + ports[5] + "/healthz/live")
	require.Eventually(t, func() bool { return live(t.Context()) == nil }, time.Minute, 50*time.Millisecond)

	targets := []target{
		{Name: "ca: Istio's API", Network: "tcp", Addr: ports[0]}, {Name: "ca: Linkerd's API", Network: "tcp", Addr: ports[1]},
		{Name: "ca: bundle endpoint", Network: "tcp", Addr: ports[2]}, {Name: "ca: admin", Network: "tcp", Addr: ports[3]},
		{Name: "agent: debug requests", Network: "tcp", Addr: ports[4]}, {Name: "agent: admin", Network: "tcp", Addr: ports[5]},
		{Name: "agent: SDS", Network: "unix", Addr: socket},
	}
	if *long { // so that the machine can do something else
		for i := range targets {
			targets[i].Pause = 10 * time.Second
		}
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "targets"), must.Get(json.Marshal(targets))(t), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "test"), must.Get(os.ReadFile("/proc/self/exe"))(t), 0o755))
	attack := start(t, filepath.Join(dir, "test"), dir, "siege", badUser)

	// The faults. Each is over after some seconds, and then what it was done to must be well again.
	type fault struct {
		name       string
		begin, end func()
		once       bool // only in the first quarter, as what a process holds is forgotten with it
		expired    bool // by the agent's clock its identity has expired, so that it gives none
	}
	none := func() {}
	clocks := func(w *watched, seconds int64) fault {
		return fault{expired: w.name == "agent" && seconds > 10, name: fmt.Sprintf("clock of the %s set by %d s", w.name, seconds), begin: func() { w.ahead(seconds) }, end: func() { w.ahead(0) }}
	}
	mode := func(name string, m int32) fault {
		return fault{name: "network " + name, begin: func() { network.mode.Store(m) }, end: func() { network.mode.Store(open) }}
	}
	faults := []fault{
		{name: "CA killed", begin: ca.kill, end: func() {
			ca.start()
			require.Eventually(t, func() bool { return caReady(t.Context()) == nil }, time.Minute, 50*time.Millisecond)
			writeToken()
		}, once: true},
		{name: "CA held", begin: func() { ca.signal(syscall.SIGSTOP) }, end: func() { ca.signal(syscall.SIGCONT) }},
		{name: "disk of the CA gone", begin: func() { assert.NoError(t, os.Rename(state, state+".gone")) }, end: func() { assert.NoError(t, os.Rename(state+".gone", state)) }},
		mode("shut", shut), mode("silent", silent), mode("slow", slow), {name: "network cut", begin: network.cut, end: none},
	}
	if full != "" {
		faults = append(faults, fault{name: "disk full", begin: func() {
			f, err := os.Create(full)
			if assert.NoError(t, err) {
				assert.ErrorIs(t, must.Err(io.Copy(f, neverEnding{})), syscall.ENOSPC)
				_ = f.Close()
			}
		}, end: func() { assert.NoError(t, os.Remove(full)) }})
	}
	if *long {
		faults = append(faults, clocks(ca, 60), clocks(ca, -60), clocks(ca, 3600), clocks(agent, 5), clocks(agent, -5), clocks(agent, 3600))
	}

	asked, failed, seen, certificates := 0, []string{}, map[string]int{}, map[time.Time]bool{}
	least := life
	request := func(what string, f func(context.Context) error) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		asked++
		if err := f(ctx); err != nil && len(failed) < 100 {
			failed = append(failed, fmt.Sprintf("%s: %v", what, err))
			t.Logf("%s: %s: %v", time.Now().Format(time.TimeOnly), what, err) // at once, with -v
		}
	}
	identity := func(ctx context.Context) error {
		end, err := identityEnd(ctx, socket)
		if err != nil {
			return err
		}
		certificates[end] = true
		left := time.Until(end)
		if least = min(least, left); left < life/10 {
			return fmt.Errorf("the identity has %v left of %v", left, life)
		}
		return nil
	}
	random := rand.New(rand.NewPCG(1, uint64(time.Now().Unix())))
	began := time.Now()
	var under *fault
	for turn := time.Now(); time.Since(began) < last || under != nil; time.Sleep(250 * time.Millisecond) {
		if under == nil || !under.expired {
			request("identity", identity)
			request("liveness", live)
		}
		ca.sample()
		agent.sample()
		if time.Now().Before(turn) {
			continue
		}
		if under != nil { // it ends, and there is some quiet
			under.end()
			under, turn = nil, time.Now().Add(time.Duration(1000+random.IntN(5000))*time.Millisecond)
			continue
		}
		f := faults[random.IntN(len(faults))]
		if f.once && time.Since(began) > last/4 {
			continue
		}
		f.begin()
		seen[f.name]++
		t.Logf("%s: %s", time.Now().Format(time.TimeOnly), f.name)
		under, turn = &f, time.Now().Add(time.Duration(1000+random.IntN(5000))*time.Millisecond)
	}
	var held map[string]int
	attack.ask(t, "held", &held)
	t.Logf("in %v: %d requests of another user, failed %d; %d certificates, the least that one had left %v of %v", last, asked, len(failed), len(certificates), least, life)
	t.Logf("held by the attacker: %v", held)
	t.Logf("faults: %v", seen)
	assert.Empty(t, failed)
	assert.Greater(t, len(certificates), int(last/life))
	require.Eventually(t, func() bool { return caReady(t.Context()) == nil }, time.Minute, 50*time.Millisecond, "the CA is well again")
	for _, w := range []*watched{ca, agent} {
		early, late := w.usage[len(w.usage)/4:len(w.usage)/2], w.usage[len(w.usage)*3/4:]
		for what, of := range map[string]func(usage) int{
			"kB of the heap": func(u usage) int { return int(u.Heap >> 10) }, "kB resident": func(u usage) int { return int(u.PeakHeap >> 10) },
			"descriptors": func(u usage) int { return u.Descriptors }, "goroutines": func(u usage) int { return u.Goroutines },
		} {
			a, b := median(early, of), median(late, of)
			t.Logf("%s: %s: %d in the second quarter, %d in the last", w.name, what, a, b)
			if *long { // the attackers hold not always the same
				assert.LessOrEqual(t, b, a+a/3+16, "%s: %s", w.name, what)
			}
		}
		for _, u := range w.usage {
			require.LessOrEqual(t, u.Descriptors, descriptors)
		}
	}
}

func median(of []usage, what func(usage) int) int {
	figures := make([]int, len(of))
	for i, u := range of {
		figures[i] = what(u)
	}
	slices.Sort(figures)
	return figures[len(figures)/2]
}

type neverEnding struct{}

func (neverEnding) Read(p []byte) (int, error) { return len(p), nil }
