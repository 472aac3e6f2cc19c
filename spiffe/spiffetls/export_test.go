package spiffetls

import (
	"context"
	"crypto/tls"
	"net/http"

	"github.com/svidkit/svidkit/spiffe"
)

// JudgeAll is one round of Run.
func JudgeAll(g *Governor, ctx context.Context) {
	g.listen(nil, true)
	g.judgeAll(ctx)
}

// GovernorStatus counts connections.
type GovernorStatus struct {
	Open     int    // governed now, the draining ones included
	Draining int    // about to end
	Ended    uint64 // ended while they were draining, so far
}

// Status returns the counts of this moment, as WriteMetrics writes them.
func (g *Governor) Status() GovernorStatus {
	g.mu.Lock()
	defer g.mu.Unlock()
	st := GovernorStatus{Open: len(g.queue), Draining: g.draining}
	for _, n := range g.endedBy {
		st.Ended += n
	}
	return st
}

// Endpoints returns how many configurations have connections, whose sources Run listens to.
func Endpoints(g *Governor) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.endpoints)
}

// Hooked returns how many connections the hook of net/http knows.
func Hooked(g *Governor) int {
	n := 0
	g.hooked.Range(func(_, _ any) bool {
		n++
		return true
	})
	return n
}

// Holds is what is asked before each Write of a connection of t.
func Holds(t *http.Transport, host, port string, id spiffe.ID) func() error {
	var q question
	_ = t.TLSClientConfig.VerifyConnection(q.in(tls.ConnectionState{}))
	return q.e.holds(hostport{host, port}, id)
}

// OtherSees returns what the Failure of e says that the other side sees.
func (e *HandshakeError) OtherSees() string { return e.otherSees() }

// Count counts a handshake.
func Count(m *Metrics) { m.good(true, false) }

// Silent returns how many connections have not sent their hello.
func Silent(m *Metrics) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.silent)
}
