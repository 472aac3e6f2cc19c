// Package watchtest judges what operators watch the programs with: dashboards and rules name only metrics, labels and
// values that the parts write.
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

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/caserver/podcert"
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
	src := must.Get(workloadapi.Start(t.Context(), workloadapitest.NewServer(t, ca, "/web").Config()))(t)
	t.Cleanup(func() { _ = src.Close() })
	partner := federationtest.NewEndpoint(t, spiffetest.NewCA(t, "partner.test"))
	fed := must.Get(federation.Start(t.Context(),
		federation.Config{Relationships: []federation.Relationship{partner.Relationship()},
			DialContext: federationtest.Dial(partner)}))(t)
	t.Cleanup(func() { _ = fed.Close() })
	manager := must.Get(secretcache.Start(t.Context(),
		secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/agent"), CA: ca}))(t)
	t.Cleanup(func() { _ = manager.Close() })
	envoy := must.Get(sds.NewHandler(manager, nil))(t)
	t.Cleanup(func() { _ = envoy.Close() })
	workloads := must.Get(workloadserver.NewHandler(manager, nil))(t)
	governor := &spiffetls.Governor{}
	contents, n := ca.Bundle().Contents(), uint64(1)
	contents.Sequence, contents.RefreshHint = &n, time.Minute
	own := must.Get(spiffe.NewBundle(ca.TrustDomain(), contents))(t)
	h := must.Get(health.New(
		health.Part{Name: "identity", Source: src}, health.Part{Name: "federation", Source: fed},
		health.Part{Name: "fixed", Source: health.FromSources(nil, own)}, health.Part{Name: "agent", Source: manager},
		health.Part{Name: "tls", Source: handshake(t, ca)}, health.Part{Name: "connections", Source: governor},
		health.Part{Name: "sds", Source: envoy}, health.Part{Name: "workloads", Source: workloads},
	))(t)
	no(t, h.Ready())
	page, text := new(bytes.Buffer), new(metricstest.Text)
	for _, write := range []func(io.Writer) error{h.WriteMetrics, istioAgent(t).WriteMetrics, failing(t).WriteMetrics,
		authority(t)} {
		page.Reset()
		no(t, write(page))
		one := must.Get(metricstest.Parse(page.String()))(t)
		if text.Samples == nil {
			text = one
			continue
		}
		maps.Copy(text.Samples, one.Samples)
	}
	return text
}

// handshake returns what a client has counted whose server is itself.
func handshake(t *testing.T, ca *spiffetest.CA) *spiffetls.Metrics {
	m := new(spiffetls.Metrics)
	e := must.Get(spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: m}))(t)
	client, server := memconn.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- must.Err(e.Server(t.Context(), server)) }()
	conn := must.Get(e.Client(t.Context(), client, "web:443"))(t)
	no(t, <-ended)
	no(t, conn.Close())
	no(t, server.Close())
	return m
}

// istioAgent returns the parts of Istio's agent, and what is theirs alone.
func istioAgent(t *testing.T) *health.Handler {
	proxy, err := xdsproxy.NewHandler(xdsproxy.Config{URL: "https://127.0.0.1:1", HTTPClient: http.DefaultClient})
	no(t, err)
	t.Cleanup(func() { _ = proxy.Close() })
	return must.Get(health.New(health.Part{Name: "ADS", Source: proxy}))(t)
}

// failing is an agent whose CA is away.
func failing(t *testing.T) *health.Handler {
	manager := must.Get(secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/away"),
		CA: unable{spiffetest.NewCA(t, "example.org")}}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- manager.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	for late := time.Now().Add(10 * time.Second); manager.Report().Identities[0].Failures == 0; time.Sleep(
		time.Millisecond) {
		if time.Now().After(late) {
			t.Fatal("the CA fails, and no attempt has")
		}
	}
	return must.Get(health.New(health.Part{Name: "failing", Source: manager}))(t)
}

// unable is a CA that signs nothing.
type unable struct{ *spiffetest.CA }

func (unable) Sign(context.Context, *pki.CSR, time.Duration) ([]*x509.Certificate, error) {
	return nil, errors.New("away")
}

// WrittenByCA returns what a CA writes, without what agents and services do.
func WrittenByCA(t *testing.T) *metricstest.Text {
	t.Helper()
	page := new(bytes.Buffer)
	no(t, authority(t)(page))
	return must.Get(metricstest.Parse(page.String()))(t)
}

// authority returns what writes the page of a CA with both APIs.
func authority(t *testing.T) func(io.Writer) error {
	td := spiffe.MustParseTrustDomain("example.org")
	store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
	a := must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: td, Create: true}, store))(t)
	tokens := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, authn.ErrNoCredential })
	ready := make(chan struct{})
	api := kubetest.Start(t)
	api.Put("/apis/certificates.k8s.io/v1/namespaces/shop/podcertificaterequests/waits", map[string]any{
		"metadata": map[string]any{}, "spec": map[string]any{"signerName": "example.org/spiffe"},
	})
	api.Faults(func(r *http.Request) *kubetest.Fault {
		if r.Method == http.MethodPatch {
			return &kubetest.Fault{Code: http.StatusServiceUnavailable}
		}
		return nil
	})
	pods := func(signer ca.Signer) (caserver.Part, error) {
		return podcert.New(podcert.Options{SignerName: "example.org/spiffe", TrustDomain: td, CA: signer,
			APIServer: api.URL(), HTTPClient: api.Client()})
	}
	server := must.Get(caserver.New(caserver.Options{
		CA: a, TrustDomain: td, Identity: caservertest.Identity(t, a,
			spiffe.MustParseID("spiffe://example.org/ca")), Istio: &istioca.Options{Authenticator: tokens},
		Linkerd: &linkerd.Options{Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "example.org"},
			Review: func(context.Context, string, []string) (*spiffe.Pod, error) {
				return nil, errors.New("none")
			}},
		Ready: func() { close(ready) }, Pods: pods,
	}))(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx, caserver.Listeners{Admin: l}) }()
	t.Cleanup(func() { cancel(); <-ended })
	<-ready
	return func(w io.Writer) error {
		for { // until there is a request of a pod
			resp, err := http.Get("http://" + l.Addr().String() + "/metrics")
			if err != nil {
				return err
			}
			page, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err != nil || bytes.Contains(page, []byte("svidkit_ca_pod_requests_oldest_timestamp_seconds")) ||
				t.Context().Err() != nil {
				_, _ = w.Write(page)
				return err
			}
		}
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

// Dashboard reads a dashboard as Grafana does, and returns the metrics in it. Each is one of those that are written,
// as Labels returns them, and so is each of its labels and values.
func Dashboard(t *testing.T, file string, written map[string]map[string][]string) (shown map[string]bool) {
	t.Helper()
	f := must.Get(os.Open(file))(t)
	defer f.Close()
	var d dashboard
	decoder := json.NewDecoder(f)
	no(t, decoder.Decode(&d))
	_, err := decoder.Token()
	want(t, err == io.EOF, "%s: something follows: %v", file, err)
	ids := map[int]bool{}
	shown = map[string]bool{}
	check := func(where, expr string, labels ...string) {
		for _, name := range Expression(t, where, expr, written, labels...) {
			shown[name] = true
		}
	}
	want(t, len(d.Panels) > 0, "%s has no panels", file)
	for _, p := range d.Panels {
		want(t, !ids[p.ID], "two panels have the id %d", p.ID)
		ids[p.ID] = true
		want(t, p.GridPos.X+p.GridPos.W <= 24, "%s is too wide", p.Title)
		if p.Type == "row" {
			continue
		}
		want(t, len(p.Targets) > 0, "%s shows nothing", p.Title)
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
func Expression(t *testing.T, where, expr string, written map[string]map[string][]string, labels ...string) (
	names []string) {
	t.Helper()
	for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
		labels = append(labels, strings.Split(m[1], ", ")...)
	}
	target := func(label string) bool { return label == "job" || label == "instance" } // of Prometheus
	names = metric.FindAllString(expr, -1)
	want(t, len(names) > 0, "%s has no metric", where)
	for _, name := range names {
		if written[name] == nil {
			t.Errorf("%s: %s: no program writes %s", where, expr, name)
			continue
		}
		for _, label := range labels {
			want(t, target(label) || written[name][label] != nil, "%s: %s has no label %s", where, name, label)
		}
	}
	for _, m := range selector.FindAllStringSubmatch(expr, -1) {
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			for value := range strings.SplitSeq(l[3], "|") {
				want(t, target(l[1]) || slices.Contains(written[m[1]][l[1]], value), "%s: %s has no %s", where, m[1],
					l[0])
			}
		}
	}
	want(t, strings.Count(expr, "(") == strings.Count(expr, ")"), "%s: %s: brackets", where, expr)
	return names
}

func want(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		t.Errorf(format, args...)
	}
}

func no(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
