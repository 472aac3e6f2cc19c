package caconfig

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

// callers configures how callers of Istio's API prove themselves, beside their certificates and Kubernetes.
type callers struct {
	rule        *rule // for the tokens of an issuer
	roots       string
	clientRoots string
	gateways    []netip.Prefix
	ownToken    string
	issuer      string // of tokens that are also accepted, with audience
	audience    string
	firstParty  bool
}

// rule is Istio's JWT_RULE, with the fields of JWTRule that a certificate server needs.
type rule struct {
	Issuer    string   `json:"issuer"`
	JWKSURI   string   `json:"jwks_uri"`
	JwksURI   string   `json:"jwksUri"` // protobuf's other spelling of the field
	Audiences []string `json:"audiences"`
}

// defineCallers defines the flags for callers in fs.
func (c *Config) defineCallers(fs *flag.FlagSet) {
	fs.Func("jwt-rule", "`rule` for tokens of an OpenID Connect issuer that prove callers of Istio's API, in JSON: "+
		"issuer, audiences, and jwks_uri, or none for discovery [JWT_RULE]", c.callers.setRule)
	fs.StringVar(&c.callers.roots, "jwt-roots", "",
		"`file` with the roots that the servers of -jwt-rule and -token-issuer are verified by, in PEM (default "+
			"those of the host)")
	fs.StringVar(&c.callers.clientRoots, "client-roots", "",
		"`file` with roots of another CA, in PEM: their certificates prove callers of Istio's "+
			"API, too, by IDs of the trust domain. Peers do not trust these roots")
	fs.StringVar(&c.callers.ownToken, "own-token", "/var/run/secrets/tokens/istio-token",
		"`file` with the token of this server, if it is there, whose issuer and first audience are the defaults of "+
			"-token-issuer and -audience")
	fs.StringVar(&c.callers.issuer, "token-issuer", "",
		"`issuer` whose service account tokens prove callers when all else does not; in a pod it has no effect "+
			"(default that of -own-token) [TOKEN_ISSUER]")
	fs.StringVar(&c.callers.audience, "audience", "",
		"`audience` of these tokens (default that of -own-token) [AUDIENCE]")
	fs.Func("trusted-gateway-cidr", "`prefixes` of the addresses of proxies that name callers of Istio's API in the "+
		"header x-forwarded-client-cert; those of this machine are trusted then, too [TRUSTED_GATEWAY_CIDR]",
		c.callers.setGateways)
	fs.Func("jwt-policy", "`policy` of Istio for tokens, third-party-jwt or first-party-jwt, which means the same: a "+
		"token has to be for one of -token-audiences [JWT_POLICY]", func(text string) (err error) {
		c.callers.firstParty, err = parseJWTPolicy(text)
		return err
	})
}

// parseJWTPolicy parses Istio's JWT_POLICY: "third-party-jwt" or "" for tokens that Kubernetes issued for this
// server, "first-party-jwt" for tokens that it issued for the API server, in clusters without other tokens.
func parseJWTPolicy(s string) (firstParty bool, err error) {
	switch s {
	case "", "third-party-jwt":
		return false, nil
	case "first-party-jwt":
		return true, nil
	}
	return false, fmt.Errorf("the policy %.64q is neither third-party-jwt nor first-party-jwt", s)
}

func (c *callers) setRule(text string) error {
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	r := new(rule)
	if err := d.Decode(r); err != nil {
		return fmt.Errorf("it is not a rule: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the rule")
	}
	r.JWKSURI = cmp.Or(r.JWKSURI, r.JwksURI)
	c.rule = r
	return nil
}

func (c *callers) setGateways(text string) error {
	var texts []string
	if err := list(&texts)(text); err != nil {
		return err
	}
	c.gateways = nil
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return fmt.Errorf("%q is not ADDRESS/BITS, such as 10.0.0.0/16", text)
		}
		c.gateways = append(c.gateways, p)
	}
	return nil
}

// startFetch is how long a start waits for the keys of an issuer.
const startFetch = 3 * time.Second

// check validates -jwt-rule and -trusted-gateway-cidr.
func (c *callers) check(td spiffe.TrustDomain) (badRule, badGateways error) {
	if c.rule != nil {
		_, badRule = jwt.New(c.rule.options(td))
	}
	_, badGateways = authn.ForwardedCertificate(spiffe.AllowMembersOf(td), c.gateways...)
	return badRule, badGateways
}

func (r *rule) options(td spiffe.TrustDomain) jwt.Options {
	return jwt.Options{Issuer: r.Issuer, JWKSURL: r.JWKSURI, Audiences: r.Audiences, TrustDomain: td}
}

// setAuthenticator sets the authenticators of Istio's API, in the order of Istio's CA: a client certificate, a token
// of the issuer in -jwt-rule, the one in o (the API server's review of a service account token), a gateway's header,
// and a token of the issuer of this server's own token.
func (c *Config) setAuthenticator(ctx context.Context, o *caserver.Options, log *slog.Logger) error {
	if c.callers.firstParty {
		log.Warn("caconfig: -jwt-policy: first-party-jwt is treated as third-party-jwt; tokens for the API server " +
			"are refused, unless -token-audiences has its audience")
	}
	var chain []authn.Authenticator
	if c.callers.clientRoots != "" {
		a, err := c.otherCertificates()
		if err != nil {
			return fmt.Errorf("-client-roots: %w", err)
		}
		chain = append(chain, a)
	}
	if r := c.callers.rule; r != nil {
		a, err := c.issuer(ctx, "jwt-rule", r, log)
		if err != nil {
			return err
		}
		chain = append(chain, a)
	}
	if o.Istio.Authenticator != nil {
		chain = append(chain, o.Istio.Authenticator)
	}
	if c.callers.gateways != nil {
		proxies, err := istioca.ForwardedCertificates(o.CA, c.CA.TrustDomain, c.callers.gateways)
		if err != nil {
			return fmt.Errorf("-trusted-gateway-cidr: %w", err)
		}
		direct, err := istioca.ClientCertificates(o.CA, c.CA.TrustDomain, 0)
		if err != nil {
			return err
		}
		o.RenewByCertificate = -1 // we put our own in front instead of the server's
		chain = append([]authn.Authenticator{direct}, append(chain, proxies)...)
	}
	issuer, audience, err := c.ownIssuer()
	switch {
	case err != nil:
		return err
	case issuer != "" && c.inCluster:
		log.Warn("caconfig: -token-issuer has no effect in a pod; use -jwt-rule", "issuer", issuer)
	case issuer != "":
		a, err := c.issuer(ctx, "token-issuer", &rule{Issuer: issuer, Audiences: []string{audience}}, log)
		if err != nil {
			return err
		}
		chain = append(chain, a)
	}
	o.Istio.Authenticator = authn.FirstOf(chain...)
	return nil
}

// issuer returns the authenticator for an issuer's service account tokens. If it cannot fetch the keys now, it logs a
// warning; the first token that needs them fetches them.
func (c *Config) issuer(ctx context.Context, name string, r *rule, log *slog.Logger) (authn.Authenticator, error) {
	o := r.options(c.CA.TrustDomain)
	if c.callers.roots != "" {
		pem, err := os.ReadFile(c.callers.roots)
		if err != nil {
			return nil, fmt.Errorf("-jwt-roots: %w", err)
		}
		roots, err := certpem.Pool(pem)
		if err != nil {
			return nil, fmt.Errorf("-jwt-roots: %s: %w", c.callers.roots, err)
		}
		o.HTTPClient = &http.Client{Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Time: certchain.Now},
			ForceAttemptHTTP2: true, IdleConnTimeout: time.Minute,
		}}
	}
	a, err := jwt.New(o)
	if err != nil {
		return nil, fmt.Errorf("-%s: %w", name, err)
	}
	soon, cancel := context.WithTimeoutCause(ctx, startFetch, fmt.Errorf("no answer within %v", startFetch))
	defer cancel()
	if err := a.Fetch(soon); err != nil && ctx.Err() == nil {
		log.Warn("caconfig: -"+name+": the keys of the issuer cannot be fetched now", "issuer", r.Issuer, "err", err)
	}
	return a, nil
}

// ownIssuer returns issuer and audience from the flags, or from the server's own token, or nothing. As with Istio, it
// serves CAs outside a cluster: in a pod the API server reviews the tokens.
func (c *Config) ownIssuer() (issuer, audience string, err error) {
	issuer, audience = c.callers.issuer, c.callers.audience
	if c.inCluster || issuer != "" && audience != "" {
		return issuer, audience, nil
	}
	ownIssuer, ownAudience, err := unverifiedIssuer(c.callers.ownToken)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !c.given["own-token"] && issuer == "":
		return "", "", nil
	case err != nil:
		return "", "", fmt.Errorf("-own-token: %w; name the issuer in -token-issuer and the audience in -audience "+
			"instead", err)
	}
	return cmp.Or(issuer, ownIssuer), cmp.Or(audience, ownAudience), nil
}

// unverifiedIssuer returns the issuer and the first audience of the token in a file, expired or not. It verifies
// nothing, so a writer of the file chooses the trusted issuer: it is a configuration file.
func unverifiedIssuer(tokenFile string) (issuer, audience string, err error) {
	text, err := files.Read(tokenFile, jws.MaxSize+2)
	c, _ := jws.ReadClaims(strings.TrimSpace(string(text)))
	switch {
	case err != nil:
	case c.Issuer == "":
		err = errors.New("it is no JWT, or names no issuer")
	case len(c.Audience) == 0 || c.Audience[0] == "":
		err = errors.New("the token names no audience")
	default:
		return c.Issuer, c.Audience[0], nil
	}
	return "", "", fmt.Errorf("the file %q: %w", tokenFile, err)
}

// otherCertificates authenticates callers by certificates that chain to the roots in -client-roots.
func (c *Config) otherCertificates() (authn.Authenticator, error) {
	pem, err := os.ReadFile(c.callers.clientRoots)
	if err != nil {
		return nil, err
	}
	bundle, err := spiffe.ParseBundlePEM(c.CA.TrustDomain, pem)
	if err != nil {
		return nil, err
	}
	v, err := spiffe.NewVerifier(bundle, spiffe.AllowMembersOf(c.CA.TrustDomain), nil)
	if err != nil {
		return nil, err
	}
	certificates := authn.ClientCertificate(v.WithAlgorithms(c.CA.Algorithms))
	return authn.Func(func(r *http.Request) (*authn.Caller, error) {
		if len(r.Header.Values("X-Forwarded-Client-Cert")) > 0 { // a client of a proxy, which has this certificate
			return nil, fmt.Errorf("-client-roots: the request is forwarded for another client: %w",
				authn.ErrNoCredential)
		}
		return certificates.Authenticate(r)
	}), nil
}
