// Package health answers the probes of an orchestrator and the scrapes of Prometheus: whether a service is ready and
// alive, and its metrics. It works with any source of identities and bundles, and with the standard library only.
//
// A service names its parts, and serves the [Handler] on a port of its own:
//
//	h, err := health.New(
//		health.Part{Name: "identity", Source: source}, // a *workloadapi.Source
//		health.Part{Name: "tls", Source: handshakes},  // a *spiffetls.Metrics
//	)
//	…
//	go http.ListenAndServe("127.0.0.1:9090", h)
//
// # Readiness
//
// A part is ready if its identity has not expired, and if it has bundles with which peers can be verified. How fresh
// they are does not matter: while the agent or the CA is away, a service stays ready until its identity expires. The
// answer names each part that is not ready with the reason, such as that the workload is not registered.
//
// # Liveness
//
// A part is alive until its identity expires. A service that waits for its first identity is alive, and so is one
// whose identity was withdrawn: a restart would not help. After the identity has expired no connection can be made.
// Whether an orchestrator should restart the service then is the operator's choice: a new process reconnects to its
// agent, but a restart does not end an outage of the CA.
//
// # Where to serve it
//
// The answers contain no keys or tokens, but they do contain IDs, addresses and errors, which are for operators. Serve
// them on loopback if a process on the same machine reads them. The probes of Kubernetes and most Prometheus servers
// come over the network, without an SVID: give them a port of their own, and let a network policy decide what reaches
// it. Do not mount the handler on the port that the service offers to its clients.
//
// # Metrics
//
// Each sample has the label part. The handler itself writes
//
//	svidkit_ready                                           1 if the part is ready, else 0
//	svidkit_alive                                           1 if the part is alive, else 0
//	svidkit_identity_start_timestamp_seconds                when the identity begins to be valid
//	svidkit_identity_end_timestamp_seconds                  when it expires
//	svidkit_identity_chain_end_timestamp_seconds            when the first certificate of its chain expires
//	svidkit_bundle_authorities                              by type: x509, jwt or wit
//	svidkit_bundle_sequence                                 the sequence number, if there is one
//	svidkit_bundle_first_authority_end_timestamp_seconds    when the first of the X.509 authorities expires
//	svidkit_bundle_last_authority_end_timestamp_seconds     when the last does, after which no peer is verified
//	svidkit_bundle_last_authority_start_timestamp_seconds   when that one began to be valid
//
// The identities are the service's own, with their SPIFFE ID in the label identity. Bundles have the label
// trust_domain. The configuration of the service bounds both. Alert on differences of times, such as
//
//	svidkit_identity_end_timestamp_seconds - time()
//
// Each part adds metrics of its own work: the Metrics of its report.
package health

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/metrics/metricspage"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Part is a part of a service. Name and at least one other field are required.
type Part struct {
	// Name identifies the part. The names of a Handler's parts must be distinct.
	Name string

	// Source reports the state of the part: a *workloadapi.Source, a *secretcache.Manager, a *spiffetls.Metrics, or
	// any other [report.Reporter]. [FromSources] makes a Reporter from sources without reports.
	Source report.Reporter

	// TrustDomains lists the trust domains whose peers the service needs: the part is ready only if the Source has a
	// bundle for each, with an authority that has not expired. Nil means the trust domain of the identity, if the
	// Source has bundles at all; empty means none.
	TrustDomains []spiffe.TrustDomain

	// Check is another condition: an error means that the part is not ready. It must not block and must be safe for
	// concurrent use.
	Check func() error
}

// FromSources makes a [report.Reporter] from sources without reports. One of them may be nil. The report has the
// bundles that the source can list (as a set of bundles, or by a method Bundles or Snapshot), and the bundles of the
// identity's trust domain and of [Part].TrustDomains.
func FromSources(identity spiffe.SVIDSource, bundles spiffe.BundleSource) report.Reporter {
	return sources{identity, bundles, nil}
}

type sources struct {
	identity spiffe.SVIDSource
	bundles  spiffe.BundleSource
	domains  []spiffe.TrustDomain
}

func (s sources) Report() report.Report {
	return sourcereport.Of(s.identity, s.bundles, "", s.domains...)
}

// Handler serves probes and metrics for the parts of a service. [New] makes one. It is safe for concurrent use. It
// asks the sources again for each request.
type Handler struct {
	parts []Part
	page  metricspage.Page
}

// New returns a Handler for at least one part. It copies the parts, and does not ask their sources yet.
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
		case p.Source == nil && p.Check == nil:
			return nil, fmt.Errorf("health: new: part %q has nothing but a name", p.Name)
		case p.Source == nil && len(p.TrustDomains) > 0:
			return nil, fmt.Errorf("health: new: part %q has TrustDomains and no Source", p.Name)
		case slices.Contains(p.TrustDomains, spiffe.TrustDomain{}):
			return nil, fmt.Errorf("health: new: part %q: a trust domain is missing: %w", p.Name, spiffe.ErrZero)
		}
		if s, ok := p.Source.(sources); ok {
			s.domains = p.TrustDomains
			p.Source = s
		}
		names[p.Name] = true
	}
	return h, nil
}

// Ready returns nil if all parts are ready. Otherwise the error has a line for each part that is not, with the
// reason, and wraps the errors of the sources.
func (h *Handler) Ready() error { return errors.Join(h.check(h.reports(), (*state).ready)...) }

// Alive returns nil if the identity of no part has expired.
func (h *Handler) Alive() error { return errors.Join(h.check(h.reports(), (*state).alive)...) }

// state is a part at one moment.
type state struct {
	*Part
	report.Report
	now time.Time
}

// reports collects one Report from each part, so that everything derived from them describes the same moment.
func (h *Handler) reports() []state {
	all := make([]state, len(h.parts))
	for i := range h.parts {
		all[i] = state{Part: &h.parts[i], now: time.Now()}
		if s := h.parts[i].Source; s != nil {
			all[i].Report = s.Report()
		}
	}
	return all
}

func (h *Handler) check(parts []state, of func(*state) error) (all []error) {
	for i := range parts {
		if err := of(&parts[i]); err != nil {
			all = append(all, fmt.Errorf("%s: %w", parts[i].Name, err))
		}
	}
	return all
}

// own returns the part's own identities, without which it is not ready, each once.
func (s *state) own() (all []*report.Identity) {
	for i := range s.Identities {
		id := &s.Identities[i]
		if id.Own && !slices.ContainsFunc(all, func(have *report.Identity) bool { return have.Name == id.Name }) {
			all = append(all, id)
		}
	}
	return all
}

// bundles returns the available bundles, one for each trust domain.
func (s *state) bundles() (all []*report.Bundle) {
	seen := map[string]bool{}
	for i := range s.Bundles {
		if b := &s.Bundles[i]; b.Err == nil && !seen[b.TrustDomain] {
			seen[b.TrustDomain] = true
			all = append(all, b)
		}
	}
	return all
}

// ready returns why the part is not ready, or nil.
func (s *state) ready() error {
	if s.NotReady != nil {
		return s.NotReady
	}
	domains := s.TrustDomains
	for _, i := range s.own() {
		switch {
		case !i.NotAfter.IsZero():
			if err := s.expired(i); err != nil {
				return err
			}
		case i.Err != nil:
			return i.Err
		default:
			return errors.New("there is no identity yet")
		}
		if id, err := spiffe.ParseID(i.Name); err == nil && s.TrustDomains == nil && len(s.Bundles) > 0 {
			domains = append(domains, id.TrustDomain())
		}
	}
	for _, td := range domains {
		if err := s.trusts(td); err != nil {
			return err
		}
	}
	if s.Check != nil {
		return s.Check()
	}
	return nil
}

// alive returns an error if the identity of the part has expired.
func (s *state) alive() error {
	for _, i := range s.own() {
		if err := s.expired(i); err != nil {
			return err
		}
	}
	return nil
}

// expired switches in the same second in which package spiffetls stops presenting the SVID.
func (s *state) expired(i *report.Identity) error {
	if !i.NotAfter.IsZero() && s.now.After(i.NotAfter) {
		return fmt.Errorf("the SVID of %q expired at %s and was not renewed", i.Name,
			i.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

// trusts returns why no peer of td can be verified, or nil.
func (s *state) trusts(td spiffe.TrustDomain) error {
	i := slices.IndexFunc(s.Bundles, func(b report.Bundle) bool { return b.TrustDomain == td.String() })
	if i < 0 {
		return fmt.Errorf("trust domain %q: %w", td, spiffe.ErrUnknownTrustDomain)
	}
	b := &s.Bundles[i]
	if b.Err != nil {
		return b.Err
	}
	_, last := ends(b)
	switch {
	case last != nil && s.now.After(last.NotAfter):
		return fmt.Errorf("the last X.509 authority in the trust bundle of %q expired at %s, so that no peer can "+
			"be verified", td, last.NotAfter.UTC().Format(time.RFC3339))
	case len(b.X509)+len(b.JWT)+len(b.WIT) == 0:
		return fmt.Errorf("the trust bundle of %q is empty, so that no peer is trusted", td)
	}
	return nil
}

// ends returns the X.509 authorities that expire first and last, or nil.
func ends(b *report.Bundle) (first, last *x509.Certificate) {
	for _, c := range b.X509 {
		if first == nil || c.NotAfter.Before(first.NotAfter) {
			first = c
		}
		if last == nil || c.NotAfter.After(last.NotAfter) {
			last = c
		}
	}
	return first, last
}

// WriteMetrics writes the metrics of all parts as one text. If a part fails, it writes nothing and returns the part's
// error; otherwise it returns the error of w.
func (h *Handler) WriteMetrics(w io.Writer) error {
	all := h.reports()
	parts := []metrics.Part{{Write: own(all).Write}}
	for _, s := range all {
		if s.Metrics != nil {
			parts = append(parts, metrics.Part{Name: s.Name, Write: s.Metrics})
		}
	}
	if err := metrics.Merge(w, partLabel, parts...); err != nil {
		return fmt.Errorf("health: %w", err)
	}
	return nil
}

const partLabel = "part"

// own returns the metrics of the handler itself.
func own(all []state) *metrics.Set {
	s := new(metrics.Set)
	addConditions(s, all)
	addIdentities(s, all)
	addBundles(s, all)
	return s
}

func addConditions(set *metrics.Set, all []state) {
	condition := func(name, help string, of func(*state) error) {
		set.Gauges(name, help, func(add metrics.Add) {
			for i := range all {
				add(metrics.Bool(of(&all[i]) == nil), partLabel, all[i].Name)
			}
		})
	}
	condition("svidkit_ready", "Whether the part is ready: 1, or 0 for one without a valid identity, without a bundle "+
		"that it needs, or by its own condition.", (*state).ready)
	condition("svidkit_alive", "Whether the part is alive: 1, or 0 if its identity has expired.", (*state).alive)
}

func addIdentities(set *metrics.Set, all []state) {
	each := func(name, happens string, at func(*report.Identity) time.Time) {
		read := func(add metrics.Add) {
			for i := range all {
				for _, id := range all[i].own() {
					if at := at(id); !at.IsZero() {
						add(metrics.Seconds(at), partLabel, all[i].Name, "identity", id.Name)
					}
				}
			}
		}
		set.Gauges("svidkit_identity_"+name+"_timestamp_seconds", "When "+happens+", in seconds since 1970.", read)
	}
	each("start", "the SVID begins to be valid", func(i *report.Identity) time.Time { return i.NotBefore })
	each("end", "the SVID, or a certificate that peers need to verify it, expires",
		func(i *report.Identity) time.Time { return i.NotAfter })
	each("chain_end", "the first certificate in the chain of the SVID expires",
		func(i *report.Identity) time.Time { return i.ChainEnd })
}

func addBundles(set *metrics.Set, all []state) {
	each := func(name, help string, of func(b *report.Bundle, add metrics.Add)) {
		set.Gauges(name, help, func(add metrics.Add) {
			for _, s := range all {
				for _, b := range s.bundles() {
					of(b, func(v float64, labels ...string) {
						add(v, append([]string{partLabel, s.Name, "trust_domain", b.TrustDomain}, labels...)...)
					})
				}
			}
		})
	}
	each("svidkit_bundle_authorities", "The number of authorities in the trust bundle, by type.",
		func(b *report.Bundle, add metrics.Add) {
			add(float64(len(b.X509)), "type", "x509")
			add(float64(len(b.JWT)), "type", "jwt")
			add(float64(len(b.WIT)), "type", "wit")
		})
	each("svidkit_bundle_sequence", "The sequence number of the trust bundle, exact up to 2^53.",
		func(b *report.Bundle, add metrics.Add) {
			if b.Sequence != nil {
				add(float64(*b.Sequence))
			}
		})
	authority := func(name, happens string, at func(first, last *x509.Certificate) time.Time) {
		read := func(b *report.Bundle, add metrics.Add) {
			if len(b.X509) > 0 {
				add(metrics.Seconds(at(ends(b))))
			}
		}
		each("svidkit_bundle_"+name+"_timestamp_seconds", "When "+happens+", in seconds since 1970.", read)
	}
	authority("first_authority_end", "the first of the X.509 authorities in the trust bundle expires",
		func(first, _ *x509.Certificate) time.Time { return first.NotAfter })
	authority("last_authority_end", "the last of the X.509 authorities in the trust bundle expires",
		func(_, last *x509.Certificate) time.Time { return last.NotAfter })
	authority("last_authority_start", "the X.509 authority that expires last began to be valid",
		func(_, last *x509.Certificate) time.Time { return last.NotBefore })
}

// ServeHTTP implements [http.Handler] for GET and HEAD. Only the last element of the path counts, so the handler can
// be mounted anywhere:
//
//	ready, readyz    200 and "ok", or 503 and a line for each part that is not ready
//	live, livez      200 and "ok", or 503 and a line for each part whose identity has expired
//	metrics          the metrics and svidkit_build_info, or 500 and the error of a part
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
		answer(w, h.check(h.reports(), (*state).ready))
	case "live", "livez":
		answer(w, h.check(h.reports(), (*state).alive))
	case "metrics":
		if err := h.page.Serve(w, h.WriteMetrics); err != nil {
			http.Error(w, line(err), http.StatusInternalServerError)
		}
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

// maxLine is how many bytes of an error are shown, because another program may have written part of it.
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
