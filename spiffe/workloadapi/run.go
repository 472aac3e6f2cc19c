package workloadapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/spiffe"
)

// Run keeps the source current. It blocks until ctx is done or [Source.Close] is called, waits for its goroutines, and
// returns nil. If the server refuses for good, Run returns that [*Error], which is Final. The last identity and
// bundles stay readable. It is an error to call Run while it runs, or after Close; otherwise it may be called again.
//
// Run uses one stream, and a second one with JWTBundles. If the server does not implement the second, Run continues
// without it.
func (s *Source) Run(ctx context.Context) error {
	err := s.life.Run(ctx, s.run)
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return fmt.Errorf("workloadapi: run: %w", err)
}

// Close stops the source for good, whether [Source.Run] or [Start] runs it, and waits until it has stopped. It closes
// all connections, after which calls such as [Source.Fetch] fail, unless [Config] has a Client, which stays the
// caller's. The last identity and bundles stay readable. The error is always nil.
func (s *Source) Close() error {
	err := s.life.Close()
	if s.cfg.Client == nil {
		s.client.conns.End(lifecycle.ErrClosed)
	}
	return err
}

func (s *Source) run(ctx context.Context) error {
	s.mu.Lock()
	s.x509.final, s.jwt.final = false, false
	s.mu.Unlock()

	inner, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	if s.cfg.JWTBundles {
		wg.Go(func() { _ = s.follow(inner, &s.jwt, s.client.WatchJWTBundles(inner)) })
	}
	watch := s.client.WatchX509SVIDs
	if s.cfg.BundlesOnly {
		watch = s.client.WatchX509Bundles
	}
	err := s.follow(inner, &s.x509, watch(inner))
	cancel()
	wg.Wait()
	if e, ok := errors.AsType[*Error](err); ok && e.Final && errors.Is(e, ErrDenied) { // of all, whatever the method
		s.failed(ctx, &s.jwt, e)
	}
	if s.cfg.Client == nil {
		s.client.CloseIdleConnections()
		// net/http may not have noticed yet that a stream ended.
		time.AfterFunc(time.Second, s.client.CloseIdleConnections)
	}
	s.mu.Lock()
	s.x509.open, s.jwt.open = false, false
	if s.early != nil {
		s.early.Stop()
	}
	s.mu.Unlock()
	return err
}

// follow adopts the updates of a watch, and returns its last failure.
func (s *Source) follow(ctx context.Context, t *track, updates iter.Seq2[*Update, error]) (last error) {
	for u, err := range updates {
		if last = err; err == nil {
			s.took(ctx, t, u)
		} else if e, ok := errors.AsType[*Error](err); ok { // a watch yields nothing else
			s.failed(ctx, t, e)
		}
	}
	return last
}

// took adopts a good response and publishes the new state. If u is nil, it adopts the parts of the last response that
// have become valid since.
func (s *Source) took(ctx context.Context, t *track, u *Update) {
	s.mu.Lock()
	before := t.skipped
	if u != nil {
		t.good(u)
	}
	t.settle(time.Now())
	published := s.publish()
	st, after := s.cur.Load(), t.skipped
	if s.early != nil {
		s.early.Stop()
	}
	if at := s.x509.again; !at.IsZero() && ctx.Err() == nil {
		s.early = time.AfterFunc(time.Until(at), func() { s.took(ctx, &s.x509, nil) })
	}
	s.mu.Unlock()

	server := slog.String("server", s.client.server)
	if published {
		attrs := []slog.Attr{server}
		if svid := st.svid(); svid != nil {
			attrs = append(attrs, slog.String("id", svid.ID().String()), slog.Time("not_after", svid.NotAfter()))
		}
		s.log.LogAttrs(ctx, slog.LevelInfo, "workloadapi: update", attrs...)
	}
	if !slices.EqualFunc(before, after, func(a, b error) bool { return a.Error() == b.Error() }) {
		for _, err := range after {
			s.log.LogAttrs(ctx, slog.LevelWarn, "workloadapi: part of a response skipped", server,
				slog.Any("err", err))
		}
	}
}

// failed records an error of a watch.
func (s *Source) failed(ctx context.Context, t *track, e *Error) {
	s.mu.Lock()
	before := t.denied
	withdrawn := t.bad(e)
	if !s.publish() && (e.Final || before == nil && t.denied != nil) {
		s.news.Notify()
	}
	s.mu.Unlock()

	msg := "workloadapi: attempt failed"
	switch {
	case withdrawn:
		msg = "workloadapi: the server has withdrawn what it sent"
	case e.Final:
		msg = "workloadapi: failed for good"
	case errors.Is(e, ErrBadResponse): // a server can send these at any rate
		s.bad.Warn("workloadapi: response discarded", e.RPC, slog.String("server", s.client.server),
			slog.Any("err", e.Err))
		return
	}
	s.log.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("rpc", e.RPC), slog.String("server", s.client.server),
		slog.Any("err", e.Err), slog.Duration("retry_in", e.RetryIn))
}

// publish makes the adopted state visible to readers, and reports whether anything changed. The caller holds mu.
func (s *Source) publish() bool {
	old := s.cur.Load()
	st := &state{update: cmp.Or(s.x509.update, new(Update)), bundles: s.bundles(old.bundles)}
	if svid := st.update.identity(s.cfg.Hint); svid != nil {
		if st.snap = old.snap; svid != old.svid() || st.bundles != old.bundles {
			st.snap = spiffe.NewSnapshot(svid, st.bundles)
		}
	}
	st.ready = (st.snap != nil || s.cfg.BundlesOnly && s.x509.update != nil) &&
		(s.jwt.update != nil || !s.cfg.JWTBundles)
	s.cur.Store(st)
	if st.ready == old.ready && st.snap == old.snap && st.bundles == old.bundles &&
		slices.Equal(st.update.Identities, old.update.Identities) &&
		slices.EqualFunc(st.update.CRLs, old.update.CRLs, slices.Equal) {
		return false // the same content, sent again after a reconnect
	}
	s.news.Notify()
	return true
}

// bundles returns the X.509 and JWT bundles as one set, or nil if there are none. A bundle keeps both kinds of
// authorities apart, so that one never verifies the other. Unchanged bundles are the same values as in old. The caller
// holds mu.
func (s *Source) bundles(old *spiffe.BundleSet) *spiffe.BundleSet {
	x509, jwt := s.x509.bundles(), s.jwt.bundles()
	s.unmerged = nil
	if jwt == nil || x509 == nil {
		return cmp.Or(x509, jwt)
	}
	all := make(map[spiffe.TrustDomain]*spiffe.Bundle)
	for b := range x509.All() {
		all[b.TrustDomain()] = b
	}
	for b := range jwt.All() {
		td := b.TrustDomain()
		if one := all[td]; one != nil {
			c := one.Contents()
			c.JWTAuthorities = maps.Collect(b.JWTAuthorities())
			var err error
			if b, err = spiffe.NewBundle(td, c); err != nil { // together they exceed the limit on authorities
				s.unmerged = append(s.unmerged, fmt.Errorf("workloadapi: the keys for JWT-SVIDs skipped: %w", err))
				b = one
			}
		}
		if old != nil {
			if last, err := old.Bundle(td); err == nil && last.Equal(b) {
				b = last
			}
		}
		all[td] = b
	}
	set := setOf(all)
	if set.Equal(old) {
		return old
	}
	return set
}

// setOf returns bundles as a set.
func setOf(bundles map[spiffe.TrustDomain]*spiffe.Bundle) *spiffe.BundleSet {
	set, err := spiffe.NewBundleSet(slices.Collect(maps.Values(bundles))...)
	if err != nil {
		panic(err) // the map has one bundle for each trust domain
	}
	return set
}

// track is the state of one stream. The Source's mu guards it.
type track struct {
	update *Update   // in force; nil before the first, and after a withdrawal
	last   *Update   // the last response as it was received
	again  time.Time // when an identity in last begins to be valid; zero if none does

	open     bool      // there is a stream, and it has delivered a response
	updates  uint64    // good responses
	success  time.Time // when the last good response came
	failures int       // since then
	err      error     // the last failure, or nil after a good response
	next     time.Time // the next attempt, after a failure that ended the stream
	skipped  []error   // why parts of the last good response were skipped
	failed   uint64    // failures since New
	denied   error     // the denial in force, or nil
	final    bool      // the server has refused for good
}

// bundles returns the bundles of the stream, nil if there are none.
func (t *track) bundles() *spiffe.BundleSet {
	if t.update == nil {
		return nil
	}
	return t.update.Bundles
}

// good records the good response u.
func (t *track) good(u *Update) {
	t.last, t.denied, t.final = u, nil, false
	t.open, t.success, t.failures, t.err, t.next = true, time.Now(), 0, nil, time.Time{}
	t.updates++
}

// settle puts the parts of the last response that are valid at now in force.
func (t *track) settle(now time.Time) {
	if t.last != nil { // otherwise it was withdrawn
		t.update, t.again = t.last.inForce(t.update, now)
		t.skipped = t.update.Skipped
	}
}

// bad records e, and reports whether it withdraws the current update. After a discarded response the stream continues.
func (t *track) bad(e *Error) (withdrawn bool) {
	t.failures++
	t.failed++
	t.err, t.final = e, e.Final
	if errors.Is(e, ErrBadResponse) {
		return false
	}
	t.open, t.next = false, time.Time{}
	if !e.Final {
		t.next = time.Now().Add(e.RetryIn)
	}
	if !errors.Is(e, ErrDenied) {
		return false
	}
	withdrawn, t.denied = t.update != nil, e
	if withdrawn {
		t.update, t.last, t.again, t.skipped = nil, nil, time.Time{}, nil
	}
	return withdrawn
}
