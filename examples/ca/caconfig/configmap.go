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

// rootless are the namespaces whose pods need no roots, as for Istio.
var rootless = []string{"kube-system", "kube-public", "kube-node-lease", "local-path-storage"}

// rootMaps keeps the roots of the CA in a ConfigMap of each namespace, where pods mount them. All replicas do this,
// and write the same.
type rootMaps struct {
	kubefollow.Keeper
	api                 *kube.Client
	name                string
	ca                  ca.Signer
	namespaces, present kubefollow.Objects[object] // namespaces and their ConfigMaps, by the name of the namespace
}

// object is a namespace, or the ConfigMap of one.
type object struct {
	Metadata kube.ObjectMeta   `json:"metadata"`
	Data     map[string]string `json:"data,omitempty"`
}

func (o *object) namespace() string { return cmp.Or(o.Metadata.Namespace, o.Metadata.Name) }

// behind returns what brings the ConfigMaps up to date that are not.
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

// put makes the ConfigMap of a namespace, or changes nothing but the roots in the version that was read.
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
