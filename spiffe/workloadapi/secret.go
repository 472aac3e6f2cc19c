package workloadapi

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/workloadwire"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The resource names that have no trust domain in them.
const (
	defaultName = "default"
	rootName    = "ROOTCA"
	allName     = "ALL"
)

// GenerateSecret returns the secret with the given resource name, which makes a Source one of package sds. The
// names are those of a *secretcache.Manager:
//
//	default                    the key pair of the identity that [Source.SVID] returns
//	spiffe://TRUST-DOMAIN/PATH the key pair of the identity with that ID, of all that the workload has: the first, if there are several
//	ROOTCA                     the X.509 authorities of the trust domain of the identity that [Source.SVID] returns
//	spiffe://TRUST-DOMAIN      the X.509 authorities of any trust domain that the server gave a bundle of
//	ALL                        those of all of them, each for its own trust domain; see [pki.NewTrustDomainsSecret]
//
// A name that the server does not have for this workload gives an error that wraps [fs.ErrNotExist]: because it
// was not in the last response, or because the server has refused or withdrawn all (PermissionDenied). That the
// server cannot be reached takes no name away. The authorities of a bundle that is empty are an error that
// wraps [spiffe.ErrNoAuthority].
//
// A secret that is there is returned without blocking. A certificate that has expired is not returned.
// GenerateSecret waits for its successor, and for the first answer of the server, until ctx is done or the server
// has refused for good; then the error wraps [ErrNotReady]. It needs [Source.Run] to run.
func (s *Source) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	var found material
	var there, none bool
	err := s.await(ctx, func() error {
		if there {
			return s.expired(found.svid)
		}
		return s.notReady(s.choice())
	}, func() bool {
		st := s.cur.Load()
		found, there = st.lookup(resourceName)
		none = !there && (st.update != nil || st.denied || !isName(resourceName))
		return none || there && (found.svid == nil || time.Now().Before(found.svid.NotAfter()))
	})
	switch {
	case err != nil:
		return nil, err
	case none:
		return nil, fmt.Errorf(`workloadapi: no secret %q: the names are "default", "ROOTCA", "ALL", the IDs of the workload's identities, and "spiffe://" with a trust domain that has a bundle: %w`, workloadwire.Clip(resourceName, 256), fs.ErrNotExist)
	case found.bundles != nil:
		return pki.NewTrustDomainsSecret(resourceName, found.bundles)
	case found.bundle != nil:
		return pki.NewTrustSecret(resourceName, found.bundle)
	}
	return pki.NewKeyPairSecret(resourceName, found.svid)
}

// expired is the error while there is nothing newer than svid.
func (s *Source) expired(svid *spiffe.SVID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := fmt.Errorf("workloadapi: source: %w: %q has expired at %s", ErrNotReady, svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
	if s.x509.Err != nil {
		err = fmt.Errorf("%w: %w", err, s.x509.Err)
	}
	return err
}

// isName reports whether there may be a secret with that name.
func isName(name string) bool {
	_, err := spiffe.ParseID(name)
	return err == nil || name == defaultName || name == rootName || name == allName
}

// material is what a secret is made of: one of the three.
type material struct {
	svid    *spiffe.SVID
	bundle  *spiffe.Bundle
	bundles *spiffe.BundleSet
}

// lookup returns what the secret with a name is made of, and whether there is one.
func (st *state) lookup(name string) (m material, ok bool) {
	if st.update == nil {
		return m, false
	}
	var own *spiffe.SVID
	if st.snap != nil {
		own, _ = st.snap.SVID() // of a snapshot: never an error
	}
	var td spiffe.TrustDomain
	switch id, err := spiffe.ParseID(name); {
	case name == defaultName:
		return material{svid: own}, own != nil
	case name == allName:
		return material{bundles: st.update.Bundles}, true
	case name == rootName && own != nil:
		td = own.ID().TrustDomain()
	case err != nil:
		return m, false
	case id.Path() != "":
		i := slices.IndexFunc(st.update.Identities, func(i Identity) bool { return i.SVID.ID() == id })
		if i < 0 {
			return m, false
		}
		return material{svid: st.update.Identities[i].SVID}, true
	default:
		td = id.TrustDomain()
	}
	b, err := st.update.Bundles.Bundle(td)
	return material{bundle: b}, err == nil
}

// names returns the names of all secrets of a state.
func (st *state) names() map[string]bool {
	all := make(map[string]bool)
	if st.update == nil {
		return all
	}
	all[defaultName], all[rootName], all[allName] = true, true, true
	for _, id := range st.update.Identities {
		all[id.SVID.ID().String()] = true
	}
	for b := range st.update.Bundles.All() {
		all[b.TrustDomain().ID().String()] = true
	}
	return all
}

// changes returns the names of the secrets that st has and old has not, or the other way round, or that
// are made of something else: bundles first, so that no certificate is told of before what vouches for it.
func (st *state) changes(old *state) []string {
	if st.update == old.update && st.snap == old.snap {
		return nil
	}
	all := st.names()
	maps.Copy(all, old.names())
	var bundles, pairs []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		before, was := old.lookup(name)
		after, is := st.lookup(name)
		switch {
		case was == is && before == after:
		case before.svid != nil || after.svid != nil:
			pairs = append(pairs, name)
		default:
			bundles = append(bundles, name)
		}
	}
	return append(bundles, pairs...)
}

// Subscribe registers f to be called with the resource name of each secret that changes, appears or is gone, as
// [Source.GenerateSecret] takes it. cancel ends that; it may be called from f, and more than once. A call of f
// that is under way goes on after cancel has returned.
//
// The calls come one at a time, after the change, from the goroutine of [Source.Run], which holds no lock.
// Bundles come first. f must return at once: while it does not, Run takes over nothing new.
func (s *Source) Subscribe(f func(resourceName string)) (cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sub := &f
	s.subscribers = append(slices.Clip(s.subscribers), sub) // a copy, for tell reads the old one
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.subscribers = slices.DeleteFunc(slices.Clone(s.subscribers), func(o *func(string)) bool { return o == sub })
	}
}

// tell tells the subscribers of what has changed since old. Its caller is the one goroutine that follows the
// stream of identities.
func (s *Source) tell(old *state) {
	s.mu.Lock()
	subscribers, st := s.subscribers, s.cur.Load()
	s.mu.Unlock()
	if len(subscribers) == 0 {
		return
	}
	for _, name := range st.changes(old) {
		for _, f := range subscribers {
			(*f)(name)
		}
	}
}
