package peers_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/svidkit/svidkit/caclient/caclienttest/storetest"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/sqlstore"
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
	moved := func() {
		p.moving.Lock()
		p.moving.Unlock()
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
