package rotation

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

const stateVersion = 1 // the form of the document; another form is not ours to change

// The form of the document in JSON. Durations are text, as in "24h0m0s"; times are UTC.
type (
	stateJSON struct {
		Version     int       `json:"version"`
		TrustDomain string    `json:"trust_domain"`
		Authority   string    `json:"authority"`
		Revision    uint64    `json:"revision"`
		Writer      string    `json:"writer"`
		Sequence    uint64    `json:"sequence"`
		Roots       []keyJSON `json:"roots,omitempty"`
		JWTKeys     []keyJSON `json:"jwt_keys,omitempty"`
		MLDSARoots  []keyJSON `json:"ml_dsa_roots,omitempty"` // releases that do not know them refuse the record
		Loose       []Loose   `json:"loose_keys,omitempty"`
	}
	keyJSON struct {
		Certificate string    `json:"certificate,omitempty"` // PEM; of a root
		KeyID       string    `json:"key_id,omitempty"`      // the next three are for a JWT key
		Algorithm   string    `json:"algorithm,omitempty"`
		PublicKey   string    `json:"public_key,omitempty"`  // PEM, PKIX
		PrivateKey  string    `json:"private_key,omitempty"` // PEM, PKCS#8; only of keys that may still sign
		KeyName     string    `json:"key_name,omitempty"`    // instead of it: of the private key at a custodian
		Phase       Phase     `json:"phase"`
		Prepared    time.Time `json:"prepared"`
		Activates   time.Time `json:"activates"`
		Retires     time.Time `json:"retires,omitzero"`
		Longest     duration  `json:"longest"`
		Grace       duration  `json:"grace"`
		Propagation duration  `json:"propagation"`
		Tainted     bool      `json:"tainted,omitempty"`
		TaintGrace  duration  `json:"taint_grace,omitempty"`
		Shown       bool      `json:"shown,omitempty"` // of a distributing key
	}
)

type duration time.Duration

func (d duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

func (d *duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err == nil && v < 0 {
		err = fmt.Errorf("%v is negative", v)
	}
	*d = duration(v)
	return err
}

// Marshal returns d as JSON, with its private keys. It fails for a document that [Parse] would refuse.
func (d *Document) Marshal(td spiffe.TrustDomain) ([]byte, error) {
	j := stateJSON{
		Version: stateVersion, TrustDomain: td.String(), Authority: d.Authority,
		Revision: d.Revision, Writer: d.Writer, Sequence: d.Sequence, Loose: d.Loose,
	}
	for kind, to := range []*[]keyJSON{&j.Roots, &j.JWTKeys, &j.MLDSARoots} {
		for _, k := range d.Keys[kind] {
			kj, err := k.encode()
			if err != nil {
				return nil, err
			}
			*to = append(*to, kj)
		}
	}
	b, err := json.MarshalIndent(j, "", "\t")
	if err != nil {
		return nil, err
	}
	_, err = Parse(b, td, Absent)
	return b, err
}

// absent stands for a private key at a custodian.
type absent struct{ public crypto.PublicKey }

func (a absent) Public() crypto.PublicKey { return a.public }

// Absent returns a stand-in for the private key with this name.
func Absent(_ string, public crypto.PublicKey) crypto.Signer { return absent{public} }

func (absent) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) {
	return nil, errors.ErrUnsupported
}

func (k *Key) encode() (j keyJSON, err error) {
	j = keyJSON{
		KeyName: k.Name,
		Phase:   k.Phase, Prepared: k.Prepared.UTC().Round(0), Activates: k.Activates.UTC().Round(0),
		Retires: k.Retires.UTC().Round(0),
		Longest: duration(k.Longest), Grace: duration(k.Grace), Propagation: duration(k.Propagation),
		Tainted: k.Tainted, TaintGrace: duration(k.TaintGrace),
		Shown: k.Shown && k.Phase == Distributing,
	}
	if k.Secret != nil && k.Name == "" {
		b, err := pki.MarshalPrivateKeyPEM(k.Secret())
		if err != nil {
			return j, err
		}
		j.PrivateKey = string(b)
	}
	if k.Cert != nil {
		j.Certificate = string(pki.MarshalCertificatesPEM(k.Cert))
		return j, nil
	}
	der, err := x509.MarshalPKIXPublicKey(k.Public)
	j.KeyID, j.Algorithm = k.ID, k.Algorithm
	j.PublicKey = string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	return j, err
}

// Parse reads a document. The result is fit to use: exactly one root signs, or there are no roots; a key that may sign
// has its own private key, and other keys have none. A private key at a custodian is what find returns, which may be
// nil if there is none.
func Parse(b []byte, td spiffe.TrustDomain,
	find func(name string, public crypto.PublicKey) crypto.Signer) (*Document, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields() // dropping a newer version's fields would lose them
	var j stateJSON
	if err := dec.Decode(&j); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("there is something after the document")
	}
	if err := j.check(td); err != nil {
		return nil, err
	}
	d := &Document{Authority: j.Authority, Revision: j.Revision, Writer: j.Writer, Sequence: j.Sequence, Loose: j.Loose}
	for kind, from := range [][]keyJSON{j.Roots, j.JWTKeys, j.MLDSARoots} {
		for i, kj := range from {
			k, err := kj.decode(Kind(kind), td, find)
			if err != nil {
				return nil, fmt.Errorf("%v %d: %w", Kind(kind), i+1, err)
			}
			d.Keys[kind] = append(d.Keys[kind], k)
		}
		if err := checkKeys(d.Keys[kind]); err != nil {
			return nil, fmt.Errorf("%vs: %w", Kind(kind), err)
		}
	}
	if len(d.Roots()) > 0 && d.Primary() == nil {
		return nil, errors.New("roots: none is active")
	}
	if d.In(Token, Trusted) != nil {
		return nil, errors.New("JWT keys: one has the phase of a root from elsewhere")
	}
	if _, err := spiffe.NewBundle(td, d.Contents()); err != nil {
		return nil, err
	}
	return d, nil
}

// check checks what does not belong to one key.
func (j *stateJSON) check(td spiffe.TrustDomain) error {
	foreign := func(name string) bool { return name != "" && !strings.HasPrefix(name, NamePrefix(j.Authority)) }
	switch {
	case j.Version != stateVersion:
		return fmt.Errorf("version %d; this program knows version %d", j.Version, stateVersion)
	case j.TrustDomain != td.String():
		return fmt.Errorf("it belongs to the trust domain %.256q, and this authority to %q; use that trust "+
			"domain, or another store", j.TrustDomain, td)
	case j.Authority == "" || j.Revision == 0 || j.Sequence == 0:
		return errors.New("authority, revision or sequence is missing")
	case max(len(j.Roots), len(j.JWTKeys), len(j.MLDSARoots)) > MaxKeys:
		return fmt.Errorf("%d and %d roots and %d JWT keys, the limit is %d each", len(j.Roots), len(j.MLDSARoots),
			len(j.JWTKeys), MaxKeys)
	case slices.ContainsFunc(j.Loose, func(l Loose) bool { return foreign(l.Name) }),
		slices.ContainsFunc(slices.Concat(j.Roots, j.JWTKeys, j.MLDSARoots),
			func(k keyJSON) bool { return foreign(k.KeyName) }):
		return errors.New("it names a private key that is not one of this CA, and would be destroyed")
	}
	return nil
}

// checkKeys checks the rules that hold between keys of one kind.
func checkKeys(keys []Key) error {
	ids := map[string]bool{}
	count := map[Phase]int{}
	for _, k := range keys {
		if ids[k.ID] {
			return fmt.Errorf("two have the ID %.64q", k.ID)
		}
		ids[k.ID] = true
		count[k.Phase]++
	}
	if count[Active] > 1 || count[Distributing] > 1 {
		return fmt.Errorf("%d are active and %d distributing", count[Active], count[Distributing])
	}
	return nil
}

func (j *keyJSON) decode(kind Kind, td spiffe.TrustDomain,
	find func(string, crypto.PublicKey) crypto.Signer) (Key, error) {
	k := Key{
		Name: j.KeyName, Phase: j.Phase, Prepared: j.Prepared, Activates: j.Activates, Retires: j.Retires,
		Terms: Terms{Longest: time.Duration(j.Longest), Grace: time.Duration(j.Grace),
			Propagation: time.Duration(j.Propagation)},
		Tainted: j.Tainted, TaintGrace: time.Duration(j.TaintGrace), Shown: j.Shown,
	}
	signs := k.Phase == Distributing || k.Phase == Active
	switch {
	case !slices.Contains([]Phase{Distributing, Active, Retiring, Trusted}, k.Phase):
		return Key{}, fmt.Errorf("%.32q is not a phase", string(k.Phase))
	case k.Prepared.IsZero() || k.Activates.IsZero():
		return Key{}, errors.New("prepared or activates is missing")
	case signs != (j.PrivateKey+j.KeyName != ""):
		return Key{}, fmt.Errorf("it is %v, and its private key is there: %v", k.Phase, !signs)
	case j.PrivateKey != "" && j.KeyName != "":
		return Key{}, errors.New("its private key is here and at a custodian")
	case signs && !k.Retires.IsZero() || k.Phase == Retiring && k.Retires.IsZero():
		return Key{}, fmt.Errorf("it is %v, and the time at which it retires is there: %v", k.Phase,
			!k.Retires.IsZero())
	}
	public, err := k.decodePublic(kind, j)
	if err != nil || !signs {
		return k, err
	}
	var signer crypto.Signer
	switch {
	case j.KeyName != "" && find == nil:
		err = fmt.Errorf("the private key %s is at a custodian, and none is named", j.KeyName)
	case j.KeyName != "":
		signer = find(j.KeyName, public)
	default:
		signer, err = pki.ParsePrivateKeyPEM([]byte(j.PrivateKey))
	}
	if err == nil {
		err = k.signWith(signer, td)
	}
	return k, err
}

// decodePublic takes what is public from j, and returns the public key.
func (k *Key) decodePublic(kind Kind, j *keyJSON) (public crypto.PublicKey, err error) {
	if kind == Token {
		k.ID, k.Algorithm = j.KeyID, j.Algorithm
		k.Public, err = certpem.PublicKey([]byte(j.PublicKey))
		return k.Public, err
	}
	certs, err := pki.ParseCertificatesPEM([]byte(j.Certificate))
	if err != nil {
		return nil, err
	}
	if len(certs) != 1 {
		return nil, fmt.Errorf("%d certificates", len(certs))
	}
	k.Cert, k.ID = certs[0], Serial(certs[0])
	if k.Kind() != kind {
		return nil, fmt.Errorf("its key is of the other kind (%w)", mldsa.ErrMissing)
	}
	return k.Cert.PublicKey, nil
}

// signWith makes k sign with its private key.
func (k *Key) signWith(signer crypto.Signer, td spiffe.TrustDomain) (err error) {
	k.Secret = redact.Seal(signer)
	if k.Cert == nil {
		if !pki.PublicKeysEqual(k.Public, signer.Public()) {
			return pki.ErrKeyMismatch
		}
		_, err = jwtsvid.NewIssuer(td, k.ID, signer, &jwtsvid.IssuerOptions{Algorithm: k.Algorithm})
		return err
	}
	for _, u := range k.Cert.URIs { // a root from elsewhere may have no URI, or its owner's address
		if u.Scheme == "spiffe" && u.String() != td.ID().String() {
			return fmt.Errorf("the certificate is that of %.256q", u.String())
		}
	}
	k.Issuer, err = SelfSigned(k.Cert, signer)
	return err
}

// SelfSigned returns the issuer with this certificate, which must be self-signed.
func SelfSigned(cert *x509.Certificate, signer crypto.Signer) (*pki.Issuer, error) {
	issuer, err := pki.NewIssuer([]*x509.Certificate{cert}, signer)
	if err != nil {
		return nil, err
	}
	if err := cert.CheckSignatureFrom(cert); err != nil {
		return nil, fmt.Errorf("the certificate is not self-signed; a CA below another one is for Load: %w", err)
	}
	return issuer, nil
}
