package spiffe

import (
	"crypto/x509"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/verifycache"
)

// Role is the side of the handshake that the peer was on, or the sides that a certificate is meant for. If a
// certificate on the path is restricted to some extended key usages, the role's usage must be among them, or
// anyExtendedKeyUsage (X509-SVID section 4.4). A certificate without that extension serves in every role.
type Role int

// The roles of a peer.
const (
	AnyRole    Role = iota // no extended key usage is required
	ServerRole             // the peer is a server: serverAuth
	ClientRole             // the peer is a client: clientAuth
	BothRoles              // both usages, which a workload's own certificate needs to serve and to dial
)

// VerifyError says why a peer was not accepted.
type VerifyError struct {
	// Stage is the step at which the peer was refused. In order they are
	//
	//	"leaf"    the form of the leaf and the ID in it: Err wraps a [*ParseError]
	//	"bundle"  finding the bundle of the ID's trust domain: Err wraps [ErrUnknownTrustDomain],
	//	          [ErrNoAuthority] or the error of the caller's [BundleSource]
	//	"chain"   the path from the leaf to an authority in that bundle, by RFC 5280: Err wraps an error
	//	          type of crypto/x509, [ErrTooLarge] or [ErrAlgorithm]
	//	"policy"  the caller's policy: Err wraps [ErrDenied]
	Stage string

	ID   ID     // the leaf claims it, at each stage: its key is not proven here; zero if it carries no valid ID
	Rule string // the id of the broken rule, as in [ParseError]; empty if none applies
	Err  error
}

// Error names the peer, the stage and the reason. It quotes at most 2 KiB of the peer's input.
func (e *VerifyError) Error() string {
	peer := ""
	if !e.ID.IsZero() {
		peer = fmt.Sprintf(" %q", redact.Clip(e.ID.s, maxInError))
	}
	reason := inner(e.Err)
	if d, ok := e.Err.(*denial); ok {
		reason = d.reason()
	}
	return fmt.Sprintf("spiffe: verify peer%s: %s: %s", peer, e.Stage, redact.Clip(reason, 2*maxInError))
}

// Unwrap returns e.Err.
func (e *VerifyError) Unwrap() error { return e.Err }

// Unvouched reports whether newer bundles could vouch for the chain. It is false for a wrong extended key usage,
// which no bundle mends.
func (e *VerifyError) Unvouched() bool {
	return (e.Stage == "bundle" || e.Stage == "chain") && e.Rule != ruleKeyUsage
}

// ruleKeyUsage is the rule for the extended key usages of a chain.
const ruleKeyUsage = "X5-39"

// Verifier decides whether a chain of certificates proves an identity that is allowed. It is safe
// for concurrent use.
//
// # Memory
//
// A Verifier remembers up to 1,024 verified chains, which makes the second handshake of a peer, and the resumption of
// a session, a thousand times cheaper. It remembers that a chain, byte for byte and in one role, leads to an
// authority of one [*Bundle], until the first certificate on that path expires. When the source returns another
// Bundle, even an equal one, the chain is verified again, so a source should return the same Bundle until there
// is a newer one. Each call still asks the bundle source and the policy, so that a removed authority or peer is
// refused at once. A refusal is never remembered.
//
// Unauthorized peers cannot fill the memory: only chains that the policy allows are remembered, of at most 64 KiB
// and without certificates outside the path, and one for each leaf and role. 1,024 chains of the usual two
// certificates take 7 MiB. A chain's place is chosen by a hash with a random seed, and a hit compares all bytes, so
// that a peer cannot choose its place or pass for another.
type Verifier struct {
	bundles BundleSource
	allow   PolicySource
	now     func() time.Time
	keys    Algorithms
	memory  *verifycache.Table[memoryKey, *remembered]
	seed    maphash.Seed
}

// NewVerifier returns a Verifier that trusts the authorities of bundles, each for its own trust domain only, and
// accepts the peers that the policy allow permits. It returns the error of [CheckPolicySource]. The function now gives
// the time to verify at, and must be safe for concurrent use; nil means time.Now.
func NewVerifier(bundles BundleSource, allow PolicySource, now func() time.Time) (*Verifier, error) {
	switch {
	case bundles == nil:
		return nil, errors.New("spiffe: new verifier: no bundle source to verify peers with, " +
			"such as a Workload API source or a *spiffe.Bundle")
	case isNil(bundles):
		return nil, fmt.Errorf("spiffe: new verifier: the bundle source is a nil %T", bundles)
	}
	if err := CheckPolicySource(allow); err != nil {
		return nil, fmt.Errorf("spiffe: new verifier: %w", err)
	}
	if now == nil {
		now = time.Now
	}
	return newVerifier(bundles, allow, now, Algorithms{}), nil
}

func newVerifier(bundles BundleSource, allow PolicySource, now func() time.Time, keys Algorithms) *Verifier {
	memory := verifycache.New[memoryKey, *remembered](maxRemembered)
	return &Verifier{bundles, allow, now, keys, memory, maphash.MakeSeed()}
}

// WithAlgorithms returns a Verifier that is like v, and accepts a chain if the key of each certificate on its path to
// an authority is of these kinds, the authority's included. It has a memory of its own.
func (v *Verifier) WithAlgorithms(a Algorithms) *Verifier {
	return newVerifier(v.bundles, v.allow, v.now, a)
}

// VerifyChain verifies the certificates that a peer presented, leaf first, and returns the proof.
// The caller must know that the peer holds the leaf's key, for example from a TLS handshake.
//
// The leaf must be an X.509-SVID of a workload (see [NewSVID]). It must have a path, through the rest of the chain
// in any order, to an authority in the bundle of the trust domain that its own ID names. No other bundle and no root
// of the host counts (X509-SVID section 5.1). The policy comes last, so that an unproven peer learns nothing about
// it. More than 16 certificates and RSA keys of more than 8192 bits are refused before any signature is checked. A
// chain that is remembered gives the same *Peer again.
//
// Revocation lists are not read: an authority is revoked by leaving the bundle, a leaf by expiring.
//
// The error is a [*VerifyError].
func (v *Verifier) VerifyChain(chain []*x509.Certificate, role Role) (*Peer, error) {
	if v == nil || v.bundles == nil {
		return nil, &VerifyError{Stage: "leaf", Err: errors.New("the Verifier was not made by NewVerifier")}
	}
	if len(chain) == 0 {
		return nil, &VerifyError{Stage: "leaf", Err: errors.New("the peer presented no certificate")}
	}
	if peer, ok := v.recall(chain, role); ok {
		return v.admit(peer)
	}
	needed := certchain.Usages(int(role))
	if needed == nil {
		return nil, &VerifyError{Stage: "leaf", Err: fmt.Errorf("unknown Role(%d)", int(role))}
	}
	if err := certchain.CheckCost(chain); err != nil {
		return nil, &VerifyError{Stage: "chain", Err: err}
	}
	id, err := checkLeaf(chain[0])
	if err != nil {
		e := &VerifyError{Stage: "leaf", ID: id, Err: err}
		if ce, ok := errors.AsType[*ParseError](err); ok {
			e.Rule = ce.Rule
		}
		return nil, e
	}
	b, err := v.bundle(id.TrustDomain())
	if err != nil {
		return nil, &VerifyError{Stage: "bundle", ID: id, Rule: "X5-38", Err: err}
	}
	now := v.now()
	// not the leaf alone, as the pool holds only CAs
	path, err := certchain.Path(chain, b.pool(), needed, now, v.keys.Check)
	if err != nil {
		return nil, &VerifyError{Stage: "chain", ID: id, Rule: chainRule(err), Err: err}
	}
	peer, err := v.admit(&Peer{id, path, certchain.End(path)})
	if err == nil {
		v.keep(chain, role, b, peer, now)
	}
	return peer, err
}

// admit returns peer if the policy allows it.
func (v *Verifier) admit(peer *Peer) (*Peer, error) {
	if err := v.allow.Policy().Check(peer.id); err != nil {
		return nil, &VerifyError{Stage: "policy", ID: peer.id, Err: err}
	}
	return peer, nil
}

// bundle gets the bundle of td from the source, and checks that it belongs to td.
func (v *Verifier) bundle(td TrustDomain) (*Bundle, error) {
	b, err := v.bundles.Bundle(td)
	switch {
	case err != nil:
		return nil, err
	case b == nil:
		return nil, errUnknownTrustDomain(td)
	case b.TrustDomain() != td:
		return nil, fmt.Errorf("the bundle source was asked for %q and returned the bundle of %q: %w", td,
			b.TrustDomain(), ErrUnknownTrustDomain)
	}
	if len(b.x509) == 0 {
		return nil, fmt.Errorf("trust domain %q: %w", td, ErrNoAuthority)
	}
	return b, nil
}

// chainRule returns the rule behind an error of path validation.
func chainRule(err error) string {
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return "X5-31"
	}
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok && e.Reason == x509.IncompatibleUsage {
		return ruleKeyUsage
	}
	return "X5-30"
}

// Peer is proof that a chain was verified and that its ID is allowed. Only a [Verifier] makes one,
// so a function that takes a *Peer cannot be called with an unproven name. It never changes. The
// zero Peer proves nothing: its ID is the zero ID.
type Peer struct {
	id       ID
	chain    []*x509.Certificate
	notAfter time.Time
}

// ID returns the ID that the peer proved.
func (p *Peer) ID() ID { return p.id }

// Chain returns the verified path, from the leaf to the authority in the trust bundle, in a new slice.
// The certificates are shared and must not be changed. Beyond the ID, the contents of the leaf are only claims of
// that trust domain's authority.
func (p *Peer) Chain() []*x509.Certificate { return slices.Clone(p.chain) }

// NotAfter returns the earliest expiry in the verified path, at which the proof ends. It ends sooner if
// the authority leaves the bundle.
func (p *Peer) NotAfter() time.Time { return p.notAfter }

// String returns the ID.
func (p *Peer) String() string { return p.id.String() }
