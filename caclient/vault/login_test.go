package vault_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// leases is a Vault in a bubble, whose logins give numbered tokens.
type leases struct {
	*cafake.Script
	ca     *spiffetest.CA
	lease  atomic.Int64 // seconds
	broken atomic.Bool  // the login
	slow   atomic.Int64 // nanoseconds of a login
	logins atomic.Int64
	valid  atomic.Int64 // the number of the token that is good; 0 for all, -1 if policies forbid the request
}

func newLeases(t testing.TB) *leases {
	l := &leases{ca: spiffetest.NewCA(t, "example.org")}
	l.lease.Store(3600)
	l.Script = &cafake.Script{Answer: func(c cafake.Call) (int, any) {
		switch {
		case strings.HasSuffix(c.URL.Path, "/login"):
			select {
			case <-time.After(time.Duration(l.slow.Load())):
			case <-c.Context().Done():
			}
			if l.broken.Load() {
				return 503, vaultErrors("Vault is sealed")
			}
			return 200, loginAnswer(fmt.Sprint("hvs.", l.logins.Add(1)), l.lease.Load())
		case strings.HasSuffix(c.URL.Path, "/issuers"):
			return 200, doc{"data": doc{"keys": []string{"all"}}}
		case strings.HasSuffix(c.URL.Path, "/json"):
			var texts []string
			for root := range l.ca.Bundle().X509Authorities() {
				texts = append(texts, string(pki.MarshalCertificatesPEM(root)))
			}
			return 200, doc{"data": doc{"certificate": texts[0], "ca_chain": texts}}
		}
		if n := l.valid.Load(); n < 0 {
			return 403, vaultErrors("1 error occurred:\n\t* permission denied\n\n")
		} else if n > 0 && c.Header.Get("X-Vault-Token") != fmt.Sprint("hvs.", n) {
			return 403, vaultErrors("permission denied")
		}
		return signed(l.ca, c)
	}}
	return l
}

func (l *leases) client(t testing.TB) *vault.CA {
	return newCA(t, vault.Options{Endpoint: endpoint(l.Script), Role: "web", LoginRole: "web"})
}

// bubble runs f with a Vault and a client of it.
func bubble(t *testing.T, f func(t *testing.T, l *leases, sign func() error)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLeases(t)
		c, csr := l.client(t), webCSR(t)
		f(t, l, func() error { _, err := c.Sign(t.Context(), csr, 0); return err })
	})
}

// A token is used for two thirds of its lease.
func TestLease(t *testing.T) {
	bubble(t, func(t *testing.T, l *leases, sign func() error) {
		for range 3 {
			before := l.logins.Load()
			require.NoError(t, sign())
			assert.Equal(t, before+1, l.logins.Load())
			time.Sleep(40*time.Minute - 1)
			require.NoError(t, sign())
			assert.Equal(t, before+1, l.logins.Load())
			time.Sleep(time.Nanosecond)
		}
	})
}

// Without an end, and beyond what Vault gives by default, it is used for 32 days at most.
func TestLongLease(t *testing.T) {
	for _, lease := range []int64{0, 1 << 40, 9223372036854775807} {
		t.Run(fmt.Sprint(lease), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *leases, sign func() error) {
				l.lease.Store(lease)
				require.NoError(t, sign())
				time.Sleep(21 * 24 * time.Hour)
				require.NoError(t, sign())
				assert.EqualValues(t, 1, l.logins.Load())
				time.Sleep(24 * time.Hour)
				require.NoError(t, sign())
				assert.EqualValues(t, 2, l.logins.Load())
			})
		})
	}
}

// A token stays in use until its end while logins fail, and those are tried rarely.
func TestLoginFails(t *testing.T) {
	bubble(t, func(t *testing.T, l *leases, sign func() error) {
		require.NoError(t, sign())
		l.broken.Store(true)
		time.Sleep(40 * time.Minute)
		for range 20 * 4 {
			require.NoError(t, sign())
			time.Sleep(15*time.Second - 1)
		}
		assert.LessOrEqual(t, logins(l.Script), 40)
		time.Sleep(time.Second)
		require.ErrorIs(t, sign(), caclient.ErrUnavailable)
		l.broken.Store(false)
		require.NoError(t, sign())
	})
}

// A login that hangs holds up one call for a moment, while the token of the last login is good.
func TestLoginHangs(t *testing.T) {
	bubble(t, func(t *testing.T, l *leases, sign func() error) {
		require.NoError(t, sign())
		time.Sleep(40 * time.Minute)
		l.slow.Store(int64(time.Minute))
		for _, took := range []time.Duration{2 * time.Second, 0, 0} {
			began := time.Now()
			require.NoError(t, sign())
			assert.Equal(t, took, time.Since(began))
		}
		time.Sleep(20 * time.Minute) // it has ended
		require.NoError(t, sign())
		assert.Equal(t, 3, logins(l.Script))
	})
}

// Calls at the same time share one login.
func TestLoginsAreShared(t *testing.T) {
	bubble(t, func(t *testing.T, l *leases, sign func() error) {
		l.slow.Store(int64(time.Second))
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() { assert.NoError(t, sign()) })
		}
		wg.Wait()
		assert.Equal(t, 1, logins(l.Script))
		time.Sleep(45 * time.Minute) // while one of them logs in again, the others use what there is
		start := time.Now()
		var slow atomic.Int64
		for range 50 {
			wg.Go(func() {
				assert.NoError(t, sign())
				if time.Since(start) > 0 {
					slow.Add(1)
				}
			})
		}
		wg.Wait()
		assert.Equal(t, 2, logins(l.Script))
		assert.EqualValues(t, 1, slow.Load())
	})
}

// The end of the call that logs in is not that of the calls that wait for it.
func TestLoginOfAnEndedCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLeases(t)
		l.slow.Store(int64(10 * time.Second))
		c := l.client(t)
		first, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			assert.ErrorIs(t, must.Err(c.Sign(first, webCSR(t), 0)), context.DeadlineExceeded)
		})
		synctest.Wait()
		wg.Go(func() { assert.NoError(t, must.Err(c.Sign(t.Context(), webCSR(t), 0))) })
		impatient, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, errors.New("impatient"))
		defer cancel()
		assert.ErrorContains(t, must.Err(c.Sign(impatient, webCSR(t), 0)), "impatient")
		wg.Wait()
		assert.EqualValues(t, 2, l.logins.Load(), "the script counts the first, too")
	})
}

// A token that is refused before its end is replaced at once, and the call repeated, once.
func TestRevoked(t *testing.T) {
	bubble(t, func(t *testing.T, l *leases, sign func() error) {
		require.NoError(t, sign())
		l.valid.Store(2)
		require.NoError(t, sign())
		assert.EqualValues(t, 2, l.logins.Load())

		l.valid.Store(-1) // the policy was taken away
		before := len(l.Paths())
		for range 50 {
			require.ErrorIs(t, sign(), caclient.ErrDenied)
		}
		assert.Len(t, l.Paths(), before+50, "no login for each call, which would fill Vault's storage")
		time.Sleep(time.Minute + 1)
		before = len(l.Paths())
		require.ErrorIs(t, sign(), caclient.ErrDenied)
		assert.Equal(t, []string{"POST /v1/pki/sign/web", "POST /v1/auth/kubernetes/login", "POST /v1/pki/sign/web"}, l.Paths()[before:])

		time.Sleep(time.Minute + 1)
		l.broken.Store(true) // and there is no other token
		before = len(l.Paths())
		require.ErrorIs(t, sign(), caclient.ErrUnavailable)
		assert.Equal(t, []string{"POST /v1/pki/sign/web", "POST /v1/auth/kubernetes/login"}, l.Paths()[before:])
		require.ErrorIs(t, sign(), caclient.ErrUnavailable)
		assert.Len(t, l.Paths(), before+3, "the token that was refused is gone")
	})
}

// A token of this call that is refused is not replaced: another one has the same policy.
func TestDeniedAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLeases(t)
		l.valid.Store(-1)
		require.ErrorIs(t, must.Err(l.client(t).Sign(t.Context(), webCSR(t), 0)), caclient.ErrDenied)
		assert.Len(t, l.Paths(), 2)
	})
}

// The same over a socket: all tokens of logins are revoked.
func TestRevokedOverTLS(t *testing.T) {
	t.Parallel()
	v := cafake.NewVault(t, spiffetest.NewCA(t, "example.org"), "/web")
	v.Change(func(r *cafake.VaultRules) { r.Kubernetes = true })
	c := newCA(t, vault.Options{Endpoint: v.Endpoint(), Role: "workload", LoginRole: "workload"})
	for i := range 3 {
		must.Get(c.Sign(t.Context(), webCSR(t), 0))(t)
		assert.Equal(t, i+1, v.Logins())
		v.RevokeLogins()
	}
}

// Answers to a login that give nothing to use.
func TestBadLogins(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]any{
		"nothing":         doc{},
		"no auth":         doc{"auth": nil},
		"no token":        loginAnswer("", 3600),
		"second factor":   doc{"auth": doc{"client_token": "", "mfa_requirement": doc{"mfa_request_id": "x"}}},
		"space":           loginAnswer("hvs. 1", 3600),
		"line":            loginAnswer("hvs.1\r\nX-Evil: 1", 3600),
		"not ASCII":       loginAnswer("hvs.é", 3600),
		"long":            loginAnswer(strings.Repeat("x", 17<<10), 3600),
		"ended":           loginAnswer("hvs.1", -1),
		"lease too large": loginAnswer("hvs.1", 1e40),
		"lease as text":   loginAnswer("hvs.1", "3600"),
		"number":          doc{"auth": doc{"client_token": 7}},
		"list":            []int{1},
		"text":            "hvs.1",
	} {
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 200, answer }}
		_, err := newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web", LoginRole: "web"}).Sign(t.Context(), webCSR(t), 0)
		require.ErrorIs(t, err, caclient.ErrBadAnswer, name)
		assert.NotContains(t, err.Error(), "hvs.", name)
		assert.Len(t, s.Paths(), 1, name)
	}
}

// The source of tokens has nothing to log in with.
func TestNothingToLogInWith(t *testing.T) {
	t.Parallel()
	s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 500, "" }}
	for name, give := range map[string]func(context.Context) (string, error){
		"empty":   cafake.Give(""),
		"failure": func(context.Context) (string, error) { return "", errors.New("no metadata server") },
		"bad":     cafake.Give("a b"),
	} {
		e := endpoint(s)
		e.Token = give
		_, err := newCA(t, vault.Options{Endpoint: e, Role: "web", LoginRole: "web"}).Sign(t.Context(), webCSR(t), 0)
		require.Error(t, err, name)
		if name == "failure" {
			assert.ErrorContains(t, err, "no metadata server")
		}
	}
	assert.Empty(t, s.Paths())
}

// The refusal of an old token that comes late takes nothing from the calls that have a new one: no call logs in again for it.
func TestLateRefusal(t *testing.T) {
	bubble(t, func(t *testing.T, l *leases, sign func() error) {
		require.NoError(t, sign())
		l.valid.Store(2)
		usual, late := l.Answer, atomic.Bool{}
		l.Answer = func(c cafake.Call) (int, any) {
			if !strings.Contains(c.URL.Path, "/auth/") && c.Header.Get("X-Vault-Token") == "hvs.1" && late.CompareAndSwap(false, true) {
				time.Sleep(5 * time.Second)
			}
			return usual(c)
		}
		var wg sync.WaitGroup
		wg.Go(func() { assert.NoError(t, sign()) })
		synctest.Wait() // it is on its way
		require.NoError(t, sign())
		assert.EqualValues(t, 2, l.logins.Load())
		wg.Wait()
		require.NoError(t, sign())
		assert.EqualValues(t, 2, l.logins.Load())
	})
}
