package athenz_test

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
)

// y64 is the base64 of Athenz, by its definition.
func y64(data []byte) string {
	return strings.NewReplacer("+", ".", "/", "_", "=", "-").Replace(base64.StdEncoding.EncodeToString(data))
}

// signText signs the text of a token with nothing of this library.
func signText(t testing.TB, text string) string {
	t.Helper()
	sum := sha256.Sum256([]byte(text))
	sig := must.Get(rsa.SignPKCS1v15(rand.Reader, athenztest.RSAKey().(*rsa.PrivateKey), crypto.SHA256, sum[:]))(t)
	return text + ";s=" + y64(sig)
}

type keyFunc = func(context.Context, athenzname.Service, string) (crypto.PublicKey, error)

func oneKey(key crypto.Signer) keyFunc {
	return func(context.Context, athenzname.Service, string) (crypto.PublicKey, error) { return key.Public(), nil }
}

func TestServiceToken(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-14-1", "ATH-14-2", "ATH-14-3", "ATH-14-4", "ATH-14-5", "ATH-14-8", "ATH-14-9", "ATH-14-10", "ATH-14-13", "ATH-14-17",
		"ATH-14-18", "ATH-14-19", "ATH-14-24")
	for _, key := range []crypto.Signer{athenztest.RSAKey(), ecKey(t, elliptic.P256()), ecKey(t, elliptic.P384())} {
		now := time.Now()
		text, err := athenz.SignServiceToken(athenz.ServiceToken{
			Service: athenztest.Subject().Service, KeyID: "v1", Issued: now, Expires: now.Add(2 * time.Hour),
		}, key)
		require.NoError(t, err)
		begin, rest, _ := strings.Cut(text, ";a=")
		assert.Equal(t, "v=S1;d=media.sports;n=frontend;k=v1", begin)
		salt, rest, _ := strings.Cut(rest, ";")
		assert.Len(t, salt, 16)
		times, _, _ := strings.Cut(rest, ";s=")
		assert.Equal(t, fmt.Sprintf("t=%d;e=%d", now.Unix(), now.Unix()+7200), times)
		assert.NotContains(t, text, "+")
		got, err := athenz.VerifyServiceToken(t.Context(), text, func(_ context.Context, owner athenzname.Service, id string) (crypto.PublicKey, error) {
			assert.Equal(t, "media.sports.frontend", owner.String())
			assert.Equal(t, "v1", id)
			return key.Public(), nil
		})
		require.NoError(t, err)
		assert.Equal(t, athenz.ServiceToken{
			Version: "S1", Service: athenztest.Subject().Service, KeyID: "v1", Issued: time.Unix(now.Unix(), 0).UTC(), Expires: time.Unix(now.Unix()+7200, 0).UTC(),
		}, *got)
	}
	joe := athenzname.Service{Domain: "user", Name: "joe"}
	for owner, tokens := range map[string][]athenz.ServiceToken{
		"sys.auth.zts": {{Service: athenztest.Subject().Service, KeyService: "zts", KeyID: "v1"}},
		"sys.auth.zms": {{Service: joe, Version: "U1", KeyID: "v1"}, {Service: joe, KeyService: "zms", KeyID: "v1"}},
	} {
		for _, token := range tokens {
			text := must.Get(athenz.SignServiceToken(token, athenztest.RSAKey()))(t)
			keys := func(_ context.Context, got athenzname.Service, _ string) (crypto.PublicKey, error) {
				assert.Equal(t, owner, got.String())
				return athenztest.RSAKey().Public(), nil
			}
			require.NoError(t, must.Err(athenz.VerifyServiceToken(t.Context(), text, keys)))
		}
	}
}

func TestServiceTokenVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-14-6", "ATH-14-7", "ATH-14-11", "ATH-14-12", "ATH-14-14", "ATH-14-15", "ATH-14-16", "ATH-14-17", "ATH-14-18", "ATH-14-22")
	now := time.Now().Unix()
	text := fmt.Sprintf("v=S1;d=media.sports;n=frontend;k=v1;a=0123456789abcdef;t=%d;e=%d", now, now+3600)
	with := func(old, replacement string) string { return signText(t, strings.Replace(text, old, replacement, 1)) }
	good := signText(t, text)
	for name, token := range map[string]string{
		"as it is":           good,
		"the server's order": signText(t, fmt.Sprintf("v=S1;d=media.sports;n=frontend;h=host1;a=7;t=%d;e=%d;k=v1;z=zts;o=user.joe;i=::1;b=a.b,c.d", now, now+3600)),
		"unknown tags":       signText(t, text+";x=1;y=a=b"),
		"no key ID":          with(";k=v1", ""),
		"signed again":       good + ";bk=0;bn=a.b;bs=x",
		"upper case":         with("media.sports", "Media.Sports"),
		"a user":             with("v=S1;d=media.sports;n=frontend", "v=U1;d=user;n=joe"),
		"ahead by less":      with("t="+strconv.FormatInt(now, 10), "t="+strconv.FormatInt(now+200, 10)),
	} {
		require.NoError(t, must.Err(athenz.VerifyServiceToken(t.Context(), token, oneKey(athenztest.RSAKey()))), name)
	}
	sig := good[strings.LastIndex(good, ";s="):]
	for name, token := range map[string]string{
		"empty": "", "noise": "noise", "no signature": text, "an empty signature": text + ";s=", "another signature": text + ";s=" + y64(make([]byte, 256)),
		"plain base64":        strings.NewReplacer(".", "+", "_", "/", "-", "=").Replace(sig),
		"base64 of its own":   text + ";s=" + strings.NewReplacer(".", "+", "_", "/", "-", "=").Replace(sig[3:]),
		"a line break":        good + "\n",
		"another text":        strings.Replace(good, "frontend", "backend", 1),
		"a tag after signing": text + ";x=1" + sig,
		"no version":          with("v=S1;", ""), "another version": with("v=S1", "v=S2"), "no domain": with("d=media.sports;", ""), "no name": with("n=frontend;", ""),
		"a name with a dot": with("n=frontend", "n=front.end"), "a domain with a slash": with("d=media.sports", "d=media/sports"),
		"another key service": with("k=v1", "k=v1;z=zzz"), "a key ID with a slash": with("k=v1", "k=../v1"),
		"no t": with(fmt.Sprintf("t=%d;", now), ""), "no e": with(fmt.Sprintf(";e=%d", now+3600), ""), "t is text": with(fmt.Sprintf("t=%d", now), "t=x"),
		"e is text": with(fmt.Sprintf("e=%d", now+3600), "e=x"), "e is large": with(fmt.Sprintf("e=%d", now+3600), "e=99999999999999999999"), "e below": with(fmt.Sprintf("e=%d", now+3600), "e=-1"),
		"ahead":                with(fmt.Sprintf("t=%d", now), fmt.Sprintf("t=%d", now+400)),
		"expired":              with(fmt.Sprintf("e=%d", now+3600), fmt.Sprintf("e=%d", now)),
		"more than 30 days":    with(fmt.Sprintf("e=%d", now+3600), fmt.Sprintf("e=%d", now+31*86400)),
		"a tag twice":          with("d=media.sports", "d=media.sports;d=media.news"),
		"a part without value": with("k=v1", "k"),
		"an empty part":        with("k=v1", "k=v1;"),
		"17 KiB":               signText(t, text+";x="+strings.Repeat("x", 17<<10)),
	} {
		got, err := athenz.VerifyServiceToken(t.Context(), token, oneKey(athenztest.RSAKey()))
		require.ErrorIs(t, err, athenz.ErrServiceToken, name)
		assert.Nil(t, got, name)
		if len(sig) > 40 {
			assert.NotContains(t, err.Error(), sig[3:30], name)
		}
	}
	must.Fail(t, must.Err(athenz.VerifyServiceToken(t.Context(), good, oneKey(ecKey(t, elliptic.P256())))), athenz.ErrServiceToken)
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	require.ErrorIs(t, must.Err(athenz.VerifyServiceToken(t.Context(), good, oneKey(ed))), athenz.ErrServiceToken)
	reason := errors.New("ZTS is away")
	_, err = athenz.VerifyServiceToken(t.Context(), good, func(context.Context, athenzname.Service, string) (crypto.PublicKey, error) { return nil, reason })
	require.ErrorIs(t, err, reason)
	require.NotErrorIs(t, err, athenz.ErrServiceToken)

	for name, edit := range map[string]func(*athenz.ServiceToken){
		"no key ID":    func(s *athenz.ServiceToken) { s.KeyID = "" },
		"a part in it": func(s *athenz.ServiceToken) { s.KeyID = "a;n=root" },
		"no service":   func(s *athenz.ServiceToken) { s.Service.Name = "" },
		"too long":     func(s *athenz.ServiceToken) { s.Expires = time.Now().AddDate(0, 2, 0) },
		"past":         func(s *athenz.ServiceToken) { s.Expires = time.Now() },
		"version":      func(s *athenz.ServiceToken) { s.Version = "Z1" },
	} {
		s := athenz.ServiceToken{Service: athenztest.Subject().Service, KeyID: "v1"}
		edit(&s)
		require.ErrorIs(t, must.Err(athenz.SignServiceToken(s, athenztest.RSAKey())), athenz.ErrServiceToken, name)
	}
	must.Fail(t, must.Err(athenz.SignServiceToken(athenz.ServiceToken{Service: athenztest.Subject().Service, KeyID: "v1"}, nil)), athenz.ErrServiceToken)
	must.Fail(t, must.Err(athenz.SignServiceToken(athenz.ServiceToken{Service: athenztest.Subject().Service, KeyID: "v1"}, ed)), athenz.ErrServiceToken)
}

func TestServiceTokenTimes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-14-21", "ATH-14-22")
	synctest.Test(t, func(t *testing.T) {
		text, err := athenz.SignServiceToken(athenz.ServiceToken{Service: athenztest.Subject().Service, KeyID: "0"}, athenztest.RSAKey())
		require.NoError(t, err)
		time.Sleep(time.Hour - time.Nanosecond)
		require.NoError(t, must.Err(athenz.VerifyServiceToken(t.Context(), text, oneKey(athenztest.RSAKey()))))
		time.Sleep(time.Nanosecond)
		must.Fail(t, must.Err(athenz.VerifyServiceToken(t.Context(), text, oneKey(athenztest.RSAKey()))), "expired at")
	})
}

func TestServiceTokenAuthenticator(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-14-23", "ATH-14-24")
	text, err := athenz.SignServiceToken(athenz.ServiceToken{Service: athenztest.Subject().Service, KeyID: "0"}, athenztest.RSAKey())
	require.NoError(t, err)
	a := athenz.ServiceTokenAuthenticator(oneKey(athenztest.RSAKey()))
	request := func(tokens ...string) *http.Request {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.TLS = &tls.ConnectionState{}
		for _, token := range tokens {
			r.Header.Add("Athenz-Principal-Auth", token)
		}
		return r
	}
	caller := must.Get(a.Authenticate(request(text)))(t)
	assert.Equal(t, "athenz-service-token:media.sports.frontend", caller.String())
	assert.WithinDuration(t, time.Now().Add(time.Hour), caller.NotAfter, 5*time.Second)
	require.ErrorIs(t, must.Err(a.Authenticate(request())), authn.ErrNoCredential)
	plain := request(text)
	plain.TLS = nil
	for name, r := range map[string]*http.Request{"two": request(text, text), "bad": request(text + "x"), "empty": request(""), "readable by others": plain} {
		require.ErrorIs(t, must.Err(a.Authenticate(r)), authn.ErrRefused, name)
	}
	away := athenz.ServiceTokenAuthenticator(func(context.Context, athenzname.Service, string) (crypto.PublicKey, error) {
		return nil, errors.New("away")
	})
	_, err = away.Authenticate(request(text))
	assert.True(t, authn.Unavailable(err))
}

func FuzzVerifyServiceToken(f *testing.F) {
	now := time.Now().Unix()
	good := signText(f, fmt.Sprintf("v=S1;d=media.sports;n=frontend;k=v1;a=0123456789abcdef;t=%d;e=%d", now, now+86400))
	f.Add(good)
	f.Add("v=S1;s=;s=")
	f.Add(";;;=;s=....")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := athenz.VerifyServiceToken(t.Context(), text, oneKey(athenztest.RSAKey()))
		if err == nil { // another process of the fuzzer may have signed it in another second
			signed, _, _ := strings.Cut(good, ";t=")
			require.True(t, strings.HasPrefix(text, signed), text)
			require.Equal(t, "media.sports.frontend", got.Service.String())
			return
		}
		require.ErrorIs(t, err, athenz.ErrServiceToken)
	})
}
