package ca

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// Custodian makes, keeps and uses private keys outside a [Store], such as in an HSM, a TPM or a key management
// service. The CA names the keys: "svidkit-", an ID of the CA and a random part, with only lower-case letters, digits
// and hyphens, at most 80 bytes. A custodian may also hold the keys of others. All methods must be safe for concurrent
// use and return when ctx is done. No error may contain a secret.
type Custodian interface {
	// NewKey makes a private key that signs, and that cannot be exported. The algorithm is "ecdsa-p256", "ecdsa-p384",
	// "ecdsa-p521", "rsa-2048", "rsa-3072", "rsa-4096", "ed25519", "ml-dsa-44" or "ml-dsa-65"; one that it does not
	// make gives an error that wraps [errors.ErrUnsupported]. If the custodian has a key with this name, the error
	// wraps [io/fs.ErrExist]. After any other error the key may have been made or not.
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
	// store. One rotation of the root, without KeepKey, and of the key for JWT-SVIDs moves all keys here, or back.
	Keys Custodian

	// Former are custodians of keys that were made before, so that these sign until the rotation is over.
	Former []Custodian

	// Seal encrypts each record in the store, so that a copy of the store gives no key; nil means that records are in
	// the clear. [Open] writes the record at once if it is in the other form.
	Seal Sealer

	// Unseal decrypts records that another Sealer has sealed, to move out of it.
	Unseal Sealer
}

const (
	maxCalls     = 64               // at a time that sign with one key, or that do not sign
	signPatience = 15 * time.Second // for a signature, and for other calls
	makePatience = time.Minute      // for a new key: a large RSA key in hardware takes its time
	keepInterval = 10 * time.Second // between the works of keep
)

// custodyError is a failure of a custodian.
type custodyError struct{ error }

func (e *custodyError) Unwrap() error { return e.error }

// keeper is what an authority does with its [Custody]. It is an interface, so that the linker leaves all of it out of
// a program that has none. For that, no type that an Authority holds may name Custody.
type keeper interface {
	call(ctx context.Context, name string, patience time.Duration, f func(context.Context) error) error
	key(name string, public crypto.PublicKey) crypto.Signer
	makeKey(ctx context.Context, kind rotation.Kind, alg string) (rotation.Key, error)
	begin(ctx context.Context, d *rotation.Document, version string, now time.Time) (based, error)
	check(ctx context.Context, d *rotation.Document) error
	keep(ctx context.Context)
	orphans(ctx context.Context) ([]string, error)
	seal(ctx context.Context, d *rotation.Document, data map[string][]byte) error
	unseal(ctx context.Context, b []byte) (state []byte, anew bool, err error)
}

// custody calls the custodians of an authority.
type custody struct {
	*Authority
	Custody
	all   []Custodian // that may have a key
	found sync.Map    // private keys by name
	slots sync.Map    // channels with room for the calls that sign with one key, by its name, and for others, by ""
}

func (c Custody) keeper(a *Authority) keeper {
	all := slices.Concat([]Custodian{c.Keys}, c.Former)
	all = slices.DeleteFunc(all, func(from Custodian) bool { return from == nil })
	a.holds, a.seals = c.Keys != nil, c.Seal != nil
	return &custody{Authority: a, Custody: c, all: all}
}

// call runs f, which signs with the private key with this name, or with "" does something else, until ctx is done or
// patience has passed. An f that does not return then keeps its slot until it does, and may still write to its
// variables, which the caller must not use after an error.
func (c *custody) call(ctx context.Context, name string, patience time.Duration, f func(context.Context) error) error {
	of, _ := c.slots.LoadOrStore(name, make(chan struct{}, maxCalls))
	slots := of.(chan struct{})
	waiting, cancel := context.WithTimeoutCause(ctx, patience,
		fmt.Errorf("it has not answered for %v: %w", patience, context.DeadlineExceeded))
	defer cancel()
	done, noted := make(chan error, 1), name != ""
	run := func() { defer func() { <-slots }(); done <- f(waiting) }
	select {
	case slots <- struct{}{}:
		go run()
	default:
		noted = false // there may be too much to sign, which is no failure of the custodian
		select {
		case slots <- struct{}{}:
			go run()
		case <-waiting.Done():
		}
	}
	var err error
	select {
	case err = <-done:
	case <-waiting.Done():
		err = &custodyError{context.Cause(waiting)}
	}
	if failed, ok := errors.AsType[*custodyError](err); ok && ctx.Err() == nil && noted {
		c.failed.Store(name, failed) // for Health
	} else if err == nil {
		c.failed.Delete(name)
	}
	return err
}

// find returns the private key with this name. The error wraps [fs.ErrNotExist] only if each custodian is certain not
// to have it.
func (c *custody) find(ctx context.Context, name string, public crypto.PublicKey) (crypto.Signer, error) {
	if key, ok := c.found.Load(name); ok {
		return key.(crypto.Signer), nil
	}
	err := fmt.Errorf("no custodian that is named has it: %w", fs.ErrNotExist)
	for _, from := range c.all {
		asking, cancel := context.WithTimeout(ctx, signPatience/time.Duration(1+len(c.all))) // or the others have no time
		key, failed := from.Key(asking, name)
		cancel()
		switch {
		case failed == nil && !pki.PublicKeysEqual(key.Public(), public):
			err = fmt.Errorf("%w: the custodian has another key with this name", pki.ErrKeyMismatch)
		case failed == nil:
			c.found.Store(name, key)
			return key, nil
		case !errors.Is(failed, fs.ErrNotExist):
			err = failed
		}
	}
	return nil, err
}

// held is a private key at a custodian. It is looked for when it signs, so that a record can be read while the
// custodian does not answer.
type held struct {
	redacted
	*custody
	name   string
	public crypto.PublicKey
}

func (c *custody) key(name string, public crypto.PublicKey) crypto.Signer {
	return &held{redact.New("ca.PrivateKey(" + name + ")"), c, name, public}
}

// Public implements [crypto.Signer].
func (h *held) Public() crypto.PublicKey { return h.public }

// Sign implements [crypto.Signer]. It verifies the signature. The caller bounds its time with custody.call.
func (h *held) Sign(rand io.Reader, digest []byte, opts crypto.SignerOpts) (signature []byte, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), signPatience)
	defer cancel()
	key, err := h.find(ctx, h.name, h.public)
	if err == nil {
		signature, err = key.Sign(rand, digest, opts)
	}
	if err == nil && !verified(h.public, digest, signature, opts) {
		err = errors.New("its signature is wrong")
	}
	if err != nil {
		h.found.Delete(h.name)
		return nil, &custodyError{fmt.Errorf("sign with the private key %s: %w", h.name, err)}
	}
	return signature, nil
}

// verified reports whether a signature verifies.
func verified(key crypto.PublicKey, digest, signature []byte, opts crypto.SignerOpts) bool {
	switch key := key.(type) {
	case *ecdsa.PublicKey:
		return ecdsa.VerifyASN1(key, digest, signature)
	case *rsa.PublicKey:
		if pss, ok := opts.(*rsa.PSSOptions); ok {
			return rsa.VerifyPSS(key, opts.HashFunc(), digest, signature, pss) == nil
		}
		return rsa.VerifyPKCS1v15(key, opts.HashFunc(), digest, signature) == nil
	case ed25519.PublicKey:
		return ed25519.Verify(key, digest, signature)
	}
	return mldsa.Name(key) != "" && mldsa.Verify(key, digest, signature)
}

// probe signs something that means nothing.
func (c *custody) probe(ctx context.Context, k *rotation.Key) error {
	key, hash := k.Secret(), crypto.SHA256
	if kind := certpem.Kind(key.Public()); kind != "ecdsa" && kind != "rsa" {
		hash = 0
	}
	return c.call(ctx, k.Name, signPatience, func(context.Context) error {
		_, err := crypto.SignMessage(key, rand.Reader, []byte("svidkit: a probe of a private key"), hash)
		return err
	})
}

// Orphans returns the names of private keys of this CA that its custodians have and its record does not name, such as
// after an older copy of the store was restored. The authority never destroys them; an operator may.
func (a *Authority) Orphans(ctx context.Context) ([]string, error) {
	if a.custody == nil {
		return nil, nil
	}
	return a.custody.orphans(ctx)
}

// makeKey makes a root, or a key for tokens with the algorithm alg. The record names the private key before it is
// made. The caller does not hold the writing slot.
func (c *custody) makeKey(ctx context.Context, kind rotation.Kind, alg string) (rotation.Key, error) {
	var name string
	err := c.update(ctx, "", func(d *rotation.Document, now time.Time) error {
		name, _ = d.Stake(kind.String()+" "+c.keyAlgorithm(kind, alg), now, 2*makePatience+c.cfg.Backdate)
		return errRemark
	})
	if err != nil {
		return rotation.Key{}, err
	}
	return c.makeHeld(ctx, kind, alg, name)
}

// makeHeld makes a key whose private key is at the custodian with this name. An earlier attempt may have made that.
func (c *custody) makeHeld(ctx context.Context, kind rotation.Kind, alg, name string) (rotation.Key, error) {
	var key crypto.Signer
	var k rotation.Key
	err := c.call(ctx, "", makePatience, func(ctx context.Context) (err error) {
		key, err = c.Keys.NewKey(ctx, name, c.keyAlgorithm(kind, alg))
		if errors.Is(err, fs.ErrExist) {
			key, err = c.Keys.Key(ctx, name)
		}
		return err
	})
	if err == nil {
		c.found.Store(name, key)
		err = c.call(ctx, "", signPatience, func(context.Context) (err error) { // it signs itself
			k, err = c.keyOf(kind, alg, c.key(name, key.Public()))
			return err
		})
	}
	if err != nil {
		return rotation.Key{}, &custodyError{fmt.Errorf("ca: new %v of %s, with the private key %s: %w", kind,
			c.cfg.TrustDomain, name, err)}
	}
	k.Name = name
	return k, nil
}

// begin makes a new CA with private keys at the custodian. The first record has only their names. The next attempt, in
// this or another process, goes on with it: d is that record, of this version, or new.
func (c *custody) begin(ctx context.Context, d *rotation.Document, version string, now time.Time) (based, error) {
	base := based{Document: d.Clone(), version: version}
	names, write := map[rotation.Kind]string{}, false
	for _, kind := range c.kinds() {
		name, had := base.Stake(kind.String()+" "+c.keyAlgorithm(kind, c.alg(kind)), now, 0)
		names[kind], write = name, write || !had
	}
	var err error
	if write {
		if base, err = c.write(ctx, base.Document, version); err != nil {
			return based{}, err
		}
	}
	c.fresh = base.Clone()
	err = c.create(c.fresh, now, func(kind rotation.Kind, alg string) (rotation.Key, error) {
		return c.makeHeld(ctx, kind, alg, names[kind])
	})
	if err == nil {
		err = c.fresh.Account(base.Document, now)
	}
	return based{Document: c.fresh, version: base.version, dirty: true}, err
}

// check finds out whether the custodians have the private keys that sign. One that is certain not to have a key
// is the wrong one, unless it has others of this CA: then the record is older than the key's end.
func (c *custody) check(ctx context.Context, d *rotation.Document) error {
	for _, k := range slices.Concat(d.Keys[:]...) {
		if k.Name == "" {
			continue
		}
		err := c.probe(ctx, &k)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, pki.ErrKeyMismatch) {
			if all, failed := c.heldKeys(ctx, d); failed == nil && len(all) == 0 {
				return fmt.Errorf("ca: %v %s of %s: %w; name the custodian that has it, which may be a former one: %w",
					k.Kind(), k.ID, c.cfg.TrustDomain, ErrUnfit, err)
			}
			err = fmt.Errorf("%w; name the former custodian that has it; if none has it, the record may be an old copy: "+
				"restore a newer one, or revoke the key now, so that its successor signs", err)
		}
		if err != nil {
			c.cfg.Logger.LogAttrs(ctx, slog.LevelError, "a private key at its custodian does not sign",
				slog.String(k.Kind().IDName(), k.ID), slog.Any("err", err))
		}
		if errors.Is(err, context.DeadlineExceeded) {
			break // the start does not wait for each key
		}
	}
	return nil
}

// heldKeys returns the names of the CA's private keys that the custodians have.
func (c *custody) heldKeys(ctx context.Context, d *rotation.Document) (all []string, _ error) {
	for _, from := range c.all {
		var names []string
		failed := c.call(ctx, "", signPatience, func(ctx context.Context) (err error) {
			names, err = from.Keys(ctx, rotation.NamePrefix(d.Authority))
			return err
		})
		if failed != nil {
			return nil, failed
		}
		all = append(all, names...)
	}
	return all, nil
}

// orphans implements [Authority.Orphans].
func (c *custody) orphans(ctx context.Context) ([]string, error) {
	// The record names a key before it is made and until it is destroyed, so that one that is neither in the record of
	// before the list nor in that of after it is in none.
	before := c.current().Document
	all, err := c.heldKeys(ctx, before)
	if err == nil && len(all) > 0 {
		err = c.update(ctx, "", nil)
	}
	if err != nil {
		return nil, c.opError("list the private keys of", err)
	}
	after := c.current().Document
	return slices.DeleteFunc(all, func(name string) bool { return before.Names(name) || after.Names(name) }), nil
}

// keep looks after the custodians until ctx is done. A private key is destroyed only after the record that it is
// not needed was written, and when replicas whose clocks are slow do not sign with it any more.
func (c *custody) keep(ctx context.Context) {
	for n := 0; renew.Sleep(ctx, keepInterval) == nil; n++ {
		s := c.current()
		for _, kind := range rotation.Kinds {
			if k := s.In(kind, rotation.Active); k != nil && k.Name != "" && (n%6 == 0 || c.keyError(s, kind) != nil) {
				_ = c.probe(ctx, k) // for Health
			}
		}
		for _, l := range s.Loose {
			if age := time.Since(l.Since); n%6 == 0 && age > c.cfg.Backdate && (l.Use == "" || age > time.Hour) && len(c.all) > 0 {
				c.discard(ctx, l)
			}
		}
		if n%360 != 0 {
			continue
		}
		if orphans, _ := c.orphans(ctx); len(orphans) > 0 {
			c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "the custodians have private keys of this CA that its record does "+
				"not name", slog.Any("names", orphans))
		}
	}
}

// discard takes a private key that no key has a step further.
func (c *custody) discard(ctx context.Context, l rotation.Loose) {
	err := c.update(ctx, "", nil) // an older record may have been restored, which needs the key
	if err == nil && l.Use == "" && slices.Contains(c.current().Loose, l) {
		for _, from := range c.all {
			err = cmp.Or(err, c.call(ctx, "", signPatience, func(ctx context.Context) error {
				return from.Destroy(ctx, l.Name)
			}))
		}
	}
	if err == nil {
		err = c.update(ctx, "", func(d *rotation.Document, now time.Time) error {
			if !d.Discard(l, now) {
				return errNoChange
			}
			return errRemark
		})
	}
	level, what := slog.LevelInfo, "a private key at a custodian was discarded"
	if err != nil {
		level, what = slog.LevelWarn, "a private key at a custodian could not be discarded"
	}
	c.cfg.Logger.LogAttrs(ctx, level, what, slog.String("name", l.Name), slog.Any("err", err))
}
