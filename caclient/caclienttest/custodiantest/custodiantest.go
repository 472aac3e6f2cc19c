// Package custodiantest has the suites that show whether a [ca.Custodian] and a [ca.Sealer] do what a CA needs.
package custodiantest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// Options say what [Run] can expect of a custodian. The zero value is one that can do everything.
type Options struct {
	// Algorithms are those that it supports, by the names of [ca.Custodian]; nil means all. It has to refuse others.
	Algorithms []string

	// NoPSS says that it refuses *rsa.PSSOptions, with an error that wraps errors.ErrUnsupported.
	NoPSS bool
}

var algorithms = []string{"ecdsa-p256", "ecdsa-p384", "ecdsa-p521", "ed25519", "rsa-2048", "rsa-3072", "rsa-4096"}

// Run checks that a custodian does what [ca.Custodian] says: each algorithm with each kind of signature, certificates
// and JWT-SVIDs, names that are taken, missing, listed and destroyed beside the keys of others, many calls at a time,
// the end of a context, and that keys are still there for another instance. It does not check how well the custodian
// protects a key, only that its signers are not private keys of package crypto.
//
// Each call of open returns an instance with the same keys, and closes it with t.Cleanup. There is one at a time. Run
// destroys the keys that it makes, whose names begin with "svidkit-" and 32 random digits, and no others.
func Run(t *testing.T, open func(t testing.TB) ca.Custodian, o Options) {
	if o.Algorithms == nil {
		o.Algorithms = algorithms
	}
	s := &suite{open: open, o: o, usual: o.Algorithms[0]}
	for _, algorithm := range algorithms {
		if slices.Contains(o.Algorithms, algorithm) {
			t.Run(algorithm, func(t *testing.T) { s.signs(t, algorithm) })
		}
	}
	t.Run("Unsupported", s.unsupported)
	t.Run("Names", s.names)
	t.Run("Another", s.another)
	t.Run("AtOnce", s.atOnce)
	t.Run("Context", s.context)
}

type suite struct {
	open  func(t testing.TB) ca.Custodian
	o     Options
	usual string // the algorithm of tests that need only one
}

// randomHex returns n random bytes in hexadecimal.
func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// newPrefix returns what the names of the keys of one CA begin with.
func newPrefix() string { return "svidkit-" + randomHex(16) + "-" }

// custody is an instance in a test.
type custody struct {
	ca.Custodian
	t *testing.T
}

func (s *suite) start(t *testing.T) custody {
	t.Helper()
	return custody{s.open(t), t}
}

// make makes a key that goes with the test.
func (c custody) make(name, algorithm string) crypto.Signer {
	c.t.Helper()
	c.t.Cleanup(func() {
		if err := c.Destroy(context.Background(), name); err != nil {
			c.t.Errorf("Destroy(%s) at the end: %v", name, err)
		}
	})
	return must.Get(c.NewKey(c.t.Context(), name, algorithm))(c.t)
}

// missing requires that there is no key.
func (c custody) missing(name string) {
	c.t.Helper()
	key, err := c.Key(c.t.Context(), name)
	if !errors.Is(err, fs.ErrNotExist) || key != nil {
		c.t.Fatalf("Key(%s) = %T, %v; want an error that wraps fs.ErrNotExist and no key", name, key, err)
	}
}

// lists requires that these are the names with a prefix.
func (c custody) lists(prefix string, want ...string) {
	c.t.Helper()
	got := slices.Sorted(slices.Values(must.Get(c.Keys(c.t.Context(), prefix))(c.t)))
	slices.Sort(want)
	if !slices.Equal(got, want) {
		c.t.Fatalf("Keys(%q) = %q; want %q", prefix, got, want)
	}
}

// is requires that a signer is a key with the public key of want, and signs.
func (c custody) is(got crypto.Signer, want crypto.PublicKey) {
	c.t.Helper()
	if !pki.PublicKeysEqual(got.Public(), want) {
		c.t.Fatal("it is another key")
	}
	if err := try(got, crypto.SHA256); err != nil {
		c.t.Fatal(err)
	}
}

// try has a key sign something random, and verifies the signature. An Ed25519 key ignores opts.
func try(key crypto.Signer, opts crypto.SignerOpts) error {
	message := make([]byte, 100)
	_, _ = rand.Read(message)
	pub := key.Public()
	if _, ok := pub.(ed25519.PublicKey); ok {
		opts = crypto.Hash(0)
	}
	digest := message
	if hash := opts.HashFunc(); hash != 0 {
		h := hash.New()
		h.Write(message)
		digest = h.Sum(nil)
	}
	began := time.Now()
	signature, err := key.Sign(rand.Reader, digest, opts)
	if took := time.Since(began); took > 12*time.Second {
		return fmt.Errorf("the signature took %v; the limit is ten seconds", took)
	}
	if err != nil {
		return fmt.Errorf("sign with %T, %v: %w", opts, opts.HashFunc(), err)
	}
	var ok bool
	switch pub := pub.(type) {
	case *ecdsa.PublicKey:
		ok = ecdsa.VerifyASN1(pub, digest, signature)
	case ed25519.PublicKey:
		ok = ed25519.Verify(pub, message, signature)
	case *rsa.PublicKey:
		if pss, isPSS := opts.(*rsa.PSSOptions); isPSS {
			ok = rsa.VerifyPSS(pub, pss.Hash, digest, signature, pss) == nil
		} else {
			ok = rsa.VerifyPKCS1v15(pub, opts.HashFunc(), digest, signature) == nil
		}
	default:
		return fmt.Errorf("its public key is a %T", pub)
	}
	if !ok {
		return fmt.Errorf("the signature with %T, %v is not valid", opts, opts.HashFunc())
	}
	return nil
}

// algorithmOf returns the name of a public key's algorithm.
func algorithmOf(pub crypto.PublicKey) string {
	switch pub := pub.(type) {
	case *ecdsa.PublicKey:
		return fmt.Sprint("ecdsa-p", pub.Curve.Params().BitSize)
	case ed25519.PublicKey:
		return "ed25519"
	case *rsa.PublicKey:
		return fmt.Sprint("rsa-", pub.N.BitLen())
	}
	return fmt.Sprintf("%T", pub)
}

// signs has a key of an algorithm sign all that a CA signs.
func (s *suite) signs(t *testing.T, algorithm string) {
	c, name := s.start(t), newPrefix()+randomHex(8)
	key := c.make(name, algorithm)
	if got := algorithmOf(key.Public()); got != algorithm {
		t.Fatalf("the new key is one of %s", got)
	}
	found := must.Get(c.Key(t.Context(), name))(t)
	c.is(found, key.Public())
	for _, k := range []crypto.Signer{key, found} {
		if _, err := x509.MarshalPKCS8PrivateKey(k); err == nil {
			t.Errorf("%T is the private key itself", k)
		}
		for _, hash := range []crypto.Hash{crypto.SHA256, crypto.SHA384, crypto.SHA512} {
			for range 3 { // a number that begins with a zero is shorter in some encodings
				if err := try(k, hash); err != nil {
					t.Error(err)
				}
			}
			if _, ok := k.Public().(*rsa.PublicKey); ok {
				s.pss(t, k, hash)
			}
		}
		// What does not fit must be an error, or a signature that is wrong, but no panic.
		_, _ = k.Sign(rand.Reader, nil, crypto.SHA256)
		_, _ = k.Sign(rand.Reader, []byte("short"), crypto.SHA512)
		_, _ = k.Sign(rand.Reader, make([]byte, 16), crypto.MD5)
		_, _ = k.Sign(rand.Reader, make([]byte, 32), &rsa.PSSOptions{SaltLength: 1000, Hash: crypto.SHA256})
	}
	s.certificate(t, found)
	s.token(t, found)
}

// pss checks the salts that CAs use: as long as the hash, in X.509 and JOSE, said in either way.
func (s *suite) pss(t *testing.T, key crypto.Signer, hash crypto.Hash) {
	t.Helper()
	for _, salt := range []int{rsa.PSSSaltLengthEqualsHash, hash.Size()} {
		err := try(key, &rsa.PSSOptions{SaltLength: salt, Hash: hash})
		if s.o.NoPSS && !errors.Is(err, errors.ErrUnsupported) || !s.o.NoPSS && err != nil {
			t.Errorf("salt length %d: %v", salt, err)
		}
	}
	err := try(key, &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthAuto, Hash: hash})
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("the longest salt: %v", err)
	}
}

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	web    = spiffe.MustParseID("spiffe://example.org/web")
)

// certificate has a key sign its own root and a leaf.
func (s *suite) certificate(t *testing.T, key crypto.Signer) {
	t.Helper()
	now := time.Now()
	o := pki.CertificateOptions{
		SANs: []pki.SAN{pki.IDSAN(domain.ID())}, NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour),
	}
	root := must.Get(pki.NewRoot(key, o))(t, "make a root")
	leaf := must.Get(pki.NewKey("ecdsa-p256"))(t)
	o.PublicKey, o.SANs = leaf.Public(), []pki.SAN{pki.IDSAN(web)}
	cert := must.Get(root.Issue(o))(t, "issue a leaf")
	roots := x509.NewCertPool()
	roots.AddCert(root.Certificate())
	_ = must.Get(cert.Verify(x509.VerifyOptions{Roots: roots}))(t, "verify the leaf")
}

// token has a key sign JWT-SVIDs, in each algorithm that it has.
func (s *suite) token(t *testing.T, key crypto.Signer) {
	t.Helper()
	algorithms := []string{""}
	switch key.Public().(type) {
	case ed25519.PublicKey:
		return // JWT-SVIDs have no such algorithm
	case *rsa.PublicKey:
		algorithms = []string{"RS256", "RS384", "RS512"}
		if !s.o.NoPSS {
			algorithms = append(algorithms, "PS256", "PS384", "PS512")
		}
	}
	keys := spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{"k": key.Public()}}
	bundle := must.Get(spiffe.NewBundle(domain, keys))(t)
	v := must.Get(jwtsvid.NewValidator(bundle, []string{"db"}, nil))(t)
	for _, algorithm := range algorithms {
		issuer := must.Get(jwtsvid.NewIssuer(domain, "k", key, &jwtsvid.IssuerOptions{Algorithm: algorithm}))(t)
		token := must.Get(issuer.IssueJWTSVID(t.Context(), web, []string{"db"}))(t, algorithm)
		_ = must.Get(v.Validate(token))(t, algorithm)
	}
}

// unsupported asks for algorithms that there are not.
func (s *suite) unsupported(t *testing.T) {
	c, prefix := s.start(t), newPrefix()
	unknown := []string{"", "ECDSA-P256", "ecdsa-p224", "rsa-1024", "dsa", "x25519", "aes256-gcm96", "ml-dsa-44", "ml-dsa-65"}
	for i, algorithm := range append(unknown, algorithms...) {
		if slices.Contains(s.o.Algorithms, algorithm) {
			continue
		}
		name := prefix + fmt.Sprintf("%016x", i)
		key, err := c.NewKey(t.Context(), name, algorithm)
		if !errors.Is(err, errors.ErrUnsupported) || key != nil {
			t.Errorf("NewKey of %q = %T, %v; want an error that wraps errors.ErrUnsupported", algorithm, key, err)
		}
		c.missing(name)
	}
	c.lists(prefix)
}

// names has keys of two CAs taken, found, listed and destroyed.
func (s *suite) names(t *testing.T) {
	c, ctx, ours, theirs := s.start(t), t.Context(), newPrefix(), newPrefix()
	name, other := ours+randomHex(8), theirs+randomHex(8)
	beside := name + strings.Repeat("0", 80-len(name)) // the longest
	for _, n := range []string{name, other} {
		c.missing(n)
		if err := c.Destroy(ctx, n); err != nil {
			t.Fatalf("Destroy(%s), which there is not: %v; want nil", n, err)
		}
	}
	c.lists(ours)
	first, kept := c.make(name, s.usual).Public(), c.make(other, s.usual).Public()
	c.lists(ours, name)
	second := c.make(beside, s.usual).Public()
	if pki.PublicKeysEqual(first, second) || pki.PublicKeysEqual(first, kept) {
		t.Fatal("two names have the same key")
	}
	for _, algorithm := range s.o.Algorithms {
		if key, err := c.NewKey(ctx, name, algorithm); !errors.Is(err, fs.ErrExist) || key != nil {
			t.Errorf("NewKey of a name that is taken, %s = %T, %v; want an error that wraps fs.ErrExist", algorithm, key, err)
		}
	}
	c.is(must.Get(c.Key(ctx, name))(t), first)
	c.lists(ours, name, beside)
	c.lists(name, name, beside)
	c.lists(beside, beside)
	c.lists(name + "x")
	c.lists(name[1:]) // what no name begins with
	c.lists(theirs, other)
	c.missing(ours[:len(ours)-1]) // what other names begin with
	c.missing(name[:len(name)-1])
	c.missing(name + "0")
	if all := must.Get(c.Keys(ctx, "svidkit-"))(t); !slices.Contains(all, name) || !slices.Contains(all, other) {
		t.Errorf("Keys of all CAs = %q", all)
	}
	for range 2 {
		if err := c.Destroy(ctx, name); err != nil {
			t.Fatalf("Destroy: %v", err)
		}
		c.missing(name)
		c.lists(ours, beside)
	}
	c.is(must.Get(c.Key(ctx, beside))(t), second)
	c.is(must.Get(c.Key(ctx, other))(t), kept)
	if again := c.make(name, s.usual); pki.PublicKeysEqual(again.Public(), first) {
		t.Error("the name of a key that was destroyed has it again")
	}
}

// another has a second instance use the key of the first.
func (s *suite) another(t *testing.T) {
	prefix := newPrefix()
	name := prefix + randomHex(8)
	var made crypto.PublicKey
	t.Run("first", func(t *testing.T) { made = must.Get(s.open(t).NewKey(t.Context(), name, s.usual))(t).Public() })
	if made == nil {
		return
	}
	t.Run("second", func(t *testing.T) {
		c := s.start(t)
		c.lists(prefix, name)
		c.is(must.Get(c.Key(t.Context(), name))(t), made)
		if _, err := c.NewKey(t.Context(), name, s.usual); !errors.Is(err, fs.ErrExist) {
			t.Errorf("NewKey of a name that is taken: %v", err)
		}
	})
	t.Run("third", func(t *testing.T) {
		c := s.start(t)
		if err := c.Destroy(t.Context(), name); err != nil {
			t.Error(err)
		}
		c.missing(name)
	})
	t.Run("fourth", func(t *testing.T) { s.start(t).missing(name) })
}

// atOnce makes keys, has 50 callers sign, and looks for keys, at the same time.
func (s *suite) atOnce(t *testing.T) {
	c, prefix := s.start(t), newPrefix()
	names, keys := make([]string, 5), make([]crypto.Signer, 5)
	var wg sync.WaitGroup
	for i := range names {
		names[i] = prefix + fmt.Sprintf("%016x", i)
		t.Cleanup(func() { _ = c.Destroy(context.Background(), names[i]) })
		wg.Go(func() {
			var err error
			if keys[i], err = c.NewKey(t.Context(), names[i], s.usual); err != nil {
				t.Errorf("make a key while others are made: %v", err)
			}
		})
	}
	if wg.Wait(); t.Failed() {
		return
	}
	for i := range 50 {
		wg.Go(func() {
			at := i % len(keys)
			for range 4 {
				if err := try(keys[at], crypto.SHA256); err != nil {
					t.Errorf("sign while others sign: %v", err)
					return
				}
			}
			if i%5 == 0 {
				key, err := c.Key(t.Context(), names[at])
				if err != nil || !pki.PublicKeysEqual(key.Public(), keys[at].Public()) {
					t.Errorf("find a key while others sign: %v", err)
				}
			}
		})
	}
	wg.Wait()
	c.lists(prefix, names...)
	same := prefix + randomHex(8)
	names = append(names, same)
	t.Cleanup(func() { _ = c.Destroy(context.Background(), same) })
	for i := range keys { // of one name, while it is taken
		wg.Go(func() {
			var err error
			if keys[i], err = c.NewKey(t.Context(), same, s.usual); err != nil && !errors.Is(err, fs.ErrExist) {
				t.Errorf("make a key that others make: %v", err)
			}
		})
	}
	wg.Wait()
	one := must.Get(c.Key(t.Context(), same))(t).Public()
	for _, key := range keys {
		if key != nil && !pki.PublicKeysEqual(key.Public(), one) {
			t.Error("of callers who make a key of one name at the same time, two have different keys")
		}
	}
	for _, name := range slices.Concat(names, names) {
		wg.Go(func() {
			if err := c.Destroy(t.Context(), name); err != nil {
				t.Errorf("destroy a key while this one and others are destroyed: %v", err)
			}
		})
	}
	wg.Wait()
	c.lists(prefix)
}

// context calls everything when it is too late.
func (s *suite) context(t *testing.T) {
	c, prefix := s.start(t), newPrefix()
	name, late := prefix+randomHex(8), prefix+randomHex(8)
	made := c.make(name, s.usual).Public()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	_, keyErr := c.Key(ctx, name)
	_, lateErr := c.NewKey(ctx, late, s.usual)
	_, listErr := c.Keys(ctx, prefix)
	for _, err := range []error{keyErr, lateErr, listErr, c.Destroy(ctx, late)} {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist) || errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("with a context that is done: %v; it says what it does not know", err)
		}
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("with a context that is done, four calls took %v", took)
	}
	if err := c.Destroy(t.Context(), late); err != nil {
		t.Error(err)
	}
	c.is(must.Get(c.Key(t.Context(), name))(t), made)
	c.lists(prefix, name)
}

// Sealer checks that a sealer does what [ca.Sealer] says. Each call of open returns an instance with the same key.
// other, which may be nil, returns a sealer with another key, and missing, which may be nil, one whose key does not
// exist.
func Sealer(t *testing.T, open, other, missing func(t testing.TB) ca.Sealer) {
	secret := []byte(randomHex(16)) // 32 bytes
	for _, size := range []int{0, 1, 100, 4096} {
		t.Run(fmt.Sprint("associated=", size), func(t *testing.T) { sealed(t, open(t), open, secret, make([]byte, size)) })
	}
	associated := []byte(strings.Repeat("the record of a CA ", 216))[:4095]
	good := must.Get(open(t).Seal(t.Context(), secret, associated))(t)
	t.Run("Altered", func(t *testing.T) { altered(t, open(t), good, secret, associated) })
	t.Run("AtOnce", func(t *testing.T) {
		s := open(t)
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() { sealed(t, s, func(testing.TB) ca.Sealer { return s }, secret, associated) })
		}
		wg.Wait()
	})
	t.Run("Context", func(t *testing.T) {
		s := open(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, sealErr := s.Seal(ctx, secret, associated)
		_, err := s.Unseal(ctx, good, associated)
		for _, err := range []error{sealErr, err} {
			if errors.Is(err, fs.ErrInvalid) || errors.Is(err, fs.ErrNotExist) {
				t.Errorf("with a context that is done: %v; it says what it does not know", err)
			}
		}
	})
	for name, c := range map[string]struct {
		open func(t testing.TB) ca.Sealer
		want error
	}{"Other": {other, fs.ErrInvalid}, "Missing": {missing, fs.ErrNotExist}} {
		if c.open != nil {
			t.Run(name, func(t *testing.T) {
				got, err := c.open(t).Unseal(t.Context(), good, associated)
				if !errors.Is(err, c.want) || got != nil || strings.Contains(err.Error(), string(secret)) {
					t.Errorf("Unseal = %d bytes, %v; want an error that wraps %v", len(got), err, c.want)
				}
			})
		}
	}
}

// sealed seals a secret, and has another instance unseal it.
func sealed(t *testing.T, s ca.Sealer, open func(testing.TB) ca.Sealer, secret, associated []byte) {
	t.Helper()
	box, err := s.Seal(t.Context(), secret, associated)
	if err != nil {
		t.Errorf("Seal: %v", err)
		return
	}
	shows := func(what []byte) bool { return strings.Contains(string(box), string(what)) }
	if shows(secret) || len(associated) > 10 && shows(associated) {
		t.Error("what is sealed has the secret, or what belongs to it, in the clear")
	}
	got, err := open(t).Unseal(t.Context(), box, associated)
	if err != nil || string(got) != string(secret) {
		t.Errorf("Unseal = %d bytes, %v; want the secret", len(got), err)
	}
}

// altered unseals what was not sealed so.
func altered(t *testing.T, s ca.Sealer, good, secret, associated []byte) {
	var unsure int // errors that may pass, for all that the sealer knows
	for i := range good {
		for _, flip := range []byte{1, 0x80} {
			box := slices.Clone(good)
			box[i] ^= flip
			got, err := s.Unseal(t.Context(), box, associated)
			if err == nil || got != nil || strings.Contains(err.Error(), string(secret)) {
				t.Errorf("byte %d of %d is altered: %d bytes, %v; want an error", i, len(good), len(got), err)
			} else if !errors.Is(err, fs.ErrInvalid) {
				unsure++
			}
		}
	}
	if unsure > 16 { // such as the version of a key, which the sealer may not know yet
		t.Errorf("of %d alterations, %d give an error that does not wrap fs.ErrInvalid", 2*len(good), unsure)
	}
	again := must.Get(s.Seal(t.Context(), secret, associated))(t)
	for name, c := range map[string]struct{ box, associated []byte }{
		"nothing":                 {nil, associated},
		"no box":                  {[]byte("x"), associated},
		"the secret":              {secret, associated},
		"cut":                     {good[:len(good)-1], associated},
		"cut to half":             {good[:len(good)/2], associated},
		"longer":                  {append(slices.Clone(good), good[len(good)-1]), associated},
		"with a line":             {append(slices.Clone(good), '\n'), associated},
		"twice":                   {append(slices.Clone(good), again...), associated},
		"nothing that belongs":    {good, nil},
		"less that belongs":       {good, associated[1:]},
		"more that belongs":       {good, append(slices.Clone(associated), 0)},
		"something other belongs": {good, append(slices.Clone(associated[:4094]), 0)},
	} {
		got, err := s.Unseal(t.Context(), c.box, c.associated)
		if !errors.Is(err, fs.ErrInvalid) || got != nil {
			t.Errorf("%s: Unseal = %d bytes, %v; want an error that wraps fs.ErrInvalid", name, len(got), err)
		}
	}
	if got := must.Get(s.Unseal(t.Context(), good, associated))(t); string(got) != string(secret) {
		t.Error("Unseal does not return the secret")
	}
}
