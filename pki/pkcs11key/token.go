//go:build cgo

package pkcs11key

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/big"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/pkcs11"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/redact"
)

// What PKCS #11 has since version 3.0.
const (
	keyEdwards      = 0x40   // CKK_EC_EDWARDS
	generateEdwards = 0x1055 // CKM_EC_EDWARDS_KEY_PAIR_GEN
	signEdwards     = 0x1057 // CKM_EDDSA
)

// A sealed secret is the format, the nonce, and what AES-GCM makes of the secret.
const (
	sealFormat = 1
	sealHeader = 1 + 12
	tagSize    = 16
)

// starts is held by the call that starts a module: two at a time can crash the process.
var starts = make(chan struct{}, 1)

var errTwo = errors.New("the token has several keys of this name")

type redacted = redact.Text

// token is a Token. A call into the module cannot be interrupted, so each runs in a goroutine, in one of a bounded
// number of places, and its caller leaves in time.
type token struct {
	redacted
	Options
	module             *pkcs11.Ctx
	signTime, turnTime time.Duration
	places             chan struct{} // one for each call under way
	hanging            atomic.Int32  // calls under way whose callers have left
	idle               chan *session
	closed             atomic.Bool
	logins, changes    chan struct{}          // each holds the call that logs in, or changes objects
	refused            atomic.Pointer[string] // a wrong PIN
}

// session is a session of the module that is logged in, for one call at a time.
type session struct {
	*token
	h    pkcs11.SessionHandle
	keys map[string]pkcs11.ObjectHandle // private keys by name, as found in this session
}

func open(ctx context.Context, o Options) (Token, error) {
	if o.Sessions <= 0 {
		o.Sessions = 32
	}
	t := &token{
		redacted: redact.New(fmt.Sprintf("pkcs11key.Token(%q)", o.Token)), Options: o, module: pkcs11.New(o.Module),
		signTime: 10 * time.Second, turnTime: 30 * time.Second, idle: make(chan *session, o.Sessions),
		places: make(chan struct{}, o.Sessions), logins: make(chan struct{}, 1), changes: make(chan struct{}, 1),
	}
	if t.module == nil {
		_, err := os.Stat(o.Module)
		return nil, fmt.Errorf("pkcs11key: %s is not a PKCS#11 library that can be loaded here (%v)", o.Module, err)
	}
	_, err := call(ctx, t, "open the token in", o.Module, func(*session) (int, error) { return 0, nil })
	if err != nil {
		return nil, err
	}
	return t, nil
}

// call runs f in a session until ctx is done: then f goes on alone.
func call[T any](ctx context.Context, t *token, what, name string, f func(*session) (T, error)) (T, error) {
	var none T
	failed := func(err error) error {
		return fmt.Errorf("pkcs11key: token %q: cannot %s %q: %w", t.Token, what, name, err)
	}
	if int(t.hanging.Load()) >= t.Sessions {
		return none, failed(fmt.Errorf("%d calls hang in the module, and no more may; look at the token, and restart "+
			"this program if it is well", t.Sessions))
	}
	select {
	case t.places <- struct{}{}:
	case <-ctx.Done():
		return none, failed(fmt.Errorf("all %d sessions are busy: %w", t.Sessions, ctx.Err()))
	}
	var v T
	result := make(chan error, 1)
	var over atomic.Bool // the call, or its caller's patience
	go func() {
		var err error
		v, err = try(ctx, t, f)
		result <- err
		if !over.CompareAndSwap(false, true) {
			t.hanging.Add(-1)
		}
		<-t.places
	}()
	var err error
	select {
	case err = <-result:
	case <-ctx.Done():
		if over.CompareAndSwap(false, true) {
			t.hanging.Add(1)
			return none, failed(fmt.Errorf("the module has not answered yet: %w", ctx.Err()))
		}
		err = <-result
	}
	if err != nil {
		return none, failed(err)
	}
	return v, nil
}

// try runs f in a session. If the session, the login or a handle is lost, it does so once more in a new session.
func try[T any](ctx context.Context, t *token, f func(*session) (T, error)) (v T, err error) {
	for again := range 2 {
		var s *session
		if again == 0 {
			select {
			case s = <-t.idle:
			default:
			}
		}
		err = nil
		if s == nil {
			s, err = t.newSession(ctx)
		}
		if is(err, pkcs11.CKR_SESSION_COUNT) { // the token has fewer
			select {
			case s = <-t.idle:
				err = nil
			case <-ctx.Done():
			}
		}
		if err == nil {
			v, err = f(s)
		}
		if _, broken := errors.AsType[pkcs11.Error](err); s != nil && broken {
			t.module.CloseSession(s.h) // if it is there
		} else if s != nil {
			t.idle <- s
			if t.closed.Load() {
				t.drain()
			}
		}
		if !is(err, lost...) {
			break
		}
	}
	return v, err
}

// lost are the answers after which a new session may help: the token was restarted or removed, or another part of the
// process has ended the session, the login or the module, or destroyed an object.
var lost = []pkcs11.Error{pkcs11.CKR_SESSION_HANDLE_INVALID, pkcs11.CKR_SESSION_CLOSED, pkcs11.CKR_DEVICE_ERROR,
	pkcs11.CKR_DEVICE_REMOVED, pkcs11.CKR_TOKEN_NOT_PRESENT, pkcs11.CKR_TOKEN_NOT_RECOGNIZED,
	pkcs11.CKR_SLOT_ID_INVALID, pkcs11.CKR_USER_NOT_LOGGED_IN, pkcs11.CKR_CRYPTOKI_NOT_INITIALIZED,
	pkcs11.CKR_KEY_HANDLE_INVALID, pkcs11.CKR_OBJECT_HANDLE_INVALID, pkcs11.CKR_GENERAL_ERROR,
	pkcs11.CKR_FUNCTION_FAILED}

// is says whether the module has answered with one of these codes.
func is(err error, codes ...pkcs11.Error) bool {
	code, ok := errors.AsType[pkcs11.Error](err)
	return ok && slices.Contains(codes, code)
}

// Close leaves the module initialized: others in this process may use it.
func (t *token) Close() error {
	t.closed.Store(true)
	done := make(chan struct{})
	go func() {
		t.drain()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(t.signTime):
		return fmt.Errorf("pkcs11key: token %q: cannot close the sessions: the module has not answered yet", t.Token)
	}
}

// drain closes the sessions that no call uses.
func (t *token) drain() {
	for {
		select {
		case s := <-t.idle:
			t.module.CloseSession(s.h) // if it is there
		default:
			return
		}
	}
}

// alone waits for its turn. A call that hangs has it only for a while.
func (t *token) alone(ctx context.Context, turn chan struct{}) (release func(), err error) {
	select {
	case turn <- struct{}{}:
		release = sync.OnceFunc(func() { <-turn })
		time.AfterFunc(t.turnTime, release)
		return release, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// change is a call that makes or destroys objects, one at a time: some modules fail otherwise.
func change[T any](ctx context.Context, t *token, what, name string, f func(*session) (T, error)) (T, error) {
	return call(ctx, t, what, name, func(s *session) (v T, err error) {
		release, err := t.alone(ctx, t.changes)
		if err != nil {
			return v, err
		}
		defer release()
		return f(s)
	})
}

func (t *token) newSession(ctx context.Context) (*session, error) {
	if t.closed.Load() {
		return nil, os.ErrClosed
	}
	release, err := t.alone(ctx, t.logins) // so that one wrong PIN is tried once
	if err != nil {
		return nil, err
	}
	defer release()
	started, err := t.alone(ctx, starts)
	if err != nil {
		return nil, err
	}
	err = t.module.Initialize()
	started()
	if err != nil && !is(err, pkcs11.CKR_CRYPTOKI_ALREADY_INITIALIZED) {
		return nil, fmt.Errorf("the module does not start: %w", err)
	}
	slot, flags, err := t.slot()
	if err != nil {
		return nil, err
	}
	h, err := t.module.OpenSession(slot, pkcs11.CKF_SERIAL_SESSION|pkcs11.CKF_RW_SESSION)
	if err != nil {
		return nil, fmt.Errorf("the token gives no session: %w", err)
	}
	s := &session{t, h, map[string]pkcs11.ObjectHandle{}}
	if err = s.loggedIn(); is(err, pkcs11.CKR_USER_NOT_LOGGED_IN) { // else another session is, and so all are
		err = s.login(flags)
	}
	if err != nil {
		t.module.CloseSession(h)
		return nil, err
	}
	return s, nil
}

// slot finds the token, which may have moved.
func (t *token) slot() (slot, flags uint, err error) {
	slots, err := t.module.GetSlotList(true)
	var labels []string
	found := 0
	for _, id := range slots {
		info, e := t.module.GetTokenInfo(id)
		if e != nil {
			err = e
		} else if labels = append(labels, info.Label); info.Label == t.Token {
			slot, flags, found = id, info.Flags, found+1
		}
	}
	switch {
	case found == 1:
		return slot, flags, nil
	case found == 0 && err != nil:
		return 0, 0, fmt.Errorf("no token that can be read has this label: %w", err)
	}
	return 0, 0, fmt.Errorf("%d tokens have this label; the module has the tokens %q", found, labels)
}

// loggedIn returns CKR_USER_NOT_LOGGED_IN if the session does not see what is private.
func (s *session) loggedIn() error {
	info, err := s.module.GetSessionInfo(s.h)
	if err == nil && info.State != pkcs11.CKS_RW_USER_FUNCTIONS {
		err = pkcs11.Error(pkcs11.CKR_USER_NOT_LOGGED_IN)
	}
	return err
}

func (s *session) login(flags uint) error {
	text, err := files.Read(s.PINFile, 1<<10)
	pin, refused := strings.TrimRight(string(text), " \t\r\n"), s.refused.Load()
	switch {
	case err != nil:
		return fmt.Errorf("cannot read the PIN: %v", err) // not %w: fs.ErrNotExist says that a key is gone
	case pin == "":
		return fmt.Errorf("there is no PIN in %s", s.PINFile)
	case refused != nil && *refused == pin:
		return fmt.Errorf("the token has refused the PIN in %s, which is not tried again; change it there", s.PINFile)
	case flags&pkcs11.CKF_USER_PIN_FINAL_TRY != 0:
		return errors.New("the token locks at the next wrong PIN; log in by another program, such as pkcs11-tool, to " +
			"show that the PIN is right")
	}
	err = s.module.Login(s.h, pkcs11.CKU_USER, pin)
	if is(err, pkcs11.CKR_PIN_INCORRECT, pkcs11.CKR_PIN_INVALID, pkcs11.CKR_PIN_LEN_RANGE, pkcs11.CKR_PIN_EXPIRED) {
		s.refused.Store(&pin)
	}
	if err != nil && !is(err, pkcs11.CKR_USER_ALREADY_LOGGED_IN) {
		return fmt.Errorf("cannot log in with the PIN in %s: %w", s.PINFile, err)
	}
	return nil
}

// attributes takes kinds and values in turn.
func attributes(pairs ...any) (list []*pkcs11.Attribute) {
	for pair := range slices.Chunk(pairs, 2) {
		list = append(list, pkcs11.NewAttribute(uint(pair[0].(int)), pair[1]))
	}
	return list
}

// named are the attributes of an object that stays in the token.
func named(class, keyType int, name string) []*pkcs11.Attribute {
	id := sha256.Sum256([]byte(name)) // of both halves
	return attributes(pkcs11.CKA_CLASS, class, pkcs11.CKA_KEY_TYPE, keyType, pkcs11.CKA_TOKEN, true,
		pkcs11.CKA_LABEL, name, pkcs11.CKA_ID, id[:16])
}

// hidden are the attributes of an object whose value stays in the token.
func hidden(class, keyType int, name string) []*pkcs11.Attribute {
	return append(named(class, keyType, name), attributes(pkcs11.CKA_PRIVATE, true, pkcs11.CKA_SENSITIVE, true,
		pkcs11.CKA_EXTRACTABLE, false, pkcs11.CKA_UNWRAP, false)...)
}

func mechanism(m uint, parameters any) []*pkcs11.Mechanism {
	return []*pkcs11.Mechanism{pkcs11.NewMechanism(m, parameters)}
}

// find returns the objects of these classes, with this label unless it is "".
func (s *session) find(label string, classes ...int) (all []pkcs11.ObjectHandle, err error) {
	for _, class := range classes {
		template := attributes(pkcs11.CKA_CLASS, class, pkcs11.CKA_TOKEN, true)
		if label != "" {
			template = append(template, attributes(pkcs11.CKA_LABEL, label)...)
		}
		err = s.module.FindObjectsInit(s.h, template)
		for some := []pkcs11.ObjectHandle{0}; err == nil && len(some) > 0; {
			some, _, err = s.module.FindObjects(s.h, 100)
			all = append(all, some...)
		}
		if err == nil {
			err = s.module.FindObjectsFinal(s.h)
		}
		if err != nil {
			return nil, err
		}
	}
	return all, s.loggedIn() // without a login, nothing private is found, and that is no error
}

// one returns the object of a class with a label.
func (s *session) one(label string, class int) (pkcs11.ObjectHandle, error) {
	found, err := s.find(label, class)
	switch {
	case err != nil:
		return 0, err
	case len(found) == 0:
		return 0, fs.ErrNotExist
	case len(found) > 1:
		return 0, errTwo
	}
	return found[0], nil
}

// get returns the values of attributes.
func (s *session) get(o pkcs11.ObjectHandle, kinds ...int) (values [][]byte, err error) {
	var template []*pkcs11.Attribute
	for _, k := range kinds {
		template = append(template, attributes(k, nil)...)
	}
	template, err = s.module.GetAttributeValue(s.h, o, template)
	for _, a := range template {
		values = append(values, a.Value)
	}
	return values, err
}

// keeps returns an error if the key can leave the token.
func (s *session) keeps(o pkcs11.ObjectHandle) error {
	v, err := s.get(o, pkcs11.CKA_SENSITIVE, pkcs11.CKA_EXTRACTABLE)
	if err == nil && (!bytes.Equal(v[0], []byte{1}) || !bytes.Equal(v[1], []byte{0})) {
		err = errors.New("the key can leave the token: it is extractable or not sensitive")
	}
	return err
}

// algorithms are, by name, the parameters of RSA keys and of elliptic curves.
var algorithms = map[string]struct {
	keyType  int
	generate uint
	curve    asn1.ObjectIdentifier
	bits     int
}{
	"ecdsa-p256": {pkcs11.CKK_EC, pkcs11.CKM_EC_KEY_PAIR_GEN, asn1.ObjectIdentifier{1, 2, 840, 10045, 3, 1, 7}, 0},
	"ecdsa-p384": {pkcs11.CKK_EC, pkcs11.CKM_EC_KEY_PAIR_GEN, asn1.ObjectIdentifier{1, 3, 132, 0, 34}, 0},
	"ecdsa-p521": {pkcs11.CKK_EC, pkcs11.CKM_EC_KEY_PAIR_GEN, asn1.ObjectIdentifier{1, 3, 132, 0, 35}, 0},
	"rsa-2048":   {pkcs11.CKK_RSA, pkcs11.CKM_RSA_PKCS_KEY_PAIR_GEN, nil, 2048},
	"rsa-3072":   {pkcs11.CKK_RSA, pkcs11.CKM_RSA_PKCS_KEY_PAIR_GEN, nil, 3072},
	"rsa-4096":   {pkcs11.CKK_RSA, pkcs11.CKM_RSA_PKCS_KEY_PAIR_GEN, nil, 4096},
	"ed25519":    {keyEdwards, generateEdwards, oidEd25519, 0},
}

var (
	oidEC      = asn1.ObjectIdentifier{1, 2, 840, 10045, 2, 1}
	oidEd25519 = asn1.ObjectIdentifier{1, 3, 101, 112}
)

// marshal is for values that have an encoding.
func marshal(v any) []byte {
	der, err := asn1.Marshal(v)
	if err != nil {
		panic(err)
	}
	return der
}

// NewKey implements ca.Custodian.
func (t *token) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	var last error // of an attempt to make the pair, which is the only one
	return change(ctx, t, "make the key", name, func(s *session) (k crypto.Signer, err error) {
		if last != nil {
			return nil, last
		}
		if _, ok := algorithms[algorithm]; !ok {
			return nil, fmt.Errorf("unknown algorithm %q: %w", algorithm, errors.ErrUnsupported)
		}
		found, err := s.find(name, pkcs11.CKO_PRIVATE_KEY, pkcs11.CKO_PUBLIC_KEY)
		if err == nil && len(found) > 0 {
			err = fs.ErrExist
		}
		if err == nil {
			k, err = s.generate(ctx, name, algorithm)
			last = err
		}
		return k, err
	})
}

// generate makes a pair. Tokens allow several with one label: if another process has made one meanwhile, generate
// destroys its own.
func (s *session) generate(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	a := algorithms[algorithm]
	public := append(named(pkcs11.CKO_PUBLIC_KEY, a.keyType, name), attributes(pkcs11.CKA_VERIFY, true)...)
	if a.curve != nil {
		public = append(public, attributes(pkcs11.CKA_EC_PARAMS, marshal(a.curve))...)
	} else {
		public = append(public, attributes(pkcs11.CKA_MODULUS_BITS, a.bits,
			pkcs11.CKA_PUBLIC_EXPONENT, []byte{1, 0, 1}, pkcs11.CKA_ENCRYPT, false, pkcs11.CKA_WRAP, false)...)
	}
	private := append(hidden(pkcs11.CKO_PRIVATE_KEY, a.keyType, name),
		attributes(pkcs11.CKA_SIGN, true, pkcs11.CKA_DECRYPT, false)...)
	publicHalf, privateHalf, err := s.module.GenerateKeyPair(s.h, mechanism(a.generate, nil), public, private)
	if is(err, pkcs11.CKR_MECHANISM_INVALID, pkcs11.CKR_CURVE_NOT_SUPPORTED, pkcs11.CKR_KEY_SIZE_RANGE) {
		err = fmt.Errorf("the token cannot make keys of %s: %w (%w)", algorithm, err, errors.ErrUnsupported)
	}
	if err != nil {
		return nil, err
	}
	k, err := s.load(name)
	if errors.Is(err, errTwo) {
		err = fs.ErrExist
	} else if err == nil {
		err = ctx.Err() // its caller has left, and will not know of the key
	}
	if err != nil {
		s.module.DestroyObject(s.h, privateHalf) // else it is an orphan, as after a crash
		s.module.DestroyObject(s.h, publicHalf)
	}
	return k, err
}

// Key implements ca.Custodian.
func (t *token) Key(ctx context.Context, name string) (crypto.Signer, error) {
	return call(ctx, t, "find the key", name, func(s *session) (crypto.Signer, error) { return s.load(name) })
}

// load finds a pair.
func (s *session) load(name string) (crypto.Signer, error) {
	private, err := s.one(name, pkcs11.CKO_PRIVATE_KEY)
	if err != nil {
		return nil, err
	}
	if err = s.keeps(private); err != nil {
		return nil, err
	}
	o, err := s.one(name, pkcs11.CKO_PUBLIC_KEY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("the token has lost the public half of the key")
	} else if err != nil {
		return nil, err
	}
	public, err := s.public(o)
	return &key{redact.New(fmt.Sprintf("pkcs11key.Key(%q)", name)), s.token, name, public}, err
}

// public reads a public key.
func (s *session) public(o pkcs11.ObjectHandle) (crypto.PublicKey, error) {
	v, err := s.get(o, pkcs11.CKA_KEY_TYPE)
	if err != nil {
		return nil, err
	}
	ofType := func(t int) bool { return bytes.Equal(v[0], attributes(pkcs11.CKA_KEY_TYPE, t)[0].Value) }
	if ofType(pkcs11.CKK_RSA) {
		if v, err = s.get(o, pkcs11.CKA_MODULUS, pkcs11.CKA_PUBLIC_EXPONENT); err != nil {
			return nil, err
		}
		n, e := new(big.Int).SetBytes(v[0]), new(big.Int).SetBytes(v[1])
		return x509.ParsePKCS1PublicKey(marshal(struct{ N, E *big.Int }{n, e}))
	}
	algorithm := pkix.AlgorithmIdentifier{Algorithm: oidEd25519}
	if ofType(pkcs11.CKK_EC) {
		if v, err = s.get(o, pkcs11.CKA_EC_PARAMS); err != nil {
			return nil, err
		}
		algorithm = pkix.AlgorithmIdentifier{Algorithm: oidEC, Parameters: asn1.RawValue{FullBytes: v[0]}}
	}
	if v, err = s.get(o, pkcs11.CKA_EC_POINT); err != nil {
		return nil, err
	}
	var point []byte // in an OCTET STRING, which some tokens leave out
	if _, err := asn1.Unmarshal(v[0], &point); err == nil {
		v = [][]byte{point, v[0]}
	}
	for _, point := range v {
		var public any
		public, err = x509.ParsePKIXPublicKey(marshal(struct {
			A pkix.AlgorithmIdentifier
			P asn1.BitString
		}{algorithm, asn1.BitString{Bytes: point, BitLength: 8 * len(point)}}))
		if err == nil {
			return public, nil
		}
	}
	return nil, err
}

// Destroy implements ca.Custodian.
func (t *token) Destroy(ctx context.Context, name string) error {
	_, err := change(ctx, t, "destroy the key", name, func(s *session) (int, error) {
		found, err := s.find(name, pkcs11.CKO_PRIVATE_KEY, pkcs11.CKO_PUBLIC_KEY)
		for i := 0; err == nil && i < len(found); i++ {
			err = s.module.DestroyObject(s.h, found[i])
		}
		return 0, err
	})
	return err
}

// Keys implements ca.Custodian. It lists half a pair, too.
func (t *token) Keys(ctx context.Context, prefix string) ([]string, error) {
	return call(ctx, t, "list the keys of", prefix, func(s *session) ([]string, error) {
		names := map[string]bool{}
		found, err := s.find("", pkcs11.CKO_PRIVATE_KEY, pkcs11.CKO_PUBLIC_KEY)
		for _, o := range found {
			v, e := s.get(o, pkcs11.CKA_LABEL)
			if e != nil {
				return nil, e
			} else if strings.HasPrefix(string(v[0]), prefix) {
				names[string(v[0])] = true
			}
		}
		return slices.Collect(maps.Keys(names)), err
	})
}

// key is a private key in the token.
type key struct {
	redacted
	t      *token
	name   string
	public crypto.PublicKey
}

// Public implements crypto.Signer.
func (k *key) Public() crypto.PublicKey { return k.public }

// Sign implements crypto.Signer.
func (k *key) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), k.t.signTime)
	defer cancel()
	m, data, size, err := prepare(k.public, digest, opts)
	if err != nil {
		return nil, fmt.Errorf("pkcs11key: cannot sign with %q: %w", k.name, err)
	}
	return call(ctx, k.t, "sign with the key", k.name, func(s *session) (signature []byte, err error) {
		o, ok := s.keys[k.name]
		if !ok {
			if o, err = s.one(k.name, pkcs11.CKO_PRIVATE_KEY); err != nil {
				return nil, err
			}
			if len(s.keys) > 100 { // most are gone
				clear(s.keys)
			}
			s.keys[k.name] = o
		}
		if err = s.module.SignInit(s.h, m, o); err == nil {
			signature, err = s.module.Sign(s.h, data)
		}
		if err == nil && len(signature) != size {
			err = fmt.Errorf("the signature has %d bytes in place of %d", len(signature), size)
		}
		if _, ok := k.public.(*ecdsa.PublicKey); ok && err == nil {
			r, s := new(big.Int).SetBytes(signature[:size/2]), new(big.Int).SetBytes(signature[size/2:])
			signature = marshal(struct{ R, S *big.Int }{r, s})
		}
		return signature, err
	})
}

// prepare returns the mechanism, a copy of what it signs, as the call may outlive its caller, and the size of the
// token's signature.
func prepare(key any, digest []byte, o crypto.SignerOpts) (_ []*pkcs11.Mechanism, data []byte, size int, err error) {
	hash, unfit := o.HashFunc(), fmt.Errorf("a %T, %T and %v: %w", key, o, o.HashFunc(), errors.ErrUnsupported)
	if hash != 0 && len(digest) != hash.Size() {
		return nil, nil, 0, fmt.Errorf("the digest has %d bytes in place of %d", len(digest), hash.Size())
	}
	data = bytes.Clone(digest)
	switch p := key.(type) {
	case ed25519.PublicKey:
		if ed, ok := o.(*ed25519.Options); hash == 0 && !(ok && ed.Context != "") {
			return mechanism(signEdwards, nil), data, ed25519.SignatureSize, nil
		}
	case *ecdsa.PublicKey:
		size = (p.Params().BitSize + 7) / 8
		return mechanism(pkcs11.CKM_ECDSA, nil), data[:min(len(data), size)], 2 * size, nil
	case *rsa.PublicKey:
		n := slices.Index([]crypto.Hash{crypto.SHA256, crypto.SHA384, crypto.SHA512}, hash)
		if n < 0 {
			break
		}
		if pss, ok := o.(*rsa.PSSOptions); ok {
			salt := pss.SaltLength
			if salt == rsa.PSSSaltLengthEqualsHash || salt == rsa.PSSSaltLengthAuto { // which fits all keys
				salt = hash.Size()
			}
			h := []uint{pkcs11.CKM_SHA256, pkcs11.CKM_SHA384, pkcs11.CKM_SHA512}[n]
			mgf := []uint{pkcs11.CKG_MGF1_SHA256, pkcs11.CKG_MGF1_SHA384, pkcs11.CKG_MGF1_SHA512}[n]
			if salt < 0 || salt > p.Size()-hash.Size()-2 {
				break
			}
			return mechanism(pkcs11.CKM_RSA_PKCS_PSS, pkcs11.NewPSSParams(h, mgf, uint(salt))), data, p.Size(), nil
		}
		size := byte(hash.Size()) // DigestInfo of RFC 8017, section 9.2, with an OID that ends in 1, 2 or 3
		data = slices.Concat([]byte{0x30, 17 + size, 0x30, 13, 6, 9, 0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, byte(1 + n)},
			[]byte{5, 0, 4, size}, digest)
		return mechanism(pkcs11.CKM_RSA_PKCS, nil), data, p.Size(), nil
	}
	return nil, nil, 0, unfit
}

// sealKeys returns the keys that seal. Processes that seal for the first time at the same time may make one each, and
// all stay.
func (s *session) sealKeys() ([]pkcs11.ObjectHandle, error) {
	if s.SealKey == "" {
		return nil, errors.New("no label is configured")
	}
	keys, err := s.find(s.SealKey, pkcs11.CKO_SECRET_KEY)
	for i := 0; err == nil && i < len(keys); i++ {
		err = s.keeps(keys[i])
	}
	return keys, err
}

func (s *session) encrypt(o pkcs11.ObjectHandle, secret, associated []byte) (box []byte, err error) {
	nonce := make([]byte, sealHeader-1)
	rand.Read(nonce)
	p := pkcs11.NewGCMParams(nonce, associated, 8*tagSize)
	defer p.Free()
	if err = s.module.EncryptInit(s.h, mechanism(pkcs11.CKM_AES_GCM, p), o); err == nil {
		box, err = s.module.Encrypt(s.h, secret)
	}
	box = slices.Concat([]byte{sealFormat}, p.IV(), box) // some tokens take their own nonce
	if err == nil && len(box) != sealHeader+len(secret)+tagSize {
		err = fmt.Errorf("the token makes a nonce and a tag of %d bytes", len(box)-1-len(secret))
	}
	return box, err
}

func (s *session) decrypt(o pkcs11.ObjectHandle, box, associated []byte) (secret []byte, err error) {
	p := pkcs11.NewGCMParams(box[1:sealHeader], associated, 8*tagSize)
	defer p.Free()
	if err = s.module.DecryptInit(s.h, mechanism(pkcs11.CKM_AES_GCM, p), o); err == nil {
		secret, err = s.module.Decrypt(s.h, box[sealHeader:])
	}
	return secret, err
}

// Seal implements ca.Sealer.
func (t *token) Seal(ctx context.Context, secret, associated []byte) ([]byte, error) {
	secret, associated = bytes.Clone(secret), bytes.Clone(associated) // the call may outlive its caller
	return change(ctx, t, "seal with the key", t.SealKey, func(s *session) ([]byte, error) {
		keys, err := s.sealKeys()
		if err == nil && len(keys) == 0 {
			keys = make([]pkcs11.ObjectHandle, 1)
			keys[0], err = s.module.GenerateKey(s.h, mechanism(pkcs11.CKM_AES_KEY_GEN, nil),
				append(hidden(pkcs11.CKO_SECRET_KEY, pkcs11.CKK_AES, s.SealKey), attributes(pkcs11.CKA_VALUE_LEN, 32,
					pkcs11.CKA_ENCRYPT, true, pkcs11.CKA_DECRYPT, true, pkcs11.CKA_WRAP, false, pkcs11.CKA_SIGN, false)...))
		}
		if err != nil {
			return nil, err
		}
		return s.encrypt(keys[0], secret, associated)
	})
}

// Unseal implements ca.Sealer.
func (t *token) Unseal(ctx context.Context, sealed, associated []byte) ([]byte, error) {
	sealed, associated = bytes.Clone(sealed), bytes.Clone(associated)
	return call(ctx, t, "unseal with the key", t.SealKey, func(s *session) ([]byte, error) {
		keys, err := s.sealKeys()
		if err == nil && len(keys) == 0 {
			err = fs.ErrNotExist
		}
		if err != nil {
			return nil, err
		}
		altered := fmt.Errorf("the key has not sealed that, or it was altered: %w", fs.ErrInvalid)
		if len(sealed) < sealHeader+tagSize || sealed[0] != sealFormat {
			return nil, altered
		}
		// Modules have no common answer for an altered box: the key must decrypt something else meanwhile.
		for _, o := range append(keys, keys...) {
			secret, err := s.decrypt(o, sealed, associated)
			if err == nil {
				return secret, nil
			}
			probe, e := s.encrypt(o, []byte("probe"), nil)
			if e == nil {
				_, e = s.decrypt(o, probe, nil)
			}
			if e != nil {
				return nil, err
			}
		}
		return nil, altered
	})
}
