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
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Identifiers of RFC 8693.
const (
	grantType       = "urn:ietf:params:oauth:grant-type:token-exchange"
	typeJWT         = "urn:ietf:params:oauth:token-type:jwt"
	typeAccessToken = "urn:ietf:params:oauth:token-type:access_token"
)

// ExchangeOptions say what [Exchange] asks for. URL is required.
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
	Audience, Resource, Scope string

	// SubjectTokenType and RequestedTokenType are URNs of RFC 8693 section 3. Empty means
	// urn:ietf:params:oauth:token-type:jwt and urn:ietf:params:oauth:token-type:access_token.
	SubjectTokenType, RequestedTokenType string

	// ClientCredential authenticates this program to the endpoint: with ClientID as its password (RFC 6749 section
	// 2.3.1), without as a bearer token. Nil means that the subject token is enough.
	ClientID         string
	ClientCredential *Source

	// Logger is as in [MetadataOptions].
	Logger *slog.Logger
}

// Exchange returns a Source of the tokens that a token endpoint gives for those of subject (RFC 8693). Each
// exchange takes the token that subject has then. A failure of subject is wrapped.
func Exchange(subject *Source, o ExchangeOptions) (*Source, error) {
	s, err := newExchange(subject, o)
	if err != nil {
		return nil, fmt.Errorf("tokensource: exchange: %w", err)
	}
	return s, nil
}

func newExchange(subject *Source, o ExchangeOptions) (*Source, error) {
	if o.URL == "" {
		return nil, errors.New("no URL")
	}
	u, err := checkURL(o.URL, netip.Addr.IsLoopback)
	switch {
	case err != nil:
		return nil, err
	case subject == nil:
		return nil, errors.New("no subject")
	case subject.fetch == nil, o.ClientCredential != nil && o.ClientCredential.fetch == nil:
		return nil, errors.New("the subject or the ClientCredential is the zero Source; functions such as File make one")
	case o.ClientID != "" && o.ClientCredential == nil:
		return nil, errors.New("ClientID is set and ClientCredential is not")
	case o.CamelCaseJSON && o.Resource != "":
		return nil, errors.New("the JSON form has no Resource")
	}
	c, err := newClient(o.HTTPClient, true)
	if err != nil {
		return nil, err
	}
	fetch := func(ctx context.Context) (token, error) {
		text, err := subject.Token(ctx)
		if err != nil {
			return token{}, fmt.Errorf("subject token: %w", err)
		}
		r := &request{method: http.MethodPost, url: u.String(), header: http.Header{"Accept": {"application/json"}}, secrets: []string{text}}
		if err := r.authenticate(ctx, &o); err != nil {
			return token{}, fmt.Errorf("client credential: %w", err)
		}
		if err := r.encode(&o, text); err != nil {
			return token{}, err
		}
		start := time.Now()
		data, _, err := r.send(ctx, c)
		if err != nil {
			return token{}, err
		}
		return parseAccessToken(data, start)
	}
	return newSource("exchange at "+u.Scheme+"://"+u.Host+u.Path, o.Logger, fetch), nil
}

// authenticate adds the credential of the client.
func (r *request) authenticate(ctx context.Context, o *ExchangeOptions) error {
	if o.ClientCredential == nil {
		return nil
	}
	text, err := o.ClientCredential.Token(ctx)
	if err != nil {
		return err
	}
	if o.ClientID == "" {
		r.header.Set("Authorization", "Bearer "+text)
		r.secrets = append(r.secrets, text)
		return nil
	}
	// Both are encoded first: RFC 6749 section 2.3.1.
	encoded := base64.StdEncoding.EncodeToString([]byte(url.QueryEscape(o.ClientID) + ":" + url.QueryEscape(text)))
	r.header.Set("Authorization", "Basic "+encoded)
	r.secrets = append(r.secrets, text, url.QueryEscape(text), encoded)
	return nil
}

// encode writes the body.
func (r *request) encode(o *ExchangeOptions, subject string) error {
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
	form := url.Values{
		"grant_type": {grantType}, "requested_token_type": {requestedType}, "subject_token_type": {subjectType}, "subject_token": {subject},
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
				at := time.Unix(n, 0)
				if string(name) == "expires_in" {
					at = start.Round(0).Add(time.Duration(n) * time.Second) // of the wall clock, which a suspended machine keeps
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
	n, err := strconv.ParseInt(string(digits), 10, 64)
	return min(n, 253402300799), ok && err == nil && n >= 0
}
