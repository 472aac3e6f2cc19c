package pki

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// keyCertPEM holds the files of a CA.
type keyCertPEM struct {
	// Cert is the CA certificate. More certificates behind it count as part of Chain.
	Cert []byte

	// Chain has the intermediates from the CA certificate to a root, in any order. It may be empty, and may repeat
	// the CA certificate and the roots.
	Chain []byte

	// Key belongs to the CA certificate, by the rules of ParsePrivateKeyPEM.
	Key    []byte
	Signer crypto.Signer // a key outside files, as in an HSM or a KMS, in place of Key; shared

	Roots []byte // one or more, by the rules of ParseCertificatesPEM
	CRL   []byte // by the rules of parseCRLs; may be empty
}

// KeyCertBundle is a CA that was verified together: a certificate that leads to a root, its key, all roots, and any
// CRLs. It never changes: a program replaces all of it in one step, so no reader sees one CA's key with another's
// chain. It does not print its key. It is safe for concurrent use.
type KeyCertBundle struct {
	redacted
	issuer *Issuer
	chain  []*x509.Certificate // the CA certificate and all others that came with it
	roots  []*x509.Certificate
	crls   []*x509.RevocationList
}

func parseKeyCertBundle(p keyCertPEM, now time.Time) (*KeyCertBundle, error) {
	if now.IsZero() {
		return nil, errors.New("no time to verify at")
	}
	chain, roots, err := p.certificates()
	if err != nil {
		return nil, err
	}
	paths, err := verify(chain[0], chain[1:], roots, now)
	if err != nil {
		return nil, noPath(append(chain, roots...), now, err)
	}
	key := p.Signer
	if key == nil {
		if key, err = parseKeyFile(p.Key); err != nil {
			return nil, fmt.Errorf("key: %w", err)
		}
	}
	// The longest path serves most verifiers. A cross-signed path to an old root helps verifiers without the new
	// root; other verifiers stop at the new root.
	path := slices.MaxFunc(paths, func(a, b []*x509.Certificate) int { return len(a) - len(b) })
	b := &KeyCertBundle{chain: chain, roots: roots}
	if b.issuer, err = NewIssuer(path[:max(1, len(path)-1)], key); err != nil {
		return nil, err
	}
	if !blank(p.CRL) {
		if b.crls, err = parseCRLs(p.CRL); err == nil {
			err = checkCRLs(paths, b.crls)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errCRL, err)
		}
	}
	b.redacted = redact.New(fmt.Sprintf("pki.KeyCertBundle(%s, %d roots, %d CRLs)", chain[0].Subject, len(roots),
		len(b.crls)))
	return b, nil
}

// noPath returns the error for a CA certificate, the first of certs, that does not lead to a root.
func noPath(certs []*x509.Certificate, now time.Time, err error) error {
	for _, c := range certs {
		if now.After(c.NotAfter) {
			return fmt.Errorf("%.300q expired at %s: put the next certificate in its place", c.Subject,
				c.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	return fmt.Errorf("the CA certificate %.300q does not lead to a root: %w", certs[0].Subject, err)
}

// certificates returns the CA certificate with the others that came with it, and the roots.
func (p *keyCertPEM) certificates() (chain, roots []*x509.Certificate, err error) {
	if chain, err = readChain("CA certificate", p.Cert); err != nil {
		return nil, nil, err
	}
	if !blank(p.Chain) {
		more, err := readChain("chain", p.Chain)
		if err != nil {
			return nil, nil, err
		}
		chain = distinct(append(chain, more...))
	}
	if roots, err = readChain("roots", p.Roots); err != nil {
		return nil, nil, err
	}
	for _, r := range roots {
		if !isCA(r) {
			return nil, nil, fmt.Errorf("roots: %.300q is not a CA certificate", r.Subject)
		}
	}
	return chain, distinct(roots), nil
}

// parseKeyFile parses a private key in PEM or DER; DER starts with the byte of a SEQUENCE.
func parseKeyFile(data []byte) (crypto.Signer, error) {
	if len(data) == 0 || data[0] != 0x30 {
		return certpem.PrivateKey(data)
	}
	return certpem.PrivateKeyDER(data)
}

func blank(b []byte) bool { return len(bytes.TrimSpace(b)) == 0 }

// readChain parses certificates and checks their keys before any of these keys verifies a signature.
func readChain(what string, pem []byte) ([]*x509.Certificate, error) {
	certs, err := certpem.Certificates(pem)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	for n, c := range certs {
		if err := certpem.CheckKey(c.PublicKey); err != nil {
			return nil, fmt.Errorf("%s: certificate %d (%.300q): %w", what, n+1, c.Subject, err)
		}
	}
	return certs, nil
}

// findPaths returns all paths from cert to one of roots, both included.
func findPaths(cert *x509.Certificate, between, roots []*x509.Certificate,
	now time.Time) ([][]*x509.Certificate, error) {
	o := x509.VerifyOptions{
		Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(),
		CurrentTime: now.UTC(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	}
	for _, c := range roots {
		o.Roots.AddCert(c)
	}
	for _, c := range between {
		o.Intermediates.AddCert(c)
	}
	return cert.Verify(o)
}

// verify returns all paths from a CA to one of roots, both included.
func verify(ca *x509.Certificate, between, roots []*x509.Certificate, now time.Time) ([][]*x509.Certificate, error) {
	paths, err := findPaths(ca, between, roots, now)
	if err != nil {
		return nil, err
	}
	// For crypto/x509 ca is the leaf, but it signs others, so each path counts one CA more.
	paths = slices.DeleteFunc(paths, func(path []*x509.Certificate) bool { return tooDeep(path) > 0 })
	if len(paths) == 0 {
		return nil, errors.New("a CA above it does not allow as many CAs below it (path length)")
	}
	return paths, nil
}

// checkCRLs applies the rules for CRLs to each path from the CA to a root.
func checkCRLs(paths [][]*x509.Certificate, crls []*x509.RevocationList) error {
	for _, path := range paths {
		lists := make([][]*x509.RevocationList, len(path)) // that each CA has signed
		for n, ca := range path {
			why := errors.New("none is of this name")
			for _, c := range crls {
				if err := checkCRL(c, ca); err == nil {
					lists[n] = append(lists[n], c)
				} else if bytes.Equal(c.RawIssuer, ca.RawSubject) {
					why = err
				}
			}
			if len(lists[n]) == 0 {
				return fmt.Errorf("no list for %.300q: %w; with CRLs, every CA of the chain needs one", ca.Subject,
					why)
			}
		}
		for n, cert := range path {
			if err := checkRevoked(cert, lists[min(n+1, len(path)-1)]); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkRevoked refuses a certificate that is in a list of its issuer.
func checkRevoked(cert *x509.Certificate, lists []*x509.RevocationList) error {
	for _, list := range lists {
		for _, e := range list.RevokedCertificateEntries {
			if e.SerialNumber.Cmp(cert.SerialNumber) == 0 {
				return fmt.Errorf("%.300q is revoked since %s, reason %d", cert.Subject,
					e.RevocationTime.Format(time.RFC3339), e.ReasonCode)
			}
		}
	}
	return nil
}

// Issuer returns the CA, ready to sign. Its chain is the CA certificate followed by the intermediates up to, but
// excluding, the root; a self-signed CA is its own chain.
func (b *KeyCertBundle) Issuer() *Issuer { return b.issuer }

// Roots returns all roots, without duplicates and in input order: a new slice of shared certificates.
func (b *KeyCertBundle) Roots() []*x509.Certificate { return slices.Clone(b.roots) }

// Equal reports whether b and other are the same CA with the same sets of certificates, roots and CRLs, compared by
// DER. Order, repetition and encoding do not matter.
func (b *KeyCertBundle) Equal(other *KeyCertBundle) bool {
	if b == nil || other == nil {
		return b == other
	}
	cert := func(c *x509.Certificate) []byte { return c.Raw }
	list := func(c *x509.RevocationList) []byte { return c.Raw }
	return b.chain[0].Equal(other.chain[0]) && sameSet(b.chain, other.chain, cert) &&
		sameSet(b.roots, other.roots, cert) && sameSet(b.crls, other.crls, list)
}

// sameSet reports whether a and b hold the same items, compared by DER.
func sameSet[T any](a, b []T, der func(T) []byte) bool {
	set := func(all []T) map[string]bool {
		in := make(map[string]bool, len(all))
		for _, x := range all {
			in[string(der(x))] = true
		}
		return in
	}
	return maps.Equal(set(a), set(b))
}

// keyCertSet are the names of a CA's files in a directory. The set applies if one of marks exists.
type keyCertSet struct {
	marks     []string
	cert, key string
	chain     string   // empty if there is none, else required
	roots     []string // one of them is required; the first that exists counts
	crl       string   // never required
}

// keyCertSets are the known sets; the first that applies counts.
var keyCertSets = []keyCertSet{
	{[]string{"tls.crt"}, "tls.crt", "tls.key", "", []string{"ca.crt", "ca-bundle.crt"}, ""},
	{[]string{"ca-cert.pem", "ca-key.pem", "cert-chain.pem", "root-cert.pem"},
		"ca-cert.pem", "ca-key.pem", "cert-chain.pem", []string{"root-cert.pem"}, "ca-crl.pem"},
	{[]string{"crt.pem", "key.pem"}, "crt.pem", "key.pem", "", []string{"ca-bundle.crt", "ca.crt"}, ""},
	{[]string{"tls.key"}, "tls.crt", "tls.key", "", []string{"ca.crt", "ca-bundle.crt"}, ""},
}

// ReadKeyCertBundle reads the files of a CA and verifies them. It knows three sets of names and takes the first that
// applies:
//
//	tls.crt      tls.key     ca.crt or ca-bundle.crt                          if tls.crt exists
//	ca-cert.pem  ca-key.pem  root-cert.pem  cert-chain.pem  (ca-crl.pem)      if one of them exists
//	crt.pem      key.pem     ca-bundle.crt or ca.crt                          if crt.pem or key.pem exists
//
// The file in brackets is optional. root-cert.pem may be missing or empty if ca-cert.pem is self-signed: then that is
// the root. If no set applies, the error wraps [fs.ErrNotExist]. If a file of the set is missing, the error names the
// file and does not wrap fs.ErrNotExist: a half-filled directory is not an empty one, and no reason to make a new CA.
// Other files are ignored. A file must be regular, after following links, and at most 1 MiB ([spiffe.ErrTooLarge]). A
// file of the host, as opened by [os.DirFS], must belong to root or to the user of this process, and other users must
// not be able to write to it. The caller must check which users can replace the directory.
//
// If key is not nil, it is the CA's key, as in an HSM or a KMS; the key file is then not needed or read.
//
// A directory that a link named "..data" swaps, as in Kubernetes volumes, is read again if the link changes during
// the read.
//
// These are the checks, in this order, at the time now, which must not be zero:
//
//   - certificates, chain and roots are valid PEM, every key in them is acceptable ([ErrWeakKey]), and every
//     root is a CA;
//   - the CA certificate leads through the chain to a root, for any extended key usage, and path lengths allow the
//     certificates that it signs;
//   - the key is valid PEM or DER and belongs to the CA certificate ([ErrKeyMismatch]), which may sign by the rules of
//     [NewIssuer];
//   - if there are CRLs, each CA from the CA certificate to the root, both included, has signed one, because Envoy
//     refuses a chain if one of its CAs has none, and no CRL lists a certificate of the chain. CRLs may be out of
//     date.
//
// Errors say which part is wrong. They wrap the errors named here, a [*ProfileError], [ErrWeakKey],
// [spiffe.ErrTooLarge] or an error of crypto/x509, and never repeat the input.
func ReadKeyCertBundle(fsys fs.FS, key crypto.Signer, now time.Time) (*KeyCertBundle, error) {
	for attempt := 1; ; attempt++ {
		before, _ := fs.ReadLink(fsys, "..data")
		p, err := readKeyCertPEM(fsys, key)
		if after, _ := fs.ReadLink(fsys, "..data"); after != before && attempt < 5 {
			continue
		}
		if err != nil {
			return finish(nil, err)
		}
		return finish(parseKeyCertBundle(*p, now))
	}
}

// finish adds to an error the part it is about, unless the error already names one.
func finish(b *KeyCertBundle, err error) (*KeyCertBundle, error) {
	if _, told := err.(*ProfileError); err != nil && !told {
		err = fmt.Errorf("pki: key-cert bundle: %w", err)
	}
	return b, err
}

// reader reads the files of a directory.
type reader struct {
	fsys    fs.FS
	missing []string
	failed  error // the first other failure
}

// exists reports whether a file exists. Reading it reports any other error.
func (r *reader) exists(name string) bool {
	_, err := fs.Stat(r.fsys, name)
	return !errors.Is(err, fs.ErrNotExist)
}

// read returns the contents of a file, or nil for an empty name.
func (r *reader) read(name string) []byte {
	if name == "" {
		return nil
	}
	data, err := readBounded(r.fsys, name)
	if errors.Is(err, fs.ErrNotExist) { // a half-filled directory must not look like an empty one
		r.missing = append(r.missing, name)
	} else {
		r.failed = cmp.Or(r.failed, err)
	}
	return data
}

func readKeyCertPEM(fsys fs.FS, key crypto.Signer) (*keyCertPEM, error) {
	r := &reader{fsys: fsys}
	i := slices.IndexFunc(keyCertSets, func(s keyCertSet) bool { return slices.ContainsFunc(s.marks, r.exists) })
	if i < 0 {
		return nil, fmt.Errorf("no file of a CA, such as ca-cert.pem, tls.crt or crt.pem: %w", fs.ErrNotExist)
	}
	set := keyCertSets[i]
	p := &keyCertPEM{Signer: key, Cert: r.read(set.cert)}
	if key == nil {
		p.Key = r.read(set.key)
	}
	p.Chain = r.read(set.chain)
	if i := slices.IndexFunc(set.roots, r.exists); i >= 0 {
		p.Roots = r.read(set.roots[i])
	}
	if set.crl != "" && r.exists(set.crl) {
		p.CRL = r.read(set.crl)
	}
	if set.chain != "" && blank(p.Roots) { // Istio's self-signed CA has no root file
		if certs, err := ParseCertificatesPEM(p.Cert); err == nil && certs[0].CheckSignatureFrom(certs[0]) == nil {
			p.Roots = MarshalCertificatesPEM(certs[0])
		}
	}
	if p.Roots == nil {
		r.missing = append(r.missing, strings.Join(set.roots, " or "))
	}
	if r.failed == nil && len(r.missing) > 0 {
		r.failed = fmt.Errorf("the directory has some files of a CA, but not %s", strings.Join(r.missing, ", "))
	}
	return p, r.failed
}

// readBounded reads a regular file of bounded size.
func readBounded(fsys fs.FS, name string) ([]byte, error) {
	info, err := fs.Stat(fsys, name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // a pipe would block
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return nil, err
	}
	if private.HasOwner(info) {
		if file, ok := f.(interface{ Name() string }); ok {
			name = file.Name() // the full path, for the operator's command
		}
		if err := private.Check(name, info, private.Options{}); err != nil {
			return nil, err
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, certpem.MaxInput+1))
	if err != nil {
		return nil, err
	}
	if len(data) > certpem.MaxInput {
		return nil, fmt.Errorf("%s has more than %d bytes: %w", name, certpem.MaxInput, spiffe.ErrTooLarge)
	}
	return data, nil
}
