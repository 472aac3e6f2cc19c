package kubetest

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// bookmarkInterval is how often a watch that wants bookmarks gets one, as API servers have it.
const bookmarkInterval = time.Minute

// Compact drops the changes up to now: a watch from an older resourceVersion gets 410 Gone, at random as
// the status of the answer or as an event, as API servers do both. Open watches continue.
func (s *Server) Compact() {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	s.store.first = s.store.version
}

// EndWatches ends all open watches, as a server does when it shuts down.
func (s *Server) EndWatches() { s.signal(func(w *watchSignals) { w.end++ }) }

// ExpireWatches ends all open watches with an event of 410 Gone.
func (s *Server) ExpireWatches() { s.signal(func(w *watchSignals) { w.expire++ }) }

// Bookmark sends a bookmark to all open watches that asked for bookmarks.
func (s *Server) Bookmark() { s.signal(func(w *watchSignals) { w.bookmark++ }) }

func (s *Server) signal(f func(*watchSignals)) {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	f(&s.store.watches)
	s.store.wake()
}

func expired() *status {
	return failure(http.StatusGone, "Expired", "The resourceVersion for the provided watch is too old.")
}

// watch answers until the watch ends. The error is for watches that do not begin.
func (s *store) watch(w http.ResponseWriter, r *http.Request, t target, sel selection) error {
	q := r.URL.Query()
	limit := 30 * time.Minute
	if v := q.Get("timeoutSeconds"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 {
			return failure(http.StatusBadRequest, "BadRequest", "timeoutSeconds is not a number")
		}
		if n > 0 {
			limit = time.Duration(n) * time.Second
		}
	}
	bookmarks := q.Get("allowWatchBookmarks") == "true"

	s.mu.Lock()
	var initial []object
	from, anew := s.version, true
	if v := q.Get("resourceVersion"); v != "" && v != "0" {
		n, err := strconv.ParseUint(v, 10, 64)
		switch {
		case err != nil:
			s.mu.Unlock()
			return failure(http.StatusBadRequest, "BadRequest", "resourceVersion: Invalid value: %q", v)
		case n > s.version:
			s.mu.Unlock()
			return failure(http.StatusGatewayTimeout, "Timeout", "Too large resource version: %d, current: %d",
				n, s.version)
		}
		from, anew = n, false
	}
	tooOld := from < s.first
	asStatus := tooOld && s.random.IntN(2) == 0
	if anew {
		for _, k := range sorted(s.objects, t) {
			if o := s.objects[k]; sel.matches(o) {
				initial = append(initial, o)
			}
		}
	}
	seen := s.watches
	s.mu.Unlock()
	if asStatus {
		return expired()
	}

	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out := json.NewEncoder(w)
	flush := http.NewResponseController(w).Flush
	send := func(kind string, o any) bool {
		return out.Encode(map[string]any{"type": kind, "object": o}) == nil && flush() == nil
	}
	if tooOld {
		send("ERROR", expired().object())
		return nil
	}
	if flush() != nil {
		return nil
	}
	for _, o := range initial {
		if !send("ADDED", o) {
			return nil
		}
	}
	mark := func(version uint64) bool {
		return !bookmarks || send("BOOKMARK", object{
			"kind": t.kind, "apiVersion": t.apiVersion(),
			"metadata": map[string]any{"resourceVersion": format(version), "creationTimestamp": nil},
		})
	}

	end := time.NewTimer(limit)
	defer end.Stop()
	tick := time.NewTicker(bookmarkInterval)
	defer tick.Stop()
	for {
		s.mu.Lock()
		var news []change
		for i := len(s.log) - 1; i >= 0 && s.log[i].version > from; i-- {
			news = append(news, s.log[i])
		}
		from = s.version
		now, changed := s.watches, s.changed
		s.mu.Unlock()
		for i := len(news) - 1; i >= 0; i-- {
			if kind, o := news[i].event(t, sel); o != nil && !send(kind, o) {
				return nil
			}
		}
		switch {
		case now.expire != seen.expire:
			send("ERROR", expired().object())
			return nil
		case now.end != seen.end:
			return nil
		case now.bookmark != seen.bookmark:
			if !mark(from) {
				return nil
			}
		}
		seen = now
		select {
		case <-changed:
		case <-tick.C:
			if !mark(from) {
				return nil
			}
		case <-end.C:
			mark(from) // so that the next watch starts from here
			return nil
		case <-r.Context().Done():
			return nil
		}
	}
}

// event returns the event of a change for a watch, or nil.
func (c change) event(t target, sel selection) (string, object) {
	if c.key.resource != t.resource || !t.everywhere && c.key.namespace != t.namespace {
		return "", nil
	}
	before, after := sel.matches(c.old), sel.matches(c.new)
	switch {
	case before && after:
		return "MODIFIED", c.new
	case after:
		return "ADDED", c.new
	case before && c.new == nil:
		return "DELETED", c.old
	case before: // it left the selection: its last state in it, with the present version
		o := c.old.clone()
		o.meta()["resourceVersion"] = format(c.version)
		return "DELETED", o
	}
	return "", nil
}
