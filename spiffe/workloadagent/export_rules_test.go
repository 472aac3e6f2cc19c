package workloadagent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/spiffe"
)

// Rules returns what a file with data says.
func Rules(t testing.TB, data string) *rules {
	t.Helper()
	r, err := parse([]byte(data), spiffe.TrustDomain{}, false)
	require.NoError(t, err, "%s", data)
	return r
}

// Grant is an identity of a process.
type Grant = grant

// Granted returns the identities of a process.
func (r *rules) Granted(peer unixsocket.Peer, process func() (unixsocket.Process, bool)) []Grant {
	return r.granted(caller{Peer: peer, process: process, pod: func() (pod, bool) { return pod{}, false }})
}

// ID returns the path of the SPIFFE ID, with the hint.
func (g grant) ID() string { return g.id.Path() + g.hint }

// Permits reports whether there may be a token for all of the audiences.
func (g grant) Permits(audiences ...string) bool { return g.permits(audiences) }
