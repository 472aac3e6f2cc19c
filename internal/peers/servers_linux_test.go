package peers_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// A database is a server of others that has its identity from files of a Sink, configured and reloaded as SERVERS.md says.
type database struct {
	databaseKind
	ca        *spiffetest.CA
	issuer    *spiffetest.CA // below the root of ca that signs
	self, web *held          // of the server, and of its clients
	sink      *filesink.Sink
	dir       string // of the test: identity has the files, run what the server makes
	addr      string
	page      *strings.Replacer   // from the paths of the page to those of the test
	as        *syscall.Credential // nil for this user
	path      string              // to find the commands of the page
	start     func() *exec.Cmd
	process   *peers.Process
	watcher   *peers.Process // the command of the page: it writes the files and reloads, and not this test; or nil
	config    *tls.Config    // of clients
}

// A databaseKind is what differs between databases.
type databaseKind struct {
	name    string // of its command on the page
	run     string // its directory on the page
	port    int    // on the page
	prepare func(t *testing.T, d *database)
	// open connects with a driver of others, which may not try twice.
	open func(ctx context.Context, d *database, config *tls.Config) (*session, error)
	dial func(ctx context.Context, d *database, dialer *spiffetls.Endpoint) (*session, error) // nil if the driver takes no dialer

	says     bool   // the command fails if the key is not that of the certificate
	wrongKey string // what it says then, or the log of the server
}

// A session is a connection that the server has let in.
type session struct {
	ask   func(context.Context) error // something that it answers
	close func() error
}

// once asks once.
func once(ctx context.Context, s *session, err error) error {
	if err != nil {
		return err
	}
	return errors.Join(s.ask(ctx), s.close())
}

// held is a source of the identity that a test puts into it.
type held struct {
	now     atomic.Pointer[spiffe.Snapshot]
	changed renew.Signal
}

func (h *held) Snapshot() (*spiffe.Snapshot, error) { return h.now.Load(), nil }
func (h *held) SVID() (*spiffe.SVID, error)         { return h.now.Load().SVID() }
func (h *held) Changed() <-chan struct{}            { return h.changed.Changed() }
func (h *held) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return h.now.Load().Bundle(td)
}

// backdate has a certificate begin in the past, as those of a CA do. OpenSSL asks time(2), which is some milliseconds behind
// at the begin of a second.
func backdate(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(-time.Minute) }

// svid mints an identity.
func (d *database) svid(path string, edit ...func(*x509.Certificate)) *spiffe.SVID {
	return d.issuer.SVID(path, append(edit, backdate)...)
}

// renew puts a new identity and the present bundles into a source.
func (d *database) renew(h *held, path string, edit ...func(*x509.Certificate)) {
	h.now.Store(spiffe.NewSnapshot(d.svid(path, edit...), d.ca.Bundles()))
	h.changed.Notify()
}

var databaseID = spiffe.MustParseID("spiffe://example.org/db")

// onPage returns the block of SERVERS.md with a name.
func onPage(t *testing.T, name string) string { t.Helper(); return fileOn(t, "SERVERS.md", name) }

// fileOn returns the file called name on another page.
func fileOn(t *testing.T, of, name string) string {
	t.Helper()
	page := must.Get(os.ReadFile("../../examples/" + of))(t)
	m := regexp.MustCompile(`<!-- file: ` + regexp.QuoteMeta(name) + ` -->\n\n((?:    .*\n|\n)+)`).FindStringSubmatch(string(page))
	require.NotNil(t, m, "%s has no %s", of, name)
	return regexp.MustCompile(`(?m)^    `).ReplaceAllString(m[1], "")
}

// newDatabase starts a server with an identity.
func newDatabase(t *testing.T, s databaseKind) *database {
	t.Helper()
	d := &database{databaseKind: s, ca: spiffetest.NewCA(t, "example.org"), self: new(held), web: new(held), dir: t.TempDir()}
	d.path = buildPrograms(t, "svid") + ":" + os.Getenv("PATH")
	d.issuer = d.ca.Intermediate(backdate)
	d.renew(d.self, "/db")
	d.renew(d.web, "/web")
	port := peers.FreePorts(t, 1)[0]
	d.addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	d.page = strings.NewReplacer("/run/identity", d.file("identity"), s.run, d.file("run"), strconv.Itoa(s.port), strconv.Itoa(port))
	require.NoError(t, errors.Join(os.Mkdir(d.file("identity"), 0o750), os.Mkdir(d.file("run"), 0o700)))
	mode := os.FileMode(0o640)
	if os.Getuid() == 0 { // MariaDB and PostgreSQL do not run as root
		const nobody = 65534
		d.as = &syscall.Credential{Uid: nobody, Gid: nobody}
		require.NoError(t, os.Chmod(filepath.Dir(d.dir), 0o711)) // the user comes through
		require.NoError(t, errors.Join(os.Chown(d.file("identity"), 0, nobody), os.Chown(d.file("run"), nobody, nobody)))
		require.NoError(t, os.Chmod(d.file("identity"), 0o750|os.ModeSetgid))
	} else {
		mode = 0o600 // PostgreSQL accepts no other if the key is its own
	}
	// The names are those of svid watch.
	var err error
	d.sink = must.Get(filesink.New(filesink.Config{
		Source: d.self, Dir: d.file("identity"), CertName: "svid.pem", KeyName: "svid-key.pem", RootsName: "bundle.pem", KeyMode: mode,
	}))(t)
	must.Get(d.sink.Write())(t)
	endpoint, err := spiffetls.New(spiffetls.Config{Self: d.web, Peers: d.web, Allow: spiffe.AllowIDs(databaseID)})
	require.NoError(t, err)
	d.config = must.Get(endpoint.ClientConfig())(t)
	s.prepare(t, d)
	d.serve(t)
	d.process.Ready(t, func() error { return d.connect(t.Context(), d.config) })
	return d
}

// connect makes a connection, asks something, and closes it.
func (d *database) connect(ctx context.Context, config *tls.Config) error {
	s, err := d.open(ctx, d, config)
	return once(ctx, s, err)
}

func (d *database) file(name string) string { return filepath.Join(d.dir, name) }

// write makes a file for the server.
func (d *database) write(t *testing.T, name, content string) string {
	t.Helper()
	path := d.file(name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	if d.as != nil {
		require.NoError(t, os.Chown(path, int(d.as.Uid), int(d.as.Gid)))
	}
	return path
}

// command returns a command of the user of the server.
func (d *database) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = d.file("run"), []string{"PATH=" + d.path, "LC_ALL=C", "TZ=UTC"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: d.as}
	return cmd
}

// serve starts the server.
func (d *database) serve(t *testing.T) { d.process = peers.Start(t, d.file("log"), d.start()) }

// commands returns the command of the page, and what it runs after a change.
func (d *database) commands(t *testing.T) (watch, exec string) {
	t.Helper()
	watch = d.page.Replace(strings.TrimSpace(onPage(t, d.name)))
	_, exec, ok := strings.Cut(watch, "-exec '")
	require.True(t, ok)
	return watch, strings.TrimSuffix(exec, "'")
}

// shell returns a command of a shell that finds the programs of the server.
func (d *database) shell(line string) *exec.Cmd {
	cmd := exec.Command("/bin/sh", "-c", line)
	cmd.Env = append(os.Environ(), "PATH="+d.path, "SPIFFE_ENDPOINT_SOCKET=unix://"+d.file("api.sock"))
	return cmd
}

// reload does what svid watch does after a change.
func (d *database) reload(t *testing.T) error {
	t.Helper()
	_, line := d.commands(t)
	if out, err := d.shell(line).CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// watch runs the command of the page, with an agent that has the identity of the server.
func (d *database) watch(t *testing.T) {
	t.Helper()
	handler := must.Get(workloadserver.NewHandler(d.self, nil))(t)
	agent := &unixsocket.Server{Path: d.file("api.sock"), Handler: handler}
	require.NoError(t, agent.Listen())
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		assert.NoError(t, errors.Join(<-ended, handler.Close()))
	})
	line, _ := d.commands(t)
	if d.as == nil {
		line = strings.Replace(line, "-mode 0640", "-mode 0600", 1)
	}
	d.watcher = peers.Start(t, d.file("watch.log"), d.shell("exec "+line))
}

// shown connects, and returns the leaf that the server has presented.
func (d *database) shown(ctx context.Context) (*x509.Certificate, error) {
	var leaf *x509.Certificate
	config := d.config.Clone()
	config.VerifyConnection = func(cs tls.ConnectionState) error {
		leaf = cs.PeerCertificates[0]
		return d.config.VerifyConnection(cs)
	}
	err := d.connect(ctx, config)
	return leaf, err
}

// await waits until new connections have the leaf of the server's source.
func (d *database) await(t *testing.T) {
	t.Helper()
	svid := must.Get(d.self.SVID())(t)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.Equal(c, svid.Leaf().SerialNumber, must.Get(d.shown(t.Context()))(c).SerialNumber)
	}, time.Minute, 5*time.Millisecond)
}

// load connects without a pause until end is called.
type load struct {
	made, failed atomic.Int64
	open         sync.RWMutex // held by each connection
	end          func()
}

func (d *database) load(t *testing.T) *load {
	t.Helper()
	byConfig := func() error { return d.connect(t.Context(), d.config) }
	clients := []func() error{byConfig, byConfig}
	if d.dial != nil {
		dialer, err := spiffetls.New(spiffetls.Config{Self: d.web, Peers: d.web, Hosts: map[string]spiffe.PolicySource{d.addr: spiffe.AllowIDs(databaseID)}})
		require.NoError(t, err)
		clients[1] = func() error {
			s, err := d.dial(t.Context(), d, dialer)
			return once(t.Context(), s, err)
		}
	}
	l, stop := new(load), make(chan struct{})
	var wg sync.WaitGroup
	for _, client := range clients {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				l.open.RLock()
				err := client()
				l.open.RUnlock()
				l.made.Add(1)
				if err != nil && l.failed.Add(1) <= 10 {
					t.Log(err)
				}
			}
		})
	}
	l.end = sync.OnceFunc(func() {
		close(stop)
		wg.Wait()
	})
	t.Cleanup(l.end)
	return l
}

// more waits for connections that begin now.
func (l *load) more(t *testing.T, n int64) {
	t.Helper()
	l.open.Lock() // those of before have ended
	begin := l.made.Load()
	l.open.Unlock()
	require.Eventually(t, func() bool { return l.made.Load() >= begin+n }, time.Minute, time.Millisecond)
}

// rotate has the leaf replaced on both sides, and the root in the steps of ROTATE.md. Each change is in the files, and in
// the server, before the next: an operator waits longer than a handshake between them.
func (d *database) rotate(t *testing.T, l *load) {
	t.Helper()
	for _, step := range []func(){
		func() {},    // the leaf
		d.ca.Prepare, // the new root is in the bundle
		func() { // and signs
			d.ca.Rotate()
			d.issuer = d.ca.Intermediate(backdate)
		},
		d.ca.DropOldRoots,
	} {
		step()
		d.renew(d.self, "/db")
		d.take(t)
		d.renew(d.web, "/web")
		l.more(t, 10)
	}
}

// replace writes a new identity of the server again and again until stop is closed, and reports that it has stopped.
func (d *database) replace(t *testing.T, stop <-chan struct{}) <-chan error {
	var next []*spiffe.Snapshot
	for range 20 {
		d.renew(d.self, "/db")
		next = append(next, d.self.now.Load())
	}
	stopped := make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			d.self.now.Store(next[i%len(next)])
			if _, err := d.sink.Write(); err != nil {
				stopped <- err
				return
			}
		}
	}()
	return stopped
}

// client returns the configuration of a client with an identity.
func (d *database) client(t *testing.T, svid *spiffe.SVID) *tls.Config {
	t.Helper()
	endpoint, err := spiffetls.New(spiffetls.Config{Self: svid, Peers: d.ca.Bundle(), Allow: spiffe.AllowIDs(databaseID)})
	require.NoError(t, err)
	return must.Get(endpoint.ClientConfig())(t)
}

// withCert returns the configuration of a client that presents this identity, and trusts any server.
func withCert(svid *spiffe.SVID) *tls.Config {
	return spiffetest.TLSConfig(svid.Chain(), svid.Signer())
}

// prove has the server and its clients go through rotations.
func (d *database) prove(t *testing.T) {
	t.Helper()
	l := d.load(t)
	old := d.svid("/web")
	require.NoError(t, d.connect(t.Context(), withCert(old)))
	stays := must.Get(d.open(t.Context(), d, d.config))(t)
	n := rounds.Of(2)
	for range n {
		d.rotate(t, l)
	}
	made := l.made.Load()

	// A reload while the files are replaced can be refused. The one after the last change is not.
	stop, refused, reloads := make(chan struct{}), 0, 0
	stopped := d.replace(t, stop)
	for ; reloads < rounds.Of(10) || l.made.Load() < made+20; reloads++ {
		if err := d.reload(t); err != nil {
			refused++
		}
	}
	close(stop)
	require.NoError(t, <-stopped)
	d.take(t)
	racing := l.made.Load()
	d.watch(t)
	d.rotate(t, l)
	d.watcher.Stop()
	d.watcher = nil
	l.end()
	assert.Zero(t, l.failed.Load())
	t.Logf("%s: %d connections in %d rotations of leaf and root, %d during %d reloads between files, %d of which were refused, %d in a rotation by svid watch; %d connections failed",
		d.name, made, n, racing-made, reloads, refused, l.made.Load()-racing, l.failed.Load())

	require.Error(t, d.connect(t.Context(), withCert(old)), "a client of the old root")
	require.Error(t, d.connect(t.Context(), withCert(spiffetest.NewCA(t, "other.test").SVID("/web"))), "a client of another CA")
	require.Error(t, d.connect(t.Context(), &tls.Config{InsecureSkipVerify: true}), "a client without a certificate")
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: d.web, Peers: d.web, Allow: spiffe.AllowIDs(webID)}))(t)
	wrong := must.Get(endpoint.ClientConfig())(t)
	require.ErrorContains(t, d.connect(t.Context(), wrong), "not allowed by policy")

	require.NoError(t, stays.ask(t.Context()), "no reload ends a connection")
	require.NoError(t, stays.close())

	d.forget(t)
	d.mix(t)
}

// take has the server take the files as the source has them.
func (d *database) take(t *testing.T) {
	t.Helper()
	if d.watcher == nil {
		must.Get(d.sink.Write())(t)
		require.NoError(t, d.reload(t))
	}
	d.await(t)
}

// forget leaves the reload out: the server goes on with what it has read, until that has expired, and refuses clients
// of a new root.
func (d *database) forget(t *testing.T) {
	t.Helper()
	end := time.Now().Add(6 * time.Second)
	until := func(c *x509.Certificate) { c.NotAfter = end }
	d.renew(d.self, "/db", until)
	d.take(t)
	have := must.Get(d.shown(t.Context()))(t)
	stays := must.Get(d.open(t.Context(), d, d.client(t, d.svid("/web", until))))(t)

	d.ca.Prepare()
	d.renew(d.web, "/web") // trusts both roots
	d.ca.Rotate()
	d.issuer = d.ca.Intermediate(backdate)
	d.renew(d.self, "/db")
	must.Get(d.sink.Write())(t)
	leaf := must.Get(d.shown(t.Context()))(t)
	assert.Equal(t, have.SerialNumber, leaf.SerialNumber, "no server reads its files by itself")
	require.Error(t, d.connect(t.Context(), withCert(d.svid("/web"))), "a client of the new root")
	require.Less(t, time.Now(), end)
	time.Sleep(time.Until(end) + time.Second) // the certificate has whole seconds
	require.ErrorContains(t, d.connect(t.Context(), d.config), "expired")
	require.NoError(t, stays.ask(t.Context()), "no end of a certificate ends a connection")
	require.NoError(t, stays.close())

	d.take(t)
	require.NoError(t, d.connect(t.Context(), withCert(d.svid("/web"))))
}

// mix puts a key beside the certificate of another, which a Sink never does. A reload leaves the server as it was, and
// it does not start. Then the certificate is gone.
func (d *database) mix(t *testing.T) {
	t.Helper()
	have := must.Get(d.shown(t.Context()))(t)
	_, key := must.Get2(d.svid("/db").MarshalPEM())(t)
	require.NoError(t, os.WriteFile(d.file("identity/svid-key.pem"), key, 0o640))
	logged := func() int {
		return strings.Count(string(must.Get(os.ReadFile(d.file("log")))(t)), d.wrongKey)
	}
	before := logged()
	err := d.reload(t)
	if d.says {
		require.ErrorContains(t, err, d.wrongKey)
	} else {
		require.NoError(t, err)
		require.Eventually(t, func() bool { return logged() > before }, time.Minute, 10*time.Millisecond)
	}
	assert.Equal(t, have.SerialNumber, must.Get(d.shown(t.Context()))(t).SerialNumber)

	d.process.Stop()
	d.doesNotStart(t)
	require.NoError(t, os.Remove(d.file("identity/svid.pem")))
	d.doesNotStart(t)
	assert.True(t, must.Get(d.sink.Write())(t), "the Sink mends the files")
	d.serve(t)
	d.process.Ready(t, func() error { return d.connect(t.Context(), d.config) })
	d.await(t)
}

func (d *database) doesNotStart(t *testing.T) {
	t.Helper()
	d.serve(t)
	select {
	case <-d.process.Ended():
	case <-time.After(20 * time.Second):
		require.Fail(t, "it has started")
	}
}

const (
	databasePassword = "PASSWORD"       // of the page
	patience         = 20 * time.Second // of drivers
)

func TestNATS(t *testing.T) {
	t.Parallel()
	program := peers.Program(t, "nats-server")
	d := newDatabase(t, databaseKind{
		name: "nats", run: "/run/nats", port: 4222, wrongKey: "private key does not match public key",
		prepare: func(t *testing.T, d *database) {
			binary, err := os.ReadFile(program) // which the user cannot read
			require.NoError(t, err)
			program = d.write(t, "nats-server", string(binary))
			require.NoError(t, os.Chmod(program, 0o755))
			d.path = d.dir + ":" + d.path
			conf := d.write(t, "nats.conf", d.page.Replace(onPage(t, "nats.conf")))
			d.start = func() *exec.Cmd { return d.command(program, "-c", conf) }
		},
		open: func(_ context.Context, d *database, config *tls.Config) (*session, error) {
			conn, err := nats.Connect("tls://"+d.addr, nats.Secure(config), nats.NoReconnect(), nats.Timeout(patience))
			if err != nil {
				return nil, err
			}
			return &session{
				func(context.Context) error { return conn.FlushTimeout(patience) }, // PING and PONG
				func() error { conn.Close(); return nil },
			}, nil
		},
	})
	d.prove(t)

	other := d.client(t, d.svid("/other"))
	require.ErrorContains(t, d.connect(t.Context(), other), "Authorization Violation")
	tlsOnly, _, _ := strings.Cut(d.page.Replace(onPage(t, "nats.conf")), "authorization")
	d.write(t, "nats.conf", strings.Replace(tlsOnly, "verify_and_map", "verify", 1))
	d.process.Stop()
	d.serve(t)
	d.process.Ready(t, func() error { return d.connect(t.Context(), d.config) })
	require.NoError(t, d.connect(t.Context(), other), "any identity gets in with verify alone")
}

func TestMariaDB(t *testing.T) {
	t.Parallel()
	program := peers.Installed(t, "mariadbd", "mariadb-server-core")
	peers.Installed(t, "mariadb", "mariadb-client-core")
	open := func(ctx context.Context, d *database, user string, config *tls.Config) (*session, error) {
		c := mysql.NewConfig()
		c.User, c.Passwd, c.Net, c.Addr, c.TLS, c.Timeout = user, databasePassword, "tcp", d.addr, config, patience
		c.Logger = &mysql.NopLogger{}
		connector, err := mysql.NewConnector(c)
		if err != nil {
			return nil, err
		}
		conn, err := connector.Connect(ctx)
		if err != nil {
			return nil, err
		}
		return &session{conn.(driver.Pinger).Ping, conn.Close}, nil
	}
	d := newDatabase(t, databaseKind{
		name: "mariadb", run: "/run/mysqld", port: 3306, says: true, wrongKey: "Unable to get private key",
		prepare: func(t *testing.T, d *database) {
			data := d.file("run/data")
			small := []string{"--skip-innodb", "--default-storage-engine=Aria", "--aria-log-file-size=8M", "--datadir=" + data}
			out, err := d.command("mariadb-install-db", append([]string{
				"--no-defaults", "--skip-test-db", "--skip-name-resolve", "--auth-root-authentication-method=normal",
			}, small...)...).CombinedOutput()
			require.NoError(t, err, "%s", out)
			conf := d.write(t, "my.cnf", d.page.Replace(onPage(t, "my.cnf")))
			users := d.write(t, "run/users.sql", strings.ReplaceAll(onPage(t, "users.sql"), "CREATE USER", "CREATE USER IF NOT EXISTS"))
			d.start = func() *exec.Cmd {
				return d.command(program, append([]string{"--defaults-file=" + conf, "--init-file=" + users}, small...)...)
			}
		},
		open: func(ctx context.Context, d *database, config *tls.Config) (*session, error) {
			return open(ctx, d, "web", config)
		},
	})
	d.prove(t)

	cmd := exec.Command("mariadb", "--no-defaults", "--socket="+d.file("run/mysqld.sock"), "--user=root")
	cmd.Stdin = strings.NewReader(`
CREATE USER subject@'127.0.0.1' IDENTIFIED BY 'PASSWORD' REQUIRE SUBJECT '/O=svidkit';
CREATE USER issuer@'127.0.0.1' IDENTIFIED BY 'PASSWORD' REQUIRE ISSUER '/O=example.org/CN=test intermediate';
CREATE USER id@'127.0.0.1' IDENTIFIED BY 'PASSWORD' REQUIRE SUBJECT 'spiffe://example.org/web';
CREATE USER free@'127.0.0.1' IDENTIFIED BY 'PASSWORD';
`)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	web, other, byRoot := d.client(t, d.svid("/web")), d.client(t, d.svid("/other")), d.client(t, d.ca.SVID("/web", backdate))
	for _, c := range []struct {
		user   string
		config *tls.Config
		in     bool
	}{
		{"web", web, true}, {"web", other, true}, {"web", byRoot, true},
		{"subject", web, true}, {"subject", other, true}, // our leaves have one subject
		{"issuer", web, true}, {"issuer", other, true}, {"issuer", byRoot, false}, // names, and not keys, are compared
		{"id", web, false},
		{"free", &tls.Config{InsecureSkipVerify: true}, true},
	} {
		s, err := open(t.Context(), d, c.user, c.config)
		err = once(t.Context(), s, err)
		if c.in {
			assert.NoError(t, err, c.user)
		} else {
			assert.ErrorContains(t, err, "Access denied", c.user)
		}
	}
}

func TestRedis(t *testing.T) {
	t.Parallel()
	program := peers.Installed(t, "redis-server", "redis-server")
	logging.Disable() // of the driver, as its errors are here
	open := func(ctx context.Context, o *redis.Options) (*session, error) {
		o.MaxRetries, o.DialerRetries, o.PoolSize = -1, 1, 1
		o.DialTimeout, o.PoolTimeout, o.ReadTimeout, o.WriteTimeout = patience, patience, patience, patience
		client := redis.NewClient(o)
		ping := func(ctx context.Context) error { return client.Ping(ctx).Err() }
		if err := ping(ctx); err != nil { // the first one dials
			return nil, errors.Join(err, client.Close())
		}
		return &session{ping, client.Close}, nil
	}
	d := newDatabase(t, databaseKind{
		name: "redis", run: "/run/redis", port: 6379, says: true, wrongKey: "Unable to update TLS configuration",
		prepare: func(t *testing.T, d *database) {
			conf := d.write(t, "redis.conf", d.page.Replace(onPage(t, "redis.conf")))
			d.start = func() *exec.Cmd { return d.command(program, conf, "--save", "") }
		},
		open: func(ctx context.Context, d *database, config *tls.Config) (*session, error) {
			return open(ctx, &redis.Options{Addr: d.addr, TLSConfig: config})
		},
		dial: func(ctx context.Context, d *database, dialer *spiffetls.Endpoint) (*session, error) {
			return open(ctx, &redis.Options{Addr: d.addr, Dialer: dialer.DialContext})
		},
	})
	d.prove(t)

	require.NoError(t, d.connect(t.Context(), d.client(t, d.svid("/other"))), "any identity gets in")
}

// Pain: a database with client certificates, both sides of which are renewed while they work.
func TestPostgreSQL(t *testing.T) {
	t.Parallel()
	bin := peers.InstalledPostgreSQL(t)
	program := bin + "/postgres"
	open := func(ctx context.Context, d *database, user string, edit func(*pgx.ConnConfig)) (*session, error) {
		c, err := pgx.ParseConfig("postgres://" + user + ":" + databasePassword + "@" + d.addr + "/postgres?sslmode=disable&connect_timeout=20")
		if err != nil {
			return nil, err
		}
		edit(c)
		conn, err := pgx.ConnectConfig(ctx, c)
		if err != nil {
			return nil, err
		}
		return &session{conn.Ping, func() error { return conn.Close(ctx) }}, nil
	}
	d := newDatabase(t, databaseKind{
		name: "postgresql", run: "/run/postgresql", port: 5432, wrongKey: "SSL configuration was not reloaded",
		prepare: func(t *testing.T, d *database) {
			data := d.file("run/data")
			password := d.write(t, "password", databasePassword)
			out, err := d.command(bin+"/initdb", "-D", data, "-U", "web", "-A", "reject", "--pwfile", password, "-E", "UTF8", "--locale=C", "--no-sync").CombinedOutput()
			require.NoError(t, err, "%s", out)
			const others = "hostssl all by_cn 127.0.0.1/32 cert\nhostssl all by_dn 127.0.0.1/32 cert clientname=DN map=leaves\n"
			d.write(t, "run/data/pg_hba.conf", onPage(t, "pg_hba.conf")+others)
			d.write(t, "run/data/pg_ident.conf", "leaves \"O=svidkit\" by_dn\n")
			users := d.command(bin+"/postgres", "--single", "-D", data, "postgres")
			users.Stdin = strings.NewReader("CREATE ROLE by_cn LOGIN\nCREATE ROLE by_dn LOGIN\n")
			out, err = users.CombinedOutput()
			require.NoError(t, err, "%s", out)
			d.write(t, "run/data/postgresql.auto.conf", d.page.Replace(onPage(t, "postgresql.conf"))+
				"unix_socket_directories = ''\nfsync = off\nshared_buffers = '1MB'\nmax_connections = 50\nautovacuum = off\n")
			d.start = func() *exec.Cmd { return d.command(program, "-D", data) }
		},
		open: func(ctx context.Context, d *database, config *tls.Config) (*session, error) {
			return open(ctx, d, "web", func(c *pgx.ConnConfig) { c.TLSConfig = config })
		},
		// The driver has the connection once TLS has begun on it.
		dial: func(ctx context.Context, d *database, dialer *spiffetls.Endpoint) (*session, error) {
			return open(ctx, d, "web", func(c *pgx.ConnConfig) {
				c.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
					plain, err := new(net.Dialer).DialContext(ctx, network, addr)
					if err != nil {
						return nil, err
					}
					var answer [1]byte
					if _, err = plain.Write([]byte{0, 0, 0, 8, 4, 210, 22, 47}); err == nil { // SSLRequest
						_, err = io.ReadFull(plain, answer[:])
					}
					if err == nil && answer[0] != 'S' {
						err = fmt.Errorf("no TLS: %q", answer)
					}
					if err != nil {
						return nil, errors.Join(err, plain.Close())
					}
					return dialer.Client(ctx, plain, addr)
				}
			})
		},
	})
	d.prove(t)

	other := d.svid("/other")
	for _, c := range []struct {
		user string
		svid *spiffe.SVID
		in   bool
	}{
		{"web", other, true},
		{"by_cn", d.svid("/web"), false},                        // it has none
		{"by_dn", d.svid("/web"), true}, {"by_dn", other, true}, // our leaves have one
	} {
		s, err := open(t.Context(), d, c.user, func(o *pgx.ConnConfig) { o.TLSConfig = d.client(t, c.svid) })
		err = once(t.Context(), s, err)
		if c.in {
			assert.NoError(t, err, c.user)
		} else {
			assert.ErrorContains(t, err, "certificate authentication failed", c.user)
		}
	}

	// What PostgreSQL has seen of a client is in a view.
	c, err := pgx.ParseConfig("postgres://web:" + databasePassword + "@" + d.addr + "/postgres?sslmode=disable")
	require.NoError(t, err)
	c.TLSConfig = d.client(t, other)
	conn := must.Get(pgx.ConnectConfig(t.Context(), c))(t)
	var serial string
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT client_serial::text FROM pg_stat_ssl WHERE pid = pg_backend_pid()").Scan(&serial))
	assert.Equal(t, other.Leaf().SerialNumber.String(), serial)
	require.NoError(t, conn.Close(t.Context()))
}
