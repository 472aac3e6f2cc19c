package tpmkey

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"encoding/asn1"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"

	"github.com/google/go-tpm/tpm2"

	"github.com/svidkit/svidkit/internal/redact"
)

// NewKey makes a private key that only this TPM can use, and only through the returned value: it is gone when the
// program ends. The algorithm is "ecdsa-p256", or "ecdsa-p384", "ecdsa-p521", "rsa-2048", "rsa-3072" or "rsa-4096" if
// the TPM has it; otherwise the error wraps [errors.ErrUnsupported]. Sign returns within ten seconds. Signatures by
// RSA-PSS need a TPM whose salts are as long as the hash (FIPS 186-4), as TLS 1.3 asks for; with another, Sign returns
// an error that wraps errors.ErrUnsupported.
func (t *TPM) NewKey(algorithm string) (crypto.Signer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), makeTime)
	defer cancel()
	return use(ctx, t, func(c *call) (crypto.Signer, error) {
		o, err := c.create(algorithm, nil)
		if err != nil {
			return nil, err
		}
		return o.key(t)
	})
}

// object is a key that the TPM has encrypted.
type object struct {
	public  tpm2.TPM2BPublic
	private tpm2.TPM2BPrivate
	name    tpm2.TPM2BName
	saved   *tpm2.TPMSContext // loads it faster, until the TPM restarts; belongs to the slot
}

// parameters returns the type of a new key, and what the TPM needs to know of it.
func parameters(algorithm string) (tpm2.TPMAlgID, tpm2.TPMUPublicParms, error) {
	curve, bits := tpm2.TPMECCNone, tpm2.TPMKeyBits(0)
	switch algorithm {
	case "ecdsa-p256":
		curve = tpm2.TPMECCNistP256
	case "ecdsa-p384":
		curve = tpm2.TPMECCNistP384
	case "ecdsa-p521":
		curve = tpm2.TPMECCNistP521
	case "rsa-2048":
		bits = 2048
	case "rsa-3072":
		bits = 3072
	case "rsa-4096":
		bits = 4096
	default:
		return 0, tpm2.TPMUPublicParms{}, fmt.Errorf("keys of algorithm %q: %w", redact.Clip(algorithm, 40), errors.ErrUnsupported)
	}
	if bits != 0 {
		return tpm2.TPMAlgRSA, tpm2.NewTPMUPublicParms(tpm2.TPMAlgRSA, &tpm2.TPMSRSAParms{KeyBits: bits}), nil
	}
	return tpm2.TPMAlgECC, tpm2.NewTPMUPublicParms(tpm2.TPMAlgECC, &tpm2.TPMSECCParms{CurveID: curve}), nil
}

// create makes a key that signs. The TPM binds it for ever to the policy, which nothing can satisfy.
func (c *call) create(algorithm string, policy []byte) (*object, error) {
	typ, parms, err := parameters(algorithm)
	if err != nil {
		return nil, err
	}
	return c.createWith(typ, parms, policy)
}

func (c *call) createWith(typ tpm2.TPMAlgID, parms tpm2.TPMUPublicParms, policy []byte) (*object, error) {
	public := tpm2.TPMTPublic{
		Type: typ, Parameters: parms, AuthPolicy: tpm2.TPM2BDigest{Buffer: policy}, NameAlg: tpm2.TPMAlgSHA256,
		ObjectAttributes: tpm2.TPMAObject{FixedTPM: true, FixedParent: true, SensitiveDataOrigin: true,
			UserWithAuth: true, NoDA: true, SignEncrypt: true},
	}
	o := &object{}
	return o, c.with(&c.tpm.primary, func(parent tpm2.AuthHandle) error {
		r, err := tpm2.Create{ParentHandle: parent, InPublic: tpm2.New2B(public)}.Execute(c)
		if err != nil {
			return unsupported(err, "such keys")
		}
		o.public, o.private = r.OutPublic, r.OutPrivate
		return nil
	})
}

// unsupported adds [errors.ErrUnsupported] to the errors by which a TPM says that it does not have what was asked for.
func unsupported(err error, what string) error {
	for _, code := range []tpm2.TPMRC{tpm2.TPMRCCurve, tpm2.TPMRCKeySize, tpm2.TPMRCValue, tpm2.TPMRCAsymmetric,
		tpm2.TPMRCHash, tpm2.TPMRCScheme} {
		if errors.Is(err, code) {
			return fmt.Errorf("the TPM does not have %s: %w: %w", what, errors.ErrUnsupported, err)
		}
	}
	return err
}

// with loads a key, calls f with it, and removes it from the TPM.
func (c *call) with(o *object, f func(tpm2.AuthHandle) error) error {
	handle, err := c.load(o)
	if err != nil {
		return err
	}
	err = f(tpm2.AuthHandle{Handle: handle, Name: o.name, Auth: tpm2.PasswordAuth(nil)})
	if _, flushErr := (tpm2.FlushContext{FlushHandle: handle}).Execute(c); flushErr != nil {
		c.tpm.hangUp() // which removes it where the kernel or a broker shares the TPM
	}
	return err
}

// load loads a key, or makes the storage key.
func (c *call) load(o *object) (handle tpm2.TPMHandle, err error) {
	if o.saved != nil {
		r, err := tpm2.ContextLoad{Context: *o.saved}.Execute(c)
		if err == nil {
			return r.LoadedHandle, nil
		}
		o.saved = nil // the TPM has restarted
	}
	if o == &c.tpm.primary {
		r, err := tpm2.CreatePrimary{
			PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
			InPublic:      tpm2.New2B(tpm2.ECCSRKTemplate),
		}.Execute(c)
		if errors.Is(err, tpm2.TPMRCBadAuth) || errors.Is(err, tpm2.TPMRCAuthFail) {
			err = fmt.Errorf("the TPM's owner hierarchy has a password, which is not supported: remove it: %w", err)
		}
		if err != nil {
			return 0, err
		}
		handle, o.name = r.ObjectHandle, r.Name
	} else if err = c.with(&c.tpm.primary, func(parent tpm2.AuthHandle) error {
		r, err := tpm2.Load{ParentHandle: parent, InPrivate: o.private, InPublic: o.public}.Execute(c)
		if bad, ok := errors.AsType[tpm2.TPMFmt1Error](err); ok {
			return fmt.Errorf("another TPM has made this key, or the TPM has been cleared since, or the key is damaged: "+
				"%w: %w", fs.ErrInvalid, bad)
		}
		if err == nil {
			handle, o.name = r.ObjectHandle, r.Name
		}
		return err
	}); err != nil {
		return 0, err
	}
	if r, err := (tpm2.ContextSave{SaveHandle: handle}).Execute(c); err == nil {
		o.saved = &r.Context
	}
	return handle, nil
}

// key is a private key in the TPM.
type key struct {
	redacted
	tpm    *TPM
	object *object
	public crypto.PublicKey
}

func (o *object) key(t *TPM) (crypto.Signer, error) {
	public, err := o.public.Contents()
	if err != nil {
		return nil, err
	}
	k := &key{redacted: redact.New("a private key in a TPM"), tpm: t, object: o}
	k.public, err = tpm2.Pub(*public)
	return k, err
}

// Public implements [crypto.Signer].
func (k *key) Public() crypto.PublicKey { return k.public }

// Sign implements [crypto.Signer].
func (k *key) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	hash := opts.HashFunc()
	if hash != 0 && hash.Size() != len(digest) {
		return nil, fmt.Errorf("tpmkey: a digest of %d bytes, and %v has %d", len(digest), hash, hash.Size())
	}
	pss, isPSS := opts.(*rsa.PSSOptions)
	scheme, alg := tpm2.TPMAlgRSASSA, hashes[hash]
	if public, ok := k.public.(*ecdsa.PublicKey); ok {
		scheme = tpm2.TPMAlgECDSA
		digest, alg = fit(digest, public.Curve.Params().BitSize)
	} else if isPSS {
		scheme = tpm2.TPMAlgRSAPSS
	}
	if alg == 0 {
		return nil, fmt.Errorf("tpmkey: signatures over %v: %w", hash, errors.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(context.Background(), useTime)
	defer cancel()
	signature, err := use(ctx, k.tpm, func(c *call) (signature tpm2.TPMTSignature, err error) {
		err = c.with(k.object, func(h tpm2.AuthHandle) error {
			r, err := tpm2.Sign{
				KeyHandle: h, Digest: tpm2.TPM2BDigest{Buffer: digest},
				InScheme: tpm2.TPMTSigScheme{Scheme: scheme,
					Details: tpm2.NewTPMUSigScheme(scheme, &tpm2.TPMSSchemeHash{HashAlg: alg})},
				Validation: tpm2.TPMTTKHashCheck{Tag: tpm2.TPMSTHashCheck, Hierarchy: tpm2.TPMRHNull},
			}.Execute(c)
			if err != nil {
				return unsupported(err, fmt.Sprintf("signatures over %v", hash))
			}
			signature = r.Signature
			return nil
		})
		return signature, err
	})
	if err != nil {
		return nil, err
	}
	switch scheme {
	case tpm2.TPMAlgECDSA:
		s, err := signature.Signature.ECDSA()
		if err != nil {
			return nil, fmt.Errorf("tpmkey: %w", err)
		}
		return asn1.Marshal(struct{ R, S *big.Int }{
			new(big.Int).SetBytes(s.SignatureR.Buffer), new(big.Int).SetBytes(s.SignatureS.Buffer)})
	case tpm2.TPMAlgRSASSA:
		s, err := signature.Signature.RSASSA()
		if err != nil {
			return nil, fmt.Errorf("tpmkey: %w", err)
		}
		return s.Sig.Buffer, nil
	}
	s, err := signature.Signature.RSAPSS()
	if err == nil { // the TPM chooses the length of the salt
		err = rsa.VerifyPSS(k.public.(*rsa.PublicKey), hash, digest, s.Sig.Buffer, pss)
	}
	if err != nil {
		return nil, fmt.Errorf("tpmkey: the TPM makes RSA-PSS signatures with a salt of another length: %w: %w",
			errors.ErrUnsupported, err)
	}
	return s.Sig.Buffer, nil
}

var hashes = map[crypto.Hash]tpm2.TPMAlgID{crypto.SHA256: tpm2.TPMAlgSHA256, crypto.SHA384: tpm2.TPMAlgSHA384,
	crypto.SHA512: tpm2.TPMAlgSHA512}

// fit returns the digest in the length of a hash that every TPM with the curve has. ECDSA signs the number of as many
// bits at the beginning of the digest as the curve has, so this does not change the signature.
func fit(digest []byte, bits int) ([]byte, tpm2.TPMAlgID) {
	size, alg := 64, tpm2.TPMAlgSHA512
	switch bits {
	case 256:
		size, alg = 32, tpm2.TPMAlgSHA256
	case 384:
		size, alg = 48, tpm2.TPMAlgSHA384
	}
	if len(digest) >= size {
		return digest[:size], alg
	}
	return append(make([]byte, size-len(digest)), digest...), alg
}
