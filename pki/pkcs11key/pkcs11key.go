// Package pkcs11key keeps the keys of a CA in a token of PKCS#11 (Cryptoki), such as an HSM.
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

	// Sessions is how many calls the token serves at once, each in a session; 0 means 32. Other calls wait.
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
