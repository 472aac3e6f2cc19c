package ca

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/renew"
)

type dirStore struct {
	dir  string
	disk disk.Disk
	mu   sync.Mutex  // separates the writers of this process where there is no flock
	seen atomic.Bool // this process has found a record in the directory
}

const (
	currentName = "CURRENT"
	begunName   = "tmp-CURRENT" // names the version that is being written, and becomes CURRENT
	lockName    = "lock"
	versionMark = "v-"
)

// errPointer says that CURRENT is missing, empty or wrong although there are versions.
var errPointer = errors.New("CURRENT does not say which version counts")

// errGone says that the directory, where this process has found a record before, is missing.
var errGone = &unfitError{errors.New("the folder was there, and is gone; mount its volume, or make the folder again " +
	"to have the record written to it")}

// NewDirStore returns a [Store] in a directory of its own, which the first save makes if it does not exist:
//
//	CURRENT          the name of the current version; writing it commits
//	v-<…>/…          the items of that version, one file each
//	tmp-CURRENT      the name of a version that is being written
//	lock             held by the process that writes
//
// The directory has mode 0700 and the files 0600, as they hold private keys. They must belong to root or to the user
// of this process, and no other user may be able to replace the directory or one above it. Otherwise the error says
// which chown or chmod helps.
//
// A save writes a new version, makes it durable, and then renames tmp-CURRENT to CURRENT, so a crash of the process
// or machine leaves the old record or the new one. A version's name contains a hash of its contents, which a load
// compares. A save removes only the version that it has replaced, once the new one is durable, and a version that a
// crash left unfinished.
//
// A directory with versions but no valid CURRENT is not an empty one: Load and Save return an error that wraps
// [ErrUnfit], and make and remove nothing. [RecoverDirStore] writes CURRENT again. A directory that had a record and
// is gone is not made again: its volume may have been unmounted.
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
	d, err := newDirStore(dir)
	if err != nil {
		return nil, err
	}
	root, err := d.open()
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	return d, root.Close()
}

func newDirStore(dir string) (*dirStore, error) {
	if dir == "" {
		return nil, errors.New("ca: a store needs the name of a folder")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("ca: folder of the store: %w", err)
	}
	return &dirStore{dir: dir, disk: disk.OS{}}, nil
}

func (d *dirStore) String() string { return "ca.DirStore(" + d.dir + ")" }

// stat returns another file if the record has changed.
func (d *dirStore) stat() (fs.FileInfo, error) { return os.Lstat(filepath.Join(d.dir, currentName)) }

// keys are the rules for all files of the store.
var keys = private.Options{Keys: true}

// open returns the directory if it is private.
func (d *dirStore) open() (*os.Root, error) {
	root, err := private.OpenDir(d.dir, keys)
	if err != nil {
		return nil, lasting(fmt.Errorf("ca: folder of the store: %w", err))
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
	// A concurrent save may remove the version that we read; then there is a newer one. An error in two readings is
	// real.
	for try := 0; ; try++ {
		if ctx.Err() != nil {
			return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, context.Cause(ctx))
		}
		r, err := d.load()
		if err == nil || !errors.Is(err, errMoving) || try == 10 {
			return r, err
		}
	}
}

// errMoving says that the store may have changed during the read.
var errMoving = errors.New("the store was changed while it was read")

func (d *dirStore) load() (Record, error) {
	root, err := d.open()
	if errors.Is(err, fs.ErrNotExist) {
		if d.seen.Load() {
			return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, errGone)
		}
		return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, ErrNoRecord)
	}
	if err != nil {
		return Record{}, err
	}
	defer root.Close()
	version, err := d.current(root)
	if err != nil {
		return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, advise(err))
	}
	if version == "" {
		return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, ErrNoRecord)
	}
	r, err := d.version(root, version)
	if now, again := d.current(root); again != nil || now != version { // a save went on meanwhile
		if again != nil {
			return Record{}, fmt.Errorf("%w: %w", errMoving, again)
		}
		return Record{}, errMoving
	}
	if err != nil {
		return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, advise(err))
	}
	d.seen.Store(true)
	return r, nil
}

// version reads a version.
func (d *dirStore) version(root *os.Root, version string) (Record, error) {
	folder, err := root.Open(version)
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, vanished(version)
	}
	if err != nil {
		return Record{}, err
	}
	info, err := folder.Stat()
	if err == nil {
		err = lasting(private.Check(filepath.Join(d.dir, version), info, keys))
	}
	var names []string
	if err == nil {
		names, err = folder.Readdirnames(-1)
	}
	folder.Close()
	if err != nil {
		return Record{}, err
	}
	data := map[string][]byte{}
	for _, name := range names {
		if data[name], err = d.read(root, filepath.Join(version, name)); err != nil {
			return Record{}, err
		}
	}
	if err := checkRecord(data); err != nil {
		return Record{}, err
	}
	if sum := sumOf(version); sum != "" && sum != sumData(data) {
		return Record{}, unfit("the version %s is damaged: it is not what was saved", version)
	}
	return NewRecord(version, data), nil
}

// unfit returns an error that only an operator can mend.
func unfit(format string, args ...any) error { return &unfitError{fmt.Errorf(format, args...)} }

func vanished(version string) error {
	return unfit("%s names the version %s, which is not there", currentName, version)
}

// advise adds to err what an operator can do about it.
func advise(err error) error {
	if errors.Is(err, ErrUnfit) && !errors.Is(err, private.ErrUnsafe) {
		err = fmt.Errorf("%w; no new CA is made and nothing is removed; restore the folder from a backup, or "+
			"recover the newest version that is complete", err)
	}
	return err
}

// current returns the name of the current version, or "" if there is no record.
func (d *dirStore) current(root *os.Root) (string, error) {
	version, err := d.pointer(root, currentName)
	if err == nil {
		return version, nil
	}
	if errors.Is(err, errPointer) { // it exists, and is wrong
		return "", &unfitError{err}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	// A first save starts with tmp-CURRENT, so a version that tmp-CURRENT does not name was once saved. Look twice,
	// as another process may be at work.
	var before []string
	for range 2 {
		orphans, err := d.versions(root)
		if err != nil {
			return "", err
		}
		begun, _ := d.pointer(root, begunName) // an unfinished file names nothing
		orphans = slices.DeleteFunc(orphans,
			func(v string) bool { return v == begun || before != nil && !slices.Contains(before, v) })
		if _, err := root.Lstat(currentName); err == nil {
			return "", errMoving
		}
		if len(orphans) == 0 {
			return "", nil
		}
		before = orphans
	}
	return "", unfit("%w: it is missing, and there are versions (%s)", errPointer, strings.Join(before, ", "))
}

// pointer returns the version that a file names. The error wraps errPointer if it names none.
func (d *dirStore) pointer(root *os.Root, name string) (string, error) {
	b, err := d.read(root, name)
	if err != nil {
		return "", err
	}
	version := strings.TrimSuffix(string(b), "\n")
	switch {
	case version == "":
		return "", fmt.Errorf("%w: it is empty", errPointer)
	case checkName(version) != nil || !strings.HasPrefix(version, versionMark):
		return "", fmt.Errorf("%w: its contents are not the name of one", errPointer)
	}
	return version, nil
}

// versions returns the names of all versions.
func (d *dirStore) versions(root *os.Root) ([]string, error) {
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), versionMark) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// read returns the contents of a file that must be private and not too large.
func (d *dirStore) read(root *os.Root, name string) ([]byte, error) {
	f, err := private.OpenIn(root, name, keys)
	if err != nil {
		return nil, lasting(err)
	}
	defer f.Close()
	return files.ReadAll(f, filepath.Join(root.Name(), name), maxRecordBytes)
}

// The name of a version is v-<random>-<random of the version it replaces>-<hash of the contents>. An older release
// wrote only the first part.
const (
	randomLen = 16 // bytes
	beforeLen = 8
	sumLen    = 16
)

func newVersion(replaces string, data map[string][]byte) string {
	var random [randomLen]byte
	_, _ = rand.Read(random[:]) // it does not fail
	before := randomOf(replaces)
	before = before[:min(len(before), 2*beforeLen)]
	return versionMark + hex.EncodeToString(random[:]) + "-" + before + "-" + sumData(data)
}

func nameParts(version string) []string {
	return append(strings.Split(strings.TrimPrefix(version, versionMark), "-"), "", "")
}

func randomOf(version string) string { return nameParts(version)[0] }
func sumOf(version string) string    { return nameParts(version)[2] }

// replaced reports whether the save of version has replaced old.
func replaced(version, old string) bool {
	before := nameParts(version)[1]
	return len(before) == 2*beforeLen && strings.HasPrefix(randomOf(old), before)
}

// sumData returns the hash of the contents of a version.
func sumData(data map[string][]byte) string {
	h := sha256.New()
	part := func(b []byte) {
		_ = binary.Write(h, binary.BigEndian, uint64(len(b))) // a Hash does not fail
		h.Write(b)
	}
	for _, name := range slices.Sorted(maps.Keys(data)) {
		part([]byte(name))
		part(data[name])
	}
	return hex.EncodeToString(h.Sum(nil)[:sumLen])
}

// Save implements [Store].
func (d *dirStore) Save(ctx context.Context, r Record) (string, error) {
	if err := checkRecord(r.Data()); err != nil {
		return "", err
	}
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
	if err != nil {
		return "", advise(err)
	}
	if have != r.Version {
		return "", fmt.Errorf("%w: version %q was to be replaced, there is %q", ErrConflict, r.Version, have)
	}
	if have != "" {
		if _, err := root.Lstat(have); errors.Is(err, fs.ErrNotExist) {
			return "", advise(vanished(have))
		}
	}
	if err := d.tidy(root, have); err != nil {
		return "", err
	}
	version := newVersion(have, r.Data())
	// After a crash from here on, tmp-CURRENT marks the version as unfinished: no Save has returned it.
	if err := d.writeFile(root, begunName, []byte(version+"\n")); err != nil {
		return "", err
	}
	if err := d.disk.SyncDir(root, "."); err != nil {
		return "", err
	}
	if err := d.writeVersion(root, version, r.Data()); err != nil {
		return "", errors.Join(err, d.disk.RemoveAll(root, version))
	}
	if ctx.Err() != nil { // the last moment to turn back
		return "", errors.Join(context.Cause(ctx), d.disk.RemoveAll(root, version))
	}
	if err := d.disk.Rename(root, begunName, currentName); err != nil { // the commit
		return "", err
	}
	if err := d.disk.SyncDir(root, "."); err != nil {
		return "", err
	}
	if have != "" {
		_ = d.disk.RemoveAll(root, have) // the next save tries again
	}
	d.seen.Store(true)
	return version, nil
}

// tidy removes what a crash has left: the version that was being written, and the version that the current one has
// replaced. The lock is held.
func (d *dirStore) tidy(root *os.Root, current string) error {
	all, err := d.versions(root)
	if err != nil {
		return err
	}
	for _, v := range all {
		if v != current && replaced(current, v) {
			_ = d.disk.RemoveAll(root, v)
		}
	}
	begun, err := d.pointer(root, begunName)
	if err == nil && begun != current {
		// Its removal must be durable before its name is removed.
		if err := d.disk.RemoveAll(root, begun); err != nil {
			return err
		}
		if err := d.disk.SyncDir(root, "."); err != nil {
			return err
		}
	}
	return d.disk.RemoveAll(root, begunName)
}

// writeVersion writes data to a new directory, and makes it and its name durable.
func (d *dirStore) writeVersion(root *os.Root, version string, data map[string][]byte) error {
	if err := d.disk.Mkdir(root, version); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(data)) {
		if err := d.writeFile(root, filepath.Join(version, name), data[name]); err != nil {
			return err
		}
	}
	return errors.Join(d.disk.SyncDir(root, version), d.disk.SyncDir(root, "."))
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
