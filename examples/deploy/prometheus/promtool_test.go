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
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
)

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
		text, err := metricstest.Parse(page)
		require.NoError(r.t, err)
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
	rules := must.Get(filepath.Abs("rules.yaml"))(t)
	data, err := json.Marshal(map[string]any{ // which is YAML, too
		"rule_files": []string{rules}, "evaluation_interval": interval.String(),
		"tests": []any{map[string]any{"interval": interval.String(), "input_series": inputs, "promql_expr_test": tests}},
	})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "test.json")
	require.NoError(t, os.WriteFile(file, data, 0o600))
	promtool(t, "test", "rules", file)
}
