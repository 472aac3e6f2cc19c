package kube

import (
	"context"
	"errors"
	"fmt"

	k8s "github.com/svidkit/svidkit/internal/kube"
)

// access is something that we might do to the objects of a cluster.
type access struct {
	Group    string `json:"group,omitempty"`
	Version  string `json:"version"`
	Resource string `json:"resource"`
	Verb     string `json:"verb"`
}

// errMayNot says that the API server would not let us.
var errMayNot = errors.New("this program may not")

// mayI asks the API server whether it would let us; the error wraps errMayNot if not.
func mayI(ctx context.Context, api *k8s.Client, a access) error {
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
	if err := api.Create(ctx, k8s.Path("apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"), &question, &answer); err != nil {
		return err
	}
	if answer.Kind != kind {
		return fmt.Errorf("the answer is not a %s of %s", kind, version)
	}
	if !answer.Status.Allowed {
		reason := ""
		if answer.Status.Reason != "" {
			reason = ": the API server says: " + redact(answer.Status.Reason, "")
		}
		return fmt.Errorf("%w %s %s%s", errMayNot, a.Verb, a.Resource, reason)
	}
	return nil
}
