package workloadapi

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
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
// A name that the server does not have for this workload gives an error that wraps [io/fs.ErrNotExist]: because it
// was not in the last response, or because the server has refused or withdrawn all (PermissionDenied). That the
// server cannot be reached takes no name away. The authorities of a bundle that is empty are an error that
// wraps [spiffe.ErrNoAuthority].
//
// A secret that is there is returned without blocking. A certificate that has expired is not returned.
// GenerateSecret waits for its successor, and for the first answer of the server, until ctx is done or the server
// has refused for good; then the error wraps [spiffe.ErrNotReady]. It needs [Source.Run] to run.
func (s *Source) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	var found secretset.Material
	var there, none bool
	err := s.await(ctx, func() error {
		if there {
			return s.expired(found.SVID)
		}
		return s.notReady()
	}, func() bool {
		st := s.now()
		found, there = st.secrets().Lookup(resourceName)
		none = !there && (st.update != nil && st.update.withheld == nil || st.denied || !secretset.IsName(resourceName))
		return none || there && (found.SVID == nil || time.Now().Before(found.SVID.NotAfter()))
	})
	switch {
	case err != nil:
		return nil, err
	case none:
		return nil, secretset.Unknown("workloadapi", resourceName)
	}
	return found.Secret(resourceName)
}

// expired is the error while there is nothing newer than svid.
func (s *Source) expired(svid *spiffe.SVID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := fmt.Errorf("workloadapi: source: %w: %q has expired at %s", spiffe.ErrNotReady, svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
	switch u := s.x509.update; {
	case s.x509.Err != nil:
		err = fmt.Errorf("%w: %w", err, s.x509.Err)
	case u != nil && u.withheld != nil:
		err = fmt.Errorf("%w: %w", err, u.withheld)
	}
	return err
}

// secrets returns what there is in st; nil before the first answer of the server.
func (st *state) secrets() *secretset.Set {
	if st.update == nil {
		return nil
	}
	set := &secretset.Set{Bundles: st.update.Bundles, Identities: func(yield func(*spiffe.SVID) bool) {
		for _, i := range st.update.Identities {
			if !yield(i.SVID) {
				return
			}
		}
	}}
	if st.snap != nil {
		set.Own, _ = st.snap.SVID() // of a snapshot: never an error
	}
	return set
}

// Subscribe registers f to be called with the resource name, as [Source.GenerateSecret] takes it, of each secret that
// changes, appears or is gone. cancel ends that; it may be called from f, and more than once. A call of f under way
// goes on after cancel has returned.
//
// The calls come one at a time, after the change, from a goroutine that holds no lock. Bundles come
// first. f must return at once: until it does, Run adopts nothing new.
func (s *Source) Subscribe(f func(resourceName string)) (cancel func()) {
	if s.from != nil {
		s.mu.Lock()
		if !slices.Contains(s.told, s) {
			s.told = append(slices.Clip(s.told), s) // a copy, for tell reads the old one
		}
		s.mu.Unlock()
	}
	return s.subscribers.Add(f)
}

// tell tells the subscribers of what has changed since old, those of the picked sources too. Its caller is the one
// goroutine that follows the stream of identities.
func (s *Source) tell(old *state) {
	st := s.cur.Load()
	if st.update == old.update && st.snap == old.snap {
		return
	}
	<-s.subscribers.Tell(func() []string { return st.secrets().Changes(old.secrets()) })
	s.mu.Lock()
	picked := s.told
	s.mu.Unlock()
	for _, p := range picked {
		<-p.subscribers.Tell(func() []string {
			return p.choice.from(st, nil).secrets().Changes(p.choice.from(old, nil).secrets())
		})
	}
}
