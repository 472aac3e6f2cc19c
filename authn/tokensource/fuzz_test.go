package tokensource_test

import (
	"strings"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// Whatever a server or a file has, a token fits into a header, has not expired, and is for the audience; and an error
// is short and quotes nothing.
func FuzzAnswers(f *testing.F) {
	for _, s := range []string{
		"", "opaque", jwt(time.Unix(4102444800, 0), "ca"), jwt(time.Unix(1, 0), "ca"), jwtOf(`{"aud":["a","ca"],"exp":1e400}`), "MIIB\nAAAA", "MAA=",
		`{"access_token":"a","token_type":"Bearer","expires_in":3599}`, `{"access_token":"a","expires_in":"1","expires_on":"4102444800"}`,
		`{"access_token":"a\u0000","expires_in":9223372036854775807}`, `{"error":"invalid_grant","error_description":"a secret-of-the-caller b"}`,
		`{"error":{"status":"X","message":"secret-of-the-caller"}}`, `{"access_token":[{}],"token_type":null}`, "{", "[]", "\xff",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		const caller = "secret-of-the-caller"
		exchange := func(status int) *tokensource.Source {
			x := &exchanged{answer: text(status, string(data))}
			o := tokensource.ClientOptions{URL: "https://sts.example/", HTTPClient: x.client()}
			return made(tokensource.Exchange(tokensource.Static(caller), o))
		}
		x := &exchanged{answer: text(200, string(data))}
		for name, s := range map[string]*tokensource.Source{
			"static": tokensource.Static(string(data)), "token": exchange(200),
			"GCE": made(tokensource.GCE("ca", &tokensource.GCEOptions{HTTPClient: x.client()})),
		} {
			got, err := s.Token(t.Context())
			if err != nil {
				if text := err.Error(); got != "" || len(text) > 1500 || len(data) > 40 && strings.Contains(text, string(data)) {
					t.Errorf("%s: %q %q", name, got, text)
				}
				continue
			}
			if got == "" || len(got) > 16<<10 || strings.ContainsFunc(got, func(r rune) bool { return r <= ' ' || r > '~' }) {
				t.Errorf("%s: the token %q", name, got)
			}
			claims, isJWT := jws.ReadClaims(got)
			if ends := claims.Expires.At; !ends.IsZero() && !ends.After(time.Now().Add(-time.Second)) {
				t.Errorf("%s: a token that ended at %v", name, ends)
			}
			if name == "GCE" && !isJWT {
				t.Errorf("not a JWT: %q", got)
			}
		}
		text := must.Err(exchange(400).Token(t.Context())).Error()
		if strings.Contains(text, caller) || len(text) > 1500 || strings.ContainsAny(text, "\r\n\x00") {
			t.Errorf("%q", text)
		}
	})
}
