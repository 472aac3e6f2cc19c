package peers

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A Process is a program that was started.
type Process struct {
	cmd    *exec.Cmd
	log    string
	done   chan struct{} // closed when it has ended
	killed bool          // so that another one has written to the log since
}

// Start starts a program, which ends with the test at the latest. What it prints is appended to the file log, and the
// end of that is in the output of a test that fails.
func Start(t testing.TB, log string, cmd *exec.Cmd) *Process {
	return start(t, log, cmd, func() error { return nil })
}

// start starts a program in a thread that prepare has changed.
func start(t testing.TB, log string, cmd *exec.Cmd, prepare func() error) *Process {
	t.Helper()
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	defer out.Close() // the program has it, too
	if cmd.Stdout == nil {
		cmd.Stdout = out
	}
	cmd.Stderr = out
	p := &Process{cmd: cmd, log: log, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The program dies with this process where the system can do that, which takes the thread for the process. The
		// thread ends with the goroutine, as prepare may have changed it.
		runtime.LockOSThread()
		dieWithParent(cmd)
		err := prepare()
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended does not matter
			close(p.done)
		}
	}()
	require.NoError(t, <-started)
	t.Cleanup(func() {
		if t.Failed() && !p.killed { // before it says at length that it ends
			t.Logf("the end of what %s printed:\n%s", cmd.Path, tailOf(log))
		}
		p.Stop()
	})
	return p
}

// PID returns the ID of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends a signal to the program.
func (p *Process) Signal(t testing.TB, s os.Signal) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(s))
}

// Ended returns a channel that is closed when the program has ended.
func (p *Process) Ended() <-chan struct{} { return p.done }

// Kill ends the program without a chance to clean up, and waits for its end.
func (p *Process) Kill() {
	p.killed = true
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
}

// Stop asks the program to end, and kills it if it does not within five seconds.
func (p *Process) Stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.done:
	case <-time.After(5 * time.Second):
		p.Kill()
	}
}

// Ready waits up to two minutes until check returns nil. The test fails if the program ends before that.
func (p *Process) Ready(t testing.TB, check func() error) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-p.done:
			t.Fatalf("%s has ended:\n%s", p.cmd.Path, tailOf(p.log))
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(end) {
			t.Fatalf("%s is not ready: %v", p.cmd.Path, err)
		}
	}
}

// FreePorts returns ports of 127.0.0.1 that were free a moment ago, and that no system gives to connections.
func FreePorts(t testing.TB, n int) []int {
	t.Helper()
	var ports []int
	for range 1000 {
		port := 20_000 + rand.IntN(12_000)
		l, err := net.Listen("tcp", loopback(port))
		if err != nil {
			continue
		}
		defer l.Close() // at the end, so that all of them differ
		if ports = append(ports, port); len(ports) == n {
			return ports
		}
	}
	t.Fatal("no ports are free")
	return nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func listenURL(port int) string { return fmt.Sprint("http://", loopback(port)) }
