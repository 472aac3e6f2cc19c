package hostilecsr_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/md5"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"math/big"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// signatures has requests that do not prove that their sender holds the key.
func (l *list) signatures() {
	n := elliptic.P256().Params().N
	zero := new(big.Int)

	l.not("signature/by another key", func(r *request) { r.sign = signP256(other()) })
	l.not("signature/of another request", func(r *request) {
		another := base()
		another.sansAre(dns("another"))
		r.sign = func([]byte) []byte { return signP256(p256())(another.info()) }
	})
	l.not("signature/of the whole request", func(r *request) {
		r.sign = func(info []byte) []byte { return signP256(p256())(seq(info)) }
	})
	l.not("signature/of the contents without their head", func(r *request) {
		r.sign = func(info []byte) []byte { return signP256(p256())(info[4:]) }
	})
	for what, change := range ordered(
		"first byte of r changed", func(r, s *big.Int) []byte { return ecdsaSignature(flip(r, 250), s) },
		"last byte of r changed", func(r, s *big.Int) []byte { return ecdsaSignature(flip(r, 0), s) },
		"first byte of s changed", func(r, s *big.Int) []byte { return ecdsaSignature(r, flip(s, 250)) },
		"last byte of s changed", func(r, s *big.Int) []byte { return ecdsaSignature(r, flip(s, 0)) },
		"r and s exchanged", func(r, s *big.Int) []byte { return ecdsaSignature(s, r) },
		"r zero", func(_, s *big.Int) []byte { return ecdsaSignature(zero, s) },
		"s zero", func(r, _ *big.Int) []byte { return ecdsaSignature(r, zero) },
		"both zero", func(_, _ *big.Int) []byte { return ecdsaSignature(zero, zero) },
		"r the order of the group", func(_, s *big.Int) []byte { return ecdsaSignature(n, s) },
		"s the order of the group", func(r, _ *big.Int) []byte { return ecdsaSignature(r, n) },
		"r over the order", func(r, s *big.Int) []byte { return ecdsaSignature(new(big.Int).Add(r, n), s) },
		"s over the order", func(r, s *big.Int) []byte { return ecdsaSignature(r, new(big.Int).Add(s, n)) },
		"r negative", func(r, s *big.Int) []byte { return ecdsaSignature(new(big.Int).Neg(r), s) },
		"s negative", func(r, s *big.Int) []byte { return ecdsaSignature(r, new(big.Int).Neg(s)) },
		"r of 60 KiB", func(_, s *big.Int) []byte { return ecdsaSignature(new(big.Int).SetBytes(ones(60<<10)), s) },
		"r with leading zeros", func(r, s *big.Int) []byte {
			return seq(tlv(asn1.INTEGER, []byte{0, 0}, fixed(r)), number(s))
		},
		"without s", func(r, _ *big.Int) []byte { return seq(number(r)) },
		"with a third number", func(r, s *big.Int) []byte { return seq(number(r), number(s), integer(0)) },
		"bytes behind", func(r, s *big.Int) []byte { return cat(ecdsaSignature(r, s), []byte{0}) },
		"a SET", func(r, s *big.Int) []byte { return set(number(r), number(s)) },
		"numbers without DER", func(r, s *big.Int) []byte { return cat(fixed(r), fixed(s)) },
		"length that is not minimal", func(r, s *big.Int) []byte {
			return cat([]byte{0x30, 0x81, byte(len(number(r)) + len(number(s)))}, number(r), number(s))
		},
		"indefinite length", func(r, s *big.Int) []byte { return cat([]byte{0x30, 0x80}, number(r), number(s), []byte{0, 0}) },
		"cut", func(r, s *big.Int) []byte { return ecdsaSignature(r, s)[:40] },
		"empty", func(_, _ *big.Int) []byte { return nil },
		"ones", func(_, _ *big.Int) []byte { return ones(72) },
	) {
		l.not("signature/"+what, func(r *request) { r.sign = changed(change) })
	}
	l.may("signature/s in its other form", func(r *request) { // not unique, but good
		r.sign = changed(func(r, s *big.Int) []byte { return ecdsaSignature(r, new(big.Int).Sub(n, s)) })
	})

	// The algorithm is not that of the key, or not named well.
	for what, algorithm := range ordered(
		"of RSA", rsaAlgorithm(),
		"of Ed25519", seq(oid(oidEd25519)),
		"with SHA-384, which it is not", seq(oid("1.2.840.10045.4.3.3")),
		"with NULL", seq(oid(oidECDSAWithSHA256), null()),
		"with parameters", seq(oid(oidECDSAWithSHA256), seq()),
		"without a hash", seq(oid(oidECPublicKey)),
		"unknown", seq(oid(oidUnknown)),
		"empty", seq(),
		"a string", str(asn1.UTF8String, "ecdsa-with-SHA256"),
		"missing", nil,
	) {
		l.not("signature algorithm/"+what, func(r *request) { r.algorithm = algorithm })
	}
	l.not("signature algorithm/ECDSA with SHA-1", func(r *request) {
		r.algorithm = seq(oid("1.2.840.10045.4.1"))
		r.sign = func(info []byte) []byte {
			sum := sha1.Sum(info)
			return must(ecdsa.SignASN1(rand.Reader, p256(), sum[:]))
		}
	})
	l.not("signature algorithm/ECDSA with SHA-224", func(r *request) {
		r.algorithm = seq(oid("1.2.840.10045.4.3.1"))
		r.sign = func(info []byte) []byte {
			sum := sha256.Sum224(info)
			return must(ecdsa.SignASN1(rand.Reader, p256(), sum[:]))
		}
	})
	l.may("signature algorithm/ECDSA P-256 with SHA-512", func(r *request) {
		r.algorithm = seq(oid("1.2.840.10045.4.3.4"))
		r.sign = func(info []byte) []byte {
			sum := sha512.Sum512(info)
			return must(ecdsa.SignASN1(rand.Reader, p256(), sum[:]))
		}
	})
	l.rsaSignatures()
	l.not("signature/Ed25519 that is cut", func(r *request) {
		r.signedBy(ed().Public(), seq(oid(oidEd25519)), func(info []byte) []byte { return ed25519.Sign(ed(), info)[:63] })
	})
	l.not("signature/Ed25519 of the hash", func(r *request) {
		r.signedBy(ed().Public(), seq(oid(oidEd25519)), func(info []byte) []byte {
			sum := sha512.Sum512(info)
			return must(ed().Sign(nil, sum[:], crypto.SHA512))
		})
	})

	// The bits around a good signature.
	for what, wrap := range ordered(
		"with unused bits", func(sig []byte) []byte { return tlv(asn1.BIT_STRING, []byte{3}, sig) },
		"with nine unused bits", func(sig []byte) []byte { return tlv(asn1.BIT_STRING, []byte{9}, sig) },
		"in an OCTET STRING", octets,
		"in constructed bits", func(sig []byte) []byte { return tlv(asn1.BIT_STRING.Constructed(), bits(sig)) },
		"without the count of unused bits", func(sig []byte) []byte { return tlv(asn1.BIT_STRING, sig) },
		"in no bits", func([]byte) []byte { return tlv(asn1.BIT_STRING) },
		"missing", func([]byte) []byte { return nil },
		"there twice", func(sig []byte) []byte { return cat(bits(sig), bits(sig)) },
	) {
		r := base()
		l.raw("signature/"+what, seq(r.info(), r.algorithm, wrap(r.sign(r.info()))))
	}
}

// rsaSignatures has signatures of a good RSA key.
func (l *list) rsaSignatures() {
	const md2, md5WithRSA, sha1WithRSA = "1.2.840.113549.1.1.2", "1.2.840.113549.1.1.4", "1.2.840.113549.1.1.5"
	with := func(algorithm []byte, sign func(info []byte) []byte) func(*request) {
		return func(r *request) { r.signedBy(rsa2048().Public(), algorithm, sign) }
	}
	raw := func(padded []byte) []byte { // the bare RSA operation
		return new(big.Int).Exp(new(big.Int).SetBytes(padded), rsa2048().D, rsa2048().N).FillBytes(make([]byte, 256))
	}
	sha := func(info []byte) []byte { sum := sha256.Sum256(info); return sum[:] }

	l.not("signature algorithm/RSA with MD5", with(seq(oid(md5WithRSA), null()), func(info []byte) []byte {
		sum := md5.Sum(info)
		return must(rsa.SignPKCS1v15(rand.Reader, rsa2048(), crypto.MD5, sum[:]))
	}))
	l.not("signature algorithm/RSA with SHA-1", with(seq(oid(sha1WithRSA), null()), func(info []byte) []byte {
		sum := sha1.Sum(info)
		return must(rsa.SignPKCS1v15(rand.Reader, rsa2048(), crypto.SHA1, sum[:]))
	}))
	l.not("signature algorithm/RSA with MD2", with(seq(oid(md2), null()), signRSA2048))
	l.not("signature algorithm/RSA with SHA-256 and odd parameters", with(seq(oid(oidSHA256WithRSA), integer(1)), signRSA2048))
	for what, padded := range ordered(
		"without padding", func(info []byte) []byte { return sha(info) },
		"padded for encryption", func(info []byte) []byte {
			p := pkcs1(256, sha256Prefix, sha(info))
			p[1] = 2
			return p
		},
		"padded with zeros", func(info []byte) []byte {
			p := pkcs1(256, sha256Prefix, sha(info))
			clear(p[2:100])
			return p
		},
		"short padding and bytes behind the hash", func(info []byte) []byte {
			return cat([]byte{0, 1}, ones(8), []byte{0}, sha256Prefix, sha(info), make([]byte, 256-11-19-32))
		},
		"without the kind of hash", func(info []byte) []byte { return pkcs1(256, nil, sha(info)) },
		"hash without NULL", func(info []byte) []byte {
			return pkcs1(256, []byte{0x30, 0x2f, 0x30, 0x0b, 0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x01, 0x04, 0x20}, sha(info))
		},
		"hash said to be SHA-512", func(info []byte) []byte {
			p := append([]byte{}, sha256Prefix...)
			p[14] = 3
			return pkcs1(256, p, sha(info))
		},
	) {
		l.not("signature/RSA "+what, with(rsaAlgorithm(), func(info []byte) []byte { return raw(padded(info)) }))
	}
	for what, change := range ordered(
		"zero", func([]byte) []byte { return make([]byte, 256) },
		"one", func([]byte) []byte { return append(make([]byte, 255), 1) },
		"ones", func([]byte) []byte { return ones(256) },
		"cut", func(sig []byte) []byte { return sig[:255] },
		"with a leading zero", func(sig []byte) []byte { return append([]byte{0}, sig...) },
		"plus the modulus", func(sig []byte) []byte {
			return new(big.Int).Add(new(big.Int).SetBytes(sig), rsa2048().N).FillBytes(make([]byte, 257))
		},
		"first byte changed", func(sig []byte) []byte { sig[0] ^= 1; return sig },
		"last byte changed", func(sig []byte) []byte { sig[255] ^= 1; return sig },
	) {
		l.not("signature/RSA "+what, with(rsaAlgorithm(), func(info []byte) []byte { return change(signRSA2048(info)) }))
	}
	pss := func(hash crypto.Hash, sum func([]byte) []byte, salt int) func([]byte) []byte {
		return func(info []byte) []byte {
			return must(rsa.SignPSS(rand.Reader, rsa2048(), hash, sum(info), &rsa.PSSOptions{SaltLength: salt}))
		}
	}
	l.may("signature algorithm/RSA-PSS with SHA-256", with(pssAlgorithm("2.16.840.1.101.3.4.2.1", 32), pss(crypto.SHA256, sha, 32)))
	l.not("signature algorithm/RSA-PSS with SHA-1", with(pssAlgorithm("1.3.14.3.2.26", 20), pss(crypto.SHA1, func(info []byte) []byte {
		sum := sha1.Sum(info)
		return sum[:]
	}, 20)))
	l.not("signature algorithm/RSA-PSS without parameters", with(seq(oid(oidRSAPSS)), pss(crypto.SHA256, sha, 32)))
	l.not("signature algorithm/RSA-PSS with an odd salt", with(pssAlgorithm("2.16.840.1.101.3.4.2.1", 7), pss(crypto.SHA256, sha, 7)))
	l.not("signature algorithm/RSA-PSS with a huge salt", with(pssAlgorithm("2.16.840.1.101.3.4.2.1", 1<<40), pss(crypto.SHA256, sha, 32)))
}

func pssAlgorithm(hash string, salt int64) []byte {
	h := seq(oid(hash), null())
	return seq(oid(oidRSAPSS), seq(
		tlv(wrapped(0), h), tlv(wrapped(1), seq(oid("1.2.840.113549.1.1.8"), h)), tlv(wrapped(2), integer(salt))))
}

func flip(n *big.Int, bit int) *big.Int { return new(big.Int).SetBit(n, bit, n.Bit(bit)^1) }

// changed signs and changes the two numbers.
func changed(change func(r, s *big.Int) []byte) func([]byte) []byte {
	return func(info []byte) []byte {
		in := cryptobyte.String(signP256(p256())(info))
		var body cryptobyte.String
		r, s := new(big.Int), new(big.Int)
		if !in.ReadASN1(&body, asn1.SEQUENCE) || !body.ReadASN1Integer(r) || !body.ReadASN1Integer(s) {
			panic("hostilecsr: a signature that is not two numbers")
		}
		return change(r, s)
	}
}
