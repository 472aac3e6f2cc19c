package peers

import (
	"bytes"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/stretchr/testify/require"
)

// Installed returns the path of a program of Debian. Without it the test skips, or fails where peers are required.
func Installed(t testing.TB, name, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Getenv(modeEnv) == "require" {
		t.Fatalf("%v; Debian's package is %s", err, pkg)
	}
	t.Skipf("%v; Debian's package is %s", err, pkg)
	return ""
}

// InstalledPostgreSQL returns the directory of the programs of PostgreSQL. Without them the test skips as for
// [Installed].
func InstalledPostgreSQL(t testing.TB) string {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	return filepath.Dir(Installed(t, slices.Max(append(found, "/usr/lib/postgresql/0/bin"))+"/postgres", "postgresql"))
}

// A Database is a server of PostgreSQL or MariaDB of Debian with data of its own and one database, named svidkit. It
// listens on a port of 127.0.0.1, without TLS and passwords, and ends with the test that made it. Its methods must not
// be called concurrently.
type Database struct {
	Dialect string // of package sqlstore: "postgres" or "mysql"
	Addr    string // of 127.0.0.1, always the same

	t       testing.TB // with which it ends
	port    string
	dir     string
	bin     string              // of PostgreSQL
	as      *syscall.Credential // nil for this user
	process *Process
}

// newDatabase returns a server without data.
func newDatabase(t testing.TB, dialect string) *Database {
	t.Helper()
	d := &Database{Dialect: dialect, t: t, dir: t.TempDir()}
	d.Addr = loopback(FreePorts(t, 1)[0])
	d.port = d.Addr[strings.LastIndex(d.Addr, ":")+1:]
	if dialect == "postgres" {
		d.bin = InstalledPostgreSQL(t)
	} else {
		Installed(t, "mariadbd", "mariadb-server-core")
		Installed(t, "mariadb", "mariadb-client-core")
	}
	require.NoError(t, os.Mkdir(d.File("run"), 0o700))
	if os.Getuid() == 0 { // neither runs as root
		const nobody = 65534
		d.as = &syscall.Credential{Uid: nobody, Gid: nobody}
		require.NoError(t, errors.Join(os.Chmod(filepath.Dir(d.dir), 0o711), os.Chmod(d.dir, 0o711),
			os.Chown(d.File("run"), nobody, nobody)))
	}
	return d
}

// File returns the path of a file of the server, such as run/data.
func (d *Database) File(name string) string { return filepath.Join(d.dir, name) }

// Write makes a file that belongs to the user of the server, and to no other.
func (d *Database) Write(t testing.TB, name, content string) string {
	t.Helper()
	path := d.File(name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	if d.as != nil {
		require.NoError(t, os.Chown(path, int(d.as.Uid), int(d.as.Gid)))
	}
	return path
}

// command returns a command of the user of the server.
func (d *Database) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = d.File("run"), []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC", "PGTZ=UTC"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: d.as}
	return cmd
}

// run runs a command of the user of the server, and returns what it prints.
func (d *Database) run(t testing.TB, stdin, name string, args ...string) string {
	t.Helper()
	cmd := d.command(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	require.NoError(t, err, "%s: %s", name, said.String())
	return string(out)
}

// NewPostgreSQL starts a server of PostgreSQL whose administrator is the user postgres. The settings are lines of
// postgresql.conf.
func NewPostgreSQL(t testing.TB, settings ...string) *Database {
	t.Helper()
	d := newDatabase(t, "postgres")
	d.run(t, "", d.bin+"/initdb", "-D", d.File("run/data"), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C",
		"--no-sync")
	d.configure(t, append([]string{
		"unix_socket_directories = ''", "fsync = off", "shared_buffers = '4MB'", "max_connections = 60",
		"autovacuum = off", "max_wal_size = '64MB'", "min_wal_size = '32MB'", "wal_keep_size = '64MB'",
	}, settings...)...)
	d.Start(t)
	d.client(t, "postgres", "CREATE DATABASE svidkit")
	return d
}

// configure appends settings, which the server reads when it starts.
func (d *Database) configure(t testing.TB, settings ...string) {
	t.Helper()
	path := d.File("run/my.cnf")
	if d.Dialect == "postgres" {
		path = d.File("run/data/postgresql.conf")
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(strings.Join(settings, "\n") + "\n")
	require.NoError(t, errors.Join(err, f.Close()))
}

// Configure restarts the server with more settings, which are lines of postgresql.conf or my.cnf.
func (d *Database) Configure(t testing.TB, settings ...string) {
	t.Helper()
	d.configure(t, settings...)
	d.Restart(t)
}

// NewStandby starts a server that replicates this one, which from now on acknowledges a commit only when the standby
// has it on its disk.
func (d *Database) NewStandby(t testing.TB) *Database {
	t.Helper()
	standby := newDatabase(t, d.Dialect)
	standby.Follow(t, d)
	return standby
}

// Follow makes this server, which does not run, the only synchronous standby of a primary, with a copy of its data.
func (d *Database) Follow(t testing.TB, primary *Database) {
	t.Helper()
	require.NoError(t, os.RemoveAll(d.File("run/data")))
	name := "standby_" + d.port
	d.run(t, "", d.bin+"/pg_basebackup", "-D", d.File("run/data"), "-R", "-X", "stream", "--checkpoint=fast", "--no-sync",
		"-d", "host=127.0.0.1 port="+primary.port+" user=postgres application_name="+name)
	d.Start(t)
	primary.Admin(t, "ALTER SYSTEM SET synchronous_standby_names = '"+name+"'")
	primary.Admin(t, "SELECT pg_reload_conf()")
	require.Eventually(t, func() bool {
		return strings.Contains(primary.Admin(t, "SELECT sync_state FROM pg_stat_replication"), "sync")
	}, time.Minute, 20*time.Millisecond)
}

// Promote makes a standby a primary that waits for no other. The primary of before does not learn of it.
func (d *Database) Promote(t testing.TB) {
	t.Helper()
	d.Admin(t, "SELECT pg_promote()") // waits
	d.Admin(t, "ALTER SYSTEM SET synchronous_standby_names = ''")
	d.Admin(t, "SELECT pg_reload_conf()")
}

// NewMariaDB starts a server of MariaDB whose administrator is the user root. The settings are options of mariadbd.
func NewMariaDB(t testing.TB, settings ...string) *Database {
	t.Helper()
	d := newDatabase(t, "mysql")
	conf := d.Write(t, "run/my.cnf", "[mariadbd]\n")
	d.configure(t, append([]string{
		"tmpdir=" + d.File("run"), // as a server that starts in /tmp removes the tables of others there
		"datadir=" + d.File("run/data"), "port=" + d.port, "bind-address=127.0.0.1", "socket=m.sock", "pid-file=m.pid",
		"innodb-buffer-pool-size=8M", "innodb-log-file-size=8M", "innodb-use-native-aio=0", "aria-log-file-size=8M",
		"performance-schema=OFF", "skip-name-resolve", "skip-log-bin", "max-connections=60",
	}, settings...)...)
	d.run(t, "", "mariadb-install-db", "--defaults-file="+conf, "--skip-test-db",
		"--auth-root-authentication-method=normal")
	d.Start(t)
	d.client(t, "mysql", "CREATE DATABASE svidkit")
	return d
}

// Start starts the server, and waits until it answers.
func (d *Database) Start(t testing.TB) {
	t.Helper()
	cmd, database := d.command("mariadbd", "--defaults-file="+d.File("run/my.cnf")), "mysql"
	if d.Dialect == "postgres" {
		cmd, database = d.command(d.bin+"/postgres", "-D", d.File("run/data"), "-p", d.port), "postgres"
	}
	d.process = Start(d.t, d.File("log"), cmd)
	d.process.Ready(t, func() error {
		db := d.Open(t, d.administrator(), database)
		return errors.Join(db.Ping(), db.Close())
	})
}

// Stop ends the server, and its connections.
func (d *Database) Stop() {
	if d.Dialect == "postgres" {
		_ = d.process.cmd.Process.Signal(syscall.SIGINT) // it may have ended
	}
	d.process.Stop()
}

// Kill ends all processes of the server at once, without a chance to clean up.
func (d *Database) Kill(t testing.TB) {
	t.Helper()
	all := d.signal(t, syscall.SIGSTOP) // as the children of one that has ended are not to be found
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
	<-d.process.done
	require.Eventually(t, func() bool { return !slices.ContainsFunc(all, lives) }, time.Minute, 5*time.Millisecond)
}

// Pause stops all processes of the server, so that it answers nothing, until Resume.
func (d *Database) Pause(t testing.TB) { t.Helper(); d.signal(t, syscall.SIGSTOP) }

// Resume ends Pause.
func (d *Database) Resume(t testing.TB) { t.Helper(); d.signal(t, syscall.SIGCONT) }

// signal sends a signal to all processes of the server, the one that starts others first, and returns their IDs.
func (d *Database) signal(t testing.TB, s syscall.Signal) []int {
	t.Helper()
	pid := d.process.PID()
	require.NoError(t, syscall.Kill(pid, s))
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if !errors.Is(err, fs.ErrNotExist) { // it has ended
		require.NoError(t, err)
	}
	all := []int{pid}
	for field := range strings.FieldsSeq(string(children)) {
		child, err := strconv.Atoi(field)
		require.NoError(t, err)
		all = append(all, child)
		if err := syscall.Kill(child, s); !errors.Is(err, syscall.ESRCH) {
			require.NoError(t, err)
		}
	}
	return all
}

// lives reports whether a process has not ended.
func lives(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, state, _ := bytes.Cut(stat, []byte(") "))
	return err == nil && !bytes.HasPrefix(state, []byte("Z"))
}

// Restart ends the server and starts it again.
func (d *Database) Restart(t testing.TB) {
	t.Helper()
	d.Stop()
	d.Start(t)
}

func (d *Database) administrator() string {
	if d.Dialect == "postgres" {
		return "postgres"
	}
	return "root"
}

// Admin has an administrator run statements in the database, with the client of the server, and returns what it
// prints.
func (d *Database) Admin(t testing.TB, statements string) string {
	t.Helper()
	return d.client(t, "svidkit", statements)
}

func (d *Database) client(t testing.TB, database, statements string) string {
	t.Helper()
	if d.Dialect == "postgres" {
		return d.run(t, statements, d.bin+"/psql", "-X", "-q", "-At", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1",
			"-p", d.port, "-U", "postgres", "-d", database)
	}
	return d.run(t, statements, "mariadb", "--no-defaults", "--protocol=tcp", "--host=127.0.0.1", "--port="+d.port,
		"--user=root", "--batch", "--skip-column-names", database)
}

// Dump returns statements that make the table again as it is now, for Admin.
func (d *Database) Dump(t testing.TB, table string) string {
	t.Helper()
	if d.Dialect == "postgres" {
		return d.run(t, "", d.bin+"/pg_dump", "--clean", "-t", table, "-h", "127.0.0.1", "-p", d.port, "-U", "postgres",
			"-d", "svidkit")
	}
	Installed(t, "mariadb-dump", "mariadb-client")
	// --replace, as a client may write a row between CREATE TABLE and LOCK TABLES
	return d.run(t, "", "mariadb-dump", "--no-defaults", "--replace", "--protocol=tcp", "--host=127.0.0.1", "--port="+d.port,
		"--user=root", "svidkit", table)
}

// NewUser makes a user with a role, as an operator does for the CA.
func (d *Database) NewUser(t testing.TB, user, role string) {
	t.Helper()
	if d.Dialect == "postgres" {
		d.Admin(t, "CREATE ROLE "+user+" LOGIN; GRANT "+role+" TO "+user)
		return
	}
	account := "'" + user + "'@'127.0.0.1'"
	d.Admin(t, "CREATE USER "+account+"; GRANT "+role+" TO "+account+"; SET DEFAULT ROLE "+role+" FOR "+account)
}

// Open returns a pool of connections of a user to a database, which the caller closes. The addresses are those of
// proxies in front of servers; with several, which only PostgreSQL has, a connection is to the first that takes
// writes. Without any, it is the address of this server.
func (d *Database) Open(t testing.TB, user, database string, addrs ...string) *sql.DB {
	t.Helper()
	dsn := d.DSN(user, database, addrs...)
	if d.Dialect == "mysql" {
		c, err := mysql.ParseDSN(dsn)
		require.NoError(t, err)
		c.Logger = new(mysql.NopLogger) // its errors are those of calls
		connector, err := mysql.NewConnector(c)
		require.NoError(t, err)
		return sql.OpenDB(connector)
	}
	db, err := sql.Open("pgx", dsn)
	require.NoError(t, err)
	return db
}

// DSN returns the data source name of Open, for the drivers pgx and go-sql-driver/mysql.
func (d *Database) DSN(user, database string, addrs ...string) string {
	if len(addrs) == 0 {
		addrs = []string{d.Addr}
	}
	if d.Dialect == "mysql" {
		c := mysql.NewConfig()
		c.User, c.Net, c.Addr, c.DBName, c.Timeout = user, "tcp", addrs[0], database, 5*time.Second
		return c.FormatDSN()
	}
	dsn := "postgres://" + user + "@" + strings.Join(addrs, ",") + "/" + database + "?sslmode=disable&connect_timeout=5"
	if len(addrs) > 1 {
		dsn += "&target_session_attrs=read-write"
	}
	return dsn
}
