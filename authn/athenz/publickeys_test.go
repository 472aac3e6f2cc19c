package athenz_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
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

type answerFunc func(r *http.Request) (int, string, error)

func (f answerFunc) RoundTrip(r *http.Request) (*http.Response, error) {
	code, text, err := f(r)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader(text)), Request: r, Header: http.Header{}}, nil
}

func TestPublicKeys(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.1-7", "ATH-14-19", "ATH-14-20")
	der := must.Get(x509.MarshalPKIXPublicKey(athenztest.RSAKey().Public()))(t)
	document := func(key string) string {
		data := must.Get(json.Marshal(object{"key": key, "id": "0"}))(t)
		return string(data)
	}
	good := document(y64(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})))
	synctest.Test(t, func(t *testing.T) {
		calls, code, text := 0, 200, good
		var failure error
		p, err := athenz.NewPublicKeys("https://zts.example:4443", &http.Client{Transport: answerFunc(func(r *http.Request) (int, string, error) {
			calls++
			assert.Equal(t, "https://zts.example:4443/zts/v1/domain/media.sports/service/frontend/publickey/v1", r.URL.String())
			return code, text, failure
		})})
		require.NoError(t, err)
		owner := athenztest.Subject().Service
		for range 3 {
			key := must.Get(p(t.Context(), owner, "v1"))(t)
			assert.Equal(t, athenztest.RSAKey().Public(), key)
		}
		assert.Equal(t, 1, calls)
		time.Sleep(10 * time.Minute)
		require.NoError(t, must.Err(p(t.Context(), owner, "v1")))
		assert.Equal(t, 2, calls)

		// While ZTS does not answer the key counts for an hour.
		failure = errors.New("away")
		time.Sleep(time.Hour - time.Second)
		require.NoError(t, must.Err(p(t.Context(), owner, "v1")))
		time.Sleep(time.Second)
		_, err = p(t.Context(), owner, "v1")
		require.ErrorIs(t, err, failure)
		require.NotErrorIs(t, err, athenz.ErrServiceToken)

		// One that is gone does not.
		failure, code = nil, 404
		require.ErrorIs(t, must.Err(p(t.Context(), owner, "v1")), athenz.ErrServiceToken)
		code = 200
		require.NoError(t, must.Err(p(t.Context(), owner, "v1")))

		time.Sleep(2 * time.Hour)
		for _, bad := range []string{"", "x", "[]", document("?"), document(""), document(y64([]byte("x"))), document(y64(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))), strings.Repeat(" ", 1<<20) + good} {
			text = bad
			_, err = p(t.Context(), owner, "v1")
			require.Error(t, err)
			require.NotErrorIs(t, err, athenz.ErrServiceToken)
		}
		text = good
		for _, code = range []int{302, 401, 500} {
			require.ErrorContains(t, must.Err(p(t.Context(), owner, "v1")), "answers")
		}
		calls = 0
		for _, id := range []string{"", ".", "..", "a/b", "a b", strings.Repeat("x", 300)} {
			require.ErrorIs(t, must.Err(p(t.Context(), owner, id)), athenz.ErrServiceToken, id)
		}
		_, err = p(t.Context(), athenzname.Service{Domain: "a/..", Name: "b"}, "v1")
		require.ErrorIs(t, err, athenz.ErrServiceToken)
		assert.Zero(t, calls)

		// The two together.
		code = 200
		token, err := athenz.SignServiceToken(athenz.ServiceToken{Service: owner, KeyID: "v1"}, athenztest.RSAKey())
		require.NoError(t, err)
		a := athenz.ServiceTokenAuthenticator(p)
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.TLS = new(tls.ConnectionState)
		r.Header.Set("Athenz-Principal-Auth", token)
		caller := must.Get(a.Authenticate(r))(t)
		assert.Equal(t, "media.sports.frontend", caller.Name)
		code = 404
		time.Sleep(10 * time.Minute)
		require.ErrorIs(t, must.Err(a.Authenticate(r)), authn.ErrRefused)
		code, failure = 200, context.DeadlineExceeded
		time.Sleep(time.Minute)
		_, err = a.Authenticate(r)
		assert.True(t, authn.Unavailable(err))
	})
	for _, address := range []string{"", "http://h", "https://", "https://h/zts/v1", "https://u@h", "https://h?x"} {
		_, err := athenz.NewPublicKeys(address, new(http.Client))
		require.ErrorContains(t, err, "athenz: new public keys: ", address)
	}
	require.Error(t, must.Err(athenz.NewPublicKeys("https://h", nil)))
}

// publicKeyAnswer is what ZTS answers about the public key of rsaKey.
func publicKeyAnswer(t *testing.T) []byte {
	t.Helper()
	der := must.Get(x509.MarshalPKIXPublicKey(athenztest.RSAKey().Public()))(t)
	answer, err := json.Marshal(object{"key": y64(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))})
	require.NoError(t, err)
	return answer
}

// TestPublicKeysAway has ZTS not answer at all, and callers that name keys that do not exist.
func TestPublicKeysAway(t *testing.T) {
	t.Parallel()
	good := publicKeyAnswer(t)
	synctest.Test(t, func(t *testing.T) {
		away, calls := false, 0
		p, err := athenz.NewPublicKeys("https://zts.example:4443", &http.Client{Transport: answerFunc(func(r *http.Request) (int, string, error) {
			calls++
			switch {
			case away:
				<-r.Context().Done()
				return 0, "", r.Context().Err()
			case strings.HasSuffix(r.URL.Path, "/good"):
				return 200, string(good), nil
			}
			return 404, "", nil
		})})
		require.NoError(t, err)
		owner := athenztest.Subject().Service
		key := func(id string) (time.Duration, error) {
			begin := time.Now()
			_, err := p(t.Context(), owner, id)
			return time.Since(begin), err
		}
		require.NoError(t, must.Err(key("good")))

		// Names of no key do not push out one that is used.
		for i := range 5000 {
			time.Sleep(20 * time.Millisecond) // not faster than ZTS is asked
			require.ErrorIs(t, must.Err(key("x"+strconv.Itoa(i))), athenz.ErrServiceToken)
		}
		calls = 0
		require.NoError(t, must.Err(key("good")))
		assert.Zero(t, calls)

		// A server that is away costs one caller in a minute its patience, and the others nothing.
		away = true
		time.Sleep(11 * time.Minute)
		var waited time.Duration
		for range 100 {
			d := must.Get(key("good"))(t)
			waited += d
		}
		assert.Equal(t, 5*time.Second, waited)
		assert.Equal(t, 1, calls)
		time.Sleep(time.Minute)
		require.NoError(t, must.Err(key("good")))
		assert.Equal(t, 2, calls)
		away = false
		time.Sleep(time.Minute)
		require.NoError(t, must.Err(key("good")))
		away = true
		time.Sleep(9 * time.Minute)
		d := must.Get(key("good"))(t)
		assert.Zero(t, d, "it is fresh again")
	})
}

// TestPublicKeysFlood has callers name more keys than ZTS is asked for, and callers that are gone before ZTS has answered. That
// keeps no key alive which ZTS has withdrawn.
func TestPublicKeysFlood(t *testing.T) {
	t.Parallel()
	good := publicKeyAnswer(t)
	synctest.Test(t, func(t *testing.T) {
		withdrawn := false
		p, err := athenz.NewPublicKeys("https://zts.example:4443", &http.Client{Transport: answerFunc(func(r *http.Request) (int, string, error) {
			if strings.HasSuffix(r.URL.Path, "/good") && !withdrawn {
				return 200, string(good), nil
			}
			return 404, "", r.Context().Err()
		})})
		require.NoError(t, err)
		owner := athenztest.Subject().Service
		gone, leave := context.WithCancel(t.Context())
		leave()
		require.NoError(t, must.Err(p(t.Context(), owner, "good")))
		withdrawn = true
		time.Sleep(10 * time.Minute)
		_, _ = p(gone, owner, "good")
		require.ErrorIs(t, must.Err(p(t.Context(), owner, "good")), athenz.ErrServiceToken)

		withdrawn = false
		time.Sleep(time.Minute)
		require.NoError(t, must.Err(p(t.Context(), owner, "good")))
		withdrawn = true
		time.Sleep(10 * time.Minute)
		refused := 0
		for i := range 1000 {
			if _, err := p(t.Context(), owner, "x"+strconv.Itoa(i)); !errors.Is(err, athenz.ErrServiceToken) {
				refused++
			}
		}
		assert.Greater(t, refused, 500, "they are limited")
		require.ErrorIs(t, must.Err(p(t.Context(), owner, "good")), athenz.ErrServiceToken)
	})
}
