package spiffe_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// A document as a bundle endpoint serves it. The second key is of a kind that this version does not
// know, which does not disturb the first one.
func ExampleParseBundle() {
	td := spiffe.MustParseTrustDomain("example.org")
	doc := []byte(`{
		"spiffe_sequence": 7,
		"spiffe_refresh_hint": 300,
		"keys": [
			{"use": "jwt-svid", "kid": "jwt-1", "kty": "EC", "crv": "P-256",
			 "x": "9NUUU7oiJdLvjfA0pATsrVtv2Lq4tsLrH8n7_-CJJJs", "y": "zJ6858Q7CTi5yrGRo0QOZHx9y64qJmWMP1X45LXvpWc"},
			{"use": "jwt-svid", "kid": "jwt-2", "kty": "LWE", "alg": "ML-DSA-65", "pub": "AAAA"}
		]
	}`)
	bundle, err := spiffe.ParseBundle(td, doc)
	if err != nil {
		fmt.Println(err) // and the last good bundle stays in force
		return
	}
	sequence, _ := bundle.Sequence()
	hint, _ := bundle.RefreshHint()
	fmt.Println("sequence", sequence, "look again in", hint)
	for id := range bundle.JWTAuthorities() {
		fmt.Println("JWT key", id)
	}
	for _, err := range bundle.Skipped() {
		fmt.Println(err)
	}

	_, err = spiffe.ParseBundle(td, []byte(`{"keys": {}}`))
	if e, ok := errors.AsType[*spiffe.ParseError](err); ok {
		fmt.Println(e.Rule, e.Reason)
	}
	// Output:
	// sequence 7 look again in 5m0s
	// JWT key jwt-1
	// spiffe: invalid bundle of "example.org", entry 1 with key ID "jwt-2" at byte 248: "kty" is missing or unknown: "LWE"
	// BND-9 "keys" is not an array
}

// Keys for WIT-SVIDs, whose standard is still changing, are read only on request.
func ExampleParseBundleWIT() {
	td := spiffe.MustParseTrustDomain("example.org")
	doc := []byte(`{"keys": [
		{"use": "wit-svid", "kid": "wit-1", "kty": "EC", "crv": "P-256",
		 "x": "4_ne-_gbSYKwe6GJ3aSoAGnOGf0ucx0P4KAKw-eHDBg", "y": "nLoKGIwEG_thYogMNASMUmpmG_bZufJP40PSo0THB78"}
	]}`)
	for _, parse := range []func(spiffe.TrustDomain, []byte) (*spiffe.Bundle, error){spiffe.ParseBundle, spiffe.ParseBundleWIT} {
		bundle, err := parse(td, doc)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(len(bundle.Contents().WITAuthorities), bundle.Skipped())
	}
	// Output:
	// 0 [spiffe: invalid bundle of "example.org", entry 0 with key ID "wit-1" at byte 13: "use" is missing or unknown: "wit-svid"]
	// 1 []
}

// A publisher adds a key and publishes the next document. The roots are what a CA hands out in PEM.
func ExampleBundle_Marshal() {
	td := spiffe.MustParseTrustDomain("example.org")
	bundle, err := spiffe.ParseBundlePEM(td, []byte(`
-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgICA+kwCgYIKoZIzj0EAwIwFjEUMBIGA1UEChMLZXhhbXBs
ZS5vcmcwHhcNMjUwMTAxMDAwMDAwWhcNNDUwMTAxMDAwMDAwWjAWMRQwEgYDVQQK
EwtleGFtcGxlLm9yZzBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABGG1b+5/2R9l
8e0tuj3DuhKsuaclBCLTe18D/4MBcGTwj3s4UDTQX0Rd2N/Uaujy4Mu51KFmAV3z
O+rJr2MMa1SjYzBhMA4GA1UdDwEB/wQEAwIBBjAPBgNVHRMBAf8EBTADAQH/MB0G
A1UdDgQWBBTAYZATcThR0VnlMINULSNGJo5DaDAfBgNVHREEGDAWhhRzcGlmZmU6
Ly9leGFtcGxlLm9yZzAKBggqhkjOPQQDAgNIADBFAiBoOZS+PbvZk17Cy979Pog0
ozyF3nzegJO6WaW86UJ+xgIhAIj0wWYaOwzVyUOHUkY2iuFsbat6WaftinA3cNHB
wdqf
-----END CERTIFICATE-----
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	point, err := base64.RawURLEncoding.DecodeString("BPTVFFO6IiXS743wNKQE7K1bb9i6uLbC6x_J-__giSSbzJ6858Q7CTi5yrGRo0QOZHx9y64qJmWMP1X45LXvpWc")
	if err != nil {
		fmt.Println(err)
		return
	}
	key, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), point)
	if err != nil {
		fmt.Println(err)
		return
	}

	contents := bundle.Contents()
	contents.JWTAuthorities = map[string]crypto.PublicKey{"jwt-1": key}
	contents.Sequence = new(uint64(8)) // one more than in the last document
	contents.RefreshHint = 5 * time.Minute
	next, err := spiffe.NewBundle(td, contents)
	if err != nil {
		fmt.Println(err)
		return
	}
	doc, err := next.Marshal()
	if err != nil {
		fmt.Println(err)
		return
	}
	start, _, _ := strings.Cut(string(doc), `,"x5c"`)
	fmt.Println(start)
	fmt.Println(next.Supersedes(bundle))
	// Output:
	// {"spiffe_sequence":8,"spiffe_refresh_hint":300,"keys":[{"use":"x509-svid","kty":"EC","crv":"P-256","x":"YbVv7n_ZH2Xx7S26PcO6Eqy5pyUEItN7XwP_gwFwZPA","y":"j3s4UDTQX0Rd2N_Uaujy4Mu51KFmAV3zO-rJr2MMa1Q"
	// true
}
