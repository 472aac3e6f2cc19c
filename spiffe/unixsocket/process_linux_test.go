package unixsocket_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// TestPeerProcess runs as another process if its variable is set: it connects, asks twice, and in between waits for a line.
const peerSocket = "UNIXSOCKET_PEER"

func TestPeerProcess(t *testing.T) {
	path := os.Getenv(peerSocket)
	if path == "" {
		t.Skip("it is a part of TestProcess")
	}
	c, err := net.Dial("unix", path)
	require.NoError(t, err)
	fmt.Println("connected")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	// The connection outlives this process in the one that it becomes.
	f, err := c.(*net.UnixConn).File()
	require.NoError(t, err)
	_, _, errno := syscall.Syscall(syscall.SYS_FCNTL, f.Fd(), syscall.F_SETFD, 0)
	require.Zero(t, errno)
	require.NoError(t, syscall.Exec("/bin/sleep", []string{"sleep", "60"}, os.Environ()))
}

// asked is a server that says of each connection what the kernel says of its process, when it is asked.
func asked(t *testing.T) (path string, contexts <-chan context.Context) {
	dir, err := os.MkdirTemp("", "process")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	found := make(chan context.Context, 10)
	s := &unixsocket.Server{
		Path: filepath.Join(dir, "s"), Handler: http.NotFoundHandler(),
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context { found <- ctx; return ctx },
	}
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return s.Path, found
}

// peer starts a copy of this test as another process that has connected; what it runs next, and its end, are up to the caller.
func peer(t *testing.T, program, path string) (cmd *exec.Cmd, next io.Writer) {
	cmd = exec.Command(program, "-test.run=^TestPeerProcess$")
	cmd.Env = append(os.Environ(), peerSocket+"="+path)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "connected\n", line)
	return cmd, in
}

// A process is told by its program and its control group while it lives, and as what it is by now: another program after
// execve, and nothing once its file was replaced, or it has ended.
func TestProcess(t *testing.T) {
	t.Parallel()
	path, contexts := asked(t)
	self, err := os.Executable()
	require.NoError(t, err)
	copied := filepath.Join(filepath.Dir(path), "web") // so that it can be replaced
	data, err := os.ReadFile(self)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(copied, data, 0o700))

	cmd, next := peer(t, copied, path)
	ctx := <-contexts
	p, err := unixsocket.ProcessFromContext(ctx)
	require.NoError(t, err)
	assert.Equal(t, copied, p.Executable)
	groups, err := os.ReadFile("/proc/self/cgroup")
	require.NoError(t, err)
	assert.Equal(t, unixsocket.UnitOf(string(groups)), p.Unit)
	assert.Equal(t, unixsocket.PodOf(string(groups)), p.Pod)

	// Another file at the path is not what runs, as in another mount namespace; nor is a deleted one.
	require.NoError(t, os.Rename(copied, copied+" (deleted)"))
	require.NoError(t, os.Remove(copied+" (deleted)"))
	require.NoError(t, os.WriteFile(copied, data, 0o700))
	require.NoError(t, os.WriteFile(copied+" (deleted)", data, 0o700))
	p, err = unixsocket.ProcessFromContext(ctx)
	require.NoError(t, err)
	assert.Empty(t, p.Executable)

	_, err = io.WriteString(next, "\n")
	require.NoError(t, err)
	sleep, err := filepath.EvalSymlinks("/bin/sleep")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		p, err := unixsocket.ProcessFromContext(ctx)
		return err == nil && p.Executable == sleep
	}, time.Minute, 10*time.Millisecond, "it has become another program, in the same process")

	require.NoError(t, cmd.Process.Kill())
	require.Eventually(t, func() bool { // a zombie at first, which has no program
		_, err := unixsocket.ProcessFromContext(ctx)
		return err != nil
	}, time.Minute, 10*time.Millisecond)
	_ = cmd.Wait()
	_, err = unixsocket.ProcessFromContext(ctx)
	require.ErrorContains(t, err, fmt.Sprintf("process %d", cmd.Process.Pid))
	_, err = unixsocket.ProcessFromContext(t.Context())
	require.Error(t, err, "no connection")
}

// A process that has ended before its connection was accepted is told from another one that has taken its PID since.
func TestProcessThatEndedBeforeAccept(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "process")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	defer l.Close()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd, _ := peer(t, self, path)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	taken := take(t, cmd.Process.Pid)
	c, err := l.Accept()
	require.NoError(t, err)
	defer c.Close()
	ctx := unixsocket.ConnContext(t.Context(), c)
	_, known := unixsocket.PeerFromContext(ctx)
	require.True(t, known)
	_, err = unixsocket.ProcessFromContext(ctx)
	require.Error(t, err)
	if !taken {
		t.Skip("no other process could be given that PID: it takes root, and a kernel that can checkpoint")
	}
}

// take starts a process with the PID, if it can.
func take(t *testing.T, pid int) bool {
	for range 200 {
		if os.WriteFile("/proc/sys/kernel/ns_last_pid", fmt.Append(nil, pid-1), 0) != nil {
			return false
		}
		cmd := exec.Command("/bin/sleep", "60")
		require.NoError(t, cmd.Start())
		stop := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		if cmd.Process.Pid == pid {
			t.Cleanup(stop)
			return true
		}
		stop()
	}
	return false
}

// The unit is the outermost of systemd, and the pod is of the kubelet: what a service, a user or a container can name itself
// does not count.
func TestUnitAndPod(t *testing.T) {
	t.Parallel()
	const uid, other = "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22", "11111111-2a49-4a8e-8f6c-2d7b6f0a1c22"
	hex := strings.Repeat("ab", 32)
	for groups, want := range map[string][2]string{
		"0::/system.slice/web.service":                                                  {"web.service", ""},
		"0::/system.slice/system-web.slice/web@1.service/worker":                        {"web@1.service", ""},
		"0::/system.slice/web.service/evil.service":                                     {"web.service", ""},
		"0::/user.slice/user-1000.slice/session-3.scope":                                {"session-3.scope", ""},
		"0::/user.slice/user-1000.slice/user@1000.service/app.slice/web.service":        {"user@1000.service", ""},
		"3:memory:/system.slice/evil.service\n1:name=systemd:/system.slice/web.service": {"web.service", ""},
		"1:name=systemd:/system.slice/web.service\n0::/system.slice/evil.service":       {"web.service", ""},
		"0::/":                             {"", ""},
		"0::/../other.service":             {"", ""},
		"0::/docker/" + hex + "/a.service": {"", ""},
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice/cri-containerd-" + hex + ".scope": {"cri-containerd-" + hex + ".scope", uid},
		"0::/kubepods/besteffort/pod" + uid + "/" + hex:                                                                {"", uid},
		"0::/../../kubepods-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice/" + hex:                                 {"", uid},
		"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice": {"", uid},
		"4:memory:/kubepods/pod" + uid + "/" + hex + "\n3:cpu:/kubepods/pod" + uid + "/" + hex:                         {"", uid},
		"4:memory:/kubepods/pod" + uid + "\n3:cpu:/kubepods/pod" + other:                                               {"", ""},
		"0::/kubepods/pod" + uid + "/kubepods/pod" + other:                                                             {"", uid},
		"0::/system.slice/web.service/kubepods/pod" + uid:                                                              {"web.service", ""},
		"0::/user.slice/user-1000.slice/kubepods/pod" + uid:                                                            {"", ""},
		"0::/pod" + uid:                                                       {"", ""},
		"0::/lxc.payload.a/kubepods/pod" + uid:                                {"", ""}, // which a container may make
		"0::/docker/" + hex + "/kubepods/pod" + uid:                           {"", ""},
		"0::/../user.slice/user-1000.slice/kubepods.slice/pod" + uid:          {"", ""},
		"0::/../../user@1000.service/kubepods/pod" + uid:                      {"", ""},
		"0::/user.slice/user-1000.slice/user@1000.service/kubepods/pod" + uid: {"user@1000.service", ""},
		"0::/kubepods/pod" + uid + "a":                                        {"", ""},
	} {
		assert.Equal(t, want[0], unixsocket.UnitOf(groups), "unit in %s", groups)
		assert.Equal(t, want[1], unixsocket.PodOf(groups), "pod in %s", groups)
	}
}
