//go:build go1.27

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// TestKeys does what an operator does with a machine whose agent has its own CA: from keys of P-256 to those of both kinds
// and to ML-DSA alone, and back, with a service that asks another one, svid, and the metrics of each.
func TestKeys(t *testing.T) {
	t.Parallel()
	programs := programtest.Build(t, "workload-agent", "service", "svid")
	dir := must.Get(os.MkdirTemp("", "quantum"))(t) // short, for the socket
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	config, socket, written := filepath.Join(dir, "workloads.json"), "unix://"+filepath.Join(dir, "agent.sock"), filepath.Join(dir, "files")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, file, os.Getuid(), "web", written), 0o600))
	svid := func(code int, args ...string) string {
		cmd := exec.CommandContext(t.Context(), filepath.Join(programs, "svid"), args...)
		cmd.Env = []string{workloadapi.SocketEnv + "=" + socket}
		out, _ := cmd.CombinedOutput()
		require.Equal(t, code, cmd.ProcessState.ExitCode(), "%q: %s", args, out)
		return string(out)
	}
	const classical, both, quantum, any = "ecdsa,rsa,ed25519", "ecdsa-p256,ml-dsa-65", "ml-dsa-44,ml-dsa-65", "ecdsa,ml-dsa-65"
	for _, step := range []struct {
		keys, algorithms string
		peer             string // the kind of key that each side of a connection sees
		file             string // the kinds of keys that have to be allowed for the file
	}{
		{"ecdsa-p256", classical, "ecdsa", classical},
		{"ecdsa-p256", any, "ecdsa", classical},
		{"ml-dsa-65,ecdsa-p256", any, "ml-dsa-65", classical}, // the first one is the classical, whatever the order
		{"ml-dsa-65", any, "ml-dsa-65", quantum},
		{"ml-dsa-65", quantum, "ml-dsa-65", quantum},
		{both, any, "ml-dsa-65", classical},
		{"ecdsa-p256", any, "ecdsa", classical},
	} {
		token := "ES256"
		if step.file == quantum {
			token = "ML-DSA-65"
		}
		roots, ca := step.keys, filepath.Join(dir, "ca-"+step.keys) // of its own, as a second root signs after 25 minutes
		agent := programtest.Start(t, filepath.Join(programs, "workload-agent"), nil, nil, "-trust-domain", "example.org", "-ca", "dir:"+ca,
			"-ca-option", "create=true", "-ca-option", "root-keys="+roots, "-ca-option", "algorithm="+token, "-keys", step.keys, "-file", config, "-socket", filepath.Join(dir, "agent.sock"),
			"-admin", "127.0.0.1:0", "-algorithms", step.algorithms)
		agent.Addr("ready")
		service := func(args ...string) (p *programtest.Program, url, metrics string) {
			p = programtest.Start(t, filepath.Join(programs, "service"), nil, nil, append(args, "-socket", socket, "-health-addr", "127.0.0.1:0",
				"-algorithms", step.algorithms, "-interval", "10ms", "-drain", "0s", "-require-mlkem")...)
			return p, p.Addr("serving"), regexp.MustCompile(`^http://[^/]+`).FindString(p.Addr("health")) + "/metrics"
		}
		db, url, atDB := service("-interval", "1h")
		web, _, atWeb := service("-url", url)
		for at, want := range map[string]string{
			atDB:  `svidkit_tls_algorithms_total{part="tls",side="server",key_exchange="X25519MLKEM768",peer_key="` + step.peer + `"}`,
			atWeb: `svidkit_tls_algorithms_total{part="tls",side="client",key_exchange="X25519MLKEM768",peer_key="` + step.peer + `"}`,
		} {
			require.Eventually(t, func() bool { return regexp.MustCompile(regexp.QuoteMeta(want) + ` [1-9]`).MatchString(get(t, at)) },
				passing, often, "%v: %s", step, want)
			metricstest.Require(t, get(t, at))
		}
		health := regexp.MustCompile(`^http://[^/]+`).FindString(agent.Addr("health"))
		metricstest.Require(t, get(t, health+"/metrics"))
		web.Stop()
		db.Stop()

		said := svid(0, "doctor", "-algorithms", step.file)
		assert.Equal(t, step.keys == both || step.keys == "ml-dsa-65,ecdsa-p256",
			regexp.MustCompile(`spiffe://example.org/web \(also with a key of ML-DSA-65\)`).MatchString(said), said)
		judged := []string{"verify", "-allow", "*", "-bundle", filepath.Join(written, "example.org.spiffe-trust-bundle.x509.pem")}
		pair := filepath.Join(written, "credential-bundle.private-key.x509.pem")
		require.Eventually(t, func() bool {
			cmd := exec.CommandContext(t.Context(), filepath.Join(programs, "svid"), append(judged, "-algorithms", step.file, pair)...)
			return cmd.Run() == nil
		}, passing, often)
		if step.file == quantum {
			assert.Contains(t, svid(1, append(judged, pair)...), "the kind of key is not allowed: ml-dsa-65 is none of ecdsa,rsa,ed25519")
			assert.Contains(t, svid(1, "doctor"), "-algorithms")
			assert.Contains(t, svid(0, "inspect", "-algorithms", quantum, pair), "ML-DSA-65")
		}
		out := filepath.Join(dir, "fetched")
		svid(0, "fetch", "-dir", out, "-jwt", "db=token")
		verify := func(code int, more ...string) string {
			return svid(code, slices.Concat([]string{"verify", "-allow", "*", "-socket", socket, "-audience", "db"}, more,
				[]string{filepath.Join(out, "token")})...)
		}
		verify(0, "-algorithms", step.file)
		client := must.Get(workloadapi.NewClient(socket, nil))(t)
		must.Get2(client.ValidateJWTSVID(t.Context(), "db", strings.TrimSpace(string(must.Get(os.ReadFile(filepath.Join(out, "token")))(t)))))(t)
		client.CloseIdleConnections()
		if step.file == quantum {
			assert.Contains(t, verify(1), "the kind of key is not allowed")
		}
		agent.Stop()
	}
}
