package spiffetls

import (
	"context"
	"errors"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// JudgeAll is one round of Run.
func JudgeAll(g *Governor, ctx context.Context) {
	g.changes()
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
	st := GovernorStatus{Open: len(g.conns), Draining: g.draining}
	for _, n := range g.endedBy {
		st.Ended += n
	}
	return st
}

// Endpoints returns how many endpoints have connections.
func Endpoints(g *Governor) int {
	heard := map[*Endpoint]bool{}
	for _, c := range g.all() {
		heard[c.e] = true
	}
	return len(heard)
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

// Holds is what is asked before each Write of a connection.
func Holds(e *Endpoint, addr string, p *spiffe.Peer) func() error {
	return e.holds(proof{peer: p, addr: addressOf(addr)}, addr)
}

// Count counts a handshake.
func Count(m *Metrics) { m.good(true, false) }

// Failure is one that Metrics keep.
type Failure struct {
	Count                              int
	Last                               time.Time
	Side, Remote, Stage, Rule, Message string
	ID                                 spiffe.ID
	Err                                error
	Reason                             string
}

// Failures returns what is kept, the newest first, and how many failures were noted.
func (m *Metrics) Failures() (all []Failure, total int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.kept {
		f := Failure{
			Count: k.count, Last: k.last, Side: "client", Remote: k.remote, Stage: k.stage, Message: k.message(), ID: k.id, Err: k.err,
		}
		if k.server {
			f.Side = "server"
		}
		for _, a := range k.attrs() {
			if a.Key == "err" {
				f.Reason = redact.Clip(a.Value.String(), 2048)
			}
		}
		if ve, ok := asVerify(k.err); ok {
			f.Rule = ve.Rule
		}
		all, total = append(all, f), total+k.count
	}
	return all, total
}

func asVerify(err error) (ve *spiffe.VerifyError, ok bool) { return ve, errors.As(err, &ve) }
