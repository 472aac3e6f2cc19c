package sidecar

import (
	"context"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/pki"
)

// maxIdentityFile bounds each file of an identity, in bytes.
const maxIdentityFile = 1 << 20

// Files are the files in which a pod keeps its identity. Readers never see a partial file. If a process is killed
// while it writes, either the new identity or the previous one remains, and the next read or write completes the
// change. Only one process may write at a time. Missing directories are created. The key and the token have mode
// 0440, the others 0444.
type Files struct {
	// KeyFile, CertificateFile and RootsFile are the paths of the private key, of the certificate with its
	// intermediates, and of the roots, in PEM and in one directory. An RSA key is in PKCS#1, any other in PKCS#8. If
	// no roots come with the certificate, their file stays as it is.
	KeyFile, CertificateFile, RootsFile string

	// TokenFile is the path of the service token. If it is empty, no token is written.
	TokenFile string
}

// check validates the paths.
func (f Files) check() error {
	dir, key, cert := filepath.Dir(f.KeyFile), filepath.Clean(f.KeyFile), filepath.Clean(f.CertificateFile)
	roots, token := filepath.Clean(f.RootsFile), filepath.Clean(f.TokenFile)
	switch {
	case f.KeyFile == "" || f.CertificateFile == "" || f.RootsFile == "":
		return errors.New("Files: one of KeyFile, CertificateFile and RootsFile is empty")
	case filepath.Dir(f.CertificateFile) != dir || filepath.Dir(f.RootsFile) != dir:
		return errors.New("Files: KeyFile, CertificateFile and RootsFile are not in one directory, in which they " +
			"change together")
	case key == cert || key == roots || cert == roots || token == key || token == cert || token == roots:
		return errors.New("Files: two of them have the same path")
	}
	return nil
}

// store is a validated Files.
type store struct {
	Files
	logger *slog.Logger
}

// write replaces the files.
func (f store) write(ctx context.Context, i *Identity) error {
	certs, key, err := i.Credential.MarshalPEM()
	if err != nil {
		return err
	}
	if rsaKey, ok := i.Credential.TLSCertificate().PrivateKey.(*rsa.PrivateKey); ok {
		key = pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(rsaKey)})
	}
	keyName, certName := filepath.Base(f.KeyFile), filepath.Base(f.CertificateFile)
	set := map[string]fileset.File{keyName: {Data: key, Mode: 0o440}, certName: {Data: certs, Mode: 0o444}}
	if roots := i.Roots; len(roots) > 0 {
		set[filepath.Base(f.RootsFile)] = fileset.File{Data: pki.MarshalCertificatesPEM(roots...), Mode: 0o444}
	}
	// The token has its own file; it also goes with the previous certificate.
	if token := i.ServiceToken(); f.TokenFile != "" && token != "" {
		if err := f.replace(ctx, filepath.Dir(f.TokenFile),
			map[string]fileset.File{filepath.Base(f.TokenFile): {Data: []byte(token), Mode: 0o440}}); err != nil {
			return fmt.Errorf("service token: %w", err)
		}
	}
	return f.replace(ctx, filepath.Dir(f.KeyFile), set, keyName, certName)
}

func (f store) replace(ctx context.Context, dir string, set map[string]fileset.File, last ...string) error {
	folder, err := f.open(ctx, dir, last...)
	if err != nil {
		return err
	}
	_, err = folder.Write(set)
	return errors.Join(err, folder.Close())
}

func (f store) open(ctx context.Context, dir string, last ...string) (*fileset.Folder, error) {
	return fileset.Open(dir, fileset.Options{Program: "athenz", Plain: true, Last: last, Warn: func(err error) {
		f.logger.LogAttrs(ctx, slog.LevelWarn, "sidecar: other users may replace the files of the identity",
			slog.Any("err", err))
	}})
}

// read returns the identity that write wrote. The error wraps [fs.ErrNotExist] if there is none. Unreadable roots,
// and a service token that is unreadable or another service's, are left out with a warning: the next refresh writes
// them again.
func (f store) read() (*Identity, error) {
	if _, err := os.Stat(filepath.Dir(f.KeyFile)); err != nil {
		return nil, err
	}
	ctx := context.Background()
	folder, err := f.open(ctx, filepath.Dir(f.KeyFile), filepath.Base(f.KeyFile), filepath.Base(f.CertificateFile))
	if err != nil {
		return nil, err
	}
	defer folder.Close() // opening it completes an interrupted change
	certs, err := files.Read(f.CertificateFile, maxIdentityFile)
	var key []byte
	if err == nil {
		key, err = files.Read(f.KeyFile, maxIdentityFile)
	}
	if err != nil {
		return nil, err
	}
	credential, err := pki.ParseCredentialPEM(certs, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Dir(f.KeyFile), err)
	}
	var roots []*x509.Certificate
	f.optional(ctx, f.RootsFile, func(data []byte) (err error) {
		roots, err = pki.ParseCertificatesPEM(data)
		return err
	})
	var token string
	f.optional(ctx, f.TokenFile, func(data []byte) error {
		own := credential.Leaf().Subject.CommonName
		if service := serviceOf(string(data)); own != "" && service != "." && !strings.EqualFold(service, own) {
			return fmt.Errorf("it is the token of %.256q, and the certificate is that of %q", service, own)
		}
		token = string(data)
		return nil
	})
	return newIdentity(credential, roots, func() string { return token }), nil
}

// serviceOf returns the service that a service token names. It does not verify the token.
func serviceOf(token string) string {
	names := map[string]string{}
	for part := range strings.SplitSeq(token, ";") {
		name, value, _ := strings.Cut(part, "=")
		names[name] = value
	}
	return names["d"] + "." + names["n"]
}

// optional reads a file that an identity can do without.
func (f store) optional(ctx context.Context, name string, use func([]byte) error) {
	if name == "" {
		return
	}
	data, err := files.Read(name, maxIdentityFile)
	if err == nil && len(data) > 0 {
		err = use(data)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.logger.LogAttrs(ctx, slog.LevelWarn, "sidecar: a file of the identity cannot be read",
			slog.String("file", name), slog.Any("err", err))
	}
}
