package kubetest

import (
	"encoding/json"
	"net/http"
	"strings"
)

// TokenReviewSpec is what a client asks about a token.
type TokenReviewSpec struct {
	Token     string   `json:"token"`
	Audiences []string `json:"audiences"`
}

// TokenReviewStatus is what the server says about it. The JSON names are those of Kubernetes.
type TokenReviewStatus struct {
	Authenticated bool     `json:"authenticated,omitempty"`
	User          UserInfo `json:"user"`
	Audiences     []string `json:"audiences,omitempty"`
	Error         string   `json:"error,omitempty"`
}

// UserInfo is who a token belongs to.
type UserInfo struct {
	Username string              `json:"username,omitempty"`
	UID      string              `json:"uid,omitempty"`
	Groups   []string            `json:"groups,omitempty"`
	Extra    map[string][]string `json:"extra,omitempty"`
}

// AccessReviewSpec is what a client asks about a permission: of a user, or of its own without one.
type AccessReviewSpec struct {
	User               string              `json:"user"`
	Groups             []string            `json:"groups"`
	ResourceAttributes *ResourceAttributes `json:"resourceAttributes"`
}

// ResourceAttributes name objects and what is to be done with them.
type ResourceAttributes struct {
	Namespace   string `json:"namespace"`
	Verb        string `json:"verb"`
	Group       string `json:"group"`
	Version     string `json:"version"`
	Resource    string `json:"resource"`
	Subresource string `json:"subresource"`
	Name        string `json:"name"`
}

// AccessReviewStatus is what the server says about it.
type AccessReviewStatus struct {
	Allowed         bool   `json:"allowed"`
	Denied          bool   `json:"denied,omitempty"`
	Reason          string `json:"reason,omitempty"`
	EvaluationError string `json:"evaluationError,omitempty"`
}

// TokenReviews sets the function that answers reviews of tokens. Without one, no token is
// authenticated. It may be called at the same time.
func (s *Server) TokenReviews(f func(TokenReviewSpec) TokenReviewStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tokenReview = f
}

// AccessReviews sets the function that answers SelfSubjectAccessReviews and SubjectAccessReviews. Without one,
// nothing is allowed. It may be called at the same time.
func (s *Server) AccessReviews(f func(AccessReviewSpec) AccessReviewStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.access = f
}

var reviews = map[string]string{
	"/apis/authentication.k8s.io/v1/tokenreviews":            "TokenReview",
	"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": "SelfSubjectAccessReview",
	"/apis/authorization.k8s.io/v1/subjectaccessreviews":     "SubjectAccessReview",
}

// review answers a request for a review, and reports whether it is one.
func (s *Server) review(r *http.Request, body []byte) (object, bool, error) {
	kind, ok := reviews[r.URL.Path]
	if !ok {
		return nil, false, nil
	}
	if r.Method != http.MethodPost {
		return nil, true, failure(http.StatusMethodNotAllowed, "MethodNotAllowed",
			"the server does not allow this method on the requested resource")
	}
	version := strings.Join(strings.Split(r.URL.Path, "/")[2:4], "/")
	t := target{resource: &resource{group: strings.Split(version, "/")[0], version: "v1", kind: kind}}
	o, err := readObject(r, t, body)
	if err != nil {
		return nil, true, err
	}
	spec := mustJSON(o["spec"])
	s.mu.Lock()
	reviewToken, access := s.tokenReview, s.access
	s.mu.Unlock()
	bad := failure(http.StatusBadRequest, "BadRequest", "%s: the spec cannot be decoded", kind)
	var answer any
	if kind == "TokenReview" {
		var in TokenReviewSpec
		if json.Unmarshal(spec, &in) != nil {
			return nil, true, bad
		}
		if in.Token == "" {
			return nil, true, failure(http.StatusBadRequest, "BadRequest",
				"token is required for TokenReview in authentication")
		}
		st := TokenReviewStatus{Error: "unknown token"}
		if reviewToken != nil {
			st = reviewToken(in)
		}
		answer = st
	} else {
		var in AccessReviewSpec
		if json.Unmarshal(spec, &in) != nil {
			return nil, true, bad
		}
		if in.ResourceAttributes == nil {
			return nil, true, invalid(t.resource, "", "spec.resourceAttributes: Required value")
		}
		if kind != "SubjectAccessReview" {
			in.User, in.Groups = "", nil // members that this kind does not have
		} else if in.User == "" && len(in.Groups) == 0 {
			return nil, true, invalid(t.resource, "",
				"spec.user: Invalid value: \"\": at least one of user or group must be specified")
		}
		var st AccessReviewStatus
		if access != nil {
			st = access(in)
		}
		answer = st
	}
	o = o.clone()
	o.meta()["creationTimestamp"] = nil
	o["status"] = answer
	return o, true, nil
}
