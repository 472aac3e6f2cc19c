package unixsocket

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// Peer is the process that opened a connection, as the kernel saw it at that moment. By now the process may
// have passed the connection on, or have ended, and its PID may belong to another process. A server that
// inspects the process further must make sure that it started before the connection did, as
// [ProcessFromContext] does.
type Peer struct {
	UID, GID uint32 // effective
	PID      int32  // in the server's PID namespace; 0 if the process is not in it
}

type peerKey struct{}

// PeerFromContext returns the peer of the request that ctx belongs to. It reports false on connections
// that are not Unix sockets, and on systems other than Linux.
func PeerFromContext(ctx context.Context) (Peer, bool) {
	p, ok := ctx.Value(peerKey{}).(Peer)
	return p, ok
}

// ConnContext adds the peer of c to ctx, for [PeerFromContext]. It is the ConnContext of an
// [http.Server] that serves Unix sockets without a [Server].
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if p, ok := peerOf(c); ok {
		ctx = peerkey.NewContext(ctx, p.user()) // for limits elsewhere
		ctx = context.WithValue(ctx, connKey{}, connected{c.(*net.UnixConn)})
		return context.WithValue(ctx, peerKey{}, p)
	}
	if user := conns.TCPPeer(c).User; user != "" {
		return peerkey.WithUser(ctx, user)
	}
	return ctx
}

// user names the peer for limits: the pod or container that it is in, and otherwise its user.
func (p Peer) user() string {
	if p.PID > 0 {
		groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.PID)) // other systems have no such file
		if name := containerOf(string(groups)); name != "" {
			return name
		}
	}
	return peerkey.User(p.UID)
}

// containerOf returns the outermost pod or container named by the control groups of a process, or "". Users can make
// groups of any name below their own slice, and below a unit that delegates them.
func containerOf(groups string) string {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy, controllers, path
		if len(parts) < 3 || strings.Contains(parts[2], "user.slice/") {
			continue
		}
		for folder := range strings.SplitSeq(parts[2], "/") {
			if pod := podFolder(folder); pod != "" {
				return pod
			}
			name, _, _ := strings.Cut(folder, ".") // as in docker-HEX.scope
			if name = name[strings.LastIndexByte(name, '-')+1:]; hexadecimal(name, 64) {
				return name
			}
			if isUnit(folder) {
				break
			}
		}
	}
	return ""
}

func hexadecimal(s string, n int) bool {
	return len(s) == n && strings.Trim(s, "0123456789abcdef") == ""
}

// holder returns the user and the process that hold a connection.
func holder(c net.Conn) conns.Peer {
	p, known := peerOf(c)
	if !known {
		return conns.TCPPeer(c)
	}
	user := p.user()
	if p.PID <= 0 {
		return conns.Peer{Names: []string{user}}
	}
	return conns.Peer{Names: []string{user, user + " pid " + strconv.Itoa(int(p.PID))}}
}
