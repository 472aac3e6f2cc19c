package tpmkey_test

import (
	"context"
	"crypto"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/tpmkey"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// workload is a Manager whose keys are in a TPM, and which renews again and again.
func workload(t *testing.T, ca *spiffetest.CA, tpm *tpmkey.TPM, path, algorithm string,
	again time.Duration) *secretcache.Manager {
	t.Helper()
	m := must.Get(secretcache.Start(t.Context(), secretcache.Config{
		ID: must.Get(spiffe.ParseID("spiffe://example.org" + path))(t), CA: ca,
		NewKey:  func() (crypto.Signer, error) { return tpm.NewKey(algorithm) },
		RenewIn: func(time.Duration, int) time.Duration { return again },
	}))(t)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// A workload that renews 200 times leaves nothing in the TPM.
func TestRenewals(t *testing.T) {
	t.Parallel()
	c := newChip(t)
	tpm := c.open()
	m := workload(t, spiffetest.NewCA(t, "example.org"), tpm, "/web", "ecdsa-p256", time.Millisecond)
	keys := map[string]bool{}
	deadline := time.After(2 * time.Minute)
	for len(keys) < 200 {
		changed := m.Changed()
		svid := must.Get(m.SVID())(t)
		keys[fmt.Sprint(svid.Leaf().PublicKey)] = true
		require.NoError(t, sign(svid.Signer()))
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("%d renewals", len(keys))
		}
	}
	require.NoError(t, m.Close())
	noneLoadedAfter(t, tpm, c)
}

// TestTLS has programs with keys in a TPM as servers and clients of each other and of programs with other keys, while
// they renew.
func TestTLS(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	tpm := newChip(t).open()
	everyone := spiffe.AllowMembersOf(ca.TrustDomain())
	renewing := workload(t, ca, tpm, "/ecdsa", "ecdsa-p256", 20*time.Millisecond)
	sources := map[string]spiffe.SVIDSource{
		"TPM": renewing, "RSA in the TPM": workload(t, ca, tpm, "/rsa", "rsa-2048", time.Hour),
		"P-384 in the TPM": workload(t, ca, tpm, "/p384", "ecdsa-p384", 20*time.Millisecond),
		"software":         ca.SVID("/software"),
	}
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		for server, s := range sources {
			for client, c := range sources {
				t.Run(fmt.Sprintf("%s/%s server/%s client", tls.VersionName(version), server, client), func(t *testing.T) {
					config := spiffetls.Config{Self: s, Peers: ca.Bundle(), Allow: everyone, MinVersion: version}
					serves := must.Get(must.Get(spiffetls.New(config))(t).ServerConfig())(t)
					config.Self = c
					calls := must.Get(must.Get(spiffetls.New(config))(t).ClientConfig())(t)
					calls.MaxVersion = version
					l := must.Get(tls.Listen("tcp", "127.0.0.1:0", serves))(t)
					defer l.Close()
					go echo(l)
					for range 5 {
						require.NoError(t, call(l.Addr(), calls, version))
					}
				})
			}
		}
	}
	// Under load, through renewals.
	config := spiffetls.Config{Self: renewing, Peers: ca.Bundle(), Allow: everyone}
	both := must.Get(spiffetls.New(config))(t)
	l := must.Get(tls.Listen("tcp", "127.0.0.1:0", must.Get(both.ServerConfig())(t)))(t)
	defer l.Close()
	go echo(l)
	calls := must.Get(both.ClientConfig())(t)
	var handshakes, renewals atomic.Int64
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for ctx.Err() == nil && (renewals.Load() < 20 || handshakes.Load() < 200) {
				if !assert.NoError(t, call(l.Addr(), calls, tls.VersionTLS13)) {
					return
				}
				handshakes.Add(1)
			}
			cancel()
		})
	}
	for ctx.Err() == nil {
		select {
		case <-renewing.Changed():
			renewals.Add(1)
		case <-ctx.Done():
		}
	}
	wg.Wait()
	t.Logf("%d handshakes, %d renewals", handshakes.Load(), renewals.Load())
	require.GreaterOrEqual(t, renewals.Load(), int64(20))
	require.GreaterOrEqual(t, handshakes.Load(), int64(200))
}

// echo serves connections until the listener is closed.
func echo(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			_, _ = io.Copy(conn, conn)
		}()
	}
}

// call has a server send something back, over a new connection with a full handshake.
func call(addr net.Addr, config *tls.Config, version uint16) error {
	config = config.Clone()
	config.ClientSessionCache = nil
	conn, err := tls.Dial("tcp", addr.String(), config)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("ping")); err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
		return err
	}
	if s := conn.ConnectionState(); s.Version != version || s.DidResume {
		return fmt.Errorf("a session of %s, resumed: %v", tls.VersionName(s.Version), s.DidResume)
	}
	return nil
}

// What needs the bytes of a key refuses one in a TPM, and says why.
func TestNotExported(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	m := workload(t, ca, newChip(t).open(), "/web", "ecdsa-p256", time.Hour)
	svid := must.Get(m.SVID())(t)
	dir := filepath.Join(t.TempDir(), "files")
	sink := must.Get(filesink.New(filesink.Config{Source: m, Dir: dir}))(t)
	want := "a key of type *tpmkey.key cannot be exported"
	for name, f := range map[string]func() error{
		"MarshalPEM":     func() error { return must.Err2(svid.MarshalPEM()) },
		"MarshalDER":     func() error { return must.Err2(svid.MarshalDER()) },
		"key":            func() error { return must.Err(pki.MarshalPrivateKeyPEM(svid.Signer())) },
		"Secret":         func() error { return must.Err(pki.NewKeyPairSecret("default", svid)) },
		"GenerateSecret": func() error { return must.Err(m.GenerateSecret(t.Context(), "default")) },
		"by ID":          func() error { return must.Err(m.GenerateSecret(t.Context(), "spiffe://example.org/web")) },
		"sdssource": func() error {
			return must.Err(sdssource.FromIdentity(m).GenerateSecret(t.Context(), "default"))
		},
		"filesink": func() error { return must.Err(sink.Write()) },
	} {
		err := f()
		assert.ErrorContains(t, err, want, name)
		t.Log(name, err)
	}
	entries, _ := os.ReadDir(dir)
	for _, entry := range entries {
		assert.NotContains(t, entry.Name(), "pem")
	}
	_ = must.Get(m.GenerateSecret(t.Context(), "ROOTCA"))(t)
}
