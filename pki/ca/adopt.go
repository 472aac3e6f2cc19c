package ca

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// errRecord says that this authority cannot work with the record in a store: it cannot be read, does not verify, or
// belongs to another trust domain or CA. The record is left as it is.
var errRecord = fmt.Errorf("the record in the store is %w", ErrUnfit)

// The names of the items in a [Record]. stateName is ours; the others are from Istio's secret.
const (
	stateName     = "svidkit-state.json"
	caCertName    = "ca-cert.pem"
	caKeyName     = "ca-key.pem"
	certChainName = "cert-chain.pem"
	keyName       = "key.pem"
	rootCertName  = "root-cert.pem"
	noteName      = "svidkit-note.txt"
)

// note is in each of our records, so that a record that has lost its state is not taken for Istio's.
const note = `The certificate authority of this record is in ` + stateName + ` or, sealed, in ` + sealedName + `. The files
in PEM are copies for other programs. If both are missing, restore all of the record from a backup. To go on with the CA in
` + caCertName + ` and ` + caKeyName + ` alone, without the roots and keys that were to retire or to sign next,
remove this file, too.
`

// record returns d in its stored form: our state, and the items that Istio expects.
func record(d *rotation.Document, td spiffe.TrustDomain) (map[string][]byte, error) {
	state, err := d.Marshal(td)
	if err != nil {
		return nil, err
	}
	data := map[string][]byte{stateName: state, noteName: []byte(note)}
	active := d.Primary()
	if active == nil {
		return data, nil
	}
	data[caCertName] = pki.MarshalCertificatesPEM(active.Cert)
	if active.Name == "" {
		if data[caKeyName], err = pki.MarshalPrivateKeyPEM(active.Secret()); err != nil {
			return nil, err
		}
	}
	// Istio leaves chain and key empty for a CA that it made itself, and reads the roots.
	data[certChainName], data[keyName] = []byte{}, []byte{}
	data[rootCertName] = pki.MarshalCertificatesPEM(d.Contents().X509Authorities...)
	return data, nil
}

// read makes a document of a record. changed says that the document must be stored, because read adopted another
// program's CA or followed another program's change.
func (a *Authority) read(ctx context.Context, r Record, now time.Time) (*rotation.Document, bool, error) {
	d, changed, err := a.parse(ctx, r, now)
	if _, passes := errors.AsType[*custodyError](err); passes {
		return nil, false, fmt.Errorf("ca: %w", err)
	}
	if err != nil {
		return nil, false, fmt.Errorf("ca: %w: %w", errRecord, within(err))
	}
	return d, changed, nil
}

// stateOf returns our state in a record, nil if it has none, and whether to write the record in another form: sealed or
// not, or sealed by another key.
func (a *Authority) stateOf(ctx context.Context, r Record) (state []byte, otherForm bool, err error) {
	state = r.Data()[stateName]
	b, sealed := r.Data()[sealedName]
	starts := a.state.Load() == nil // later, replicas with other settings would take turns
	switch {
	case !sealed:
		return state, starts && a.seals, nil
	case state != nil:
		return nil, false, fmt.Errorf("there are %s and %s: restore the record from a backup", stateName, sealedName)
	case a.custody == nil:
		return nil, false, errors.New("the record is sealed, and no key is named to unseal it")
	}
	state, anew, err := a.custody.unseal(ctx, b)
	return state, starts && (anew || !a.seals), err
}

func (a *Authority) parse(ctx context.Context, r Record, now time.Time) (*rotation.Document, bool, error) {
	state, otherForm, err := a.stateOf(ctx, r)
	if err != nil {
		return nil, false, err
	}
	if state == nil {
		if _, noted := r.Data()[noteName]; a.state.Load() != nil {
			a.cfg.Logger.Warn(stateName + " is missing from the record, and is written again")
		} else if noted {
			return nil, false, fmt.Errorf("%s is missing, and %s says that it was there: restore the record "+
				"from a backup, or read %s", stateName, noteName, noteName)
		} else {
			a.adopted = true
		}
		d, err := a.adopt(nil, r, now)
		return d, true, err
	}
	var find func(string, crypto.PublicKey) crypto.Signer
	if a.custody != nil {
		find = a.custody.key
	} else if a.views() {
		find = rotation.Absent
	}
	d, err := rotation.Parse(state, a.cfg.TrustDomain, find)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", stateName, err)
	}
	active := d.Primary()
	if plugged := a.files != nil; plugged != (active == nil) && !d.Begun() {
		return nil, false, errors.New("it is the record of a CA with roots of its own for one of plugged-in files, " +
			"or the other way round; give each its own store")
	}
	if active == nil {
		return d, otherForm, nil
	}
	if len(r.Data()[caCertName]) > 0 {
		cert, err := firstCertificate(r.Data()[caCertName])
		if err != nil {
			return nil, false, err
		}
		if !cert.Equal(active.Cert) {
			d, err = a.adopt(d, r, now)
			return d, true, err
		}
	}
	return d, otherForm, checkKeyCopy(r, active)
}

// checkKeyCopy checks the copy of the active root's key in PEM. Another key may be the only copy, and the next save
// would overwrite it.
func checkKeyCopy(r Record, active *rotation.Key) error {
	b := r.Data()[caKeyName]
	if len(bytes.TrimSpace(b)) == 0 {
		return nil
	}
	key, err := pki.ParsePrivateKeyPEM(b)
	if err == nil && !pki.PublicKeysEqual(key.Public(), active.Cert.PublicKey) {
		err = pki.ErrKeyMismatch
	}
	if err != nil {
		return fmt.Errorf("%s is not the key of the active root %s, which is in %s: to replace the CA put the "+
			"certificate of the key into %s, else remove %s: %w",
			caKeyName, active.ID, stateName, caCertName, caKeyName, err)
	}
	return nil
}

func firstCertificate(b []byte) (*x509.Certificate, error) {
	certs, err := pki.ParseCertificatesPEM(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", caCertName, err)
	}
	return certs[0], nil
}

// foreignTTL is the longest lifetime that we assume another CA has granted: Istio's default.
const foreignTTL = 90 * 24 * time.Hour

// foreign returns the root in ca-cert.pem and ca-key.pem.
func (a *Authority) foreign(r Record, now time.Time) (k rotation.Key, err error) {
	if a.files != nil {
		return k, errors.New("it has no " + stateName + "; the JWT keys of a plugged-in CA need a store of their own")
	}
	if len(r.Data()[caCertName]) == 0 || len(r.Data()[caKeyName]) == 0 {
		return k, fmt.Errorf("it has neither %s nor both of %s and %s", stateName, caCertName, caKeyName)
	}
	cert, err := firstCertificate(r.Data()[caCertName])
	if err != nil {
		return k, err
	}
	signer, err := pki.ParsePrivateKeyPEM(r.Data()[caKeyName])
	if err != nil {
		return k, fmt.Errorf("%s: %w", caKeyName, err)
	}
	issuer, err := rotation.SelfSigned(cert, signer)
	if err != nil {
		return k, fmt.Errorf("%s: %w", caCertName, err)
	}
	bundle, err := spiffe.NewBundle(a.cfg.TrustDomain,
		spiffe.BundleContents{X509Authorities: []*x509.Certificate{cert}})
	if err != nil {
		return k, err
	}
	if err := probe(a.cfg.TrustDomain, issuer, nil, bundle, now); err != nil {
		return k, fmt.Errorf("%s: %w", caCertName, err)
	}
	t := a.cfg.terms(rotation.Root)
	t.Longest = max(t.Longest, foreignTTL)
	return rotation.Key{
		ID: rotation.Serial(cert), Cert: cert, Issuer: issuer, Secret: redact.Seal(signer),
		Phase: rotation.Active, Prepared: now, Activates: now, Terms: t,
	}, nil
}

// adopt makes a document of a CA that another program made, as Istio does in istio-ca-secret, or put in the place of
// d's active root.
func (a *Authority) adopt(d *rotation.Document, r Record, now time.Time) (*rotation.Document, error) {
	active, err := a.foreign(r, now)
	if err != nil {
		return nil, err
	}
	if s := a.state.Load(); d == nil && s != nil {
		// Only the document was lost: the roots that this process publishes stay in the bundle until their leaves
		// have expired, and the numbers go on.
		d = s.Clone()
	}
	if d == nil {
		d = newDocument()
		d.Keys[active.Kind()] = []rotation.Key{active}
	} else if err := d.ReplaceActive(active, now); err != nil {
		return nil, fmt.Errorf("%s: %w", caCertName, err)
	}
	if len(bytes.TrimSpace(r.Data()[rootCertName])) == 0 {
		return d, nil
	}
	more, err := pki.ParseCertificatesPEM(r.Data()[rootCertName])
	if err == nil {
		err = d.AddTrusted(a.cfg.TrustDomain, more, now)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", rootCertName, err)
	}
	return d, nil
}
