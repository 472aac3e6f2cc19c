//go:build cgo

package pkcs11key

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/pkcs11"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// children are what other processes do, by the first argument of this program; the others are the module, the file
// with the PIN, and more.
var children map[string]func(ctx context.Context, args ...string) error

func init() {
	children = map[string]func(ctx context.Context, args ...string) error{
		"child-share": childShare, "child-check": childCheck, "child-make": childMake, "child-restart": childRestart,
		"child-open": childOpenAtOnce,
	}
}

// child is another process, with the tokens in a directory.
type child struct {
	*exec.Cmd
	in  io.Closer
	out *bufio.Scanner
}

func start(t *testing.T, dir string, args ...string) child {
	t.Helper()
	c := exec.Command(must.Get(os.Executable())(t), args...)
	c.Env, c.Stderr = append(os.Environ(), "SOFTHSM2_CONF="+confOf(dir)), os.Stderr
	in, out := must.Get(c.StdinPipe())(t), must.Get(c.StdoutPipe())(t)
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return child{c, in, bufio.NewScanner(out)}
}

// childrensToken makes the token of a test's children.
func childrensToken(t *testing.T) (o Options, dir string) {
	t.Helper()
	o, dir = options(t), t.TempDir()
	require.NoError(t, initTokens(dir, "svidkit"))
	return o, dir
}

func childOpen(ctx context.Context, args []string) (Token, error) {
	return Open(ctx, Options{Module: args[0], Token: "svidkit", PINFile: args[1], SealKey: "of all"})
}

// childShare seals, uses the keys of these names, and makes others.
func childShare(ctx context.Context, args ...string) error {
	k, err := childOpen(ctx, args)
	if err != nil {
		return err
	}
	for _, name := range args[3:] {
		if _, err := k.NewKey(ctx, name, "ecdsa-p256"); (err == nil) != (args[2] == "0") {
			return fmt.Errorf("the first makes the keys: %w", err)
		}
	}
	fmt.Println("logged in")
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	box, err := k.Seal(ctx, []byte("secret"), nil)
	if err != nil {
		return err
	}
	fmt.Printf("box-%x\n", box)
	for _, name := range args[3:] {
		_, taken := k.NewKey(ctx, name, "ecdsa-p256")
		key, err := k.Key(ctx, name)
		if !errors.Is(taken, fs.ErrExist) || err != nil {
			return fmt.Errorf("%v, %w", taken, err)
		}
		own := newName()
		if _, err := k.NewKey(ctx, own, "ecdsa-p256"); err != nil {
			return err
		}
		fmt.Println(own)
		for range 20 {
			if _, err := signed(key); err != nil {
				return err
			}
		}
	}
	return k.Close()
}

// childCheck unseals boxes, and signs with keys and destroys them; of the last key there may be a part, or nothing. It
// prints how many keys of the prefix there were.
func childCheck(ctx context.Context, args ...string) error {
	k, err := childOpen(ctx, args)
	if err != nil {
		return err
	}
	prefix, names := args[2], args[3:]
	names = slices.DeleteFunc(names, func(text string) bool {
		var box []byte
		if n, _ := fmt.Sscanf(text, "box-%x", &box); n == 0 {
			return false
		}
		if secret, e := k.Unseal(ctx, box, nil); e != nil || string(secret) != "secret" {
			err = errors.Join(err, fmt.Errorf("unseal: %w", e))
		}
		return true
	})
	for i, name := range names {
		key, e := k.Key(ctx, name)
		if e == nil {
			_, e = signed(key)
		}
		if e != nil && i < len(names)-1 {
			err = errors.Join(err, e)
		}
	}
	listed, e := k.Keys(ctx, prefix)
	for _, name := range listed {
		err = errors.Join(err, k.Destroy(ctx, name))
		if !slices.Contains(names, name) {
			err = errors.Join(err, errors.New("also there: "+name))
		}
	}
	rest, e2 := k.Keys(ctx, prefix)
	if len(rest) > 0 || len(listed) < len(names)-1 {
		err = errors.Join(err, fmt.Errorf("listed %q, then %q of %q", listed, rest, names))
	}
	fmt.Println(len(listed))
	return errors.Join(err, e, e2, k.Close())
}

// check starts childCheck, and returns what it prints.
func check(t *testing.T, dir string, o Options, args ...string) (listed string) {
	t.Helper()
	c := start(t, dir, append([]string{"child-check", softHSM, o.PINFile}, args...)...)
	var out []string
	for c.out.Scan() {
		out = append(out, c.out.Text())
	}
	require.NoError(t, c.Wait(), "%q", out)
	return out[0]
}

// Processes seal, make keys and sign at the same time; afterwards another has the keys and boxes of all.
func TestProcesses(t *testing.T) {
	t.Parallel()
	o, dir := childrensToken(t)
	names := []string{newName(), newName(), newName()}
	var running []child
	for i := range 3 { // one after another, as SoftHSM fails when several log in at the same time
		c := start(t, dir, append([]string{"child-share", softHSM, o.PINFile, fmt.Sprint(i)}, names...)...)
		running = append(running, c)
		require.True(t, c.out.Scan())
		require.Equal(t, "logged in", c.out.Text())
	}
	for _, c := range running {
		require.NoError(t, c.in.Close())
	}
	args := append([]string{"svidkit-"}, names...)
	for _, c := range running {
		for c.out.Scan() {
			args = append(args, c.out.Text())
		}
		require.NoError(t, c.Wait(), "%q", args)
	}
	assert.Equal(t, "12", check(t, dir, o, append(args, names[0])...)) // the last may be missing
}

// childMake makes keys until it is killed.
func childMake(ctx context.Context, args ...string) error {
	k, err := childOpen(ctx, args)
	for i := 0; err == nil; i++ {
		name := fmt.Sprint(args[2], i)
		fmt.Println(name)
		_, err = k.NewKey(ctx, name, "ecdsa-p256")
	}
	return err
}

// A process is killed while it makes keys: those from before are whole, and what is left of the last can be found and
// destroyed.
func TestKilled(t *testing.T) {
	t.Parallel()
	o, dir := childrensToken(t)
	f := newFaulty(t)
	for i := range 12 {
		prefix, module := newName(), softHSM
		if i < 2 {
			module = f.path
			f.set(fmt.Sprintf("%d %s 0 0", generateKeyPair, []string{"kill", "killafter"}[i]))
		}
		c := start(t, dir, "child-make", module, o.PINFile, prefix)
		require.True(t, c.out.Scan())
		args := []string{prefix, c.out.Text()}
		if i >= 2 {
			time.AfterFunc(rand.N(30*time.Millisecond), func() { _ = c.Process.Kill() })
		}
		for c.out.Scan() {
			args = append(args, c.out.Text())
		}
		assert.Error(t, c.Wait())
		if listed := check(t, dir, o, args...); i < 2 {
			assert.Equal(t, fmt.Sprint(i), listed, "killed before or after it is made")
		}
	}
}

// moveTokens moves the folders of tokens.
func moveTokens(from, to string) error {
	_ = os.Mkdir(to, 0o700)
	entries, err := os.ReadDir(from)
	for _, e := range entries {
		if e.IsDir() && len(e.Name()) > 20 { // a UUID
			err = errors.Join(err, os.Rename(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())))
		}
	}
	return err
}

// childRestart uses a token through a restart of the module, and through the loss of the token.
func childRestart(ctx context.Context, args ...string) error {
	k, err := childOpen(ctx, args)
	if err != nil {
		return err
	}
	name := newName()
	key, err := k.NewKey(ctx, name, "ecdsa-p256")
	if err != nil {
		return err
	}
	module := pkcs11.New(args[0])
	for _, step := range []struct {
		do   func() error
		want string
	}{
		{func() error { return nil }, ""},
		{module.Finalize, ""},
		{func() error { return errors.Join(module.Finalize(), moveTokens(args[2], args[2]+"/away")) }, "0 tokens"},
		{func() error { return errors.Join(module.Finalize(), moveTokens(args[2]+"/away", args[2])) }, ""},
	} {
		if err := step.do(); err != nil {
			return err
		}
		_, signErr := signed(key)
		_, keyErr := k.Key(ctx, name)
		_, listErr := k.Keys(ctx, name)
		for _, err := range []error{signErr, keyErr, listErr} {
			if (err == nil) != (step.want == "") || errors.Is(err, fs.ErrNotExist) ||
				err != nil && !strings.Contains(err.Error(), step.want) {
				return fmt.Errorf("%v in place of %q", err, step.want)
			}
		}
	}
	return errors.Join(k.Destroy(ctx, name), k.Close())
}

// TestRestart is in a process of its own, as it ends the module for all of its process.
func TestRestart(t *testing.T) {
	t.Parallel()
	o, dir := childrensToken(t)
	c := start(t, dir, "child-restart", softHSM, o.PINFile, dir)
	for c.out.Scan() {
		t.Log(c.out.Text())
	}
	require.NoError(t, c.Wait())
}

// childOpenAtOnce opens a token several times at the same time.
func childOpenAtOnce(ctx context.Context, args ...string) error {
	results := make(chan error)
	for range 8 {
		go func() {
			k, err := childOpen(ctx, args)
			if err == nil {
				_, err = k.Keys(ctx, "")
			}
			results <- err
		}()
	}
	var err error
	for range 8 {
		err = errors.Join(err, <-results)
	}
	return err
}

// A program may open several tokens of a module at the same time, which starts once.
func TestOpenAtOnce(t *testing.T) {
	t.Parallel()
	o, dir := childrensToken(t)
	for range 10 {
		c := start(t, dir, "child-open", softHSM, o.PINFile)
		for c.out.Scan() {
			t.Log(c.out.Text())
		}
		require.NoError(t, c.Wait())
	}
}
