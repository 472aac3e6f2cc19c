package tokensource

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// Identifiers of RFC 8693, RFC 7523 and the draft OAuth SPIFFE Client Authentication.
const (
	grantExchange   = "urn:ietf:params:oauth:grant-type:token-exchange"
	typeJWT         = "urn:ietf:params:oauth:token-type:jwt"
	typeAccessToken = "urn:ietf:params:oauth:token-type:access_token"
	assertionSPIFFE = "urn:ietf:params:oauth:client-assertion-type:jwt-spiffe"
	assertionBearer = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
)

// ClientOptions configure [Exchange] and [ClientCredentials]: the requested token and the client. URL is required.
type ClientOptions struct {
	// URL is the token endpoint: https, or http on loopback. It may have a query.
	URL string

	// HTTPClient sends the requests. It is copied; the copy follows no redirects and keeps no cookies. Nil
	// means one that trusts the roots of the host and uses the proxy of the environment, as net/http does.
	HTTPClient *http.Client

	// Audience, Resource and Scope are parameters of RFC 8693 section 2.1. Empty ones are not sent. Most servers
	// expect the name that they call audience as the Resource (RFC 8707) or the Scope.
	//
	// A JWT received for an Audience must be for that audience, or for the Resource beside it. A Resource alone is
	// not compared, because a server may have another name for it (RFC 8707 section 2).
	Audience, Resource, Scope string

	// ClientAssertion authenticates this program without a secret, by JWT-SVIDs: [SVID] for the audience Issuer, or a
	// [File] with a JWT-SVID. Issuer is the authorization server's own name; a token is sent only if Issuer is its
	// only audience. Its type comes from the draft OAuth SPIFFE Client Authentication (jwt-spiffe), or with JWTBearer
	// from RFC 7523 section 2.2. A ClientID is sent beside it. A server may accept an assertion only once, as
	// Keycloak does for JWTBearer: then fetch assertions from a *workloadapi.Source, which returns a new one for each
	// call, and not from a cache.
	ClientAssertion *Source
	Issuer          string
	JWTBearer       bool

	// ClientID without a ClientAssertion is for a server that authenticates this program by the X.509-SVID that the
	// HTTPClient presents (RFC 8705 section 2.1). It requires an HTTPClient, such as one of package spiffetls. A
	// server can bind its access tokens to that certificate (section 3). Receivers reject such tokens after the next
	// renewal of the SVID; prefer a ClientAssertion there.
	ClientID string

	// Logger receives a message about each new token (Debug), and about each fetch that failed while no call
	// waited for it (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Exchange returns a Source of access tokens that a token endpoint gives in exchange for the tokens of subject (RFC
// 8693): JWTs, or access tokens if subject comes from Exchange or [ClientCredentials]. Each exchange takes the
// current token of subject. A failure of subject is wrapped.
func Exchange(subject *Source, o ClientOptions) (*Source, error) {
	if subject == nil || subject.fetch == nil {
		return nil, errors.New("tokensource: exchange: the subject is nil or the zero Source; functions such as " +
			"File make one")
	}
	return newClientSource("exchange", o, func(ctx context.Context, r *request, form url.Values) error {
		text, err := r.secret(ctx, subject)
		if err != nil {
			return fmt.Errorf("subject token: %w", err)
		}
		form.Set("grant_type", grantExchange)
		form.Set("requested_token_type", typeAccessToken)
		form.Set("subject_token_type", subject.kind)
		form.Set("subject_token", text)
		return nil
	})
}

// ClientCredentials returns a Source of access tokens that a token endpoint gives to this program itself (RFC 6749
// section 4.4). The program proves itself by a ClientAssertion, or with a ClientID by the certificate of the
// HTTPClient.
func ClientCredentials(o ClientOptions) (*Source, error) {
	if o.ClientAssertion == nil && o.ClientID == "" {
		return nil, errors.New("tokensource: client credentials: nothing authenticates this program: set " +
			"ClientAssertion, or ClientID with an HTTPClient that presents a certificate")
	}
	return newClientSource("client credentials", o, func(_ context.Context, _ *request, form url.Values) error {
		form.Set("grant_type", "client_credentials")
		return nil
	})
}

// newClientSource returns a Source of access tokens; grant adds its own parameters to the form.
func newClientSource(what string, o ClientOptions,
	grant func(context.Context, *request, url.Values) error) (*Source, error) {
	u, err := o.check()
	if err != nil {
		return nil, fmt.Errorf("tokensource: %s: %w", what, err)
	}
	c := newClient(o.HTTPClient, http.ProxyFromEnvironment)
	fetch := func(ctx context.Context) (token, error) {
		r := &request{method: http.MethodPost, url: u.String(), header: http.Header{
			"Accept": {"application/json"}, "Content-Type": {"application/x-www-form-urlencoded"},
		}}
		form, err := o.form(ctx, r)
		if err != nil {
			return token{}, fmt.Errorf("client credential: %w", err)
		}
		if err := grant(ctx, r, form); err != nil {
			return token{}, err
		}
		r.body = []byte(form.Encode())
		start := time.Now()
		data, _, err := r.send(ctx, c)
		if err != nil {
			return token{}, err
		}
		got, err := parseAccessToken(data, start)
		asked := func(a string) bool { return a == o.Audience || a == o.Resource && o.Resource != "" }
		claims, isJWT := jws.ReadClaims(got.text)
		if isJWT && o.Audience != "" && !slices.ContainsFunc(claims.Audience, asked) {
			return token{}, fmt.Errorf("the token is for %.256q, and %.256q was asked for; see what the server "+
				"permits this client", claims.Audience, o.Audience)
		}
		return got, err
	}
	s := newSource(what+" at "+u.Scheme+"://"+u.Host+u.Path, o.Logger, fetch)
	s.kind = typeAccessToken
	return s, nil
}

// check reports what is wrong with the options, and returns the URL.
func (o *ClientOptions) check() (*url.URL, error) {
	switch {
	case o.URL == "":
		return nil, errors.New("no URL")
	case (o.ClientAssertion == nil) != (o.Issuer == "") || o.JWTBearer && o.ClientAssertion == nil:
		return nil, errors.New("ClientAssertion and Issuer belong together, and JWTBearer to them: the " +
			"assertion is for the issuer alone")
	case o.ClientAssertion != nil && o.ClientAssertion.fetch == nil:
		return nil, errors.New("the ClientAssertion is the zero Source; functions such as SVID make one")
	case o.ClientID != "" && o.ClientAssertion == nil && o.HTTPClient == nil:
		return nil, errors.New("ClientID is set and neither ClientAssertion nor HTTPClient is")
	}
	return checkURL(o.URL, netip.Addr.IsLoopback)
}

// form returns the parameters that the two grants share: the requested token, and the credential of the client.
func (o *ClientOptions) form(ctx context.Context, r *request) (url.Values, error) {
	form := make(url.Values)
	for name, value := range map[string]string{"audience": o.Audience, "resource": o.Resource,
		"scope": o.Scope, "client_id": o.ClientID} {
		if value != "" {
			form.Set(name, value)
		}
	}
	if o.ClientAssertion == nil {
		return form, nil
	}
	text, err := r.secret(ctx, o.ClientAssertion)
	if err != nil {
		return nil, err
	}
	if claims, _ := jws.ReadClaims(text); !slices.Equal(claims.Audience, []string{o.Issuer}) {
		return nil, fmt.Errorf("the assertion is for %.256q, and has to be for the issuer %.256q alone",
			claims.Audience, o.Issuer)
	}
	form.Set("client_assertion", text)
	form.Set("client_assertion_type", assertionSPIFFE)
	if o.JWTBearer {
		form.Set("client_assertion_type", assertionBearer)
	}
	return form, nil
}

// secret returns a token of s, and keeps it out of errors.
func (r *request) secret(ctx context.Context, s *Source) (string, error) {
	text, err := s.Token(ctx)
	if err == nil {
		r.secrets = append(r.secrets, text)
	}
	return text, err
}

// parseAccessToken parses the answer of a token endpoint (RFC 6749 section 5.1). Some servers send the number of
// seconds as a string. The request was sent after start. The errors quote nothing.
func parseAccessToken(data []byte, start time.Time) (token, error) {
	var answer struct {
		Token   string      `json:"access_token"`
		Type    string      `json:"token_type"`
		Seconds json.Number `json:"expires_in"`
	}
	if json.Unmarshal(data, &answer) != nil {
		return token{}, errors.New("the answer is not JSON, or a member of it has the wrong type")
	}
	seconds, err := cmp.Or(answer.Seconds, "0").Int64()
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange) || seconds < 0:
		return token{}, errors.New(`the member "expires_in" of the answer is not a number of seconds`)
	case answer.Type != "" && !strings.EqualFold(answer.Type, "Bearer") && answer.Type != "N_A":
		return token{}, errors.New(`the token is not a bearer token: the member "token_type" has another value`)
	case answer.Seconds == "":
		return newToken(answer.Token, time.Time{})
	}
	// By the wall clock, which a suspended machine keeps.
	return newToken(answer.Token, start.Round(0).Add(time.Duration(min(seconds, 1<<32))*time.Second))
}
