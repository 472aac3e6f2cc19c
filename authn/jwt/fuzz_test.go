package jwt_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/authn"
)

// FuzzAuthenticate gives an authenticator the documents of an issuer and a token. What it accepts has the issuer, the
// audience and a subject that names the caller, and is accepted again; what it refuses does not show in the error.
func FuzzAuthenticate(f *testing.F) {
	late := map[string]any{"exp": 253402300799}
	set := keySet("p256", "rsa")
	acting := map[string]any{"exp": 253402300799, "act": map[string]any{"sub": "spiffe://example.org/gateway", "act": map[string]any{"sub": "x"}}}
	for _, text := range []string{sign("p256", acting), sign("p256", late), sign("rsa", late), sign("other", late), "..", "e30.e30.", "a.b.c.d.e"} {
		f.Add("", set, text)
	}
	f.Add(`{"issuer":"https://oidc.example.org","jwks_uri":"https://oidc.example.org/jwks","more":[1]}`,
		`{"keys":[{"kty":"oct","k":"AAAA"},`+jwk("p256", `,"alg":"ES256"`)+`]}`, signHeader(`{"alg":"ES256"}`, late))
	f.Add(`{"issuer":"https://evil.example.org","jwks_uri":"http://oidc.example.org/jwks"}`, set, sign("p256", late))
	f.Add(``, `{"keys":[{}]}`, signHeader(`{"alg":"none"}`, late))
	f.Fuzz(func(t *testing.T, discovery, jwks, text string) {
		i := newIssuer()
		i.discovery, i.jwks = discovery, jwks
		a := newAuthenticator(t, i)
		r := request(t, "")
		r.Header.Set("Authorization", "Bearer "+text)
		c, err := a.Authenticate(r)
		if err != nil {
			if c != nil || len(err.Error()) > 3000 {
				t.Fatalf("%v, %d bytes", c, len(err.Error()))
			}
			if known := errors.Is(err, authn.ErrNoCredential) || errors.Is(err, authn.ErrRefused); known == authn.Unavailable(err) {
				t.Fatalf("the kind of %v is not clear", err)
			}
			if _, sig, _ := strings.Cut(text, "."); sig != "" && strings.Contains(err.Error(), text[strings.LastIndexByte(text, '.'):]) && len(text)-strings.LastIndexByte(text, '.') > 20 {
				t.Fatalf("the error %q shows the signature", err)
			}
			return
		}
		namespace, account, ok := c.ID.Kubernetes()
		if !ok || !c.ID.MemberOf(td) || c.Method != "jwt" || c.NotAfter.IsZero() {
			t.Fatalf("%v", c)
		}
		payload, err := parsePayload(text)
		if err != nil || payload.Actor != nil || payload.Issuer != issuerURL || payload.Subject != "system:serviceaccount:"+namespace+":"+account {
			t.Fatalf("%+v, %v", payload, err)
		}
		if again, err := a.Authenticate(r); err != nil || again.String() != c.String() {
			t.Fatalf("%v, %v", again, err)
		}
	})
}

// parsePayload reads claims as another reader does.
func parsePayload(text string) (c struct {
	Issuer  string `json:"iss"`
	Subject string `json:"sub"`
	Actor   any    `json:"act"`
}, err error) {
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(text, ".")[1])
	if err == nil {
		err = json.Unmarshal(payload, &c)
	}
	return c, err
}
