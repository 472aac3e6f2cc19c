// Package ra is a registration authority: it has no key, and has the signers of a Kubernetes cluster sign through the
// API certificates.k8s.io/v1. It is used like a [ca.Authority].
//
//	a, err := ra.New(ra.Config{TrustDomain: td, Signer: "example.com/mesh", Roots: bundle})
//	…
//	chain, err := a.Sign(ctx, ca.Request{CSR: csr, ID: id})
//
// For each request it creates a CertificateSigningRequest, approves it, waits for the certificate, and deletes it
// again.
//
// # What it promises
//
// A signer may take any name from a signing request. So the request is sent only if the caller of [RA.Sign] granted
// every name in it, and if it asks for nothing else: no other extension, no other subject. It is sent unchanged, as
// only its sender has the key.
//
// The answer is checked like that of any CA: the certificate must have the key and exactly the names of the request,
// be a leaf, be valid now, and lead to a configured root. No CA certificate is ever asked for.
//
// A request ends with a certificate, with a reason, or after sixty seconds. Its object is always deleted.
//
// # Rights
//
// The service account of the registration authority needs these rules in a ClusterRole, with the names of all its
// signers in the third:
//
//	rules:
//	- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests],
//	   verbs: [create, get, watch, delete]}
//	- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests/approval], verbs: [update]}
//	- {apiGroups: [certificates.k8s.io], resources: [signers], resourceNames: [example.com/mesh], verbs: [approve]}
//
// A right to approve for "example.com/*" is one for all signers of the domain.
//
// # Signers
//
// Any signer of that API will do, such as istiod's or one of a cloud. cert-manager's answer there as
// "clusterissuers.cert-manager.io/NAME" and "issuers.cert-manager.io/NAMESPACE.NAME", if its feature gate
// ExperimentalCertificateSigningRequestControllers is on. There is no code for it, as the API is the whole contract;
// and no test with a real one, as that controller is an experiment of cert-manager, off by default: tests have a
// signer of their own at a real API server. Its issuers of the kind SelfSigned take the caller's private key, which
// this package never sends.
//
// # What it does not do
//
// It does not decide which caller gets which name: as with [ca.Authority], the caller of Sign does. It makes no keys
// and no signatures.
package ra

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/internal/lastresult"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures an [RA]. [New] copies it. Zero means the default that is named here.
type Config struct {
	TrustDomain spiffe.TrustDomain // required

	// Signer is the name of the signer for requests that name none, such as "example.com/mesh". Empty
	// means that every request has to name one.
	Signer string

	// SignerDomain lets a request choose among the signers of a domain: its "mesh" is SignerDomain + "/mesh". Empty
	// means that requests must not name a signer. It must not be the domain of Kubernetes' own signers, some of which
	// make administrators.
	SignerDomain string

	// Roots are the roots that the signers' certificates lead to: the source is asked for the bundle of
	// TrustDomain. For a list of roots in PEM there is [spiffe.ParseBundlePEM].
	Roots spiffe.BundleSource

	// SignerRoots are the roots of single signers, by their full name, in place of Roots. A signer without roots must
	// not be asked for.
	SignerRoots map[string]spiffe.BundleSource

	// LearnRoots takes the roots of signers without configured roots from their answers: the last certificate of a
	// chain, if it is a CA. Then any client that can write an answer into the API can make the whole trust domain
	// trust a root of its own, and after a start [RA.Bundle] is empty until the first answer.
	LearnRoots bool

	// MaxTTL is the longest lifetime of a request and of a certificate; 0 means 90 days.
	MaxTTL time.Duration

	// Timeout is how long a certificate may take; 0 means 60 seconds.
	Timeout time.Duration

	// APIServer is the URL of the API server, https or, on loopback, http. Empty means that of the
	// cluster that this process runs in.
	APIServer string

	// HTTPClient authenticates this process to the API server. Nil means with its service account, whose token and CA
	// certificate are read again when they rotate.
	HTTPClient *http.Client

	Limits  ca.Limits    // on what is asked of the signers at once, and in a second
	Auditor ca.Auditor   // records each certificate before it leaves; nil means no record
	Logger  *slog.Logger // nil means silence
}

// Defaults and limits.
const (
	defaultMaxTTL  = 90 * 24 * time.Hour
	defaultTimeout = 60 * time.Second
	minTTL         = 600 * time.Second // Kubernetes refuses less
	cleanUp        = 5 * time.Second   // for the deletion
	maxLearned     = 64                // roots
	clockSkew      = 5 * time.Minute   // that a signer's clock may be ahead, for MaxTTL
)

// RA is a registration authority. [New] makes one. It is safe for concurrent use.
type RA struct {
	cfg     Config
	api     *k8s.Client
	limiter *limit.Limiter

	audited, asked lastresult.Result // of the last record, and whether the cluster answered the last request

	turn atomic.Uint64 // of a call that asks the sources

	mu      sync.Mutex
	taken   uint64 // the last turn whose answers are in sources
	learned []learnedRoot
	sources []*spiffe.Bundle // the last answers; nil where a source had none yet
	union   *spiffe.Bundle   // nil before the first use
}

// learnedRoot is a root from an answer.
type learnedRoot struct {
	cert     *x509.Certificate
	lastLeaf time.Time // when the last certificate that leads to it ends
}

// New checks the configuration. It starts nothing, and does not contact the API server.
func New(cfg Config) (*RA, error) {
	cfg.MaxTTL = cmp.Or(cfg.MaxTTL, defaultMaxTTL)
	cfg.Timeout = cmp.Or(cfg.Timeout, defaultTimeout)
	cfg.SignerRoots = maps.Clone(cfg.SignerRoots)
	cfg.Logger = ratelog.Patient(cfg.Logger)
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("ra: invalid Config: %w", err)
	}
	api, err := k8s.New(k8s.Options{URL: cfg.APIServer, Client: cfg.HTTPClient})
	if err != nil {
		return nil, fmt.Errorf("ra: %w", err)
	}
	return &RA{cfg: cfg, api: api, limiter: limit.New(limit.Options(cfg.Limits))}, nil
}

func (c *Config) check() error {
	switch {
	case c.TrustDomain.IsZero():
		return fmt.Errorf("the trust domain: %w", spiffe.ErrZero)
	case c.Signer == "" && c.SignerDomain == "":
		return errors.New("a signer, or a domain of signers, is required")
	case c.Signer != "" && !validSigner(c.Signer):
		return fmt.Errorf("the signer %.300q is not DOMAIN/NAME", c.Signer)
	case c.SignerDomain != "" && !validDomain(c.SignerDomain):
		return fmt.Errorf("the signers' domain %.300q is not a domain", c.SignerDomain)
	case c.SignerDomain == kubernetesDomain || strings.HasSuffix(c.SignerDomain, "."+kubernetesDomain):
		return fmt.Errorf("the signers' domain %q belongs to Kubernetes: its signers are not for "+
			"callers to choose from", c.SignerDomain)
	case c.MaxTTL < minTTL || c.MaxTTL > math.MaxInt32*time.Second:
		return fmt.Errorf("the longest lifetime is %v, want %v to %v", c.MaxTTL, minTTL, math.MaxInt32*time.Second)
	case c.Timeout < 0:
		return fmt.Errorf("the timeout is negative (%v)", c.Timeout)
	}
	for name, roots := range c.SignerRoots {
		if !validSigner(name) || roots == nil {
			return fmt.Errorf("the roots of %.300q: that is not the full name of a signer "+
				"(DOMAIN/NAME), or it has no roots", name)
		}
	}
	if c.Signer != "" && c.Roots == nil && c.SignerRoots[c.Signer] == nil && !c.LearnRoots {
		return fmt.Errorf("there are no roots for the signer %q: give them, or allow that they are "+
			"learned from the answers", c.Signer)
	}
	if c.Signer == "" && c.Roots == nil && len(c.SignerRoots) == 0 && !c.LearnRoots {
		return errors.New("there are no roots: give them, or allow that they are learned from the answers")
	}
	return nil
}

const kubernetesDomain = "kubernetes.io"

// validDomain reports whether s can be the first part of a signer's name.
func validDomain(s string) bool { return k8s.ValidName(s) && strings.Contains(s, ".") }

// validSigner reports whether s is a domain and a name.
func validSigner(s string) bool {
	domain, name, _ := strings.Cut(s, "/")
	return validDomain(domain) && k8s.ValidName(name)
}

// signer returns the full name of the signer for a request, whether it names one or not.
func (a *RA) signer(name string) (string, error) {
	full := a.cfg.Signer
	switch {
	case name == "" && full == "":
		return "", errors.New("the request names no signer, and there is no default")
	case name == "":
	case a.cfg.SignerDomain == "":
		return "", fmt.Errorf("the request names the signer %.300q, and there is no signer domain to find it in", name)
	case !k8s.ValidName(name):
		return "", fmt.Errorf("%.300q is not the name of a signer", name)
	default:
		full = a.cfg.SignerDomain + "/" + name
	}
	if a.source(full) == nil && !a.cfg.LearnRoots {
		return "", fmt.Errorf("the signer %q is not configured: there are no roots for it", full)
	}
	return full, nil
}

// source returns where the roots of a signer come from; nil if they are learned.
func (a *RA) source(signer string) spiffe.BundleSource {
	if s := a.cfg.SignerRoots[signer]; s != nil {
		return s
	}
	return a.cfg.Roots
}

// roots returns the roots of a signer; nil if they are learned.
func (a *RA) roots(signer string) (*spiffe.Bundle, error) {
	source := a.source(signer)
	if source == nil {
		return nil, nil
	}
	return a.ask(source)
}

// ask returns the present bundle of a source, never nil without an error.
func (a *RA) ask(source spiffe.BundleSource) (*spiffe.Bundle, error) {
	b, err := source.Bundle(a.cfg.TrustDomain)
	switch {
	case err != nil:
		return nil, err
	case b == nil:
		return nil, errors.New("the source gave none")
	case b.TrustDomain() != a.cfg.TrustDomain:
		return nil, fmt.Errorf("the source gave those of %q", b.TrustDomain())
	}
	return b, nil
}

// Bundle returns the roots of all signers: the configured ones, as their sources return them now, and the learned
// ones, each for as long as a certificate that leads to it is valid. It is the same Bundle until they change. A source
// that fails keeps its last roots. The bundle has no sequence number, as the RA keeps nothing over a restart.
func (a *RA) Bundle() *spiffe.Bundle {
	sources := []spiffe.BundleSource{a.cfg.Roots}
	for _, name := range slices.Sorted(maps.Keys(a.cfg.SignerRoots)) {
		sources = append(sources, a.cfg.SignerRoots[name])
	}
	turn, answers := a.turn.Add(1), make([]*spiffe.Bundle, len(sources))
	for i, source := range sources { // without mu, as the sources are the user's
		if source != nil {
			answers[i], _ = a.ask(source)
		}
	}
	bundle, err := a.unite(turn, answers)
	if err != nil {
		a.cfg.Logger.Warn("roots of the signers do not fit into one bundle", slog.Any("err", err))
	}
	return bundle
}

// unite makes one bundle of all roots. A source without an answer keeps its last one. The error says why the bundle is
// an old one.
func (a *RA) unite(turn uint64, answers []*spiffe.Bundle) (*spiffe.Bundle, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forget()
	var roots []*x509.Certificate
	for i, b := range answers {
		if a.sources != nil && (b == nil || turn < a.taken) { // another call has asked later
			answers[i] = a.sources[i]
		}
		if answers[i] != nil {
			roots = slices.AppendSeq(roots, answers[i].X509Authorities())
		}
	}
	a.sources, a.taken = answers, max(a.taken, turn)
	for _, r := range a.learned {
		roots = append(roots, r.cert)
	}
	b, err := spiffe.NewBundle(a.cfg.TrustDomain, spiffe.BundleContents{X509Authorities: roots})
	switch {
	case err == nil && b.Equal(a.union): // the same Bundle, for verifiers remember by it
	case err == nil:
		a.union = b
	case a.union == nil: // each of them was in a bundle already; together they are too many
		a.union, _ = spiffe.NewBundle(a.cfg.TrustDomain, spiffe.BundleContents{}) // cannot fail
	}
	return a.union, err
}

// CallerBundle returns [RA.Bundle]: the signers do not say which of their keys may be stolen.
func (a *RA) CallerBundle() *spiffe.Bundle { return a.Bundle() }

// Health returns the health of the RA, for a program's readiness and metrics: whether the roots of the default signer
// are known and audit records can be made. Store is why the cluster did not answer the last request, for ten seconds.
// Root, Synced and Until are zero.
func (a *RA) Health() ca.Health {
	var h ca.Health
	if a.cfg.Signer != "" {
		if _, err := a.roots(a.cfg.Signer); err != nil {
			h.Signing = fmt.Errorf("ra: the roots of the signer %q: %w", a.cfg.Signer, err)
		}
	}
	if err := a.audited.Ask(a.cfg.Auditor); err != nil {
		h.Audit = fmt.Errorf("ra: audit record: %w", err)
	}
	h.Signing, h.Store = cmp.Or(h.Signing, h.Audit), a.asked.Err()
	return h
}

// Proven returns zero, for "not known": a [ca.Authority] keeps the time in the serial numbers of its certificates, but
// here the signer chooses them. So a server cannot follow chains of renewals by certificate, and has to allow all of
// them or none.
func (a *RA) Proven(*x509.Certificate) time.Time { return time.Time{} }

// forget removes the learned roots that no valid certificate leads to; a.mu is held.
func (a *RA) forget() {
	now := time.Now()
	a.learned = slices.DeleteFunc(a.learned, func(r learnedRoot) bool { return now.After(r.lastLeaf) })
}

// learn adds a root to the bundle, until the end of the leaf that it was learned from.
func (a *RA) learn(root *x509.Certificate, leafEnd time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forget()
	for i := range a.learned {
		if r := &a.learned[i]; r.cert.Equal(root) {
			if leafEnd.After(r.lastLeaf) {
				r.lastLeaf = leafEnd
			}
			return nil
		}
	}
	if len(a.learned) >= maxLearned {
		return fmt.Errorf("the signers have %d roots with valid certificates already: configure "+
			"the roots of the signers", maxLearned)
	}
	a.learned = append(a.learned, learnedRoot{root, leafEnd})
	return nil
}

func fail(kind error, format string, args ...any) *ca.SignError {
	return &ca.SignError{Kind: kind, Err: fmt.Errorf(format, args...)}
}

// Sign has a signer of the cluster certify the request and returns the chain to present: leaf first, then
// intermediates up to a root in [RA.Bundle], without that root. The caller owns the result.
//
// [ca.Authority.Sign] certifies the names that r grants; a signer certifies the names that r.CSR asks for. So the CSR
// must ask for r.ID (or, for a certificate without ID, for a DNS name), and may ask for any of r.DNSNames, r.IPs and
// r.CommonName. A CSR that asks for anything else is refused, except for an empty organization, which Istio's agents
// send. A caller that is granted a name and does not ask for it does not get it.
//
// A TTL of 0 or less leaves the lifetime to the signer. Any other is at least ten minutes, which Kubernetes demands: a
// shorter one is refused, not made longer. Fractions of a second are cut off. A signer may give less than the TTL, and
// more up to MaxTTL. Backdate is the signer's choice, too.
//
// When ctx is done, Sign still deletes what it created, for up to five seconds. The error is a
// [*ca.SignError], or wraps the cause of ctx's end:
//
//   - [ca.ErrCSR], [ca.ErrIdentity], [ca.ErrTTL]: the request is refused; so is one for an unknown signer.
//   - [spiffe.ErrNotReady]: the API server does not answer, or there was no certificate in time.
//   - [ca.ErrLimit]: over a limit of Config, or the API server asks to come back later.
//   - [ca.ErrGeneration]: the signer or the API server refused, or what came back is not good.
//   - [ca.ErrAudit]: there is no record, so that the certificate was thrown away.
func (a *RA) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("ra: sign %q: %w", r.ID, context.Cause(ctx))
	}
	chain, f := a.sign(ctx, &r)
	switch {
	case f == nil:
		return chain, nil
	case ctx.Err() != nil && (errors.Is(f.Err, context.Cause(ctx)) || errors.Is(f.Err, ctx.Err())):
		return nil, fmt.Errorf("ra: sign %q: %w", r.ID, context.Cause(ctx))
	}
	f.ID = r.ID
	return nil, f
}

func (a *RA) sign(ctx context.Context, r *ca.Request) ([]*x509.Certificate, *ca.SignError) {
	if f := a.check(r); f != nil {
		return nil, f
	}
	signer, err := a.signer(r.Signer)
	if err != nil {
		return nil, fail(ca.ErrCSR, "%w", err)
	}
	roots, err := a.roots(signer)
	if err != nil {
		return nil, fail(spiffe.ErrNotReady, "the roots of the signer %q: %w", signer, err)
	}
	if err := a.limiter.Acquire(ctx, cmp.Or(r.LimitKey, r.Caller)); err != nil {
		f := fail(ca.ErrLimit, "%w", err)
		if over, ok := errors.AsType[*limit.Error](err); ok {
			f.RetryAfter = over.RetryAfter
		}
		return nil, f
	}
	defer a.limiter.Release()
	answer, f := a.obtain(ctx, r, signer)
	switch {
	case f == nil || !errors.Is(f, spiffe.ErrNotReady):
		a.asked.Note(nil)
	case ctx.Err() == nil:
		a.asked.Note(f)
	}
	if f != nil {
		return nil, f
	}
	if newer, err := a.roots(signer); err == nil { // they may have changed meanwhile
		roots = newer
	}
	chain, issuer, err := a.accept(answer, r, roots, time.Now())
	if err != nil {
		return nil, fail(ca.ErrGeneration, "the answer of the signer %q: %w", signer, err)
	}
	if f := a.audit(ctx, issuance(r, chain[0], issuer)); f != nil {
		return nil, f
	}
	return chain, nil
}

func (a *RA) audit(ctx context.Context, i *ca.Issuance) *ca.SignError {
	if a.cfg.Auditor == nil {
		return nil
	}
	err := a.cfg.Auditor.Record(ctx, i)
	if err == nil || ctx.Err() == nil {
		a.audited.Note(err)
	}
	if err != nil {
		return fail(ca.ErrAudit, "%w", err)
	}
	return nil
}

// issuance is the audit record of a certificate, which the CA of the certificate issuer has signed; nil if that is not
// known.
func issuance(r *ca.Request, cert, issuer *x509.Certificate) *ca.Issuance {
	i := &ca.Issuance{
		Time: time.Now().Round(0), Kind: "x509-svid", Serial: cert.SerialNumber.Text(16),
		ID: r.ID, DNSNames: cert.DNSNames, IPs: cert.IPAddresses, NotBefore: cert.NotBefore, NotAfter: cert.NotAfter,
		Fingerprint: fmt.Sprintf("%x", sha256.Sum256(cert.Raw)),
		PublicKey:   fmt.Sprintf("%x", sha256.Sum256(cert.RawSubjectPublicKeyInfo)),
		Caller:      r.Caller, Method: r.Method, Pod: r.Pod, PodRequest: r.PodRequest,
	}
	if r.Profile == ca.DNSOnly {
		i.Kind = "dns"
	}
	if issuer != nil {
		i.Issuer = issuer.SerialNumber.Text(16)
	}
	return i
}
