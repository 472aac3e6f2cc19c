// Package auditlog keeps the audit record of a certificate authority in a file: one line of JSON for each certificate or
// token, on the disk before it leaves, and one for each change of the authority's keys.
//
// Give a [Log] to ca.Config.Auditor:
//
//	l, err := auditlog.Open("/var/log/svidkit/audit.jsonl", nil)
//	…
//	authority, err := ca.Open(ctx, ca.Config{TrustDomain: td, Auditor: l}, store)
//
// [Read] reads such a file, and [Verify] sees whether it is as it was written.
//
// # What it promises
//
// When [Log.Record] returns nil, the line has been written and fsync has returned without an error. Records that come at
// the same time share one fsync. A slow disk pushes back: the queue is bounded, and a caller that finds it full waits
// until its context is done. When writing or fsync fails, every record of that write gets the error, and the log stays
// failed until the file was opened again and a write worked; no later success hides a lost one.
//
// A line that a crash left unfinished gets its newline with the next one, so that no record is ever glued to it. A
// line may be in the file although Record returned an error; then its certificate was thrown away. There is no
// certificate without a line.
//
// [Log.Err] says whether a record could be written now, for pages about health. When there is room again, the log goes on
// by itself.
//
// The file, its folder and those above it must belong to the user of this process or to root. If other users can read the
// file, or write to it or to a folder, Options.Logger gets a warning that names the chmod that helps.
//
// # The format
//
// Each line is one JSON object. Its members, in this order, of which those that are empty are left
// out, except for time and prev:
//
//	time         when it was issued, RFC 3339 in UTC
//	kind         such as "x509-svid", "dns", "ca", "jwt-svid"
//	serial       of the certificate, in hexadecimal; the jti of a token
//	id           the SPIFFE ID
//	dns_names    an array of strings
//	ips          an array of strings
//	audience     an array of strings; of a token
//	not_before   RFC 3339 in UTC
//	not_after    RFC 3339 in UTC
//	issuer       serial of the signing certificate in hexadecimal, or the ID of the key
//	fingerprint  SHA-256 of the certificate (DER), in hexadecimal
//	public_key   SHA-256 of the SubjectPublicKeyInfo (DER), in hexadecimal
//	caller       the authenticated caller
//	method       how it authenticated
//	cluster, namespace, service_account, pod, pod_uid, node
//	             where the caller runs in Kubernetes, as far as its proof says
//	service_account_uid, node_uid, request
//	             of a pod that asked by a PodCertificateRequest, whose name request is
//	prev         SHA-256 of the line before, without its newline, in hexadecimal
//
// The line of a change of keys, a [ca.KeyEvent], has these members instead, by the same rules; event is never left out:
//
//	time         when it happened
//	event        such as "created", "loaded", "prepared", "activated", "tainted", "revoked", "retired"
//	key          "root" or "jwt"
//	serial       of a root, in hexadecimal; the ID of a JWT key
//	not_after    of a root
//	fingerprint  SHA-256 of a root (DER), in hexadecimal; of "removed", see below
//	successor    the serial or ID of the key that takes over
//	detail       for operators
//	uid          of the user of the process that did it
//	host         its machine or pod
//	command      its command line, without secrets
//	prev         as above
//
// The log itself writes one with the event "removed", the names of files in detail, and in fingerprint the SHA-256 of the last
// line of the newest of them.
//
// By prev each line vouches for the one before, also across files that were moved away. The first line ever has zeros
// there, and so has the first one of a process that found an empty file and has no MaxSize, by which it would know the
// file before. So the next line shows that a line was changed or taken out, and [Verify] says where, and that the first lines are
// not here. That lines at the end were cut off or changed, or that all of it was rewritten, shows only against the hash of a later
// line that is kept elsewhere: [Log.End].
//
// # Rotation
//
// With Options.MaxSize a full file is renamed with the date and a number, such as audit-20060102.1.jsonl, and a new one
// begins. A program such as logrotate may move the file instead: the log notices before its next write, and after
// [Log.Reopen] nothing is written to the old file any more.
//
// Options.KeepSize and Options.KeepAge bound the full files; without them nothing is ever deleted. The oldest go first.
// The current file and the newest full one always stay, so that the chain goes on. A file with such a name that does not
// end with a record, or that belongs to another user, stays too. The log names the files that it removes in a line of its
// own, which tells that from a deletion by another program. The files that are left are a chain.
//
// On systems with flock (all but Windows, Solaris, AIX and Plan 9) several processes of one machine may write to the same
// file with the same Options, such as a server and an operator's command. A process that holds the lock on the file for
// more than 10 seconds makes records fail.
package auditlog

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/ca"
)

// Limits.
const (
	maxLine = 64 << 10 // bytes of a line without its newline
	maxTorn = 64 << 20 // bytes without a newline at the end of a file, after a crash

	attemptEvery = time.Second // from a failure to the next attempt to open the file, and how long an answer of Err counts
)

// Options are the options of [Open]. Zero means the default that is named here.
type Options struct {
	// MaxSize is the size in bytes at which a file is full. It is checked before each write, so that a file gets larger only
	// if a single write is larger. 0 means no limit.
	MaxSize int64

	// Queue is how many records wait while the disk is busy; callers with more wait until there is room. 0 means 1024.
	Queue int

	// KeepSize is how many bytes the full files may have together before the oldest are removed; 0 means no limit. KeepAge is
	// how long a full file is kept after its last record; 0 means for ever. Both are checked when a file is full, at the
	// start, and once an hour while there are records.
	KeepSize int64
	KeepAge  time.Duration

	// Logger gets a warning, once, about a file or a folder that other users can write to or a file that they can
	// read, and one about a full file that cannot be removed. Nil means silence.
	Logger *slog.Logger
}

// Log is an audit log in a file; [Open] makes one. It is a [ca.Auditor]. It is safe for concurrent use. A goroutine runs
// while there is work for the disk, and none otherwise.
type Log struct {
	path  string
	o     Options
	fs    fileSystem
	every time.Duration // attemptEvery; less in tests of a real disk

	mu      sync.Mutex
	pending *batch        // the records that go into the next write; nil for none
	taken   chan struct{} // closed when pending goes to the disk
	busy    bool          // a goroutine is writing
	idle    sync.Cond     // it has ended
	closed  bool
	began   time.Time // when the present write began; zero for none
	checked time.Time // when it was last found out whether the disk works
	health  error     // what was found
	ended   digest    // last, as of the present write or look

	disk   sync.Mutex // held while writing; guards what follows
	file   file       // nil if it is not open
	size   int64      // of the file when last was found; -1 if it was not looked at yet
	last   digest     // the hash of the last line, here or in a file before
	torn   bool       // the last line has no newline yet
	err    error      // of the last attempt; nil if it worked
	failed time.Time
	pruned time.Time       // when it was last looked which files may go
	gone   []removed       // files that are in no line yet, the newest first
	told   map[string]bool // warnings
}

// removed is a full file that was removed.
type removed struct {
	name string
	last digest // the hash of its last line
}

// removedEvent is what the log says of them.
const removedEvent = "removed"

// batch is what goes to the disk together.
type batch struct {
	lines [][]byte
	done  chan struct{}
	err   error // once done is closed
}

// size is how much b adds to a file; a nil batch adds nothing.
func (b *batch) size() (n int64) {
	if b == nil {
		return 0
	}
	for _, line := range b.lines {
		n += int64(len(line) + 1)
	}
	return n
}

// Open opens the audit log at path, or creates it with the mode 0600, in a folder that has to be
// there. The error says what is wrong with the file; it wraps that of the operating system. o may be nil.
func Open(path string, o *Options) (*Log, error) {
	return open(path, o, osFileSystem{})
}

func open(path string, o *Options, fsys fileSystem) (*Log, error) {
	if o == nil {
		o = &Options{}
	}
	if o.MaxSize < 0 || o.Queue < 0 || o.KeepSize < 0 || o.KeepAge < 0 {
		return nil, fmt.Errorf("auditlog: invalid Options: MaxSize is %d, Queue %d, KeepSize %d and KeepAge %v, but none may be negative", o.MaxSize, o.Queue, o.KeepSize, o.KeepAge)
	}
	path, err := filepath.Abs(path) // the program may go to another folder
	if err != nil {
		return nil, fmt.Errorf("auditlog: %w", err)
	}
	l := &Log{path: path, o: *o, fs: fsys, every: attemptEvery, taken: make(chan struct{}), told: map[string]bool{}}
	l.o.Queue, l.o.Logger = cmp.Or(o.Queue, 1024), ratelog.Patient(o.Logger)
	l.idle.L = &l.mu
	if err := l.Reopen(); err != nil {
		return nil, err
	}
	return l, nil
}

// Record writes i as one line and returns nil when it is on the disk. Invalid UTF-8 is replaced. A
// record that is no valid line (more than 64 KiB, or a year over 9999) is refused.
//
// The error wraps that of the operating system, or the cause of ctx's end; the line may be in the
// file all the same. After [Log.Close] it wraps [fs.ErrClosed].
func (l *Log) Record(ctx context.Context, i *ca.Issuance) error {
	if err := l.record(ctx, Entry{Issuance: i}); err != nil {
		return fmt.Errorf("auditlog: record of %q: %w", i.Serial, err)
	}
	return nil
}

// RecordKeyEvent is Record for a change of the keys; see [ca.Auditor].
func (l *Log) RecordKeyEvent(ctx context.Context, e *ca.KeyEvent) error {
	if err := l.record(ctx, Entry{KeyEvent: e}); err != nil {
		return fmt.Errorf("auditlog: record of the event %q of key %q: %w", e.Event, e.Serial, err)
	}
	return nil
}

func (l *Log) record(ctx context.Context, e Entry) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	line, err := encode(e)
	if err != nil {
		return err
	}
	b, err := l.join(ctx, line)
	if err != nil {
		return err
	}
	select {
	case <-b.done:
		return b.err
	case <-ctx.Done():
		return fmt.Errorf("waiting for the disk: %w", context.Cause(ctx))
	}
}

// join puts a line into the next batch, once there is room, and sees to it that it is written.
func (l *Log) join(ctx context.Context, line []byte) (*batch, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.closed && l.pending != nil && len(l.pending.lines) >= l.o.Queue {
		taken := l.taken
		l.mu.Unlock()
		select {
		case <-taken:
		case <-ctx.Done():
		}
		l.mu.Lock()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("the queue is full: %w", context.Cause(ctx))
		}
	}
	if l.closed {
		return nil, fs.ErrClosed
	}
	if l.pending == nil {
		l.pending = &batch{done: make(chan struct{})}
	}
	b := l.pending
	b.lines = append(b.lines, line)
	if !l.busy {
		l.busy = true
		go l.write()
	}
	return b, nil
}

// write brings batches to the disk until there are none.
func (l *Log) write() {
	for {
		runtime.Gosched() // a caller that is about to bring a record shares this fsync instead of waiting for it, and for the next
		l.mu.Lock()
		b := l.pending
		if b == nil {
			l.busy = false
			l.idle.Broadcast()
			l.mu.Unlock()
			return
		}
		l.pending = nil
		close(l.taken)
		l.taken = make(chan struct{})
		l.mu.Unlock()

		l.disk.Lock()
		b.err = l.commit(b)
		l.disk.Unlock()
		close(b.done)
	}
}

// Limits of Err.
const (
	checkWait = time.Second // for an answer; then the one before counts
	tooSlow   = 10 * time.Second
	probeSize = 4 << 10 // bytes for which there has to be room
)

// Err returns nil if a record could be written now, and otherwise why not: the error of the last attempt, a disk without
// room for another record, or one that has not answered for ten seconds. It wraps [fs.ErrClosed] after [Log.Close]. It
// checks the disk at most once a second, and not while writes succeed, so that pages about health may call it at any
// rate. It waits for the disk for a second at most; then the answer before counts.
func (l *Log) Err() error {
	if done := l.check(); done != nil {
		timer := time.NewTimer(checkWait)
		defer timer.Stop()
		select {
		case <-done:
		case <-timer.C:
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	slow := time.Since(l.began)
	switch {
	case l.fs == nil:
		return errors.New("auditlog: the Log is the zero one; Open makes one")
	case l.closed:
		return fmt.Errorf("auditlog: %w", fs.ErrClosed)
	case !l.began.IsZero() && slow > tooSlow:
		return fmt.Errorf("auditlog: %s: the disk has not answered for %v", l.path, slow.Round(time.Second))
	case l.health != nil:
		return fmt.Errorf("auditlog: %w", l.health)
	}
	return nil
}

// check looks whether the disk works, if that is due, and closes the channel when it knows. Nil means that it is not due,
// or that a write will tell.
func (l *Log) check() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.fs == nil || time.Since(l.checked) < l.every || !l.disk.TryLock() {
		return nil
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer l.disk.Unlock() // Close waits for it
		err := l.commit(nil)
		if err == nil {
			if err = l.fs.Probe(l.path, probeSize); err != nil {
				err = fmt.Errorf("%s: no room for another record: %w", l.path, err)
			}
		}
		l.mu.Lock()
		l.health, l.checked = err, time.Now()
		l.mu.Unlock()
	}()
	return done
}

// End returns the SHA-256 of the last line in hexadecimal, as of the last write, or of the last look at what other processes have
// written. Kept where those who can change the log cannot change it, [Verify] sees by it that lines at the end are missing.
func (l *Log) End() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return hex.EncodeToString(l.ended[:])
}

// Reopen closes the file and opens the one at its path, creating it if it was moved away. When it returns, nothing is
// written to the old file any more. It also ends a failure at once, if the file can be used again; otherwise that is tried
// once a second while there are records to write.
func (l *Log) Reopen() error {
	l.disk.Lock()
	defer l.disk.Unlock()
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return fmt.Errorf("auditlog: reopen %s: %w", l.path, fs.ErrClosed)
	}
	_ = l.leave()
	l.err = nil
	if err := l.commit(nil); err != nil {
		return fmt.Errorf("auditlog: open: %w", err)
	}
	return nil
}

// Close waits for the records that are being written, and closes the file. Closing again does
// nothing.
func (l *Log) Close() error {
	l.mu.Lock()
	l.closed = true
	for l.busy {
		l.idle.Wait()
	}
	l.mu.Unlock()
	l.disk.Lock()
	defer l.disk.Unlock()
	return l.leave()
}

// commit writes b, which may be nil, at the end of the file that is at path now, and waits for the
// disk. After a failure it does not even try before attemptEvery has passed. The lock disk is held, as in all
// that follows.
func (l *Log) commit(b *batch) error {
	if l.err != nil && time.Since(l.failed) < l.every {
		return l.err
	}
	l.mu.Lock()
	l.began = time.Now()
	l.mu.Unlock()
	l.err = l.try(b)
	if l.err != nil {
		_ = l.leave() // what the file holds is unknown now; the next attempt looks
		l.err, l.failed = fmt.Errorf("%s: %w", l.path, l.err), time.Now()
	}
	l.mu.Lock()
	l.began = time.Time{}
	if l.err == nil {
		l.ended = l.last
	}
	if b != nil || l.err != nil { // it says more than a write of nothing
		l.health, l.checked = l.err, time.Now()
	}
	l.mu.Unlock()
	return l.err
}

func (l *Log) try(b *batch) error {
	unlock, err := l.settle(b.size())
	if err != nil {
		return err
	}
	defer unlock()
	l.prune()
	var text []byte
	last := l.last
	add := func(line []byte) {
		if l.torn && text == nil {
			text = append(text, '\n')
		}
		last = link(line, last)
		text = append(append(text, line...), '\n')
	}
	named := 0 // of the files that are gone
	if len(l.gone) > 0 {
		var detail string
		for ; named < len(l.gone) && len(detail) < maxNamed; named++ {
			detail += " " + l.gone[named].name
		}
		line, err := encode(Entry{KeyEvent: &ca.KeyEvent{
			Time: time.Now(), Event: removedEvent, Fingerprint: hex.EncodeToString(l.gone[0].last[:]), Detail: detail[1:],
		}})
		if err != nil {
			return err
		}
		add(line)
	}
	if b != nil {
		for _, line := range b.lines {
			add(line)
		}
	}
	if len(text) > 0 {
		if n, err := l.file.Write(text); err != nil || n < len(text) {
			return cmp.Or(err, io.ErrShortWrite)
		}
	}
	if err := l.file.Sync(); err != nil { // also of nothing: it says whether the disk is well
		return err
	}
	l.size, l.last, l.torn = l.size+int64(len(text)), last, l.torn && len(text) == 0
	l.gone = l.gone[named:]
	return nil
}

// settle opens the file that is at path now, unless it is the open one, and locks it, with room in it for
// more bytes. Then l knows all of it.
func (l *Log) settle(more int64) (unlock func(), err error) {
	for range 100 { // others may move the file away again and again
		if l.file == nil {
			if err := l.open(); err != nil {
				return nil, err
			}
		}
		unlock, err := l.file.Lock()
		if err != nil {
			return nil, err
		}
		ready, err := l.look(more)
		if ready && err == nil {
			return unlock, nil
		}
		unlock()
		if err != nil {
			return nil, err
		}
		_ = l.leave()
	}
	return nil, errors.New("the file is moved away all the time")
}

// open opens the file at path, or creates it so that it is there after a crash, too.
func (l *Log) open() error {
	f, err := l.fs.OpenFile(l.path, func(err error) {
		l.warn("auditlog: other users can change the audit log", slog.Any("err", err))
	})
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && runtime.GOOS != "windows" && info.Mode().Perm()&0o006 == 0o004 {
		l.warn("auditlog: all users of this machine can read the audit log", slog.String("file", l.path),
			slog.String("mode", fmt.Sprintf("%04o", info.Mode().Perm())), slog.String("run", fmt.Sprintf("chmod o-r %q", l.path)))
	}
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("not a regular file, so that nothing stays in it")
	}
	if err == nil && info.Size() == 0 {
		err = l.fs.SyncDir(filepath.Dir(l.path))
	}
	if err != nil {
		f.Close()
		return err
	}
	l.file, l.size = f, -1
	return nil
}

// warn says something once.
func (l *Log) warn(text string, attrs ...slog.Attr) {
	if what := fmt.Sprint(text, attrs); !l.told[what] {
		l.told[what] = true
		l.o.Logger.LogAttrs(context.Background(), slog.LevelWarn, text, attrs...)
	}
}

// leave closes the file and remembers its last line, which the next file goes on from.
func (l *Log) leave() error {
	if l.file == nil {
		return nil
	}
	err := l.file.Close() // everything in it went through Sync
	l.file = nil
	return err
}

// look reports whether the open file is the one to write to. If it is full, it is moved away.
func (l *Log) look(more int64) (ready bool, err error) {
	own, err := l.file.Stat()
	if err != nil {
		return false, err
	}
	size, fresh := own.Size(), l.size < 0
	if size > 0 && size != l.size { // new to us, or another process wrote
		if l.last, l.torn, err = end(l.file, size); err != nil {
			return false, err
		}
	}
	named, err := l.fs.Stat(l.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(own, named) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if l.size = size; size == 0 {
		// The first line follows the last one that is known, or that of the file that was moved away
		// last: another process may have written and moved that meanwhile.
		l.torn = false
		if fresh && l.o.MaxSize > 0 {
			return true, l.follow()
		}
		return true, nil
	}
	if more == 0 || l.o.MaxSize == 0 || l.torn || size+more <= l.o.MaxSize {
		return true, nil
	}
	return false, l.moveAway()
}

// follow finds the last line of the file that was moved away last.
func (l *Log) follow() error {
	full, err := fullFiles(l.path)
	if len(full) == 0 || err != nil {
		return err
	}
	f, err := openFull(full[len(full)-1].path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && info.Size() > 0 {
		l.last, _, err = end(f, info.Size())
	}
	return err
}

// moveAway gives a full file its name: a number more than those that are there.
func (l *Log) moveAway() error {
	full, err := fullFiles(l.path)
	if err != nil {
		return err
	}
	date, n := "", 0
	if len(full) > 0 {
		date, n = full[len(full)-1].date, full[len(full)-1].number
	}
	if today := time.Now().UTC().Format(dateLayout); today > date {
		date, n = today, 0
	}
	base, ext := split(l.path)
	for { // another user may have put something there
		n++
		name := fmt.Sprintf("%s%s.%d%s", base, date, n, ext)
		if _, err := os.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
			if err != nil {
				return err
			}
			continue
		}
		if err := l.fs.Rename(l.file, l.path, name); err != nil {
			return err
		}
		break
	}
	l.pruned = time.Time{}
	return l.fs.SyncDir(filepath.Dir(l.path))
}

const (
	pruneEvery = time.Hour
	maxNamed   = 8 << 10 // bytes after which no more files are named in a line
)

// prune removes full files that are too old or too much. That it cannot is no reason not to write.
func (l *Log) prune() {
	if l.o.KeepSize == 0 && l.o.KeepAge == 0 || time.Since(l.pruned) < pruneEvery {
		return
	}
	l.pruned = time.Now()
	full, err := fullFiles(l.path)
	if err != nil {
		l.warn("auditlog: full files cannot be listed", slog.Any("err", err))
		return
	}
	var total int64
	for i, f := range slices.Backward(full) {
		info, err := os.Lstat(f.path)
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		total += info.Size()
		tooMuch := l.o.KeepSize > 0 && total > l.o.KeepSize
		tooOld := l.o.KeepAge > 0 && time.Since(info.ModTime()) > l.o.KeepAge
		if i == len(full)-1 || !tooMuch && !tooOld {
			continue
		}
		last, ok := endOfRecord(f.path, info.Size())
		if !ok {
			continue
		}
		if err := l.fs.Remove(f.path); err != nil {
			l.warn("auditlog: a full file cannot be removed", slog.Any("err", err))
			continue
		}
		l.gone = append(l.gone, removed{filepath.Base(f.path), last})
	}
}

// endOfRecord returns the hash of the last line of a file, if that is one of ours.
func endOfRecord(path string, size int64) (last digest, ok bool) {
	f, err := openFull(path)
	if err != nil {
		return last, false
	}
	defer f.Close()
	line := make([]byte, min(size, int64(endLen+1)))
	if _, err := f.ReadAt(line, size-int64(len(line))); err != nil || !finished(bytes.TrimSuffix(line, []byte{'\n'})) {
		return last, false
	}
	last, _, err = end(f, size)
	return last, err == nil
}

const dateLayout = "20060102"

// split returns what comes before and behind the date and the number in the name of a full file.
func split(path string) (base, ext string) {
	ext = filepath.Ext(path)
	return strings.TrimSuffix(path, ext) + "-", ext
}

// fullFile is a file that was moved away, and what its name says.
type fullFile struct {
	path, date string
	number     int
}

// owned reports whether a file is one, and of this user or root.
func owned(e fs.DirEntry, path string) bool {
	info, err := e.Info()
	return err == nil && info.Mode().IsRegular() && private.Check(path, info, private.Options{Warn: func(error) {}}) == nil
}

// openFull opens a full file for reading.
func openFull(path string) (*os.File, error) {
	return private.OpenFile(path, os.O_RDONLY, private.Options{Warn: func(error) {}})
}

// Files returns the files of the log at path, the oldest first: the full ones, and path itself.
func Files(path string) ([]string, error) {
	full, err := fullFiles(path)
	var all []string
	for _, f := range full {
		all = append(all, f.path)
	}
	return append(all, path), err
}

// fullFiles returns the files that were moved away, the newest last. Those of other users are none.
func fullFiles(path string) (full []*fullFile, err error) {
	base, ext := split(path)
	entries, err := os.ReadDir(filepath.Dir(path))
	for _, e := range entries {
		name := filepath.Join(filepath.Dir(path), e.Name())
		middle, isOurs := strings.CutPrefix(name, base)
		middle, isFull := strings.CutSuffix(middle, ext)
		date, digits, _ := strings.Cut(middle, ".")
		n, invalid := strconv.Atoi(digits)
		_, noDate := time.Parse(dateLayout, date)
		if isOurs && isFull && invalid == nil && noDate == nil && n > 0 && owned(e, name) {
			full = append(full, &fullFile{name, date, n})
		}
	}
	slices.SortFunc(full, func(a, b *fullFile) int { return cmp.Or(strings.Compare(a.date, b.date), a.number-b.number) })
	return full, err
}

// end returns the hash of the last line of a file that has the given size, not 0, and whether that
// has no newline yet.
func end(f io.ReaderAt, size int64) (last digest, torn bool, err error) {
	chunk := make([]byte, 4<<10)
	if _, err := f.ReadAt(chunk[:1], size-1); err != nil {
		return last, false, err
	}
	to := size
	if torn = chunk[0] != '\n'; !torn {
		to--
	}
	from := to
	for from > 0 {
		if to-from > maxTorn {
			return last, false, fmt.Errorf("this is no audit log: it ends with more than %d bytes without a newline; move it away", maxTorn)
		}
		part := chunk[:min(int64(len(chunk)), from)]
		if _, err := f.ReadAt(part, from-int64(len(part))); err != nil {
			return last, false, err
		}
		i := bytes.LastIndexByte(part, '\n')
		from -= int64(len(part) - i - 1)
		if i >= 0 {
			break
		}
	}
	h := sha256.New()
	_, err = io.Copy(h, io.NewSectionReader(f, from, to-from))
	return digest(h.Sum(nil)), torn, err
}
