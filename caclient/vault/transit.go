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
)

const (
	signTimeout = 10 * time.Second       // of a signature with a log-in, a renewal and a repetition
	behindWait  = 200 * time.Millisecond // before a standby is asked again that does not have a new key yet
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

// Transit keeps keys in the transit engine of OpenBao or HashiCorp Vault, for a CA whose store then holds none: it is a
// ca.Custodian and, with a SealKey, a ca.Sealer. [NewTransit] makes one. It is safe for concurrent use, and never prints
// a token. Private keys do not leave the engine: each signature is a call, which is repeated only if its login's token
// had ended.
//
// # What OpenBao needs
//
// An engine of its own for each CA or group of replicas, because a policy cannot name a part of the keys:
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
//	path "transit/encrypt/seal"  { capabilities = ["update"] }
//	path "transit/decrypt/seal"  { capabilities = ["update"] }
//	path "transit/keys/seal"     { capabilities = ["read"] }
//
// The policy lets the CA make, use and destroy its keys, but not export them, and not destroy the key that seals. With
// the capability create for transit/encrypt/seal the first [Transit.Seal] makes that key.
//
// # Logins
//
// A token of the Endpoint is renewed when a third of its life is over, by the call that comes next. So it may be a
// periodic one (bao token create -orphan -period=768h), whose policies include auth/token/renew-self, as those of most
// tokens do, and lasts for as long as calls come. A token with an end of its own stops there. Logins renew themselves,
// as [Options] say.
//
// The login can be by an SVID of the very CA whose keys are here. That is a circle: once the SVID has expired, such as
// after a day without the CA, there is no login to sign the next one with. Keep a second login for that day, by a token
// or by a certificate of another CA.
//
// # What an operator must not do
//
// The client pins version 1 of a key, and never asks for another. To rotate a key in the engine therefore changes
// nothing: the CA rotates by new keys. To trim versions, or to raise min_encryption_version or min_decryption_version,
// takes the key away. The key that seals may be rotated, but old versions are needed until the record has been written
// again. Who may use sys/mounts or a backup of OpenBao's storage and its unseal keys has all keys.
//
// # Certainty
//
// An error wraps [fs.ErrNotExist] only if the active server says that its engine, which is one of the type transit, has
// no such key. A standby that does not have a new key yet, a mount or namespace that is missing, a sealed server and a
// refusal give a [*caclient.Error], unless ctx is done. [Transit.Keys] may lag, if the server is a standby that reads.
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

// ask sends a request to the engine. active makes a standby forward it, by a wrap of the answer, which only the active
// server can make; the answer then has no data. none says that the answer is a 404 of OpenBao that knows of nothing
// wrong. No error wraps another one of package fs, such as that of a token's file.
func (t *Transit) ask(ctx context.Context, op, method, path string, active bool, body, answer any) (
	s caconn.Status, none bool, err error) {
	r := caconn.Request{Op: op, Method: method, Path: path, Body: body, Message: func(body []byte) string {
		var m struct{ Errors []string }
		none = json.Unmarshal(body, &m) == nil && m.Errors != nil && len(m.Errors) == 0
		return message(body)
	}}
	if active {
		r.Header, answer = http.Header{"X-Vault-Wrap-Ttl": {"1s"}}, nil
	}
	err = t.do(ctx, r, answer)
	if status, ok := errors.AsType[*caconn.Status](err); ok {
		s = *status
	}
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		err = &caclient.Error{Op: e.Op, Kind: e.Kind, RetryAfter: e.RetryAfter, Err: errors.New(e.Err.Error())}
	}
	return s, none && s.Code == http.StatusNotFound, err
}

// read reads what the engine says about a key. If there is none, the error wraps fs.ErrNotExist.
func (t *Transit) read(ctx context.Context, op, name string, answer any) error {
	if !isName(name) {
		return t.conn.Error(op, caclient.ErrInvalid, errors.New("it is not a name that a key can have"))
	}
	for path := t.mount + "/keys/" + name; ; {
		if _, none, err := t.ask(ctx, op, http.MethodGet, path, false, nil, answer); !none {
			return err
		}
		_, none, err := t.ask(ctx, op, http.MethodGet, path, true, nil, nil)
		if none {
			err = cmp.Or(t.isTransit(ctx, op), fmt.Errorf("vault: %s: %w in the engine at %s", op, fs.ErrNotExist, t.mounted))
		}
		if err != nil {
			return err
		}
		select { // a standby does not have the key yet
		case <-ctx.Done():
			return fmt.Errorf("vault: %s: %w", op, context.Cause(ctx))
		case <-time.After(behindWait):
		}
	}
}

// isTransit returns nil if the engine is of the type transit. Others give the same answer if there is no key.
func (t *Transit) isTransit(ctx context.Context, op string) error {
	var mount struct{ Data struct{ Type string } }
	_, _, err := t.ask(ctx, op, http.MethodGet, "/v1/sys/internal/ui/mounts/"+t.mounted, false, nil, &mount)
	if err == nil && mount.Data.Type != "transit" {
		err = t.conn.Error(op, caclient.ErrInvalid,
			fmt.Errorf("the engine at %s is not one of the type transit, but %.40q", t.mounted, mount.Data.Type))
	}
	return err
}

// keyAnswer is the answer of keys/NAME.
type keyAnswer struct {
	Data struct {
		Type       string
		Derived    bool
		Exportable bool
		Backup     bool `json:"allow_plaintext_backup"`
		Keys       map[string]json.RawMessage
	}
}

// signer returns version 1 of a key.
func (t *Transit) signer(op, name string, a *keyAnswer) (crypto.Signer, error) {
	s := &signer{redact.New("vault key " + name), t, name, nil}
	var version struct {
		PublicKey string `json:"public_key"`
	}
	raw, ok := a.Data.Keys["1"]
	err := json.Unmarshal(raw, &version)
	key, notRaw := base64.StdEncoding.DecodeString(version.PublicKey)
	block, _ := pem.Decode([]byte(version.PublicKey))
	switch {
	case !ok:
		err = errors.New("version 1 of the key, which is the CA's, is not available: set min_decryption_version to 1, " +
			"or restore the key if it was trimmed")
	case err != nil || a.Data.Derived:
		err = fmt.Errorf("the key is not one that signs, but of the type %.40q", a.Data.Type)
	case notRaw == nil && len(key) == ed25519.PublicKeySize:
		s.public = ed25519.PublicKey(key)
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
	var a keyAnswer
	err := t.read(ctx, op, name, &a) // because the engine answers to a name that is taken as if it had made the key
	if errors.Is(err, fs.ErrNotExist) {
		_, _, err = t.ask(ctx, op, http.MethodPost, t.mount+"/keys/"+name, false,
			map[string]any{"type": algorithm, "exportable": false, "allow_plaintext_backup": false}, nil)
		if err == nil {
			err = t.read(ctx, op, name, &a)
		}
		if d := a.Data; err == nil && d.Type == algorithm && !d.Derived && !d.Exportable && !d.Backup {
			return t.signer(op, name, &a)
		}
	}
	if err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("vault: %s: %w", op, fs.ErrExist)
}

// Key implements ca.Custodian.
func (t *Transit) Key(ctx context.Context, name string) (crypto.Signer, error) {
	op := "find key " + name
	var a keyAnswer
	if err := t.read(ctx, op, name, &a); err != nil {
		return nil, err
	}
	return t.signer(op, name, &a)
}

// Destroy implements ca.Custodian. It sets the key's deletion_allowed first.
func (t *Transit) Destroy(ctx context.Context, name string) error {
	op := "destroy key " + name
	var a keyAnswer
	err := t.read(ctx, op, name, &a)
	if err == nil {
		_, _, err = t.ask(ctx, op, http.MethodPost, t.mount+"/keys/"+name+"/config", true,
			map[string]bool{"deletion_allowed": true}, nil)
	}
	if err == nil {
		_, _, err = t.ask(ctx, op, http.MethodDelete, t.mount+"/keys/"+name, true, nil, nil)
	}
	if errors.Is(err, fs.ErrNotExist) || err != nil && errors.Is(t.read(ctx, op, name, &a), fs.ErrNotExist) {
		return nil // another client may have been faster
	}
	return err
}

// Keys implements ca.Custodian.
func (t *Transit) Keys(ctx context.Context, prefix string) ([]string, error) {
	const op = "list keys"
	var list issuerList
	_, none, err := t.ask(ctx, op, http.MethodGet, t.mount+"/keys?list=true", false, nil, &list)
	if none {
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

// signBody is the body of sign/NAME.
type signBody struct {
	Input     []byte `json:"input"`
	Version   int    `json:"key_version"`
	Prehashed bool   `json:"prehashed"`
	Hash      string `json:"hash_algorithm,omitempty"`
	Form      string `json:"marshaling_algorithm"`
	Padding   string `json:"signature_algorithm,omitempty"`
	Salt      string `json:"salt_length,omitempty"`
}

var hashes = map[crypto.Hash]string{crypto.SHA256: "sha2-256", crypto.SHA384: "sha2-384", crypto.SHA512: "sha2-512"}

// Sign implements [crypto.Signer]. It takes ten seconds at most.
func (s *signer) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	op := "sign with key " + s.name
	hash := opts.HashFunc()
	body := signBody{Input: digest, Version: 1, Form: "asn1"}
	if _, whole := s.public.(ed25519.PublicKey); !whole {
		body.Prehashed, body.Hash = true, hashes[hash]
		if body.Hash == "" || len(digest) != hash.Size() {
			return nil, fmt.Errorf("vault: %s: %w: a digest of %d bytes by %v", op, errors.ErrUnsupported, len(digest), hash)
		}
	} else if hash != 0 {
		return nil, fmt.Errorf("vault: %s: %w: Ed25519 with %v", op, errors.ErrUnsupported, hash)
	}
	if _, ok := s.public.(*rsa.PublicKey); ok {
		body.Padding = "pkcs1v15"
		if pss, ok := opts.(*rsa.PSSOptions); ok {
			body.Padding, body.Salt = "pss", strconv.Itoa(pss.SaltLength)
			switch pss.SaltLength {
			case rsa.PSSSaltLengthAuto:
				body.Salt = "auto"
			case rsa.PSSSaltLengthEqualsHash:
				body.Salt = "hash"
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), signTimeout)
	defer cancel()
	var answer struct{ Data struct{ Signature string } }
	if _, _, err := s.t.ask(ctx, op, http.MethodPost, s.t.mount+"/sign/"+s.name, false, body, &answer); err != nil {
		return nil, err
	}
	text, ok := strings.CutPrefix(answer.Data.Signature, "vault:v1:")
	signature, err := base64.StdEncoding.DecodeString(text)
	if !ok || err != nil {
		return nil, s.t.conn.Error(op, caclient.ErrBadAnswer, errors.New("the answer has no signature of version 1 of the key"))
	}
	return signature, nil
}

// sealBody is the body of encrypt/NAME and decrypt/NAME, and a part of their answers.
type sealBody struct {
	Plaintext  []byte `json:"plaintext,omitempty"`
	Ciphertext string `json:"ciphertext,omitempty"`
	Associated []byte `json:"associated_data,omitempty"`
}

type sealAnswer struct{ Data sealBody }

// Seal implements ca.Sealer.
func (t *Transit) Seal(ctx context.Context, secret, associated []byte) ([]byte, error) {
	const op = "seal"
	var a sealAnswer
	s, _, err := t.askSeal(ctx, op, "/encrypt/", sealBody{Plaintext: secret, Associated: associated}, &a)
	if s.Code == http.StatusForbidden {
		err = fmt.Errorf("%w; the policy has to allow %s/encrypt/%s, and the key has to be there: bao write -f "+
			"%[2]s/keys/%[3]s type=aes256-gcm96", err, t.mounted, t.sealKey)
	}
	if err == nil && !box.MatchString(a.Data.Ciphertext) {
		err = t.conn.Error(op, caclient.ErrBadAnswer, errors.New("the answer has no ciphertext"))
	}
	if err != nil {
		return nil, err
	}
	return []byte(a.Data.Ciphertext), nil
}

// box is a ciphertext of AES-GCM: the version of the key, then the nonce, the ciphertext and the tag, of which there
// are more than 28 bytes.
var box = regexp.MustCompile(`^vault:v[1-9][0-9]{0,8}:([A-Za-z0-9+/]{38,}={0,2})$`)

// Unseal implements ca.Sealer.
func (t *Transit) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	const op = "unseal"
	not := fmt.Errorf("vault: %s: %w: the key %q at %s did not seal this", op, fs.ErrInvalid, t.sealKey, t.mounted)
	parts := box.FindSubmatch(sealed)
	if parts == nil {
		return nil, not
	}
	if _, err := base64.StdEncoding.Strict().DecodeString(string(parts[1])); err != nil {
		return nil, not // the engine would not mind the bits at the end
	}
	var a sealAnswer
	s, _, err := t.askSeal(ctx, op, "/decrypt/", sealBody{Ciphertext: string(sealed), Associated: associated}, &a)
	switch {
	case err == nil:
		return a.Data.Plaintext, nil
	case s.Code != http.StatusBadRequest:
	case strings.Contains(s.Message, "message authentication failed"):
		return nil, not
	default:
		err = cmp.Or(t.read(ctx, op, t.sealKey, nil), err) // the reason may be that there is no key
	}
	return nil, err
}

func (t *Transit) askSeal(ctx context.Context, op, path string, body, answer any) (caconn.Status, bool, error) {
	if t.sealKey == "" {
		return caconn.Status{}, false, t.conn.Error(op, caclient.ErrInvalid, errors.New("SealKey is not set"))
	}
	return t.ask(ctx, op, http.MethodPost, t.mount+path+t.sealKey, false, body, answer)
}
