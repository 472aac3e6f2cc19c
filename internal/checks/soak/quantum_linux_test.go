package soak

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// before is the last commit without ML-DSA.
const before = "ea05c52c049837a7b65a30ffabd3b7f1ace551fc"

// quantumBinaries has the programs of the states: of that commit, of this tree with Go 1.26, and with Go 1.27.
type quantumBinaries struct{ release, old, now string }

func buildQuantum(t *testing.T) quantumBinaries {
	t.Helper()
	dir := t.TempDir()
	build := func(toolchain, from, name string) string {
		out := filepath.Join(dir, name)
		cmd := exec.Command("go", "version")
		cmd.Dir, cmd.Env = from, append(os.Environ(), "GOTOOLCHAIN="+toolchain)
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Skipf("%s cannot be had here: %s", toolchain, text)
		}
		cmd = exec.Command("go", "build", "-o", out, "./internal/test/quantumpeer")
		cmd.Dir, cmd.Env = from, append(os.Environ(), "GOTOOLCHAIN="+toolchain)
		text, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s: %s", toolchain, text)
		return out
	}
	here := must.Get(filepath.Abs("../../.."))(t)
	b := quantumBinaries{old: build("go1.26.8", here, "old"), now: build("go1.27.4", here, "now")}
	tree := filepath.Join(dir, "release")
	require.NoError(t, os.Mkdir(tree, 0o700))
	if out, err := exec.Command("git", "-C", "../../..", "archive", "-o", tree+".tar", before).CombinedOutput(); err != nil {
		t.Logf("the release before is left out, as its commit is not here: %v: %s", err, out)
		return b
	}
	must.Get(exec.Command("tar", "-x", "-C", tree, "-f", tree+".tar").CombinedOutput())(t)
	to := filepath.Join(tree, "internal/test/quantumpeer")
	require.NoError(t, os.MkdirAll(to, 0o700))
	for _, name := range []string{"main.go", "without.go"} {
		require.NoError(t, os.WriteFile(filepath.Join(to, name), must.Get(os.ReadFile(filepath.Join("../../test/quantumpeer", name)))(t), 0o600))
	}
	b.release = build("go1.26.8", tree, "before")
	return b
}

// quantumPairs says for each client and server how they meet: the keys that the server and the client present, or who refuses
// whom, and the reason in that side's metrics. "old" stands for a program of the release before, too. examples/QUANTUM.md has it.
var quantumPairs = map[string]map[string]string{
	"old": {
		"old": "ECDSA ECDSA", "default": "ECDSA ECDSA", "verifies": "ECDSA ECDSA", "both": "ECDSA ECDSA", "new": "server: not_verified",
	},
	"default": {
		"old": "ECDSA ECDSA", "default": "ECDSA ECDSA", "verifies": "ECDSA ECDSA", "both": "client: algorithm", "new": "client: algorithm",
	},
	"verifies": {
		"old": "ECDSA ECDSA", "default": "ECDSA ECDSA", "verifies": "ECDSA ECDSA", "both": "ML-DSA ECDSA", "new": "server: algorithm",
	},
	"both": {
		"old": "ECDSA ECDSA", "default": "server: algorithm", "verifies": "ECDSA ML-DSA", "both": "ML-DSA ML-DSA", "new": "ML-DSA ML-DSA",
	},
	"new": {
		"old": "client: algorithm", "default": "client: algorithm", "verifies": "client: algorithm", "both": "ML-DSA ML-DSA", "new": "ML-DSA ML-DSA",
	},
}

// quantum is a trust domain whose CA and workloads are processes.
type quantum struct {
	t         *testing.T
	binaries  quantumBinaries
	dir, url  string
	life      time.Duration // of certificates
	ca        *process
	workloads map[string]*quantumWorkload
	met       map[string]int // handshakes by the states of both sides
	resumed   int
}

type quantumWorkload struct {
	*process
	state, addr string
	stop        func()
}

type quantumStatus struct {
	Servers map[string]*quantumSeen
	Metrics string
	Roots   int
	Issuers map[string]string
	Stood   time.Duration
}

type quantumSeen struct {
	Keys            map[string]int
	Resumed, Failed int
	Errors          []string
}

type quantumRoots struct {
	Roots []struct{ Algorithm, Phase string }
	Err   string
	Stood time.Duration
}

func newQuantum(t *testing.T) *quantum {
	t.Helper()
	q := &quantum{t: t, binaries: buildQuantum(t), dir: t.TempDir(), workloads: map[string]*quantumWorkload{}, met: map[string]int{}}
	q.life = 12 * time.Second
	if *long {
		q.life = 30 * time.Second
	}
	q.ca, _ = q.run("ca", q.binaries.now, "-life", q.life.String())
	require.True(t, q.ca.out.Scan(), "the CA has ended")
	require.NoError(t, json.Unmarshal(q.ca.out.Bytes(), &q.url))
	return q
}

// run starts a program, whose log is shown if the test fails.
func (q *quantum) run(name, binary string, args ...string) (*process, func()) {
	q.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, binary, args...)
	log := must.Get(os.Create(filepath.Join(q.dir, name+".log")))(q.t)
	cmd.Stderr, cmd.Dir = log, q.dir
	p := &process{cmd: cmd, in: must.Get(cmd.StdinPipe())(q.t)}
	p.out = bufio.NewScanner(must.Get(cmd.StdoutPipe())(q.t))
	p.out.Buffer(nil, 1<<20)
	require.NoError(q.t, cmd.Start())
	ended := false
	stop := func() {
		if !ended {
			ended = true
			_ = p.in.Close()
			cancel()
			_ = cmd.Wait()
			_ = log.Close()
		}
	}
	q.t.Cleanup(func() {
		stop()
		if text, err := os.ReadFile(log.Name()); err == nil && q.t.Failed() {
			q.t.Logf("the end of the log of %s:\n%s", name, text[max(0, len(text)-4<<10):])
		}
	})
	return p, stop
}

// start starts a workload in a state. With load it and all others meet from now on, and it meets itself.
func (q *quantum) start(name, state, form string, load bool) {
	q.t.Helper()
	binary, program := q.binaries.now, state
	switch state {
	case "release":
		binary, program = q.binaries.release, "old"
	case "old":
		binary = q.binaries.old
	}
	if binary == "" {
		return
	}
	p, stop := q.run(name, binary, "-state", program, "-ca", q.url, "-path", "/"+name, "-form", form)
	w := &quantumWorkload{process: p, state: program, stop: stop}
	require.True(q.t, p.out.Scan(), "%s has ended", name)
	require.NoError(q.t, json.Unmarshal(p.out.Bytes(), &w.addr))
	q.workloads[name] = w
	if !load {
		return
	}
	var added string
	for other, o := range q.workloads {
		w.ask(q.t, "add "+other+" "+o.addr, &added)
		if o != w {
			o.ask(q.t, "add "+name+" "+w.addr, &added)
		}
	}
}

// stop ends workloads, after all have stopped meeting them and they have stopped meeting others.
func (q *quantum) stop(names ...string) {
	q.t.Helper()
	var dropped string
	for _, name := range names {
		w := q.workloads[name]
		if w == nil {
			continue // there is no program of the release before
		}
		for other, o := range q.workloads {
			o.ask(q.t, "drop "+name, &dropped)
			if o != w {
				w.ask(q.t, "drop "+other, &dropped)
			}
		}
		q.judge(name, true)
		w.stop()
		delete(q.workloads, name)
	}
}

func (w *quantumWorkload) status(t *testing.T) (s quantumStatus) {
	t.Helper()
	w.ask(t, "status", &s)
	return s
}

// failures are the failed handshakes that a workload has counted, by its side and the reason.
func (s quantumStatus) failures() map[string]string {
	all := map[string]string{}
	for _, m := range quantumFailed.FindAllStringSubmatch(s.Metrics, -1) {
		all[m[1]+": "+m[2]] = m[3]
	}
	return all
}

var quantumFailed = regexp.MustCompile(`svidkit_tls_handshakes_total\{side="(\w+)",outcome="failed",reason="(\w+)"\} ([1-9]\d*)`)

// judge requires that a workload has failed no handshake, and that each server and it presented what they should.
func (q *quantum) judge(name string, count bool) {
	q.t.Helper()
	w := q.workloads[name]
	status := w.status(q.t)
	for server, seen := range status.Servers {
		if seen.Failed > 0 {
			q.excuse()
		}
		require.Zero(q.t, seen.Failed, "%s to %s: %v", name, server, seen.Errors)
		other := strings.TrimRight(server, "0123456789")
		if other == "release" {
			other = "old"
		}
		for keys, n := range seen.Keys {
			require.Equal(q.t, quantumPairs[w.state][other], keys, "%s to %s", name, server)
			if count {
				q.met[w.state+" to "+other] += n
			}
		}
		if count {
			q.resumed += seen.Resumed
		}
	}
	if len(status.failures()) > 0 {
		q.excuse()
	}
	require.Empty(q.t, status.failures(), name)
}

// excuse skips a test that has seen a failure on a machine so busy that processes stood still while certificates expire.
func (q *quantum) excuse() {
	q.t.Helper()
	var ca quantumRoots
	q.ca.ask(q.t, "status", &ca)
	stood := ca.Stood
	for _, w := range q.workloads {
		stood = max(stood, w.status(q.t).Stood)
	}
	if stood > q.life/6 {
		q.t.Skipf("a process stood still for %v, and certificates live for %v: the machine is too busy", stood, q.life)
	}
}

// order gives the CA an order.
func (q *quantum) order(line string) string {
	q.t.Helper()
	var r quantumRoots
	q.ca.ask(q.t, line, &r)
	if !strings.Contains(r.Err, "a rotation is under way") {
		require.Empty(q.t, r.Err, line)
	}
	var all []string
	for _, root := range r.Roots {
		all = append(all, root.Algorithm+" "+root.Phase)
	}
	return strings.Join(all, ", ")
}

// await goes on with the load until the roots of the CA are these.
func (q *quantum) await(roots string) {
	q.until(roots, func() bool { return q.order("status") == roots })
}

// signs goes on with the load until all roots that are known now have been replaced.
func (q *quantum) signs(kind string) {
	q.t.Helper()
	q.until("new roots", func() bool {
		roots := q.order("status")
		return !strings.Contains(roots, "distributing") && strings.Contains(roots, kind+" retiring, "+kind+" active")
	})
}

// issued goes on with the load until each workload of some states has certificates that these algorithms signed, by the key.
func (q *quantum) issued(issuers map[string]string, states ...string) {
	q.until(fmt.Sprint(issuers), func() bool {
		for _, w := range q.workloads {
			if slices.Contains(states, w.state) && !maps.Equal(issuers, w.status(q.t).Issuers) {
				return false
			}
		}
		return true
	})
}

func (q *quantum) until(what string, good func() bool) {
	q.t.Helper()
	began := time.Now()
	for !good() {
		for name := range q.workloads {
			q.judge(name, false)
		}
		require.Less(q.t, time.Since(began), 4*time.Minute, "waiting for %s; the roots are %s", what, q.order("status"))
		time.Sleep(250 * time.Millisecond)
	}
	q.t.Logf("%s %s: after %v, with %v", time.Now().Format(time.TimeOnly), what, time.Since(began).Round(time.Second/10), slices.Sorted(maps.Keys(q.workloads)))
}

// load goes on until each workload has met each again several times.
func (q *quantum) load() {
	q.t.Helper()
	more := 6
	if *long {
		more = 60
	}
	count := func() map[string]int {
		all := map[string]int{}
		for name, w := range q.workloads {
			for server, seen := range w.status(q.t).Servers {
				if q.workloads[server] != nil {
					for _, n := range seen.Keys {
						all[name+" to "+server] += n
					}
				}
			}
		}
		return all
	}
	first := count()
	q.until("load", func() bool {
		for pair, n := range count() {
			if n < first[pair]+more {
				return false
			}
		}
		return true
	})
}

// TestQuantum moves a trust domain from ECDSA to ML-DSA and back, in the order of examples/QUANTUM.md, while its workloads of all
// states that may meet make full and resumed handshakes with each other. None fails, and each side presents what the other reads.
//
//	go -C internal/checks test -v ./soak -run TestQuantum -long -timeout 3h
func TestQuantum(t *testing.T) {
	rounds.Slow(t)
	end := time.Now()
	if *long {
		end = end.Add(*lasts / 4)
	}
	q := newQuantum(t)
	olds := func() {
		q.start("release", "release", "document", true)
		q.start("release2", "release", "der", true)
		q.start("old", "old", "document", true)
		q.start("old2", "old", "der", true)
	}
	const classical, mldsa = "ECDSA-SHA256", "ML-DSA-65"
	olds()
	q.start("default", "default", "document", true)
	for round := 1; ; round++ {
		q.start("verifies", "verifies", "der", true) // the first step: programs, then the root
		q.load()
		q.order("keys ecdsa-p256,ml-dsa-65")
		q.await("ECDSA active, ML-DSA active")
		q.load()

		q.stop("default") // the second step
		q.start("both", "both", "document", true)
		q.start("both2", "both", "der", true)
		q.order("rotate")
		q.signs("ECDSA")
		q.issued(map[string]string{"ECDSA": classical, "ML-DSA": mldsa}, "both")
		q.load()

		q.stop("release", "release2", "old", "old2") // the third step
		q.order("keys ml-dsa-65")
		q.await("ML-DSA active")
		q.issued(map[string]string{"ECDSA": mldsa, "ML-DSA": mldsa}, "both")
		q.stop("verifies")
		q.start("new", "new", "document", true)
		q.load()

		q.order("keys ml-dsa-65,ecdsa-p256") // and back
		q.issued(map[string]string{"ECDSA": classical, "ML-DSA": mldsa}, "both")
		q.stop("new")
		q.start("verifies", "verifies", "der", true)
		olds()
		q.load()
		q.order("keys ecdsa-p256")
		q.await("ECDSA active")
		q.issued(map[string]string{"ECDSA": classical, "ML-DSA": classical}, "both")
		q.stop("both", "both2")
		q.start("default", "default", "document", true)
		q.load()
		q.stop("verifies")
		if time.Now().After(end) {
			t.Logf("%d times", round)
			break
		}
	}
	for _, name := range slices.Sorted(maps.Keys(q.workloads)) {
		q.judge(name, true)
	}
	total := 0
	for pair, n := range q.met {
		total += n
		assert.Greater(t, n, 5, pair)
	}
	t.Logf("%d handshakes, %d of them resumed: %v", total, q.resumed, q.met)
	assert.Greater(t, q.resumed, total/20)
	for client, servers := range quantumPairs {
		for server, want := range servers {
			_, met := q.met[client+" to "+server]
			apart := client == "new" && server == "verifies" || strings.Contains(want, ":")
			assert.Equal(t, !apart, met, "%s to %s", client, server)
		}
	}
}

// TestQuantumPage: the table of examples/QUANTUM.md is quantumPairs.
func TestQuantumPage(t *testing.T) {
	t.Parallel()
	page := string(must.Get(os.ReadFile("../../../examples/QUANTUM.md"))(t))
	words := map[string]string{
		"ECDSA ECDSA": "P-256, P-256", "ML-DSA ECDSA": "ML-DSA, P-256", "ECDSA ML-DSA": "P-256, ML-DSA", "ML-DSA ML-DSA": "ML-DSA, ML-DSA",
		"client: algorithm": "**client refuses**", "server: algorithm": "**server refuses**", "server: not_verified": "**fails**",
	}
	states := []string{"old", "default", "verifies", "both", "new"}
	assert.Contains(t, page, "\n| client | "+strings.Join(states, " server | ")+" server |\n")
	for _, client := range states {
		var row strings.Builder
		row.WriteString("\n| " + client + " |")
		for _, server := range states {
			row.WriteString(" " + words[quantumPairs[client][server]] + " |")
		}
		assert.Contains(t, page, row.String()+"\n")
	}
}

// TestQuantumPairs: each client and each server of all states meet as the table of examples/QUANTUM.md says.
func TestQuantumPairs(t *testing.T) {
	rounds.Slow(t)
	q := newQuantum(t)
	q.order("keys ecdsa-p256,ml-dsa-65")
	q.await("ECDSA active, ML-DSA active")
	states := slices.Sorted(maps.Keys(quantumPairs))
	for _, state := range append(states, "release") {
		q.start(state, state, "der", false)
	}
	failures := func(name string) map[string]string { return q.workloads[name].status(t).failures() }
	for client, c := range q.workloads {
		for server, s := range q.workloads {
			want := quantumPairs[c.state][s.state]
			side, _, refused := strings.Cut(want, ": ")
			name := map[bool]string{true: client, false: server}[side == "client"]
			earlier := failures(name)[want]
			var seen quantumSeen
			c.ask(t, "meet "+s.addr, &seen)
			if !refused {
				assert.Equal(t, map[string]int{want: 1}, seen.Keys, "%s to %s: %v", client, server, seen.Errors)
				continue
			}
			assert.Equal(t, 1, seen.Failed, "%s to %s: %v", client, server, seen.Keys)
			assert.Eventually(t, func() bool { return failures(name)[want] != earlier }, 20*time.Second, 20*time.Millisecond,
				"%s to %s: %s; %v, of the server %v", client, server, want, seen.Errors, failures(server))
		}
	}
}
