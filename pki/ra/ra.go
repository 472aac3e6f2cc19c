// Package ra is a registration authority: it has no key. The signers of a Kubernetes cluster sign for it through the
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
// every name in it, and it asks for nothing else: no other extension, no other subject. It is sent unchanged, as only
// its sender has the key.
//
// The answer is checked like any CA's: the certificate must have the key and exactly the names of the request, be a
// leaf, be valid now, and lead to a configured root. The package never requests a CA certificate.
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
//	   verbs: [create, get, delete]}
//	- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests/approval], verbs: [update]}
//	- {apiGroups: [certificates.k8s.io], resources: [signers], resourceNames: [example.com/mesh], verbs: [approve]}
//
// A right to approve for "example.com/*" covers all signers of the domain.
//
// # Signers
//
// Any signer of that API will do, such as istiod's or a cloud's. cert-manager's signers are
// "clusterissuers.cert-manager.io/NAME" and "issuers.cert-manager.io/NAMESPACE.NAME", if its feature gate
// ExperimentalCertificateSigningRequestControllers is on. They need no code here, as the API is the whole contract,
// and have no test, as that controller is an experiment, off by default: tests use their own signer at a real API
// server. cert-manager's issuers of the kind SelfSigned need the caller's private key, which this package never
// sends.
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
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/internal/lastresult"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures an [RA]. [New] copies it. A zero field means its default.
type Config struct {
	TrustDomain spiffe.TrustDomain // required

	// Signer is the signer for requests that name none, such as "example.com/mesh". Empty means that every request
	// must name a signer.
	Signer string

	// SignerDomain lets a request choose among the signers of a domain: its "mesh" is SignerDomain + "/mesh". Empty
	// means that requests must not name a signer. It must not be the domain of Kubernetes' own signers, some of which
	// make administrators.
	SignerDomain string

	// Roots has the roots of the signers' certificates, in its bundle of TrustDomain. For a list of roots in PEM
	// there is [spiffe.ParseBundlePEM].
	Roots spiffe.BundleSource

	// LearnRoots takes the roots from the signers' answers, if there are no Roots: the last certificate of a chain,
	// if it is a CA. Then any client that can write an answer into the API can make the whole trust domain trust its
	// own root, and after a start [RA.Bundle] is empty until the first answer.
	LearnRoots bool

	// MaxTTL is the longest lifetime of a request and of a certificate; 0 means 90 days.
	MaxTTL time.Duration

	// APIServer is the URL of the API server, https or, on loopback, http. Empty means the API server of this
	// process's cluster.
	APIServer string

	// HTTPClient authenticates this process to the API server. Nil means with its service account, whose token and CA
	// certificate are reloaded when they rotate.
	HTTPClient *http.Client

	Limits  ca.Limits    // on concurrent requests to signers and requests per second
	Auditor ca.Auditor   // records each certificate before it leaves; nil means no record
	Logger  *slog.Logger // nil means silence
}

// Defaults and limits.
const (
	defaultMaxTTL = 90 * 24 * time.Hour
	timeout       = 60 * time.Second  // for a certificate
	minTTL        = 600 * time.Second // Kubernetes refuses less
	cleanUp       = 5 * time.Second   // for the deletion
	maxLearned    = 64                // roots
	clockSkew     = 5 * time.Minute   // how far ahead a signer's clock may be, for MaxTTL
)

// RA is a registration authority. [New] makes one. It is safe for concurrent use.
type RA struct {
	cfg     Config
	api     *k8s.Client
	limiter *limit.Limiter

	audited, asked lastresult.Result // of the last record, and whether the cluster answered the last request

	mu      sync.Mutex
	learned []learnedRoot
	bundle  *spiffe.Bundle // that Bundle returned last
}

// learnedRoot is a root from an answer.
type learnedRoot struct {
	cert     *x509.Certificate
	lastLeaf time.Time // when the last certificate that leads to it ends
}

// New checks the configuration. It starts nothing, and does not contact the API server.
func New(cfg Config) (*RA, error) {
	cfg.MaxTTL = cmp.Or(cfg.MaxTTL, defaultMaxTTL)
	cfg.Logger = ratelog.Patient(cfg.Logger)
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("ra: invalid Config: %w", err)
	}
	api, err := k8s.New(k8s.Options{URL: cfg.APIServer, Client: cfg.HTTPClient})
	if err != nil {
		return nil, fmt.Errorf("ra: %w", err)
	}
	a := &RA{cfg: cfg, api: api, limiter: limit.New(limit.Options(cfg.Limits))}
	a.bundle, err = a.bundleOf(nil)
	return a, err
}

// bundleOf returns a bundle without a sequence number.
func (a *RA) bundleOf(roots []*x509.Certificate) (*spiffe.Bundle, error) {
	return spiffe.NewBundle(a.cfg.TrustDomain, spiffe.BundleContents{X509Authorities: roots})
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
	case c.Roots == nil && !c.LearnRoots:
		return errors.New("there are no roots: give them, or allow that they are learned from the answers")
	}
	return nil
}

const kubernetesDomain = "kubernetes.io"

// validDomain reports whether s can be the domain of a signer's name.
func validDomain(s string) bool { return k8s.ValidName(s) && strings.Contains(s, ".") }

// validSigner reports whether s is a domain and a name.
func validSigner(s string) bool {
	domain, name, _ := strings.Cut(s, "/")
	return validDomain(domain) && k8s.ValidName(name)
}

// signer returns the full name of the signer for a request, which need not name one.
func (a *RA) signer(name string) (string, error) {
	switch {
	case name == "" && a.cfg.Signer == "":
		return "", errors.New("the request names no signer, and there is no default")
	case name == "":
		return a.cfg.Signer, nil
	case a.cfg.SignerDomain == "":
		return "", fmt.Errorf("the request names the signer %.300q, and there is no signer domain to find it in", name)
	case !k8s.ValidName(name):
		return "", fmt.Errorf("%.300q is not the name of a signer", name)
	}
	return a.cfg.SignerDomain + "/" + name, nil
}

// roots returns the configured roots, or nil if they are learned.
func (a *RA) roots() (*spiffe.Bundle, error) {
	if a.cfg.Roots == nil {
		return nil, nil
	}
	b, err := a.cfg.Roots.Bundle(a.cfg.TrustDomain)
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

// Bundle returns the roots of all signers: the configured roots, as their source returns them now, or the learned
// roots, each for as long as a certificate that leads to it is valid. It returns the same Bundle until they change.
// If the source fails, its last roots stay. The bundle has no sequence number, as the RA stores nothing over a
// restart.
func (a *RA) Bundle() *spiffe.Bundle {
	configured, err := a.roots() // without mu, as the source is user code
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		return a.bundle
	}
	var roots []*x509.Certificate
	if configured != nil {
		roots = slices.Collect(configured.X509Authorities())
	}
	a.forget()
	for _, r := range a.learned {
		roots = append(roots, r.cert)
	}
	b, err := a.bundleOf(roots)
	if err == nil && !b.Equal(a.bundle) { // keep an equal Bundle, because verifiers' caches depend on it
		a.bundle = b
	}
	return a.bundle
}

// CallerBundle returns [RA.Bundle]: the signers do not say which of their keys may be stolen.
func (a *RA) CallerBundle() *spiffe.Bundle { return a.Bundle() }

// Health returns the health of the RA, for a program's readiness and metrics: whether the signers' roots are known
// and audit records can be made. Store is why the cluster did not answer the last request, for ten seconds. Root,
// Synced and Until are zero.
func (a *RA) Health() ca.Health {
	var h ca.Health
	if _, err := a.roots(); err != nil {
		h.Signing = fmt.Errorf("ra: the roots of the signers: %w", err)
	}
	if err := a.audited.Ask(a.cfg.Auditor); err != nil {
		h.Audit = fmt.Errorf("ra: audit record: %w", err)
	}
	h.Signing, h.Store = cmp.Or(h.Signing, h.Audit), a.asked.Err()
	return h
}

// Proven returns zero, for "unknown": a [ca.Authority] keeps the time in its serial numbers, but here the signer
// chooses them. So a server cannot limit chains of renewals by certificate, and must allow all of them or none.
func (a *RA) Proven(*x509.Certificate) time.Time { return time.Time{} }

// forget removes the learned roots without a valid certificate; a.mu is held.
func (a *RA) forget() {
	now := time.Now()
	a.learned = slices.DeleteFunc(a.learned, func(r learnedRoot) bool { return now.After(r.lastLeaf) })
}

// learn adds a root to the bundle, until the end of the leaf that came with it.
func (a *RA) learn(root *x509.Certificate, leafEnd time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forget()
	if i := slices.IndexFunc(a.learned, func(r learnedRoot) bool { return r.cert.Equal(root) }); i >= 0 {
		if leafEnd.After(a.learned[i].lastLeaf) {
			a.learned[i].lastLeaf = leafEnd
		}
		return nil
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

// Sign certifies the request through a signer of the cluster and returns the chain to present: leaf first, then
// intermediates up to a root in [RA.Bundle], without that root. The caller owns the result.
//
// [ca.Authority.Sign] certifies the names that r grants; a signer certifies the names in r.CSR. So the CSR must ask
// for r.ID (or, for a certificate without ID, for a DNS name), and may ask for any of r.DNSNames, r.IPs and
// r.CommonName. Any other CSR is refused, except that an empty organization, which Istio's agents send, is allowed. A
// granted name that is not in the CSR is not in the certificate.
//
// A TTL of 0 or less leaves the lifetime to the signer. Kubernetes demands at least ten minutes: a shorter TTL is
// refused, not extended. Fractions of a second are cut off. A signer may grant less than the TTL, or more, up to
// MaxTTL. It also chooses the Backdate.
//
// When ctx is done, Sign still deletes the object that it created, for up to five seconds. The error is a
// [*ca.SignError], or wraps the cause of ctx's end:
//
//   - [ca.ErrCSR], [ca.ErrIdentity], [ca.ErrTTL]: the request is refused; so is one for an unknown signer.
//   - [spiffe.ErrNotReady]: the API server does not answer, or there was no certificate in time.
//   - [ca.ErrLimit]: over a limit of Config, or the API server asks to come back later.
//   - [ca.ErrGeneration]: the signer or the API server refused, or the answer is not valid.
//   - [ca.ErrAudit]: no record could be made, so the certificate was thrown away.
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
	roots, err := a.roots()
	if err != nil {
		return nil, fail(spiffe.ErrNotReady, "the roots of the signers: %w", err)
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
	if newer, err := a.roots(); err == nil { // they may have changed meanwhile
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

// issuance is the audit record of a certificate signed by the CA with the certificate issuer.
func issuance(r *ca.Request, cert, issuer *x509.Certificate) *ca.Issuance {
	i := &ca.Issuance{
		Time: time.Now().Round(0), Kind: "x509-svid",
		Serial: cert.SerialNumber.Text(16), Issuer: issuer.SerialNumber.Text(16),
		ID: r.ID, DNSNames: cert.DNSNames, IPs: cert.IPAddresses, NotBefore: cert.NotBefore, NotAfter: cert.NotAfter,
		Fingerprint: fmt.Sprintf("%x", sha256.Sum256(cert.Raw)),
		PublicKey:   fmt.Sprintf("%x", sha256.Sum256(cert.RawSubjectPublicKeyInfo)),
		Caller:      r.Caller, Method: r.Method, Pod: r.Pod, PodRequest: r.PodRequest,
	}
	if r.Profile == ca.DNSOnly {
		i.Kind = "dns"
	}
	return i
}
