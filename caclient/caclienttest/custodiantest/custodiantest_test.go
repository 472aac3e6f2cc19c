package custodiantest_test

import (
	"context"
	"crypto"
	"crypto/rsa"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/internal/test/custodian"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// faultVariable names the fault that the memory has in the process of a test that has to fail.
const faultVariable = "CUSTODIANTEST_FAULT"

var supported = []string{"ecdsa-p256", "ecdsa-p384", "ed25519", "rsa-2048", "rsa-3072"}

// memory is a custodian with a fault, unless that is empty.
type memory struct {
	*custodian.Custodian
	fault string
}

func (m *memory) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	switch {
	case !slices.Contains(supported, algorithm) && m.fault == "vague":
		return nil, errors.New("no such algorithm")
	case !slices.Contains(supported, algorithm):
		return nil, errors.ErrUnsupported
	case m.fault == "replaces":
		_ = m.Custodian.Destroy(ctx, name)
	case m.fault == "races" && !slices.Contains(m.Names(), name):
		key := must.Do(pki.NewKey(algorithm))
		time.Sleep(10 * time.Millisecond)
		m.Put(name, key)
		return m.signer(key, nil)
	case m.fault == "cuts":
		name = name[:min(64, len(name))]
	}
	key, err := m.Custodian.NewKey(ctx, name, algorithm)
	if m.fault == "tells" && err == nil {
		key = must.Do(pki.NewKey(algorithm))
		m.Put(name, key)
		return key, nil
	}
	return m.signer(key, err)
}

func (m *memory) Key(ctx context.Context, name string) (crypto.Signer, error) {
	for _, n := range m.Names() {
		if m.fault == "begins" && strings.HasPrefix(n, name) || m.fault == "cuts" && n == name[:min(64, len(name))] {
			name = n
		}
	}
	key, err := m.Custodian.Key(ctx, name)
	if ctx.Err() != nil && m.fault == "hasty" {
		err = fs.ErrNotExist
	}
	return m.signer(key, err)
}

func (m *memory) Destroy(ctx context.Context, name string) error {
	names := m.Names()
	if m.fault == "busy" && slices.Contains(names, name) {
		time.Sleep(10 * time.Millisecond)
		if !slices.Contains(m.Names(), name) {
			return errors.New("it is gone")
		}
	}
	if m.fault == "once" && !slices.Contains(names, name) {
		return fs.ErrNotExist
	}
	for _, n := range names {
		if m.fault == "sweeps" && n[:40] == name[:40] || m.fault == "prunes" && strings.HasPrefix(n, name) {
			_ = m.Custodian.Destroy(ctx, n)
		}
	}
	return m.Custodian.Destroy(ctx, name)
}

func (m *memory) Keys(ctx context.Context, prefix string) ([]string, error) {
	switch m.fault {
	case "lists":
		prefix = ""
	case "contains":
		return slices.DeleteFunc(m.Names(), func(n string) bool { return !strings.Contains(n, prefix) }), ctx.Err()
	}
	return m.Custodian.Keys(ctx, prefix)
}

func (m *memory) signer(key crypto.Signer, err error) (crypto.Signer, error) {
	if err != nil {
		return nil, err
	}
	return &signer{m.fault, key}, nil
}

type signer struct {
	fault string
	crypto.Signer
}

func (s *signer) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	pss, ok := opts.(*rsa.PSSOptions)
	switch {
	case ok && s.fault == "pkcs1":
		opts = pss.Hash
	case ok && s.fault == "salt":
		opts = &rsa.PSSOptions{Hash: pss.Hash, SaltLength: 20}
	case s.fault == "hash" && opts.HashFunc() == crypto.SHA384:
		opts = crypto.SHA256
	}
	signature, err := s.Signer.Sign(r, digest, opts)
	if s.fault == "cut" && err == nil {
		signature = signature[:len(signature)-1]
	}
	return signature, err
}

// box is a sealer with a fault, unless that is empty.
type box struct {
	*custodian.Custodian
	fault string
}

func (b *box) Seal(ctx context.Context, secret, associated []byte) ([]byte, error) {
	switch b.fault {
	case "clear":
		return slices.Clone(secret), nil
	case "alone":
		associated = nil
	case "shortens":
		associated = associated[:min(1024, len(associated))]
	}
	return b.Custodian.Seal(ctx, secret, associated)
}

func (b *box) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	switch b.fault {
	case "clear":
		return sealed, nil
	case "alone":
		associated = nil
	case "shortens":
		associated = associated[:min(1024, len(associated))]
	}
	secret, err := b.Custodian.Unseal(ctx, sealed, associated)
	if err != nil && b.fault == "vague" {
		return nil, errors.New("it did not work")
	}
	if ctx.Err() != nil && b.fault == "hasty" {
		return nil, fs.ErrInvalid
	}
	return secret, err
}

type noKey struct{ *box }

func (noKey) Unseal(context.Context, []byte, []byte) ([]byte, error) { return nil, fs.ErrNotExist }

func TestMemory(t *testing.T) {
	rounds.NotShort(t)
	m := &memory{custodian.New(), os.Getenv(faultVariable)}
	custodiantest.Run(t, func(testing.TB) ca.Custodian {
		if m.fault == "forgets" {
			m.Custodian = custodian.New()
		}
		return m
	}, custodiantest.Options{Algorithms: supported})
	assert.Empty(t, m.Names())
}

func TestBox(t *testing.T) {
	b, other := &box{custodian.New(), os.Getenv(faultVariable)}, &box{Custodian: custodian.New()}
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
		{"TestMemory", "forgets", "Another"}, {"TestMemory", "races", "AtOnce"}, {"TestMemory", "cuts", "Names"},
		{"TestMemory", "prunes", "Names"}, {"TestMemory", "contains", "Names"}, {"TestBox", "clear", "Altered"},
		{"TestMemory", "busy", "AtOnce"}, {"TestBox", "alone", "Altered"}, {"TestBox", "shortens", "Altered"},
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
