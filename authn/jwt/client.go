package jwt

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// ClientOptions configure [Client], which copies them. Issuer, Bundles and Clients are required.
type ClientOptions struct {
	// Issuer is the authorization server's name in its metadata (RFC 8414): the only audience that an assertion may
	// have.
	Issuer string

	// Bundles has the keys of the clients' trust domains, such as a *federation.Manager.
	Bundles spiffe.BundleSource

	// Clients returns the policy for the SPIFFE IDs of a client, given its client ID: one SPIFFE ID, or a pattern for
	// many instances. The zero Policy means an unknown client. If a client sends no ID, clientID is its SPIFFE ID.
	// The text comes from the request: look it up, and do not make a policy from it. Clients must not block, and must
	// be safe for concurrent use.
	Clients func(clientID string) spiffe.Policy

	// JWTBearer also accepts the type of RFC 7523 (jwt-bearer) for the same assertions, for clients that support no
	// other.
	JWTBearer bool

	// Certificates proves clients that send their ID without an assertion, by their X.509-SVID (RFC 8705 section
	// 2.1): [authn.ClientCertificate]. Nil means that there are no such clients.
	Certificates authn.Authenticator

	// Uses is how many times an assertion is accepted; 0 means 100. A client presents its JWT-SVID until the SVID is
	// renewed, an agent may give one SVID to all instances of a workload on its machine, and a thief can present it
	// as well. Each process counts for itself.
	Uses int

	// AllowPlaintext is as in [Options].
	AllowPlaintext bool
}

// maxAssertion is how far ahead an assertion may end.
const maxAssertion = time.Hour

// Client returns an [authn.Authenticator] for the clients of an OAuth authorization server. A client without a secret
// proves itself by a JWT-SVID that ends within an hour (the draft OAuth SPIFFE Client Authentication, and RFC 7523
// section 3), or by its X.509-SVID. The handler must first parse the form of the request with a bound on its size, as
// http.Request.ParseForm does. Client reads client_id, client_assertion and client_assertion_type from PostForm; each
// may occur once (RFC 6749 section 3.2).
//
// The caller's Name is the client ID, its ID the SPIFFE ID, and its Method "client-assertion" or
// "client-certificate". Answer invalid_client if an error wraps [authn.ErrNoCredential] or [authn.ErrRefused]. Any
// other error means that Client could not decide now; it has the method Retryable if a client has presented too many
// assertions.
func Client(o ClientOptions) (authn.Authenticator, error) {
	c := &clients{ClientOptions: o, used: limit.NewUses[spiffe.ID](1<<16, 1<<10)}
	var err error
	switch {
	case o.Issuer == "" || o.Clients == nil:
		err = errors.New("ClientOptions.Issuer or Clients is missing")
	case o.Uses < 0:
		err = errors.New("ClientOptions.Uses is negative")
	default:
		c.validator, err = jwtsvid.NewValidator(o.Bundles, []string{o.Issuer}, nil)
	}
	if err != nil {
		return nil, fmt.Errorf("authn/jwt: clients: %w", err)
	}
	c.Uses = cmp.Or(c.Uses, 100)
	return c, nil
}

type clients struct {
	ClientOptions
	validator *jwtsvid.Validator
	used      *limit.Uses[spiffe.ID] // assertions, by their signed part
}

// The values of client_assertion_type.
const (
	assertionPrefix = "urn:ietf:params:oauth:client-assertion-type:"
	typeSPIFFE      = assertionPrefix + "jwt-spiffe"
	typeBearer      = assertionPrefix + "jwt-bearer"
)

// Authenticate implements [authn.Authenticator].
func (c *clients) Authenticate(r *http.Request) (*authn.Caller, error) {
	caller, err := c.authenticate(r)
	if err != nil {
		return nil, fmt.Errorf("authn/jwt: client: %w", err)
	}
	return caller, nil
}

func (c *clients) authenticate(r *http.Request) (*authn.Caller, error) {
	if r.PostForm == nil {
		return nil, errors.New("the form was not parsed: the handler has to call ParseForm before this")
	}
	for _, name := range []string{"client_id", "client_assertion", "client_assertion_type"} {
		if n := len(r.PostForm[name]); n > 1 {
			return nil, refuse(fmt.Errorf("the parameter %s is there %d times", name, n))
		}
	}
	id, assertion := r.PostForm.Get("client_id"), r.PostForm.Get("client_assertion")
	kind := r.PostForm.Get("client_assertion_type")
	other := len(r.Header["Authorization"]) > 0 || len(r.PostForm["client_secret"]) > 0
	switch {
	case assertion+kind == "" && (c.Certificates == nil || id == "" || other):
		return nil, fmt.Errorf("there is no client_assertion: %w", authn.ErrNoCredential)
	case assertion+kind == "":
		return c.certificate(r, id)
	case kind != typeSPIFFE && !(c.JWTBearer && kind == typeBearer):
		return nil, refuse(fmt.Errorf("the client_assertion_type is %.128q, and has to be %s", kind, typeSPIFFE))
	case other:
		return nil, refuse(errors.New("there is another credential beside the assertion"))
	case !c.AllowPlaintext && !bearer.Confidential(r):
		return nil, refuse(errors.New("the connection is not encrypted, so that others can read the assertion; " +
			"use TLS or a Unix socket"))
	}
	return c.asserted(id, assertion)
}

func (c *clients) asserted(id, assertion string) (*authn.Caller, error) {
	proof, err := c.validator.Validate(assertion)
	switch {
	case errors.Is(err, jwtsvid.ErrUnavailable):
		return nil, err
	case err != nil:
		return nil, refuse(err)
	case !slices.Equal(proof.Audience(), []string{c.Issuer}):
		return nil, refuse(fmt.Errorf("the assertion is for %.256q, and has to be for %.256q alone: %w",
			proof.Audience(), c.Issuer, jwtsvid.ErrAudience))
	case time.Until(proof.Expires()) > maxAssertion:
		return nil, refuse(fmt.Errorf("the assertion is good until %s, which is more than %v from now",
			proof.Expires().UTC().Format(time.RFC3339), maxAssertion))
	}
	caller, err := c.named(id, proof.ID(), "client-assertion", proof.Expires())
	if err == nil {
		err = c.use(assertion, proof)
	}
	if err != nil {
		return nil, err
	}
	return caller, nil
}

// certificate proves a client that sends no assertion.
func (c *clients) certificate(r *http.Request, id string) (*authn.Caller, error) {
	proven, err := c.Certificates.Authenticate(r)
	if err != nil {
		return nil, err
	}
	caller, err := c.named(id, proven.ID, proven.Method, proven.NotAfter)
	if err != nil {
		return nil, err
	}
	caller.Certificate = proven.Certificate
	return caller, nil
}

// named returns the client with the ID that a request names, if its policy allows the SPIFFE ID.
func (c *clients) named(clientID string, id spiffe.ID, method string, until time.Time) (*authn.Caller, error) {
	if clientID == "" {
		clientID = id.String()
	}
	if err := c.Clients(clientID).Check(id); err != nil {
		return nil, refuse(fmt.Errorf("as the client %.256q: %w", clientID, err))
	}
	return &authn.Caller{ID: id, Name: clientID, Method: method, NotAfter: until}, nil
}

// use counts a use of an assertion. It ignores the signature, because a different one can be valid too.
func (c *clients) use(assertion string, proof *jwtsvid.Verified) error {
	key := sha256.Sum256([]byte(assertion[:strings.LastIndexByte(assertion, '.')]))
	n, err := c.used.Count(key, proof.ID(), proof.Expires().Add(2*time.Minute)) // beyond any leeway
	switch {
	case err != nil:
		return fmt.Errorf("%q has presented too many assertions that have not ended: %w", proof.ID(), err)
	case n > c.Uses:
		return refuse(fmt.Errorf("the assertion of %q was presented %d times, and at most %d are accepted; "+
			"fetch a new one", proof.ID(), n, c.Uses))
	}
	return nil
}
