package ca_test

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

var crashDir = flag.String("crash-dir", "", "be the process that is killed, in this directory")

// The settings of a CA that lives fast.
const (
	crashTTL         = 2 * time.Second
	crashBackdate    = time.Second
	crashPropagation = 60 * time.Millisecond
)

func crashConfig(c *ca.Config) {
	c.DefaultTTL, c.MaxTTL, c.Backdate, c.Rotation.Propagation = crashTTL, crashTTL, crashBackdate, crashPropagation
	c.JWT = &ca.JWTConfig{DefaultTTL: time.Second, MaxTTL: 2 * time.Second}
}

// crashLine is one line of the child's log.
type crashLine struct {
	Leaf    string // DER in hexadecimal
	Serial  string
	Gone    string // a root that was tainted or revoked, from before it was
	Revoked string // a root that was reported as revoked
	Key     string // its key identifier in hexadecimal
	Root    string // a root that was reported as prepared
	At      time.Time
}

// lineAuditor writes each certificate to a file, and no certificate leaves before.
type lineAuditor struct{ f *os.File }

func (l lineAuditor) write(c crashLine) error {
	b, err := json.Marshal(c)
	if err == nil {
		_, err = l.f.Write(append(b, '\n')) // one write: lines do not mix
	}
	return err
}

func (l lineAuditor) Record(_ context.Context, i *ca.Issuance) error {
	return l.write(crashLine{Serial: i.Serial})
}

// TestCrashChild is not a test: it is the program that TestCrash kills.
func TestCrashChild(t *testing.T) {
	if *crashDir == "" {
		t.Skip("TestCrash starts it")
	}
	f := must.Get(os.OpenFile(filepath.Join(*crashDir, "audit"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600))(t)
	must.Get(f.WriteString("\n"))(t) // after a line that a kill has torn
	log := lineAuditor{f}
	store := must.Get(ca.NewDirStore(filepath.Join(*crashDir, "ca")))(t)
	a := open(t, store, crashConfig, func(c *ca.Config) { c.Auditor = log })
	go func() { _ = a.Run(context.Background()) }()
	csr := newCSR(t)
	go func() {
		for {
			if chain, err := a.Sign(context.Background(), ca.Request{CSR: csr, ID: web}); err == nil {
				_ = log.write(crashLine{Leaf: hex.EncodeToString(chain[0].Raw)})
			}
			time.Sleep(2 * time.Millisecond)
		}
	}()
	for ctx := context.Background(); ; {
		roots := a.Roots()
		some := roots[rand.IntN(len(roots))]
		switch n := rand.IntN(10); {
		case n < 6:
			if r, err := a.Rotate(ctx); err == nil {
				_ = log.write(crashLine{Root: r.ID, At: time.Now()})
			}
		case n < 8:
			_, _ = a.RotateJWT(ctx)
		case n < 9:
			_ = log.write(crashLine{Gone: some.ID, Key: hex.EncodeToString(some.Certificate.SubjectKeyId)})
			_ = a.Taint(ctx, some.ID)
		default:
			_ = log.write(crashLine{Gone: some.ID, Key: hex.EncodeToString(some.Certificate.SubjectKeyId)})
			if _, err := a.Revoke(ctx, some.ID, true); err == nil {
				_ = log.write(crashLine{Revoked: some.ID})
			}
		}
		time.Sleep(time.Duration(rand.IntN(10)) * time.Millisecond)
	}
}

// A process that issues and rotates as fast as it can is killed at random moments. Each time, the CA
// is there again, with its active key and all that was reported as done.
func TestCrash(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	kills := rounds.Of(15)
	if *long {
		kills = 1000
	}
	// Several CAs at once, as most of the time goes by in waiting.
	const lanes = 5
	for lane := range lanes {
		t.Run(fmt.Sprint(lane), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for kill := range kills / lanes {
				crash(t, dir, kill)
			}
		})
	}
}

func crash(t *testing.T, dir string, kill int) {
	cmd := exec.Command(os.Args[0], "-test.run=^TestCrashChild$", "-crash-dir="+dir)
	out := new(strings.Builder)
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	// From the first line of this life on; a start may take its time.
	audit := filepath.Join(dir, "audit")
	size := func() int64 {
		if info, err := os.Stat(audit); err == nil {
			return info.Size()
		}
		return 0
	}
	begin := size()
	if kill%4 != 0 { // every fourth one is killed while it starts
		for end := time.Now().Add(30 * time.Second); size() == begin && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
	time.Sleep(time.Duration(rand.IntN(220)) * time.Millisecond)
	require.NoError(t, cmd.Process.Kill()) // SIGKILL
	_ = cmd.Wait()

	store := must.Get(ca.NewDirStore(filepath.Join(dir, "ca")))(t)
	if _, err := store.Load(t.Context()); err != nil && begin == 0 && size() == 0 {
		require.ErrorIs(t, err, ca.ErrNoRecord, "killed before there was a CA")
		return
	}
	var bundle *spiffe.Bundle
	var roots []ca.KeyStatus
	var chain []*x509.Certificate
	for range 20 { // what was read from a disk that takes longer than a leaf lives is too old to sign with
		a, err := tryOpen(t.Context(), store, crashConfig)
		require.NoError(t, err, "kill %d: %s", kill, out)
		bundle, roots = a.Bundle(), a.Roots()
		chain, err = a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
		if !errors.Is(err, spiffe.ErrNotReady) {
			require.NoError(t, err, "kill %d: the active key is there", kill)
			break
		}
	}
	require.NotEmpty(t, chain, "kill %d: the active key is never ready", kill)
	require.NoError(t, verify(bundle, chain[0], chain[0].NotAfter)) // that may have been by now

	f := must.Get(os.Open(audit))(t)
	defer f.Close()
	serials, gone, revoked := map[string]int{}, map[string]bool{}, map[string]bool{}
	var leaves []*x509.Certificate
	var last crashLine
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var l crashLine
		if json.Unmarshal(lines.Bytes(), &l) != nil {
			continue // torn by a kill, or empty
		}
		switch {
		case l.Serial != "":
			serials[l.Serial]++
			require.Equal(t, 1, serials[l.Serial], "kill %d: serial number %s twice", kill, l.Serial)
		case l.Gone != "":
			gone[l.Gone], gone[l.Key] = true, true
		case l.Revoked != "":
			revoked[l.Revoked] = true
		case l.Root != "":
			last = l
		case l.Leaf != "":
			der := must.Get(hex.DecodeString(l.Leaf))(t)
			c := must.Get(x509.ParseCertificate(der))(t)
			leaves = append(leaves, c)
			require.Equal(t, 1, serials[c.SerialNumber.Text(16)], "kill %d: a certificate without a record", kill)
		}
	}
	now := time.Now()
	// After its time one whose successor was prepared, but not reported, has gone in good order.
	if last.Root != "" && !gone[last.Root] && now.Before(last.At.Add(crashTTL+crashBackdate)) {
		found := false
		for _, r := range roots {
			found = found || r.ID == last.Root
		}
		assert.True(t, found, "kill %d: the root %s was reported as prepared, and is lost", kill, last.Root)
	}
	for _, r := range roots {
		assert.False(t, revoked[r.ID], "kill %d: the root %s was reported as revoked, and is back", kill, r.ID)
	}
	live := 0
	for _, c := range leaves {
		if now.After(c.NotAfter) || gone[hex.EncodeToString(c.AuthorityKeyId)] {
			continue
		}
		assert.NoError(t, verify(bundle, c, now), "kill %d: a live leaf is refused", kill)
		live++
	}
	t.Logf("kill %d: %d certificates, %d of them live, %d roots, sequence %d", kill, len(serials), live, len(roots), sequence(t, bundle))
}
