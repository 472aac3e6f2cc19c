package ca

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca/internal/recordtext"
)

type dirStore struct {
	dir  string
	disk disk.Disk
	mu   sync.Mutex  // separates the writers of this process where there is no flock
	seen atomic.Bool // this process has found a record in the directory
}

const (
	recordName = "record.json"
	begunName  = "tmp-record.json" // is being written, and becomes record.json
	lockName   = "lock"

	maxBytes = recordtext.MaxBytes + 1<<10 // of record.json
)

// errGone says that the directory, where this process has found a record before, is missing.
var errGone = &unfitError{errors.New("the directory was there, and is gone; mount its volume, or make the " +
	"directory again to have the record written to it")}

// NewDirStore returns a [Store] in a directory of its own, which the first save makes if it does not exist:
//
//	record.json      the record: its version, and its items in base64
//	tmp-record.json  a record that is being written
//	lock             held by the process that writes
//
// The directory has mode 0700 and the files 0600, as they hold private keys. They must belong to root or to the user
// of this process, and no other user may be able to replace the directory or one above it. Otherwise the error says
// which chown or chmod helps.
//
// A save makes the new record durable and then renames it to record.json, so a crash of the process or machine leaves
// the old record or the new one. The version contains a hash of the items, which a load compares: a damaged record is
// an error that wraps [ErrUnfit]. A directory that had a record and is gone is not made again: its volume may have
// been unmounted.
//
// A directory of a build before this layout, in which a file CURRENT names a directory with one file for each item,
// is read, and the next save replaces that layout.
//
// In Kubernetes, an emptyDir is refused, as all users can write to it. A volume with an fsGroup needs
// fsGroupChangePolicy: OnRootMismatch, as otherwise each mount opens the files to the group. Or keep the CA in a
// Secret with package kubesecret.
//
// A file lock separates processes that share the directory, on systems with flock: Linux, macOS and the BSDs.
// Elsewhere only one process at a time may use it. A network file system must honour locks and renames.
//
// A backup is a copy of the directory. It holds the CA's private keys. To restore one, stop every authority that uses
// the directory, put the copy in its place, and start again; see OPERATING.md.
//
// NewDirStore returns an error if the directory exists and is not private.
func NewDirStore(dir string) (Store, error) {
	if dir == "" {
		return nil, errors.New("ca: a store needs the name of a directory")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("ca: directory of the store: %w", err)
	}
	d := &dirStore{dir: dir, disk: disk.OS{}}
	root, err := d.open()
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	return d, root.Close()
}

func (d *dirStore) String() string { return "ca.DirStore(" + d.dir + ")" }

// stat returns another file if the record has changed.
func (d *dirStore) stat() (fs.FileInfo, error) { return os.Lstat(filepath.Join(d.dir, recordName)) }

// keys are the rules for all files of the store.
var keys = private.Options{Keys: true}

// open returns the directory if it is private.
func (d *dirStore) open() (*os.Root, error) {
	root, err := private.OpenDir(d.dir, keys)
	if err != nil {
		return nil, lasting(fmt.Errorf("ca: directory of the store: %w", err))
	}
	return root, nil
}

// lasting makes err an ErrUnfit if another user may have made or may change the store: only an operator can mend it.
func lasting(err error) error {
	if errors.Is(err, private.ErrUnsafe) {
		return &unfitError{err}
	}
	return err
}

// unfitError is an ErrUnfit with its own text.
type unfitError struct{ error }

func (e *unfitError) Unwrap() error        { return e.error }
func (e *unfitError) Is(target error) bool { return target == ErrUnfit }

// Load implements [Store].
func (d *dirStore) Load(ctx context.Context) (Record, error) {
	r, err := d.load(ctx)
	if err != nil {
		return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, within(err))
	}
	return r, nil
}

func (d *dirStore) load(ctx context.Context) (Record, error) {
	if ctx.Err() != nil {
		return Record{}, context.Cause(ctx)
	}
	root, err := d.open()
	if errors.Is(err, fs.ErrNotExist) {
		if d.seen.Load() {
			return Record{}, errGone
		}
		return Record{}, ErrNoRecord
	}
	if err != nil {
		return Record{}, err
	}
	defer root.Close()
	r, err := d.current(root)
	if err == nil {
		d.seen.Store(true)
	}
	return r, err
}

// recordFile is the form of record.json.
type recordFile struct {
	Version string          `json:"version"` // random, and the hash of Data
	Data    json.RawMessage `json:"data"`    // the items by name, in base64
}

// current returns the record in the directory.
func (d *dirStore) current(root *os.Root) (Record, error) {
	b, err := d.read(root, recordName)
	if errors.Is(err, fs.ErrNotExist) {
		return d.earlier(root)
	}
	if err != nil {
		return Record{}, err
	}
	var file recordFile
	var data map[string][]byte
	if err = json.Unmarshal(b, &file); err == nil {
		data, err = recordtext.Decode(file.Version, file.Data)
	}
	if err != nil {
		return Record{}, damaged(err)
	}
	return NewRecord(file.Version, data), nil
}

// damaged returns the error for a directory that only an operator can mend.
func damaged(err error) error {
	return &unfitError{fmt.Errorf("the record is damaged: %w; no new CA is made and nothing is removed; restore the "+
		"directory from a backup", within(err))}
}

// read returns the contents of a file that must be private and not too large.
func (d *dirStore) read(root *os.Root, name string) ([]byte, error) {
	f, err := private.OpenIn(root, name, keys)
	if err != nil {
		return nil, lasting(err)
	}
	defer f.Close()
	return files.ReadAll(f, filepath.Join(root.Name(), name), maxBytes)
}

// The layout of builds before record.json.
const (
	earlierName = "CURRENT" // names the directory of the record
	earlierMark = "v-"      // begins the name of such a directory
)

// earlier returns the record of a directory without record.json.
func (d *dirStore) earlier(root *os.Root) (Record, error) {
	version, err := d.earlierVersion(root)
	if errors.Is(err, fs.ErrNotExist) {
		if lost, _ := fs.Glob(root.FS(), earlierMark+"*"); len(lost) > 0 {
			return Record{}, damaged(fmt.Errorf("the file %s is missing beside %v", earlierName, lost))
		}
		return Record{}, ErrNoRecord
	}
	if err != nil {
		return Record{}, err
	}
	entries, err := fs.ReadDir(root.FS(), version)
	if err != nil {
		return Record{}, damaged(err)
	}
	data := map[string][]byte{}
	for _, e := range entries {
		if data[e.Name()], err = d.read(root, filepath.Join(version, e.Name())); err != nil {
			return Record{}, err
		}
	}
	return NewRecord(version, data), nil
}

// earlierVersion returns the name in the file CURRENT.
func (d *dirStore) earlierVersion(root *os.Root) (string, error) {
	b, err := d.read(root, earlierName)
	version := strings.TrimSuffix(string(b), "\n")
	if err == nil && (filepath.Base(version) != version || !strings.HasPrefix(version, earlierMark)) {
		err = damaged(fmt.Errorf("the file %s names no version", earlierName))
	}
	return version, err
}

// Save implements [Store].
func (d *dirStore) Save(ctx context.Context, r Record) (string, error) {
	version, err := d.save(ctx, r)
	if err != nil {
		return "", fmt.Errorf("ca: save to %s: %w", d.dir, err)
	}
	return version, nil
}

func (d *dirStore) save(ctx context.Context, r Record) (string, error) {
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	open := private.MakeDir
	if d.seen.Load() {
		open = private.OpenDir
	}
	root, err := open(d.dir, keys)
	if errors.Is(err, fs.ErrNotExist) && d.seen.Load() {
		return "", errGone
	}
	if err != nil {
		return "", lasting(err)
	}
	defer root.Close()
	unlock, err := d.lock(ctx, root)
	if err != nil {
		return "", err
	}
	defer unlock()
	have, err := d.current(root)
	if err != nil && !errors.Is(err, ErrNoRecord) {
		return "", err
	}
	if have.Version != r.Version {
		return "", fmt.Errorf("%w: version %q was to be replaced, there is %q", ErrConflict, r.Version, have.Version)
	}
	return d.replace(ctx, root, r.Data())
}

// replace writes a record in place of the current one, and returns its version. The lock is held.
func (d *dirStore) replace(ctx context.Context, root *os.Root, data map[string][]byte) (string, error) {
	version, items, err := recordtext.Encode(data)
	if err != nil {
		return "", err
	}
	file := recordFile{Version: version, Data: items}
	b, err := json.Marshal(file)
	if err != nil {
		return "", err
	}
	if err := d.disk.RemoveAll(root, begunName); err != nil { // left by a crash
		return "", err
	}
	err = d.writeFile(root, begunName, b)
	if err == nil && ctx.Err() != nil { // the last moment to turn back
		err = context.Cause(ctx)
	}
	if err != nil {
		return "", errors.Join(err, d.disk.RemoveAll(root, begunName))
	}
	if err := d.disk.Rename(root, begunName, recordName); err != nil { // the commit
		return "", err
	}
	if err := d.disk.SyncDir(root, "."); err != nil {
		return "", err
	}
	if version, err := d.earlierVersion(root); err == nil && d.disk.RemoveAll(root, version) == nil {
		_ = d.disk.RemoveAll(root, earlierName) // until then, the next save tries again
	}
	d.seen.Store(true)
	return file.Version, nil
}

// writeFile writes a new file, and makes its contents durable.
func (d *dirStore) writeFile(root *os.Root, name string, b []byte) error {
	f, err := d.disk.Create(root, name)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// lock waits until no other process or goroutine writes.
func (d *dirStore) lock(ctx context.Context, root *os.Root) (unlock func(), err error) {
	f, err := root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		err = lasting(private.Check(f.Name(), info, keys))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if d.mu.TryLock() {
			ok, err := flock.TryLock(f)
			if ok {
				return func() { f.Close(); d.mu.Unlock() }, nil // closing the file releases its lock
			}
			d.mu.Unlock()
			if err != nil {
				f.Close()
				return nil, fmt.Errorf("lock %s: %w", filepath.Join(d.dir, lockName), err)
			}
		}
		if cause := renew.Sleep(ctx, wait); cause != nil {
			f.Close()
			return nil, fmt.Errorf("another process has the lock %s: %w", filepath.Join(d.dir, lockName), cause)
		}
	}
}
