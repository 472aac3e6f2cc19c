package ca

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// The kinds of a [SignError], to test for with [errors.Is].
var (
	// ErrCSR says that the signing request is missing, or that its key must not be certified.
	ErrCSR = errors.New("bad signing request")
	// ErrTTL says that the lifetime is more than the authority grants, or less than a second.
	ErrTTL = errors.New("bad lifetime")
	// ErrIdentity says that the ID is not a workload's in the authority's trust domain, that another name cannot be
	// in its certificate, or that a token has no audience, or too many.
	ErrIdentity = errors.New("bad identity")
	// ErrGeneration says that the certificate could not be built or signed.
	ErrGeneration = errors.New("certificate generation failed")
	// ErrLimit says that there are too many requests now; [SignError.RetryAfter] says when to come back.
	ErrLimit = errors.New("too many requests")
	// ErrAudit says that no durable audit record could be made, so the certificate was thrown away.
	ErrAudit = errors.New("no audit record")
)

// SignError is the error of [Authority.Sign] and [Authority.SignJWT], unless the context was done. It wraps Kind and
// Err.
type SignError struct {
	// Kind is an error above, [ErrNoJWT], or [spiffe.ErrNotReady]. The last may pass: the active root has expired or
	// is not valid yet, the store has not answered for too long, or the first JWT key is still being distributed.
	Kind error
	ID   spiffe.ID // as the caller gave it
	Err  error     // the reason

	// RetryAfter is when to come back; 0 if unknown.
	RetryAfter time.Duration

	// Asked is the requested lifetime. For ErrTTL, Granted is the nearest lifetime that would be granted; servers
	// then tell the client what Err says. Both are 0 if the lifetime is not the reason.
	Asked, Granted time.Duration
}

func (e *SignError) Error() string {
	return fmt.Sprintf("ca: sign%s: %v: %v", quoted(e.ID), e.Kind, e.Err)
}

// quoted returns " " and the quoted ID, or "" for the zero ID of a certificate with DNS names only.
func quoted(id spiffe.ID) string {
	if id.IsZero() {
		return ""
	}
	return fmt.Sprintf(" %q", id)
}

// Unwrap returns Err and Kind.
func (e *SignError) Unwrap() []error { return []error{e.Err, e.Kind} }

var _ retry.Error = (*SignError)(nil)

// Retryable reports whether the same request may succeed later, and when: see [spiffe.ErrNotReady]. That is so for
// [ErrLimit], [ErrAudit] and [spiffe.ErrNotReady], and if Err says so.
func (e *SignError) Retryable() (after time.Duration, ok bool) {
	after, advice := retry.After(e.Err)
	after = cmp.Or(e.RetryAfter, after)
	return after, advice == retry.Again || e.Kind == ErrLimit || e.Kind == ErrAudit || e.Kind == spiffe.ErrNotReady
}

// signCanceled is the error for a context that is done.
func signCanceled(ctx context.Context, id spiffe.ID) error {
	return fmt.Errorf("ca: sign%s: %w", quoted(id), context.Cause(ctx))
}

// minTTL is the shortest lifetime: certificates carry whole seconds.
const minTTL = time.Second

// Request asks for a certificate. The caller of [Authority.Sign] vouches for everything in it except the CSR: it is
// signed unchanged.
type Request struct {
	// CSR holds the public key to certify. Its names, extensions and subject are not used.
	CSR *pki.CSR

	// ID is the workload: in the authority's trust domain, with a path.
	ID spiffe.ID

	DNSNames []string // further names, beside the ID
	IPs      []net.IP // further addresses, beside the ID

	// CommonName is the subject's common name, for old peers that look for a name there; at most 64 bytes. Empty
	// means the usual subject; see [Config.EmptySubject].
	CommonName string

	// TTL is the lifetime from now; 0 or less means the authority's default.
	TTL time.Duration

	// Backdate is how far before now the validity begins; 0 means the authority's. More than MaxTTL is refused.
	Backdate time.Duration

	// Profile is the kind of certificate; the zero value is an X.509-SVID.
	Profile Profile

	// Caller is the authenticated caller, and Method how it authenticated, for limits per caller and for the audit
	// record. An empty Caller means ID, or the first of DNSNames. Pod is where it runs, and PodRequest the name of
	// its PodCertificateRequest, if any, for the audit record.
	Caller, Method string
	Pod            spiffe.Pod
	PodRequest     string

	// Proven is when the workload last proved its identity without a certificate of this CA, such as by a token;
	// zero, or a future time, means now. A server that takes such a certificate as proof sets it to
	// [Authority.Proven] of that certificate, so the new leaf carries the same time.
	Proven time.Time

	// LimitKey replaces Caller for the limits per caller, where one Caller stands for many: the pod, if many pods
	// share a service account, or the workload, if a proxy asks for all workloads of a node. Empty means Caller.
	LimitKey string

	// Signer names one of several signers behind a registration authority; an [Authority] has only one and ignores
	// it.
	Signer string
}

// Signer signs for a certificate service: an [Authority], or a registration authority such as a *ra.RA. It must be
// safe for concurrent use.
type Signer interface {
	// Sign returns the chain for a request, leaf first. Its errors are as in [Authority.Sign], or others that say
	// whether they pass: see [spiffe.ErrNotReady].
	Sign(ctx context.Context, r Request) ([]*x509.Certificate, error)

	// Bundle returns the current trust bundle. It is nil or empty while the signer does not know its roots.
	Bundle() *spiffe.Bundle

	// CallerBundle returns the part of Bundle that may authenticate callers to the signer: see
	// [Authority.CallerBundle]. It is nil or empty like Bundle.
	CallerBundle() *spiffe.Bundle

	// Proven returns when the holder of a leaf of this signer last proved its identity without a certificate: see
	// [Authority.Proven]. It is zero if the signer does not choose the contents of its certificates and so cannot
	// know.
	Proven(leaf *x509.Certificate) time.Time
}

// organization is the subject of leaves without a common name.
const organization = "svidkit"

// Profile is the kind of a certificate.
type Profile int

const (
	// SVID is an X.509-SVID: ID is required, and is the only URI name.
	SVID Profile = iota
	// DNSOnly is a certificate for DNSNames (at least one) without a SPIFFE ID, for Linkerd's proxies and servers
	// called by name. ID must be zero.
	DNSOnly
)

// kind returns the kind in an [Issuance].
func (p Profile) kind() string {
	if p == DNSOnly {
		return "dns"
	}
	return "x509-svid"
}

// Sign certifies the public key of r.CSR for r.ID and returns the chain to present: the leaf first, then the
// certificates between it and a root of [Authority.Bundle], without the root. Roots made by the authority sign leaves
// directly, so the chain is only the leaf. The caller owns the result.
//
// The leaf is valid from Backdate before now until TTL from now, or until the end of the CA certificates above it, if
// that is earlier. A TTL over the authority's MaxTTL is refused, not shortened.
//
// The error is a [*SignError], or wraps the cause of ctx's end.
func (a *Authority) Sign(ctx context.Context, r Request) ([]*x509.Certificate, error) {
	if ctx.Err() != nil {
		return nil, signCanceled(ctx, r.ID)
	}
	if err := a.check(&r); err != nil {
		return nil, refusal(err, r.ID)
	}
	var chain []*x509.Certificate
	kind := a.current().rootFor(r.CSR.PublicKey())
	err := a.issue(ctx, kind, r.ID, cmp.Or(r.LimitKey, r.Caller), r.TTL, func(g *grant) (*Issuance, error) {
		leaf, err := g.sign(&r, a.cfg.EmptySubject)
		if err != nil {
			return nil, err
		}
		chain = append([]*x509.Certificate{leaf}, g.above...)
		return newIssuance(&r, leaf, g.key.Cert, g.now), nil
	})
	if err != nil {
		return nil, err
	}
	return chain, nil
}

// issue does the common work for certificates and tokens: the limits, the key, and the audit record, without which no
// certificate or token leaves. sign makes the certificate or token with the key.
func (a *Authority) issue(ctx context.Context, kind rotation.Kind, id spiffe.ID, caller string, ttl time.Duration,
	sign func(*grant) (*Issuance, error)) error {
	if err := a.acquire(ctx, id, caller); err != nil {
		return err
	}
	defer a.limiter.Release()
	a.look(ctx)
	g, err := a.reserve(ctx, kind, id, ttl)
	if err != nil {
		return err
	}
	var i *Issuance
	err = a.use(ctx, g.key, func() (err error) {
		i, err = sign(g)
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return signCanceled(ctx, id)
	case err != nil:
		return generationError(id, err)
	}
	return a.audit(ctx, i)
}

// use runs f, which signs with k. It waits for a custodian only until ctx is done.
func (a *Authority) use(ctx context.Context, k *rotation.Key, f func() error) error {
	if k.Name == "" || a.custody == nil {
		return f()
	}
	return a.custody.call(ctx, k.Name, signPatience, func(context.Context) error { return f() })
}

// refused is the error for a bad request.
func refused(kind error, format string, args ...any) error {
	return &SignError{Kind: kind, Err: fmt.Errorf(format, args...)}
}

// check checks the request and fills in the defaults. Its error is a SignError.
func (a *Authority) check(r *Request) error {
	if r.CSR == nil || r.CSR.PublicKey() == nil {
		return refused(ErrCSR, "there is none; pki.ParseCSR makes one")
	}
	if err := a.cfg.Algorithms.Check(r.CSR.PublicKey()); err != nil {
		return refused(ErrCSR, "%w", err)
	}
	switch r.Profile {
	case SVID:
		if err := a.checkID(r.ID); err != nil {
			return err
		}
		r.Caller = cmp.Or(r.Caller, r.ID.String())
	case DNSOnly:
		if !r.ID.IsZero() {
			return refused(ErrIdentity, "there is an ID, which a certificate of the profile DNSOnly does not carry")
		}
		if len(r.DNSNames) == 0 {
			return refused(ErrIdentity, "there is no DNS name")
		}
		r.Caller = cmp.Or(r.Caller, r.DNSNames[0])
	default:
		return refused(ErrIdentity, "there is no profile %d", int(r.Profile))
	}
	if r.TTL <= 0 {
		r.TTL = a.cfg.DefaultTTL
	}
	r.Backdate = cmp.Or(r.Backdate, a.cfg.Backdate)
	if r.Backdate < 0 || r.Backdate > max(a.cfg.MaxTTL, a.cfg.Backdate) {
		return refused(ErrTTL, "to be backdated by %v was asked for, it can be 0 to %v", r.Backdate,
			max(a.cfg.MaxTTL, a.cfg.Backdate))
	}
	return checkTTL(r.TTL, a.cfg.MaxTTL)
}

func (a *Authority) checkID(id spiffe.ID) error {
	switch {
	case id.IsZero():
		return refused(ErrIdentity, "ID: %w", spiffe.ErrZero)
	case !id.MemberOf(a.cfg.TrustDomain):
		return refused(ErrIdentity, "the ID is not in the trust domain %q of this authority", a.cfg.TrustDomain)
	case id.Path() == "":
		return refused(ErrIdentity, "the ID has no path, so it names no workload")
	}
	return nil
}

func checkTTL(ttl, longest time.Duration) error {
	switch {
	case ttl > longest:
		return &SignError{Kind: ErrTTL, Asked: ttl, Granted: longest,
			Err: fmt.Errorf("%v was asked for, the longest is %v", ttl, longest)}
	case ttl < minTTL:
		return &SignError{Kind: ErrTTL, Asked: ttl, Granted: minTTL,
			Err: fmt.Errorf("%v was asked for, the shortest is %v", ttl, minTTL)}
	}
	return nil
}

// refusal returns err with the ID.
func refusal(err error, id spiffe.ID) error {
	if e, ok := errors.AsType[*SignError](err); ok {
		e.ID = id
	}
	return err
}

// acquire waits for a signing slot, which the caller releases.
func (a *Authority) acquire(ctx context.Context, id spiffe.ID, caller string) error {
	err := a.limiter.Acquire(ctx, caller)
	if over, ok := errors.AsType[*limit.Error](err); ok {
		return &SignError{Kind: ErrLimit, ID: id, Err: over, RetryAfter: over.RetryAfter}
	}
	if err != nil {
		return signCanceled(ctx, id)
	}
	return nil
}

// sign signs the certificate.
func (g *grant) sign(r *Request, emptySubject bool) (*x509.Certificate, error) {
	proven := g.now
	if !r.Proven.IsZero() && r.Proven.Before(g.now) {
		proven = r.Proven
	}
	sans := make([]pki.SAN, 0, 1+len(r.DNSNames)+len(r.IPs))
	if r.Profile == SVID {
		sans = append(sans, pki.IDSAN(r.ID))
	}
	for _, name := range r.DNSNames {
		sans = append(sans, pki.DNSSAN(name))
	}
	for _, ip := range r.IPs {
		sans = append(sans, pki.IPSAN(ip))
	}
	o := pki.CertificateOptions{
		PublicKey: r.CSR.PublicKey(), SANs: sans, CommonName: r.CommonName,
		NotBefore: g.now.Add(-r.Backdate), NotAfter: g.notAfter, SerialNumber: newSerial(proven),
	}
	if r.CommonName == "" && !emptySubject {
		o.Organization = organization
	}
	return g.key.Issuer.Issue(o)
}

// generationError returns the error for a failed signing, which may be the request's fault.
func generationError(id spiffe.ID, err error) error {
	kind := ErrGeneration
	if errors.Is(err, pki.ErrWeakKey) {
		kind = ErrCSR
	} else if _, ok := errors.AsType[*custodyError](err); ok {
		kind = spiffe.ErrNotReady
	} else if _, ok := errors.AsType[*pki.ProfileError](err); ok {
		kind = ErrIdentity // the key and the dates are good, so a name is not
	}
	return &SignError{Kind: kind, ID: id, Err: err}
}

// grant is a key to sign with, and the latest end of what it may sign.
type grant struct {
	key           *rotation.Key
	above         []*x509.Certificate // the certificates between it and a root
	now, notAfter time.Time
}

// errTooLong says that the store does not allow such a long lifetime yet.
var errTooLong = errors.New("the store does not know yet that lifetimes may be so long")

// reserve chooses the key for a certificate or token of this lifetime. It first makes sure that the key stays in the
// bundle until the certificate ends, however long the signing takes and whatever happens meanwhile.
func (a *Authority) reserve(ctx context.Context, kind rotation.Kind, id spiffe.ID, ttl time.Duration) (*grant, error) {
	for again := true; ; again = false {
		a.mu.Lock()
		now := time.Now() // under the lock, so that a later caller has a later time
		s, steps := a.advance(now)
		g, err := a.grant(s, kind, ttl, now)
		a.mu.Unlock()
		a.happened("", steps...)
		if again && errors.Is(err, errTooLong) {
			// This authority's settings have grown, or the replica that made the key had smaller ones.
			if err := a.update(ctx, "", nil); err != nil && ctx.Err() != nil {
				return nil, signCanceled(ctx, id)
			}
			continue
		}
		return g, refusal(err, id)
	}
}

// grant decides at now without changing anything; mu is held.
func (a *Authority) grant(s *state, kind rotation.Kind, ttl time.Duration, now time.Time) (*grant, error) {
	notReady := func(retry time.Duration, format string, args ...any) (*grant, error) {
		return nil, &SignError{Kind: spiffe.ErrNotReady, RetryAfter: retry, Err: fmt.Errorf(format, args...)}
	}
	g := &grant{now: now}
	wall, end := now.Round(0), now.Add(ttl)
	if kind == rotation.Token {
		if g.key = s.In(kind, rotation.Active); g.key == nil {
			first := s.In(kind, rotation.Distributing)
			if first == nil {
				return notReady(0, "there is no JWT key yet; see that the authority is running and its store answers")
			}
			return notReady(max(0, first.Activates.Sub(now)), "the first JWT key %s signs from %s, when "+
				"validators have heard of it", first.ID, first.Activates.UTC().Format(time.RFC3339))
		}
	} else {
		g.key = cmp.Or(s.In(kind, rotation.Active), s.active())
		from, until := s.validity(g.key)
		if s.plugged != nil {
			g.above = s.plugged.above
		}
		if wall.Before(from) {
			return notReady(0, "the root %s signs from %s; check the clock", g.key.ID, from.UTC().Format(time.RFC3339))
		}
		if !wall.Before(until) {
			return notReady(0, "the root %s signed until %s; %s", g.key.ID, until.UTC().Format(time.RFC3339),
				s.expiredRemedy(g.key))
		}
		end = now.Add(min(ttl, until.Sub(wall)))
	}
	if bound := a.bound(s, kind, g.key); !bound.IsZero() {
		left := bound.Sub(wall)
		if ttl > g.key.Longest {
			return notReady(a.syncInterval, "%w: %v, not %v", errTooLong, g.key.Longest, ttl)
		}
		if left < minTTL {
			return notReady(a.syncInterval, "%w", a.staleError(bound))
		}
		end = rotation.Earlier(end, now.Add(left))
	}
	g.notAfter = end
	return g, nil
}

// validity returns when an active root, and all certificates above it, are valid.
func (s *state) validity(root *rotation.Key) (from, until time.Time) {
	if s.plugged != nil {
		return s.plugged.from, s.plugged.until
	}
	return root.Cert.NotBefore, root.Cert.NotAfter
}

// expiredRemedy says what to do when the active root has expired.
func (s *state) expiredRemedy(root *rotation.Key) string {
	if s.plugged != nil {
		return "replace its files, of which one ends then"
	}
	return "revoke it now, so that its successor signs at once: -revoke " + root.ID + " -now"
}

// bound returns the latest end allowed for the key's signatures, as the store may know more than s; zero for none. mu
// is held.
func (a *Authority) bound(s *state, kind rotation.Kind, key *rotation.Key) time.Time {
	if a.store == nil || kind != rotation.Token && s.plugged != nil {
		return time.Time{}
	}
	bound := a.synced.Add(key.Propagation).Add(key.Longest)
	if next := s.In(kind, rotation.Distributing); next != nil {
		bound = rotation.Earlier(bound, next.Activates.Round(0).Add(key.Longest))
	}
	return bound
}

// The bound ensures that a leaf's root stays in the bundle.
//
// Let R be the time when the last reading began that gave the state in use, and A the active root in that state. This
// authority knows all of the record up to R. Another replica may replace A by a rotation prepared at a time P >= R.
// Terms only grow, so A's successor activates no earlier than P + propagation, and A stays in every bundle until
// that activation plus longest plus grace, with longest and propagation at least as large as in the state in use. So
// A stays at least until
//
//	P + propagation + longest + grace >= R + propagation + longest + grace
//
// A leaf that ends by R + propagation + longest, as the bound demands, expires before A retires, by at least the
// grace, which is for clocks that differ. If the successor was prepared before R, its activation is known: A retires
// longest and grace after it, and the second bound applies. It restricts only an authority that still signs with A
// when its successor should, because its monotonic clock lags. Two rotations do not overlap: the second is refused
// until the first has activated; then the same holds for its successor.
//
// There are three exceptions: a root that is tainted or revoked, which must go sooner; a root renewed with its own
// key, whose leaves still verify; and a root that another program replaced, for which replaceActive adds the same
// time once it notices.
//
// mu is held.
func (a *Authority) staleError(bound time.Time) error {
	err := fmt.Errorf("the store was last read at %s, and a rotation that began since would not cover "+
		"what is signed after %s; see that the authority is running and its store answers",
		a.synced.UTC().Format(time.RFC3339), bound.UTC().Format(time.RFC3339))
	if a.syncErr != nil {
		err = fmt.Errorf("%w: %w", err, within(a.syncErr))
	}
	return err
}
