package ca

import (
	"cmp"
	"crypto"
	"crypto/x509"
	"errors"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// Errors of the methods that change the keys.
var (
	// ErrRotating says that a rotation cannot start because another is under way.
	ErrRotating = rotation.ErrRotating

	// ErrUnknownKey says that there is no root with this serial number, and no JWT key with this ID.
	ErrUnknownKey = errors.New("no such key")

	// errPluggedIn says that the roots come from files, which the operator must change.
	errPluggedIn = errors.New("the roots are plugged in")
)

// KeyStatus describes one root or JWT-SVID key of an [Authority]. It is a copy and holds no secret. Its times are
// wall-clock times.
type KeyStatus struct {
	redacted // prints the key's phase and its next change as a sentence

	ID string // the serial number of a root in hexadecimal, or the key ID

	Certificate *x509.Certificate // of a root, shared; do not change
	Custody     string            // the name of the private key at a custodian; empty if the store has it, or it is gone
	Algorithm   string            // "alg" of the tokens of a JWT key
	PublicKey   crypto.PublicKey  // of a JWT key

	// Phase is the stage of a key in a rotation. A key moves only forward, except that a distributing key waits again
	// if no authority ran to distribute it; see [Open].
	//
	//   - "distributing": it is in the bundle, so that verifiers learn of it, but does not sign yet
	//   - "active": it is the only key of its kind that signs
	//   - "retiring": it no longer signs, and its private key is gone; it stays in the bundle until the last leaf or
	//     token that it signed has expired
	//   - "trusted": a root from elsewhere, which never signs: another root of an adopted CA, until it expires, or a
	//     root of a plugged-in CA
	Phase string

	Prepared  time.Time // when it joined the bundle
	Activates time.Time // when it starts, or started, to sign
	Retires   time.Time // when it leaves the bundle; zero if unknown
	Tainted   bool      // its private key may be in wrong hands; see [Authority.Taint]
}

func statuses(keys []rotation.Key) (all []KeyStatus) {
	for _, k := range keys {
		all = append(all, status(k))
	}
	return all
}

func status(k rotation.Key) KeyStatus {
	return KeyStatus{
		ID: k.ID, Certificate: k.Cert, Custody: k.Name, Algorithm: k.Algorithm, PublicKey: k.Public,
		Phase: string(k.Phase), Tainted: k.Tainted,
		Prepared:  k.Prepared.Round(0), // without the monotonic reading, which means nothing to others
		Activates: k.Activates.Round(0),
		Retires:   k.Retires.Round(0),
	}.worded()
}

// worded returns s with its printed form, such as "root 5d1c…: distributing, signs from 2000-01-01T00:25:00Z".
func (s KeyStatus) worded() KeyStatus {
	key := rotation.Key{Cert: s.Certificate}
	what := key.Kind().String() + " " + s.ID + ": " + s.Phase
	if s.Tainted {
		what += ", tainted"
	}
	switch {
	case s.Phase == "distributing":
		what += ", signs from " + s.Activates.UTC().Format(time.RFC3339)
	case s.Phase == "active":
		what += " since " + s.Activates.UTC().Format(time.RFC3339)
	case !s.Retires.IsZero():
		what += ", leaves the bundle at " + s.Retires.UTC().Format(time.RFC3339)
	}
	if s.Custody != "" {
		what += ", private key " + s.Custody
	}
	s.redacted = redact.New(what)
	return s
}

// Status is the state of an authority at one moment, for health pages. It holds no secret.
type Status struct {
	TrustDomain spiffe.TrustDomain
	Sequence    uint64      // of the bundle
	Roots       []KeyStatus // in the bundle, oldest first, and those of ML-DSA after the others
	JWTKeys     []KeyStatus // in the bundle, oldest first

	// Loose are the names of private keys at custodians that no key has: they are to be destroyed, or a next key may have
	// them. Keep a former custodian until it has none of them.
	Loose []string

	// Synced is when the store last answered, or the files of a plugged-in CA were last valid; zero for an authority
	// of [New]. SyncError is the failure since then, or nil. The authority goes on working: [Open] says for how long.
	Synced    time.Time
	SyncError error
}

// Status returns the state of the authority.
func (a *Authority) Status() Status {
	s := a.current()
	out := Status{TrustDomain: a.cfg.TrustDomain, Sequence: s.sequence, Roots: statuses(s.Roots()),
		JWTKeys: statuses(s.Keys[rotation.Token])}
	if s.plugged != nil {
		out.Roots = s.plugged.status()
	}
	for _, l := range s.Loose {
		out.Loose = append(out.Loose, l.Name)
	}
	a.mu.Lock()
	out.Synced, out.SyncError = a.synced, a.syncErr
	a.mu.Unlock()
	if a.files != nil {
		checked, err := a.files.follower.Status()
		if a.store == nil || !checked.After(out.Synced) {
			out.Synced = checked
		}
		out.SyncError = cmp.Or(err, out.SyncError)
	}
	return out
}
