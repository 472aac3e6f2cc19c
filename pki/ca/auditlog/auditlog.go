// Package auditlog keeps the audit record of a certificate authority in a file: one line of JSON for
// each certificate or token that was issued, on the disk before the certificate leaves.
//
// Give a [Log] to ca.Config.Auditor:
//
//	l, err := auditlog.Open("/var/log/svidkit/audit.jsonl", nil)
//	…
//	authority, err := ca.Open(ctx, ca.Config{TrustDomain: td, Auditor: l}, store)
//
// [Read] reads such a file, for operators and for tests.
//
// # What it promises
//
// When [Log.Record] returns nil, the line has been written and fsync has returned without an error.
// Records that come at the same time share one fsync. A disk that is slow pushes back: the queue is
// bounded, and a caller that finds it full waits until its context is done. When writing or fsync fails, every
// record that was in that write gets the error, and the log stays failed until the file was opened
// anew and everything about it worked; no later success hides a lost write.
//
// What a crash left unfinished is ended by a newline before anything is added, so that no record is
// ever glued to a torn one. A line may be in the file although Record returned an error; then its
// certificate was thrown away. A certificate without a line does not exist.
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
//	prev         SHA-256 of the line before, without its newline, in hexadecimal
//
// By prev each line vouches for the one before, also across files that were moved away; the first
// line ever has zeros there, and so has the first one of a process that found an empty file and has no
// MaxSize, by which it would know the name of the file before. So a line that was changed or taken out is
// noticed by the one that follows it: [Read] says where. A file whose end was cut off, or that was written anew
// as a whole, can only be told from a copy of a later line elsewhere.
//
// # Rotation
//
// With Options.MaxSize a file that is full gets a name with the date and a number, such as
// audit-20060102.1.jsonl, and a new one begins. Programs such as logrotate may move the file
// instead of that; the log notices before its next write, and [Log.Reopen] is for those that must be sure
// that nothing is written to the old one any more. Nothing is ever deleted.
//
// On systems with flock (all but Windows, Solaris, AIX and Plan 9) several processes of one machine
// may write to the same file with the same Options, for instance a server and a command of its
// operator.
package auditlog

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
)

// Limits.
const (
	maxLine    = 64 << 10    // bytes of a line without its newline
	maxTorn    = 64 << 20    // bytes without a newline at the end of a file, after a crash
	retryAfter = time.Second // from a failure to the next attempt to open the file
)

// Options changes how a [Log] works. The zero value is the usual.
type Options struct {
	// MaxSize is the size in bytes at which a file is full. It is looked at before each write, so a
	// file gets larger only if what is written at once is larger. 0 means no limit.
	MaxSize int64

	// Queue is how many records wait while the disk is at work; more wait outside. 0 means 1024.
	Queue int
}

// Log is an audit log in a file; [Open] makes one. It implements ca.Auditor. All methods may be
// called at the same time. A goroutine runs while there is something to write, and none otherwise.
type Log struct {
	path    string
	maxSize int64
	queue   int
	fs      fileSystem

	mu      sync.Mutex
	pending *batch        // the records that go into the next write; nil for none
	taken   chan struct{} // closed when pending goes to the disk
	busy    bool          // a goroutine is writing
	idle    sync.Cond     // it has ended
	closed  bool

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
// there. If the file has an unfinished last line, it gets its newline. The error says what is wrong
// with the file; it wraps that of the operating system. o may be nil.
func Open(path string, o *Options) (*Log, error) {
	return open(path, o, osFileSystem{})
}

func open(path string, o *Options, fsys fileSystem) (*Log, error) {
	if o == nil {
		o = &Options{}
	}
	if o.MaxSize < 0 || o.Queue < 0 {
		return nil, fmt.Errorf("auditlog: invalid Options: MaxSize is %d and Queue %d, but neither may be negative", o.MaxSize, o.Queue)
	}
	path, err := filepath.Abs(path) // the program may go to another folder
	if err != nil {
		return nil, fmt.Errorf("auditlog: %w", err)
	}
	l := &Log{path: path, maxSize: o.MaxSize, queue: cmp.Or(o.Queue, 1024), fs: fsys, taken: make(chan struct{})}
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
	if err := l.record(ctx, i); err != nil {
		return fmt.Errorf("auditlog: record of %q: %w", i.Serial, err)
	}
	return nil
}

func (l *Log) record(ctx context.Context, i *ca.Issuance) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	line, err := encode(i)
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
	for !l.closed && l.pending != nil && len(l.pending.lines) >= l.queue {
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

// Reopen closes the file and opens what is at its path now, creating it if it was moved away. Once
// it returns, nothing is written to the old file any more. It also ends a failure at once, if the
// file can be used again; otherwise that is tried once a second while there are records to write.
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
// disk. After a failure it does not even try before retryAfter has passed. The lock disk is held, as in all
// that follows.
func (l *Log) commit(b *batch) error {
	if l.err != nil && time.Since(l.failed) < retryAfter {
		return l.err
	}
	l.err = l.try(b)
	if l.err != nil {
		_ = l.leave() // what the file holds is unknown now; the next attempt looks
		l.err, l.failed = fmt.Errorf("%s: %w", l.path, l.err), time.Now()
	}
	return l.err
}

func (l *Log) try(b *batch) error {
	unlock, err := l.settle(b.size())
	if err != nil {
		return err
	}
	defer unlock()
	var text []byte
	if l.torn {
		text = append(text, '\n')
	}
	last := l.last
	if b != nil {
		for _, line := range b.lines {
			last = link(line, last)
			text = append(append(text, line...), '\n')
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
	l.size, l.last, l.torn = l.size+int64(len(text)), last, false
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
	f, err := l.fs.OpenFile(l.path)
	if err != nil {
		return err
	}
	info, err := f.Stat()
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
		if fresh && l.maxSize > 0 {
			return true, l.follow()
		}
		return true, nil
	}
	if more == 0 || l.maxSize == 0 || l.torn || size+more <= l.maxSize {
		return true, nil
	}
	return false, l.moveAway()
}

// follow finds the last line of the file that was moved away last.
func (l *Log) follow() error {
	name, _, _, err := newest(l.path)
	if name == "" || err != nil {
		return err
	}
	f, err := os.Open(name)
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
	_, date, n, err := newest(l.path)
	if err != nil {
		return err
	}
	if today := time.Now().UTC().Format(dateLayout); today > date {
		date, n = today, 0
	}
	base, ext := split(l.path)
	if err := l.fs.Rename(l.file, l.path, fmt.Sprintf("%s%s.%d%s", base, date, n+1, ext)); err != nil {
		return err
	}
	return l.fs.SyncDir(filepath.Dir(l.path))
}

const dateLayout = "20060102"

// split returns what comes before and behind the date and the number in the name of a full file.
func split(path string) (base, ext string) {
	ext = filepath.Ext(path)
	return strings.TrimSuffix(path, ext) + "-", ext
}

// newest returns the file that was moved away last, and what its name says; zeros if there is none.
func newest(path string) (name, date string, number int, err error) {
	base, ext := split(path)
	entries, err := os.ReadDir(filepath.Dir(path))
	for _, e := range entries {
		full := filepath.Join(filepath.Dir(path), e.Name())
		middle, isOurs := strings.CutPrefix(full, base)
		middle, isFull := strings.CutSuffix(middle, ext)
		d, digits, _ := strings.Cut(middle, ".")
		n, invalid := strconv.Atoi(digits)
		_, noDate := time.Parse(dateLayout, d)
		if isOurs && isFull && invalid == nil && noDate == nil && n > 0 && (d > date || d == date && n > number) {
			name, date, number = full, d, n
		}
	}
	return name, date, number, err
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
