package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_WORKLOAD_AGENT"

const passing, often = 20 * time.Second, 10 * time.Millisecond

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	m.Run()
}

// TestExitCodes runs the program as a process: a wrong flag ends it with 2, and everything else that is wrong with 1.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())(t)
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	bad, open := filepath.Join(dir, "bad.json"), filepath.Join(dir, "open.json")
	require.NoError(t, os.WriteFile(bad, []byte("{\n\"workload\": []}"), 0o600))
	require.NoError(t, os.WriteFile(open, []byte("{}"), 0o600))
	require.NoError(t, os.Chmod(open, 0o666))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "good.json"), []byte("{}"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "brokers.json"), []byte("{\n\"brokers\": [{}]}"), 0o600))
	made := "-trust-domain example.org -ca dir:" + dir + "/ca -ca-option create=true -admin= -socket " + dir + "/s -file "
	served := made + dir + "/good.json -for 10s -broker-id spiffe://example.org/agent -broker "
	for _, c := range []struct {
		args, out, errOut string
		code              int
	}{
		{"-version", "workload-agent ", "", 0},
		{"-h", "Usage: workload-agent [flags]", "", 0},
		{"-nonsense", "", "there is no flag -nonsense; -h lists the flags\n", 2},
		{"-for x", "", "-for: ", 2},
		{"-for -1s", "", "may not be negative", 2},
		{"-log-format xml", "", "has to be text or json", 2},
		{"-trust-domain A", "", "-trust-domain: ", 2},
		{"serve", "", "hyphen", 2},
		{"", "", "-ca: it is needed, and so is -trust-domain", 2},
		{"-ca nowhere -trust-domain example.org", "", "istio:, vault:, step:, google:, dir: or spire:", 2},
		{"-ca spire:tcp://host:1", "", "-ca: ", 2},
		{"-ca istio:http://host -trust-domain example.org", "", "-ca: ", 2},
		{"-ca vault:https://host -trust-domain example.org", "", "-ca: ", 2},
		{"-ca vault:https://host -trust-domain example.org -ca-option role", "", "want NAME=VALUE", 2},
		{"-ca step:https://host -trust-domain example.org -ca-option role=web", "", `step: -ca-option role="web": there is fingerprint=HEX`, 2},
		{"-ca istio:https://host -trust-domain example.org -ca-option impersonate=yes", "", `istio: -ca-option impersonate="yes": there is cluster=NAME and impersonate=true`, 2},
		{"-ca google: -trust-domain example.org", "", "-ca: ", 2},
		{"-ca dir:" + dir + " -trust-domain example.org", "", "make a new one with -ca-option create=true", 2},
		{"-ca dir:/sys/svidkit -ca-option create=true -trust-domain example.org", "", fmt.Sprintf("give the directory to user %d, as which this runs", os.Getuid()), 1},
		{made + dir + "/good.json -socket /sys/svidkit/agent.sock", "", "-socket: unixsocket: listen on \"/sys/svidkit/agent.sock\"", 1},
		{made + dir + "/none.json", "", "none.json: file does not exist", 1},
		{made + bad, "", bad + `: line 2, column 13: "workload" is not known here: the file can have brokers, workloads`, 1},
		{made + open, "", "chmod", 1},
		{"-keys ed25519", "", `-keys: "ed25519" is none of ecdsa-p256`, 2},
		{"-keys ecdsa-p256,rsa-2048", "", "-keys: of two, one is of ML-DSA, and the other is not", 2},
		{"-ca spire:unix:///s -keys rsa-2048", "", "there is no -keys: that agent makes the keys", 2},
		{"-algorithms ecdsa,x", "", "-algorithms: ", 2},
		{made + dir + "/good.json -ca-option root-keys=ed25519", "", `-ca-option root-keys: "ed25519" is none of`, 2},
		{"-broker unix:///b", "", "-broker and -broker-id go together\n", 2},
		{"-broker-id spiffe://example.org/agent", "", "-broker and -broker-id go together\n", 2},
		{"-broker unix:///b -broker-id agent", "", "-broker-id: ", 2},
		{served + "/b", "", `-broker: want unix:///PATH or tcp://HOST:PORT, not "/b"`, 2},
		{served + "unix:b", "", "-broker: want unix:///PATH", 2},
		{served + "unix://b/c", "", "-broker: want unix:///PATH", 2},
		{served + "https://127.0.0.1:1", "", "-broker: want unix:///PATH", 2},
		{served + "unix:///sys/svidkit/b", "", `-broker: unixsocket: listen on "/sys/svidkit/b"`, 1},
		{served + "tcp://127.0.0.1:99999", "", "-broker: listen tcp: address 99999: invalid port", 1},
		{strings.Replace(served, "example.org/agent", "other.test/agent", 1) + "unix://" + dir + "/b", "",
			`not in the trust domain "example.org"`, 1},
		{strings.Replace(served, "example.org/agent", "example.org", 1) + "unix://" + dir + "/b", "",
			"names a trust domain", 1},
		{made + dir + "/brokers.json", "", "line 2, column 13: this agent serves no brokers, as workload-agent " +
			"does with -broker: take them out", 1},
	} {
		cmd := exec.CommandContext(t.Context(), self, strings.Fields(c.args)...)
		cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + dir}
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		_ = cmd.Run()
		assert.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s: %s", c.args, errOut.String())
		assert.True(t, strings.HasPrefix(out.String(), c.out), out.String())
		assert.Contains(t, errOut.String(), c.errOut)
		if c.args == "-h" {
			programtest.Help(t, out.String(), errOut.String())
			assert.NotContains(t, out.String(), "\nFlags:\n", "each is in a group")
		}
		if c.code == 2 {
			assert.Equal(t, 1, strings.Count(errOut.String(), "\n"), errOut.String())
		}
	}
}

const file = `{"workloads": [{"match": {"uid": %d}, "identities": [
  {"id": "spiffe://example.org/%s", "audiences": ["db"], "files": [{"folder": "%s", "key_mode": "0400"}]}
]}]}`

// TestProgram runs the program, and the svid command as a workload of it: a CA of its own, files, a file that is followed, one
// that is refused with line and remedy while the old one stays, a restart with the same CA, and a second agent that takes its
// identity from the first one's socket, as from SPIRE's.
func TestProgram(t *testing.T) {
	t.Parallel()
	programs := programtest.Build(t, "workload-agent", "svid")
	dir, err := os.MkdirTemp("", "machine") // short, for the socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	config, written := filepath.Join(dir, "workloads.json"), filepath.Join(dir, "files")
	write := func(text string) {
		require.NoError(t, os.WriteFile(config+".new", []byte(text), 0o600))
		require.NoError(t, os.Rename(config+".new", config))
	}
	write(fmt.Sprintf(file, os.Getuid(), "web", written))
	svid := func(code int, args ...string) string {
		cmd := exec.CommandContext(t.Context(), filepath.Join(programs, "svid"), args...)
		cmd.Env = []string{workloadapi.SocketEnv + "=unix://" + filepath.Join(dir, "agent.sock")}
		out, _ := cmd.CombinedOutput()
		require.Equal(t, code, cmd.ProcessState.ExitCode(), "%s", out)
		return string(out)
	}
	logs := new(programtest.Log)
	start := func() *programtest.Program {
		p := programtest.Start(t, filepath.Join(programs, "workload-agent"), logs, nil, "-trust-domain", "example.org", "-ca", "dir:"+filepath.Join(dir, "ca"),
			"-ca-option", "create=true", "-file", config, "-socket", filepath.Join(dir, "agent.sock"), "-admin", "127.0.0.1:0", "-log-format", "json")
		p.Addr("ready")
		return p
	}
	p := start()
	svid(0, "fetch", "-dir", filepath.Join(dir, "web"), "-jwt", "db=token")
	assert.Contains(t, svid(0, "verify", "-allow", "*", "-bundle", filepath.Join(dir, "web", "bundle.pem"), filepath.Join(dir, "web", "svid.pem")), "spiffe://example.org/web")
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(written, "credential-bundle.private-key.x509.pem"))
		return err == nil
	}, passing, often)
	svid(0, "verify", "-allow", "*", "-bundle", filepath.Join(written, "example.org.spiffe-trust-bundle.x509.pem"), filepath.Join(written, "credential-bundle.private-key.x509.pem"))

	logs.Healthy(t)
	svid(1, "fetch", "-dir", filepath.Join(dir, "web"), "-jwt", "bank=token")
	assert.Contains(t, svid(0, "doctor"), "spiffe://example.org/web")

	address := regexp.MustCompile(`^http://[^/]+`).FindString(p.Addr("health"))
	for path, want := range map[string]string{"/ready": "ok", "/live": "ok", "/metrics": "svidkit_workloadagent_file_refused{part=\"agent\"} 0"} {
		assert.Contains(t, get(t, address+path), want)
	}

	write(strings.Replace(fmt.Sprintf(file, os.Getuid(), "other", written), `"0400"`, `"0777"`, 1))
	require.Eventually(t, func() bool { return strings.Contains(logs.String(), "line 2, column") }, passing, often)
	assert.Contains(t, logs.String(), `want 0644, 0640, 0600, 0444, 0440 or 0400`)
	metricstest.Require(t, get(t, address+"/metrics"))
	assert.Contains(t, get(t, address+"/metrics"), "svidkit_workloadagent_file_refused{part=\"agent\"} 1")
	assert.Contains(t, svid(0, "doctor"), "spiffe://example.org/web", "the old one stays")

	write(fmt.Sprintf(file, os.Getuid(), "other", written))
	require.Eventually(t, func() bool { return strings.Contains(svid(0, "doctor"), "spiffe://example.org/other") }, passing, often)
	p.Stop()
	p = start()
	roots := filepath.Join(dir, "web", "bundle.pem")
	svid(0, "fetch", "-dir", filepath.Join(dir, "later"))
	svid(0, "verify", "-allow", "*", "-bundle", roots, filepath.Join(dir, "later", "svid.pem")) // the CA is the same

	second := filepath.Join(dir, "second.json")
	require.NoError(t, os.WriteFile(second, fmt.Appendf(nil, file, os.Getuid(), "other", filepath.Join(dir, "relayed")), 0o600))
	relay := programtest.Start(t, filepath.Join(programs, "workload-agent"), nil, nil, "-ca", "spire:unix://"+filepath.Join(dir, "agent.sock"),
		"-file", second, "-socket", filepath.Join(dir, "second.sock"), "-admin=")
	svid(0, "fetch", "-socket", strings.TrimPrefix(relay.Addr("ready"), workloadapi.SocketEnv+"="), "-dir", filepath.Join(dir, "third"), "-jwt", "db=token")
	svid(0, "verify", "-allow", "*", "-bundle", roots, filepath.Join(dir, "third", "svid.pem"))
	relay.Stop()
	p.Stop()
}

// TestBrokers runs the program with a broker that has its own identity from it by a rule, and names a process until
// that ends.
func TestBrokers(t *testing.T) {
	t.Parallel()
	programs := programtest.Build(t, "workload-agent")
	sleep := must.Get(filepath.EvalSymlinks(must.Get(exec.LookPath("sleep"))(t)))(t)
	this := must.Get(filepath.EvalSymlinks(must.Get(os.Executable())(t)))(t)
	agent := spiffe.MustParseID("spiffe://example.org/agent")
	for _, network := range []string{"unix", "tcp"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 2*passing)
			defer cancel()
			dir := must.Get(os.MkdirTemp("", "broker"))(t) // short, for the sockets
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			rule := func(executable, path string) string {
				return fmt.Sprintf(`{"match": {"uid": %d, "executable": %q}, `+
					`"identities": [{"id": "spiffe://example.org%s", "audiences": ["*"]}]}`,
					os.Getuid(), executable, path)
			}
			config := filepath.Join(dir, "workloads.json")
			require.NoError(t, os.WriteFile(config,
				[]byte(`{"brokers": [{"id": "spiffe://example.org/proxy", "references": ["pid", "pods"], `+
					`"audiences": ["db"], `+
					`"identities": ["spiffe://example.org/*"]}], "workloads": [`+rule(this, "/proxy")+", "+rule(sleep,
					"/sleep")+"]}"), 0o600))
			at := map[string]string{"unix": "unix://" + filepath.Join(dir, "b.sock"),
				"tcp": "tcp://127.0.0.1:0"}[network]
			logs := new(programtest.Log)
			p := programtest.Start(t, filepath.Join(programs, "workload-agent"), logs, nil, "-trust-domain",
				"example.org", "-ca", "dir:"+filepath.Join(dir, "ca"),
				"-ca-option", "create=true", "-file", config, "-socket", filepath.Join(dir,
					"agent.sock"), "-admin=", "-broker", at, "-broker-id", agent.String())
			address := strings.TrimPrefix(p.Addr("broker"), broker.SocketEnv+"=")
			p.Addr("ready")
			own := must.Get(workloadapi.Start(ctx, workloadapi.Config{Address: "unix://" +
				filepath.Join(dir, "agent.sock")}))(t)
			defer own.Close()
			require.Len(t, own.SVIDs(), 1, "and not the agent's")
			client := func(server spiffe.ID) *broker.Client {
				endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: own, Peers: own,
					Allow: spiffe.AllowIDs(server)}))(t)
				c := must.Get(broker.NewClient(address, endpoint))(t)
				t.Cleanup(func() { _ = c.Close() })
				return c
			}
			pod := broker.Reference{Object: broker.Object{Plural: "pods", Group: "core", Namespace: "shop",
				Name: "cart"}}
			for server, want := range map[spiffe.ID]string{agent: "this agent knows no pods",
				spiffe.MustParseID("spiffe://example.org/other"): "the server is refused: verify peer"} {
				w := must.Get(client(server).For(pod))(t)
				require.EventuallyWithT(t, func(c *assert.CollectT) { // the agent may be ready before its own identity has come
					_, err := w.FetchJWTSVIDs(ctx, spiffe.ID{}, "db")
					assert.ErrorContains(c, err, want)
				}, passing, often)
			}
			cmd := exec.CommandContext(ctx, sleep, "1000")
			require.NoError(t, cmd.Start())
			defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
			process := broker.Reference{PID: int32(cmd.Process.Pid)}
			if network == "tcp" {
				require.ErrorContains(t, must.Err(client(agent).For(process)), "Unix sockets only")
				p.Stop()
				return
			}
			w := must.Get(client(agent).For(process))(t)
			src := must.Get(workloadapi.New(workloadapi.Config{Client: w}))(t)
			ran := make(chan error, 1)
			go func() { ran <- src.Run(ctx) }()
			require.NoError(t, src.Ready(ctx))
			assert.Equal(t, "spiffe://example.org/sleep", must.Get(src.SVID())(t).ID().String())
			must.Get(w.FetchJWTSVIDs(ctx, spiffe.ID{}, "db"))(t)
			require.ErrorIs(t, must.Err(w.FetchJWTSVIDs(ctx, spiffe.ID{}, "bank")), workloadapi.ErrDenied)
			require.NoError(t, cmd.Process.Kill())
			require.ErrorIs(t, <-ran, broker.ErrEnded)
			require.ErrorIs(t, must.Err(src.SVID()), spiffe.ErrNotReady)
			p.Stop()
		})
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp := must.Get(http.Get(url))(t)
	defer resp.Body.Close()
	return string(must.Get(io.ReadAll(resp.Body))(t))
}

// TestDemo runs -demo, which has to print the two commands that README.md shows and serve what it says.
func TestDemo(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, logs programtest.Log
	done := make(chan error, 1)
	go func() { done <- run(ctx, []string{"-demo", "-admin=", "-for", "1m"}, &out, &logs) }()
	ready := regexp.MustCompile(`ready: SPIFFE_ENDPOINT_SOCKET=(\S+)\n`)
	require.Eventually(t, func() bool { return ready.MatchString(out.String()) }, passing, often, "%s", &logs)
	client := must.Get(workloadapi.NewClient(ready.FindStringSubmatch(out.String())[1], nil))(t)
	defer client.CloseIdleConnections()
	for update, err := range client.WatchX509SVIDs(ctx) {
		require.NoError(t, err)
		assert.Equal(t, "spiffe://demo.test/web", update.Identities[0].SVID.ID().String())
		assert.Equal(t, "web", update.Identities[0].Hint)
		break
	}
	written := regexp.MustCompile(`files: (\S+)\n`).FindStringSubmatch(out.String())[1]
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(written, "credential-bundle.private-key.x509.pem"))
		return err == nil
	}, passing, often)
	assert.Regexp(t, `try: SPIFFE_ENDPOINT_SOCKET=unix://\S+ go run ./examples/svid fetch -dir \S+\n`, out.String())
	assert.Contains(t, out.String(), "ends: in 1m0s, or with Ctrl-C; -for sets another time\n")
	logs.Healthy(t)
	cancel()
	require.NoError(t, <-done)
}

// TestReadme reads the example of README.md as the program does, and looks for each flag in it.
func TestReadme(t *testing.T) {
	t.Parallel()
	readme := must.Get(os.ReadFile("README.md"))(t)
	examples := regexp.MustCompile("(?s)```json\n(.*?)```").FindAllSubmatch(readme, -1)
	require.Len(t, examples, 2, "workloads and brokers")
	td := spiffe.MustParseTrustDomain("example.org")
	read := func(text []byte) error {
		config := filepath.Join(t.TempDir(), "workloads.json")
		require.NoError(t, os.WriteFile(config, text, 0o600))
		m := must.Get(secretcache.New(secretcache.Config{TrustDomain: td, CA: noCA{}}))(t)
		agent, err := workloadagent.New(workloadagent.Config{File: config, Source: m, TrustDomain: td,
			Broker: spiffe.MustParseID("spiffe://example.org/agent")})
		if err == nil {
			require.NoError(t, agent.Close())
		}
		return err
	}
	for _, example := range examples {
		require.NoError(t, read(example[1]))
	}
	require.Contains(t, string(examples[1][1]), `"brokers"`)
	_, keys, _ := strings.Cut(read([]byte(`{"brokers": [{"x": 1}]}`)).Error(), "a broker can have ")
	for key := range strings.SplitSeq(keys, ", ") {
		assert.Contains(t, string(readme), "\n| `"+key+"` |", "README.md has each key of a broker")
	}
	var help bytes.Buffer
	require.Error(t, run(t.Context(), []string{"-h"}, &help, nil))
	for _, flag := range regexp.MustCompile(`(?m)^  (-[a-z-]+)`).FindAllStringSubmatch(help.String(), -1) {
		assert.Contains(t, string(readme), "`"+flag[1], "README.md has each flag")
	}
	unknown := must.Get(os.ReadFile("ca.go"))(t)
	for _, option := range regexp.MustCompile(`c(?:a)?\.(?:option|chosen)\("([a-z-]+)"\)`).FindAllStringSubmatch(string(unknown), -1) {
		assert.Contains(t, string(readme), "`"+option[1], "and each option")
	}
}

type noCA struct{ caclient.CA }

// TestFromAgent has an agent of another maker as the origin: what it takes back is taken back here, too.
func TestFromAgent(t *testing.T) {
	t.Parallel()
	api := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/agent", "/web")
	o := new(options)
	o.ca.from = "spire:" + api.Config().Address
	from := must.Get(o.origin(t.Context()))(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- from.run[0](ctx) }()
	require.Eventually(t, func() bool { return from.Source.Bundles() != nil }, passing, often)
	must.Get(from.Source.GenerateSecret(ctx, "spiffe://example.org/web"))(t)
	assert.NoError(t, must.Err(from.IssueJWTSVID(ctx, spiffe.MustParseID("spiffe://example.org/web"), []string{"db"})))
	cancel()
	require.NoError(t, <-done)
}
