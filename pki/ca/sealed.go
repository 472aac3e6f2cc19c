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

// sealedState is a state encrypted with a key of its own, which a [Sealer] has sealed. What is readable is
// authenticated with both, so that no part of a record fits another one, or another version of it.
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

// text is what both encryptions authenticate.
func (h sealedHead) text() []byte {
	b, _ := json.Marshal(h) // these are strings and a number
	return b
}

func aead(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// seal encrypts what is secret in the record of d. It unseals the key again before anything depends on that.
func (c *custody) seal(ctx context.Context, d *rotation.Document, data map[string][]byte) error {
	head := sealedHead{c.cfg.TrustDomain.String(), d.Authority, d.Revision, d.Writer}
	key, sealed := make([]byte, 32), []byte(nil)
	_, _ = rand.Read(key) // it does not fail
	err := c.call(ctx, "", signPatience, func(ctx context.Context) (err error) {
		if sealed, err = c.Seal.Seal(ctx, bytes.Clone(key), head.text()); err != nil {
			return err
		}
		again, err := c.Seal.Unseal(ctx, sealed, head.text())
		if err == nil && !bytes.Equal(again, key) {
			err = errors.New("what was sealed does not unseal to the same")
		}
		return err
	})
	if err != nil {
		return &custodyError{fmt.Errorf("seal the record: %w", err)}
	}
	gcm, err := aead(key)
	if err != nil {
		return err
	}
	data[sealedName], err = json.Marshal(sealedState{head, sealed, gcm.Seal(nil, nil, data[stateName], head.text())})
	delete(data, stateName)
	delete(data, caKeyName)
	return err
}

// unseal returns the state in a sealed record, and whether it has to be sealed anew.
func (c *custody) unseal(ctx context.Context, b []byte) (_ []byte, anew bool, err error) {
	var s sealedState
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, false, fmt.Errorf("%s: %w", sealedName, err)
	}
	err = errors.New("the record is sealed, and no key is named to unseal it")
	for i, by := range []Sealer{c.Seal, c.Unseal} {
		if by == nil {
			continue
		}
		var state []byte
		err = c.call(ctx, "", signPatience, func(ctx context.Context) error {
			key, err := by.Unseal(ctx, s.Key, s.text())
			if err != nil {
				return err
			}
			gcm, err := aead(key)
			if err == nil {
				state, err = gcm.Open(nil, nil, s.State, s.text())
			}
			if err != nil {
				err = fmt.Errorf("%w: %w", fs.ErrInvalid, err)
			}
			return err
		})
		switch {
		case err == nil:
			return state, i == 1, nil
		case !errors.Is(err, fs.ErrInvalid) && !errors.Is(err, fs.ErrNotExist):
			return nil, false, &custodyError{fmt.Errorf("unseal the record: %w", err)}
		}
	}
	return nil, false, fmt.Errorf("unseal %s: %w", sealedName, err)
}
