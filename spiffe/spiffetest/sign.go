package spiffetest

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"net"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The calls that a CA answers. Faults apply to each separately.
const (
	callSign = iota
	callFetchBundles
	callWatchBundles
	calls // how many there are
)

// behaviour holds the faults and counters of a CA.
type behaviour struct {
	mu           sync.Mutex
	failures     [calls]int // how many of the next calls fail; below 0: all
	err          error      // the error of failing calls
	delay        time.Duration
	editTemplate func(*x509.Certificate)
	editAnswer   func([]*x509.Certificate) []*x509.Certificate
	signed       int
}

// FailNext makes the next n calls of each of [CA.Sign], [CA.FetchBundles] and [CA.WatchBundles] return err, or an
// unspecified error if err is nil. A negative n begins an outage: all calls fail until FailNext is called again.
// It replaces an earlier FailNext, so FailNext(0, nil) ends an outage. A running watch continues.
func (ca *CA) FailNext(n int, err error) {
	if err == nil {
		err = errors.New("spiffetest: injected failure")
	}
	ca.mu.Lock()
	defer ca.mu.Unlock()
	ca.err = err
	for i := range ca.failures {
		ca.failures[i] = n
	}
}

// Delay makes every call of Sign, FetchBundles and WatchBundles wait for d before it answers or fails, or until its
// context is done. 0, the default, ends that. Calls that already wait are not affected.
func (ca *CA) Delay(d time.Duration) {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	ca.delay = d
}

// EditTemplates makes [CA.Sign] pass the template of every leaf to edit before it is signed: to shorten
// the lifetime, to backdate, to change the ID. A nil edit, the default, ends that. The function is called
// on the goroutine of the caller of Sign, concurrently.
func (ca *CA) EditTemplates(edit func(*x509.Certificate)) {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	ca.editTemplate = edit
}

// EditAnswers makes [CA.Sign] return the result of edit for the chain that it would have returned: an
// empty chain, one in the wrong order, one with the root, the certificate of another key. A nil edit,
// the default, ends that. The function is called on the goroutine of the caller of Sign, concurrently.
func (ca *CA) EditAnswers(edit func(chain []*x509.Certificate) []*x509.Certificate) {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	ca.editAnswer = edit
}

// Signed returns how many certificates Sign has signed.
func (ca *CA) Signed() int {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	return ca.signed
}

// Sign answers a signing request and returns the chain, leaf first, without the root. The identity
// is the one URI name in the request, which must be a SPIFFE ID of a workload of this trust domain.
// DNS names, IP addresses and the common name are copied too. A lifetime of 0 means one hour.
//
// The error comes from [CA.FailNext], is the cause of ctx, or says what is wrong with the request.
func (ca *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	return ca.certify(ctx, csr, csr.SANs(), 1, lifetime)
}

// Certify is like [CA.Sign], but takes the names from its argument and ignores those in csr. Without a URI name it
// needs a DNS name; the certificate is then no X.509-SVID, like Linkerd's certificates. With a DNS name the URI may be
// a SPIFFE ID of another trust domain, because Athenz's ZTS signs for all its domains.
func (ca *CA) Certify(
	ctx context.Context, csr *pki.CSR, names []pki.SAN, lifetime time.Duration,
) ([]*x509.Certificate, error) {
	return ca.certify(ctx, csr, names, 0, lifetime)
}

func (ca *CA) certify(
	ctx context.Context, csr *pki.CSR, names []pki.SAN, ids int, lifetime time.Duration,
) ([]*x509.Certificate, error) {
	if err := ca.begin(ctx, callSign); err != nil {
		return nil, err
	}
	template, err := ca.template(csr, names, ids, lifetime)
	if err != nil {
		return nil, fmt.Errorf("spiffetest: sign: %w", err)
	}
	ca.mu.Lock()
	editTemplate, editAnswer := ca.editTemplate, ca.editAnswer
	ca.mu.Unlock()
	if editTemplate != nil {
		editTemplate(template)
	}
	chain, err := ca.signer().sign(template, csr.PublicKey())
	if err != nil {
		return nil, fmt.Errorf("spiffetest: sign: %w", err)
	}
	ca.mu.Lock()
	ca.signed++
	ca.mu.Unlock()
	if editAnswer != nil {
		chain = editAnswer(chain)
	}
	return chain, nil
}

// FetchBundles returns the bundle of the CA and the federated bundles. The error comes from [CA.FailNext] or is the
// cause of ctx.
func (ca *CA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if err := ca.begin(ctx, callFetchBundles); err != nil {
		return nil, err
	}
	return ca.Bundles(), nil
}

// WatchBundles yields the result of [CA.FetchBundles] now and after each change, until ctx is done. A
// slow reader skips to the newest. A watch that fails at its start yields that one error and ends. The
// sequence may be used many times and concurrently.
func (ca *CA) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		if err := ca.begin(ctx, callWatchBundles); err != nil {
			yield(nil, err)
			return
		}
		for bundles := range renew.Follow(ctx, ca.trust.changed.Changed, ca.Bundles) {
			if !yield(bundles, nil) {
				return
			}
		}
	}
}

// begin waits, and returns the error of FailNext or of ctx.
func (ca *CA) begin(ctx context.Context, call int) error {
	ca.mu.Lock()
	delay := ca.delay
	ca.mu.Unlock()
	if renew.Sleep(ctx, delay) != nil || ctx.Err() != nil {
		return fmt.Errorf("spiffetest: %w", context.Cause(ctx))
	}
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if ca.failures[call] == 0 {
		return nil
	}
	if ca.failures[call] > 0 {
		ca.failures[call]--
	}
	return ca.err
}

// template returns the template of a leaf with these names. The number of URI names must be ids or one.
func (ca *CA) template(csr *pki.CSR, names []pki.SAN, ids int, lifetime time.Duration) (*x509.Certificate, error) {
	var uris, dnsNames []string
	var ips []net.IP
	for _, san := range names {
		switch san.Type {
		case pki.URI:
			uris = append(uris, san.Value)
		case pki.DNS:
			dnsNames = append(dnsNames, san.Value)
		case pki.IP:
			ips = append(ips, net.IP(san.Value))
		}
	}
	if len(uris) != 1 && (len(uris) != ids || len(dnsNames) == 0) {
		return nil, fmt.Errorf("the request has %d URI names, want one", len(uris))
	}
	id := ca.trust.td.ID()
	if len(uris) == 1 {
		var err error
		if id, err = spiffe.ParseID(uris[0]); err != nil {
			return nil, err
		}
		if own := id.MemberOf(ca.trust.td); !own && (ids == 1 || len(dnsNames) == 0) || id.Path() == "" {
			return nil, fmt.Errorf("%s is not a workload of %s", id, ca.trust.td)
		}
	}
	if lifetime < 0 {
		return nil, fmt.Errorf("the lifetime %v is negative", lifetime)
	}
	if lifetime == 0 {
		lifetime = leafLifetime
	}
	template := leafTemplate(id, lifetime)
	if len(uris) == 0 {
		template.URIs = nil
	}
	template.Subject.CommonName = csr.CommonName()
	template.DNSNames, template.IPAddresses = dnsNames, ips
	return template, nil
}
