package rotation

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// MaxKeys bounds the keys of each kind in the bundle: every verifier of the trust domain parses and searches it.
const MaxKeys = 64

// ErrRotating says that a key cannot be prepared.
var ErrRotating = errors.New("a rotation is under way")

// Document is the state of an authority, which it must not lose. A shared Document never changes: [Document.Advance]
// returns the next one, the same on every replica. Call the other methods that change it only on a [Document.Clone].
type Document struct {
	Authority string   // random, chosen when the CA was made: it tells two CAs of one trust domain apart
	Revision  uint64   // grows by one with each write
	Writer    string   // random, chosen for each write: it tells a reader whether the write was its own
	Sequence  uint64   // of the bundle
	Keys      [3][]Key // by kind, oldest first; at most one is Active; of roots at least one, unless there are none
	Loose     []Loose  // the private keys at custodians that no key has
}

// Loose is a private key at a custodian that no key of a document has. It is in the document before it is made, and
// until it is destroyed, so that a crash at no moment leaves a key that no document names.
type Loose struct {
	Name  string    `json:"name"`
	Use   string    `json:"use,omitempty"` // the kind and algorithm of the next key; empty: it is to be destroyed
	Since time.Time `json:"since"`         // when the attempt to make it began, or it was to be destroyed
}

// Names reports whether d names this private key at a custodian.
func (d *Document) Names(name string) bool {
	return d.signsWith(name) || slices.ContainsFunc(d.Loose, func(l Loose) bool { return l.Name == name })
}

// signsWith reports whether a key of d has the private key with this name.
func (d *Document) signsWith(name string) bool {
	return slices.ContainsFunc(slices.Concat(d.Keys[:]...), func(k Key) bool { return k.Name == name })
}

// Begun reports whether d is the record of a CA that is being made: its private keys have names, and no more.
func (d *Document) Begun() bool { return len(slices.Concat(d.Keys[:]...)) == 0 && len(d.Loose) > 0 }

// Stake returns the name of a private key for the next key of this use, and whether d had it: that of an attempt that
// began at least patience ago and so has failed, or a new one. Attempts at the same time have different names, or one
// could make a key again that the other has used, retired and destroyed.
func (d *Document) Stake(use string, now time.Time, patience time.Duration) (name string, had bool) {
	now = now.UTC().Round(0)
	for i, l := range d.Loose {
		if l.Use == use && now.Sub(l.Since) >= patience {
			d.Loose[i].Since = now
			return l.Name, true
		}
	}
	name = NamePrefix(d.Authority) + RandomID()[:16]
	d.Loose = append(slices.Clip(d.Loose), Loose{Name: name, Use: use, Since: now})
	return name, false
}

// Discard takes l a step further: if no next key came of it, it is to be destroyed, and otherwise it has been. It
// reports whether d had l.
func (d *Document) Discard(l Loose, now time.Time) bool {
	i := slices.Index(d.Loose, l)
	switch {
	case i < 0:
		return false
	case l.Use != "":
		d.Loose[i] = Loose{Name: l.Name, Since: now.UTC().Round(0)}
	default:
		d.Loose = slices.Delete(d.Loose, i, i+1)
	}
	return true
}

// NamePrefix begins the names of the private keys of the CA with this ID.
func NamePrefix(authority string) string { return "svidkit-" + authority + "-" }

// Account brings d.Loose up to date after a change of before's keys. A private key that no key has any more is to be
// destroyed. A key that joined must have a private key that was loose, and is not to be destroyed.
func (d *Document) Account(before *Document, now time.Time) error {
	for _, k := range slices.Concat(d.Keys[:]...) {
		if k.Name == "" || before.signsWith(k.Name) {
			continue
		}
		at := slices.IndexFunc(d.Loose, func(l Loose) bool { return l.Use != "" && l.Name == k.Name })
		if at < 0 {
			return fmt.Errorf("the private key %s is not for a next key any more", k.Name)
		}
		d.Loose = slices.Concat(d.Loose[:at], d.Loose[at+1:])
	}
	for _, k := range slices.Concat(before.Keys[:]...) {
		if k.Name != "" && !d.signsWith(k.Name) {
			d.Loose = append(slices.Clip(d.Loose), Loose{Name: k.Name, Since: now.UTC().Round(0)})
		}
	}
	return nil
}

// Clone returns a document that may be changed, including its keys.
func (d *Document) Clone() *Document {
	c := *d
	for kind := range c.Keys {
		c.Keys[kind] = slices.Clone(d.Keys[kind])
	}
	c.Loose = slices.Clone(d.Loose)
	return &c
}

// In returns the first key of a kind in the given phase, or nil. The key belongs to d.
func (d *Document) In(kind Kind, p Phase) *Key {
	if i := slices.IndexFunc(d.Keys[kind], func(k Key) bool { return k.Phase == p }); i >= 0 {
		return &d.Keys[kind][i]
	}
	return nil
}

// Roots returns both kinds of roots, the classical ones first.
func (d *Document) Roots() []Key { return slices.Concat(d.Keys[Root], d.Keys[Quantum]) }

// Primary returns the root that signs what either could: the classical one, if there is one. It is nil without roots.
func (d *Document) Primary() *Key { return cmp.Or(d.In(Root, Active), d.In(Quantum, Active)) }

// End ends a kind of root, which is no longer wanted, if one of the other kind signs: the active one retires, and a
// distributing one leaves. It reports whether there was any.
func (d *Document) End(kind Kind, now time.Time) bool {
	active, distributing := d.In(kind, Active), d.In(kind, Distributing)
	if d.In(Root+Quantum-kind, Active) == nil || active == nil && distributing == nil {
		return false
	}
	if active != nil {
		*active = active.retired(now.Add(active.Propagation)) // another replica may not know yet
	}
	d.Keys[kind] = slices.DeleteFunc(d.Keys[kind], func(k Key) bool { return k.Phase == Distributing })
	return true
}

// Find returns the key with this ID, or nil. The key belongs to d.
func (d *Document) Find(id string) *Key {
	for _, keys := range d.Keys {
		for i := range keys {
			if keys[i].ID == id {
				return &keys[i]
			}
		}
	}
	return nil
}

// twins returns all keys with the same private key as the key with this ID, itself included: a renewed root has
// several certificates. The keys belong to d.
func (d *Document) twins(id string) (all []*Key) {
	of := d.Find(id)
	if of == nil {
		return nil
	}
	for i := range d.Keys[of.Kind()] {
		if k := &d.Keys[of.Kind()][i]; k.SameKey(of) {
			all = append(all, k)
		}
	}
	return all
}

// ErrActive says that a key cannot be revoked because it signs.
var ErrActive = errors.New("the key is active")

// Revoke removes a key and all with the same private key. If one of them is active, the distributing key becomes
// active at once, or else the key that successor makes; with a nil successor the error wraps [ErrActive]. It returns
// the new active key, or nil.
func (d *Document) Revoke(id string, successor func() (Key, error), now time.Time) (*Key, error) {
	found := d.Find(id)
	if found == nil {
		return nil, nil
	}
	gone, kind, after := *found, found.Kind(), (*Key)(nil)
	if active := d.In(kind, Active); active != nil && active.SameKey(&gone) {
		if successor == nil {
			return nil, fmt.Errorf("%v %s: %w", kind, active.ID, ErrActive)
		}
		terms, next := active.Terms, d.In(kind, Distributing)
		if next == nil {
			fresh, err := successor()
			if err != nil {
				return nil, err
			}
			fresh.Prepared = now
			d.Keys[kind] = append(d.Keys[kind], fresh)
			next = &d.Keys[kind][len(d.Keys[kind])-1]
		}
		next.Phase, next.Activates, next.Terms = Active, now, next.Terms.Raise(terms)
		after = new(*next)
	}
	d.Keys[kind] = slices.DeleteFunc(d.Keys[kind], func(k Key) bool { return k.SameKey(&gone) })
	return after, nil
}

// Advance returns d as of now, and the events of the steps that lead there. Each moment at which keys of one kind
// leave gives the bundle the next number.
func (d *Document) Advance(now time.Time) (*Document, []Event) {
	next := *d
	var events []Event
	for kind, keys := range d.Keys {
		after, more := advance(keys, now)
		next.Keys[kind], events = after, append(events, more...)
		var last time.Time
		for _, e := range more {
			if e.What == Retired && !e.At.Equal(last) {
				next.Sequence++
				last = e.At
			}
		}
	}
	if len(events) == 0 {
		return d, nil
	}
	_ = next.Account(d, now) // no key has joined
	return &next, events
}

// Next returns when the next step of time is due; zero for never.
func (d *Document) Next() time.Time { return nextStep(slices.Concat(d.Keys[:]...)) }

// NumberOfNext returns the bundle's sequence number after an authority has decided a change of d, or of its times. It
// is higher than any number that time alone leads to from d: replicas that do not know of the decision may reach
// those, and two bundles must not share a number.
func (d *Document) NumberOfNext() uint64 {
	n := d.Sequence + 1
	for _, k := range slices.Concat(d.Keys[:]...) {
		if k.Phase == Retiring || k.Phase == Trusted || k.Phase == Active && d.In(k.Kind(), Distributing) != nil {
			n++
		}
	}
	return n
}

// Contents returns the bundle's contents, without the sequence number and the hint.
func (d *Document) Contents() spiffe.BundleContents {
	var c spiffe.BundleContents
	for _, k := range d.Roots() {
		c.X509Authorities = append(c.X509Authorities, k.Cert)
	}
	if len(d.Keys[Token]) > 0 {
		c.JWTAuthorities = make(map[string]crypto.PublicKey, len(d.Keys[Token]))
	}
	for _, k := range d.Keys[Token] {
		c.JWTAuthorities[k.ID] = k.Public
	}
	return c
}

// Tainted reports whether any key is tainted.
func (d *Document) Tainted() bool {
	return slices.ContainsFunc(slices.Concat(d.Keys[:]...), func(k Key) bool { return k.Tainted })
}

// Untainted returns [Document.Contents] without the tainted keys.
func (d *Document) Untainted() spiffe.BundleContents {
	clean := new(Document)
	for kind, keys := range d.Keys {
		for _, k := range keys {
			if !slices.ContainsFunc(keys, func(bad Key) bool { return bad.Tainted && bad.SameKey(&k) }) {
				clean.Keys[kind] = append(clean.Keys[kind], k)
			}
		}
	}
	return clean.Contents()
}

// MayPrepare returns an error that wraps [ErrRotating] if no key of this kind can be prepared now. An added key needs
// room in the bundle.
func (d *Document) MayPrepare(kind Kind, adds bool) error {
	if k := d.In(kind, Distributing); k != nil {
		return fmt.Errorf("%w: %v %s activates at %s", ErrRotating, kind, k.ID, k.Activates.UTC().Format(time.RFC3339))
	}
	if keys := d.Keys[kind]; len(keys) >= MaxKeys && adds {
		return fmt.Errorf("%w: %d %vs are in the bundle, the next one to retire does so at %s", ErrRotating,
			len(keys), kind, nextStep(keys).UTC().Format(time.RFC3339))
	}
	return nil
}

// Prepare adds a key that becomes active after at least wait, when all verifiers know it. It returns the added key.
func (d *Document) Prepare(fresh Key, wait time.Duration, now time.Time) Key {
	kind := fresh.Kind()
	if k := d.In(kind, Active); k != nil {
		wait = max(wait, k.Propagation)
	}
	fresh.Phase, fresh.Prepared, fresh.Activates, fresh.Met = Distributing, now, now.Add(wait), now
	d.Keys[kind] = append(d.Keys[kind], fresh)
	return fresh
}

// Renew replaces the active key of renewed's kind at once. It returns the new one.
func (d *Document) Renew(renewed Key, now time.Time) Key {
	renewed.Prepared, renewed.Activates = now, now
	*d.In(renewed.Kind(), Active) = renewed
	return renewed
}

// NeedsSuccessor reports whether a key, once tainted, needs a successor. A full bundle has no room for one yet.
func (d *Document) NeedsSuccessor(id string) bool {
	return slices.ContainsFunc(d.twins(id), func(k *Key) bool {
		return !k.Tainted && (k.Phase == Distributing || k.Phase == Active && d.In(k.Kind(), Distributing) == nil &&
			len(d.Keys[k.Kind()]) < MaxKeys)
	})
}

// Taint taints a key and all with the same private key. It removes a distributing key, and a retiring one leaves
// after grace. It reports whether any of them exists and was not tainted yet.
func (d *Document) Taint(id string, grace time.Duration, now time.Time) (tainted bool) {
	for _, k := range d.twins(id) {
		switch {
		case k.Tainted:
		case k.Phase == Distributing: // a new key has no twin
			d.Keys[k.Kind()] = slices.DeleteFunc(d.Keys[k.Kind()], func(k Key) bool { return k.ID == id })
			return true
		default:
			k.taint(grace, now)
			tainted = true
		}
	}
	return tainted
}

// taint taints k, which is not distributing.
func (k *Key) taint(grace time.Duration, now time.Time) {
	k.Tainted, k.TaintGrace = true, grace
	if end := now.Add(grace); k.Phase != Active && (k.Retires.IsZero() || end.Before(k.Retires)) {
		k.Retires = end
	}
}

// taintLike taints k if another certificate of the same private key is tainted in d.
func (d *Document) taintLike(k *Key, now time.Time) {
	bad := slices.IndexFunc(d.Keys[k.Kind()], func(bad Key) bool { return bad.Tainted && bad.SameKey(k) })
	if bad >= 0 && !k.Tainted {
		k.taint(d.Keys[k.Kind()][bad].TaintGrace, now)
	}
}

// Raise raises the terms of keys that sign, or will sign, to at least these. It reports whether any was lower.
func (d *Document) Raise(kind Kind, to Terms) (raised bool) {
	for i, k := range d.Keys[kind] {
		if t := k.Terms.Raise(to); (k.Phase == Active || k.Phase == Distributing) && t != k.Terms {
			d.Keys[kind][i].Terms, raised = t, true
		}
	}
	return raised
}

// Merge returns d, which was read at now, with the parts of known keys that are not stored: monotonic clock readings,
// the time when each was first read, and the same parsed certificates.
func (d *Document) Merge(known *Document, now time.Time) *Document {
	d = d.Clone()
	for _, keys := range d.Keys {
		for i := range keys {
			k := &keys[i]
			var was Key
			if o := known.Find(k.ID); o != nil && o.Kind() == k.Kind() {
				was = *o
			}
			if k.Met = was.Met; k.Met.IsZero() {
				k.Met = now
			}
			if was.Cert != nil && was.Cert.Equal(k.Cert) {
				k.Cert = was.Cert
			}
			for _, t := range [][2]*time.Time{{&was.Prepared, &k.Prepared}, {&was.Activates, &k.Activates},
				{&was.Retires, &k.Retires}} {
				if t[0].Round(0).Equal(t[1].Round(0)) {
					*t[1] = *t[0]
				} else {
					*t[1] = anchor(now, *t[1])
				}
			}
		}
	}
	return d
}

// Postpone makes distributing keys that are not in known wait again if verifiers have too little time left to learn
// of them: it is unknown which verifiers have seen them.
func (d *Document) Postpone(known *Document, now time.Time) (_ *Document, changed bool) {
	for _, kind := range Kinds {
		k := d.In(kind, Distributing)
		if k == nil || known.Find(k.ID) != nil || k.Shown || k.Activates.Sub(now) >= k.wantsLeft() {
			continue
		}
		// Once time has retired the old key, others may have dropped it, and all that it signed has expired: it must
		// not come back.
		if old := d.In(kind, Active); old != nil && !now.Before(old.retired(k.Activates).Retires) {
			continue
		}
		if !changed {
			d, changed = d.Clone(), true
		}
		k = d.In(kind, Distributing)
		k.Activates = now.Add(k.Propagation)
	}
	return d, changed
}

// ReplaceActive replaces the active root of next's kind. A root with the same key and subject is the same root renewed. Any
// other root takes over now, and the old one retires after the longest lifetime of a leaf that an uninformed replica
// may still sign.
func (d *Document) ReplaceActive(next Key, now time.Time) error {
	kind, before := next.Kind(), d.Clone()
	active := d.In(kind, Active)
	if active == nil {
		return fmt.Errorf("there is no %v that it could replace", kind)
	}
	old := *active
	if old.Cert.Equal(next.Cert) {
		return nil
	}
	renewed := SameAuthority(old.Cert, next.Cert)
	for _, k := range d.Keys[kind] {
		if k.ID == next.ID && !k.Cert.Equal(next.Cert) && !(renewed && k.Phase == Active) {
			return fmt.Errorf("another root has its serial number %s, by which roots are told apart; it would "+
				"drop out of the bundle", next.ID)
		}
	}
	d.Sequence = d.NumberOfNext()
	d.taintLike(&next, now)
	// It may have been in the bundle as a root that does not sign.
	d.Keys[kind] = slices.DeleteFunc(d.Keys[kind], func(k Key) bool { return k.Cert.Equal(next.Cert) })
	active = d.In(kind, Active)
	next.Terms = next.Terms.Raise(old.Terms)
	if renewed {
		next.Prepared, next.Activates = old.Prepared, old.Activates
		*active = next
		return d.Account(before, now)
	}
	*active = old.retired(now.Add(old.Propagation))
	// The active root comes before the distributing one.
	at := slices.IndexFunc(d.Keys[kind], func(k Key) bool { return k.Phase == Distributing })
	if at < 0 {
		at = len(d.Keys[kind])
	}
	d.Keys[kind] = slices.Insert(d.Keys[kind], at, next)
	return cmp.Or(d.Account(before, now), d.checkRoom())
}

func (d *Document) checkRoom() error {
	if n := max(len(d.Keys[Root]), len(d.Keys[Quantum])); n > MaxKeys {
		return fmt.Errorf("%d roots, the limit is %d", n, MaxKeys)
	}
	return nil
}

// AddTrusted adds more roots to d, in front, as the oldest. They stay until they expire.
func (d *Document) AddTrusted(td spiffe.TrustDomain, certs []*x509.Certificate, now time.Time) error {
	var more []Key
	for _, c := range certs {
		known := func(k Key) bool { return k.Cert.Equal(c) }
		if slices.ContainsFunc(d.Roots(), known) || slices.ContainsFunc(more, known) || c.NotAfter.Before(now) {
			continue
		}
		k := Key{ID: Serial(c), Cert: c, Phase: Trusted, Prepared: now, Activates: now, Retires: c.NotAfter}
		d.taintLike(&k, now)
		more = append(more, k)
	}
	for _, kind := range []Kind{Root, Quantum} {
		other := func(k Key) bool { return k.Kind() != kind }
		d.Keys[kind] = append(slices.DeleteFunc(slices.Clone(more), other), d.Keys[kind]...)
	}
	if err := d.checkRoom(); err != nil {
		return err
	}
	if _, err := spiffe.NewBundle(td, d.Contents()); err != nil { // checks that each may be a trust anchor
		return err
	}
	return cmp.Or(checkKeys(d.Keys[Root]), checkKeys(d.Keys[Quantum]))
}

// SameAuthority reports whether leaves signed by either CA certificate verify with the other.
func SameAuthority(a, b *x509.Certificate) bool {
	return pki.PublicKeysEqual(a.PublicKey, b.PublicKey) && bytes.Equal(a.RawSubject, b.RawSubject) &&
		bytes.Equal(a.SubjectKeyId, b.SubjectKeyId)
}

// Serial returns the ID of the root with this certificate.
func Serial(c *x509.Certificate) string { return c.SerialNumber.Text(16) }

// RandomID returns 128 random bits in hexadecimal.
func RandomID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it does not fail
	return hex.EncodeToString(b[:])
}
