package athenztest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Provider returns the name of the provider in a [Place].
func Provider() athenzname.Service {
	return athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}
}

// Place is a directory with what the programs read: roots.pem, the certificates and keys of the provider and of a
// node, and version 1 of the key that signs documents, in private and public.
type Place struct {
	CA  *spiffetest.CA
	ZTS *cafake.ZTS

	t   testing.TB
	dir string
}

// NewPlace makes one.
func NewPlace(t testing.TB) *Place {
	t.Helper()
	dir, err := os.MkdirTemp("", "athenz") // a path that a Unix socket may have
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &Place{t: t, dir: dir, CA: spiffetest.NewCA(t, "athenz.io")}
	p.ZTS = cafake.NewZTS(t, p.CA, "/ns/"+Namespace+"/sa/"+Account)
	p.Write("roots.pem", p.CA.Bundle().MarshalPEM())
	p.Certify("provider", Provider().String())
	p.Certify("node", Node)
	for _, dir := range []string{"private", "public"} {
		must(t, os.Mkdir(p.Path(dir), 0o700))
	}
	p.NewKey(Secret + ".v1")
	return p
}

// Path returns that of a file.
func (p *Place) Path(names ...string) string {
	return filepath.Join(append([]string{p.dir}, names...)...)
}

// Write writes a file.
func (p *Place) Write(name string, data []byte) {
	must(p.t, os.WriteFile(p.Path(name), data, 0o600))
}

// Certify writes NAME.pem and NAME.key for a common name.
func (p *Place) Certify(name, cn string) {
	certs, key, err := p.ZTS.Credential(cn).MarshalPEM()
	must(p.t, err)
	p.Write(name+".pem", certs)
	p.Write(name+".key", key)
}

// NewKey writes a version of a key for documents into private and public.
func (p *Place) NewKey(name string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(p.t, err)
	text, err := pki.MarshalPrivateKeyPEM(key)
	must(p.t, err)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	must(p.t, err)
	p.Write("private/"+name, text)
	p.Write("public/"+name, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

// MutualTLS returns a client with a certificate of a common name; an empty one means none.
func (p *Place) MutualTLS(cn string) *http.Client {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: p.CA.Bundle().CertPool()}
	if cn != "" {
		cfg.Certificates = []tls.Certificate{*p.ZTS.Credential(cn).TLSCertificate()}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}}
}

// Environ returns an environment with changes: names with their values, of which "" takes one away.
func Environ(env map[string]string, changes ...string) (list []string) {
	for _, change := range changes {
		name, value, _ := strings.Cut(change, "=")
		env[name] = value
	}
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	return list
}
