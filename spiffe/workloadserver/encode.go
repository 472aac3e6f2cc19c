package workloadserver

import (
	"bytes"
	"crypto"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// encodings caches the responses for one snapshot. The first stream that needs a response encodes it, and all streams
// with the same response share it.
type encodings struct {
	mu  sync.Mutex
	cur *generation
}

// generation has the responses for one snapshot and one list of CRLs.
type generation struct {
	snap    *spiffe.Snapshot
	crls    [][]byte
	bundles [3]func() ([]byte, error) // X.509, JWT, WIT

	mu    sync.Mutex
	svids map[string]func() ([]byte, error) // by list of identities
	held  int                               // identities in these lists
}

// of returns the generation of snap and crls, and drops any other generation.
func (e *encodings) of(snap *spiffe.Snapshot, crls [][]byte) *generation {
	e.mu.Lock()
	defer e.mu.Unlock()
	if g := e.cur; g == nil || g.snap != snap || !slices.EqualFunc(g.crls, crls, bytes.Equal) {
		e.cur = &generation{snap: snap, crls: crls, svids: make(map[string]func() ([]byte, error))}
		for i, kind := range kinds {
			e.cur.bundles[i] = sync.OnceValues(func() ([]byte, error) { return kind.encode(snap, crls) })
		}
	}
	return e.cur
}

// of returns the response for ids, which it encodes once.
func (g *generation) of(ids []Identity) ([]byte, error) {
	var key strings.Builder
	for _, id := range ids {
		// The function keeps the SVIDs alive, so that no other one can have the address.
		fmt.Fprintf(&key, "%p %q ", id.SVID, id.Hint)
	}
	g.mu.Lock()
	encode := g.svids[key.String()]
	if encode == nil {
		if g.held += len(ids); g.held > maxEncodings { // they can change while the snapshot does not
			clear(g.svids)
			g.held = len(ids)
		}
		encode = sync.OnceValues(func() ([]byte, error) { return encodeSVIDs(g.snap, g.crls, ids) })
		g.svids[key.String()] = encode
	}
	g.mu.Unlock()
	return encode()
}

func encodeSVIDs(snap *spiffe.Snapshot, crls [][]byte, ids []Identity) ([]byte, error) {
	m := &workloadwire.SVIDs{CRLs: crls, Federated: make(map[string][]byte)}
	own := make(map[spiffe.TrustDomain][]byte)
	for _, id := range ids {
		td := id.SVID.ID().TrustDomain()
		if own[td] == nil {
			b, err := snap.Bundle(td)
			if err != nil {
				return nil, err
			}
			if own[td] = authorities(b); len(own[td]) == 0 {
				// An empty bundle revokes the whole trust domain. A response can only say so with a denial.
				return nil, fmt.Errorf("the bundle of %q is empty: %w", td, ErrDenied)
			}
		}
		certs, key, err := id.SVID.MarshalDER()
		if err != nil {
			return nil, err
		}
		m.SVIDs = append(m.SVIDs,
			workloadwire.SVID{ID: id.SVID.ID().String(), Hint: id.Hint, Parts: [3][]byte{certs, key, own[td]}})
	}
	for b := range snap.Bundles().All() {
		der := authorities(b)
		if _, is := own[b.TrustDomain()]; !is && len(der) > 0 {
			m.Federated[b.TrustDomain().ID().String()] = der
		}
	}
	return workloadwire.X509.WriteSVIDs(m)
}

// authorities returns the X.509 authorities of b in DER, back to back.
func authorities(b *spiffe.Bundle) []byte {
	var der []byte
	for c := range b.X509Authorities() {
		der = append(der, c.Raw...)
	}
	return der
}

// kind is a kind of authorities: X.509, JWT or WIT.
type kind struct {
	profile *workloadwire.Profile
	value   func(b *spiffe.Bundle) (value []byte, some bool, err error) // some: b has authorities of the kind
}

var kinds = [...]kind{
	{workloadwire.X509, func(b *spiffe.Bundle) ([]byte, bool, error) {
		der := authorities(b)
		return der, len(der) > 0, nil
	}},
	{workloadwire.JWT, func(b *spiffe.Bundle) ([]byte, bool, error) {
		doc, err := b.MarshalJWKS()
		return doc, anyKey(b.JWTAuthorities()), err
	}},
	{workloadwire.WIT, func(b *spiffe.Bundle) ([]byte, bool, error) {
		doc, err := jws.MarshalSet(b.WITAuthorities(), false)
		return doc, anyKey(b.WITAuthorities()), err
	}},
}

// anyKey reports whether there are keys.
func anyKey(keys iter.Seq2[string, crypto.PublicKey]) bool {
	for range keys {
		return true
	}
	return false
}

// encode encodes all bundles that have authorities of the kind, and always the bundle of the server's own trust
// domain.
func (k kind) encode(snap *spiffe.Snapshot, crls [][]byte) ([]byte, error) {
	svid, err := snap.SVID()
	if err != nil {
		return nil, err
	}
	m := &workloadwire.Bundles{Bundles: make(map[string][]byte)}
	if k.profile == workloadwire.X509 {
		m.CRLs = crls
	}
	own, found := svid.ID().TrustDomain(), false
	for b := range snap.Bundles().All() {
		v, some, err := k.value(b)
		if err != nil {
			return nil, err
		}
		if found = found || some; some || b.TrustDomain() == own {
			m.Bundles[b.TrustDomain().ID().String()] = v
		}
	}
	if _, ok := m.Bundles[own.ID().String()]; !ok {
		return nil, fmt.Errorf("the snapshot has no bundle of its own trust domain %q", own)
	}
	if !found && k.profile == workloadwire.WIT { // without WIT authorities, WIT-SVIDs are not in use
		return nil, fmt.Errorf("no bundle has WIT authorities: %w", ErrDenied)
	}
	return k.profile.WriteBundles(m)
}
