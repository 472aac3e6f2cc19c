package statuspage_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// dialled is the error of a connection.
func dialled(err error) error {
	addr := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 15012}
	return fmt.Errorf("sign: %w", &net.OpError{Op: "dial", Net: "tcp", Addr: addr, Err: err})
}

// TestWords: what has one cause is one problem, which says in words since when it lasts, when it is tried again, and what to do;
// what has expired, or ends first, comes first.
func TestWords(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		refused := dialled(os.NewSyscallError("connect", syscall.ECONNREFUSED))
		one := func(name string, end time.Duration, err error) report.Identity {
			return report.Identity{
				Name: name, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(end), Renewal: now.Add(5 * time.Second), Since: now.Add(-40 * time.Second), Failures: 2, Err: err,
			}
		}
		h := of(t, report.Report{
			Identities: []report.Identity{
				one("spiffe://example.org/late", 10*time.Minute, refused),
				one("spiffe://example.org/gone", -16*time.Second, refused),
				one("spiffe://example.org/soon", 20*time.Second, refused),
				one("spiffe://example.org/denied", 30*time.Second, errors.New("denied")),
				{Name: "spiffe://example.org/none", Err: errors.New("not registered")},
				{Name: "spiffe://example.org/file", NotBefore: now.Add(-time.Hour), NotAfter: now.Add(-20 * time.Second)},
				{Name: "spiffe://example.org/future", NotBefore: now.Add(time.Minute), NotAfter: now.Add(time.Hour)},
			},
			Upstreams: []report.Upstream{
				{Name: "CA 127.0.0.1:15012", Since: now.Add(-40 * time.Second), NextAttempt: now.Add(5 * time.Second), Err: refused},
				{Name: "files", Err: &fs.PathError{Op: "open", Path: "/etc/certs/key.pem", Err: syscall.EACCES}},
			},
			Problems: []error{errors.New("an entry was skipped")},
		})
		text := page(t, h)
		at := 0
		for _, want := range []string{
			"<code>spiffe://example.org/file</code> expired 20 s ago",
			"To do: see why what writes or renews it has no newer one: CA 127.0.0.1:15012.",
			"<code>spiffe://example.org/gone</code> expired 16 s ago; 127.0.0.1:15012 refuses connections, for 40 s; next attempt in 5 s; 3 identities",
			"To do: start what listens there, or correct the address.",
			"connection refused",
			"<code>spiffe://example.org/none</code> there is none yet; not registered",
			"<code>spiffe://example.org/denied</code> expires in 30 s; denied, for 40 s; next attempt in 5 s",
			"<code>spiffe://example.org/future</code> valid in 60 s",
			"To do: compare the clocks of this machine and of the CA.",
			"<code>files</code> this process may not open /etc/certs/key.pem",
			"To do: let the user of this process read it.",
			"an entry was skipped",
		} {
			next := strings.Index(text[at:], want)
			require.GreaterOrEqual(t, next, 0, "%s\nin %s", want, text[at:min(at+3000, len(text))])
			at += next
		}
		assert.Equal(t, 4, strings.Count(text, "To do: "), "an error whose remedy is not known has none but its own")
		assert.NotContains(t, text, "the log")
		assert.Contains(t, text, ">7 problems<", "the CA that refuses is no other one than that of the identities")
	})
}

func TestCauses(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"127.0.0.1:15012 does not answer in time":          dialled(os.ErrDeadlineExceeded),
		"the other side does not answer in time":           fmt.Errorf("sign: %w", context.DeadlineExceeded),
		"/run/agent.sock is not there":                     &net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: "/run/agent.sock", Net: "unix"}, Err: os.NewSyscallError("connect", syscall.ENOENT)},
		"/var/run/token is not there":                      fmt.Errorf("token: %w", &fs.PathError{Op: "open", Path: "/var/run/token", Err: syscall.ENOENT}),
		"no address is known for ca.test":                  dialled(&net.DNSError{Err: "no such host", Name: "ca.test", IsNotFound: true}),
		"does not lead to the roots that are trusted here": dialled(x509.UnknownAuthorityError{}),
		"something else":                                   errors.New("something else"),
	} {
		assert.Contains(t, page(t, of(t, report.Report{Problems: []error{err}})), want)
	}
}

// TestOpenSSL: serial, fingerprint and issuer are what openssl prints, of an identity that is kept for others, too.
func TestOpenSSL(t *testing.T) {
	t.Parallel()
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Skip("there is no openssl: ", err)
	}
	ca := spiffetest.NewCA(t, "example.org")
	m, err := secretcache.Start(t.Context(), secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca, CAName: "ca.test:15012"})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, m.Close()) })
	other := spiffe.MustParseID("spiffe://example.org/db")
	require.NoError(t, m.Add(other))
	secret := must.Get(m.GenerateSecret(t.Context(), other.String()))(t)
	chain, _, ok := secret.KeyPair()
	require.True(t, ok)
	svid := must.Get(m.SVID())(t)
	r := m.Report()
	text := page(t, of(t, r))
	for _, cert := range [][]byte{
		chain, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: svid.Leaf().Raw}), ca.Bundle().MarshalPEM(),
	} {
		cmd := exec.Command(openssl, "x509", "-noout", "-serial", "-fingerprint", "-sha256", "-issuer", "-nameopt", "RFC2253")
		cmd.Stdin = bytes.NewReader(cert)
		out := must.Get(cmd.Output())(t)
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSpace(line)
			if _, sum, ok := strings.Cut(line, "ingerprint="); ok {
				line = "SHA-256 " + strings.ToLower(strings.ReplaceAll(sum, ":", ""))
			} else if serial, ok := strings.CutPrefix(line, "serial="); ok { // hexadecimal has one form here
				line = "serial=" + strings.TrimLeft(strings.ToLower(serial), "0")
			}
			assert.Contains(t, text, ">"+line+"<")
		}
	}
	assert.Contains(t, text, "CA ca.test:15012")
	assert.Contains(t, text, "renewed")
	require.NotEmpty(t, r.Attempts)
}

// TestRemedyOfExpired: an identity that has expired without an error is told with where the next one comes from: a file, a socket, or
// the address of a CA.
func TestRemedyOfExpired(t *testing.T) {
	t.Parallel()
	i := report.Identity{Name: "spiffe://example.org/web", NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(-time.Minute)}
	for _, from := range []string{"/etc/certs/tls.crt", "unix:///run/agent.sock (X.509)", "CA ca.test:15012"} {
		assert.Contains(t, page(t, of(t, report.Report{Identities: []report.Identity{i}, Upstreams: []report.Upstream{{Name: from, OK: true}}})),
			"To do: see why what writes or renews it has no newer one: "+from+".")
	}
	assert.Contains(t, page(t, of(t, report.Report{Identities: []report.Identity{i}})), "To do: see why what writes or renews it has no newer one.")
}
