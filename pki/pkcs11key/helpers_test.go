//go:build cgo

package pkcs11key

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/pkcs11"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

const userPIN = "the-user's-PIN"

// Functions of a module, by their places in its list.
const (
	getTokenInfo    = 6
	openSession     = 12
	closeSession    = 13
	getSessionInfo  = 15
	login           = 18
	destroyObject   = 22
	getAttribute    = 24
	findInit        = 26
	find            = 27
	encryptInit     = 29
	decryptInit     = 33
	decrypt         = 34
	signInit        = 42
	sign            = 43
	generateKeyPair = 59
)

// softHSM is the library, or "" if it is missing.
var softHSM string

// labels are those of the tokens that TestMain makes. A test has one to itself, as SoftHSM fails when several change a
// token at the same time.
var labels = []string{"twin", "twin", "TestCustodian", "TestSealer", "TestTwoSealKeys", "TestOpen", "TestWrongPIN",
	"TestLoginEnds", "TestLost", "TestUnsealDoubt", "TestMadeInSpite", "TestHang", "TestWrongSignatures", "TestHalves",
	"TestSameName", "TestPrivate", "TestPublicKeys", "TestProcesses", "TestKilled", "TestRestart", "BenchmarkSign"}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	for _, path := range []string{"/usr/lib/softhsm/libsofthsm2.so", "/usr/local/lib/softhsm/libsofthsm2.so",
		"/usr/lib64/softhsm/libsofthsm2.so", "/opt/homebrew/lib/softhsm/libsofthsm2.so"} {
		if _, err := os.Stat(path); err == nil {
			softHSM = path
		}
	}
	if len(os.Args) > 1 && children[os.Args[1]] != nil {
		if err := children[os.Args[1]](context.Background(), os.Args[2:]...); err != nil {
			fmt.Println("failed:", err)
			return 1
		}
		return 0
	}
	if softHSM == "" {
		return m.Run()
	}
	dir := must.Do(os.MkdirTemp("", "p11"))
	defer os.RemoveAll(dir)
	if err := initTokens(dir, labels...); err != nil {
		fmt.Println(err)
		return 1
	}
	return m.Run()
}

// initTokens makes tokens in dir for this process and its children.
func initTokens(dir string, labels ...string) error {
	conf := dir + "/softhsm2.conf"
	os.Setenv("SOFTHSM2_CONF", conf)
	text := fmt.Appendf(nil, "directories.tokendir = %s\nlog.level = ERROR\n", dir)
	if err := os.WriteFile(conf, text, 0o600); err != nil {
		return err
	}
	for _, l := range labels {
		c := exec.Command("softhsm2-util", "--init-token", "--free", "--label", l, "--so-pin", "so-pin-1", "--pin", userPIN)
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("softhsm2-util: %w: %s", err, out)
		}
	}
	return nil
}

// options are those of the test's token, with a file for its PIN.
func options(t testing.TB) Options {
	t.Helper()
	if softHSM == "" {
		t.Skip("SoftHSM is missing: install softhsm2")
	}
	label, _, _ := strings.Cut(t.Name(), "/")
	o := Options{Module: softHSM, Token: label, PINFile: filepath.Join(t.TempDir(), "pin")}
	setPIN(t, o, userPIN)
	return o
}

func setPIN(t testing.TB, o Options, pin string) {
	t.Helper()
	require.NoError(t, os.WriteFile(o.PINFile, []byte(pin+"\n"), 0o600))
}

func openAs(t testing.TB, o Options) *token {
	t.Helper()
	k := must.Get(Open(t.Context(), o))(t)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	return k.(*token)
}

// faulty is a module over SoftHSM that fails where a test says so.
type faulty struct {
	t    testing.TB
	path string
	id   int
}

func newFaulty(t testing.TB) *faulty {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("gcc is missing: ", err)
	}
	f := &faulty{t: t, path: filepath.Join(t.TempDir(), "faulty.so")}
	c := exec.Command(gcc, "-Wall", "-Werror", "-shared", "-fPIC", "-o", f.path, "testdata/faulty.c", "-ldl", "-lpthread",
		fmt.Sprintf("-DREAL=%q", softHSM), fmt.Sprintf("-DCONTROL=%q", f.path+".rules"),
		fmt.Sprintf("-DLOG=%q", f.path+".calls"))
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return f
}

// set sets the rules: function, action, argument and times each.
func (f *faulty) set(rules ...string) {
	f.t.Helper()
	var text strings.Builder
	for _, r := range rules {
		if f.id++; r == "" {
			continue
		}
		fmt.Fprintln(&text, f.id, r)
	}
	require.NoError(f.t, os.WriteFile(f.path+".new", []byte(text.String()), 0o600))
	require.NoError(f.t, os.Rename(f.path+".new", f.path+".rules"))
}

// calls returns how often a function has been called.
func (f *faulty) calls(function int) int {
	text, _ := os.ReadFile(f.path + ".calls")
	n := 0
	for line := range strings.Lines(string(text)) {
		if line == fmt.Sprintln(function) {
			n++
		}
	}
	return n
}

// raw is another part of the process that uses the token, by a session that is logged in.
type raw struct {
	*pkcs11.Ctx
	slot uint
	h    pkcs11.SessionHandle
}

func newRaw(t testing.TB, o Options) raw {
	t.Helper()
	r := raw{Ctx: pkcs11.New(softHSM)}
	require.NotNil(t, r.Ctx)
	if err := r.Initialize(); err != nil {
		require.Equal(t, pkcs11.Error(pkcs11.CKR_CRYPTOKI_ALREADY_INITIALIZED), err)
	}
	for _, id := range must.Get(r.GetSlotList(true))(t) {
		if must.Get(r.GetTokenInfo(id))(t).Label == o.Token {
			r.slot = id
		}
	}
	r.h = must.Get(r.OpenSession(r.slot, pkcs11.CKF_SERIAL_SESSION|pkcs11.CKF_RW_SESSION))(t)
	if err := r.Login(r.h, pkcs11.CKU_USER, userPIN); err != nil {
		require.Equal(t, pkcs11.Error(pkcs11.CKR_USER_ALREADY_LOGGED_IN), err)
	}
	t.Cleanup(func() { _ = r.CloseSession(r.h) })
	return r
}

// objects returns those with a label.
func (r raw) objects(t testing.TB, pairs ...any) (all []pkcs11.ObjectHandle) {
	t.Helper()
	require.NoError(t, r.FindObjectsInit(r.h, attributes(pairs...)))
	all, _, err := r.FindObjects(r.h, 1000)
	require.NoError(t, err)
	require.NoError(t, r.FindObjectsFinal(r.h))
	return all
}
