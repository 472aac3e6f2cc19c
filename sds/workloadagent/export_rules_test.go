package workloadagent

import (
	"testing"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// Rules returns what a file with data says.
func Rules(t testing.TB, data string) *rules {
	t.Helper()
	return must.Get(parse([]byte(data), &Config{Node: "n1"}))(t, "%s", data)
}

// Grant is an identity of a process.
type Grant = grant

// Pod is what the API server says of one.
type Pod struct {
	Namespace, Account string
	Labels             map[string]string
}

// Granted returns the identities of a process.
func (r *rules) Granted(peer unixsocket.Peer, process func() (unixsocket.Process, bool), in func() (Pod, bool)) []Grant {
	return r.granted(caller{Peer: peer, process: process, pod: func() (p pod, ok bool) {
		of, ok := in()
		p.Metadata.Namespace, p.Spec.Account, p.Metadata.Labels = of.Namespace, of.Account, of.Labels
		return p, ok
	}})
}

// ID returns the path of the SPIFFE ID, with the hint.
func (g grant) ID() string { return g.id.Path() + g.hint }

// Permits reports whether there may be a token for all of the audiences.
func (g grant) Permits(audiences ...string) bool { return g.permits(audiences) }
