// Package sdssource provides sources for package sds: over identities and bundles, over files by Istio's names, and
// over several sources by name.
//
//	files, err := sdssource.NewFiles(sdssource.FilesConfig{Allow: []string{"/etc/gateway-certs"}})
//	if err != nil { … }
//	group.Go(func() error { return files.Run(ctx) })
//	src, err := sdssource.Mux(map[string]sds.Source{
//		"default":     own, // of sdssource.FromIdentity(mounted), a *filesource.Source
//		"ROOTCA":      own,
//		"file-cert:*": files,
//		"file-root:*": files,
//		"spiffe://*":  sdssource.FromBundles(federated, spiffe.TrustDomain{}), // a *federation.Manager
//	})
//	if err != nil { … }
//	handler, err := sds.NewHandler(src, nil)
//
// # The workload's own files
//
// A *filesource.Source serves files under the names default and ROOTCA, by [FromIdentity], or by [FromBundles] if
// there are roots and no certificate. Istio has the files in one of these directories:
//
//	etc/certs, var/run/secrets/workload-spiffe-credentials     cert-chain.pem, key.pem, root-cert.pem
//	var/run/secrets/workload-spiffe-credentials, of GKE        certificates.pem, private_key.pem, ca_certificates.pem
//
// With FILE_MOUNTED_CERTS the proxy asks for its files by the names file-cert: and file-root:. List these files in
// FilesConfig.Allow. This package reads no environment variables.
//
// # Several trust domains
//
// The roots of other trust domains come from files, or from their bundle endpoints. Package source adds them to the
// roots of the identity:
//
//	all, err := source.NewMerge(td, manager, files, federated)
//	if err != nil { … }
//	defer all.Close()
//	handler, err := sds.NewHandler(sdssource.FromIdentity(all), nil)
//
// Here manager is a *secretcache.Manager, files a *filesource.Source of roots, and federated a *federation.Manager.
// Each keeps its last good roots. Roots are pushed before the certificate that needs them.
//
// Envoy trusts several trust domains in one of two ways. With its SPIFFE validator it asks for ALL, in which each
// root vouches only for peers of its own trust domain. Istio's Envoys ask for ROOTCA and expect all roots in it:
// [FromIdentityWithAllRoots]. With FromIdentity, ROOTCA has only the roots of the workload's own trust domain.
//
// # Output is not input
//
// A program that writes its identity to a directory (OUTPUT_CERTS) lists that directory in Config.Refuse of
// filesource and in FilesConfig.Refuse, so that it never reads its own output.
package sdssource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
)

// Identity is a source of an identity and its trust bundles: a *filesource.Source with a certificate, a
// *source.LastGood, a result of source.NewMerge, or a *workloadapi.Source.
//
// If it also has the methods SVIDs() []*spiffe.SVID and Bundles() *spiffe.BundleSet, as a *workloadapi.Source does,
// its other identities are served by their IDs, too, and all that exists while the Snapshot is missing.
type Identity interface {
	Snapshot() (*spiffe.Snapshot, error)
	Changed() <-chan struct{}
}

// FromIdentity returns a source of secrets over src, with the names of a *secretcache.Manager: "default" and the ID of
// the identity for its key pair, "ROOTCA" for the X.509 authorities of its trust domain, "spiffe://" followed by a
// trust domain for the authorities of that domain, and "ALL" for all authorities, each for its trust domain.
//
// Other names give an error that wraps [fs.ErrNotExist], and so do all names once an error of src has a method
// Withdrawn that returns true. While src has no snapshot, or an expired certificate, GenerateSecret waits until ctx
// is done; then its error wraps src's error. FromIdentity panics if src is nil.
//
// The source of secrets needs no Close: a goroutine follows src while there is a subscriber.
func FromIdentity(src Identity) sds.Source { return fromIdentity(src, false) }

// FromIdentityWithAllRoots is like FromIdentity, but its ROOTCA has the X.509 authorities of all trust domains with a
// bundle, as in Istio. Then an authority of any trust domain vouches for any peer, and only the names that Envoy is
// configured to match (match_typed_subject_alt_names) protect against that. Where you can change Envoy's
// configuration, prefer its SPIFFE validator with the name ALL: there each authority vouches only for its domain.
func FromIdentityWithAllRoots(src Identity) sds.Source { return fromIdentity(src, true) }

func fromIdentity(src Identity, joined bool) sds.Source {
	if src == nil {
		panic("sdssource: FromIdentity needs a source")
	}
	several, _ := src.(interface {
		SVIDs() []*spiffe.SVID
		Bundles() *spiffe.BundleSet
	})
	return &source{changed: src.Changed, set: func() (*secretset.Set, error) {
		set := &secretset.Set{Joined: joined}
		if several != nil {
			set.Identities = several.SVIDs()
		}
		snap, err := src.Snapshot()
		if err == nil {
			set.Own, _ = snap.SVID() // a snapshot's SVID never fails
			set.Identities, set.Bundles = append(slices.Clip(set.Identities), set.Own), snap.Bundles()
		}
		if len(set.Identities) == 0 {
			return nil, err
		}
		if several != nil {
			set.Bundles = several.Bundles() // read after the certificates, which may need newer bundles
		}
		return set, nil
	}}
}

// FromBundles returns a source of secrets over a source of trust bundles: a *federation.Manager, or a
// *filesource.Source without a certificate. It has the names spiffe://TRUST-DOMAIN and ALL as in [FromIdentity], and
// ROOTCA for the authorities of td unless td is zero. A name without a bundle (yet) gives an error that wraps
// [fs.ErrNotExist]. FromBundles panics if src is nil.
func FromBundles(src interface {
	Bundles() *spiffe.BundleSet
	Changed() <-chan struct{}
}, td spiffe.TrustDomain) sds.Source {
	if src == nil {
		panic("sdssource: FromBundles needs a source")
	}
	return &source{changed: src.Changed, set: func() (*secretset.Set, error) {
		return &secretset.Set{TrustDomain: td, Bundles: cmp.Or(src.Bundles(), noBundles)}, nil
	}}
}

// noBundles is the set of a *secretcache.Manager before its first bundles, for which it has nil.
var noBundles = new(spiffe.BundleSet)

// source is an sds.Source over another source.
type source struct {
	changed func() <-chan struct{}
	set     func() (*secretset.Set, error) // nil with an error that gives the reason
	subs    secretset.Subscribers

	mu    sync.Mutex
	count int           // number of subscribers
	done  chan struct{} // closed when the last subscriber leaves
}

func (s *source) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	for {
		changed := s.changed()
		set, err := s.set()
		found, there := set.Lookup(resourceName)
		switch {
		case there && (found.SVID == nil || time.Now().Before(found.SVID.NotAfter())):
			return found.Secret(resourceName)
		case there:
			err = fmt.Errorf("the certificate of %q has expired at %s", found.SVID.ID(),
				found.SVID.NotAfter().UTC().Format(time.RFC3339))
		case set != nil || sourcereport.Withdrawn(err) || !secretset.IsName(resourceName):
			return nil, secretset.Unknown("sdssource", resourceName)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("sdssource: no secret %q yet: %w; waited for it: %w", resourceName, err,
				context.Cause(ctx))
		}
	}
}

// Subscribe uses one goroutine for all subscribers, so that bundles come first also for several routes of a mux.
func (s *source) Subscribe(f func(resourceName string)) (cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	remove := s.subs.Add(f)
	if s.count++; s.count == 1 {
		s.done = make(chan struct{})
		changed := s.changed()
		old, _ := s.set()
		go s.follow(s.done, changed, old)
	}
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		remove()
		if s.count--; s.count == 0 {
			close(s.done)
		}
	})
}

// follow notifies the subscribers of changes since old, until done is closed.
func (s *source) follow(done, changed <-chan struct{}, old *secretset.Set) {
	for {
		select {
		case <-changed:
		case <-done:
			return
		}
		changed = s.changed()
		set, _ := s.set()
		<-s.subs.Tell(func() []string { return set.Changes(old) })
		old = set
	}
}

// Mux returns a source that routes each name to another source. The keys of routes are names, such as "ROOTCA", and
// prefixes of names with a "*" at the end, such as "file-cert:*"; "*" alone matches all names. An exact name takes
// precedence over prefixes, and a longer prefix over a shorter one. If the source of a name fails, or does not have
// it, Mux tries no other. A name without a source gives an error that wraps [fs.ErrNotExist]. Mux copies routes.
func Mux(routes map[string]sds.Source) (sds.Source, error) {
	if len(routes) == 0 {
		return nil, errors.New("sdssource: mux: there are no routes")
	}
	m := mux(maps.Clone(routes))
	for key, src := range m {
		name, _ := strings.CutSuffix(key, "*")
		switch {
		case src == nil:
			return nil, fmt.Errorf("sdssource: mux: the source of %q is nil", key)
		case key == "" || strings.Contains(name, "*"):
			return nil, fmt.Errorf(`sdssource: mux: %q is neither a name nor a prefix with one "*" at its end`, key)
		}
	}
	return m, nil
}

type mux map[string]sds.Source

// route returns the key that matches a name; empty if there is none.
func (m mux) route(name string) (key string) {
	if _, ok := m[name]; ok && !strings.HasSuffix(name, "*") {
		return name
	}
	for k := range m {
		if prefix, ok := strings.CutSuffix(k, "*"); ok && len(k) > len(key) && strings.HasPrefix(name, prefix) {
			key = k
		}
	}
	return key
}

func (m mux) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	src := m[m.route(resourceName)]
	if src == nil {
		return nil, fmt.Errorf("sdssource: no source for the name %.256q: %w", resourceName, fs.ErrNotExist)
	}
	return src.GenerateSecret(ctx, resourceName)
}

// Subscribe subscribes to each source for the names routed to it, once for each route.
func (m mux) Subscribe(f func(resourceName string)) (cancel func()) {
	var cancels []func()
	for key, src := range m {
		cancels = append(cancels, src.Subscribe(func(name string) {
			if m.route(name) == key {
				f(name)
			}
		}))
	}
	return func() {
		for _, cancel := range cancels {
			cancel()
		}
	}
}
