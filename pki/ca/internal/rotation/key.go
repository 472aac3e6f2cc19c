// Package rotation computes how the keys of a certificate authority succeed one another: from a document with the
// keys, and a time, the document at that time and the steps that lead to it. It reads no clock and no store, signs
// nothing and never waits.
//
// A key is distributing, then active, then retiring, and then gone:
//
//	prepare     Document.Prepare adds a distributing key, which is in the bundle but does not sign
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

	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/pki"
)

// Kind says what a key signs.
type Kind int

// The kinds of keys, which rotate by the same steps, independently.
const (
	Root    Kind = iota // certificates
	Token               // JWT-SVIDs
	Quantum             // certificates, with ML-DSA; a Root has a classical key
)

// Kinds are all kinds.
var Kinds = [...]Kind{Root, Token, Quantum}

// String names a key of this kind.
func (k Kind) String() string {
	return [...]string{"root", "JWT key", "ML-DSA root"}[k]
}

// IDName is the name of this kind's IDs in logs.
func (k Kind) IDName() string {
	if k == Token {
		return "key_id"
	}
	return "serial"
}

// Phase is the stage of a root or JWT key in a rotation. A key moves only forward, except that a distributing key
// waits again if no authority ran to distribute it. A key does not exist before the first phase; after the last it is
// out of the bundle and forgotten.
type Phase string

// The phases of a key in the bundle.
const (
	Distributing Phase = "distributing" // verifiers learn of it; it does not sign yet
	Active       Phase = "active"       // the one key that signs
	Retiring     Phase = "retiring"     // it no longer signs, and its private key is gone
	Trusted      Phase = "trusted"      // a root from elsewhere, which never signs
)

// Key is a root or a JWT key, and its stage in the rotation. Its value never changes: a step makes a new one.
type Key struct {
	ID string // the serial number of a root in hexadecimal, or the key ID

	Cert      *x509.Certificate // of a root; nil for a JWT key
	Issuer    *pki.Issuer       // of a root that may sign
	Algorithm string            // of a JWT key
	Public    crypto.PublicKey  // of a JWT key

	Secret func() crypto.Signer // nil once retiring, so that the key cannot sign any more
	Name   string               // of the private key at a custodian, which Secret uses; empty if the record has it

	Phase     Phase
	Prepared  time.Time // when it joined the bundle
	Activates time.Time // when it starts, or started, to sign
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
	Propagation time.Duration // the shortest time that its successor is in the bundle before it signs
}

// Raise returns the higher value of each limit.
func (t Terms) Raise(other Terms) Terms {
	return Terms{max(t.Longest, other.Longest), max(t.Grace, other.Grace), max(t.Propagation, other.Propagation)}
}

// Kind returns the kind of the key.
func (k *Key) Kind() Kind {
	switch {
	case k.Cert == nil:
		return Token
	case mldsa.Name(k.Cert.PublicKey) != "":
		return Quantum
	}
	return Root
}

// SameKey reports whether k and o have the same private key.
func (k *Key) SameKey(o *Key) bool {
	if k.ID == o.ID {
		return true
	}
	if k.Cert == nil || o.Cert == nil {
		return k.Cert == nil && o.Cert == nil && pki.PublicKeysEqual(k.Public, o.Public)
	}
	return pki.PublicKeysEqual(k.Cert.PublicKey, o.Cert.PublicKey)
}

// ShownAfter is how long a running authority has a key in its bundle before it records that in the store. With the
// default Propagation it is two refreshes: every consumer that polls has the key.
func (k *Key) ShownAfter() time.Duration { return k.Propagation - k.wantsLeft() }

// wantsLeft is how much of its Propagation a key must have left when a process first reads it, unless another process
// has shown it: three refreshes by default.
func (k *Key) wantsLeft() time.Duration { return k.Propagation / 5 * 3 }

// due returns when the key takes its next step by time; zero for never. The active key waits for its successor.
func (k *Key) due() time.Time {
	switch k.Phase {
	case Distributing:
		return k.Activates
	case Retiring, Trusted:
		return k.Retires
	}
	return time.Time{}
}

// retired returns k as it is when another key takes over at the time at. It stays for the longest lifetime that any
// replica may have granted until then.
func (k Key) retired(at time.Time) Key {
	end := at.Add(k.Longest).Add(k.Grace)
	if k.Tainted {
		end = Earlier(end, at.Add(k.TaintGrace))
	}
	k.Phase, k.Issuer, k.Secret, k.Name, k.Retires = Retiring, nil, nil, "", end
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

// advance returns keys as of now, and the events of the steps that lead there, in the order of time. The result is the
// same however late and however often it is called, and on every replica with the same keys. Phases only move
// forward: an earlier now than the last one changes nothing. keys is not changed.
func advance(keys []Key, now time.Time) (_ []Key, events []Event) {
	for {
		at := nextStep(keys)
		if at.IsZero() || !Reached(now, at) {
			return keys, events
		}
		activates := slices.ContainsFunc(keys,
			func(k Key) bool { return k.Phase == Distributing && !at.Before(k.Activates) })
		after := make([]Key, 0, len(keys))
		for _, k := range keys {
			switch {
			case activates && k.Phase == Active:
				k = k.retired(at)
			case activates && k.Phase == Distributing:
				k.Phase = Active
				events = append(events, Event{What: Activated, At: at, Key: k})
			}
			if (k.Phase == Retiring || k.Phase == Trusted) && !k.Retires.IsZero() && !at.Before(k.Retires) {
				events = append(events, Event{What: Retired, At: at, Key: k})
				continue
			}
			after = append(after, k)
		}
		keys = after
	}
}

// Reached reports whether t has come at now, on the wall clock and, if both have a reading of it, on the monotonic
// clock. With the wall clock alone, a clock that jumps ahead would cut a wait short. With the monotonic clock alone,
// a leaf could outlive its root if the clock that wrote its dates was set back since.
func Reached(now, t time.Time) bool {
	return !now.Before(t) && !now.Round(0).Before(t.Round(0))
}

// anchor gives t a monotonic clock reading, derived from now's.
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
