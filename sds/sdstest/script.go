package sdstest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

// patience is for steps that succeed at once unless the server is broken; impatience is for broken servers.
const (
	patience   = time.Minute
	impatience = 2 * time.Second
)

// player runs a script against a server.
type player struct {
	ctx      context.Context
	server   *Server
	contents *contents
	patience time.Duration
	grpc     *grpchttp.Client
	streams  map[string]*stream
	history  map[string][]string // the contents that the source has had under a name; the last is current
	fetched  string              // version of the last fetch
	ours     map[string]string   // what the scripts call a name of the server
	barriers int
	strict   bool // dropped names must not come any more
}

// stream is a client's stream and its state. The fields on the wire belong to the current connection; the others
// persist across reconnections, as in a client.
type stream struct {
	name  string
	delta bool

	on      *grpchttp.Stream // nil while there is none
	in      chan arrival
	nonces  []string
	last    *response // the last response, if it is unanswered
	wanted  map[string]bool
	dropped map[string]bool
	// the last content of each name, "-" if it does not exist; no element if it must be sent
	sent     map[string]string
	rejected map[string]string
	again    map[string]bool // requested again: the server must answer each request, even after a later rejection
	racing   bool            // the source has changed since the client was up to date

	version  string // SotW: the last accepted version
	accepted map[string]held
	seen     map[string]int // index into the history
}

// held is the content that a client has under a name.
type held struct{ word, version string }

type arrival struct {
	msg []byte
	err error
}

// play runs the lines of a script.
func play(ctx context.Context, server *Server, contents *contents, patience time.Duration, lines []string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &player{
		ctx: ctx, server: server, contents: contents, patience: patience, ours: make(map[string]string),
		grpc:    grpchttp.NewClient(server.Client, server.URL, 16<<20),
		streams: make(map[string]*stream), history: make(map[string][]string),
	}
	defer func() {
		for _, s := range p.streams {
			s.close()
		}
	}()
	for n, line := range lines {
		if err := p.line(line); err != nil {
			return fmt.Errorf("line %d, %q: %w", n+1, line, err)
		}
	}
	return nil
}

// expand returns the names that words stand for.
func expand(words []string) []string {
	var names []string
	for _, w := range words {
		switch {
		case w == "_":
			names = append(names, "")
		case strings.HasPrefix(w, "@"):
			names = append(names, strings.Repeat("x", number(w[1:])))
		case strings.HasPrefix(w, "#"):
			for i := range number(w[1:]) {
				names = append(names, fmt.Sprintf("n%d", i+1))
			}
		default:
			names = append(names, w)
		}
	}
	return names
}

func (p *player) line(line string) error {
	words := strings.Fields(line)
	if line == "finish" {
		return p.finish()
	}
	if len(words) < 2 {
		return errors.New("too few words")
	}
	switch words[0] {
	case "set":
		return p.set(words[1], words[len(words)-1])
	case "fetch":
		return p.fetch(words[1:])
	}
	s := p.streams[words[0]]
	if s == nil {
		s = &stream{name: words[0], delta: strings.HasPrefix(words[0], "d"), accepted: make(map[string]held),
			seen: make(map[string]int)}
		p.streams[s.name] = s
	}
	args := words[2:]
	switch words[1] {
	case "ask":
		return p.send(s, &request{names: expand(args), nonce: s.nonce(), what: s.newest()})
	case "sub":
		return p.send(s, &request{delta: true, names: expand(args)})
	case "unsub":
		return p.send(s, &request{delta: true, drop: expand(args)})
	case "ack", "nack":
		return p.answer(s, words[1] == "nack")
	case "send":
		return p.sendFields(s, args)
	case "raw":
		p.open(s)
		return s.on.Send([]byte(strings.Join(args, " ")))
	case "want":
		return p.want(s, args)
	case "sync":
		return p.sync(s, args[0] == "nack")
	case "barrier":
		return p.barrier(s)
	case "flush":
		return p.flush(s)
	case "quiet":
		if s.on == nil {
			return errors.New("the stream is not open")
		}
		s.on.CloseSend()
		if _, err := p.receive(s); err != io.EOF {
			return fmt.Errorf("it does not end with OK: %w", cause(err))
		}
		return nil
	case "ends":
		_, err := p.receive(s)
		return endsWith(args, err)
	case "close":
		s.close()
		return nil
	}
	return fmt.Errorf("there is no %q", words[1])
}

// endsWith returns an error unless the server has ended a call with one of these codes.
func endsWith(codes []string, err error) error {
	if e, ok := errors.AsType[*grpchttp.Error](err); ok && e.Remote && slices.Contains(codes, e.Code.String()) {
		return nil
	}
	return fmt.Errorf("it does not end with %s: %w", strings.Join(codes, " or "), cause(err))
}

func cause(err error) error {
	if err == nil {
		return errors.New("there is a response")
	}
	return err
}

// theirs returns the server's name for what the scripts call name.
func (p *player) theirs(name string) string {
	if p.server.Name == nil || name == "" || name == "*" {
		return name
	}
	theirs := p.server.Name(name)
	p.ours[theirs] = name
	return theirs
}

// set changes the source.
func (p *player) set(name, word string) error {
	s, err := p.contents.secret(p.theirs(name), word)
	if err != nil {
		return err
	}
	if p.history[name] == nil {
		p.history[name] = []string{"-"}
	}
	p.history[name] = append(p.history[name], word) // before the server has it
	for _, s := range p.streams {
		s.racing = true
	}
	p.server.Set(p.theirs(name), s)
	return nil
}

// current returns what the source has under a name.
func (p *player) current(name string) string {
	h := p.history[name]
	if len(h) == 0 {
		return "-"
	}
	return h[len(h)-1]
}

// open begins a stream, unless there is one already.
func (p *player) open(s *stream) {
	if s.on != nil {
		return
	}
	method := "StreamSecrets"
	if s.delta {
		method = "DeltaSecrets"
	}
	on, in := p.grpc.Open(p.ctx, service+method, nil), make(chan arrival)
	s.on, s.in, s.nonces, s.last = on, in, nil, nil
	s.wanted, s.dropped, s.again = make(map[string]bool), make(map[string]bool), make(map[string]bool)
	s.sent, s.rejected = make(map[string]string), make(map[string]string)
	go func() {
		defer close(in)
		for {
			msg, err := on.Receive()
			select {
			case in <- arrival{msg, err}:
			case <-p.ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
}

// close ends a stream without notice, like a client that goes away.
func (s *stream) close() {
	if s.on == nil {
		return
	}
	_ = s.on.Close()
	go func(in chan arrival) { // responses that have arrived are lost
		for range in {
		}
	}(s.in)
	s.on = nil
}

func (s *stream) nonce() string {
	if len(s.nonces) == 0 {
		return ""
	}
	return s.nonces[len(s.nonces)-1]
}

// newest returns the version of a client that accepts the last response.
func (s *stream) newest() string {
	if s.last != nil {
		return s.last.version
	}
	return s.version
}

// send sends a request, and records its effect.
func (p *player) send(s *stream, r *request) error {
	r.delta = s.delta
	switch r.typeURL {
	case "":
		r.typeURL = secretURL
	case "none":
		r.typeURL = ""
	}
	p.open(s)
	msg, err := r.encode(p.theirs)
	if err != nil {
		return err
	}
	answers := len(s.nonces) > 0 && r.nonce == s.nonce()
	if answers {
		s.take(r.reason != "")
	}
	if s.delta || answers || r.nonce == "" || len(s.nonces) == 0 { // otherwise it is stale
		s.wants(r)
	}
	_ = s.on.Send(msg) // Receive returns the reason for a failure
	return nil
}

// take records that the client accepts or rejects the last response.
func (s *stream) take(rejected bool) {
	if s.last == nil {
		return
	}
	for _, it := range s.last.items {
		if rejected {
			s.rejected[it.name] = it.word
		} else {
			s.accepted[it.name] = held{it.word, it.version}
		}
	}
	if !rejected {
		s.version = s.last.version
		for _, name := range s.last.removed {
			delete(s.accepted, name)
		}
	}
	s.last = nil
}

// wants records the names that the client wants from now on.
func (s *stream) wants(r *request) {
	drop := func(name string) {
		if s.wanted[name] {
			delete(s.wanted, name)
			s.dropped[name] = true
		}
	}
	if s.delta {
		for _, name := range r.drop {
			drop(name)
		}
	} else {
		for name := range maps.Clone(s.wanted) {
			if !slices.Contains(r.names, name) {
				drop(name)
			}
		}
	}
	racing := s.racing || s.last != nil
	for _, name := range r.names {
		if name == "" || !s.delta && s.wanted[name] {
			continue
		}
		s.racing = true
		s.again[name] = s.wanted[name] || s.dropped[name]
		s.wanted[name] = true
		delete(s.rejected, name)
		// In SotW a server may not know that the name was dropped, if that request was already stale.
		if s.delta || !racing {
			delete(s.sent, name)
		}
		if version, ok := r.have[name]; ok && version == s.accepted[name].version {
			s.sent[name] = s.accepted[name].word
		}
	}
}

// answer acknowledges or rejects the last response.
func (p *player) answer(s *stream, reject bool) error {
	if len(s.nonces) == 0 {
		return errors.New("there is nothing to answer")
	}
	r := &request{nonce: s.nonce(), what: s.newest()}
	if reject {
		r.what, r.reason = s.version, "rejected by the script"
	}
	if !s.delta {
		r.names = slices.Sorted(maps.Keys(s.wanted))
	}
	return p.send(s, r)
}

// sendFields sends a request with the fields in a script.
func (p *player) sendFields(s *stream, fields []string) error {
	var r request
	for _, f := range fields {
		key, value, _ := strings.Cut(f, "=")
		var list []string
		if value != "" {
			list = expand(strings.Split(value, ","))
		}
		switch key {
		case "names", "sub":
			r.names = list
		case "unsub":
			r.drop = list
		case "have":
			r.have = make(map[string]string)
			for _, entry := range list {
				name, version, ok := strings.Cut(entry, ":")
				if !ok {
					version = s.accepted[name].version
				}
				r.have[name] = version
			}
		case "nonce":
			switch r.nonce = value; {
			case value == "last":
				r.nonce = s.nonce()
			case value == "prev" && len(s.nonces) > 1:
				r.nonce = s.nonces[len(s.nonces)-2]
			}
		case "version":
			if r.what = value; value == "last" {
				r.what = s.newest()
			}
		case "type":
			r.typeURL = value
		case "node":
			r.node = value
		case "error":
			r.reason = value
		default:
			return fmt.Errorf("there is no field %q", key)
		}
	}
	return p.send(s, &r)
}

// receive returns the next response, after it has checked it and recorded its effect.
func (p *player) receive(s *stream) (*response, error) {
	if s.on == nil {
		return nil, errors.New("the stream is not open")
	}
	timer := time.NewTimer(p.patience)
	defer timer.Stop()
	var a arrival
	select {
	case got, ok := <-s.in:
		if a = got; !ok {
			return nil, errors.New("the stream has ended before")
		}
	case <-timer.C:
		return nil, fmt.Errorf("nothing comes for %v", p.patience)
	case <-p.ctx.Done():
		return nil, context.Cause(p.ctx)
	}
	if a.err != nil {
		return nil, a.err
	}
	r, err := p.contents.decode(a.msg, s.delta, p.ours)
	if err != nil {
		return nil, err
	}
	switch {
	case r.nonce == "" || slices.Contains(s.nonces, r.nonce):
		return nil, fmt.Errorf("the nonce %q is empty, or was there before", r.nonce)
	case !s.delta && r.version == "":
		return nil, errors.New("the response has no version")
	}
	s.nonces, s.last = append(s.nonces, r.nonce), r
	names := make(map[string]bool)
	for _, it := range r.items {
		if err := p.check(s, it, names); err != nil {
			return nil, err
		}
	}
	for _, name := range r.removed {
		if err := p.check(s, item{name: name, word: "-"}, names); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// check checks an item of a response against the rules; names are the names of the items before it.
func (p *player) check(s *stream, it item, names map[string]bool) error {
	wild := len(s.wanted) == 0 || s.wanted["*"] // in a case that lists its names
	switch {
	case names[it.name]:
		return fmt.Errorf("%q is there twice", it.name)
	case !s.wanted[it.name] && !wild && (p.strict || !s.dropped[it.name]):
		return fmt.Errorf("%q=%s comes, which the client does not want", it.name, it.word)
	case it.word != "-" && s.rejected[it.name] == it.word && !s.again[it.name]:
		return fmt.Errorf("%q=%s comes again, which the client has rejected", it.name, it.word)
	}
	names[it.name] = true
	if old, ok := s.accepted[it.name]; ok && s.delta && it.word != "-" && old.word != it.word &&
		old.version == it.version {
		return fmt.Errorf("%q has the version %q with other content", it.name, it.version)
	}
	delete(s.rejected, it.name)
	if it.name == "*" && it.word == "-" {
		return nil
	}
	h := p.history[it.name]
	if len(h) == 0 {
		h = []string{"-"}
	}
	i := s.seen[it.name]
	n := slices.Index(h[min(i, len(h)):], it.word)
	if n < 0 {
		return fmt.Errorf("%q=%s comes, which the source does not have; it has had %q since what came last", it.name,
			it.word, h[i:])
	}
	s.seen[it.name], s.sent[it.name] = i+n, it.word
	return nil
}

// want receives exactly these items.
func (p *player) want(s *stream, items []string) error {
	left := make(map[string]bool)
	for _, it := range items {
		left[it] = true
	}
	for {
		r, err := p.receive(s)
		if err != nil {
			return err
		}
		var got []string
		for _, it := range r.items {
			got = append(got, it.name+"="+it.word)
		}
		for _, name := range r.removed {
			got = append(got, "-"+name)
		}
		for _, it := range got {
			if !left[it] {
				return fmt.Errorf("a response has %q, of which %q is not due", got, it)
			}
			delete(left, it)
		}
		if len(left) == 0 {
			return nil
		}
		if err := p.answer(s, false); err != nil {
			return err
		}
	}
}

// due returns a name for which the client does not have the source's content yet.
func (p *player) due(s *stream) (name string, ok bool) {
	for _, name := range slices.Sorted(maps.Keys(s.wanted)) {
		current := p.current(name)
		if s.sent[name] != current && (s.delta || current != "-") {
			return name, true
		}
	}
	return "", false
}

// sync receives and answers until the client is up to date.
func (p *player) sync(s *stream, reject bool) error {
	p.open(s)
	for {
		if s.last != nil {
			if err := p.answer(s, reject); err != nil {
				return err
			}
		}
		name, wait := p.due(s)
		if !wait {
			return nil
		}
		if _, err := p.receive(s); err != nil {
			return fmt.Errorf("%q is due as %q, and was last sent as %q: %w", name, p.current(name), s.sent[name], err)
		}
	}
}

// barrier requests one more name, which exists, and receives only that: earlier requests are then handled.
func (p *player) barrier(s *stream) error {
	p.barriers++
	name := fmt.Sprintf("barrier-%d", p.barriers)
	if err := p.ask(s, name); err != nil {
		return err
	}
	if err := p.want(s, []string{name + "=1"}); err != nil {
		return err
	}
	return p.answer(s, false)
}

// flush requests one more name, and receives and answers until the client has that name and everything else due.
func (p *player) flush(s *stream) error {
	p.barriers++
	if err := p.ask(s, fmt.Sprintf("flush-%d", p.barriers)); err != nil {
		return err
	}
	err := p.sync(s, false)
	s.racing = false // later changes may arrive late
	return err
}

// ask creates one more name, and requests it.
func (p *player) ask(s *stream, name string) error {
	if err := p.set(name, "1"); err != nil {
		return err
	}
	r := &request{names: []string{name}}
	if !s.delta {
		r.names, r.nonce, r.what = append(slices.Sorted(maps.Keys(s.wanted)), name), s.nonce(), s.newest()
	}
	return p.send(s, r)
}

// names returns the names that the source has had, sorted.
func (p *player) names() []string { return slices.Sorted(maps.Keys(p.history)) }

func (p *player) sorted() []*stream {
	return slices.SortedFunc(maps.Values(p.streams), func(a, b *stream) int { return strings.Compare(a.name, b.name) })
}

// fetch runs a line with a fetch.
func (p *player) fetch(words []string) error {
	r, verb, args, err := p.fetchRequest(words)
	if err != nil {
		return err
	}
	msg, err := r.encode(p.theirs)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, p.patience)
	defer cancel()
	answer, err := p.grpc.Unary(ctx, service+"FetchSecrets", nil, msg)
	if verb == "ends" {
		return endsWith(args, err)
	}
	if err != nil {
		return err
	}
	resp, err := p.contents.decode(answer, false, p.ours)
	if err != nil {
		return err
	}
	p.fetched = resp.version
	var got []string
	for _, it := range resp.items {
		got = append(got, it.name+"="+it.word)
	}
	slices.Sort(got)
	want := slices.Sorted(slices.Values(args))
	if !slices.Equal(got, want) || resp.version == "" {
		return fmt.Errorf("the answer has %q and the version %q, want %q", got, resp.version, want)
	}
	return nil
}

// fetchRequest parses a line with a fetch.
func (p *player) fetchRequest(words []string) (r request, verb string, args []string, err error) {
	i := slices.IndexFunc(words, func(w string) bool { return w == "want" || w == "ends" })
	if i < 0 {
		return r, "", nil, errors.New("it does not say what to expect")
	}
	r.typeURL = secretURL
	for _, w := range words[:i] {
		switch key, value, ok := strings.Cut(w, "="); {
		case !ok:
			r.names = append(r.names, expand([]string{w})...)
		case key == "version":
			if r.what = value; value == "last" {
				r.what = p.fetched
			}
		case key == "nonce":
			r.nonce = value
		case key == "type":
			r.typeURL = value
		case key == "node":
			r.node = value
		default:
			return r, "", nil, fmt.Errorf("there is no field %q", key)
		}
	}
	return r, words[i], words[i+1:], nil
}
