//go:build !cgo

package pkcs11key

import (
	"context"
	"errors"
	"fmt"
)

func open(context.Context, Options) (Token, error) {
	return nil, fmt.Errorf("pkcs11key: this program is built without cgo, which modules of PKCS#11 need; "+
		"build it with CGO_ENABLED=1 and a C compiler: %w", errors.ErrUnsupported)
}
