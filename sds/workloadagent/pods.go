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

// follow follows the objects of a kind, by UID.
func (a *Agent) follow(api *kube.Client, plural, kind string, query url.Values) {
	a.objects[plural] = &kubefollow.Objects[pod]{
		Follower: kubefollow.Follower[pod]{API: api, Path: "/api/v1/" + plural, Kind: kind, Query: query},
		Name:     func(p *pod) string { return p.Metadata.UID },
		Keeper:   &a.keeper,
	}
}

// await returns the object with a UID, or any if that is empty, that match accepts.
func (a *Agent) await(ctx context.Context, plural, uid string, match func(*pod) bool) (pod, error) {
	ctx, cancel := context.WithTimeout(ctx, podWait)
	defer cancel()
	for {
		changed := a.keeper.News.Changed()
		of, found, known := a.objects[plural].Find(uid, match)
		if found && (match == nil || match(&of)) {
			return of, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err := fs.ErrNotExist
			if !known {
				err = errors.New("the API server has not told of them yet")
			}
			return of, fmt.Errorf("none of the %s for node %s has the UID %q: %w", plural, a.cfg.Node, uid, err)
		}
	}
}

type objectKey struct{}

// find finds the workload that a broker names, as [broker.Options] describes it. The context of an object has it as a
// caller.
func (a *Agent) find(ctx context.Context, r broker.Reference) (context.Context, string, error) {
	if r.PID > 0 {
		ctx, err := unixsocket.WithProcess(ctx, r.PID)
		if err != nil || a.objects["pods"] == nil {
			return ctx, "", err
		}
		var of pod
		p, err := unixsocket.ProcessFromContext(ctx)
		if err == nil && p.Pod != "" {
			if of, err = a.await(ctx, "pods", p.Pod, nil); errors.Is(err, fs.ErrNotExist) { // such as a static pod
				err = nil
			}
		}
		return ctx, of.Metadata.Namespace, cmp.Or(context.Cause(ctx), err)
	}
	o, plural := r.Object, r.Kind()
	if a.objects[plural] == nil {
		return nil, "", fmt.Errorf("this agent knows no %s: %w", plural, fs.ErrInvalid)
	}
	of, err := a.await(ctx, plural, o.UID, func(p *pod) bool {
		return o.Name == "" || o.Name == p.Metadata.Name && o.Namespace == p.Metadata.Namespace
	})
	if err != nil {
		return nil, "", err
	}
	ctx, _ = unixsocket.WithProcess(ctx, 0) // never an error
	ctx, cancel := context.WithCancelCause(ctx)
	var p unixsocket.Process // no executable and no unit
	if plural == "pods" {
		p.Pod = of.Metadata.UID
	}
	c := caller{unixsocket.Peer{UID: math.MaxUint32, GID: math.MaxUint32}, // no user and no group
		func() (unixsocket.Process, bool) { return p, true }, func() (pod, bool) {
			now, there, _ := a.objects[plural].Find(of.Metadata.UID, nil)
			if !there {
				cancel(fs.ErrNotExist)
			}
			if plural == "serviceaccounts" {
				now.Metadata.Labels, now.Spec.Account = nil, now.Metadata.Name
			}
			return now, there
		}}
	return context.WithValue(ctx, objectKey{}, c), of.Metadata.Namespace, nil
}

// Broker returns the handler of the Broker API, and the agent's own identity with the trust bundles, for the TLS of
// its server; nil without [Config].Broker. The file says what each broker may ask for. A broker names processes by
// PID, and in a cluster pods of the node and service accounts, which have the identities of the workloads whose
// selectors they meet: a pod has no user, executable or unit, and an account no labels either.
func (a *Agent) Broker() (http.Handler, workloadserver.Provider) {
	one := a.current.Load().identities[a.cfg.Broker]
	if one == nil {
		return nil, nil
	}
	h, _ := broker.NewHandler(a.workload, broker.Options{Resolve: a.find, Grant: func(id spiffe.ID) *broker.Grant {
		return a.current.Load().brokers[id]
	}}) // never an error: nothing is missing
	return h, one
}
