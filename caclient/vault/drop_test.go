package vault_test

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/cafake"
)

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
