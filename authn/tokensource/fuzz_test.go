package tokensource_test

import (
	"strings"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/tokensource"
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
		for name, p := range tokensource.Parse(data, "ca") {
			if p.Err != nil {
				if text := p.Err.Error(); p.Text != "" || len(text) > 1500 || len(data) > 40 && strings.Contains(text, string(data)) {
					t.Errorf("%s: %q %q", name, p.Text, text)
				}
				continue
			}
			if p.Text == "" || len(p.Text) > 16<<10 || strings.ContainsFunc(p.Text, func(r rune) bool { return r <= ' ' || r > '~' }) {
				t.Errorf("%s: the token %q", name, p.Text)
			}
			if !p.Expires.IsZero() && !p.Expires.After(time.Now().Add(-time.Second)) {
				t.Errorf("%s: a token that ended at %v", name, p.Expires)
			}
			if name == "GCE" && !strings.Contains(p.Text, ".") {
				t.Errorf("not a JWT: %q", p.Text)
			}
		}
		if text := tokensource.Refusal(data, caller).Error(); strings.Contains(text, caller) || len(text) > 1500 || strings.ContainsAny(text, "\r\n\x00") {
			t.Errorf("%q", text)
		}
	})
}
