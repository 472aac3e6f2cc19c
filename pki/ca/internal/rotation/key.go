// Package rotation computes how the keys of a certificate authority follow one another: from a document with the keys,
// and a time, the document at that time and the steps that lead to it. It reads no clock and no store, signs nothing
// and never waits.
//
// A key is distributing, then active, then retiring, and then gone:
//
//	prepare     Document.Prepare adds a distributing key, which is in the bundle and signs nothing
//	activate    at Key.Activates it signs, and the key that signed before is retiring
//	retire      at Key.Retires a retiring key leaves the bundle
//
// Time alone takes the last two steps, in Document.Advance, and all replicas with the same document take them at the
// same moment.
package rotation

import (
	"crypto"
	"crypto/x509"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
)

// Kind is what a key signs.
type Kind int

// The kinds of keys, which rotate by the same steps and each by itself.
const (
	Root  Kind = iota // certificates
	Token             // JWT-SVIDs
)

// Kinds are all kinds.
var Kinds = [...]Kind{Root, Token}

// String names a key of this kind.
func (k Kind) String() string {
	if k == Token {
		return "JWT key"
	}
	return "root"
}

// IDName is what the ID of a key of this kind is called in logs.
func (k Kind) IDName() string {
	if k == Token {
		return "key_id"
	}
	return "serial"
}

// Phase is the place of a root, or of a JWT key, in a rotation. A key moves forward only, except that a distributing
// key waits again when no authority ran to distribute it. Before the first phase a key does not exist; after the last
// it is out of the bundle, and forgotten.
type Phase string

// The phases of a key that is in the bundle.
const (
	Distributing Phase = "distributing" // verifiers learn of it, and it signs nothing yet
	Active       Phase = "active"       // the one key that signs
	Retiring     Phase = "retiring"     // it signs nothing any more, and its private key is gone
	Trusted      Phase = "trusted"      // a root from elsewhere, which never signs
)

// Key is a root or a JWT key, and its place in the rotation. Its value never changes: a step makes a
// new one.
type Key struct {
	ID string // the serial number of a root in hexadecimal, or the key ID

	Cert      *x509.Certificate // of a root; nil for a JWT key
	Issuer    *pki.Issuer       // of a root that may sign
	Algorithm string            // of a JWT key
	Public    crypto.PublicKey  // of a JWT key

	Secret func() crypto.Signer // nil once retiring: a key that must not sign any more cannot

	Phase     Phase
	Prepared  time.Time // when it joined the bundle
	Activates time.Time // when it begins, or began, to sign
	Retires   time.Time // when it leaves the bundle; zero before it is retiring
	Terms

	Tainted    bool
	TaintGrace time.Duration

	Met   time.Time // when this process first read a distributing key; not stored
	Shown bool      // a process has had the distributing key in its bundle for ShownAfter
}

// Terms are the limits of all replicas together. They only grow while a key lives.
type Terms struct {
	Longest     time.Duration // the longest lifetime that any replica may grant under the key
	Grace       time.Duration // how much longer verifiers with slow clocks accept its leaves
	Propagation time.Duration // its successor is in the bundle for at least as long before it signs
}

// Raise returns the larger of each.
func (t Terms) Raise(other Terms) Terms {
	return Terms{max(t.Longest, other.Longest), max(t.Grace, other.Grace), max(t.Propagation, other.Propagation)}
}

// Kind returns the kind of the key.
func (k *Key) Kind() Kind {
	if k.Cert == nil {
		return Token
	}
	return Root
}

// sameKey reports whether k and o have the same private key.
func (k *Key) sameKey(o *Key) bool {
	if k.ID == o.ID {
		return true
	}
	if k.Cert == nil || o.Cert == nil {
		return k.Cert == nil && o.Cert == nil && pki.PublicKeysEqual(k.Public, o.Public)
	}
	return pki.PublicKeysEqual(k.Cert.PublicKey, o.Cert.PublicKey)
}

// ShownAfter is how long a running authority has a key in its bundle before it says so in the store.
// With the default Propagation it is two refreshes: every consumer that polls has the key.
func (k *Key) ShownAfter() time.Duration { return k.Propagation - k.wantsLeft() }

// wantsLeft is how much of its Propagation a key must have left when a process first reads it, unless another process
// has shown it: three refreshes by default.
func (k *Key) wantsLeft() time.Duration { return k.Propagation / 5 * 3 }

// due returns when the key takes its next step by time; zero for never. The active key waits for
// another one.
func (k *Key) due() time.Time {
	switch k.Phase {
	case Distributing:
		return k.Activates
	case Retiring, Trusted:
		return k.Retires
	}
	return time.Time{}
}

// retired returns k as it is when another key takes over at the time at.
//
// A sole signer knows when the last certificate of the key ends, or that there is none (zero), and passes it as last.
// Replicas do not know what the others signed, and pass nil: then the key stays for the longest lifetime that any of
// them may have granted until then.
func (k Key) retired(last *time.Time, at time.Time) Key {
	end := at.Add(k.Longest).Add(k.Grace)
	if last != nil {
		end = at
		if e := last.Add(k.Grace); !last.IsZero() && e.After(at) {
			end = e
		}
	}
	if k.Tainted {
		end = Earlier(end, at.Add(k.TaintGrace))
	}
	k.Phase, k.Issuer, k.Secret, k.Retires = Retiring, nil, nil, end
	return k
}

// nextStep returns when the first of keys takes its next step by time; zero for never.
func nextStep(keys []Key) time.Time {
	var first time.Time
	for i := range keys {
		if t := keys[i].due(); !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
}

// Step is a change of the keys of one kind at one time.
type Step struct {
	At        time.Time
	Kind      Kind
	Activated *Key  // the new active key, or nil
	Retired   []Key // the keys that left the bundle
}

// advance returns keys as they are at now, and the steps that lead there, one for each moment at which something
// happened. The result is the same however late and however often it is called, and on every replica with the same
// keys. For last see [Key.retired]. Phases only move forward: an earlier now than the last one changes nothing. keys
// is not changed.
func advance(keys []Key, last *time.Time, now time.Time) ([]Key, []Step) {
	var steps []Step
	for {
		at := nextStep(keys)
		if at.IsZero() || !Reached(now, at) {
			return keys, steps
		}
		st := Step{At: at, Kind: keys[0].Kind()}
		activates := slices.ContainsFunc(keys,
			func(k Key) bool { return k.Phase == Distributing && !at.Before(k.Activates) })
		after := make([]Key, 0, len(keys))
		for _, k := range keys {
			switch {
			case activates && k.Phase == Active:
				k = k.retired(last, at)
			case activates && k.Phase == Distributing:
				k.Phase = Active
				st.Activated = &k
			}
			if (k.Phase == Retiring || k.Phase == Trusted) && !k.Retires.IsZero() && !at.Before(k.Retires) {
				st.Retired = append(st.Retired, k)
				continue
			}
			after = append(after, k)
		}
		if activates && last != nil {
			last = new(time.Time) // the new key has signed nothing
		}
		keys, steps = after, append(steps, st)
	}
}

// Reached reports whether t has come at now, on the wall clock and, if both have a reading of it, on
// the monotonic clock. The wall clock alone would let a clock that jumps ahead cut a wait short;
// the monotonic clock alone would let a leaf whose dates were written by a clock that was set back
// since outlive its root.
func Reached(now, t time.Time) bool {
	return !now.Before(t) && !now.Round(0).Before(t.Round(0))
}

// anchor gives t a reading of the monotonic clock: that of now, and of the time between the two.
func anchor(now, t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return now.Add(t.Sub(now.Round(0)))
}

// Earlier returns the earlier of two times.
func Earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// Schedule says when a root is replaced.
type Schedule struct {
	TTL         time.Duration // of each root
	Longest     time.Duration // the longest life of anything that it signs
	Propagation time.Duration
	GraceRatio  float64
	SameKey     bool // the successor has the key of the root, so that no step has to wait
}

// ReplaceAt returns when the active root is to be replaced. Only the certificate's dates count here, so the
// result is for comparison with the wall clock.
//
// With four steps it is when Propagation, Longest and the grace ratio of the root's life are left,
// but not in the first half of its life. With the same key it is when the grace ratio is left.
func (s Schedule) ReplaceAt(active *x509.Certificate) time.Time {
	life := min(s.TTL, active.NotAfter.Sub(active.NotBefore)) // that of a root from elsewhere may be short
	half, share := life/2, time.Duration(float64(life)*s.GraceRatio)
	if s.SameKey {
		return active.NotAfter.Add(-share)
	}
	if s.Longest < half-share-s.Propagation { // so written that no sum overflows
		return active.NotAfter.Add(-(s.Propagation + s.Longest + share))
	}
	return active.NotAfter.Add(-half)
}
