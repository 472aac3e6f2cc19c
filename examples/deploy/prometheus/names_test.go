package prometheus_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/watchtest"
)

// rule is one of rules.yaml.
type rule struct {
	Record      string            `yaml:"record"`
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func rules(t testing.TB) (all []rule) {
	t.Helper()
	data := must.Get(os.ReadFile("rules.yaml"))(t)
	var file struct {
		Groups []struct {
			Name  string `yaml:"name"`
			Rules []rule `yaml:"rules"`
		} `yaml:"groups"`
	}
	require.NoError(t, yaml.Unmarshal(data, &file))
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	require.NotEmpty(t, all)
	return all
}

// TestPromtool: promtool is content with the rules, the configuration, and the tests of the rules that are written by hand.
func TestPromtool(t *testing.T) {
	t.Parallel()
	promtool(t, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
	promtool(t, "check", "config", "prometheus.yaml")
	promtool(t, "test", "rules", "rules_test.yaml")
}

// left are metrics that are neither on a dashboard nor in a rule, with the reason.
var left = map[string]string{
	"svidkit_bundle_refresh_hint_seconds":                "a setting",
	"svidkit_federation_bundle_present":                  "the part is not ready without, and fresh is on the dashboard",
	"svidkit_workloadapi_identity_end_timestamp_seconds": "the same as svidkit_identity_end_timestamp_seconds",
}

// TestNames: each metric, label and value in a rule is one that the programs write, and each metric that they write is in a
// rule or on a dashboard.
func TestNames(t *testing.T) {
	t.Parallel()
	written := watchtest.Labels(watchtest.Written(t))
	shown := map[string]bool{}
	known := map[string]bool{}
	for _, r := range rules(t) {
		if r.Record != "" {
			known[r.Record] = true
		}
		for _, used := range recorded.FindAllString(r.Expr, -1) {
			assert.True(t, known[used], "%s%s: no rule before it records %s", r.Record, r.Alert, used)
		}
		expr := recorded.ReplaceAllString(r.Expr, "")
		if !strings.Contains(expr, "svidkit_") {
			continue // only what is recorded, or up
		}
		for _, name := range watchtest.Expression(t, r.Record+r.Alert, expr, written) {
			shown[name] = true
		}
	}
	for _, name := range []string{"service", "agent", "ca"} {
		for name := range watchtest.Dashboard(t, "../../"+name+"/dashboard.json", written) {
			shown[name] = true
		}
	}
	for name := range written {
		if strings.HasPrefix(name, "svidkit_") {
			_, except := left[name]
			assert.NotEqual(t, except, shown[name], name)
		}
	}
	for name := range left {
		assert.Contains(t, written, name)
	}
}

var recorded = regexp.MustCompile(`svidkit:\w+(:\w+)*`)

// TestRunbook: each alert has its entry and each entry its alert, and what an entry names exists.
func TestRunbook(t *testing.T) {
	rounds.Slow(t) // it builds the CA
	t.Parallel()
	text := string(must.Get(os.ReadFile("../../RUNBOOK.md"))(t))
	var alerts, entries []string
	for _, r := range rules(t) {
		if r.Alert == "" {
			continue
		}
		alerts = append(alerts, r.Alert)
		assert.Contains(t, []string{"critical", "warning"}, r.Labels["severity"], r.Alert)
		assert.NotEmpty(t, r.Annotations["summary"], r.Alert)
		assert.Contains(t, r.Annotations["description"], "{{", "%s has figures", r.Alert)
		assert.Equal(t, "https://github.com/svidkit/svidkit/blob/main/examples/RUNBOOK.md#"+strings.ToLower(r.Alert), r.Annotations["runbook_url"])
	}
	for _, part := range strings.Split(text, "\n## ")[1:] {
		name, body, _ := strings.Cut(part, "\n")
		entries = append(entries, name)
		for _, field := range []string{"Means", "Users see", "Look", "Do", "Over"} {
			assert.Contains(t, body, "- **"+field+":** ", name)
		}
	}
	assert.Equal(t, alerts, entries)
	var faults []byte
	for _, name := range []string{"faults_test.go", "server_test.go"} {
		faults = append(faults, must.Get(os.ReadFile(name))(t)...)
	}
	for _, name := range alerts {
		assert.Contains(t, string(faults), `"`+name+`": minutes(`, "a real fault fires it")
	}

	written := watchtest.Labels(watchtest.Written(t))
	for _, name := range regexp.MustCompile(`\bsvidkit_\w+`).FindAllString(text, -1) {
		assert.Contains(t, written, name)
	}
	for _, name := range regexp.MustCompile(`\bSvidkit\w+`).FindAllString(text, -1) {
		assert.Contains(t, alerts, name)
	}
	// Flags of the CA: those in backquotes, and those after its command.
	help := must.Get(exec.CommandContext(t.Context(), "go", "run", "../../ca", "-help").CombinedOutput())(t)
	n := 0
	for _, code := range regexp.MustCompile("`[^`]+`").FindAllString(text, -1) {
		if strings.Contains(code, "curl") || strings.Contains(code, "/proc/") || strings.Contains(code, "ulimit") || strings.Contains(code, "ss -") {
			continue
		}
		for _, flag := range regexp.MustCompile(`(?:^|[ `+"`"+`])(-[a-z][a-z-]+)`).FindAllStringSubmatch(code, -1) {
			n++
			assert.Regexp(t, `(?m)^  `+flag[1]+`\b`, string(help), flag[1])
		}
	}
	assert.Greater(t, n, 8)
	for _, link := range regexp.MustCompile(`\]\(([^)#]+)\)`).FindAllStringSubmatch(text, -1) {
		_, err := os.Stat("../../" + link[1])
		assert.NoError(t, err)
	}
}
