package peers

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// PySpiffe is the version of the Python package spiffe, and Cryptography that of cryptography.
const (
	PySpiffe     = "0.3.2"
	Cryptography = "50.0.2"
)

const (
	pySpiffe     = "py-spiffe"    // as a peer
	cryptography = "cryptography" // as a peer
)

// python is a Python package with what it needs, for the python3 of this machine.
func python(name, pkg, version string) (*peer, error) {
	tag, err := exec.Command("python3", "-c", "import sys; print(sys.implementation.cache_tag)").Output()
	if err != nil {
		return nil, fmt.Errorf("python3: %w", err)
	}
	return &peer{name + "-" + version + "-" + strings.TrimSpace(string(tag)) + "/packages",
		func(path string) error {
			return run(exec.Command("python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
				"--root-user-action=ignore", "--target", path, pkg+"=="+version))
		}}, nil
}

// Python returns a command that runs a script with a Python package, py-spiffe or cryptography.
func Python(t testing.TB, name, script string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "python3", append([]string{script}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+Program(t, name), "PYTHONDONTWRITEBYTECODE=1")
	return cmd
}
