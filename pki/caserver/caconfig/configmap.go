package caconfig

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
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
	rootsPoll  = time.Minute      // of a CA that does not tell of new roots
)

// rootless are the namespaces whose pods need no roots, as for Istio.
var rootless = []string{"kube-system", "kube-public", "kube-node-lease", "local-path-storage"}

// rootMaps keeps the roots of the CA in a ConfigMap of each namespace, where pods mount them. What others change or delete
// there is repaired. All replicas do this, and write the same.
type rootMaps struct {
	api   *kube.Client
	name  string
	again time.Duration // between two writes of one ConfigMap
	ca    ca.Signer
	log   *ratelog.Log
	news  renew.Signal

	mu         sync.Mutex
	told       bool
	namespaces map[string]bool // that want a ConfigMap
	present    map[string]configMap
	next       map[string]time.Time // when a namespace may be written again
}

// configMap is an object, whose other members are kept.
type configMap map[string]any

// member returns the member of o that is an object itself.
func member(o map[string]any, name string) map[string]any {
	m, _ := o[name].(map[string]any)
	return m
}

func text(o map[string]any, name string) string {
	s, _ := o[name].(string)
	return s
}

// namespaceObject is the part of a namespace that counts.
type namespaceObject struct {
	Metadata struct {
		Name     string     `json:"name"`
		Deletion *time.Time `json:"deletionTimestamp"`
	} `json:"metadata"`
}

// run writes until ctx is done.
func (m *rootMaps) run(ctx context.Context) {
	m.namespaces, m.present, m.next = map[string]bool{}, map[string]configMap{}, map[string]time.Time{}
	namespaces := kubefollow.Follower[namespaceObject]{API: m.api, Path: kube.Path("api", "v1", "namespaces"), Kind: "Namespace", State: m.follows}
	listed := map[string]bool{}
	namespaces.Begin = func() { listed = map[string]bool{} }
	namespaces.Items = func(_ context.Context, items []namespaceObject) {
		for _, n := range items {
			if n.Metadata.Deletion == nil {
				listed[n.Metadata.Name] = true
			}
		}
	}
	namespaces.End = func(context.Context) { m.set(func() { m.namespaces = listed }) }
	namespaces.Event = func(_ context.Context, change string, n *namespaceObject) error {
		m.set(func() {
			delete(m.namespaces, n.Metadata.Name)
			if change != kube.Deleted && n.Metadata.Deletion == nil {
				m.namespaces[n.Metadata.Name] = true
			}
		})
		return nil
	}
	configMaps := kubefollow.Follower[configMap]{API: m.api, Path: kube.Path("api", "v1", "configmaps"), Kind: "ConfigMap", State: m.follows,
		Query: map[string][]string{"fieldSelector": {"metadata.name=" + m.name}}}
	present := map[string]configMap{}
	configMaps.Begin = func() { present = map[string]configMap{} }
	configMaps.Items = func(_ context.Context, items []configMap) {
		for _, c := range items {
			present[text(member(c, "metadata"), "namespace")] = c
		}
	}
	ready := false
	configMaps.End = func(context.Context) { m.set(func() { m.present, ready = present, true }) }
	configMaps.Event = func(_ context.Context, change string, c *configMap) error {
		m.set(func() {
			ns := text(member(*c, "metadata"), "namespace")
			delete(m.present, ns)
			if change != kube.Deleted {
				m.present[ns] = *c
			}
		})
		return nil
	}
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { namespaces.Run(ctx) })
	running.Go(func() { configMaps.Run(ctx) })
	for ctx.Err() == nil {
		changed, wait := m.news.Changed(), rootsPoll
		var roots <-chan struct{}
		if c, ok := m.ca.(interface{ Changed() <-chan struct{} }); ok {
			roots = c.Changed()
		}
		m.mu.Lock()
		listed := ready
		m.mu.Unlock()
		if listed {
			wait = m.write(ctx)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-roots:
		case <-time.After(wait):
		}
	}
}

func (m *rootMaps) set(f func()) {
	m.mu.Lock()
	f()
	m.mu.Unlock()
	m.news.Notify()
}

// follows says once why the cluster is not followed.
func (m *rootMaps) follows(_ context.Context, err error, retryIn time.Duration) {
	m.mu.Lock()
	tell := err != nil && !m.told
	m.told = err != nil
	m.mu.Unlock()
	if tell {
		m.log.Warn("caconfig: -root-configmap: roots are not handed out", "the cluster cannot be followed", slog.Any("err", m.remedy(err)), slog.Duration("retry_in", retryIn))
	}
}

func (m *rootMaps) remedy(err error) error {
	if !kube.Forbidden(err) {
		return err
	}
	return fmt.Errorf("%w; bind a ClusterRole that may list and watch namespaces, and list, watch, create and update configmaps, "+
		"to the service account of this program, or empty this flag", err)
}

// write brings the ConfigMaps up to date, and returns when to look again.
func (m *rootMaps) write(ctx context.Context) time.Duration {
	b := m.ca.Bundle()
	if b == nil {
		return time.Second
	}
	roots, wait := string(b.MarshalPEM()), rootsPoll
	m.mu.Lock()
	names := slices.Sorted(maps.Keys(m.namespaces))
	m.mu.Unlock()
	for _, ns := range names {
		m.mu.Lock()
		old, next := m.present[ns], m.next[ns]
		m.mu.Unlock()
		if roots == "" || slices.Contains(rootless, ns) || text(member(old, "data"), rootsKey) == roots {
			continue
		}
		if left := time.Until(next); left > 0 {
			wait = min(wait, left)
			continue
		}
		now, err := m.put(ctx, ns, old, roots)
		m.mu.Lock()
		m.next[ns] = time.Now().Add(m.again)
		if err == nil {
			m.present[ns] = now
		}
		m.mu.Unlock()
		switch {
		case err == nil:
			m.log.Log(slog.LevelInfo, "caconfig: roots written", "the ConfigMap was not up to date", slog.String("namespace", ns), slog.String("configmap", m.name))
		case ctx.Err() != nil:
			return 0
		case kube.AlreadyExists(err), kube.Conflict(err), kube.NotFound(err): // another replica was faster, or the namespace ends
		default:
			m.log.Warn("caconfig: -root-configmap: roots are not handed out", "a ConfigMap cannot be written", slog.String("namespace", ns), slog.Any("err", m.remedy(err)))
		}
		wait = min(wait, m.again)
	}
	return wait
}

// put writes the ConfigMap of a namespace, where old is present unless it is nil.
func (m *rootMaps) put(ctx context.Context, ns string, old configMap, roots string) (now configMap, err error) {
	path := kube.Path("api", "v1", "namespaces", ns, "configmaps")
	o := configMap{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{
		"name": m.name, "namespace": ns, "labels": map[string]any{"istio.io/config": "true"},
	}, "data": map[string]any{rootsKey: roots}}
	if old == nil {
		err = m.api.Create(ctx, path, o, &now)
		return now, err
	}
	data := maps.Clone(member(old, "data"))
	if data == nil {
		data = map[string]any{}
	}
	data[rootsKey], o["data"], o["metadata"] = roots, data, old["metadata"]
	if binary, ok := old["binaryData"]; ok {
		o["binaryData"] = binary
	}
	err = m.api.Update(ctx, path+"/"+m.name, o, &now)
	return now, err
}

// handOutRoots keeps the roots in ConfigMaps until stop is called.
func (c *Config) handOutRoots(ctx context.Context, signer ca.Signer, again time.Duration, log *slog.Logger) (stop func(), err error) {
	api, err := kube.New(kube.Options{URL: c.cluster.API.APIServer, Client: c.cluster.API.HTTPClient})
	if err != nil {
		return nil, err
	}
	m := &rootMaps{api: api, name: c.rootConfigMap, again: again, ca: signer, log: ratelog.New(log, 0)}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { m.run(ctx) })
	return func() { cancel(); running.Wait(); _ = api.Close() }, nil
}
