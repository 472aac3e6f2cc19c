package workloadapi

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/svidkit/svidkit/spiffe"
)

// encodings are the responses that belong to one snapshot, each made once, by the first caller that
// is to have it, and shared by all whose answer is the same.
type encodings struct {
	mu  sync.Mutex
	cur *generation
}

// generation has the responses of one snapshot with one list of CRLs.
type generation struct {
	snap *spiffe.Snapshot
	crls [][]byte

	x509, jwt, wit once
	mu             sync.Mutex
	callers        *node
	nodes          int
}

// node stands for a list of identities: its own, after those on the way to it. It holds on to them,
// so that no other SVID can have the address of one that is here.
type node struct {
	next map[Identity]*node
	svid once
}

// once makes a response once. If that fails it fails for all.
type once struct {
	do  sync.Once
	m   *raw
	err error
}

func (o *once) get(f func() (*raw, error)) (*raw, error) {
	o.do.Do(func() { o.m, o.err = f() })
	return o.m, o.err
}

// of returns what belongs to snap, and drops what belongs to another.
func (e *encodings) of(snap *spiffe.Snapshot, crls [][]byte) *generation {
	e.mu.Lock()
	defer e.mu.Unlock()
	if g := e.cur; g == nil || g.snap != snap || !sameSlices(g.crls, crls) {
		e.cur = &generation{snap: snap, crls: crls, callers: &node{}}
	}
	return e.cur
}

// sameSlices compares the elements by their place in memory first.
func sameSlices(a, b [][]byte) bool {
	return slices.EqualFunc(a, b, func(x, y []byte) bool {
		return len(x) == len(y) && (len(x) == 0 || &x[0] == &y[0] || slices.Equal(x, y))
	})
}

// node returns the node of a list of identities.
func (g *generation) node(ids []Identity) *node {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.nodes > maxEncodings { // their callers' identities change while the snapshot does not
		g.callers, g.nodes = &node{}, 0
	}
	n := g.callers
	for _, id := range ids {
		next := n.next[id]
		if next == nil {
			if n.next == nil {
				n.next = make(map[Identity]*node)
			}
			next = &node{}
			n.next[id] = next
			g.nodes++
		}
		n = next
	}
	return n
}

// checkIdentities refuses what the Identities hook must not return.
func checkIdentities(ids []Identity) error {
	hints := make(map[string]bool)
	for _, id := range ids {
		switch {
		case id.SVID == nil:
			return errors.New("an Identity has no SVID")
		case len(id.Hint) > maxHint:
			return fmt.Errorf("the hint of %q has %d bytes, the limit is %d (WAPI-25)", id.SVID.ID(), len(id.Hint), maxHint)
		case !utf8.ValidString(id.Hint):
			return fmt.Errorf("the hint of %q is not UTF-8", id.SVID.ID())
		case id.Hint != "" && hints[id.Hint]:
			return fmt.Errorf("two identities have the hint %q (WAPI-23)", clip(id.Hint, 128))
		}
		hints[id.Hint] = true
	}
	return nil
}

func (e *encodings) x509SVIDs(snap *spiffe.Snapshot, crls [][]byte, ids []Identity) (*raw, error) {
	return e.of(snap, crls).node(ids).svid.get(func() (*raw, error) {
		if err := checkIdentities(ids); err != nil {
			return nil, err
		}
		resp := &x509SVIDResponse{crl: crls, federatedBundles: make(map[string][]byte)}
		own := make(map[spiffe.TrustDomain][]byte)
		for _, id := range ids {
			td := id.SVID.ID().TrustDomain()
			if own[td] == nil {
				b, err := snap.Bundle(td)
				if err != nil {
					return nil, err
				}
				if own[td] = authorities(b); len(own[td]) == 0 {
					// Everything of the trust domain is revoked, and this is the only way to say it.
					return nil, fmt.Errorf("the bundle of %q is empty: %w", td, ErrDenied)
				}
			}
			certs, key, err := id.SVID.MarshalDER()
			if err != nil {
				return nil, err
			}
			resp.svids = append(resp.svids, x509SVID{
				spiffeID: id.SVID.ID().String(), x509SVID: certs, x509SVIDKey: key, bundle: own[td], hint: id.Hint,
			})
		}
		for b := range snap.Bundles().All() {
			der := authorities(b)
			if _, is := own[b.TrustDomain()]; !is && len(der) > 0 {
				resp.federatedBundles[b.TrustDomain().ID().String()] = der
			}
		}
		return encode(resp)
	})
}

// authorities returns the X.509 authorities of b in DER, back to back.
func authorities(b *spiffe.Bundle) []byte {
	var der []byte
	for c := range b.X509Authorities() {
		der = append(der, c.Raw...)
	}
	return der
}

func (e *encodings) x509Bundles(snap *spiffe.Snapshot, crls [][]byte) (*raw, error) {
	return e.of(snap, crls).x509.get(func() (*raw, error) {
		resp := &x509BundlesResponse{crl: crls, bundles: make(map[string][]byte)}
		for b := range snap.Bundles().All() {
			if der := authorities(b); len(der) > 0 || isOwn(snap, b) {
				resp.bundles[b.TrustDomain().ID().String()] = der
			}
		}
		return whole(resp.bundles, snap, resp)
	})
}

func (e *encodings) jwtBundles(snap *spiffe.Snapshot, crls [][]byte) (*raw, error) {
	return e.of(snap, crls).jwt.get(func() (*raw, error) {
		resp := &jwtBundlesResponse{bundles: make(map[string][]byte)}
		for b := range snap.Bundles().All() {
			keys := b.Contents().JWTAuthorities
			if len(keys) == 0 && !isOwn(snap, b) {
				continue
			}
			only, err := spiffe.NewBundle(b.TrustDomain(), spiffe.BundleContents{JWTAuthorities: keys})
			if err != nil {
				return nil, err
			}
			doc, err := only.Marshal()
			if err != nil {
				return nil, err
			}
			// A plain JWK Set, as other servers send it: "use" belongs to bundle documents (WAPI-45). Inside
			// of a string the quotes would be escaped.
			resp.bundles[b.TrustDomain().ID().String()] = bytes.ReplaceAll(doc, []byte(`"use":`+useJWT+`,`), nil)
		}
		return whole(resp.bundles, snap, resp)
	})
}

func isOwn(snap *spiffe.Snapshot, b *spiffe.Bundle) bool {
	svid, err := snap.SVID()
	return err == nil && svid.ID().MemberOf(b.TrustDomain())
}

// whole encodes a response if its bundles have that of the server's own trust domain (WAPI-34, WAPI-44).
func whole(bundles map[string][]byte, snap *spiffe.Snapshot, m message) (*raw, error) {
	svid, err := snap.SVID()
	if err != nil {
		return nil, err
	}
	td := svid.ID().TrustDomain()
	if _, ok := bundles[td.ID().String()]; !ok {
		return nil, fmt.Errorf("the snapshot has no bundle of its own trust domain %q", td)
	}
	return encode(m)
}
