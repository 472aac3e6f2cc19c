package custodiantest_test

import (
	"context"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/rsa"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// faultVariable names the fault that the memory has in the process of a test that has to fail.
const faultVariable = "CUSTODIANTEST_FAULT"

var supported = []string{"ecdsa-p256", "ecdsa-p384", "ed25519", "rsa-2048", "rsa-3072"}

// memory is a custodian without protection, with a fault unless that is empty.
type memory struct {
	fault string
	mu    sync.Mutex
	keys  map[string]crypto.Signer
}

func (m *memory) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, taken := m.keys[name]
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case taken && m.fault != "replaces":
		return nil, fs.ErrExist
	case !slices.Contains(supported, algorithm) && m.fault == "vague":
		return nil, errors.New("no such algorithm")
	case !slices.Contains(supported, algorithm):
		return nil, errors.ErrUnsupported
	}
	m.keys[name] = must.Do(pki.NewKey(algorithm))
	return m.signer(m.keys[name]), nil
}

func (m *memory) Key(ctx context.Context, name string) (crypto.Signer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for n, key := range m.keys {
		if n == name || m.fault == "begins" && strings.HasPrefix(n, name) {
			if ctx.Err() != nil && m.fault != "hasty" {
				return nil, ctx.Err()
			} else if ctx.Err() == nil {
				return m.signer(key), nil
			}
		}
	}
	return nil, fs.ErrNotExist
}

func (m *memory) Destroy(_ context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for n := range m.keys {
		if n == name || m.fault == "sweeps" && n[:40] == name[:40] {
			delete(m.keys, n)
			return nil
		}
	}
	if m.fault == "once" {
		return fs.ErrNotExist
	}
	return nil
}

func (m *memory) Keys(ctx context.Context, prefix string) (names []string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for n := range m.keys {
		if m.fault == "lists" || strings.HasPrefix(n, prefix) {
			names = append(names, n)
		}
	}
	return names, ctx.Err()
}

func (m *memory) signer(key crypto.Signer) crypto.Signer {
	if m.fault == "tells" {
		return key
	}
	return &signer{m.fault, key}
}

type signer struct {
	fault string
	key   crypto.Signer
}

func (s *signer) Public() crypto.PublicKey { return s.key.Public() }

func (s *signer) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	pss, ok := opts.(*rsa.PSSOptions)
	switch {
	case ok && s.fault == "pkcs1":
		opts = pss.Hash
	case ok && s.fault == "salt":
		opts = &rsa.PSSOptions{Hash: pss.Hash, SaltLength: 20}
	case s.fault == "hash" && opts.HashFunc() == crypto.SHA384:
		opts = crypto.SHA256
	}
	signature, err := s.key.Sign(rand.Reader, digest, opts)
	if s.fault == "cut" && err == nil {
		signature = signature[:len(signature)-1]
	}
	return signature, err
}

// box is a sealer with a key in memory, with a fault unless that is empty.
type box struct {
	fault string
	aead  cipher.AEAD
}

func newBox(fault string) *box {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	return &box{fault, must.Do(cipher.NewGCMWithRandomNonce(must.Do(aes.NewCipher(key))))}
}

func (b *box) Seal(_ context.Context, secret, associated []byte) ([]byte, error) {
	switch b.fault {
	case "clear":
		return append([]byte(nil), secret...), nil
	case "alone":
		associated = nil
	}
	return b.aead.Seal(nil, nil, secret, associated), nil
}

func (b *box) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	switch b.fault {
	case "clear":
		return sealed, nil
	case "alone":
		associated = nil
	}
	if ctx.Err() != nil && b.fault != "hasty" {
		return nil, ctx.Err()
	}
	secret, err := b.aead.Open(nil, nil, sealed, associated)
	if ctx.Err() != nil || err != nil && b.fault != "vague" {
		return nil, fs.ErrInvalid
	}
	return secret, err
}

type noKey struct{ *box }

func (noKey) Unseal(context.Context, []byte, []byte) ([]byte, error) { return nil, fs.ErrNotExist }

func TestMemory(t *testing.T) {
	rounds.NotShort(t)
	m := &memory{fault: os.Getenv(faultVariable), keys: map[string]crypto.Signer{}}
	custodiantest.Run(t, func(testing.TB) ca.Custodian {
		if m.fault == "forgets" {
			m = &memory{fault: m.fault, keys: map[string]crypto.Signer{}}
		}
		return m
	}, custodiantest.Options{Algorithms: supported})
	assert.Empty(t, m.keys)
}

func TestBox(t *testing.T) {
	b, other := newBox(os.Getenv(faultVariable)), newBox("")
	if b.fault == "same" {
		other = b
	}
	give := func(s ca.Sealer) func(testing.TB) ca.Sealer { return func(testing.TB) ca.Sealer { return s } }
	custodiantest.Sealer(t, give(b), give(other), give(noKey{b}))
}

// TestFaults: a custodian or a sealer with a fault fails, in the test that is for it.
func TestFaults(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	self := must.Get(os.Executable())(t)
	for _, c := range []struct{ test, fault, fails string }{
		{"TestMemory", "replaces", "Names"}, {"TestMemory", "vague", "Unsupported"}, {"TestMemory", "begins", "Names"},
		{"TestMemory", "hasty", "Context"}, {"TestMemory", "sweeps", "Names"}, {"TestMemory", "once", "Names"},
		{"TestMemory", "lists", "Names"}, {"TestMemory", "tells", "ecdsa-p256"}, {"TestMemory", "pkcs1", "rsa-2048"},
		{"TestMemory", "salt", "rsa-3072"}, {"TestMemory", "hash", "rsa-2048"}, {"TestMemory", "cut", "ed25519"},
		{"TestMemory", "forgets", "Another"}, {"TestBox", "clear", "Altered"}, {"TestBox", "alone", "Altered"},
		{"TestBox", "hasty", "Context"}, {"TestBox", "vague", "Altered"}, {"TestBox", "same", "Other"},
	} {
		cmd := exec.Command(self, "-test.run=^"+c.test+"$/^"+c.fails+"$", "-test.v")
		cmd.Env = append(os.Environ(), faultVariable+"="+c.fault)
		out, err := cmd.CombinedOutput()
		assert.Error(t, err, "%s passes with the fault %s", c.test, c.fault)
		assert.Contains(t, string(out), fmt.Sprintf("--- FAIL: %s/%s", c.test, c.fails), c.fault)
		assert.NotContains(t, string(out), "panic:", c.fault)
	}
}
