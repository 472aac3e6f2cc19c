package tpmkey_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/tpmkey"
	"github.com/svidkit/svidkit/spiffe"
)

var secret = []byte("0123456789abcdef0123456789ABCDEF")

func TestCustodian(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	dir := filepath.Join(t.TempDir(), "keys")
	custodiantest.Run(t, func(t testing.TB) ca.Custodian { return must.Get(open(t, c.socket).Custodian(dir))(t) },
		custodiantest.Options{Algorithms: []string{"ecdsa-p256", "ecdsa-p384", "rsa-2048"}})
	noneLoaded(t, c.socket)
	require.Empty(t, must.Get(os.ReadDir(dir))(t), "files were left")
}

func TestSealer(t *testing.T) {
	t.Parallel()
	path := newChip(t).shared()
	sealer := func(dir string) func(testing.TB) ca.Sealer {
		return func(t testing.TB) ca.Sealer { return must.Get(open(t, path).Custodian(dir))(t) }
	}
	dir, other := filepath.Join(t.TempDir(), "keys"), filepath.Join(t.TempDir(), "keys")
	t.Run("prepare", func(t *testing.T) {
		s := sealer(other)(t)
		one, two := must.Get(s.Seal(t.Context(), secret, nil))(t), must.Get(s.Seal(t.Context(), secret, nil))(t)
		require.NotEqual(t, one[:20], two[:20], "each secret has a salt, and so a key, of its own")
	})
	custodiantest.Sealer(t, sealer(dir), sealer(other), sealer(filepath.Join(t.TempDir(), "keys")))
}

// A key that is made after its caller has gone is not kept.
func TestLate(t *testing.T) {
	t.Parallel()
	chip := newChip(t)
	slow, release := make(chan struct{}), make(chan struct{})
	tpm := must.Get(tpmkey.New(func() (transport.TPMCloser, error) {
		conn, err := net.Dial("unix", chip.socket)
		if err != nil {
			return nil, err
		}
		return &faulty{transport.FromReadWriteCloser(conn), func(command []byte) ([]byte, error) {
			if bytes.Equal(command[6:10], []byte{0, 0, 1, 0x53}) { // TPM2_Create
				close(slow)
				<-release
			}
			return nil, nil
		}}, nil
	}))(t)
	dir := filepath.Join(t.TempDir(), "keys")
	c := must.Get(tpm.Custodian(dir))(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-slow
		cancel()
	}()
	_, err := c.NewKey(ctx, "root", "ecdsa-p256")
	require.ErrorIs(t, err, context.Canceled)
	waiting, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err = c.Keys(waiting, "")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	close(release)
	require.Empty(t, must.Get(c.Keys(t.Context(), ""))(t))
	require.Empty(t, must.Get(os.ReadDir(dir))(t))
	noneLoadedAfter(t, tpm, chip)
}

// A directory and files that others can read are refused, and new ones are not readable.
func TestModes(t *testing.T) {
	t.Parallel()
	tpm := newChip(t).open()
	dir := filepath.Join(t.TempDir(), "a", "keys")
	c := must.Get(tpm.Custodian(dir))(t)
	_ = must.Get(c.NewKey(t.Context(), "root", "ecdsa-p256"))(t)
	_ = must.Get(c.Seal(t.Context(), secret, nil))(t)
	entries := must.Get(os.ReadDir(dir))(t)
	require.Len(t, entries, 2)
	for _, entry := range entries {
		require.Equal(t, fs.FileMode(0o600), must.Get(entry.Info())(t).Mode(), entry.Name())
	}
	require.Equal(t, fs.ModeDir|0o700, must.Get(os.Stat(dir))(t).Mode())
	require.NoError(t, os.Chmod(dir, 0o750))
	_, err := tpm.Custodian(dir)
	require.ErrorContains(t, err, "chmod")

	for _, name := range []string{"../root", "a/b", "..", "", "ROOT", "root.tpmkey", "%2e"} {
		key := must.Get(c.NewKey(t.Context(), name, "ecdsa-p256"))(t, name)
		found := must.Get(c.Key(t.Context(), name))(t, name)
		require.True(t, pki.PublicKeysEqual(key.Public(), found.Public()), name)
		require.Equal(t, []string{name}, must.Get(c.Keys(t.Context(), name))(t)[:1], name)
		require.NoError(t, c.Destroy(t.Context(), name))
	}
	require.Len(t, must.Get(os.ReadDir(dir))(t), 2)
	require.Len(t, must.Get(os.ReadDir(filepath.Dir(dir)))(t), 1, "a name led out of the directory")
}

// TestFiles has the files of keys cut, changed, exchanged and copied to another machine. No such key is missing: the
// error says what is wrong.
func TestFiles(t *testing.T) {
	t.Parallel()
	chip, elsewhere := newChip(t), newChip(t)
	tpm := chip.open()
	dir := filepath.Join(t.TempDir(), "keys")
	c := must.Get(tpm.Custodian(dir))(t)
	ctx := t.Context()
	root := must.Get(c.NewKey(ctx, "root", "ecdsa-p256"))(t)
	token := must.Get(c.NewKey(ctx, "token", "rsa-2048"))(t)
	sealed := must.Get(c.Seal(ctx, secret, nil))(t)
	files := map[string][]byte{}
	for _, name := range []string{"root.tpmkey", "token.tpmkey", "sealing-key.tpmhmac"} {
		files[name] = must.Get(os.ReadFile(filepath.Join(dir, name)))(t)
	}
	write := func(name string, data []byte) {
		t.Helper()
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	damaged := func(what string) {
		t.Helper()
		_, err := c.Key(ctx, "root")
		require.ErrorIs(t, err, fs.ErrInvalid, what)
		require.NotErrorIs(t, err, fs.ErrNotExist, what)
		require.ErrorContains(t, err, filepath.Join(dir, "root.tpmkey"), what)
		require.Contains(t, must.Get(c.Keys(ctx, "r"))(t), "root", what)
	}
	whole := files["root.tpmkey"]
	for size := range len(whole) {
		write("root.tpmkey", whole[:size])
		damaged(fmt.Sprintf("cut to %d bytes", size))
	}
	for i := range whole {
		for _, bit := range []byte{1, 0x20, 0x80} {
			changed := append([]byte(nil), whole...)
			changed[i] ^= bit
			write("root.tpmkey", changed)
			// What JSON does not distinguish, such as capital letters of a name, may change.
			if key, err := c.Key(ctx, "root"); err == nil {
				require.True(t, pki.PublicKeysEqual(key.Public(), root.Public()), "byte %d", i)
				require.NoError(t, sign(key))
			} else {
				require.ErrorIs(t, err, fs.ErrInvalid, "byte %d", i)
			}
		}
	}
	write("root.tpmkey", append(whole[:len(whole):len(whole)], '{'))
	damaged("longer")
	write("root.tpmkey", files["token.tpmkey"])
	damaged("the file of another key")
	write("root.tpmkey", files["sealing-key.tpmhmac"])
	damaged("the file of the sealing key")
	write("root.tpmkey", whole)
	found := must.Get(c.Key(ctx, "root"))(t)
	require.True(t, pki.PublicKeysEqual(found.Public(), root.Public()))
	require.NoError(t, sign(token))

	// On another machine nothing works, and nothing is missing.
	there := must.Get(elsewhere.open().Custodian(dir))(t)
	_, err := there.Key(ctx, "root")
	require.ErrorIs(t, err, fs.ErrInvalid)
	require.NotErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "another TPM has made this key")
	_, err = there.NewKey(ctx, "root", "ecdsa-p256")
	require.ErrorIs(t, err, fs.ErrExist)
	_, err = there.Unseal(ctx, sealed, nil)
	require.ErrorIs(t, err, fs.ErrInvalid)
	require.ErrorContains(t, err, "another TPM has made this key")
	_, err = there.Seal(ctx, secret, nil)
	require.ErrorIs(t, err, fs.ErrInvalid)
	require.Len(t, must.Get(there.Keys(ctx, ""))(t), 2)

	// The file of a key has no key in it, and the TPM gives it to no other.
	for name, data := range files {
		var has struct{ Public []byte }
		require.NoError(t, json.Unmarshal(data, &has))
		area := must.Get(tpm2.Unmarshal[tpm2.TPMTPublic](has.Public))(t)
		require.Equal(t, tpm2.TPMAObject{FixedTPM: true, FixedParent: true, SensitiveDataOrigin: true, UserWithAuth: true,
			NoDA: true, SignEncrypt: true}, area.ObjectAttributes, name)
	}
	for _, der := range [][]byte{whole, must.Get(base64.StdEncoding.AppendDecode(nil, []byte(
		strings.Split(string(whole), `"`)[7])))(t)} {
		_, err := x509.ParsePKCS8PrivateKey(der)
		require.Error(t, err)
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "sealing-key.tpmhmac")))
	_, err = c.Unseal(ctx, sealed, nil)
	require.ErrorIs(t, err, fs.ErrNotExist)
	_ = must.Get(c.Seal(ctx, secret, nil))(t)
	_, err = c.Unseal(ctx, sealed, nil)
	require.ErrorIs(t, err, fs.ErrInvalid)
	noneLoadedAfter(t, tpm, chip)
}

func noneLoadedAfter(t *testing.T, tpm *tpmkey.TPM, c *chip) {
	t.Helper()
	require.NoError(t, tpm.Close())
	noneLoaded(t, c.socket)
}

// After a loss of power the directory is in one of the states that a new key goes through.
func TestPowerLoss(t *testing.T) {
	t.Parallel()
	tpm := newChip(t).open()
	from, ctx := filepath.Join(t.TempDir(), "keys"), t.Context()
	key := must.Get(must.Get(tpm.Custodian(from))(t).NewKey(ctx, "root", "ecdsa-p256"))(t)
	whole := must.Get(os.ReadFile(filepath.Join(from, "root.tpmkey")))(t)
	for name, x := range map[string]struct {
		files map[string][]byte
		has   bool
	}{
		"before":         {map[string][]byte{}, false},
		"empty draft":    {map[string][]byte{"draft-A.new": nil}, false},
		"half a draft":   {map[string][]byte{"draft-A.new": whole[:100]}, false},
		"draft":          {map[string][]byte{"draft-A": whole}, false},
		"draft and file": {map[string][]byte{"draft-A": whole, "root.tpmkey": whole}, true},
		"file":           {map[string][]byte{"root.tpmkey": whole}, true},
	} {
		dir := t.TempDir()
		require.NoError(t, os.Chmod(dir, 0o700))
		for file, data := range x.files {
			require.NoError(t, os.WriteFile(filepath.Join(dir, file), data, 0o600))
		}
		c := must.Get(tpm.Custodian(dir))(t)
		found, err := c.Key(ctx, "root")
		if !x.has {
			require.ErrorIs(t, err, fs.ErrNotExist, name)
			require.Empty(t, must.Get(c.Keys(ctx, ""))(t), name)
			_ = must.Get(c.NewKey(ctx, "root", "ecdsa-p256"))(t, name)
		} else {
			require.NoError(t, err, name)
			require.True(t, pki.PublicKeysEqual(found.Public(), key.Public()), name)
			require.NoError(t, sign(found), name)
		}
		require.Equal(t, []string{"root"}, must.Get(c.Keys(ctx, ""))(t), name)
	}
}

// A CA with its keys in the TPM issues, rotates and starts again, and its store is of no use elsewhere.
func TestAuthority(t *testing.T) {
	t.Parallel()
	here, elsewhere := newChip(t), newChip(t)
	dir := t.TempDir()
	start := func(c *chip, create bool, keys string) (*ca.Authority, error) {
		tpm := must.Get(tpmkey.Open(c.socket))(t)
		t.Cleanup(func() { _ = tpm.Close() })
		custodian := must.Get(tpm.Custodian(filepath.Join(dir, keys)))(t)
		return ca.Open(t.Context(), ca.Config{
			TrustDomain: spiffe.MustParseTrustDomain("example.org"), Create: create, JWT: &ca.JWTConfig{Algorithm: "RS256"},
			Custody: ca.Custody{Keys: custodian, Seal: custodian},
		}, must.Get(ca.NewDirStore(filepath.Join(dir, "store")))(t))
	}
	web := spiffe.MustParseID("spiffe://example.org/web")
	csr := must.Get(pki.NewCSR(must.Get(pki.NewKey("ecdsa-p256"))(t), pki.CSROptions{}))(t)
	issue := func(a *ca.Authority) {
		t.Helper()
		chain := must.Get(a.Sign(t.Context(), ca.Request{ID: web, CSR: csr}))(t)
		verifier := must.Get(spiffe.NewVerifier(a.Bundle(), spiffe.AllowIDs(web), nil))(t)
		_ = must.Get(verifier.VerifyChain(chain, spiffe.ServerRole))(t)
		_ = must.Get(a.IssueJWTSVID(t.Context(), web, []string{"db"}))(t)
	}
	a := must.Get(start(here, true, "keys"))(t)
	issue(a)
	_ = must.Get(a.Rotate(t.Context()))(t)
	issue(a)
	here.stop()
	_, err := a.Sign(t.Context(), ca.Request{ID: web, CSR: csr})
	require.ErrorContains(t, err, "tpmkey: connect to the TPM", "the TPM is away")
	here.start()
	issue(a)
	require.Empty(t, must.Get(a.Orphans(t.Context()))(t))
	here.stop() // its one connection
	here.start()
	issue(must.Get(start(here, false, "keys"))(t))

	_, err = start(elsewhere, false, "keys")
	require.ErrorIs(t, err, ca.ErrUnfit, "on another machine")
	require.ErrorContains(t, err, "another TPM has made this key, or the TPM was cleared")
	here.stop()
	here.start()
	_, err = start(here, false, "other keys")
	require.ErrorIs(t, err, ca.ErrUnfit, "without the keys")
	require.ErrorContains(t, err, "sealing-key.tpmhmac")
}

// TestMain also runs as a child process of a test, which makes keys and prints their names when they are made.
func TestMain(m *testing.M) {
	if job := os.Getenv("TPMKEY_TEST_CHILD"); job != "" {
		if err := child(strings.Split(job, " ")); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child makes keys with the names PREFIX0 and so on, until it is killed or has made ten of them.
func child(job []string) error {
	socket, dir, prefix, ends := job[0], job[1], job[2], job[3] == "ends"
	tpm, err := tpmkey.Open(socket)
	if err != nil {
		return err
	}
	defer tpm.Close()
	c, err := tpm.Custodian(dir)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sealed, err := c.Seal(ctx, secret, []byte("all"))
	if err != nil {
		return err
	}
	fmt.Println("sealed", base64.StdEncoding.EncodeToString(sealed))
	for i := 0; !ends || i < 10; i++ {
		name := fmt.Sprint(prefix, i)
		key, err := c.NewKey(ctx, name, "ecdsa-p256")
		if errors.Is(err, fs.ErrExist) && ends {
			fmt.Println("taken", name)
			if key, err = c.Key(ctx, name); err == nil {
				err = sign(key)
			}
		} else if err == nil {
			fmt.Println("made", name)
			err = sign(key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// run starts a child, which the test waits for or kills. lines has what it prints.
func run(t testing.TB, job ...string) (cmd *exec.Cmd, lines *bufio.Scanner) {
	cmd = exec.Command(must.Get(os.Executable())(t))
	cmd.Env = append(os.Environ(), "TPMKEY_TEST_CHILD="+strings.Join(job, " "))
	out := must.Get(cmd.StdoutPipe())(t)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, bufio.NewScanner(out)
}

// Processes that share a TPM and a directory get one key for each name, and one key that seals.
func TestProcesses(t *testing.T) {
	t.Parallel()
	chip := newChip(t)
	socket, dir := chip.shared(), filepath.Join(chip.dir, "keys")
	var mu sync.Mutex
	said := map[string]int{}
	var boxes [][]byte
	var wg sync.WaitGroup
	for range 3 {
		cmd, lines := run(t, socket, dir, "key-", "ends")
		wg.Go(func() {
			for lines.Scan() {
				mu.Lock()
				if box, ok := strings.CutPrefix(lines.Text(), "sealed "); ok {
					boxes = append(boxes, must.Do(base64.StdEncoding.DecodeString(box)))
				} else {
					said[lines.Text()]++
				}
				mu.Unlock()
			}
			assert.NoError(t, cmd.Wait())
		})
	}
	wg.Wait()
	c := must.Get(open(t, socket).Custodian(dir))(t)
	for i := range 10 {
		require.Equal(t, 1, said[fmt.Sprint("made key-", i)], "%v", said)
		require.Equal(t, 2, said[fmt.Sprint("taken key-", i)], "%v", said)
		require.NoError(t, sign(must.Get(c.Key(t.Context(), fmt.Sprint("key-", i)))(t)))
	}
	require.Len(t, said, 20, "%v", said)
	require.Len(t, boxes, 3)
	for _, box := range boxes {
		require.Equal(t, secret, must.Get(c.Unseal(t.Context(), box, []byte("all")))(t))
	}
	require.Len(t, must.Get(c.Keys(t.Context(), ""))(t), 10)
	noneLoaded(t, socket)
}

// A process that is killed while it makes keys has lost none that it said were made, and leaves none that is half.
func TestKill(t *testing.T) {
	t.Parallel()
	chip := newChip(t)
	socket, dir := chip.shared(), filepath.Join(chip.dir, "keys")
	for round := range 12 {
		var made []string
		cmd, lines := run(t, socket, dir, fmt.Sprintf("round%d-", round), "never")
		for lines.Scan() {
			if name, ok := strings.CutPrefix(lines.Text(), "made "); ok {
				if made = append(made, name); len(made) == 1+round {
					_ = cmd.Process.Kill()
				}
			}
		}
		_ = cmd.Wait()
		require.GreaterOrEqual(t, len(made), 1+round)
		c := must.Get(open(t, socket).Custodian(dir))(t)
		names := must.Get(c.Keys(t.Context(), fmt.Sprintf("round%d-", round)))(t)
		require.Subset(t, names, made)
		require.LessOrEqual(t, len(names), len(made)+1)
		for _, name := range names {
			require.NoError(t, sign(must.Get(c.Key(t.Context(), name))(t)), name)
		}
	}
	noneLoaded(t, socket)
}
