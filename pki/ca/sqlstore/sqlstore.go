// Package sqlstore keeps the record of a certificate authority in one row of a database, which all replicas of the CA
// share. [New] makes a store for package ca over a database/sql pool, whose driver the program links:
//
//	db, err := sql.Open("pgx", "postgres://ca@db.example.org/ca") // import _ "github.com/jackc/pgx/v5/stdlib"
//	…
//	store, err := sqlstore.New(db, sqlstore.Options{Dialect: "postgres"})
//	…
//	authority, err := ca.Open(ctx, cfg, store)
//
// The dialect is "postgres" for PostgreSQL 14 or later with the drivers pgx or pq; "mysql" for MySQL 8 and MariaDB
// 10.5 or later, with go-sql-driver/mysql; and "sqlite" for SQLite 3.35 or later, in a file on a local disk, with the
// drivers modernc.org/sqlite or mattn/go-sqlite3. Each call of the store is one short statement outside a
// transaction, so a pool of two or three connections is enough. PgBouncer may be between, for pgx with
// default_query_exec_mode=exec in the data source name.
//
// # The table and its rights
//
// An administrator of the database runs what [Schema] returns, once. It makes one table and a role that may select,
// insert and update its rows and nothing else: that role cannot delete the record, and the CA needs no other. A client
// that may read the table can sign for the whole trust domain, unless custody of package ca keeps the keys elsewhere
// or seals the record. The same holds for each dump, backup and standby of the database. Several CAs may share the
// table under different names. The role belongs to the server: its members may use the table of that name in each
// database, so that CAs that must not read each other's keys need tables with different names.
//
// # Concurrent writers
//
// One statement compares the version and replaces the record, so of several racing writers one wins, and the others
// get [ca.ErrConflict]. A version is random, and contains a hash of the record, which each reading compares: a row
// that was damaged or edited is an error that wraps [ca.ErrUnfit]. If the connection is lost before the answer, the
// error does not say whether the record was written; the authority reads it again.
//
// # Standbys and failover
//
// The store answers only from a server that takes writes. The statement that reads the record also asks the server
// whether it is a read replica (in MySQL and MariaDB, whether it is read_only), and whether it acknowledges writes
// before they are durable. Either is an error that may pass, and names the cause.
//
// Replicate synchronously. Otherwise a failover loses the last acknowledged writes, perhaps a new root that already
// signs: the authorities refuse the older record and go on with what they have until they are restarted.
//
//   - PostgreSQL: set synchronous_standby_names and synchronous_commit, and promote only such a standby. With that a
//     server that was replaced and does not know it gives no old record either: each reading waits until its standbys
//     have confirmed a message in the log.
//   - MySQL and MariaDB: use semi-synchronous replication with rpl_semi_sync_master_wait_point=AFTER_SYNC and a
//     timeout that is never reached, keep replicas read_only, and stop the old primary, or make it read_only, before
//     another takes its place.
//   - Galera and Group Replication: set wsrep_sync_wait=1 or group_replication_consistency=BEFORE for the sessions of
//     the CA, in the data source name, so that each member reads what any member wrote.
//
// A dump that is restored is an older record: stop all authorities first, as with any other store.
//
// # Notice of changes
//
// The store has the method Watch, by which an authority learns of a change by another process within Options.Poll. In
// PostgreSQL, the schema has a trigger that notifies a channel with the name of the table, so that Options.Listen can
// tell at once.
package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/internal/recordtext"
)

// Options configures a store. A zero field means its default, except for Dialect.
type Options struct {
	// Dialect is "postgres", "mysql" (also for MariaDB) or "sqlite".
	Dialect string

	// Table is the name of the table, optionally after that of a schema or database and a dot, in at most 32 lower-case
	// letters, digits and underscores; empty means svidkit_ca.
	Table string

	// Name is the name of the record among those in the table, such as the trust domain: at most 300 letters, digits,
	// dots, hyphens and underscores; empty means ca.
	Name string

	// Poll is how often Watch asks for the version of the record; 0 or less means 2 seconds.
	Poll time.Duration

	// Listen, if it is not nil, calls changed once the database would notify it of changes of the table, and after each
	// notice, until ctx is done; in PostgreSQL, with a connection of its own that executes LISTEN and the name of the
	// table, with an underscore for a dot. Watch calls it, and calls it again, after growing waits of up to a minute,
	// when it has returned. It must return when ctx is done. changed does not block.
	Listen func(ctx context.Context, changed func()) error

	Logger *slog.Logger // of failures of Listen; nil means silence
}

//go:embed schema
var schemas embed.FS

// dialects has what each dialect puts in the place of parts of the statements. FLAW is an expression with the reason
// why the server is not to be asked, or NULL or an empty text.
var dialects = map[string][]string{
	// With the message there is something to commit, so that the answer waits for synchronous standbys.
	"postgres": {"FLAW", "CASE WHEN pg_is_in_recovery() THEN 'it is a read replica'" +
		" WHEN current_setting('synchronous_commit') = 'off' THEN 'synchronous_commit is off'" +
		" WHEN pg_logical_emit_message(true, 'svidkit', '') IS NULL THEN '' END"},
	"mysql": {"FLAW", "CASE WHEN @@global.read_only NOT IN ('0', 'OFF') THEN 'it is a read replica (read_only)'" +
		" WHEN @@global.innodb_flush_log_at_trx_commit NOT IN (1, 3) THEN 'innodb_flush_log_at_trx_commit is not 1'" +
		" WHEN NOT @@autocommit THEN 'autocommit is off' END",
		"INSERT", "INSERT IGNORE", " ON CONFLICT (name) DO NOTHING", "", "$1", "?", "$2", "?", "$3", "?", "$4", "?"},
	"sqlite": {"FLAW", "(SELECT 'PRAGMA synchronous is not full' FROM pragma_synchronous WHERE synchronous < 2)",
		"$1", "?", "$2", "?", "$3", "?", "$4", "?"},
}

var (
	tableForm = regexp.MustCompile(`^([a-z_][a-z0-9_]*\.)?[a-z_][a-z0-9_]*$`)
	nameForm  = regexp.MustCompile(`^[A-Za-z0-9._-]{1,300}$`)

	// overtaken is the form of drivers' errors for a statement that had no effect, as another writer was faster:
	// PostgreSQL with an isolation level above READ COMMITTED, Galera and Group Replication.
	overtaken = regexp.MustCompile(`SQLSTATE 40001|could not serialize access|Error (1020|1213|3101)`)
)

// withDefaults returns checked options.
func (o Options) withDefaults() (Options, error) {
	o.Table, o.Name, o.Poll = cmp.Or(o.Table, "svidkit_ca"), cmp.Or(o.Name, "ca"), cmp.Or(max(o.Poll, 0), 2*time.Second)
	o.Logger = ratelog.Patient(o.Logger)
	switch {
	case dialects[o.Dialect] == nil:
		return o, fmt.Errorf("sqlstore: invalid Options: Dialect %.64q is not postgres, mysql or sqlite", o.Dialect)
	case len(o.Table) > 32 || !tableForm.MatchString(o.Table):
		return o, fmt.Errorf("sqlstore: invalid Options: Table %.64q is not at most 32 of a-z, 0-9 and '_'", o.Table)
	case !nameForm.MatchString(o.Name):
		return o, fmt.Errorf("sqlstore: invalid Options: Name %.99q is not at most 300 letters, digits, '.', '-' and '_'", o.Name)
	}
	return o, nil
}

// Schema returns the statements that make the table of the options and a role for the CA, for an administrator of the
// database. The role has the name of the table, with an underscore for a dot, and may select, insert and update rows
// of the table; the administrator grants it to the user of the CA. SQLite has no roles: there the mode of the file
// decides. The statements do no harm to a table that exists.
func Schema(o Options) (string, error) {
	o, err := o.withDefaults()
	if err != nil {
		return "", err
	}
	text, err := schemas.ReadFile("schema/" + o.Dialect + ".sql")
	role := strings.ReplaceAll(o.Table, ".", "_")
	return strings.NewReplacer("{table}", o.Table, "{role}", role).Replace(string(text)), err
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

type store struct {
	redacted
	db                            *sql.DB
	options                       Options
	load, version, insert, update string // statements
}

// New returns a [ca.Store] in a row of a database, and sends nothing. The store keeps nothing in memory and is safe
// for concurrent use. The caller closes db, after the authority has ended. Each call takes at most ten seconds, if the
// driver heeds contexts. Only a table without the row gives [ca.ErrNoRecord]: a missing table, a missing right and a
// read replica are errors that may pass. A record has at most 2 MiB.
//
// The store has the method Watch that [ca.Store] describes.
func New(db *sql.DB, o Options) (ca.Store, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if db == nil {
		return nil, errors.New("sqlstore: New needs a database")
	}
	text := strings.NewReplacer(append([]string{"TABLE", o.Table}, dialects[o.Dialect]...)...)
	return &store{
		redacted: redact.New(fmt.Sprintf("sqlstore.Store(%s, %s in %s)", o.Dialect, o.Name, o.Table)),
		db:       db, options: o,
		load:    text.Replace("SELECT FLAW, t.version, t.data FROM (SELECT 1 AS one) AS o LEFT JOIN TABLE AS t ON t.name = $1"),
		version: text.Replace("SELECT version FROM TABLE WHERE name = $1"),
		insert:  text.Replace("INSERT INTO TABLE (version, data, name) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING"),
		update:  text.Replace("UPDATE TABLE SET version = $1, data = $2 WHERE name = $3 AND version = $4"),
	}, nil
}

// patience bounds each call.
const patience = 10 * time.Second

// row reads columns of a row that belongs to the record. It asks twice, as the pool may have a connection that a
// failover has ended.
func (s *store) row(ctx context.Context, statement string, columns ...any) (err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for range 2 {
		err = s.db.QueryRowContext(ctx, statement, s.options.Name).Scan(columns...)
		if err == nil || errors.Is(err, sql.ErrNoRows) {
			break
		}
	}
	return err
}

// Load implements [ca.Store].
func (s *store) Load(ctx context.Context) (ca.Record, error) {
	var flaw, version sql.NullString
	var text []byte
	err := s.row(ctx, s.load, &flaw, &version, &text)
	switch {
	case err != nil:
		err = remedy(ctx, err)
	case flaw.String != "":
		err = fmt.Errorf("this server is not asked, as %s: connect to the primary, with durable commits", flaw.String)
	case !version.Valid:
		err = ca.ErrNoRecord
	default:
		items, wrong := recordtext.Decode(version.String, text)
		if wrong == nil {
			return ca.NewRecord(version.String, items), nil
		}
		err = fmt.Errorf("%w: the record is damaged: %w; no new CA is made; restore the row from a backup", ca.ErrUnfit, wrong)
	}
	return ca.Record{}, fmt.Errorf("sqlstore: load %s from %s: %w", s.options.Name, s.options.Table, err)
}

// Save implements [ca.Store].
func (s *store) Save(ctx context.Context, r ca.Record) (string, error) {
	version, text, err := recordtext.Encode(r.Data())
	if err == nil {
		err = s.replace(ctx, r.Version, version, string(text))
	}
	if err != nil {
		return "", fmt.Errorf("sqlstore: save %s to %s: %w", s.options.Name, s.options.Table, remedy(ctx, err))
	}
	return version, nil
}

// replace writes a record in place of the one with the version old.
func (s *store) replace(ctx context.Context, old, version, text string) error {
	asking, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	statement, args := s.insert, []any{version, text, s.options.Name}
	if old != "" {
		statement, args = s.update, append(args, old)
	}
	var n int64
	result, err := s.db.ExecContext(asking, statement, args...)
	if err == nil {
		n, err = result.RowsAffected()
	}
	if n == 1 || err != nil && !overtaken.MatchString(err.Error()) {
		return err
	}
	have, err := s.current(asking)
	if err == nil && have != version { // it has ours if the driver sent the statement twice
		err = fmt.Errorf("%w: version %q was to be replaced, there is %q", ca.ErrConflict, old, have)
	}
	return err
}

// current returns the version of the record, or "" if there is none.
func (s *store) current(ctx context.Context) (version string, err error) {
	if err = s.row(ctx, s.version, &version); errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return version, err
}

// remedies has, by a form of drivers' errors, what to do about them.
var remedies = map[string]string{
	`SQLSTATE 42P01|relation ".*" does not exist|Error 1146|no such table`: "there is no such table: run the " +
		"statements of the schema as an administrator of the database",
	`SQLSTATE 42501|permission denied|Error (1044|114[23])`: "the user of the CA lacks a right: grant it the role of the schema",
	`SQLSTATE 25006|Error 1290`:                             "the server is a read replica: connect to the primary",
}

// remedy says what to do about an error of the driver.
func remedy(ctx context.Context, err error) error {
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	for of, says := range remedies {
		if regexp.MustCompile(of).MatchString(err.Error()) {
			return fmt.Errorf("%s: %w", says, err)
		}
	}
	return err
}

// Watch calls changed when the record has another version than before, and once at the start.
func (s *store) Watch(ctx context.Context, changed func()) {
	var notice renew.Signal
	var listening sync.WaitGroup
	if s.options.Listen != nil {
		listening.Go(func() { s.listen(ctx, notice.Notify) })
	}
	defer listening.Wait()
	for last, known := "", false; ctx.Err() == nil; {
		wake := notice.Changed()
		if now, err := s.current(ctx); err == nil && (now != last || !known) {
			last, known = now, true
			changed()
		}
		_ = renew.Sleep(ctx, 20*time.Millisecond) // as each user of PostgreSQL may flood it with notices
		renew.Wait(ctx, s.options.Poll/2+rand.N(s.options.Poll), wake)
	}
}

// listen calls Options.Listen until ctx is done.
func (s *store) listen(ctx context.Context, changed func()) {
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		err := s.options.Listen(ctx, changed)
		if ctx.Err() == nil {
			s.options.Logger.Warn("the database gives no notices, and is only polled", "err", err, "retry_in", wait)
		}
		if renew.Sleep(ctx, wait/2+rand.N(wait)) != nil {
			return
		}
	}
}
