package kube_test

import (
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/must"
)

// Close ends the connections that a Reviewer has made, as often as it is called, and does not end the Reviewer. The test runs
// itself again where the files of a pod are.
func TestClose(t *testing.T) {
	if os.Getenv("SVIDKIT_TEST_POD") == "" {
		t.Parallel()
		pod := exec.Command("/proc/self/exe", "-test.run=^TestClose$")
		pod.Env = append(os.Environ(), "SVIDKIT_TEST_POD=yes")
		pod.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
		out, err := pod.CombinedOutput()
		if os.Geteuid() != 0 && err != nil {
			t.Skipf("no pod can be made: %v", err)
		}
		require.NoError(t, err, "%s", out)
		return
	}
	require.NoError(t, syscall.Mount("none", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""))
	require.NoError(t, syscall.Mount("tmpfs", "/var/run", "tmpfs", 0, ""))
	var open atomic.Int64
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","status":{"authenticated":false}}`)
	}))
	srv.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			open.Add(1)
		case http.StateClosed:
			open.Add(-1)
		}
	}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	const files = "/var/run/secrets/kubernetes.io/serviceaccount"
	require.NoError(t, os.MkdirAll(files, 0o755))
	for name, text := range map[string]string{
		"token": "of-this-program", "namespace": "prod", "ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(files, name), []byte(text), 0o600))
	}
	r := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: srv.URL}))(t)
	for i := range 2 {
		_, err := r.Review(t.Context(), fmt.Sprint("sesame", i), []string{"a"})
		require.ErrorIs(t, err, kube.ErrNotAuthenticated)
		require.EqualValues(t, 1, open.Load(), "it is kept")
		require.NoError(t, r.Close())
		require.NoError(t, r.Close())
		require.Eventually(t, func() bool { return open.Load() == 0 }, time.Minute, time.Millisecond)
	}
}
