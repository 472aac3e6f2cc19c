package sds_test

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// house is a handler whose callers have secrets of their own.
type house struct {
	*sds.Handler
	t testing.TB

	mu    sync.Mutex
	names map[string]string // caller and the name that it asks for, to the source's
}

func newHouse(t testing.TB, src sds.Source, opts sds.Options) *house {
	h := &house{t: t, names: make(map[string]string)}
	opts.Resolve = func(ctx context.Context, name string) (string, error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if source, ok := h.names[ctx.Value(callerKey{}).(string)+" "+name]; ok {
			return source, nil
		}
		return "", errors.New("not yours")
	}
	h.Handler = handler(t, src, &opts)
	return h
}

func (h *house) let(caller, name, source string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.names[caller+" "+name] = source
}

// as returns a client that is caller.
func (h *house) as(caller string) *http.Client {
	socket, _ := serve(h.t, h.Handler, func(s *unixsocket.Server) {
		s.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, callerKey{}, caller)
		}
	})
	return dial(h.t, socket)
}

// named returns s under another name.
func named(t testing.TB, s *pki.Secret, name string) *pki.Secret {
	t.Helper()
	chain, key, _ := s.KeyPair()
	roots, _ := s.Roots()
	return must.Get(pki.NewSecretPEM(name, chain, key, roots, time.Time{}))(t)
}

// quiet asserts that nothing comes on a stream before its client ends it.
func quiet(t testing.TB, s *raw) {
	t.Helper()
	require.NoError(t, s.in.Close())
	status, messages := s.status()
	assert.Equal(t, codeOK, status)
	assert.Zero(t, messages)
}

// Two callers ask one handler for "default", and each gets its own, by every method. A rotation of one is pushed to
// its streams and to no other.
func TestCallersHaveTheirOwn(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, db := m.pair("spiffe://example.org/web"), m.pair("spiffe://example.org/db")
	src.put(web.Name(), web)
	src.put(db.Name(), db)
	h := newHouse(t, src, sds.Options{})
	h.let("web", "default", web.Name())
	h.let("web", "too", web.Name())
	h.let("db", "default", db.Name())
	asWeb, asDB := h.as("web"), h.as("db")

	s, other := openSotW(t, asWeb), openSotW(t, asDB)
	s.ask("default", "too")
	r := s.recv()
	got := secrets(t, r)
	if len(got) == 1 { // the other name follows
		s.ack(r, "default", "too")
		r = s.recv()
		maps.Copy(got, secrets(t, r))
	}
	s.ack(r, "default", "too")
	require.Len(t, got, 2)
	same(t, named(t, web, "default"), got["default"])
	same(t, named(t, web, "too"), got["too"])
	other.ask("default")
	other.takes(named(t, db, "default"))
	d, dOther := openDelta(t, asWeb), openDelta(t, asDB)
	d.subscribe("default")
	d.takes(nil, named(t, web, "default"))
	dOther.subscribe("default", web.Name())
	rd := dOther.recv()
	if len(rd.GetResources()) == 0 || len(rd.GetRemovedResources()) == 0 {
		dOther.ack(rd)
		next := dOther.recv()
		rd.Resources, rd.RemovedResources = append(rd.GetResources(), next.GetResources()...), append(rd.GetRemovedResources(), next.GetRemovedResources()...)
		rd.Nonce = next.GetNonce()
	}
	wantDelta(t, rd, []string{web.Name()}, named(t, db, "default")) // the name of another's secret is no way to it
	dOther.ack(rd)

	fetched := func(c *http.Client, s *pki.Secret) {
		t.Helper()
		r, code := fetch(t, c, "default")
		require.Equal(t, codeOK, code)
		want(t, r, named(t, s, "default"))
	}
	fetched(asWeb, web)
	fetched(asDB, db)
	_, code := fetch(t, asDB, "too")
	assert.Equal(t, codeNotFound, code)

	names := h.Status().Names
	assert.Len(t, names, 3)
	for _, name := range []string{"default (spiffe://example.org/web)", "too (spiffe://example.org/web)", "default (spiffe://example.org/db)"} {
		assert.Len(t, names[name], 32, name)
	}

	web = m.pair(web.Name())
	src.put(web.Name(), web)
	got = map[string]*envoysds.Secret{}
	for len(got) < 2 {
		r = s.recv()
		maps.Copy(got, secrets(t, r))
		s.ack(r, "default", "too")
	}
	same(t, named(t, web, "default"), got["default"])
	same(t, named(t, web, "too"), got["too"])
	wantDelta(t, d.recv(), nil, named(t, web, "default"))
	quiet(t, other.raw)
	quiet(t, dOther.raw)
	fetched(asWeb, web)
	fetched(asDB, db)
}

// A rejection counts for the caller that sent it, under the name that it knows.
func TestCallersReject(t *testing.T) {
	t.Parallel()
	m, src, shared := withPair(t, "shared")
	var log syncBuffer
	h := newHouse(t, src, sds.Options{Logger: textLogger(&log)})
	h.let("web", "default", "shared")
	h.let("db", "mine", "shared")
	s, other := openSotW(t, h.as("web")), openSotW(t, h.as("db"))
	s.ask("default")
	r := s.recv()
	want(t, r, named(t, shared, "default"))
	s.nack(r, "no", "default")
	other.ask("mine")
	other.takes(named(t, shared, "mine"))
	require.Eventually(t, func() bool { return h.Status().NACKs == 1 }, patient, time.Millisecond)
	assert.Equal(t, []string{"default"}, h.Status().LastNACK.Names)
	assert.Equal(t, r.GetVersionInfo(), h.Status().LastNACK.Version)
	src.put("shared", shared) // the same again is not sent again
	fresh := m.pair("shared")
	src.put("shared", fresh)
	want(t, s.recv(), named(t, fresh, "default"))
	want(t, other.recv(), named(t, fresh, "mine"))
	openSotW(t, h.as("db")).ask("default")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "not yours") }, patient, time.Millisecond)
	assert.Contains(t, log.String(), "name=default")
}

// A hundred streams of one caller share each look-up.
func TestCallersShare(t *testing.T) {
	t.Parallel()
	m, src, _ := withPair(t, "web")
	src.put("db", m.pair("db"))
	h := newHouse(t, src, sds.Options{})
	h.let("web", "default", "web")
	h.let("db", "default", "db")
	var streams, others []sotw
	c, other := h.as("web"), h.as("db")
	for range 100 {
		s, o := openSotW(t, c), openSotW(t, other)
		s.ask("default")
		o.ask("default")
		streams, others = append(streams, s), append(others, o)
	}
	take := func(streams []sotw) {
		for _, s := range streams {
			s.ack(s.recv(), "default")
		}
	}
	take(streams)
	take(others)
	for round := range 3 {
		src.put("web", m.pair("web"))
		take(streams)
		assert.Equal(t, round+2, src.count("web"))
	}
	assert.Equal(t, 1, src.count("db"))
	for _, s := range others {
		quiet(t, s.raw)
	}
	src.put("db", m.pair("db")) // which no stream watches any more
	assert.Equal(t, 1, src.count("db"))
}

// A caller can be given another secret in the place of the one that it has, after Refresh.
func TestCallersMove(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	old, next := m.pair("old"), m.pair("next")
	src.put("old", old)
	src.put("next", next)
	h := newHouse(t, src, sds.Options{})
	h.let("web", "default", "old")
	c := h.as("web")
	s, d := openSotW(t, c), openDelta(t, c)
	s.ask("default")
	s.takes(named(t, old, "default"))
	d.subscribe("default")
	d.takes(nil, named(t, old, "default"))
	take := func(secret *pki.Secret) {
		t.Helper()
		r := s.recv()
		want(t, r, named(t, secret, "default"))
		s.ack(r, "default")
		d.takes(nil, named(t, secret, "default"))
	}

	h.let("web", "default", "next")
	h.Refresh()
	take(next)
	src.put("old", m.pair("old")) // is not its business any more
	h.Refresh()                   // changes nothing
	next = m.pair("next")
	src.put("next", next)
	take(next)

	// To one that does not exist: delta is told, and both get it when it appears.
	h.let("web", "default", "later")
	h.Refresh()
	d.takes([]string{"default"})
	later := m.pair("later")
	src.put("later", later)
	take(later)

	// From one that does not exist, and from no at all.
	src.put("later", nil)
	d.takes([]string{"default"})
	h.let("web", "default", "next")
	h.Refresh()
	take(next)
	h.let("web", "default", "") // an empty name is none
	h.Refresh()
	d.takes([]string{"default"})
	src.put("next", m.pair("next"))
	h.let("web", "default", "old")
	h.Refresh()
	old = must.Get(src.GenerateSecret(t.Context(), "old"))(t)
	take(old)

	// While a response is out, the change of the secret and of the name both wait, and the newest is sent.
	src.put("old", m.pair("old"))
	r, rd := s.recv(), d.recv()
	h.let("web", "default", "next")
	h.Refresh()
	src.put("old", m.pair("old"))
	next = m.pair("next")
	src.put("next", next)
	s.ack(r, "default")
	d.ack(rd)
	take(next)
	quiet(t, s.raw)
	quiet(t, d.raw)
	require.Eventually(t, func() bool { return len(h.Status().Names) == 0 }, patient, time.Millisecond)
	assert.Zero(t, h.Waits())
	_, names := h.Held()
	assert.Zero(t, names)
}

// What a caller asks for is counted for it, whatever the names are mapped to.
func TestCallersAreLimited(t *testing.T) {
	t.Parallel()
	src := newFakeSource()
	h, c := serving(t, src, &sds.Options{MaxNames: 1000, Resolve: func(context.Context, string) (string, error) { return "one for all", nil }})
	s := openSotW(t, c)
	var names []string
	for i := range 1001 {
		names = append(names, strings.Repeat("x", i+1))
	}
	s.ask(names...)
	s.ends(codeResourceExhausted)
	require.Eventually(t, func() bool { return len(h.Status().Names) == 0 }, patient, time.Millisecond)
	_, held := h.Held()
	assert.Zero(t, held)
}
