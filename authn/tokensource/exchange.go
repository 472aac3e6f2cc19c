package tokensource

import (
	"cmp"
	"context"
	"encoding/base64"
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

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// Identifiers of RFC 8693, RFC 7523 and the draft OAuth SPIFFE Client Authentication.
const (
	grantType       = "urn:ietf:params:oauth:grant-type:token-exchange"
	typeJWT         = "urn:ietf:params:oauth:token-type:jwt"
	typeAccessToken = "urn:ietf:params:oauth:token-type:access_token"
	assertionSPIFFE = "urn:ietf:params:oauth:client-assertion-type:jwt-spiffe"
	assertionBearer = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
)

// ExchangeOptions say what [Exchange] and [ClientCredentials] ask for. URL is required.
type ExchangeOptions struct {
	// URL is the token endpoint: https, or http on loopback. It may have a query.
	URL string

	// HTTPClient sends the requests. It is copied; the copy follows no redirects and keeps no cookies. Nil means one that
	// trusts the roots of the host and uses the proxy of the environment, as net/http does.
	HTTPClient *http.Client

	// CamelCaseJSON sends a JSON object with the members grantType, subjectToken and so on, as
	// https://sts.googleapis.com/v1/token takes it and Istio's agents sent it, and not the form of RFC 8693.
	CamelCaseJSON bool

	// Audience, Resource and Scope are parameters of RFC 8693 section 2.1. Empty ones are not sent. Istio's agents sent
	// identitynamespace:TRUST-DOMAIN:PROVIDER as the audience, and https://www.googleapis.com/auth/cloud-platform as the scope.
	// A JWT that is given for an Audience has to be for that, or for the Resource beside it. A Resource alone is not compared, as a
	// server may have another name for it (RFC 8707 section 2).
	Audience, Resource, Scope string

	// SubjectTokenType and RequestedTokenType are URNs of RFC 8693 section 3. Empty means
	// urn:ietf:params:oauth:token-type:jwt and urn:ietf:params:oauth:token-type:access_token.
	SubjectTokenType, RequestedTokenType string

	// Actor has the tokens of the party that acts for the subject (RFC 8693 section 2.1), such as this program's own, and ActorTokenType
	// their type, empty for that of a JWT. The server puts the actor into the claim "act". Nil means that none is sent.
	Actor          *Source
	ActorTokenType string

	// ClientCredential authenticates this program to the endpoint: with ClientID as its password (RFC 6749 section
	// 2.3.1), without as a bearer token. Nil means that the subject token is enough, or what follows.
	ClientID         string
	ClientCredential *Source

	// ClientAssertion authenticates this program without a secret, by JWT-SVIDs: [SVID] for the audience Issuer, or a File of such. Issuer
	// is the authorization server as it names itself, and a token that is not for it alone is not sent. The type is that of the draft
	// OAuth SPIFFE Client Authentication (jwt-spiffe), or with JWTBearer that of RFC 7523 section 2.2. A ClientID is sent beside it.
	// A server can accept an assertion once only, as Keycloak does for JWTBearer: then fetch them from a *workloadapi.Source, which gives a
	// new one for each call, and not from a cache.
	//
	// With a ClientID and neither, the HTTPClient authenticates this program, by presenting its X.509-SVID (RFC 8705 section
	// 2.1): it is required then, such as one of package spiffetls. A server can bind its access tokens to that certificate
	// (section 3). Such tokens end for their receivers at the next renewal of the SVID; prefer a ClientAssertion there.
	ClientAssertion *Source
	Issuer          string
	JWTBearer       bool

	// Logger is as in [MetadataOptions].
	Logger *slog.Logger
}

// Exchange returns a Source of the tokens that a token endpoint gives for those of subject (RFC 8693). Each
// exchange takes the token that subject has then. A failure of subject is wrapped.
func Exchange(subject *Source, o ExchangeOptions) (*Source, error) {
	var s *Source
	err := errors.New("no subject")
	if subject != nil {
		s, err = newExchange(subject, o)
	}
	if err != nil {
		return nil, fmt.Errorf("tokensource: exchange: %w", err)
	}
	return s, nil
}

// ClientCredentials returns a Source of the access tokens that a token endpoint gives to this program itself (RFC 6749 section 4.4),
// which proves who it is by one of the credentials in o. The options about other tokens must be empty, and what a server calls
// the audience is for most of them the Resource (RFC 8707) or the Scope.
func ClientCredentials(o ExchangeOptions) (*Source, error) {
	var err error
	switch {
	case o.Actor != nil || o.SubjectTokenType+o.RequestedTokenType+o.ActorTokenType != "" || o.CamelCaseJSON:
		err = errors.New("the options Actor, CamelCaseJSON and those for types of tokens are for an exchange")
	case o.ClientCredential == nil && o.ClientAssertion == nil && o.ClientID == "":
		err = errors.New("nothing authenticates this program: set ClientAssertion, ClientCredential, or ClientID with an HTTPClient that presents a certificate")
	}
	var s *Source
	if err == nil {
		s, err = newExchange(nil, o)
	}
	if err != nil {
		return nil, fmt.Errorf("tokensource: client credentials: %w", err)
	}
	return s, nil
}

// SVID returns a Source of JWT-SVIDs of this program for one audience, which source fetches at each call: a *jwtsvid.Cache, which keeps them
// fresh, or a *workloadapi.Source.
func SVID(source interface {
	Fetch(ctx context.Context, audience ...string) (token string, err error)
}, audience string) *Source {
	return &Source{redacted: printed("JWT-SVID"), name: "JWT-SVID", direct: true, fetch: func(ctx context.Context) (token, error) {
		if source == nil || audience == "" {
			return token{}, errors.New("there is no source of JWT-SVIDs, or no audience")
		}
		text, err := source.Fetch(ctx, audience)
		if err != nil {
			return token{}, err
		}
		return newToken(text, time.Time{}, audience)
	}}
}

func newExchange(subject *Source, o ExchangeOptions) (*Source, error) {
	if o.URL == "" {
		return nil, errors.New("no URL")
	}
	u, err := checkURL(o.URL, netip.Addr.IsLoopback)
	switch {
	case err != nil:
		return nil, err
	case slices.ContainsFunc([]*Source{subject, o.Actor, o.ClientCredential, o.ClientAssertion}, func(s *Source) bool { return s != nil && s.fetch == nil }):
		return nil, errors.New("the subject, the Actor or the credential of the client is the zero Source; functions such as File make one")
	case o.ClientCredential != nil && o.ClientAssertion != nil:
		return nil, errors.New("ClientCredential and ClientAssertion are both set")
	case (o.ClientAssertion == nil) != (o.Issuer == "") || o.JWTBearer && o.ClientAssertion == nil:
		return nil, errors.New("ClientAssertion and Issuer belong together, and JWTBearer to them: the assertion is for the issuer alone")
	case o.ClientID != "" && o.ClientCredential == nil && o.ClientAssertion == nil && o.HTTPClient == nil:
		return nil, errors.New("ClientID is set and none of ClientCredential, ClientAssertion and HTTPClient is")
	case o.CamelCaseJSON && (o.Resource != "" || o.Actor != nil || o.ClientAssertion != nil):
		return nil, errors.New("the JSON form has no Resource, no Actor and no ClientAssertion")
	}
	c, err := newClient(o.HTTPClient, true)
	if err != nil {
		return nil, err
	}
	fetch := func(ctx context.Context) (token, error) {
		r := &request{method: http.MethodPost, url: u.String(), header: http.Header{"Accept": {"application/json"}}}
		form, err := r.authenticate(ctx, &o)
		if err != nil {
			return token{}, fmt.Errorf("client credential: %w", err)
		}
		if err := r.encode(ctx, &o, subject, form); err != nil {
			return token{}, err
		}
		start := time.Now()
		data, _, err := r.send(ctx, c)
		if err != nil {
			return token{}, err
		}
		got, err := parseAccessToken(data, start)
		asked := func(audience string) bool {
			return audience == o.Audience || audience == o.Resource && o.Resource != ""
		}
		if claims, isJWT := jws.ReadClaims(got.text); isJWT && o.Audience != "" && !slices.ContainsFunc(claims.Audience, asked) {
			return token{}, fmt.Errorf("the token is for %.256q, and %.256q was asked for; see what the server permits this client", claims.Audience, o.Audience)
		}
		return got, err
	}
	what := "exchange at "
	if subject == nil {
		what = "client credentials at "
	}
	return newSource(what+u.Scheme+"://"+u.Host+u.Path, o.Logger, fetch), nil
}

// secret returns a token of s, which errors must not repeat.
func (r *request) secret(ctx context.Context, s *Source) (string, error) {
	text, err := s.Token(ctx)
	if err == nil {
		r.secrets = append(r.secrets, text)
	}
	return text, err
}

// authenticate adds the credential of the client to the header, or to the form that it returns.
func (r *request) authenticate(ctx context.Context, o *ExchangeOptions) (form url.Values, err error) {
	form = make(url.Values)
	if o.ClientID != "" && o.ClientCredential == nil {
		form.Set("client_id", o.ClientID)
	}
	if o.ClientAssertion != nil {
		text, err := r.secret(ctx, o.ClientAssertion)
		if err != nil {
			return nil, err
		}
		if claims, _ := jws.ReadClaims(text); !slices.Equal(claims.Audience, []string{o.Issuer}) {
			return nil, fmt.Errorf("the assertion is for %.256q, and has to be for the issuer %.256q alone", claims.Audience, o.Issuer)
		}
		form.Set("client_assertion", text)
		form.Set("client_assertion_type", assertionSPIFFE)
		if o.JWTBearer {
			form.Set("client_assertion_type", assertionBearer)
		}
	}
	if o.ClientCredential == nil {
		return form, nil
	}
	text, err := r.secret(ctx, o.ClientCredential)
	if err != nil {
		return nil, err
	}
	if o.ClientID == "" {
		r.header.Set("Authorization", "Bearer "+text)
		return form, nil
	}
	// Both are encoded first: RFC 6749 section 2.3.1.
	encoded := base64.StdEncoding.EncodeToString([]byte(url.QueryEscape(o.ClientID) + ":" + url.QueryEscape(text)))
	r.header.Set("Authorization", "Basic "+encoded)
	r.secrets = append(r.secrets, url.QueryEscape(text), encoded)
	return form, nil
}

// encode writes the body: that of an exchange, or without a subject that of client credentials.
func (r *request) encode(ctx context.Context, o *ExchangeOptions, from *Source, form url.Values) error {
	var subject string
	if from != nil {
		var err error
		if subject, err = r.secret(ctx, from); err != nil {
			return fmt.Errorf("subject token: %w", err)
		}
	}
	subjectType, requestedType := cmp.Or(o.SubjectTokenType, typeJWT), cmp.Or(o.RequestedTokenType, typeAccessToken)
	if o.CamelCaseJSON {
		var err error
		r.header.Set("Content-Type", "application/json")
		r.body, err = json.Marshal(struct {
			Audience           string `json:"audience,omitempty"`
			GrantType          string `json:"grantType"`
			RequestedTokenType string `json:"requestedTokenType"`
			SubjectTokenType   string `json:"subjectTokenType"`
			SubjectToken       string `json:"subjectToken"`
			Scope              string `json:"scope,omitempty"`
		}{o.Audience, grantType, requestedType, subjectType, subject, o.Scope})
		return err
	}
	form.Set("grant_type", "client_credentials")
	if from != nil {
		form.Set("grant_type", grantType)
		form.Set("requested_token_type", requestedType)
		form.Set("subject_token_type", subjectType)
		form.Set("subject_token", subject)
	}
	if o.Actor != nil {
		text, err := r.secret(ctx, o.Actor)
		if err != nil {
			return fmt.Errorf("actor token: %w", err)
		}
		form.Set("actor_token", text)
		form.Set("actor_token_type", cmp.Or(o.ActorTokenType, typeJWT))
	}
	for name, value := range map[string]string{"audience": o.Audience, "resource": o.Resource, "scope": o.Scope} {
		if value != "" {
			form.Set(name, value)
		}
	}
	r.header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.body = []byte(form.Encode())
	return nil
}

// parseAccessToken reads the answer of a token endpoint (RFC 6749 section 5.1), or of Azure's metadata server, whose
// numbers are texts and whose "expires_on" is in seconds since 1970. The request was sent after start. The errors
// quote nothing.
func parseAccessToken(data []byte, start time.Time) (token, error) {
	var text, kind []byte
	var expires time.Time
	var wrong string
	r := strictjson.NewReader(data)
	if r.Kind() != strictjson.Object {
		return token{}, errors.New("the answer is not a JSON object")
	}
	for name := range r.Members() {
		ok := true
		switch string(name) {
		case "access_token":
			text, ok = r.Text()
		case "token_type":
			kind, ok = r.Text()
		case "expires_in", "expires_on":
			var n int64
			if n, ok = seconds(r); ok {
				at := time.Unix(n, 0).UTC()
				if string(name) == "expires_in" {
					at = start.Round(0).Add(time.Duration(min(n, 1<<32)) * time.Second) // of the wall clock, which a suspended machine keeps
				}
				if expires.IsZero() || at.Before(expires) {
					expires = at
				}
			}
		}
		if !ok && wrong == "" {
			wrong = string(name)
		}
	}
	switch err := r.End(); {
	case err != nil:
		return token{}, fmt.Errorf("the answer is not strict JSON: %w", err)
	case wrong != "":
		return token{}, fmt.Errorf("the member %q of the answer has a wrong type or value", wrong)
	case kind != nil && !strings.EqualFold(string(kind), "Bearer") && string(kind) != "N_A":
		return token{}, errors.New("the token is not a bearer token: the member \"token_type\" has another value")
	}
	return newToken(string(text), expires)
}

// seconds reads a number of seconds, which may be a text: up to the year 9999.
func seconds(r *strictjson.Reader) (int64, bool) {
	var digits []byte
	ok := false
	switch r.Kind() {
	case strictjson.String:
		digits, ok = r.Text()
	case strictjson.Number:
		digits, ok = r.Number()
	}
	n, err := strconv.ParseInt(string(digits), 10, 64) // the largest one if it is larger
	return min(n, 253402300799), ok && (err == nil || errors.Is(err, strconv.ErrRange)) && n >= 0
}
