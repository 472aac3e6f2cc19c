package workloadapi

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// Choice says which of several identities [Source.Pick] returns: the first, in the order of the server, that meets all
// of its conditions. The zero Choice is the default identity.
type Choice struct {
	// Hint is the label that the identity has; "" means any.
	Hint string

	// Policy allows the ID of the identity; the zero Policy means any.
	Policy spiffe.Policy

	// OrDefault makes the default identity, the first one, stand in while no identity meets the conditions;
	// [Status].Fallback says so. Without it there is no identity then, and readers get an error.
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

// pick returns the identity of u, which may be nil, that c says, or nil.
func (c Choice) pick(u *Update) (svid *spiffe.SVID, fallback bool) {
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
	svid, _ := c.pick(u)
	return svid != nil
}

// text describes the conditions, for errors.
func (c Choice) text() string {
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
	text := strings.TrimSpace("the server has no identity " + c.text())
	if u == nil {
		return fmt.Errorf("workloadapi: source: %w: %s", spiffe.ErrNotReady, text)
	}
	var have []string
	for i, id := range u.Identities {
		if i == mostNamed {
			have = append(have, fmt.Sprintf("%d more", len(u.Identities)-i))
			break
		}
		have = append(have, fmt.Sprintf("%q with the hint %q", id.SVID.ID(), redact.Clip(id.Hint, 128)))
	}
	if len(have) > 0 {
		text += "; it has " + strings.Join(have, ", ")
	}
	if u.withheld != nil {
		return fmt.Errorf("workloadapi: source: %w: %s: %w", spiffe.ErrNotReady, text, u.withheld)
	}
	return fmt.Errorf("workloadapi: source: %w: %s", spiffe.ErrNotReady, text)
}

// Pick returns a Source of the identity that c selects, which may change from one response to the next. It reads the
// stream of s, which is run and closed through s: Run of the returned Source is an error, and its Close does nothing. A
// program picks each identity once, when it starts, before the source is ready or after:
//
//	internal, err := src.Pick(workloadapi.Choice{Hint: "internal"})
//	…
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: internal, Peers: internal, Allow: allow})
//
// While no identity meets c, SVID and the other readers of the identity return an error that wraps [spiffe.ErrNotReady]
// and names the identities that there are. Bundles do not depend on c. Changed also tells of changes of other
// identities.
//
// The error says that the policy can allow no identity, or that the source has [Config].BundlesOnly.
func (s *Source) Pick(c Choice) (*Source, error) {
	if s.cfg.BundlesOnly {
		return nil, errors.New("workloadapi: pick: the source is configured for bundles only")
	}
	if !c.Policy.IsZero() {
		if err := spiffe.CheckPolicySource(c.Policy); err != nil {
			return nil, fmt.Errorf("workloadapi: pick: %w", err)
		}
	}
	name := strings.TrimSpace(fmt.Sprintf("workloadapi.Source(%s) %s", s.client.server, c.text()))
	return &Source{redacted: redact.New(name), feed: s.feed, choice: c, from: cmp.Or(s.from, s)}, nil
}

// now returns the current state. The first reader of a picked Source after a change picks for all.
func (s *Source) now() *state {
	if s.from == nil {
		return s.cur.Load()
	}
	for {
		last := s.cur.Load() // before the state of from, which is then never older than what was picked from
		all := s.from.cur.Load()
		if last != nil && last.of == all {
			return last
		}
		next := s.choice.from(all, last)
		if s.cur.CompareAndSwap(last, next) {
			return next
		}
	}
}

// from returns the state of a picked Source for the state of the Source that it was picked from. The snapshot of last,
// which may be nil, is kept if a new one would be equal.
func (c Choice) from(all, last *state) *state {
	next := &state{of: all, bundles: all.bundles, update: all.update, denied: all.denied}
	svid, fallback := c.pick(all.update)
	if svid == nil {
		return next
	}
	next.fallback = fallback
	if last != nil && snapshotOf(last.snap, svid, all.bundles) {
		next.snap = last.snap
	} else {
		next.snap = spiffe.NewSnapshot(svid, all.bundles)
	}
	return next
}
