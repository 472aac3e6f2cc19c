package test_test

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/test/hostilecsr"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
)

func TestHostileCSRNames(t *testing.T) {
	t.Parallel()
	cases := hostilecsr.Cases(t)
	seen := map[string]bool{}
	signable := 0
	for _, c := range cases {
		assert.False(t, seen[c.Name], "duplicate name %q", c.Name)
		seen[c.Name] = true
		group, what, ok := strings.Cut(c.Name, "/")
		assert.True(t, ok && group != "" && what != "", c.Name)
		assert.NotNil(t, c.PEM, c.Name)
		assert.Equal(t, group == "pem", c.DER == nil, c.Name)
		if c.Signable {
			signable++
		}
	}
	assert.Len(t, cases, 541)
	assert.Equal(t, 227, signable)
	for group, whats := range refusedByStandardLibrary {
		for _, what := range whats {
			assert.True(t, seen[group+"/"+what], "%s/%s is gone", group, what)
		}
	}
}

// refusedByStandardLibrary are the requests that crypto/x509 refuses to read, though key and signature
// are good. That it reads the others shows that nothing is wrong with those but what their name says.
var refusedByStandardLibrary = map[string][]string{
	"san": {
		"URI with a line break",
		"URI with a NUL",
		"URI with bytes that are not ASCII",
		"URI with a template",
		"DNS name in UTF-8",
		"DNS name in Latin-1",
		"DNS name with a look-alike letter",
		"IP of no bytes",
		"IP of five bytes",
		"IP of eight bytes, a network",
		"IP of 32 bytes",
		"two extensions with different names",
	},
	"san form": {
		"a SET in place of the SEQUENCE",
		"no SEQUENCE around it",
		"empty value",
		"garbage",
		"length over the end",
		"indefinite length",
		"length that is not minimal",
		"length of 4 GiB",
		"tag of many bytes",
	},
	"extension": {
		"the same one twice",
		"first not a CA, then one",
		"five hundred of one",
	},
	"extension form": {
		"one critical in BER",
		"one critical of two bytes",
		"one without a value",
		"one without a number",
		"one with a value that is no OCTET STRING",
		"one with an empty number",
		"one with a number that does not end",
		"one with a number with leading zeros",
		"one that is a SET",
		"one of indefinite length",
		"one longer than the request",
	},
	"attribute": {
		"two requests for extensions",
		"two equal requests for extensions",
		"a request for extensions that is a string",
	},
	"subject": {
		"common name in bad UTF-8",
		"common name in overlong UTF-8",
		"common name in BMPString of odd length",
		"common name in NumericString with letters",
		"common name in PrintableString with @ and *",
		"common name in IA5String with high bytes",
	},
}

// refusedByNewest are those that crypto/x509 refuses from Go 1.27 on.
var refusedByNewest = map[string][]string{"san": {"IP of sixteen bytes"}}

// TestSignable checks with crypto/x509 alone that the key of a signable request has signed it.
func TestHostileCSRSignable(t *testing.T) {
	t.Parallel()
	for _, c := range hostilecsr.Cases(t) {
		if !c.Signable {
			assert.Nil(t, c.Key, c.Name)
			continue
		}
		require.NoError(t, certpem.CheckKey(c.Key), c.Name)
		der := c.DER
		if der == nil {
			b, _ := pem.Decode(c.PEM)
			require.NotNil(t, b, c.Name)
			der = b.Bytes
		}
		csr, err := x509.ParseCertificateRequest(der)
		group, what, _ := strings.Cut(c.Name, "/")
		if slices.Contains(refusedByStandardLibrary[group], what) {
			require.Error(t, err, c.Name)
			csr = unpack(t, c, der)
		} else if err != nil && slices.Contains(refusedByNewest[group], what) {
			csr = unpack(t, c, der)
		} else {
			require.NoError(t, err, c.Name)
			assert.True(t, pki.PublicKeysEqual(csr.PublicKey, c.Key), c.Name)
		}
		assert.NoError(t, csr.CheckSignature(), c.Name)
	}
}

// unpack reads what the signature is about, and nothing else.
func unpack(t *testing.T, c hostilecsr.Case, der []byte) *x509.CertificateRequest {
	var parts struct {
		Info      asn1.RawValue
		Algorithm pkix.AlgorithmIdentifier
		Signature asn1.BitString
	}
	rest := must.Get(asn1.Unmarshal(der, &parts))(t, c.Name)
	require.Empty(t, rest, c.Name)
	require.Equal(t, asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 2}, parts.Algorithm.Algorithm, c.Name)
	return &x509.CertificateRequest{
		RawTBSCertificateRequest: parts.Info.FullBytes,
		SignatureAlgorithm:       x509.ECDSAWithSHA256,
		Signature:                parts.Signature.Bytes,
		PublicKey:                c.Key,
	}
}

// TestNotSignable checks that the strict reader of package pki refuses what the file says.
func TestHostileCSRNotSignable(t *testing.T) {
	t.Parallel()
	for _, c := range hostilecsr.Cases(t) {
		if c.Signable {
			continue
		}
		if c.DER != nil {
			assert.ErrorContains(t, must.Err(pki.ParseCSR(c.DER)), "pki: invalid certificate signing request: ", c.Name)
		}
		assert.ErrorContains(t, must.Err(pki.ParseCSRPEM(c.PEM)), "pki: invalid certificate signing request: ", c.Name)
	}
}
