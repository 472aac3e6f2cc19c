package main

import (
	"bytes"
	"context"
	"flag"
	"io"
	"net"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/linkerd/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/testtree"
)

var update = flag.Bool("update", false, "write the diagram and the table in README.md")

// The demo ends well, and README.md has its trace and the table of the environment.
func TestDemo(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	trace, err := demo(t.Context(), &out)
	require.NoError(t, err, out.String())
	assert.Contains(t, out.String(), ", failed 0\n")

	var table bytes.Buffer
	require.NoError(t, linkerdproxy.WriteEnviron(&table))
	testtree.Section(t, *update, "README.md", "<!-- environment -->\n", "<!-- /environment -->\n", "\n"+table.String()+"\n")
	testtree.Section(t, *update, "README.md", "```mermaid\n", "```\n", trace.Diagram())
}

// What is wrong with the flags or the environment is told before anything listens or is written.
func TestRefuses(t *testing.T) {
	t.Parallel()
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer busy.Close()
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-route", "x"}, "HOST:PORT=ADDRESS"},
		{[]string{"-route", "=127.0.0.1:1"}, "HOST:PORT=ADDRESS"},
		{[]string{"surplus"}, "surplus"},
		{[]string{"-admin", busy.Addr().String()}, "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB"},
	} {
		err := run(t.Context(), c.args, nil, io.Discard, io.Discard, nil)
		require.ErrorContains(t, err, c.want)
	}
	var help bytes.Buffer
	require.ErrorIs(t, run(t.Context(), []string{"-help"}, nil, io.Discard, &help, nil), flag.ErrHelp)
	assert.Contains(t, help.String(), "LINKERD2_PROXY_IDENTITY_STORE_DIR")
}

// A port that is taken, and a store that is missing, end the program with their reason.
func TestEnds(t *testing.T) {
	t.Parallel()
	d := &meshDemo{Trace: newTrace(io.Discard), dir: t.TempDir(), tokens: map[string]string{}}
	d.PhaseWith("test", operator, operator, "begins")
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer busy.Close()
	d.addr = busy.Addr().String()
	require.NoError(t, d.makeAuthority())
	ctx, cancel := context.WithCancel(t.Context())
	_, err = d.start(ctx, "web", "127.0.0.1:1", []string{"-admin", busy.Addr().String()})
	require.ErrorContains(t, err, "address already in use")
	cancel()
	d.wg.Wait()

	d.failed = nil
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	environ, err := d.environ(&workload{name: "voting", token: filepath.Join(d.dir, "web-token"), store: filepath.Join(d.dir, "missing")})
	require.NoError(t, err)
	err = run(ctx, []string{"-inbound", "127.0.0.1:0", "-outbound", "127.0.0.1:0", "-admin", "127.0.0.1:0"}, environ, io.Discard, io.Discard, nil)
	require.ErrorContains(t, err, "mount a folder in memory")
	require.NoFileExists(t, filepath.Join(d.dir, "missing"))
}
