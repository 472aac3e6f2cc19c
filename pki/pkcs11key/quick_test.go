//go:build cgo

package pkcs11key

import (
	"testing"
	"os"
	"path/filepath"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/pki/ca"
)

func openTest(t testing.TB, seal string) Token {
	pin := filepath.Join(t.TempDir(), "pin")
	os.WriteFile(pin, []byte(userPIN+"\n"), 0o600)
	k := must.Get(Open(t.Context(), Options{Module: softHSM, Token: "ca", PINFile: pin, SealKey: seal}))(t)
	t.Cleanup(func() { k.Close() })
	return k
}

func TestCustodian(t *testing.T) {
	custodiantest.Run(t, func(t testing.TB) ca.Custodian { return openTest(t, "") }, custodiantest.Options{})
}

func TestSealer(t *testing.T) {
	f := func(l string) func(testing.TB) ca.Sealer { return func(t testing.TB) ca.Sealer { return openTest(t, l) } }
	must.Get(openTest(t, "seal2").Seal(t.Context(), make([]byte, 32), nil))(t)
	custodiantest.Sealer(t, f("seal"), f("seal2"), f("seal3"))
}
