package sds

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
)

// driver drives a session like a stream does, with a world of names to values in place of a source.
// Values are small; an entry's version is its name and value.
type driver struct {
	t     testing.TB
	s     *session
	world map[string]string // a name that is missing does not exist; "?" is one that is not looked up yet
	watch map[string]*item
}

func drive(t testing.TB, delta bool, world map[string]string) *driver {
	d := &driver{t: t, s: newSession(delta, 5), world: world, watch: make(map[string]*item)}
	d.s.stamp = ""
	return d
}

func fakeEntry(name, value string) *entry {
	e := &entry{name: name, any: []byte(name + "=" + value)}
	copy(e.version[:8], value)
	copy(e.version[8:], name)
	return e
}

func (d *driver) look(it *item) {
	switch value, ok := d.world[it.name]; {
	case !ok:
		d.s.news(it, &state{})
	case value != "?":
		d.s.news(it, &state{entry: fakeEntry(it.name, value)})
	}
}

// send hands over a request and returns what it did.
func (d *driver) send(r request) (outcome, error) {
	out, err := d.s.request(&r)
	for _, it := range out.dropped {
		delete(d.watch, it.name)
	}
	for _, it := range out.added {
		d.watch[it.name] = it
		d.look(it)
	}
	return out, err
}

// set changes the world. An empty value removes the name.
func (d *driver) set(name, value string) {
	if d.world[name] = value; value == "" {
		delete(d.world, name)
	}
	if it := d.watch[name]; it != nil {
		d.look(it)
	}
}

// receive returns the next response as text, such as "#1 a=1 b=1 -c", or "" if there is none.
func (d *driver) receive() string {
	r := d.s.next()
	if r == nil {
		return ""
	}
	parts := []string{"#" + r.nonce}
	for _, e := range r.entries {
		parts = append(parts, string(e.any))
	}
	for _, name := range r.removed {
		parts = append(parts, "-"+name)
	}
	return strings.Join(parts, " ")
}

// step is one thing that happens to a stream, and the response that it leads to.
type step struct {
	request *request
	set     [2]string // name, value
	want    string
	nack    bool
}

func ask(names ...string) *request { return &request{names: names} }

func ack(nonce string, names ...string) *request { return &request{nonce: nonce, names: names} }

func reject(nonce string, names ...string) *request {
	return &request{nonce: nonce, names: names, rejected: true, reason: "bad"}
}

// What package sdstest cannot see from outside: what the session knows of a request, names that are not looked up yet, and
// that a response waits until the one before it was answered.
func TestSession(t *testing.T) {
	t.Parallel()
	sub := func(nonce string, names ...string) *request { return &request{nonce: nonce, names: names} }
	tests := map[string]struct {
		delta bool
		world map[string]string
		steps []step
	}{
		"SotW: a stale rejection is no rejection": {
			world: map[string]string{"a": "1"},
			steps: []step{
				{request: ask("a"), want: "#1 a=1"}, {request: ack("1", "a")}, {set: [2]string{"a", "2"}, want: "#2 a=2"},
				{request: reject("1", "a")},
			},
		},
		"SotW: a rejection is recorded and the same not sent again; what is new is": {
			world: map[string]string{"a": "1"},
			steps: []step{
				{request: ask("a"), want: "#1 a=1"},
				{request: reject("1", "a"), nack: true},
				{set: [2]string{"a", "1"}},
				{set: [2]string{"a", "2"}, want: "#2 a=2"},
				{request: ack("2", "a")},
			},
		},
		"SotW: what was rejected is not sent again, unless something else was in between": {
			world: map[string]string{"a": "1"},
			steps: []step{
				{request: ask("a"), want: "#1 a=1"},
				{request: ack("1", "a")},
				{set: [2]string{"a", "2"}, want: "#2 a=2"},
				{set: [2]string{"a", "3"}}, {set: [2]string{"a", "2"}},
				{request: reject("2", "a"), nack: true},
				{set: [2]string{"a", "2"}},
				{set: [2]string{"a", "1"}, want: "#3 a=1"},
				{request: ack("3", "a")},
				{set: [2]string{"a", "2"}, want: "#4 a=2"},
				{set: [2]string{"a", "1"}},
				{request: reject("4", "a"), nack: true, want: "#5 a=1"},
				{request: reject("5", "a"), nack: true},
				{set: [2]string{"a", "1"}},
				{set: [2]string{"a", "2"}, want: "#6 a=2"},
			},
		},
		"delta: what was rejected is not sent again, unless something else was in between": {
			delta: true,
			world: map[string]string{"a": "1"},
			steps: []step{
				{request: ask("a"), want: "#1 a=1"},
				{request: ack("1")},
				{set: [2]string{"a", "2"}, want: "#2 a=2"},
				{set: [2]string{"a", "3"}}, {set: [2]string{"a", "2"}},
				{request: reject("2"), nack: true},
				{set: [2]string{"a", "2"}},
				{set: [2]string{"a", "1"}, want: "#3 a=1"},
				{request: ack("3")},
				{set: [2]string{"a", "2"}, want: "#4 a=2"},
				{set: [2]string{"a", "1"}},
				{request: reject("4"), nack: true, want: "#5 a=1"},
				{request: reject("5"), nack: true},
				{set: [2]string{"a", "1"}},
				{set: [2]string{"a", "2"}, want: "#6 a=2"},
			},
		},
		"SotW: a rejection counts once": {
			world: map[string]string{"a": "1"},
			steps: []step{{request: ask("a"), want: "#1 a=1"}, {request: reject("1", "a"), nack: true}, {request: reject("1", "a")}},
		},
		"SotW: a rejection when nothing is wanted": {
			world: map[string]string{"a": "1"},
			steps: []step{{request: reject("")}, {request: ask("a"), want: "#1 a=1"}, {request: reject("1"), nack: true}},
		},
		"SotW: names that are not looked up yet": {
			world: map[string]string{"x": "?"},
			steps: []step{{request: ask("x")}, {set: [2]string{"x", "1"}, want: "#1 x=1"}},
		},
		"SotW: while a response is out, the newest of each waits": {
			world: map[string]string{"a": "1", "b": "1"},
			steps: []step{
				{request: ask("a", "b"), want: "#1 a=1 b=1"},
				{set: [2]string{"a", "2"}}, {set: [2]string{"b", "2"}}, {set: [2]string{"a", "3"}}, {set: [2]string{"b", "1"}},
				{request: ack("1", "a", "b"), want: "#2 a=3"},
			},
		},
		"SotW: what is dropped while it waits is not sent": {
			world: map[string]string{"a": "1", "b": "1"},
			steps: []step{
				{request: ask("a", "b"), want: "#1 a=1 b=1"}, {set: [2]string{"a", "2"}}, {set: [2]string{"b", "2"}},
				{request: ack("1", "b"), want: "#2 b=2"},
			},
		},
		"delta: a name that is not looked up yet is not said to be unknown": {
			delta: true,
			world: map[string]string{"x": "?"},
			steps: []step{{request: sub("", "x")}, {set: [2]string{"x", "1"}, want: "#1 x=1"}},
		},
		"delta: a name that comes and goes while a response is out": {
			delta: true,
			world: map[string]string{"a": "1"},
			steps: []step{
				{request: sub("", "a", "x"), want: "#1 a=1 -x"}, {set: [2]string{"x", "1"}}, {set: [2]string{"x", ""}},
				{set: [2]string{"a", ""}}, {request: sub("1"), want: "#2 -a"},
			},
		},
		"delta: versions brought along": {
			delta: true,
			world: map[string]string{"same": "1", "other": "2", "late": "?"},
			steps: []step{
				{
					request: &request{names: []string{"same", "other", "gone", "late"}, have: map[string]string{
						"same": fakeEntry("same", "1").version.String(), "other": "1", "gone": "1",
						"late": fakeEntry("late", "7").version.String(), "never asked for": "1",
					}},
					want: "#1 other=2 -gone",
				},
				{request: sub("1")},
				{set: [2]string{"same", "2"}, want: "#2 same=2"}, {request: sub("2")},
				{set: [2]string{"late", "7"}}, {set: [2]string{"late", "8"}, want: "#3 late=8"},
			},
		},
		"delta: a rejection is recorded and the same not sent again": {
			delta: true,
			world: map[string]string{"a": "1"},
			steps: []step{
				{request: sub("", "a"), want: "#1 a=1"}, {request: &request{nonce: "1", rejected: true}, nack: true},
				{set: [2]string{"a", "1"}}, {set: [2]string{"a", "2"}, want: "#2 a=2"},
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			world := maps.Clone(test.world)
			if world == nil {
				world = make(map[string]string)
			}
			d := drive(t, test.delta, world)
			for i, step := range test.steps {
				where := fmt.Sprintf("step %d", i+1)
				if step.request != nil {
					out, err := d.send(*step.request)
					require.NoError(t, err, where)
					assert.Equal(t, step.nack, out.nack != nil, where)
				} else {
					d.set(step.set[0], step.set[1])
				}
				require.Equal(t, step.want, d.receive(), where)
			}
		})
	}
}

// Resolve is asked when a secret is sent: what waited for an acknowledgement may be refused by then,
// and allowed again when it is asked for once more.
func TestSessionAllows(t *testing.T) {
	t.Parallel()
	for _, delta := range []bool{false, true} {
		d := drive(t, delta, map[string]string{"a": "1", "b": "1"})
		denied := ""
		var questions []string
		d.s.allow = func(it *item) bool {
			questions = append(questions, it.name)
			return it.name != denied
		}
		send := func(r *request) string {
			must.Get(d.send(*r))(t)
			return d.receive()
		}
		assert.Equal(t, "#1 a=1", send(ask("a")))
		assert.Empty(t, send(ask("a", "b")))
		denied = "b"
		if !delta {
			assert.Empty(t, send(ack("1", "a", "b")))
			assert.Equal(t, []string{"a", "b"}, questions, "once, when it is about to go")
			d.set("b", "2")
			assert.Empty(t, d.receive())
			denied = ""
			d.set("b", "3")
			assert.Equal(t, "#2 b=3", d.receive())
			continue
		}
		assert.Equal(t, "#2 a=1 -b", send(ack("1")))
		denied = ""
		assert.Empty(t, send(ack("2")))
		assert.Equal(t, "#3 b=1", send(ask("b")), "each subscription is answered")
		denied = "b"
		assert.Equal(t, "#4 -b", send(ack("3", "b")), "what it had before, too")
	}
}

// codeOf returns the code of gRPC that an error has.
func codeOf(t testing.TB, err error) grpchttp.Code {
	t.Helper()
	e, ok := errors.AsType[*grpchttp.Error](err)
	require.True(t, ok, "%v", err)
	return e.Code
}

func TestSessionRefuses(t *testing.T) {
	t.Parallel()
	many := []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"}
	tests := map[string]struct {
		request request
		code    grpchttp.Code
	}{
		"other type":     {request{typeURL: "type.googleapis.com/envoy.config.cluster.v3.Cluster"}, grpchttp.InvalidArgument},
		"too many names": {request{names: many}, grpchttp.ResourceExhausted},
	}
	for name, test := range tests {
		for _, delta := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, delta %v", name, delta), func(t *testing.T) {
				t.Parallel()
				_, err := drive(t, delta, nil).send(test.request)
				assert.Equal(t, test.code, codeOf(t, err))
			})
		}
	}
	t.Run("delta refuses one by one, over requests", func(t *testing.T) {
		t.Parallel()
		d := drive(t, true, map[string]string{"1": "1", "6": "1", "7": "1"})
		out := must.Get(d.send(request{names: many[:4]}))(t)
		assert.Zero(t, out.over)
		assert.Equal(t, "#1 1=1 -2 -3 -4", d.receive())
		bytes := d.s.bytes
		out = must.Get(d.send(request{names: []string{"3", "5", "6", "6"}}))(t)
		assert.Equal(t, 2, out.over)
		assert.Empty(t, d.receive(), "the first response is not answered yet")
		assert.Equal(t, bytes+2, d.s.bytes, "what waits is counted")
		must.Get(d.send(request{nonce: "1", drop: many[1:4], names: []string{"7"}}))(t)
		assert.Equal(t, "#2 7=1 -5 -6", d.receive())
		assert.Equal(t, 3, d.s.bytes)
		must.Get(d.send(request{nonce: "2", names: []string{"6"}}))(t)
		assert.Equal(t, "#3 6=1", d.receive(), "there is room again")
	})
	t.Run("delta, of a client that answers nothing", func(t *testing.T) {
		t.Parallel()
		d := drive(t, true, map[string]string{})
		must.Get(d.send(request{names: many[:10]}))(t)
		_, err := d.send(request{names: many[4:]})
		assert.Equal(t, grpchttp.ResourceExhausted, codeOf(t, err))
	})
	t.Run("SotW counts the wanted ones", func(t *testing.T) {
		t.Parallel()
		d := drive(t, false, map[string]string{})
		must.Get(d.send(request{names: many[:5]}))(t)
		must.Get(d.send(request{names: many[1:6]}))(t)
		assert.Len(t, d.s.items, 5)
	})
	t.Run("own type", func(t *testing.T) {
		t.Parallel()
		must.Get(drive(t, false, map[string]string{}).send(request{typeURL: typeURL, names: []string{"a"}}))(t)
	})
}

func TestSessionNode(t *testing.T) {
	t.Parallel()
	d := drive(t, false, map[string]string{"a": "1"})
	for _, r := range []request{{names: []string{"a"}}, {node: "first", names: []string{"a"}}, {names: []string{"a"}}, {node: "second", names: []string{"a"}}} {
		must.Get(d.send(r))(t)
	}
	require.Equal(t, "#1 a=1", d.receive())
	out, err := d.send(request{nonce: "1", names: []string{"a"}, rejected: true, reason: strings.Repeat("é", maxText)})
	require.NoError(t, err)
	assert.Equal(t, "first", out.nack.Client)
	assert.Equal(t, []string{"a"}, out.nack.Names)
	assert.Equal(t, fakeEntry("a", "1").version.String(), out.nack.Version)
	assert.Len(t, out.nack.Message, maxText)
}

// The version of a response depends on what the client then has, not on the way there.
func TestSessionVersion(t *testing.T) {
	t.Parallel()
	world := func() map[string]string { return map[string]string{"a": "1", "b": "1"} }
	straight := drive(t, false, world())
	must.Get(straight.send(*ask("a", "b")))(t)
	want := straight.s.next().version

	crooked := drive(t, false, world())
	for _, r := range []*request{ask("b"), ack("1", "b", "c", "a"), ack("2", "a"), ack("2", "a", "b")} {
		must.Get(crooked.send(*r))(t)
		if resp := crooked.s.next(); resp != nil && len(crooked.s.items) == 2 {
			assert.Equal(t, want, resp.version)
		}
	}
	assert.Equal(t, want, crooked.s.version)

	single := drive(t, false, world())
	must.Get(single.send(*ask("a")))(t)
	assert.Equal(t, fakeEntry("a", "1").version, single.s.next().version)
}

// Many large secrets go out in several responses.
func TestSessionSplits(t *testing.T) {
	t.Parallel()
	s := newSession(false, 10)
	out := must.Get(s.request(ask("a", "b", "c", "d", "e")))(t)
	for _, it := range out.added {
		e := fakeEntry(it.name, it.name)
		e.any = make([]byte, maxResponse/2)
		s.news(it, &state{entry: e})
	}
	var got []int
	for r := s.next(); r != nil; r = s.next() {
		got = append(got, len(r.entries))
		must.Get(s.request(ack(r.nonce, "a", "b", "c", "d", "e")))(t)
	}
	assert.Equal(t, []int{2, 2, 1}, got)
}

// A client that asks and drops for ever, and answers nothing, costs no more than its names.
func TestSessionChurn(t *testing.T) {
	t.Parallel()
	d := drive(t, true, map[string]string{"a": "1", "b": "1"})
	for range 1000 {
		for _, r := range []request{{names: []string{"a", "b"}}, {drop: []string{"a", "b"}}} {
			must.Get(d.send(r))(t)
			d.s.next()
		}
	}
	assert.Empty(t, d.s.items)
	assert.LessOrEqual(t, cap(d.s.queue), 16)
	assert.Equal(t, uint64(1), d.s.serial)
}
