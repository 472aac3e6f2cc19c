package kube

import (
	"context"
	"fmt"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// checkAccess asks the API server whether it allows this program each access in what. If not, the error contains
// remedy.
func checkAccess(ctx context.Context, api *k8s.Client, remedy string, what ...k8s.Access) error {
	ctx, cancel := limited(ctx)
	defer cancel()
	for _, a := range what {
		allowed, reason, err := api.Review(ctx, "", "", a)
		switch {
		case err != nil:
			return fmt.Errorf("authn/kube: check: %w", err)
		case !allowed && reason != "":
			return fmt.Errorf("authn/kube: this program may not %s %s: the API server says: %s; %s", a.Verb,
				a.Resource, bearer.Redact(reason), remedy)
		case !allowed:
			return fmt.Errorf("authn/kube: this program may not %s %s; %s", a.Verb, a.Resource, remedy)
		}
	}
	return nil
}

// limited returns ctx with the timeout; the cause of its end names the timeout.
func limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %v", timeout))
}
