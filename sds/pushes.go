package sds

import (
	"slices"
	"time"
)

// push is a response that was sent on streams. Streams that have the same secrets count as one push.
type push struct {
	Time     time.Time // when it was last sent
	Names    []string  // of its secrets, and of some that it removes; at most 16
	Version  string
	Streams  int   // that it was sent on
	NACKs    int   // clients that rejected it
	LastNACK *nack // the last of them, or nil
}

// nack is a client's refusal of a response.
type nack struct {
	Time    time.Time
	Node    string   // ID that the client gives itself, or ""
	Names   []string // of the secrets in the response
	Version string   // of the response
	Message string   // the client's reason, cut to 1 KiB; not to be trusted
}

// maxPushes is how many pushes are kept, and how many names of each.
const maxPushes = 16

// pushes are the last ones. The Handler's mu guards them.
type pushes []push

// pushed notes a response that is about to be sent.
func (h *Handler) pushed(l *label) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.pushes.find(l.version, l.names)
	if p == nil {
		if len(h.pushes) < maxPushes {
			h.pushes = append(h.pushes, push{})
			p = &h.pushes[len(h.pushes)-1]
		} else {
			p = h.pushes.oldest()
		}
		*p = push{Version: l.version, Names: slices.Clone(first(l.names))}
	}
	p.Time = time.Now()
	p.Streams++
}

// rejected notes that a client has rejected a response.
func (ps pushes) rejected(n *nack) {
	if p := ps.find(n.Version, n.Names); p != nil {
		p.NACKs++
		p.LastNACK = n
	}
}

func (ps pushes) find(version string, names []string) *push {
	for i := range ps {
		if p := &ps[i]; p.Version == version && slices.Equal(p.Names, first(names)) {
			return p
		}
	}
	return nil
}

func (ps pushes) oldest() *push {
	oldest := &ps[0]
	for i := range ps {
		if ps[i].Time.Before(oldest.Time) {
			oldest = &ps[i]
		}
	}
	return oldest
}

// list returns a copy, newest first.
func (ps pushes) list() []push {
	return slices.SortedFunc(slices.Values(ps), func(a, b push) int { return b.Time.Compare(a.Time) })
}

func first(names []string) []string { return names[:min(len(names), maxPushes)] }
