package spiffetls

import (
	"errors"
	"slices"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// GovernorStatus counts connections.
type GovernorStatus struct {
	Open     int    // governed now, the draining ones included
	Draining int    // about to end
	Ended    uint64 // ended while they were draining, so far
}

// Status returns the counts of this moment.
func (g *Governor) Status() GovernorStatus {
	g.mu.Lock()
	defer g.mu.Unlock()
	st := GovernorStatus{Open: len(g.conns)}
	for _, c := range g.conns {
		if c.cause != "" {
			st.Draining++
		}
	}
	for _, n := range g.endedBy {
		st.Ended += n
	}
	return st
}

// Failure is the last of a kind, with their number.
type Failure struct {
	Count                         int
	Last                          time.Time
	Side, Remote, Kind, Rule, Err string
	ID                            spiffe.ID
}

// Failures returns the last failures, the newest first, and how many there were.
func (m *Metrics) Failures() (all []Failure, total int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, last := range m.last {
		f := Failure{
			Count: int(m.counts[k]), Last: last.at, Side: k.side, Remote: last.remote, Kind: k.reason,
			ID: last.id, Err: last.err.Error(),
		}
		if ve, ok := errors.AsType[*spiffe.VerifyError](last.err); ok {
			f.Rule = ve.Rule
		}
		all, total = append(all, f), total+f.Count
	}
	slices.SortFunc(all, func(a, b Failure) int { return b.Last.Compare(a.Last) })
	return all, total
}
