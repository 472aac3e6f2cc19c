package jwtsvid

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/documents"
)

// NewOIDCHandler returns a handler that makes td an OpenID Connect issuer: verifiers that do not know SPIFFE, such
// as clouds, vaults and API servers, find the keys of JWT-SVIDs there. The tokens need the issuer as their "iss":
// see [IssuerOptions] and ca.JWTConfig.
//
// The issuer is the URL by which verifiers know it, https or, for loopback alone, http, without a slash at the
// end. It need not lead here: a proxy, a CDN or a directory of static files may be in front; see [OIDCFiles].
// The handler serves the discovery document (OpenID Connect Discovery 1.0 section 4) at each path that ends in
// /.well-known/openid-configuration, the key set (RFC 7517) at each path that ends in /keys, and nothing else, so
// that it can be mounted below any path.
//
// The key set has the JWT keys of the bundle, each with the members "kid", "use" and "alg". "alg" is ES256, ES384 or
// ES512 for an ECDSA key, and RS256 for an RSA key, which should then sign with no other algorithm. Everything else
// is as for federation.NewHandler. Without a JWT key the status is 503.
//
// Caches keep an answer for the refresh hint of the bundle. Many verifiers fetch less often, and only when they meet
// a token with an unknown key: add a new key to the bundle long before it signs. Package ca publishes it a day
// before.
func NewOIDCHandler(source spiffe.BundleSource, td spiffe.TrustDomain, issuer string) (http.Handler, error) {
	current, err := documents.Bundle(source, td)
	if err == nil {
		err = jws.CheckIssuer(issuer)
	}
	if err != nil {
		return nil, fmt.Errorf("jwtsvid: OIDC handler: %w", err)
	}
	routes := make(map[string]http.Handler)
	for _, path := range oidcPaths {
		routes[path] = documents.Handler(current, oidcDocument{issuer, path}.of)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for path, h := range routes {
			if strings.HasSuffix(r.URL.Path, path) {
				h.ServeHTTP(w, r)
				return
			}
		}
		http.NotFound(w, r)
	}), nil
}

// OIDCFiles returns the files that the handler of [NewOIDCHandler] serves, by their path below the issuer's URL. Use
// it for a web server or bucket of static files: serve them with the type application/json, and write them again
// when the bundle changes. The error wraps [spiffe.ErrNoAuthority] for a bundle without a JWT key.
func OIDCFiles(b *spiffe.Bundle, issuer string) (map[string][]byte, error) {
	if b == nil {
		return nil, fmt.Errorf("jwtsvid: OIDC files: no bundle: %w", spiffe.ErrZero)
	}
	if err := jws.CheckIssuer(issuer); err != nil {
		return nil, fmt.Errorf("jwtsvid: OIDC files: %w", err)
	}
	files := make(map[string][]byte)
	for _, path := range oidcPaths {
		doc, err := oidcDocument{issuer, path}.of(b)
		if err != nil {
			return nil, fmt.Errorf("jwtsvid: OIDC files: %w", err)
		}
		files[strings.TrimPrefix(path, "/")] = doc
	}
	return files, nil
}

const oidcKeys = "/keys"

var oidcPaths = []string{jws.Discovery, oidcKeys}

// oidcDocument is the document at a path below the issuer.
type oidcDocument struct{ issuer, path string }

func (d oidcDocument) of(b *spiffe.Bundle) ([]byte, error) {
	var algorithms []string
	for _, key := range b.JWTAuthorities() {
		if alg, _ := jws.DefaultAlgorithm(key); !slices.Contains(algorithms, alg.String()) {
			algorithms = append(algorithms, alg.String())
		}
	}
	switch slices.Sort(algorithms); {
	case len(algorithms) == 0:
		return nil, fmt.Errorf("the bundle of %q has no JWT key: %w", b.TrustDomain(), spiffe.ErrNoAuthority)
	case d.path == oidcKeys:
		return jws.MarshalSet(b.Contents().JWTAuthorities, true)
	}
	return json.Marshal(struct {
		Issuer     string   `json:"issuer"`
		Keys       string   `json:"jwks_uri"`
		Responses  []string `json:"response_types_supported"`
		Subjects   []string `json:"subject_types_supported"`
		Algorithms []string `json:"id_token_signing_alg_values_supported"`
	}{d.issuer, d.issuer + oidcKeys, []string{"id_token"}, []string{"public"}, algorithms})
}
