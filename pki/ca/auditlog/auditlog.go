// Package auditlog keeps the audit record of a certificate authority in a file: one line of JSON for each certificate
// or token, on disk before it leaves, and one for each change of the authority's keys.
//
// Give a [Log] to ca.Config.Auditor:
//
//	l, err := auditlog.Open("/var/log/svidkit/audit.jsonl", logger)
//	…
//	authority, err := ca.Open(ctx, ca.Config{TrustDomain: td, Auditor: l}, store)
//
// A line without its last member is the JSON form of a [ca.Issuance] or a [ca.KeyEvent]. [Verify] checks that a log
// was not changed.
//
// # What it promises
//
// When [Log.Record] returns nil, the line has been written and fsync has returned without an error. Concurrent
// records share one fsync. A caller waits for a slow disk until its context is done; while 4,096 wait, more are
// refused. When writing or fsync fails, every record of that write gets the error, and the next write opens the file
// again; no later success hides a lost record.
//
// A line that a crash left unfinished gets its newline before the next line, so no record is ever glued to it. A line
// may be in the file although Record returned an error; then its certificate was thrown away. Every certificate has a
// line.
//
// [Log.Err] says whether a record could be written now, for health pages. When the disk has room again, the log
// continues automatically.
//
// The file and the directories above it must belong to root or to the user of this process. If other users can read
// the file, or write to it or to a directory, the logger gets a warning that names the chmod that helps.
//
// # The format
//
// Each line is one JSON object with these members in this order. Empty ones are left out, except for time and prev:
//
//	time         when it was issued, RFC 3339 in UTC
//	kind         such as "x509-svid", "dns", "jwt-svid"
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
// The line of a key event, a [ca.KeyEvent], has these members instead, by the same rules; event is never left out:
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
// Through prev each line vouches for the line before it, even in files that were moved away. The very first line has
// zeros there. So the next line shows that a line was changed or removed, and [Verify] says where. If lines at the
// end were cut off or changed, or the whole log was rewritten, only the hash of a later line that is kept elsewhere
// shows it: [Log.End].
//
// # Rotation
//
// The log never moves or deletes a file. A program such as logrotate moves it to a name that [Files] finds: the same
// name followed by a number or a date, such as audit.jsonl.1 or audit.jsonl-20260102. It must not copy and truncate,
// which loses records. The log notices the move before its next write; after [Log.Reopen] it has closed the old
// file. The first line in the new file follows the last line in the old.
//
// On systems with flock (all but Windows, Solaris, AIX and Plan 9) several processes of one machine may write to the
// same file, such as a server and an operator's command. If another process holds the lock for more than 10 seconds,
// records fail.
package auditlog

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/ca"
)

// Limits.
const (
	maxLine  = 64 << 10 // bytes of a line without its newline
	maxTorn  = 64 << 20 // bytes without a newline at the end of a file, after a crash
	maxQueue = 4096     // records that wait while the disk is busy

	checkEvery = time.Second      // how long an answer of Err counts, and how long Err waits for one
	tooSlow    = 10 * time.Second // for a write
	probeSize  = 4 << 10          // free bytes that the disk must have
)

// Log is an audit log in a file; [Open] makes one. It is a [ca.Auditor]. It is safe for concurrent use. A goroutine
// runs only while there is work for the disk.
type Log struct {
	path string
	log  *ratelog.Log

	// The operating system's functions; tests replace them by failing ones.
	write func(*os.File, []byte) (int, error)
	sync  func(*os.File) error
	dirs  func(dir string) error // sync of a directory

	writing sync.WaitGroup // goroutines, one for each batch

	mu      sync.Mutex
	pending *batch        // the next batch for the disk; nil for none
	newest  chan struct{} // closed when the newest batch is written; nil before the first
	busy    bool          // the batch before is being written
	closed  bool
	since   time.Time // when the current write began, or the last one ended
	health  error     // the error of the last write
	last    digest    // the hash of the last line, here or in an earlier file

	// For the goroutine that writes, and for Close after it.
	file    *os.File    // stays open between writes; nil at first, and after an error
	written fs.FileInfo // of the file that was written last, as it was before
	size    int64       // of that file after it
}

// batch goes to the disk together: records, or none, to check that the disk works.
type batch struct {
	lines [][]byte // without the last member
	done  chan struct{}
	err   error // valid once done is closed
}

// Open opens the audit log at path, or creates it with mode 0600 in an existing directory. The error says what is
// wrong with the file; it wraps the operating system's error. The logger gets one warning about a file or a directory
// that other users can write to, or a file that they can read; nil means silence.
func Open(path string, logger *slog.Logger) (*Log, error) {
	l, err := newLog(path, logger)
	if err == nil {
		err = l.Reopen()
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

func newLog(path string, logger *slog.Logger) (*Log, error) {
	path, err := filepath.Abs(path) // the program may change its directory
	if err != nil {
		return nil, fmt.Errorf("auditlog: %w", err)
	}
	return &Log{
		path: path, log: ratelog.New(ratelog.Patient(logger), 0),
		write: (*os.File).Write, sync: (*os.File).Sync, dirs: private.SyncDir,
	}, nil
}

// Record writes i as one line and returns nil when it is on disk. Invalid UTF-8 is replaced. A record that is no
// valid line (more than 64 KiB, or a year over 9999) is refused.
//
// The error wraps the operating system's, or the cause of ctx's end; the line may be in the file anyway. After
// [Log.Close] it wraps [fs.ErrClosed].
func (l *Log) Record(ctx context.Context, i *ca.Issuance) error {
	c := *i
	c.Time, c.NotBefore, c.NotAfter = c.Time.UTC(), c.NotBefore.UTC(), c.NotAfter.UTC()
	if err := l.record(ctx, c); err != nil {
		return fmt.Errorf("auditlog: record of %q: %w", i.Serial, err)
	}
	return nil
}

// RecordKeyEvent is Record for a key event; see [ca.Auditor].
func (l *Log) RecordKeyEvent(ctx context.Context, e *ca.KeyEvent) error {
	c := *e
	c.Time, c.NotAfter = c.Time.UTC(), c.NotAfter.UTC()
	if err := l.record(ctx, c); err != nil {
		return fmt.Errorf("auditlog: record of the event %q of key %q: %w", e.Event, e.Serial, err)
	}
	return nil
}

func (l *Log) record(ctx context.Context, value any) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	line, err := encode(value)
	if err != nil {
		return err
	}
	return l.flush(ctx, line)
}

// flush puts lines into the next batch for the disk and waits for it. Without lines it checks that the disk works.
func (l *Log) flush(ctx context.Context, lines ...[]byte) error {
	b, err := l.add(lines)
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

// add puts lines into the next batch.
func (l *Log) add(lines [][]byte) (*batch, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fs.ErrClosed
	}
	if l.pending == nil {
		before := l.newest
		l.newest = make(chan struct{})
		l.pending = &batch{done: l.newest}
		l.writing.Go(func() {
			if before != nil {
				<-before
			}
			l.writePending()
		})
	}
	b := l.pending
	if len(b.lines)+len(lines) > maxQueue {
		return nil, fmt.Errorf("%d records wait for the disk already", maxQueue)
	}
	b.lines = append(b.lines, lines...)
	return b, nil
}

// writePending writes the pending batch, after the batch before.
func (l *Log) writePending() {
	// A caller that is about to add a record can share this fsync instead of waiting for the next.
	runtime.Gosched()
	l.mu.Lock()
	b := l.pending
	l.pending, l.busy, l.since = nil, true, time.Now()
	l.mu.Unlock()
	last, err := l.commit(b.lines)
	for err == errMoved { // others may do so repeatedly
		last, err = l.commit(b.lines)
	}
	health := err
	if err == nil && len(b.lines) == 0 {
		health = l.probe()
	}
	l.mu.Lock()
	if err == nil {
		l.last = last
	}
	l.busy, l.health, l.since = false, health, time.Now()
	l.mu.Unlock()
	if err != nil {
		b.err = fmt.Errorf("%s: %w", l.path, err)
	}
	close(b.done)
}

// Err returns nil if a record could be written now, and otherwise the reason: the error of the last attempt, a disk
// without room for another record, or a disk that has not answered for ten seconds. It wraps [fs.ErrClosed] after
// [Log.Close]. It checks the disk at most once a second, and not during writes, so that health pages may call it at
// any rate. It waits for the disk for at most a second; then the previous answer counts.
func (l *Log) Err() error {
	l.mu.Lock()
	check := !l.busy && time.Since(l.since) >= checkEvery
	l.mu.Unlock()
	if check {
		ctx, cancel := context.WithTimeout(context.Background(), checkEvery)
		_ = l.flush(ctx) // see l.health
		cancel()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	slow := time.Since(l.since)
	switch {
	case l.closed:
		return fmt.Errorf("auditlog: %w", fs.ErrClosed)
	case l.busy && slow > tooSlow:
		return fmt.Errorf("auditlog: %s: the disk has not answered for %v", l.path, slow.Round(time.Second))
	case l.health != nil:
		return fmt.Errorf("auditlog: %s: %w", l.path, l.health)
	}
	return nil
}

// End returns the SHA-256 of the last line in hexadecimal, as of the last write or the last look at other processes'
// lines. Keep it where those who can change the log cannot change it: then [Verify] can tell if lines at the end are
// missing.
func (l *Log) End() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return hex.EncodeToString(l.last[:])
}

// Reopen creates the file if it was moved away. When it returns, the old file gets no more lines.
func (l *Log) Reopen() error {
	if err := l.flush(context.Background()); err != nil {
		return fmt.Errorf("auditlog: open: %w", err)
	}
	return nil
}

// Close waits for pending records, and refuses further ones. Closing again does nothing.
func (l *Log) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.writing.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leave()
	return nil
}

// commit writes the lines at the end of the file that is at path now, or creates it, waits for the disk, and returns
// the hash of the last line.
func (l *Log) commit(lines [][]byte) (last digest, err error) {
	if len(lines) == 0 {
		l.leave() // to look at owners and modes again
	}
	f, err := l.open()
	if err != nil {
		return last, err
	}
	defer func() {
		if err != nil || !flock.Supported { // Windows renames no open file
			l.leave()
		} else {
			_ = flock.Unlock(f)
		}
	}()
	info, err := l.lock(f)
	if err != nil {
		return last, err
	}
	last, torn, err := l.end(f, info)
	if err != nil {
		return last, err
	}
	var text []byte
	if torn {
		text = append(text, '\n')
	}
	for _, line := range lines {
		text, last = link(text, line, last)
	}
	if len(lines) > 0 {
		if _, err = l.write(f, text); err != nil {
			return last, err
		}
	}
	if err = l.sync(f); err == nil {
		l.written, l.size = info, info.Size()+int64(len(text))
	}
	return last, err
}

// open returns the file that is open already, or opens the one at path, or creates it.
func (l *Log) open() (f *os.File, err error) {
	if l.file == nil {
		l.file, err = private.OpenFile(l.path, os.O_RDWR|os.O_APPEND|os.O_CREATE, private.Options{Warn: func(err error) {
			l.log.Warn("auditlog: other users can change the audit log", err.Error(), slog.Any("err", err))
		}})
	}
	return l.file, err
}

// leave closes the file, which unlocks it, too. All of it went through fsync, or failed.
func (l *Log) leave() {
	if l.file != nil {
		l.file.Close()
		l.file = nil
	}
}

// probe returns an error if the disk has no room for another record. It writes to a file of its own, as every line in
// the log is permanent. If it may not create the file, or another process has it, it reports no error.
func (l *Log) probe() error {
	path := l.path + ".probe"
	_ = os.Remove(path) // left by a crash
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		_, err = l.write(f, make([]byte, probeSize))
		err = errors.Join(err, f.Close(), os.Remove(path))
	}
	if err != nil {
		return fmt.Errorf("no room for another record: %w", err)
	}
	return nil
}

var errMoved = errors.New("the file was moved away")

// lockTime is how long another process may hold the lock. A writer needs it for one write; any process that may read
// the file can hold it longer.
const lockTime = 10 * time.Second

// lock locks f, which was at path when it was opened, against other processes, waiting for them. It does not on
// systems without flock. The error is errMoved if f is not at path any more. A new file is made durable.
func (l *Log) lock(f *os.File) (fs.FileInfo, error) {
	locked, err := flock.TryLockFor(f, lockTime)
	if err != nil {
		return nil, err
	}
	if !locked {
		return nil, fmt.Errorf("another process holds its lock for more than %v; end that process", lockTime)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	at, err := os.Stat(l.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(info, at) {
		return nil, errMoved
	}
	if runtime.GOOS != "windows" && info.Mode().Perm()&0o006 == 0o004 {
		l.log.Warn("auditlog: all users of this machine can read the audit log", "mode", slog.String("file", l.path),
			slog.String("mode", fmt.Sprintf("%04o", info.Mode().Perm())),
			slog.String("run", fmt.Sprintf("chmod o-r %q", l.path)))
	}
	if err == nil && info.Size() == 0 {
		err = l.dirs(filepath.Dir(l.path))
	}
	return info, err
}

// end returns the hash of the last line of f, and whether that line lacks its newline. An empty file continues what
// was in it, or the file that was moved away last, which another process may have written.
func (l *Log) end(f *os.File, info fs.FileInfo) (last digest, torn bool, err error) {
	same := l.written != nil && os.SameFile(l.written, info)
	switch {
	case same && (info.Size() == 0 || info.Size() == l.size):
		return l.last, false, nil
	case info.Size() > 0:
		return end(f, info.Size())
	}
	files, err := Files(l.path)
	if len(files) < 2 || err != nil {
		return l.last, false, err
	}
	before, err := private.OpenFile(files[len(files)-2], os.O_RDONLY, private.Options{Warn: func(error) {}})
	if err != nil {
		return last, false, err
	}
	defer before.Close()
	if info, err = before.Stat(); err != nil || info.Size() == 0 {
		return l.last, false, err
	}
	last, _, err = end(before, info.Size())
	return last, false, err
}

// Files returns the files of the log at path, oldest first by the time of their last record: path itself, and the
// files moved to the same name followed by a number or a date. It leaves out other users' files.
func Files(path string) ([]string, error) {
	dir := filepath.Dir(path)
	entries, err := os.ReadDir(dir)
	var all []string
	written := map[string]time.Time{}
	for _, e := range entries {
		suffix, ok := strings.CutPrefix(e.Name(), filepath.Base(path))
		if !ok || suffix == "" || strings.Trim(suffix, ".-0123456789") != "" {
			continue
		}
		name := filepath.Join(dir, e.Name())
		info, err := os.Lstat(name)
		if err == nil && info.Mode().IsRegular() &&
			private.Check(name, info, private.Options{Warn: func(error) {}}) == nil {
			all, written[name] = append(all, name), info.ModTime()
		}
	}
	slices.SortStableFunc(all, func(a, b string) int { return written[a].Compare(written[b]) })
	return append(all, path), err
}

// end returns the hash of the last line of a file that has the given size, not 0, and whether that line lacks its
// newline.
func end(f *os.File, size int64) (last digest, torn bool, err error) {
	for n := min(size, 4<<10); ; n = min(size, 2*n) {
		text := make([]byte, n)
		if _, err := f.ReadAt(text, size-n); err != nil {
			return last, false, err
		}
		text, whole := bytes.CutSuffix(text, []byte{'\n'})
		i := bytes.LastIndexByte(text, '\n')
		switch {
		case i < 0 && n > maxTorn:
			return last, false, fmt.Errorf("this is no audit log: it ends with more than %d bytes without "+
				"a newline; move it away", maxTorn)
		case i >= 0 || n == size:
			return sha256.Sum256(text[i+1:]), !whole, nil
		}
	}
}
