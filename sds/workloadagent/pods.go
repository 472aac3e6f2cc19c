package workloadagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/http"
	"net/url"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// podWait is how long a request waits for the API server to report an object, which may have just been made.
const podWait = 5 * time.Second

// pod is a pod, or a service account, as the API server reports it.
type pod struct {
	Metadata kube.ObjectMeta `json:"metadata"`
	Spec     struct {
		Account string `json:"serviceAccountName"`
	} `json:"spec"`
}

func (p pod) account() string { return cmp.Or(p.Spec.Account, "default") }

// objects holds the objects of a kind by UID.
type objects = kubefollow.Objects[pod]

func followObjects(api *kube.Client, cfg *Config, plural, kind string, query url.Values) *objects {
	return &objects{
		Follower: kubefollow.Follower[pod]{API: api, Path: "/api/v1/" + plural, Kind: kind, Query: query},
		Name:     func(p *pod) string { return p.Metadata.UID },
		Keeper: &kubefollow.Keeper{
			Name: "workloadagent", Log: ratelog.New(cfg.Logger, 0), Fails: "new pods get nothing by their namespaces",
			Remedy: "bind a ClusterRole that may list and watch " + plural + " to the service account of this program",
		},
	}
}

// await returns the object that match accepts.
func await(ctx context.Context, in *objects, match func(*pod) bool) (pod, error) {
	ctx, cancel := context.WithTimeout(ctx, podWait)
	defer cancel()
	for {
		changed := in.Keeper.News.Changed()
		of, found, known := in.Find(match)
		if found {
			return of, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if !known {
				return of, errors.New("the API server does not answer")
			}
			return of, fs.ErrNotExist
		}
	}
}

// podOf returns the pod with a UID.
func (a *Agent) podOf(ctx context.Context, uid string) (pod, error) {
	of, err := await(ctx, a.pods, func(p *pod) bool { return p.Metadata.UID == uid })
	if err != nil {
		err = fmt.Errorf("the API server tells of no pod with the UID %s on node %s: %w", uid, a.cfg.Node, err)
	}
	return of, err
}

type objectKey struct{}

// find finds the workload that a broker names, as [broker.Options] describes it. The
// context of an object has it as a caller.
func (a *Agent) find(ctx context.Context, r broker.Reference) (context.Context, string, error) {
	o := r.Object
	if r.PID > 0 {
		ctx, err := unixsocket.WithProcess(ctx, r.PID)
		if err != nil || a.pods == nil {
			return ctx, "", err
		}
		p, _ := unixsocket.ProcessFromContext(ctx)
		of, _, _ := a.pods.Find(func(of *pod) bool { return p.Pod != "" && of.Metadata.UID == p.Pod })
		return ctx, of.Metadata.Namespace, nil
	}
	in := map[string]*objects{"pods": a.pods, "serviceaccounts": a.accounts}[r.Kind()]
	if in == nil {
		return nil, "", fmt.Errorf("this agent knows no %s: %w", r.Kind(), fs.ErrInvalid)
	}
	of, err := await(ctx, in, func(p *pod) bool {
		m := p.Metadata
		return (o.UID == "" || o.UID == m.UID) && (o.Name == "" || o.Name == m.Name && o.Namespace == m.Namespace)
	})
	if err != nil {
		return nil, "", err
	}
	ctx, _ = unixsocket.WithProcess(ctx, 0) // never an error
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		for ctx.Err() == nil {
			changed := in.Keeper.News.Changed()
			if _, there, known := in.Find(of.is); known && !there {
				cancel(fs.ErrNotExist)
			}
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	}()
	c := caller{Peer: unixsocket.Peer{UID: math.MaxUint32, GID: math.MaxUint32}} // no user and no group
	c.pod = func() (pod, bool) {
		now, there, _ := in.Find(of.is)
		if in == a.accounts {
			now.Metadata.Labels, now.Spec.Account = nil, now.Metadata.Name
		}
		return now, there
	}
	c.process = func() (p unixsocket.Process, ok bool) {
		if in == a.pods {
			p.Pod = of.Metadata.UID
		}
		return p, true
	}
	return context.WithValue(ctx, objectKey{}, c), of.Metadata.Namespace, nil
}

func (p pod) is(other *pod) bool { return p.Metadata.UID == other.Metadata.UID }

// Broker returns the handler of the Broker API, and the agent's own identity with the trust bundles, for the TLS of its
// server; nil without [Config].Broker. The file says what each broker may ask for. A broker names processes by PID,
// and in a cluster pods of the node and service accounts, which have the identities of the workloads whose selectors
// they meet: a pod has no user, executable or unit, and an account no labels either.
func (a *Agent) Broker() (http.Handler, workloadserver.Provider) {
	one := a.current.Load().identities[a.cfg.Broker]
	if one == nil {
		return nil, nil
	}
	h, err := broker.NewHandler(a.workload, broker.Options{Resolve: a.find, Grant: func(id spiffe.ID) *broker.Grant {
		return a.current.Load().brokers[id]
	}})
	if err != nil {
		panic(err) // never: nothing is missing
	}
	return h, one
}
