package compare

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// roles are the programs below programs/svidkit that show what a user has to write, and their counterparts below
// programs/gospiffe. Lines are lines of code: those with nothing but comments, and blank ones, do not count.
var roles = []struct {
	name  string
	title string // in BENCHMARKS.md
	file  string
	lines int  // what a user wrote before, and the program must stay below
	peer  bool // there is a counterpart
	less  bool // it must have more lines
}{
	{"http", "a service over HTTP that calls another one", "main.go", 70, true, true},
	{"grpc", "the same over gRPC", "main.go", 76, true, false}, // as a policy that is a mistake is an error
	{"raw", "the same over TLS alone", "main.go", 73, true, false},
	{"agent", "an agent for three users, with tokens, readiness and metrics", "main.go", 178, false, false},
	{"tests", "tests: another trust domain, expired, rotated away, a hanging agent, an outage of the CA", "service_test.go", 189, false, false},
	{"httpserver", "an HTTP server", "main.go", 45, true, false}, // as a configuration that is a mistake is an error, once more than with the peer,
	{"httpclient", "an HTTP client", "main.go", 46, true, false},
	{"jwtserver", "an HTTP server for tokens", "main.go", 48, true, true},
	{"jwtclient", "its client", "main.go", 59, true, true},
	{"watcher", "a watcher of identities and bundles", "main.go", 44, true, true},
}

// linesOf counts the lines of a file with code, and all.
func linesOf(t *testing.T, file string) (code, all int) {
	t.Helper()
	src := must.Get(os.ReadFile(file))(t)
	fset := token.NewFileSet()
	f := fset.AddFile(file, -1, len(src))
	var s scanner.Scanner
	s.Init(f, src, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return len(lines), bytes.Count(src, []byte("\n"))
		}
		if tok == token.SEMICOLON && lit != ";" {
			continue // not written
		}
		for n := range 1 + strings.Count(lit, "\n") {
			lines[f.Line(pos)+n] = true
		}
	}
}

// TestLines holds the lengths of the programs, and the table in BENCHMARKS.md.
func TestLines(t *testing.T) {
	t.Parallel()
	page := must.Get(os.ReadFile("BENCHMARKS.md"))(t)
	for _, r := range roles {
		code, all := linesOf(t, filepath.Join("programs", "svidkit", r.name, r.file))
		assert.Less(t, code, r.lines, r.name)
		peer := "–"
		if r.peer {
			theirs, all := linesOf(t, filepath.Join("programs", "gospiffe", r.name, r.file))
			peer = strconv.Itoa(theirs)
			if r.less {
				assert.Less(t, code, theirs, r.name)
			}
			t.Logf("%s: with comments and blank lines %d in the counterpart", r.name, all)
		}
		t.Logf("%s: with comments and blank lines %d", r.name, all)
		row := fmt.Sprintf("| %s | %d | %s | %d |\n", r.title, code, peer, r.lines)
		t.Log(row)
		assert.Contains(t, string(page), row, r.name)
	}
}

// TestRoles runs all programs beside an agent of ours, also the ones of one library with those of the other.
func TestRoles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		require.NoError(t, os.Chmod(d, 0o711)) // for other users
	}
	for _, library := range []string{"svidkit", "gospiffe"} {
		for _, r := range roles {
			if r.file == "main.go" && (r.peer || library == "svidkit") {
				goCommand(t, "build", "-o", filepath.Join(dir, library, r.name), "./programs/"+library+"/"+r.name)
			}
		}
	}
	for _, server := range []string{"svidkit", "gospiffe"} {
		for _, client := range []string{"svidkit", "gospiffe"} {
			with := func(test func(t *testing.T, serving, calling string)) func(*testing.T) {
				return func(t *testing.T) {
					t.Parallel()
					test(t, filepath.Join(dir, server), filepath.Join(dir, client))
				}
			}
			t.Run(client+" calls "+server+" by http", with(httpRole))
			t.Run(client+" calls "+server+" by grpc", with(grpcRole))
			t.Run(client+" calls "+server+" by raw TLS", with(rawRole))
			t.Run(client+" calls "+server+" by ports", with(ports))
		}
		t.Run(server+" watches", func(t *testing.T) {
			t.Parallel()
			watches(t, filepath.Join(dir, server))
		})
	}
	t.Run("agent", func(t *testing.T) {
		t.Parallel()
		agentRole(t, dir)
	})
}

// fleet is a trust domain with an agent for each workload.
type fleet struct {
	a      *authority
	agents map[string]*live
	socket map[string]string
}

func newFleet(t *testing.T, workloads ...string) *fleet {
	t.Helper()
	f := &fleet{newAuthority(t, "example.org"), map[string]*live{}, map[string]string{}}
	for _, w := range workloads {
		f.agents[w] = newLive(f.a.snapshot(t, w))
		f.socket[w] = serveOurs(t, f.agents[w], &workloadserver.Options{IssueJWTSVID: f.a.jwt.IssueJWTSVID})
	}
	return f
}

// rotate gives all workloads new identities, and bundles with one more root. That root does not sign yet, as nothing says
// when all of them have heard of it.
func (f *fleet) rotate(t *testing.T) {
	t.Helper()
	f.a.ca.Prepare()
	for w, agent := range f.agents {
		agent.set(f.a.snapshot(t, w), nil)
	}
}

// running is a program that runs.
type running struct {
	cmd  *exec.Cmd
	done chan error

	mu  sync.Mutex
	out bytes.Buffer
}

// Write implements [io.Writer].
func (r *running) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.out.Write(b)
}

func (r *running) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.out.String()
}

// start runs a program, as the workload of a socket.
func start(t *testing.T, socket, program string, args ...string) *running {
	t.Helper()
	r := &running{cmd: exec.Command(program, args...), done: make(chan error, 1)}
	r.cmd.Env = append(os.Environ(), workloadapi.SocketEnv+"="+socket)
	r.cmd.Stdout, r.cmd.Stderr = r, r
	require.NoError(t, r.cmd.Start())
	go func() { r.done <- r.cmd.Wait() }()
	t.Cleanup(func() { // if it was not stopped
		_ = r.cmd.Process.Kill()
	})
	return r
}

// stop tells it to stop, which it does without an error.
func (r *running) stop(t *testing.T) {
	t.Helper()
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-r.done:
		require.NoError(t, err, r.text())
	case <-time.After(30 * time.Second):
		t.Fatal("it does not stop: ", r.text())
	}
}

// lastPort is the last one that was given to a program. It is not of those that the system chooses for others, and
// begins anywhere, for other runs beside this one.
var lastPort = func() *atomic.Int32 {
	var first atomic.Int32
	first.Store(20000 + rand.Int32N(10000))
	return &first
}()

// freeAddress returns an address that nothing listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 1000 {
		addr := "127.0.0.1:" + strconv.Itoa(int(lastPort.Add(1)))
		if l, err := net.Listen("tcp", addr); err == nil {
			require.NoError(t, l.Close())
			return addr
		}
	}
	t.Fatal("no free port")
	return ""
}

// serving waits until the address is served.
func (r *running) serving(t *testing.T, addr string) {
	t.Helper()
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}, time.Minute, 10*time.Millisecond, r.text())
}

// service is a program that serves, and its database.
type service struct {
	*fleet
	role      string
	web, db   *running
	at, below string // their addresses
}

func newService(t *testing.T, role, calling, serving string) *service {
	t.Helper()
	s := &service{fleet: newFleet(t, "/web", "/db", "/neighbour"), role: role, at: freeAddress(t), below: freeAddress(t)}
	s.db = s.database(t, "/db", serving)
	s.web = start(t, s.socket["/web"], filepath.Join(calling, role), s.at, s.below)
	s.web.serving(t, s.at)
	return s
}

// database runs the program that the service asks.
func (s *service) database(t *testing.T, workload, library string) *running {
	t.Helper()
	args := []string{s.below}
	if s.role != "raw" { // which needs none
		args = append(args, s.at)
	}
	db := start(t, s.socket[workload], filepath.Join(library, s.role), args...)
	db.serving(t, s.below)
	return db
}

// replace stops the database, and runs a neighbour at its address.
func (s *service) replace(t *testing.T, library string) {
	t.Helper()
	s.db.stop(t)
	s.db = s.database(t, "/neighbour", library)
}

// caller returns a configuration for a client that the services serve.
func (f *fleet) caller(t *testing.T) *tls.Config {
	t.Helper()
	endpoint, err := spiffetls.New(spiffetls.Config{Self: f.a.ca.SVID("/client"), Peers: f.a.bundle(t), Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/web"))})
	require.NoError(t, err)
	return must.Get(endpoint.ClientConfig())(t)
}

// stranger returns one that they refuse: its trust domain is another one.
func stranger(t *testing.T) *tls.Config {
	t.Helper()
	return spiffetest.TLSConfig(spiffetest.NewCA(t, "other.test").Certificate("/client"))
}

func httpRole(t *testing.T, serving, calling string) {
	s := newService(t, "http", calling, serving)
	get := func(config *tls.Config, path string) (string, error) {
		transport := &http.Transport{TLSClientConfig: config}
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport}).Get("https://" + s.at + path)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return fmt.Sprint(resp.StatusCode, " ", string(body)), err
	}
	for range 2 {
		text := must.Get(get(s.caller(t), "/"))(t)
		assert.Equal(t, "200 hello spiffe://example.org/client\n", text)
		text = must.Get(get(s.caller(t), "/db"))(t)
		assert.Equal(t, "200 hello spiffe://example.org/web\n", text)
		s.rotate(t)
	}
	_, err := get(stranger(t), "/")
	assert.Error(t, err)
	s.replace(t, serving)
	text := must.Get(get(s.caller(t), "/db"))(t)
	assert.Contains(t, text, "502 ")
	s.web.stop(t)
	s.db.stop(t)
}

func grpcRole(t *testing.T, serving, calling string) {
	s := newService(t, "grpc", calling, serving)
	check := func(config *tls.Config, service string) error {
		conn := must.Get(grpc.NewClient(s.at, grpc.WithTransportCredentials(credentials.NewTLS(config))))(t)
		defer conn.Close()
		_, err := grpc_health_v1.NewHealthClient(conn).Check(timeout(t), &grpc_health_v1.HealthCheckRequest{Service: service})
		return err
	}
	for range 2 {
		require.NoError(t, check(s.caller(t), ""))
		require.NoError(t, check(s.caller(t), "db"))
		s.rotate(t)
	}
	assert.Error(t, check(stranger(t), ""))
	assert.Equal(t, 4, strings.Count(s.web.text(), "hello spiffe://example.org/client\n"), s.web.text())
	assert.Equal(t, 2, strings.Count(s.db.text(), "hello spiffe://example.org/web\n"), s.db.text())
	s.replace(t, serving)
	assert.Error(t, check(s.caller(t), "db"))
	assert.NotContains(t, s.db.text(), "hello")
	s.web.stop(t)
	s.db.stop(t)
}

func rawRole(t *testing.T, serving, calling string) {
	s := newService(t, "raw", calling, serving)
	greeting := func(config *tls.Config) (string, error) {
		conn := must.Get(tls.Dial("tcp", s.at, config))(t)
		defer conn.Close()
		text, err := io.ReadAll(conn)
		return string(text), err
	}
	for range 2 {
		text := must.Get(greeting(s.caller(t)))(t)
		assert.Equal(t, "hello spiffe://example.org/client\nhello spiffe://example.org/web\n", text)
		s.rotate(t)
	}
	_, err := greeting(stranger(t))
	assert.Error(t, err)
	s.replace(t, serving)
	text := must.Get(greeting(s.caller(t)))(t)
	assert.Equal(t, "hello spiffe://example.org/client\n", text)
	s.web.stop(t)
	s.db.stop(t)
}

// ports are the ports of the peer's examples: a server, and a client that asks it once.
func ports(t *testing.T, serving, calling string) {
	f := newFleet(t, "/server", "/client", "/other")
	for _, kind := range []string{"http", "jwt"} {
		at := freeAddress(t)
		server := start(t, f.socket["/server"], filepath.Join(serving, kind+"server"), at)
		server.serving(t, at)
		want := map[string]string{"http": "Success!!!\n", "jwt": "hello spiffe://example.org/client\n"}[kind]
		ask := func(workload string) (string, error) {
			client := start(t, f.socket[workload], filepath.Join(calling, kind+"client"), at)
			err := <-client.done
			return client.text(), err
		}
		text, err := ask("/client")
		require.NoError(t, err, text)
		assert.Equal(t, want, text)
		text, err = ask("/other")
		assert.NotContains(t, text, want, "%v", err)
		assert.True(t, err != nil || strings.Contains(strings.ToLower(text), "forbidden"), text)
		require.NoError(t, server.cmd.Process.Kill())
	}
}

func watches(t *testing.T, library string) {
	f := newFleet(t, "/web")
	watcher := start(t, f.socket["/web"], filepath.Join(library, "watcher"))
	for n := range 2 {
		require.Eventually(t, func() bool {
			text := watcher.text()
			return strings.Count(text, "identity spiffe://example.org/web\n") > n && strings.Count(text, "bundle example.org\n") > 0
		}, time.Minute, 10*time.Millisecond, watcher.text())
		f.rotate(t)
	}
	watcher.stop(t)
}

// agentRole runs the agent, and a workload of each user if this process may become them.
func agentRole(t *testing.T, dir string) {
	path, at := socket(t), freeAddress(t)
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o711))
	agent := start(t, "", filepath.Join(dir, "svidkit", "agent"), path, at)
	agent.serving(t, at)
	get := func(what string) (string, int) {
		resp := must.Get(http.Get("http://" + at + "/" + what))(t)
		defer resp.Body.Close()
		body := must.Get(io.ReadAll(resp.Body))(t)
		return string(body), resp.StatusCode
	}
	require.Eventually(t, func() bool { _, status := get("readyz"); return status == http.StatusOK }, time.Minute, 10*time.Millisecond)
	text, _ := get("metrics")
	assert.Contains(t, text, `svidkit_workloadserver_streams{part="api"} 0`)
	for _, id := range []string{"web", "db", "batch"} {
		assert.Contains(t, text, `svidkit_identity_end_timestamp_seconds{part="/`+id+`",identity="spiffe://example.org/`+id+`"}`)
	}
	as := func(uid uint32) (string, error) {
		cmd := exec.CommandContext(timeout(t), filepath.Join(dir, "gospiffe", "watcher"))
		cmd.Env = []string{workloadapi.SocketEnv + "=unix://" + path}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		var out running
		out.cmd, cmd.Stdout, cmd.Stderr = cmd, &out, &out
		if err := cmd.Start(); err != nil {
			return "", err
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		defer func() { _ = cmd.Process.Kill(); <-ended }()
		for ctx := timeout(t); ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
			if text := out.text(); strings.Contains(text, "identity ") || strings.Contains(text, "identities: ") {
				break
			}
		}
		return out.text(), nil
	}
	if os.Geteuid() == 0 {
		for uid, id := range map[uint32]string{1001: "web", 1002: "db", 1003: "batch"} {
			text := must.Get(as(uid))(t)
			assert.Contains(t, text, "spiffe://example.org/"+id)
		}
		text := must.Get(as(1004))(t)
		assert.Contains(t, text, "PermissionDenied")
	}
	agent.stop(t)
}
