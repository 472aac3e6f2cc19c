package athenz

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

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/pki"
)

// maxIdentityFile is the most bytes of a file with a part of an identity.
const maxIdentityFile = 1 << 20

// IdentityFiles are the files in which a pod keeps its identity: [IdentityFiles.Write] is the Keep of a [SidecarConfig], and
// [IdentityFiles.Read] returns its Identity. Readers never see a part of a file. A process that is killed while it writes
// leaves the whole identity or the one before: what is missing is completed when the files are read or written again.
// One process at a time writes.
type IdentityFiles struct {
	// KeyFile, CertificateFile and RootsFile are the paths of the private key, of the certificate with its intermediates, and
	// of the roots, in PEM and in one folder. An RSA key is in PKCS#1, and any other in PKCS#8.
	KeyFile, CertificateFile, RootsFile string

	// TokenFile is the path of the service token. Empty means that it is not written.
	TokenFile string

	// Logger is warned if other users may replace the files, as in an emptyDir volume of Kubernetes. Nil means no logs.
	Logger *slog.Logger
}

// Check returns what is wrong with the paths.
func (f IdentityFiles) Check() error {
	dir, key, cert := filepath.Dir(f.KeyFile), filepath.Clean(f.KeyFile), filepath.Clean(f.CertificateFile)
	roots, token := filepath.Clean(f.RootsFile), filepath.Clean(f.TokenFile)
	switch {
	case f.KeyFile == "" || f.CertificateFile == "" || f.RootsFile == "":
		return errors.New("athenz: identity files: one of KeyFile, CertificateFile and RootsFile is empty")
	case filepath.Dir(f.CertificateFile) != dir || filepath.Dir(f.RootsFile) != dir:
		return errors.New("athenz: identity files: KeyFile, CertificateFile and RootsFile are not in one folder, in which they change together")
	case key == cert || key == roots || cert == roots || token == key || token == cert || token == roots:
		return errors.New("athenz: identity files: two of them have the same path")
	}
	return nil
}

// String names the folder.
func (f IdentityFiles) String() string {
	return "athenz.IdentityFiles(" + filepath.Dir(f.KeyFile) + ")"
}

// Write replaces the files. Their folders are made if they are missing. The key and the token have the mode 0440, the others
// 0444. The roots are kept as they are if i has none.
func (f IdentityFiles) Write(ctx context.Context, i *Identity) error {
	if err := f.Check(); err != nil {
		return err
	}
	if i == nil || i.Credential == nil {
		return errors.New("athenz: write identity: there is none")
	}
	certs, key, err := i.Credential.MarshalPEM()
	if err != nil {
		return fmt.Errorf("athenz: write identity: %w", err)
	}
	if rsaKey, ok := i.Credential.TLSCertificate().PrivateKey.(*rsa.PrivateKey); ok {
		key = pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(rsaKey)})
	}
	keyName, certName := filepath.Base(f.KeyFile), filepath.Base(f.CertificateFile)
	files := map[string]fileset.File{keyName: {Data: key, Mode: 0o440}, certName: {Data: certs, Mode: 0o444}}
	if roots := i.Roots; len(roots) > 0 {
		files[filepath.Base(f.RootsFile)] = fileset.File{Data: pki.MarshalCertificatesPEM(roots...), Mode: 0o444}
	}
	// The token is a file of its own; it is good with the certificate before, too.
	if token := i.ServiceToken(); f.TokenFile != "" && token != "" {
		if err := f.write(ctx, filepath.Dir(f.TokenFile), map[string]fileset.File{filepath.Base(f.TokenFile): {Data: []byte(token), Mode: 0o440}}); err != nil {
			return fmt.Errorf("athenz: write service token: %w", err)
		}
	}
	if err := f.write(ctx, filepath.Dir(f.KeyFile), files, keyName, certName); err != nil {
		return fmt.Errorf("athenz: write identity: %w", err)
	}
	return nil
}

func (f IdentityFiles) write(ctx context.Context, dir string, files map[string]fileset.File, last ...string) error {
	folder, err := f.open(ctx, dir, last...)
	if err != nil {
		return err
	}
	_, err = folder.Write(files)
	return errors.Join(err, folder.Close())
}

func (f IdentityFiles) open(ctx context.Context, dir string, last ...string) (*fileset.Folder, error) {
	return fileset.Open(dir, fileset.Options{Program: "athenz", Plain: true, Last: last, Warn: func(err error) {
		discard(f.Logger).LogAttrs(ctx, slog.LevelWarn, "athenz: other users may replace the files of the identity", slog.Any("err", err))
	}})
}

// Read returns the identity that Write has written. The error wraps [fs.ErrNotExist] if there is none. Roots or a service token
// that cannot be read are none, and the Logger is warned: the next refresh writes them anew.
func (f IdentityFiles) Read() (*Identity, error) {
	if err := f.Check(); err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Dir(f.KeyFile)); err != nil {
		return nil, fmt.Errorf("athenz: read identity: %w", err)
	}
	ctx := context.Background()
	folder, err := f.open(ctx, filepath.Dir(f.KeyFile), filepath.Base(f.KeyFile), filepath.Base(f.CertificateFile))
	if err != nil {
		return nil, fmt.Errorf("athenz: read identity: %w", err)
	}
	defer folder.Close() // it has completed what was not
	certs, err := files.Read(f.CertificateFile, maxIdentityFile)
	var key []byte
	if err == nil {
		key, err = files.Read(f.KeyFile, maxIdentityFile)
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: read identity: %w", err)
	}
	i := new(Identity)
	if i.Credential, err = pki.ParseCredentialPEM(certs, key); err != nil {
		return nil, fmt.Errorf("athenz: read identity from %s: %w", filepath.Dir(f.KeyFile), err)
	}
	f.optional(ctx, f.RootsFile, func(data []byte) (err error) {
		i.Roots, err = pki.ParseCertificatesPEM(data)
		return err
	})
	f.optional(ctx, f.TokenFile, func(data []byte) error {
		token := string(data)
		i.token = func() string { return token }
		return nil
	})
	return i, nil
}

// optional reads a file without which an identity is one, too.
func (f IdentityFiles) optional(ctx context.Context, name string, use func([]byte) error) {
	if name == "" {
		return
	}
	data, err := files.Read(name, maxIdentityFile)
	if err == nil && len(data) > 0 {
		err = use(data)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		discard(f.Logger).LogAttrs(ctx, slog.LevelWarn, "athenz: a file of the identity cannot be read", slog.String("file", name), slog.Any("err", err))
	}
}
