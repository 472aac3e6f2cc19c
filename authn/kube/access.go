package kube

import (
	"context"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/bearer"
	k8s "github.com/svidkit/svidkit/internal/kube"
)

// access is something that this program does to the objects of a cluster.
type access struct {
	Group    string `json:"group,omitempty"`
	Version  string `json:"version"`
	Resource string `json:"resource"`
	Verb     string `json:"verb"`
}

// checkAccess asks the API server whether it lets this program do all of what. The error has the remedy if
// it does not.
func checkAccess(ctx context.Context, api *k8s.Client, timeout time.Duration, remedy string, what ...access) error {
	ctx, cancel := limited(ctx, timeout)
	defer cancel()
	for _, a := range what {
		const version, kind = "authorization.k8s.io/v1", "SelfSubjectAccessReview"
		type spec struct {
			Attributes access `json:"resourceAttributes"`
		}
		var answer struct {
			Kind   string `json:"kind"`
			Status struct {
				Allowed bool   `json:"allowed"`
				Reason  string `json:"reason"`
			} `json:"status"`
		}
		question := struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Spec       spec   `json:"spec"`
		}{version, kind, spec{a}}
		err := api.Create(ctx, k8s.Path("apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"), &question, &answer)
		switch {
		case err != nil:
			return fmt.Errorf("check: %w", err)
		case answer.Kind != kind:
			return fmt.Errorf("check: the answer is not a %s of %s", kind, version)
		case !answer.Status.Allowed && answer.Status.Reason != "":
			return fmt.Errorf("this program may not %s %s: the API server says: %s; %s", a.Verb, a.Resource, bearer.Redact(answer.Status.Reason), remedy)
		case !answer.Status.Allowed:
			return fmt.Errorf("this program may not %s %s; %s", a.Verb, a.Resource, remedy)
		}
	}
	return nil
}

// limited is ctx with a timeout, whose cause says so.
func limited(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %v", timeout))
}
