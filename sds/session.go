package sds

import (
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/spiffe/report"
)

// session is the protocol state of one stream, without the transport: it takes requests and news about names, and
// returns responses. One goroutine at a time uses it.
//
// At most one response is unanswered at a time. Meanwhile, news waits by name, and the next response carries the
// newest of each name, so a session's memory is bounded by its names.
type session struct {
	delta    bool
	maxNames int
	maxBytes int    // of all names together
	stamp    string // prefix of each nonce, so that no nonce of another stream is taken for one of this

	// allow decides about content before it is sent, possibly long after it became known, and again whenever there is
	// news about it; nil allows all. For the client, refused content does not exist until there is news again. allow
	// sets the item's cur to nil if the client will get other content, which arrives as news.
	allow func(*item) bool

	items    map[string]*item
	over     map[string]bool // delta: names beyond a limit; the client has yet to be told that they do not exist
	queue    []*item         // items with news, oldest first
	version  version         // of the content sent to the client under the names that it still wants
	serial   uint64          // of the last response; 0 before the first
	pushed   *report.Push    // the last response
	awaiting bool            // the last response is neither acknowledged nor rejected
	begun    bool            // there has been a request
	bytes    int             // of the names of all items
	node     string
}

// item is one name that the client wants.
type item struct {
	name   string
	cur    *state  // the newest state; nil or with an error if unknown
	sent   version // sent last, or reported by the client as its own; zero if none
	told   bool    // delta: the client was told that there is no such name
	queued bool

	denied bool   // allow refused it
	watch  *watch // the stream's; not used here
}

// absent is the state of a name that does not exist for the client.
var absent = &state{}

// outcome is the effect of a request on a session.
type outcome struct {
	nack    *report.Push // the client rejected the last response
	added   []*item      // names that were not wanted before; delta: also denied ones that the client requests again
	dropped []*item      // names that are no longer wanted
	over    int          // delta: how many names exceeded a limit
}

func newSession(delta bool, maxNames int) *session {
	return &session{
		delta: delta, maxNames: maxNames, maxBytes: max(maxNameBytes, nameBytes*maxNames),
		stamp: strconv.FormatUint(uint64(rand.Uint32()), 36) + "-", items: make(map[string]*item),
	}
}

// nonce returns the nonce of the last response.
func (s *session) nonce() string { return s.stamp + strconv.FormatUint(s.serial, 10) }

// request handles one request. An error is for the client, and ends the stream.
func (s *session) request(r *request) (outcome, error) {
	var out outcome
	if r.typeURL != "" && r.typeURL != typeURL {
		return out, grpchttp.Errorf(grpchttp.InvalidArgument,
			"sds: type URL %q: this service has %s only", clip(r.typeURL), typeURL)
	}
	if s.node == "" {
		s.node = clip(r.node) // later requests may leave it out
	}
	switch answer := r.nonce == s.nonce(); {
	case answer && s.awaiting:
		if r.rejected {
			out.nack = &report.Push{NACK: true, Names: s.pushed.Names, Version: s.pushed.Version, Client: s.node,
				Message: clip(r.reason)}
		}
		s.awaiting = false
	case !s.delta && !answer && r.nonce != "" && s.serial > 0:
		// The client will answer the newer response as well, and name again what it wants. Before our first response,
		// a nonce comes from an older stream, and the request counts as the first one.
		return out, nil
	}
	r.names = slices.DeleteFunc(r.names, func(name string) bool { return name == "" })
	var err error
	if s.delta {
		err = s.change(r, &out)
	} else {
		err = s.replace(r, &out)
	}
	s.begun = true
	if err == nil && s.bytes > s.maxBytes {
		err = grpchttp.Errorf(grpchttp.ResourceExhausted,
			"sds: resource names of more than %d bytes together; open another stream", s.maxBytes)
	}
	if len(out.dropped) > 0 {
		s.queue = slices.DeleteFunc(s.queue, s.dropped) // their names are no longer counted
	}
	return out, err
}

// replace makes the names of a SotW request the wanted names.
func (s *session) replace(r *request, out *outcome) error {
	wanted := make(map[*item]bool, len(r.names))
	for _, name := range r.names {
		wanted[s.add(name, out)] = true
	}
	if len(wanted) > s.maxNames {
		return errTooMany(s.maxNames)
	}
	for _, it := range s.items {
		if !wanted[it] {
			s.drop(it, out)
		}
	}
	return nil
}

// change applies a delta request. It drops names first, so that a name in both lists stays.
func (s *session) change(r *request, out *outcome) error {
	for _, name := range r.drop {
		if it := s.items[name]; it != nil {
			s.drop(it, out)
		}
	}
	for _, name := range r.names {
		if s.items[name] == nil && len(s.items) >= s.maxNames {
			if err := s.refuse(name, out); err != nil {
				return err
			}
			continue
		}
		it := s.add(name, out)
		if it.denied {
			out.added = append(out.added, it)
		}
		s.mark(it, version{}) // answer each subscription: the client may have lost its copy
		s.enqueue(it)
	}
	for name, v := range r.have {
		if it := s.items[name]; it != nil && !s.begun { // only the first request may say what the client has
			s.mark(it, parseVersion(v))
		}
	}
	return nil
}

// refuse notes a name beyond the limit. Only that name fails: if the stream ended, the client would come back with
// the same names, and none of them would be renewed.
func (s *session) refuse(name string, out *outcome) error {
	if out.over++; s.over[name] {
		return nil
	}
	if len(s.over) >= s.maxNames { // a client that answers responses stays below this
		return errTooMany(s.maxNames)
	}
	if s.over == nil {
		s.over = make(map[string]bool)
	}
	s.over[name] = true
	s.bytes += len(name)
	return nil
}

// add returns the item with that name, and creates it if it is new.
func (s *session) add(name string, out *outcome) *item {
	it := s.items[name]
	if it == nil {
		it = &item{name: name}
		s.items[name] = it
		s.bytes += len(name)
		if name == "*" { // a wildcard, which matches nothing here
			s.news(it, absent)
		} else {
			out.added = append(out.added, it)
		}
	}
	return it
}

func (s *session) drop(it *item, out *outcome) {
	delete(s.items, it.name)
	s.bytes -= len(it.name)
	s.mark(it, version{})
	out.dropped = append(out.dropped, it)
}

// dropped reports whether the client no longer wants the item.
func (s *session) dropped(it *item) bool { return s.items[it.name] != it }

// news records the new state of a name.
func (s *session) news(it *item, st *state) {
	if !s.dropped(it) {
		it.cur = st
		s.enqueue(it)
	}
}

func (s *session) enqueue(it *item) {
	if !it.queued {
		it.queued = true
		s.queue = append(s.queue, it)
	}
}

// next returns the response to send now, or nil. The caller sends it or ends the stream.
func (s *session) next() *response {
	if s.awaiting || len(s.queue)+len(s.over) == 0 {
		return nil
	}
	r := s.collect()
	if len(r.entries) == 0 && len(r.removed) == 0 {
		return nil // the client already has all of it, and each item waits only once
	}
	s.serial++
	s.awaiting = true
	r.nonce, r.push = s.nonce(), &report.Push{Version: r.version.String(), Names: r.names()}
	s.pushed = r.push
	return r
}

// collect takes as much news from the queue as fits into a response.
func (s *session) collect() *response {
	r := response{delta: s.delta}
	size, done := 0, 0
	for _, it := range s.queue {
		if size >= maxResponse {
			break
		}
		done++
		it.queued = false
		if s.settled(it) {
			size += s.include(it, &r)
		}
	}
	for name := range s.over {
		if s.bytes -= len(name); s.items[name] == nil { // it still exceeds the limit
			r.removed = append(r.removed, name)
		}
	}
	s.over = nil
	s.queue = slices.Delete(s.queue, 0, done)
	r.version = s.version
	return &r
}

// settled reports whether there is something to tell the client about a name that it wants. It asks allow about
// content.
func (s *session) settled(it *item) bool {
	if s.dropped(it) || it.cur == nil || it.cur.err != nil {
		return false
	}
	if it.cur.entry != nil && s.allow != nil {
		if it.denied = !s.allow(it); it.denied {
			it.cur = absent
		}
	}
	return it.cur != nil
}

// include adds the news of a name to a response, and returns its size.
func (s *session) include(it *item, r *response) (size int) {
	switch e := it.cur.entry; {
	case e != nil && it.sent != e.version:
		r.entries = append(r.entries, e)
		s.mark(it, e.version)
		return len(e.any)
	case e == nil && s.delta && !it.told:
		r.removed = append(r.removed, it.name)
		s.mark(it, version{})
		it.told = true
		return len(it.name)
	}
	return 0
}

// mark notes which version of the item the client has.
func (s *session) mark(it *item, v version) {
	s.version = s.version.xor(it.sent).xor(v)
	it.sent, it.told = v, false
}
