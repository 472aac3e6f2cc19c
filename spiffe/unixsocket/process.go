package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/spiffe/internal/process"
)

// Process is what the kernel says about the process of a [Peer], now. An empty field means that the kernel does not
// say.
//
// The kernel vouches for the unit and the pod, as only root makes their control groups and moves processes into them.
// It does not protect the executable from the user of the process: that user can load other code into any program
// (LD_PRELOAD), or trace it. So the executable only distinguishes honest programs of one user. Use it only together
// with Peer.UID, Unit or Pod.
type Process struct {
	// Executable is the absolute path of the program without symbolic links, as this process finds it. It is empty if
	// that path now leads to another file, because the program was replaced or deleted, or the process sees other
	// mounts (in a container, or with unshare). For a script it is the path of the interpreter. For another user's
	// process it is empty unless this process has root or CAP_SYS_PTRACE.
	Executable string

	// Unit is the unit of systemd that the process is in, such as web.service, or of its session or user
	// manager, such as session-3.scope and user@1000.service, by the name of its control group. Units of a user
	// manager are left out, and so are groups below a unit: users make and name them.
	Unit string

	// Pod is the UID of the Kubernetes pod that the process is in, with hyphens, by the name of its control
	// group, which must be the kubelet's: not below a unit, the slice of a user, or a container.
	Pod string
}

// ProcessFromContext returns what the kernel says about the process on the other side of the request that ctx belongs
// to. It fails if the process is not known for certain: it has ended, its PID may belong to another process by now, or
// it is in another PID namespace. It needs Linux 6.5 or later, which has handles of peers (SO_PEERPIDFD).
//
// Call it for each decision: a process can become another program (execve) while its connection lasts. Peer.UID and
// Peer.GID stay as they were when it connected.
func ProcessFromContext(ctx context.Context) (Process, error) {
	peer, _ := PeerFromContext(ctx)
	who, _ := ctx.Value(connKey{}).(certain)
	var p Process
	folder := fmt.Sprintf("/proc/%d/", peer.PID)
	path, err := os.Readlink(folder + "exe")
	if err == nil && filepath.IsAbs(path) {
		running, err := os.Stat(folder + "exe")
		if there, errThere := os.Lstat(path); err == nil && errThere == nil && os.SameFile(running, there) {
			p.Executable = path
		}
	}
	gone := errors.Is(err, fs.ErrNotExist) // even if it waits for its parent (zombie)
	groups, err := os.ReadFile(folder + "cgroup")
	if who == nil || gone || !who.is(peer.PID) { // checked after all reads
		err = errors.New("it has ended, is not in the PID namespace of this server, or this is not Linux 6.5 or later")
	}
	if err != nil {
		return Process{}, fmt.Errorf("unixsocket: process %d: %w", peer.PID, err)
	}
	p.Unit, p.Pod = unitOf(string(groups)), podOf(string(groups))
	return p, nil
}

// WithProcess returns a copy of ctx, the context of a request, in which [PeerFromContext] and [ProcessFromContext] are
// about the process with a PID, as if it had sent the request. The context ends a quarter of a second after the
// process at the latest, with a cause that wraps [fs.ErrNotExist]; a later process with the PID is another one. With
// the PID 0 there is no peer in the context.
//
// The PID must be in the PID namespace of this server, so the peer of ctx must be known and in it, too: the error
// wraps [fs.ErrInvalid] if it is not, and [fs.ErrNotExist] if there is no such process. Processes are found on Linux
// only.
func WithProcess(ctx context.Context, pid int32) (context.Context, error) {
	if pid == 0 {
		return context.WithValue(context.WithValue(ctx, connKey{}, nil), peerKey{}, nil), nil
	}
	caller, _ := PeerFromContext(ctx)
	who, _ := ctx.Value(connKey{}).(certain)
	if who == nil || len(strings.Fields(process.Status(caller.PID)["NSpid"])) != 1 || !who.is(caller.PID) {
		return nil, fmt.Errorf("unixsocket: process %d: its PID comes from another PID namespace or machine, or from a "+
			"process that is not known for certain: %w", pid, fs.ErrInvalid)
	}
	one := found{Started: process.Find(pid)}
	status := process.Status(pid)
	peer := Peer{UID: effective(status["Uid"]), GID: effective(status["Gid"]), PID: pid}
	gone := fmt.Errorf("unixsocket: process %d: %w", pid, fs.ErrNotExist)
	if status["Tgid"] != strconv.Itoa(int(pid)) || one.Ended() { // a thread is no process
		return nil, gone
	}
	ctx, cancel := context.WithCancelCause(ctx)
	one.end = func() { cancel(gone) }
	var look func()
	look = func() {
		if one.is(pid) && ctx.Err() == nil {
			time.AfterFunc(processPoll, look)
		}
	}
	look()
	return context.WithValue(context.WithValue(ctx, connKey{}, one), peerKey{}, peer), nil
}

const processPoll = 250 * time.Millisecond

// certain reports whether the process of a peer lives and has the PID.
type certain interface{ is(pid int32) bool }

// connected is the process that opened a connection.
type connected struct{ conn *net.UnixConn }

func (c connected) is(pid int32) bool { return isPeer(c.conn, pid) }

// found is a process that was found by its PID.
type found struct {
	process.Started
	end func() // ends its context
}

func (f found) is(pid int32) bool {
	if f.Ended() {
		f.end()
		return false
	}
	return pid == f.PID
}

// effective returns the second of the IDs in a line of /proc/PID/status.
func effective(ids string) uint32 {
	fields := append(strings.Fields(ids), "", "")
	id, err := strconv.ParseUint(fields[1], 10, 32)
	if err != nil {
		return 1<<32 - 1 // no user
	}
	return uint32(id)
}

type connKey struct{}

// groupPaths returns the control group paths of a process by controller; "" is the single hierarchy of version 2.
func groupPaths(groups string) map[string]string {
	paths := make(map[string]string)
	for line := range strings.Lines(groups) {
		if parts := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3); len(parts) == 3 {
			paths[parts[1]] = parts[2]
		}
	}
	return paths
}

// unitOf returns the outermost unit named by the control groups of a process, or "". systemd makes that group; the
// unit itself may have made the groups below it.
func unitOf(groups string) string {
	paths := groupPaths(groups)
	path, version1 := paths["name=systemd"]
	if !version1 {
		path = paths[""]
	}
	for folder := range strings.SplitSeq(path, "/") {
		if isUnit(folder) {
			return folder
		}
		if folder != "" && !strings.HasSuffix(folder, ".slice") {
			return "" // not of systemd, or of another namespace
		}
	}
	return ""
}

func isUnit(folder string) bool {
	return strings.HasSuffix(folder, ".service") || strings.HasSuffix(folder, ".scope")
}

// podOf returns the pod UID named by the control groups of a process, or "". It accepts only a group of the kubelet
// with only system slices above it: any user could have made a group below a unit, a container or the slice of a user.
func podOf(groups string) string {
	found := ""
	for _, path := range groupPaths(groups) {
		kubelet := false
		for folder := range strings.SplitSeq(path, "/") {
			kubelet = kubelet || strings.Contains(folder, "kubepods")
			above := folder == "" || folder == ".." || strings.HasSuffix(folder, ".slice") && folder != "user.slice"
			if isUnit(folder) || !above && !kubelet {
				break
			}
			name := podFolder(folder)
			if name == "" || !kubelet {
				continue
			}
			uid := strings.ReplaceAll(strings.TrimPrefix(name, "pod"), "_", "-")
			if found != "" && found != uid {
				return ""
			}
			found = uid
			break
		}
	}
	return found
}

// podFolder returns the part of a directory's name that begins with "pod" and has the UID of a pod, as in
// kubepods-pod6f9c7a34_2a49_4a8e_8f6c_2d7b6f0a1c22.slice, or "". A longer UID is none.
func podFolder(folder string) string {
	folder, _, _ = strings.Cut(folder, ".")
	i := strings.LastIndex(folder, "pod")
	if i < 0 || len(folder) != i+len("pod")+36 ||
		!hexadecimal(strings.NewReplacer("-", "", "_", "").Replace(folder[i+3:]), 32) {
		return ""
	}
	return folder[i:]
}
