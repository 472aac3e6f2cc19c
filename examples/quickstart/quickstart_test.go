package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_QUICKSTART"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	rounds.Parallel(8)
	m.Run()
}

// A usage error ends the program with 2, and everything else that is wrong with 1.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())(t)
	for _, c := range []struct {
		args, out, errOut string
		code              int
	}{
		{"-h", "", "-lifetime", 0},
		{"-nonsense", "", "flag provided but not defined: -nonsense", 2},
		{"show", "", `"show" is not understood`, 2},
		{"-lifetime 1s", "", "-lifetime is 1s", 2},
		{"-ca https://localhost", "", "belong together", 2},
		{"-ca localhost:15012 -ca-roots none.pem", "", "has to be a URL such as", 2},
		{"-ca https://localhost:15012 -ca-roots none.pem", "", "quickstart: stat none.pem", 1},
	} {
		cmd := exec.CommandContext(t.Context(), self, strings.Fields(c.args)...)
		cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + t.TempDir()}
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		_ = cmd.Run()
		assert.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s: %s", c.args, errOut.String())
		assert.Contains(t, out.String(), c.out)
		assert.Contains(t, errOut.String(), c.errOut)
	}
}

// A whole show: everything happens that the summary counts, in order. Lifetimes are long enough for a
// machine with more to do.
func TestShow(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	var out bytes.Buffer
	require.NoError(t, show(t.Context(), options{duration: 12 * time.Second, lifetime: 4 * time.Second, json: true}, &out))
	var steps []string
	var last event
	for line := range strings.Lines(out.String()) {
		last = event{}
		require.NoError(t, json.Unmarshal([]byte(line), &last), line)
		if last.Who == "ca" {
			steps = append(steps, last.What)
		}
	}
	assert.Equal(t, []string{"root created", "root prepared", "root distributed", "root activated", "root retiring", "root retired"}, steps)
	require.NotNil(t, last.Summary, "the summary is last")
	assert.GreaterOrEqual(t, last.Summary.Renewals, int64(6))
	assert.Equal(t, int64(1), last.Summary.RootRotations)
	assert.GreaterOrEqual(t, last.Summary.SDSUpdates, int64(5))
	assert.Greater(t, last.Summary.Requests, int64(50))
	assert.Zero(t, last.Summary.FailedHandshakes)
}

// until calls then when the text was written. The narrator writes under its lock.
type until struct {
	bytes.Buffer
	text string
	then func()
}

func (u *until) Write(b []byte) (int, error) {
	n, err := u.Buffer.Write(b)
	if strings.Contains(u.String(), u.text) {
		u.then()
	}
	return n, err
}

// A signal ends -serve; before that the bootstrap has been printed, and the root replaced.
func TestServe(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	out := &until{text: "root activated", then: cancel}
	require.NoError(t, show(ctx, options{serve: true, lifetime: 4 * time.Second, every: time.Second}, out))
	assert.Contains(t, out.String(), "root prepared")
	assert.Contains(t, out.String(), "sds.sock")
	assert.Contains(t, out.String(), "envoy.transport_sockets.tls")
	assert.Contains(t, out.String(), "failed handshakes: 0")
}

// A server that does not expect this client refuses it, and that shows.
func TestFailureShows(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	n := &narrator{start: time.Now(), out: &out}
	g := newGroup(t.Context())
	authority := must.Get(ca.New(ca.Config{TrustDomain: trustDomain}))(t)
	frontend := must.Get(startWorkload(g, n, inside(authority), "frontend", 0))(t)
	backend := must.Get(startWorkload(g, n, inside(authority), "backend", 0))(t)
	// The server of the backend allows only its own ID.
	tr := must.Get(startTraffic(g, n, &workload{name: "unauthorized", id: backend.id, manager: frontend.manager}, backend))(t)
	require.Eventually(t, func() bool { return tr.failed.Load() > 0 }, time.Minute, 10*time.Millisecond)
	g.end(nil)
	require.NoError(t, g.wait())
	require.ErrorContains(t, tr.verdict(), "failed, the first at")
	assert.Contains(t, out.String(), "bad certificate")
}

// outsider serves a CA behind Istio's certificate API, which believes every token.
func outsider(t *testing.T) (*ca.Authority, *httptest.Server) {
	t.Helper()
	authority := must.Get(ca.New(ca.Config{TrustDomain: trustDomain}))(t)
	handler, err := istioca.New(istioca.Options{Signer: authority, Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
		token, err := authn.Bearer(r)
		if err != nil {
			return nil, err
		}
		id, err := spiffe.ParseID(token)
		return &authn.Caller{ID: id, Method: "test"}, err
	})})
	require.NoError(t, err)
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return authority, server
}

// The show with a CA outside.
func TestShowWithCAOutside(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	authority, server := outsider(t)
	roots := filepath.Join(t.TempDir(), "root-cert.pem")
	pem := pki.MarshalCertificatesPEM(server.Certificate(), authority.Status().Roots[0].Certificate)
	require.NoError(t, os.WriteFile(roots, pem, 0o600))
	var out bytes.Buffer
	require.NoError(t, show(t.Context(), options{duration: 4 * time.Second, lifetime: 4 * time.Second, ca: server.URL, caRoots: roots}, &out))
	assert.Contains(t, out.String(), "renewed")
	assert.Contains(t, out.String(), "failed handshakes: 0")

	err := show(t.Context(), options{duration: time.Second, lifetime: 4 * time.Second, ca: server.URL, caRoots: filepath.Join(t.TempDir(), "none.pem")}, &out)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// The CA proves itself by the roots of the moment, which its operator replaces while we run.
func TestRootsOfTheMoment(t *testing.T) {
	t.Parallel()
	authority, server := outsider(t)
	file := filepath.Join(t.TempDir(), "root-cert.pem")
	old := pki.MarshalCertificatesPEM(authority.Status().Roots[0].Certificate) // not the one that the server's certificate is from
	require.NoError(t, os.WriteFile(file, old, 0o600))
	from := must.Get(outside(options{ca: server.URL, caRoots: file}))(t)
	id := spiffe.MustParseID("spiffe://example.org/ns/demo/sa/web")
	client := must.Get(from(id))(t)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}}))(t)
	require.ErrorContains(t, must.Err(client.Sign(t.Context(), csr, 0)), "unknown authority")
	require.NoError(t, os.WriteFile(file, append(old, pki.MarshalCertificatesPEM(server.Certificate())...), 0o600))
	must.Get(client.Sign(t.Context(), csr, 0))(t)
}
