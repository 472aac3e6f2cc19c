package istioagent

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// directory returns a directory whose name is short enough for Unix sockets.
func folder(t *testing.T) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "ia"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// config returns the configuration of an environment, in a directory.
func config(t *testing.T, root, environ string) Config {
	t.Helper()
	cfg := must.Get(FromEnvironment(strings.Fields(strings.ReplaceAll(environ, "{root}", root))))(t)
	cfg.Root = root
	return cfg
}

// chosen is a configuration with an origin.
func chosen(cfg Config, origin string) Config {
	cfg.Origin, cfg.Socket = origin, "/run/s"
	return cfg
}

// write writes a file below a directory.
func write(t *testing.T, root, name string, data []byte) {
	t.Helper()
	name = filepath.Join(root, name)
	require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
	require.NoError(t, os.WriteFile(name+".new", data, 0o600))
	require.NoError(t, os.Rename(name+".new", name))
}

// writeSVID writes an identity and its roots to a directory.
func writeSVID(t *testing.T, root, dir string, ca *spiffetest.CA, svid *spiffe.SVID) {
	t.Helper()
	key := must.Get(pki.MarshalPrivateKeyPEM(svid.Signer()))(t)
	write(t, root, dir+"/root-cert.pem", ca.Bundle().MarshalPEM())
	write(t, root, dir+"/key.pem", key)
	write(t, root, dir+"/cert-chain.pem", pki.MarshalCertificatesPEM(svid.Chain()...))
}

const workloadSocket = "var/run/secrets/workload-spiffe-uds/socket"

// serve runs a server at a socket.
func serve(t *testing.T, socket string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	s := &unixsocket.Server{Path: socket, Handler: http.NotFoundHandler()}
	require.NoError(t, s.Listen())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		assert.NoError(t, <-done)
	})
}

// dead leaves a socket on which no process listens.
func dead(t *testing.T, socket string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(socket), 0o755))
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
}

func TestChoose(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.4-1", "IST-7.4-2", "IST-7.8-1", "IST-7.8-2", "IST-7.8-3", "IST-8.2-1", "IST-8.2-2",
		"IST-8.2-3", "IST-8.2-4", "IST-8.2-5", "IST-9.1-6", "IST-9.2-11", "IST-9.2-24")
	text := []byte("some text")
	for _, c := range []struct {
		name    string
		environ string
		prepare func(t *testing.T, root string)
		want    string // empty: an error
		why     string // or the error
	}{
		{"nothing", "", func(*testing.T, string) {}, fromCA, "no socket at"},
		{"live socket", "", func(t *testing.T, root string) { serve(t, filepath.Join(root, workloadSocket)) }, fromSocket, "a server answers"},
		{"live socket and files", "FILE_MOUNTED_CERTS=true", func(t *testing.T, root string) {
			serve(t, filepath.Join(root, workloadSocket))
			write(t, root, credentials+"/cert-chain.pem", text)
		}, fromSocket, "a server answers"},
		{"live socket with a name", "WORKLOAD_IDENTITY_SOCKET_FILE=other", func(t *testing.T, root string) {
			serve(t, filepath.Join(root, filepath.Dir(workloadSocket), "other"))
		}, fromSocket, "other"},
		{"no socket with a name", "WORKLOAD_IDENTITY_SOCKET_FILE=other", func(*testing.T, string) {}, "", "WORKLOAD_IDENTITY_SOCKET_FILE"},
		{"dead socket with a name", "WORKLOAD_IDENTITY_SOCKET_FILE=other", func(t *testing.T, root string) {
			dead(t, filepath.Join(root, filepath.Dir(workloadSocket), "other"))
		}, "", "requires a server"},
		{"dead socket", "", func(t *testing.T, root string) { dead(t, filepath.Join(root, workloadSocket)) }, fromCA, "no server answers at"},
		{"dead socket and files", "", func(t *testing.T, root string) {
			dead(t, filepath.Join(root, workloadSocket))
			write(t, root, credentials+"/cert-chain.pem", text)
			write(t, root, credentials+"/key.pem", text)
		}, fromFiles, "no server answers at"},
		{"file in the place of the socket", "", func(t *testing.T, root string) { write(t, root, workloadSocket, text) }, "", "is no socket: remove it"},
		{"directory in the place of the socket", "", func(t *testing.T, root string) { write(t, root, workloadSocket+"/x", text) }, "", "is no socket: remove it"},
		{"silent server", "", func(t *testing.T, root string) {
			require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(workloadSocket)), 0o755))
			l := must.Get(net.Listen("unix", filepath.Join(root, workloadSocket)))(t) // it never accepts
			t.Cleanup(func() { _ = l.Close() })
		}, "", "does not answer with HTTP/2"},
		{"other server", "", func(t *testing.T, root string) {
			require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(workloadSocket)), 0o755))
			l := must.Get(net.Listen("unix", filepath.Join(root, workloadSocket)))(t)
			t.Cleanup(func() { _ = l.Close() })
			go func() {
				if conn, err := l.Accept(); err == nil {
					_, _ = conn.Write([]byte("220 mail.example.org ESMTP\r\n"))
				}
			}()
		}, "", "something else"},
		{"credentials", "", func(t *testing.T, root string) {
			for _, name := range []string{"cert-chain.pem", "key.pem", "root-cert.pem"} {
				write(t, root, credentials+"/"+name, text)
			}
		}, fromFiles, "there are files in"},
		{"credentials and certificates", "", func(t *testing.T, root string) {
			for _, dir := range []string{credentials, "etc/certs"} {
				write(t, root, dir+"/cert-chain.pem", text)
				write(t, root, dir+"/key.pem", text)
			}
		}, fromFiles, "files in {root}/" + credentials[2:]},
		{"one of two credentials, and certificates", "", func(t *testing.T, root string) {
			write(t, root, credentials+"/key.pem", text)
			write(t, root, "etc/certs/cert-chain.pem", text)
			write(t, root, "etc/certs/key.pem", text)
		}, fromFiles, "files in {root}/" + credentials[2:] + ", without cert-chain.pem so far"},
		{"credentials for output, and certificates", "OUTPUT_CERTS={root}/" + credentials, func(t *testing.T, root string) {
			for _, dir := range []string{credentials, "etc/certs"} {
				write(t, root, dir+"/cert-chain.pem", text)
				write(t, root, dir+"/key.pem", text)
			}
		}, fromFiles, "files in {root}/etc/certs"},
		{"certificates", "", func(t *testing.T, root string) {
			write(t, root, "etc/certs/cert-chain.pem", text)
			write(t, root, "etc/certs/key.pem", text)
		}, fromFiles, "etc/certs"},
		{"a certificate without its key", "", func(t *testing.T, root string) { write(t, root, credentials+"/cert-chain.pem", text) }, fromFiles, "without key.pem so far"},
		{"a key without its certificate", "", func(t *testing.T, root string) { write(t, root, "etc/certs/key.pem", text) }, fromFiles, "without cert-chain.pem so far"},
		{"roots alone", "", func(t *testing.T, root string) { write(t, root, "etc/certs/root-cert.pem", text) }, fromCA, "no files in"},
		{"empty files", "", func(t *testing.T, root string) {
			write(t, root, "etc/certs/cert-chain.pem", nil)
			write(t, root, "etc/certs/key.pem", nil)
		}, fromCA, "no files in"},
		{"output", "OUTPUT_CERTS={root}/etc/certs", func(t *testing.T, root string) {
			write(t, root, "etc/certs/cert-chain.pem", text)
			write(t, root, "etc/certs/key.pem", text)
		}, fromCA, "for output"},
		{"for the control plane", "PROV_CERT=etc/certs", func(t *testing.T, root string) {
			write(t, root, "etc/certs/cert-chain.pem", text)
			write(t, root, "etc/certs/key.pem", text)
		}, fromCA, "for the control plane"},
		{"mounted, without files", "FILE_MOUNTED_CERTS=true", func(*testing.T, string) {}, fromFiles, "FILE_MOUNTED_CERTS"},
		{"mounted output", "FILE_MOUNTED_CERTS=true OUTPUT_CERTS=./etc/certs", func(*testing.T, string) {}, "", "OUTPUT_CERTS"},
		{"GKE", "CA_PROVIDER=GkeWorkloadCertificate", func(t *testing.T, root string) {
			for _, name := range []string{"certificates.pem", "private_key.pem", "ca_certificates.pem"} {
				write(t, root, credentials+"/"+name, text)
			}
		}, fromFiles, "GkeWorkloadCertificate"},
		{"GKE without files", "CA_PROVIDER=GkeWorkloadCertificate", func(*testing.T, string) {}, "", "CA_PROVIDER"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			root := folder(t)
			c.prepare(t, root)
			cfg := config(t, root, c.environ)
			ctx, cancel := context.WithTimeout(t.Context(), map[bool]time.Duration{true: 100 * time.Millisecond, false: wait}[c.name == "silent server"])
			defer cancel()
			choice, err := Choose(ctx, cfg)
			if c.want == "" {
				require.ErrorContains(t, err, c.why)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.want, choice.Origin, choice.why)
			assert.Contains(t, choice.why, strings.ReplaceAll(c.why, "{root}", root))
			if _, dir, named := strings.Cut(c.why, "files in {root}/"); named {
				dir, _, _ = strings.Cut(dir, ",")
				for _, path := range []string{choice.cert, choice.key, choice.roots} {
					assert.Equal(t, filepath.Join(root, dir), filepath.Dir(path), "all of one directory")
				}
			}
			for _, path := range []string{choice.Socket, choice.cert, choice.key, choice.roots} {
				if path != "" {
					assert.True(t, strings.HasPrefix(path, root), path)
				}
			}
			assert.Equal(t, c.want == fromFiles, choice.cert != "" && choice.key != "" && choice.roots != "")
		})
	}
}

// TestChooseEnds shows that the context bounds the look at a server that does not answer.
func TestChooseEnds(t *testing.T) {
	t.Parallel()
	root := folder(t)
	require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(workloadSocket)), 0o755))
	l := must.Get(net.Listen("unix", filepath.Join(root, workloadSocket)))(t)
	t.Cleanup(func() { _ = l.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	begun := time.Now()
	require.Error(t, must.Err(Choose(ctx, config(t, root, ""))))
	assert.Less(t, time.Since(begun), 500*time.Millisecond)
}
