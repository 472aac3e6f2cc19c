//go:build go1.27

package pki_test

import (
	"bytes"
	"crypto/mldsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// identifier returns the AlgorithmIdentifier of ML-DSA-44, -65 or -87, whose last arc is given, and what follows.
func identifier(t *testing.T, arc int, parameters ...byte) []byte {
	oid := must.Get(asn1.Marshal(asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 3, arc}))(t)
	return quantum.Sequence(t, oid, parameters)
}

func keyInfo(t *testing.T, identifier, key []byte, unused int) []byte {
	bits := must.Get(asn1.Marshal(asn1.BitString{Bytes: key, BitLength: 8*len(key) - unused}))(t)
	return quantum.Sequence(t, identifier, bits)
}

// TestQuantumKeyVectors: CSRs and certificates of ML-DSA in forms that RFC 9881 does not have, each signed with their own
// key, are read by nothing.
func TestQuantumKeyVectors(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	key := must.Get(pki.NewKey("ml-dsa-65"))(t)
	pub := key.Public().(*mldsa.PublicKey).Bytes()
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN("a.test")}}))(t)
	root := must.Get(pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(quantum.TrustDomain.ID())},
		NotBefore: quantum.Root(t, "ml-dsa-44").Certificate().NotBefore, NotAfter: quantum.Root(t, "ml-dsa-44").Certificate().NotAfter}))(t)
	null := asn1.NullBytes
	const csrKey, certKey, certAlgorithm = 2, 6, 2
	for name, c := range map[string]struct {
		info, signature []byte // nil for the right ones
	}{
		"good":                            {},
		"the same again":                  {keyInfo(t, identifier(t, 18), pub, 0), identifier(t, 18)},
		"parameters of the key":           {keyInfo(t, identifier(t, 18, null...), pub, 0), nil},
		"parameters of the signature":     {nil, identifier(t, 18, null...)},
		"another algorithm of the key":    {keyInfo(t, identifier(t, 17), pub, 0), nil},
		"87":                              {keyInfo(t, identifier(t, 19), pub, 0), nil},
		"another algorithm of signatures": {nil, identifier(t, 17)},
		"a signature of 87":               {nil, identifier(t, 19)},
		"prehashed":                       {nil, identifier(t, 33)},
		"a byte short":                    {keyInfo(t, identifier(t, 18), pub[1:], 0), nil},
		"a byte long":                     {keyInfo(t, identifier(t, 18), append(bytes.Clone(pub), 0), 0), nil},
		"empty":                           {keyInfo(t, identifier(t, 18), nil, 0), nil},
		"bits unused":                     {keyInfo(t, identifier(t, 18), append(bytes.Clone(pub[:len(pub)-1]), 0), 7), nil},
		"in an OCTET STRING": {keyInfo(t, identifier(t, 18),
			must.Get(asn1.Marshal(pub))(t), 0), nil}, // as some drafts had it
	} {
		edited := quantum.Edit(t, csr.DER(), key, func(parts [][]byte) []byte {
			if c.info != nil {
				parts[csrKey] = c.info
			}
			return c.signature
		})
		_, err := pki.ParseCSR(edited)
		good := name == "good" || name == "the same again"
		assert.Equal(t, good, err == nil, "CSR, %s: %v", name, err)

		der := quantum.Edit(t, root.Certificate().Raw, key, func(parts [][]byte) []byte {
			if c.info != nil {
				parts[certKey] = c.info
			}
			if c.signature != nil {
				parts[certAlgorithm] = c.signature
			}
			return c.signature
		})
		cert, err := x509.ParseCertificate(der)
		if err == nil {
			_, err = pki.NewIssuer([]*x509.Certificate{cert}, key)
		}
		if err == nil && !good {
			err = cert.CheckSignatureFrom(cert) // what reads it does not verify it
		}
		assert.Equal(t, good, err == nil, "certificate, %s: %v", name, err)
	}

	// crypto/x509 passes over what follows a key.
	behind := quantum.Edit(t, csr.DER(), key, func(parts [][]byte) []byte {
		info := parts[csrKey]
		var outer asn1.RawValue
		must.Get(asn1.Unmarshal(info, &outer))(t)
		parts[csrKey] = quantum.Sequence(t, outer.Bytes, null)
		return nil
	})
	must.Get(x509.ParseCertificateRequest(behind))(t)
	_, err := pki.ParseCSR(behind)
	assert.ErrorContains(t, err, "not in its one DER form")

	// The signature is over the very bytes.
	for name, change := range map[string]func(der []byte) []byte{
		"a bit of the signature": func(der []byte) []byte { der[len(der)-1] ^= 1; return der },
		"a bit of the name":      func(der []byte) []byte { der[bytes.Index(der, []byte("a.test"))] ^= 1; return der },
		"a byte behind":          func(der []byte) []byte { return append(der, 0) },
		"a byte less":            func(der []byte) []byte { return der[:len(der)-1] },
	} {
		_, err := pki.ParseCSR(change(csr.DER()))
		assert.Error(t, err, name)
	}
	other := must.Get(pki.NewKey("ml-dsa-65"))(t)
	_, err = pki.ParseCSR(quantum.Edit(t, csr.DER(), other, func([][]byte) []byte { return nil }))
	assert.ErrorContains(t, err, "not by the key in the request")
}

// TestQuantumPrivateKeys: a private key is its seed (RFC 9881). Other forms have a clear error.
func TestQuantumPrivateKeys(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	key := must.Get(pki.NewKey("ml-dsa-65"))(t).(*mldsa.PrivateKey)
	text := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	block, _ := pem.Decode(text)
	t.Log(len(block.Bytes), "bytes")
	pkcs8 := func(arc int, private []byte) []byte {
		return quantum.Sequence(t, must.Get(asn1.Marshal(0))(t), identifier(t, arc), must.Get(asn1.Marshal(private))(t))
	}
	seed := append([]byte{0x80, 32}, key.Bytes()...)
	require.Equal(t, pkcs8(18, seed), block.Bytes)
	octets := func(b []byte) []byte { return must.Get(asn1.Marshal(b))(t) }
	for name, c := range map[string]struct {
		der  []byte
		good bool
	}{
		"seed":               {pkcs8(18, seed), true},
		"seed of another":    {pkcs8(17, seed), true},
		"seed of 87":         {pkcs8(19, seed), false},
		"a byte short":       {pkcs8(18, append([]byte{0x80, 31}, seed[2:33]...)), false},
		"a byte long":        {pkcs8(18, append([]byte{0x80, 33}, append(seed[2:34:34], 0)...)), false},
		"something behind":   {pkcs8(18, append(seed[:34:34], 0)), false},
		"an OCTET STRING":    {pkcs8(18, octets(seed[2:])), false},
		"expanded":           {pkcs8(18, octets(make([]byte, 4032))), false},
		"both, not matching": {pkcs8(18, quantum.Sequence(t, octets(key.Bytes()), octets(make([]byte, 4032)))), false},
		"too large":          {pkcs8(18, octets(make([]byte, 8<<10))), false},
	} {
		got, err := pki.ParsePrivateKeyPEM(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: c.der}))
		require.Equal(t, c.good, err == nil, "%s: %v", name, err)
		if !c.good {
			t.Log(name, err)
			assert.Equal(t, name == "too large", errors.Is(err, spiffe.ErrTooLarge), name)
			assert.NotContains(t, err.Error(), fmt.Sprintf("%x", key.Bytes()[:8]))
			continue
		}
		assert.Equal(t, name == "seed", pki.PublicKeysEqual(got.Public(), key.Public()))
	}
}

// TestQuantumCSRLimit: a CSR with a key of ML-DSA-65 may have 64 KiB, as one of any key.
func TestQuantumCSRLimit(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	key := must.Get(pki.NewKey("ml-dsa-65"))(t)
	usual := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))}}))(t)
	t.Log(len(usual.DER()), "bytes of DER,", len(usual.PEM()), "of PEM")
	sized := func(n int) []byte { // with an attribute of the request that is passed over
		return quantum.Edit(t, usual.DER(), key, func(parts [][]byte) []byte {
			value := must.Get(asn1.Marshal(strings.Repeat("x", n)))(t)
			set := must.Get(asn1.Marshal(asn1.RawValue{Tag: asn1.TagSet, IsCompound: true, Bytes: value}))(t)
			unstructured := must.Get(asn1.Marshal(asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 2}))(t)
			parts[3] = must.Get(asn1.Marshal(asn1.RawValue{Class: asn1.ClassContextSpecific, IsCompound: true,
				Bytes: quantum.Sequence(t, unstructured, set)}))(t)
			return nil
		})
	}
	room := 64<<10 - len(sized(60_000)) + 60_000
	require.Len(t, sized(room), 64<<10)
	csr := must.Get(pki.ParseCSR(sized(room)))(t)
	must.Get(pki.ParseCSRPEM(csr.PEM()))(t)
	_, err := pki.ParseCSR(sized(room + 1))
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
}
