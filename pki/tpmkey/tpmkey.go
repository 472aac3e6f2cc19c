// Package tpmkey keeps private keys in a TPM 2.0, the security chip of a machine: the keys of a workload, and those of
// a CA. It is a module of its own, so that svidkit itself requires no library for TPMs.
//
// # Keys of workloads
//
// A workload whose keys the TPM makes has an identity that cannot be copied to another machine:
//
//	tpm, err := tpmkey.Open("/dev/tpmrm0")
//	…
//	defer tpm.Close()
//	m, err := secretcache.Start(ctx, secretcache.Config{ID: web, CA: ca,
//		NewKey: func() (crypto.Signer, error) { return tpm.NewKey("ecdsa-p256") }})
//
// Each renewal makes a new key. The program holds it only in a form that this TPM alone can decrypt, and a signature
// loads it and removes it again. So keys that are no longer used take no room in the TPM, which has room for about
// three, and all keys are gone when the program ends. The Manager works with packages spiffetls, crypto/tls and
// net/http. What needs the bytes of the key refuses it: Secrets for Envoy, and files.
//
// # Keys of a CA
//
// [TPM.Custodian] keeps the keys of a [ca.Authority] in files that this TPM alone can decrypt:
//
//	keys, err := tpm.Custodian("/var/lib/svidkit/keys")
//	…
//	authority, err := ca.Open(ctx, ca.Config{…, Custody: ca.Custody{Keys: keys, Seal: keys}})
//
// What an operator has to know:
//
//   - A TPM belongs to one machine. Replicas of a CA on several machines cannot share these keys.
//   - Clearing the TPM (TPM2_Clear, often an entry in the firmware's menu) destroys all keys, as does the loss of the
//     directory. Have a way to a new root, such as bundles with two roots from two CAs.
//   - A copy of the directory is of no use without the TPM. Restoring a copy on the same machine brings keys back that
//     were destroyed: Destroy deletes the file of a key, and its copy still signs.
//   - A process that may use the TPM and read the directory can sign, and gets the secrets that are sealed. The TPM
//     protects keys from being copied, and not from being used on this machine.
//   - The wires between a TPM chip and the processor carry the secret that seals records in the clear. This matters
//     against those who can open the machine while it runs; TPMs in firmware have no such wires.
//
// # The TPM
//
// All keys are children of the ECC storage key that TPM 2.0 Provisioning Guidance defines (P-256, under the owner
// hierarchy), which each TPM makes again at will, so nothing is stored in the TPM. The owner hierarchy must have no
// password. Authorizations with passwords or policies are not supported, and none is needed: no failure counts for
// the TPM's dictionary attack lockout.
//
// On Linux use /dev/tpmrm0, by which several processes share the TPM: the kernel cleans up after each. The program's
// user needs access to the device, usually by the group tss. A Unix socket, as of swtpm, works as well, but nothing
// there cleans up after a process that was killed in a signature, and after about three the TPM has no room until it
// restarts.
//
// TPM chips take 20 to 200 ms for a signature with P-256, and do one thing at a time.
package tpmkey

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/svidkit/svidkit/internal/redact"
)

const (
	useTime  = 10 * time.Second // for a signature, and what waits before it
	makeTime = time.Minute      // for a new key of a workload: some chips need long for RSA
	hungTime = 2 * time.Minute  // after which a connection is closed, to make a new one
	maxReply = 64 << 10
)

type redacted = redact.Text // an alias, so that the embedded field is not exported

// TPM is a TPM 2.0; [Open] or [New] makes one. It is safe for concurrent use, and does one thing at a time. It
// connects again when the connection is lost.
type TPM struct {
	redacted
	dial func() (transport.TPMCloser, error)
	slot chan struct{} // of one; whoever is in it has the fields below

	conn    transport.TPMCloser // nil if there is none
	primary object
	closed  bool
}

// Open returns the TPM at path, a device such as "/dev/tpmrm0" or a Unix socket, after asking for its storage key.
func Open(path string) (*TPM, error) {
	return New(func() (transport.TPMCloser, error) {
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		if info.Mode()&fs.ModeSocket != 0 {
			conn, err := net.DialTimeout("unix", path, useTime)
			if err != nil {
				return nil, err
			}
			return stream{conn}, nil
		}
		if info.Mode()&fs.ModeDevice == 0 {
			return nil, fmt.Errorf("%s is neither a device nor a socket", path)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: the user of this program must be in the group of the device, usually tss", err)
		}
		if err != nil {
			return nil, err
		}
		return transport.FromReadWriteCloser(f), nil
	})
}

// New returns the TPM to which dial connects. dial is called at once, and again when a connection is lost; its
// connections are used by one goroutine at a time, and closed by another if the TPM hangs.
func New(dial func() (transport.TPMCloser, error)) (*TPM, error) {
	t := &TPM{redacted: redact.New("tpmkey.TPM"), dial: dial, slot: make(chan struct{}, 1)}
	ctx, cancel := context.WithTimeout(context.Background(), useTime)
	defer cancel()
	_, err := use(ctx, t, func(c *call) (struct{}, error) {
		return struct{}{}, c.with(&t.primary, func(tpm2.AuthHandle) error { return nil })
	})
	if err != nil {
		_ = t.Close()
		return nil, err
	}
	return t, nil
}

// Close ends the connection, after what is under way, or returns an error after ten seconds. Keys cannot be used any
// more: an error then wraps [fs.ErrClosed].
func (t *TPM) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), useTime)
	defer cancel()
	_, err := use(ctx, t, func(*call) (struct{}, error) {
		t.closed = true
		t.hangUp()
		return struct{}{}, nil
	})
	if errors.Is(err, fs.ErrClosed) {
		return nil
	}
	return err
}

// hangUp ends the connection: the next command makes a new one.
func (t *TPM) hangUp() {
	if t.conn != nil {
		_ = t.conn.Close()
		t.conn = nil
	}
}

// use calls f while nothing else has the TPM. It returns at the end of ctx, too: f then goes on until its command
// ends, and others wait for it, up to the end of theirs. If the connection is lost, f is called a second time.
func use[T any](ctx context.Context, t *TPM, f func(c *call) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	select {
	case t.slot <- struct{}{}:
	case <-ctx.Done():
		return none, fmt.Errorf("tpmkey: the TPM was busy with other commands: %w", context.Cause(ctx))
	}
	done := make(chan result, 1)
	go func() {
		defer func() { <-t.slot }()
		var r result
		for range 2 {
			c := &call{ctx: ctx, tpm: t}
			if r.err = fs.ErrClosed; !t.closed {
				r.value, r.err = f(c)
			}
			if !c.lost || ctx.Err() != nil {
				break
			}
		}
		if r.err != nil {
			r.err = fmt.Errorf("tpmkey: %w", r.err)
		}
		done <- r
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		return none, fmt.Errorf("tpmkey: the TPM did not answer in time: %w", context.Cause(ctx))
	}
}

// call is a [transport.TPM] for the function that has the TPM.
type call struct {
	ctx  context.Context
	tpm  *TPM
	lost bool // the connection broke
}

// Send sends a command, and again as long as the TPM asks for that, or has no room because of other processes.
func (c *call) Send(command []byte) ([]byte, error) {
	end := time.Now().Add(useTime / 2) // then the caller shows why
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		reply, err := c.send(command)
		if err != nil {
			return nil, err
		}
		switch tpm2.TPMRC(binary.BigEndian.Uint32(reply[6:])) {
		case tpm2.TPMRCRetry, tpm2.TPMRCYielded, tpm2.TPMRCTesting, tpm2.TPMRCObjectMemory, tpm2.TPMRCMemory:
		default:
			return reply, nil
		}
		if time.Now().After(end) {
			return reply, nil
		}
		select {
		case <-c.ctx.Done():
			return reply, nil
		case <-time.After(wait):
		}
	}
}

func (c *call) send(command []byte) (reply []byte, err error) {
	if c.lost { // handles of the old connection may be those of others on a new one
		return nil, net.ErrClosed
	}
	if c.tpm.conn == nil {
		if c.tpm.conn, err = c.tpm.dial(); err != nil {
			c.tpm.conn = nil
			return nil, err
		}
	}
	conn := c.tpm.conn
	watch := time.AfterFunc(hungTime, func() { _ = conn.Close() })
	reply, err = conn.Send(command)
	watch.Stop()
	if err == nil && len(reply) < 10 {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		c.lost = true
		c.tpm.hangUp()
		return nil, fmt.Errorf("the connection to the TPM is lost: %w", err)
	}
	return reply, nil
}

// stream is a connection to a TPM on a socket, which may deliver an answer in parts.
type stream struct{ net.Conn }

func (s stream) Send(command []byte) ([]byte, error) {
	if _, err := s.Write(command); err != nil {
		return nil, err
	}
	reply := make([]byte, 10)
	if _, err := io.ReadFull(s, reply); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(reply[2:])
	if size < 10 || size > maxReply {
		return nil, fmt.Errorf("an answer of %d bytes", size)
	}
	reply = append(reply, make([]byte, size-10)...)
	_, err := io.ReadFull(s, reply[10:])
	return reply, err
}
