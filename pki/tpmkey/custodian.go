package tpmkey

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki/ca"
)

const (
	suffix   = ".tpmkey"             // of the file of a key
	draft    = ".new"                // follows the name of a file that is being written; see fileset.Replace
	sealName = "sealing-key.tpmhmac" // the file of the key that seals
	maxFile  = 8 << 10
	lockWait = 5 * time.Second
)

// Custodian returns the custodian of the keys in the directory at path, and a sealer with a key there. It makes the
// directory if it is missing, with mode 0700; no other user may have access. Several processes on this machine may use
// a directory at the same time. After [TPM.Close] its methods return errors that wrap [fs.ErrClosed].
//
// Each key is in a file "NAME.tpmkey", which can be used only under this name. The sealer's key, in
// "sealing-key.tpmhmac", is made by the first call of Seal. Keys has the algorithms of [TPM.NewKey]. A file that was
// damaged, renamed or copied from another machine, and all files after the TPM was cleared, give an error that wraps
// [fs.ErrInvalid] and not fs.ErrNotExist, since the right TPM may be elsewhere. A directory that is missing or was
// replaced gives an error that wraps neither.
func (t *TPM) Custodian(path string) (interface {
	ca.Custodian
	ca.Sealer
}, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("tpmkey: %w", err)
	}
	root, err := private.MakeDir(path, private.Options{Keys: true})
	if err != nil {
		return nil, fmt.Errorf("tpmkey: %w", err)
	}
	defer root.Close()
	c := &custodian{redacted: t.redacted, tpm: t, path: path}
	if c.is, err = root.Stat("."); err == nil {
		err = locked(root, func() error { return removeDrafts(root) })
	}
	if err != nil {
		return nil, fmt.Errorf("tpmkey: %s: %w", path, err)
	}
	return c, nil
}

// removeDrafts removes what a crash has left.
func removeDrafts(root *os.Root) error {
	entries, err := fs.ReadDir(root.FS(), ".")
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), suffix+draft) || entry.Name() == sealName+draft {
			err = errors.Join(err, root.Remove(entry.Name()))
		}
	}
	return err
}

// custodian implements [ca.Custodian] and [ca.Sealer]. The goroutine that has the TPM does all its work, so that a
// caller waits no longer than its context says.
type custodian struct {
	redacted
	tpm  *TPM
	path string
	is   fs.FileInfo // of the directory
}

// inDir calls f with the TPM and the directory.
func inDir[T any](ctx context.Context, c *custodian, f func(*call, *os.Root) (T, error)) (T, error) {
	return use(ctx, c.tpm, func(call *call) (T, error) {
		var none T
		root, err := private.OpenDir(c.path, private.Options{Keys: true})
		if err != nil {
			return none, fmt.Errorf("the directory of the keys: %v", err) // it does not say that there is no key
		}
		defer root.Close()
		if now, err := root.Stat("."); err != nil || !os.SameFile(now, c.is) {
			return none, fmt.Errorf("%s is another directory than before: restart this program if it is right (%v)",
				c.path, err)
		}
		return f(call, root)
	})
}

// locked calls f while no other process changes the directory, if the file system has locks.
func locked(root *os.Root, f func() error) error {
	lock, err := root.Open(".")
	if err != nil {
		return err
	}
	defer lock.Close()
	if got, err := flock.TryLockFor(lock, lockWait); err == nil && !got {
		return errors.New("another process holds the lock of the directory")
	}
	return f()
}

// file returns the name of the file of a key.
func file(name string) (string, error) {
	bad := func(r rune) bool { return !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-') }
	if name == "" || len(name) > 80 || strings.ContainsFunc(name, bad) {
		return "", fmt.Errorf("%w: a key named %q: want 1 to 80 lower-case letters, digits and hyphens",
			fs.ErrInvalid, redact.Clip(name, 80))
	}
	return name + suffix, nil
}

// binding is part of a key, so that a file cannot get the name of another.
func binding(file string) []byte {
	sum := sha256.Sum256([]byte("svidkit tpmkey " + file))
	return sum[:]
}

// free returns an error if there is a file.
func (c *custodian) free(root *os.Root, file string) error {
	_, err := root.Lstat(file)
	switch {
	case err == nil:
		return fmt.Errorf("%s: %w", filepath.Join(c.path, file), fs.ErrExist)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return err
}

// write makes the file of a key that the TPM has made.
func (c *custodian) write(ctx context.Context, root *os.Root, file string, o *object) error {
	return locked(root, func() error {
		if err := cmp.Or(ctx.Err(), c.free(root, file)); err != nil {
			return err
		}
		data := slices.Concat(tpm2.Marshal(o.public), tpm2.Marshal(o.private))
		return fileset.Replace(root, file, fileset.File{Data: data, Mode: 0o600})
	})
}

// read returns the key in a file, after the TPM has loaded it once.
func (c *custodian) read(call *call, root *os.Root, file string) (*object, error) {
	path := filepath.Join(c.path, file)
	f, err := private.OpenIn(root, file, private.Options{Keys: true})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer f.Close() // only read
	data, err := files.ReadAll(f, path, maxFile)
	if err != nil {
		return nil, err
	}
	public, rest := cut(data)
	secret, rest := cut(rest)
	if public == nil || secret == nil || len(rest) != 0 {
		return nil, fmt.Errorf("%s is %w: it is cut or damaged: restore it from a copy", path, fs.ErrInvalid)
	}
	o := &object{public: tpm2.BytesAs2B[tpm2.TPMTPublic](public), private: tpm2.TPM2BPrivate{Buffer: secret}}
	area, err := o.public.Contents()
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s is %w: restore it from a copy: %w", path, fs.ErrInvalid, err)
	case !bytes.Equal(area.AuthPolicy.Buffer, binding(file)):
		return nil, fmt.Errorf("%s is %w: it has the key of another file", path, fs.ErrInvalid)
	}
	if err := call.with(o, func(tpm2.AuthHandle) error { return nil }); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return o, nil
}

// cut returns the first sized buffer in data, nil if it is not whole, and what follows.
func cut(data []byte) (buffer, rest []byte) {
	if len(data) < 2 || len(data)-2 < int(binary.BigEndian.Uint16(data)) {
		return nil, nil
	}
	end := 2 + int(binary.BigEndian.Uint16(data))
	return data[2:end], data[end:]
}

// NewKey implements [ca.Custodian].
func (c *custodian) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	return inDir(ctx, c, func(call *call, root *os.Root) (crypto.Signer, error) {
		file, err := file(name)
		if err == nil {
			err = c.free(root, file)
		}
		if err != nil {
			return nil, err
		}
		o, err := call.create(algorithm, binding(file))
		if err != nil {
			return nil, err
		}
		if err := c.write(call.ctx, root, file, o); err != nil {
			return nil, err
		}
		return o.key(c.tpm)
	})
}

// Key implements [ca.Custodian].
func (c *custodian) Key(ctx context.Context, name string) (crypto.Signer, error) {
	return inDir(ctx, c, func(call *call, root *os.Root) (crypto.Signer, error) {
		file, err := file(name)
		if err != nil {
			return nil, err
		}
		o, err := c.read(call, root, file)
		if err != nil {
			return nil, err
		}
		return o.key(c.tpm)
	})
}

// Destroy implements [ca.Custodian].
func (c *custodian) Destroy(ctx context.Context, name string) error {
	_, err := inDir(ctx, c, func(_ *call, root *os.Root) (struct{}, error) {
		file, err := file(name)
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, locked(root, func() error {
			if err := root.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			return disk.OS{}.SyncDir(root, ".")
		})
	})
	return err
}

// Keys implements [ca.Custodian].
func (c *custodian) Keys(ctx context.Context, prefix string) ([]string, error) {
	return inDir(ctx, c, func(_ *call, root *os.Root) (names []string, err error) {
		entries, err := fs.ReadDir(root.FS(), ".")
		for _, entry := range entries {
			if name, ok := strings.CutSuffix(entry.Name(), suffix); ok && strings.HasPrefix(name, prefix) {
				names = append(names, name)
			}
		}
		return names, err
	})
}

// A sealed secret is a version, the beginning of the hash of the sealing key's public area, a salt, and the secret
// encrypted by AES-256-GCM with a key that the TPM makes of all that by HMAC.
const (
	version = 1
	idSize  = 16
	header  = 1 + idSize + 32
)

// Seal implements [ca.Sealer].
func (c *custodian) Seal(ctx context.Context, secret, associated []byte) ([]byte, error) {
	return inDir(ctx, c, func(call *call, root *os.Root) ([]byte, error) {
		o, err := c.read(call, root, sealName)
		if errors.Is(err, fs.ErrNotExist) {
			if o, err = call.createWith(sealing()); err == nil {
				err = c.write(call.ctx, root, sealName, o)
			}
			if errors.Is(err, fs.ErrExist) { // another process was faster
				o, err = c.read(call, root, sealName)
			}
		}
		if err != nil {
			return nil, err
		}
		salt := make([]byte, header-1-idSize)
		rand.Read(salt)
		head := slices.Concat([]byte{version}, o.id(), salt)
		aead, err := call.aead(o, head)
		if err != nil {
			return nil, err
		}
		return aead.Seal(head, nil, secret, associated), nil
	})
}

// Unseal implements [ca.Sealer].
func (c *custodian) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	return inDir(ctx, c, func(call *call, root *os.Root) ([]byte, error) {
		if len(sealed) < header || sealed[0] != version {
			return nil, fmt.Errorf("%w: the secret was not sealed with a TPM", fs.ErrInvalid)
		}
		o, err := c.read(call, root, sealName)
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(o.id(), sealed[1:1+idSize]) {
			return nil, fmt.Errorf("%w: the secret was sealed with another key than that in %s: restore that file",
				fs.ErrNotExist, filepath.Join(c.path, sealName))
		}
		aead, err := call.aead(o, sealed[:header])
		if err != nil {
			return nil, err
		}
		secret, err := aead.Open(nil, nil, sealed[header:], associated)
		if err != nil {
			return nil, fmt.Errorf("%w: the sealed secret, or what it belongs to, was changed", fs.ErrInvalid)
		}
		return secret, nil
	})
}

// sealing describes the key that seals, for createWith.
func sealing() (tpm2.TPMAlgID, tpm2.TPMUPublicParms, []byte) {
	return tpm2.TPMAlgKeyedHash, tpm2.NewTPMUPublicParms(tpm2.TPMAlgKeyedHash, &tpm2.TPMSKeyedHashParms{
		Scheme: tpm2.TPMTKeyedHashScheme{Scheme: tpm2.TPMAlgHMAC, Details: tpm2.NewTPMUSchemeKeyedHash(
			tpm2.TPMAlgHMAC, &tpm2.TPMSSchemeHMAC{HashAlg: tpm2.TPMAlgSHA256})}}), binding(sealName)
}

// id names the key.
func (o *object) id() []byte {
	sum := sha256.Sum256(o.public.Bytes())
	return sum[:idSize]
}

// aead returns the cipher for the secret with this head.
func (c *call) aead(o *object, head []byte) (aead cipher.AEAD, err error) {
	err = c.with(o, func(h tpm2.AuthHandle) error {
		r, err := tpm2.Hmac{Handle: h, Buffer: tpm2.TPM2BMaxBuffer{Buffer: head}, HashAlg: tpm2.TPMAlgSHA256}.Execute(c)
		if err != nil {
			return err
		}
		block, err := aes.NewCipher(r.OutHMAC.Buffer)
		if err == nil {
			aead, err = cipher.NewGCMWithRandomNonce(block)
		}
		return err
	})
	return aead, err
}
