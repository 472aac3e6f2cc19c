package workloadagent

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/ratelog"
)

// podWait is how long a request waits for the API server to report a pod, which may have just started.
const podWait = 5 * time.Second

// pod is a pod as the API server reports it.
type pod struct {
	Metadata kube.ObjectMeta `json:"metadata"`
	Spec     struct {
		Account string `json:"serviceAccountName"`
	} `json:"spec"`
}

func (p pod) account() string { return cmp.Or(p.Spec.Account, "default") }

// pods holds the pods of the node by UID.
type pods = kubefollow.Objects[pod]

func followPods(api *kube.Client, cfg *Config) *pods {
	return &pods{
		Follower: kubefollow.Follower[pod]{API: api, Path: "/api/v1/pods", Kind: "Pod",
			Query: url.Values{"fieldSelector": {"spec.nodeName=" + cfg.Node}}},
		Name: func(p *pod) string { return p.Metadata.UID },
		Keeper: &kubefollow.Keeper{
			Name: "workloadagent", Log: ratelog.New(cfg.Logger, 0), Fails: "new pods get nothing by their namespaces",
			Remedy: "bind a ClusterRole that may list and watch pods to the service account of this program",
		},
	}
}

// podOf returns the pod with a UID.
func (a *Agent) podOf(ctx context.Context, uid string) (pod, error) {
	ctx, cancel := context.WithTimeout(ctx, podWait)
	defer cancel()
	for {
		changed := a.pods.Keeper.News.Changed()
		if p, ok := a.pods.All()[uid]; ok {
			return p, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return pod{}, fmt.Errorf("the API server tells of no pod with the UID %s on node %s", uid, a.cfg.Node)
		}
	}
}
