package caconfig

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca"
)

const (
	rootsKey   = "root-cert.pem"
	rootsAgain = 10 * time.Second // between two writes of one ConfigMap, as another program may write it, too
)

// rootless are the namespaces whose pods need no roots, as for Istio.
var rootless = []string{"kube-system", "kube-public", "kube-node-lease", "local-path-storage"}

// rootMaps keeps the roots of the CA in a ConfigMap of each namespace, where pods mount them. Roots that others change or delete
// there are written again. All replicas do this, and write the same.
type rootMaps struct {
	api   *kube.Client
	name  string
	again time.Duration // between two writes of one ConfigMap, and between two looks at the roots of the CA
	ca    ca.Signer
	log   *ratelog.Log
	news  renew.Signal
	next  map[string]time.Time // when a namespace may be written again; only run uses it

	mu                  sync.Mutex
	namespaces, present map[string]object // namespaces and their ConfigMaps, by the name of the namespace; nil until listed
}

// object is a namespace, or the ConfigMap of one.
type object struct {
	Metadata kube.ObjectMeta   `json:"metadata"`
	Data     map[string]string `json:"data,omitempty"`
}

func (o *object) namespace() string { return cmp.Or(o.Metadata.Namespace, o.Metadata.Name) }

// run writes until ctx is done.
func (m *rootMaps) run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { m.follow(ctx, "Namespace", "namespaces", nil, &m.namespaces) })
	only := url.Values{"fieldSelector": {"metadata.name=" + m.name}}
	running.Go(func() { m.follow(ctx, "ConfigMap", "configmaps", only, &m.present) })
	for ctx.Err() == nil {
		changed := m.news.Changed()
		m.write(ctx)
		renew.Wait(ctx, m.again, changed)
	}
}

// follow keeps the objects of a kind up to date.
func (m *rootMaps) follow(ctx context.Context, kind, plural string, query url.Values, all *map[string]object) {
	var listed map[string]object
	f := kubefollow.Follower[object]{API: m.api, Path: kube.Path("api", "v1", plural), Query: query, Kind: kind}
	f.State = func(_ context.Context, err error, _ time.Duration) {
		if err != nil {
			m.warn("the cluster cannot be followed", err)
		}
	}
	f.Page = func(_ context.Context, items []object, first, last bool) {
		if first {
			listed = make(map[string]object)
		}
		for _, o := range items {
			listed[o.namespace()] = o
		}
		if last {
			m.mu.Lock()
			*all = listed
			m.mu.Unlock()
			m.news.Notify()
		}
	}
	f.Event = func(_ context.Context, change string, o *object) bool {
		m.mu.Lock()
		if (*all)[o.namespace()] = *o; change == kube.Deleted {
			delete(*all, o.namespace())
		}
		m.mu.Unlock()
		m.news.Notify()
		return o.namespace() != ""
	}
	f.Run(ctx)
}

func (m *rootMaps) warn(reason string, err error, attrs ...slog.Attr) {
	if kube.Forbidden(err) {
		err = fmt.Errorf("%w; bind a ClusterRole that may list and watch namespaces, and list, watch, create and patch configmaps, "+
			"to the service account of this program, or empty this flag", err)
	}
	m.log.Warn("caconfig: -root-configmap: roots are not handed out", reason, append(attrs, slog.Any("err", err))...)
}

// write brings the ConfigMaps up to date that were not written a moment ago.
func (m *rootMaps) write(ctx context.Context) {
	roots := ""
	if b := m.ca.Bundle(); b != nil {
		roots = string(b.MarshalPEM())
	}
	maps.DeleteFunc(m.next, func(_ string, at time.Time) bool { return time.Until(at) <= 0 })
	stale := make(map[string]bool) // whether there is a ConfigMap
	m.mu.Lock()
	for ns, o := range m.namespaces {
		old, exists := m.present[ns]
		_, soon := m.next[ns]
		behind := m.present != nil && roots != "" && old.Data[rootsKey] != roots
		if behind && !soon && o.Metadata.DeletionTimestamp == nil && !slices.Contains(rootless, ns) {
			stale[ns] = exists
		}
	}
	m.mu.Unlock()
	for ns, exists := range stale {
		m.next[ns] = time.Now().Add(m.again)
		switch err := m.put(ctx, ns, exists, roots); {
		case err == nil:
			m.log.Log(slog.LevelInfo, "caconfig: roots written", "the ConfigMap was not up to date", slog.String("namespace", ns), slog.String("configmap", m.name))
		case ctx.Err() != nil, kube.AlreadyExists(err), kube.Conflict(err), kube.NotFound(err): // another replica was faster, or the namespace ends
		default:
			m.warn("a ConfigMap cannot be written", err, slog.String("namespace", ns))
		}
	}
}

// put makes the ConfigMap of a namespace, or changes nothing but the roots in it.
func (m *rootMaps) put(ctx context.Context, ns string, exists bool, roots string) error {
	path, o := kube.Path("api", "v1", "namespaces", ns, "configmaps"), object{Data: map[string]string{rootsKey: roots}}
	if exists {
		return m.api.Patch(ctx, path+"/"+m.name, o)
	}
	o.Metadata = kube.ObjectMeta{Name: m.name, Labels: map[string]string{"istio.io/config": "true"}}
	return m.api.Create(ctx, path, o, nil)
}

// handOutRoots keeps the roots in ConfigMaps until stop is called.
func (c *Config) handOutRoots(ctx context.Context, signer ca.Signer, again time.Duration, log *slog.Logger) (stop func(), err error) {
	api, err := kube.New(kube.Options{URL: c.cluster.API.APIServer, Client: c.cluster.API.HTTPClient})
	if err != nil {
		return nil, err
	}
	m := &rootMaps{api: api, name: c.rootConfigMap, again: again, ca: signer, log: ratelog.New(log, 0), next: make(map[string]time.Time)}
	return background(ctx, func(ctx context.Context) { m.run(ctx); _ = api.Close() }), nil
}
