package tpmkey_test

import (
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/tpmkey"
)

// chip is a software TPM: Debian's swtpm, which serves one connection at a time.
type chip struct {
	t      testing.TB
	dir    string
	socket string
	cmd    *exec.Cmd
}

// newChip starts a new TPM, with seeds of its own.
func newChip(t testing.TB) *chip {
	rounds.NotShort(t)
	if _, err := exec.LookPath("swtpm"); err != nil {
		t.Skip("no swtpm, a software TPM, which the Debian package swtpm has")
	}
	dir := must.Get(os.MkdirTemp("", "tpm"))(t) // a short path, for sockets
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := &chip{t: t, dir: dir, socket: filepath.Join(dir, "tpm.sock")}
	c.start()
	t.Cleanup(c.stop)
	return c
}

func (c *chip) start() {
	c.t.Helper()
	_ = os.Remove(c.socket)
	c.cmd = exec.Command("swtpm", "socket", "--tpm2", "--tpmstate", "dir="+c.dir, "--server",
		"type=unixio,path="+c.socket, "--flags", "not-need-init,startup-clear")
	require.NoError(c.t, c.cmd.Start())
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		conn, err := net.Dial("unix", c.socket)
		if err == nil {
			_ = conn.Close()
			return
		}
		require.True(c.t, time.Now().Before(end), "swtpm does not start: %v", err)
	}
}

// stop cuts the power.
func (c *chip) stop() {
	if c.cmd != nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
		c.cmd = nil
	}
}

// open opens the TPM until the end of the test.
func (c *chip) open() *tpmkey.TPM { return open(c.t, c.socket) }

func open(t testing.TB, path string) *tpmkey.TPM {
	t.Helper()
	tpm := must.Get(tpmkey.Open(path))(t)
	t.Cleanup(func() { require.NoError(t, tpm.Close()) })
	return tpm
}

// shared returns the path of a socket with which several programs use the TPM, as with the /dev/tpmrm0 of Linux: the
// keys that a program has not removed go when it ends, and each has all slots, as programs with keys in the TPM take
// turns.
func (c *chip) shared() string {
	path := filepath.Join(c.dir, "shared.sock")
	l := must.Get(net.Listen("unix", path))(c.t)
	chip := must.Get(net.Dial("unix", c.socket))(c.t)
	var turn sync.Mutex
	var wg sync.WaitGroup
	c.t.Cleanup(func() {
		_ = l.Close()
		_ = chip.Close()
		wg.Wait()
	})
	exchange := func(command []byte) ([]byte, error) {
		if _, err := chip.Write(command); err != nil {
			return nil, err
		}
		return message(chip)
	}
	serve := func(client net.Conn) {
		defer client.Close()
		var loaded []uint32
		for {
			command, err := message(client)
			if len(loaded) == 0 {
				turn.Lock()
			}
			if err != nil {
				for _, handle := range loaded {
					_, _ = exchange(binary.BigEndian.AppendUint32([]byte{0x80, 1, 0, 0, 0, 14, 0, 0, 1, 0x65}, handle))
				}
				turn.Unlock()
				return
			}
			reply, err := exchange(command)
			if err == nil && binary.BigEndian.Uint32(reply[6:]) == 0 {
				switch tpm2.TPMCC(binary.BigEndian.Uint32(command[6:])) {
				case tpm2.TPMCCCreatePrimary, tpm2.TPMCCLoad, tpm2.TPMCCContextLoad:
					loaded = append(loaded, binary.BigEndian.Uint32(reply[10:]))
				case tpm2.TPMCCFlushContext:
					flushed := binary.BigEndian.Uint32(command[10:])
					loaded = slices.DeleteFunc(loaded, func(h uint32) bool { return h == flushed })
				}
			}
			if len(loaded) == 0 {
				turn.Unlock()
			}
			if _, writeErr := client.Write(reply); err != nil || writeErr != nil {
				_ = client.Close() // and the next read fails
			}
		}
	}
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			c.t.Cleanup(func() { _ = client.Close() })
			wg.Go(func() { serve(client) })
		}
	})
	return path
}

// message reads a command or an answer.
func message(r io.Reader) ([]byte, error) {
	head := make([]byte, 10)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(head[2:])
	if size < 10 || size > 4096 {
		return nil, errors.New("not a message of a TPM")
	}
	all := append(head, make([]byte, size-10)...)
	_, err := io.ReadFull(r, all[10:])
	return all, err
}

// loaded returns how many keys are in the TPM behind a socket, and for how many more it has room.
func loaded(t testing.TB, path string) (keys, room int) {
	t.Helper()
	conn := must.Get(net.Dial("unix", path))(t)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute))) // swtpm serves one connection at a time
	tpm := transport.FromReadWriter(conn)
	r := must.Get(tpm2.GetCapability{Capability: tpm2.TPMCapHandles, Property: 0x80000000,
		PropertyCount: 100}.Execute(tpm))(t)
	handles := must.Get(r.CapabilityData.Data.Handles())(t)
	r = must.Get(tpm2.GetCapability{Capability: tpm2.TPMCapTPMProperties,
		Property: uint32(tpm2.TPMPTHRTransientAvail), PropertyCount: 1}.Execute(tpm))(t)
	properties := must.Get(r.CapabilityData.Data.TPMProperties())(t)
	require.Equal(t, tpm2.TPMPTHRTransientAvail, properties.TPMProperty[0].Property)
	return len(handles.Handle), int(properties.TPMProperty[0].Value)
}

// noneLoaded requires that no key was left in the TPM, whose room for keys is three.
func noneLoaded(t testing.TB, path string) {
	t.Helper()
	keys, room := loaded(t, path)
	require.Zero(t, keys, "keys were left in the TPM")
	require.Equal(t, 3, room)
}

func TestOpen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, err := tpmkey.Open(filepath.Join(dir, "tpmrm0"))
	require.ErrorContains(t, err, "no such file")
	require.NotErrorIs(t, err, fs.ErrNotExist, "this is for keys")
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("kept"), 0o600))
	_, err = tpmkey.Open(file)
	require.EqualError(t, err, "tpmkey: connect to the TPM: "+file+" is neither a device nor a socket")
	require.Equal(t, "kept", string(must.Get(os.ReadFile(file))(t)))
	_, err = tpmkey.Open("/dev/null") // a device that answers nothing
	require.ErrorContains(t, err, "tpmkey: the connection to the TPM is lost")

	c := newChip(t)
	tpm := c.open()
	key := must.Get(tpm.NewKey("ecdsa-p256"))(t)
	require.NoError(t, tpm.Close())
	require.NoError(t, tpm.Close())
	require.ErrorContains(t, sign(key), "tpmkey: connect to the TPM: file already closed")
	noneLoaded(t, c.socket)
}

// A TPM whose owner has set a password is refused.
func TestOwnerPassword(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	conn := must.Get(net.Dial("unix", c.socket))(t)
	owner := tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)}
	_ = must.Get(tpm2.HierarchyChangeAuth{AuthHandle: owner,
		NewAuth: tpm2.TPM2BAuth{Buffer: []byte("secret")}}.Execute(transport.FromReadWriter(conn)))(t)
	require.NoError(t, conn.Close())
	_, err := tpmkey.Open(c.socket)
	require.ErrorContains(t, err, "the TPM must have keys with P-256, and no password of its owner hierarchy")
	require.NotErrorIs(t, err, fs.ErrInvalid)
}
