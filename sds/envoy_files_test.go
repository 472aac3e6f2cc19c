package sds_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// TestEnvoyOfFiles gives two Envoys their certificates and roots by the names file-cert: and file-root:, from volumes as
// Kubernetes makes them, and has them speak mTLS to each other while both are swapped, and while files are missing.
func TestEnvoyOfFiles(t *testing.T) {
	t.Parallel()
	dir := envoytest.Dir(t)
	run := background(t)

	authority := spiffetest.NewCA(t, "example.org")
	files := must.Get(sdssource.NewFiles(sdssource.FilesConfig{Allow: []string{filepath.Join(dir, "frontend"), filepath.Join(dir, "backend")}}))(t)
	run("files", files.Run)
	src := must.Get(sdssource.Mux(map[string]sds.Source{"file-cert:*": files, "file-root:*": files}))(t)
	s := &unixsocket.Server{Path: filepath.Join(dir, "sds.sock"), Handler: handler(t, src, nil)}
	run("SDS", s.Run)

	// swap puts a new certificate and the roots into the volume of a workload, as the kubelet does.
	swaps := 0
	swap := func(workload string) *spiffe.SVID {
		t.Helper()
		swaps++
		svid := authority.SVID("/ns/demo/sa/" + workload)
		certs, key, err := svid.MarshalPEM()
		require.NoError(t, err)
		at, version := filepath.Join(dir, workload), fmt.Sprintf("..2026_01_02_15_04_05.%09d", swaps)
		require.NoError(t, os.MkdirAll(filepath.Join(at, version), 0o755))
		for name, data := range map[string][]byte{"tls.crt": certs, "tls.key": key, "ca.crt": authority.Bundle().MarshalPEM()} {
			require.NoError(t, os.WriteFile(filepath.Join(at, version, name), data, 0o644))
			_ = os.Symlink(filepath.Join("..data", name), filepath.Join(at, name)) // there is one from the second time on
		}
		before, _ := os.Readlink(filepath.Join(at, "..data"))
		require.NoError(t, os.Symlink(version, filepath.Join(at, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(at, "..data_tmp"), filepath.Join(at, "..data")))
		if before != "" {
			require.NoError(t, os.RemoveAll(filepath.Join(at, before)))
		}
		return svid
	}
	names := func(workload string) (cert, root string) {
		at := filepath.Join(dir, workload)
		return "file-cert:" + at + "/tls.crt~" + at + "/tls.key", "file-root:" + at + "/ca.crt"
	}
	fill := func(bootstrap, workload, api string) string {
		cert, root := names(workload)
		return strings.NewReplacer("name: default", "name: "+cert, "{name: ROOTCA,", `{name: "`+root+`",`).Replace(
			socketOf(bootstrap, "sds.sock", api))
	}
	svids := map[string]*spiffe.SVID{"frontend": swap("frontend"), "backend": swap("backend")}
	server, client, url := startMesh(t, dir, fill(serverBootstrap, "backend", "DELTA_GRPC"), fill(clientBootstrap, "frontend", "GRPC"))
	load := startLoad(t, url)
	envoys := map[string]*envoytest.Envoy{"frontend": client, "backend": server}

	// arrived waits until both Envoys have what is in the files.
	arrived := func() {
		t.Helper()
		for workload, e := range envoys {
			require.Eventually(t, func() bool {
				leaves, roots := e.Serials()
				return slices.Equal(leaves, []string{envoytest.Serial(svids[workload].Leaf().SerialNumber)}) &&
					slices.Contains(roots, envoytest.Serial(authority.Root().SerialNumber))
			}, time.Minute, 50*time.Millisecond, workload)
		}
	}
	arrived()
	for n := range 4 {
		if n == 2 { // new roots first, everywhere, and then leaves under them
			authority.Prepare()
			for workload := range envoys {
				svids[workload] = swap(workload)
			}
			arrived()
			load.wait()
			authority.Rotate()
		}
		for workload := range envoys {
			svids[workload] = swap(workload)
		}
		arrived()
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "backend", "tls.key")))
	require.NoError(t, os.Remove(filepath.Join(dir, "frontend", "ca.crt")))
	require.Eventually(t, func() bool {
		refused := 0
		for _, u := range files.Report().Upstreams {
			if u.Err != nil && u.OK {
				refused++
			}
		}
		return refused == 2
	}, time.Minute, 10*time.Millisecond)
	time.Sleep(500 * time.Millisecond)
	arrived()
	for workload := range envoys {
		svids[workload] = swap(workload)
	}
	arrived()

	done, failed := load.stop()
	assert.Empty(t, failed)
	assert.Greater(t, done, 50)
	for workload, e := range envoys {
		cert, root := names(workload)
		for _, name := range []string{cert, root} {
			stat := "sds." + strings.ReplaceAll(name, ":/", "_")
			assert.Positive(t, e.Stat(stat+".update_success"), stat)
			assert.Zero(t, e.Stat(stat+".update_rejected"), stat)
			assert.Zero(t, e.Stat(stat+".init_fetch_timeout"), stat)
		}
	}
	t.Logf("%d requests, each with a handshake, over %d swaps", done, swaps)
}
