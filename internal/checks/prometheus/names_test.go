// Package prometheus_test holds the rules of examples/deploy/prometheus, the runbook and the dashboards against what
// the programs write, and has real faults fire each alert.
package prometheus_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/watchtest"
)

const examples = "../../../examples"

// deployed returns the path of a file for operators.
func deployed(name string) string { return filepath.Join(examples, "deploy/prometheus", name) }

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
	data := must.Get(os.ReadFile(deployed("rules.yaml")))(t)
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
	promtool(t, "check", "rules", "--lint=all", "--lint-fatal", deployed("rules.yaml"))
	promtool(t, "check", "config", deployed("prometheus.yaml"))
	promtool(t, "test", "rules", deployed("rules_test.yaml"))
}

// left are metrics that are neither on a dashboard nor in a rule, with the reason.
var left = map[string]string{
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
		for name := range watchtest.Dashboard(t, filepath.Join(examples, name, "dashboard.json"), written) {
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
	text := string(must.Get(os.ReadFile(filepath.Join(examples, "RUNBOOK.md")))(t))
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
	faults := must.Get(os.ReadFile("faults_test.go"))(t)
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
	cmd := exec.CommandContext(t.Context(), "go", "run", "github.com/svidkit/svidkit/examples/ca", "-help")
	help := must.Get(cmd.CombinedOutput())(t)
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
		assert.NoError(t, must.Err(os.Stat(filepath.Join(examples, link[1]))))
	}
}

// tool returns the path of a program of Prometheus.
func tool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("there is no %s in PATH; Debian has it in the package prometheus", name)
	}
	return path
}

// promtool runs promtool, which has to be content.
func promtool(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), tool(t, "promtool"), args...).CombinedOutput()
	require.NoError(t, err, "promtool %s:\n%s", strings.Join(args, " "), out)
	return string(out)
}

const interval = 15 * time.Second // as in prometheus.yaml

// recording is what a Prometheus would have of the pages of programs that are scraped every 15 seconds from begin.
type recording struct {
	t      testing.TB
	begin  time.Time
	n      int                 // scrapes
	series map[string][]string // the values of each, by name and labels, up to the last scrape at which it was there
	last   map[string]bool     // those that the last scrape had
}

func record(t testing.TB) *recording {
	return &recording{t: t, begin: time.Now(), series: map[string][]string{}, last: map[string]bool{}}
}

// target is a program to be scraped: a page of metrics, or why there is none.
type target struct {
	job  string
	page func() (string, error)
}

// handled is the page of a handler.
func handled(job string, h http.Handler) target {
	return target{job, func() (string, error) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://localhost/metrics", nil))
		return w.Body.String(), nil
	}}
}

// fetched is the page at a URL.
func fetched(job string, client *http.Client, url string) target {
	return target{job, func() (string, error) {
		resp, err := client.Get(url)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		page, err := io.ReadAll(resp.Body)
		return string(page), err
	}}
}

// scrape asks all targets once.
func (r *recording) scrape(targets ...target) {
	now := map[string]bool{}
	add := func(key, value string) {
		values := r.series[key]
		if !r.last[key] {
			values = append(values, slices.Repeat([]string{"_"}, r.n-len(values))...)
		}
		r.series[key], now[key] = append(values, value), true
	}
	for _, target := range targets {
		labels := fmt.Sprintf(`job=%q,instance="%s:1"`, target.job, strings.TrimPrefix(target.job, "svidkit-"))
		page, err := target.page()
		if err != nil {
			add("up{"+labels+"}", "0")
			continue
		}
		add("up{"+labels+"}", "1")
		text := must.Get(metricstest.Parse(page))(r.t)
		for key, v := range text.Samples {
			name, more, some := strings.Cut(strings.TrimSuffix(key, "}"), "{")
			if some {
				more = "," + more
			}
			if strings.HasSuffix(name, "_timestamp_seconds") { // the tests of promtool begin in 1970
				v -= float64(r.begin.UnixNano()) / 1e9
			}
			add(name+"{"+labels+more+"}", strconv.FormatFloat(v, 'f', -1, 64))
		}
	}
	for key := range r.last {
		if !now[key] { // Prometheus marks the end of a series
			r.series[key] = append(r.series[key], "stale")
		}
	}
	r.last = now
	r.n++
}

// follow scrapes for so long, in the time of a bubble.
func (r *recording) follow(d time.Duration, targets ...target) {
	for range d / interval {
		r.scrape(targets...)
		time.Sleep(interval)
	}
}

// window is when an alert begins to fire, since the begin of the recording.
type window struct{ from, to time.Duration }

// expression is a test of promtool: what an expression gives at a time.
type expression struct {
	Expr    string   `json:"expr"`
	Time    string   `json:"eval_time"`
	Samples []sample `json:"exp_samples"`
}

type sample struct {
	Labels string  `json:"labels"`
	Value  float64 `json:"value"`
}

// require has promtool evaluate the rules for what was recorded: these alerts fire, each first in its window, and no other; and
// at the end none does.
func (r *recording) require(t *testing.T, fired map[string]window) {
	t.Helper()
	end := time.Duration(r.n-1) * interval
	all := "[" + (end + interval).String() + "]"
	var tests []expression
	var names []sample
	for name, w := range fired {
		names = append(names, sample{fmt.Sprintf("{alertname=%q}", name), 1})
		first := fmt.Sprintf(`min(min_over_time(timestamp(ALERTS{alertname=%q,alertstate="firing"})[%s:15s]))`, name, end+interval)
		tests = append(tests,
			expression{fmt.Sprintf("%s >= bool %g", first, w.from.Seconds()), end.String(), []sample{{"{}", 1}}},
			expression{fmt.Sprintf("%s <= bool %g", first, w.to.Seconds()), end.String(), []sample{{"{}", 1}}})
	}
	if len(fired) == 0 { // and none is near
		tests = append(tests, expression{`last_over_time(ALERTS` + all + `)`, end.String(), nil})
	}
	tests = append(tests,
		expression{`group by (alertname) (last_over_time(ALERTS{alertstate="firing"}` + all + `))`, end.String(), names},
		expression{`ALERTS`, end.String(), nil},
		expression{`count(count_over_time(up` + all + `)) > bool 0`, end.String(), []sample{{"{}", 1}}}) // there are samples
	type input struct {
		Series string `json:"series"`
		Values string `json:"values"`
	}
	var inputs []input
	for key, values := range r.series {
		inputs = append(inputs, input{key, strings.Join(values, " ")})
	}
	rules := must.Get(filepath.Abs(deployed("rules.yaml")))(t)
	data := must.Get(json.Marshal(map[string]any{ // which is YAML, too
		"rule_files": []string{rules}, "evaluation_interval": interval.String(),
		"tests": []any{map[string]any{"interval": interval.String(), "input_series": inputs, "promql_expr_test": tests}},
	}))(t)
	file := filepath.Join(t.TempDir(), "test.json")
	require.NoError(t, os.WriteFile(file, data, 0o600))
	promtool(t, "test", "rules", file)
}
