package kubesecrets_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

var td = spiffe.MustParseTrustDomain("example.org")

const reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

// of returns the context of a request of a proven caller.
func of(t testing.TB, c *authn.Caller) (ctx context.Context) {
	t.Helper()
	method := authn.Func(func(*http.Request) (*authn.Caller, error) { return c, nil })
	next := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { ctx = r.Context() })
	authn.Require(method, next, nil).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
	require.NotNil(t, ctx)
	return ctx
}

func byID(t testing.TB, id string) context.Context {
	t.Helper()
	return of(t, &authn.Caller{ID: spiffe.MustParseID(id), Method: "test"})
}

// rbac is what an API server says about service accounts.
type rbac struct {
	mu    sync.Mutex
	may   map[string]string // verbs on secrets in the own namespace, by user
	asked []kubetest.AccessReviewSpec
	last  time.Time // of them
}

func (r *rbac) set(user, verb string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.may[user] = verb
}

func (r *rbac) review(in kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked, r.last = append(r.asked, in), time.Now()
	verb, known := r.may[in.User+" in "+in.ResourceAttributes.Namespace]
	return kubetest.AccessReviewStatus{Allowed: known && verb == in.ResourceAttributes.Verb}
}

const gateway = "system:serviceaccount:gw:gateway in gw"

func newRBAC(w *world) *rbac {
	r := &rbac{may: map[string]string{}}
	w.api.AccessReviews(r.review)
	return r
}

// TestResolve has the callers that may have something, and those that may not, whatever the API server says.
func TestResolve(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *spiffetest.CA, w *world) {
		w.start(kubesecrets.Config{AllNamespaces: true, TrustDomain: td})
		r := newRBAC(w)
		r.set(gateway, "list")
		r.set("system:serviceaccount:gw:reader in gw", "get")
		r.set("system:serviceaccount:gw:watcher in gw", "watch")
		var told atomic.Int64
		defer w.src.OnAccess(func() { told.Add(1) })()
		ask := func(ctx context.Context, name string) (string, error) {
			if _, err := w.src.Resolve(ctx, name); err != nil {
				synctest.Wait() // the review
			}
			return w.src.Resolve(ctx, name)
		}
		for name, want := range map[string]string{
			"kubernetes://s": "kubernetes://gw/s", "kubernetes://gw/s": "kubernetes://gw/s",
			"kubernetes://s-cacert": "kubernetes://gw/s-cacert",
		} {
			for _, account := range []string{"gateway", "reader"} {
				got, err := ask(byID(t, "spiffe://example.org/ns/gw/sa/"+account), name)
				require.NoError(t, err, name)
				assert.Equal(t, want, got)
			}
		}
		assert.EqualValues(t, 2, told.Load(), "once for each account")
		assert.Equal(t, 3, w.api.Count("POST", reviews), "list, and list and get")
		assert.Equal(t, kubetest.AccessReviewSpec{
			User: "system:serviceaccount:gw:gateway", Groups: []string{"system:serviceaccounts", "system:serviceaccounts:gw", "system:authenticated"},
			ResourceAttributes: &kubetest.ResourceAttributes{Namespace: "gw", Verb: "list", Version: "v1", Resource: "secrets"},
		}, r.asked[slices.IndexFunc(r.asked, func(s kubetest.AccessReviewSpec) bool { return s.User == "system:serviceaccount:gw:gateway" })])

		before := w.api.Count("POST", reviews)
		good := byID(t, "spiffe://example.org/ns/gw/sa/gateway")
		id := spiffe.MustParseID("spiffe://example.org/ns/gw/sa/gateway")
		for text, c := range map[string]struct {
			ctx  context.Context
			name string
		}{
			"not proven":                               {t.Context(), "kubernetes://s"},
			`is not of trust domain "example.org"`:     {byID(t, "spiffe://other.test/ns/gw/sa/gateway"), "kubernetes://s"},
			"does not name a service account":          {byID(t, "spiffe://example.org/gateway"), "kubernetes://s"},
			`"unix-peer:uid:0" is not of trust domain`: {of(t, &authn.Caller{Name: "uid:0", Method: "unix-peer"}), "kubernetes://s"},
			"and not of this one": {of(t, &authn.Caller{ID: id, Method: "test",
				Pod: &spiffe.Pod{Cluster: "remote", Namespace: "gw", ServiceAccount: "gateway"}}), "kubernetes://s"},
			`may not have Secrets of "app"`: {good, "kubernetes://app/s"},
			`may not have Secrets of "gw"`:  {byID(t, "spiffe://example.org/ns/app/sa/gateway"), "kubernetes://gw/s"},
			"no valid name":                 {good, "kubernetes://gw/a/b"},
			"no valid namespace":            {good, "kubernetes:///s"},
			"the names are":                 {good, "default"},
		} {
			require.ErrorContains(t, must.Err(ask(c.ctx, c.name)), text)
		}
		assert.Equal(t, before, w.api.Count("POST", reviews), "none of these asks the API server")
		for _, account := range []string{"watcher", "unknown"} {
			_, err := ask(byID(t, "spiffe://example.org/ns/gw/sa/"+account), "kubernetes://s")
			require.ErrorContains(t, err, "neither list nor get")
		}
		assert.Equal(t, 4, w.src.Status().Callers)
	})
}

func TestResolveWithoutConfig(t *testing.T) {
	t.Parallel()
	src := must.Get(kubesecrets.New(kubesecrets.Config{Namespace: "gw", APIServer: "https://127.0.0.1"}))(t)
	_, err := src.Resolve(byID(t, "spiffe://example.org/ns/gw/sa/gateway"), "kubernetes://s")
	require.ErrorContains(t, err, "Config.TrustDomain")
}

// TestManyCallers bounds the callers that are known, in all and of one namespace.
func TestManyCallers(t *testing.T) {
	t.Parallel()
	src := must.Get(kubesecrets.New(kubesecrets.Config{Namespace: "gw", APIServer: "https://127.0.0.1", TrustDomain: td}))(t)
	refused := func(namespace, account, text string) {
		t.Helper()
		_, err := src.Resolve(byID(t, fmt.Sprintf("spiffe://example.org/ns/%s/sa/%s", namespace, account)), "kubernetes://s")
		require.ErrorContains(t, err, text)
	}
	for n := range kubesecrets.MaxCallers / kubesecrets.MaxCallersEach {
		namespace := fmt.Sprint("n", n)
		for i := range kubesecrets.MaxCallersEach {
			refused(namespace, fmt.Sprint("a", i), "not known yet")
		}
		refused(namespace, "more", "1000 of one namespace")
		refused(namespace, "a7", "not known yet")
	}
	refused("gw", "gateway", "the rights of 10000 service accounts")
	assert.Equal(t, kubesecrets.MaxCallers, src.Status().Callers)
	assert.Equal(t, kubesecrets.MaxCallers, src.Places())
}

// TestReviews follows what an account may have over time: given, taken, in an outage, and forgotten.
func TestReviews(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *spiffetest.CA, w *world) {
		w.start(kubesecrets.Config{AllNamespaces: true, TrustDomain: td})
		r := newRBAC(w)
		caller := byID(t, "spiffe://example.org/ns/gw/sa/gateway")
		resolve := func() error {
			_, err := w.src.Resolve(caller, "kubernetes://s")
			return err
		}
		var told sync.Map    // when, in nanoseconds
		var open atomic.Bool // a stream that asks again when it is told so
		open.Store(true)
		defer w.src.OnAccess(func() {
			told.Store(time.Now().UnixNano(), true)
			if open.Load() {
				_ = resolve()
			}
		})()
		require.ErrorContains(t, resolve(), "not known yet")
		synctest.Wait()
		require.ErrorContains(t, resolve(), "neither list nor get")
		for range 3 {
			r.set(gateway, "list")
			time.Sleep(31 * time.Second)
			require.NoError(t, resolve())
			r.set(gateway, "")
			for resolve() == nil {
				time.Sleep(100 * time.Millisecond)
				synctest.Wait()
			}
			require.ErrorContains(t, resolve(), "neither list nor get")
			r.mu.Lock()
			_, atOnce := told.Load(r.last.UnixNano())
			r.mu.Unlock()
			assert.True(t, atOnce, "it is told")
		}
		r.set(gateway, "get")
		time.Sleep(31 * time.Second)
		require.NoError(t, resolve())

		// In an outage the last answer counts, for an hour.
		w.api.Faults(func(*http.Request) *kubetest.Fault {
			return &kubetest.Fault{Code: 503, Reason: "ServiceUnavailable", Message: "down"}
		})
		asked := w.api.Count("POST", reviews)
		open.Store(false)
		time.Sleep(29 * time.Minute)
		require.NoError(t, resolve(), "also of a gateway that had no stream meanwhile")
		open.Store(true)
		time.Sleep(30 * time.Minute)
		require.NoError(t, resolve())
		time.Sleep(2 * time.Minute)
		require.ErrorContains(t, resolve(), "have not been known for 1h0m0s")
		assert.Less(t, w.api.Count("POST", reviews)-asked, 61*6, "no tight loop")
		w.api.Faults(nil)
		time.Sleep(31 * time.Second)
		require.NoError(t, resolve())

		// Without a stream it is forgotten, and asked about no more.
		open.Store(false)
		time.Sleep(3 * time.Minute)
		assert.Zero(t, w.src.Status().Callers)
		assert.Zero(t, w.src.Places())
		asked = w.api.Count("POST", reviews)
		time.Sleep(time.Hour)
		assert.Equal(t, asked, w.api.Count("POST", reviews))

		// The program itself may not ask.
		w.api.Faults(func(r *http.Request) *kubetest.Fault {
			if r.Method == http.MethodPost {
				return &kubetest.Fault{Code: 403, Reason: "Forbidden", Message: "no"}
			}
			return nil
		})
		require.Error(t, resolve())
		synctest.Wait()
		require.ErrorContains(t, resolve(), "system:auth-delegator")
		assert.Contains(t, w.log.String(), "the rights of a caller cannot be reviewed")
	})
}

// TestReviewsStopped has a handler that goes on after its Source was closed.
func TestReviewsStopped(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *spiffetest.CA, w *world) {
		w.start(kubesecrets.Config{AllNamespaces: true, TrustDomain: td})
		newRBAC(w).set(gateway, "list")
		caller := byID(t, "spiffe://example.org/ns/gw/sa/gateway")
		require.Error(t, must.Err(w.src.Resolve(caller, "kubernetes://s")))
		synctest.Wait()
		must.Get(w.src.Resolve(caller, "kubernetes://s"))(t)
		require.NoError(t, w.src.Close())
		time.Sleep(2 * time.Hour)
		_, err := w.src.Resolve(caller, "kubernetes://s")
		require.ErrorContains(t, err, "is not running")
		assert.NotContains(t, err.Error(), "%!")
	})
}

// TestEntitlement serves two callers on a Unix socket. The right of one is taken, and within a second of the review
// that says so it gets nothing more; with the right it gets the newest at once.
func TestEntitlement(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	w := &world{t: t, api: kubetest.Start(t)}
	r := newRBAC(w)
	r.set(gateway, "list")
	r.set("system:serviceaccount:app:gateway in app", "list")
	first := tls(t, ca.SVID("/1"))
	put(w.api, "gw/s", first)
	put(w.api, "app/s", first)
	w.start(kubesecrets.Config{AllNamespaces: true, TrustDomain: td, ReviewInterval: time.Second})
	handler := must.Get(sds.NewHandler(w.src, &sds.Options{Resolve: w.src.Resolve}))(t)
	defer handler.Close()
	defer w.src.OnAccess(handler.Refresh)()
	method := authn.Func(func(r *http.Request) (*authn.Caller, error) {
		id, err := spiffe.ParseID(r.Header.Get("caller"))
		return &authn.Caller{ID: id, Method: "test"}, err
	})
	dir := must.Get(os.MkdirTemp("", "ks"))(t)
	defer os.RemoveAll(dir)
	server := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: authn.Require(method, handler, nil)}
	require.NoError(t, server.Listen())
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { assert.NoError(t, server.Run(ctx)) })

	type news struct {
		at  time.Time
		key string
	}
	follow := func(namespace string) <-chan news {
		ch := make(chan news, 100)
		hc := sds.UnixClient(server.Path)
		client := sds.NewClient(&http.Client{Transport: as{"spiffe://example.org/ns/" + namespace + "/sa/gateway", hc.Transport}}, "http://localhost")
		wg.Go(func() {
			for secret, err := range client.Watch(ctx, "kubernetes://s") {
				if err == nil {
					_, key, _ := secret.KeyPair()
					ch <- news{time.Now(), string(key)}
				}
			}
		})
		return ch
	}
	gw, app := follow("gw"), follow("app")
	want := func(ch <-chan news, d data) {
		t.Helper()
		select {
		case n := <-ch:
			require.Equal(t, string(d["tls.key"]), n.key)
		case <-time.After(20 * time.Second):
			t.Fatal("the secret did not come")
		}
	}
	want(gw, first)
	want(app, first)

	refused := func() (at time.Time) {
		caller := byID(t, "spiffe://example.org/ns/gw/sa/gateway")
		for _, err := w.src.Resolve(caller, "kubernetes://s"); err == nil; _, err = w.src.Resolve(caller, "kubernetes://s") {
			time.Sleep(time.Millisecond)
		}
		return time.Now()
	}
	r.set(gateway, "")
	at := refused()
	require.Eventually(t, func() bool { return len(handler.Report().Servers[0].Names) == 1 }, time.Minute, time.Millisecond)
	assert.Less(t, time.Since(at), time.Second, "the stream lost the name")
	second := tls(t, ca.SVID("/2"))
	put(w.api, "gw/s", second)
	put(w.api, "app/s", second)
	want(app, second)
	time.Sleep(300 * time.Millisecond)
	assert.Empty(t, gw, "nothing more is sent")
	r.set(gateway, "list")
	want(gw, second)
	assert.Empty(t, app)
}

// as sends requests of a caller.
type as struct {
	id   string
	next http.RoundTripper
}

func (a as) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("caller", a.id)
	return a.next.RoundTrip(r)
}
