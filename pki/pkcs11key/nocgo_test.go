//go:build !cgo

package pkcs11key

import (
	"errors"
	"testing"

	"github.com/svidkit/svidkit/internal/test/must"
)

func TestOpenWithoutCgo(t *testing.T) {
	t.Parallel()
	_, err := Open(t.Context(), Options{Module: "/usr/lib/p11.so", Token: "svidkit", PINFile: "/run/pin"})
	must.Fail(t, err, errors.ErrUnsupported, "CGO_ENABLED=1")
}
