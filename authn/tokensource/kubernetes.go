package tokensource

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
)

// KubernetesOptions say which token [Kubernetes] requests. Namespace and ServiceAccount are required.
type KubernetesOptions struct {
	// APIServer is the URL of the API server, https or, on loopback, http. Empty means that of the cluster that this
	// process runs in.
	APIServer string

	// HTTPClient authenticates this program to the API server. Nil means as the service account of this process, whose
	// token and CA certificate are read again when they rotate.
	HTTPClient *http.Client

	// Namespace and ServiceAccount name the account that the token is for. This program needs the permission to create
	// serviceaccounts/token there.
	Namespace, ServiceAccount string

	// Audiences are those of the token, all of them. None means the API server's own, and the token is then good for
	// the API server itself.
	Audiences []string

	// Lifetime is what is asked for, at least ten minutes; 0 means the API server's default, an hour. The API server may
	// give another one.
	Lifetime time.Duration

	// Bound is the object that the token ends with; nil means none.
	Bound *BoundObject

	// Logger is as in [MetadataOptions].
	Logger *slog.Logger
}

// BoundObject is what a Kubernetes token is bound to: when the object is deleted, the API server refuses the token.
type BoundObject struct {
	Kind string // Pod, Secret or Node
	Name string // in the namespace of the service account
	UID  string // empty means that of the object that has the name now
}

const shortestRequest = 10 * time.Minute // that the API server accepts

// Kubernetes returns a Source of tokens that it requests from an API server, as kubectl create token does.
func Kubernetes(o KubernetesOptions) (*Source, error) {
	s, err := newKubernetes(o)
	if err != nil {
		return nil, fmt.Errorf("tokensource: Kubernetes: %w", err)
	}
	return s, nil
}

// tokenRequest is a TokenRequest of authentication.k8s.io/v1.
type tokenRequest struct {
	APIVersion string           `json:"apiVersion"`
	Kind       string           `json:"kind"`
	Spec       tokenRequestSpec `json:"spec"`
}

type tokenRequestSpec struct {
	Audiences         []string     `json:"audiences,omitempty"`
	ExpirationSeconds int64        `json:"expirationSeconds,omitempty"`
	BoundObjectRef    *boundObject `json:"boundObjectRef,omitempty"`
}

type boundObject struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	UID        string `json:"uid,omitempty"`
}

// tokenAnswer is what the API server fills in.
type tokenAnswer struct {
	Status struct {
		Token   string    `json:"token"`
		Expires time.Time `json:"expirationTimestamp"`
	} `json:"status"`
}

func newKubernetes(o KubernetesOptions) (*Source, error) {
	switch {
	case !kube.ValidLabel(o.Namespace):
		return nil, fmt.Errorf("%.64q is not a Namespace", o.Namespace)
	case !kube.ValidName(o.ServiceAccount):
		return nil, fmt.Errorf("%.256q is not the name of a ServiceAccount", o.ServiceAccount)
	case slices.Contains(o.Audiences, ""):
		return nil, errors.New("an audience is empty")
	case o.Lifetime != 0 && o.Lifetime < shortestRequest:
		return nil, fmt.Errorf("the Lifetime is %v, and API servers accept %v or more", o.Lifetime, shortestRequest)
	}
	in := tokenRequest{"authentication.k8s.io/v1", "TokenRequest", tokenRequestSpec{slices.Clone(o.Audiences), int64(o.Lifetime / time.Second), nil}}
	if b := o.Bound; b != nil {
		if b.Kind != "Pod" && b.Kind != "Secret" && b.Kind != "Node" || !kube.ValidName(b.Name) {
			return nil, fmt.Errorf("the object Bound is the %.64q %.256q, and has to be a Pod, a Secret or a Node, by its name", b.Kind, b.Name)
		}
		in.Spec.BoundObjectRef = &boundObject{"v1", b.Kind, b.Name, b.UID}
	}
	api, err := kube.New(kube.Options{URL: o.APIServer, Client: o.HTTPClient})
	if err != nil {
		return nil, err
	}
	path := kube.Path("api", "v1", "namespaces", o.Namespace, "serviceaccounts", o.ServiceAccount, "token")
	return newSource("Kubernetes, for "+o.Namespace+"/"+o.ServiceAccount, o.Logger, func(ctx context.Context) (token, error) {
		ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, fmt.Errorf("no answer in %v: %w", requestTimeout, context.DeadlineExceeded))
		defer cancel()
		var out tokenAnswer
		if err := api.Create(ctx, path, in, &out); err != nil {
			return token{}, kubernetesError(ctx, err)
		}
		return newToken(out.Status.Token, out.Status.Expires, in.Spec.Audiences...)
	}), nil
}

// kubernetesError makes an error of this package of one of package kube.
func kubernetesError(ctx context.Context, err error) error {
	if e, ok := errors.AsType[*kube.StatusError](err); ok {
		return &StatusError{StatusCode: e.Code, Code: e.Reason, Message: e.Message, RetryAfter: e.RetryAfter}
	}
	if !kube.MayHaveLanded(err) || ctx.Err() != nil {
		return &networkError{err}
	}
	return err
}
