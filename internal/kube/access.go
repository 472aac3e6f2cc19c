package kube

import (
	"context"
	"errors"
)

// Access is an action on objects of a cluster. Empty fields mean all, or none.
type Access struct {
	Namespace string `json:"namespace,omitempty"`
	Group     string `json:"group,omitempty"`
	Version   string `json:"version"`
	Resource  string `json:"resource"`
	Verb      string `json:"verb"`
}

// Review asks the API server whether a service account may perform a; an empty account means this client itself. The
// reason comes from the server, and may be empty; it is not redacted.
func (c *Client) Review(ctx context.Context, namespace, account string, a Access) (allowed bool, reason string,
	err error) {
	const version = "authorization.k8s.io/v1"
	type spec struct {
		User       string   `json:"user,omitempty"`
		Groups     []string `json:"groups,omitempty"`
		Attributes Access   `json:"resourceAttributes"`
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
	}{version, "SelfSubjectAccessReview", spec{Attributes: a}}
	resource := "selfsubjectaccessreviews"
	if account != "" {
		question.Kind, resource = "SubjectAccessReview", "subjectaccessreviews"
		question.Spec.User = "system:serviceaccount:" + namespace + ":" + account
		question.Spec.Groups = []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace,
			"system:authenticated"}
	}
	if err := c.Create(ctx, Path("apis", "authorization.k8s.io", "v1", resource), &question, &answer); err != nil {
		return false, "", err
	}
	if answer.Kind != question.Kind {
		return false, "", errors.New("the answer is not a " + question.Kind + " of " + version)
	}
	return answer.Status.Allowed, answer.Status.Reason, nil
}
