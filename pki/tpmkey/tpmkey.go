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
// Each renewal makes a new key. The program holds it only in a form that this TPM alone can decrypt, and loads it for
// each signature. So keys that are no longer used take no room in the TPM, which has room for about three, and all
// keys are gone when the program ends. The Manager works with packages spiffetls, crypto/tls and net/http. What needs
// the bytes of the key returns an error that says so: secrets for Envoy, and files.
//
// # Keys of a CA
//
// [TPM.Custodian] keeps the keys of a [ca.Authority] in files that this TPM alone can decrypt:
//
//	keys, err := tpm.Custodian("/var/lib/svidkit/keys")
//	…
//	authority, err := ca.Open(ctx, ca.Config{…, Custody: ca.Custody{Keys: keys, Seal: keys}}, store)
//
// What an operator has to know:
//
//   - A TPM belongs to one machine. Replicas of a CA on several machines cannot share these keys.
//   - Clearing the TPM destroys all keys: by TPM2_Clear, in the menu of the firmware, with some updates of firmware,
//     or with a new mainboard. So does the loss of the directory. Have a plan for a new root.
//   - A copy of the directory is of no use without the TPM. With this TPM, a copy brings back keys that were
//     destroyed: Destroy deletes the file of a key, and its copy still signs.
//   - A process that may use the TPM and read the directory can sign, and gets the secrets that are sealed. The TPM
//     keeps keys from being copied, not from being used on this machine.
//   - Between a TPM that is a chip and the processor, what opens a sealed secret passes in the clear. This matters
//     against someone who opens the running machine.
//   - A crash can leave a file whose name begins with "draft-". It is of no use.
//
// # The TPM
//
// All keys are children of the storage key with P-256 under the owner hierarchy, by the template of the TCG, which a
// TPM makes again when asked. So nothing is stored in the TPM. The owner hierarchy must have no password; passwords,
// policies and PCRs are not supported. No failure counts for the TPM's lockout.
//
// On Linux use /dev/tpmrm0, by which processes share the TPM, and the kernel cleans up after each. The user of the
// program needs access to it, usually by the group tss. A Unix socket, as of swtpm, serves one process at a time, and
// nothing cleans up after one that was killed during a signature, so the TPM may be full until it restarts.
//
// A TPM does one thing at a time, and chips take some tens of milliseconds for a signature with P-256, and longer with
// RSA: measure yours before a busy server or CA uses it.
package tpmkey

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"net"
	"os"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/svidkit/svidkit/internal/redact"
)

// useTime bounds a signature, with what waits before it. makeTime bounds the making of a key, for which some chips
// need long, and every command: then the connection is closed.
const useTime, makeTime = 10 * time.Second, 2 * time.Minute

// TPM is a TPM 2.0; [Open] or [New] makes one. It is safe for concurrent use, and does one thing at a time. It
// connects again when the connection is lost.
type TPM struct {
	slot    chan struct{} // of one; the call in it has the fields below
	dial    func() (transport.TPMCloser, error)
	conn    transport.TPMCloser // nil if there is none
	storage key                 // the parent of all keys
}

// Open returns the TPM at path, a device such as "/dev/tpmrm0" or a Unix socket.
func Open(path string) (*TPM, error) {
	return New(func() (transport.TPMCloser, error) {
		var conn io.ReadWriteCloser
		info, err := os.Stat(path)
		switch {
		case err != nil:
		case info.Mode()&fs.ModeSocket != 0:
			conn, err = net.DialTimeout("unix", path, useTime)
		case info.Mode()&fs.ModeDevice != 0:
			conn, err = os.OpenFile(path, os.O_RDWR, 0)
		default:
			err = fmt.Errorf("%s is neither a device nor a socket", path)
		}
		return transport.FromReadWriteCloser(conn), err
	})
}

// New returns the TPM to which dial connects, such as one on a system without a device file. It calls dial at once,
// and again after a failure. One goroutine at a time uses a connection; another closes it if the TPM hangs.
func New(dial func() (transport.TPMCloser, error)) (*TPM, error) {
	t := &TPM{dial: dial, slot: make(chan struct{}, 1)}
	return use(context.Background(), useTime, t, func(c *call) (*TPM, error) {
		return t, c.with(&t.storage, func(tpm2.AuthHandle) error { return nil })
	})
}

// Close ends the connection after what is under way, or returns an error after ten seconds. Then nothing can sign any
// more.
func (t *TPM) Close() error {
	_, err := use(context.Background(), useTime, t, func(*call) (any, error) {
		t.hangUp()
		t.dial = func() (transport.TPMCloser, error) { return nil, fs.ErrClosed }
		return nil, nil
	})
	return err
}

// hangUp ends the connection, and with it what a failure has left in the TPM where several programs share it: the next
// command makes a new one.
func (t *TPM) hangUp() {
	if t.conn != nil {
		_ = t.conn.Close()
		t.conn = nil
	}
}

// use calls f while nothing else has the TPM, and again if the connection is lost meanwhile. It returns at the end of
// ctx and after limit, too: f then goes on until its command ends, and others wait for it no longer than they would.
func use[T any](ctx context.Context, limit time.Duration, t *TPM, f func(*call) (T, error)) (none T, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan func() (T, error), 1)
	go func() {
		select {
		case t.slot <- struct{}{}:
		case <-ctx.Done():
			return
		}
		defer func() { <-t.slot }()
		c := &call{ctx: ctx, tpm: t}
		value, err := f(c)
		if c.lost && ctx.Err() == nil {
			t.hangUp()
			value, err = f(&call{ctx: ctx, tpm: t})
		}
		if err != nil {
			t.hangUp()
			value, err = *new(T), fmt.Errorf("tpmkey: %w", err)
		}
		done <- func() (T, error) { return value, err }
	}()
	select {
	case result := <-done:
		return result()
	case <-ctx.Done():
		return none, fmt.Errorf("tpmkey: the TPM is busy, or does not answer: %w", ctx.Err())
	}
}

// call is a [transport.TPM] for the function that has the TPM.
type call struct {
	ctx  context.Context
	tpm  *TPM
	lost bool // the connection broke
}

// Send sends a command, and for a while again if the answer is a warning: the TPM is busy, or others fill it.
func (c *call) Send(command []byte) ([]byte, error) {
	end := time.Now().Add(useTime / 2)
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if c.lost { // the rest of an answer would pass for the next one
			return nil, net.ErrClosed
		}
		if c.tpm.conn == nil {
			conn, err := c.tpm.dial()
			if err != nil { // not wrapped: a TPM that is missing is no missing key
				return nil, fmt.Errorf("connect to the TPM: %v", err)
			}
			c.tpm.conn = conn
		}
		conn := c.tpm.conn
		watch := time.AfterFunc(makeTime, func() { _ = conn.Close() })
		reply, err := conn.Send(command)
		watch.Stop()
		if err != nil || len(reply) < 10 { // the header
			c.lost = true
			return nil, fmt.Errorf("the connection to the TPM is lost: %v", cmp.Or(err, io.ErrUnexpectedEOF))
		}
		warning := tpm2.TPMRC(binary.BigEndian.Uint32(reply[6:])).IsWarning()
		if !warning || time.Now().After(end) || c.ctx.Err() != nil {
			return reply, nil
		}
		time.Sleep(wait)
	}
}

// NewKey makes a private key that only this TPM can use, and only through the returned value: it is gone when the
// program ends. The algorithm is "ecdsa-p256", or "ecdsa-p384" or "rsa-2048" if the TPM has it; for others the error
// wraps [errors.ErrUnsupported]. NewKey takes some milliseconds, for RSA up to a minute, and at most two.
//
// Sign is safe for concurrent use, and returns within ten seconds. It signs the digests of SHA-256, SHA-384 and
// SHA-512 as far as the TPM has them, and by RSA-PSS with salts of the length that the TPM chooses: that of the hash
// in TPMs that follow FIPS 186, as TLS 1.3 needs it. For others the error wraps errors.ErrUnsupported, too.
func (t *TPM) NewKey(algorithm string) (crypto.Signer, error) {
	return use(context.Background(), makeTime, t, func(c *call) (crypto.Signer, error) {
		return c.create(algorithm, nil)
	})
}

// key is a private key that the TPM has encrypted, or its storage key, of which there is only the name. It is used by
// the goroutine that has the TPM.
type key struct {
	redact.Text
	tpm     *TPM
	public  crypto.PublicKey // nil if the key does not sign
	area    tpm2.TPM2BPublic
	private tpm2.TPM2BPrivate
	name    tpm2.TPM2BName
	saved   *tpm2.TPMSContext // loads it faster, until the TPM restarts
}

func (t *TPM) key(area tpm2.TPM2BPublic, private tpm2.TPM2BPrivate) *key {
	k := &key{Text: redact.New("tpmkey.key"), tpm: t, area: area, private: private}
	if public, err := area.Contents(); err == nil {
		k.public, _ = tpm2.Pub(*public)
	}
	return k
}

// create makes a key. The TPM binds it for ever to policy, which nothing can satisfy.
func (c *call) create(algorithm string, policy []byte) (k *key, err error) {
	area := tpm2.TPMTPublic{NameAlg: tpm2.TPMAlgSHA256, AuthPolicy: tpm2.TPM2BDigest{Buffer: policy},
		ObjectAttributes: tpm2.TPMAObject{FixedTPM: true, FixedParent: true, SensitiveDataOrigin: true,
			UserWithAuth: true, NoDA: true, SignEncrypt: true}}
	curve := map[string]tpm2.TPMECCCurve{"ecdsa-p256": tpm2.TPMECCNistP256, "ecdsa-p384": tpm2.TPMECCNistP384}[algorithm]
	switch {
	case curve != 0:
		area.Type = tpm2.TPMAlgECC
		area.Parameters = tpm2.NewTPMUPublicParms(area.Type, &tpm2.TPMSECCParms{CurveID: curve})
	case algorithm == "rsa-2048":
		area.Type = tpm2.TPMAlgRSA
		area.Parameters = tpm2.NewTPMUPublicParms(area.Type, &tpm2.TPMSRSAParms{KeyBits: 2048})
	case algorithm == sealFile && bytes.Equal(policy, binding(sealFile)):
		area.Type = tpm2.TPMAlgKeyedHash
		area.Parameters = tpm2.NewTPMUPublicParms(area.Type, &tpm2.TPMSKeyedHashParms{
			Scheme: tpm2.TPMTKeyedHashScheme{Scheme: tpm2.TPMAlgHMAC, Details: tpm2.NewTPMUSchemeKeyedHash(
				tpm2.TPMAlgHMAC, &tpm2.TPMSSchemeHMAC{HashAlg: tpm2.TPMAlgSHA256})}})
	default:
		return nil, fmt.Errorf("keys of algorithm %q: %w", redact.Clip(algorithm, 40), errors.ErrUnsupported)
	}
	err = c.with(&c.tpm.storage, func(parent tpm2.AuthHandle) error {
		r, err := tpm2.Create{ParentHandle: parent, InPublic: tpm2.New2B(area)}.Execute(c)
		if err == nil {
			k = c.tpm.key(r.OutPublic, r.OutPrivate)
		}
		return refused(err, errors.ErrUnsupported, "the TPM does not make keys of algorithm "+algorithm)
	})
	return k, err
}

// refused wraps err with what it means if the TPM says that something is wrong with a command.
func refused(err, sentinel error, what string) error {
	if _, ok := errors.AsType[tpm2.TPMFmt1Error](err); ok {
		return fmt.Errorf("%s: %w: %w", what, sentinel, err)
	}
	return err
}

// with loads a key, calls f with it, and removes it from the TPM.
func (c *call) with(k *key, f func(tpm2.AuthHandle) error) error {
	handle, err := c.load(k)
	if err != nil {
		return err
	}
	err = f(tpm2.AuthHandle{Handle: handle, Name: k.name, Auth: tpm2.PasswordAuth(nil)})
	_, flushErr := tpm2.FlushContext{FlushHandle: handle}.Execute(c)
	return cmp.Or(err, flushErr)
}

func (c *call) load(k *key) (handle tpm2.TPMHandle, err error) {
	if k.saved != nil {
		if r, err := (tpm2.ContextLoad{Context: *k.saved}).Execute(c); err == nil {
			return r.LoadedHandle, nil
		}
		k.saved = nil // the TPM has restarted
	}
	if k == &c.tpm.storage {
		owner := tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)}
		r, err := tpm2.CreatePrimary{PrimaryHandle: owner, InPublic: tpm2.New2B(tpm2.ECCSRKTemplate)}.Execute(c)
		if err != nil {
			return 0, refused(err, errors.ErrUnsupported,
				"the TPM must have keys with P-256, and no password of its owner hierarchy")
		}
		handle, k.name = r.ObjectHandle, r.Name
	} else if err := c.with(&c.tpm.storage, func(parent tpm2.AuthHandle) error {
		r, err := tpm2.Load{ParentHandle: parent, InPrivate: k.private, InPublic: k.area}.Execute(c)
		if err == nil {
			handle, k.name = r.ObjectHandle, r.Name
		}
		return refused(err, fs.ErrInvalid, "another TPM has made this key, or the TPM was cleared, or the key is damaged")
	}); err != nil {
		return 0, err
	}
	if r, err := (tpm2.ContextSave{SaveHandle: handle}).Execute(c); err == nil {
		k.saved = &r.Context
	}
	return handle, nil
}

// Public implements [crypto.Signer].
func (k *key) Public() crypto.PublicKey { return k.public }

// Sign implements [crypto.Signer].
func (k *key) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	hash := opts.HashFunc()
	alg := map[crypto.Hash]tpm2.TPMAlgID{crypto.SHA256: tpm2.TPMAlgSHA256, crypto.SHA384: tpm2.TPMAlgSHA384,
		crypto.SHA512: tpm2.TPMAlgSHA512}[hash]
	if alg == 0 || hash.Size() != len(digest) {
		return nil, fmt.Errorf("tpmkey: signatures over %d bytes of %v: %w", len(digest), hash, errors.ErrUnsupported)
	}
	scheme := tpm2.TPMAlgRSASSA
	pss, isPSS := opts.(*rsa.PSSOptions)
	if isPSS {
		scheme = tpm2.TPMAlgRSAPSS
	}
	if _, isEC := k.public.(*ecdsa.PublicKey); isEC {
		scheme = tpm2.TPMAlgECDSA
	}
	digest = bytes.Clone(digest) // the TPM may get it after the end of the call
	return use(context.Background(), useTime, k.tpm, func(c *call) (signature []byte, err error) {
		err = c.with(k, func(h tpm2.AuthHandle) error {
			r, err := tpm2.Sign{
				KeyHandle: h, Digest: tpm2.TPM2BDigest{Buffer: digest},
				InScheme: tpm2.TPMTSigScheme{Scheme: scheme,
					Details: tpm2.NewTPMUSigScheme(scheme, &tpm2.TPMSSchemeHash{HashAlg: alg})},
				Validation: tpm2.TPMTTKHashCheck{Tag: tpm2.TPMSTHashCheck, Hierarchy: tpm2.TPMRHNull},
			}.Execute(c)
			if err != nil {
				return refused(err, errors.ErrUnsupported, fmt.Sprintf("the TPM does not sign over %v", hash))
			}
			if s, err := r.Signature.Signature.ECDSA(); err == nil {
				signature, err = asn1.Marshal(struct{ R, S *big.Int }{
					new(big.Int).SetBytes(s.SignatureR.Buffer), new(big.Int).SetBytes(s.SignatureS.Buffer)})
				return err
			}
			s, err := r.Signature.Signature.RSASSA()
			if isPSS {
				s, err = r.Signature.Signature.RSAPSS()
			}
			if err == nil {
				signature = s.Sig.Buffer
			}
			if err == nil && isPSS && rsa.VerifyPSS(k.public.(*rsa.PublicKey), hash, digest, signature, pss) != nil {
				err = fmt.Errorf("the TPM makes RSA-PSS salts of another length: %w", errors.ErrUnsupported)
			}
			return err
		})
		return signature, err
	})
}
