package ca

import (
	"context"
	"crypto"
)

// Custodian makes, keeps and uses private keys outside a [Store], such as in an HSM, a TPM or a key management service.
// The CA names the keys: "svidkit-", an ID of the CA and a random part, with only lower-case letters, digits and
// hyphens, at most 80 bytes. A custodian may also hold the keys of others. All methods must be safe for concurrent use
// and return when ctx is done. No error may contain a secret.
type Custodian interface {
	// NewKey makes a private key that signs, and that cannot be exported. The algorithm is "ecdsa-p256", "ecdsa-p384",
	// "ecdsa-p521", "rsa-2048", "rsa-3072", "rsa-4096" or "ed25519"; an unknown one gives an error that wraps
	// [errors.ErrUnsupported]. If the custodian has a key with this name, the error wraps [io/fs.ErrExist]. After any
	// other error the key may have been made or not.
	NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error)

	// Key returns the private key with this name, for as long as the custodian is open. Only if the custodian is
	// certain to have no such key, the error wraps [io/fs.ErrNotExist]. Public does not block. Sign must be safe for
	// concurrent use, return within ten seconds, and support the options [crypto.Hash] and *[crypto/rsa.PSSOptions]
	// as far as they fit the key; it need not check the result, as the CA does.
	Key(ctx context.Context, name string) (crypto.Signer, error)

	// Destroy destroys the private key with this name for ever. It returns nil if there is none.
	Destroy(ctx context.Context, name string) error

	// Keys returns the names of all keys that begin with prefix, in any order.
	Keys(ctx context.Context, prefix string) ([]string, error)
}

// Sealer encrypts short secrets with a key of a custodian. It must be safe for concurrent use; both methods return
// when ctx is done. No error may contain a secret.
type Sealer interface {
	// Seal encrypts and authenticates secret, of 32 bytes, together with associated, of at most 4 KiB, which the
	// result does not contain.
	Seal(ctx context.Context, secret, associated []byte) (sealed []byte, err error)

	// Unseal returns the secret. If the custodian is certain that this key did not make sealed with the same
	// associated, the error wraps [io/fs.ErrInvalid]; if it is certain to have no such key, [io/fs.ErrNotExist].
	// Other errors may pass.
	Unseal(ctx context.Context, sealed, associated []byte) (secret []byte, err error)
}

// Custody says where the private keys of an [Authority] are made and kept; the zero value means in its store.
type Custody struct {
	// Keys makes the next keys, which the store then names and does not hold; nil means that they are made in the
	// store. One rotation of the root and of the key for JWT-SVIDs moves all keys here, or back.
	Keys Custodian

	// Former are custodians of keys that were made before, so that these sign until the rotation is over.
	Former []Custodian

	// Seal encrypts each record in the store, so that a copy of the store gives no key; nil means that records are in
	// the clear. An authority writes the record at once if it is in the other form.
	Seal Sealer

	// Unseal decrypts records that another Sealer has sealed, to move out of it.
	Unseal Sealer
}
