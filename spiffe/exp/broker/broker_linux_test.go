package broker_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// A broker gets the identity of a process until that ends.
func TestProcess(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	dir := must.Get(os.MkdirTemp("", "b"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	workload := must.Get(workloadserver.NewHandler(ca.Source("/agent"), &workloadserver.Options{
		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
			p, err := unixsocket.ProcessFromContext(ctx)
			if err != nil {
				return nil, nil
			}
			return []workloadserver.Identity{{SVID: ca.SVID("/" + filepath.Base(p.Executable))}}, nil
		}}))(t)
	h := must.Get(broker.NewHandler(workload, broker.Options{Grant: func(id spiffe.ID) *broker.Grant {
		return &broker.Grant{References: []string{"pid"}, Namespaces: []string{"*"}, Identities: spiffe.AllowAnyPeer()}
	}}))(t)
	self := ca.Source("/agent")
	se := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: self, Allow: spiffe.AllowAnyPeer()}))(t)
	s := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: h, Serve: se.Serve}
	require.NoError(t, s.Listen())
	go s.Run(t.Context())
	own := ca.Source("/broker")
	ce := must.Get(spiffetls.New(spiffetls.Config{Self: own, Peers: own, Allow: spiffe.AllowAnyPeer()}))(t)
	c := must.Get(broker.NewClient("unix://"+filepath.Join(dir, "s"), ce))(t)
	cmd := exec.Command("sleep", "100")
	require.NoError(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	w := must.Get(c.For(broker.Reference{PID: int32(cmd.Process.Pid)}))(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	src := must.Get(workloadapi.Start(ctx, workloadapi.Config{Client: w}))(t)
	defer src.Close()
	svid := must.Get(src.SVID())(t)
	assert.Equal(t, "spiffe://example.org/sleep", svid.ID().String())
	require.NoError(t, cmd.Process.Kill())
	begin := time.Now()
	require.Eventually(t, func() bool { _, err := src.SVID(); return err != nil }, 5*time.Second, time.Millisecond)
	t.Log(time.Since(begin), must.Err(src.SVID()), src.Ready(ctx))
}
