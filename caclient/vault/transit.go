package vault

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	signTimeout = 10 * time.Second      // of a signature with a log-in, a renewal and a repetition
	behindWait  = 50 * time.Millisecond // before a standby is asked again that does not have a new key yet
)

// TransitOptions are the choices of [NewTransit]. Only URL of the Endpoint is required. TrustDomain and Roots are not
// used.
type TransitOptions struct {
	caclient.Endpoint

	// Mount is the path of the transit engine; empty means "transit".
	Mount string

	// Namespace is as in [Options].
	Namespace string

	// LoginRole and LoginMount are as in [Options].
	LoginRole, LoginMount string

	// SealKey is the name of the engine's key that seals, of the type aes256-gcm96. Empty means that [Transit.Seal] and
	// [Transit.Unseal] fail.
	SealKey string
}

// Transit keeps keys in the transit engine of OpenBao or HashiCorp Vault, for a CA whose store then holds none. It is
// a ca.Custodian and, with a SealKey, a ca.Sealer; [NewTransit] makes one. It is safe for concurrent use, and never
// prints a token. Private keys do not leave the engine: each signature is a call.
//
// # What OpenBao needs
//
// Each CA has an engine of its own, because a policy cannot name a part of an engine's keys:
//
//	bao secrets enable transit
//	bao write -f transit/keys/seal type=aes256-gcm96
//
//	path "transit/keys"          { capabilities = ["list"] }
//	path "transit/keys/+"        { capabilities = ["read", "update", "delete"]
//	                               allowed_parameters = { "type" = [], "exportable" = [false],
//	                                                      "allow_plaintext_backup" = [false] } }
//	path "transit/keys/+/config" { capabilities = ["update"], allowed_parameters = { "deletion_allowed" = [true] } }
//	path "transit/sign/+"        { capabilities = ["update"] }
//	path "transit/keys/seal"     { capabilities = ["read"] }
//	path "transit/encrypt/seal"  { capabilities = ["update"] }
//	path "transit/decrypt/seal"  { capabilities = ["update"] }
//
// So the CA can make, use and destroy its keys, but cannot export them, and cannot destroy the key that seals. With
// the capability create for transit/encrypt/seal, the first [Transit.Seal] makes that key.
//
// # Logins
//
// A token of the Endpoint that is not for a login is renewed when a third of its life is over, by the next call. So it
// can be a periodic one (bao token create -orphan -period=768h -policy=ca), which lasts for as long as calls come, if
// a policy allows "update" for auth/token/renew-self, as the one named default does. A token with a last day ends on
// it. Logins are renewed as [Options] say; the method cert of OpenBao wants a certificate with a common name.
//
// A login with an SVID of the very CA whose keys are here is a circle: if the SVID expires while the engine is away,
// there is no login to sign the next one. Keep a second login for that day: a token, or a certificate of another CA.
//
// # What an operator must not do
//
// The client makes version 1 of a key and uses no other, so a rotation in the engine changes nothing: the CA rotates
// by new keys. Trimming, and raising min_encryption_version or min_decryption_version, take a key away from the CA.
// The key that seals may be rotated; its old versions are needed until the record has been saved again. The power to
// use transit/export or transit/backup, to change the policy, or to read the storage and the unseal keys of OpenBao is
// the power to have the keys.
//
// # Certainty
//
// An error wraps [fs.ErrNotExist] only if the active server says that its engine, of the type transit, has no such
// key. A missing mount or namespace, a sealed server, a standby that is behind, and a refusal give a
// [*caclient.Error], unless ctx is done. [Transit.Keys] may lag behind if the server is a standby.
type Transit struct {
	client
	mounted string // the path of the engine, as its operator knows it
	sealKey string
}

// NewTransit returns a Transit. It does not connect and reads no file. The error says which option is wrong.
func NewTransit(o TransitOptions) (*Transit, error) {
	t := &Transit{mounted: cmp.Or(strings.Trim(o.Mount, "/"), "transit"), sealKey: o.SealKey}
	o.Roots, t.renews = nil, true
	err := t.connect(caconn.Config{Endpoint: o.Endpoint, Keys: true}, t.mounted, o.Namespace, o.LoginRole, o.LoginMount)
	if err == nil && t.sealKey != "" && !isName(t.sealKey) {
		err = errors.New("the SealKey is not the name of a key")
	}
	if err != nil {
		return nil, fmt.Errorf("vault: invalid TransitOptions: %w", err)
	}
	t.redacted = redact.New("vault.Transit(" + t.conn.URL + ")")
	return t, nil
}

// ask sends a request to the engine. active makes a standby forward it, by asking for a wrapped answer, which only the
// active server can make; then there is no answer to read. The Status is that of an answer that is an error. The error
// is a [*caclient.Error], unless ctx is done, and wraps no cause, which may be one of package fs for a token's file.
func (t *Transit) ask(
	ctx context.Context, op, method, path string, active bool, body, answer any) (s caconn.Status, err error) {
	r := caconn.Request{Op: op, Method: method, Path: path, Body: body}
	if active {
		r.Header, answer = http.Header{"X-Vault-Wrap-Ttl": {"1s"}}, nil
	}
	err = t.do(ctx, r, answer)
	if status, ok := errors.AsType[*caconn.Status](err); ok {
		s = *status
	}
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		err = &caclient.Error{Op: op, Kind: e.Kind, RetryAfter: e.RetryAfter, Err: errors.New(e.Err.Error())}
	}
	return s, err
}

// read reads what the engine says about a key. If there is none, the error wraps fs.ErrNotExist.
func (t *Transit) read(ctx context.Context, op, name string) (a keyAnswer, err error) {
	if !isName(name) {
		return a, t.conn.Error(op, caclient.ErrInvalid, errors.New("it is not a name that a key can have"))
	}
	for path := t.mount + "/keys/" + name; ; {
		s, err := t.ask(ctx, op, http.MethodGet, path, false, nil, &a)
		if err == nil && a.Data.Type == "" {
			err = t.conn.Error(op, caclient.ErrBadAnswer, errors.New("there is no type of a key"))
		}
		if !missing(s) {
			return a, err
		}
		s, err = t.ask(ctx, op, http.MethodGet, path, true, nil, nil)
		if missing(s) {
			err = cmp.Or(t.isTransit(ctx, op), fmt.Errorf("vault: %s: %w at %s", op, fs.ErrNotExist, t.mounted))
		}
		if err == nil {
			err = renew.Sleep(ctx, behindWait) // a standby does not have the key yet
		}
		if err != nil {
			return a, err
		}
	}
}

// missing reports whether s says that there is no such key, or an engine of another type.
func missing(s caconn.Status) bool { return s.Code == http.StatusNotFound && s.Message == nothing }

// isTransit returns nil if the engine is of the type transit.
func (t *Transit) isTransit(ctx context.Context, op string) error {
	var mount struct{ Data struct{ Type string } }
	_, err := t.ask(ctx, op, http.MethodGet, "/v1/sys/internal/ui/mounts/"+t.mounted, false, nil, &mount)
	if err == nil && mount.Data.Type != "transit" {
		err = t.conn.Error(op, caclient.ErrInvalid,
			fmt.Errorf("the engine at %s is of the type %.40q, not transit", t.mounted, mount.Data.Type))
	}
	return err
}

// keyAnswer is the answer of keys/NAME.
type keyAnswer struct {
	Data struct {
		Type                string
		Derived, Exportable bool
		Backup              bool `json:"allow_plaintext_backup"`
		Keys                map[string]json.RawMessage
	}
}

// signer returns version 1 of a key.
func (t *Transit) signer(op, name string, a keyAnswer) (crypto.Signer, error) {
	s := &signer{redact.New("vault key " + name), t, name, nil}
	var version struct {
		PublicKey string `json:"public_key"`
	}
	err := json.Unmarshal(a.Data.Keys["1"], &version)
	raw, notRaw := base64.StdEncoding.DecodeString(version.PublicKey)
	block, _ := pem.Decode([]byte(version.PublicKey))
	switch {
	case a.Data.Keys["1"] == nil:
		err = errors.New("version 1 of the key is not available: set its min_decryption_version to 1, or restore " +
			"a backup from before the key was trimmed")
	case err != nil || a.Data.Derived:
		err = fmt.Errorf("the key is of the type %.40q, or derived, and does not sign", a.Data.Type)
	case notRaw == nil && len(raw) == ed25519.PublicKeySize:
		s.public = ed25519.PublicKey(raw)
	case block == nil:
		err = errors.New("the key has no public key")
	default:
		s.public, err = x509.ParsePKIXPublicKey(block.Bytes)
	}
	if err != nil {
		return nil, t.conn.Error(op, caclient.ErrBadAnswer, err)
	}
	return s, nil
}

var algorithms = []string{"ecdsa-p256", "ecdsa-p384", "ecdsa-p521", "rsa-2048", "rsa-3072", "rsa-4096", "ed25519"}

// NewKey implements ca.Custodian. The key cannot be exported. If another client makes a key with the same name and
// algorithm at the same moment, both have the same key.
func (t *Transit) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	op := "make key " + name
	if !slices.Contains(algorithms, algorithm) {
		return nil, fmt.Errorf("vault: %s: %w: the algorithm %.40q", op, errors.ErrUnsupported, algorithm)
	}
	a, err := t.read(ctx, op, name) // because the engine answers to a name that is taken as if it had made the key
	if errors.Is(err, fs.ErrNotExist) {
		_, err = t.ask(ctx, op, http.MethodPost, t.mount+"/keys/"+name, false,
			map[string]any{"type": algorithm, "exportable": false, "allow_plaintext_backup": false}, nil)
		if err == nil {
			a, err = t.read(ctx, op, name)
		}
		if d := a.Data; err == nil && d.Type == algorithm && !d.Derived && !d.Exportable && !d.Backup {
			return t.signer(op, name, a)
		}
	}
	return nil, cmp.Or(err, fmt.Errorf("vault: %s: %w", op, fs.ErrExist))
}

// Key implements ca.Custodian.
func (t *Transit) Key(ctx context.Context, name string) (crypto.Signer, error) {
	op := "find key " + name
	a, err := t.read(ctx, op, name)
	if err != nil {
		return nil, err
	}
	return t.signer(op, name, a)
}

// Destroy implements ca.Custodian. It sets the key's deletion_allowed first. Backups of the engine still have the key.
func (t *Transit) Destroy(ctx context.Context, name string) error {
	op, path := "destroy key "+name, t.mount+"/keys/"+name
	_, err := t.read(ctx, op, name)
	if err == nil {
		_, err = t.ask(ctx, op, http.MethodPost, path+"/config", true, map[string]bool{"deletion_allowed": true}, nil)
	}
	if err == nil {
		_, err = t.ask(ctx, op, http.MethodDelete, path, true, nil, nil)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		if _, now := t.read(ctx, op, name); !errors.Is(now, fs.ErrNotExist) {
			return err
		} // another client was faster
	}
	return nil
}

// Keys implements ca.Custodian.
func (t *Transit) Keys(ctx context.Context, prefix string) ([]string, error) {
	const op = "list keys"
	var list issuerList // has the same form
	s, err := t.ask(ctx, op, "LIST", t.mount+"/keys", false, nil, &list)
	if missing(s) {
		err = t.isTransit(ctx, op)
	}
	return slices.DeleteFunc(list.Data.Keys, func(n string) bool { return !strings.HasPrefix(n, prefix) }), err
}

// signer is a key in the engine.
type signer struct {
	redacted
	t      *Transit
	name   string
	public crypto.PublicKey
}

// Public implements [crypto.Signer].
func (s *signer) Public() crypto.PublicKey { return s.public }

var (
	hashes = map[crypto.Hash]string{crypto.SHA256: "sha2-256", crypto.SHA384: "sha2-384", crypto.SHA512: "sha2-512"}
	salts  = map[int]string{rsa.PSSSaltLengthAuto: "auto", rsa.PSSSaltLengthEqualsHash: "hash"}
)

// Sign implements [crypto.Signer]. It takes ten seconds at most.
func (s *signer) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	op, hash := "sign with key "+s.name, opts.HashFunc()
	body := map[string]any{"input": digest, "key_version": 1}
	_, whole := s.public.(ed25519.PublicKey)
	if whole != (hash == 0) || !whole && (hashes[hash] == "" || len(digest) != hash.Size()) {
		return nil, fmt.Errorf("vault: %s: %w: %d bytes by %v", op, errors.ErrUnsupported, len(digest), hash)
	}
	if !whole {
		body["prehashed"], body["hash_algorithm"], body["signature_algorithm"] = true, hashes[hash], "pkcs1v15"
	}
	if pss, ok := opts.(*rsa.PSSOptions); ok {
		body["signature_algorithm"] = "pss"
		body["salt_length"] = cmp.Or(salts[pss.SaltLength], strconv.Itoa(pss.SaltLength))
	}
	ctx, cancel := context.WithTimeout(context.Background(), signTimeout)
	defer cancel()
	var answer struct{ Data struct{ Signature string } }
	if _, err := s.t.ask(ctx, op, http.MethodPost, s.t.mount+"/sign/"+s.name, false, body, &answer); err != nil {
		return nil, err
	}
	text, ok := strings.CutPrefix(answer.Data.Signature, "vault:v1:")
	signature, err := base64.StdEncoding.DecodeString(text)
	if !ok || err != nil {
		return nil, s.t.conn.Error(op, caclient.ErrBadAnswer, errors.New("there is no signature of version 1 of the key"))
	}
	return signature, nil
}

// box is a ciphertext: the version of the key, and in base64 a nonce of 12 bytes, a secret of 32, and a tag of 16.
var box = regexp.MustCompile(`^vault:v[1-9][0-9]{0,8}:[A-Za-z0-9+/]{80}$`)

// sealAnswer is the answer of encrypt/NAME and decrypt/NAME.
type sealAnswer struct {
	Data struct {
		Plaintext  []byte
		Ciphertext string
	}
}

// seal has the key that seals encrypt or decrypt.
func (t *Transit) seal(
	ctx context.Context, op string, body map[string]any) (a sealAnswer, s caconn.Status, err error) {
	if t.sealKey == "" {
		return a, s, t.conn.Error(op, caclient.ErrInvalid, errors.New("SealKey is not set"))
	}
	if err = t.isTransit(ctx, op); err == nil { // another engine may keep the secret as it is
		s, err = t.ask(ctx, op, http.MethodPost, t.mount+"/"+op+"/"+t.sealKey, false, body, &a)
	}
	return a, s, err
}

// Seal implements ca.Sealer.
func (t *Transit) Seal(ctx context.Context, secret, associated []byte) ([]byte, error) {
	a, s, err := t.seal(ctx, "encrypt", map[string]any{"plaintext": secret, "associated_data": associated})
	if s.Code == http.StatusForbidden {
		err = fmt.Errorf("%w; the policy has to allow %s/encrypt/%s, and the key has to be there: bao write -f "+
			"%[2]s/keys/%[3]s type=aes256-gcm96", err, t.mounted, t.sealKey)
	}
	if err == nil && box.MatchString(a.Data.Ciphertext) {
		return []byte(a.Data.Ciphertext), nil
	}
	return nil, cmp.Or[error](err, t.conn.Error("encrypt", caclient.ErrBadAnswer, errors.New("there is no sealed secret of 32 bytes")))
}

// Unseal implements ca.Sealer.
func (t *Transit) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	not := fmt.Errorf("vault: decrypt: %w: the key %s at %s did not seal this", fs.ErrInvalid, t.sealKey, t.mounted)
	if !box.Match(sealed) { // the engine is less strict
		return nil, not
	}
	a, s, err := t.seal(ctx, "decrypt", map[string]any{"ciphertext": string(sealed), "associated_data": associated})
	switch {
	case s.Code == http.StatusBadRequest && strings.Contains(s.Message, "message authentication failed"):
		err = not
	case s.Code == http.StatusBadRequest: // perhaps because there is no key
		_, gone := t.read(ctx, "decrypt", t.sealKey)
		err = cmp.Or(gone, err)
	case err == nil && len(a.Data.Plaintext) != 32:
		err = t.conn.Error("decrypt", caclient.ErrBadAnswer, errors.New("there is no secret of 32 bytes"))
	}
	if err != nil {
		return nil, err
	}
	return a.Data.Plaintext, nil
}
