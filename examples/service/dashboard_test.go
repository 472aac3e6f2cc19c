package main

import (
	"encoding/json"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// dashboard is what the test reads of dashboard.json.
type dashboard struct {
	Templating struct {
		List []struct {
			Query any `json:"query"`
		} `json:"list"`
	} `json:"templating"`
	Panels []struct {
		ID      int    `json:"id"`
		Type    string `json:"type"`
		Title   string `json:"title"`
		GridPos struct{ H, W, X, Y int }
		Targets []struct {
			Expr         string `json:"expr"`
			LegendFormat string `json:"legendFormat"`
		} `json:"targets"`
	} `json:"panels"`
}

// everything returns what all parts together write.
func everything(t *testing.T) *metricstest.Text {
	t.Helper()
	ca := spiffetest.NewCA(t, "example.org")
	src, err := workloadapi.Start(t.Context(), workloadapitest.NewServer(t, ca, "/web").Config())
	require.NoError(t, err)
	t.Cleanup(func() { _ = src.Close() })
	partner := federationtest.NewEndpoint(t, spiffetest.NewCA(t, "partner.test"))
	fed, err := federation.Start(t.Context(), federation.Config{Relationships: []federation.Relationship{partner.Relationship()}, Fetch: federationtest.Options(partner)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = fed.Close() })
	manager, err := secretcache.Start(t.Context(), secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/agent"), CA: ca})
	require.NoError(t, err)
	t.Cleanup(func() { _ = manager.Close() })
	envoy, err := sds.NewHandler(manager, nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = envoy.Close() })
	workloads, err := workloadserver.NewHandler(manager, nil)
	require.NoError(t, err)
	governor := &spiffetls.Governor{}
	contents, n := ca.Bundle().Contents(), uint64(1)
	contents.Sequence, contents.RefreshHint = &n, time.Minute
	own, err := spiffe.NewBundle(ca.TrustDomain(), contents)
	require.NoError(t, err)
	h, err := health.New(
		health.Part{Name: "identity", Source: src}, health.Part{Name: "federation", Source: fed},
		health.Part{Name: "fixed", Source: health.FromSources(nil, own)}, health.Part{Name: "agent", Source: manager},
		health.Part{Name: "tls", Source: new(spiffetls.Metrics)}, health.Part{Name: "connections", Source: governor},
		health.Part{Name: "sds", Source: envoy}, health.Part{Name: "workloads", Source: workloads},
	)
	require.NoError(t, err)
	require.NoError(t, h.Ready())
	text, err := metricstest.Of(h.WriteMetrics)
	require.NoError(t, err)
	return text
}

// labelsOf returns the values of the labels of each metric.
func labelsOf(text *metricstest.Text) map[string]map[string][]string {
	all := map[string]map[string][]string{}
	pair := regexp.MustCompile(`(\w+)="([^"]*)"`)
	for key := range text.Samples {
		name, labels, _ := strings.Cut(key, "{")
		if all[name] == nil {
			all[name] = map[string][]string{}
		}
		for _, m := range pair.FindAllStringSubmatch(labels, -1) {
			all[name][m[1]] = append(all[name][m[1]], m[2])
		}
	}
	return all
}

// TestDashboard: it is read as Grafana reads it, and each metric, label and value in it is one that the parts write.
func TestDashboard(t *testing.T) {
	t.Parallel()
	f, err := os.Open("dashboard.json")
	require.NoError(t, err)
	defer f.Close()
	var d dashboard
	decoder := json.NewDecoder(f)
	require.NoError(t, decoder.Decode(&d))
	_, err = decoder.Token()
	require.ErrorIs(t, err, io.EOF)
	written := labelsOf(everything(t))

	var (
		metric   = regexp.MustCompile(`svidkit_\w+`)
		selector = regexp.MustCompile(`(svidkit_\w+)\{([^}]*)\}`)
		matcher  = regexp.MustCompile(`(\w+)(=~|=)"([^"]*)"`)
		grouping = regexp.MustCompile(`by \(([^)]*)\)`)
		legend   = regexp.MustCompile(`\{\{(\w+)\}\}`)
		ids      = map[int]bool{}
		shown    = map[string]bool{}
	)
	target := func(label string) bool { return label == "job" || label == "instance" } // of Prometheus
	check := func(where, expr string, labels ...string) {
		names := metric.FindAllString(expr, -1)
		assert.NotEmpty(t, names, where)
		for _, name := range names {
			shown[name] = true
			if !assert.Contains(t, written, name, "%s: %s", where, expr) {
				continue
			}
			for _, label := range labels {
				assert.True(t, target(label) || written[name][label] != nil, "%s: %s has no label %s", where, name, label)
			}
		}
		for _, m := range selector.FindAllStringSubmatch(expr, -1) {
			for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
				assert.True(t, target(l[1]) || slices.Contains(written[m[1]][l[1]], l[3]), "%s: %s has no %s", where, m[1], l[0])
			}
		}
		assert.Equal(t, strings.Count(expr, "("), strings.Count(expr, ")"), expr)
	}
	require.NotEmpty(t, d.Panels)
	for _, p := range d.Panels {
		assert.False(t, ids[p.ID], "two panels have the id %d", p.ID)
		ids[p.ID] = true
		assert.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		if p.Type == "row" {
			continue
		}
		assert.NotEmpty(t, p.Targets, p.Title)
		for _, tg := range p.Targets {
			var labels []string
			for _, m := range grouping.FindAllStringSubmatch(tg.Expr, -1) {
				labels = append(labels, strings.Split(m[1], ", ")...)
			}
			for _, m := range legend.FindAllStringSubmatch(tg.LegendFormat, -1) {
				labels = append(labels, m[1])
			}
			check(p.Title, tg.Expr, labels...)
		}
	}
	for _, v := range d.Templating.List {
		if q, ok := v.Query.(map[string]any); ok {
			check("variable", q["query"].(string))
		}
	}
	var missing []string
	for name := range written {
		if !shown[name] {
			missing = append(missing, name)
		}
	}
	slices.Sort(missing)
	assert.Equal(t, []string{ // the others are on the dashboard
		"svidkit_bundle_refresh_hint_seconds", "svidkit_federation_bundle_present", "svidkit_secretcache_bundles_confirmed_timestamp_seconds",
		"svidkit_secretcache_bundles_watched", "svidkit_workloadapi_identity_end_timestamp_seconds",
	}, missing)
}
