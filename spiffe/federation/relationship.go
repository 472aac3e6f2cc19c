package federation

import (
	"crypto/x509"
	"fmt"
	"net/url"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// Relationship describes where the bundle of a trust domain comes from, as an operator configures it. No field is
// derived from another.
type Relationship struct {
	// TrustDomain is the trust domain of the bundle.
	TrustDomain spiffe.TrustDomain

	// URL is where its bundle is: https, without user name and password.
	URL string

	// Profile is how the endpoint authenticates: [Web] or [SPIFFE].
	Profile Profile

	// JWKS says that the URL serves a JWK Set, as an OpenID Connect provider does, and not a bundle. Its keys become
	// the JWT authorities of TrustDomain: see [spiffe.ParseJWKS]. The bundle has nothing else, so it cannot verify
	// an endpoint in TrustDomain itself.
	JWKS bool
}

// Profile is a [Web] or a [SPIFFE].
type Profile interface {
	// plan checks the profile for the endpoint of td. A reason that is not empty says why the profile is refused.
	plan(td spiffe.TrustDomain) (p plan, reason string)
}

// plan is a checked Profile.
type plan struct {
	roots   *x509.CertPool      // https_web: nil for the roots of the host
	id      spiffe.ID           // https_spiffe; zero for https_web
	initial *spiffe.Bundle      // for a self-serving endpoint
	bundles spiffe.BundleSource // verifies the endpoint; nil for the Manager
}

// Web is the profile https_web: the endpoint has a certificate for the host of its URL, by DNS name
// or IP address, from an authority that is trusted for websites.
type Web struct {
	// Roots are the authorities; nil means the roots of the host. The caller must not change the pool afterwards.
	Roots *x509.CertPool
}

func (w Web) plan(_ spiffe.TrustDomain) (p plan, reason string) {
	if w.Roots != nil && w.Roots.Equal(x509.NewCertPool()) {
		return p, "Web.Roots is empty, so that no endpoint could be verified; nil means the roots of the host"
	}
	return plan{roots: w.Roots}, ""
}

// SPIFFE is the profile https_spiffe: the endpoint has an X.509-SVID with exactly the configured ID. Host
// names are not checked.
type SPIFFE struct {
	// EndpointID is the ID of the endpoint, with a path. If it is in the trust domain whose bundle is
	// fetched, the endpoint is called self-serving.
	EndpointID spiffe.ID

	// Initial is required for a self-serving endpoint: a bundle of the trust domain that was obtained in another
	// way. It verifies the endpoint until a bundle has been fetched, and for as long as its sequence number is
	// higher. It is not put in force; [Manager.Set] does that.
	Initial *spiffe.Bundle

	// Bundles is for an endpoint in another trust domain: the source of that domain's bundle. Each fetch calls it.
	// In a [Manager], nil means the Manager itself, which must then have a relationship with that trust domain.
	Bundles spiffe.BundleSource
}

func (s SPIFFE) plan(td spiffe.TrustDomain) (p plan, reason string) {
	switch {
	case s.EndpointID.IsZero():
		return p, "SPIFFE.EndpointID is required"
	case s.EndpointID.Path() == "":
		return p, fmt.Sprintf("SPIFFE.EndpointID is %q, which names a trust domain and not a workload", s.EndpointID)
	case !s.EndpointID.MemberOf(td) && s.Initial != nil:
		return p, "SPIFFE.Initial is for an endpoint in the trust domain that is fetched; use SPIFFE.Bundles"
	case !s.EndpointID.MemberOf(td):
		return plan{id: s.EndpointID, bundles: s.Bundles}, ""
	case s.Initial == nil:
		return p, "SPIFFE.Initial is required, as the endpoint is in the trust domain that is fetched"
	case s.Bundles != nil:
		return p, "SPIFFE.Bundles is for an endpoint in another trust domain; use SPIFFE.Initial"
	case s.Initial.TrustDomain() != td:
		return p, fmt.Sprintf("SPIFFE.Initial is a bundle of %q", s.Initial.TrustDomain())
	case !hasAuthority(s.Initial):
		return p, "SPIFFE.Initial has no X.509 authority, so that no endpoint could be verified"
	}
	return plan{id: s.EndpointID, initial: s.Initial, bundles: s.Initial}, ""
}

// relationshipError returns an error about the relationship with td.
func relationshipError(td spiffe.TrustDomain, reason string) error {
	return fmt.Errorf("relationship with %q: %s", td, reason)
}

// check returns the endpoint of r.
func (r Relationship) check() (*endpoint, error) {
	refuse := func(reason string) (*endpoint, error) { return nil, relationshipError(r.TrustDomain, reason) }
	switch {
	case r.TrustDomain.IsZero():
		return refuse("TrustDomain is required")
	case r.URL == "":
		return refuse("URL is required")
	case r.Profile == nil:
		return refuse("Profile is required: Web or SPIFFE")
	}
	u, err := url.Parse(r.URL)
	if err != nil || len(r.URL) > maxURL {
		return refuse("URL is not a URL") // it may have a password, so it is not shown
	}
	if reason := unfitURL(u); reason != "" {
		return refuse("URL " + reason)
	}
	p, reason := r.Profile.plan(r.TrustDomain)
	if reason != "" {
		return refuse(reason)
	}
	if r.JWKS && p.id.TrustDomain() == r.TrustDomain {
		return refuse("JWKS is for endpoints that authenticate in another way: " +
			"a JWK Set has nothing to verify this one with")
	}
	e := &endpoint{td: r.TrustDomain, url: u, where: display(u), plan: p, source: p.bundles, parse: spiffe.ParseBundle}
	if r.JWKS {
		e.parse = spiffe.ParseJWKS
	}
	return e, nil
}

// maxURL is how long a URL may be, in bytes: an endpoint chooses the URL of a redirect.
const maxURL = 8 << 10

// unfitURL returns the reason why u cannot be the URL of an endpoint, or "".
func unfitURL(u *url.URL) (reason string) {
	switch {
	case u.Scheme != "https":
		return "does not begin with https://"
	case u.User != nil:
		return "has a user name or password, which an endpoint does not ask for"
	case u.Hostname() == "":
		return "has no host"
	}
	return ""
}

// display formats u for errors and logs, without its query, which may be a credential, as in a signed URL that a
// redirect leads to.
func display(u *url.URL) string {
	shown := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path, RawPath: u.RawPath}
	s := redact.Clip(shown.String(), 512)
	if u.RawQuery != "" {
		s += "?…"
	}
	return s
}

func hasAuthority(b *spiffe.Bundle) bool { return len(b.Contents().X509Authorities) > 0 }
