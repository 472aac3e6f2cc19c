package tpmkey

import (
	"bytes"
	"context"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-tpm/tpm2"

	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/pki/ca"
)

// The ends of the names of files with keys, the name of the file with the key that seals, and the size of rand.Text.
const suffix, sealFile, saltSize = ".tpmkey", "sealing-key.tpmhmac", 26

// Custodian returns the custodian of the keys in the directory at path, and a sealer with a key there. It makes the
// directory if it is missing, with mode 0700; no other user may have access. Several processes of this machine may use
// it at the same time.
//
// Each key is in a file "NAME.tpmkey", which can be used only under this name; the sealer's key, which the first Seal
// makes, is in "sealing-key.tpmhmac". The algorithms are those of [TPM.NewKey]. A file that is damaged, renamed or of
// another TPM, and all files after the TPM was cleared, give errors that wrap [fs.ErrInvalid], and not fs.ErrNotExist:
// the right TPM may be elsewhere.
func (t *TPM) Custodian(path string) (interface {
	ca.Custodian
	ca.Sealer
}, error) {
	root, err := private.MakeDir(path, private.Options{Keys: true})
	if err != nil {
		return nil, fmt.Errorf("tpmkey: %w", err)
	}
	return &custodian{t, root}, nil
}

// custodian implements [ca.Custodian] and [ca.Sealer]. The goroutine that has the TPM does all work, with the files,
// too, so that a caller waits no longer than its context says.
type custodian struct {
	tpm  *TPM
	root *os.Root
}

// file returns the name of the file of a key.
func file(name string) string { return url.PathEscape(name) + suffix }

// contents of a file.
type contents struct{ Public, Private []byte }

// binding becomes a part of the key in a file, so that no other file can pass for it.
func binding(file string) []byte {
	sum := sha256.Sum256([]byte("svidkit tpmkey " + file))
	return sum[:]
}

// make makes a key and its file. After a crash the file is whole or missing.
func (c *custodian) make(call *call, file, algorithm string) (*key, error) {
	k, err := call.create(algorithm, binding(file))
	if err := errors.Join(err, call.ctx.Err()); err != nil {
		return nil, err
	}
	data, _ := json.Marshal(contents{k.area.Bytes(), k.private.Buffer})
	draft := "draft-" + rand.Text()
	if err := fileset.Replace(c.root, draft, fileset.File{Data: data, Mode: 0o600}); err != nil {
		return nil, err
	}
	err = c.root.Link(draft, file) // unlike a rename, it never replaces the file of another process
	return k, errors.Join(err, c.root.Remove(draft), disk.OS{}.SyncDir(c.root, "."))
}

// read returns the key in a file, which the TPM has loaded once.
func (c *custodian) read(call *call, file string) (*key, error) {
	path := filepath.Join(c.root.Name(), file)
	data, err := c.root.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var has contents
	err = json.Unmarshal(data, &has)
	k := c.tpm.key(tpm2.BytesAs2B[tpm2.TPMTPublic](has.Public), tpm2.TPM2BPrivate{Buffer: has.Private})
	area, areaErr := k.area.Contents()
	if err != nil || areaErr != nil || !bytes.Equal(area.AuthPolicy.Buffer, binding(file)) {
		return nil, fmt.Errorf("%s is damaged, or the file of another key: %w", path, fs.ErrInvalid)
	}
	if err := call.with(k, func(tpm2.AuthHandle) error { return nil }); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return k, nil
}

// NewKey implements [ca.Custodian].
func (c *custodian) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	return use(ctx, makeTime, c.tpm, func(x *call) (crypto.Signer, error) { return c.make(x, file(name), algorithm) })
}

// Key implements [ca.Custodian].
func (c *custodian) Key(ctx context.Context, name string) (crypto.Signer, error) {
	return use(ctx, makeTime, c.tpm, func(x *call) (crypto.Signer, error) { return c.read(x, file(name)) })
}

// Destroy implements [ca.Custodian].
func (c *custodian) Destroy(ctx context.Context, name string) error {
	_, err := use(ctx, makeTime, c.tpm, func(*call) (any, error) {
		return nil, errors.Join(c.root.RemoveAll(file(name)), disk.OS{}.SyncDir(c.root, "."))
	})
	return err
}

// Keys implements [ca.Custodian].
func (c *custodian) Keys(ctx context.Context, prefix string) ([]string, error) {
	return use(ctx, makeTime, c.tpm, func(*call) (names []string, err error) {
		entries, err := fs.ReadDir(c.root.FS(), ".")
		for _, entry := range entries {
			escaped, ok := strings.CutSuffix(entry.Name(), suffix)
			name, badName := url.PathUnescape(escaped)
			if ok && badName == nil && strings.HasPrefix(name, prefix) {
				names = append(names, name)
			}
		}
		return names, err
	})
}

// Seal implements [ca.Sealer]. The result is a salt, and the secret encrypted with a key that the TPM derives from it.
func (c *custodian) Seal(ctx context.Context, secret, associated []byte) ([]byte, error) {
	return use(ctx, makeTime, c.tpm, func(call *call) ([]byte, error) {
		salt := []byte(rand.Text())
		aead, err := c.aead(call, salt)
		if errors.Is(err, fs.ErrNotExist) {
			_, err = c.make(call, sealFile, sealFile)
			if err == nil || errors.Is(err, fs.ErrExist) { // another process was faster
				aead, err = c.aead(call, salt)
			}
		}
		if err != nil {
			return nil, err
		}
		return aead.Seal(salt, nil, secret, associated), nil
	})
}

// Unseal implements [ca.Sealer].
func (c *custodian) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	return use(ctx, makeTime, c.tpm, func(call *call) ([]byte, error) {
		salt := sealed[:min(saltSize, len(sealed))]
		aead, err := c.aead(call, salt)
		if err != nil {
			return nil, err
		}
		secret, err := aead.Open(nil, nil, sealed[len(salt):], associated)
		if err != nil {
			err = fmt.Errorf("%w: not sealed with the key in %s, or changed since", fs.ErrInvalid,
				filepath.Join(c.root.Name(), sealFile))
		}
		return secret, err
	})
}

// aead returns the cipher for a salt.
func (c *custodian) aead(call *call, salt []byte) (aead cipher.AEAD, err error) {
	k, err := c.read(call, sealFile)
	if err != nil {
		return nil, err
	}
	err = call.with(k, func(h tpm2.AuthHandle) error {
		r, err := tpm2.Hmac{Handle: h, Buffer: tpm2.TPM2BMaxBuffer{Buffer: salt}, HashAlg: tpm2.TPMAlgNull}.Execute(call)
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
