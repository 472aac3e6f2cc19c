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
	// APIServer is the URL of the API server, https or, on loopback, http. If empty, it is the API server of the
	// cluster that this process runs in.
	APIServer string

	// HTTPClient authenticates this program to the API server. If nil, requests are authenticated with this
	// process's own service account; its token and CA certificate are reloaded when they rotate.
	HTTPClient *http.Client

	// Namespace and ServiceAccount name the account for the token. This program needs the right to create
	// serviceaccounts/token there.
	Namespace, ServiceAccount string

	// Audiences are the audiences of the token. None means the API server's own, and the token is then good for the
	// API server itself.
	Audiences []string

	// Lifetime is the requested lifetime, at least ten minutes; 0 means the API server's default, an hour. The API
	// server may choose another.
	Lifetime time.Duration

	// Logger is as in [ClientOptions].
	Logger *slog.Logger
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
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Spec       struct {
		Audiences         []string `json:"audiences,omitempty"`
		ExpirationSeconds int64    `json:"expirationSeconds,omitempty"`
	} `json:"spec"`
	Status struct { // which the API server fills in
		Token   string    `json:"token"`
		Expires time.Time `json:"expirationTimestamp"`
	} `json:"status,omitzero"`
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
	in := tokenRequest{APIVersion: "authentication.k8s.io/v1", Kind: "TokenRequest"}
	in.Spec.Audiences, in.Spec.ExpirationSeconds = slices.Clone(o.Audiences), int64(o.Lifetime/time.Second)
	api, err := kube.New(kube.Options{URL: o.APIServer, Client: o.HTTPClient})
	if err != nil {
		return nil, err
	}
	path := kube.Path("api", "v1", "namespaces", o.Namespace, "serviceaccounts", o.ServiceAccount, "token")
	return newSource("Kubernetes, for "+o.Namespace+"/"+o.ServiceAccount, o.Logger,
		func(ctx context.Context) (token, error) {
			ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout,
				fmt.Errorf("no answer in %v: %w", requestTimeout, context.DeadlineExceeded))
			defer cancel()
			var out tokenRequest
			err := api.Create(ctx, path, in, &out)
			if e, ok := errors.AsType[*kube.StatusError](err); ok {
				err = &StatusError{StatusCode: e.Code, Code: e.Reason, Message: e.Message, RetryAfter: e.RetryAfter}
			}
			if err != nil {
				return token{}, err
			}
			return newToken(out.Status.Token, out.Status.Expires, in.Spec.Audiences...)
		}), nil
}
