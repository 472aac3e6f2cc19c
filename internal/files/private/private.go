// Package private opens directories and files that no other user of the machine has made or can change: for keys,
// sockets, trusted bundles, and files that an operator writes for this process.
//
//	root, err := private.MakeDir("/var/lib/svidkit/ca", private.Options{Keys: true})
//	…
//	f, err := private.OpenIn(root, "ca-key.pem", private.Options{Keys: true})
//
// # The rules
//
// The opened file or directory, each directory above it, and each link on the way must belong to the effective user of
// this process, to root, or to one of [Options.Owners]. For the directories above, the owner of "/" counts as root: a
// user namespace may show root as another user.
//
// With [Options.Keys] no other user may have any access: their directory has a mode like 0700 and their files one like
// 0600.
//
// Everything else may be read by other users, and not written. A directory in which all users can write needs the
// sticky bit, as /tmp and the Secret volumes of Kubernetes have it, or is the volume of a ConfigMap in this pod.
// Write permission of a group counts as write permission of others, unless it is the group of root or one of the
// groups of this process: so the private groups of users with a umask of 002 work, and the fsGroup of a Kubernetes
// volume. With [Options.Warn] such directories and files are reported and accepted: for caches and sockets in an
// emptyDir of Kubernetes (root's, mode 0777).
//
// # How it checks
//
// The path is followed from the root of the file system, link by link. Each directory is checked before the next name
// in it is resolved, so by then only this user and root can change the meaning of that name. The opened file or
// directory is checked again by its descriptor, and must be the one the path led to. Below an [os.Root], the caller
// uses [Check] or [OpenIn].
//
// Windows and Plan 9 have no such owners and modes. Nothing is checked there: the access list of the directory
// decides.
package private

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ErrUnsafe says that another user of this machine may have made or may change a directory or a file. The error
// names it, and the chown or chmod that helps.
var ErrUnsafe = errors.New("not safe from other users")

// Options says what is safe enough. The zero value refuses files and directories that other users can change.
type Options struct {
	// Keys also refuses files and directories that other users can read or list.
	Keys bool

	// Owners are further users whose files, directories and links are trusted.
	Owners []int

	// Mode is the mode of the directories that MakeDir makes, whatever the umask; 0 means 0700.
	Mode fs.FileMode

	// Warn, if set, accepts directories and files that other users can write to, and is called once for each, with an
	// error that wraps [ErrUnsafe], unless it is a [PodVolume]. A wrong owner is still refused, and so are files that
	// break the rule of Keys.
	Warn func(error)
}

const (
	maxLinks = 40 // in a path; Linux has the same limit
	maxTries = 50 // to open what a path leads to while links are swapped, or directories are made
)

// OpenDir opens the directory at path, following links. If it does not exist, and the directories above it are safe,
// the error wraps [fs.ErrNotExist].
func OpenDir(path string, o Options) (*os.Root, error) { return openDir(path, o, nil) }

// MakeDir opens the directory at path. It durably makes the directory and its parents if they do not exist.
func MakeDir(path string, o Options) (*os.Root, error) { return openDir(path, o, SyncDir) }

// openDir makes missing directories if sync is set, and calls sync with each directory that gets a new name.
func openDir(path string, o Options, sync func(dir string) error) (*os.Root, error) {
	mode := o.Mode.Perm()
	if mode == 0 {
		mode = 0o700
	}
	made := false // the last one
	o.Warn = Once(o.Warn)
	for try := 1; ; try++ {
		at, missing, info, err := follow(path, &o)
		if err == nil && len(missing) > 0 && sync == nil {
			err = &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		} else if err == nil && len(missing) == 0 && !info.IsDir() {
			err = fmt.Errorf("%s is not a directory", path)
		}
		if err != nil {
			return nil, err
		}
		if len(missing) > 0 {
			err = os.Mkdir(filepath.Join(at, missing[0]), mode)
			made = err == nil && len(missing) == 1
			if err == nil || errors.Is(err, fs.ErrExist) { // another process was faster, and may not have synced yet
				err = cmp.Or(sync(at), err)
			}
			if err != nil && (!errors.Is(err, fs.ErrExist) || try >= maxTries) {
				return nil, err
			}
			continue
		}
		root, err := os.OpenRoot(at)
		if err == nil {
			if err = judgeDir(root, path, info, made, mode, &o); err == nil {
				return root, nil
			}
			root.Close()
		}
		if try >= maxTries || !errors.Is(err, errChanged) && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
}

// Once returns a function that calls warn, which may be nil, with each text once. It is nil if warn is.
func Once(warn func(error)) func(error) {
	if warn == nil {
		return nil
	}
	told := map[string]bool{}
	return func(err error) {
		if text := err.Error(); !told[text] {
			told[text] = true
			warn(err)
		}
	}
}

// judgeDir checks an open directory. It sets the mode of a directory that was just made.
func judgeDir(root *os.Root, path string, expected fs.FileInfo, made bool, mode fs.FileMode, o *Options) error {
	info, err := root.Stat(".")
	if err != nil {
		return err
	}
	if !os.SameFile(info, expected) {
		return fmt.Errorf("%s: %w", path, errChanged)
	}
	if made && info.Mode().Perm() != mode {
		if err := checkOwner(path, info, o); err != nil {
			return err
		}
		if err := root.Chmod(".", mode|info.Mode()&fs.ModeSetgid); err != nil {
			return err
		}
		if info, err = root.Stat("."); err != nil {
			return err
		}
	}
	return Check(path, info, *o)
}

// errChanged says that the opened file or directory is not the one checked before.
var errChanged = errors.New("it was replaced while it was opened")

// OpenFile opens the regular file at path, following links, with the flags of [os.OpenFile]. With os.O_CREATE it makes
// a missing file, with mode 0600.
func OpenFile(path string, flag int, o Options) (*os.File, error) {
	o.Warn = Once(o.Warn)
	for try := 1; ; try++ {
		f, err := openFile(path, flag, o)
		again := errors.Is(err, errChanged) || errors.Is(err, fs.ErrExist) && flag&os.O_EXCL == 0
		if err == nil || !again || try == maxTries {
			return f, err
		}
	}
}

func openFile(path string, flag int, o Options) (*os.File, error) {
	at, missing, info, err := follow(path, &o)
	switch {
	case err != nil:
		return nil, err
	case len(missing) > 1 || len(missing) == 1 && flag&os.O_CREATE == 0:
		return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
	case len(missing) == 1: // it does not open a file put there meanwhile
		at, flag = filepath.Join(at, missing[0]), flag|os.O_EXCL
	case flag&os.O_EXCL == 0:
		flag &^= os.O_CREATE
	}
	if info != nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.OpenFile(at, flag|noBlock, 0o600)
	if err != nil {
		if info != nil && errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", errChanged, err)
		}
		return nil, err
	}
	return checked(f, path, info, o)
}

// OpenIn opens the file with the name in an open directory for reading. It must be a regular file, and not a link. If
// it is replaced meanwhile, the new one is opened.
func OpenIn(root *os.Root, name string, o Options) (*os.File, error) {
	for try := 1; ; try++ {
		f, err := openIn(root, name, o)
		if err == nil || !errors.Is(err, errChanged) || try == maxTries {
			return f, err
		}
	}
}

func openIn(root *os.Root, name string, o Options) (*os.File, error) {
	info, err := root.Lstat(name)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(root.Name(), name)
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := root.OpenFile(name, os.O_RDONLY|noBlock, 0)
	if err != nil {
		return nil, err
	}
	return checked(f, path, info, o)
}

// checked returns f if it is safe and the expected file (nil for a new file); otherwise it closes f.
func checked(f *os.File, path string, expected fs.FileInfo, o Options) (*os.File, error) {
	info, err := f.Stat()
	if err == nil && expected != nil && !os.SameFile(info, expected) {
		err = fmt.Errorf("%s: %w", path, errChanged)
	}
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err == nil {
		err = Check(path, info, o)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Check judges a directory or file that the caller has opened. info must come from Stat of its descriptor. The path is
// for the error.
func Check(path string, info fs.FileInfo, o Options) error {
	if err := checkOwner(path, info, &o); err != nil {
		return err
	}
	if o.Keys {
		return checkKeys(path, info)
	}
	return checkWritable(path, info, &o)
}

// CheckKeyFile checks an open private key file that another program has written for this one. The rules of
// Options.Keys apply, except that the groups of this process and of root may read the file, like the fsGroup of a pod.
// In directories that the kubelet makes for volumes, whose names begin with two dots, any mode is accepted, because no
// other user can reach the volume. The path is for the error.
func CheckKeyFile(path string, f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if strings.Contains(filepath.ToSlash(f.Name()), "/..") {
		return nil
	}
	return checkReadable(path, info)
}

// OpenGiven opens a file that another program has written for this one. It checks the directories above the file by o.
// It checks the file itself without exceptions, and like [CheckKeyFile] if key is true. It refuses a file in one of
// the directories not, whether named directly or through links, because this process writes to them.
func OpenGiven(path string, key bool, not []string, o Options) (*os.File, error) {
	f, err := OpenFile(path, os.O_RDONLY, o)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		err = Check(path, info, Options{Owners: o.Owners})
	}
	if err == nil && key {
		err = CheckKeyFile(path, f)
	}
	for _, name := range []string{path, f.Name()} {
		for _, folder := range not {
			if err == nil && Same(filepath.Dir(name), folder) {
				err = fmt.Errorf("%s is in %s, to which this program writes what it obtains, and so is not read",
					path, folder)
			}
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Same reports whether two paths lead to the same directory.
func Same(a, b string) bool {
	one, err := os.Stat(a)
	if err != nil {
		return false
	}
	two, err := os.Stat(b)
	return err == nil && os.SameFile(one, two)
}

// HasOwner reports whether info has an owner that [Check] can judge: not on Windows, nor for an [fs.FS] in memory or
// in an archive.
func HasOwner(info fs.FileInfo) bool { return hasOwner(info) }
