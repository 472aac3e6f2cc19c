//go:build linux

package spiffetls_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// postgres is a server of its own, with TLS files that a test replaces.
type postgres struct {
	dir, addr string
	as        *syscall.SysProcAttr // nil for this user
	uid, gid  int
	process   *os.Process
	log       *bytes.Buffer
}

// startPostgres starts a real PostgreSQL that requires client certificates of the CA, and stops it when the
// test ends. As PostgreSQL refuses to run as root, it runs as the user that Debian's package makes.
func startPostgres(t *testing.T, ca *spiffetest.CA, svid *spiffe.SVID) *postgres {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if len(found) == 0 {
		t.Skip("PostgreSQL is not installed; Debian's package is postgresql")
	}
	bin := filepath.Dir(slices.Max(found))
	p := &postgres{dir: t.TempDir(), uid: os.Getuid(), gid: os.Getgid(), log: new(bytes.Buffer)}
	if os.Getuid() == 0 {
		u, err := user.Lookup("postgres")
		if err != nil {
			t.Skip("PostgreSQL does not run as root, and there is no user postgres: ", err)
		}
		p.uid, err = strconv.Atoi(u.Uid)
		require.NoError(t, err)
		p.gid, err = strconv.Atoi(u.Gid)
		require.NoError(t, err)
		p.as = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(p.uid), Gid: uint32(p.gid)}}
		require.NoError(t, os.Chmod(filepath.Dir(p.dir), 0o711)) // the user comes through
		require.NoError(t, os.Chown(p.dir, p.uid, p.gid))
	}
	data := filepath.Join(p.dir, "data")
	init := p.command(t.Context(), bin+"/initdb", "-D", data, "-U", "postgres", "-A", "reject", "-E", "UTF8", "--locale=C", "--no-sync")
	out, err := init.CombinedOutput()
	require.NoError(t, err, "%s", out)

	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p.addr = free.Addr().String()
	require.NoError(t, free.Close())
	_, port, err := net.SplitHostPort(p.addr)
	require.NoError(t, err)
	p.files(t, ca, svid)
	p.write(t, "data/pg_hba.conf", []byte("hostssl all postgres 127.0.0.1/32 trust clientcert=verify-ca\n"))
	p.write(t, "data/postgresql.auto.conf", fmt.Appendf(nil, `
listen_addresses = '127.0.0.1'
port = %s
unix_socket_directories = ''
fsync = off
shared_buffers = '1MB'
max_connections = 50
autovacuum = off
ssl = on
ssl_cert_file = '%[2]s/cert.pem'
ssl_key_file = '%[2]s/key.pem'
ssl_ca_file = '%[2]s/ca.pem'
`, port, p.dir))
	server := p.command(context.WithoutCancel(t.Context()), bin+"/postgres", "-D", data)
	server.Stdout, server.Stderr = p.log, p.log
	require.NoError(t, server.Start())
	p.process = server.Process
	t.Cleanup(func() {
		_ = p.process.Signal(syscall.SIGINT) // fast shutdown
		ended := make(chan struct{})
		go func() {
			_ = server.Wait()
			close(ended)
		}()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			_ = p.process.Signal(syscall.SIGQUIT)
			<-ended
		}
		if t.Failed() {
			t.Logf("PostgreSQL:\n%s", p.log)
		}
	})
	return p
}

func (p *postgres) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir, c.SysProcAttr, c.Env = p.dir, p.as, []string{"LC_ALL=C", "TZ=UTC"}
	return c
}

func (p *postgres) write(t *testing.T, name string, content []byte) {
	t.Helper()
	path := filepath.Join(p.dir, name)
	require.NoError(t, os.WriteFile(path, content, 0o600))
	require.NoError(t, os.Chown(path, p.uid, p.gid))
}

// files writes the identity and the roots that PostgreSQL reads at its next reload.
func (p *postgres) files(t *testing.T, ca *spiffetest.CA, svid *spiffe.SVID) {
	t.Helper()
	chain, key, err := svid.MarshalPEM()
	require.NoError(t, err)
	p.write(t, "cert.pem", chain)
	p.write(t, "key.pem", key)
	p.write(t, "ca.pem", ca.Bundle().MarshalPEM())
}

// session connects as a driver does: it asks for TLS in the clear, begins it with the configuration, and sends the
// startup message and one query, whose first column it returns.
func session(ctx context.Context, addr string, begin func(net.Conn) (*tls.Conn, error), query string) (string, error) {
	plain, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer plain.Close()
	if err := plain.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return "", err
	}
	if _, err := plain.Write([]byte{0, 0, 0, 8, 4, 210, 22, 47}); err != nil { // SSLRequest
		return "", err
	}
	answer := make([]byte, 1)
	if _, err := io.ReadFull(plain, answer); err != nil {
		return "", err
	}
	if answer[0] != 'S' {
		return "", fmt.Errorf("no TLS: %q", answer)
	}
	conn, err := begin(plain)
	if err != nil {
		return "", err
	}
	startup := "\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00"
	if _, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(4+len(startup))), startup...)); err != nil {
		return "", err
	}
	sent, value := false, ""
	for {
		var head [5]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return "", err
		}
		body := make([]byte, min(binary.BigEndian.Uint32(head[1:])-4, 1<<16))
		if _, err := io.ReadFull(conn, body); err != nil {
			return "", err
		}
		switch {
		case head[0] == 'E':
			return "", fmt.Errorf("PostgreSQL: %q", body)
		case head[0] == 'D':
			value = string(body[6:]) // one column
		case head[0] == 'Z' && !sent:
			sent = true
			q := append(binary.BigEndian.AppendUint32([]byte{'Q'}, uint32(4+len(query)+1)), query...)
			if _, err := conn.Write(append(q, 0)); err != nil {
				return "", err
			}
		case head[0] == 'Z':
			_, err := conn.Write([]byte{'X', 0, 0, 0, 4})
			return value, errors.Join(err, conn.Close())
		}
	}
}

// Pain: a database with client certificates, both sides of which are renewed while they work.
func TestPostgreSQL(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := ca.Source("/web")
	p := startPostgres(t, ca, ca.SVID("/db"))

	// The one call of a program that has a driver.
	config, err := spiffetls.ClientConfig(web, web, spiffe.AllowIDs(dbID), nil)
	require.NoError(t, err)
	byConfig := func(plain net.Conn) (*tls.Conn, error) {
		conn := tls.Client(plain, config)
		if err := conn.HandshakeContext(t.Context()); err != nil {
			return nil, err
		}
		peer, err := spiffetls.PeerFromState(config, conn.ConnectionState())
		if err == nil && peer.ID() != dbID {
			err = fmt.Errorf("the server is %s", peer)
		}
		return conn, err
	}
	dialer := dialerOfSource(t, web, spiffetls.Hosts{p.addr: spiffe.AllowIDs(dbID)})
	byDialer := func(plain net.Conn) (*tls.Conn, error) { return dialer.Handshake(t.Context(), plain, p.addr) }

	const serial = "SELECT client_serial::text FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
	require.Eventually(t, func() bool {
		var got string
		got, err = session(t.Context(), p.addr, byConfig, serial)
		return err == nil && got != ""
	}, 30*time.Second, 50*time.Millisecond, "%v", err)
	svid, err := web.SVID()
	require.NoError(t, err)
	got, err := session(t.Context(), p.addr, byConfig, serial)
	require.NoError(t, err)
	assert.Equal(t, svid.Leaf().SerialNumber.String(), got, "PostgreSQL has seen our certificate")

	stranger := spiffetest.NewCA(t, "other.test")
	_, err = session(t.Context(), p.addr, func(plain net.Conn) (*tls.Conn, error) {
		return tls.Client(plain, spiffetest.TLSConfig(stranger.Certificate("/web"))), nil
	}, serial)
	require.Error(t, err, "PostgreSQL refuses another CA")
	wrong := dialerOfSource(t, web, spiffetls.Hosts{p.addr: spiffe.AllowIDs(billingID)})
	_, err = session(t.Context(), p.addr, func(plain net.Conn) (*tls.Conn, error) { return wrong.Handshake(t.Context(), plain, p.addr) }, serial)
	verifyError(t, err, "policy")

	var done, failed atomic.Int64
	var open sync.RWMutex // held by each session
	stop := make(chan struct{})
	var wg sync.WaitGroup
	end := sync.OnceFunc(func() {
		close(stop)
		wg.Wait()
	})
	defer end()
	for _, begin := range []func(net.Conn) (*tls.Conn, error){byConfig, byDialer} {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				open.RLock()
				_, err := session(t.Context(), p.addr, begin, serial)
				open.RUnlock()
				if err != nil {
					t.Log(err)
					failed.Add(1)
				}
				done.Add(1)
			}
		})
	}
	// reload makes PostgreSQL take its files again, and returns when it has, and no session of before is left:
	// its process has the old files, and an operator waits longer than a handshake between the steps of a
	// rotation.
	reload := func() {
		const loaded = "SELECT pg_conf_load_time()::text"
		before, err := session(t.Context(), p.addr, byConfig, loaded)
		require.NoError(t, err)
		require.NoError(t, p.process.Signal(syscall.SIGHUP)) // as pg_ctl reload does
		require.Eventually(t, func() bool {
			after, err := session(t.Context(), p.addr, byConfig, loaded)
			return err == nil && after != before
		}, 20*time.Second, 5*time.Millisecond)
		open.Lock()
		defer open.Unlock()
	}
	db := ca.SVID("/db")
	for range 5 {
		ca.Prepare() // both sides learn the new root before it signs
		web.Renew()
		p.files(t, ca, db)
		reload()
		ca.Rotate()
		web.Renew()
		db = ca.SVID("/db")
		p.files(t, ca, db)
		reload()
		ca.DropOldRoots()
		web.Renew()
		p.files(t, ca, db)
		reload()
	}
	end()
	assert.Zero(t, failed.Load())
	assert.Greater(t, done.Load(), int64(10))
	t.Logf("%d connections in 5 rotations of leaf and root, %d failed", done.Load(), failed.Load())
}

func dialerOfSource(t *testing.T, source *spiffetest.Source, allow spiffe.PolicySource) *spiffetls.Dialer {
	t.Helper()
	d, err := spiffetls.NewDialer(source, source, allow, nil)
	require.NoError(t, err)
	return d
}
