package ca

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/flock"
	"github.com/svidkit/svidkit/internal/renew"
)

type dirStore struct {
	dir string
	mu  sync.Mutex // keeps the writers of this process apart where there is no flock
}

const (
	currentName = "CURRENT"
	lockName    = "lock"
	versionMark = "v-"
	tempMark    = "tmp-"
)

// NewDirStore returns a [Store] in a folder of its own, which the first save makes if it is not there:
//
//	CURRENT          the name of the version that counts, and the commit
//	v-<hex>/…        the items of that version, one file each
//	lock             held by the process that writes
//
// The folder has mode 0700 and the files 0600, as they hold private keys; a folder or a file that
// others may read or write is refused with an error that says which chmod helps. A save writes a new version,
// makes it durable, and then replaces CURRENT by a rename, so that a crash, of the process or of
// the machine, leaves the old record or the new one. What a crash leaves lying about is removed by
// the next save.
//
// Processes that share the folder are kept apart by a file lock on systems that have flock: Linux,
// macOS and the BSDs. Elsewhere only one process at a time may use it. A network file system has to
// honour locks and renames.
//
// A backup is a copy of the folder. It holds the private keys of the CA. To restore one, stop every
// authority that uses the folder, put the copy in its place, and start again; the package comment
// says what to think of.
//
// The error says what is wrong with a dir that is there and not a private folder.
func NewDirStore(dir string) (Store, error) {
	if dir == "" {
		return nil, errors.New("ca: a store needs the name of a folder")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("ca: folder of the store: %w", err)
	}
	d := &dirStore{dir: dir}
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

// open returns the folder if it is private.
func (d *dirStore) open() (*os.Root, error) {
	root, err := os.OpenRoot(d.dir)
	if err != nil {
		return nil, fmt.Errorf("ca: folder of the store: %w", err)
	}
	info, err := root.Stat(".")
	if err == nil {
		err = checkPrivate(d.dir, info, 0o700)
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return root, nil
}

// checkPrivate refuses what others than its owner may read or write. Windows has no such modes.
func checkPrivate(path string, info fs.FileInfo, want fs.FileMode) error {
	if runtime.GOOS == "windows" || info.Mode().Perm()&0o077 == 0 {
		return nil
	}
	return fmt.Errorf("ca: %s has mode %04o, so that others may get at the keys of the CA; run: chmod %04o %q", path, info.Mode().Perm(), want, path)
}

// Load implements [Store].
func (d *dirStore) Load(ctx context.Context) (Record, error) {
	// A save that finishes while we read may remove what we are reading: then there is a newer one.
	for try := 0; ; try++ {
		if ctx.Err() != nil {
			return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, context.Cause(ctx))
		}
		r, err := d.load()
		if err == nil || !errors.Is(err, errVanished) || try == 10 {
			return r, err
		}
	}
}

// errVanished says that the version that CURRENT named was not there any more.
var errVanished = errors.New("the current version vanished")

func (d *dirStore) load() (Record, error) {
	root, err := d.open()
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, ErrNoRecord)
	}
	if err != nil {
		return Record{}, err
	}
	defer root.Close()
	version, err := d.current(root)
	if err != nil {
		return Record{}, err
	}
	if version == "" {
		return Record{}, fmt.Errorf("ca: load from %s: %w", d.dir, ErrNoRecord)
	}
	r := NewRecord(version, map[string][]byte{})
	folder, err := root.Open(version)
	if err != nil {
		return Record{}, d.vanished(version, err)
	}
	names, err := folder.Readdirnames(-1)
	folder.Close()
	if err != nil {
		return Record{}, d.vanished(version, err)
	}
	slices.Sort(names)
	for _, name := range names {
		if r.Data()[name], err = d.read(root, filepath.Join(version, name)); err != nil {
			return Record{}, d.vanished(version, err)
		}
	}
	// What is removed while it is listed may be listed in part.
	if now, err := d.current(root); err != nil || now != version {
		return Record{}, errors.Join(errVanished, err)
	}
	if err := checkRecord(r.Data()); err != nil {
		return Record{}, err
	}
	return r, nil
}

func (d *dirStore) vanished(version string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("ca: load from %s: %w: CURRENT names %s; restore the folder from a backup: %w", d.dir, errVanished, version, err)
	}
	return fmt.Errorf("ca: load from %s: %w", d.dir, err)
}

// current returns what CURRENT says, or "" if there is none.
func (d *dirStore) current(root *os.Root) (string, error) {
	b, err := d.read(root, currentName)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("ca: load from %s: %w", d.dir, err)
	}
	version := strings.TrimSuffix(string(b), "\n")
	if checkName(version) != nil || !strings.HasPrefix(version, versionMark) {
		return "", fmt.Errorf("ca: %s in %s does not name a version; restore the folder from a backup", currentName, d.dir)
	}
	return version, nil
}

// read returns a file that is private and not too large.
func (d *dirStore) read(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := checkPrivate(filepath.Join(d.dir, name), info, 0o600); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxRecordBytes+1))
	if err == nil && len(b) > maxRecordBytes {
		err = fmt.Errorf("ca: %s has more than %d bytes", filepath.Join(d.dir, name), maxRecordBytes)
	}
	return b, err
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
	if err := d.make(); err != nil {
		return "", err
	}
	root, err := d.open()
	if err != nil {
		return "", err
	}
	defer root.Close()
	unlock, err := d.lock(ctx, root)
	if err != nil {
		return "", err
	}
	defer unlock()
	have, err := d.current(root)
	if err != nil {
		return "", err
	}
	if have != r.Version {
		return "", fmt.Errorf("%w: version %q was to be replaced, there is %q", ErrConflict, r.Version, have)
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // it does not fail
	version := versionMark + hex.EncodeToString(random[:])
	if err := writeVersion(root, version, r.Data()); err != nil {
		return "", errors.Join(err, root.RemoveAll(version))
	}
	if ctx.Err() != nil { // the last moment to turn back
		return "", errors.Join(context.Cause(ctx), root.RemoveAll(version))
	}
	temp := tempMark + currentName
	if err := writeFile(root, temp, []byte(version+"\n")); err != nil {
		return "", err
	}
	if err := root.Rename(temp, currentName); err != nil { // the commit
		return "", err
	}
	if err := syncDir(root, "."); err != nil {
		return "", err
	}
	d.clean(root, version)
	return version, nil
}

// make makes the folder if it is not there.
func (d *dirStore) make() error {
	if _, err := os.Stat(d.dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return makeDir(d.dir, func(path string) error {
		root, err := os.OpenRoot(path)
		if err != nil {
			return err
		}
		defer root.Close()
		return syncDir(root, ".")
	})
}

// makeDir makes a folder and those above it that are not there. It has sync make each new name durable,
// in the folder that it is in: a record is lost with any of the folders on the way to it.
func makeDir(dir string, sync func(path string) error) error {
	above := filepath.Dir(dir)
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrNotExist) && above != dir {
		if err := makeDir(above, sync); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o700)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) { // another process may have been faster
		return err
	}
	return sync(above)
}

// writeVersion writes data to a new folder, and makes it and its name durable.
func writeVersion(root *os.Root, version string, data map[string][]byte) error {
	if err := root.Mkdir(version, 0o700); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(data)) {
		if err := writeFile(root, filepath.Join(version, name), data[name]); err != nil {
			return err
		}
	}
	return errors.Join(syncDir(root, version), syncDir(root, "."))
}

// writeFile writes a file, replacing what a crash has left, and makes its contents durable.
func writeFile(root *os.Root, name string, b []byte) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// syncDir makes the names in a folder durable. Windows cannot, and keeps its own journal of names.
func syncDir(root *os.Root, name string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// clean removes old versions and what crashes have left; the lock is held. What cannot be removed
// stays until the next save: the record itself is safe.
func (d *dirStore) clean(root *os.Root, current string) {
	f, err := root.Open(".")
	if err != nil {
		return
	}
	names, _ := f.Readdirnames(-1)
	f.Close()
	for _, name := range names {
		if name != current && (strings.HasPrefix(name, versionMark) || strings.HasPrefix(name, tempMark)) {
			_ = root.RemoveAll(name)
		}
	}
}

// lock waits until no other process or goroutine writes.
func (d *dirStore) lock(ctx context.Context, root *os.Root) (unlock func(), err error) {
	f, err := root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if d.mu.TryLock() {
			ok, err := flock.TryLock(f)
			if ok {
				return func() { f.Close(); d.mu.Unlock() }, nil // the file lock ends with the file
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
