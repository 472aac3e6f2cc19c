package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// certificate returns the program's own.
type certificate func() (*pki.Credential, error)

// readable returns an error for each of the files that is not one of CA certificates.
func readable(s settings, rootsFiles ...string) error {
	var bad []error
	for _, name := range rootsFiles {
		if _, err := readBundle(nameless, s[name]); err != nil {
			bad = append(bad, s.reject(name, fmt.Errorf("%w; set it to a file of CA certificates in PEM", err)))
		}
	}
	return errors.Join(bad...)
}

// readPair reads CERT_FILE and KEY_FILE.
func (s settings) readPair() (*pki.Credential, error) {
	certs, err1 := os.ReadFile(s["CERT_FILE"])
	key, err2 := os.ReadFile(s["KEY_FILE"])
	c, err := pki.ParseCredentialPEM(certs, key)
	switch err = cmp.Or(err1, err2, err); {
	case err != nil:
		err = fmt.Errorf("%w; set it to a file with certificates in PEM, and KEY_FILE to one with their key", err)
	case !time.Now().Before(c.NotAfter()):
		err = errors.New("the certificate there has expired")
	case s["PROVIDER_ADDR"] != off && c.Leaf().Subject.CommonName != s["PROVIDER_SERVICE"]:
		err = fmt.Errorf("the common name is %.200q; ZTS asks for that of the provider: set it to the certificate of %s", c.Leaf().Subject.CommonName, s["PROVIDER_SERVICE"])
	default:
		return c, nil
	}
	return nil, s.reject("CERT_FILE", err)
}

// nameless is the trust domain of the roots where no certificate has a SPIFFE ID of it.
var nameless = spiffe.MustParseTrustDomain("athenz.io")

// trustDomain returns the trust domain of the SPIFFE IDs, and whether they have a namespace.
func trustDomain(s settings) (td spiffe.TrustDomain, named bool) {
	if text := s["SPIFFE_TRUST_DOMAIN"]; text != "" {
		return spiffe.MustParseTrustDomain(text), true // it was checked
	}
	return nameless, false
}

// readBundle returns the CA certificates in a file as the bundle of a trust domain.
func readBundle(td spiffe.TrustDomain, file string) (*spiffe.Bundle, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	b, err := spiffe.ParseBundlePEM(td, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return b, nil
}
