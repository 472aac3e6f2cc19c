// Package health tells orchestrators and monitoring how a service is: whether it is ready and alive, and metrics in
// the text format of Prometheus. It works with any source of identities and bundles, and imports the standard library
// only.
//
// A service names its parts, and serves the [Handler] on a port of its own:
//
//	h, err := health.New(
//		health.Part{Name: "identity", Identity: source, Bundles: source, Metrics: source},
//		health.Part{Name: "tls", Metrics: handshakes}, // a *spiffetls.Metrics
//	)
//	…
//	go http.ListenAndServe("127.0.0.1:9090", h)
//
// # Readiness
//
// A part is ready if it has an identity that has not expired, and bundles with which peers can be verified. How fresh
// they are does not matter: while the agent or the CA is away, a service stays ready until its identity expires. The
// answer names each part that is not ready, and has the error of its source, which says why: that the workload is not
// registered, for example.
//
// # Liveness
//
// A part is alive until its identity has expired. A service that waits for its first identity is alive, and one whose
// identity was withdrawn too, as a restart would not help. Once the identity has expired, no connection can be made
// any more; whether an orchestrator should then restart the service is the operator's choice. A new process makes a
// new connection to its agent; an outage of the CA it only repeats.
//
// # Where to serve it
//
// The answers have no keys or tokens. They do have IDs, addresses and errors, which are for operators. Serve them on
// loopback if a process on the same machine reads them. The probes of Kubernetes and most Prometheus servers come over
// the network, without an SVID: give them a port of their own, apart from that of the service, and let a network policy
// decide what reaches it. Do not mount the handler on the port that the service offers to its clients.
//
// # Metrics
//
// Each sample has the label part. The handler itself writes
//
//	svidkit_ready                                           1 if the part is ready, else 0
//	svidkit_alive                                           1 if the part is alive, else 0
//	svidkit_identity_start_timestamp_seconds                when the SVID begins to be valid
//	svidkit_identity_end_timestamp_seconds                  when it expires
//	svidkit_identity_chain_end_timestamp_seconds            when the first certificate of its chain expires
//	svidkit_bundle_authorities                              by type: x509, jwt or wit
//	svidkit_bundle_sequence                                 the sequence number, if there is one
//	svidkit_bundle_refresh_hint_seconds                     the refresh hint, if there is one
//	svidkit_bundle_first_authority_end_timestamp_seconds    when the first of the X.509 authorities expires
//	svidkit_bundle_last_authority_end_timestamp_seconds     when the last does, after which no peer is verified
//
// Those of an identity have the label identity, the service's own SPIFFE ID, and those of a bundle the label
// trust_domain. Both are bounded by what the service is configured for. Ages are differences of times, such as
//
//	svidkit_identity_end_timestamp_seconds - time()
//
// The part's Metrics add what the part knows of its own work. The parts of this module do that with the method
// WriteMetrics, which can also be called alone; then two parts of one kind cannot be in one text, as they have the
// same names. [Handler.WriteMetrics] makes them one text, in which the label part tells them apart.
package health

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/spiffe"
)

// Part is a part of a service. Name is required, and one of the others.
type Part struct {
	// Name is a word of the program's choice. No two parts have the same.
	Name string

	// Identity must have an SVID that has not expired, or the part is not ready.
	Identity spiffe.SVIDSource

	// Bundles must have a bundle of each of TrustDomains, with an authority that has not expired, or the part is not
	// ready. The metrics are about all its bundles, if it is a set of them or tells by its method Bundles or
	// Snapshot which it has, as the sources of this module do; otherwise about those of TrustDomains.
	Bundles spiffe.BundleSource

	// TrustDomains are those whose peers the service cannot do without. Nil means that of the Identity, and none
	// without one. It needs Bundles.
	TrustDomains []spiffe.TrustDomain

	// Check is a condition of the program's own: an error means that the part is not ready. It must not block and
	// must be safe for concurrent use.
	Check func() error

	// Metrics writes the metrics of the part, in the text format of Prometheus. WriteMetrics must be safe for
	// concurrent use, and none of its labels is called part.
	Metrics interface {
		WriteMetrics(w io.Writer) error
	}
}

// Handler answers for the parts of a service. [New] makes one. It never changes and is safe for concurrent use. It asks
// the sources anew for each answer.
type Handler struct{ parts []Part }

// New returns a Handler for these parts, of which there is at least one. It copies them, and asks their sources
// nothing yet.
func New(parts ...Part) (*Handler, error) {
	if len(parts) == 0 {
		return nil, errors.New("health: new: no parts, such as the source of the identity")
	}
	h := &Handler{parts: slices.Clone(parts)}
	names := map[string]bool{}
	for i := range h.parts {
		p := &h.parts[i]
		p.TrustDomains = slices.Clone(p.TrustDomains)
		switch {
		case p.Name == "" || !utf8.ValidString(p.Name) || strings.ContainsFunc(p.Name, unicode.IsControl):
			return nil, fmt.Errorf("health: new: part %d needs a Name of printable characters", i+1)
		case names[p.Name]:
			return nil, fmt.Errorf("health: new: two parts have the name %q", p.Name)
		case p.Identity == nil && p.Bundles == nil && p.Check == nil && p.Metrics == nil:
			return nil, fmt.Errorf("health: new: part %q has nothing but a name", p.Name)
		case p.Bundles == nil && len(p.TrustDomains) > 0:
			return nil, fmt.Errorf("health: new: part %q has TrustDomains and no Bundles", p.Name)
		case slices.Contains(p.TrustDomains, spiffe.TrustDomain{}):
			return nil, fmt.Errorf("health: new: part %q: a trust domain is missing: %w", p.Name, spiffe.ErrZero)
		}
		names[p.Name] = true
	}
	return h, nil
}

// Ready returns nil if all parts are ready, and otherwise which are not and why, one line for each. The error wraps
// those of the sources.
func (h *Handler) Ready() error { return errors.Join(h.check((*Part).ready)...) }

// Alive returns nil if the identity of no part has expired.
func (h *Handler) Alive() error { return errors.Join(h.check((*Part).alive)...) }

func (h *Handler) check(of func(*Part, time.Time) error) (all []error) {
	now := time.Now()
	for i := range h.parts {
		if err := of(&h.parts[i], now); err != nil {
			all = append(all, fmt.Errorf("%s: %w", h.parts[i].Name, err))
		}
	}
	return all
}

// ready says why p is not ready.
func (p *Part) ready(now time.Time) error {
	domains := p.TrustDomains
	if p.Identity != nil {
		svid, err := p.svid()
		if err == nil {
			err = expired(svid, now)
		}
		if err != nil {
			return err
		}
		if domains == nil {
			domains = []spiffe.TrustDomain{svid.ID().TrustDomain()}
		}
	}
	if p.Bundles != nil {
		for _, td := range domains {
			if err := p.trusts(td, now); err != nil {
				return err
			}
		}
	}
	if p.Check != nil {
		return p.Check()
	}
	return nil
}

// alive says that the identity of p has expired.
func (p *Part) alive(now time.Time) error {
	if p.Identity == nil {
		return nil
	}
	svid, err := p.svid()
	if err != nil {
		return nil // there is none, and it may still come
	}
	return expired(svid, now)
}

// svid returns the present SVID.
func (p *Part) svid() (*spiffe.SVID, error) {
	svid, err := p.Identity.SVID()
	if err == nil && svid == nil {
		err = errors.New("the source returned no SVID and no error")
	}
	return svid, err
}

// expired uses the same second as package spiffetls, which then presents the SVID no more.
func expired(svid *spiffe.SVID, now time.Time) error {
	if now.After(svid.NotAfter()) {
		return fmt.Errorf("the SVID of %q expired at %s and was not renewed", svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
	}
	return nil
}

// trusts says why no peer of td can be verified.
func (p *Part) trusts(td spiffe.TrustDomain, now time.Time) error {
	b, err := p.Bundles.Bundle(td)
	switch {
	case err != nil:
		return err
	case b == nil:
		return fmt.Errorf("the source returned no bundle of %q and no error", td)
	}
	_, last, x509s := ends(b)
	switch {
	case x509s > 0 && now.After(last):
		return fmt.Errorf("the last X.509 authority in the trust bundle of %q expired at %s, so that no peer can be verified", td, last.UTC().Format(time.RFC3339))
	case x509s == 0 && number(b.JWTAuthorities()) == 0 && number(b.WITAuthorities()) == 0:
		return fmt.Errorf("the trust bundle of %q is empty, so that no peer is trusted", td)
	}
	return nil
}

// ends returns when the first and the last of the X.509 authorities expire, and how many there are.
func ends(b *spiffe.Bundle) (first, last time.Time, n int) {
	for c := range b.X509Authorities() {
		if n == 0 || c.NotAfter.Before(first) {
			first = c.NotAfter
		}
		if n == 0 || c.NotAfter.After(last) {
			last = c.NotAfter
		}
		n++
	}
	return first, last, n
}

func number[K, V any](seq iter.Seq2[K, V]) (n int) {
	for range seq {
		n++
	}
	return n
}

// bundles returns the bundles that the metrics are about.
func (p *Part) bundles() []*spiffe.Bundle {
	var all []*spiffe.Bundle
	var set *spiffe.BundleSet
	switch s := p.Bundles.(type) {
	case nil:
		return nil
	case *spiffe.BundleSet:
		set = s
	case interface{ Bundles() *spiffe.BundleSet }:
		set = s.Bundles()
	case interface {
		Snapshot() (*spiffe.Snapshot, error)
	}:
		if snap, err := s.Snapshot(); err == nil && snap != nil {
			set = snap.Bundles()
		}
	}
	if set != nil {
		all = slices.Collect(set.All())
	}
	domains := p.TrustDomains
	if p.Identity != nil && domains == nil {
		if svid, err := p.svid(); err == nil {
			domains = []spiffe.TrustDomain{svid.ID().TrustDomain()}
		}
	}
	if b, ok := p.Bundles.(*spiffe.Bundle); ok {
		domains = []spiffe.TrustDomain{b.TrustDomain()}
	}
	for _, td := range domains {
		if slices.ContainsFunc(all, func(b *spiffe.Bundle) bool { return b.TrustDomain() == td }) {
			continue
		}
		if b, err := p.Bundles.Bundle(td); err == nil && b != nil {
			all = append(all, b)
		}
	}
	return all
}

// WriteMetrics writes the metrics of all parts as one text. An error is that of a part's WriteMetrics, and then nothing
// is written, or that of w.
func (h *Handler) WriteMetrics(w io.Writer) error {
	own := h.metrics(time.Now())
	parts := []metrics.Part{{Write: own.Write}}
	for _, p := range h.parts {
		if p.Metrics != nil {
			parts = append(parts, metrics.Part{Name: p.Name, Write: p.Metrics.WriteMetrics})
		}
	}
	if err := metrics.Merge(w, partLabel, parts...); err != nil {
		return fmt.Errorf("health: %w", err)
	}
	return nil
}

const partLabel = "part"

// metrics returns what the handler itself writes.
func (h *Handler) metrics(now time.Time) *metrics.Set {
	s := new(metrics.Set)
	condition := func(name, help string, of func(*Part, time.Time) error) {
		s.Gauges(name, help, func(add metrics.Add) {
			for i := range h.parts {
				add(metrics.Bool(of(&h.parts[i], now) == nil), partLabel, h.parts[i].Name)
			}
		})
	}
	condition("svidkit_ready", "Whether the part is ready: 1, or 0 for one without a valid identity, without a bundle that it needs, or by its own condition.", (*Part).ready)
	condition("svidkit_alive", "Whether the part is alive: 1, or 0 if its identity has expired.", (*Part).alive)

	type identity struct {
		part string
		svid *spiffe.SVID
	}
	type bundle struct {
		part string
		*spiffe.Bundle
	}
	var identities []identity // read once, so that all their samples are about the same
	var bundles []bundle
	for i := range h.parts {
		p := &h.parts[i]
		if p.Identity != nil {
			if svid, err := p.svid(); err == nil {
				identities = append(identities, identity{p.Name, svid})
			}
		}
		for _, b := range p.bundles() {
			bundles = append(bundles, bundle{p.Name, b})
		}
	}
	for _, m := range []struct {
		name, help string
		at         func(*spiffe.SVID) time.Time
	}{
		{"svidkit_identity_start_timestamp_seconds", "When the SVID begins to be valid, in seconds since 1970.", func(s *spiffe.SVID) time.Time { return s.Leaf().NotBefore }},
		{"svidkit_identity_end_timestamp_seconds", "When the SVID expires, in seconds since 1970.", (*spiffe.SVID).NotAfter},
		{"svidkit_identity_chain_end_timestamp_seconds", "When the first certificate in the chain of the SVID expires, in seconds since 1970.", func(s *spiffe.SVID) time.Time {
			return slices.MinFunc(s.Chain(), func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) }).NotAfter
		}},
	} {
		s.Gauges(m.name, m.help, func(add metrics.Add) {
			for _, i := range identities {
				add(metrics.Seconds(m.at(i.svid)), partLabel, i.part, "identity", i.svid.ID().String())
			}
		})
	}
	each := func(name, help string, of func(b *spiffe.Bundle, add metrics.Add)) {
		s.Gauges(name, help, func(add metrics.Add) {
			for _, b := range bundles {
				of(b.Bundle, func(v float64, labels ...string) {
					add(v, append([]string{partLabel, b.part, "trust_domain", b.TrustDomain().String()}, labels...)...)
				})
			}
		})
	}
	each("svidkit_bundle_authorities", "The number of authorities in the trust bundle, by type.", func(b *spiffe.Bundle, add metrics.Add) {
		_, _, n := ends(b)
		add(float64(n), "type", "x509")
		add(float64(number(b.JWTAuthorities())), "type", "jwt")
		add(float64(number(b.WITAuthorities())), "type", "wit")
	})
	each("svidkit_bundle_sequence", "The sequence number of the trust bundle, exact up to 2^53.", func(b *spiffe.Bundle, add metrics.Add) {
		if n, ok := b.Sequence(); ok {
			add(float64(n))
		}
	})
	each("svidkit_bundle_refresh_hint_seconds", "How often the publisher of the trust bundle suggests to fetch it.", func(b *spiffe.Bundle, add metrics.Add) {
		if d, ok := b.RefreshHint(); ok {
			add(d.Seconds())
		}
	})
	each("svidkit_bundle_first_authority_end_timestamp_seconds", "When the first of the X.509 authorities in the trust bundle expires, in seconds since 1970.", func(b *spiffe.Bundle, add metrics.Add) {
		if first, _, n := ends(b); n > 0 {
			add(metrics.Seconds(first))
		}
	})
	each("svidkit_bundle_last_authority_end_timestamp_seconds", "When the last of the X.509 authorities in the trust bundle expires, in seconds since 1970.", func(b *spiffe.Bundle, add metrics.Add) {
		if _, last, n := ends(b); n > 0 {
			add(metrics.Seconds(last))
		}
	})
	return s
}

// ServeHTTP implements [http.Handler] for GET and HEAD. The last element of the path says what is asked for, so that it
// can be mounted anywhere:
//
//	ready, readyz    200 and "ok", or 503 and a line for each part that is not ready
//	live, livez      200 and "ok", or 503 and a line for each part whose identity has expired
//	metrics          the metrics, or 500 and the error of a part
//
// Other paths are answered with 404.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	switch path.Base(r.URL.Path) {
	case "ready", "readyz":
		answer(w, h.check((*Part).ready))
	case "live", "livez":
		answer(w, h.check((*Part).alive))
	case "metrics":
		var b bytes.Buffer
		if err := h.WriteMetrics(&b); err != nil {
			http.Error(w, line(err), http.StatusInternalServerError)
			return
		}
		header.Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = w.Write(b.Bytes()) // an error means that the client is gone
	default:
		http.NotFound(w, r)
	}
}

func answer(w http.ResponseWriter, faults []error) {
	if len(faults) == 0 {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = io.WriteString(w, "ok\n")
		return
	}
	var lines []string
	for _, err := range faults {
		lines = append(lines, line(err))
	}
	http.Error(w, strings.Join(lines, "\n"), http.StatusServiceUnavailable)
}

// maxLine is how much of an error is shown, in bytes: a part of it may be from another program.
const maxLine = 1024

// line returns an error as one line.
func line(err error) string {
	s := strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, err.Error())
	if len(s) > maxLine {
		s = s[:maxLine] + "…"
	}
	return strings.ToValidUTF8(s, "")
}
