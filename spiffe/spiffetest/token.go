package spiffetest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"slices"
	"time"
)

// keyID is the "kid" of the one key for tokens.
const keyID = "spiffetest"

// JWTSVID returns a JWT-SVID of the ID that is the trust domain followed by path, for the audiences, good for one hour
// and signed with ES256. The first call makes the key and adds it to the bundle, so take the bundle after that call,
// or from a source made or renewed after it, such as [CA.Source]. Rotations keep the key.
func (ca *CA) JWTSVID(path string, audience ...string) string {
	ca.t.Helper()
	id := ca.id(path)
	tr := ca.trust
	tr.mu.Lock()
	if tr.jwt == nil {
		tr.jwt = seal(ca.newKey())
		ca.publish(slices.Clone(tr.roots))
	}
	key, now := tr.jwt().(*ecdsa.PrivateKey), time.Now()
	tr.mu.Unlock()
	encode := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			ca.t.Fatalf("spiffetest: JWT-SVID: %v", err)
		}
		return base64.RawURLEncoding.EncodeToString(text)
	}
	signed := encode(map[string]any{"alg": "ES256", "kid": keyID, "typ": "JWT"}) + "." +
		encode(map[string]any{
			"sub": id.String(), "aud": audience, "iat": now.Unix(), "exp": now.Add(leafLifetime).Unix(),
		})
	sum := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, key, sum[:])
	if err != nil {
		ca.t.Fatalf("spiffetest: JWT-SVID: %v", err)
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature)
}

// jwtKeys returns the bundle's keys for tokens. The caller holds the lock.
func (tr *trust) jwtKeys() map[string]crypto.PublicKey {
	if tr.jwt == nil {
		return nil
	}
	return map[string]crypto.PublicKey{keyID: tr.jwt().Public()}
}
