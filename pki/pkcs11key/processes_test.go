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
		"child-share": childShare, "child-make": childMake, "child-restart": childRestart,
	}
}

// child is another process with the tokens of this one.
type child struct {
	*exec.Cmd
	in  io.Closer
	out *bufio.Scanner
}

func start(t *testing.T, args ...string) child {
	t.Helper()
	c := exec.Command(must.Get(os.Executable())(t), args...)
	c.Stderr = os.Stderr
	in, out := must.Get(c.StdinPipe())(t), must.Get(c.StdoutPipe())(t)
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return child{c, in, bufio.NewScanner(out)}
}

func childOpen(ctx context.Context, label string, args []string) (Token, error) {
	return Open(ctx, Options{Module: args[0], Token: label, PINFile: args[1], SealKey: "of all"})
}

// childShare seals, uses the keys of these names, and makes others.
func childShare(ctx context.Context, args ...string) error {
	k, err := childOpen(ctx, "TestProcesses", args)
	if err != nil {
		return err
	}
	fmt.Println("logged in")
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	box, err := k.Seal(ctx, []byte("secret"), nil)
	if err != nil {
		return err
	}
	fmt.Printf("%x\n", box)
	for _, name := range args[2:] {
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

// Processes seal, make keys and sign at the same time; afterwards another has the keys and boxes of all.
func TestProcesses(t *testing.T) {
	t.Parallel()
	o := options(t)
	o.SealKey = "of all"
	k, ctx := openAs(t, o), t.Context()
	var names []string
	for range 5 {
		names = append(names, newName())
		_ = must.Get(k.NewKey(ctx, names[len(names)-1], "ecdsa-p256"))(t)
	}
	var running []child
	for range 3 { // one after another, as SoftHSM fails when several log in at the same time
		c := start(t, append([]string{"child-share", softHSM, o.PINFile}, names...)...)
		running = append(running, c)
		require.True(t, c.out.Scan())
		require.Equal(t, "logged in", c.out.Text())
	}
	for _, c := range running {
		require.NoError(t, c.in.Close())
	}
	var boxes []string
	for _, c := range running {
		for first := true; c.out.Scan(); first = false {
			if first {
				boxes = append(boxes, c.out.Text())
			} else {
				names = append(names, c.out.Text())
			}
		}
		require.NoError(t, c.Wait(), "%q %q", boxes, names)
	}
	require.Len(t, names, 20)
	assert.ElementsMatch(t, names, must.Get(k.Keys(ctx, "svidkit-"))(t))
	for _, name := range names {
		_ = must.Get(signed(must.Get(k.Key(ctx, name))(t)))(t)
		require.NoError(t, k.Destroy(ctx, name))
	}
	for _, text := range boxes {
		var box []byte
		_ = must.Get(fmt.Sscanf(text, "%x", &box))(t)
		assert.Equal(t, "secret", string(must.Get(k.Unseal(ctx, box, nil))(t)))
	}
}

// childMake makes keys until it is killed.
func childMake(ctx context.Context, args ...string) error {
	k, err := childOpen(ctx, "TestKilled", args)
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
	o := options(t)
	f := newFaulty(t)
	k, ctx := openAs(t, o), t.Context()
	for i := range 14 {
		prefix, module := newName(), softHSM
		if at := slices.Index([]string{"kill", "killafter"}, []string{"kill", "killafter", ""}[min(i, 2)]); at >= 0 {
			module = f.path
			f.set(fmt.Sprintf("%d %s 0 0", generateKeyPair, []string{"kill", "killafter"}[at]))
		}
		c := start(t, "child-make", module, o.PINFile, prefix)
		require.True(t, c.out.Scan())
		names := []string{c.out.Text()}
		if i >= 2 {
			time.AfterFunc(rand.N(30*time.Millisecond), func() { _ = c.Process.Kill() })
		}
		for c.out.Scan() {
			names = append(names, c.out.Text())
		}
		assert.Error(t, c.Wait())
		for j, name := range names {
			key, err := k.Key(ctx, name)
			if j < len(names)-1 {
				require.NoError(t, err)
			}
			if err == nil {
				_ = must.Get(signed(key))(t)
			}
		}
		listed := must.Get(k.Keys(ctx, prefix))(t)
		assert.Subset(t, names, listed)
		assert.Subset(t, listed, names[:len(names)-1])
		for _, name := range listed {
			require.NoError(t, k.Destroy(ctx, name))
		}
		assert.Empty(t, must.Get(k.Keys(ctx, prefix))(t))
		if i < 2 {
			assert.Len(t, listed, i, "killed before or after it is made")
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
	if err := initTokens(args[2], "mine"); err != nil {
		return err
	}
	k, err := childOpen(ctx, "mine", args)
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
	o := options(t)
	c := start(t, "child-restart", softHSM, o.PINFile, t.TempDir())
	for c.out.Scan() {
		t.Log(c.out.Text())
	}
	require.NoError(t, c.Wait())
}
