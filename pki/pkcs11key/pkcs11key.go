// Package pkcs11key keeps the private keys of a CA in a token of PKCS#11 (Cryptoki), such as an HSM, and seals the
// records of its store with a key of that token. It is a module of its own, which needs cgo and
// github.com/miekg/pkcs11.
//
//	token, err := pkcs11key.Open(ctx, pkcs11key.Options{
//		Module:  "/usr/lib/softhsm/libsofthsm2.so",
//		Token:   "svidkit",
//		PINFile: "/run/secrets/pin",
//		SealKey: "svidkit-seal",
//	})
//	…
//	defer token.Close()
//	authority, err := ca.Open(ctx, ca.Config{…, Custody: ca.Custody{Keys: token, Seal: token}}, store)
//
// # The token
//
// The maker's program makes a token with a label, a PIN of its security officer and a PIN of its user, who needs the
// right to make, use, find and destroy keys. With SoftHSM, which is for trials:
//
//	softhsm2-util --init-token --free --label svidkit
//
// and with others, if they have no program of their own:
//
//	pkcs11-tool --module MODULE --slot SLOT --init-token --label svidkit
//	pkcs11-tool --module MODULE --token-label svidkit --login --login-type so --init-pin
//
// The first Seal makes the key that seals if there is none. Replicas that do so at the same time may make several;
// all must be kept, as each unseals only what it has sealed. An operator can make the key before:
//
//	pkcs11-tool --module MODULE --token-label svidkit --login --keygen --key-type AES:32 \
//		--label svidkit-seal --id 01 --sensitive
//
// The token may have keys of other applications. They are found by no method that is not given their label, and
// destroyed only by Destroy with it.
//
// # Keys
//
// The name of a key is the label (CKA_LABEL) of a private and a public object, with the same CKA_ID. The private
// object is sensitive, not extractable, and allows only signatures; a key that could leave the token is refused. A
// token that lacks an algorithm gives an error that wraps [errors.ErrUnsupported]; Ed25519 needs a module of PKCS#11
// 3.0. RSA keys sign with SHA-256, SHA-384 and SHA-512.
//
// PKCS#11 has no unique labels. NewKey refuses a label that it finds, and looks again when it has made the pair: if
// there are two, it destroys its own. So two processes that make the same name at the same time may both get
// [io/fs.ErrExist], and on a token that shows new objects late, both a key, which then neither finds: names must be
// random, as those of the CA are. A crash can leave half a pair: Keys lists it, and Destroy destroys it.
//
// # Replicas
//
// All replicas need the same keys: one token on the network, or a cluster whose module shows one token and copies new
// keys to all members before it answers. A member that lacks a key says that there is no such key, and this package
// believes it. SoftHSM is for a single process: if several log in or change a token at the same time, some get errors,
// and some do not see the keys of the others for a while.
//
// # The PIN
//
// The PIN is read from its file at each login: when the program starts, and after the token was restarted. Tokens
// lock after a few wrong PINs. So a PIN that the token refuses is tried once, and not again before the file has
// another; each start of the program is one more try. If the token warns that the next wrong PIN locks it, the PIN is
// not tried at all.
//
// # When the token is away
//
// If the token was restarted or removed and is back, or another part of the process has ended the login, a call is
// made once more in a new session, except for making a pair, which may have been made. Modules that look for tokens
// only when they start need a restart of the program.
//
// A call into the module cannot be interrupted. Callers leave when their context is done, and Sign returns within ten
// seconds, but each call that hangs keeps one of Options.Sessions; when they all hang, further calls fail at once,
// until some return. Close, too, leaves the module loaded and initialized, as others in the process may use it.
package pkcs11key

import (
	"context"
	"errors"
	"io"
	"path/filepath"

	"github.com/svidkit/svidkit/pki/ca"
)

// Options says which token [Open] opens. Module, Token and PINFile are required.
type Options struct {
	// Module is the absolute path of the PKCS#11 library of the token's maker, such as
	// /usr/lib/softhsm/libsofthsm2.so. It runs in this process, so that who can change it has the PIN and the keys.
	Module string

	// Token is the label of the token. Another token of the module must not have the same.
	Token string

	// PINFile is a file with the PIN of the token's user, which is read at each login. White space at the end is
	// ignored.
	PINFile string

	// SealKey is the label of the AES key that seals, which the first Seal makes; "" means that the token seals
	// nothing.
	SealKey string

	// Sessions is how many calls the token serves at once, each in a session; 0 means 32. Other calls wait, as they do if
	// the token gives fewer sessions.
	Sessions int
}

// Token is an open token. All methods are safe for concurrent use.
type Token interface {
	ca.Custodian
	ca.Sealer

	// Close closes the sessions, within ten seconds. Keys of the token cannot sign afterwards.
	io.Closer
}

// Open loads the module and logs in to the token. It tries the PIN once. If the program is built without cgo, the
// error wraps [errors.ErrUnsupported].
func Open(ctx context.Context, o Options) (Token, error) {
	switch {
	case !filepath.IsAbs(o.Module):
		return nil, errors.New("pkcs11key: the module must be an absolute path")
	case o.Token == "" || o.PINFile == "":
		return nil, errors.New("pkcs11key: the label of the token and the file with the PIN are needed")
	case o.Sessions < 0:
		return nil, errors.New("pkcs11key: the number of sessions is negative")
	}
	return open(ctx, o)
}
