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
// bounded, and who finds it full waits until its context is done. When writing or fsync fails, every
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
//	caller       who asked
//	method       how that was proven
//	prev         SHA-256 of the line before, without its newline, in hexadecimal
//
// By prev each line vouches for the one before, also across files that were moved away; the first
// line ever has zeros there, and so has the first one of a process that found an empty file and has no
// MaxSize, by which it would know the name of the file before. So a line that was changed or taken out is noticed by the one that follows it. That
// nobody cut off the end, or wrote all of the file anew, can only be told from a copy of a later
// line elsewhere.
//
// # Rotation
//
// With Options.MaxSize a file that is full gets a name with the date and a number, such as
// audit-20060102.1.jsonl, and a new one begins. Programs such as logrotate may move the file
// instead of that; the log notices before its next write, and [Log.Reopen] is for those that must be sure
// that nobody writes to the old one any more. Nothing is ever deleted.
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
	"encoding/hex"
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

// Options changes how a [Log] works. The zero value is good.
type Options struct {
	// MaxSize is the size in bytes at which a file is full. It is looked at before each write, so a
	// file gets larger only if what is written at once is larger. 0 means no limit.
	MaxSize int64

	// Queue is how many records wait while the disk is at work; who finds no room waits outside.
	// 0 means 1024.
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

	disk sync.Mutex // held while writing; guards what follows
	out  output
}

// batch is what goes to the disk together.
type batch struct {
	text []byte // lines without prev and what follows it, one after the other
	ends []int  // of each in text
	done chan struct{}
	err  error // once done is closed
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
	if ctx.Err() != nil {
		return fmt.Errorf("auditlog: record of %q: %w", i.Serial, context.Cause(ctx))
	}
	b, err := l.join(ctx, i)
	if err != nil {
		return fmt.Errorf("auditlog: record of %q: %w", i.Serial, err)
	}
	select {
	case <-b.done:
		if b.err != nil {
			return fmt.Errorf("auditlog: record of %q: %w", i.Serial, b.err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("auditlog: record of %q: waiting for the disk: %w", i.Serial, context.Cause(ctx))
	}
}

// join puts i into the next batch, once there is room, and sees to it that somebody writes it.
func (l *Log) join(ctx context.Context, i *ca.Issuance) (*batch, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.closed && l.pending != nil && len(l.pending.ends) >= l.queue {
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
	begin := len(b.text)
	text, err := appendBody(b.text, i)
	if err == nil && len(text)-begin+len(prevMember)+2*sha256.Size+len(lineEnd) > maxLine {
		err = fmt.Errorf("it would be a line of more than %d bytes", maxLine)
	}
	if err != nil {
		if len(b.ends) == 0 {
			l.pending = nil
		}
		return nil, err
	}
	b.text, b.ends = text, append(b.ends, len(text))
	if !l.busy {
		l.busy = true
		go l.write()
	}
	return b, nil
}

// write brings batches to the disk until there are none.
func (l *Log) write() {
	for {
		runtime.Gosched() // who is about to bring a record shares this fsync instead of waiting for it, and for the next
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
		b.err = l.out.commit(l, b)
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
	l.out.leave()
	l.out.err = nil
	if err := l.out.commit(l, nil); err != nil {
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
	return l.out.close()
}

// String names the file.
func (l *Log) String() string { return "audit log " + l.path }

// output is the file as it is known to be. Its zero value is not open.
type output struct {
	file   file
	size   int64  // as it was when last was found; -1 if it was not looked at yet
	last   digest // the hash of the last line, here or in a file before
	torn   bool   // the last line has no newline yet
	err    error  // of the last attempt; nil if it worked
	failed time.Time
	buf    []byte
}

type digest = [sha256.Size]byte

// commit writes b, which may be nil, at the end of the file that is at path now, and waits for the
// disk. After a failure it does not even try before retryAfter has passed.
func (o *output) commit(l *Log, b *batch) error {
	if o.err != nil && time.Since(o.failed) < retryAfter {
		return o.err
	}
	if err := o.try(l, b); err != nil {
		o.close() // what the file holds is unknown now; the next attempt looks
		o.err, o.failed = fmt.Errorf("%s: %w", l.path, err), time.Now()
		return o.err
	}
	o.err = nil
	return nil
}

func (o *output) try(l *Log, b *batch) error {
	unlock, err := o.settle(l, b)
	if err != nil {
		return err
	}
	defer unlock()
	o.buf = o.buf[:0]
	if o.torn {
		o.buf = append(o.buf, '\n')
	}
	last := o.last
	if b != nil {
		begin := 0
		for _, end := range b.ends {
			from := len(o.buf)
			o.buf = append(o.buf, b.text[begin:end]...)
			o.buf = append(o.buf, prevMember...)
			o.buf = hex.AppendEncode(o.buf, last[:])
			o.buf = append(o.buf, lineEnd...)
			last = sha256.Sum256(o.buf[from:])
			o.buf = append(o.buf, '\n')
			begin = end
		}
	}
	if len(o.buf) > 0 {
		if n, err := o.file.Write(o.buf); err != nil || n < len(o.buf) {
			return cmp.Or(err, io.ErrShortWrite)
		}
	}
	if err := o.file.Sync(); err != nil { // also of nothing: it says whether the disk is well
		return err
	}
	o.size, o.last, o.torn = o.size+int64(len(o.buf)), last, false
	if cap(o.buf) > 1<<20 {
		o.buf = nil
	}
	return nil
}

// settle opens the file that is at path now, unless it is the open one, and locks it, having made
// room in it for b. Then o knows all of it.
func (o *output) settle(l *Log, b *batch) (unlock func(), err error) {
	for range 100 { // others may move the file away again and again
		if o.file == nil {
			if err := o.open(l); err != nil {
				return nil, err
			}
		}
		unlock, err := o.file.Lock()
		if err != nil {
			return nil, err
		}
		ready, err := o.look(l, b)
		if ready && err == nil {
			return unlock, nil
		}
		unlock()
		if err != nil {
			return nil, err
		}
		o.leave()
	}
	return nil, errors.New("the file is moved away all the time")
}

// look reports whether the open file is the one to write to. If it is full, it moves it away.
func (o *output) look(l *Log, b *batch) (ready bool, err error) {
	own, err := o.file.Stat()
	if err != nil {
		return false, err
	}
	if size := own.Size(); size > 0 && size != o.size { // new to us, or somebody else wrote
		if o.last, o.torn, err = end(o.file, size); err != nil {
			return false, err
		}
		o.size = size
	}
	named, err := l.fs.Stat(l.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !l.fs.SameFile(own, named) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if own.Size() == 0 {
		if err := o.begin(l); err != nil {
			return false, err
		}
	}
	if b == nil || l.maxSize == 0 || o.size == 0 || o.torn || o.size+b.size() <= l.maxSize {
		return true, nil
	}
	return false, o.moveAway(l)
}

// begin finds the line that the first line of an empty file follows: the last one that is known, or
// that of the file that was moved away last. Others may have written and moved that meanwhile.
func (o *output) begin(l *Log) error {
	fresh := o.size < 0
	o.size, o.torn = 0, false
	if !fresh || l.maxSize == 0 {
		return nil
	}
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
		o.last, _, err = end(f, info.Size())
	}
	return err
}

// size is about how much b adds to a file.
func (b *batch) size() int64 {
	return int64(len(b.text) + len(b.ends)*(len(prevMember)+2*sha256.Size+len(lineEnd)+1))
}

// open opens the file at path, or creates it so that it is there after a crash, too.
func (o *output) open(l *Log) error {
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
	o.file, o.size = f, -1
	return nil
}

// moveAway gives a full file its name: a number more than those that are there.
func (o *output) moveAway(l *Log) error {
	_, date, n, err := newest(l.path)
	if err != nil {
		return err
	}
	if today := time.Now().UTC().Format(dateLayout); today > date {
		date, n = today, 0
	}
	base, ext := split(l.path)
	if err := l.fs.Rename(o.file, l.path, fmt.Sprintf("%s%s.%d%s", base, date, n+1, ext)); err != nil {
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
		middle, isOurs := strings.CutPrefix(filepath.Join(filepath.Dir(path), e.Name()), base)
		middle, isFull := strings.CutSuffix(middle, ext)
		d, digits, _ := strings.Cut(middle, ".")
		n, invalid := strconv.Atoi(digits)
		_, noDate := time.Parse(dateLayout, d)
		if isOurs && isFull && invalid == nil && noDate == nil && n > 0 && (d > date || d == date && n > number) {
			name, date, number = base+middle+ext, d, n
		}
	}
	return name, date, number, err
}

// end returns the hash of the last line of a file that has the given size, not 0, and whether that
// has no newline yet.
func end(f io.ReaderAt, size int64) (last digest, torn bool, err error) {
	to := size
	one := make([]byte, 1)
	if _, err := f.ReadAt(one, size-1); err != nil {
		return last, false, err
	}
	if torn = one[0] != '\n'; !torn {
		to--
	}
	from := to
	chunk := make([]byte, 4<<10)
	for from > 0 {
		if to-from > maxTorn {
			return last, false, fmt.Errorf("this is no audit log: it ends with more than %d bytes without a newline; move it away", maxTorn)
		}
		part := chunk[:min(int64(len(chunk)), from)]
		if _, err := f.ReadAt(part, from-int64(len(part))); err != nil {
			return last, false, err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			from -= int64(len(part) - i - 1)
			break
		}
		from -= int64(len(part))
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, from, to-from)); err != nil {
		return last, false, err
	}
	h.Sum(last[:0])
	return last, torn, nil
}

// leave closes the file and remembers its last line, which the next file goes on from.
func (o *output) leave() {
	if o.file != nil {
		o.file.Close() // everything in it went through Sync
		o.file = nil
	}
}

// close closes the file for good, or until it is looked at again.
func (o *output) close() error {
	if o.file == nil {
		return nil
	}
	err := o.file.Close()
	o.file = nil
	return err
}
