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

// Count counts a handshake.
func Count(m *Metrics) { m.good(true, false) }

// Silent returns how many connections have not sent their hello.
func Silent(m *Metrics) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.silent)
}
