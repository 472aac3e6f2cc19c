package tokens_test

import (
	"encoding/base64"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/tokens/jws"
)

func claiming(payload string) string {
	b := base64.RawURLEncoding.EncodeToString
	return b([]byte(`{"alg":"RS256"}`)) + "." + b([]byte(payload)) + "." + b([]byte("signature"))
}

func expiry(token string) time.Time {
	c, _ := jws.ReadClaims(token)
	return c.Expires.At
}

func FuzzJWSExpiry(f *testing.F) {
	for _, s := range []string{`{"exp":1}`, `{"exp":1e400}`, `{"exp":-1.5}`, `{"exp":"1"}`, `{"exp":1,"exp":2}`, `{"a":{"exp":1}}`, `[]`, ``, `{"exp":1}x`} {
		f.Add(claiming(s))
	}
	f.Add("a.b.c")
	f.Add("...")
	f.Fuzz(func(t *testing.T, tok string) {
		if end := expiry(tok); !end.IsZero() && (end.Year() < -1 || end.Year() > 10000) {
			t.Fatalf("%q ends at %v", tok, end)
		}
	})
}

func TestJWSExpiry(t *testing.T) {
	t.Parallel()
	for payload, want := range map[string]int64{
		`{"exp":4102444800}`: 4102444800, `{"iat":1,"exp":2.5e1}`: 25, `{"exp":0}`: 0, `{"kubernetes.io":{"exp":7},"exp":8}`: 8,
		`{}`: -1, `{"exp":"1"}`: -1, `{"exp":null}`: -1, `{"exp":[1]}`: -1, `{"EXP":1}`: -1, `{"exp":1,"exp":1}`: -1, `{"exp":1}{}`: -1,
		`{"kubernetes.io":{"exp":7}}`: -1, `[{"exp":1}]`: -1, `{"exp":1`: -1,
	} {
		end := expiry(claiming(payload))
		if want < 0 {
			if !end.IsZero() {
				t.Errorf("%s ends at %v", payload, end)
			}
		} else if !end.Equal(time.Unix(want, 0)) {
			t.Errorf("%s ends at %v", payload, end)
		}
	}
}

func TestJWSReadClaims(t *testing.T) {
	t.Parallel()
	for payload, want := range map[string]jws.Claims{
		`{"aud":"a","iss":"i"}`:       {Audience: []string{"a"}, HasAudience: true, AudienceOK: true, Issuer: "i"},
		`{"aud":["a","b"],"sub":"s"}`: {Audience: []string{"a", "b"}, HasAudience: true, AudienceOK: true, AudienceList: true, Subject: "s", HasSubject: true},
		`{"aud":["a",1],"sub":"s"}`:   {HasAudience: true, AudienceList: true, Subject: "s", HasSubject: true, Mistyped: "aud"},
		`{"aud":{"a":"b"}}`:           {HasAudience: true, Mistyped: "aud"},
		`{"iss":["i"],"aud":[]}`:      {HasAudience: true, AudienceOK: true, AudienceList: true, Mistyped: "iss"},
		`{"sub":1}`:                   {Mistyped: "sub"},
	} {
		got, ok := jws.ReadClaims(claiming(payload))
		assert.True(t, ok, payload)
		assert.Equal(t, want, got, payload)
	}
	for _, text := range []string{"", "opaque", "a.b.c", claiming(`[]`), claiming(`{"iss":"i"`), claiming(`{"iss":"i","iss":"i"}`), claiming(`"iss"`)} {
		got, ok := jws.ReadClaims(text)
		assert.False(t, ok, text)
		assert.Zero(t, got, text)
	}
}
