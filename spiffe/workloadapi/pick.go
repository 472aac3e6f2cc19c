package workloadapi

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Choice says which of the identities that a server has for this workload a [Picked] hands out: the first, in the order of
// the server, that meets all of its conditions. The zero Choice is the default identity.
type Choice struct {
	// Hint is the label that the identity has; "" means any.
	Hint string

	// Policy allows the ID of the identity; the zero Policy means any.
	Policy spiffe.Policy

	// OrDefault makes the default identity, which is the first, stand in while no identity meets the conditions.
	// [Status].Fallback says so. Without it the choice is strict: there is no identity then, and readers get an error.
	OrDefault bool
}

// index returns the first of n identities that meets c, or the one that stands in for it.
func (c Choice) index(n int, at func(int) (hint string, id spiffe.ID)) (i int, fallback, ok bool) {
	for i := range n {
		hint, id := at(i)
		if (c.Hint == "" || hint == c.Hint) && (c.Policy.IsZero() || c.Policy.Allows(id)) {
			return i, false, true
		}
	}
	return 0, true, c.OrDefault && n > 0
}

// of returns the identity of u, which may be nil, that c picks, or nil.
func (c Choice) of(u *Update) (svid *spiffe.SVID, fallback bool) {
	if u == nil {
		return nil, false
	}
	i, fallback, ok := c.index(len(u.Identities), func(i int) (string, spiffe.ID) { return u.Identities[i].Hint, u.Identities[i].SVID.ID() })
	if !ok {
		return nil, false
	}
	return u.Identities[i].SVID, fallback
}

// meets reports whether there is an identity in u for c.
func (c Choice) meets(u *Update) bool {
	svid, _ := c.of(u)
	return svid != nil
}

// String describes the conditions, for errors.
func (c Choice) String() string {
	var all []string
	if c.Hint != "" {
		all = append(all, fmt.Sprintf("with the hint %q", redact.Clip(c.Hint, 128)))
	}
	if !c.Policy.IsZero() {
		all = append(all, fmt.Sprintf("that the policy allows (%s)", redact.Clip(c.Policy.String(), maxText)))
	}
	return strings.Join(all, " and ")
}

// mostNamed is how many identities an error names.
const mostNamed = 5

// missing is the error for a choice that the identities of u, which may be nil, do not meet.
func (c Choice) missing(u *Update) error {
	err := fmt.Errorf("workloadapi: source: %w: the server has no identity %v", ErrNotReady, c)
	if u == nil || len(u.Identities) == 0 {
		return err
	}
	var have []string
	for i, id := range u.Identities {
		if i == mostNamed {
			have = append(have, fmt.Sprintf("%d more", len(u.Identities)-i))
			break
		}
		have = append(have, fmt.Sprintf("%q with the hint %q", id.SVID.ID(), redact.Clip(id.Hint, 128)))
	}
	return fmt.Errorf("%w; it has %s", err, strings.Join(have, ", "))
}

// Picked is another identity of a [Source], over the same stream: [Source.Pick] makes one. It follows its source, which is
// run, started and closed, and has nothing to be closed itself. It is a [spiffe.SVIDSource], a [spiffe.BundleSource] and a
// jwtsvid.Source. Its methods are safe for concurrent use, and read without blocking.
//
// An identity and the bundles of a [Picked.Snapshot] are of one response, as those of the source are.
type Picked struct {
	source *Source
	choice Choice
	cur    atomic.Pointer[picking] // nil before the first read
}

// picking is what was picked of a state of the source. It never changes.
type picking struct {
	of       *state
	snap     *spiffe.Snapshot // nil if there is no identity
	fallback bool
}

// Pick returns the identity that c says, which may change from one response to the next. A program picks each identity
// once, at its start, before the source is ready or after:
//
//	internal, err := src.Pick(workloadapi.Choice{Hint: "internal"})
//	…
//	cfg, err := spiffetls.ClientConfig(internal, internal, allow, nil)
//
// The error says that the policy can allow no identity, or that the source has [Config].BundlesOnly.
func (s *Source) Pick(c Choice) (*Picked, error) {
	if s.cfg.BundlesOnly {
		return nil, errors.New("workloadapi: pick: the source is configured for bundles only")
	}
	if !c.Policy.IsZero() {
		if err := spiffe.CheckPolicySource(c.Policy); err != nil {
			return nil, fmt.Errorf("workloadapi: pick: %w", err)
		}
	}
	return &Picked{source: s, choice: c}, nil
}

// now returns what is picked of the present state. The first reader after a change picks for all.
func (p *Picked) now() *picking {
	for {
		last := p.cur.Load() // before the state, which is then never older than what was picked from
		st := p.source.cur.Load()
		if last != nil && last.of == st {
			return last
		}
		next := &picking{of: st}
		svid, fallback := p.choice.of(st.update)
		if svid != nil {
			next.fallback = fallback
			if last != nil && snapshotOf(last.snap, svid, st.bundles) {
				next.snap = last.snap
			} else {
				next.snap = spiffe.NewSnapshot(svid, st.bundles)
			}
		}
		if p.cur.CompareAndSwap(last, next) {
			return next
		}
	}
}

// SVID returns the present X.509-SVID of the identity with its key, as [Source.SVID] does. While no identity meets the
// [Choice], and it is strict, the error wraps [ErrNotReady] and names the identities that there are.
func (p *Picked) SVID() (*spiffe.SVID, error) {
	snap, err := p.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle is that of the source: see [Source.Bundle].
func (p *Picked) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return p.source.Bundle(td) }

// Snapshot returns the identity and the trust bundles as they were published together. The error is that of [Picked.SVID].
func (p *Picked) Snapshot() (*spiffe.Snapshot, error) {
	if snap := p.now().snap; snap != nil {
		return snap, nil
	}
	return nil, p.source.notReady(p.choice)
}

// Changed is that of the source: see [Source.Changed]. It tells of changes of other identities, too.
func (p *Picked) Changed() <-chan struct{} { return p.source.Changed() }

// Updates returns the present snapshot first, if there is one, and then each newer one, as [Source.Updates] does.
func (p *Picked) Updates(ctx context.Context) iter.Seq[*spiffe.Snapshot] {
	return renew.Follow(ctx, p.Changed, func() *spiffe.Snapshot { return p.now().snap })
}

// Fetch asks the server for a JWT-SVID of the identity, as [Source.Fetch] does.
func (p *Picked) Fetch(ctx context.Context, audience ...string) (token string, err error) {
	return p.source.fetch(ctx, p.choice, p.now().snap, audience)
}

// Ready waits as [Source.Ready] does, for this identity.
func (p *Picked) Ready(ctx context.Context) error {
	return p.source.await(ctx, func() error { return p.source.notReady(p.choice) }, p.ready)
}

func (p *Picked) ready() bool {
	p.source.mu.Lock()
	defer p.source.mu.Unlock()
	return p.source.ready(p.now().snap)
}

// Status returns the state of the source, with the ID, NotAfter, Fallback and Ready of this identity.
func (p *Picked) Status() Status {
	p.source.mu.Lock()
	defer p.source.mu.Unlock()
	now := p.now()
	return p.source.status(now.snap, now.fallback)
}

// String names the server and the choice. A Picked does not print its keys.
func (p *Picked) String() string {
	return strings.TrimSpace(fmt.Sprintf("workloadapi.Picked(%s) %v", p.source.client.server, p.choice))
}

// GoString is String: the verb %#v must not walk to the keys either.
func (p *Picked) GoString() string { return p.String() }

// LogValue is String as a log value.
func (p *Picked) LogValue() slog.Value { return slog.StringValue(p.String()) }
