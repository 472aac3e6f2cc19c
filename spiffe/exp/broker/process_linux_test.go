package broker_test

import (
	"context"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// start starts a process that sleeps, which is killed and waited for when the test ends.
func start(t testing.TB, edit ...func(*exec.Cmd)) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	for _, e := range edit {
		e(cmd)
	}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

// program is the name of the program of start, which may be one of many in one file.
func program(t testing.TB) string {
	path := must.Get(filepath.EvalSymlinks(must.Get(exec.LookPath("sleep"))(t)))(t)
	return "/" + filepath.Base(path)
}

func pid(cmd *exec.Cmd) broker.Reference { return broker.Reference{PID: int32(cmd.Process.Pid)} }

// elsewhere has a command run in a new PID namespace, or ends the test if that is not permitted.
func elsewhere(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	if os.Geteuid() != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWUSER}
	} else {
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	}
	try := exec.Command("true")
	try.SysProcAttr = cmd.SysProcAttr
	if err := try.Run(); err != nil {
		t.Skip("no PID namespace can be made here: ", err)
	}
}

// kill kills a process, which then waits for its parent, and returns how long its source goes on.
func kill(t testing.TB, cmd *exec.Cmd, s *workloadapi.Source) time.Duration {
	t.Helper()
	changed := s.Changed()
	require.NoError(t, cmd.Process.Kill())
	require.Eventually(t, func() bool {
		stat, _ := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
		return strings.Contains(string(stat), ") Z ")
	}, patient, time.Millisecond)
	begin := time.Now()
	select {
	case <-changed:
	case <-time.After(patient):
		t.Fatal("the stream goes on")
	}
	return time.Since(begin)
}

// A process is what the kernel says about it, and not about the broker. Its end, though its parent does not know yet,
// ends its streams, within a second, and no others.
func TestProcess(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-14", "BRK-19", "BRK-23", "BRK-24")
	h := newHub(t)
	h.serve(nil)
	c := h.client(h.ca.Source("/broker"))
	as := func(cmd *exec.Cmd) {
		if os.Geteuid() == 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}
	}
	one, two := start(t, as), start(t)
	first, second := ready(t, c, pid(one)), ready(t, c, pid(two))
	assert.Equal(t, program(t), pathOf(first))
	users := []uint32{uint32(os.Geteuid()), uint32(os.Geteuid())}
	if os.Geteuid() == 0 {
		users[0] = 65534
	}
	h.set(func() { assert.Equal(t, users, h.users) })
	tokens := must.Get(c.For(pid(one)))(t)
	must.Get(tokens.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db"))(t)

	took := kill(t, one, first)
	require.ErrorIs(t, must.Err(first.SVID()), broker.ErrEnded)
	require.ErrorIs(t, must.Err(tokens.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db")), broker.ErrEnded)
	require.ErrorIs(t, must.Err(c.For(pid(one))), fs.ErrNotExist)
	_, code, reason := h.first(h.raw("/broker"), svids, process(one.Process.Pid))
	assert.Equal(t, notFound, code, "a zombie")
	assert.Equal(t, unknown, reason)

	changed := second.Changed()
	h.set(func() { h.svids = make(map[string]*spiffe.SVID) })
	<-changed
	assert.Equal(t, program(t), pathOf(second), "the stream of another workload goes on")
	assert.EqualValues(t, 2, h.conns.Load(), "one of the client, one by hand")
	for i := 0; i < 10 && took >= time.Second; i++ { // this machine may be busy
		cmd := start(t)
		took = min(took, kill(t, cmd, ready(t, c, pid(cmd))))
	}
	t.Log("the stream ended after ", took)
	assert.Less(t, took, time.Second)
}

// A PID names no workload if it is that of a thread, of nothing, or of a process that has ended.
func TestNoProcess(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-14")
	h := newHub(t)
	h.serve(nil)
	c, raw := h.client(h.ca.Source("/broker")), h.raw("/broker")
	gone := exec.Command("true")
	require.NoError(t, gone.Run())
	thread := 0
	for _, task := range must.Get(os.ReadDir("/proc/self/task"))(t) {
		if id := must.Get(strconv.Atoi(task.Name()))(t); id != os.Getpid() {
			thread = id
		}
	}
	require.NotZero(t, thread)
	_, code, _ := h.first(raw, svids, process(os.Getpid()))
	require.Equal(t, workloadtest.OK, code)
	for _, pid := range []int{thread, gone.Process.Pid, 1<<31 - 1} {
		_, code, reason := h.first(raw, svids, process(pid))
		assert.Equal(t, notFound, code, pid)
		assert.Equal(t, unknown, reason, pid)
	}
	require.ErrorIs(t, must.Err(c.For(pid(gone))), fs.ErrNotExist)
}

// A process in another PID namespace is named by the PID that it has in that of the server.
func TestProcessElsewhere(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	h.serve(nil)
	cmd := start(t, func(cmd *exec.Cmd) { elsewhere(t, cmd) })
	s := ready(t, h.client(h.ca.Source("/broker")), pid(cmd))
	assert.Equal(t, program(t), pathOf(s))
	changed := s.Changed()
	require.NoError(t, cmd.Process.Kill())
	<-changed
	require.ErrorIs(t, must.Err(s.SVID()), broker.ErrEnded)
}

// A broker in another PID namespace means other processes than the server by its PIDs, and so does one that comes by
// TCP, from another machine perhaps.
func TestBrokerElsewhere(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-14", "BRK-18")
	sleeps := start(t)
	self := must.Get(os.Executable())(t)
	for _, where := range []string{"here", "elsewhere", "tcp"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			h := newHub(t)
			if where == "tcp" {
				h.serve(must.Get(net.Listen("tcp", "127.0.0.1:0"))(t))
			} else {
				h.serve(nil)
				fds := must.Get(syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0))(t)
				mine, theirs := os.NewFile(uintptr(fds[0]), ""), os.NewFile(uintptr(fds[1]), "")
				cmd := exec.Command(self)
				if where == "elsewhere" {
					elsewhere(t, cmd)
				}
				cmd.Env = append(os.Environ(), relaySocket+"="+strings.TrimPrefix(h.address, "unix://"))
				cmd.Stdin, cmd.Stdout = theirs, theirs
				require.NoError(t, cmd.Start())
				_ = theirs.Close()
				conn := must.Get(net.FileConn(mine))(t)
				_ = mine.Close()
				t.Cleanup(func() { _ = conn.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
				h.set(func() { h.way = func(context.Context, string, string) (net.Conn, error) { return conn, nil } })
			}
			_, code, reason := h.first(h.raw("/broker"), svids, process(sleeps.Process.Pid))
			if where == "here" {
				assert.Equal(t, workloadtest.OK, code)
				return
			}
			assert.Equal(t, workloadtest.InvalidArgument, code)
			assert.Equal(t, invalid, reason)
			h.set(func() { assert.Empty(t, h.users) })
		})
	}
}

// A PID that another process has by now is never the old workload, neither for the server nor for a client that calls
// again after an outage of the server.
func TestReusedPID(t *testing.T) {
	conformance.Covers(t, "BRK-14", "BRK-19")
	h := newHub(t)
	h.serve(nil)
	c := h.client(h.ca.Source("/broker"))
	cmd := start(t)
	old := pid(cmd)
	s := ready(t, c, old)
	tokens := must.Get(c.For(old))(t)
	open := h.call(h.raw("/broker"), svids, process(cmd.Process.Pid))
	require.NotNil(t, open.Receive())
	h.taken()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !workloadtest.TakePID(t, cmd.Process.Pid) {
		t.Skip("no other process could be given that PID: it takes root, and a kernel that can checkpoint")
	}
	code, _ := refused(open)
	assert.Equal(t, notFound, code)
	require.Eventually(t, func() bool { return must.Err(s.SVID()) != nil }, patient, time.Millisecond)
	require.ErrorIs(t, must.Err(s.SVID()), broker.ErrEnded)
	require.ErrorIs(t, must.Err(tokens.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db")), broker.ErrEnded)
	assert.Empty(t, h.taken(), "what has ended is not asked for")
	assert.Equal(t, program(t), pathOf(ready(t, c, old)), "the other process is a workload, too")
}
