package kube

import (
	"context"
	"fmt"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// checkAccess asks the API server whether it lets this program do all of what. The error has the remedy if
// it does not.
func checkAccess(ctx context.Context, api *k8s.Client, remedy string, what ...k8s.Access) error {
	ctx, cancel := limited(ctx)
	defer cancel()
	for _, a := range what {
		allowed, reason, err := api.Review(ctx, "", "", a)
		switch {
		case err != nil:
			return fmt.Errorf("check: %w", err)
		case !allowed && reason != "":
			return fmt.Errorf("this program may not %s %s: the API server says: %s; %s", a.Verb, a.Resource,
				bearer.Redact(reason), remedy)
		case !allowed:
			return fmt.Errorf("this program may not %s %s; %s", a.Verb, a.Resource, remedy)
		}
	}
	return nil
}

// limited is ctx with the timeout, whose cause says so.
func limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %v", timeout))
}
