package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
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
	podsFresh   = 5 * time.Second // how long a pod that was seen counts as running
	podsPage    = 50              // pods in one answer
	maxPodPages = 100             // a node runs some hundred pods
	maxNodes    = 4096            // namespaces of nodes that are remembered

	readsPerCaller      = 50  // of one pod, per second
	readsPerCallerBurst = 500 // at once, as when a node starts
)

// NodeAuthorizerOptions configure a [NodeAuthorizer].
type NodeAuthorizerOptions struct {
	// APIServer and HTTPClient say which API server to ask about pods, as in [ReviewerOptions].
	APIServer  string
	HTTPClient *http.Client

	// Accounts are the service accounts of the proxies that may ask for the certificates of other
	// workloads, such as "istio-system/ztunnel"; at least one is required.
	Accounts []string

	// Remotes decide about callers of other clusters, by the cluster's ID. Their own Remotes are not
	// used. Callers of a cluster without one are refused.
	Remotes map[string]*NodeAuthorizer
}

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
	nodes map[place]*running
}

// NewNodeAuthorizer returns a NodeAuthorizer. It sends nothing.
func NewNodeAuthorizer(o NodeAuthorizerOptions) (*NodeAuthorizer, error) {
	n := &NodeAuthorizer{
		trusted: map[string]bool{},
		remotes: maps.Clone(o.Remotes),
		nodes:   map[place]*running{},
		reads:   newLimiter(readsPerCaller, readsPerCallerBurst),
	}
	fail := func(format string, args ...any) (*NodeAuthorizer, error) {
		return nil, fmt.Errorf("authn/kube: new node authorizer: "+format, args...)
	}
	if len(o.Accounts) == 0 {
		return fail("no accounts: every request would be refused")
	}
	for _, account := range o.Accounts {
		namespace, name, _ := strings.Cut(account, "/")
		if !k8s.ValidLabel(namespace) || !k8s.ValidName(name) {
			return fail("the account %.300q is not NAMESPACE/SERVICE-ACCOUNT", account)
		}
		n.trusted[account] = true
	}
	for id, r := range o.Remotes {
		if id == "" || r == nil {
			return fail("the remote cluster %q has no ID or no NodeAuthorizer", id)
		}
	}
	var err error
	if n.api, err = k8s.New(k8s.Options{URL: o.APIServer, Client: o.HTTPClient}); err != nil {
		return fail("%w", err)
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
	return n.find(ctx, caller.Pod.UID, place{node, namespace}, name)
}

// read reads from the API server for the pod with a UID, within the limits.
func (n *NodeAuthorizer) read(ctx context.Context, uid, path string, query url.Values, out any) error {
	if err := n.reads.Acquire(ctx, uid); err != nil {
		return comeBack(err)
	}
	defer n.reads.Release()
	return n.api.Get(ctx, path, query, out)
}

// pod is the part of a pod that this package reads.
type pod struct {
	Kind     string         `json:"kind"`
	Metadata k8s.ObjectMeta `json:"metadata"`
	Spec     struct {
		ServiceAccountName string `json:"serviceAccountName"`
		NodeName           string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// nodeOf returns the node of the caller's pod, if the pod is the one that the token is bound to.
func (n *NodeAuthorizer) nodeOf(ctx context.Context, caller *spiffe.Pod) (string, error) {
	came := time.Now()
	if caller.Name == "" || caller.UID == "" {
		return "", denied("the caller's token is not bound to a pod")
	}
	if !k8s.ValidName(caller.Name) {
		return "", denied("%.300q is not the name of a pod", caller.Name)
	}
	r, err := n.take(ctx, place{caller.UID, ""}, "find the pod of the caller")
	if err != nil {
		return "", err
	}
	defer func() { <-r.turn }()
	if came.Before(r.asked) && r.caller == *caller { // another goroutine asked while this one waited
		return r.node, nil
	}
	asked := time.Now()
	var p pod
	err = n.read(ctx, caller.UID, k8s.Path("api", "v1", "namespaces", caller.Namespace, "pods", caller.Name), nil, &p)
	switch {
	case k8s.NotFound(err):
		return "", denied("there is no pod %s/%s", caller.Namespace, caller.Name)
	case err != nil:
		return "", fmt.Errorf("find the pod of the caller: %w", withRemedy(err))
	case p.Metadata.Name != caller.Name || p.Metadata.Namespace != caller.Namespace:
		return "", errors.New("find the pod of the caller: the API server answered with another object")
	case p.Metadata.UID != caller.UID:
		return "", denied("the pod %s/%s is not the one that the token was issued for: its UID differs",
			caller.Namespace, caller.Name)
	case p.Spec.ServiceAccountName != caller.ServiceAccount:
		return "", denied("the pod %s/%s has the service account %.300q", caller.Namespace, caller.Name,
			p.Spec.ServiceAccountName)
	case !k8s.ValidName(p.Spec.NodeName):
		return "", denied("the pod %s/%s is not on a node", caller.Namespace, caller.Name)
	}
	r.asked, r.caller, r.node = asked, *caller, p.Spec.NodeName
	return r.node, nil
}

// place is a namespace on a node, or the UID of a caller's pod without a namespace.
type place struct{ node, namespace string }

// running records which service accounts have pods in a place, or where a caller's pod is. The goroutine that has
// sent to turn, whose capacity is one, may use the other fields.
type running struct {
	turn     chan struct{}
	asked    time.Time // when the last answer was asked for
	accounts map[string]bool
	caller   spiffe.Pod
	node     string
}

// take returns the record of a place, with the turn, which the caller gives back. what is for the error.
func (n *NodeAuthorizer) take(ctx context.Context, at place, what string) (*running, error) {
	n.mu.Lock()
	r := n.nodes[at]
	if r == nil {
		for other := range n.nodes { // make space for one more
			if len(n.nodes) < maxNodes {
				break
			}
			delete(n.nodes, other)
		}
		r = &running{turn: make(chan struct{}, 1)}
		n.nodes[at] = r
	}
	n.mu.Unlock()
	select {
	case r.turn <- struct{}{}:
		return r, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
}

// find returns nil if a pod with the service account runs in the place. It asks on behalf of a caller's pod.
func (n *NodeAuthorizer) find(ctx context.Context, caller string, at place, account string) error {
	came := time.Now()
	r, err := n.take(ctx, at, "find a pod of the workload")
	if err != nil {
		return err
	}
	defer func() { <-r.turn }()
	if r.accounts[account] && time.Since(r.asked) < podsFresh {
		return nil
	}
	if r.asked.Before(came) { // else another goroutine asked while this one waited
		asked := time.Now()
		accounts, err := n.list(ctx, caller, at)
		if err != nil {
			return fmt.Errorf("find a pod of the workload: %w", withRemedy(err))
		}
		r.asked, r.accounts = asked, accounts
	}
	if !r.accounts[account] {
		return denied("no pod with the service account %s/%s is on the caller's node %s", at.namespace,
			account, at.node)
	}
	return nil
}

// list asks which service accounts have pods in a place. It requests one namespace of one node, which the API server
// finds without reading all pods of the cluster.
func (n *NodeAuthorizer) list(ctx context.Context, caller string, at place) (map[string]bool, error) {
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
			Items []pod `json:"items"`
		}
		path := k8s.Path("api", "v1", "namespaces", at.namespace, "pods")
		if err := n.read(ctx, caller, path, query, &page); err != nil {
			return nil, err
		}
		if page.Kind != "PodList" {
			return nil, errors.New("the answer is not a PodList")
		}
		for _, p := range page.Items {
			// The selector is repeated here, because a proxy in front of the API server may drop it.
			if p.Metadata.Namespace == at.namespace && p.Spec.NodeName == at.node && p.Status.Phase != "Failed" {
				accounts[p.Spec.ServiceAccountName] = true
			}
		}
		if page.Metadata.Continue == "" {
			return accounts, nil
		}
		query.Set("continue", page.Metadata.Continue)
	}
	return nil, fmt.Errorf("more than %d pods", podsPage*maxPodPages)
}

const podsRemedy = "bind a ClusterRole that may get and list pods to the service account of this program"

func withRemedy(err error) error {
	if k8s.Forbidden(err) {
		return fmt.Errorf("%w; %s", err, podsRemedy)
	}
	return err
}

// Check asks the API servers, also of remote clusters, whether this program may get and list pods, as
// [Reviewer.Check] does for reviews.
func (n *NodeAuthorizer) Check(ctx context.Context) error {
	if err := n.check(ctx); err != nil {
		return fmt.Errorf("authn/kube: %w", err)
	}
	for id, r := range n.remotes {
		if err := r.check(ctx); err != nil {
			return fmt.Errorf("authn/kube: cluster %q: %w", id, err)
		}
	}
	return nil
}

func (n *NodeAuthorizer) check(ctx context.Context) error {
	return checkAccess(ctx, n.api, podsRemedy,
		k8s.Access{Version: "v1", Resource: "pods", Verb: "get"},
		k8s.Access{Version: "v1", Resource: "pods", Verb: "list"})
}
