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
	jws.Claims
	actors []string
}

// readClaims parses a payload. Each claim that this package judges must have the right type.
func readClaims(payload []byte) (c claims, e *token.Error) {
	actorsOK := true
	var err error
	c.Claims, err = jws.ParseClaims(payload, func(name string, r *strictjson.Reader) {
		if name == "act" {
			c.actors, actorsOK = readActors(r, nil)
		}
	})
	if err != nil {
		return c, kind.MalformedPayload(err)
	}
	if !actorsOK {
		c.Mistyped = "act"
	}
	if c.Mistyped != "" {
		e = kind.Refuse(token.Malformed, "", "the claim %q is of another type than it should be", c.Mistyped)
	}
	return c, e
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

// binding is the client certificate that a token is bound to (RFC 8705 section 3.1), if it is bound.
type binding struct {
	bound bool
	hash  string // empty if the token is bound in another way, or in several
}

// fault checks that a token bound to a certificate comes from the certificate's holder: the TLS handshake proved that
// the client has the key.
func (b binding) fault(r *http.Request) *token.Error {
	switch {
	case !b.bound:
		return nil
	case b.hash == "":
		return kind.Refuse("binding", "", `"cnf" binds it to a key by another way than "x5t#S256" alone, `+
			`so that nothing proves its holder here`)
	case r.TLS == nil || len(r.TLS.PeerCertificates) == 0:
		return kind.Refuse("binding", "", `it is bound to a client certificate ("cnf"), `+
			`and the client has presented none on this connection`)
	}
	sum := sha256.Sum256(r.TLS.PeerCertificates[0].Raw)
	if base64.RawURLEncoding.EncodeToString(sum[:]) != b.hash {
		return kind.Refuse("binding", "", `it is bound to another client certificate than the client has presented `+
			`("cnf"); a client whose certificate was renewed fetches a new token`)
	}
	return nil
}

// claimsFault checks the claims before the signature, so that a token that is refused anyway costs nothing more.
func (a *Authenticator) claimsFault(c *claims, now time.Time) *token.Error {
	latest := now.Add(leeway)
	switch {
	case !slices.ContainsFunc(c.Audience, func(s string) bool { return slices.Contains(a.audiences, s) }):
		return kind.Refuse(token.Audience, "", "it is for %.256q, and this is %.256q", c.Audience, a.audiences)
	case !c.Expires.Present:
		return kind.Refuse(token.Expired, "", `"exp" is missing`)
	case !now.Before(c.Expires.At.Add(leeway)):
		return kind.Refuse(token.Expired, "", "it ended at %s", token.Stamp(c.Expires.At))
	case c.NotBefore.Present && latest.Before(c.NotBefore.At):
		return kind.Refuse("not yet valid", "", "it begins at %s", token.Stamp(c.NotBefore.At))
	case c.IssuedAt.Present && latest.Before(c.IssuedAt.At):
		return kind.Refuse("not yet valid", "", "it was issued at %s, which is in the future; compare the "+
			"clocks", token.Stamp(c.IssuedAt.At))
	case c.Subject == "":
		return kind.Refuse("subject", "", `"sub" is missing or empty`)
	}
	return nil
}
