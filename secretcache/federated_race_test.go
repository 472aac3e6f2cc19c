package secretcache_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// hasty are bundles that become others while the Manager asks to be told of changes.
type hasty struct {
	bundles
	next atomic.Pointer[spiffe.BundleSet]
}

func (h *hasty) Changed() <-chan struct{} {
	if next := h.next.Swap(nil); next != nil {
		h.set.Store(next)
		h.changed.Notify()
	}
	return h.bundles.Changed()
}

// Bundles that change between two looks at them are taken over at once, and not when the CA is asked next.
func TestFederatedWhileLooking(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		of := func() *spiffe.BundleSet { return set(t, spiffetest.NewCA(t, "partner.test").Bundle()) }
		h := new(hasty)
		h.set.Store(of())
		m := newManager(t, secretcache.Config{CA: poll(spiffetest.NewCA(t, "example.org")), Federated: h})
		ready(t, m)
		for range 3 {
			time.Sleep(time.Second)
			last := of()
			h.next.Store(last)
			h.set.Store(of())
			h.changed.Notify()
			synctest.Wait()
			require.Nil(t, h.next.Load())
			want := must.Get(last.Bundle(spiffe.MustParseTrustDomain("partner.test")))(t)
			assert.Same(t, want, must.Get(m.Bundle(want.TrustDomain()))(t))
		}
	})
}
