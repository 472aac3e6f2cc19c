package ca

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// errRecord says that the record in a store is not one that this authority may work with: it cannot
// be read, does not verify, or belongs to another trust domain or another CA. It is left as it is.
var errRecord = fmt.Errorf("the record in the store is %w", ErrUnfit)

// The names of the items in a [Record]. stateName is ours, the others are those of Istio's secret.
const (
	stateName     = "svidkit-state.json"
	caCertName    = "ca-cert.pem"
	caKeyName     = "ca-key.pem"
	certChainName = "cert-chain.pem"
	keyName       = "key.pem"
	rootCertName  = "root-cert.pem"
)

// record returns d as it is stored: our state, and the items that Istio has.
func record(d *rotation.Document, td spiffe.TrustDomain) (map[string][]byte, error) {
	state, err := d.Marshal(td)
	if err != nil {
		return nil, err
	}
	data := map[string][]byte{stateName: state}
	maps.Copy(data, d.Others)
	active := d.In(rotation.Root, Active)
	if active == nil {
		return data, nil
	}
	data[caCertName] = pki.MarshalCertificatesPEM(active.Cert)
	if data[caKeyName], err = pki.MarshalPrivateKeyPEM(active.Secret()); err != nil {
		return nil, err
	}
	// Istio has the chain and the key of a CA that it made itself empty, and reads the roots.
	data[certChainName], data[keyName] = []byte{}, []byte{}
	data[rootCertName] = pki.MarshalCertificatesPEM(d.Contents().X509Authorities...)
	return data, nil
}

// read makes a document of a record. What it returns may differ from the record, and then has to be
// stored: a CA that another program made is adopted, and one that another program changed is followed.
func (a *Authority) read(r Record, now time.Time) (d *rotation.Document, changed bool, err error) {
	d, changed, err = a.parse(r, now)
	if err != nil {
		return nil, false, fmt.Errorf("ca: %w: %w", errRecord, err)
	}
	d.Others = map[string][]byte{}
	for name, b := range r.Data() {
		switch name {
		case stateName, caCertName, caKeyName, certChainName, keyName, rootCertName:
		default:
			d.Others[name] = bytes.Clone(b) // not ours to change
		}
	}
	return d, changed, nil
}

func (a *Authority) parse(r Record, now time.Time) (*rotation.Document, bool, error) {
	state, ours := r.Data()[stateName]
	if !ours {
		d, err := a.adopt(nil, r, now)
		return d, true, err
	}
	d, err := rotation.Parse(state, a.cfg.TrustDomain)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", stateName, err)
	}
	active := d.In(rotation.Root, Active)
	if plugged := a.files != nil; plugged != (active == nil) {
		return nil, false, errors.New("it is the record of a CA with roots of its own for one of plugged-in files, or the other way round; give each its own store")
	}
	if active == nil || len(r.Data()[caCertName]) == 0 {
		return d, false, nil
	}
	cert, err := firstCertificate(r.Data()[caCertName])
	if err != nil {
		return nil, false, err
	}
	if cert.Equal(active.Cert) {
		return d, false, nil
	}
	d, err = a.adopt(d, r, now)
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
	bundle, err := spiffe.NewBundle(a.cfg.TrustDomain, spiffe.BundleContents{X509Authorities: []*x509.Certificate{cert}})
	if err != nil {
		return k, err
	}
	if err := probe(a.cfg.TrustDomain, issuer, nil, bundle, now); err != nil {
		return k, fmt.Errorf("%s: %w", caCertName, err)
	}
	t := a.cfg.terms(rotation.Root)
	t.Longest = max(t.Longest, foreignTTL)
	return rotation.Key{
		ID: rotation.Serial(cert), Cert: cert, Issuer: issuer, Secret: rotation.Seal(signer),
		Phase: Active, Prepared: now, Activates: now, Terms: t,
	}, nil
}

// adopt makes a document of a CA that another program made, as Istio does in istio-ca-secret, or put in
// the place of the active root of d.
func (a *Authority) adopt(d *rotation.Document, r Record, now time.Time) (*rotation.Document, error) {
	active, err := a.foreign(r, now)
	if err != nil {
		return nil, err
	}
	if d == nil {
		// What this process publishes already stays in the bundle until its leaves are dead, and the
		// numbers go on: only the document was taken away.
		if s := a.state.Load(); s != nil {
			d = s.Clone()
		}
	}
	if d == nil {
		d = &rotation.Document{Authority: rotation.RandomID(), Sequence: 1}
		d.Keys[rotation.Root] = []rotation.Key{active}
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
