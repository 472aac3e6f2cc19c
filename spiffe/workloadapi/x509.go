package workloadapi

import (
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Identity is an X.509-SVID with the label that the operator has given it.
type Identity struct {
	SVID *spiffe.SVID

	// Hint says what the identity is for, where a workload has several: a word that the operator and
	// the workload have agreed upon, at most 1,024 bytes, or "".
	Hint string
}

// X509Update is what one response of FetchX509SVID says: all that the caller has, never a change to
// what was before (WAPI-10). It does not change and is shared.
type X509Update struct {
	// Identities are what the caller may present, at least one. The first is the default
	// (WAPI-21). Hints that are not empty are distinct (WAPI-24).
	Identities []Identity

	// Bundles are the trust bundles of the identities' own trust domains and of those they
	// federate with, with X.509 authorities only (WAPI-16).
	Bundles *spiffe.BundleSet

	// CRLs are certificate revocation lists in DER, as they were received. Nothing of this library
	// looks into them (AMB-23).
	CRLs [][]byte

	// Skipped says what was not taken over: see [BundlesUpdate]. They are worth a line in the log.
	Skipped []error
}

// byHint returns the identity with that hint, and the default one for "".
func (u *X509Update) byHint(hint string) (*spiffe.SVID, bool) {
	if hint == "" {
		return u.Identities[0].SVID, true
	}
	for _, id := range u.Identities {
		if id.Hint == hint {
			return id.SVID, true
		}
	}
	return nil, false
}

// x509Reader reads the responses of one watch of X.509-SVIDs.
type x509Reader struct {
	svids map[[sha256.Size]byte]*spiffe.SVID // of the last good response
	shelf shelf
	last  *X509Update
}

func (r *x509Reader) forget() { *r = x509Reader{} }

// read makes an update of a response. An identity that is not whole makes it bad as a whole: it says
// what the caller has, and half of that is not what the server meant (WAPI-14, WAPI-26).
func (r *x509Reader) read(data []byte) (*X509Update, error) {
	var m x509SVIDResponse
	if err := decode(data, &m, maxElements); err != nil {
		return nil, err
	}
	switch n := len(m.svids); {
	case n == 0:
		return nil, errors.New("it has no SVIDs (WAPI-30)")
	case n > maxIdentities:
		return nil, fmt.Errorf("it has %d SVIDs, the limit is %d: %w", n, maxIdentities, spiffe.ErrTooLarge)
	}
	u := &X509Update{CRLs: m.crl}
	svids, next := make(map[[sha256.Size]byte]*spiffe.SVID, len(m.svids)), make(shelf, len(m.federatedBundles)+1)
	hints := make(map[string]bool)
	for i := range m.svids {
		s := &m.svids[i]
		hint := s.hint
		if hint != "" && hints[hint] {
			u.Skipped = append(u.Skipped, fmt.Errorf("workloadapi: SVID %d skipped: an earlier one has the hint %q too (WAPI-24)", i+1, clip(hint, 128)))
			continue
		}
		hints[hint] = true
		svid, notes, err := r.identity(s, svids, next)
		if err != nil {
			return nil, fmt.Errorf("SVID %d: %w", i+1, err)
		}
		u.Identities = append(u.Identities, Identity{SVID: svid, Hint: hint})
		u.Skipped = append(u.Skipped, notes...)
	}
	u.Skipped = atMost(maxNotes, append(u.Skipped, r.shelf.takeAll(next, m.federatedBundles, parseX509Bundle)...))
	var old *spiffe.BundleSet
	if r.last != nil {
		old = r.last.Bundles
	}
	u.Bundles = next.set(old)
	r.svids, r.shelf, r.last = svids, next, u
	return u, nil
}

// identity checks one SVID, and puts it into svids and the bundle of its trust domain into next.
func (r *x509Reader) identity(s *x509SVID, svids map[[sha256.Size]byte]*spiffe.SVID, next shelf) (*spiffe.SVID, []error, error) {
	for _, f := range []struct {
		name  string
		empty bool
	}{
		{"spiffe_id", s.spiffeID == ""}, {"x509_svid", len(s.x509SVID) == 0},
		{"x509_svid_key", len(s.x509SVIDKey) == 0}, {"bundle", len(s.bundle) == 0},
	} {
		if f.empty {
			return nil, nil, fmt.Errorf("%s is empty (WAPI-14)", f.name)
		}
	}
	id, err := spiffe.ParseID(s.spiffeID)
	if err != nil {
		return nil, nil, err
	}

	td := id.TrustDomain()
	own, err := r.shelf.take(td, s.bundle, parseX509Bundle)
	if err != nil {
		return nil, nil, fmt.Errorf("bundle: %w", err)
	}
	notes := own.notes
	if first, there := next[td]; there {
		notes = nil
		if first.sum != own.sum {
			notes = []error{fmt.Errorf("workloadapi: the bundle that comes with %q skipped: an earlier SVID brought another of the same trust domain", id)}
		}
		own = first
	}

	h := sha256.New()
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s.x509SVID))))
	h.Write(s.x509SVID)
	h.Write(s.x509SVIDKey)
	sum := [sha256.Size]byte(h.Sum(nil))
	svid := cmp.Or(r.svids[sum], svids[sum])
	if svid == nil {
		if svid, err = spiffe.ParseSVID(s.x509SVID, s.x509SVIDKey); err != nil {
			return nil, nil, err
		}
	}
	if svid.ID() != id {
		return nil, nil, fmt.Errorf("the certificate is that of %q, not %q", svid.ID(), id)
	}
	if err := verify(svid, own.bundle); err != nil {
		// Not a reason to discard the response: a root that was revoked may have left the bundle before
		// the identity is renewed, and to keep the bundle from before would be to trust that root.
		notes = append(slices.Clip(notes), fmt.Errorf("workloadapi: peers will refuse %q: %w", id, err))
	}
	svids[sum], next[td] = svid, own
	return svid, notes, nil
}

// verify tells whether svid has a path to its own bundle, as peers will look for one. Whether it is
// valid today is another question, which passes with time.
func verify(svid *spiffe.SVID, bundle *spiffe.Bundle) error {
	leaf := svid.Leaf()
	now := func() time.Time {
		now := time.Now()
		if now.Before(leaf.NotBefore) {
			return leaf.NotBefore
		}
		if now.After(leaf.NotAfter) {
			return leaf.NotAfter
		}
		return now
	}
	v, err := spiffe.NewVerifier(bundle, spiffe.AllowIDs(svid.ID()), &spiffe.VerifierOptions{Now: now})
	if err == nil {
		_, err = v.VerifyChain(svid.Chain(), spiffe.AnyRole)
	}
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok && e.Reason == x509.Expired {
		return nil // something above the leaf, whose time may come or has gone
	}
	return err
}
