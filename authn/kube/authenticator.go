package kube

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/spiffe"
)

const method = "kubernetes-token"

// TokenReviewOptions configure [TokenReview], which copies them.
type TokenReviewOptions struct {
	Reviewer    *Reviewer          // required: for the server's own cluster
	TrustDomain spiffe.TrustDomain // required: of all callers, whatever their cluster

	// Audiences are the audiences that a token may be issued for, at least one; nil means "istio-ca", which Istio's
	// agents use.
	Audiences []string

	// Cluster is the ID of the server's own cluster. Callers name theirs in the header clusterid; callers that name
	// no cluster, or this one, are from the server's own.
	Cluster string

	// Remotes review the tokens of other clusters, by ID. A cluster with two IDs is there twice.
	Remotes map[string]*Reviewer

	// AllowPlaintext also accepts tokens over connections that are not TLS and not Unix sockets. It is for servers
	// whose connections have other protection, such as a proxy in the same pod.
	AllowPlaintext bool
}

// TokenReview returns an [authn.Authenticator] that proves a caller by the service account token in
// the authorization header, see [authn.Bearer]. The caller's ID is
// spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT, its method "kubernetes-token", and its Pod is
// never nil; the pod's Cluster is the ID of the remote cluster, or empty for the server's own.
//
// The header clusterid selects the cluster whose API server reviews the token; it counts if it occurs exactly once.
//
// Errors of the Authenticator wrap [authn.ErrNoCredential] if there is no token, [authn.ErrRefused]
// if the token or the cluster is not accepted, and the kinds of [Reviewer.Review]; with
// [ErrReviewFailed] alone the same request may succeed later.
func TokenReview(o TokenReviewOptions) (authn.Authenticator, error) {
	if o.Audiences == nil {
		o.Audiences = []string{"istio-ca"}
	}
	o.Remotes, o.Audiences = maps.Clone(o.Remotes), slices.Clone(o.Audiences)
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("authn/kube: %w", err)
	}
	a := &tokenReviewer{o, authn.Bearer}
	if o.AllowPlaintext {
		a.bearer = authn.BearerOverPlaintext
	}
	return a, nil
}

type tokenReviewer struct {
	TokenReviewOptions
	bearer func(*http.Request) (string, error)
}

func (o *TokenReviewOptions) check() error {
	switch {
	case o.Reviewer == nil || o.Reviewer.api == nil:
		return errors.New("TokenReviewOptions.Reviewer is missing, or the zero one; NewReviewer makes one")
	case o.TrustDomain.IsZero():
		return fmt.Errorf("TokenReviewOptions.TrustDomain: %w", spiffe.ErrZero)
	case len(o.Audiences) == 0 || slices.Contains(o.Audiences, ""):
		return errors.New("TokenReviewOptions.Audiences is empty, or has an empty one: every token of the " +
			"cluster would be accepted; nil means istio-ca")
	}
	for id, r := range o.Remotes {
		switch {
		case id == "" || id == o.Cluster:
			return fmt.Errorf("the remote cluster %q has the ID of the server's own", id)
		case r == nil || r.api == nil:
			return fmt.Errorf("the Reviewer of the remote cluster %q is missing, or the zero one", id)
		}
	}
	return nil
}

// Authenticate implements [authn.Authenticator].
func (a *tokenReviewer) Authenticate(r *http.Request) (*authn.Caller, error) {
	token, err := a.bearer(r)
	if err != nil {
		return nil, err
	}
	reviewer, cluster, err := a.choose(r.Header)
	if err != nil {
		return nil, fmt.Errorf("authn/kube: %w: %w", authn.ErrRefused, err)
	}
	pod, expires, err := reviewer.review(peerkey.WithRequest(r.Context(), r), token, a.Audiences)
	switch {
	case errors.Is(err, ErrReviewFailed):
		return nil, fmt.Errorf("authn/kube: %w", err)
	case err != nil:
		return nil, fmt.Errorf("authn/kube: %w: %w", authn.ErrRefused, err)
	}
	id, err := a.TrustDomain.WorkloadID("ns", pod.Namespace, "sa", pod.ServiceAccount)
	if err != nil { // names that Kubernetes allows never break the rules of SPIFFE
		return nil, fmt.Errorf("authn/kube: %w: %w", authn.ErrRefused, err)
	}
	pod.Cluster = cluster
	return &authn.Caller{ID: id, Method: method, NotAfter: expires, Pod: pod}, nil
}

// choose returns the Reviewer for the cluster that the caller names, and the ID of the cluster if it is
// remote.
func (a *tokenReviewer) choose(h http.Header) (r *Reviewer, cluster string, err error) {
	name := ""
	if values := h.Values("Clusterid"); len(values) == 1 {
		name = values[0]
	}
	switch {
	case name == "" || name == a.Cluster:
		return a.Reviewer, "", nil
	case a.Remotes[name] != nil:
		return a.Remotes[name], name, nil
	}
	known := slices.Sorted(maps.Keys(a.Remotes))
	if a.Cluster != "" {
		known = append([]string{a.Cluster}, known...)
	}
	return nil, "", fmt.Errorf("the cluster %.253q is not one of %.64q", name, known)
}
