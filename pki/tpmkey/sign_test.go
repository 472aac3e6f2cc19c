package tpmkey_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/tpmkey"
)

// sign has a key sign something random, and verifies the signature.
func sign(key crypto.Signer) error { return signWith(key, crypto.SHA256) }

func signWith(key crypto.Signer, opts crypto.SignerOpts) error {
	h := opts.HashFunc().New()
	h.Write([]byte(rand.Text()))
	digest := h.Sum(nil)
	signature, err := key.Sign(rand.Reader, digest, opts)
	if err != nil {
		return err
	}
	switch public := key.Public().(type) {
	case *ecdsa.PublicKey:
		if !ecdsa.VerifyASN1(public, digest, signature) {
			return errors.New("a wrong signature")
		}
		return nil
	case *rsa.PublicKey:
		if pss, ok := opts.(*rsa.PSSOptions); ok {
			return rsa.VerifyPSS(public, pss.Hash, digest, signature, pss)
		}
		return rsa.VerifyPKCS1v15(public, opts.HashFunc(), digest, signature)
	}
	return fmt.Errorf("a public key of type %T", key.Public())
}

func TestNewKey(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	tpm := c.open()
	for _, algorithm := range []string{"ecdsa-p256", "ecdsa-p384", "rsa-2048"} {
		t.Run(algorithm, func(t *testing.T) {
			key := must.Get(tpm.NewKey(algorithm))(t)
			all := []crypto.SignerOpts{crypto.SHA256, crypto.SHA384, crypto.SHA512}
			if _, ok := key.Public().(*rsa.PublicKey); ok {
				for _, hash := range []crypto.Hash{crypto.SHA256, crypto.SHA384, crypto.SHA512} {
					for _, salt := range []int{rsa.PSSSaltLengthEqualsHash, rsa.PSSSaltLengthAuto, hash.Size()} {
						all = append(all, &rsa.PSSOptions{SaltLength: salt, Hash: hash})
					}
				}
				other := &rsa.PSSOptions{SaltLength: 20, Hash: crypto.SHA256}
				err := signWith(key, other)
				require.ErrorIs(t, err, errors.ErrUnsupported)
				require.ErrorContains(t, err, "RSA-PSS salts of another length")
			}
			for _, opts := range all {
				assert.NoError(t, signWith(key, opts), "%T %v", opts, opts.HashFunc())
			}
			for _, opts := range []crypto.SignerOpts{crypto.MD5, crypto.SHA1, crypto.SHA3_256, crypto.Hash(0)} {
				_, err := key.Sign(rand.Reader, make([]byte, 32), opts)
				assert.ErrorIs(t, err, errors.ErrUnsupported, "%v", opts)
			}
			for _, size := range []int{0, 20, 31, 33, 48} {
				_, err := key.Sign(rand.Reader, make([]byte, size), crypto.SHA256)
				assert.ErrorContains(t, err, fmt.Sprintf("%d bytes of SHA-256", size))
			}
			assert.Equal(t, "tpmkey.key", fmt.Sprintf("%+v", key))
		})
	}
	for _, algorithm := range []string{"ed25519", "rsa-4096", "ecdsa-p521", "hmac-sha256", "ECDSA-P256", ""} {
		_, err := tpm.NewKey(algorithm)
		assert.ErrorIs(t, err, errors.ErrUnsupported, algorithm)
	}
	noneLoadedAfter(t, tpm, c)
}

// A TPM that restarts has lost the keys that it had loaded, and those who used it notice nothing.
func TestRestart(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	tpm := c.open()
	keys := must.Get(tpm.Custodian(t.TempDir() + "/keys"))(t)
	workload := must.Get(tpm.NewKey("ecdsa-p256"))(t)
	authority := must.Get(keys.NewKey(t.Context(), "root", "ecdsa-p384"))(t)
	sealed := must.Get(keys.Seal(t.Context(), secret, nil))(t)
	for round := range 3 {
		require.NoError(t, sign(workload))
		require.NoError(t, sign(authority))
		c.stop()
		if round > 0 { // or no server listens there
			require.NoError(t, os.Remove(c.socket))
		}
		err := sign(workload)
		require.Error(t, err)
		require.NotErrorIs(t, err, fs.ErrInvalid)
		_, err = keys.Key(t.Context(), "root")
		require.Error(t, err)
		require.NotErrorIs(t, err, fs.ErrNotExist, "it is there when the TPM is")
		_, err = keys.Unseal(t.Context(), sealed, nil)
		require.Error(t, err)
		require.NotErrorIs(t, err, fs.ErrNotExist)
		require.NotErrorIs(t, err, fs.ErrInvalid)
		c.start()
	}
	require.NoError(t, sign(workload))
	require.NoError(t, sign(authority))
	require.Equal(t, secret, must.Get(keys.Unseal(t.Context(), sealed, nil))(t))
}

// A TPM that is cleared has lost all keys, and says so.
func TestClear(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	path := c.shared()
	tpm := open(t, path)
	keys := must.Get(tpm.Custodian(t.TempDir() + "/keys"))(t)
	workload := must.Get(tpm.NewKey("ecdsa-p256"))(t)
	authority := must.Get(keys.NewKey(t.Context(), "root", "ecdsa-p256"))(t)
	conn := must.Get(net.Dial("unix", path))(t)
	defer conn.Close()
	_ = must.Get(tpm2.Clear{AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)}}.
		Execute(transport.FromReadWriter(conn)))(t)
	for _, key := range []crypto.Signer{workload, authority} {
		err := sign(key)
		require.ErrorIs(t, err, fs.ErrInvalid)
		require.ErrorContains(t, err, "another TPM has made this key, or the TPM was cleared")
	}
	require.NoError(t, sign(must.Get(tpm.NewKey("ecdsa-p256"))(t)))
}

// Many callers of a TPM get their turn.
func TestAtOnce(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	tpm := c.open()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			key, err := tpm.NewKey("ecdsa-p256")
			if !assert.NoError(t, err) {
				return
			}
			for range 5 {
				assert.NoError(t, sign(key))
			}
		})
	}
	wg.Wait()
}

// faulty is a connection to a TPM for which fault may answer.
type faulty struct {
	transport.TPMCloser
	fault func(command []byte) (reply []byte, err error)
}

func (f *faulty) Send(command []byte) ([]byte, error) {
	if reply, err := f.fault(command); reply != nil || err != nil {
		return reply, err
	}
	return f.TPMCloser.Send(command)
}

// code is an answer of a TPM that has only a response code.
func code(rc tpm2.TPMRC) []byte {
	return binary.BigEndian.AppendUint32([]byte{0x80, 1, 0, 0, 0, 10}, uint32(rc))
}

// TestTrouble has a TPM answer some commands otherwise.
func TestTrouble(t *testing.T) {
	t.Parallel()
	path := newChip(t).shared()
	var fault atomic.Pointer[func(command []byte) ([]byte, error)]
	tpm := must.Get(tpmkey.New(func() (transport.TPMCloser, error) {
		conn, err := net.Dial("unix", path)
		if err != nil {
			return nil, err
		}
		return &faulty{transport.FromReadWriteCloser(conn), func(command []byte) ([]byte, error) {
			if f := fault.Load(); f != nil {
				return (*f)(command)
			}
			return nil, nil
		}}, nil
	}))(t)
	defer tpm.Close()
	key := must.Get(tpm.NewKey("ecdsa-p256"))(t)
	for name, x := range map[string]struct {
		reply []byte
		err   error
		times int    // how often
		want  string // an error; none if it is empty
	}{
		"retry":           {reply: code(tpm2.TPMRCRetry), times: 3},
		"yielded":         {reply: code(tpm2.TPMRCYielded), times: 3},
		"testing":         {reply: code(tpm2.TPMRCTesting), times: 3},
		"others' keys":    {reply: code(tpm2.TPMRCObjectMemory), times: 3},
		"failure":         {reply: code(tpm2.TPMRCFailure), times: 1, want: "TPM_RC_FAILURE"},
		"lost once":       {err: errors.New("gone"), times: 1},
		"lost":            {err: errors.New("gone"), times: 2, want: "the connection to the TPM is lost: gone"},
		"cut once":        {reply: []byte{0x80, 1}, times: 1},
		"cut":             {reply: []byte{0x80, 1}, times: 2, want: "unexpected EOF"},
		"no signature":    {reply: code(0), times: 1, want: "EOF"},
		"does not have":   {reply: code(tpm2.TPMRCScheme | 0x2C0), times: 1, want: "the TPM does not sign over SHA-256"},
		"another's slots": {reply: code(tpm2.TPMRCMemory), times: 3},
	} {
		left := x.times
		f := func(command []byte) ([]byte, error) {
			if left == 0 || !bytes.Equal(command[6:10], []byte{0, 0, 1, 0x5D}) { // TPM2_Sign
				return nil, nil
			}
			left--
			return x.reply, x.err
		}
		fault.Store(&f)
		err := sign(key)
		if x.want == "" {
			assert.NoError(t, err, name)
		} else {
			assert.ErrorContains(t, err, x.want, name)
		}
		assert.Zero(t, left, name)
		fault.Store(nil)
		require.NoError(t, sign(key), "after %s", name)
	}
	require.NoError(t, tpm.Close())
	noneLoaded(t, path)
}

// replay is a TPM that gives answers recorded before. While it hangs it gives none until the connection is closed.
type replay struct {
	replies map[string][]byte
	hangs   *atomic.Bool
	closed  chan struct{}
	once    sync.Once
}

func (r *replay) Send(command []byte) ([]byte, error) {
	if r.hangs.Load() { // after that it answers, which must not be used
		<-r.closed
		return nil, net.ErrClosed
	}
	return r.replies[string(command)], nil
}

func (r *replay) Close() error {
	r.once.Do(func() { close(r.closed) })
	return nil
}

// A TPM that hangs holds up no caller for more than ten seconds, and gets a new connection after two minutes.
func TestHung(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	replies := map[string][]byte{}
	digest := make([]byte, 32)
	tpm := must.Get(tpmkey.New(func() (transport.TPMCloser, error) {
		conn, err := net.Dial("unix", c.socket)
		if err != nil {
			return nil, err
		}
		tpm := transport.FromReadWriteCloser(conn)
		return &faulty{tpm, func(command []byte) (reply []byte, err error) {
			reply, err = tpm.Send(command)
			replies[string(command)] = reply
			return reply, err
		}}, nil
	}))(t)
	key := must.Get(tpm.NewKey("ecdsa-p256"))(t)
	_ = must.Get(key.Sign(nil, digest, crypto.SHA256))(t)
	_ = must.Get(key.Sign(nil, digest, crypto.SHA256))(t) // with its saved context
	require.NoError(t, tpm.Close())

	synctest.Test(t, func(t *testing.T) {
		var hangs atomic.Bool
		var dialled atomic.Int32
		tpm := must.Get(tpmkey.New(func() (transport.TPMCloser, error) {
			dialled.Add(1)
			return &replay{replies: replies, hangs: &hangs, closed: make(chan struct{})}, nil
		}))(t)
		key := must.Get(tpm.NewKey("ecdsa-p256"))(t)
		_ = must.Get(key.Sign(nil, digest, crypto.SHA256))(t)
		start := time.Now()
		hangs.Store(true)
		for time.Since(start) < 100*time.Second {
			var wg sync.WaitGroup
			began := time.Now()
			for range 5 {
				wg.Go(func() {
					_, err := key.Sign(nil, digest, crypto.SHA256)
					assert.ErrorIs(t, err, context.DeadlineExceeded)
					assert.Equal(t, 10*time.Second, time.Since(began))
				})
			}
			wg.Wait()
		}
		require.ErrorIs(t, tpm.Close(), context.DeadlineExceeded)
		require.EqualValues(t, 1, dialled.Load())
		hangs.Store(false)
		time.Sleep(time.Until(start.Add(121 * time.Second)))
		_ = must.Get(key.Sign(nil, digest, crypto.SHA256))(t)
		require.EqualValues(t, 2, dialled.Load())
		require.NoError(t, tpm.Close())
	})
}

// full is a TPM that never has room.
type full struct{}

func (full) Send([]byte) ([]byte, error) { return code(tpm2.TPMRCObjectMemory), nil }
func (full) Close() error                { return nil }

// A TPM that stays full is an error that says so.
func TestFull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		_, err := tpmkey.New(func() (transport.TPMCloser, error) { return full{}, nil })
		require.ErrorIs(t, err, tpm2.TPMRCObjectMemory)
		require.Less(t, time.Since(start), 6*time.Second)
	})
}
