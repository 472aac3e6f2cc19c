// Package watchtest judges what operators watch the programs with: dashboards and rules name only metrics, labels and values
// that the parts write.
package watchtest

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
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

// Written returns what all parts of services, agents and certificate authorities write together.
func Written(t *testing.T) *metricstest.Text {
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
	page, text := new(bytes.Buffer), new(metricstest.Text)
	for _, write := range []func(io.Writer) error{h.WriteMetrics, istioAgent(t).WriteMetrics, failing(t).WriteMetrics, authority(t)} {
		page.Reset()
		require.NoError(t, write(page))
		one, err := metricstest.Parse(page.String())
		require.NoError(t, err)
		if text.Samples == nil {
			text = one
			continue
		}
		maps.Copy(text.Samples, one.Samples)
	}
	return text
}

// istioAgent returns the parts of Istio's agent, and what is theirs alone.
func istioAgent(t *testing.T) *health.Handler {
	proxy, err := xdsproxy.NewHandler(xdsproxy.Config{URL: "https://127.0.0.1:1", HTTPClient: http.DefaultClient})
	require.NoError(t, err)
	t.Cleanup(func() { _ = proxy.Close() })
	h, err := health.New(health.Part{Name: "ADS", Source: proxy})
	require.NoError(t, err)
	return h
}

// failing is an agent whose CA is away.
func failing(t *testing.T) *health.Handler {
	manager, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/away"), CA: unable{spiffetest.NewCA(t, "example.org")}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- manager.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	require.Eventually(t, func() bool { return manager.Report().Identities[0].Failures > 0 }, 10*time.Second, time.Millisecond)
	h, err := health.New(health.Part{Name: "failing", Source: manager})
	require.NoError(t, err)
	return h
}

// unable is a CA that signs nothing.
type unable struct{ *spiffetest.CA }

func (unable) Sign(context.Context, *pki.CSR, time.Duration) ([]*x509.Certificate, error) {
	return nil, errors.New("away")
}

// authority returns what writes the page of a CA with both APIs.
func authority(t *testing.T) func(io.Writer) error {
	td := spiffe.MustParseTrustDomain("example.org")
	store, err := ca.NewDirStore(filepath.Join(t.TempDir(), "ca"))
	require.NoError(t, err)
	a, err := ca.Open(t.Context(), ca.Config{TrustDomain: td, Create: true}, store)
	require.NoError(t, err)
	tokens, err := caserver.NewInsecureTokens(td, filepath.Join(t.TempDir(), "secret"))
	require.NoError(t, err)
	ready := make(chan struct{})
	server, err := caserver.New(caserver.Options{
		CA: a, ID: spiffe.MustParseID("spiffe://example.org/ca"), Istio: &istioca.Options{Authenticator: tokens},
		Linkerd: &linkerd.Options{Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "example.org"}, Review: func(context.Context, string, []string) (*kube.Account, error) { return nil, errors.New("none") }},
		Ready:   func() { close(ready) },
	})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx, caserver.Listeners{Admin: l}) }()
	t.Cleanup(func() { cancel(); <-ended })
	<-ready
	return func(w io.Writer) error {
		resp, err := http.Get("http://" + l.Addr().String() + "/metrics")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		_, err = io.Copy(w, resp.Body)
		return err
	}
}

// Labels returns the values of the labels of each metric.
func Labels(text *metricstest.Text) map[string]map[string][]string {
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

// Dashboard reads a dashboard as Grafana does, and returns the metrics in it. Each is one of those that are written, as Labels
// returns them, and so is each of its labels and values.
func Dashboard(t *testing.T, file string, written map[string]map[string][]string) (shown map[string]bool) {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	var d dashboard
	decoder := json.NewDecoder(f)
	require.NoError(t, decoder.Decode(&d))
	_, err = decoder.Token()
	require.ErrorIs(t, err, io.EOF)
	ids := map[int]bool{}
	shown = map[string]bool{}
	check := func(where, expr string, labels ...string) {
		for _, name := range Expression(t, where, expr, written, labels...) {
			shown[name] = true
		}
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
	return shown
}

var (
	metric   = regexp.MustCompile(`\b(svidkit|istio_agent|citadel_server|linkerd_identity)_\w+`)
	selector = regexp.MustCompile(`(\w+)\{([^}]*)\}`)
	matcher  = regexp.MustCompile(`(\w+)(=~|=)"([^"]*)"`)
	grouping = regexp.MustCompile(`(?:by|on|without|ignoring) \(([^)]*)\)`)
	legend   = regexp.MustCompile(`\{\{(\w+)\}\}`)
)

// Expression judges an expression of Prometheus, and returns the metrics in it. All of them have the labels.
func Expression(t *testing.T, where, expr string, written map[string]map[string][]string, labels ...string) (names []string) {
	t.Helper()
	for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
		labels = append(labels, strings.Split(m[1], ", ")...)
	}
	target := func(label string) bool { return label == "job" || label == "instance" } // of Prometheus
	names = metric.FindAllString(expr, -1)
	assert.NotEmpty(t, names, where)
	for _, name := range names {
		if !assert.Contains(t, written, name, "%s: %s", where, expr) {
			continue
		}
		for _, label := range labels {
			assert.True(t, target(label) || written[name][label] != nil, "%s: %s has no label %s", where, name, label)
		}
	}
	for _, m := range selector.FindAllStringSubmatch(expr, -1) {
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			for value := range strings.SplitSeq(l[3], "|") {
				assert.True(t, target(l[1]) || slices.Contains(written[m[1]][l[1]], value), "%s: %s has no %s", where, m[1], l[0])
			}
		}
	}
	assert.Equal(t, strings.Count(expr, "("), strings.Count(expr, ")"), expr)
	return names
}
