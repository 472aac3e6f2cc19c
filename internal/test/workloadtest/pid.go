package workloadtest

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// TakePID starts a process that has a PID, and sleeps until the test ends. It reports whether it could: it takes root
// on Linux, and a kernel that can checkpoint.
func TakePID(t testing.TB, pid int) bool {
	t.Helper()
	for range 200 {
		if os.WriteFile("/proc/sys/kernel/ns_last_pid", fmt.Append(nil, pid-1), 0) != nil {
			return false
		}
		cmd := exec.Command("sleep", "60")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stop := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		if cmd.Process.Pid == pid {
			t.Cleanup(stop)
			return true
		}
		stop()
	}
	return false
}
