package vault_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	_ ca.Custodian = (*vault.Transit)(nil)
	_ ca.Sealer    = (*vault.Transit)(nil)
)

const sealedBefore = "a secret that was sealed before."

const keyName = "svidkit-00112233445566778899aabbccddeeff-0011223344556677"

func newTransit(t testing.TB, s *cafake.Script, edit ...func(*vault.TransitOptions)) *vault.Transit {
	t.Helper()
	o := vault.TransitOptions{Endpoint: endpoint(s), SealKey: "seal"}
	o.TrustDomain = spiffe.TrustDomain{} // no use for one
	for _, e := range edit {
		e(&o)
	}
	return must.Get(vault.NewTransit(o))(t)
}

// noRenewal answers what asks for a renewal of the token, as to a root token, and the rest with next.
func noRenewal(next func(cafake.Call) (int, any)) func(cafake.Call) (int, any) {
	return func(c cafake.Call) (int, any) {
		if strings.HasSuffix(c.URL.Path, "/renew-self") {
			return 400, cafake.Errors("lease is not renewable")
		}
		return next(c)
	}
}

// fewer is without the algorithms that take long.
type fewer struct{ *vault.Transit }

func (f fewer) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	if algorithm == "rsa-3072" || algorithm == "rsa-4096" {
		return nil, errors.ErrUnsupported
	}
	return f.Transit.NewKey(ctx, name, algorithm)
}

// The suites, on the fake, which internal/peers runs on a real OpenBao.
func TestTransit(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	engine := cafake.NewTransit()
	o := custodiantest.Options{Algorithms: []string{"ecdsa-p256", "ecdsa-p384", "ecdsa-p521", "rsa-2048", "ed25519"}}
	custodiantest.Run(t, func(t testing.TB) ca.Custodian { return fewer{newTransit(t, engine.Script)} }, o)
	with := func(key string) func(t testing.TB) ca.Sealer {
		return func(t testing.TB) ca.Sealer {
			return newTransit(t, engine.Script, func(o *vault.TransitOptions) { o.SealKey = key })
		}
	}
	must.Get(with("other")(t).Seal(t.Context(), make([]byte, 32), nil))(t)
	custodiantest.Sealer(t, with("seal"), with("other"), with("missing"))
}

// Requests, field for field.
func TestTransitWire(t *testing.T) {
	t.Parallel()
	engine := cafake.NewTransit()
	engine.Answer = noRenewal(engine.Engine)
	c := newTransit(t, engine.Script)
	digest := make([]byte, 32)
	key := must.Get(c.NewKey(t.Context(), keyName, "rsa-2048"))(t)
	for _, opts := range []crypto.SignerOpts{crypto.SHA256, &rsa.PSSOptions{Hash: crypto.SHA256, SaltLength: 20}} {
		must.Get(key.Sign(rand.Reader, digest, opts))(t)
	}
	must.Get(c.Keys(t.Context(), "svidkit-"))(t)
	require.NoError(t, c.Destroy(t.Context(), keyName))
	must.Get(must.Get(c.NewKey(t.Context(), keyName, "ed25519"))(t).Sign(nil, []byte("message"), crypto.Hash(0)))(t)
	box := must.Get(c.Seal(t.Context(), make([]byte, 32), []byte("a")))(t)
	must.Get(c.Unseal(t.Context(), box, []byte("a")))(t)
	const keys, sign = "/v1/transit/keys/" + keyName, "/v1/transit/sign/" + keyName
	const body = ` {"hash_algorithm":"sha2-256","input":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",` +
		`"key_version":1,"prehashed":true`
	var got []string
	for _, call := range engine.Calls() {
		assert.Equal(t, secret, call.Header.Get("X-Vault-Token"))
		wrap := map[bool]string{true: " forwarded"}[call.Header.Get("X-Vault-Wrap-TTL") == "1s"]
		got = append(got, strings.TrimSpace(call.Method+" "+call.URL.RequestURI()+wrap+" "+call.Raw))
	}
	create := func(algorithm string) []string {
		return []string{
			"GET " + keys, "GET " + keys + " forwarded", "GET /v1/sys/internal/ui/mounts/transit",
			"POST " + keys + ` {"allow_plaintext_backup":false,"exportable":false,"type":"` + algorithm + `"}`, "GET " + keys,
		}
	}
	want := append([]string{"POST /v1/auth/token/renew-self {}"}, create("rsa-2048")...)
	want = append(want,
		"POST "+sign+body+`,"signature_algorithm":"pkcs1v15"}`,
		"POST "+sign+body+`,"salt_length":"20","signature_algorithm":"pss"}`,
		"LIST /v1/transit/keys",
		"GET "+keys, "POST "+keys+`/config forwarded {"deletion_allowed":true}`, "DELETE "+keys+" forwarded",
	)
	want = append(want, create("ed25519")...)
	want = append(want, "POST "+sign+` {"input":"bWVzc2FnZQ==","key_version":1}`,
		"GET /v1/sys/internal/ui/mounts/transit",
		`POST /v1/transit/encrypt/seal {"associated_data":"YQ==",`+
			`"plaintext":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}`,
		"GET /v1/sys/internal/ui/mounts/transit",
		`POST /v1/transit/decrypt/seal {"associated_data":"YQ==","ciphertext":"`+string(box)+`"}`)
	assert.Equal(t, want, got)
}

// Only an engine of the right type that is certain says that there is no key.
func TestTransitCertainty(t *testing.T) {
	t.Parallel()
	box := must.Get(newTransit(t, cafake.NewTransit().Script).Seal(t.Context(), make([]byte, 32), nil))(t)
	fail := func(code int, body any) func(cafake.Call) (int, any) {
		return noRenewal(func(cafake.Call) (int, any) { return code, body })
	}
	for name, answer := range map[string]func(cafake.Call) (int, any){
		"sealed": fail(503, cafake.Errors("Vault is sealed")), "standby": fail(473, ""), "elsewhere": fail(307, ""),
		"quota": fail(429, cafake.Errors("rate limit quota exceeded")), "failed": fail(500, cafake.Errors("internal error")),
		"denied":    fail(403, cafake.Errors("1 error occurred:\n\t* permission denied\n\n")),
		"bad token": fail(403, cafake.Errors("permission denied")),
		"no engine": fail(404, cafake.Errors("no handler for route \"transit/keys/\". route entry not found.")),
		"namespace": fail(404, cafake.Errors("namespace not found")), "not found": fail(404, ""),
		"page":   fail(404, "<html>Not Found"),
		"object": fail(404, doc{}), "null": fail(404, doc{"errors": nil}), "bad": fail(400, cafake.Errors("bad request")),
		"200, nothing": fail(200, ""), "200, empty": fail(200, doc{}), "200, list": fail(200, []int{}),
		"200, no data": fail(200, doc{"data": nil}), "gone": fail(410, cafake.Errors()),
		"text": fail(400, "message authentication failed"), "proxy": fail(502, "cipher: message authentication failed"),
	} {
		c := newTransit(t, &cafake.Script{Answer: answer})
		key, err := c.Key(t.Context(), keyName)
		passes(t, name+", Key", err)
		assert.Nil(t, key, name)
		_, err = c.NewKey(t.Context(), keyName, "ecdsa-p256")
		passes(t, name+", NewKey", err)
		_, err = c.Unseal(t.Context(), box, nil)
		passes(t, name+", Unseal", err)
		sealed, err := c.Seal(t.Context(), make([]byte, 32), nil)
		passes(t, name+", Seal", err)
		assert.Nil(t, sealed, name)
		if !strings.HasPrefix(name, "200") {
			passes(t, name+", Destroy", c.Destroy(t.Context(), keyName))
			_, err = c.Keys(t.Context(), "")
			passes(t, name+", Keys", err)
		}
	}

	// An engine of another type has no keys either, and says so in the same way.
	engine := cafake.NewTransit()
	engine.Type = "kv"
	c := newTransit(t, engine.Script)
	passes(t, "kv, Key", must.Err(c.Key(t.Context(), keyName)))
	passes(t, "kv, NewKey", must.Err(c.NewKey(t.Context(), keyName, "ecdsa-p256")))
	passes(t, "kv, Keys", must.Err(c.Keys(t.Context(), "")))
	passes(t, "kv, Destroy", c.Destroy(t.Context(), keyName))
	passes(t, "kv, Seal", must.Err(c.Seal(t.Context(), make([]byte, 32), nil)))
	passes(t, "kv, Unseal", must.Err(c.Unseal(t.Context(), box, nil)))
	assert.NotContains(t, fmt.Sprint(engine.Paths()), "crypt", "a secret is not sent to an engine that would keep it")

	// No error of this machine's files is one of the engine.
	gone := filepath.Join(t.TempDir(), "gone")
	for name, edit := range map[string]func(*vault.TransitOptions){
		"token": func(o *vault.TransitOptions) { o.TokenFile = gone },
		"login": func(o *vault.TransitOptions) { o.TokenFile, o.LoginRole = gone, "ca" },
		"source": func(o *vault.TransitOptions) {
			o.Token = func(context.Context) (string, error) { return "", fs.ErrInvalid }
		},
		"missing": func(o *vault.TransitOptions) {
			o.Token = func(context.Context) (string, error) { return "", fs.ErrNotExist }
		},
		"roots": func(o *vault.TransitOptions) { o.HTTPClient, o.RootsFile = nil, gone },
	} {
		refuse := func(cafake.Call) (int, any) { return 403, cafake.Errors("permission denied") }
		c := newTransit(t, &cafake.Script{Answer: refuse}, func(o *vault.TransitOptions) { o.Token = nil; edit(o) })
		passes(t, name, must.Err(c.Key(t.Context(), keyName)))
		passes(t, name, must.Err(c.NewKey(t.Context(), keyName, "ecdsa-p256")))
		passes(t, name, must.Err(c.Unseal(t.Context(), box, nil)))
	}
}

func passes(t *testing.T, name string, err error) {
	t.Helper()
	require.Error(t, err, name)
	for _, certain := range []error{fs.ErrNotExist, fs.ErrExist, fs.ErrInvalid, fs.ErrPermission, errors.ErrUnsupported} {
		assert.NotErrorIs(t, err, certain, name)
	}
	assert.NotNil(t, must.As[*caclient.Error](err)(t, name).Kind, name)
	assert.NotContains(t, err.Error(), secret, name)
	assert.NotContains(t, err.Error(), "the CA answers", name)
}

// A standby that is behind does not make a key missing, and the call waits for it.
func TestTransitStandby(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		engine := cafake.NewTransit()
		var behind atomic.Int64 // until when, in Unix nanoseconds
		engine.Answer = noRenewal(func(c cafake.Call) (int, any) {
			read := c.Method == http.MethodGet && strings.Contains(c.URL.Path, "/keys/")
			if read && c.Header.Get("X-Vault-Wrap-TTL") == "" && time.Now().UnixNano() < behind.Load() {
				return 404, cafake.Errors()
			}
			return engine.Engine(c)
		})
		c := newTransit(t, engine.Script)
		behind.Store(time.Now().Add(time.Second).UnixNano())
		made := must.Get(c.NewKey(t.Context(), keyName, "ecdsa-p256"))(t)
		behind.Store(time.Now().Add(time.Second).UnixNano())
		found := must.Get(c.Key(t.Context(), keyName))(t)
		assert.True(t, pki.PublicKeysEqual(made.Public(), found.Public()))
		behind.Store(time.Now().Add(time.Hour).UnixNano())
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := c.Key(ctx, keyName)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, fs.ErrNotExist)
		behind.Store(time.Now().Add(time.Second).UnixNano())
		_, err = c.NewKey(t.Context(), keyName, "ecdsa-p256")
		require.ErrorIs(t, err, fs.ErrExist)
		behind.Store(time.Now().Add(time.Second).UnixNano())
		require.NoError(t, c.Destroy(t.Context(), keyName))
		_, err = c.Key(t.Context(), keyName)
		require.ErrorIs(t, err, fs.ErrNotExist)
	})
}

// What an operator does to a key.
func TestTransitOperator(t *testing.T) {
	t.Parallel()
	engine := cafake.NewTransit()
	c := newTransit(t, engine.Script)
	for _, algorithm := range []string{"ecdsa-p256", "ed25519"} {
		name := keyName + algorithm
		made := must.Get(c.NewKey(t.Context(), name, algorithm))(t)
		engine.Rotate(name)
		for _, key := range []crypto.Signer{made, must.Get(c.Key(t.Context(), name))(t)} {
			assert.True(t, pki.PublicKeysEqual(made.Public(), key.Public()), "version 1")
			_ = must.Get(pki.NewRoot(key, rootOptions()))(t, "sign with version 1")
		}
		engine.Trim(name)
		_, err := c.Key(t.Context(), name)
		passes(t, "trimmed", err)
		assert.ErrorContains(t, err, "version 1 of the key is not available")
		_, err = c.NewKey(t.Context(), name, algorithm)
		require.ErrorIs(t, err, fs.ErrExist)
		must.Err(made.Sign(rand.Reader, make([]byte, 32), crypto.SHA256))
	}
	must.Get(c.Seal(t.Context(), make([]byte, 32), nil))(t)
	_, err := c.Key(t.Context(), "seal")
	passes(t, "a key that seals", err)
	box := must.Get(c.Seal(t.Context(), []byte(sealedBefore), nil))(t)
	engine.Rotate("seal")
	assert.Equal(t, sealedBefore, string(must.Get(c.Unseal(t.Context(), box, nil))(t)))
	assert.Contains(t, string(must.Get(c.Seal(t.Context(), make([]byte, 32), nil))(t)), "vault:v2:")
	newer := strings.Replace(string(box), "vault:v1:", "vault:v3:", 1)
	passes(t, "a version that the engine does not know", must.Err(c.Unseal(t.Context(), []byte(newer), nil)))

	// Another client, or an operator, makes a key with the name while NewKey runs.
	for name, body := range map[string]doc{
		"type": {"type": "ecdsa-p384"}, "exportable": {"type": "ecdsa-p256", "exportable": true},
		"backup": {"type": "ecdsa-p256", "allow_plaintext_backup": true},
	} {
		engine := cafake.NewTransit()
		engine.Answer = noRenewal(func(call cafake.Call) (int, any) {
			if call.Method == http.MethodPost {
				call.Body = body
			}
			return engine.Engine(call)
		})
		key, err := newTransit(t, engine.Script).NewKey(t.Context(), keyName, "ecdsa-p256")
		require.ErrorIs(t, err, fs.ErrExist, name)
		assert.Nil(t, key)
	}
}

// Another client destroys a key while Destroy runs.
func TestTransitDestroyedMeanwhile(t *testing.T) {
	t.Parallel()
	for _, before := range []string{http.MethodPost, http.MethodDelete} {
		engine := cafake.NewTransit()
		c := newTransit(t, engine.Script)
		must.Get(c.NewKey(t.Context(), keyName, "ecdsa-p256"))(t)
		var done atomic.Bool
		engine.Answer = noRenewal(func(call cafake.Call) (int, any) {
			if call.Method == before && done.CompareAndSwap(false, true) {
				assert.NoError(t, c.Destroy(t.Context(), keyName))
			}
			return engine.Engine(call)
		})
		require.NoError(t, c.Destroy(t.Context(), keyName), before)
		require.ErrorIs(t, must.Err(c.Key(t.Context(), keyName)), fs.ErrNotExist)
	}
}

func rootOptions() pki.CertificateOptions {
	now := time.Now()
	return pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(domain.ID())}, NotBefore: now, NotAfter: now.Add(time.Hour)}
}

// What is not a signature of the pinned version does not get out; neither does what the key cannot sign get in.
func TestTransitSignatures(t *testing.T) {
	t.Parallel()
	engine := cafake.NewTransit()
	c := newTransit(t, engine.Script)
	for _, algorithm := range []string{"ecdsa-p256", "rsa-2048", "ed25519"} {
		key := must.Get(c.NewKey(t.Context(), keyName+algorithm, algorithm))(t)
		calls := len(engine.Calls())
		for _, opts := range []crypto.SignerOpts{crypto.SHA1, crypto.SHA512, crypto.MD5, crypto.Hash(99)} {
			require.ErrorIs(t, must.Err(key.Sign(rand.Reader, make([]byte, 32), opts)), errors.ErrUnsupported)
		}
		if algorithm != "ed25519" {
			require.ErrorIs(t, must.Err(key.Sign(rand.Reader, make([]byte, 32), crypto.Hash(0))), errors.ErrUnsupported)
		}
		assert.Len(t, engine.Calls(), calls, "nothing is asked")
	}
	key := must.Get(c.Key(t.Context(), keyName+"ecdsa-p256"))(t)
	for name, answer := range map[string]any{
		"nothing": "", "object": doc{}, "no data": doc{"data": nil}, "no signature": doc{"data": doc{"signature": ""}},
		"other version": doc{"data": doc{"signature": "vault:v2:AAAA"}}, "no prefix": doc{"data": doc{"signature": "AAAA"}},
		"no base64":  doc{"data": doc{"signature": "vault:v1:%"}},
		"other form": doc{"data": doc{"signature": "vault:v1:_-_-"}},
		"number":     doc{"data": doc{"signature": 1}},
	} {
		engine.Answer = func(cafake.Call) (int, any) { return 200, answer }
		signature, err := key.Sign(rand.Reader, make([]byte, 32), crypto.SHA256)
		require.ErrorIs(t, err, caclient.ErrBadAnswer, name)
		assert.Nil(t, signature)
	}
	for name, answer := range map[string]any{
		"nothing": "", "object": doc{}, "no data": doc{"data": nil}, "text": doc{"data": doc{"ciphertext": "x"}},
		"short": doc{"data": doc{"ciphertext": "vault:v1:AAAA", "plaintext": "AAAA"}},
		"empty": doc{"data": doc{"ciphertext": "", "plaintext": ""}},
	} {
		box := "vault:v1:" + strings.Repeat("A", 80)
		engine.Answer = func(c cafake.Call) (int, any) {
			if strings.Contains(c.URL.Path, "crypt") {
				return 200, answer
			}
			return engine.Engine(c)
		}
		require.ErrorIs(t, must.Err(c.Unseal(t.Context(), []byte(box), nil)), caclient.ErrBadAnswer, name)
		require.ErrorIs(t, must.Err(c.Seal(t.Context(), make([]byte, 32), nil)), caclient.ErrBadAnswer, name)
	}
	assert.Equal(t, "vault key "+keyName+"ecdsa-p256", fmt.Sprint(key))
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d"} {
		assert.NotContains(t, fmt.Sprintf(verb, c)+fmt.Sprintf(verb, struct{ c any }{c}), secret)
	}
	assert.Equal(t, "vault.Transit(https://vault.test)", c.String())
}

// Public keys that are none.
func TestTransitPublicKeys(t *testing.T) {
	t.Parallel()
	for name, keys := range map[string]any{
		"none": doc{}, "null": doc{"1": nil}, "number": doc{"1": 7}, "list": []int{1},
		"empty": doc{"1": doc{"public_key": ""}}, "no PEM": doc{"1": doc{"public_key": "x"}},
		"short":         doc{"1": doc{"public_key": "AAAA"}},
		"bad PEM":       doc{"1": doc{"public_key": "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"}},
		"other version": doc{"2": doc{"public_key": "h6w5UlbwZR0mJQ+GfCufKMcwtnq8Xx9qPZVCixocuBo="}},
	} {
		c := newTransit(t, &cafake.Script{Answer: func(cafake.Call) (int, any) {
			return 200, doc{"data": doc{"type": "ed25519", "keys": keys}}
		}})
		key, err := c.Key(t.Context(), keyName)
		passes(t, name, err)
		assert.Nil(t, key)
	}
}

// A server that does not answer costs each signature ten seconds, not those of others, and other calls their context.
func TestTransitHangs(t *testing.T) {
	t.Parallel()
	for _, login := range []string{"", "ca"} {
		synctest.Test(t, func(t *testing.T) {
			engine := cafake.NewTransit()
			var hangs atomic.Bool
			engine.Answer = func(c cafake.Call) (int, any) {
				if hangs.Load() {
					<-c.Context().Done()
				}
				if strings.Contains(c.URL.Path, "/auth/") {
					return 200, loginAnswer("hvs.1", 60)
				}
				return engine.Engine(c)
			}
			c := newTransit(t, engine.Script, func(o *vault.TransitOptions) { o.LoginRole = login })
			key := must.Get(c.NewKey(t.Context(), keyName, "ecdsa-p256"))(t)
			time.Sleep(2 * time.Minute) // a renewal, or a login, is due
			hangs.Store(true)
			began := time.Now()
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					_, err := key.Sign(rand.Reader, make([]byte, 32), crypto.SHA256)
					assert.ErrorIs(t, err, context.DeadlineExceeded)
				})
			}
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			wg.Go(func() { assert.ErrorIs(t, must.Err(c.Key(ctx, keyName)), context.DeadlineExceeded) })
			wg.Wait()
			assert.Equal(t, 10*time.Second, time.Since(began))
			hangs.Store(false)
			must.Get(key.Sign(rand.Reader, make([]byte, 32), crypto.SHA256))(t)
		})
	}
}

// A token is renewed when a third of its life is over, and is used whatever comes of that.
func TestTransitRenewal(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code   int
		answer any
		slow   time.Duration
		every  int // minutes; 60 in an hour at most once
	}{
		"renewed":       {200, loginAnswer(secret, 3600), 0, 20},
		"without end":   {200, loginAnswer(secret, 0), 0, 60},
		"not renewable": {400, cafake.Errors("lease is not renewable"), 0, 10},
		"not allowed":   {403, cafake.Errors("1 error occurred:\n\t* permission denied\n\n"), 0, 10},
		"sealed":        {503, cafake.Errors("Vault is sealed"), 0, 1}, // the token may have minutes
		"nonsense":      {200, "nonsense", 0, 1},
		"slow":          {200, loginAnswer(secret, 3600), time.Minute, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			engine, began := cafake.NewTransit(), time.Now()
			var at []int
			engine.Answer = func(call cafake.Call) (int, any) {
				assert.Equal(t, secret, call.Header.Get("X-Vault-Token"), name)
				if call.URL.Path != "/v1/auth/token/renew-self" {
					return engine.Engine(call)
				}
				at = append(at, int(time.Since(began).Minutes()))
				select {
				case <-time.After(c.slow):
				case <-call.Context().Done():
				}
				return c.code, c.answer
			}
			var log logtest.Buffer
			client := newTransit(t, engine.Script, func(o *vault.TransitOptions) { o.Logger = log.Logger() })
			for range 60 {
				call := time.Now()
				var wg sync.WaitGroup
				for range 5 { // of which one renews
					wg.Go(func() { assert.NoError(t, must.Err(client.Keys(t.Context(), "")), name) })
				}
				wg.Wait()
				assert.LessOrEqual(t, time.Since(call), 2*time.Second, name)
				time.Sleep(time.Minute - time.Since(call))
			}
			var want []int
			for minute := 0; minute < 60; minute += c.every {
				want = append(want, minute)
			}
			assert.Equal(t, want, at, name)
			assert.Equal(t, c.every < 20, strings.Contains(log.String(), "the token was not renewed"), name)
			assert.NotContains(t, log.String(), secret, name)
		})
	}
}

// A token that its source replaces is renewed at once; a login's never is, but is asked for again.
func TestTransitTokens(t *testing.T) {
	t.Parallel()
	engine := cafake.NewTransit()
	engine.Answer = func(c cafake.Call) (int, any) {
		switch c.URL.Path {
		case "/v1/auth/token/renew-self":
			return 200, loginAnswer(c.Header.Get("X-Vault-Token"), 3600)
		case "/v1/auth/cert/login":
			return 200, loginAnswer("hvs.1", 3600)
		}
		return engine.Engine(c)
	}
	token := "first"
	c := newTransit(t, engine.Script, func(o *vault.TransitOptions) {
		o.Token = func(context.Context) (string, error) { return token, nil }
	})
	for _, token = range []string{"first", "first", "next", "next"} {
		must.Get(c.Keys(t.Context(), ""))(t)
	}
	const renew, list = "POST /v1/auth/token/renew-self", "LIST /v1/transit/keys"
	const is = "GET /v1/sys/internal/ui/mounts/transit" // as there are no keys
	assert.Equal(t, []string{renew, list, is, list, is, renew, list, is, list, is}, engine.Paths())

	for _, mount := range []string{"", "cert"} {
		before := len(engine.Paths())
		c = newTransit(t, engine.Script, func(o *vault.TransitOptions) {
			o.Token, o.LoginRole, o.LoginMount = nil, "ca", mount
		})
		for range 2 {
			must.Get(c.Keys(t.Context(), ""))(t)
		}
		assert.Equal(t, []string{"POST /v1/auth/cert/login", list, is, list, is}, engine.Paths()[before:])
		login := engine.Calls()[before]
		assert.JSONEq(t, `{"name":"ca"}`, login.Raw)
		assert.Empty(t, login.Header.Get("X-Vault-Token"))
	}
}

func TestTransitBadOptions(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		edit func(*vault.TransitOptions)
		want string
	}{
		"no URL":     {func(o *vault.TransitOptions) { o.URL = "" }, "URL"},
		"mount":      {func(o *vault.TransitOptions) { o.Mount = "a/../b" }, "Mount"},
		"namespace":  {func(o *vault.TransitOptions) { o.Namespace = "a b" }, "Namespace"},
		"seal key":   {func(o *vault.TransitOptions) { o.SealKey = "a/b" }, "SealKey"},
		"two tokens": {func(o *vault.TransitOptions) { o.TokenFile = "x" }, "TokenFile"},
		"nothing to log in": {func(o *vault.TransitOptions) {
			o.LoginRole, o.Token, o.HTTPClient = "ca", nil, nil
		}, "LoginRole"},
	} {
		o := vault.TransitOptions{Endpoint: endpoint(new(cafake.Script))}
		c.edit(&o)
		_, err := vault.NewTransit(o)
		require.ErrorContains(t, err, "vault: invalid TransitOptions: ", name)
		assert.ErrorContains(t, err, c.want, name)
		assert.NotContains(t, err.Error(), secret)
	}
	s := new(cafake.Script)
	c := newTransit(t, s, func(o *vault.TransitOptions) { o.SealKey, o.Mount, o.Namespace = "", "/a/b/", "/team/" })
	passes(t, "no SealKey", must.Err(c.Seal(t.Context(), nil, nil)))
	for _, name := range []string{"", "a/b", "../x", "a?b", "a%2fb", "a\r\nb", strings.Repeat("x", 256)} {
		passes(t, name, must.Err(c.Key(t.Context(), name)))
		passes(t, name, must.Err(c.NewKey(t.Context(), name, "ecdsa-p256")))
		passes(t, name, c.Destroy(t.Context(), name))
	}
	assert.Empty(t, s.Paths())
	s.Answer = noRenewal(func(call cafake.Call) (int, any) {
		assert.Equal(t, "team/", call.Header.Get("X-Vault-Namespace"))
		return 404, cafake.Errors()
	})
	passes(t, "elsewhere", must.Err(c.Key(t.Context(), keyName)))
	assert.Equal(t, "GET /v1/sys/internal/ui/mounts/a/b", s.Paths()[len(s.Paths())-1])
}

// FuzzTransitAnswers gives one status and one body to every request about a key, in the place of OpenBao.
func FuzzTransitAnswers(f *testing.F) {
	engine := cafake.NewTransit()
	c := newTransit(f, engine.Script)
	must.Get(c.NewKey(f.Context(), keyName, "ecdsa-p256"))(f)
	box := must.Get(c.Seal(f.Context(), make([]byte, 32), nil))(f)
	read := must.Get(http.NewRequest(http.MethodGet, "/v1/transit/keys/"+keyName, nil))(f)
	_, known := engine.Engine(cafake.Call{Request: read})
	for _, body := range []any{
		"", "{", doc{}, doc{"data": nil}, known, doc{"data": doc{"keys": []string{keyName, "x"}}},
		doc{"data": doc{"type": "ed25519", "keys": doc{"1": doc{"public_key": ""}}}},
		doc{"data": doc{"signature": "vault:v1:AAAA"}}, doc{"data": doc{"signature": "vault:v2:AAAA"}},
		doc{"data": doc{"ciphertext": string(box)}}, doc{"data": doc{"plaintext": "AAAA"}},
		cafake.Errors(), cafake.Errors("permission denied", secret), doc{"errors": "x"},
		cafake.Errors("cipher: message authentication failed"),
		cafake.Errors("invalid ciphertext: version is too new"),
	} {
		for _, code := range []int{200, 204, 400, 403, 404, 503} {
			f.Add(code, must.Get(cafake.Text(body))(f))
		}
	}
	f.Fuzz(func(t *testing.T, code int, body string) {
		if code < 200 || code > 999 {
			code = 200
		}
		engine, missing := cafake.NewTransit(), code == 404 && strings.Contains(body, "[]")
		engine.Answer = noRenewal(func(c cafake.Call) (int, any) {
			if strings.Contains(c.URL.Path, "/v1/transit/") {
				return code, body
			}
			return engine.Engine(c)
		})
		c := newTransit(t, engine.Script)
		judge := func(err error, certain error, may bool) bool {
			if err == nil {
				return true
			}
			if !may || !errors.Is(err, certain) {
				passes(t, "", err)
			}
			require.NotContains(t, err.Error(), secret)
			require.Less(t, len(err.Error()), 2000)
			return false
		}
		key, err := c.Key(t.Context(), keyName)
		if judge(err, fs.ErrNotExist, missing) {
			require.NotNil(t, key.Public())
			_, err = key.Sign(rand.Reader, make([]byte, 32), crypto.SHA256)
			judge(err, errors.ErrUnsupported, true)
		} else {
			require.Nil(t, key)
		}
		_, err = c.NewKey(t.Context(), keyName, "ecdsa-p384")
		judge(err, cmp.Or(map[bool]error{true: fs.ErrNotExist}[missing], fs.ErrExist), missing || code < 300)
		names, err := c.Keys(t.Context(), keyName)
		judge(err, nil, false)
		for _, name := range names {
			require.True(t, strings.HasPrefix(name, keyName))
		}
		judge(c.Destroy(t.Context(), keyName), nil, false)
		_, err = c.Seal(t.Context(), make([]byte, 32), nil)
		judge(err, nil, false)
		_, err = c.Unseal(t.Context(), box, nil)
		judge(err, fs.ErrInvalid, code == 400 && strings.Contains(body, "authentication"))
	})
}
