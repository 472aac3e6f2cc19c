// Package peers has real programs of others, which our tests run against: the API server of Kubernetes with its etcd,
// what a kubelet does for certificates of pods, SPIRE's server and agent, Istio's CA server, agent and injector
// (istioctl), step-ca, OpenBao, Keycloak, Athenz's client of ZTS, a Python client of the Workload API, nats-server,
// MariaDB, Redis and PostgreSQL of Debian, and others that know ML-DSA: Node.js, rustls and Python's cryptography. The
// proofs are its tests.
//
// The programs are built from published modules, each with a module file of its own below programs, so that nothing
// of theirs reaches another go.mod. They are built once for a user of a machine, and kept in the user's cache
// directory under a hash of what they are built from, or in the directory that the environment variable
// SVIDKIT_PEERS_CACHE names:
//
//	go run ./build
//
// The first builds take about a quarter of an hour on two cores. A test skips with the reason where a program is not
// built. With SVIDKIT_PEERS=require in the environment, as in CI, it is built then, and the test fails if that fails.
package peers

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/internal/files/flock"
)

const (
	modeEnv  = "SVIDKIT_PEERS"       // "require" or empty
	cacheEnv = "SVIDKIT_PEERS_CACHE" // a directory
)

// Toolchain is the release of Go that builds the programs, whichever runs the tests, so that each is built once. Releases
// of these programs are not built with a newer one.
const Toolchain = "go1.26.8"

// A program is a package of a module below the directory programs.
type program struct{ module, pkg string }

var programs = map[string]program{
	"etcd":           {"etcd", "."},
	"kube-apiserver": {"kube-apiserver", "."},
	"kubelet":        {"kube-apiserver", "./kubelet"},
	"istio-ca":       {"istio", "./ca"},
	"istioctl":       {"istio", "istio.io/istio/istioctl/cmd/istioctl"},
	"pilot-agent":    {"istio", "istio.io/istio/pilot/cmd/pilot-agent"},
	"step-ca":        {"step-ca", "github.com/smallstep/certificates/cmd/step-ca"},
	"nats-server":    {"nats-server", "github.com/nats-io/nats-server/v2"},
	"spire-agent":    {"spire", "github.com/spiffe/spire/cmd/spire-agent"},
	"spire-server":   {"spire", "github.com/spiffe/spire/cmd/spire-server"},
	"zts-svccert":    {"athenz", "github.com/AthenZ/athenz/utils/zts-svccert"},
}

// A peer is what is made once.
type peer struct {
	file string                  // in the cache
	make func(path string) error // makes it at another path
}

func peerOf(name string) (*peer, error) {
	switch name {
	case pySpiffe:
		return python(pySpiffe, "spiffe", PySpiffe)
	case cryptography:
		return python(cryptography, "cryptography", Cryptography)
	case nodeJS:
		return node()
	case rustls:
		return rust()
	case openBao:
		return bao(), nil
	case keycloak:
		return keycloakDist(), nil
	}
	p, ok := programs[name]
	if !ok {
		return nil, errors.New("there is no such peer")
	}
	module := filepath.Join("programs", p.module)
	sum, err := hashOf(module, Toolchain)
	if err != nil {
		return nil, err
	}
	dir, cgo := name+"-"+sum, "CGO_ENABLED=0"
	if name == "spire-server" {
		dir, cgo = dir+"-cgo", "CGO_ENABLED=1" // its database, SQLite, is in C
	}
	return &peer{filepath.Join(dir, name), func(path string) error {
		// With the tags, all that is not in C is compiled once for both.
		cmd := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-s -w", "-tags=netgo,osusergo", "-o", path,
			p.pkg)
		cmd.Dir = module
		cmd.Env = append(os.Environ(), cgo, "GOFLAGS=", "GOWORK=off", "GOEXPERIMENT=", "GOTOOLCHAIN="+Toolchain)
		return run(cmd)
	}}, nil
}

// Names returns the names that [Build] takes.
func Names() []string {
	return append(slices.Sorted(maps.Keys(programs)), pySpiffe, cryptography, openBao, keycloak, nodeJS, rustls)
}

// Program returns the path of a peer that is built. If it is not, the test skips, or, where peers are required, builds
// it.
func Program(t testing.TB, name string) string {
	t.Helper()
	if os.Getenv(modeEnv) == "require" {
		path, err := Build(name)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	p, err := peerOf(name)
	if err != nil {
		t.Skipf("peers: %s: %v", name, err)
	}
	path, err := p.path()
	switch {
	case err != nil:
		t.Fatal(err)
	case !exists(path):
		t.Skipf("peers: %s is not built on this machine; go run ./build does that", name)
	}
	return path
}

// Build returns the path of a program, or of the directory of a Python package, and makes it first if there is none
// that was made from the same files by the same Go or Python. It must be called in the directory of this package, as
// tests and go run are. Calls in several processes wait for each other.
func Build(name string) (string, error) {
	p, err := peerOf(name)
	if err != nil {
		return "", fmt.Errorf("peers: %s: %w", name, err)
	}
	path, err := p.once()
	if err != nil {
		return "", fmt.Errorf("peers: build %s: %w", name, err)
	}
	return path, nil
}

// path returns where the peer is, once it was made.
func (p *peer) path() (string, error) {
	cache := os.Getenv(cacheEnv)
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(user, "svidkit-peers")
	}
	return filepath.Abs(filepath.Join(cache, p.file))
}

// once makes the peer unless that was done. It appears as a whole.
func (p *peer) once() (string, error) {
	path, err := p.path()
	if err != nil || exists(path) {
		return path, err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.Create(filepath.Join(dir, ".lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close() // which gives the lock back
	if err := flock.Lock(lock); err != nil {
		return "", err
	}
	if exists(path) { // made by the process that had the lock
		return path, nil
	}
	scratch, err := os.MkdirTemp(dir, ".new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(scratch)
	made := filepath.Join(scratch, filepath.Base(path))
	if err := p.make(made); err != nil {
		return "", err
	}
	return path, os.Rename(made, path)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// hashOf names the files of a directory, what builds them and the system.
func hashOf(dir, builder string) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%s %s %s\n", builder, runtime.GOOS, runtime.GOARCH)
	files := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		data, err := os.ReadFile(path)
		fmt.Fprintf(h, "%s %d\n%s", filepath.ToSlash(path), len(data), data)
		return err
	})
	if err == nil && files == 0 {
		err = errors.New("it has no files")
	}
	return hex.EncodeToString(h.Sum(nil))[:20], err
}

// run runs a command. The error has the end of what it printed.
func run(cmd *exec.Cmd) error {
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, tail(out))
	}
	return nil
}

// tail returns the last 4 KiB of an output.
func tail(out []byte) []byte { return out[max(0, len(out)-4<<10):] }

// tailOf returns the end of a file, for the message of a test.
func tailOf(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close() // only read
	if st, err := f.Stat(); err == nil {
		_, _ = f.Seek(max(0, st.Size()-4<<10), io.SeekStart) // or else all of it
	}
	out, _ := io.ReadAll(f) // what can be read
	return string(tail(out))
}
