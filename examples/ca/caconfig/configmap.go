package caconfig

import (
	"cmp"
	"context"
	"log/slog"
	"net/url"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/ca"
)

const rootsKey = "root-cert.pem"

// rootless are the namespaces whose pods need no roots, as in Istio.
var rootless = []string{"kube-system", "kube-public", "kube-node-lease", "local-path-storage"}

// rootMaps keeps the CA's roots in a ConfigMap of each namespace, which pods mount. All replicas do this, and write
// the same.
type rootMaps struct {
	kubefollow.Keeper
	api                 *kube.Client
	name                string
	ca                  ca.Signer
	namespaces, present kubefollow.Objects[object] // both by the namespace's name
}

// object is a namespace or its ConfigMap.
type object struct {
	Metadata kube.ObjectMeta   `json:"metadata"`
	Data     map[string]string `json:"data,omitempty"`
}

func (o *object) namespace() string { return cmp.Or(o.Metadata.Namespace, o.Metadata.Name) }

// behind returns, by namespace, the functions that update the outdated ConfigMaps.
func (m *rootMaps) behind() map[string]func(context.Context) error {
	roots, present, writes := "", m.present.All(), make(map[string]func(context.Context) error)
	if b := m.ca.Bundle(); b != nil {
		roots = string(b.MarshalPEM())
	}
	for ns, o := range m.namespaces.All() {
		old := present[ns]
		behind := present != nil && roots != "" && old.Data[rootsKey] != roots
		if behind && o.Metadata.DeletionTimestamp == nil && !slices.Contains(rootless, ns) {
			writes[ns+"/"+m.name] = func(ctx context.Context) error {
				return m.put(ctx, ns, old.Metadata.ResourceVersion, roots)
			}
		}
	}
	return writes
}

// put creates a namespace's ConfigMap, or patches only the roots in the version that was read.
func (m *rootMaps) put(ctx context.Context, ns, version, roots string) error {
	path, o := kube.Path("api", "v1", "namespaces", ns, "configmaps"), object{Data: map[string]string{rootsKey: roots}}
	if version != "" {
		o.Metadata.ResourceVersion = version
		return m.api.Patch(ctx, path+"/"+m.name, o)
	}
	o.Metadata = kube.ObjectMeta{Name: m.name, Labels: map[string]string{"istio.io/config": "true"}}
	return m.api.Create(ctx, path, o, nil)
}

// handOutRoots keeps the roots in ConfigMaps until stop is called.
func (c *Config) handOutRoots(ctx context.Context, signer ca.Signer, again time.Duration, log *slog.Logger) (
	stop func(), err error) {
	api, err := kube.New(kube.Options{URL: c.cluster.API.APIServer, Client: c.cluster.API.HTTPClient})
	if err != nil {
		return nil, err
	}
	m := &rootMaps{api: api, name: c.rootConfigMap, ca: signer}
	m.Keeper = kubefollow.Keeper{
		Name: "caconfig: -root-configmap", Again: again, Log: ratelog.New(log, 0), Behind: m.behind,
		Remedy: "bind a ClusterRole that may list and watch namespaces, and list, watch, create and patch " +
			"configmaps, to the service account of " +
			"this program, or empty this flag",
	}
	only := url.Values{"fieldSelector": {"metadata.name=" + m.name}}
	m.namespaces.Follower = kubefollow.Follower[object]{API: api, Path: kube.Path("api", "v1", "namespaces"),
		Kind: "Namespace"}
	m.present.Follower = kubefollow.Follower[object]{API: api, Path: kube.Path("api", "v1", "configmaps"),
		Query: only, Kind: "ConfigMap"}
	for _, o := range []*kubefollow.Objects[object]{&m.namespaces, &m.present} {
		o.Name, o.Keeper = (*object).namespace, &m.Keeper
	}
	return background(ctx, func(ctx context.Context) {
		m.Run(ctx, m.namespaces.Run, m.present.Run)
		_ = api.Close()
	}), nil
}
