// Package custodian is a custodian of private keys, and a sealer, in memory, with the faults that a test asks for.
package custodian

import (
	"context"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/pki"
)

// Custodian is a ca.Custodian and a ca.Sealer; [New] makes one.
type Custodian struct {
	// Fault is called before each call, with "new", "key", "sign", "destroy", "keys", "seal" or "unseal" and the name of
	// the key. Its error is the call's; it may also block. Nil means no faults. Set it before the first use.
	Fault func(ctx context.Context, op, name string) error
	// Late is called after "new" and "destroy" were done; its error is the call's.
	Late func(op, name string) error
	// Spoil changes signatures and unsealed secrets before they are returned.
	Spoil func(result []byte) []byte

	mu   sync.Mutex
	keys map[string]crypto.Signer
	seal cipher.AEAD
}

// New returns a custodian without keys.
func New() *Custodian {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	block, _ := aes.NewCipher(key)
	seal, _ := cipher.NewGCMWithRandomNonce(block)
	return &Custodian{keys: map[string]crypto.Signer{}, seal: seal}
}

// String keeps the keys out of logs.
func (c *Custodian) String() string { return "custodian.Custodian" }

func (c *Custodian) fault(ctx context.Context, op, name string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if c.Fault != nil {
		return c.Fault(ctx, op, name)
	}
	return nil
}

// NewKey implements ca.Custodian.
func (c *Custodian) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	if err := c.fault(ctx, "new", name); err != nil {
		return nil, err
	}
	var key crypto.Signer
	var err error
	if algorithm == "ecdsa-p521" {
		key, err = ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	} else if key, err = pki.NewKey(algorithm); err != nil {
		return nil, fmt.Errorf("custodian: %w: %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	_, taken := c.keys[name]
	if !taken {
		c.keys[name] = key
	}
	c.mu.Unlock()
	if taken {
		return nil, fmt.Errorf("custodian: %s: %w", name, fs.ErrExist)
	}
	if c.Late != nil {
		if err := c.Late("new", name); err != nil {
			return nil, err
		}
	}
	return signer{c, name, key.Public()}, nil
}

// Key implements ca.Custodian.
func (c *Custodian) Key(ctx context.Context, name string) (crypto.Signer, error) {
	if err := c.fault(ctx, "key", name); err != nil {
		return nil, err
	}
	key, err := c.get(name)
	if err != nil {
		return nil, err
	}
	return signer{c, name, key.Public()}, nil
}

func (c *Custodian) get(name string) (crypto.Signer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if key, ok := c.keys[name]; ok {
		return key, nil
	}
	return nil, fmt.Errorf("custodian: %s: %w", name, fs.ErrNotExist)
}

// Destroy implements ca.Custodian.
func (c *Custodian) Destroy(ctx context.Context, name string) error {
	if err := c.fault(ctx, "destroy", name); err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.keys, name)
	c.mu.Unlock()
	if c.Late != nil {
		return c.Late("destroy", name)
	}
	return nil
}

// Keys implements ca.Custodian.
func (c *Custodian) Keys(ctx context.Context, prefix string) ([]string, error) {
	if err := c.fault(ctx, "keys", prefix); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(c.Names(), func(name string) bool { return !strings.HasPrefix(name, prefix) }), nil
}

// Names returns the names of all keys, sorted.
func (c *Custodian) Names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.keys))
}

// Put replaces the key with this name.
func (c *Custodian) Put(name string, key crypto.Signer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keys[name] = key
}

// Seal implements ca.Sealer.
func (c *Custodian) Seal(ctx context.Context, secret, associated []byte) ([]byte, error) {
	if err := c.fault(ctx, "seal", ""); err != nil {
		return nil, err
	}
	return c.seal.Seal(nil, nil, secret, associated), nil
}

// Unseal implements ca.Sealer.
func (c *Custodian) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	if err := c.fault(ctx, "unseal", ""); err != nil {
		return nil, err
	}
	secret, err := c.seal.Open(nil, nil, sealed, associated)
	if err != nil {
		return nil, fmt.Errorf("custodian: unseal: %w", fs.ErrInvalid)
	}
	return c.spoil(secret), nil
}

func (c *Custodian) spoil(b []byte) []byte {
	if c.Spoil != nil {
		return c.Spoil(b)
	}
	return b
}

type signer struct {
	c      *Custodian
	name   string
	public crypto.PublicKey
}

func (s signer) Public() crypto.PublicKey { return s.public }

func (s signer) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	if err := s.c.fault(context.Background(), "sign", s.name); err != nil {
		return nil, err
	}
	key, err := s.c.get(s.name)
	if err != nil {
		return nil, err
	}
	signature, err := key.Sign(r, digest, opts)
	if err != nil {
		return nil, err
	}
	return s.c.spoil(signature), nil
}
