package linkerdproxy

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/pki"
)

const (
	maxFile   = 1 << 20
	storeMode = 0o400 // of files that do not change during the process
	probeName = ".linkerdproxy-probe"
)

// store is the key and the signing request of a process.
type store struct {
	key func() crypto.Signer // a func, so that no printer sees the key
	csr *pki.CSR
}

// names returns the names of the files in a store directory; an empty anchors means no such file.
func (c *Config) names() (key, csr, anchors string) {
	if c.CurrentNames {
		return "key.p8", "csr.der", ""
	}
	return "key.der", "csr.p8", "trust-anchors.pem"
}

// checkToken finds an unusable token file before a key is made in vain.
func checkToken(file string) error {
	data, err := files.Read(file, maxFile)
	switch {
	case err != nil:
		return fmt.Errorf("the token of the service account: %w", err)
	case len(bytes.TrimSpace(data)) == 0:
		return fmt.Errorf("the token file %s is empty: mount the token of the service account there", file)
	}
	return nil
}

// openStore makes the key and the signing request, or reads another process's.
func openStore(cfg *Config) (*store, error) {
	if cfg.KeyFile != "" {
		return readStore(cfg)
	}
	var folder *os.Root
	if cfg.Dir != "" {
		var err error
		if folder, err = openDir(cfg); err != nil {
			return nil, fmt.Errorf("the directory of the identity: %s: %w", cfg.Dir, err)
		}
		defer folder.Close()
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	s, err := newStore(cfg, key)
	if err != nil || folder == nil {
		return s, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	keyName, csrName, anchorsName := cfg.names()
	for _, f := range []struct {
		name string
		data []byte
	}{{anchorsName, cfg.Anchors}, {keyName, der}, {csrName, s.csr.DER()}} {
		if f.name == "" {
			continue
		}
		if err := fileset.Replace(folder, f.name, fileset.File{Data: f.data, Mode: storeMode}); err != nil {
			return nil, fmt.Errorf("the directory of the identity: %s: %w", cfg.Dir, err)
		}
	}
	return s, nil
}

func newStore(cfg *Config, key crypto.Signer) (*store, error) {
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN(cfg.Name)}})
	if err != nil {
		return nil, err
	}
	return &store{key: func() crypto.Signer { return key }, csr: csr}, nil
}

// openDir opens the existing store directory, and checks that it is writable.
func openDir(cfg *Config) (*os.Root, error) {
	// An emptyDir is root's, mode 0777.
	warn := func(err error) { cfg.Logger.Warn("linkerdproxy: the store is not safe from other users", "err", err) }
	root, err := private.OpenDir(cfg.Dir, private.Options{Warn: warn})
	if err != nil {
		return nil, fmt.Errorf("%w (mount a directory in memory there)", err)
	}
	err = fileset.Replace(root, probeName, fileset.File{Mode: storeMode})
	if err == nil {
		err = root.Remove(probeName)
	}
	if err != nil {
		_ = root.Close()
		return nil, fmt.Errorf("no file can be written: %w; let user %d write to it", err, os.Getuid())
	}
	return root, nil
}

// readStore reads the files of another process.
func readStore(cfg *Config) (*store, error) {
	der, err := readKeyFile(cfg.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("the key, Config.KeyFile: %w", err)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(der)
	clear(der)
	if err != nil {
		return nil, fmt.Errorf("the key %s, Config.KeyFile, is not PKCS#8 in DER", cfg.KeyFile)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("the key %s, Config.KeyFile, is not ECDSA with P-256", cfg.KeyFile)
	}
	data, err := files.Read(cfg.CSRFile, maxFile)
	if err != nil {
		return nil, fmt.Errorf("the signing request, Config.CSRFile: %w", err)
	}
	csr, err := pki.ParseCSR(data)
	switch {
	case err != nil:
		return nil, fmt.Errorf("the signing request %s, Config.CSRFile: %w", cfg.CSRFile, err)
	case !pki.PublicKeysEqual(csr.PublicKey(), key.Public()):
		return nil, fmt.Errorf("the signing request %s, Config.CSRFile, is for another key than %s has", cfg.CSRFile,
			cfg.KeyFile)
	case !slices.Equal(csr.SANs(), []pki.SAN{pki.DNSSAN(cfg.Name)}):
		return nil, fmt.Errorf("the signing request %s, Config.CSRFile, is for %.300v, want %q alone", cfg.CSRFile,
			csr.SANs(), cfg.Name)
	}
	return &store{key: func() crypto.Signer { return key }, csr: csr}, nil
}

func readKeyFile(name string) ([]byte, error) {
	// Its directory may be an emptyDir.
	f, err := private.OpenGiven(name, true, nil, private.Options{Warn: func(error) {}})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err == nil && len(data) == 0 {
		err = errors.New(name + " is empty")
	}
	return data, err
}

// Environ returns the variables that tell another process where [Config].Dir holds the key, the signing request and
// the trust anchors, for [FromEnviron]. It returns nil before [Identity.Run] has made them, or if they are not in
// such files.
func (id *Identity) Environ() []string {
	key, csr, anchors := id.cfg.names()
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.store == nil || id.cfg.Dir == "" || anchors == "" {
		return nil
	}
	return []string{
		envKeyFile + "=" + filepath.Join(id.cfg.Dir, key),
		envCSRFile + "=" + filepath.Join(id.cfg.Dir, csr),
		envAnchorsFile + "=" + filepath.Join(id.cfg.Dir, anchors),
	}
}
