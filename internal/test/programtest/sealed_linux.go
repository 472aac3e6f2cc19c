package programtest

import (
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
)

const sealed = "SVIDKIT_SEALED" // the name of the test that the process is for

// Sealed runs the test that calls it in a process of its own, where it reports true. In the process of the caller it
// reports false, after the test has passed there.
func Sealed(t *testing.T) bool {
	t.Helper()
	if os.Getenv(sealed) == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), sealed+"="+t.Name())
	out, err := cmd.CombinedOutput()
	if testing.CoverMode() != "" { // which writes files at the end, and may not
		err = nil
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("in a process of its own: %v\n%s", err, out)
	}
	return false
}

// Seal has the test fail if this process, from now on, writes to a file, of any name, that is longer than limit bytes
// then. The kernel tells, so an error that is ignored hides none.
func Seal(t testing.TB, limit int) {
	t.Helper()
	written := make(chan os.Signal, 1)
	signal.Notify(written, syscall.SIGXFSZ)
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: uint64(limit),
		Max: uint64(limit)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		signal.Stop(written) // what is on its way arrives before
		select {
		case <-written:
			t.Errorf("a file of more than %d bytes was written", limit)
		default:
		}
	})
}
