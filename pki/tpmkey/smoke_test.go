package tpmkey

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
	"context"

	"github.com/stretchr/testify/require"
)

func TestSmoke(t *testing.T) {
	dir := t.TempDir()
	sock := filepath.Join(dir, "s")
	cmd := exec.Command("swtpm", "socket", "--tpm2", "--tpmstate", "dir="+dir, "--server", "type=unixio,path="+sock, "--flags", "not-need-init,startup-clear")
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	defer cmd.Process.Kill()
	var tpm *TPM
	require.Eventually(t, func() (ok bool) { var err error; tpm, err = Open(sock); if err != nil {t.Log(err)}; return err == nil }, 5*time.Second, 50*time.Millisecond)
	for _, alg := range []string{"ecdsa-p256", "ecdsa-p384", "ecdsa-p521", "rsa-2048", "rsa-3072", "rsa-4096"} {
		start := time.Now()
		k, err := tpm.NewKey(alg)
		t.Log(alg, err, time.Since(start))
		if err != nil { continue }
		d := sha256.Sum256([]byte("x"))
		start = time.Now()
		sig, err := k.Sign(nil, d[:], crypto.SHA256)
		require.NoError(t, err)
		t.Log(time.Since(start))
		start = time.Now()
		for range 20 {
		sig, err = k.Sign(nil, d[:], crypto.SHA256)
		require.NoError(t, err)
		}
		t.Log(time.Since(start)/20)
		if p, ok := k.Public().(*ecdsa.PublicKey); ok {
			require.True(t, ecdsa.VerifyASN1(p, d[:], sig))
		}
	}
	c, err := tpm.Custodian(filepath.Join(dir, "keys"))
	require.NoError(t, err)
	ctx := context.Background()
	k, err := c.NewKey(ctx, "abc", "ecdsa-p256")
	require.NoError(t, err)
	k2, err := c.Key(ctx, "abc")
	require.NoError(t, err)
	require.Equal(t, k.Public(), k2.Public())
	s, err := c.Seal(ctx, make([]byte, 32), []byte("x"))
	require.NoError(t, err)
	s, err = c.Unseal(ctx, s, []byte("x"))
	require.NoError(t, err)
	require.Equal(t, make([]byte, 32), s)
}
