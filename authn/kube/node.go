package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/authn"
	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/spiffe"
)

// ErrDenied means that a caller may not have the certificate of another workload.
var ErrDenied = errors.New("impersonation denied")

// Limits on requests about the pods of a node.
const (
	podsFresh    = 5 * time.Second // how long a pod that was seen counts as running
	podsPage     = 50              // pods in one answer
	maxPodPages  = 100             // a node runs some hundred pods
	maxQuestions = 4096            // whose last answers are remembered

	readsPerCaller      = 50  // of one pod, per second
	readsPerCallerBurst = 500 // at once, as when a node starts
)

// NodeAuthorizer decides whether a proxy that serves the pods of its node may have the certificate of
// one of them: such a caller asks the certificate authority for an ID that is not its own. It is safe for
// concurrent use.
//
// This program must be allowed to get and list pods of all namespaces that are served; see
// [NodeAuthorizer.Check].
//
// It sends at most 64 reads at once, and 500 a second, to the API server. For one caller's pod it reads 50 times a
// second after 500 at once, so that a proxy with many requests does not delay others. A request beyond these limits
// gets an error with a method Retryable, which says when to come back.
type NodeAuthorizer struct {
	api     *k8s.Client
	trusted map[string]bool // NAMESPACE/NAME
	remotes map[string]*NodeAuthorizer

	reads *limit.Limiter

	mu    sync.Mutex
	known map[question]*known
}

// NewNodeAuthorizer returns a NodeAuthorizer that asks the API server of r about pods. It sends nothing.
//
// The accounts, at least one, are the service accounts of the proxies that may ask for the certificates of other
// workloads, such as "istio-system/ztunnel". The remotes decide about callers of other clusters, by the cluster's ID;
// their own remotes are not used. Callers of a cluster without one are refused.
func NewNodeAuthorizer(
	r *Reviewer, accounts []string, remotes map[string]*NodeAuthorizer,
) (*NodeAuthorizer, error) {
	n := &NodeAuthorizer{
		trusted: map[string]bool{},
		remotes: maps.Clone(remotes),
		known:   map[question]*known{},
		reads:   newLimiter(readsPerCaller, readsPerCallerBurst),
	}
	fail := func(format string, args ...any) (*NodeAuthorizer, error) {
		return nil, fmt.Errorf("authn/kube: new node authorizer: "+format, args...)
	}
	if r == nil || r.api == nil {
		return fail("the Reviewer is nil or the zero one; NewReviewer makes one")
	}
	n.api = r.api
	if len(accounts) == 0 {
		return fail("no accounts: every request would be refused")
	}
	for _, account := range accounts {
		namespace, name, _ := strings.Cut(account, "/")
		if !k8s.ValidLabel(namespace) || !k8s.ValidName(name) {
			return fail("the account %.300q is not NAMESPACE/SERVICE-ACCOUNT", account)
		}
		n.trusted[account] = true
	}
	for id, remote := range remotes {
		if id == "" || remote == nil {
			return fail("the remote cluster %q has no ID or no NodeAuthorizer", id)
		}
	}
	return n, nil
}

// Authorize returns nil if the caller may have a certificate for id. All of this must hold:
//
//  1. the caller's cluster is ours, or one of the remotes;
//  2. the caller's service account is trusted;
//  3. id names a service account (spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/NAME), in the trust domain of
//     the caller's own ID;
//  4. the caller's token is bound to a pod, and the pod exists,
//  5. with the UID of the token,
//  6. and with the service account of the token;
//  7. on the node of that pod runs a pod with the service account that id names. A pod that has failed
//     does not count; one that has succeeded and is still there does, as for Istio.
//
// The caller's pod is looked up each time; calls that wait at the same time share one answer. A pod found for 7
// counts for five more seconds. A pod that was not found is looked up again at the next call, so that a new pod is
// found.
//
// The error wraps [ErrDenied] if one of the conditions does not hold; any other error means that Authorize could not
// decide, and has a method Retryable. The text contains the reason, which is for the server's log and not for the
// caller.
func (n *NodeAuthorizer) Authorize(ctx context.Context, caller *authn.Caller, id spiffe.ID) error {
	err := n.authorize(ctx, caller, id)
	if err == nil {
		return nil
	}
	from := cmp.Or(caller.String(), "an unknown caller")
	err = fmt.Errorf("authn/kube: may %q have a certificate for %.300q: %w", from, id, err)
	if _, over := errors.AsType[*limit.Error](err); over || errors.Is(err, ErrDenied) {
		return err
	}
	return unanswered{err}
}

// unanswered is an error that says that Authorize could not decide, and may be called again.
type unanswered struct{ error }

func (e unanswered) Unwrap() error                  { return e.error }
func (unanswered) Retryable() (time.Duration, bool) { return 0, true }

func denied(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrDenied}, args...)...)
}

func (n *NodeAuthorizer) authorize(ctx context.Context, caller *authn.Caller, id spiffe.ID) error {
	if caller == nil || caller.Pod == nil {
		return denied("the caller is not known to run in a pod; only Kubernetes tokens prove that")
	}
	if cluster := caller.Pod.Cluster; cluster != "" {
		if n = n.remotes[cluster]; n == nil {
			return denied("there is no NodeAuthorizer for the cluster %.253q", cluster)
		}
	}
	account := caller.Pod.Namespace + "/" + caller.Pod.ServiceAccount
	if !n.trusted[account] {
		return denied("%.320q is not one of the trusted accounts", account)
	}
	namespace, name, ok := id.Kubernetes()
	if !ok || !k8s.ValidLabel(namespace) || !k8s.ValidName(name) {
		return denied("the requested ID does not name a service account")
	}
	if !id.MemberOf(caller.ID.TrustDomain()) {
		return denied("the requested ID is not in the trust domain of the caller")
	}
	ctx, cancel := limited(ctx)
	defer cancel()
	node, err := n.nodeOf(ctx, caller.Pod)
	if err != nil {
		return err
	}
	return n.find(ctx, caller.Pod.UID, question{node: node, namespace: namespace}, name)
}

// read calls get, which reads from the API server for the pod with a UID, within the limits.
func (n *NodeAuthorizer) read(ctx context.Context, uid string, get func() error) error {
	if err := n.reads.Acquire(ctx, uid); err != nil {
		return err
	}
	defer n.reads.Release()
	err := get()
	if k8s.Forbidden(err) {
		return fmt.Errorf("%w; %s", err, podsRemedy)
	}
	return err
}

const podsRemedy = "bind a ClusterRole that may get and list pods to the service account of this program"

// question asks where the pod of a caller is, or which service accounts have pods in a namespace on a node.
type question struct {
	caller          spiffe.Pod
	node, namespace string
}

type answer struct {
	node     string
	accounts map[string]bool
}

// known is the last answer to a question. The goroutine that has sent to turn, whose capacity is one, may use the
// other fields.
type known struct {
	turn  chan struct{}
	asked time.Time // when this program asked for the answer
	answer
}

// ask returns the last answer to a question if it is enough and not older than podsFresh, or if another call has asked
// for it while this one waited for its turn. Otherwise it asks.
func (n *NodeAuthorizer) ask(
	ctx context.Context, q question, enough func(answer) bool, ask func() (answer, error),
) (answer, error) {
	came := time.Now()
	k := n.last(q)
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	}
	now := time.Now()
	if came.Before(k.asked) || now.Sub(k.asked) < podsFresh && enough(k.answer) {
		return k.answer, nil
	}
	a, err := ask()
	if err == nil {
		k.asked, k.answer = now, a
	}
	return a, err
}

// last returns the record of a question.
func (n *NodeAuthorizer) last(q question) *known {
	n.mu.Lock()
	defer n.mu.Unlock()
	k := n.known[q]
	if k == nil {
		for other := range n.known { // make space for one more
			if len(n.known) < maxQuestions {
				break
			}
			delete(n.known, other)
		}
		k = &known{turn: make(chan struct{}, 1)}
		n.known[q] = k
	}
	return k
}

// nodeOf returns the node of the caller's pod, if the pod is the one that the token is bound to.
func (n *NodeAuthorizer) nodeOf(ctx context.Context, caller *spiffe.Pod) (string, error) {
	switch {
	case caller.Name == "" || caller.UID == "":
		return "", denied("the caller's token is not bound to a pod")
	case !k8s.ValidName(caller.Name):
		return "", denied("%.300q is not the name of a pod", caller.Name)
	}
	never := func(answer) bool { return false }
	found, err := n.ask(ctx, question{caller: *caller}, never, func() (answer, error) {
		var p k8s.Pod
		err := n.read(ctx, caller.UID, func() (err error) {
			p, err = n.api.Pod(ctx, caller.Namespace, caller.Name)
			return err
		})
		switch {
		case k8s.NotFound(err):
			err = denied("there is no pod %s/%s", caller.Namespace, caller.Name)
		case err != nil:
		case p.Metadata.UID != caller.UID:
			err = denied("the pod %s/%s is not the one that the token was issued for: its UID differs",
				caller.Namespace, caller.Name)
		case p.Spec.ServiceAccountName != caller.ServiceAccount:
			err = denied("the pod %s/%s has the service account %.300q", caller.Namespace, caller.Name,
				p.Spec.ServiceAccountName)
		case !k8s.ValidName(p.Spec.NodeName):
			err = denied("the pod %s/%s is not on a node", caller.Namespace, caller.Name)
		}
		return answer{node: p.Spec.NodeName}, err
	})
	if err != nil {
		return "", fmt.Errorf("find the pod of the caller: %w", err)
	}
	return found.node, nil
}

// find returns nil if a pod with the service account runs in a namespace on a node. It asks on behalf of a caller's
// pod.
func (n *NodeAuthorizer) find(ctx context.Context, uid string, at question, account string) error {
	runs := func(a answer) bool { return a.accounts[account] }
	found, err := n.ask(ctx, at, runs, func() (answer, error) { return n.list(ctx, uid, at) })
	if err != nil {
		return fmt.Errorf("find a pod of the workload: %w", err)
	}
	if !found.accounts[account] {
		return denied("no pod with the service account %s/%s is on the caller's node %s", at.namespace,
			account, at.node)
	}
	return nil
}

// list asks which service accounts have pods in a namespace on a node. The API server finds these without reading all
// pods of the cluster.
func (n *NodeAuthorizer) list(ctx context.Context, uid string, at question) (answer, error) {
	accounts := map[string]bool{}
	query := url.Values{
		"fieldSelector": {"spec.nodeName=" + at.node + ",status.phase!=Failed"},
		"limit":         {fmt.Sprint(podsPage)},
	}
	for range maxPodPages {
		var page struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []k8s.Pod `json:"items"`
		}
		path := k8s.Path("api", "v1", "namespaces", at.namespace, "pods")
		if err := n.read(ctx, uid, func() error { return n.api.Get(ctx, path, query, &page) }); err != nil {
			return answer{}, err
		}
		if page.Kind != "PodList" {
			return answer{}, errors.New("the answer is not a PodList")
		}
		for _, p := range page.Items {
			// The selector is repeated here, because a proxy in front of the API server may drop it.
			if p.Metadata.Namespace == at.namespace && p.Spec.NodeName == at.node && p.Status.Phase != "Failed" {
				accounts[p.Spec.ServiceAccountName] = true
			}
		}
		if page.Metadata.Continue == "" {
			return answer{accounts: accounts}, nil
		}
		query.Set("continue", page.Metadata.Continue)
	}
	return answer{}, fmt.Errorf("more than %d pods", podsPage*maxPodPages)
}

// Check asks the API server whether this program may get and list pods, as [Reviewer.Check] does for reviews. It does
// not ask those of the remotes.
func (n *NodeAuthorizer) Check(ctx context.Context) error {
	return checkAccess(ctx, n.api, podsRemedy,
		k8s.Access{Version: "v1", Resource: "pods", Verb: "get"},
		k8s.Access{Version: "v1", Resource: "pods", Verb: "list"})
}
