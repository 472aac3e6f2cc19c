package hostilecsr_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"math/big"
	"sync"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

var (
	p256    = newECDSA(elliptic.P256())
	other   = newECDSA(elliptic.P256()) // another's
	p384    = newECDSA(elliptic.P384())
	p521    = newECDSA(elliptic.P521())
	p224    = newECDSA(elliptic.P224())
	rsa2048 = sync.OnceValue(func() *rsa.PrivateKey { return must(rsa.GenerateKey(rand.Reader, 2048)) })
	ed      = sync.OnceValue(func() ed25519.PrivateKey { return ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)) })
)

func newECDSA(c elliptic.Curve) func() *ecdsa.PrivateKey {
	return sync.OnceValue(func() *ecdsa.PrivateKey { return must(ecdsa.GenerateKey(c, rand.Reader)) })
}

// point is the key as an uncompressed point.
func point(key *ecdsa.PrivateKey) []byte { return must(key.PublicKey.Bytes()) }

// keys has keys that are too weak, too large, or no keys.
func (l *list) keys() {
	const ecdsa384, ecdsa512 = "1.2.840.10045.4.3.3", "1.2.840.10045.4.3.4"

	// The good ones of other kinds: so that a CA that takes only one kind is found.
	l.may("key/P-384", func(r *request) {
		r.signedBy(p384().Public(), seq(oid(ecdsa384)), func(info []byte) []byte {
			sum := sha512.Sum384(info)
			return must(p384().Sign(rand.Reader, sum[:], crypto.SHA384))
		})
	})
	l.may("key/P-521", func(r *request) {
		r.signedBy(p521().Public(), seq(oid(ecdsa512)), func(info []byte) []byte {
			sum := sha512.Sum512(info)
			return must(p521().Sign(rand.Reader, sum[:], crypto.SHA512))
		})
	})
	l.may("key/Ed25519", func(r *request) {
		r.signedBy(ed().Public(), seq(oid(oidEd25519)), func(info []byte) []byte { return ed25519.Sign(ed(), info) })
	})
	l.may("key/RSA of 2048 bits", func(r *request) { r.signedBy(rsa2048().Public(), rsaAlgorithm(), signRSA2048) })

	// Curves and points.
	l.not("key/P-224", func(r *request) {
		r.signedBy(p224().Public(), seq(oid(oidECDSAWithSHA256)), signP256(p224()))
	})
	for what, c := range ordered("secp256k1", secp256k1(), "P-192", p192(), "brainpoolP256r1", brainpool()) {
		l.not("key/"+what, func(r *request) {
			r.spki = ecSPKI(c.oid, c.public())
			r.sign = c.sign
		})
	}
	l.not("key/P-256 by its parameters", func(r *request) { // as OpenSSL writes it with -param_enc explicit
		c := elliptic.P256().Params()
		field := seq(oid("1.2.840.10045.1.1"), number(c.P))
		a := new(big.Int).Sub(c.P, big.NewInt(3))
		params := seq(integer(1), field, seq(octets(a.Bytes()), octets(c.B.Bytes())),
			octets(append([]byte{4}, append(fixed(c.Gx), fixed(c.Gy)...)...)), number(c.N), integer(1))
		r.spki = seq(seq(oid(oidECPublicKey), params), bits(point(p256())))
	})
	x := point(p256())[1:33]
	for what, p := range ordered(
		"point not on the curve", append([]byte{4}, append(append([]byte{}, x...), x...)...),
		"point of P-384", point(p384()),
		"compressed point", append([]byte{2 + point(p256())[64]&1}, x...),
		"hybrid point", append([]byte{6 + point(p256())[64]&1}, point(p256())[1:]...),
		"point at infinity", []byte{0},
		"point at infinity in 65 bytes", make([]byte, 65),
		"point of zeros", append([]byte{4}, make([]byte, 64)...),
		"point of ones", append([]byte{4}, ones(64)...),
		"point that is too short", point(p256())[:64],
		"point that is too long", append(point(p256()), 0),
		"no point", nil,
	) {
		l.not("key/"+what, func(r *request) { r.spki = ecSPKI(oidP256, p) })
	}
	l.not("key/unknown curve", func(r *request) { r.spki = ecSPKI(oidUnknown, point(p256())) })
	l.not("key/no curve", func(r *request) { r.spki = seq(seq(oid(oidECPublicKey)), bits(point(p256()))) })
	l.not("key/curve NULL", func(r *request) { r.spki = seq(seq(oid(oidECPublicKey), null()), bits(point(p256()))) })
	l.not("key/bytes after the curve", func(r *request) {
		r.spki = seq(seq(oid(oidECPublicKey), oid(oidP256), null()), bits(point(p256())))
	})
	l.not("key/only for key agreement", func(r *request) { // id-ecDH
		r.spki = seq(seq(oid("1.3.132.1.12"), oid(oidP256)), bits(point(p256())))
	})
	l.not("key/point with unused bits", func(r *request) {
		r.spki = seq(seq(oid(oidECPublicKey), oid(oidP256)), tlv(asn1.BIT_STRING, []byte{1}, point(p256())))
	})
	l.not("key/point in an OCTET STRING", func(r *request) {
		r.spki = seq(seq(oid(oidECPublicKey), oid(oidP256)), octets(point(p256())))
	})
	l.not("key/bytes after the point", func(r *request) {
		r.spki = seq(seq(oid(oidECPublicKey), oid(oidP256)), bits(point(p256())), null())
	})

	// RSA: each of these signs, and its signature is good by the arithmetic.
	l.rsaKey("of 512 bits", newRSA(512, 65537))
	l.rsaKey("of 768 bits", newRSA(768, 65537))
	l.rsaKey("of 1024 bits", newRSA(1024, 65537))
	l.rsaKey("of 2047 bits", newRSA(2047, 65537))
	l.rsaKey("of 8200 bits", newRSA(8200, 65537))
	l.rsaKey("of 16384 bits", newRSA(16384, 65537))
	l.rsaKey("with exponent 1", newRSA(2048, 1))
	l.rsaKey("with exponent 3", newRSA(2048, 3))
	l.rsaKey("with exponent 17", newRSA(2048, 17))
	l.rsaKey("with exponent 65535", newRSA(2048, 65535))
	l.rsaKey("with exponent 2^33+1", newRSA(2048, 1<<33+1))
	for what, key := range ordered(
		"with exponent 0", rsaSPKI(number(rsa2048().N), integer(0)),
		"with exponent 2", rsaSPKI(number(rsa2048().N), integer(2)),
		"with exponent 65538", rsaSPKI(number(rsa2048().N), integer(65538)),
		"with exponent -65537", rsaSPKI(number(rsa2048().N), integer(-65537)),
		"with an exponent of 2048 bits", rsaSPKI(number(rsa2048().N), number(new(big.Int).Sub(rsa2048().N, big.NewInt(2)))),
		"with modulus 0", rsaSPKI(integer(0), integer(65537)),
		"with modulus 1", rsaSPKI(integer(1), integer(65537)),
		"with an even modulus", rsaSPKI(number(new(big.Int).Lsh(rsa2048().N, 1)), integer(65537)),
		"with a negative modulus", rsaSPKI(tlv(asn1.INTEGER, rsa2048().N.Bytes()), integer(65537)),
		"with a modulus with leading zeros", rsaSPKI(tlv(asn1.INTEGER, []byte{0, 0}, rsa2048().N.Bytes()), integer(65537)),
		"with a modulus of 60 KiB", rsaSPKI(number(new(big.Int).SetBytes(ones(60<<10))), integer(65537)),
		"without an exponent", rsaSPKI(number(rsa2048().N)),
		"with bytes after the exponent", rsaSPKI(number(rsa2048().N), integer(65537), null()),
		"without a key", seq(seq(oid(oidRSA), null()), bits(nil)),
		"with parameters", seq(seq(oid(oidRSA), seq()), bits(seq(number(rsa2048().N), integer(65537)))),
		"only for PSS", seq(seq(oid(oidRSAPSS)), bits(seq(number(rsa2048().N), integer(65537)))),
		"only for encryption", seq(seq(oid("1.2.840.113549.1.1.7"), null()), bits(seq(number(rsa2048().N), integer(65537)))),
	) {
		l.not("key/RSA "+what, func(r *request) { r.spki, r.algorithm, r.sign = key, rsaAlgorithm(), signRSA2048 })
	}

	// Other kinds.
	l.not("key/DSA", func(r *request) {
		pub, sign := dsaKey()
		r.spki, r.algorithm, r.sign = pub, seq(oid("2.16.840.1.101.3.4.3.2")), sign
	})
	for what, kind := range ordered(
		"Ed25519 of 31 bytes", opaque{oidEd25519, 31, 64},
		"Ed25519 of 33 bytes", opaque{oidEd25519, 33, 64},
		"Ed448", opaque{"1.3.101.113", 57, 114},
		"X25519", opaque{"1.3.101.110", 32, 64},
		"X448", opaque{"1.3.101.111", 56, 114},
		"ML-DSA-65", opaque{"2.16.840.1.101.3.4.3.18", 1952, 3309},
		"GOST", opaque{"1.2.643.7.1.1.1.1", 64, 64},
		"SM2", opaque{"1.2.156.10197.1.301", 65, 71},
		"Diffie-Hellman", opaque{"1.2.840.113549.1.3.1", 256, 64},
		"unknown kind", opaque{oidUnknown, 32, 64},
	) {
		l.not("key/"+what, func(r *request) {
			r.spki, r.algorithm = seq(seq(oid(kind.oid)), bits(ones(kind.key))), seq(oid(kind.oid))
			r.sign = func([]byte) []byte { return ones(kind.signature) }
		})
	}
	l.not("key/Ed25519 with parameters", func(r *request) {
		pub := ed().Public().(ed25519.PublicKey)
		r.spki, r.algorithm = seq(seq(oid(oidEd25519), null()), bits(pub)), seq(oid(oidEd25519))
		r.sign = func(info []byte) []byte { return ed25519.Sign(ed(), info) }
	})
	l.not("key/none", func(r *request) { r.spki = nil })
	l.not("key/empty", func(r *request) { r.spki = seq() })
	l.not("key/NULL", func(r *request) { r.spki = null() })
	l.not("key/a private key in place of the public one", func(r *request) {
		r.spki = seq(integer(0), seq(oid(oidEd25519)), octets(octets(make([]byte, 32))))
	})
}

// opaque is a kind of key whose arithmetic is not here, so its signature cannot be good either.
type opaque struct {
	oid            string
	key, signature int // bytes
}

func (l *list) rsaKey(what string, k *rsaKey) {
	l.not("key/RSA "+what, func(r *request) {
		r.spki = rsaSPKI(number(k.n), number(k.e))
		r.algorithm = rsaAlgorithm()
		r.sign = func(info []byte) []byte {
			sum := sha256.Sum256(info)
			return k.sign(pkcs1(len(k.n.Bytes()), sha256Prefix, sum[:]))
		}
	})
}

func rsaAlgorithm() []byte { return seq(oid(oidSHA256WithRSA), null()) }

func rsaSPKI(numbers ...[]byte) []byte { return seq(seq(oid(oidRSA), null()), bits(seq(numbers...))) }

func signRSA2048(info []byte) []byte {
	sum := sha256.Sum256(info)
	return must(rsa.SignPKCS1v15(rand.Reader, rsa2048(), crypto.SHA256, sum[:]))
}

// rsaKey is an RSA key of a size or exponent that package rsa does not make. Its primes have at most
// 512 bits, which makes large keys quick to make and to sign with.
type rsaKey struct {
	n, e   *big.Int
	primes []*big.Int
}

func newRSA(bits int, exponent int64) *rsaKey {
	one := big.NewInt(1)
	k := &rsaKey{n: big.NewInt(1), e: big.NewInt(exponent)}
	add := func(size int) bool {
		p := must(rand.Prime(rand.Reader, size))
		if new(big.Int).GCD(nil, nil, k.e, new(big.Int).Sub(p, one)).Cmp(one) != 0 {
			return false
		}
		k.n, k.primes = new(big.Int).Mul(k.n, p), append(k.primes, p)
		return true
	}
	count := max(2, (bits+511)/512)
	for len(k.primes) < count-1 {
		add(bits / count)
	}
	for i := 0; ; i++ { // the last one makes up the size: with a bit more if the others are small
		before, primes := k.n, k.primes
		if add(bits-before.BitLen()+i%2) && k.n.BitLen() == bits {
			return k
		}
		k.n, k.primes = before, primes
	}
}

// sign raises a padded message to the private exponent, prime by prime.
func (k *rsaKey) sign(padded []byte) []byte {
	m, one := new(big.Int).SetBytes(padded), big.NewInt(1)
	s := new(big.Int)
	for _, p := range k.primes {
		d := new(big.Int).ModInverse(k.e, new(big.Int).Sub(p, one))
		sp := new(big.Int).Exp(new(big.Int).Mod(m, p), d, p)
		rest := new(big.Int).Div(k.n, p)
		sp.Mul(sp, rest).Mul(sp, new(big.Int).ModInverse(rest, p))
		s.Add(s, sp)
	}
	return s.Mod(s, k.n).FillBytes(make([]byte, len(k.n.Bytes())))
}

// The DigestInfo of PKCS#1 up to the digest.
var sha256Prefix = []byte{0x30, 0x31, 0x30, 0x0d, 0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x01, 0x05, 0x00, 0x04, 0x20}

func pkcs1(size int, prefix, digest []byte) []byte {
	t := cat(prefix, digest)
	return cat([]byte{0, 1}, ones(size-len(t)-3), []byte{0}, t)
}

// weierstrass is a curve that the standard library does not have, in affine arithmetic: slow and not
// safe for a real key.
type weierstrass struct {
	oid                string
	p, a, b, gx, gy, n *big.Int
}

func secp256k1() *weierstrass {
	return &weierstrass{"1.3.132.0.10",
		hex("fffffffffffffffffffffffffffffffffffffffffffffffffffffffefffffc2f"), big.NewInt(0), big.NewInt(7),
		hex("79be667ef9dcbbac55a06295ce870b07029bfcdb2dce28d959f2815b16f81798"),
		hex("483ada7726a3c4655da4fbfc0e1108a8fd17b448a68554199c47d08ffb10d4b8"),
		hex("fffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141")}
}

func p192() *weierstrass {
	return &weierstrass{"1.2.840.10045.3.1.1",
		hex("fffffffffffffffffffffffffffffffeffffffffffffffff"), hex("fffffffffffffffffffffffffffffffefffffffffffffffc"),
		hex("64210519e59c80e70fa7e9ab72243049feb8deecc146b9b1"),
		hex("188da80eb03090f67cbf20eb43a18800f4ff0afd82ff1012"), hex("07192b95ffc8da78631011ed6b24cdd573f977a11e794811"),
		hex("ffffffffffffffffffffffff99def836146bc9b1b4d22831")}
}

func brainpool() *weierstrass {
	return &weierstrass{"1.3.36.3.3.2.8.1.1.7",
		hex("a9fb57dba1eea9bc3e660a909d838d726e3bf623d52620282013481d1f6e5377"),
		hex("7d5a0975fc2c3057eef67530417affe7fb8055c126dc5c6ce94a4b44f330b5d9"),
		hex("26dc5c6ce94a4b44f330b5d9bbd77cbf958416295cf7e1ce6bccdc18ff8c07b6"),
		hex("8bd2aeb9cb7e57cb2c4b482ffc81b7afb9de27e1e3bd23c23a4453bd9ace3262"),
		hex("547ef835c3dac4fd97f8461a14611dc9c27745132ded8e545c1d54c72f046997"),
		hex("a9fb57dba1eea9bc3e660a909d838d718c397aa3b561a6f7901e0e82974856a7")}
}

func hex(s string) *big.Int {
	n, ok := new(big.Int).SetString(s, 16)
	if !ok {
		panic("hostilecsr: not hexadecimal: " + s)
	}
	return n
}

func (c *weierstrass) size() int { return len(c.p.Bytes()) }

// secret is the private key, the same for all.
func (c *weierstrass) secret() *big.Int { return big.NewInt(0x5eed5eed5eed5eed) }

func (c *weierstrass) public() []byte {
	x, y := c.times(c.secret())
	return cat([]byte{4}, x.FillBytes(make([]byte, c.size())), y.FillBytes(make([]byte, c.size())))
}

// times multiplies the generator by k.
func (c *weierstrass) times(k *big.Int) (x, y *big.Int) {
	for i := k.BitLen() - 1; i >= 0; i-- {
		if x != nil {
			x, y = c.add(x, y, x, y)
		}
		if k.Bit(i) == 1 {
			if x == nil {
				x, y = c.gx, c.gy
			} else {
				x, y = c.add(x, y, c.gx, c.gy)
			}
		}
	}
	return x, y
}

// add adds two points that are not opposites.
func (c *weierstrass) add(x1, y1, x2, y2 *big.Int) (x, y *big.Int) {
	var slope, under *big.Int
	if x1.Cmp(x2) == 0 {
		slope = new(big.Int).Mul(x1, x1)
		slope.Mul(slope, big.NewInt(3)).Add(slope, c.a)
		under = new(big.Int).Lsh(y1, 1)
	} else {
		slope = new(big.Int).Sub(y2, y1)
		under = new(big.Int).Sub(x2, x1)
	}
	slope.Mul(slope, under.ModInverse(under.Mod(under, c.p), c.p)).Mod(slope, c.p)
	x = new(big.Int).Mul(slope, slope)
	x.Sub(x, x1).Sub(x, x2).Mod(x, c.p)
	y = new(big.Int).Sub(x1, x)
	y.Mul(y, slope).Sub(y, y1).Mod(y, c.p)
	return x, y
}

func (c *weierstrass) sign(info []byte) []byte {
	sum := sha256.Sum256(info)
	e := new(big.Int).SetBytes(sum[:min(32, c.size())])
	k := must(rand.Int(rand.Reader, new(big.Int).Rsh(c.n, 1)))
	k.Add(k, big.NewInt(1))
	r, _ := c.times(k)
	r = new(big.Int).Mod(r, c.n)
	s := new(big.Int).Mul(r, c.secret())
	s.Add(s, e).Mul(s, new(big.Int).ModInverse(k, c.n)).Mod(s, c.n)
	return ecdsaSignature(r, s)
}

func ecdsaSignature(r, s *big.Int) []byte { return seq(number(r), number(s)) }

// dsaKey is in the group with a 1024-bit modulus that RFC 5114, section 2.1, has.
func dsaKey() (pub []byte, sign func([]byte) []byte) {
	p := hex("b10b8f96a080e01dde92de5eae5d54ec52c99fbcfb06a3c69a6a9dca52d23b616073e28675a23d189838ef1e2ee652c013ecb4aea906112324975c3cd49b83bfaccbdd7d90c4bd7098488e9c219a73724effd6fae5644738faa31a4ff55bccc0a151af5f0dc8b4bd45bf37df365c1a65e68cfda76d4da708df1fb2bc2e4a4371")
	g := hex("a4d1cbd5c3fd34126765a442efb99905f8104dd258ac507fd6406cff14266d31266fea1e5c41564b777e690f5504f213160217b4b01b886a5e91547f9e2749f4d7fbd7d3b9a92ee1909d0d2263f80a76a6a24c087a091f531dbf0a0169b6a28ad662a4d18e73afa32d779d5918d08bc8858f4dcef97c2a24855e6eeb22b3b2e5")
	q := hex("f518aa8781a8df278aba4e7d64b7cb9d49462353")
	x := big.NewInt(0x5eed5eed5eed5eed)
	pub = seq(seq(oid("1.2.840.10040.4.1"), seq(number(p), number(q), number(g))), bits(number(new(big.Int).Exp(g, x, p))))
	return pub, func(info []byte) []byte {
		sum := sha256.Sum256(info)
		e := new(big.Int).SetBytes(sum[:20])
		k := must(rand.Int(rand.Reader, new(big.Int).Rsh(q, 1)))
		k.Add(k, big.NewInt(1))
		r := new(big.Int).Exp(g, k, p)
		r.Mod(r, q)
		s := new(big.Int).Mul(x, r)
		s.Add(s, e).Mul(s, k.ModInverse(k, q)).Mod(s, q)
		return ecdsaSignature(r, s)
	}
}

// number is an INTEGER.
func number(n *big.Int) []byte {
	var b cryptobyte.Builder
	b.AddASN1BigInt(n)
	return b.BytesOrPanic()
}

// fixed is n in the 32 bytes of P-256.
func fixed(n *big.Int) []byte { return n.FillBytes(make([]byte, 32)) }

func ones(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = 0xff
	}
	return b
}
