package sds_test

import (
	"context"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// whole has what a source needs beside what spiffetest has.
type whole struct{ *spiffetest.Source }

func (whole) Ready(context.Context) error { return nil }
func (whole) Close() error                { return nil }

// federated has bundles that a test changes.
type federated struct {
	renew.Signal
	set atomic.Pointer[spiffe.BundleSet]
}

func (f *federated) put(all ...*spiffe.Bundle) {
	set, err := spiffe.NewBundleSet(all...)
	if err != nil {
		panic(err)
	}
	f.set.Store(set)
	f.Notify()
}

func (f *federated) Bundles() *spiffe.BundleSet { return f.set.Load() }

func (f *federated) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return f.Bundles().Bundle(td)
}

// TestEnvoyAllRoots has an Envoy of one trust domain call one of another, both with a ROOTCA of all roots: not before
// federation has brought the other's roots, and not after it has taken them away.
func TestEnvoyAllRoots(t *testing.T) {
	t.Parallel()
	dir := envoytest.Dir(t)
	run := background(t)
	home, abroad := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	var mesh federated
	mesh.put()
	serve := func(name string, ca *spiffetest.CA) {
		t.Helper()
		all := must.Get(source.NewMerge(ca.TrustDomain(), whole{ca.Source("/ns/demo/sa/" + name)}, &mesh))(t)
		t.Cleanup(func() { _ = all.Close() })
		s := &unixsocket.Server{Path: filepath.Join(dir, name+".sock"), Handler: handler(t, sdssource.FromIdentityWithAllRoots(all), nil)}
		run(name, s.Run)
	}
	serve("backend", home)
	serve("frontend", abroad)
	accepts := strings.ReplaceAll(socketOf(serverBootstrap, "backend.sock", "GRPC"),
		"spiffe://example.org/ns/demo/sa/frontend", "spiffe://partner.test/ns/demo/sa/frontend")
	server, _, address := startMesh(t, dir, accepts, socketOf(clientBootstrap, "frontend.sock", "GRPC"))
	becomes := func(want bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			resp, err := http.Get(address)
			if err != nil {
				return false
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			good := resp.StatusCode == http.StatusOK && strings.Contains(string(body), "URI=spiffe://partner.test/ns/demo/sa/frontend")
			return err == nil && good == want
		}, time.Minute, 50*time.Millisecond)
	}
	for range 2 {
		becomes(false)
		mesh.put(home.Bundle(), abroad.Bundle())
		becomes(true)
		_, in := server.Serials()
		require.Len(t, in, 2, "each root once")
		mesh.put()
	}
	becomes(false)
	require.Zero(t, server.Stat("sds.ROOTCA.update_rejected"))
}
