package podcert_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
)

// A replica that is behind waits ten minutes for the news of another one each time: those in which the replicas agreed do not count, and after them
// what it knows is written.
func TestBehindAgain(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		c := &cluster{Server: kubetest.StartOn(t, 1, memconn.Listen()), t: t}
		defer c.Client().CloseIdleConnections()
		a := newAuthority(t)
		_, stop := c.run(c.options(a))
		defer stop()
		const object = "example.org:spiffe:example.org"
		own, newer := string(a.Bundle().MarshalPEM()), string(newAuthority(t).Bundle().MarshalPEM())
		put := func(sequence, roots string) {
			c.Put(bundles+object, map[string]any{
				"metadata": map[string]any{"annotations": map[string]string{"svidkit.github.io/sequence": sequence}, "labels": map[string]string{"k8s.spiffe.io/peer-trust-domain": "example.org"}},
				"spec":     map[string]string{"signerName": name, "trustBundle": roots},
			})
		}
		now := func() string {
			var o bundle
			c.Get(bundles+object, &o)
			return o.Spec.TrustBundle
		}
		time.Sleep(time.Minute)
		require.Equal(t, own, now())
		for range 3 {
			put("18446744073709551615", newer)
			time.Sleep(9 * time.Minute)
			require.Equal(t, newer, now(), "another replica is ahead")
			put("1", own) // it has gone back, or this one has caught up
			time.Sleep(9 * time.Minute)
			require.Equal(t, own, now())
		}
		put("18446744073709551615", newer)
		time.Sleep(11 * time.Minute)
		require.Equal(t, own, now(), "there is no such replica any more")
	})
}
