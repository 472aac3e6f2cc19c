package workloadserver

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/documents"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// encodings caches the responses for one snapshot and one list of CRLs. The first stream that needs a response encodes
// it, and all streams with the same response share it.
type encodings struct {
	mu   sync.Mutex
	snap *spiffe.Snapshot
	crls [][]byte
	made map[string]response
	held int // identities in these responses
}

type response struct {
	encode func() ([]byte, error) // once
	ids    []Identity             // keeps the SVIDs alive, as their addresses are in the key
}

// get returns the response with a key, which encode makes once, for ids.
func (e *encodings) get(snap *spiffe.Snapshot, crls [][]byte, key string, ids []Identity,
	encode func() ([]byte, error)) ([]byte, error) {
	e.mu.Lock()
	if e.snap != snap || !slices.EqualFunc(e.crls, crls, bytes.Equal) {
		e.snap, e.crls, e.made, e.held = snap, crls, make(map[string]response), 0
	}
	r, ok := e.made[key]
	if !ok {
		if e.held += len(ids); e.held > maxEncodings { // they can change while the snapshot does not
			clear(e.made)
			e.held = len(ids)
		}
		r = response{sync.OnceValues(encode), ids}
		e.made[key] = r
	}
	e.mu.Unlock()
	return r.encode()
}

// svids returns the response with identities, for a client that may read ML-DSA.
func (h *Handler) svids(snap *spiffe.Snapshot, ids []Identity, reads bool) ([]byte, error) {
	if reads {
		ids = withAlternatives(ids)
	}
	var key strings.Builder
	for _, id := range ids {
		fmt.Fprintf(&key, "%p %q ", id.SVID, id.Hint)
	}
	crls := h.crls()
	return h.enc.get(snap, crls, key.String(), ids, func() ([]byte, error) { return encodeSVIDs(snap, crls, ids) })
}

// bundles returns the response with the bundles of a profile, for a client that may read ML-DSA.
func (h *Handler) bundles(snap *spiffe.Snapshot, p *workloadwire.Profile, reads bool) ([]byte, error) {
	crls, key := h.crls(), fmt.Sprintf("%p %t", p, reads)
	return h.enc.get(snap, crls, key, nil, func() ([]byte, error) { return encodeBundles(p, snap, crls, reads) })
}

// withAlternatives returns ids, each followed by its alternative.
func withAlternatives(ids []Identity) (all []Identity) {
	for _, id := range ids {
		all = append(all, id)
		if other := id.SVID.Alternative(); other != nil {
			all = append(all, Identity{SVID: other})
		}
	}
	return all
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

// encodeBundles encodes all bundles that have authorities of the profile, and always the bundle of the server's own
// trust domain.
func encodeBundles(p *workloadwire.Profile, snap *spiffe.Snapshot, crls [][]byte, reads bool) ([]byte, error) {
	m := &workloadwire.Bundles{Bundles: make(map[string][]byte)}
	if p == workloadwire.X509 {
		m.CRLs = crls
	}
	svid, _ := snap.SVID() // of a snapshot: never an error
	own, found := svid.ID().TrustDomain(), false
	for b := range snap.Bundles().All() {
		if p == workloadwire.JWT && !reads {
			b = documents.Classical(b)
		}
		v, some, err := encodeBundle(p, b)
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
	if !found && p == workloadwire.WIT { // without WIT authorities, WIT-SVIDs are not in use
		return nil, fmt.Errorf("no bundle has WIT authorities: %w", ErrDenied)
	}
	return p.WriteBundles(m)
}

// encodeBundle returns the authorities of b for the profile, and whether there are some.
func encodeBundle(p *workloadwire.Profile, b *spiffe.Bundle) (value []byte, some bool, err error) {
	c := b.Contents()
	switch p {
	case workloadwire.X509:
		value = authorities(b)
		return value, len(value) > 0, nil
	case workloadwire.JWT:
		value, err = b.MarshalJWKS()
		return value, len(c.JWTAuthorities) > 0, err
	}
	value, err = jws.MarshalSet(c.WITAuthorities, false)
	return value, len(c.WITAuthorities) > 0, err
}
