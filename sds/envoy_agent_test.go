package sds_test

import (
	"context"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// TestEnvoyOfAgent takes the identities of a SPIFFE agent to two Envoys, which ask one handler for "default" and
// each get their own, and speak mTLS to each other while the identities and the root rotate and the agent is away.
func TestEnvoyOfAgent(t *testing.T) {
	t.Parallel()
	dir := envoytest.Dir(t)
	run := background(t)

	authority := spiffetest.NewCA(t, "example.org")
	agent := workloadapitest.NewServer(t, authority, "/ns/demo/sa/frontend", "/ns/demo/sa/backend")
	src := must.Get(workloadapi.New(agent.Config()))(t)
	run("source", src.Run)
	h := handler(t, sdssource.FromIdentity(src), &sds.Options{Resolve: func(ctx context.Context, name string) (string, error) {
		if name == "default" {
			return "spiffe://example.org/ns/demo/sa/" + ctx.Value(callerKey{}).(string), nil
		}
		return name, nil
	}})
	for _, caller := range []string{"frontend", "backend"} {
		s := &unixsocket.Server{Path: filepath.Join(dir, caller+".sock"), Handler: h, ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, callerKey{}, caller)
		}}
		run(caller+" SDS", s.Run)
	}

	server, client, url := startMesh(t, dir,
		socketOf(serverBootstrap, "backend.sock", "DELTA_GRPC"), socketOf(clientBootstrap, "frontend.sock", "GRPC"))
	load := startLoad(t, url)

	// arrived waits until both Envoys have the identities that the agent has now, each its own.
	arrived := func() {
		t.Helper()
		for path, e := range map[string]*envoytest.Envoy{"/ns/demo/sa/frontend": client, "/ns/demo/sa/backend": server} {
			require.Eventually(t, func() bool {
				leaves, roots := e.Serials()
				all := src.SVIDs()
				i := slices.IndexFunc(all, func(svid *spiffe.SVID) bool { return svid.ID().Path() == path })
				return i >= 0 && slices.Equal(leaves, []string{envoytest.Serial(all[i].Leaf().SerialNumber)}) &&
					slices.Contains(roots, envoytest.Serial(authority.Root().SerialNumber))
			}, time.Minute, 50*time.Millisecond, path)
		}
	}
	arrived()
	for range 3 {
		changed := src.Changed()
		agent.Rotate()
		<-changed
		arrived()
	}
	agent.Drop() // it keeps crashing
	time.Sleep(time.Second)
	agent.Mend()
	authority.Rotate()
	arrived() // the new root is with both before the first identity under it
	load.wait()
	changed := src.Changed()
	agent.Rotate()
	<-changed
	arrived()

	done, failed := load.stop()
	assert.Empty(t, failed)
	assert.Greater(t, done, 50)
	for name, e := range map[string]*envoytest.Envoy{"client": client, "server": server} {
		assert.GreaterOrEqual(t, e.Stat("sds.default.update_success"), int64(5), name)
		for _, secret := range []string{"default", "ROOTCA"} {
			assert.Zero(t, e.Stat("sds."+secret+".update_rejected"), "%s: %s", name, secret)
			assert.Zero(t, e.Stat("sds."+secret+".init_fetch_timeout"), "%s: %s", name, secret)
		}
	}
	t.Logf("%d requests, each with a handshake", done)
}
