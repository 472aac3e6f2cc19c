//go:build !go1.27

package mldsa

import "crypto"

// NewKey returns [ErrMissing].
func NewKey(string) (crypto.Signer, error) { return nil, ErrMissing }

func of(crypto.PublicKey) (none algorithm) { return none }

// Bytes is not called, as no key has a Name.
func Bytes(crypto.PublicKey) []byte { return nil }

// PublicKey returns nil.
func PublicKey(string, []byte) crypto.PublicKey { return nil }

// Verify is not called, as no key has a Name.
func Verify(crypto.PublicKey, []byte, []byte) bool { return false }
