package jwt

import (
	"crypto/sha256"
	"encoding/base64"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

var kind = &token.Kind{Package: "jwt", What: "token"}

// headerFault checks the header beyond the form of the algorithm.
func headerFault(s *token.Signed) *token.Error {
	typ := strings.TrimPrefix(strings.ToLower(s.Type), "application/")
	switch {
	case slices.Contains(s.Extra, "crit"):
		return kind.Refuse("header", "", `"crit" asks for rules that are not known here`)
	case s.NotText == "kid":
		return kind.Refuse("header", "", `"kid" is not a string`)
	case s.HasType && typ != "jwt" && typ != "jose" && typ != "at+jwt":
		return kind.Refuse("header", "", `"typ" is %q, and neither JWT nor at+jwt: it is a token of another kind`,
			token.Clip(s.Type, token.MaxQuoted))
	}
	return nil
}

type claims struct {
	issuer, subject              string
	audiences, actors            []string
	expires, notBefore, issuedAt jws.Date
	certificate                  *string // that the token is bound to; see readBinding
}

// forms are the JSON types of claims.
var forms = map[string]strictjson.Kind{
	"iss": strictjson.String, "sub": strictjson.String,
	"exp": strictjson.Number, "nbf": strictjson.Number, "iat": strictjson.Number,
}

// readClaims parses a payload. Each claim that this package judges must have the right form.
func readClaims(payload []byte) (claims, *token.Error) {
	var c claims
	bad := ""
	e := kind.ReadObject(payload, func(name string, r *strictjson.Reader) {
		form, judged := forms[name]
		ok := !judged || r.Kind() == form
		switch name {
		case "iss":
			c.issuer = text(r)
		case "sub":
			c.subject = text(r)
		case "aud":
			c.audiences, ok = readAudience(r)
		case "act":
			c.actors, ok = readActors(r, nil)
		case "cnf":
			c.certificate = readBinding(r)
		case "exp":
			c.expires = jws.ReadDate(r)
		case "nbf":
			c.notBefore = jws.ReadDate(r)
		case "iat":
			c.issuedAt = jws.ReadDate(r)
		}
		if !ok {
			bad = name
		}
	})
	if e == nil && bad != "" {
		e = kind.Refuse(token.Malformed, "", "the claim %q is of another type than it should be", bad)
	}
	return c, e
}

// readAudience reads a string or a list of strings.
func readAudience(r *strictjson.Reader) (all []string, ok bool) {
	if r.Kind() != strictjson.Array {
		one, ok := r.Text()
		return []string{string(one)}, ok
	}
	ok = true
	for range r.Elements() {
		one, isText := r.Text()
		all, ok = append(all, string(one)), ok && isText
	}
	return all, ok
}

// text reads a string; it returns "" for another value.
func text(r *strictjson.Reader) string {
	t, _ := r.Text()
	return string(t)
}

const maxActors = 16

// readActors reads the claim "act" (RFC 8693 section 4.1) and appends its actors to the chain, the present one first.
func readActors(r *strictjson.Reader, chain []string) (_ []string, ok bool) {
	i := len(chain)
	if chain = append(chain, ""); i == maxActors || r.Kind() != strictjson.Object {
		return chain, false
	}
	ok = true
	for name := range r.Members() {
		switch string(name) {
		case "sub":
			chain[i] = text(r)
		case "act":
			var inner bool
			chain, inner = readActors(r, chain)
			ok = ok && inner
		}
	}
	return chain, ok && chain[i] != ""
}

// readBinding reads the claim "cnf" (RFC 7800). It returns the hash of the client certificate if the token is bound by
// that alone (RFC 8705 section 3.1), and otherwise "", which matches no certificate.
func readBinding(r *strictjson.Reader) *string {
	hash, members := "", 0
	for name := range r.Members() {
		if members++; string(name) == "x5t#S256" {
			hash = text(r)
		}
	}
	if members > 1 {
		hash = ""
	}
	return &hash
}

// bindingFault checks that a token bound to a certificate comes from the certificate's holder: the TLS handshake
// proved that the client has the key.
func bindingFault(certificate *string, r *http.Request) *token.Error {
	switch {
	case certificate == nil:
		return nil
	case *certificate == "":
		return kind.Refuse("binding", "", `"cnf" binds it to a key by another way than "x5t#S256" alone, `+
			`so that nothing proves its holder here`)
	case r.TLS == nil || len(r.TLS.PeerCertificates) == 0:
		return kind.Refuse("binding", "", `it is bound to a client certificate ("cnf"), `+
			`and the client has presented none on this connection`)
	}
	sum := sha256.Sum256(r.TLS.PeerCertificates[0].Raw)
	if base64.RawURLEncoding.EncodeToString(sum[:]) != *certificate {
		return kind.Refuse("binding", "", `it is bound to another client certificate than the client has presented `+
			`("cnf"); a client whose certificate was renewed fetches a new token`)
	}
	return nil
}

// claimsFault checks the claims before the signature, so that a token that is refused anyway costs nothing more.
func (a *Authenticator) claimsFault(c *claims, now time.Time) *token.Error {
	latest := now.Add(leeway)
	switch {
	case !slices.ContainsFunc(c.audiences, func(s string) bool { return slices.Contains(a.audiences, s) }):
		return kind.Refuse(token.Audience, "", "it is for %.256q, and this is %.256q", c.audiences, a.audiences)
	case !c.expires.Present:
		return kind.Refuse(token.Expired, "", `"exp" is missing`)
	case !now.Before(c.expires.At.Add(leeway)):
		return kind.Refuse(token.Expired, "", "it ended at %s", token.Stamp(c.expires.At))
	case c.notBefore.Present && latest.Before(c.notBefore.At):
		return kind.Refuse("not yet valid", "", "it begins at %s", token.Stamp(c.notBefore.At))
	case c.issuedAt.Present && latest.Before(c.issuedAt.At):
		return kind.Refuse("not yet valid", "", "it was issued at %s, which is in the future; compare the "+
			"clocks", token.Stamp(c.issuedAt.At))
	case c.subject == "":
		return kind.Refuse("subject", "", `"sub" is missing or empty`)
	}
	return nil
}
