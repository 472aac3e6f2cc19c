package kube_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

type object = map[string]any

// put stores a pod.
func put(s *kubetest.Server, namespace, name, account, node, phase string) {
	s.Put("/api/v1/namespaces/"+namespace+"/pods/"+name, object{
		"metadata": object{"uid": "uid-of-" + name},
		"spec":     object{"serviceAccountName": account, "nodeName": node},
		"status":   object{"phase": phase},
	})
}

// proxy is the caller: a ztunnel of the node n1.
func proxy() *authn.Caller {
	return &authn.Caller{
		ID:     spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/ztunnel"),
		Method: "kubernetes-token",
		Pod:    &spiffe.Pod{Namespace: "istio-system", ServiceAccount: "ztunnel", Name: "ztunnel-1", UID: "uid-of-ztunnel-1"},
	}
}

var web = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")

// cluster has a node n1 with a ztunnel and a pod of prod/web, and a node n2 with others.
func cluster(s *kubetest.Server) *kubetest.Server {
	put(s, "istio-system", "ztunnel-1", "ztunnel", "n1", "Running")
	put(s, "istio-system", "ztunnel-2", "ztunnel", "n2", "Running")
	put(s, "prod", "web-1", "web", "n1", "Running")
	put(s, "prod", "db-1", "db", "n2", "Running")
	put(s, "test", "api-1", "api", "n1", "Running")
	return s
}

// clusters are NodeAuthorizers, by the ID of their cluster.
type clusters = map[string]*kube.NodeAuthorizer

var trusted = []string{"istio-system/ztunnel", "kube-system/proxy.v1"}

func nodeAuthorizer(t testing.TB, s *kubetest.Server, remotes clusters) *kube.NodeAuthorizer {
	t.Helper()
	return must.Get(kube.NewNodeAuthorizer(reviewer(t, s, kube.ReviewerOptions{}), trusted, remotes))(t)
}

func TestNodeAuthorizer(t *testing.T) {
	t.Parallel()
	s := cluster(kubetest.Start(t))
	n := nodeAuthorizer(t, s, nil)
	require.NoError(t, n.Authorize(t.Context(), proxy(), web))
	require.NoError(t, n.Authorize(t.Context(), proxy(), spiffe.MustParseID("spiffe://example.org/ns/test/sa/api")))
	require.NoError(t, n.Authorize(t.Context(), proxy(), proxy().ID), "its own, by the same rules")

	var list *kubetest.Request
	for _, r := range s.Requests() {
		if r.Path == "/api/v1/namespaces/prod/pods" {
			list = &r
		}
	}
	require.NotNil(t, list)
	assert.Equal(t, "spec.nodeName=n1,status.phase!=Failed", list.Query.Get("fieldSelector"))
}

// Each vector breaks one of the conditions.
func TestNodeAuthorizerDenied(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.5-1", "IST-4.5-2", "IST-4.5-3", "IST-4.5-4", "IST-4.5-5", "IST-4.5-6", "IST-4.5-7")
	id := spiffe.MustParseID
	pod := func(f func(*spiffe.Pod)) func(*authn.Caller) { return func(c *authn.Caller) { f(c.Pod) } }
	keep := func(*authn.Caller) {}
	for _, c := range []struct {
		name   string
		edit   func(*authn.Caller)
		id     spiffe.ID
		change func(*kubetest.Server)
		text   string
	}{
		{"1 unknown cluster", pod(func(p *spiffe.Pod) { p.Cluster = "west" }), web, nil, `there is no NodeAuthorizer for the cluster "west"`},
		{"2 other account", pod(func(p *spiffe.Pod) { p.ServiceAccount = "ztunnel2" }), web, nil, `"istio-system/ztunnel2" is not one of the trusted accounts`},
		{"2 other namespace", pod(func(p *spiffe.Pod) { p.Namespace = "prod" }), web, nil, "not one of the trusted"},
		{"2 other split", pod(func(p *spiffe.Pod) { p.Namespace, p.ServiceAccount = "istio-system/ztunnel", "" }), web, nil, "not one of the trusted"},
		{"2 no account", pod(func(p *spiffe.Pod) { p.Namespace, p.ServiceAccount = "", "" }), web, nil, "not one of the trusted"},
		{"3 zero ID", keep, spiffe.ID{}, nil, "does not name a service account"},
		{"3 no path", keep, id("spiffe://example.org"), nil, "does not name a service account"},
		{"3 other form", keep, id("spiffe://example.org/web"), nil, "does not name a service account"},
		{"3 more segments", keep, id("spiffe://example.org/ns/prod/sa/web/x"), nil, "does not name a service account"},
		{"3 upper case", keep, id("spiffe://example.org/ns/prod/sa/Web"), nil, "does not name a service account"},
		{"3 namespace with a dot", keep, id("spiffe://example.org/ns/pr.od/sa/web"), nil, "does not name a service account"},
		{"3 other trust domain", keep, id("spiffe://example.com/ns/prod/sa/web"), nil, "not in the trust domain of the caller"},
		{"3 longer trust domain", keep, id("spiffe://example.org.evil/ns/prod/sa/web"), nil, "not in the trust domain of the caller"},
		{"4 no pod in the token", pod(func(p *spiffe.Pod) { p.Name, p.UID = "", "" }), web, nil, "not bound to a pod"},
		{"4 no UID in the token", pod(func(p *spiffe.Pod) { p.UID = "" }), web, nil, "not bound to a pod"},
		{"4 no name in the token", pod(func(p *spiffe.Pod) { p.Name = "" }), web, nil, "not bound to a pod"},
		{"4 a path as name", pod(func(p *spiffe.Pod) { p.Name = "../../prod/pods/web-1" }), web, nil, "not the name of a pod"},
		{"4 no such pod", pod(func(p *spiffe.Pod) { p.Name = "ztunnel-9" }), web, nil, "there is no pod istio-system/ztunnel-9"},
		{"4 pod is gone", keep, web, func(s *kubetest.Server) { s.Remove("/api/v1/namespaces/istio-system/pods/ztunnel-1") }, "there is no pod"},
		{"5 other UID", pod(func(p *spiffe.Pod) { p.UID = "uid-of-ztunnel-2" }), web, nil, "its UID differs"},
		{"6 pod of another account", keep, web, func(s *kubetest.Server) { put(s, "istio-system", "ztunnel-1", "other", "n1", "Running") }, `has the service account "other"`},
		{"7 pod has no node", keep, web, func(s *kubetest.Server) { put(s, "istio-system", "ztunnel-1", "ztunnel", "", "Pending") }, "is not on a node"},
		{"7 odd node", keep, web, func(s *kubetest.Server) {
			put(s, "istio-system", "ztunnel-1", "ztunnel", "n1,status.phase=Running", "Running")
		}, "is not on a node"},
		{"7 on another node", keep, id("spiffe://example.org/ns/prod/sa/db"), nil, "no pod with the service account prod/db is on the caller's node n1"},
		{"7 in another namespace", keep, id("spiffe://example.org/ns/test/sa/web"), nil, "no pod with the service account test/web"},
		{"7 nowhere", keep, id("spiffe://example.org/ns/none/sa/web"), nil, "no pod with the service account none/web"},
		{"7 name of the pod", keep, id("spiffe://example.org/ns/prod/sa/web-1"), nil, "no pod with the service account prod/web-1"},
		{"7 failed", keep, web, func(s *kubetest.Server) { put(s, "prod", "web-1", "web", "n1", "Failed") }, "no pod with the service account"},
		{"7 gone", keep, web, func(s *kubetest.Server) { s.Remove("/api/v1/namespaces/prod/pods/web-1") }, "no pod with the service account"},
		{"7 the caller moved", keep, web, func(s *kubetest.Server) { put(s, "istio-system", "ztunnel-1", "ztunnel", "n2", "Running") }, "on the caller's node n2"},
		{"no pod at all", func(c *authn.Caller) { c.Pod = nil }, web, nil, "not known to run in a pod"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := cluster(kubetest.Start(t))
			if c.change != nil {
				c.change(s)
			}
			caller := proxy()
			c.edit(caller)
			err := nodeAuthorizer(t, s, nil).Authorize(t.Context(), caller, c.id)
			must.Fail(t, err, kube.ErrDenied, c.text)
			assert.True(t, strings.HasPrefix(err.Error(), `authn/kube: may "spiffe://example.org/ns/istio-system/sa/ztunnel" have`), err)
		})
	}
	err := nodeAuthorizer(t, kubetest.Start(t), nil).Authorize(t.Context(), nil, web)
	require.ErrorIs(t, err, kube.ErrDenied)
	nameless := proxy() // a proxy that is proven to run in its pod, and has no SPIFFE ID
	nameless.ID, nameless.Name = spiffe.ID{}, "tunnel"
	err = nodeAuthorizer(t, cluster(kubetest.Start(t)), nil).Authorize(t.Context(), nameless, web)
	require.ErrorIs(t, err, kube.ErrDenied)
	require.ErrorContains(t, err, `may "`+nameless.String()+`" have`)
}

// What a pod is doing does not matter, unless it has failed.
func TestNodeAuthorizerPhases(t *testing.T) {
	t.Parallel()
	for phase, want := range map[string]bool{"": true, "Pending": true, "Running": true, "Succeeded": true, "Unknown": true, "Failed": false} {
		s := cluster(kubetest.Start(t))
		put(s, "prod", "web-1", "web", "n1", phase)
		err := nodeAuthorizer(t, s, nil).Authorize(t.Context(), proxy(), web)
		assert.Equal(t, want, err == nil, phase)

		put(s, "prod", "web-2", "web", "n1", "Running") // another of the same account
		require.NoError(t, nodeAuthorizer(t, s, nil).Authorize(t.Context(), proxy(), web), phase)
	}
}

func TestNodeAuthorizerClusters(t *testing.T) {
	t.Parallel()
	own, west := kubetest.Start(t), cluster(kubetest.Start(t))
	put(own, "istio-system", "ztunnel-1", "ztunnel", "n1", "Running")
	deep := nodeAuthorizer(t, west, nil)
	east := must.Get(kube.NewNodeAuthorizer(reviewer(t, west, kube.ReviewerOptions{}), []string{"kube-system/other"}, nil))(t)
	n := nodeAuthorizer(t, own, clusters{"west": nodeAuthorizer(t, west, clusters{"deep": deep}), "east": east})
	caller := proxy()
	require.ErrorIs(t, n.Authorize(t.Context(), caller, web), kube.ErrDenied, "our own cluster has no such pod")
	caller.Pod.Cluster = "west"
	require.NoError(t, n.Authorize(t.Context(), caller, web))
	caller.Pod.Cluster = "east"
	require.ErrorContains(t, n.Authorize(t.Context(), caller, web), "not one of the trusted accounts", "whether an account is trusted is each cluster's own matter")
	caller.Pod.Cluster = "deep"
	require.ErrorContains(t, n.Authorize(t.Context(), caller, web), `there is no NodeAuthorizer for the cluster "deep"`)
}

func TestNewNodeAuthorizer(t *testing.T) {
	t.Parallel()
	r := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: "https://api.example.org", HTTPClient: http.DefaultClient}))(t)
	for _, accounts := range [][]string{
		nil, {"a/b", ""}, {"ztunnel"}, {"/ztunnel"}, {"istio-system/"}, {"istio-system/ztunnel/x"}, {"a/b,c/d"}, {" a/b"}, {"A/b"}, {"istio-system/*"},
	} {
		must.Fail(t, must.Err(kube.NewNodeAuthorizer(r, accounts, nil)), "authn/kube: new node authorizer: ", "account")
	}
	for _, remotes := range []clusters{{"west": nil}, {"": {}}} {
		must.Fail(t, must.Err(kube.NewNodeAuthorizer(r, []string{"a/b"}, remotes)), "authn/kube: new node authorizer: the remote cluster")
	}
	for _, zero := range []*kube.Reviewer{nil, {}} {
		must.Fail(t, must.Err(kube.NewNodeAuthorizer(zero, []string{"a/b"}, nil)), "the Reviewer is nil or the zero one")
	}
	require.NoError(t, must.Err(kube.NewNodeAuthorizer(r, []string{"a/b"}, nil)))
}

// An API server that fails is no decision.
func TestNodeAuthorizerFailed(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/api/v1/namespaces/istio-system/pods/ztunnel-1", "/api/v1/namespaces/prod/pods"} {
		for _, c := range []struct {
			fault kubetest.Fault
			texts []string
		}{
			{kubetest.Fault{Code: 500}, []string{"500"}},
			{kubetest.Fault{Code: 429}, []string{"429"}},
			{kubetest.Fault{Code: 401}, []string{"401"}},
			{kubetest.Fault{Code: 403, Reason: "Forbidden"}, []string{"403", "may get and list pods"}},
			{kubetest.Fault{Code: 404, Reason: "Unknown"}, []string{path}},
		} {
			s := cluster(kubetest.Start(t))
			s.FailNext(1, c.fault, func(r *http.Request) bool { return r.URL.Path == path })
			n := nodeAuthorizer(t, s, nil)
			err := n.Authorize(t.Context(), proxy(), web)
			require.Error(t, err)
			require.NotErrorIs(t, err, kube.ErrDenied)
			_, again := errors.AsType[interface {
				error
				Retryable() (time.Duration, bool)
			}](err)
			require.True(t, again)
			for _, text := range c.texts {
				require.ErrorContains(t, err, text)
			}
			require.NoError(t, n.Authorize(t.Context(), proxy(), web), "once more")
		}
	}
	synctest.Test(t, func(t *testing.T) {
		s := cluster(kubetest.StartOn(t, 1, memconn.Listen()))
		n := nodeAuthorizer(t, s, nil)
		for _, only := range []string{"/api/v1/namespaces/istio-system/pods/ztunnel-1", "/api/v1/namespaces/prod/pods"} {
			s.FailNext(1, kubetest.Fault{Hang: true}, func(r *http.Request) bool { return r.URL.Path == only })
			start := time.Now()
			err := n.Authorize(t.Context(), proxy(), web)
			require.ErrorContains(t, err, "no answer within 10s")
			require.NotErrorIs(t, err, kube.ErrDenied)
			assert.Equal(t, 10*time.Second, time.Since(start))
		}
		// a caller that waits for the list of another gives up when its own time is over
		s.FailNext(1, kubetest.Fault{Hang: true}, func(r *http.Request) bool { return r.URL.Path == "/api/v1/namespaces/prod/pods" })
		var wg sync.WaitGroup
		wg.Go(func() { assert.Error(t, n.Authorize(t.Context(), proxy(), web)) })
		time.Sleep(time.Second)
		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, gone)
		defer cancel()
		start := time.Now()
		require.ErrorIs(t, n.Authorize(ctx, proxy(), web), gone)
		assert.Equal(t, time.Second, time.Since(start))
		wg.Wait()
		s.Client().CloseIdleConnections()
	})
}

// A pod that was seen counts for five seconds; one that has just started is found.
func TestNodeAuthorizerFreshness(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := cluster(kubetest.StartOn(t, 1, memconn.Listen()))
		n := nodeAuthorizer(t, s, nil)
		lists := func() int { return s.Count(http.MethodGet, "/api/v1/namespaces/prod/pods") }
		gets := func() int { return s.Count(http.MethodGet, "/api/v1/namespaces/istio-system/pods/ztunnel-1") }
		require.NoError(t, n.Authorize(t.Context(), proxy(), web))
		time.Sleep(5*time.Second - 1)
		s.Remove("/api/v1/namespaces/prod/pods/web-1")
		require.NoError(t, n.Authorize(t.Context(), proxy(), web), "seen a moment ago")
		assert.Equal(t, 1, lists())
		assert.Equal(t, 2, gets(), "the caller's own pod is looked up each time")
		time.Sleep(time.Nanosecond)
		require.ErrorIs(t, n.Authorize(t.Context(), proxy(), web), kube.ErrDenied)
		assert.Equal(t, 2, lists())

		time.Sleep(time.Nanosecond)
		put(s, "prod", "web-2", "web", "n1", "Pending")
		require.NoError(t, n.Authorize(t.Context(), proxy(), web), "just started")
		assert.Equal(t, 3, lists())
		put(s, "prod", "new-1", "new", "n1", "Pending")
		time.Sleep(time.Nanosecond)
		require.NoError(t, n.Authorize(t.Context(), proxy(), spiffe.MustParseID("spiffe://example.org/ns/prod/sa/new")))
		assert.Equal(t, 4, lists())
		require.NoError(t, n.Authorize(t.Context(), proxy(), web))
		assert.Equal(t, 4, lists())

		// a caller whose token names a pod that is gone is refused at once
		put(s, "istio-system", "ztunnel-1", "other", "n1", "Running")
		require.ErrorIs(t, n.Authorize(t.Context(), proxy(), web), kube.ErrDenied)
		s.Client().CloseIdleConnections()
	})
}

// A node that starts asks for all its workloads at once: one list answers all.
func TestNodeAuthorizerShares(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := cluster(kubetest.StartOn(t, 1, memconn.Listen()))
		s.Latency(100 * time.Millisecond)
		n := nodeAuthorizer(t, s, nil)
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				id := web
				if i%2 == 1 {
					id = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/db") // on the other node
				}
				assert.Equal(t, i%2 == 0, n.Authorize(t.Context(), proxy(), id) == nil)
			})
		}
		wg.Wait()
		lists := s.Count(http.MethodGet, "/api/v1/namespaces/prod/pods")
		assert.LessOrEqual(t, lists, 3, "they came at the same time")
		assert.Equal(t, 2, s.Count(http.MethodGet, "/api/v1/namespaces/istio-system/pods/"), "the first asks for itself, the next for all that wait")
		s.Client().CloseIdleConnections()
	})
}

func TestNodeAuthorizerBounded(t *testing.T) {
	t.Parallel()
	n := nodeAuthorizer(t, kubetest.Start(t), nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the API server is not asked
	const questions, remembered = 5000, 4096
	var forgotten atomic.Int64
	for i := range questions {
		uid := fmt.Appendf(nil, "an account %30d", i)
		runtime.AddCleanup(&uid[0], func(int) { forgotten.Add(1) }, 0)
		caller := proxy()
		caller.Pod.ServiceAccountUID = unsafe.String(&uid[0], len(uid))
		require.Error(t, n.Authorize(ctx, caller, web))
	}
	assert.Eventually(t, func() bool {
		runtime.GC()
		return forgotten.Load() == questions-remembered
	}, 10*time.Second, time.Millisecond)
	runtime.KeepAlive(n)
}

// Lists in several answers, and servers that do not select.
func TestNodeAuthorizerPages(t *testing.T) {
	t.Parallel()
	pods := func(names ...string) string {
		var items []string
		for _, n := range names {
			items = append(items, fmt.Sprintf(`{"metadata":{"name":%q,"namespace":"prod"},"spec":{"nodeName":"n1","serviceAccountName":%q},"status":{"phase":"Running"}}`, n, n))
		}
		return strings.Join(items, ",")
	}
	for _, c := range []struct {
		name   string
		answer func(next string) string
		want   string // "" for yes
		denied bool
	}{
		{"the last of three pages", func(next string) string {
			switch next {
			case "":
				return `{"kind":"PodList","metadata":{"continue":"p 2"},"items":[` + pods("a", "b") + `]}`
			case "p 2":
				return `{"kind":"PodList","metadata":{"continue":"p3"},"items":[]}`
			}
			return `{"kind":"PodList","metadata":{},"items":[` + pods("web") + `]}`
		}, "", false},
		{"not in three pages", func(next string) string {
			if next == "" {
				return `{"kind":"PodList","metadata":{"continue":"2"},"items":[` + pods("a", "b") + `]}`
			}
			return `{"kind":"PodList","items":[` + pods("c") + `]}`
		}, "no pod with the service account", true},
		{"pages without end", func(string) string {
			return `{"kind":"PodList","metadata":{"continue":"again"},"items":[` + pods("web") + `]}`
		}, "more than 5000 pods", false},
		{"another kind", func(string) string { return `{"kind":"SecretList","items":[` + pods("web") + `]}` }, "not a PodList", false},
		{"other node", func(string) string {
			return strings.ReplaceAll(`{"kind":"PodList","items":[`+pods("web")+`]}`, `"n1"`, `"n2"`)
		}, "no pod with", true},
		{"other namespace", func(string) string {
			return strings.ReplaceAll(`{"kind":"PodList","items":[`+pods("web")+`]}`, `"prod"`, `"test"`)
		}, "no pod with", true},
		{"failed", func(string) string {
			return strings.ReplaceAll(`{"kind":"PodList","items":[`+pods("web")+`]}`, `Running`, `Failed`)
		}, "no pod with", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			api := cluster(kubetest.Start(t))
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/api/v1/namespaces/prod/pods" {
					api.ServeHTTP(w, r)
					return
				}
				assert.Equal(t, "50", r.URL.Query().Get("limit"))
				assert.Equal(t, "spec.nodeName=n1,status.phase!=Failed", r.URL.Query().Get("fieldSelector"))
				w.Header().Set("Content-Type", "application/json")
				_, _ = w.Write([]byte(c.answer(r.URL.Query().Get("continue"))))
			}))
			t.Cleanup(srv.Close)
			r := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: srv.URL, HTTPClient: srv.Client()}))(t)
			n := must.Get(kube.NewNodeAuthorizer(r, trusted, nil))(t)
			err := n.Authorize(t.Context(), proxy(), web)
			if c.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.want)
			assert.Equal(t, c.denied, errors.Is(err, kube.ErrDenied))
		})
	}
}

// A server that answers with another pod.
func TestNodeAuthorizerOtherObject(t *testing.T) {
	t.Parallel()
	api := cluster(kubetest.Start(t))
	target := must.Get(url.Parse(api.URL()))(t)
	behind := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.URL.Path = strings.Replace(r.Out.URL.Path, "ztunnel-1", "ztunnel-2", 1)
	}}
	srv := httptest.NewServer(behind)
	t.Cleanup(srv.Close)
	r := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: srv.URL, HTTPClient: srv.Client()}))(t)
	n := must.Get(kube.NewNodeAuthorizer(r, trusted, nil))(t)
	require.ErrorContains(t, n.Authorize(t.Context(), proxy(), web), "answered with another object")
}

func TestNodeAuthorizerCheck(t *testing.T) {
	t.Parallel()
	own := kubetest.Start(t)
	n := nodeAuthorizer(t, own, nil)
	allow := func(verbs ...string) func(kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
		return func(s kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
			ok := false
			for _, v := range verbs {
				ok = ok || s.ResourceAttributes != nil && *s.ResourceAttributes == kubetest.ResourceAttributes{Verb: v, Version: "v1", Resource: "pods"}
			}
			return kubetest.AccessReviewStatus{Allowed: ok}
		}
	}
	own.AccessReviews(allow("get", "list"))
	require.NoError(t, n.Check(t.Context()))
	own.AccessReviews(allow("list"))
	require.EqualError(t, n.Check(t.Context()), "authn/kube: this program may not get pods; bind a ClusterRole that may get and list pods to "+
		"the service account of this program")
	own.FailNext(1, kubetest.Fault{Code: 503}, nil)
	err := n.Check(t.Context())
	require.ErrorContains(t, err, "authn/kube: check: ")
	assert.NotContains(t, err.Error(), "bind")
}

// Calls that wait at the same time share one answer about one pod as one caller describes it: a caller with the UID of that pod and another name,
// namespace or account gets none of it.
func TestNodeAuthorizerSharesNothingWithOthers(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*spiffe.Pod){
		"another name":      func(p *spiffe.Pod) { p.Name = "other" },
		"another namespace": func(p *spiffe.Pod) { p.Namespace = "elsewhere" },
	} {
		synctest.Test(t, func(t *testing.T) {
			s := cluster(kubetest.StartOn(t, 1, memconn.Listen()))
			defer s.Client().CloseIdleConnections()
			s.Latency(100 * time.Millisecond)
			n := nodeAuthorizer(t, s, nil)
			var wg sync.WaitGroup
			var good atomic.Int64
			for i := range 20 {
				caller := proxy()
				if i%2 == 1 {
					change(caller.Pod)
				}
				wg.Go(func() {
					err := n.Authorize(t.Context(), caller, web)
					if i%2 == 1 {
						assert.Error(t, err, name)
					} else if err == nil {
						good.Add(1)
					}
				})
			}
			wg.Wait()
			assert.EqualValues(t, 10, good.Load(), name)
			assert.Positive(t, s.Count(http.MethodGet, "/api/v1/namespaces/istio-system/pods/"))
		})
	}
}
