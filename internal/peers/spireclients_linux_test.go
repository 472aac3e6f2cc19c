package peers_test

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// TestSPIREAgentCLI has the commands "api" of SPIRE's agent call our Workload API: each prints what was served, watch
// sees a rotation, and a caller without an identity is refused until it has one again.
func TestSPIREAgentCLI(t *testing.T) {
	t.Parallel()
	program := peers.Program(t, "spire-agent")
	cfg := quick()
	cfg.JWT = &ca.JWTConfig{}
	authority := must.Get(ca.New(cfg))(t)
	other, stranger := newAuthority(t, "other.test"), newAuthority(t, "stranger.test")
	m := must.Get(secretcache.New(secretcache.Config{ID: webID, CA: must.Get(local.New(authority, webID))(t),
		Lifetime:  5 * time.Second,
		Federated: federated{must.Get(spiffe.NewBundleSet(other.Bundle()))(t)}}))(t)
	validator := must.Get(jwtsvid.NewAgentValidator(m, nil))(t)
	var denied atomic.Bool
	h := must.Get(workloadserver.NewHandler(m, &workloadserver.Options{
		IssueJWTSVID: authority.IssueJWTSVID, ValidateJWTSVID: validator.ValidateJWTSVID,
		Identities: func(context.Context) ([]workloadserver.Identity, error) {
			if denied.Load() {
				return nil, nil
			}
			return []workloadserver.Identity{{Provider: m, Hint: "internal"}}, nil
		},
	}))(t)
	socket := filepath.Join(shortDir(t), "api.sock")
	serveAPI(t, socket, h, authority.Run, m.Run)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	command := func(args ...string) *exec.Cmd {
		args = append(append([]string{"api"}, args...), "-socketPath", socket)
		return exec.CommandContext(ctx, program, args...)
	}
	call := func(code int, args ...string) string {
		t.Helper()
		cmd := command(args...)
		out, _ := cmd.CombinedOutput()
		require.Equal(t, code, cmd.ProcessState.ExitCode(), "%s: %s", args, out)
		return string(out)
	}
	// served is what the commands print of a state; watch prints no hints.
	served := func(state *spiffe.Snapshot, hint, domain string) string {
		svid := must.Get(state.SVID())(t)
		out := fmt.Sprintf("SPIFFE ID:\t\t%v\n%s", svid.ID(), hint)
		add := func(what string, c *x509.Certificate) {
			out += fmt.Sprintf("%s Valid After:\t%v\n%[1]s Valid Until:\t%[3]v\n", what, c.NotBefore, c.NotAfter)
		}
		add("SVID", svid.Leaf())
		for i, c := range bundleCerts(must.Get(state.Bundle(webID.TrustDomain()))(t)) {
			add(fmt.Sprintf("CA #%d", i+1), c)
		}
		add("["+domain+"] CA #1", bundleCerts(other.Bundle())[0])
		return out
	}
	require.NoError(t, m.Ready(t.Context()))
	// steady repeats a call until the identity is the same after it as before, and returns that state, too.
	steady := func(args ...string) (out string, state *spiffe.Snapshot) {
		for {
			state = must.Get(m.Snapshot())(t)
			before := must.Get(state.SVID())(t)
			if out = call(0, args...); must.Get(m.SVID())(t) == before {
				return out, state
			}
		}
	}
	text, state := steady("fetch", "x509")
	assert.Contains(t, text, "\n\n"+served(state, "Hint:\t\t\tinternal\n", "spiffe://other.test")+"\n")
	assert.True(t, strings.HasPrefix(text, "Received 1 svid after "), text)
	var both struct {
		SVIDs []struct {
			ID     string `json:"spiffe_id"`
			Hint   string
			Chain  []byte `json:"x509_svid"`
			Key    []byte `json:"x509_svid_key"`
			Bundle []byte
		}
		Federated map[string][]byte `json:"federated_bundles"`
	}
	text, state = steady("fetch", "x509", "-output", "json")
	svid := must.Get(state.SVID())(t)
	require.NoError(t, json.Unmarshal([]byte(text), &both))
	require.Len(t, both.SVIDs, 1)
	assert.Equal(t, webID.String(), both.SVIDs[0].ID)
	assert.Equal(t, "internal", both.SVIDs[0].Hint)
	assert.Equal(t, svid.Chain(), must.Get(x509.ParseCertificates(both.SVIDs[0].Chain))(t))
	assert.Equal(t, svid.TLSCertificate().PrivateKey, must.Get(x509.ParsePKCS8PrivateKey(both.SVIDs[0].Key))(t))
	assert.Equal(t, bundleCerts(authority.Bundle()), must.Get(x509.ParseCertificates(both.SVIDs[0].Bundle))(t))
	require.Len(t, both.Federated, 1)
	assert.Equal(t, bundleCerts(other.Bundle()),
		must.Get(x509.ParseCertificates(both.Federated["spiffe://other.test"]))(t))

	text = call(0, "fetch", "jwt", "-audience", "db", "-spiffeID", webID.String())
	printed := regexp.MustCompile(`^token\((.+)\):\n\t(.+)\nhint\((.+)\):\n\tinternal\n` +
		`(bundle\(spiffe://example.org\):\n\t.+\nbundle\(spiffe://other.test\):\n\t.+\n` +
		`|bundle\(spiffe://other.test\):\n\t.+\nbundle\(spiffe://example.org\):\n\t.+\n)\n?$`).FindStringSubmatch(text)
	require.NotNil(t, printed, "%s", text)
	assert.Equal(t, []string{webID.String(), webID.String()}, []string{printed[1], printed[3]})
	for _, key := range append(keyIDs(authority.Bundle()), keyIDs(other.Bundle())...) {
		assert.Contains(t, printed[4], key)
	}
	for _, c := range []struct {
		code  int
		args  string // $T is the token above, and $F one of a trust domain without a bundle
		wants string
	}{
		{0, "validate jwt -audience db -svid $T", "SVID is valid.\nSPIFFE ID : " + webID.String() + `
Claims    : {"aud": ?\["db"\], ?"exp":`}, // spaces differ from build to build
		{1, "validate jwt -audience bank -svid $T", `SVID is not valid: .* it is for "db", and this is "bank"`},
		{1, "validate jwt -audience db -svid $F", `SVID is not valid: .* "stranger.test": no trust bundle`},
		{1, "fetch jwt -audience db -spiffeID spiffe://example.org/other", ".* code = PermissionDenied "},
		{1, "fetch jwt -audience db,cache", ".* code = InvalidArgument .* 2 audiences"},
	} {
		foreign, err := stranger.IssueJWTSVID(t.Context(), spiffe.MustParseID("spiffe://stranger.test/web"), []string{"db"})
		require.NoError(t, err)
		args := strings.NewReplacer("$T", printed[2], "$F", foreign).Replace(c.args)
		assert.Regexp(t, "^(?s:"+c.wants+")", call(c.code, strings.Fields(args)...), c.args)
	}

	watch, stderr := command("watch"), new(programtest.Log)
	watch.Stderr = stderr
	lines := bufio.NewScanner(must.Get(watch.StdoutPipe())(t))
	require.NoError(t, watch.Start())
	update := func() (text string) { // the next one
		for lines.Scan() && (lines.Text() != "" || text == "") {
			if line := lines.Text(); line != "" && !strings.HasPrefix(line, "Received 1 svid after ") {
				text += line + "\n"
			}
		}
		return text
	}
	// await reads updates until one has what is served at that time, which is signed by a certificate.
	await := func(by *x509.Certificate) {
		t.Helper()
		for {
			next, state := update(), must.Get(m.Snapshot())(t)
			require.NotEmpty(t, next, "it has ended: %s", stderr)
			if next == served(state, "", "other.test") &&
				must.Get(state.SVID())(t).Leaf().CheckSignatureFrom(by) == nil {
				return
			}
		}
	}
	await(bundleCerts(authority.Bundle())[0])
	rotated := must.Get(authority.Rotate(t.Context()))(t).Certificate
	await(rotated)
	denied.Store(true)
	h.Refresh()
	for _, args := range []string{"fetch x509", "fetch jwt -audience db"} {
		assert.Contains(t, call(1, strings.Fields(args)...), "code = PermissionDenied desc = ")
	}
	require.Eventually(t, func() bool { return strings.Contains(stderr.String(), "code = PermissionDenied desc = ") },
		passing, often, "the stream of watch ends")
	denied.Store(false)
	await(rotated)
	require.NoError(t, watch.Process.Signal(os.Interrupt))
	_ = watch.Wait() // the exit code is 1
}

// TestSPIREWorkloadAgent has our agent for a machine take its identities from SPIRE's, which goes away and returns: a
// workload of it has those that are registered for it, renewed, and tokens, and loses what is registered no more.
func TestSPIREWorkloadAgent(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{SVIDTTL: 20 * time.Second, Interval: 200 * time.Millisecond})
	program := filepath.Join(buildPrograms(t, "workload-agent"), "workload-agent")
	selector := "unix:path:" + program // our agent, and not its workloads
	web := s.Register(t, "/web", "-selector", selector, "-entryID", "web")
	admin := s.Register(t, "/admin", "-selector", selector, "-entryID", "admin")
	dir := shortDir(t)
	file, socket := filepath.Join(dir, "workloads.json"), filepath.Join(dir, "agent.sock")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `{"workloads": [{"match": {"uid": %d}, "identities": [
		{"id": %q, "audiences": ["db"]}, {"id": %q, "hint": "admin"}]}]}`, os.Getuid(), web, admin), 0o600))
	programtest.Start(t, program, nil, nil, "-ca", "spire:"+s.WorkloadAPI(), "-file", file, "-socket", socket,
		"-admin", "").Addr("ready")
	_, err := s.AgentCLI("api", "fetch", "x509")
	require.ErrorContains(t, err, "no identity issued", "this program is not registered")

	client := must.Get(workloadapi.NewClient("unix://"+socket, nil))(t)
	src := must.Get(workloadapi.Start(t.Context(), workloadapi.Config{Client: client, JWTBundles: true}))(t)
	t.Cleanup(func() { _ = src.Close() })
	ids := func() (all []spiffe.ID) {
		for _, svid := range src.SVIDs() {
			all = append(all, svid.ID())
		}
		return all
	}
	// await waits until the workload has these identities, all of them newer than a time.
	await := func(after time.Time, want ...spiffe.ID) {
		t.Helper()
		require.Eventually(t, func() bool {
			for _, svid := range src.SVIDs() {
				if !svid.Leaf().NotBefore.After(after) {
					return false
				}
			}
			return slices.Equal(want, ids())
		}, passing, often, "%v", want)
		v := must.Get(spiffe.NewVerifier(s.Bundle(t), spiffe.AllowIDs(want...), nil))(t)
		for _, svid := range src.SVIDs() {
			assert.NoError(t, must.Err(v.VerifyChain(svid.Chain(), spiffe.AnyRole)))
		}
	}
	await(time.Time{}, web, admin)
	token := func() string {
		t.Helper()
		tokens := must.Get(client.FetchJWTSVIDs(t.Context(), web, "db"))(t)
		require.Len(t, tokens, 1)
		return tokens[0].Token()
	}
	id, claims := must.Get2(client.ValidateJWTSVID(t.Context(), "db", token()))(t)
	assert.Equal(t, web, id)
	assert.Equal(t, []any{"db"}, claims["aud"])
	assert.Contains(t, must.Get(s.AgentCLI("api", "validate", "jwt", "-audience", "db", "-svid", token()))(t),
		"SVID is valid.\nSPIFFE ID : "+web.String()+"\n")
	validator := must.Get(jwtsvid.NewValidator(src, []string{"db"}, nil))(t)
	require.Eventually(t, func() bool { return must.Err(validator.Validate(token())) == nil }, passing, often,
		"the keys come by a stream of their own")
	_, _, err = client.ValidateJWTSVID(t.Context(), "bank", token())
	assert.ErrorIs(t, err, workloadapi.ErrRefused)
	_, err = client.FetchJWTSVIDs(t.Context(), admin, "db")
	assert.ErrorIs(t, err, workloadapi.ErrDenied, "the file has no audiences for it")

	s.Agent.Stop()
	assert.Equal(t, []spiffe.ID{web, admin}, ids(), "its agent is away")
	s.StartAgent(t)
	await(src.SVIDs()[0].Leaf().NotBefore, web, admin)
	_ = token()

	s.ServerCLI(t, "entry", "delete", "-entryID", "admin")
	await(time.Time{}, web)
	_, err = client.FetchJWTSVIDs(t.Context(), admin, "db")
	assert.ErrorIs(t, err, workloadapi.ErrDenied)
	s.ServerCLI(t, "entry", "delete", "-entryID", "web")
	require.Eventually(t, func() bool {
		_, err := src.SVID()
		return errors.Is(err, workloadapi.ErrDenied) && len(src.SVIDs()) == 0
	}, passing, often)
}

// TestSPIREDoctor has "svid doctor" find out what is wrong between a workload and SPIRE: each time it names the first
// thing that is, and the remedy.
func TestSPIREDoctor(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{SVIDTTL: 10 * time.Minute, Interval: 200 * time.Millisecond})
	dir := shortDir(t)
	require.NoError(t, os.Chmod(dir, 0o755)) // for other users
	program := filepath.Join(dir, "svid")
	require.NoError(t, os.Rename(filepath.Join(buildPrograms(t, "svid"), "svid"), program))
	require.NoError(t, os.Chmod(program, 0o755))
	doctor := func(uid int) (code int, out string) {
		cmd := exec.CommandContext(t.Context(), program, "doctor", "-socket", s.WorkloadAPI(), "-timeout", "5s")
		cmd.Dir, cmd.SysProcAttr = "/", new(syscall.SysProcAttr)
		if uid != os.Getuid() {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
		}
		text, _ := cmd.CombinedOutput()
		return cmd.ProcessState.ExitCode(), string(text)
	}
	// finds has a step fail for a reason, and those before it succeed.
	finds := func(uid int, step, says string) {
		t.Helper()
		code, out := doctor(uid)
		assert.Equal(t, 1, code)
		assert.Regexp(t, `^(ok .+\n)+failed +`+step+` +`+says+`\n(skipped .+\n)*$`, out)
	}
	me, socket := os.Getuid(), regexp.QuoteMeta(s.AgentSocket)
	const unregistered = `.*"no identity issued"; register this workload: the agent sees user %d, process \d+`
	finds(me, "identity", fmt.Sprintf(unregistered, me))
	s.Register(t, "/web")
	require.Eventually(t, func() bool { code, _ := doctor(me); return code == 0 }, passing, often)
	s.Server.Stop()
	finds(me, "clock", "no token to compare with: .*; the agent gets none.*: see whether it reaches its server")
	s.Agent.Stop()
	finds(me, "socket", "there is nothing at "+socket+"; start the agent.*")
	s.StartServer(t)
	s.StartAgent(t)
	s.Agent.Kill()
	finds(me, "permission", ".*; the socket was left behind by an agent that is gone: start the agent")
	s.StartAgent(t)

	t.Run("of another user", func(t *testing.T) {
		if me != 0 {
			t.Skip("only root runs programs as another user")
		}
		const nobody = 65534
		folder := filepath.Dir(s.AgentSocket)
		finds(nobody, "socket", ".*; let this user pass the directory: chmod o\\+x "+folder)
		require.NoError(t, os.Chmod(folder, 0o711))
		finds(nobody, "identity", fmt.Sprintf(unregistered, nobody))
		require.NoError(t, os.Chmod(s.AgentSocket, 0o700))
		finds(nobody, "permission", "user 65534 may not connect: "+socket+" has mode 0700 .*write permission.*")
	})
}
