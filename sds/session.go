package sds

import (
	"slices"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/spiffe/report"
)

// session is the protocol state of one stream, without the transport: requests and news about names go in, responses
// come out. One goroutine at a time uses it.
//
// At most one response is unanswered at a time. News that arrives meanwhile waits, by name, and the next response has
// the newest of each, so a session's memory is bounded by its names.
type session struct {
	delta    bool
	maxNames int
	maxBytes int // of all names together
	frames   *frames

	// allow decides about content before it is sent, which may be long after it became known, and whenever there is
	// news about it; nil allows all. Content that it refuses does not exist for the client until there is news again.
	// It sets the item's cur to nil if the client is to get other content, about which there will be news.
	allow func(*item) bool

	items    map[string]*item
	over     map[string]bool // delta: names without room; the client is still to be told that they do not exist
	queue    []*item         // those with news, oldest first; may have dropped ones
	version  version         // of what the client was sent of the names it still wants
	last     label           // of the last response; zero if there was none
	awaiting bool            // the last response is neither acknowledged nor rejected
	begun    bool            // there was a request
	bytes    int             // of the names of all items
	node     string
	round    uint64 // marks the items that a request names
}

// item is one name that the client wants.
type item struct {
	name   string
	cur    *state  // the newest; nil or with an error if that is not known
	sent   version // what the client was sent last, or says that it brought; zero if nothing
	told   bool    // delta: the client was told that there is no such name
	queued bool
	round  uint64

	denied bool   // allow has refused it
	watch  *watch // the stream's; not used here
}

// absent is the state of a name that does not exist for the client.
var absent = &state{}

// outcome is what a request did to a session.
type outcome struct {
	stale   bool         // SotW: an answer to an old response; nothing was done
	nack    *report.Push // the client rejected the last response
	added   []*item      // names that were not wanted before
	again   []*item      // delta: that are denied, and asked for once more
	dropped []*item      // and that are no longer
	over    int          // delta: how many names found no room
}

func newSession(delta bool, maxNames int, frames *frames) *session {
	return &session{
		delta: delta, maxNames: maxNames, maxBytes: max(maxNameBytes, nameBytes*maxNames),
		frames: frames, items: make(map[string]*item),
	}
}

// request takes one request. An error is for the client, and ends the stream.
func (s *session) request(r *request) (outcome, error) {
	var out outcome
	if r.typeURL != "" && r.typeURL != typeURL {
		return out, grpchttp.Errorf(grpchttp.InvalidArgument,
			"sds: type URL %q: this service has %s only", clip(r.typeURL), typeURL)
	}
	if s.node == "" {
		s.node = clip(r.node) // later requests may leave it out
	}
	switch first, answer := s.last.serial == 0, r.nonce == s.last.nonce; {
	case answer && s.awaiting:
		if r.rejected {
			out.nack = &report.Push{
				NACK: true, Names: s.last.names, Version: s.last.version, Client: s.node, Message: clip(r.reason),
			}
		}
		s.awaiting = false
	case !s.delta && !answer && r.nonce != "" && !first:
		// The client will answer the newer response as well, and name again what it wants. Before
		// our first response a nonce is one of an older stream, and the request is a first one.
		out.stale = true
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
		err = errTooLong(s.maxBytes)
	}
	if len(s.queue) > 2*len(s.items) {
		s.queue = slices.DeleteFunc(s.queue, s.dropped) // which is not counted any more
	}
	return out, err
}

// replace makes the names of a SotW request the wanted ones.
func (s *session) replace(r *request, out *outcome) error {
	s.round++
	wanted := 0
	for _, name := range r.names {
		if it := s.add(name, out); it.round != s.round {
			it.round = s.round
			wanted++
		}
	}
	if wanted > s.maxNames {
		return errTooMany(s.maxNames)
	}
	for _, it := range s.items {
		if it.round != s.round {
			s.drop(it, out)
		}
	}
	return nil
}

// change applies a delta request. What is dropped goes first, so that a name in both lists stays.
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
			out.again = append(out.again, it)
		}
		s.forget(it) // each subscription is answered: the client may have lost what it had
	}
	for name, v := range r.have {
		if it := s.items[name]; it != nil && !s.begun { // later ones are not believed
			s.mark(it, parseVersion(v))
		}
	}
	return nil
}

// refuse notes a name for which there is no room. It fails alone: if the stream ended, the client would come back
// with the same names, and none of them would be renewed.
func (s *session) refuse(name string, out *outcome) error {
	if out.over++; s.over[name] {
		return nil
	}
	if len(s.over) >= s.maxNames { // which a client that answers does not reach
		return errTooMany(s.maxNames)
	}
	if s.over == nil {
		s.over = make(map[string]bool)
	}
	s.over[name] = true
	s.bytes += len(name)
	return nil
}

// add returns the item with that name, and makes it if it is new.
func (s *session) add(name string, out *outcome) *item {
	it := s.items[name]
	if it == nil {
		it = &item{name: name}
		s.items[name] = it
		s.bytes += len(name)
		if name == "*" { // everything, which is nothing here
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

// dropped reports whether the client no longer wants it.
func (s *session) dropped(it *item) bool { return s.items[it.name] != it }

// forget makes the next response include it, whatever was sent before.
func (s *session) forget(it *item) {
	s.mark(it, version{})
	s.enqueue(it)
}

// news tells what is now known of a name.
func (s *session) news(it *item, st *state) {
	if !s.dropped(it) {
		it.cur = st
		s.enqueue(it)
	}
}

func (s *session) enqueue(it *item) {
	if it.queued {
		return
	}
	if len(s.queue) > 2*len(s.items) { // a client that asks and drops, and answers nothing
		s.queue = slices.DeleteFunc(s.queue, s.dropped)
	}
	it.queued = true
	s.queue = append(s.queue, it)
}

// next returns the response to send now, or nil. The caller sends it or ends the stream.
func (s *session) next() *response {
	if s.awaiting || len(s.queue)+len(s.over) == 0 {
		return nil
	}
	r := s.collect()
	if len(r.entries) == 0 && len(r.removed) == 0 {
		return nil // only news that the client has already; there is no more than one round of it
	}
	r.frame = s.frames.of(r, s.last.serial)
	s.last, s.awaiting = r.frame.label, true
	return r
}

// collect takes the news out of the queue that fits into a response.
func (s *session) collect() *response {
	var r response
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
		if s.bytes -= len(name); s.items[name] == nil { // there was no room later, either
			r.removed = append(r.removed, name)
		}
	}
	s.over = nil
	rest := copy(s.queue, s.queue[done:])
	clear(s.queue[rest:])
	s.queue = s.queue[:rest]
	r.holding = holding{s.delta, s.version}
	return &r
}

// settled reports whether the client wants a name about which there is something to say. It asks allow about content.
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

// mark notes what the client has.
func (s *session) mark(it *item, v version) {
	s.version = s.version.xor(it.sent).xor(v)
	it.sent, it.told = v, false
}
