package cafake

import (
	"cmp"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/internal/test/testkey"
)

// Transit is a fake of the transit engine at transit, as a [Script], so that it works in a bubble. It answers as a
// real OpenBao 2.7.2 does, which passes the same suites in internal/peers, but to any token. It has one RSA key.
type Transit struct {
	*Script
	Type string // of the engine that is mounted; empty means transit

	mu   sync.Mutex
	keys map[string]*transitKey
}

type transitKey struct {
	algorithm             string
	versions              []any // a crypto.Signer, or a cipher.AEAD
	deletable, exportable bool
	derived, backup       bool
}

// NewTransit returns an engine without keys.
func NewTransit() *Transit {
	t := &Transit{keys: map[string]*transitKey{}}
	t.Script = &Script{Answer: t.Engine}
	return t
}

// Rotate adds a version to a key, as an operator can.
func (t *Transit) Rotate(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.keys[name]
	k.versions = append(k.versions, newTransitKey(k.algorithm).versions[0])
}

// Trim takes the first version from a key, as an operator can.
func (t *Transit) Trim(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keys[name].versions[0] = nil
}

// newTransitKey returns a key, or nil if there is no such algorithm.
func newTransitKey(algorithm string) *transitKey {
	var key any
	var err error
	switch algorithm {
	case "aes256-gcm96":
		secret := make([]byte, 32)
		_, _ = rand.Read(secret) // never fails
		block, _ := aes.NewCipher(secret)
		key, err = cipher.NewGCMWithRandomNonce(block)
	case "ed25519":
		_, key, err = ed25519.GenerateKey(nil)
	case "ecdsa-p256":
		key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case "ecdsa-p384":
		key, err = ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	case "ecdsa-p521":
		key, err = ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	case "rsa-2048": // the others take long to make
		key = testkey.RSA()
	default:
		return nil
	}
	if err != nil {
		panic(err)
	}
	return &transitKey{algorithm: algorithm, versions: []any{key}}
}

// Errors returns the body of a refusal.
func Errors(texts ...string) map[string]any {
	return map[string]any{"errors": append([]string{}, texts...)}
}

func data(v any) (int, any) { return http.StatusOK, map[string]any{"data": v} }

// Engine is the [Script.Answer] of an engine without faults.
func (t *Transit) Engine(c Call) (int, any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	path := strings.TrimPrefix(c.URL.Path, "/v1/")
	if path == "sys/internal/ui/mounts/transit" {
		return data(map[string]any{"type": cmp.Or(t.Type, "transit"), "path": "transit/"})
	}
	parts := strings.Split(path, "/")
	switch {
	case parts[0] != "transit":
		return http.StatusNotFound, Errors(fmt.Sprintf("no handler for route %q. route entry not found.", path))
	case path == "transit/keys" && c.Method == "LIST" && len(t.keys) > 0:
		return data(map[string]any{"keys": slices.Sorted(maps.Keys(t.keys))})
	case len(parts) < 3:
		return http.StatusNotFound, Errors()
	}
	code, body := t.answer(c, parts)
	if code == http.StatusOK && c.Header.Get("X-Vault-Wrap-TTL") != "" {
		return code, map[string]any{"data": nil, "wrap_info": map[string]any{"token": "s.wrapped", "ttl": 1}}
	}
	return code, body
}

// answer answers a request about one key.
func (t *Transit) answer(c Call, parts []string) (int, any) {
	name, k := parts[2], t.keys[parts[2]]
	does := fmt.Sprint(c.Method, " ", parts[1], len(parts))
	switch {
	case does == "GET keys3" && k == nil:
		return http.StatusNotFound, Errors()
	case does == "POST keys3":
		return t.create(c, name)
	case k == nil && does == "POST encrypt3":
		t.keys[name] = newTransitKey("aes256-gcm96")
		return t.answer(c, parts)
	case k == nil:
		return http.StatusBadRequest, Errors(map[string]string{
			"DELETE keys3": "error deleting policy " + name + ": could not delete key; not found",
			"POST sign3":   "signing key not found",
			"POST keys4":   "no existing key named " + name + " could be found", "POST decrypt3": "encryption key not found",
		}[does])
	}
	switch does {
	case "GET keys3":
		return data(k.describe())
	case "POST keys4":
		k.deletable = k.deletable || c.Body["deletion_allowed"] == true
		return data(k.describe())
	case "DELETE keys3":
		if !k.deletable {
			return http.StatusBadRequest, Errors("error deleting policy " + name + ": deletion is not allowed for this key")
		}
		delete(t.keys, name)
		return http.StatusNoContent, ""
	case "POST sign3":
		return k.sign(c.Body)
	case "POST encrypt3", "POST decrypt3":
		return k.seal(c.Body, parts[1] == "decrypt")
	}
	return http.StatusMethodNotAllowed, Errors("unsupported operation")
}

func (t *Transit) create(c Call, name string) (int, any) {
	if t.keys[name] == nil { // a name that is taken is no error
		k := newTransitKey(c.Body["type"].(string))
		if k == nil {
			return http.StatusBadRequest, Errors(fmt.Sprintf("unknown key type %v", c.Body["type"]))
		}
		k.exportable, k.backup = c.Body["exportable"] == true, c.Body["allow_plaintext_backup"] == true
		t.keys[name] = k
	}
	return data(t.keys[name].describe())
}

func (k *transitKey) describe() any {
	keys := map[string]any{}
	for i, version := range k.versions {
		if number := strconv.Itoa(i + 1); version == nil { // it was trimmed
			continue
		} else if signer, ok := version.(crypto.Signer); !ok {
			keys[number] = 1795972986
		} else if raw, ok := signer.Public().(ed25519.PublicKey); ok {
			keys[number] = map[string]string{"name": k.algorithm, "public_key": base64.StdEncoding.EncodeToString(raw)}
		} else {
			der, _ := x509.MarshalPKIXPublicKey(signer.Public())
			text := string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
			keys[number] = map[string]string{"name": k.algorithm, "public_key": text}
		}
	}
	return map[string]any{"type": k.algorithm, "derived": k.derived, "exportable": k.exportable, "keys": keys,
		"allow_plaintext_backup": k.backup, "deletion_allowed": k.deletable, "latest_version": len(k.versions)}
}

func (k *transitKey) sign(body map[string]any) (int, any) {
	at := len(k.versions)
	if n, ok := body["key_version"].(float64); ok && n > 0 {
		at = int(n)
	}
	if at > len(k.versions) || k.versions[at-1] == nil {
		return http.StatusInternalServerError, Errors("1 error occurred:\n\t* requested version is not there\n\n")
	}
	signer, ok := k.versions[at-1].(crypto.Signer)
	input, err := base64.StdEncoding.DecodeString(body["input"].(string))
	if !ok || err != nil {
		return http.StatusBadRequest, Errors("the key does not sign this")
	}
	var opts crypto.SignerOpts = crypto.Hash(0)
	if k.algorithm != "ed25519" {
		hash := map[any]crypto.Hash{
			"sha2-256": crypto.SHA256, "sha2-384": crypto.SHA384, "sha2-512": crypto.SHA512,
		}[body["hash_algorithm"]]
		if body["prehashed"] != true { // the engine would hash what is a hash already
			h := hash.New()
			h.Write(input)
			input = h.Sum(nil)
		}
		opts = hash
		if body["signature_algorithm"] != "pkcs1v15" && strings.HasPrefix(k.algorithm, "rsa-") {
			text, _ := body["salt_length"].(string)
			salt, _ := strconv.Atoi(text) // auto, which is 0, if it is no number
			if text == "hash" {
				salt = rsa.PSSSaltLengthEqualsHash
			}
			opts = &rsa.PSSOptions{SaltLength: salt, Hash: hash}
		}
	}
	signature, err := signer.Sign(rand.Reader, input, opts)
	if err != nil {
		return http.StatusInternalServerError, Errors("1 error occurred:\n\t* " + err.Error() + "\n\n")
	}
	return data(map[string]any{"signature": versioned(at, signature), "key_version": at})
}

func versioned(at int, data []byte) string {
	return fmt.Sprintf("vault:v%d:%s", at, base64.StdEncoding.EncodeToString(data))
}

func (k *transitKey) seal(body map[string]any, open bool) (int, any) {
	text, _ := body["associated_data"].(string)
	associated, _ := base64.StdEncoding.DecodeString(text)
	if _, ok := k.versions[len(k.versions)-1].(cipher.AEAD); !ok {
		return http.StatusBadRequest, Errors("'[0].associated_data' provided for non-AEAD cipher suite " + k.algorithm)
	}
	if !open {
		plain, err := base64.StdEncoding.DecodeString(body["plaintext"].(string))
		if err != nil {
			return http.StatusBadRequest, Errors("failed to base64-decode plaintext")
		}
		box := k.versions[len(k.versions)-1].(cipher.AEAD).Seal(nil, nil, plain, associated)
		return data(map[string]any{"ciphertext": versioned(len(k.versions), box)})
	}
	version, text, _ := strings.Cut(strings.TrimPrefix(body["ciphertext"].(string), "vault:v"), ":")
	at, err := strconv.Atoi(version)
	if err == nil && at > len(k.versions) {
		return http.StatusBadRequest, Errors("invalid ciphertext: version is too new")
	}
	at = max(at, 1) // as the engine takes the version 0
	box, bad := base64.StdEncoding.DecodeString(text)
	if err != nil || bad != nil {
		return http.StatusBadRequest, Errors("invalid ciphertext: could not decode base64")
	}
	plain, err := k.versions[at-1].(cipher.AEAD).Open(nil, nil, box, associated)
	if err != nil {
		return http.StatusBadRequest, Errors("cipher: message authentication failed")
	}
	return data(map[string]any{"plaintext": base64.StdEncoding.EncodeToString(plain)})
}
