package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/caclienttest/storetest"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/sqlstore"
)

// A table is the driver, the connection and the server of a table in memory, which understands what a store sends. The
// databases are in internal/peers.
type table struct {
	mu    sync.Mutex
	rows  map[string]row
	flaw  string
	cut   func()
	fault error // of the driver; errHang waits for the context
	twice bool  // the driver sends the next change twice
	late  error // of the driver, for changes alone
	asked int   // queries so far

	slow time.Duration // of the next change, after which nothing is answered
}

type row struct{ version, data string }

var errHang = errors.New("hang")

func (d *table) Connect(context.Context) (driver.Conn, error) { return conn{d}, nil }
func (d *table) Driver() driver.Driver                        { return nil }

// conn is a connection, without what no store calls.
type conn struct{ *table }

func (c conn) Prepare(string) (driver.Stmt, error) { return nil, errors.ErrUnsupported }
func (c conn) Begin() (driver.Tx, error)           { return nil, errors.ErrUnsupported }
func (c conn) Close() error                        { return nil }

// begin returns the arguments of a statement unless it fails.
func (c conn) begin(ctx context.Context, args []driver.NamedValue) (out []string, err error) {
	c.mu.Lock()
	err = c.fault
	c.mu.Unlock()
	if errors.Is(err, errHang) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for _, a := range args {
		out = append(out, a.Value.(string))
	}
	return out, err
}

func (c conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	values, err := c.begin(ctx, args)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked++
	r, ok := c.rows[values[0]]
	switch {
	case strings.HasPrefix(query, "SELECT version FROM "):
		if !ok {
			return &result{}, nil
		}
		return &result{columns: []driver.Value{r.version}}, nil
	case !strings.Contains(query, "LEFT JOIN"):
		return nil, errors.New("a syntax error")
	case !ok:
		return &result{columns: []driver.Value{c.flaw, nil, nil}}, nil
	}
	return &result{columns: []driver.Value{c.flaw, r.version, r.data}}, nil
}

func (c conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	values, err := c.begin(ctx, args)
	if err != nil {
		return nil, err
	}
	if c.slow > 0 {
		time.Sleep(c.slow)
		c.fails(errHang)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.late != nil {
		return nil, c.late
	}
	have, ok := c.rows[values[2]]
	if update := strings.HasPrefix(query, "UPDATE"); update && (!ok || have.version != values[3]) || !update && ok {
		return driver.RowsAffected(0), nil
	}
	c.rows[values[2]] = row{values[0], values[1]}
	if cut := c.cut; cut != nil {
		c.cut = nil
		cut()
		return nil, io.ErrUnexpectedEOF
	}
	if c.twice {
		c.twice = false
		return nil, driver.ErrBadConn // database/sql tries again
	}
	return driver.RowsAffected(1), nil
}

type result struct{ columns []driver.Value }

func (r *result) Columns() []string { return make([]string, len(r.columns)) }
func (r *result) Close() error      { return nil }
func (r *result) Next(to []driver.Value) error {
	if r.columns == nil {
		return io.EOF
	}
	copy(to, r.columns)
	r.columns = nil
	return nil
}

// set changes how the table behaves.
func (d *table) set(change func(*table)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change(d)
}

func (d *table) fails(err error) (mend func()) {
	d.set(func(d *table) { d.fault = err })
	return func() { d.set(func(d *table) { d.fault = nil }) }
}

func newTable() *table { return &table{rows: make(map[string]row)} }

func (d *table) store(t testing.TB, o sqlstore.Options) (ca.Store, *sql.DB) {
	t.Helper()
	db := sql.OpenDB(d)
	t.Cleanup(func() { _ = db.Close() })
	if o.Dialect == "" {
		o.Dialect = "postgres"
	}
	return must.Get(sqlstore.New(db, o))(t), db
}

func item(version, value string) ca.Record {
	return ca.NewRecord(version, map[string][]byte{"svidkit-x": []byte(value)})
}

func TestStores(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) storetest.Place {
		t.Parallel()
		d := newTable()
		return storetest.Place{
			Open: func() (ca.Store, error) {
				s, _ := d.store(t, sqlstore.Options{Poll: 10 * time.Millisecond})
				return s, nil
			},
			Cut:   func(meanwhile func()) { d.set(func(d *table) { d.cut = meanwhile }) },
			Break: func() func() { return d.fails(io.ErrUnexpectedEOF) },
			Hang:  func() func() { return d.fails(errHang) },
			Dump: func() func() {
				old := d.rows["ca"]
				return func() { d.set(func(d *table) { d.rows["ca"] = old }) }
			},
			Remove: func() func() { return d.fails(errors.New(`no such table: svidkit_ca`)) },
			Damage: func() { d.rows["ca"] = row{d.rows["ca"].version, strings.ToUpper(d.rows["ca"].data)} },
		}
	})
}

// A driver may send a change again, of which it does not know whether it was done.
func TestSentTwice(t *testing.T) {
	t.Parallel()
	d := newTable()
	s, _ := d.store(t, sqlstore.Options{})
	version := ""
	for range 2 {
		d.twice = true
		version = must.Get(s.Save(t.Context(), item(version, "a")))(t)
		require.Equal(t, version, must.Get(s.Load(t.Context()))(t).Version)
	}
}

// Databases have errors for a writer that came second. They are conflicts, and other errors are not.
func TestOvertaken(t *testing.T) {
	t.Parallel()
	d := newTable()
	s, _ := d.store(t, sqlstore.Options{})
	version := must.Get(s.Save(t.Context(), item("", "a")))(t)
	for text, conflict := range map[string]bool{
		"ERROR: could not serialize access due to concurrent update (SQLSTATE 40001)": true,
		"pq: could not serialize access due to read/write dependencies":               true,
		"Error 1020 (HY000): Record has changed since last read in table":             true,
		"Error 1213 (40001): Deadlock found when trying to get lock":                  true,
		"Error 3101 (40000): Plugin instructed the server to rollback":                true,
		"Error 1205 (HY000): Lock wait timeout exceeded":                              false,
		"ERROR: canceling statement due to user request (SQLSTATE 57014)":             false,
	} {
		for _, v := range []string{"", version} {
			d.late = errors.New(text)
			err := must.Err(s.Save(t.Context(), item(v, "b")))
			require.Equal(t, conflict, errors.Is(err, ca.ErrConflict), "%v", err)
			d.late = nil
		}
	}
	require.Equal(t, version, must.Get(s.Load(t.Context()))(t).Version)
}

// What is in the row, or is said of the server, is told apart from a row that is not there.
func TestLoadRefuses(t *testing.T) {
	t.Parallel()
	d := newTable()
	s, _ := d.store(t, sqlstore.Options{})
	must.Get(s.Save(t.Context(), item("", "a")))(t)
	good := d.rows["ca"]
	for _, r := range []row{
		{good.version, ""}, {good.version, "{}"}, {good.version, "null"}, {good.version, good.data[1:]},
		{good.version, good.data + " "},
		{"", good.data}, {"1", good.data}, {good.version[:len(good.version)-1], good.data}, {good.version + "0", good.data},
	} {
		d.rows["ca"] = r
		must.Fail(t, must.Err(s.Load(t.Context())), ca.ErrUnfit, "the record is damaged", "restore the row from a backup")
	}
	d.rows["ca"] = good
	for _, there := range []bool{true, false} {
		if !there {
			delete(d.rows, "ca")
		}
		d.flaw = "it is a read replica"
		err := must.Err(s.Load(t.Context()))
		must.Fail(t, err, "load ca from svidkit_ca: this server is not asked, as it is a read replica: connect to the ")
		assert.NotErrorIs(t, err, ca.ErrUnfit)
		assert.NotErrorIs(t, err, ca.ErrNoRecord)
		d.flaw = ""
	}
	require.ErrorIs(t, must.Err(s.Load(t.Context())), ca.ErrNoRecord)
	must.Fail(t, must.Err(s.Save(t.Context(), item("", strings.Repeat("x", 2<<20)))), "the limit is 2097152")
	require.Empty(t, d.rows)
}

// A caller waits for the end of its context at most, for a connection too, and for ten seconds without one.
func TestPatience(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		d := newTable()
		s, db := d.store(t, sqlstore.Options{})
		db.SetMaxOpenConns(1)
		held := must.Get(db.Conn(t.Context()))(t)
		check := func() {
			t.Helper()
			cause := errors.New("enough")
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, cause)
			defer cancel()
			for limit, ctx := range map[time.Duration]context.Context{time.Second: ctx, 10 * time.Second: t.Context()} {
				for _, call := range []func() error{
					func() error { return must.Err(s.Load(ctx)) },
					func() error { return must.Err(s.Save(ctx, item("", "a"))) },
				} {
					began := time.Now()
					err := call()
					assert.LessOrEqual(t, time.Since(began), limit)
					if limit == time.Second {
						assert.ErrorIs(t, err, cause)
					} else {
						assert.ErrorIs(t, err, context.DeadlineExceeded)
					}
				}
			}
		}
		check()
		require.NoError(t, held.Close())
		mend := d.fails(errHang)
		check()
		mend()
		d.slow = 6 * time.Second
		began := time.Now()
		require.ErrorIs(t, must.Err(s.Save(t.Context(), item("1", "a"))), context.DeadlineExceeded)
		assert.LessOrEqual(t, time.Since(began), 10*time.Second, "with the question after a conflict")
		require.NoError(t, db.Close())
	})
}

// Watch tells of each change once, and at the start. Without notices it goes on by polling, and asks for them again.
func TestWatch(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		d := newTable()
		var log logtest.Buffer
		var listens []time.Time
		notices := make(chan func(), 1)
		o := sqlstore.Options{Poll: time.Minute, Logger: log.Logger()}
		o.Listen = func(ctx context.Context, changed func()) error {
			if listens = append(listens, time.Now()); len(listens) < 12 {
				return errors.New("not yet")
			}
			notices <- changed
			<-ctx.Done()
			return ctx.Err()
		}
		s, db := d.store(t, o)
		ctx, stop := context.WithCancel(t.Context())
		var calls []time.Time
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.(interface {
				Watch(ctx context.Context, changed func())
			}).Watch(ctx, func() { calls = append(calls, time.Now()) })
		}()
		synctest.Wait()
		require.Len(t, calls, 1, "at the start")
		version := must.Get(s.Save(t.Context(), item("", "a")))(t)
		time.Sleep(90 * time.Second)
		synctest.Wait()
		require.Len(t, calls, 2, "by polling")
		mend := d.fails(io.ErrUnexpectedEOF)
		time.Sleep(10 * time.Minute)
		mend()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		require.Len(t, calls, 2, "it is as it was")

		notice := <-notices
		for i := range 3 {
			time.Sleep(time.Second)
			version = must.Get(s.Save(t.Context(), item(version, "b")))(t)
			notice()
			notice()
			synctest.Wait()
			require.Len(t, calls, 3+i)
			assert.Equal(t, time.Now(), calls[2+i], "at once")
			notice()
			synctest.Wait()
			require.Len(t, calls, 3+i, "it is as it was")
		}
		before := d.asked
		for range 1000 {
			notice()
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		assert.InDelta(t, 50, d.asked-before, 5, "queries in a second of many notices")
		for i := range listens[2:] {
			first, wait := listens[i+1].Sub(listens[i]), listens[i+2].Sub(listens[i+1])
			assert.True(t, wait > first/4 && wait <= 90*time.Second, "%v after %v", wait, first)
		}
		assert.Greater(t, listens[11].Sub(listens[10]), 29*time.Second)
		assert.Contains(t, log.String(), `msg="the database gives no notices, and is only polled" err="not yet" retry_in=1s`)
		stop()
		<-ended
		require.NoError(t, db.Close())
	})
}

func TestOptions(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(newTable())
	defer db.Close()
	for want, o := range map[string]sqlstore.Options{
		`Dialect "" is not postgres, mysql or sqlite`:    {},
		`Dialect "oracle" is not`:                        {Dialect: "oracle"},
		`Table "a;b" is not at most 32`:                  {Dialect: "mysql", Table: "a;b"},
		`Table "A" is not at most 32`:                    {Dialect: "mysql", Table: "A"},
		`Table "a.b.c" is not at most 32`:                {Dialect: "mysql", Table: "a.b.c"},
		`Table "` + strings.Repeat("a", 33) + `" is not`: {Dialect: "mysql", Table: strings.Repeat("a", 33)},
		`Name "a'b" is not at most 300 letters`:          {Dialect: "sqlite", Name: "a'b"},
		`Name "` + strings.Repeat("a", 99):               {Dialect: "sqlite", Name: strings.Repeat("a", 301)},
	} {
		must.Fail(t, must.Err(sqlstore.New(db, o)), "sqlstore: invalid Options: "+want)
		must.Fail(t, must.Err(sqlstore.Schema(o)), "sqlstore: invalid Options: "+want)
	}
	must.Fail(t, must.Err(sqlstore.New(nil, sqlstore.Options{Dialect: "mysql"})), "sqlstore: New needs a database")
	s := must.Get(sqlstore.New(db, sqlstore.Options{Dialect: "mysql", Name: "x", Table: "a.b"}))(t)
	assert.Equal(t, "sqlstore.Store(mysql, x in a.b)", fmt.Sprint(s))
}

// The statements for an administrator have the names of the options, and a role of its own for each table.
func TestSchema(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"postgres", "mysql", "sqlite"} {
		for table, role := range map[string]string{"": "svidkit_ca", "a.b_2": "a_b_2"} {
			text := must.Get(sqlstore.Schema(sqlstore.Options{Dialect: dialect, Table: table}))(t)
			if table == "" {
				table = "svidkit_ca"
			}
			assert.Contains(t, text, "CREATE TABLE IF NOT EXISTS "+table+" (")
			assert.NotContains(t, text, "{")
			if dialect != "sqlite" {
				assert.Contains(t, text, "GRANT SELECT, INSERT, UPDATE ON "+table+" TO "+role+";")
			}
		}
	}
}
