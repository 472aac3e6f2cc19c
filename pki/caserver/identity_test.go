package caserver_test

import (
	"context"
	"crypto/tls"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
)

// hasty is a CA whose root is replaced while the server asks to be told of changes, once it is armed.
type hasty struct {
	*ca.Authority
	t     testing.TB
	armed atomic.Bool
}

func (h *hasty) Changed() <-chan struct{} {
	if h.armed.CompareAndSwap(true, false) {
		_, err := h.RevokeNow(context.WithoutCancel(h.t.Context()), active(h.t, h.Authority))
		if err != nil {
			h.t.Error(err)
		}
	}
	return h.Authority.Changed()
}

func active(t testing.TB, a *ca.Authority) string {
	t.Helper()
	for _, k := range a.Status().Roots {
		if k.Phase == ca.Active {
			return k.ID
		}
	}
	require.Fail(t, "there is no active root")
	return ""
}

// The server has a certificate under the roots of now as soon as they are others, also if they become others while it reads them.
func TestIdentityFollowsRoots(t *testing.T) {
	t.Parallel()
	h := &hasty{Authority: newAuthority(t), t: t}
	at := caserver.Listeners{Bundle: localhost()}
	run(t, caserver.Options{CA: h}, at)
	follows := func() {
		t.Helper()
		require.Eventually(t, func() bool {
			c, err := tls.Dial("tcp", at.Bundle.Addr().String(), &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: h.Bundle().CertPool(), ServerName: "localhost"})
			if err != nil {
				return false
			}
			return c.Close() == nil
		}, time.Minute, 10*time.Millisecond)
	}
	follows()
	_, err := h.RevokeNow(t.Context(), active(t, h.Authority))
	require.NoError(t, err)
	follows()
	h.armed.Store(true)
	_, err = h.Rotate(t.Context()) // the server looks for news
	require.NoError(t, err)
	require.Eventually(t, func() bool { return !h.armed.Load() }, time.Minute, time.Millisecond)
	follows()
}
