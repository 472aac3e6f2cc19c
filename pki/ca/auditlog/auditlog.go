// Package auditlog keeps the audit record of a certificate authority in a file: one line of JSON for each certificate
// or token, on the disk before it leaves, and one for each change of the authority's keys.
//
// Give a [Log] to ca.Config.Auditor:
//
//	l, err := auditlog.Open("/var/log/svidkit/audit.jsonl", logger)
//	…
//	authority, err := ca.Open(ctx, ca.Config{TrustDomain: td, Auditor: l}, store)
//
// [Read] reads such a file, and [Verify] says whether it is as it was written.
//
// # What it promises
//
// When [Log.Record] returns nil, the line has been written and fsync has returned without an error. Records that come
// at the same time share one fsync. A slow disk pushes back: the queue is bounded, and a caller that finds it full
// waits until its context is done. When writing or fsync fails, every record of that write gets the error, and the log
// stays failed until the file was opened again and a write worked; no later success hides a lost one.
//
// A line that a crash left unfinished gets its newline with the next one, so that no record is ever glued to it. A
// line may be in the file although Record returned an error; then its certificate was thrown away. There is no
// certificate without a line.
//
// [Log.Err] says whether a record could be written now, for pages about health. When there is room again, the log goes
// on by itself.
//
// The file and the directories above it must belong to the user of this process or to root. If other users can read
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
// The line of a change of keys, a [ca.KeyEvent], has these members instead, by the same rules; event is never left
// out:
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
// By prev each line vouches for the one before, also across files that were moved away. The first line of all has
// zeros there. So the next line shows that a line was changed or taken out, and [Verify] says where. That lines at the
// end were cut off or changed, or that all of it was rewritten, shows only against the hash of a later line that is
// kept elsewhere: [Log.End].
//
// # Rotation
//
// The log never moves or deletes a file. A program such as logrotate moves it, to a name that [Files] finds: that of
// the file with a number or a date after it, such as audit.jsonl.1 or audit.jsonl-20260102. It must not copy and
// truncate, which loses records. The log notices the move before its next write, and after [Log.Reopen] nothing is
// written to the old file any more. The first line in the new file follows the last one in the old.
//
// On systems with flock (all but Windows, Solaris, AIX and Plan 9) several processes of one machine may write to the
// same file, such as a server and an operator's command. A process that holds the lock on the file for more than 10
// seconds makes records fail.
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
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/ca"
)

// Limits.
const (
	maxLine  = 64 << 10 // bytes of a line without its newline
	maxTorn  = 64 << 20 // bytes without a newline at the end of a file, after a crash
	maxQueue = 1024     // records that wait while the disk is busy

	attemptEvery = time.Second      // from a failure to the next attempt, and how long an answer of Err counts
	checkWait    = time.Second      // that Err waits for an answer; then the one before counts
	tooSlow      = 10 * time.Second // of a write
	probeSize    = 4 << 10          // bytes for which there has to be room
)

// Log is an audit log in a file; [Open] makes one. It is a [ca.Auditor]. It is safe for concurrent use. A goroutine
// runs while there is work for the disk, and none otherwise.
type Log struct {
	path  string
	log   *ratelog.Log
	fs    fileSystem
	every time.Duration // attemptEvery; less in tests of a real disk
	room  chan struct{} // has one element for each record in pending

	mu      sync.Mutex
	pending *batch         // the records that go into the next write; nil for none
	busy    bool           // a goroutine is writing
	writing sync.WaitGroup // that goroutine
	closed  bool
	began   time.Time // when the present write began; zero for none
	checked time.Time // when it was last found out whether the disk works
	health  error     // what was found
	ended   digest    // last, as of the last write or check

	disk   sync.Mutex // held while writing; guards what follows
	file   file       // nil if it is not open
	size   int64      // of the file when last was found; -1 if it was not looked at yet
	last   digest     // the hash of the last line, here or in a file before
	torn   bool       // the last line has no newline yet
	err    error      // of the last attempt; nil if it worked
	failed time.Time
}

// batch is what goes to the disk together.
type batch struct {
	lines [][]byte
	done  chan struct{}
	err   error // once done is closed
}

// Open opens the audit log at path, or creates it with the mode 0600 in a directory that exists. The error says what
// is wrong with the file; it wraps that of the operating system. The logger gets a warning, once, about a file or a
// directory that other users can write to, or a file that they can read; nil means silence.
func Open(path string, logger *slog.Logger) (*Log, error) {
	return open(path, logger, osFileSystem{})
}

func open(path string, logger *slog.Logger, fsys fileSystem) (*Log, error) {
	path, err := filepath.Abs(path) // the program may change its directory
	if err != nil {
		return nil, fmt.Errorf("auditlog: %w", err)
	}
	l := &Log{
		path: path, log: ratelog.New(ratelog.Patient(logger),
			0), fs: fsys, every: attemptEvery, room: make(chan struct{}, maxQueue),
	}
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
	select {
	case l.room <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("the queue is full: %w", context.Cause(ctx))
	}
	b := l.join(line)
	if b == nil {
		<-l.room
		return fs.ErrClosed
	}
	select {
	case <-b.done:
		return b.err
	case <-ctx.Done():
		return fmt.Errorf("waiting for the disk: %w", context.Cause(ctx))
	}
}

// join puts a line into the next batch, and makes sure that it is written. It returns nil after Close.
func (l *Log) join(line []byte) *batch {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	if l.pending == nil {
		l.pending = &batch{done: make(chan struct{})}
	}
	l.pending.lines = append(l.pending.lines, line)
	if !l.busy {
		l.busy = true
		l.writing.Go(l.write)
	}
	return l.pending
}

// write brings batches to the disk until there are none.
func (l *Log) write() {
	for {
		// a caller that is about to bring a record shares this fsync instead of waiting for it, and for the next
		runtime.Gosched()
		l.mu.Lock()
		b := l.pending
		l.pending, l.busy = nil, b != nil
		l.mu.Unlock()
		if b == nil {
			return
		}
		for range b.lines {
			<-l.room
		}
		l.disk.Lock()
		b.err = l.commit(b.lines)
		l.disk.Unlock()
		close(b.done)
	}
}

// Err returns nil if a record could be written now, and otherwise why not: the error of the last attempt, a disk
// without room for another record, or one that has not answered for ten seconds. It wraps [fs.ErrClosed] after
// [Log.Close]. It checks the disk at most once a second, and not while writes succeed, so that pages about health may
// call it at any rate. It waits for the disk for a second at most; then the answer before counts.
func (l *Log) Err() error {
	if l.fs == nil {
		return errors.New("auditlog: the Log is the zero one; Open makes one")
	}
	if done := l.check(); done != nil {
		select {
		case <-done:
		case <-time.After(checkWait):
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	slow := time.Since(l.began)
	switch {
	case l.closed:
		return fmt.Errorf("auditlog: %w", fs.ErrClosed)
	case !l.began.IsZero() && slow > tooSlow:
		return fmt.Errorf("auditlog: %s: the disk has not answered for %v", l.path, slow.Round(time.Second))
	case l.health != nil:
		return fmt.Errorf("auditlog: %w", l.health)
	}
	return nil
}

// check looks whether the disk works, if that is due, and closes the channel when it knows. Nil means that it is not
// due, or that a write will tell.
func (l *Log) check() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || time.Since(l.checked) < l.every || !l.disk.TryLock() {
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

// End returns the SHA-256 of the last line in hexadecimal, as of the last write, or of the last look at what other
// processes have written. If it is kept where those who can change the log cannot change it, [Verify] can tell that
// lines at the end are missing.
func (l *Log) End() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return hex.EncodeToString(l.ended[:])
}

// Reopen closes the file and opens the one at its path, creating it if it was moved away. When it returns, nothing is
// written to the old file any more. It also ends a failure at once, if the file can be used again; otherwise that is
// tried once a second while there are records to write.
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
	l.mu.Unlock()
	l.writing.Wait()
	l.disk.Lock()
	defer l.disk.Unlock()
	return l.leave()
}

// commit writes lines, which may be none, at the end of the file that is at path now, and waits for the disk. After a
// failure it does not even try before attemptEvery has passed. The lock disk is held, as in all that follows.
func (l *Log) commit(lines [][]byte) error {
	if l.err != nil && time.Since(l.failed) < l.every {
		return l.err
	}
	l.mu.Lock()
	l.began = time.Now()
	l.mu.Unlock()
	if l.err = l.try(lines); l.err != nil {
		_ = l.leave() // what the file holds is unknown now; the next attempt looks
		l.err, l.failed = fmt.Errorf("%s: %w", l.path, l.err), time.Now()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = time.Time{}
	if l.err == nil {
		l.ended = l.last
	}
	if lines != nil || l.err != nil { // it says more than a write of nothing
		l.health, l.checked = l.err, time.Now()
	}
	return l.err
}

func (l *Log) try(lines [][]byte) error {
	unlock, err := l.settle()
	if err != nil {
		return err
	}
	defer unlock()
	var text []byte
	if l.torn && len(lines) > 0 {
		text = append(text, '\n')
	}
	last := l.last
	for _, line := range lines {
		last = link(line, last)
		text = append(append(text, line...), '\n')
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
	return nil
}

// settle opens the file that is at path now, unless it is the open one, and locks it. Then l knows all of it.
func (l *Log) settle() (unlock func(), err error) {
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
		current, err := l.look()
		if current {
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
		l.log.Warn("auditlog: other users can change the audit log", err.Error(), slog.Any("err", err))
	})
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && runtime.GOOS != "windows" && info.Mode().Perm()&0o006 == 0o004 {
		l.log.Warn("auditlog: all users of this machine can read the audit log", "mode", slog.String("file", l.path),
			slog.String("mode", fmt.Sprintf("%04o", info.Mode().Perm())),
			slog.String("run", fmt.Sprintf("chmod o-r %q", l.path)))
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

// leave closes the file and remembers its last line, which the next file follows.
func (l *Log) leave() error {
	if l.file == nil {
		return nil
	}
	err := l.file.Close() // everything in it went through Sync
	l.file = nil
	return err
}

// look reports whether the open file is the one at path, and reads the end of it if another process has written.
func (l *Log) look() (current bool, err error) {
	own, err := l.file.Stat()
	if err != nil {
		return false, err
	}
	size := own.Size()
	if size > 0 && size != l.size {
		if l.last, l.torn, err = end(l.file, size); err != nil {
			return false, err
		}
	}
	named, err := os.Stat(l.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(own, named) {
		return false, nil
	}
	if err == nil && size == 0 {
		l.torn = false
		if l.size < 0 {
			err = l.follow()
		}
	}
	l.size = size
	return err == nil, err
}

// follow finds the last line of the file that was moved away last: another process may have written it.
func (l *Log) follow() error {
	moved, err := Files(l.path)
	if len(moved) < 2 || err != nil {
		return err
	}
	f, err := private.OpenFile(moved[len(moved)-2], os.O_RDONLY, private.Options{Warn: func(error) {}})
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

// Files returns the files of the log at path, the oldest first by the time of their last record: those that were moved
// to the same name with a number or a date after it, and path itself. It leaves out those of other users.
func Files(path string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(path))
	var moved []fs.FileInfo
	for _, e := range entries {
		suffix, ok := strings.CutPrefix(e.Name(), filepath.Base(path))
		if !ok || suffix == "" || strings.Trim(suffix, ".-0123456789") != "" {
			continue
		}
		name := filepath.Join(filepath.Dir(path), e.Name())
		info, err := os.Lstat(name)
		if err == nil && info.Mode().IsRegular() &&
			private.Check(name, info, private.Options{Warn: func(error) {}}) == nil {
			moved = append(moved, info)
		}
	}
	slices.SortStableFunc(moved, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	var all []string
	for _, info := range moved {
		all = append(all, filepath.Join(filepath.Dir(path), info.Name()))
	}
	return append(all, path), err
}

// end returns the hash of the last line of a file that has the given size, not 0, and whether that
// has no newline yet.
func end(f io.ReaderAt, size int64) (last digest, torn bool, err error) {
	for n := min(size, 2*maxLine); ; n = min(size, 2*n) {
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
