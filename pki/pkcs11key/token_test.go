//go:build cgo

package pkcs11key

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/svidkit/svidkit/internal/test/must"
)

const (
	userPIN = "the-user's-PIN"
	wrong   = "not-the-user's-PIN"
)

// softHSM is the library, or "" if it is missing; TestMain gives this process its tokens.
var softHSM string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	for _, path := range []string{"/usr/lib/softhsm/libsofthsm2.so", "/usr/local/lib/softhsm/libsofthsm2.so",
		"/usr/lib64/softhsm/libsofthsm2.so", "/opt/homebrew/lib/softhsm/libsofthsm2.so"} {
		if _, err := os.Stat(path); err == nil {
			softHSM = path
		}
	}
	if os.Getenv("SOFTHSM2_CONF_OF_TEST") == "" && softHSM != "" {
		dir := must.Do(os.MkdirTemp("", "p11"))
		defer os.RemoveAll(dir)
		if err := initTokens(dir, "ca", "other"); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	return m.Run()
}

// initTokens makes tokens for this process and its children.
func initTokens(dir string, labels ...string) error {
	conf := filepath.Join(dir, "softhsm2.conf")
	os.Setenv("SOFTHSM2_CONF", conf)
	text := fmt.Appendf(nil, "directories.tokendir = %s\nlog.level = ERROR\n", dir)
	if err := os.WriteFile(conf, text, 0o600); err != nil {
		return err
	}
	for _, l := range labels {
		c := exec.Command("softhsm2-util", "--init-token", "--free", "--label", l, "--so-pin", "so-pin-1", "--pin", userPIN)
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %s", err, bytes.TrimSpace(out))
		}
	}
	return nil
}
