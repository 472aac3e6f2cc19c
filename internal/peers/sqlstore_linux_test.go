package peers_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"database/sql"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/svidkit/svidkit/caclient/caclienttest/storetest"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/sqlstore"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// A wire is a proxy between the stores and a server of a database.
type wire struct {
	addr   string
	target atomic.Value // the address of the server

	mu    sync.Mutex
	conns map[net.Conn]bool
	down  bool          // ends connections
	open  chan struct{} // closed while something comes through
	cut   func()        // is called, and the connection ends, in place of the answer to the next record
}

func newWire(t *testing.T, target string) *wire {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	w := &wire{addr: l.Addr().String(), conns: make(map[net.Conn]bool), open: make(chan struct{})}
	close(w.open)
	w.target.Store(target)
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go w.serve(client)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		w.end()
	})
	return w
}

// end ends all connections.
func (w *wire) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for conn := range w.conns {
		_ = conn.Close()
	}
}

// keep remembers an open connection, unless there may be none.
func (w *wire) keep(conn net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conns[conn] = true
	return !w.down
}

func (w *wire) serve(client net.Conn) {
	defer client.Close()
	if !w.keep(client) {
		return
	}
	server, err := net.Dial("tcp", w.target.Load().(string))
	if err != nil {
		return
	}
	defer server.Close()
	if !w.keep(server) {
		return
	}
	wrote := make(chan func(), 1)
	go func() {
		defer server.Close()
		w.copy(server, client, func(b []byte) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.cut != nil && bytes.Contains(b, []byte(`"svidkit-`)) { // an item
				wrote <- w.cut
				w.cut = nil
			}
			return nil
		})
	}()
	w.copy(client, server, func([]byte) error {
		select {
		case cut := <-wrote:
			cut()
			return io.EOF
		default:
			return nil
		}
	})
}

// copy copies until an end, and has look see what comes.
func (w *wire) copy(to, from net.Conn, look func(b []byte) error) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		w.mu.Lock()
		open := w.open
		w.mu.Unlock()
		<-open
		if n > 0 {
			if err := look(b[:n]); err != nil {
				return
			}
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (w *wire) breaks() func() {
	set := func(down bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.down = down
	}
	set(true)
	w.end()
	return func() { set(false) }
}

func (w *wire) hang() func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	open := make(chan struct{})
	w.open = open
	return func() { close(open) }
}

func (w *wire) cutNext(meanwhile func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = meanwhile
}

// A sqlPlace is a table on a server, and perhaps on its standby.
type sqlPlace struct {
	*peers.Database
	standby *peers.Database // nil for none
	wire    *wire           // to the server
	options sqlstore.Options
	n       int // cases so far
	moving  sync.Mutex
}

// newSQLPlace starts a server with a table and the user of the CA.
func newSQLPlace(t *testing.T, start func(testing.TB, ...string) *peers.Database) *sqlPlace {
	p := &sqlPlace{Database: start(t)}
	p.options = sqlstore.Options{Dialect: p.Dialect}
	schema := must.Get(sqlstore.Schema(p.options))(t)
	p.Admin(t, schema)
	p.Admin(t, schema) // it does no harm
	p.NewUser(t, "issuer", "svidkit_ca")
	p.wire = newWire(t, p.Addr)
	return p
}

// store returns a store of another process, by way of the wire or straight to a server.
func (p *sqlPlace) store(t *testing.T, addrs ...string) ca.Store {
	t.Helper()
	if len(addrs) == 0 {
		addrs = []string{p.wire.addr}
	}
	db := p.Open(t, "issuer", "svidkit", addrs...)
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(3)
	return must.Get(sqlstore.New(db, p.options))(t)
}

// failOver crashes the server. Its standby takes its place, or it starts again.
func (p *sqlPlace) failOver(t *testing.T) {
	p.moving.Lock()
	defer p.moving.Unlock()
	p.Kill(t)
	if p.standby == nil {
		p.Start(t)
		return
	}
	p.standby.Promote(t)
	p.Database, p.standby = p.standby, p.Database
	p.wire.target.Store(p.Addr)
	p.standby.Follow(t, p.Database)
}

// place is one for a case: a row of its own.
func (p *sqlPlace) place(t *testing.T) storetest.Place {
	p.n++
	p.options.Name = fmt.Sprint("case-", p.n)
	p.wire.cutNext(nil)
	moved := func() { // waits for a failover that is under way
		p.moving.Lock()
		defer p.moving.Unlock()
	}
	t.Cleanup(moved)
	place := storetest.Place{
		Open: func() (ca.Store, error) { return p.store(t), nil },
		Cut: func(meanwhile func()) {
			moved()
			p.wire.cutNext(meanwhile)
		},
		Break:    func() func() { return p.wire.breaks() },
		Hang:     func() func() { return p.wire.hang() },
		FailOver: func() { p.failOver(t) },
		Remove: func() func() {
			p.Admin(t, "ALTER TABLE svidkit_ca RENAME TO away")
			return func() { p.Admin(t, "ALTER TABLE away RENAME TO svidkit_ca") }
		},
		Dump: func() func() {
			dump := p.Dump(t, "svidkit_ca")
			return func() { p.Admin(t, dump) }
		},
		Damage: func() { p.Admin(t, "UPDATE svidkit_ca SET data = REPLACE(data, 'svidkit-', 'svidkjt-')") },
	}
	if p.standby != nil {
		place.Behind = func() (ca.Store, error) { return p.store(t, p.standby.Addr), nil }
	}
	return place
}

// listen returns notices of PostgreSQL.
func listen(dsn string) func(ctx context.Context, changed func()) error {
	return func(ctx context.Context, changed func()) error {
		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		if _, err = conn.Exec(ctx, "LISTEN svidkit_ca"); err != nil {
			return err
		}
		for changed(); ; changed() {
			if _, err := conn.WaitForNotification(ctx); err != nil {
				return err
			}
		}
	}
}

func TestSQLStore(t *testing.T) {
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		p := newSQLPlace(t, peers.NewPostgreSQL)
		p.standby = p.NewStandby(t)
		p.options.Poll, p.options.Listen = time.Hour, listen(p.DSN("issuer", "svidkit", p.wire.addr))
		storetest.Run(t, p.place)
	})
	t.Run("serializable PostgreSQL", func(t *testing.T) {
		t.Parallel()
		p := newSQLPlace(t, peers.NewPostgreSQL)
		p.Admin(t, "ALTER ROLE issuer SET default_transaction_isolation = 'serializable'")
		p.options.Poll = 50 * time.Millisecond
		storetest.Run(t, p.place)
	})
	t.Run("MariaDB", func(t *testing.T) {
		t.Parallel()
		p := newSQLPlace(t, peers.NewMariaDB)
		p.options.Poll = 50 * time.Millisecond
		storetest.Run(t, p.place)
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) storetest.Place {
			t.Parallel()
			o := sqlstore.Options{Dialect: "sqlite", Poll: 50 * time.Millisecond}
			file := "file:" + filepath.Join(t.TempDir(), "ca.db") + "?_pragma=busy_timeout(9000)&_pragma=journal_mode(wal)"
			open := func() *sql.DB {
				db := must.Get(sql.Open("sqlite", file))(t)
				t.Cleanup(func() { _ = db.Close() })
				return db
			}
			admin := open()
			do := func(statement string, args ...any) {
				t.Helper()
				must.Get(admin.Exec(statement, args...))(t)
			}
			do(must.Get(sqlstore.Schema(o))(t))
			hasty := must.Get(sql.Open("sqlite", file+"&_pragma=synchronous(normal)"))(t)
			defer hasty.Close()
			must.Fail(t, must.Err(must.Get(sqlstore.New(hasty, o))(t).Load(t.Context())), "as PRAGMA synchronous is not full")
			return storetest.Place{
				Open: func() (ca.Store, error) { return sqlstore.New(open(), o) },
				Remove: func() func() {
					do("ALTER TABLE svidkit_ca RENAME TO away")
					return func() { do("ALTER TABLE away RENAME TO svidkit_ca") }
				},
				Dump: func() func() {
					var version, data string
					require.NoError(t, admin.QueryRow("SELECT version, data FROM svidkit_ca").Scan(&version, &data))
					return func() { do("UPDATE svidkit_ca SET version = ?, data = ?", version, data) }
				},
				Damage: func() { do("UPDATE svidkit_ca SET data = REPLACE(data, 'svidkit-', 'svidkjt-')") },
			}
		})
	})
}

// The store refuses a database that is not fit, and says what to do. None of that looks like a CA that is not there, and
// all of it may pass.
func TestSQLStoreRefuses(t *testing.T) {
	t.Parallel()
	type trouble struct{ make, end, load, save string } // statements, and what the errors say
	const missing, denied = "there is no such table: run the statements of the schema", "lacks a right: grant it the role"
	for dialect, c := range map[string]struct {
		start    func(testing.TB, ...string) *peers.Database
		troubles []trouble
		denied   []string // statements that the role of the schema does not allow
	}{
		"PostgreSQL": {peers.NewPostgreSQL, []trouble{
			{"ALTER TABLE svidkit_ca RENAME TO away", "ALTER TABLE away RENAME TO svidkit_ca", missing, missing},
			{"REVOKE svidkit_ca FROM issuer", "GRANT svidkit_ca TO issuer", denied, denied},
			{"ALTER ROLE issuer SET synchronous_commit = off", "ALTER ROLE issuer RESET ALL",
				"as synchronous_commit is off", ""},
			{"ALTER ROLE issuer SET default_transaction_read_only = on", "ALTER ROLE issuer RESET ALL", "",
				"the server is a read replica: connect to the primary"},
		}, []string{
			"DELETE FROM svidkit_ca", "TRUNCATE svidkit_ca", "DROP TABLE svidkit_ca",
			"ALTER TABLE svidkit_ca ADD COLUMN x text",
			"ALTER TABLE svidkit_ca DISABLE TRIGGER changed", "CREATE TABLE other ()", "DROP FUNCTION svidkit_ca_changed",
			"CREATE RULE r AS ON UPDATE TO svidkit_ca DO INSTEAD NOTHING", "SELECT * FROM private",
		}},
		"MariaDB": {peers.NewMariaDB, []trouble{
			{"RENAME TABLE svidkit_ca TO away", "RENAME TABLE away TO svidkit_ca", missing, missing},
			{"REVOKE UPDATE ON svidkit_ca FROM svidkit_ca", "GRANT UPDATE ON svidkit_ca TO svidkit_ca", "", denied},
			{"REVOKE SELECT ON svidkit_ca FROM svidkit_ca", "GRANT SELECT ON svidkit_ca TO svidkit_ca", denied, denied},
			{"SET GLOBAL read_only = ON", "SET GLOBAL read_only = OFF",
				"as it is a read replica", "is a read replica: connect"},
			{"SET GLOBAL innodb_flush_log_at_trx_commit = 2", "SET GLOBAL innodb_flush_log_at_trx_commit = 1",
				"as innodb_flush_log_at_trx_commit is not 1", ""},
			{"SET GLOBAL autocommit = OFF", "SET GLOBAL autocommit = ON", "as autocommit is off", ""},
		}, []string{
			"DELETE FROM svidkit_ca", "TRUNCATE svidkit_ca", "DROP TABLE svidkit_ca",
			"ALTER TABLE svidkit_ca ADD COLUMN x text",
			"CREATE TABLE other (x int)", "CREATE TRIGGER r BEFORE UPDATE ON svidkit_ca FOR EACH ROW SET NEW.data = ''",
			"SELECT * FROM private", "RENAME TABLE svidkit_ca TO away",
		}},
	} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			p := newSQLPlace(t, c.start)
			p.Admin(t, "CREATE TABLE private (x int)")
			open := func() ca.Store { return p.store(t, p.Addr) }
			version := must.Get(open().Save(t.Context(), item("", "a")))(t)
			for _, tt := range c.troubles {
				p.Admin(t, tt.make)
				for want, err := range map[string]error{
					tt.load: must.Err(open().Load(t.Context())), tt.save: must.Err(open().Save(t.Context(), item("wrong", "b"))),
				} {
					if want != "" {
						must.Fail(t, err, want)
						assert.NotErrorIs(t, err, ca.ErrNoRecord)
						assert.NotErrorIs(t, err, ca.ErrUnfit)
						assert.NotErrorIs(t, err, ca.ErrConflict)
					}
				}
				p.Admin(t, tt.end)
				require.Equal(t, version, must.Get(open().Load(t.Context()))(t).Version)
			}
			db := p.Open(t, "issuer", "svidkit")
			defer db.Close()
			for _, statement := range c.denied {
				_, err := db.Exec(statement)
				assert.Error(t, err, statement)
				assert.Regexp(t, "permission denied|must be owner|denied to user", fmt.Sprint(err), statement)
			}
			require.Equal(t, version, must.Get(open().Load(t.Context()))(t).Version)

			// The same user has other records in the same table, and none in that of another schema.
			for _, name := range []string{"CA", strings.Repeat("n", 299) + "1", strings.Repeat("n", 299) + "2"} {
				p.options.Name = name
				require.ErrorIs(t, must.Err(open().Load(t.Context())), ca.ErrNoRecord)
				must.Get(open().Save(t.Context(), item("", name)))(t)
				require.Equal(t, name, string(must.Get(open().Load(t.Context()))(t).Data()["svidkit-x"]))
			}
			p.options.Table = "elsewhere.ca"
			p.Admin(t, "CREATE SCHEMA elsewhere")
			p.Admin(t, must.Get(sqlstore.Schema(p.options))(t))
			must.Fail(t, must.Err(open().Load(t.Context())), denied)
			p.NewUser(t, "other", "elsewhere_ca")
			db = p.Open(t, "other", map[string]string{"postgres": "svidkit", "mysql": "elsewhere"}[p.Dialect])
			defer db.Close()
			other := must.Get(sqlstore.New(db, p.options))(t)
			must.Get(other.Save(t.Context(), item("", "b")))(t)
			require.Len(t, must.Get(other.Load(t.Context()))(t).Data(), 1)
		})
	}
}

func item(version, value string) ca.Record {
	return ca.NewRecord(version, map[string][]byte{"svidkit-x": []byte(value)})
}

// A primary that was replaced without learning of it answers no more, as it cannot know whether what it has is the
// latest. A primary whose standby is away shows nothing that the standby does not have.
func TestSQLStoreReplacedPrimary(t *testing.T) {
	t.Parallel()
	p := newSQLPlace(t, peers.NewPostgreSQL)
	standby := p.NewStandby(t)
	old, by := p.store(t, p.Addr), p.store(t, standby.Addr)
	version := must.Get(old.Save(t.Context(), item("", "a")))(t)
	must.Fail(t, must.Err(by.Load(t.Context())), "as it is a read replica: connect to the primary")
	must.Fail(t, must.Err(by.Save(t.Context(), item(version, "b"))), "is a read replica: connect to the primary")
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		t.Cleanup(cancel)
		return ctx
	}

	standby.Pause(t)
	require.ErrorIs(t, must.Err(old.Save(short(), item(version, "b"))), context.DeadlineExceeded)
	require.Eventually(t, func() bool { // as the driver cancels the wait
		return strings.Contains(p.Admin(t, "SELECT data FROM svidkit_ca"), "Yg==")
	}, time.Minute, 20*time.Millisecond)
	require.ErrorIs(t, must.Err(old.Load(short())), context.DeadlineExceeded)
	standby.Resume(t)
	r := must.Get(old.Load(t.Context()))(t)
	assert.Equal(t, "b", string(r.Data()["svidkit-x"]))

	standby.Promote(t)
	latest := must.Get(by.Save(t.Context(), item(r.Version, "c")))(t)
	require.ErrorIs(t, must.Err(old.Load(short())), context.DeadlineExceeded)
	require.Equal(t, latest, must.Get(by.Load(t.Context()))(t).Version)
}

// Notices come again after the connection for them was lost.
func TestSQLStoreListensAgain(t *testing.T) {
	t.Parallel()
	p := newSQLPlace(t, peers.NewPostgreSQL)
	var log logtest.Buffer
	p.options.Poll, p.options.Listen = time.Hour, listen(p.DSN("issuer", "svidkit"))
	p.options.Logger = log.Logger()
	s := p.store(t)
	calls := make(chan struct{}, 100)
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		s.(interface {
			Watch(ctx context.Context, changed func())
		}).Watch(ctx, func() { calls <- struct{}{} })
	})
	<-calls // at the start
	version := ""
	for range 2 {
		version = must.Get(p.store(t).Save(t.Context(), item(version, "x")))(t)
		<-calls
		const those = "FROM pg_stat_activity WHERE usename = 'issuer' AND query LIKE 'LISTEN%'"
		require.Eventually(t, func() bool {
			return p.Admin(t, "SELECT count(*) "+those) == "1\n"
		}, time.Minute, 20*time.Millisecond)
		p.Admin(t, "SELECT pg_terminate_backend(pid) "+those)
	}
	stop()
	watching.Wait()
	assert.Contains(t, log.String(), "the database gives no notices")
	assert.Empty(t, calls, "it is called for changes alone")
}

// The database takes clients with an identity of ours, and no other, and the store goes on when both sides have new
// ones.
func TestSQLStoreTLS(t *testing.T) {
	t.Parallel()
	issuer := spiffetest.NewCA(t, "example.org")
	config := func(issuer *spiffetest.CA) *tls.Config {
		endpoint := must.Get(spiffetls.New(spiffetls.Config{
			Self: issuer.SVID("/ca", backdate), Peers: issuer.Bundle(), Allow: spiffe.AllowIDs(databaseID),
		}))(t)
		return must.Get(endpoint.ClientConfig())(t)
	}
	for dialect, start := range map[string]func(testing.TB, ...string) *peers.Database{
		"PostgreSQL": peers.NewPostgreSQL, "MariaDB": peers.NewMariaDB,
	} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			p := newSQLPlace(t, start)
			cert, key := must.Get2(issuer.SVID("/db", backdate).MarshalPEM())(t)
			var files []any
			for i, content := range [][]byte{cert, key, issuer.Bundle().MarshalPEM()} {
				files = append(files, p.Write(t, fmt.Sprint(i, ".pem"), string(content)))
			}
			if p.Dialect == "postgres" {
				p.Write(t, "run/data/pg_hba.conf", "host all postgres 127.0.0.1/32 trust\n"+
					"hostssl all issuer 127.0.0.1/32 trust clientcert=verify-ca\n")
				p.Configure(t, fmt.Sprintf("ssl = on\nssl_cert_file = '%s'\nssl_key_file = '%s'\nssl_ca_file = '%s'", files...))
			} else {
				p.Configure(t, fmt.Sprintf("ssl-cert=%s\nssl-key=%s\nssl-ca=%s", files...))
				p.Admin(t, "ALTER USER issuer@'127.0.0.1' REQUIRE X509")
			}
			open := func(config *tls.Config) ca.Store {
				var db *sql.DB
				if p.Dialect == "postgres" {
					c := must.Get(pgx.ParseConfig(p.DSN("issuer", "svidkit")))(t)
					c.TLSConfig = config
					db = sql.OpenDB(stdlib.GetConnector(*c))
				} else {
					c := must.Get(mysql.ParseDSN(p.DSN("issuer", "svidkit")))(t)
					c.TLS, c.Logger = config, new(mysql.NopLogger)
					db = sql.OpenDB(must.Get(mysql.NewConnector(c))(t))
				}
				t.Cleanup(func() { _ = db.Close() })
				return must.Get(sqlstore.New(db, p.options))(t)
			}
			s := open(config(issuer))
			must.Get(s.Save(t.Context(), item("", "a")))(t)
			must.Get(s.Load(t.Context()))(t)
			other := spiffetest.NewCA(t, "example.org")
			for name, config := range map[string]*tls.Config{
				"no TLS": nil, "no certificate": {InsecureSkipVerify: true}, "another server": config(other),
				"another CA": withCert(other.SVID("/ca", backdate)),
			} {
				err := must.Err(open(config).Load(t.Context()))
				require.Error(t, err, name)
				assert.NotErrorIs(t, err, ca.ErrNoRecord)
			}
		})
	}
}
