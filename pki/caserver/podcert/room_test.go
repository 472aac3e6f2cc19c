package podcert_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/podcert"
)

// All requests are read again while some were left out for want of room, and once there was room for all they are followed as before, by watches alone.
func TestRoomAgain(t *testing.T) {
	rounds.NotShort(t)
	bubble.Test(t, func(t *testing.T) {
		c := &cluster{Server: kubetest.StartOn(t, 1, memconn.Listen()), t: t}
		defer c.Client().CloseIdleConnections()
		a := newCA(t)
		a.set(&ca.SignError{Kind: ca.ErrLimit, Err: errors.New("busy")})
		var requests []string
		for range 40 {
			requests = append(requests, c.ask(nil))
		}
		_, stop := c.run(c.options(a), func(s *podcert.Signer) { s.SetRoom(10<<10, 10<<10) })
		defer stop()
		lists := func() (n int) {
			for _, r := range c.Requests() {
				if r.Method == http.MethodGet && strings.HasSuffix(r.Path, "/podcertificaterequests") && r.Query.Get("watch") == "" {
					n++
				}
			}
			return n
		}
		time.Sleep(10 * time.Minute)
		assert.Greater(t, lists(), 5, "each minute")
		a.set(nil)
		time.Sleep(30 * time.Minute)
		for _, request := range requests {
			c.issued(request)
		}
		before := lists()
		time.Sleep(time.Hour)
		require.Equal(t, before, lists())
		c.issued(c.ask(nil)) // and they are followed
	})
}
