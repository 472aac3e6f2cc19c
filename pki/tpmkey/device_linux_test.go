package tpmkey_test

import (
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// A device file is opened and used like a TPM's, by way of a terminal whose other end passes on what is written.
func TestDevice(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no terminals: ", err)
	}
	ioctl := func(f *os.File, request uintptr, argument unsafe.Pointer) {
		t.Helper()
		_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(argument))
		require.Zero(t, errno)
	}
	var locked, number int32
	ioctl(master, syscall.TIOCSPTLCK, unsafe.Pointer(&locked))
	ioctl(master, syscall.TIOCGPTN, unsafe.Pointer(&number))
	path := fmt.Sprintf("/dev/pts/%d", number)
	terminal := must.Get(os.OpenFile(path, os.O_RDWR|syscall.O_NOCTTY, 0))(t)
	raw := syscall.Termios{Cflag: syscall.CS8 | syscall.CREAD}
	raw.Cc[syscall.VMIN] = 1
	ioctl(terminal, syscall.TCSETS, unsafe.Pointer(&raw))

	chip := must.Get(net.Dial("unix", c.socket))(t)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			command, err := message(master)
			if err != nil {
				return
			}
			if _, err = chip.Write(command); err != nil {
				return
			}
			reply, err := message(chip)
			if err != nil {
				return
			}
			if _, err := master.Write(reply); err != nil {
				return
			}
		}
	}()
	tpm := open(t, path)
	key := must.Get(tpm.NewKey("ecdsa-p256"))(t)
	for range 20 {
		require.NoError(t, sign(key))
	}
	require.NoError(t, tpm.Close())
	require.NoError(t, terminal.Close()) // its last user: the other end fails
	<-ended
	require.NoError(t, master.Close())
	require.NoError(t, chip.Close())
	noneLoaded(t, c.socket)
}
