package peers

import (
	"os"
	"os/exec"
	"path/filepath"
)

const rustls = "rustls" // as a peer

// rust is a program of programs/rustls.
func rust() (*peer, error) {
	module := filepath.Join("programs", rustls)
	sum, err := hashOf(module, "")
	return &peer{rustls + "-" + sum + "/rustls-peer", func(path string) error {
		scratch := path + ".cargo"
		defer os.RemoveAll(scratch)
		cmd := exec.Command("cargo", "build", "--release", "--locked", "--quiet",
			"--manifest-path", filepath.Join(module, "Cargo.toml"), "--target-dir", scratch)
		if err := run(cmd); err != nil {
			return err
		}
		return os.Rename(filepath.Join(scratch, "release", "rustls-peer"), path)
	}}, err
}
