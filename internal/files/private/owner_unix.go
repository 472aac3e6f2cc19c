//go:build unix

package private

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// noBlock keeps the process from blocking on a pipe that replaced a file.
const noBlock = syscall.O_NONBLOCK

// follow returns the path without links and its info, or the last existing directory and the missing names.
func follow(path string, o *Options) (at string, missing []string, info fs.FileInfo, err error) {
	if path == "" {
		return "", nil, nil, errors.New("the path is empty")
	}
	if !filepath.IsAbs(path) {
		dir, err := os.Getwd()
		if err != nil {
			return "", nil, nil, err
		}
		path = dir + "/" + path // not cleaned: what is behind a link decides what ".." means
	}
	// The target of a link may be gone because the link leads elsewhere by now. Then the second answer differs.
	var before string
	for range maxTries {
		at, missing, info, err = walk(path, o)
		leads := filepath.Join(at, filepath.Join(missing...))
		if err != nil || len(missing) == 0 || leads == before || leads == filepath.Clean(path) {
			break
		}
		before = leads
	}
	return at, missing, info, err
}

// walk follows path from the root of the file system, and checks each directory before it resolves a name in it.
func walk(path string, o *Options) (at string, missing []string, info fs.FileInfo, err error) {
	at = "/"
	if info, err = os.Lstat(at); err != nil {
		return "", nil, nil, err
	}
	rest := split(path)
	for links := 0; len(rest) > 0; {
		if !info.IsDir() {
			return "", nil, nil, &fs.PathError{Op: "open", Path: at, Err: syscall.ENOTDIR}
		}
		if err := checkFolder(at, info, o); err != nil {
			return "", nil, nil, err
		}
		if rest[0] == ".." { // of a link: at is free of links
			at, rest = filepath.Dir(at), rest[1:]
			if info, err = os.Lstat(at); err != nil {
				return "", nil, nil, err
			}
			continue
		}
		next := filepath.Join(at, rest[0])
		found, err := os.Lstat(next)
		if errors.Is(err, fs.ErrNotExist) {
			return at, rest, nil, nil
		}
		if err != nil {
			return "", nil, nil, err
		}
		rest = rest[1:]
		if found.Mode().Type() != fs.ModeSymlink {
			at, info = next, found
			continue
		}
		if err := checkAbove(next, found, o); err != nil {
			return "", nil, nil, err
		}
		target, err := os.Readlink(next)
		if err != nil {
			return "", nil, nil, err
		}
		if links++; links > maxLinks {
			return "", nil, nil, &fs.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
		}
		rest = append(split(target), rest...)
		if filepath.IsAbs(target) {
			at = "/"
			if info, err = os.Lstat(at); err != nil {
				return "", nil, nil, err
			}
		}
	}
	return at, nil, info, nil
}

// split returns the names in a path, without empty names and dots.
func split(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(s string) bool { return s == "" || s == "." })
}

func checkFolder(path string, info fs.FileInfo, o *Options) error {
	if err := checkAbove(path, info, o); err != nil {
		return err
	}
	return checkWritable(path, info, o)
}

// checkAbove is checkOwner for directories and links on the way to a file. The owner of the root of the file system
// can replace all of them, and is trusted there: a user other than root in a user namespace that does not map root,
// such as a sandbox.
func checkAbove(path string, info fs.FileInfo, o *Options) error {
	if owner, _, ok := ids(info); ok && owner == ownerOfAll() {
		return nil
	}
	return checkOwner(path, info, o)
}

var ownerOfAll = sync.OnceValue(func() uint32 {
	info, err := os.Lstat("/")
	if err != nil {
		return 0
	}
	owner, _, _ := ids(info)
	return owner
})

func checkOwner(path string, info fs.FileInfo, o *Options) error {
	owner, _, ok := ids(info)
	own := uint32(os.Geteuid())
	if ok && (owner == own || owner == 0 || slices.Contains(o.Owners, int(owner))) {
		return nil
	}
	if !ok {
		return fmt.Errorf("%s: %w: its owner is unknown", path, ErrUnsafe)
	}
	what, command := "file", "chown"
	switch {
	case info.IsDir():
		what = "directory"
	case info.Mode().Type() == fs.ModeSymlink:
		what, command = "link", "chown -h"
	}
	process := "root, as which this process runs"
	if own != 0 {
		process = fmt.Sprintf("user %d, as which this process runs, or root", own)
	}
	return fmt.Errorf("%s: %w: the %s belongs to user %d and not to %s: start it as user %[4]d, or change the "+
		"owner; run: %[6]s %d %q", path, ErrUnsafe, what, owner, process, command, own, path)
}

func checkKeys(path string, info fs.FileInfo) error {
	have := info.Mode().Perm()
	if have&0o077 == 0 {
		return nil
	}
	want := 0o600
	if info.IsDir() {
		want = 0o700
	}
	return fmt.Errorf("%s: %w: it has mode %04o, so that others may get at the keys; run: chmod %04o %q", path,
		ErrUnsafe, have, want, path)
}

// strangers returns the argument for chmod, which ends in how, and the other users who have one of the permissions,
// which are given as permissions of all users. Both are empty if there are no such users.
func strangers(info fs.FileInfo, permissions fs.FileMode, how string) (bits, by string) {
	_, group, ok := ids(info)
	grouped := info.Mode()&(permissions<<3) != 0 && !(ok && trusted(group))
	switch all := info.Mode()&permissions != 0; {
	case all && grouped:
		return "go" + how, "all users"
	case all:
		return "o" + how, "all users"
	case grouped:
		return "g" + how, fmt.Sprintf("the group %d, which is none of this process and not root's,", group)
	}
	return "", ""
}

func checkReadable(path string, info fs.FileInfo) error {
	bits, by := strangers(info, 0o007, "=")
	if by == "" {
		return nil
	}
	return fmt.Errorf("%s: %w: it has mode %04o, so that %s may get at the key; run: chmod %s %q", path, ErrUnsafe,
		info.Mode().Perm(), by, bits, path)
}

func checkWritable(path string, info fs.FileInfo, o *Options) error {
	if info.IsDir() && info.Mode()&fs.ModeSticky != 0 {
		return nil // only the owner of a file in it can replace that file
	}
	bits, by := strangers(info, 0o002, "-w")
	if by == "" || info.IsDir() && podMount(path, configMap) {
		return nil
	}
	err := fmt.Errorf("%s: %w: it has mode %04o, so that %s can change it; run: chmod %s %q", path, ErrUnsafe,
		info.Mode().Perm(), by, bits, path)
	if o.Warn == nil {
		return err
	}
	if !info.IsDir() || !PodVolume(path) {
		o.Warn(err)
	}
	return nil
}

// trusted reports whether the members of a group are trusted: it is root's group or one of this process's groups.
func trusted(group uint32) bool {
	return group == 0 || slices.Contains(ownGroups(), int(group))
}

var ownGroups = sync.OnceValue(func() []int {
	groups, _ := os.Getgroups() // without them, fewer groups are trusted
	return append(groups, os.Getegid())
})

// ids returns the owner and the group of a file.
func ids(info fs.FileInfo) (owner, group uint32, ok bool) {
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, false
	}
	return uint32(s.Uid), uint32(s.Gid), true
}

func hasOwner(info fs.FileInfo) bool {
	_, _, ok := ids(info)
	return ok
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrPermission) { // one that may be entered and written, and not listed
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
