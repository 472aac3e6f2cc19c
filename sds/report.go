package sds

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Report implements [report.Reporter] with the open streams, the permitted names that clients ask for, with their
// versions, the last 16 distinct pushes, and the last 16 rejections by clients. A name for which [Options].Resolve
// returned another is "NAME (SOURCE NAME)". The names of the metrics begin with svidkit_sds_, and no metric has
// labels from a client.
func (h *Handler) Report() report.Report {
	h.mu.Lock()
	pushes := slices.Concat(h.pushes, h.rejections)
	h.mu.Unlock()
	server := report.Server{Protocol: "SDS", Streams: h.open.Held(), Names: h.table.versions(), Pushes: pushes}
	return report.Report{Servers: []report.Server{server}, Metrics: h.counts.Write}
}

// maxPushes is how many pushes are kept, and how many names of each push.
const maxPushes = 16

// noted adds p to list. Pushes with the same version and names count as one, and the oldest of too many is dropped.
func noted(list []report.Push, p report.Push) []report.Push {
	p.Time, p.Streams, p.Names = time.Now(), 1, p.Names[:min(len(p.Names), maxPushes)]
	i := slices.IndexFunc(list, func(q report.Push) bool {
		return q.Version == p.Version && slices.Equal(q.Names, p.Names)
	})
	if i >= 0 {
		p.Streams, p.Names = p.Streams+list[i].Streams, list[i].Names
		list = slices.Delete(list, i, i+1)
	} else if p.Names = slices.Clone(p.Names); len(list) == maxPushes {
		list = slices.Delete(list, 0, 1)
	}
	return append(list, p)
}

// pushed notes a response about to be sent.
func (h *Handler) pushed(p *report.Push) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pushes = noted(h.pushes, *p)
}

// rejected notes that a client has rejected a response.
func (h *Handler) rejected(ctx context.Context, p peerkey.Holder, n *report.Push) {
	h.nacks.Add(1)
	h.mu.Lock()
	h.rejections = noted(h.rejections, *n)
	h.mu.Unlock()
	h.table.log.LogOf(slog.LevelWarn, p.Name(), "sds: client rejected a response", "NACK", append(attrs(ctx, p),
		slog.String("node", n.Client), slog.Any("names", n.Names), slog.String("version", n.Version),
		slog.String("message", n.Message))...)
}
