// Package jwt proves callers by signed tokens: JSON Web Tokens of an OpenID Connect issuer, such as the API
// server of a Kubernetes cluster or a build system, and JWT-SVIDs.
//
// [New] makes an [Authenticator] for the tokens of one issuer, and [SVID] one for JWT-SVIDs. authn.FirstOf combines
// several issuers:
//
//	a, err := jwt.New(jwt.Options{
//		Issuer:      "https://oidc.example.org",
//		Audiences:   []string{"istio-ca"},
//		TrustDomain: td,
//	})
//	…
//	err = a.Fetch(ctx) // at start, if the program wants to know
//	handler = authn.Require(a, handler, logger)
//
// [Client] is for authorization servers: it proves their clients without a shared secret.
//
// # What it promises
//
// A token counts if it is signed by a key that the issuer publishes, with one of the nine algorithms RS, PS and ES
// with 256, 384 and 512 bits, names this issuer, is in time, and is for one of the audiences. The key is from the
// issuer's key set (JWKS), never from the token. The token must be presented over TLS or a Unix socket, unless an
// option says otherwise.
//
// Tokens are read strictly: three parts of canonical base64url of at most 16 KiB, and JSON without duplicate members.
// A header with "crit" is refused, and so is a "typ" other than JWT, JOSE and at+jwt: another kind of token that the
// issuer signs, such as for a logout, is no proof. Other members of a header are ignored.
//
// A token bound to a client certificate (the claim "cnf" with "x5t#S256", RFC 8705) counts if the client of the TLS
// connection presented that certificate. Tokens with another binding, such as DPoP, are refused, and so is every
// JWT-SVID with "cnf".
//
// # Keys
//
// The keys are fetched when the first token needs them, or by [Authenticator.Fetch]. They are fetched again for a
// token with an unknown key, at most once in 10 seconds, and when they are in use and older than 5 minutes, without
// delaying a request. So a withdrawn key counts for about 5 minutes. While fetches fail, the last keys stay in use,
// so that an outage of the issuer costs no caller its identity. Waits after a failure grow from a second to half a
// minute. Callers share one fetch, which goes on if they leave.
//
// A document has at most 1 MiB, and a key set 256 keys. Keys of other types and for other uses are left out; a set
// without a usable key is a failure.
//
// A verified token is cached while the key set is the same, so that it costs one signature check. Tokens of
// more than 8 KiB are not cached.
//
// # What it does not do
//
// A good token proves that it was issued, not that its holder still exists: package kube asks the API server about
// that. There are no sessions, refresh tokens or flows of OpenID Connect.
package jwt

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

const method = "jwt"

const leeway = token.DefaultLeeway // of "exp", "nbf" and "iat", for clocks that disagree

const maxRemembered = 1000 // tokens

// Options configure [New], which copies them. Issuer, Audiences, and one of TrustDomain and Caller are required.
type Options struct {
	// Issuer is the required value of "iss", byte for byte: a URL with the scheme https, or http on loopback. With
	// JWKSURL it may be any text, because some issuers are not URLs.
	Issuer string

	// JWKSURL is the URL of the issuer's key set, https or, on loopback, http. If empty, it comes from the issuer's
	// discovery document at ISSUER/.well-known/openid-configuration.
	JWKSURL string

	// Audiences are the names of this server, at least one. "aud" must contain one of them.
	Audiences []string

	// TrustDomain is the trust domain of callers whose "sub" is a Kubernetes service account,
	// system:serviceaccount:NAMESPACE:NAME. Their IDs are spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/NAME. Other subjects
	// are refused.
	TrustDomain spiffe.TrustDomain

	// Caller, if set, replaces that rule: it returns the ID, Name, DNSNames or Pod of the caller with these verified
	// claims. This package sets the method and the end of the proof. Caller must depend on the claims alone, because
	// the result is cached with the token, and must be safe for concurrent use. An error, or a caller without a name,
	// refuses the token. Caller also decides which actors may act for a subject; TrustDomain refuses a token with an
	// actor (the claim "act" of RFC 8693 section 4.1).
	Caller func(*Claims) (*authn.Caller, error)

	// AllowPlaintext also accepts tokens over connections that are not TLS and not Unix sockets. It is for servers
	// whose connections have other protection, such as a proxy in the same pod.
	AllowPlaintext bool

	// HTTPClient fetches the documents of the issuer. It is copied; the copy follows no redirect. Nil means one that
	// trusts the roots of the host and uses no proxy. A fetch ends after 10 seconds.
	HTTPClient *http.Client
}

// Claims are the claims of a verified token. They must not be changed.
type Claims struct {
	Issuer, Subject string
	Audiences       []string
	Expires         time.Time

	// Actors act for the subject: first the present one, then earlier ones, which are for the record (RFC 8693
	// section 4.1). Usually there are none.
	Actors []string

	payload []byte
}

// Claim decodes the claim with this name into the value that into points to, as package encoding/json does, and
// reports whether there is such a claim. Names are case-sensitive. Only the issuer vouches for claims.
func (c *Claims) Claim(name string, into any) (ok bool, err error) {
	if ok, err = token.DecodeClaim(c.payload, name, into); err != nil {
		return false, fmt.Errorf("authn/jwt: claim %q: %w", name, err)
	}
	return ok, nil
}

// Authenticator proves callers by the tokens of one issuer. [New] makes one. It is an [authn.Authenticator] and safe
// for concurrent use. It starts one goroutine for each fetch of keys, which ends with the fetch, and no other.
type Authenticator struct {
	redacted  // it remembers tokens
	issuer    string
	audiences []string
	caller    func(*Claims) (*authn.Caller, error)
	plaintext bool
	keys      *keys
	memory    *token.Memory[keySet, kept]
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

var errNotMade = errors.New("authn/jwt: the Authenticator was not made by New")

// kept is the cache entry of a verified token.
type kept struct {
	caller      *authn.Caller
	to          binding
	from, until time.Time
}

// New returns an Authenticator. It fetches nothing. The error says which option is missing or wrong.
func New(o Options) (*Authenticator, error) {
	a := &Authenticator{
		redacted: redact.New(fmt.Sprintf("jwt.Authenticator(%.256q)", o.Issuer)),
		issuer:   o.Issuer, audiences: slices.Clone(o.Audiences), caller: o.Caller,
		plaintext: o.AllowPlaintext, memory: token.NewMemory[keySet, kept](maxRemembered),
	}
	if a.caller == nil {
		a.caller = func(c *Claims) (*authn.Caller, error) { return serviceAccount(o.TrustDomain, c) }
	}
	var err error
	switch {
	case o.Issuer == "":
		err = errors.New("Options.Issuer is empty")
	case len(o.Audiences) == 0 || slices.Contains(o.Audiences, ""):
		err = errors.New("Options.Audiences is empty, or has an empty one: every token of the issuer would be " +
			"accepted; name this server as its clients do")
	case o.Caller == nil && o.TrustDomain.IsZero():
		err = fmt.Errorf("Options.TrustDomain and Caller are both missing, so that no token would name a caller: %w",
			spiffe.ErrZero)
	case o.Caller != nil && !o.TrustDomain.IsZero():
		err = errors.New("Options.TrustDomain and Caller are both set; Caller decides about trust domains itself")
	default:
		a.keys, err = newKeys(&o)
	}
	if err != nil {
		return nil, fmt.Errorf("authn/jwt: %w", err)
	}
	return a, nil
}

// serviceAccount is the rule for callers that are Kubernetes service accounts.
func serviceAccount(td spiffe.TrustDomain, c *Claims) (*authn.Caller, error) {
	if len(c.Actors) > 0 { // the actor would become the subject
		return nil, fmt.Errorf("%.256q acts for the subject %.256q (act), and no actor is allowed here",
			c.Actors[0], c.Subject)
	}
	namespace, name, err := kube.ParseUser(c.Subject)
	if err != nil {
		return nil, err
	}
	id, err := td.WorkloadID("ns", namespace, "sa", name)
	if err != nil { // names that Kubernetes allows never break the rules of SPIFFE
		return nil, err
	}
	return &authn.Caller{ID: id}, nil
}

// Fetch fetches the keys of the issuer, unless they were fetched in the last 10 seconds, for a program that wants to
// know at its start whether it can. It returns nil if there are keys, even if the last fetch failed.
func (a *Authenticator) Fetch(ctx context.Context) error {
	if a.keys == nil {
		return errNotMade
	}
	set, err := a.keys.renew(ctx)
	if err == nil || len(set.keys) > 0 {
		return nil
	}
	return fmt.Errorf("authn/jwt: %w", err)
}

// Authenticate proves the caller by the token in the authorization header, see [authn.Bearer]. The method of the
// caller is "jwt", and NotAfter is "exp". The Caller is the same for every request with the same token.
//
// The error wraps [authn.ErrNoCredential] if there is no token, or one that is not for this method: not a JWT, or a
// JWT of another issuer. It wraps [authn.ErrRefused] if the token is refused, and then jwtsvid.ErrExpired or
// jwtsvid.ErrAudience for two of the reasons. Otherwise the keys of the issuer cannot be fetched, and the same token
// may be good later.
func (a *Authenticator) Authenticate(r *http.Request) (*authn.Caller, error) {
	if a.keys == nil {
		return nil, errNotMade
	}
	now := time.Now()
	if text, ok := bearer.Token(r.Header); ok && (a.plaintext || bearer.Confidential(r)) { // its form was checked
		if c := a.recall(r, text, now); c != nil {
			return c, nil
		}
	}
	read := authn.Bearer
	if a.plaintext {
		read = authn.BearerOverPlaintext
	}
	text, err := read(r)
	if err != nil {
		return nil, err
	}
	c, err := a.verify(r, strings.Clone(text), now) // it may be a small part of a large string
	if err != nil {
		return nil, fmt.Errorf("authn/jwt: %w", err)
	}
	return c, nil
}

// recall returns the caller of a cached token that was verified with the present keys and is in time.
func (a *Authenticator) recall(r *http.Request, text string, now time.Time) *authn.Caller {
	k, set, ok := a.memory.Find(text)
	if !ok || set != a.keys.current(now) || now.Before(k.from) || !now.Before(k.until) || k.to.fault(r) != nil {
		return nil
	}
	return k.caller
}

func (a *Authenticator) verify(r *http.Request, text string, now time.Time) (*authn.Caller, error) {
	if strings.Count(text, ".") != 2 {
		return nil, fmt.Errorf("the token is no JWT: %w", authn.ErrNoCredential)
	}
	signed, e := kind.Parse(text)
	var c claims
	if e == nil {
		e = headerFault(signed)
	}
	if e == nil {
		c, e = readClaims(signed.Payload)
	}
	if e == nil && c.Issuer != a.issuer { // other issuers cost nothing
		return nil, fmt.Errorf("the token is of the issuer %.256q, and not of %.256q: %w", c.Issuer, a.issuer,
			authn.ErrNoCredential)
	}
	if e == nil {
		e = a.claimsFault(&c, now)
	}
	to := binding{c.Bound, string(c.Confirmation.Certificate)}
	if e == nil {
		e = to.fault(r)
	}
	if e != nil {
		return nil, refuse(e)
	}
	set, err := a.keys.verify(r.Context(), signed)
	if err != nil {
		return nil, err
	}
	caller, err := a.name(&c, signed.Payload)
	if err != nil {
		return nil, refuse(err)
	}
	from, until := c.NotBefore.At, c.Expires.At.Add(leeway)
	if c.IssuedAt.At.After(from) {
		from = c.IssuedAt.At
	}
	a.memory.Keep(text, kept{caller, to, from.Add(-leeway), until}, set, until)
	return caller, nil
}

// refuse wraps err as the reason to refuse a token.
func refuse(err error) error { return fmt.Errorf("%w: %w", authn.ErrRefused, err) }

// name returns the caller of verified claims.
func (a *Authenticator) name(c *claims, payload []byte) (*authn.Caller, error) {
	named, err := a.caller(&Claims{c.Issuer, c.Subject, c.Audience, c.Expires.At, c.actors, payload})
	if err != nil {
		return nil, err
	}
	if named == nil || named.String() == "" {
		return nil, fmt.Errorf("the function Caller names no caller for the subject %.256q", c.Subject)
	}
	caller := *named
	caller.Method, caller.NotAfter, caller.Actors = method, c.Expires.At, c.actors
	return &caller, nil
}
