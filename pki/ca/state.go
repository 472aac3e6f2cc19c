package ca

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// ErrRecord says that the record in a store is not one that this authority may work with: it cannot
// be read, does not verify, or belongs to another trust domain or another CA. It is left as it is.
var ErrRecord = errors.New("the record in the store is unfit")

// The names of the items in a [Record]. stateName is ours, the others are those of Istio's secret.
const (
	stateName     = "svidkit-state.json"
	caCertName    = "ca-cert.pem"
	caKeyName     = "ca-key.pem"
	certChainName = "cert-chain.pem"
	keyName       = "key.pem"
	rootCertName  = "root-cert.pem"
)

// stateVersion is the form of the document. A document of another form is not ours to change.
const stateVersion = 1

// document is what an authority must not lose. It never changes. Time moves it on, by
// [document.advance] and in the same way for everybody who has it, and writers replace it.
type document struct {
	authority string // random, chosen when the CA was made: two CAs of one trust domain are not the same
	revision  uint64 // grows by one with each write
	writer    string // random, chosen for each write: whoever reads it knows whether a write was its own
	sequence  uint64 // of the bundle
	roots     []key  // oldest first; exactly one is Active, or there are none, of a plugged-in CA
	jwt       []key  // oldest first; at most one is Active
	others    map[string][]byte
}

// advance returns d as it is at now, and the steps that lead there.
func (d *document) advance(last *lastEnds, now time.Time) (*document, []step) {
	var leaf, token *time.Time
	if last != nil {
		leaf, token = &last.leaf, &last.token
	}
	roots, steps := advance(d.roots, leaf, now)
	jwt, more := advance(d.jwt, token, now)
	steps = append(steps, more...)
	if len(steps) == 0 {
		return d, nil
	}
	next := *d
	next.roots, next.jwt = roots, jwt
	for _, s := range steps {
		if len(s.retired) > 0 {
			next.sequence++
		}
	}
	return &next, steps
}

// numberOfNext returns the sequence number of the bundle after somebody has decided something that
// changes what is in d, or when. It is more than any number that time alone leads to from d: those who
// have not heard of the decision yet may get there, and two bundles must not have one number
// (BND-17).
func (d *document) numberOfNext() uint64 {
	n := d.sequence + 1
	for _, keys := range [][]key{d.roots, d.jwt} {
		for _, k := range keys {
			if k.phase == Retiring || k.phase == Trusted || k.phase == Active && inPhase(keys, Distributing) >= 0 {
				n++
			}
		}
	}
	return n
}

// next returns when time takes the next step; zero for never.
func (d *document) next() time.Time {
	a, b := nextStep(d.roots), nextStep(d.jwt)
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// contents returns what the bundle has, but for the sequence number and the hint.
func (d *document) contents() spiffe.BundleContents {
	var c spiffe.BundleContents
	for _, k := range d.roots {
		c.X509Authorities = append(c.X509Authorities, k.cert)
	}
	if len(d.jwt) > 0 {
		c.JWTAuthorities = make(map[string]crypto.PublicKey, len(d.jwt))
	}
	for _, k := range d.jwt {
		c.JWTAuthorities[k.id] = k.public
	}
	return c
}

// find returns the set that holds the key with this ID, and its place there.
func (d *document) find(id string) (set *[]key, i int) {
	for _, set := range []*[]key{&d.roots, &d.jwt} {
		if i := slices.IndexFunc(*set, func(k key) bool { return k.id == id }); i >= 0 {
			return set, i
		}
	}
	return nil, -1
}

// clone returns a document that may be changed, keys included.
func (d *document) clone() *document {
	c := *d
	c.roots, c.jwt = slices.Clone(d.roots), slices.Clone(d.jwt)
	return &c
}

func inPhase(keys []key, p Phase) int {
	return slices.IndexFunc(keys, func(k key) bool { return k.phase == p })
}

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
	}
	keyJSON struct {
		Certificate string     `json:"certificate,omitempty"` // PEM; of a root
		KeyID       string     `json:"key_id,omitempty"`      // the next three are of a JWT key
		Algorithm   string     `json:"algorithm,omitempty"`
		PublicKey   string     `json:"public_key,omitempty"`  // PEM, PKIX
		PrivateKey  string     `json:"private_key,omitempty"` // PEM, PKCS#8; only of what may yet sign
		Phase       Phase      `json:"phase"`
		Prepared    time.Time  `json:"prepared"`
		Activates   time.Time  `json:"activates"`
		Retires     *time.Time `json:"retires,omitempty"`
		Longest     duration   `json:"longest"`
		Grace       duration   `json:"grace"`
		Propagation duration   `json:"propagation"`
		Tainted     bool       `json:"tainted,omitempty"`
		TaintGrace  duration   `json:"taint_grace,omitempty"`
		Shown       bool       `json:"shown,omitempty"` // of a distributing key
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

// record returns d as it is stored.
func (d *document) record(td spiffe.TrustDomain) (map[string][]byte, error) {
	j := stateJSON{
		Version: stateVersion, TrustDomain: td.String(), Authority: d.authority,
		Revision: d.revision, Writer: d.writer, Sequence: d.sequence,
	}
	data := maps.Clone(d.others)
	if data == nil {
		data = map[string][]byte{}
	}
	var roots []*x509.Certificate
	for _, k := range d.roots {
		kj, err := k.encode()
		if err != nil {
			return nil, err
		}
		kj.Certificate = string(pki.MarshalCertificatesPEM(k.cert))
		j.Roots = append(j.Roots, kj)
		roots = append(roots, k.cert)
		if k.phase == Active {
			data[caCertName], data[caKeyName] = []byte(kj.Certificate), []byte(kj.PrivateKey)
		}
	}
	for _, k := range d.jwt {
		kj, err := k.encode()
		if err != nil {
			return nil, err
		}
		der, err := x509.MarshalPKIXPublicKey(k.public)
		if err != nil {
			return nil, err
		}
		kj.KeyID, kj.Algorithm = k.id, k.algorithm
		kj.PublicKey = string(pem.EncodeToMemory(&pem.Block{Type: publicKeyBlock, Bytes: der}))
		j.JWTKeys = append(j.JWTKeys, kj)
	}
	if len(roots) > 0 {
		// Istio has the chain and the key of a CA that it made itself empty, and reads the roots.
		data[certChainName], data[keyName] = []byte{}, []byte{}
		data[rootCertName] = pki.MarshalCertificatesPEM(roots...)
	}
	b, err := json.MarshalIndent(j, "", "\t")
	if err != nil {
		return nil, err
	}
	data[stateName] = b
	return data, nil
}

const publicKeyBlock = "PUBLIC KEY"

// encode returns what roots and JWT keys have in common.
func (k *key) encode() (keyJSON, error) {
	j := keyJSON{
		Phase: k.phase, Prepared: k.prepared.UTC().Round(0), Activates: k.activates.UTC().Round(0),
		Longest: duration(k.longest), Grace: duration(k.grace), Propagation: duration(k.propagation),
		Tainted: k.tainted, TaintGrace: duration(k.taintGrace),
		Shown: k.shown && k.phase == Distributing,
	}
	if !k.retires.IsZero() {
		j.Retires = new(k.retires.UTC().Round(0))
	}
	if k.secret != nil {
		b, err := pki.MarshalPrivateKeyPEM(k.secret())
		if err != nil {
			return keyJSON{}, err
		}
		j.PrivateKey = string(b)
	}
	return j, nil
}

// parseState reads a document. What it returns is fit to work with: there is one root that signs, or
// none at all; who may sign has the private key that belongs to it, and who may not has none.
func parseState(b []byte, td spiffe.TrustDomain) (*document, error) {
	if len(b) > maxRecordBytes {
		return nil, fmt.Errorf("it has %d bytes, the limit is %d", len(b), maxRecordBytes)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields() // to drop what a newer version wrote would lose it
	var j stateJSON
	if err := dec.Decode(&j); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("there is something after the document")
	}
	switch {
	case j.Version != stateVersion:
		return nil, fmt.Errorf("version %d; this program knows version %d", j.Version, stateVersion)
	case j.TrustDomain != td.String():
		return nil, fmt.Errorf("it belongs to the trust domain %.256q, and this authority to %q", j.TrustDomain, td)
	case j.Authority == "" || j.Revision == 0 || j.Sequence == 0:
		return nil, errors.New("authority, revision or sequence is missing")
	case len(j.Roots) > maxKeys || len(j.JWTKeys) > maxKeys:
		return nil, fmt.Errorf("%d roots and %d JWT keys, the limit is %d each", len(j.Roots), len(j.JWTKeys), maxKeys)
	}
	d := &document{authority: j.Authority, revision: j.Revision, writer: j.Writer, sequence: j.Sequence}
	for i, kj := range j.Roots {
		k, err := kj.root(td)
		if err != nil {
			return nil, fmt.Errorf("root %d: %w", i+1, err)
		}
		d.roots = append(d.roots, k)
	}
	for i, kj := range j.JWTKeys {
		k, err := kj.jwtKey(td)
		if err != nil {
			return nil, fmt.Errorf("JWT key %d: %w", i+1, err)
		}
		d.jwt = append(d.jwt, k)
	}
	if err := checkKeys(d.roots); err != nil {
		return nil, fmt.Errorf("roots: %w", err)
	}
	if len(d.roots) > 0 && inPhase(d.roots, Active) < 0 {
		return nil, errors.New("roots: none is active")
	}
	if err := checkKeys(d.jwt); err != nil {
		return nil, fmt.Errorf("JWT keys: %w", err)
	}
	if inPhase(d.jwt, Trusted) >= 0 {
		return nil, errors.New("JWT keys: one has the phase of a root from elsewhere")
	}
	if _, err := spiffe.NewBundle(td, d.contents()); err != nil {
		return nil, err
	}
	return d, nil
}

// checkKeys checks what holds between keys of one kind.
func checkKeys(keys []key) error {
	ids := map[string]bool{}
	count := map[Phase]int{}
	for _, k := range keys {
		if ids[k.id] {
			return fmt.Errorf("two have the ID %.64q", k.id)
		}
		ids[k.id] = true
		count[k.phase]++
	}
	if count[Active] > 1 || count[Distributing] > 1 {
		return fmt.Errorf("%d are active and %d distributing", count[Active], count[Distributing])
	}
	return nil
}

// common returns what roots and JWT keys have in common, and the private key, if there is one.
func (j *keyJSON) common() (key, crypto.Signer, error) {
	k := key{
		phase: j.Phase, prepared: j.Prepared, activates: j.Activates,
		terms:   terms{longest: time.Duration(j.Longest), grace: time.Duration(j.Grace), propagation: time.Duration(j.Propagation)},
		tainted: j.Tainted, taintGrace: time.Duration(j.TaintGrace), shown: j.Shown,
	}
	if j.Retires != nil {
		k.retires = *j.Retires
	}
	signs := k.phase == Distributing || k.phase == Active
	switch {
	case k.prepared.IsZero() || k.activates.IsZero():
		return key{}, nil, errors.New("prepared or activates is missing")
	case signs != (j.PrivateKey != ""):
		return key{}, nil, fmt.Errorf("it is %v, and its private key is there: %v", k.phase, j.PrivateKey != "")
	case signs && !k.retires.IsZero() || k.phase == Retiring && k.retires.IsZero():
		return key{}, nil, fmt.Errorf("it is %v, and the time at which it retires is there: %v", k.phase, !k.retires.IsZero())
	case !signs:
		return k, nil, nil
	}
	signer, err := pki.ParsePrivateKeyPEM([]byte(j.PrivateKey))
	if err != nil {
		return key{}, nil, err
	}
	k.secret = seal(signer)
	return k, signer, nil
}

func (j *keyJSON) root(td spiffe.TrustDomain) (key, error) {
	if j.KeyID != "" || j.Algorithm != "" || j.PublicKey != "" {
		return key{}, errors.New("it has what belongs to a JWT key")
	}
	k, signer, err := j.common()
	if err != nil {
		return key{}, err
	}
	certs, err := pki.ParseCertificatesPEM([]byte(j.Certificate))
	if err != nil {
		return key{}, err
	}
	if len(certs) != 1 {
		return key{}, fmt.Errorf("%d certificates", len(certs))
	}
	k.cert, k.id = certs[0], serial(certs[0])
	if signer == nil {
		return k, nil
	}
	for _, u := range k.cert.URIs { // a root from elsewhere may have none (X5-10), or the address of its owner
		if u.Scheme == "spiffe" && u.String() != td.ID().String() {
			return key{}, fmt.Errorf("the certificate is that of %.256q", u.String())
		}
	}
	k.issuer, err = selfSigned(k.cert, signer)
	return k, err
}

// selfSigned returns the issuer with this certificate, which has to be signed with its own key.
func selfSigned(cert *x509.Certificate, signer crypto.Signer) (*pki.Issuer, error) {
	issuer, err := pki.NewIssuer([]*x509.Certificate{cert}, signer)
	if err != nil {
		return nil, err
	}
	if err := cert.CheckSignatureFrom(cert); err != nil {
		return nil, fmt.Errorf("the certificate is not self-signed; a CA below another one is for Load: %w", err)
	}
	return issuer, nil
}

func (j *keyJSON) jwtKey(td spiffe.TrustDomain) (key, error) {
	if j.Certificate != "" {
		return key{}, errors.New("it has a certificate")
	}
	k, signer, err := j.common()
	if err != nil {
		return key{}, err
	}
	block, rest := pem.Decode([]byte(j.PublicKey))
	if block == nil || block.Type != publicKeyBlock || len(bytes.TrimSpace(rest)) > 0 {
		return key{}, errors.New("the public key is not one block of PEM")
	}
	if k.public, err = x509.ParsePKIXPublicKey(block.Bytes); err != nil {
		return key{}, err
	}
	if err := pki.CheckPublicKey(k.public); err != nil {
		return key{}, err
	}
	k.id, k.algorithm = j.KeyID, j.Algorithm
	if signer == nil {
		return k, nil
	}
	if !pki.PublicKeysEqual(k.public, signer.Public()) {
		return key{}, pki.ErrKeyMismatch
	}
	_, err = jwtsvid.NewIssuer(td, k.id, signer, &jwtsvid.IssuerOptions{Algorithm: k.algorithm})
	return k, err
}

// read makes a document of a record. What it returns may differ from the record, and then has to be
// stored: a CA that somebody else made is adopted, and one that somebody else changed is followed.
func (a *Authority) read(r Record, now time.Time) (d *document, changed bool, err error) {
	d, changed, err = a.parse(r, now)
	if err != nil {
		return nil, false, fmt.Errorf("ca: %w: %w", ErrRecord, err)
	}
	d.others = map[string][]byte{}
	for name, b := range r.Data {
		switch name {
		case stateName, caCertName, caKeyName, certChainName, keyName, rootCertName:
		default:
			d.others[name] = bytes.Clone(b) // somebody's, and none of our business
		}
	}
	return d, changed, nil
}

func (a *Authority) parse(r Record, now time.Time) (*document, bool, error) {
	state, ours := r.Data[stateName]
	if !ours {
		d, err := a.adopt(r, now)
		return d, true, err
	}
	d, err := parseState(state, a.cfg.TrustDomain)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", stateName, err)
	}
	if plugged := a.files != nil; plugged != (len(d.roots) == 0) {
		return nil, false, errors.New("it is the record of a CA with roots of its own for one of plugged-in files, or the other way round; give each its own store")
	}
	i := inPhase(d.roots, Active)
	if i < 0 || len(r.Data[caCertName]) == 0 {
		return d, false, nil
	}
	cert, err := firstCertificate(r.Data[caCertName])
	if err != nil {
		return nil, false, err
	}
	if cert.Equal(d.roots[i].cert) {
		return d, false, nil
	}
	d, err = a.follow(d, r, now)
	return d, true, err
}

func firstCertificate(b []byte) (*x509.Certificate, error) {
	certs, err := pki.ParseCertificatesPEM(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", caCertName, err)
	}
	return certs[0], nil
}

// foreignTTL is the longest lifetime that another CA is believed to have granted: Istio's default.
const foreignTTL = 90 * 24 * time.Hour

// foreign returns the root that ca-cert.pem and ca-key.pem make.
func (a *Authority) foreign(r Record, now time.Time) (key, error) {
	if a.files != nil {
		return key{}, errors.New("it has no " + stateName + "; the JWT keys of a plugged-in CA need a store of their own")
	}
	if len(r.Data[caCertName]) == 0 || len(r.Data[caKeyName]) == 0 {
		return key{}, fmt.Errorf("it has neither %s nor both of %s and %s", stateName, caCertName, caKeyName)
	}
	cert, err := firstCertificate(r.Data[caCertName])
	if err != nil {
		return key{}, err
	}
	signer, err := pki.ParsePrivateKeyPEM(r.Data[caKeyName])
	if err != nil {
		return key{}, fmt.Errorf("%s: %w", caKeyName, err)
	}
	issuer, err := selfSigned(cert, signer)
	if err != nil {
		return key{}, fmt.Errorf("%s: %w", caCertName, err)
	}
	bundle, err := spiffe.NewBundle(a.cfg.TrustDomain, spiffe.BundleContents{X509Authorities: []*x509.Certificate{cert}})
	if err != nil {
		return key{}, err
	}
	if err := probe(a.cfg.TrustDomain, issuer, nil, bundle, now); err != nil {
		return key{}, fmt.Errorf("%s: %w", caCertName, err)
	}
	t := a.cfg.terms()
	t.longest = max(t.longest, foreignTTL)
	return key{
		id: serial(cert), cert: cert, issuer: issuer, secret: seal(signer),
		phase: Active, prepared: now, activates: now, terms: t,
	}, nil
}

// adopt makes a document of a CA that somebody else made, as Istio does in istio-ca-secret.
func (a *Authority) adopt(r Record, now time.Time) (*document, error) {
	active, err := a.foreign(r, now)
	if err != nil {
		return nil, err
	}
	d := &document{authority: randomID(), sequence: 1, roots: []key{active}}
	// What this process publishes already stays in the bundle until its leaves are dead, and the
	// numbers go on: whoever took the document away took nothing else.
	if s := a.state.Load(); s != nil {
		d = s.document.clone()
		if d, err = replaceActive(d, active, now); err != nil {
			return nil, err
		}
	}
	return d, addTrusted(a.cfg.TrustDomain, d, r, now)
}

// follow makes a document of one whose active root somebody else has replaced since.
func (a *Authority) follow(d *document, r Record, now time.Time) (*document, error) {
	active, err := a.foreign(r, now)
	if err != nil {
		return nil, err
	}
	if d, err = replaceActive(d.clone(), active, now); err != nil {
		return nil, err
	}
	return d, addTrusted(a.cfg.TrustDomain, d, r, now)
}

// replaceActive puts next in the place of the active root of d, which is changed. A root with the
// same key and subject is the same root renewed. Any other one takes over now, and the old one
// retires: after the longest life of a leaf that somebody who has not heard of it yet may sign.
func replaceActive(d *document, next key, now time.Time) (*document, error) {
	i := inPhase(d.roots, Active)
	old := d.roots[i]
	if old.cert.Equal(next.cert) {
		return d, nil
	}
	renewed := sameAuthority(old.cert, next.cert)
	for j, k := range d.roots {
		if k.id == next.id && !k.cert.Equal(next.cert) && !(renewed && j == i) {
			return nil, fmt.Errorf("%s: another root has its serial number %s, by which roots are told apart; it would drop out of the bundle", caCertName, next.id)
		}
	}
	d.sequence = d.numberOfNext()
	// It may have been in the bundle as one that does not sign.
	d.roots = slices.DeleteFunc(d.roots, func(k key) bool { return k.cert.Equal(next.cert) })
	i = inPhase(d.roots, Active)
	next.terms = next.terms.raise(old.terms)
	if renewed {
		next.prepared, next.activates = old.prepared, old.activates
		d.roots[i] = next
		return d, nil
	}
	old.phase, old.issuer, old.secret = Retiring, nil, nil
	old.retires = now.Add(old.propagation).Add(old.longest).Add(old.grace)
	d.roots[i] = old
	// The one that signs comes before the one that will.
	at := cmp.Or(inPhase(d.roots, Distributing)+1, len(d.roots)+1) - 1
	d.roots = slices.Insert(d.roots, at, next)
	if len(d.roots) > maxKeys {
		return nil, fmt.Errorf("%d roots, the limit is %d", len(d.roots), maxKeys)
	}
	return d, nil
}

// sameAuthority reports whether leaves that one of the certificates signed verify with the other.
func sameAuthority(a, b *x509.Certificate) bool {
	return pki.PublicKeysEqual(a.PublicKey, b.PublicKey) && bytes.Equal(a.RawSubject, b.RawSubject) && bytes.Equal(a.SubjectKeyId, b.SubjectKeyId)
}

// addTrusted puts further roots of root-cert.pem into d, which is changed: in front, as the oldest.
func addTrusted(td spiffe.TrustDomain, d *document, r Record, now time.Time) error {
	if len(bytes.TrimSpace(r.Data[rootCertName])) == 0 {
		return nil
	}
	certs, err := pki.ParseCertificatesPEM(r.Data[rootCertName])
	if err != nil {
		return fmt.Errorf("%s: %w", rootCertName, err)
	}
	var more []key
	for _, c := range certs {
		known := func(k key) bool { return k.cert.Equal(c) }
		if slices.ContainsFunc(d.roots, known) || slices.ContainsFunc(more, known) || c.NotAfter.Before(now) {
			continue
		}
		more = append(more, key{id: serial(c), cert: c, phase: Trusted, prepared: now, activates: now, retires: c.NotAfter})
	}
	d.roots = append(more, d.roots...)
	if len(d.roots) > maxKeys {
		return fmt.Errorf("%d roots, the limit is %d", len(d.roots), maxKeys)
	}
	c := spiffe.BundleContents{X509Authorities: make([]*x509.Certificate, 0, len(d.roots))}
	for _, k := range d.roots {
		c.X509Authorities = append(c.X509Authorities, k.cert)
	}
	if _, err = spiffe.NewBundle(td, c); err != nil { // each has to be fit to be an anchor
		return fmt.Errorf("%s: %w", rootCertName, err)
	}
	return checkKeys(d.roots)
}

// randomID returns 128 random bits in hexadecimal.
func randomID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it does not fail
	return hex.EncodeToString(b[:])
}

// seal puts a secret where package fmt cannot follow it.
func seal[T any](secret T) func() T { return func() T { return secret } }

func sorted(names iter.Seq[string]) []string { return slices.Sorted(names) }
