package jws

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/strictjson"
)

// Limits on RSA keys. RFC 7518 sets the lower; the upper bounds the cost of one verification.
const (
	minRSABits = 2048
	maxRSABits = 8192
)

// Limits on a JWK Set, such as a bundle document.
const (
	MaxSetSize = 1 << 20 // bytes
	MaxSetKeys = 1000    // entries
)

// JWK has the public members of a JSON Web Key as in a document. A member that is missing or not a string is nil.
type JWK struct{ Kty, Crv, X, Y, N, E, Alg, Pub []byte }

// Member reads the value of the member name from r if a JWK has such a member, and otherwise leaves it unread.
func (k *JWK) Member(name []byte, r *strictjson.Reader) {
	switch string(name) {
	case "kty":
		k.Kty, _ = r.Text()
	case "crv":
		k.Crv, _ = r.Text()
	case "x":
		k.X, _ = r.Text()
	case "y":
		k.Y, _ = r.Text()
	case "n":
		k.N, _ = r.Text()
	case "e":
		k.E, _ = r.Text()
	case "alg":
		k.Alg, _ = r.Text()
	case "pub":
		k.Pub, _ = r.Text()
	}
}

// Confirmation is the claim "cnf" of a token (RFC 7800): the key of its holder.
type Confirmation struct {
	JWK
	There  bool // "jwk" is present and an object
	Secret bool // "jwk" has members of a private or symmetric key

	Certificate []byte // "x5t#S256", the hash of a client certificate (RFC 8705), if it is the only member of "cnf"
}

// Read reads the value of "cnf".
func (c *Confirmation) Read(r *strictjson.Reader) {
	members := 0
	for name := range r.Members() {
		if members++; members > 1 {
			c.Certificate = nil
		} else if string(name) == "x5t#S256" {
			c.Certificate, _ = r.Text()
		}
		if string(name) != "jwk" {
			continue
		}
		c.There = r.Kind() == strictjson.Object
		for name := range r.Members() {
			switch string(name) {
			case "d", "k", "p", "q", "dp", "dq", "qi", "oth", "priv":
				c.Secret = true
			default:
				c.Member(name, r)
			}
		}
	}
}

// PublicKey returns the key, an *ecdsa.PublicKey, *rsa.PublicKey or *mldsa.PublicKey that passes [Unfit], or the reason
// why there is none.
func (k *JWK) PublicKey() (crypto.PublicKey, string) {
	switch string(k.Kty) {
	case "EC":
		at := slices.IndexFunc(curves, func(c elliptic.Curve) bool { return c.Params().Name == string(k.Crv) })
		if at < 0 {
			return nil, fmt.Sprintf("the curve is not P-256, P-384 or P-521: %.40q", k.Crv)
		}
		curve := curves[at]
		size := CurveSize(curve)
		point := make([]byte, 1+2*size)
		point[0] = 4 // uncompressed
		if !decodeURL(point[1:1+size], k.X) || !decodeURL(point[1+size:], k.Y) {
			return nil, fmt.Sprintf(`"x" and "y" are not both %d bytes in base64url`, size)
		}
		key, err := ecdsa.ParseUncompressedPublicKey(curve, point)
		if err != nil {
			return nil, "the point is not on the curve"
		}
		return key, ""
	case "RSA":
		n := make([]byte, strictURL.DecodedLen(min(len(k.N), 2048)))
		e := make([]byte, strictURL.DecodedLen(min(len(k.E), 6)))
		if !decodeURL(n, k.N) || !decodeURL(e, k.E) || len(n) == 0 || len(e) == 0 || n[0] == 0 || e[0] == 0 {
			return nil, `"n" and "e" are not both numbers of usual size in base64url without leading zeros`
		}
		key := &rsa.PublicKey{N: new(big.Int).SetBytes(n)}
		for _, b := range e {
			key.E = key.E<<8 | int(b)
		}
		if reason := Unfit(key); reason != "" {
			return nil, reason
		}
		return key, ""
	case "AKP": // RFC 9964
		pub := make([]byte, strictURL.DecodedLen(min(len(k.Pub), 4096)))
		if decodeURL(pub, k.Pub) {
			if key := mldsa.PublicKey(string(k.Alg), pub); key != nil {
				return key, ""
			}
		}
		return nil, `"alg" and "pub" are not those of ML-DSA-44 or ML-DSA-65, which need a program built with Go 1.27`
	}
	return nil, "no algorithm uses this type of key"
}

// SameKey reports whether two public keys are equal. Keys that cannot be compared are not.
func SameKey(a, b crypto.PublicKey) bool {
	k, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.Equal(b)
}

// Unfit returns the reason why no algorithm can use key, or "".
func Unfit(key crypto.PublicKey) string {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if k == nil || CurveSize(k.Curve) == 0 {
			return "the curve is not P-256, P-384 or P-521"
		}
		if _, err := k.Bytes(); err != nil {
			return "the point is not on the curve"
		}
	case *rsa.PublicKey:
		switch {
		case k == nil || k.N == nil:
			return "the RSA key is empty"
		case k.N.BitLen() < minRSABits || k.N.BitLen() > maxRSABits:
			return fmt.Sprintf("the RSA key has %d bits, not %d to %d", k.N.BitLen(), minRSABits, maxRSABits)
		case k.N.Bit(0) == 0:
			return "the RSA modulus is even"
		case k.E < 3 || k.E&1 == 0 || k.E > 1<<31-1:
			return fmt.Sprintf("the RSA exponent %d is not an odd number from 3 to 2³¹-1", k.E)
		}
	default:
		if mldsa.Name(key) == "" {
			return fmt.Sprintf("no algorithm uses a key of type %T", key)
		}
	}
	return ""
}

// AppendKey appends the members of a public key, without braces, and reports whether a JWK can hold the key. Ed25519
// keys are included, for certificates.
func AppendKey(b []byte, key crypto.PublicKey) ([]byte, bool) {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		size := CurveSize(k.Curve)
		point, err := k.Bytes() // uncompressed
		if err != nil || size == 0 {
			return b, false
		}
		b = append(b, `"kty":"EC","crv":"`...)
		b = append(b, k.Curve.Params().Name...)
		b = append(b, `","x":"`...)
		b = strictURL.AppendEncode(b, point[1:1+size])
		b = append(b, `","y":"`...)
		b = strictURL.AppendEncode(b, point[1+size:])
		return append(b, '"'), true
	case *rsa.PublicKey:
		b = append(b, `"kty":"RSA","n":"`...)
		b = strictURL.AppendEncode(b, k.N.Bytes())
		b = append(b, `","e":"`...)
		b = strictURL.AppendEncode(b, Exponent(k))
		return append(b, '"'), true
	case ed25519.PublicKey:
		b = append(b, `"kty":"OKP","crv":"Ed25519","x":"`...)
		b = strictURL.AppendEncode(b, k)
		return append(b, '"'), true
	}
	if alg := mldsa.JOSE(key); alg != "" {
		return AppendAKP(b, alg, mldsa.Bytes(key)), true
	}
	return b, false
}

// AppendAKP appends the members of an ML-DSA key (RFC 9964), without braces.
func AppendAKP(b []byte, alg string, pub []byte) []byte {
	b = append(append(append(b, `"kty":"AKP","alg":"`...), alg...), `","pub":"`...)
	return append(strictURL.AppendEncode(b, pub), '"')
}

// AppendJWK appends a JWK with this key ID, and with the members "use" and "alg" unless they are empty.
func AppendJWK(b []byte, use, alg, keyID string, key crypto.PublicKey) ([]byte, bool) {
	b = append(b, '{')
	if use != "" {
		b = append(append(append(b, `"use":"`...), use...), `",`...)
	}
	if alg != "" && mldsa.JOSE(key) == "" {
		b = append(append(append(b, `"alg":"`...), alg...), `",`...)
	}
	kid, err := json.Marshal(keyID)
	b = append(append(append(b, `"kid":`...), kid...), ',')
	b, ok := AppendKey(b, key)
	return append(b, '}'), ok && err == nil
}

// MarshalSet returns a JWK Set of keys, sorted by key ID. With openID, for an issuer of OpenID Connect, each key has
// the members "use", which is "sig", and "alg", from [DefaultAlgorithm].
func MarshalSet(keys map[string]crypto.PublicKey, openID bool) ([]byte, error) {
	doc := []byte(`{"keys":[`)
	for _, id := range slices.Sorted(maps.Keys(keys)) {
		use, alg, key := "", "", keys[id]
		if openID {
			a, _ := DefaultAlgorithm(key)
			use, alg = "sig", a.String()
		}
		if doc[len(doc)-1] != '[' {
			doc = append(doc, ',')
		}
		var ok bool
		if doc, ok = AppendJWK(doc, use, alg, id, key); !ok {
			return nil, fmt.Errorf("the key %.64q has no form as a JWK", id)
		}
	}
	if doc = append(doc, "]}"...); len(doc) > MaxSetSize {
		return nil, fmt.Errorf("the JWK Set would have %d bytes, the limit is %d: %w", len(doc), MaxSetSize,
			certpem.ErrTooLarge)
	}
	return doc, nil
}

// CurveSize returns the size of a coordinate in bytes, or 0 for a curve that has no name in JWKs.
func CurveSize(curve elliptic.Curve) int {
	if !slices.Contains(curves, curve) {
		return 0
	}
	return (curve.Params().BitSize + 7) / 8
}

// Exponent returns the public exponent as big-endian bytes without leading zeros.
func Exponent(key *rsa.PublicKey) []byte {
	return bytes.TrimLeft(binary.BigEndian.AppendUint64(nil, uint64(key.E)), "\x00")
}

// strictURL refuses stray bits at the end. It ignores line breaks; callers detect them by the length.
var strictURL = base64.RawURLEncoding.Strict()

// decodeURL decodes src into dst and reports whether it fits exactly.
func decodeURL(dst, src []byte) bool {
	if len(src) != strictURL.EncodedLen(len(dst)) {
		return false
	}
	n, err := strictURL.Decode(dst, src)
	return err == nil && n == len(dst)
}

// EqualURL reports whether text is the encoding of data.
func EqualURL(text, data []byte) bool { return string(text) == strictURL.EncodeToString(data) }
