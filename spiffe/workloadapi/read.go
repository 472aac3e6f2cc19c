package workloadapi

import (
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// Identity is an X.509-SVID with the operator's label.
type Identity struct {
	SVID *spiffe.SVID

	// Hint says what the identity is for, in a workload that has several: a word agreed between operator and workload,
	// or "".
	Hint string
}

// Update is one response: everything that the workload has or may trust, not a change to earlier responses. It never
// changes and is shared.
type Update struct {
	// Identities are what the workload may present, the default one first. Hints other than "" are distinct. A
	// response with bundles has none, and one with SVIDs at least one.
	Identities []Identity

	// Bundles are the trust bundles of the identities' own trust domains, and of others that the workload may trust.
	// They have authorities of one kind, that of the response. A bundle that was received without content is an empty
	// one: nothing of its trust domain is trusted.
	Bundles *spiffe.BundleSet

	// CRLs are certificate revocation lists in DER, unparsed. Responses of JWT and WIT bundles have none.
	CRLs [][]byte

	// Skipped says what of the response was not used: a damaged bundle of a foreign trust domain, whose previous one
	// stays, an authority in a bundle, or an identity with the hint of an earlier one. It also reports identities that
	// peers will refuse, or that serve on one side of a connection only. Each is worth a line in a log.
	Skipped []error

	withheld error // why identities that the server sent are not in force; of a Source only
}

// identity returns the first identity with hint, or the first one if hint is empty; nil if there is none.
func (u *Update) identity(hint string) *spiffe.SVID {
	for _, id := range u.Identities {
		if hint == "" || id.Hint == hint {
			return id.SVID
		}
	}
	return nil
}

// of returns the SVID with this ID and hint, or nil.
func (u *Update) of(id spiffe.ID, hint string) *spiffe.SVID {
	for _, i := range u.Identities {
		if i.SVID.ID() == id && i.Hint == hint {
			return i.SVID
		}
	}
	return nil
}

// inForce returns u with the identities that are in force at now, of which old, which may be nil, were before. One
// that has expired or is not valid yet replaces none of its ID and, if it is the only one, none at all: its
// successor will come. next is when one of those begins to be valid, zero for none.
func (u *Update) inForce(old *Update, now time.Time) (out *Update, next time.Time) {
	if old == nil {
		old = &Update{}
	}
	c := *u
	c.Identities = nil
	for _, id := range u.Identities {
		from, err := u.inTime(id.SVID, now)
		if err == nil {
			c.Identities = append(c.Identities, id)
			continue
		}
		if from.After(now) && (next.IsZero() || from.Before(next)) {
			next = from
		}
		c.withheld = fmt.Errorf("workloadapi: %q is not in force: %w", id.SVID.ID(), err)
		c.Skipped = append(slices.Clip(c.Skipped), c.withheld)
		if before := old.of(id.SVID.ID(), id.Hint); before != nil {
			c.Identities = append(c.Identities, Identity{SVID: before, Hint: id.Hint})
		}
	}
	if c.withheld == nil {
		return u, next
	}
	if len(c.Identities) == 0 {
		c.Identities = old.Identities
	}
	return &c, next
}

// inTime returns why svid is not valid at now, or a certificate on the way to its bundle, and when the last
// certificate of its chain begins to be.
func (u *Update) inTime(svid *spiffe.SVID, now time.Time) (from time.Time, err error) {
	last := slices.MaxFunc(svid.Chain(), func(a, b *x509.Certificate) int { return a.NotBefore.Compare(b.NotBefore) })
	if err = certchain.InTime(svid.Leaf(), now); err == nil {
		if err = sourcereport.Refused(svid, u.Bundles, now); !expired(err) {
			err = nil
		}
	}
	return last.NotBefore, err
}

// expired reports whether err says that a certificate has expired or is not valid yet.
func expired(err error) bool {
	e, ok := errors.AsType[x509.CertificateInvalidError](err)
	return ok && e.Reason == x509.Expired
}

// reader reads the responses of one watch. What has not changed since the last good response is the same value as
// before, for readers that compare.
type reader struct {
	last  *Update
	force *Update // last, with what of the responses before is still in force, when another one came
}

// bundles has the bundles of a response.
type bundles map[spiffe.TrustDomain]*spiffe.Bundle

// parser makes a bundle of the value in a message. The notes say what was left out of it.
type parser func(td spiffe.TrustDomain, value []byte) (b *spiffe.Bundle, notes []error, err error)

// entry is an SVID of a response with its ID.
type entry struct {
	workloadwire.SVID
	id spiffe.ID
	n  int // in the response, counted from 1
}

// readEntries checks the SVIDs of a response. One incomplete SVID makes the whole response bad: the response says what
// the workload has, and half of that is not what the server meant.
func readEntries(p *workloadwire.Profile, svids []workloadwire.SVID) (all []entry, skipped []error, err error) {
	switch n := len(svids); {
	case n == 0:
		return nil, nil, errors.New("it has no SVIDs")
	case n > maxIdentities:
		return nil, nil, fmt.Errorf("it has %d SVIDs, the limit is %d: %w", n, maxIdentities, spiffe.ErrTooLarge)
	}
	hints := make(map[string]bool)
	for i, s := range svids {
		if s.Hint != "" && hints[s.Hint] {
			skipped = append(skipped, fmt.Errorf("workloadapi: SVID %d skipped: an earlier one has the hint %q too",
				i+1, redact.Clip(s.Hint, 128)))
			continue
		}
		hints[s.Hint] = true
		id, err := spiffe.ParseID(s.ID)
		if err != nil {
			return nil, nil, fmt.Errorf("SVID %d: %w", i+1, err)
		}
		for k, name := range p.Parts {
			if len(s.Parts[k]) == 0 {
				return nil, nil, fmt.Errorf("SVID %d: %s is empty", i+1, name)
			}
		}
		all = append(all, entry{s, id, i + 1})
	}
	return all, skipped, nil
}

// x509SVIDs makes an update of a response of FetchX509SVID.
func (r *reader) x509SVIDs(data []byte) (*Update, error) {
	m, err := workloadwire.X509.ReadSVIDs(data, maxElements)
	if err != nil {
		return nil, err
	}
	if r.last != nil {
		r.force, _ = r.last.inForce(r.force, time.Now())
	}
	entries, skipped, err := readEntries(workloadwire.X509, m.SVIDs)
	if err != nil {
		return nil, err
	}
	u, next := &Update{CRLs: m.CRLs, Skipped: skipped}, make(bundles)
	for _, e := range entries {
		svid, notes, err := r.identity(e, next)
		if err != nil {
			return nil, fmt.Errorf("SVID %d: %w", e.n, err)
		}
		u.Skipped = append(u.Skipped, notes...)
		if n := len(u.Identities) - 1; n >= 0 && e.Hint == "" {
			if both, err := u.Identities[n].SVID.WithAlternative(svid); err == nil {
				u.Identities[n].SVID = both
				continue
			}
		}
		u.Identities = append(u.Identities, Identity{SVID: svid, Hint: e.Hint})
	}
	for i := range u.Identities {
		u.Identities[i].SVID = r.known(u.Identities[i].SVID)
	}
	u.Skipped = append(u.Skipped, r.takeAll(next, m.Federated, parseX509Bundle)...)
	return r.took(u, next), nil
}

// took completes an update with its bundles.
func (r *reader) took(u *Update, next bundles) *Update {
	u.Skipped = atMost(maxNotes, u.Skipped)
	u.Bundles = setOf(next)
	if r.last != nil && u.Bundles.Equal(r.last.Bundles) {
		u.Bundles = r.last.Bundles
	}
	r.last = u
	return u
}

// identity checks one SVID, and puts the bundle of its trust domain into next.
func (r *reader) identity(e entry, next bundles) (*spiffe.SVID, []error, error) {
	td := e.id.TrustDomain()
	own, notes, err := r.take(td, e.Parts[2], parseX509Bundle)
	if err != nil {
		return nil, nil, fmt.Errorf("bundle: %w", err)
	}
	if first := next[td]; first != nil {
		notes = nil
		if !first.Equal(own) {
			notes = []error{fmt.Errorf("workloadapi: the bundle that comes with %q skipped: an earlier SVID "+
				"brought another of the same trust domain", e.id)}
		}
		own = first
	}
	svid, err := spiffe.ParseSVID(e.Parts[0], e.Parts[1])
	if err != nil {
		return nil, nil, err
	}
	if svid.ID() != e.id {
		return nil, nil, fmt.Errorf("the certificate is that of %q, not %q", svid.ID(), e.id)
	}
	var before *spiffe.SVID
	if r.force != nil {
		before = r.force.of(e.id, e.Hint)
	}
	limited, err := sourcereport.Usages(svid, before)
	if err != nil {
		return nil, nil, err
	}
	if limited != nil {
		notes = append(notes, fmt.Errorf("workloadapi: %w", limited))
	}
	if err := refused(svid, own); err != nil {
		// This does not discard the response: a revoked root may have left the bundle before the identity is renewed,
		// and keeping the previous bundle would mean trusting that root.
		notes = append(notes, fmt.Errorf("workloadapi: peers will refuse %q: %w", e.id, err))
	}
	next[td] = own
	return svid, notes, nil
}

// refused returns why peers will refuse svid, apart from its times: whether it is valid now is another question, which
// passes with time.
func refused(svid *spiffe.SVID, own *spiffe.Bundle) error {
	leaf, at := svid.Leaf(), time.Now()
	if at.Before(leaf.NotBefore) {
		at = leaf.NotBefore
	} else if at.After(leaf.NotAfter) {
		at = leaf.NotAfter
	}
	if err := sourcereport.Refused(svid, own, at); !expired(err) { // a certificate above the leaf
		return err
	}
	return nil
}

// known returns the SVID of the last response with the certificates of svid, or svid if there is none.
func (r *reader) known(svid *spiffe.SVID) *spiffe.SVID {
	if r.last != nil {
		for _, old := range r.last.Identities {
			if same(old.SVID, svid) {
				return old.SVID
			}
		}
	}
	return svid
}

// same reports whether two SVIDs, which may be nil, have the same certificates, and their alternatives too.
func same(a, b *spiffe.SVID) bool {
	if a == nil || b == nil {
		return a == b
	}
	return slices.EqualFunc(a.Chain(), b.Chain(), (*x509.Certificate).Equal) && same(a.Alternative(), b.Alternative())
}

func (r *reader) x509Bundles(data []byte) (*Update, error) {
	return r.bundles(workloadwire.X509, parseX509Bundle, data)
}

func (r *reader) jwtBundles(data []byte) (*Update, error) {
	return r.bundles(workloadwire.JWT, jwks(spiffe.ParseJWKS), data)
}

func (r *reader) witBundles(data []byte) (*Update, error) {
	return r.bundles(workloadwire.WIT, jwks(spiffe.ParseJWKSWIT), data)
}

// bundles makes an update of a response with bundles.
func (r *reader) bundles(p *workloadwire.Profile, parse parser, data []byte) (*Update, error) {
	m, err := p.ReadBundles(data, maxElements)
	if err != nil {
		return nil, err
	}
	if len(m.Bundles) == 0 {
		return nil, errors.New("it has no bundles")
	}
	next := make(bundles, len(m.Bundles))
	u := &Update{CRLs: m.CRLs, Skipped: r.takeAll(next, m.Bundles, parse)}
	if len(next) == 0 {
		return nil, fmt.Errorf("no bundle in it can be used: %w", u.Skipped[0])
	}
	return r.took(u, next), nil
}

// before returns the bundle of td in the last response, or nil.
func (r *reader) before(td spiffe.TrustDomain) *spiffe.Bundle {
	if r.last == nil {
		return nil
	}
	b, _ := r.last.Bundles.Bundle(td) // nil if there is none
	return b
}

// take returns the bundle that value stands for.
func (r *reader) take(td spiffe.TrustDomain, value []byte, parse parser) (*spiffe.Bundle, []error, error) {
	b, notes, err := parse(td, value)
	if err != nil {
		return nil, nil, err
	}
	if old := r.before(td); old != nil && old.Equal(b) {
		b = old
	}
	return b, atMost(maxBundleNotes, notes), nil
}

// takeAll puts the bundles of a map into next, each by itself: a damaged one affects no other and leaves the previous
// one in place. It skips a trust domain that next already has.
func (r *reader) takeAll(next bundles, m map[string][]byte, parse parser) (skipped []error) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		td, err := trustDomain(key)
		if err != nil {
			skipped = append(skipped, err)
			continue
		}
		if next[td] != nil {
			skipped = append(skipped,
				fmt.Errorf("workloadapi: bundle of %q: skipped: it is the own trust domain, whose bundle comes "+
					"with the identity", td))
			continue
		}
		b, notes, err := r.take(td, m[key], parse)
		if err != nil {
			notes = []error{fmt.Errorf("workloadapi: bundle of %q: skipped: %w", td, err)}
			b = r.before(td)
		}
		if b != nil {
			next[td] = b
		}
		skipped = append(skipped, notes...)
	}
	return skipped
}

// atMost cuts notes to n and counts the rest, so that a foreign trust domain cannot fill the log.
func atMost(n int, notes []error) []error {
	if len(notes) <= n {
		return notes
	}
	return append(notes[:n:n], fmt.Errorf("workloadapi: and %d more", len(notes)-n))
}

// trustDomain parses the key of a map of bundles.
func trustDomain(key string) (spiffe.TrustDomain, error) {
	id, err := spiffe.ParseID(key)
	switch {
	case err != nil:
		return spiffe.TrustDomain{}, fmt.Errorf("workloadapi: a bundle was skipped: its name: %w", err)
	case id.Path() != "":
		return spiffe.TrustDomain{},
			fmt.Errorf("workloadapi: a bundle was skipped: its name %q is not the ID of a trust domain",
				redact.Clip(key, 128))
	}
	return id.TrustDomain(), nil
}

// parseX509Bundle parses concatenated certificates in DER. If one does not parse, the whole bundle is damaged; a
// certificate that cannot be an authority is left out. No content is the empty bundle.
func parseX509Bundle(td spiffe.TrustDomain, der []byte) (*spiffe.Bundle, []error, error) {
	if len(der) > jws.MaxSetSize {
		return nil, nil, fmt.Errorf("%d bytes, the limit is %d: %w", len(der), jws.MaxSetSize, spiffe.ErrTooLarge)
	}
	var authorities []*x509.Certificate
	var notes []error
	for n := 1; len(der) > 0; n++ {
		if n > jws.MaxSetKeys {
			return nil, nil, fmt.Errorf("more than %d certificates: %w", jws.MaxSetKeys, spiffe.ErrTooLarge)
		}
		var one asn1.RawValue
		rest, err := asn1.Unmarshal(der, &one)
		if err != nil {
			return nil, nil, fmt.Errorf("certificate %d: not DER", n)
		}
		cert, err := x509.ParseCertificate(one.FullBytes)
		if err != nil {
			return nil, nil, fmt.Errorf("certificate %d: %w", n, cutError{err})
		}
		der = rest
		if reason := certchain.UnfitAnchor(cert); reason != "" {
			notes = append(notes, fmt.Errorf("workloadapi: authority %d of %q skipped: %s", n, td, reason))
			continue
		}
		authorities = append(authorities, cert)
	}
	b, err := spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: authorities})
	return b, notes, err
}

// jwks returns a parser of JWK Sets. In a standard one, keys lack the "use" that a bundle document demands; keys of
// another use are left out. No content, and a set without usable keys, is the empty bundle.
func jwks(parse func(spiffe.TrustDomain, []byte) (*spiffe.Bundle, error)) parser {
	return func(td spiffe.TrustDomain, doc []byte) (*spiffe.Bundle, []error, error) {
		if len(doc) == 0 {
			b, err := spiffe.NewBundle(td, spiffe.BundleContents{})
			return b, nil, err
		}
		b, err := parse(td, doc)
		if err != nil {
			return nil, nil, err
		}
		return b, b.Skipped(), nil
	}
}
