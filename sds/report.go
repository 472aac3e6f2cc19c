package sds

import (
	"slices"

	"github.com/svidkit/svidkit/spiffe/report"
)

// Report implements [report.Reporter] with a server: its open streams, the names that clients ask for and may have, with
// their versions, and the last 16 pushes that differ, with what clients have rejected of them. A name for which
// [Options].Resolve has returned another is "NAME (SOURCE NAME)". The metrics are:
//
//	svidkit_sds_streams                  open streams
//	svidkit_sds_names                    that clients ask for, by state: served, or missing
//	svidkit_sds_responses_total          responses on streams
//	svidkit_sds_nacks_total              responses that clients rejected
//	svidkit_sds_refused_requests_total   requests that were refused, by reason: limit or request
//	svidkit_sds_failed_lookups_total     look-ups in the source that failed
//
// Nothing that a client says is among their labels.
func (h *Handler) Report() report.Report {
	st := h.status()
	server := report.Server{Protocol: "SDS", Streams: st.Streams, Names: st.Names}
	rejected := func(n *nack, clients int) report.Push {
		return report.Push{Time: n.Time, NACK: true, Names: n.Names, Version: n.Version, Streams: clients, Client: n.Node, Message: n.Message}
	}
	for _, p := range st.Pushes {
		server.Pushes = append(server.Pushes, report.Push{Time: p.Time, Names: p.Names, Version: p.Version, Streams: p.Streams})
		if p.LastNACK != nil {
			server.Pushes = append(server.Pushes, rejected(p.LastNACK, p.NACKs))
		}
	}
	if n := st.LastNACK; n != nil && !slices.ContainsFunc(st.Pushes, func(p push) bool { return p.LastNACK == n }) {
		server.Pushes = append(server.Pushes, rejected(n, 1))
	}
	return report.Report{Servers: []report.Server{server}, Metrics: h.counts.Write}
}

// status is the state of a [Handler] at one moment.
type status struct {
	Streams  int               // open ones, of both kinds
	Names    map[string]string // what clients ask for and may have: name to version, which is "" while there is nothing to serve
	NACKs    uint64            // responses that clients rejected
	LastNACK *nack             // the last of them, or nil
	Pushes   []push            // the last 16 that differ, newest first
}

func (h *Handler) status() status {
	h.mu.Lock()
	defer h.mu.Unlock()
	return status{Streams: int(h.streams.Load()), Names: h.table.versions(), NACKs: h.nacks, LastNACK: h.last, Pushes: h.pushes.list()}
}
