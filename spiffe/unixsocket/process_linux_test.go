package unixsocket_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"io/fs"
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

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// TestPeerProcess runs as another process if its variable is set: it connects, asks twice, and in between waits for a line.
const peerSocket = "UNIXSOCKET_PEER"

func TestPeerProcess(t *testing.T) {
	path := os.Getenv(peerSocket)
	if path == "" {
		t.Skip("it is a part of TestProcess")
	}
	c := must.Get(net.Dial("unix", path))(t)
	fmt.Println("connected")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	// The connection outlives this process in the one that it becomes.
	_, _, errno := syscall.Syscall(syscall.SYS_FCNTL, must.Get(c.(*net.UnixConn).File())(t).Fd(), syscall.F_SETFD, 0)
	require.Zero(t, errno)
	require.NoError(t, syscall.Exec("/bin/sleep", []string{"sleep", "60"}, os.Environ()))
}

// asked is a server that says of each connection what the kernel says of its process, when it is asked.
func asked(t *testing.T) (path string, contexts <-chan context.Context) {
	found := make(chan context.Context, 10)
	path = filepath.Join(socketDir(t), "s")
	serve(t, &unixsocket.Server{
		Path: path, Handler: http.NotFoundHandler(),
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context { found <- ctx; return ctx },
	})
	return path, found
}

// peer starts a copy of this test as another process that has connected; what it runs next, and its end, are up to the caller.
func peer(t *testing.T, program, path string) (cmd *exec.Cmd, next io.Writer) {
	cmd = exec.Command(program, "-test.run=^TestPeerProcess$")
	cmd.Env = append(os.Environ(), peerSocket+"="+path)
	in := must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	require.Equal(t, "connected\n", must.Get(bufio.NewReader(out).ReadString('\n'))(t))
	return cmd, in
}

// A process is told by its program and its control group while it lives, and as what it is by now: another program after
// execve, and nothing once its file was replaced, or it has ended.
func TestProcess(t *testing.T) {
	t.Parallel()
	path, contexts := asked(t)
	self := must.Get(os.Executable())(t)
	copied := filepath.Join(filepath.Dir(path), "web") // so that it can be replaced
	data := must.Get(os.ReadFile(self))(t)
	require.NoError(t, os.WriteFile(copied, data, 0o700))

	cmd, next := peer(t, copied, path)
	ctx := <-contexts
	p := must.Get(unixsocket.ProcessFromContext(ctx))(t)
	assert.Equal(t, copied, p.Executable)
	groups := must.Get(os.ReadFile("/proc/self/cgroup"))(t)
	assert.Equal(t, unixsocket.UnitOf(string(groups)), p.Unit)
	assert.Equal(t, unixsocket.PodOf(string(groups)), p.Pod)

	// Another file at the path is not what runs, as in another mount namespace; nor is a deleted one.
	require.NoError(t, os.Rename(copied, copied+" (deleted)"))
	require.NoError(t, os.Remove(copied+" (deleted)"))
	require.NoError(t, os.WriteFile(copied, data, 0o700))
	require.NoError(t, os.WriteFile(copied+" (deleted)", data, 0o700))
	p = must.Get(unixsocket.ProcessFromContext(ctx))(t)
	assert.Empty(t, p.Executable)

	must.Get(io.WriteString(next, "\n"))(t)
	sleep := must.Get(filepath.EvalSymlinks("/bin/sleep"))(t)
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
	require.ErrorContains(t, must.Err(unixsocket.ProcessFromContext(ctx)), fmt.Sprintf("process %d", cmd.Process.Pid))
	require.Error(t, must.Err(unixsocket.ProcessFromContext(t.Context())), "no connection")
}

// A process that has ended before its connection was accepted is told from another one that has taken its PID since.
func TestProcessThatEndedBeforeAccept(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	l := must.Get(net.Listen("unix", path))(t)
	defer l.Close()
	cmd, _ := peer(t, must.Get(os.Executable())(t), path)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	taken := workloadtest.TakePID(t, cmd.Process.Pid)
	c := must.Get(l.Accept())(t)
	defer c.Close()
	ctx := unixsocket.ConnContext(t.Context(), c)
	_, known := unixsocket.PeerFromContext(ctx)
	require.True(t, known)
	require.Error(t, must.Err(unixsocket.ProcessFromContext(ctx)))
	if !taken {
		t.Skip("no other process could be given that PID: it takes root, and a kernel that can checkpoint")
	}
}

// In the context of a request, another process takes the place of the caller, until it ends.
func TestWithProcess(t *testing.T) {
	t.Parallel()
	path, contexts := asked(t)
	copied := filepath.Join(filepath.Dir(path), "web) Z (1") // as its own line of /proc/PID/stat has it
	self := must.Get(os.Executable())(t)
	require.NoError(t, os.WriteFile(copied, must.Get(os.ReadFile(self))(t), 0o700))
	cmd, _ := peer(t, copied, path)
	theirs := <-contexts
	defer must.Get(net.Dial("unix", path))(t).Close()
	ours := <-contexts
	with := func(ctx context.Context, pid int) error { return must.Err(unixsocket.WithProcess(ctx, int32(pid))) }

	ctx := must.Get(unixsocket.WithProcess(ours, int32(cmd.Process.Pid)))(t)
	found, known := unixsocket.PeerFromContext(ctx)
	require.True(t, known)
	want := unixsocket.Peer{PID: int32(cmd.Process.Pid), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	assert.Equal(t, want, found)
	assert.Equal(t, copied, must.Get(unixsocket.ProcessFromContext(ctx))(t).Executable)
	assert.Equal(t, self, must.Get(unixsocket.ProcessFromContext(ours))(t).Executable, "it was and is the caller")
	nobody := must.Get(unixsocket.WithProcess(ours, 0))(t)
	_, known = unixsocket.PeerFromContext(nobody)
	assert.False(t, known)
	require.Error(t, must.Err(unixsocket.ProcessFromContext(nobody)))
	for _, none := range []int{-1, 1<<31 - 1} {
		require.ErrorIs(t, with(ours, none), fs.ErrNotExist)
	}
	for _, stranger := range []context.Context{t.Context(), nobody} {
		require.ErrorIs(t, with(stranger, os.Getpid()), fs.ErrInvalid)
	}
	require.NoError(t, with(theirs, os.Getpid()))

	require.NoError(t, ctx.Err())
	require.NoError(t, cmd.Process.Kill())
	select {
	case <-ctx.Done():
	case <-time.After(time.Minute):
		t.Fatal("the process has ended, and its context has not")
	}
	require.ErrorIs(t, context.Cause(ctx), fs.ErrNotExist)
	require.Error(t, must.Err(unixsocket.ProcessFromContext(ctx)))
	require.ErrorIs(t, with(ours, cmd.Process.Pid), fs.ErrNotExist, "a zombie")
	require.ErrorIs(t, with(theirs, os.Getpid()), fs.ErrInvalid, "of a caller that has ended")
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

// The socket of a server whose queue is full is in use.
func TestBusyServer(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	open := func() int {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _ = syscall.Close(fd) })
		return fd
	}
	server := open()
	require.NoError(t, syscall.Bind(server, &syscall.SockaddrUnix{Name: path}))
	require.NoError(t, syscall.Listen(server, 1))
	for i := 0; ; i++ {
		err := syscall.Connect(open(), &syscall.SockaddrUnix{Name: path})
		if err == syscall.EAGAIN {
			break
		}
		require.NoError(t, err)
		require.Less(t, i, 100, "the queue has no end")
	}
	require.ErrorIs(t, (&unixsocket.Server{Path: path, Handler: says("")}).Listen(), unixsocket.ErrInUse)
	require.NotZero(t, mode(t, path), "it is still there")
}

// A second user whose connections are refused is seen in the log.
func TestRefusedUsersAreNamed(t *testing.T) {
	t.Parallel()
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var log lines
	serve(t, &unixsocket.Server{Listener: inner, Handler: says("hello"), Logger: log.logger(), MaxConnsPerUser: 1})
	for _, from := range []string{"127.0.0.2", "127.0.0.3"} {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		for i := range 3 {
			c := must.Get(d.Dial("tcp", inner.Addr().String()))(t)
			t.Cleanup(func() { _ = c.Close() })
			if i > 0 {
				require.True(t, cut(c, 5*time.Second))
			}
		}
	}
	refused := log.with("closed at once")
	require.Len(t, refused, 2)
	assert.Contains(t, refused[0], "peer=127.0.0.2:")
	assert.Contains(t, refused[1], "peer=127.0.0.3:")
}
