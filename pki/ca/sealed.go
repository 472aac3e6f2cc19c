package ca

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// sealedName is the item of a sealed record in the place of stateName and caKeyName.
const sealedName = "svidkit-sealed.json"

// sealedState is a state encrypted with a key of its own, which a [Sealer] has sealed. What is readable is authenticated
// with both, so that no part of a record fits another one, or another version of it.
type sealedState struct {
	sealedHead
	Key   []byte `json:"key"`   // of AES-256-GCM, sealed
	State []byte `json:"state"` // encrypted
}

type sealedHead struct {
	TrustDomain string `json:"trust_domain"`
	Authority   string `json:"authority"`
	Revision    uint64 `json:"revision"`
	Writer      string `json:"writer"`
}

func (a *Authority) headOf(d *rotation.Document) sealedHead {
	return sealedHead{a.cfg.TrustDomain.String(), d.Authority, d.Revision, d.Writer}
}

// cipher returns the cipher of a state, and what it authenticates.
func (h sealedHead) cipher(key []byte) (cipher.AEAD, []byte, error) {
	associated, err := json.Marshal(h)
	if err != nil {
		return nil, nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, nil, err
	}
	gcm, err := cipher.NewGCMWithRandomNonce(block)
	return gcm, associated, err
}

// seal encrypts what is secret in the record of d, if there is a sealer. It unseals the key again before anything
// depends on that.
func (a *Authority) seal(ctx context.Context, d *rotation.Document, data map[string][]byte) error {
	by := a.custody.Seal
	if by == nil {
		return nil
	}
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it does not fail
	s := sealedState{sealedHead: a.headOf(d)}
	gcm, associated, err := s.cipher(key)
	if err != nil {
		return err
	}
	err = a.custody.call(ctx, signPatience, func(ctx context.Context) error {
		sealed, err := by.Seal(ctx, bytes.Clone(key), associated)
		if err != nil {
			return err
		}
		again, err := by.Unseal(ctx, sealed, associated)
		if err == nil && !bytes.Equal(again, key) {
			err = errors.New("what was sealed does not unseal to the same")
		}
		s.Key = sealed
		return err
	})
	if err != nil {
		return &custodyError{fmt.Errorf("seal the record: %w", err)}
	}
	s.State = gcm.Seal(nil, nil, data[stateName], associated)
	delete(data, stateName)
	delete(data, caKeyName)
	data[sealedName], err = json.Marshal(s)
	return err
}

// unseal returns the state in a sealed record, and whether it has to be sealed anew, as Custody.Unseal has unsealed it.
func (a *Authority) unseal(ctx context.Context, b []byte) (state []byte, head sealedHead, former bool, err error) {
	var s sealedState
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, head, false, fmt.Errorf("%s: %w", sealedName, err)
	}
	associated, err := json.Marshal(s.sealedHead)
	if err != nil {
		return nil, head, false, err
	}
	err = errors.New("the record is sealed, and no key is named to unseal it")
	for i, by := range []Sealer{a.custody.Seal, a.custody.Unseal} {
		if by == nil {
			continue
		}
		var key []byte
		failed := a.custody.call(ctx, signPatience, func(ctx context.Context) (err error) {
			key, err = by.Unseal(ctx, s.Key, associated)
			return err
		})
		if failed == nil {
			gcm, _, err := s.cipher(key)
			if err == nil {
				state, err = gcm.Open(nil, nil, s.State, associated)
			}
			return state, s.sealedHead, i == 1, err
		}
		failed = fmt.Errorf("unseal the record: %w", failed)
		if !errors.Is(failed, fs.ErrInvalid) && !errors.Is(failed, fs.ErrNotExist) {
			return nil, head, false, &custodyError{failed}
		}
		err = failed
	}
	return nil, head, false, err
}
