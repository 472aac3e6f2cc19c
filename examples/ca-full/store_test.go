package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Which URLs and flags are refused, before anything is sent: what would show the keys of the CA on a network above all.
func TestStores(t *testing.T) {
	t.Parallel()
	identity, empty := t.TempDir(), t.TempDir()
	ca := spiffetest.NewCA(t, "db.test")
	certs, key := must.Get2(ca.SVID("/ca").MarshalPEM())(t)
	for name, text := range map[string][]byte{"svid.pem": certs, "svid-key.pem": key, "bundle.pem": ca.Bundle().MarshalPEM()} {
		require.NoError(t, os.WriteFile(filepath.Join(identity, name), text, 0o600))
	}
	password := filepath.Join(empty, "password")
	require.NoError(t, os.WriteFile(password, []byte(" a word \r\n"), 0o600))
	record := strings.Repeat("d", 255) + ".TOKENS" // of the longest trust domain
	const another = "is another machine, so name a directory in -store-identity, for TLS"
	for _, tc := range []struct{ url, flags, want string }{
		{"//ca@127.0.0.1/ca", "", ""},
		{"//ca@[::1]:1/ca", "", ""},
		{"//ca@localhost/ca", "", ""},
		{"//ca@db.test/ca", "-store-identity " + identity, ""},
		{"//ca@db.test/ca", "-store-identity " + identity + " -store-server spiffe://db.test/server", ""},
		{"//ca@db.test/ca", "", "db.test " + another},
		{"//ca@10.0.0.1/ca", "", "10.0.0.1 " + another},
		{"//ca@localhost.db.test/ca", "", another},
		{"//ca@localhost/ca?sslmode=verify-full", "", `the parameter "sslmode" is not for this program`},
		{"//ca@db.test/ca?sslmode=disable", "-store-identity " + identity, `the parameter "sslmode" is not for this`},
		{"//ca@localhost/ca?TLS=true", "", `the parameter "TLS" is not for this program`},
		{"//ca@db.test/ca?allowFallbackToPlaintext=true", "-store-identity " + identity, "is not for this program"},
		{"//ca@localhost/ca", "-store-server spiffe://db.test/server", "name a directory in -store-identity"},
		{"//ca@db.test/ca", "-store-identity " + empty, "-store-identity: "},
	} {
		for _, scheme := range []string{"postgres", "mysql"} {
			ctx, cancel := context.WithCancel(t.Context())
			if strings.Contains(tc.flags, empty) { // a start waits for the files
				cancel()
			}
			var d databases
			fs := flag.NewFlagSet("", flag.ContinueOnError)
			d.define(fs)
			require.NoError(t, fs.Parse(strings.Fields(tc.flags)))
			open := map[string]func() error{
				"postgres": func() error {
					_, closes, err := d.postgres(ctx, must.Get(url.Parse(scheme+":"+tc.url))(t), record, slog.Default())
					if err == nil {
						closes()
					}
					return err
				},
				"mysql": func() error {
					_, closes, err := d.mysql(ctx, must.Get(url.Parse(scheme+":"+tc.url))(t), record, slog.Default())
					if err == nil {
						closes()
					}
					return err
				},
			}[scheme]
			if tc.want == "" {
				require.NoError(t, open(), "%s %s", tc.url, tc.flags)
			} else {
				require.ErrorContains(t, open(), tc.want, "%s %s %s", scheme, tc.url, tc.flags)
			}
			cancel()
		}
	}
	// A Unix socket is this machine, and one other among several is enough.
	var d databases
	for at, want := range map[string]string{
		"postgres://ca@/ca?host=/run/postgresql":                          "",
		"postgres://ca@/ca?host=/run/postgresql,db.test":                  another,
		"postgres://ca@127.0.0.1,db.test/ca?target_session_attrs=primary": another,
	} {
		_, closes, err := d.postgres(t.Context(), must.Get(url.Parse(at))(t), "ca", slog.Default())
		if want != "" {
			require.ErrorContains(t, err, want, at)
			continue
		}
		require.NoError(t, err, at)
		closes()
	}
	_, closes, err := d.mysql(t.Context(), must.Get(url.Parse("mysql://ca@db.test/ca?socket=/run/mysqld.sock"))(t), "ca",
		slog.Default())
	require.NoError(t, err)
	closes()

	d.passwordFile = password
	assert.Equal(t, " a word ", must.Get(d.password())(t), "without the end of the line alone")
	d.passwordFile += "none"
	require.ErrorContains(t, must.Err(d.password()), "-store-password-file: ")
}

// A server that does not answer, as one without power, leaves a call the time for the next server.
func TestNextServer(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits for five seconds")
	}
	t.Parallel()
	var addrs []string
	var next net.Listener
	for range 2 {
		next = must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		defer next.Close()
		addrs = append(addrs, next.Addr().String())
	}
	reached := errors.New("reached")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		if c, err := next.Accept(); err == nil {
			cancel(reached)
			_ = c.Close()
		}
	}()
	var d databases
	at := must.Get(url.Parse("postgres://ca@" + strings.Join(addrs, ",") + "/ca?target_session_attrs=read-write"))(t)
	store, closes, err := d.postgres(t.Context(), at, "ca", slog.Default())
	require.NoError(t, err)
	defer closes()
	require.ErrorIs(t, must.Err(store.Load(ctx)), reached)
}
