// Package follow reads a set of small files, such as a certificate with its key and its roots, and reads them again
// when they change.
//
//	f := follow.New([]string{"/certs/tls.crt", "/certs/tls.key"}, take, &follow.Options{Open: open})
//	if err := f.Read(ctx); err != nil { … }
//	go f.Run(ctx) // in a group that waits for it
//
// The take function parses the files and publishes the result. If it returns an error, the last result stays in use,
// and [Follower.Status] returns the error until the files are in order again.
//
// # Changes
//
// Only contents count: a file written in place, replaced by a rename or reached through a swapped link (as "..data" in
// the volumes of Kubernetes) is new if its bytes are, and a file that is only touched is not. All files are read
// together, and take gets them when two reads in a row found the same contents. A slower writer can leave a set that
// does not match, such as a certificate with the key of another one: take must refuse it.
//
// Notifications of the operating system say when to look; a slow poll finds changes without a notification, as on
// network file systems.
package follow

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	defaultPoll = 5 * time.Second
	usualSize   = 1 << 20 // bytes of a file

	settle    = 100 * time.Millisecond // between the two reads that must agree
	pause     = 10 * time.Millisecond  // from a notification to a read, to combine notifications
	maxSettle = 5 * time.Second        // after which take gets files even if they keep changing
	readTries = 20                     // of Read
	// after which take gets refused files again: they may have become valid with time
	retryAfter = time.Minute
)

// Options says how a [Follower] works. Open or FS is required.
type Options struct {
	// FS has the files; nil means the file system of the host, with its notifications. An FS has none, and is polled.
	FS fs.FS

	// Open opens a file of the host, unless FS is set. It checks who owns the file, and refuses one that is not
	// regular, because a pipe would block its reader.
	Open func(path string) (*os.File, error)

	// MaxSize is how many bytes a file may have; 0 means 1 MiB. MaxTotal is how many all of them may have together,
	// with Each: the largest are left out beyond that, with an error each; 0 means that there is no such limit.
	MaxSize, MaxTotal int64

	// Each also passes to take the files that cannot be read or do not exist, with the reason in File.Err, instead of
	// refusing the set. So take may accept some files and return an error about the others. Files that return to their
	// old contents after an error are passed to take again.
	Each bool

	// Find, if set, returns the paths to read instead of the paths of New and Set. It is called at each read.
	Find func() []string

	// Poll is how often the files are read without a notification; 0 means every 5 seconds.
	Poll time.Duration

	// Logger gets a warning when files are refused while Run follows them; nil means no logs.
	Logger *slog.Logger
}

// Follower follows a set of files; [New] makes one. Its methods are safe for concurrent use.
type Follower struct {
	take func(context.Context, Files) error
	o    Options
	wake chan struct{} // has room for one

	reading sync.Mutex // held while files are read and taken; guards the next six
	taken   digest     // the set that take accepted last
	refused digest     // the set that was refused since
	retry   time.Time  // when to pass the refused set to take again
	pending digest     // the set read last, not yet passed to take
	since   time.Time  // when pending first differed from taken
	seen    time.Time  // when pending was first read

	mu      sync.Mutex // guards what follows
	paths   []string   // replaced, never changed
	fresh   bool       // take must get the files even if unchanged
	checked time.Time
	err     error
}

type digest = [sha256.Size]byte

// New returns a Follower of the files at paths. It reads nothing. The function take is called by one goroutine at a
// time, with all files that exist (see Options.Each), and owns them.
func New(paths []string, take func(context.Context, Files) error, o *Options) *Follower {
	f := &Follower{paths: slices.Clone(paths), take: take, o: *o, wake: make(chan struct{}, 1)}
	f.o.Poll, f.o.MaxSize, f.o.MaxTotal = cmp.Or(f.o.Poll, defaultPoll), cmp.Or(f.o.MaxSize, usualSize),
		cmp.Or(f.o.MaxTotal, math.MaxInt64)
	f.o.Logger = ratelog.Patient(f.o.Logger)
	return f
}

// Set replaces the paths. Run reads the files at once, and passes them to take even if they are unchanged.
func (f *Follower) Set(paths []string) {
	f.mu.Lock()
	f.paths, f.fresh = slices.Clone(paths), true
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default: // Run has not come to it yet
	}
}

func (f *Follower) current() (paths []string) {
	if f.o.Find != nil {
		return f.o.Find()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.paths
}

// Read reads the files until two reads in a row agree, and passes them to take, even if they are unchanged. Call it at
// the start. It returns the error of take, or an error that says which file cannot be read, or one that wraps the
// cause of ctx.
func (f *Follower) Read(ctx context.Context) error {
	f.reading.Lock()
	defer f.reading.Unlock()
	files, sum, err := f.read()
	for range readTries {
		again, next, nextErr := f.read()
		if stable := next == sum; stable {
			break
		}
		files, sum, err = again, next, nextErr
		if err := renew.Sleep(ctx, settle); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return f.give(ctx, files, sum, err)
}

// Run reads the files when they change, and passes them to take, until ctx is done. It returns nil.
func (f *Follower) Run(ctx context.Context) error {
	w := f.watch()
	defer w.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	next := time.Now()
	soon := func() {
		if at := time.Now().Add(pause); at.Before(next) {
			next = at
			timer.Reset(pause)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-f.wake:
			soon()
		case _, open := <-w.events:
			if !open {
				w.events = nil // the system gave up: only polling remains
			} else {
				soon()
			}
		case <-timer.C:
			w.update(f.current())
			wait := f.look(ctx)
			next = time.Now().Add(wait)
			timer.Reset(wait)
		}
	}
}

// Status returns when the files were last found in order, and the error since then, or nil.
func (f *Follower) Status() (checked time.Time, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.checked, f.err
}

// look reads the files once, passes them to take if that is due, and returns how long to wait.
func (f *Follower) look(ctx context.Context) time.Duration {
	f.reading.Lock()
	defer f.reading.Unlock()
	f.mu.Lock()
	if f.fresh {
		f.fresh, f.taken, f.refused = false, digest{}, digest{}
	}
	f.mu.Unlock()
	files, sum, err := f.read()
	now := time.Now()
	switch {
	case sum == f.taken:
		f.pending, f.since, f.refused = digest{}, time.Time{}, digest{}
		f.note(nil)
		return f.o.Poll
	case sum == f.refused && now.Before(f.retry):
		f.pending, f.since = digest{}, time.Time{}
		return min(f.o.Poll, f.retry.Sub(now))
	}
	if f.since.IsZero() {
		f.since = now
	}
	if sum != f.refused && now.Sub(f.since) < maxSettle { // a writer may still be at work
		if sum != f.pending {
			f.pending, f.seen = sum, now
		}
		if left := settle - now.Sub(f.seen); left > 0 { // also if a notification of what was read comes late
			return left
		}
	}
	f.pending, f.since = digest{}, time.Time{}
	known := sum == f.refused
	if err := f.give(ctx, files, sum, err); err != nil && !known {
		f.o.Logger.LogAttrs(ctx, slog.LevelWarn, "files refused, the ones before stay in use", slog.Any("err", err))
	}
	return f.o.Poll
}

// give calls take with the files; reading is held.
func (f *Follower) give(ctx context.Context, files Files, sum digest, err error) error {
	if err == nil {
		err = f.take(ctx, files)
	}
	if err != nil {
		f.refused, f.retry = sum, time.Now().Add(retryAfter)
		if f.o.Each {
			f.taken = digest{}
		}
	} else {
		f.taken, f.refused = sum, digest{}
	}
	f.note(err)
	return err
}

func (f *Follower) note(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err = err; err == nil {
		f.checked = time.Now().Round(0)
	}
}

// read reads all files. The sum covers the paths, the contents, which files exist, and the errors.
func (f *Follower) read() (Files, digest, error) {
	all, h := Files{}, sha256.New()
	var refused error
	var total int64
	for _, path := range f.current() {
		file, err := f.readOne(path)
		size := int64(len(file.Data))
		switch {
		case err == nil:
			total += size - int64(len(all[path].Data)) // a path may be there twice
			all[path] = file
			total -= all.leaveOut(total - f.o.MaxTotal)
		case errors.Is(err, fs.ErrNotExist):
			size = -1
		default:
			size = -2
			file.Data = []byte(err.Error()) // for the sum
		}
		if err != nil && f.o.Each {
			all[path] = File{Err: err}
		} else if size == -2 {
			refused = cmp.Or(refused, err)
		}
		h.Write([]byte(path))
		_ = binary.Write(h, binary.BigEndian, size) // a Hash does not fail
		h.Write(file.Data)
	}
	return all, digest(h.Sum(nil)), refused
}

func (f *Follower) readOne(path string) (File, error) {
	open := func(path string) (fs.File, error) { return f.o.Open(path) }
	if f.o.FS != nil {
		open = f.o.FS.Open
	}
	file, err := open(path)
	if err != nil {
		return File{}, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return File{}, err
	}
	data, err := files.ReadAll(file, path, int(f.o.MaxSize))
	return File{Data: data, Info: info}, err
}

// File is one file as it was read.
type File struct {
	Data []byte
	Info fs.FileInfo
	Err  error // why it cannot be read, with Options.Each; it names the file
}

// Files are the files that exist, by path. It is an [fs.FS].
type Files map[string]File

// leaveOut replaces the largest files by errors until they have at least that many bytes together, and returns how
// many bytes they had.
func (f Files) leaveOut(bytes int64) (n int64) {
	for n < bytes {
		largest := slices.MaxFunc(slices.Sorted(maps.Keys(f)),
			func(a, b string) int { return cmp.Compare(len(f[a].Data), len(f[b].Data)) })
		n += int64(len(f[largest].Data))
		f[largest] = File{Err: fmt.Errorf("%s has %d bytes, too many beside the other files: those that are "+
			"larger than others are not read", largest, len(f[largest].Data))}
	}
	return n
}

// Open implements [fs.FS].
func (f Files) Open(name string) (fs.File, error) {
	file, ok := f[name]
	switch {
	case !ok:
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	case file.Err != nil:
		return nil, file.Err
	}
	return &openFile{bytes.NewReader(file.Data), file.Info}, nil
}

type openFile struct {
	*bytes.Reader
	info fs.FileInfo
}

func (f *openFile) Stat() (fs.FileInfo, error) { return f.info, nil }
func (f *openFile) Close() error               { return nil }

// watcher wakes Run. The zero value, for files without notifications, never does.
type watcher struct {
	notify *fsnotify.Watcher
	events <-chan fsnotify.Event
	errors sync.WaitGroup
}

// watch returns a watcher that watches nothing yet. If the system has no room for one, polling remains.
func (f *Follower) watch() *watcher {
	w := new(watcher)
	if f.o.FS != nil {
		return w
	}
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		f.o.Logger.Warn("no notifications about files, polling them", slog.Any("err", err),
			slog.Duration("every", f.o.Poll))
		return w
	}
	w.notify, w.events = notify, notify.Events
	w.errors.Go(func() {
		for range notify.Errors { // an overflow, mostly: the poll finds what was lost
		}
	})
	return w
}

// update watches the directories that the paths are in now, as they are named and as links lead to them.
func (w *watcher) update(paths []string) {
	if w.notify == nil {
		return
	}
	dirs := map[string]bool{}
	for _, path := range paths {
		dirs[filepath.Dir(path)] = true
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs[filepath.Dir(real)] = true
		}
	}
	for _, dir := range w.notify.WatchList() {
		if !dirs[dir] {
			_ = w.notify.Remove(dir) // it may be gone, and its watch with it
		}
	}
	for dir := range dirs {
		_ = w.notify.Add(dir) // again does nothing, unless the directory is another one than before
	}
}

func (w *watcher) close() {
	if w.notify != nil {
		_ = w.notify.Close()
		w.errors.Wait()
	}
}
