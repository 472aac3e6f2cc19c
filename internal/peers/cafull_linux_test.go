package peers_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// caFull is the program examples/ca-full with flags.
type caFull struct {
	program, dir string // dir is for states
	flags        []string
	env          []string
}

// buildCAFull builds the program, which is a module of its own.
func buildCAFull(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "ca-full")
	out, err := exec.Command("go", "build", "-C", "../../examples/ca-full", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

func newCAFull(t *testing.T, program string, flags ...string) *caFull {
	t.Helper()
	return &caFull{program: program, dir: t.TempDir(), flags: append([]string{"-propagation", "2s", "-default-ttl", "10s", "-max-ttl", "10s",
		"-backdate", "1s", "-refresh-hint", "1s", "-linkerd-addr=", "-bundle-addr=", "-root-ca-dir="}, flags...)}
}

func (c *caFull) command(args ...string) *exec.Cmd {
	cmd := exec.Command(c.program, append(args, c.flags...)...)
	cmd.Env = append(os.Environ(), c.env...)
	return cmd
}

// run runs a command on the store, by a process with a state directory of its own unless flags name one, and returns
// what it prints.
func (c *caFull) run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := c.command(args...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, said.String())
	}
	return string(out), err
}

// serving is a server of the program.
type serving struct {
	*peers.Process
	state, istio, admin string
}

// serve starts a server whose state directory has the name.
func (c *caFull) serve(t *testing.T, name string, ports []int, args ...string) *serving {
	t.Helper()
	s := &serving{state: filepath.Join(c.dir, name), istio: fmt.Sprint("127.0.0.1:", ports[0]),
		admin: fmt.Sprint("127.0.0.1:", ports[1])}
	s.Process = peers.Start(t, s.state+".log", c.command(append(args, "-state-dir", s.state, "-istio-addr", s.istio,
		"-admin-addr", s.admin)...))
	s.Ready(t, s.ready)
	return s
}

// ready returns nil if the server says that it signs.
func (s *serving) ready() error {
	resp, err := http.Get("http://" + s.admin + "/ready")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// caller is a workload that renews at a server, and makes handshakes with itself all the time.
type caller struct {
	m            *secretcache.Manager
	done, failed atomic.Int64
}

func newCaller(t *testing.T, s *serving, account string) *caller {
	t.Helper()
	td := spiffe.MustParseTrustDomain("cluster.local")
	id := spiffe.MustParseID("spiffe://cluster.local/ns/demo/sa/" + account)
	authority := must.Get(istioca.New(istioca.Options{Endpoint: caclient.Endpoint{
		URL: "https://" + s.istio, TrustDomain: td, RootsFile: filepath.Join(s.state, "root-cert.pem"),
		Token: func(context.Context) (string, error) {
			secret, err := os.ReadFile(filepath.Join(s.state, "token-secret"))
			return string(secret) + ".demo/" + account, err
		},
	}}))(t)
	c := &caller{m: must.Get(secretcache.Start(t.Context(), secretcache.Config{ID: id, CA: authority}))(t)}
	e := must.Get(spiffetls.New(spiffetls.Config{Self: c.m, Peers: c.m, Allow: spiffe.AllowIDs(id)}))(t)
	client, server := must.Get(e.ClientConfig())(t), must.Get(e.ServerConfig())(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	t.Cleanup(func() { cancel(); <-ended; _ = c.m.Close() })
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			if err := handshake(client, server); err != nil {
				t.Logf("handshake of %s: %v", account, err)
				c.failed.Add(1)
			}
			c.done.Add(1)
			time.Sleep(20 * time.Millisecond)
		}
	}()
	return c
}

// root returns the serial number of the root of the workload's certificate, as -status prints it.
func (c *caller) root(t *testing.T) string {
	t.Helper()
	leaf := must.Get(c.m.SVID())(t).Leaf()
	b := must.Get(c.m.Bundle(spiffe.MustParseTrustDomain("cluster.local")))(t)
	for root := range b.X509Authorities() {
		if leaf.CheckSignatureFrom(root) == nil {
			return fmt.Sprintf("%x", root.SerialNumber)
		}
	}
	return ""
}

var activeKeys = regexp.MustCompile(`(?m)^(?:root|JWT key) ([0-9a-f]+): active since [^,\n]+(, private key)?`)

// moved waits until the CA signs with a root and a key for tokens that have their private keys at a custodian, or in the
// store, and until the workload has a certificate of that root.
func (c *caFull) moved(t *testing.T, w *caller, s *serving, held bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		resp, err := http.Get("http://" + s.admin + "/status")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		var text bytes.Buffer
		_, _ = text.ReadFrom(resp.Body) // or it does not match
		m := activeKeys.FindAllStringSubmatch(text.String(), -1)
		return len(m) == 2 && (m[0][2] != "") == held && (m[1][2] != "") == held && w.root(t) == m[0][1]
	}, time.Minute, 100*time.Millisecond)
	assert.Zero(t, w.failed.Load(), "of %d handshakes", w.done.Load())
}

// TestCAFullStores shares a CA in a real database between two servers, with a password in a file, by TLS with
// certificates that are replaced, as the page says.
func TestCAFullStores(t *testing.T) {
	t.Parallel()
	program := buildCAFull(t)
	for _, kind := range []string{"postgres", "mysql"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var d *peers.Database
			authority, identity, files := spiffetest.NewCA(t, "db.test"), t.TempDir(), must.Get(os.MkdirTemp("", "db"))(t)
			t.Cleanup(func() { _ = os.RemoveAll(files) })
			require.NoError(t, os.Chmod(files, 0o755)) // a server that runs as another user reads them
			writePEM(t, authority, "/server", files, 0o644, "server.pem", "server-key.pem", "roots.pem")
			writeIdentity := func() {
				writePEM(t, authority, "/ca", identity, 0o600, "svid.pem", "svid-key.pem", "bundle.pem")
			}
			writeIdentity()
			if kind == "postgres" {
				d = peers.NewPostgreSQL(t)
			} else {
				d = peers.NewMariaDB(t, "ssl_cert="+files+"/server.pem", "ssl_key="+files+"/server-key.pem",
					"ssl_ca="+files+"/roots.pem")
			}
			password := filepath.Join(t.TempDir(), "password")
			require.NoError(t, os.WriteFile(password, []byte("the first\n"), 0o600))
			c := newCAFull(t, program, "-store", kind+"://ca@"+d.Addr+"/svidkit", "-store-password-file", password)
			plain := slices.Clip(c.flags)
			c.flags = append(plain, "-store-identity", identity, "-store-server", "spiffe://db.test/server")
			d.Admin(t, must.Get(c.run(t, "-store-schema"))(t))
			d.Admin(t, strings.ReplaceAll(fileOn(t, "REPLICAS.md", "replicas."+kind+".sql"), "PASSWORD'", "the first'"))
			alter := func(text string) {
				if kind == "postgres" {
					d.Admin(t, "ALTER ROLE ca PASSWORD '"+text+"'")
				} else {
					d.Admin(t, "ALTER USER ca@'127.0.0.1' IDENTIFIED BY '"+text+"'")
				}
			}
			if kind == "postgres" {
				d.Write(t, "run/data/pg_hba.conf", "host all postgres 127.0.0.1/32 trust\n"+
					fileOn(t, "REPLICAS.md", "replicas.pg_hba.conf"))
				for name, file := range map[string]string{"cert": "server.pem", "key": "server-key.pem", "ca": "roots.pem"} {
					d.Admin(t, "ALTER SYSTEM SET ssl_"+name+"_file = '"+d.Write(t, "run/"+file,
						string(must.Get(os.ReadFile(filepath.Join(files, file)))(t)))+"'")
				}
				d.Admin(t, "ALTER SYSTEM SET ssl = on")
				d.Restart(t)
			}
			ends := func() { // connections, so that the next ones show what has changed
				if kind == "postgres" {
					d.Admin(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'ca'")
					return
				}
				for id := range strings.FieldsSeq(d.Admin(t, "SELECT id FROM information_schema.processlist WHERE user = 'ca'")) {
					d.Admin(t, "KILL CONNECTION "+id)
				}
			}

			operator := filepath.Join(c.dir, "operator")
			err := must.Err(c.run(t, "-status", "-state-dir", operator))
			require.ErrorContains(t, err, "exit status 1: ca-full: there is no CA in "+kind+"://ca@"+d.Addr+"/svidkit")
			a := c.serve(t, "a", peers.FreePorts(t, 2), "-create")
			b := c.serve(t, "b", peers.FreePorts(t, 2))
			web, db := newCaller(t, a, "web"), newCaller(t, b, "db")
			require.Equal(t, web.root(t), db.root(t))
			must.Get(c.run(t, "-rotate", "-state-dir", operator))(t)
			first := web.root(t)
			require.Eventually(t, func() bool { return web.root(t) != first && db.root(t) == web.root(t) }, time.Minute,
				100*time.Millisecond)

			// The password and the certificate are replaced, and the server is restarted, under both.
			require.NoError(t, os.WriteFile(password, []byte("the second"), 0o600))
			alter("the second")
			writeIdentity()
			ends()
			d.Restart(t)
			must.Get(c.run(t, "-rotate", "-state-dir", operator))(t)
			second := web.root(t)
			require.Eventually(t, func() bool { return web.root(t) != second && db.root(t) == web.root(t) }, time.Minute,
				100*time.Millisecond)
			require.NoError(t, errors.Join(a.ready(), b.ready()))
			assert.Zero(t, web.failed.Load()+db.failed.Load())
			logs := a.state + "/audit.jsonl," + b.state + "/audit.jsonl," + operator + "/audit.jsonl"
			said := must.Get(c.run(t, "-verify-audit", logs, "-state-dir", operator))(t)
			assert.Equal(t, 3, strings.Count(said, "all records are as they were written\n"), said)

			// What an operator gets wrong ends with an error that says what.
			require.NoError(t, os.WriteFile(password, []byte("SECRET"), 0o600))
			wrong := func(want string, args ...string) {
				t.Helper()
				cmd := c.command(append(args, "-state-dir", operator, "-wait", "5s", "-istio-addr", "127.0.0.1:0",
					"-admin-addr=")...)
				out, err := cmd.CombinedOutput()
				require.Error(t, err)
				require.Regexp(t, want, string(out))
				require.NotContains(t, string(out), "SECRET")
			}
			wrong("(?i)(password authentication failed|access denied)")
			require.NoError(t, os.WriteFile(password, []byte("the second"), 0o600))
			c.flags = append(plain, "-store-identity", identity, "-store-server", "spiffe://db.test/other")
			wrong("spiffe://db.test/server")
			c.flags = append(plain, "-store-identity", identity) // so that the server has to have the host's name
			wrong("(?i)certificate")
			c.flags = plain
			wrong("(?i)(no pg_hba.conf entry|access denied)")
		})
	}
}

// writePEM writes a certificate, its key and the roots to files with these names.
func writePEM(t *testing.T, ca *spiffetest.CA, path, dir string, mode fs.FileMode, cert, key, roots string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o755))
	certs, keys := must.Get2(ca.SVID(path).MarshalPEM())(t)
	for name, text := range map[string][]byte{cert: certs, key: keys, roots: ca.Bundle().MarshalPEM()} {
		next := filepath.Join(dir, name+".new")
		require.NoError(t, errors.Join(os.WriteFile(next, text, mode), os.Chmod(next, mode),
			os.Rename(next, filepath.Join(dir, name))))
	}
}

// TestCAFullCustody moves the keys of a CA to a real custodian and back while a workload renews, and seals its store.
func TestCAFullCustody(t *testing.T) {
	t.Parallel()
	program := buildCAFull(t)
	for _, kind := range []string{"openbao", "pkcs11", "tpm"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			c, dir := newCAFull(t, program), t.TempDir()
			write := func(name, text string) string {
				path := filepath.Join(dir, name)
				require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
				return path
			}
			var options, other string // files, the second one of another custodian of the kind
			var deny func()           // makes the custodian refuse this CA
			denied := ""              // what is said then
			switch kind {
			case "openbao":
				b := peers.NewOpenBao(t)
				mountTransit(t, b, "")
				b.Do(t, "", http.MethodPost, "sys/mounts/elsewhere", doc{"type": "transit"}, nil)
				b.Do(t, "", http.MethodPost, "elsewhere/keys/seal", doc{"type": "aes256-gcm96"}, nil)
				policy := transitPolicy(t)
				policy += strings.ReplaceAll(policy, `"transit/`, `"elsewhere/`)
				policy = strings.Replace(policy, `path "transit/keys" `, `path "sys/mounts" { capabilities = ["read"] }`+"\n"+
					`path "transit/keys" `, 1)
				token := write("token", b.Token(t, policy))
				text := `{"url": "` + b.URL + `", "roots_file": "` + b.RootsFile + `", "token_file": "` + token + `", "seal_key": "seal"`
				options, other = write("bao.json", text+"}"), write("elsewhere.json", text+`, "mount": "elsewhere"}`)
				deny, denied = func() { write("token", "hvs.wrong") }, "permission denied"
			case "pkcs11":
				peers.Installed(t, "softhsm2-util", "softhsm2")
				c.env = []string{"SOFTHSM2_CONF=" + write("softhsm2.conf", "directories.tokendir = "+dir+"\nlog.level = ERROR\n")}
				for _, label := range []string{"ca", "elsewhere"} {
					cmd := exec.Command("softhsm2-util", "--init-token", "--free", "--label", label, "--so-pin", "so-pin-1",
						"--pin", "user-pin-1")
					cmd.Env = append(os.Environ(), c.env...)
					out, err := cmd.CombinedOutput()
					require.NoError(t, err, "%s", out)
				}
				pin := write("pin", "user-pin-1\n")
				text := `{"module": "` + softHSM(t) + `", "pin_file": "` + pin + `", "seal_key": "seal", "token": `
				options, other = write("hsm.json", text+`"ca"}`), write("elsewhere.json", text+`"elsewhere"}`)
				deny, denied = func() { write("pin", "wrong-pin-1") }, "PIN"
			case "tpm":
				chip := func() string {
					peers.Installed(t, "swtpm", "swtpm")
					dir := must.Get(os.MkdirTemp("", "tpm"))(t) // a short path, for sockets
					t.Cleanup(func() { _ = os.RemoveAll(dir) })
					socket := filepath.Join(dir, "tpm.sock")
					p := peers.Start(t, filepath.Join(dir, "log"), exec.Command("swtpm", "socket", "--tpm2", "--tpmstate",
						"dir="+dir, "--server", "type=unixio,path="+socket, "--flags", "not-need-init,startup-clear"))
					p.Ready(t, func() error { return must.Err(os.Stat(socket)) })
					return `{"device": "` + socket + `", "directory": "`
				}
				device := chip()
				options = write("tpm.json", device+filepath.Join(dir, "keys")+`"}`)
				other = write("elsewhere.json", chip()+filepath.Join(dir, "other")+`"}`)
				deny, denied = func() { write("tpm.json", device+"/proc/keys\"}") }, "/proc"
			}
			at, elsewhere := kind+":"+options, kind+":"+other
			ports, state := peers.FreePorts(t, 2), filepath.Join(c.dir, "ca")
			on := func(args ...string) []string { return append(args, "-state-dir", state) }
			s := c.serve(t, "ca", ports, "-create")
			web := newCaller(t, s, "web")
			move := func(held bool, flags ...string) {
				t.Helper()
				s.Stop()
				must.Get(c.run(t, on(append(flags, "-rotate")...)...))(t)
				must.Get(c.run(t, on(append(flags, "-rotate-jwt")...)...))(t)
				s = c.serve(t, "ca", ports, flags...)
				c.moved(t, web, s, held)
			}
			move(true, "-custodian", at)
			s.Stop()
			said := must.Get(c.run(t, on("-custodian", at, "-seal", at, "-reseal")...))(t)
			assert.Contains(t, said, "is sealed\n")
			assert.Contains(t, said, ", private key svidkit-")
			assert.NotContains(t, contents(t, state, "ca"), "PRIVATE KEY")

			// A copy of the store opens nowhere else, and the other kinds of misuse are told.
			for _, tc := range []struct {
				want  string
				flags []string
			}{
				{"is sealed, and no key is named", []string{"-custodian", at}},
				{"unseal svidkit-sealed.json: ", []string{"-custodian", at, "-seal", elsewhere}},
				{"name the custodian that has it", []string{"-custodian", elsewhere, "-seal", at}},
			} {
				cmd := c.command(on(append(tc.flags, "-wait", "3s", "-istio-addr", "127.0.0.1:0", "-admin-addr=")...)...)
				out, err := cmd.CombinedOutput()
				require.Error(t, err, tc.flags)
				assert.Contains(t, string(out), tc.want, tc.flags)
			}
			s = c.serve(t, "ca", ports, "-custodian", at, "-seal", at)
			c.moved(t, web, s, true)
			s.Stop()
			must.Get(c.run(t, on("-custodian", at, "-unseal", at, "-reseal")...))(t)
			move(false, "-former-custodian", at)
			s.Stop()
			status := must.Get(c.run(t, on("-former-custodian", at, "-status")...))(t)
			assert.NotRegexp(t, "active since .* private key", status)
			deny()
			out, err := c.command(on("-custodian", at, "-rotate")...).CombinedOutput()
			require.Error(t, err)
			assert.Contains(t, string(out), denied)
			s = c.serve(t, "ca", ports) // it needs no custodian any more
			c.moved(t, web, s, false)
			assert.Greater(t, web.done.Load(), int64(100))
		})
	}
}

// softHSM returns the path of its library.
func softHSM(t *testing.T) string {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/softhsm/libsofthsm2.so")
	more, _ := filepath.Glob("/usr/lib/*/softhsm/libsofthsm2.so")
	found = append(found, more...)
	require.NotEmpty(t, found)
	return found[0]
}

// contents returns all files of a store together.
func contents(t *testing.T, state, folder string) string {
	t.Helper()
	var all strings.Builder
	require.NoError(t, filepath.WalkDir(filepath.Join(state, folder), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all.Write(must.Get(os.ReadFile(path))(t))
		}
		return err
	}))
	return all.String()
}
