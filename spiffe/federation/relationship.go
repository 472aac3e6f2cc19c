package federation

import (
	"crypto/x509"
	"fmt"
	"net/url"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

// Relationship is what has to be known before the bundle of a trust domain can be fetched. Nothing
// in it is guessed from the rest (FED-21).
type Relationship struct {
	// TrustDomain is whose bundle it is.
	TrustDomain spiffe.TrustDomain

	// URL is where its bundle is: https, without user name and password (FED-30, FED-31).
	URL string

	// Profile is how the endpoint proves itself: [Web] or [SPIFFE].
	Profile Profile
}

// Profile is a [Web] or a [SPIFFE].
type Profile interface {
	// plan checks the profile for the endpoint of td.
	plan(td spiffe.TrustDomain) (plan, *ConfigError)
}

// plan is what a Profile comes to.
type plan struct {
	roots   *x509.CertPool      // https_web: nil for those of the host
	id      spiffe.ID           // https_spiffe; zero for https_web
	initial *spiffe.Bundle      // of a self-serving endpoint
	bundles spiffe.BundleSource // of another one; nil for the Manager
}

// Web is the profile https_web: the endpoint has a certificate for the host of its URL, by DNS name
// or IP address, from an authority that is trusted for websites (FED-52).
type Web struct {
	// Roots are the authorities; nil means those of the host. The pool must not be changed any more.
	Roots *x509.CertPool
}

func (w Web) plan(td spiffe.TrustDomain) (plan, *ConfigError) {
	if w.Roots != nil && w.Roots.Equal(x509.NewCertPool()) {
		return plan{}, &ConfigError{td, "FED-52", "Web.Roots is empty, so that no endpoint could be verified; nil means the roots of the host"}
	}
	return plan{roots: w.Roots}, nil
}

// SPIFFE is the profile https_spiffe: the endpoint has an X.509-SVID with exactly the ID that is
// configured. Host names play no part (FED-65).
type SPIFFE struct {
	// EndpointID is the ID of the endpoint, with a path. If it is in the trust domain whose bundle is
	// fetched, the endpoint is called self-serving (FED-61).
	EndpointID spiffe.ID

	// Initial is for a self-serving endpoint, and is required there: a bundle of the trust domain that
	// was obtained in another way, with what the endpoint is verified by until a bundle was fetched, or
	// as long as this one has the higher sequence number. It is for that only: it does not become the
	// bundle in force. Give it to [Manager.Set] if it shall.
	Initial *spiffe.Bundle

	// Bundles is for an endpoint in another trust domain: where the bundle of that one comes from, which
	// is asked at each fetch (FED-68). In a [Manager], nil means the Manager itself, which must then have
	// a relationship with that trust domain.
	Bundles spiffe.BundleSource
}

func (s SPIFFE) plan(td spiffe.TrustDomain) (plan, *ConfigError) {
	refuse := func(rule, reason string) (plan, *ConfigError) { return plan{}, &ConfigError{td, rule, reason} }
	switch {
	case s.EndpointID.IsZero():
		return refuse("FED-60", "SPIFFE.EndpointID is required")
	case s.EndpointID.Path() == "":
		return refuse("FED-60", fmt.Sprintf("SPIFFE.EndpointID is %q, which names a trust domain and not a workload", s.EndpointID))
	case !s.EndpointID.MemberOf(td) && s.Initial != nil:
		return refuse("FED-63", "SPIFFE.Initial is for an endpoint in the trust domain that is fetched; use SPIFFE.Bundles")
	case !s.EndpointID.MemberOf(td):
		return plan{id: s.EndpointID, bundles: s.Bundles}, nil
	case s.Initial == nil:
		return refuse("FED-61", "SPIFFE.Initial is required, as the endpoint is in the trust domain that is fetched")
	case s.Bundles != nil:
		return refuse("FED-61", "SPIFFE.Bundles is for an endpoint in another trust domain; use SPIFFE.Initial")
	case s.Initial.TrustDomain() != td:
		return refuse("FED-61", fmt.Sprintf("SPIFFE.Initial is a bundle of %q", s.Initial.TrustDomain()))
	case !hasAuthority(s.Initial):
		return refuse("FED-62", "SPIFFE.Initial has no X.509 authority, so that no endpoint could be verified")
	}
	return plan{id: s.EndpointID, initial: s.Initial}, nil
}

// ConfigError says what is wrong with the parameters of a relationship. It comes before anything is
// sent.
type ConfigError struct {
	TrustDomain spiffe.TrustDomain
	Rule        string // the rule's id, as in the conformance table, such as "FED-30"
	Reason      string // the rule in words
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("relationship with %q: %s", e.TrustDomain, e.Reason)
}

// check returns the endpoint of r.
func (r Relationship) check() (*endpoint, error) {
	refuse := func(rule, reason string) (*endpoint, error) {
		return nil, &ConfigError{r.TrustDomain, rule, reason}
	}
	switch {
	case r.TrustDomain.IsZero():
		return refuse("FED-20", "TrustDomain is required")
	case r.URL == "":
		return refuse("FED-20", "URL is required")
	case r.Profile == nil:
		return refuse("FED-20", "Profile is required: Web or SPIFFE")
	}
	u, err := url.Parse(r.URL)
	if err != nil || len(r.URL) > maxURL {
		return refuse("FED-30", "URL is not a URL") // which may have a password, so that it is not shown
	}
	if rule, reason := unfitURL(u); rule != "" {
		return refuse(rule, "URL "+reason)
	}
	p, fault := r.Profile.plan(r.TrustDomain)
	if fault != nil {
		return nil, fault
	}
	e := &endpoint{td: r.TrustDomain, url: u, where: display(u), plan: p, source: p.bundles}
	if p.initial != nil {
		e.source = p.initial
	}
	return e, nil
}

// maxURL is how long a URL may be, in bytes: that of a redirect comes from the endpoint.
const maxURL = 8 << 10

// unfitURL says which rule keeps u from being the URL of an endpoint, and why, or returns "".
func unfitURL(u *url.URL) (rule, reason string) {
	switch {
	case u.Scheme != "https":
		return "FED-30", "does not begin with https://"
	case u.User != nil:
		return "FED-31", "has a user name or password, which an endpoint does not ask for"
	case u.Hostname() == "":
		return "FED-30", "has no host"
	}
	return "", ""
}

// display is u for people and logs. A query may be a credential, such as that of a signed URL that a
// redirect leads to.
func display(u *url.URL) string {
	shown := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path, RawPath: u.RawPath}
	s := shown.String()
	if len(s) > 512 {
		s = strings.ToValidUTF8(s[:512], "") + "…"
	}
	if u.RawQuery != "" {
		s += "?…"
	}
	return s
}

func hasAuthority(b *spiffe.Bundle) bool {
	for range b.X509Authorities() {
		return true
	}
	return false
}
