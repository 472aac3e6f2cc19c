// Package tests has the tests of a service that those forget who test with good identities alone, with svidkit.
package tests

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// refused tests that the service, with the identity me, serves a good client, and refuses the other one by this rule.
func refused(t *testing.T, ca *spiffetest.CA, me *spiffetest.Source, client *tls.Config, rule string) {
	t.Helper()
	var failures spiffetls.Metrics
	endpoint, err := spiffetls.New(spiffetls.Config{Self: me, Peers: me, Allow: spiffe.AllowMembersOf(ca.TrustDomain()), Metrics: &failures})
	require.NoError(t, err)
	config, err := endpoint.ServerConfig()
	require.NoError(t, err)
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	spiffetest.StartTLS(server, config)
	defer server.Close()
	read := func(config *tls.Config) error {
		conn, err := tls.Dial("tcp", server.Listener.Addr().String(), config)
		require.NoError(t, err)
		defer conn.Close()
		_, _ = io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n")
		_, err = conn.Read(make([]byte, 1))
		return err
	}
	require.NoError(t, read(spiffetest.TLSConfig(ca.Certificate("/web"))))
	require.Error(t, read(client))
	kept := failures.Report().Problems
	require.Len(t, kept, 1)
	var refusal *spiffe.VerifyError
	require.ErrorAs(t, kept[0], &refusal)
	require.Equal(t, rule, refusal.Rule, refusal)
}

func TestAnotherTrustDomain(t *testing.T) {
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	refused(t, ca, ca.Source("/db"), spiffetest.TLSConfig(other.Certificate("/web")), "X5-38")
}

func TestExpired(t *testing.T) {
	ca := spiffetest.NewCA(t, "example.org")
	refused(t, ca, ca.Source("/db"), spiffetest.TLSConfig(ca.Broken("Expired")), "X5-30")
}

func TestRotatedAway(t *testing.T) {
	ca := spiffetest.NewCA(t, "example.org")
	old := spiffetest.TLSConfig(ca.Certificate("/web"))
	ca.Rotate()
	ca.DropOldRoots()
	refused(t, ca, ca.Source("/db"), old, "X5-31")
}

func TestHangingAgent(t *testing.T) {
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/db")
	api.Hang()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := workloadapi.Start(ctx, api.Config())
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	api.Mend()
	me, err := workloadapi.Start(t.Context(), api.Config())
	require.NoError(t, err)
	require.NoError(t, me.Close())
}

func TestCAOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		me, err := secretcache.Start(t.Context(), secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/db"), CA: ca, Lifetime: 24 * time.Hour})
		require.NoError(t, err)
		defer me.Close()
		ca.FailNext(-1, errors.New("the CA is down"))
		for range 11 {
			time.Sleep(time.Hour)
			svid, err := me.SVID()
			require.NoError(t, err)
			require.True(t, svid.NotAfter().After(time.Now()))
		}
		ca.FailNext(0, nil)
		time.Sleep(time.Hour)
		svid, err := me.SVID()
		require.NoError(t, err)
		require.Greater(t, time.Until(svid.NotAfter()), 12*time.Hour, "renewed")
	})
}
