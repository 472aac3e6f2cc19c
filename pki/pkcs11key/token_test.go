//go:build cgo

package pkcs11key

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/pkcs11"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func TestCustodian(t *testing.T) {
	t.Parallel()
	o := options(t)
	custodiantest.Run(t, func(t testing.TB) ca.Custodian { return openAs(t, o) }, custodiantest.Options{})
}

func TestSealer(t *testing.T) {
	t.Parallel()
	labelled := func(label string) func(t testing.TB) ca.Sealer {
		o := options(t)
		o.SealKey = label
		return func(t testing.TB) ca.Sealer { return openAs(t, o) }
	}
	_ = must.Get(labelled("second")(t).Seal(t.Context(), make([]byte, 32), nil))(t)
	custodiantest.Sealer(t, labelled("first"), labelled("second"), labelled("none"))
	_, err := labelled("")(t).Seal(t.Context(), make([]byte, 32), nil)
	must.Fail(t, err, "no label")
}

// Of two keys that seal, as two processes may make them, each unseals what it sealed.
func TestTwoSealKeys(t *testing.T) {
	t.Parallel()
	o := options(t)
	o.SealKey = newName()
	k, r := openAs(t, o), newRaw(t, o)
	boxes := [][]byte{must.Get(k.Seal(t.Context(), []byte("secret"), nil))(t)}
	first := r.objects(t, pkcs11.CKA_LABEL, o.SealKey)
	require.Len(t, first, 1)
	for range 2 {
		_ = must.Get(r.GenerateKey(r.h, mechanism(pkcs11.CKM_AES_KEY_GEN, nil), append(hidden(pkcs11.CKO_SECRET_KEY,
			pkcs11.CKK_AES, o.SealKey), attributes(pkcs11.CKA_VALUE_LEN, 32)...)))(t)
	}
	for range 20 {
		boxes = append(boxes, must.Get(k.Seal(t.Context(), []byte("secret"), nil))(t))
	}
	for _, box := range boxes {
		assert.Equal(t, "secret", string(must.Get(k.Unseal(t.Context(), box, nil))(t)))
	}
	require.NoError(t, r.DestroyObject(r.h, first[0]))
	must.Fail(t, must.Err(k.Unseal(t.Context(), boxes[0], nil)), fs.ErrInvalid)
}

// What is wrong at the start is an error that says so, without the PIN, and not that a key is gone.
func TestOpen(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"relative":    {func(o *Options) { o.Module = "softhsm.so" }, "absolute path"},
		"no label":    {func(o *Options) { o.Token = "" }, "label"},
		"no PIN file": {func(o *Options) { o.PINFile = "" }, "PIN"},
		"no module":   {func(o *Options) { o.Module = "/nowhere/p11.so" }, "/nowhere/p11.so"},
		"no library":  {func(o *Options) { o.Module = o.PINFile }, "not a PKCS#11 library"},
		"no token":    {func(o *Options) { o.Token = "nowhere" }, `the tokens ["`},
		"two tokens":  {func(o *Options) { o.Token = "twin" }, "2 tokens have"},
		"no file":     {func(o *Options) { o.PINFile += "s" }, "cannot read the PIN"},
		"empty":       {func(o *Options) { setPIN(t, *o, " ") }, "there is no PIN"},
		"long":        {func(o *Options) { setPIN(t, *o, strings.Repeat("1", 2000)) }, "1024 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t)
			c.change(&o)
			_, err := Open(t.Context(), o)
			must.Fail(t, err, c.want)
			assert.NotErrorIs(t, err, fs.ErrNotExist)
			assert.NotContains(t, err.Error(), userPIN)
		})
	}
	o := options(t)
	k := must.Get(Open(t.Context(), o))(t)
	name := newName()
	key := must.Get(k.NewKey(t.Context(), name, "ecdsa-p256"))(t)
	for _, format := range []string{"%v", "%+v", "%#v", "%d"} {
		assert.Regexp(t, `pkcs11key\.Token\("TestOpen"\).*pkcs11key\.Key\("svidkit-`, fmt.Sprintf(format+" "+format, k, key))
	}
	require.NoError(t, k.Destroy(t.Context(), name))
	require.NoError(t, k.Close())
	require.NoError(t, k.Close())
	must.Fail(t, must.Err(k.Keys(t.Context(), "")), os.ErrClosed)
	must.Fail(t, must.Err(signed(key)), os.ErrClosed)
}

func newName() string {
	b := make([]byte, 24)
	_, _ = rand.Read(b)
	return fmt.Sprintf("svidkit-%x-%x", b[:16], b[16:])
}

// signed signs and verifies.
func signed(key crypto.Signer) ([]byte, error) {
	digest := sha256.Sum256(fmt.Append(nil, rand.Text()))
	signature, err := key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err == nil && !ecdsa.VerifyASN1(key.Public().(*ecdsa.PublicKey), digest[:], signature) {
		err = errors.New("the signature is wrong")
	}
	return signature, err
}

// A wrong PIN is tried once, by however many callers, until the file has another. The last try is for the operator.
func TestWrongPIN(t *testing.T) {
	t.Parallel()
	o := options(t)
	f := newFaulty(t)
	o.Module = f.path
	setPIN(t, o, "not-the-PIN")
	_, err := Open(t.Context(), o)
	must.Fail(t, err, pkcs11.Error(pkcs11.CKR_PIN_INCORRECT), o.PINFile)
	assert.NotContains(t, err.Error(), "not-the-PIN")
	require.Equal(t, 1, f.calls(login))

	setPIN(t, o, userPIN)
	f.set(fmt.Sprintf("%d flags %x 0", getTokenInfo, pkcs11.CKF_USER_PIN_FINAL_TRY))
	_, err = Open(t.Context(), o)
	must.Fail(t, err, "locks at the next wrong PIN")
	require.Equal(t, 1, f.calls(login))
	f.set()

	k, r := openAs(t, o), newRaw(t, o)
	name := newName()
	key := must.Get(k.NewKey(t.Context(), name, "ecdsa-p256"))(t)
	require.Equal(t, 2, f.calls(login))
	for i, pin := range []string{"another-PIN", "a-third"} {
		setPIN(t, o, pin)
		require.NoError(t, r.CloseAllSessions(r.slot))
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() { assert.Error(t, must.Err(signed(key))) })
		}
		wg.Wait()
		err = must.Err(signed(key))
		must.Fail(t, err, "has refused the PIN in "+o.PINFile)
		assert.NotContains(t, err.Error(), pin)
		require.Equal(t, 3+i, f.calls(login))
	}
	setPIN(t, o, userPIN)
	_ = must.Get(signed(key))(t)
	require.Equal(t, 5, f.calls(login))
	require.NoError(t, k.Destroy(t.Context(), name))
}

// Another part of the process ends the login or the sessions, at every step: nothing fails, and nothing private is
// taken for gone.
func TestLoginEnds(t *testing.T) {
	t.Parallel()
	o := options(t)
	o.SealKey = "seals"
	k, ctx := openAs(t, o), t.Context()
	for name, end := range map[string]func(raw) error{
		"logout":   func(r raw) error { return r.Logout(r.h) },
		"sessions": func(r raw) error { return r.CloseAllSessions(r.slot) },
	} {
		t.Run(name, func(t *testing.T) {
			name, box := newName(), must.Get(k.Seal(ctx, []byte("secret"), nil))(t)
			key := must.Get(k.NewKey(ctx, name, "ecdsa-p256"))(t)
			for _, step := range []struct {
				what string
				try  func() error
			}{
				{"sign", func() error { return must.Err(signed(key)) }},
				{"find", func() error { return must.Err(k.Key(ctx, name)) }},
				{"taken", func() error {
					if err := must.Err(k.NewKey(ctx, name, "ecdsa-p256")); !errors.Is(err, fs.ErrExist) {
						return fmt.Errorf("not taken: %w", err)
					}
					return nil
				}},
				{"list", func() error {
					if names, err := k.Keys(ctx, name); err != nil || !slices.Equal(names, []string{name}) {
						return fmt.Errorf("%q, %w", names, err)
					}
					return nil
				}},
				{"seal", func() error { return must.Err(k.Seal(ctx, []byte("secret"), nil)) }},
				{"unseal", func() error { return must.Err(k.Unseal(ctx, box, nil)) }},
				{"destroy", func() error { return k.Destroy(ctx, name) }},
				{"gone", func() error {
					if names, err := k.Keys(ctx, name); err != nil || len(names) > 0 {
						return fmt.Errorf("%q, %w", names, err)
					}
					return nil
				}},
			} {
				require.NoError(t, end(newRaw(t, o)))
				require.NoError(t, step.try(), step.what)
			}
			r := newRaw(t, o)
			assert.Len(t, r.objects(t, pkcs11.CKA_LABEL, "seals"), 1)
		})
	}
}

// Each answer of a token that is restarted or removed is one more try in a new session; if it lasts, it is an error,
// and no loss; afterwards all is well.
func TestLost(t *testing.T) {
	t.Parallel()
	o := options(t)
	f := newFaulty(t)
	o.Module, o.SealKey = f.path, "seals"
	k, ctx, name := openAs(t, o), t.Context(), newName()
	key := must.Get(k.NewKey(ctx, name, "ecdsa-p256"))(t)
	box := must.Get(k.Seal(ctx, []byte("secret"), nil))(t)
	tries := map[string]func() error{
		"sign":   func() error { return must.Err(signed(key)) },
		"find":   func() error { return must.Err(k.Key(ctx, name)) },
		"list":   func() error { return must.Err(k.Keys(ctx, name)) },
		"unseal": func() error { return must.Err(k.Unseal(ctx, box, nil)) },
		"new": func() error {
			other := newName()
			defer k.Destroy(ctx, other)
			return must.Err(k.NewKey(ctx, other, "ecdsa-p256"))
		},
	}
	steps := map[string][]int{
		"sign": {signInit, sign, findInit, getSessionInfo, openSession, getTokenInfo}, "find": {find, getAttribute},
		"list": {findInit}, "unseal": {decryptInit, decrypt}, "new": {find},
	}
	for _, code := range lost {
		for what, functions := range steps {
			for _, function := range functions {
				rule := fmt.Sprintf("%d fail %x ", function, uint(code))
				first := "" // makes what opens a session happen
				if what == "sign" && function != sign && function != signInit {
					first = fmt.Sprintf("%d fail %x 1", sign, uint(code))
				}
				where := fmt.Sprint(what, " of ", rule, first)
				f.set(first, rule+"0")
				err := tries[what]()
				require.ErrorIs(t, err, code, where)
				assert.NotErrorIs(t, err, fs.ErrNotExist, where)
				assert.NotErrorIs(t, err, fs.ErrInvalid, where)
				f.set()
				require.NoError(t, tries[what](), where)
				if first == "" {
					f.set(rule + "1")
					require.NoError(t, tries[what](), where)
				}
			}
		}
	}
}

// An error that modules give for altered boxes, too, is one only if the key works otherwise, twice.
func TestUnsealDoubt(t *testing.T) {
	t.Parallel()
	o := options(t)
	f := newFaulty(t)
	o.Module, o.SealKey = f.path, "doubt"
	k := openAs(t, o)
	box := must.Get(k.Seal(t.Context(), []byte("secret"), nil))(t)
	for _, c := range []struct {
		rule string
		want error
	}{
		{fmt.Sprintf("%d late 5 1", decrypt), nil},
		{fmt.Sprintf("%d fail 5 0", decrypt), pkcs11.Error(pkcs11.CKR_GENERAL_ERROR)},
		{fmt.Sprintf("%d fail 5 0", decryptInit), pkcs11.Error(pkcs11.CKR_GENERAL_ERROR)},
	} {
		f.set(c.rule)
		got, err := k.Unseal(t.Context(), box, nil)
		require.ErrorIs(t, err, c.want, c.rule)
		assert.NotErrorIs(t, err, fs.ErrInvalid, c.rule)
		assert.Equal(t, c.want == nil, string(got) == "secret")
	}
	box[len(box)-1] ^= 1
	f.set(fmt.Sprintf("%d fail 5 0", encryptInit)) // the token decrypts no other box
	err := must.Err(k.Unseal(t.Context(), box, nil))
	must.Fail(t, err, pkcs11.Error(pkcs11.CKR_GENERAL_ERROR))
	assert.NotErrorIs(t, err, fs.ErrInvalid)
	f.set()
	must.Fail(t, must.Err(k.Unseal(t.Context(), box, nil)), fs.ErrInvalid)
}

// Making a pair is not tried twice, as the first may be there.
func TestMadeInSpite(t *testing.T) {
	t.Parallel()
	o := options(t)
	f := newFaulty(t)
	o.Module = f.path
	k, ctx, name := openAs(t, o), t.Context(), newName()
	f.set(fmt.Sprintf("%d late %x 1", generateKeyPair, pkcs11.CKR_DEVICE_ERROR))
	err := must.Err(k.NewKey(ctx, name, "ecdsa-p256"))
	must.Fail(t, err, pkcs11.Error(pkcs11.CKR_DEVICE_ERROR))
	assert.NotErrorIs(t, err, fs.ErrExist)
	assert.Equal(t, 1, f.calls(generateKeyPair))
	require.Equal(t, []string{name}, must.Get(k.Keys(ctx, name))(t))
	must.Fail(t, must.Err(k.NewKey(ctx, name, "ecdsa-p256")), fs.ErrExist)
	assert.Equal(t, 1, f.calls(generateKeyPair))
	require.NoError(t, k.Destroy(ctx, name))
	f.set(fmt.Sprintf("%d fail %x 0", generateKeyPair, pkcs11.CKR_MECHANISM_INVALID))
	must.Fail(t, must.Err(k.NewKey(ctx, name, "ed25519")), errors.ErrUnsupported)
	must.Fail(t, must.Err(k.Key(ctx, name)), fs.ErrNotExist)
	require.NoError(t, k.Close())
	assert.Greater(t, f.calls(openSession), 1)
	assert.Equal(t, f.calls(openSession), f.calls(closeSession))
}

// While all calls hang, callers leave in time and others fail at once; when the module answers, all goes on.
func TestHang(t *testing.T) {
	t.Parallel()
	o := options(t)
	f := newFaulty(t)
	o.Module, o.Sessions = f.path, 4
	k, ctx, name := openAs(t, o), t.Context(), newName()
	key := must.Get(k.NewKey(ctx, name, "ecdsa-p256"))(t)
	t.Cleanup(func() { assert.NoError(t, k.Destroy(context.Background(), name)) })
	require.Equal(t, 10*time.Second, k.signTime)
	require.Equal(t, 30*time.Second, k.turnTime)

	var wg sync.WaitGroup
	for range 40 { // more than places, which they wait for
		wg.Go(func() { assert.NoError(t, must.Err(signed(key))) })
	}
	wg.Wait()

	// The same with a token that gives one session.
	k.drain()
	_ = must.Get(signed(key))(t)
	f.set(fmt.Sprintf("%d fail %x 0", openSession, pkcs11.CKR_SESSION_COUNT))
	for range 40 {
		wg.Go(func() { assert.NoError(t, must.Err(signed(key))) })
	}
	wg.Wait()
	f.set()

	k.signTime = 300 * time.Millisecond
	f.set(fmt.Sprintf("%d hang 0 0", sign))
	for range 20 {
		wg.Go(func() { assert.ErrorIs(t, must.Err(signed(key)), context.DeadlineExceeded) })
	}
	wg.Wait()
	require.EqualValues(t, 4, k.hanging.Load())
	for range 20 {
		calls := f.calls(openSession)
		must.Fail(t, must.Err(k.Key(ctx, name)), "4 calls hang in the module") // ctx never ends
		must.Fail(t, must.Err(signed(key)), "4 calls hang in the module")
		assert.Equal(t, calls, f.calls(openSession))
	}
	f.set()
	require.Eventually(t, func() bool { return must.Err(signed(key)) == nil }, 20*time.Second, 5*time.Millisecond)
	require.Eventually(t, func() bool { return k.hanging.Load() == 0 }, 20*time.Second, 5*time.Millisecond)

	// A key whose caller has left is not made, or not kept.
	other := newName()
	f.set(fmt.Sprintf("%d hang 0 0", generateKeyPair))
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	must.Fail(t, must.Err(k.NewKey(short, other, "ecdsa-p256")), context.DeadlineExceeded)
	f.set()
	require.Eventually(t, func() bool { return f.calls(destroyObject) == 2 }, 20*time.Second, 5*time.Millisecond)
	require.Eventually(t, func() bool { return k.hanging.Load() == 0 }, 20*time.Second, 5*time.Millisecond)
	assert.Empty(t, must.Get(k.Keys(ctx, other))(t))

	// A login that hangs gives way to the next.
	k.turnTime = 300 * time.Millisecond
	r := newRaw(t, o)
	require.NoError(t, r.CloseAllSessions(r.slot))
	f.set(fmt.Sprintf("%d hang 0 1", login))
	must.Fail(t, must.Err(signed(key)), context.DeadlineExceeded)
	k.signTime = 10 * time.Second
	require.NoError(t, must.Err(signed(key)))
	require.EqualValues(t, 1, k.hanging.Load())
	f.set()
	require.Eventually(t, func() bool { return k.hanging.Load() == 0 }, 20*time.Second, 5*time.Millisecond)
}

// Signatures of a wrong size are errors. The CA catches wrong ones of the right size, and no certificate has one.
func TestWrongSignatures(t *testing.T) {
	t.Parallel()
	o := options(t)
	f := newFaulty(t)
	o.Module, o.SealKey = f.path, "of a CA"
	k, ctx := openAs(t, o), t.Context()
	store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
	web := spiffe.MustParseID("spiffe://example.org/web")
	a := must.Get(ca.Open(ctx, ca.Config{
		TrustDomain: web.TrustDomain(), Create: true, Custody: ca.Custody{Keys: k, Seal: k},
	}, store))(t)
	csr := must.Get(pki.NewCSR(must.Get(pki.NewKey("ecdsa-p256"))(t), pki.CSROptions{}))(t)
	issue := func() error {
		chain, err := a.Sign(ctx, ca.Request{CSR: csr, ID: web})
		if err == nil {
			v := must.Get(spiffe.NewVerifier(a.Bundle(), spiffe.AllowIDs(web), nil))(t)
			_ = must.Get(v.VerifyChain(chain, spiffe.ClientRole))(t)
		}
		return err
	}
	require.NoError(t, issue())
	for _, action := range []string{"flip 0", "swap 0", "short 1", "short 2", "short 40", "fail 5"} {
		f.set(fmt.Sprintf("%d %s 0", sign, action))
		for range 3 {
			assert.Error(t, issue(), action)
		}
		f.set()
		require.Eventually(t, func() bool { return issue() == nil }, 20*time.Second, 5*time.Millisecond, action)
	}
	name := newName()
	key := must.Get(k.NewKey(ctx, name, "ecdsa-p256"))(t)
	f.set(fmt.Sprintf("%d short 2 0", sign))
	must.Fail(t, must.Err(signed(key)), "62 bytes in place of 64")
	require.NoError(t, k.Destroy(ctx, name))
}

// What only half of is there is listed, refused and destroyed, beside what others have under the same label.
func TestHalves(t *testing.T) {
	t.Parallel()
	o := options(t)
	k, r, ctx := openAs(t, o), newRaw(t, o), t.Context()
	for _, c := range []struct {
		kept int
		want string
	}{
		{pkcs11.CKO_PRIVATE_KEY, "lost the public half"},
		{pkcs11.CKO_PUBLIC_KEY, fs.ErrNotExist.Error()},
	} {
		name := newName()
		key := must.Get(k.NewKey(ctx, name, "ecdsa-p256"))(t)
		data := must.Get(r.CreateObject(r.h, attributes(pkcs11.CKA_CLASS, pkcs11.CKO_DATA, pkcs11.CKA_TOKEN, true,
			pkcs11.CKA_LABEL, name, pkcs11.CKA_VALUE, []byte("data"))))(t)
		for _, class := range []int{pkcs11.CKO_PRIVATE_KEY, pkcs11.CKO_PUBLIC_KEY} {
			if class != c.kept {
				require.NoError(t, r.DestroyObject(r.h, r.objects(t, pkcs11.CKA_CLASS, class, pkcs11.CKA_LABEL, name)[0]))
			}
		}
		err := must.Err(k.Key(ctx, name))
		must.Fail(t, err, c.want)
		assert.Equal(t, c.kept == pkcs11.CKO_PUBLIC_KEY, errors.Is(err, fs.ErrNotExist))
		assert.Equal(t, c.kept == pkcs11.CKO_PUBLIC_KEY, errors.Is(must.Err(signed(key)), fs.ErrNotExist))
		assert.Equal(t, []string{name}, must.Get(k.Keys(ctx, name))(t))
		must.Fail(t, must.Err(k.NewKey(ctx, name, "ecdsa-p256")), fs.ErrExist)
		require.NoError(t, k.Destroy(ctx, name))
		assert.Empty(t, must.Get(k.Keys(ctx, name))(t))
		assert.Equal(t, []pkcs11.ObjectHandle{data}, r.objects(t, pkcs11.CKA_LABEL, name))
		require.NoError(t, r.DestroyObject(r.h, data))
	}

	prefix := newName() // more than the module gives at a time
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	for i := range 120 {
		_ = must.Get(r.CreateObject(r.h, append(named(pkcs11.CKO_PUBLIC_KEY, pkcs11.CKK_EC, fmt.Sprint(prefix, i)),
			point(algorithms["ecdsa-p256"].curve, marshal(must.Get(key.PublicKey.Bytes())(t)))...)))(t)
	}
	assert.Len(t, must.Get(k.Keys(ctx, prefix))(t), 120)
}

// Of several callers with one name, one makes the key. If another process makes one meanwhile, the later destroys its
// own.
func TestSameName(t *testing.T) {
	t.Parallel()
	o := options(t)
	f := newFaulty(t)
	k, ctx, name := openAs(t, o), t.Context(), newName()
	var wg sync.WaitGroup
	var won atomic.Int32
	for range 10 {
		wg.Go(func() {
			if err := must.Err(k.NewKey(ctx, name, "ecdsa-p256")); err == nil {
				won.Add(1)
			} else {
				assert.ErrorIs(t, err, fs.ErrExist)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, won.Load())
	require.NoError(t, k.Destroy(ctx, name))

	o.Module = f.path
	slow := openAs(t, o)
	f.set(fmt.Sprintf("%d hang 0 0", generateKeyPair))
	wg.Go(func() { assert.ErrorIs(t, must.Err(slow.NewKey(ctx, name, "ecdsa-p256")), fs.ErrExist) })
	require.Eventually(t, func() bool { return f.calls(generateKeyPair) == 1 }, 20*time.Second, 5*time.Millisecond)
	key := must.Get(k.NewKey(ctx, name, "ecdsa-p256"))(t)
	f.set()
	wg.Wait()
	found := must.Get(k.Key(ctx, name))(t)
	assert.True(t, pki.PublicKeysEqual(key.Public(), found.Public()))
	_ = must.Get(signed(found))(t)
	require.NoError(t, k.Destroy(ctx, name))
}

// The token gives no private value away, allows only signatures, and a key that could leave it is not used.
func TestPrivate(t *testing.T) {
	t.Parallel()
	o := options(t)
	o.SealKey = "private"
	k, r, ctx := openAs(t, o), newRaw(t, o), t.Context()
	_ = must.Get(k.Seal(ctx, []byte("secret"), nil))(t)
	values := map[string]int{"ecdsa-p256": pkcs11.CKA_VALUE, "ed25519": pkcs11.CKA_VALUE,
		"rsa-2048": pkcs11.CKA_PRIVATE_EXPONENT}
	secrets := map[string]int{"private": pkcs11.CKA_VALUE}
	for algorithm, value := range values {
		name := newName()
		_ = must.Get(k.NewKey(ctx, name, algorithm))(t)
		defer k.Destroy(context.Background(), name)
		secrets[name] = value
	}
	for name, value := range secrets {
		h := r.objects(t, pkcs11.CKA_LABEL, name, pkcs11.CKA_PRIVATE, true)
		require.Len(t, h, 1)
		_, err := r.GetAttributeValue(r.h, h[0], attributes(value, nil))
		require.Equal(t, pkcs11.Error(pkcs11.CKR_ATTRIBUTE_SENSITIVE), err)
		want := map[int]bool{pkcs11.CKA_SENSITIVE: true, pkcs11.CKA_ALWAYS_SENSITIVE: true, pkcs11.CKA_EXTRACTABLE: false,
			pkcs11.CKA_NEVER_EXTRACTABLE: true, pkcs11.CKA_LOCAL: true, pkcs11.CKA_TOKEN: true,
			pkcs11.CKA_UNWRAP: false, pkcs11.CKA_SIGN: name != "private", pkcs11.CKA_DECRYPT: name == "private"}
		for a, is := range want {
			v := must.Get(r.GetAttributeValue(r.h, h[0], attributes(a, nil)))(t)
			assert.Equal(t, attributes(a, is)[0].Value, v[0].Value, "%s: %x", name, a)
		}
		err = r.SetAttributeValue(r.h, h[0], attributes(pkcs11.CKA_EXTRACTABLE, true))
		assert.Error(t, err)
	}
	a := algorithms["ecdsa-p256"]
	for _, leaks := range [][]*pkcs11.Attribute{
		attributes(pkcs11.CKA_SENSITIVE, true, pkcs11.CKA_EXTRACTABLE, true),
		attributes(pkcs11.CKA_SENSITIVE, false, pkcs11.CKA_EXTRACTABLE, false),
	} {
		name := newName()
		private := append(named(pkcs11.CKO_PRIVATE_KEY, a.keyType, name),
			attributes(pkcs11.CKA_SIGN, true, pkcs11.CKA_PRIVATE, true)...)
		_, _, err := r.GenerateKeyPair(r.h, mechanism(a.generate, nil), append(named(pkcs11.CKO_PUBLIC_KEY, a.keyType, name),
			attributes(pkcs11.CKA_EC_PARAMS, marshal(a.curve))...), append(private, leaks...))
		require.NoError(t, err)
		must.Fail(t, must.Err(k.Key(ctx, name)), "can leave the token")
		require.NoError(t, k.Destroy(ctx, name))

		o.SealKey = newName()
		seals := openAs(t, o)
		_ = must.Get(r.GenerateKey(r.h, mechanism(pkcs11.CKM_AES_KEY_GEN, nil), append(append(named(pkcs11.CKO_SECRET_KEY,
			pkcs11.CKK_AES, o.SealKey), attributes(pkcs11.CKA_VALUE_LEN, 32)...), leaks...)))(t)
		must.Fail(t, must.Err(seals.Seal(ctx, []byte("secret"), nil)), "can leave the token")
	}
}

// Some tokens give the point of a curve without the OCTET STRING around it, whose tag it also begins with.
func TestPublicKeys(t *testing.T) {
	t.Parallel()
	o := options(t)
	k, r := openAs(t, o), newRaw(t, o)
	s := &session{token: k, h: r.h}
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	tricky := key
	for tricky.X.Bit(255) > 0 || tricky.X.Bytes()[0] != 63 || len(tricky.X.Bytes()) < 32 { // the length of what follows
		tricky = must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	}
	off := must.Get(key.PublicKey.Bytes())(t)
	off[64] ^= 1
	p256, p384 := algorithms["ecdsa-p256"].curve, algorithms["ecdsa-p384"].curve
	ed := must.Get2(ed25519.GenerateKey(rand.Reader))
	edKey, _ := ed(t)
	rsaKey := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	for name, c := range map[string]struct {
		keyType int
		more    []*pkcs11.Attribute
		want    crypto.PublicKey
	}{
		"octets":  {pkcs11.CKK_EC, point(p256, marshal(must.Get(key.PublicKey.Bytes())(t))), &key.PublicKey},
		"raw":     {pkcs11.CKK_EC, point(p256, must.Get(key.PublicKey.Bytes())(t)), &key.PublicKey},
		"tricky":  {pkcs11.CKK_EC, point(p256, must.Get(tricky.PublicKey.Bytes())(t)), &tricky.PublicKey},
		"off":     {pkcs11.CKK_EC, point(p256, marshal(off)), nil},
		"short":   {pkcs11.CKK_EC, point(p256, marshal(off[:60])), nil},
		"none":    {pkcs11.CKK_EC, point(p256, nil), nil},
		"another": {pkcs11.CKK_EC, point(p384, marshal(must.Get(key.PublicKey.Bytes())(t))), nil},
		"edwards": {keyEdwards, point(oidEd25519, marshal([]byte(edKey))), edKey},
		"raw ed":  {keyEdwards, point(oidEd25519, edKey), edKey},
		"rsa": {pkcs11.CKK_RSA, attributes(pkcs11.CKA_MODULUS, append([]byte{0}, rsaKey.N.Bytes()...),
			pkcs11.CKA_PUBLIC_EXPONENT, []byte{0, 1, 0, 1}), &rsaKey.PublicKey},
		"huge": {pkcs11.CKK_RSA, attributes(pkcs11.CKA_MODULUS, rsaKey.N.Bytes(), pkcs11.CKA_PUBLIC_EXPONENT,
			new(big.Int).Lsh(big.NewInt(1), 70).Bytes()), nil},
	} {
		h, err := r.CreateObject(r.h, append(named(pkcs11.CKO_PUBLIC_KEY, c.keyType, newName()), c.more...))
		require.NoError(t, err, name)
		got, err := s.public(h)
		require.Equal(t, c.want == nil, err != nil, "%s: %v", name, err)
		if c.want != nil {
			assert.True(t, pki.PublicKeysEqual(c.want, got), name)
		}
		require.NoError(t, r.DestroyObject(r.h, h))
	}
}

func point(curve, p any) []*pkcs11.Attribute {
	b, _ := p.([]byte)
	if k, ok := p.(ed25519.PublicKey); ok {
		b = k
	}
	return attributes(pkcs11.CKA_EC_PARAMS, marshal(curve), pkcs11.CKA_EC_POINT, b)
}

// What a key cannot sign is an error that says so, and the token is not asked.
func TestUnfit(t *testing.T) {
	t.Parallel()
	modulus := &rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 2047)}
	for name, c := range map[string]struct {
		public any
		size   int
		o      crypto.SignerOpts
	}{
		"Ed25519ph":      {ed25519.PublicKey{}, 64, crypto.SHA512},
		"Ed25519ctx":     {ed25519.PublicKey{}, 10, &ed25519.Options{Context: "c"}},
		"no DigestInfo":  {modulus, 20, crypto.SHA1},
		"no hash":        {modulus, 20, crypto.Hash(0)},
		"long salt":      {modulus, 32, &rsa.PSSOptions{SaltLength: 223, Hash: crypto.SHA256}},
		"negative":       {modulus, 32, &rsa.PSSOptions{SaltLength: -2, Hash: crypto.SHA256}},
		"key of no kind": {nil, 32, crypto.SHA256},
	} {
		_, _, _, err := prepare(c.public, make([]byte, c.size), c.o)
		assert.ErrorIs(t, err, errors.ErrUnsupported, name)
	}
	_, _, _, err := prepare(&ecdsa.PublicKey{Curve: elliptic.P256()}, make([]byte, 31), crypto.SHA256)
	must.Fail(t, err, "31 bytes in place of 32")
	_, data, _, err := prepare(&ecdsa.PublicKey{Curve: elliptic.P256()}, make([]byte, 64), crypto.SHA512)
	require.NoError(t, err)
	assert.Len(t, data, 32, "tokens need not shorten it")
}

func BenchmarkSign(b *testing.B) {
	k := openAs(b, options(b))
	for _, algorithm := range []string{"ecdsa-p256", "ed25519", "rsa-2048"} {
		name := newName()
		key := must.Get(k.NewKey(b.Context(), name, algorithm))(b)
		digest := make([]byte, 32)
		var o crypto.SignerOpts = crypto.SHA256
		if algorithm == "ed25519" {
			o = crypto.Hash(0)
		}
		b.Run(algorithm, func(b *testing.B) {
			for b.Loop() {
				_ = must.Get(key.Sign(nil, digest, o))(b)
			}
		})
		b.Run(algorithm+"/parallel", func(b *testing.B) {
			b.SetParallelism(8)
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					_ = must.Get(key.Sign(nil, digest, o))(b)
				}
			})
		})
		require.NoError(b, k.Destroy(context.Background(), name))
	}
}
