package spiffetest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Enough calls for the race detector to find a race in a source.
const (
	readers  = 8
	readings = 50
)

// patience is how long a method that must not block may take.
const patience = 30 * time.Second

// TestSVIDSource checks that a source keeps the promises of [spiffe.SVIDSource]: it does not block, is
// safe for concurrent use, returns either an identity or an error, and never changes a returned identity. If the
// source has these methods, they are checked too:
//
//   - Snapshot() (*spiffe.Snapshot, error): the bundles of a snapshot verify its identity.
//   - Changed() <-chan struct{}: it does not block.
//
// newSource returns a source that has an identity, which is valid now. Faults are reported with t.Errorf.
func TestSVIDSource(t testing.TB, newSource func(t testing.TB) spiffe.SVIDSource) {
	t.Helper()
	source := newSource(t)
	if source == nil {
		t.Errorf("spiffetest: SVID source: newSource returned nil")
		return
	}
	report := reporter(t, "SVID source")

	var first *spiffe.SVID
	var err error
	if !answers(1, 1, func() { first, err = source.SVID() }) {
		report("it blocks: no answer for %v", patience)
		return
	}
	if fault := svidFault(first, err); fault != "" {
		report("%s", fault)
		return
	}
	if err != nil {
		report("no identity, though it should have one: %v", err)
		return
	}
	before := content(first)
	if !answers(readers, readings, func() {
		svid, err := source.SVID()
		if fault := svidFault(svid, err); fault != "" {
			report("%s", fault)
		}
		if s, ok := source.(snapshots); ok {
			snap, err := s.Snapshot()
			if fault := snapshotFault(snap, err); fault != "" {
				report("%s", fault)
			}
		}
		if s, ok := source.(interface{ Changed() <-chan struct{} }); ok {
			s.Changed()
		}
	}) {
		report("it blocks: %d readers had no answer for %v", readers, patience)
	}
	if !bytes.Equal(before, content(first)) {
		report("an identity changed after it was handed out")
	}
}

// content returns the parts of an identity that must not change.
func content(svid *spiffe.SVID) []byte {
	b := []byte(svid.ID().String())
	for _, c := range svid.Chain() {
		b = append(b, c.Raw...)
	}
	return b
}

type snapshots interface {
	Snapshot() (*spiffe.Snapshot, error)
}

// either describes the fault of a result that must be either a value or an error, or returns "".
func either(what string, there bool, err error) string {
	switch {
	case !there && err == nil:
		return "it returned neither " + what + " nor an error"
	case there && err != nil:
		return "it returned " + what + " and an error"
	}
	return ""
}

// svidFault describes the fault of a result, or returns "".
func svidFault(svid *spiffe.SVID, err error) string {
	fault := either("an identity", svid != nil, err)
	if fault == "" && err == nil && svid.ID().IsZero() {
		fault = "it returned an SVID that was not made by a function of package spiffe"
	}
	return fault
}

func snapshotFault(snap *spiffe.Snapshot, err error) string {
	if fault := either("a snapshot", snap != nil, err); fault != "" {
		return fault
	}
	if err != nil {
		return "no snapshot, though it has an identity: " + err.Error()
	}
	svid, _ := snap.SVID() // never an error
	v, err := spiffe.NewVerifier(snap, spiffe.AllowIDs(svid.ID()), nil)
	if err != nil {
		return err.Error()
	}
	if _, err := v.VerifyChain(svid.Chain(), spiffe.AnyRole); err != nil {
		return "the identity of a snapshot is not verified by its bundles: " + err.Error()
	}
	return ""
}

// TestBundleSource checks that a source keeps the promises of [spiffe.BundleSource]: it does not block,
// is safe for concurrent use, and returns the bundle of exactly the requested trust domain, or an error. For an
// unknown trust domain the error wraps [spiffe.ErrUnknownTrustDomain] and names it.
//
// newSource returns a source, and the trust domains that it knows. The source must not know others
// that end in "spiffetest.invalid" or extend those that it knows. Faults are reported with t.Errorf.
func TestBundleSource(t testing.TB, newSource func(t testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain)) {
	t.Helper()
	source, known := newSource(t)
	if source == nil {
		t.Errorf("spiffetest: bundle source: newSource returned nil")
		return
	}
	report := reporter(t, "bundle source")

	unknown := []string{"spiffetest.invalid"}
	for _, td := range known {
		unknown = append(unknown, "sub."+td.String(), td.String()+".spiffetest.invalid",
			strings.TrimRight(td.String(), ".")+".")
	}
	if !answers(1, 1, func() {
		for _, td := range known {
			b, err := source.Bundle(td)
			if fault := bundleFault(td, b, err); fault != "" {
				report("%s", fault)
			} else if err != nil {
				report("%q: no bundle, though it should have one: %v", td, err)
			}
		}
	}) {
		report("it blocks: no answer for %v", patience)
		return
	}
	for _, name := range unknown {
		td, err := spiffe.ParseTrustDomain(name)
		if err != nil {
			continue // too long
		}
		b, err := source.Bundle(td)
		switch fault := bundleFault(td, b, err); {
		case fault != "":
			report("%s", fault)
		case err == nil:
			report("%q: a bundle, though it cannot know the domain: only equal names are the same domain", td)
		case !errors.Is(err, spiffe.ErrUnknownTrustDomain):
			report("%q: the error does not wrap spiffe.ErrUnknownTrustDomain: %v", td, err)
		case !strings.Contains(err.Error(), name):
			report("%q: the error does not name the trust domain: %v", td, err)
		}
	}
	if b, err := source.Bundle(spiffe.TrustDomain{}); b != nil || !errors.Is(err, spiffe.ErrUnknownTrustDomain) {
		report("the zero trust domain: want an error that wraps spiffe.ErrUnknownTrustDomain, got %v, %v", b, err)
	}
	if !answers(readers, readings, func() {
		for _, td := range known {
			b, err := source.Bundle(td)
			if fault := bundleFault(td, b, err); fault != "" {
				report("%s", fault)
			}
		}
	}) {
		report("it blocks: %d readers had no answer for %v", readers, patience)
	}
}

// bundleFault describes the fault of a result, or returns "".
func bundleFault(td spiffe.TrustDomain, b *spiffe.Bundle, err error) string {
	fault := either("a bundle of "+td.String(), b != nil, err)
	if fault == "" && err == nil && b.TrustDomain() != td {
		fault = "asked for " + td.String() + " it returned the bundle of " + b.TrustDomain().String()
	}
	return fault
}

// reporter returns a func that reports each fault once, as many readers may find it.
func reporter(t testing.TB, what string) func(format string, args ...any) {
	var mu sync.Mutex
	seen := map[string]bool{}
	return func(format string, args ...any) {
		t.Helper()
		fault := fmt.Sprintf(format, args...)
		mu.Lock()
		defer mu.Unlock()
		if !seen[fault] {
			seen[fault] = true
			t.Errorf("spiffetest: %s: %s", what, fault)
		}
	}
}

// answers calls f from many goroutines, many times from each, and reports whether all calls returned.
func answers(goroutines, times int, f func()) bool {
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range times {
				f()
			}
		})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		wg.Wait()
	}()
	select {
	case <-done:
		return true
	case <-time.After(patience):
		return false
	}
}
