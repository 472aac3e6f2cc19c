package caprogram

import (
	_ "embed"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

// layout names the objects of an installation.
type layout struct {
	configMap, anchors string // a ConfigMap, and the key in it
	secret, secretType string
	cert, key          string // keys of the Secret
	der                bool   // the private key is DER
}

// layouts are the forms of Linkerd's issuer credentials: two of its identity service, and the first design's, whose
// private key is DER.
var layouts = map[string]layout{
	"kubernetes.io/tls": {"linkerd-identity-trust-roots", "ca-bundle.crt", "linkerd-identity-issuer",
		"kubernetes.io/tls", "tls.crt", "tls.key", false},
	"linkerd.io/tls": {"linkerd-identity-trust-roots", "ca-bundle.crt", "linkerd-identity-issuer", "Opaque",
		"crt.pem", "key.pem", false},
	"design": {"linkerd-trust-anchor", "trust-anchors.pem", "linkerd-identity-signing", "Opaque",
		"crt.pem", "key.pem", true},
}

const (
	anchorCert = "root-cert.pem"
	anchorKey  = "root-key.pem"
	anchorLife = 3650 * 24 * time.Hour
)

// install prints a ConfigMap with a mesh's trust anchors, a Secret with an issuer below them, the service account
// that alone may read the Secret, its Role, and the identity service. It takes the trust anchor in dir, and makes one
// if dir is empty. The anchor's key is needed again only for the next issuer.
func install(out io.Writer, scheme, dir string, mesh linkerdname.Mesh, life time.Duration,
	identity program.Manifest) error {
	l, ok := layouts[scheme]
	if !ok {
		return program.Misused("-install: %.100q is none of kubernetes.io/tls, linkerd.io/tls, design and kubernetes",
			scheme)
	}
	if dir == "" {
		return program.Misused("-install: -anchor-dir names the directory for the trust anchor and its key, which " +
			"the next issuer needs")
	}
	issuerName, err := mesh.Issuer()
	if err != nil {
		return fmt.Errorf("-install: %w", err)
	}
	td, err := spiffe.ParseTrustDomain(mesh.TrustDomain)
	if err != nil {
		return fmt.Errorf("-install: %w", err)
	}
	if life > anchorLife { // before an anchor is made
		return program.Misused("-issuer-ttl: a trust anchor lives for %v, which is less", anchorLife)
	}
	now := time.Now()
	anchor, err := openAnchor(dir, td, now)
	if err != nil {
		return fmt.Errorf("-anchor-dir: %w", err)
	}
	end := now.Add(life)
	if last := anchor.Certificate().NotAfter; end.After(last) {
		return fmt.Errorf("-issuer-ttl: the trust anchor in %s ends at %s, before an issuer of %v would: make it "+
			"shorter, or begin with another directory",
			dir, last.Format(time.RFC3339), life)
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return err
	}
	pathLen := 0
	cert, err := anchor.Issue(pki.CertificateOptions{
		PublicKey: key.Public(), CA: true, MaxPathLen: &pathLen, CommonName: issuerName, SANs: []pki.SAN{pki.IDSAN(
			td.ID())},
		NotBefore: now.Add(-2 * time.Minute), NotAfter: end,
	})
	if err != nil {
		return err
	}
	keyPEM, err := pki.MarshalPrivateKeyPEM(key)
	if err != nil {
		return err
	}
	if l.der {
		block, _ := pem.Decode(keyPEM)
		keyPEM = block.Bytes
	}
	anchors := pki.MarshalCertificatesPEM(anchor.Certificate())
	data := func(b []byte) string { return base64.StdEncoding.EncodeToString(b) }
	_, err = fmt.Fprintf(out, meshObjects, l.configMap, mesh.ControlNamespace, l.anchors, indent(anchors),
		cert.NotAfter.UTC().Format(time.RFC3339), l.secret, mesh.ControlNamespace, l.secretType, l.cert,
		data(pki.MarshalCertificatesPEM(cert)), l.key, data(keyPEM), data(anchors))
	identity.Text = strings.NewReplacer("NAMESPACE", mesh.ControlNamespace, "TRUST-DOMAIN", mesh.TrustDomain,
		"SECRET", l.secret).Replace(linkerdManifest)
	return errors.Join(err, identity.Print(out))
}

// meshObjects are the trust anchors and the issuer, with the rights to read it.
const meshObjects = "" +
	`# Trust anchors of the mesh: for proxies, the injector, and operators who deploy the control plane.
apiVersion: v1
kind: ConfigMap
metadata:
  name: %s
  namespace: %s
data:
  %s: |
%s---
# The issuer: only the service account of the identity service may read it. It ends at %s.
apiVersion: v1
kind: Secret
metadata:
  name: %s
  namespace: %s
type: %s
data:
  %s: %s
  %s: %s
  ca.crt: %s
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: linkerd-identity, namespace: %[2]s}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: linkerd-identity, namespace: %[2]s}
rules:
- {apiGroups: [""], resources: [secrets], resourceNames: [%[6]s], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: linkerd-identity, namespace: %[2]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: linkerd-identity}
subjects: [{kind: ServiceAccount, name: linkerd-identity, namespace: %[2]s}]
`

//go:embed linkerd.yaml
var linkerdManifest string

func indent(text []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		b.WriteString("    " + line)
	}
	return b.String()
}

// openAnchor returns the trust anchor in the directory, and makes one if there is none.
func openAnchor(dir string, td spiffe.TrustDomain, now time.Time) (*pki.Issuer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	info, err := root.Stat(".")
	if err != nil {
		return nil, err
	}
	if err := checkPrivate(dir, info); err != nil {
		return nil, err
	}
	certPEM, errCert := readFile(root, anchorCert)
	keyPEM, errKey := readFile(root, anchorKey)
	switch noCert, noKey := errors.Is(errCert, fs.ErrNotExist), errors.Is(errKey, fs.ErrNotExist); {
	case noCert && noKey:
		return makeAnchor(root, td, now)
	case noCert || noKey:
		return nil, fmt.Errorf("%s has one of %s and %s: put the other one back, or begin with another directory", dir,
			anchorCert, anchorKey)
	case errCert != nil || errKey != nil:
		return nil, errors.Join(errCert, errKey)
	}
	certs, err := pki.ParseCertificatesPEM(certPEM)
	if err != nil {
		return nil, err
	}
	key, err := pki.ParsePrivateKeyPEM(keyPEM)
	if err != nil {
		return nil, err
	}
	issuer, err := pki.NewIssuer(certs, key)
	switch {
	case err != nil:
		return nil, err
	case now.After(certs[0].NotAfter):
		return nil, fmt.Errorf("the trust anchor in %s ended at %s: begin with another directory", dir,
			certs[0].NotAfter.Format(time.RFC3339))
	}
	if id, err := spiffe.IDFromCertificate(certs[0]); err != nil || id != td.ID() {
		return nil, fmt.Errorf("the trust anchor in %s is not for the trust domain %s", dir, td)
	}
	return issuer, nil
}

// makeAnchor makes a trust anchor. It writes the key first: a directory with only a key shows an interrupted
// makeAnchor.
func makeAnchor(root *os.Root, td spiffe.TrustDomain, now time.Time) (*pki.Issuer, error) {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return nil, err
	}
	issuer, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())},
		NotBefore: now.Add(-2 * time.Minute), NotAfter: now.Add(anchorLife)})
	if err != nil {
		return nil, err
	}
	keyPEM, err := pki.MarshalPrivateKeyPEM(key)
	if err != nil {
		return nil, err
	}
	for _, f := range []struct {
		name string
		data []byte
	}{{anchorKey, keyPEM}, {anchorCert, pki.MarshalCertificatesPEM(issuer.Certificate())}} {
		file, err := root.OpenFile(f.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, err
		}
		_, err = file.Write(f.data)
		if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
			return nil, err
		}
	}
	return issuer, nil
}

func readFile(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := checkPrivate(filepath.Join(root.Name(), name), info); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, 1<<20))
}
