package peers

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// StartIsolated is [Start] in a network namespace of its own, which has a loopback device and nothing else: for
// programs that listen on all addresses. It also returns a listener on a port of 127.0.0.1 in that namespace, which is
// closed when the test ends. Where the system does not allow namespaces, the test skips, even where peers are
// required, as nothing can be installed to change that.
func StartIsolated(t testing.TB, log string, cmd *exec.Cmd, port int) (*Process, net.Listener) {
	t.Helper()
	allowed(t, syscall.CLONE_NEWNET)
	var l net.Listener
	p := start(t, log, cmd, func() (err error) {
		if err := isolate(""); err != nil {
			return err
		}
		l, err = net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		return err
	})
	t.Cleanup(func() { _ = l.Close() }) // its server may have closed it
	return p, l
}

// StartContainer is [StartIsolated] for a program in a pod with an IPv4 address. Files and directories are mounted for
// it: binds has them by the places where it sees them.
func StartContainer(t testing.TB, log string, cmd *exec.Cmd, address string, port int, binds map[string]string) (
	*Process, net.Listener) {
	t.Helper()
	allowed(t, syscall.CLONE_NEWNET)
	allowed(t, syscall.CLONE_NEWNS)
	var l net.Listener
	p := start(t, log, cmd, func() (err error) {
		if err := isolate(address); err != nil {
			return err
		}
		if l, err = net.Listen("tcp", loopback(port)); err != nil {
			return err
		}
		err = cmp.Or(syscall.Unshare(syscall.CLONE_NEWNS), syscall.Mount("", "/", "",
			syscall.MS_REC|syscall.MS_PRIVATE, ""))
		for at, file := range binds {
			err = cmp.Or(err, syscall.Mount(file, at, "", syscall.MS_BIND, ""))
		}
		return err
	})
	t.Cleanup(func() { _ = l.Close() }) // its server may have closed it
	return p, l
}

// isolate gives the thread a network namespace with a loopback device, which has another address, too, unless that is
// empty.
func isolate(address string) error {
	if err := syscall.Unshare(syscall.CLONE_NEWNET); err != nil {
		return err
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("set the loopback device up: %w", err)
	}
	if address == "" {
		return nil
	}
	request := struct { // ifreq
		name [16]byte
		addr unix.RawSockaddrInet4
		_    [8]byte
	}{name: [16]byte{'l', 'o', ':', '1'}, addr: unix.RawSockaddrInet4{Family: unix.AF_INET,
		Addr: netip.MustParseAddr(address).As4()}}
	return ioctl(syscall.SIOCSIFADDR, unsafe.Pointer(&request))
}

// Dial connects to an address in the network namespace of the program.
func (p *Process) Dial(network, address string) (conn net.Conn, err error) {
	err = p.enter(func() (err error) {
		conn, err = net.DialTimeout(network, address, 10*time.Second)
		return err
	})
	return conn, err
}

// Listen listens at an address in the network namespace of the program.
func (p *Process) Listen(network, address string) (l net.Listener, err error) {
	err = p.enter(func() (err error) {
		l, err = net.Listen(network, address)
		return err
	})
	return l, err
}

// Exec runs another program in the network namespace of the program, as a hook of a pod is run.
func (p *Process) Exec(cmd *exec.Cmd) (out []byte, err error) {
	err = p.enter(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	return out, err
}

// enter calls do in the network namespace of the program.
func (p *Process) enter(do func() error) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", p.cmd.Process.Pid))
	if err != nil {
		return err
	}
	defer namespace.Close() // only read
	done := make(chan error)
	go func() { // in a thread that ends with the goroutine
		runtime.LockOSThread()
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter the namespace: %w", err)
			return
		}
		done <- do()
	}()
	return <-done
}

// StartInPod is [Start] with what a pod has to call the API server of c: the two variables, and the files of the
// account in account, a directory of the caller's, where a pod has them. Where the system does not allow that, the
// test skips, as with [StartIsolated].
func StartInPod(t testing.TB, log string, cmd *exec.Cmd, c *Cluster, account string) *Process {
	t.Helper()
	allowed(t, syscall.CLONE_NEWNS)
	u, err := url.Parse(c.URL)
	require.NoError(t, err)
	cmd.Env = append(cmd.Environ(), "KUBERNETES_SERVICE_HOST="+u.Hostname(), "KUBERNETES_SERVICE_PORT="+u.Port())
	return start(t, log, cmd, func() error {
		if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
			return err
		}
		const at = "/run/secrets/kubernetes.io/serviceaccount"
		return cmp.Or(
			syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""),
			syscall.Mount("tmpfs", "/run", "tmpfs", 0, ""),
			os.MkdirAll(at, 0o755),
			syscall.Mount(account, at, "", syscall.MS_BIND, ""),
		)
	})
}

// allowed skips the test unless a thread may have a namespace of a kind.
func allowed(t testing.TB, kind int) {
	t.Helper()
	may := make(chan error)
	go func() { // in a thread that ends with the goroutine
		runtime.LockOSThread()
		may <- syscall.Unshare(kind)
	}()
	if err := <-may; err != nil {
		t.Skipf("no namespace can be made here: %v", err)
	}
}

// loopbackUp sets the loopback device of the thread's namespace up.
func loopbackUp() error {
	request := struct { // ifreq
		name  [16]byte
		flags uint16
		_     [22]byte
	}{name: [16]byte{'l', 'o'}, flags: syscall.IFF_UP | syscall.IFF_RUNNING}
	return ioctl(syscall.SIOCSIFFLAGS, unsafe.Pointer(&request))
}

// ioctl sends a request about a network device.
func ioctl(kind uintptr, request unsafe.Pointer) error {
	s, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(s)
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(s), kind, uintptr(request)); errno != 0 {
		return errno
	}
	return nil
}
