// Package sdssource makes sources for package sds: of identities and bundles, of files by Istio's names, and of
// several sources by name.
//
//	files, err := sdssource.StartFiles(ctx, sdssource.FilesConfig{
//		Allow:       []string{"/etc/gateway-certs"},
//		SystemRoots: sdssource.FindSystemRoots(),
//	})
//	if err != nil { … }
//	defer files.Close()
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
// The roots of other trust domains come from files, or from their bundle endpoints. Package source adds them to
// those of the identity:
//
//	all, err := source.NewMerge(td, manager, files, federated)
//	if err != nil { … }
//	defer all.Close()
//	handler, err := sds.NewHandler(sdssource.FromIdentity(all), nil)
//
// Here manager is a *secretcache.Manager, files a *filesource.Source of roots, and federated a *federation.Manager.
// Each keeps its last good roots. Roots are pushed before the certificate that needs them.
//
// Envoy trusts several trust domains in one of two ways. With its SPIFFE validator it asks for ALL, in which each root
// vouches for peers of its own trust domain. In Istio's way it asks for ROOTCA and expects all roots in it:
// [FromIdentityWithAllRoots]. With FromIdentity, ROOTCA has the roots of the workload's own trust domain.
//
// # Output is not input
//
// A program that writes its identity to a directory (OUTPUT_CERTS) lists that directory in Config.Refuse of
// filesource and in FilesConfig.Refuse, so that it never reads its own output.
package sdssource

import (
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
// *source.LastGood, what source.NewMerge returns, or a *workloadapi.Source.
//
// If it also has the methods SVIDs() []*spiffe.SVID and Bundles() *spiffe.BundleSet, as a *workloadapi.Source has, the
// other identities are served by their IDs, too, and all that there is while the Snapshot is missing.
type Identity interface {
	Snapshot() (*spiffe.Snapshot, error)
	Changed() <-chan struct{}
}

// FromIdentity returns a source of secrets over src. The names are those of a *secretcache.Manager: "default" and
// the ID of the identity for its key pair, "ROOTCA" and "spiffe://" with a trust domain for the X.509 authorities of
// one trust domain, and "ALL" for those of all trust domains, each for its own.
//
// Other names give an error that wraps [fs.ErrNotExist], and so do all names once an error of src has a method
// Withdrawn that reports true. While src has no snapshot, or an expired certificate, GenerateSecret waits until ctx
// is done; then its error wraps that of src. FromIdentity panics if src is nil.
//
// The source of secrets needs no Close: a goroutine follows src while there is a subscriber.
func FromIdentity(src Identity) sds.Source { return fromIdentity(src, false) }

// FromIdentityWithAllRoots is FromIdentity with a ROOTCA that has the X.509 authorities of all trust domains with a
// bundle, as Istio does it. Then an authority of any trust domain vouches for any peer, and only the names that
// Envoy is configured to match (match_typed_subject_alt_names) protect from that. Where Envoy's configuration can be
// changed, prefer its SPIFFE validator with the name ALL: there each authority vouches for its own trust domain
// only.
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
			set.Own, _ = snap.SVID() // of a snapshot: never an error
			set.Identities, set.Bundles = append(slices.Clip(set.Identities), set.Own), snap.Bundles()
		}
		if len(set.Identities) == 0 {
			return nil, err
		}
		if several != nil {
			set.Bundles = several.Bundles() // after the certificates, which may need newer ones
		}
		return set, nil
	}}
}

// FromBundles returns a source of secrets over a source of trust bundles: a *federation.Manager, or a
// *filesource.Source without a certificate. It has the names spiffe://TRUST-DOMAIN and ALL as [FromIdentity] has
// them, and ROOTCA for the authorities of td unless td is zero. A name whose bundle does not exist (yet) gives an
// error that wraps [fs.ErrNotExist]. FromBundles panics if src is nil.
func FromBundles(src interface {
	Bundles() *spiffe.BundleSet
	Changed() <-chan struct{}
}, td spiffe.TrustDomain) sds.Source {
	if src == nil {
		panic("sdssource: FromBundles needs a source")
	}
	return &source{changed: src.Changed, set: func() (*secretset.Set, error) {
		return &secretset.Set{TrustDomain: td, Bundles: src.Bundles()}, nil
	}}
}

// source is an sds.Source over another source.
type source struct {
	changed func() <-chan struct{}
	set     func() (*secretset.Set, error) // nil with an error that says why there is nothing
	subs    secretset.Subscribers

	mu    sync.Mutex
	count int           // of subscribers
	done  chan struct{} // closed when there are none any more
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

// Subscribe has one goroutine for all subscribers, so that bundles come first for several routes of a mux, too.
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

// follow tells the subscribers of what is not as in old, until done is closed.
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
// prefixes of names with a "*" at the end, such as "file-cert:*"; "*" alone is for all names. The name itself wins
// over prefixes, and the longest prefix over the others. If the source of a name fails, or does not have it, no
// other is tried. A name without a source gives an error that wraps [fs.ErrNotExist]. Mux copies routes.
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

// route returns the key that a name goes to; empty if there is none.
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

// Subscribe has each source tell of the names that are routed to it. A source of several routes is subscribed to once
// for each.
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
