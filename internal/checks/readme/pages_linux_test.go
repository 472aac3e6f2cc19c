package readme_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/sds"
)

// block is commands of a page, after a comment that says how they are run:
//
//	<!-- run -->                 to their end, without an error
//	<!-- run as 1000 -->         as that user
//	<!-- run … until TEXT -->    again and again until TEXT is printed
//	<!-- start: TEXT -->         in a terminal of their own, until TEXT is printed
type block struct{ start, user, until, commands string }

var marked = regexp.MustCompile(`<!-- (?:run|start: (.*?))(?: as (\d+))?(?: until (.*?))? -->\n\n((?:    .*\n|\n)+)`)

func blocks(t *testing.T, page string) []block {
	text := must.Get(os.ReadFile(page))(t)
	var all []block
	for _, m := range marked.FindAllStringSubmatch(string(text), -1) {
		commands := regexp.MustCompile(`(?m)^    `).ReplaceAllString(m[4], "")
		all = append(all, block{m[1], m[2], m[3], commands})
	}
	require.Len(t, all, strings.Count(string(text), "<!-- run")+strings.Count(string(text), "<!-- start"), "each comment has its commands")
	require.NotEmpty(t, all)
	return all
}

// walk does what a page says, and ends what it has started.
func walk(t *testing.T, page string, environ ...string) {
	for _, b := range blocks(t, page) {
		if b.start != "" {
			c := open(t, b.commands, environ...)
			c.await(b.start)
			t.Cleanup(func() { c.interrupt() })
			continue
		}
		args := []string{"sh", "-euc", b.commands}
		if b.user != "" {
			args = append([]string{"setpriv", "--reuid=" + b.user, "--regid=" + b.user, "--clear-groups"}, args...)
		}
		until := time.Now().Add(30 * time.Second)
		for {
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Dir = "../../.."
			cmd.Env = append(os.Environ(), environ...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			out, err := cmd.CombinedOutput()
			t.Logf("%s\n%s", b.commands, out)
			if b.until != "" && !strings.Contains(string(out), b.until) && time.Now().Before(until) {
				time.Sleep(100 * time.Millisecond)
				continue
			}
			require.NoError(t, err, "%s\n%s", b.commands, out)
			require.Contains(t, string(out), b.until)
			break
		}
	}
}

// TestMachine does what MACHINE.md says, as root, where other processes do not see it.
func TestMachine(t *testing.T) {
	rounds.Slow(t)
	if os.Getuid() != 0 {
		t.Skip("the page is for root")
	}
	if isolate(t, "/etc", "/run", "/var/lib", "/usr/local/bin", "/tmp") {
		walk(t, "../../../examples/MACHINE.md")
	}
}

// TestNode does what NODE.md says, as root, where other processes do not see it, with the Envoy of ENVOY_PATH.
func TestNode(t *testing.T) {
	rounds.Slow(t)
	if os.Getuid() != 0 {
		t.Skip("the page is for root")
	}
	envoy := must.Get(os.ReadFile(envoytest.Binary(t)))(t)
	for _, name := range []string{"openssl", "/usr/bin/python3"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skip(err)
		}
	}
	if isolate(t, "/etc", "/run", "/var/lib", "/usr/local/bin", "/tmp") {
		require.NoError(t, os.WriteFile("/usr/local/bin/envoy", envoy, 0o755))
		walk(t, "../../../examples/NODE.md")
	}
}

// The three tests of CUSTODY.md do what it says, as root, where other processes do not see it, with the custodians that
// are installed.
func TestCustodyOpenBao(t *testing.T) { testCustody(t, "OpenBao", "bao") }
func TestCustodyPKCS11(t *testing.T)  { testCustody(t, "PKCS 11", "softhsm2-util") }
func TestCustodyTPM(t *testing.T)     { testCustody(t, "TPM", "swtpm") }

func testCustody(t *testing.T, section, program string) {
	rounds.Slow(t)
	if os.Getuid() != 0 {
		t.Skip("the page is for root")
	}
	path, err := exec.LookPath(program)
	if cache, bad := os.UserCacheDir(); err != nil && bad == nil { // that of internal/peers, which has a bao
		found, _ := filepath.Glob(filepath.Join(cache, "svidkit-peers/*/packages/*/bin", program))
		path = slices.Max(append(found, ""))
	}
	if path == "" {
		t.Skip(err)
	}
	page := string(must.Get(os.ReadFile("../../../examples/CUSTODY.md"))(t))
	part := func(title string) string {
		_, text, ok := strings.Cut(page, "\n## "+title+"\n")
		require.True(t, ok, title)
		text, _, _ = strings.Cut(text, "\n## ")
		return text
	}
	if isolate(t, "/etc", "/var/lib", "/usr/local/bin", "/tmp") {
		if !strings.HasPrefix(path, "/usr/bin/") {
			require.NoError(t, os.Symlink(path, "/usr/local/bin/"+program))
		}
		both := filepath.Join(t.TempDir(), "CUSTODY.md")
		require.NoError(t, os.WriteFile(both, []byte(part("Build")+part(section)), 0o600))
		walk(t, both)
	}
}

// TestService does what SERVICE.md says, in a home of its own. A workspace is in the place of "go get", so that the programs are
// built with this tree.
func TestService(t *testing.T) {
	rounds.Slow(t)
	if !isolate(t) {
		return
	}
	root := must.Get(filepath.Abs("../../.."))(t)
	home, err := os.MkdirTemp("", "home") // shorter than that of the test, for the address of a socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	work := filepath.Join(home, "go.work")
	text := "go " + strings.TrimPrefix(runtime.Version(), "go") + "\n\nuse (\n\t" + filepath.Join(home, "hello") + "\n\t" + root + "\n)\n"
	require.NoError(t, os.WriteFile(work, []byte(text), 0o600))
	environ := []string{"HOME=" + home, "GOWORK=" + work, "GOFLAGS="}
	for _, name := range []string{"GOENV", "GOCACHE", "GOMODCACHE"} { // which would be in that home, too
		value := must.Get(exec.Command("go", "env", name).Output())(t)
		environ = append(environ, name+"="+strings.TrimSpace(string(value)))
	}
	walk(t, "../../../examples/SERVICE.md", environ...)
}

const isolated = "SVIDKIT_TEST_ISOLATED"

// isolate runs the test that calls it in a network namespace of its own, as other programs may use the ports of the commands,
// and with directories whose changes other processes do not see. It reports whether this is that process.
func isolate(t *testing.T, folders ...string) bool {
	if os.Getenv(isolated) != "" {
		if len(folders) > 0 {
			require.NoError(t, syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""))
		}
		for _, folder := range folders {
			layers := t.TempDir()
			require.NoError(t, syscall.Mount("tmpfs", layers, "tmpfs", 0, ""))
			t.Cleanup(func() { _ = syscall.Unmount(layers, syscall.MNT_DETACH) })
			upper, work := filepath.Join(layers, "upper"), filepath.Join(layers, "work")
			info := must.Get(os.Stat(folder))(t)
			require.NoError(t, errors.Join(os.Mkdir(upper, 0o755), os.Chmod(upper, info.Mode()), os.Mkdir(work, 0o755)))
			err := syscall.Mount("overlay", folder, "overlay", 0, "lowerdir="+folder+",upperdir="+upper+",workdir="+work)
			if err != nil {
				t.Skipf("no overlay file system here: %v", err)
			}
			t.Cleanup(func() { _ = syscall.Unmount(folder, syscall.MNT_DETACH) })
		}
		fd := must.Get(syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0))(t)
		defer syscall.Close(fd)
		request := struct { // ifreq, of 40 bytes
			name  [syscall.IFNAMSIZ]byte
			flags uint16
			_     [22]byte
		}{[syscall.IFNAMSIZ]byte{'l', 'o'}, syscall.IFF_UP, [22]byte{}}
		_, _, failed := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&request)))
		require.Zero(t, failed)
		return true
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), isolated+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) {
		t.Skipf("this user may not make a network namespace: %v", err)
	}
	t.Logf("%s", out)
	require.NoError(t, err)
	if strings.Contains(string(out), "--- SKIP") {
		t.Skip("skipped in its namespaces")
	}
	return false
}

// terminal runs a command as a shell in the directory of the project does, until Ctrl-C.
type terminal struct {
	t   *testing.T
	cmd *exec.Cmd
	mu  sync.Mutex
	out bytes.Buffer
}

func (c *terminal) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.Write(b)
}

func (c *terminal) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.String()
}

func open(t *testing.T, command string, environ ...string) *terminal {
	c := &terminal{t: t, cmd: exec.Command("sh", "-c", command)}
	c.cmd.Dir = "../../.."
	c.cmd.Env = append(os.Environ(), environ...)
	c.cmd.Stdout, c.cmd.Stderr = c, c
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, c.cmd.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL) // if the test has failed
		_ = c.cmd.Wait()
		if t.Failed() {
			t.Logf("%s\n%s", command, c.text())
		}
	})
	return c
}

// interrupt is Ctrl-C. It returns the output.
func (c *terminal) interrupt() string {
	require.NoError(c.t, syscall.Kill(-c.cmd.Process.Pid, syscall.SIGINT))
	_ = c.cmd.Wait() // with the status of "go run"
	return c.text()
}

func (c *terminal) await(text string) {
	c.t.Helper()
	require.Eventually(c.t, func() bool { return strings.Contains(c.text(), text) }, time.Minute, 10*time.Millisecond, text)
}

// TestTwoCommands runs the two commands of examples/README.md as they are printed there, and each again. The identity is served, the
// CA knows the agent's token after its restart, and nothing is a warning.
func TestTwoCommands(t *testing.T) {
	rounds.Slow(t)
	if !isolate(t) {
		return
	}
	page := must.Get(os.ReadFile("../../../examples/README.md"))(t)
	printed := regexp.MustCompile(`(?m)^    (go run \./examples/ca)\n    (go run \./examples/agent)$`).FindStringSubmatch(string(page))
	require.NotNil(t, printed, "examples/README.md has the two commands")
	home, run := t.TempDir(), t.TempDir()
	cache := must.Get(exec.Command("go", "env", "GOCACHE", "GOMODCACHE", "GOPATH").Output())(t)
	caches := strings.Fields(string(cache))
	user := []string{
		"HOME=" + home, "XDG_STATE_HOME=", "XDG_RUNTIME_DIR=" + run, "GOCACHE=" + caches[0], "GOMODCACHE=" + caches[1], "GOPATH=" + caches[2],
		"KUBERNETES_SERVICE_HOST=",
	}

	ready := func() string { // the serial of what is served
		require.Eventually(t, func() bool {
			resp, err := http.Get("http://127.0.0.1:15020/healthz/ready")
			if err != nil {
				return false
			}
			defer resp.Body.Close()
			return resp.StatusCode == http.StatusOK
		}, time.Minute, 10*time.Millisecond)
		sockets := must.Get(filepath.Glob(filepath.Join(run, "*/*/var/run/secrets/workload-spiffe-uds/socket")))(t)
		require.Len(t, sockets, 1)
		client := sds.UnixClient(sockets[0])
		defer client.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		for secret, err := range sds.NewClient(client, "http://localhost").Watch(ctx, "default") {
			require.NoError(t, err)
			chain, _, ok := secret.KeyPair()
			require.True(t, ok)
			block, _ := pem.Decode(chain)
			leaf := must.Get(x509.ParseCertificate(block.Bytes))(t)
			require.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", leaf.URIs[0].String())
			return leaf.SerialNumber.String()
		}
		return ""
	}
	healthy := func(output string) {
		assert.NotContains(t, output, "level=WARN")
		assert.NotContains(t, output, "level=ERROR")
	}

	authority := open(t, printed[1], user...)
	authority.await("metrics, health:")
	agent := open(t, printed[2], user...)
	first := ready()
	agent.await("secretcache: new certificate")
	healthy(agent.interrupt())

	healthy(authority.interrupt())
	authority = open(t, printed[1], user...)
	authority.await("metrics, health:")
	agent = open(t, printed[2], user...)
	second := ready()
	require.NotEqual(t, first, second)
	healthy(authority.interrupt())
	healthy(agent.interrupt())

	// What the CA prints for another directory, with a control plane: its stream has the token.
	authority = open(t, printed[1]+" -state-dir "+filepath.Join(home, "elsewhere")+" -create", user...)
	authority.await("metrics, health:")
	command := regexp.MustCompile(`(?m)^agent of demo/web: +(.*)$`).FindStringSubmatch(authority.text())
	require.NotNil(t, command)
	var plane controlPlane
	plane.start(t)
	agent = open(t, command[1], append(user, `PROXY_CONFIG={"discoveryAddress":"127.0.0.1:15010"}`)...)
	require.NotEqual(t, second, ready())
	sockets := must.Get(filepath.Glob(filepath.Join(run, "*/*/etc/istio/proxy/XDS")))(t)
	require.Len(t, sockets, 1)
	plane.ask(t, sockets[0])
	secret := must.Get(os.ReadFile(filepath.Join(home, "elsewhere", "token-secret")))(t)
	require.Equal(t, "Bearer "+string(secret)+".demo/web", plane.token())
	agent.interrupt()
	healthy(authority.interrupt())
}

// controlPlane notes the token of a stream, and ends it.
type controlPlane struct {
	mu            sync.Mutex
	authorization string
}

const aggregated = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"

func (p *controlPlane) start(t *testing.T) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:15010"))(t)
	server := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		p.authorization = r.Header.Get("Authorization")
		p.mu.Unlock()
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", "16")
	})}
	server.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
}

func (p *controlPlane) token() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.authorization
}

// ask opens a stream for clusters, as an Envoy does, and waits for its end.
func (p *controlPlane) ask(t *testing.T, socket string) {
	const clusters = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	message := append([]byte{4<<3 | 2, byte(len(clusters))}, clusters...)
	frame := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	client := sds.UnixClient(socket)
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r := must.Get(http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+aggregated, bytes.NewReader(frame)))(t)
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("Te", "trailers")
	resp := must.Get(client.Do(r))(t)
	defer resp.Body.Close()
	must.Get(io.Copy(io.Discard, resp.Body))(t)
}
