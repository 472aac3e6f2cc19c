//go:build unix

package unixsocket

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// maxPath is the longest path of a socket in bytes; a zero byte follows it.
const maxPath = len(syscall.RawSockaddrUnix{}.Path) - 1

func refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// backlog is how many connections may wait to be accepted, within the limit of the system. The
// constant in package syscall is 128, and more clients than that reconnect at once when an agent restarts.
const backlog = 4096

// listenUnix makes a socket with the mode and name in the open directory root, whose path is dir and ends in a slash.
// own is the new socket file. The name must be free.
//
// The socket is bound, gets its mode and listens in a new directory that only this user may enter, and gets its name
// by a link when it is ready. So no client finds it too early, and a user who may write to the directory cannot trick
// this process into changing the mode of another file.
func listenUnix(root *os.Root, dir, name string, mode fs.FileMode) (l net.Listener, own fs.FileInfo, err error) {
	folder := "." + name[:min(len(name), 32)] + "." + rand.Text()[:6]
	if err := root.Mkdir(folder, 0o700); err != nil {
		return nil, nil, err
	}
	defer root.Remove(folder) // if it is not empty, it is not the directory made here
	inside, err := openFolder(root, folder)
	if err != nil {
		return nil, nil, err
	}
	defer inside.Close()
	at, err := inside.Open(".")
	if err != nil {
		return nil, nil, err
	}
	defer at.Close()
	// The path of the descriptor is shorter. It is not the first choice, as tools show the path of bind.
	byDescriptor := fmt.Sprintf("/proc/self/fd/%d", at.Fd())
	path := dir + folder + "/" + name
	if len(path) > maxPath {
		path = byDescriptor + "/s"
	}
	l, err = bind(inside, path, byDescriptor, mode)
	if errors.Is(err, fs.ErrNotExist) { // there is no /proc
		err = fmt.Errorf("the path is too long on this system; use a shorter one, or a relative one: %w", err)
	}
	if err != nil {
		return nil, nil, err
	}
	if own, err = publish(root, inside, folder, filepath.Base(l.Addr().String()), name); err != nil {
		l.Close()
		return nil, nil, err
	}
	return l, own, nil
}

// openFolder opens a directory that this user has just made. It fails if another user has replaced the directory,
// which is possible if others may write to root.
func openFolder(root *os.Root, name string) (*os.Root, error) {
	// the umask took more away
	if info, err := root.Lstat(name); err == nil && info.IsDir() && info.Mode().Perm() != 0o700 {
		if err := root.Chmod(name, 0o700); err != nil {
			return nil, err
		}
	}
	inside, err := root.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	info, err := inside.Stat(".")
	if err == nil {
		if s, ok := info.Sys().(*syscall.Stat_t); !ok || int(s.Uid) != os.Geteuid() || info.Mode().Perm() != 0o700 {
			err = errReplaced
		}
	}
	if err != nil {
		inside.Close()
		return nil, err
	}
	return inside, nil
}

var errReplaced = errors.New("another process that may write to the directory replaced the socket while it was " +
	"made; take away write permission of the directory")

// bind makes a socket with the mode at a path that leads into the directory inside, and listens on it.
func bind(inside *os.Root, path, byDescriptor string, mode fs.FileMode) (net.Listener, error) {
	syscall.ForkLock.RLock()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // the listener has a copy
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	name := filepath.Base(path)
	if info, err := inside.Lstat(name); err != nil || info.Mode().Type() != fs.ModeSocket {
		return nil, errReplaced // the path led elsewhere
	}
	err = inside.Chmod(name, mode)
	if err != nil && os.Chmod(filepath.Join(byDescriptor, name), mode) == nil {
		err = nil // a sandbox may forbid the newer system call of the first way
	}
	if err == nil {
		err = os.NewSyscallError("listen", syscall.Listen(fd, backlog))
	}
	var l net.Listener
	if err == nil {
		l, err = net.FileListener(f)
	}
	if err != nil {
		_ = inside.Remove(name)
		return nil, err
	}
	return l, nil
}

// publish links the socket made in the directory inside to its name in root.
func publish(root, inside *os.Root, folder, made, name string) (fs.FileInfo, error) {
	defer inside.Remove(made) // after Rename it is not there
	own, err := inside.Lstat(made)
	if err != nil {
		return nil, err
	}
	from := filepath.Join(folder, made)
	err = root.Link(from, name)
	if err != nil && !errors.Is(err, fs.ErrExist) { // a file system without links; Rename replaces any file there
		if _, there := root.Lstat(name); errors.Is(there, fs.ErrNotExist) {
			err = root.Rename(from, name)
		}
	}
	if err != nil {
		return nil, err
	}
	if got, err := root.Lstat(name); err != nil || !os.SameFile(got, own) {
		return nil, errReplaced
	}
	return own, nil
}
