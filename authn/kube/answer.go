package kube

import (
	"errors"
	"fmt"
	"slices"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/spiffe"
)

type status struct {
	Authenticated bool     `json:"authenticated"`
	Audiences     []string `json:"audiences,omitempty"`
	Error         string   `json:"error,omitempty"`
	User          struct {
		Username string              `json:"username"`
		UID      string              `json:"uid"`
		Groups   []string            `json:"groups"`
		Extra    map[string][]string `json:"extra"`
	} `json:"user,omitzero"`
}

// Names of Kubernetes for service accounts and the pods that their tokens are bound to.
const (
	accountsGroup = "system:serviceaccounts"
	extraPodName  = "authentication.kubernetes.io/pod-name"
	extraPodUID   = "authentication.kubernetes.io/pod-uid"
	extraNodeName = "authentication.kubernetes.io/node-name"
)

// account returns the account in an answer about the token. With wanted audiences, one must be confirmed.
func (s *status) account(token string, wanted []string) (*spiffe.Pod, error) {
	switch {
	case s.Error != "":
		return nil, fmt.Errorf("%w: the API server says: %s", ErrInvalidToken, bearer.Redact(s.Error, token))
	case !s.Authenticated:
		return nil, fmt.Errorf("%w: the API server does not know it", ErrNotAuthenticated)
	case len(wanted) > 0 && !slices.ContainsFunc(s.Audiences,
		func(a string) bool { return slices.Contains(wanted, a) }):
		return nil, fmt.Errorf("%w: the API server does not confirm any of the audiences %.256q",
			ErrNotAuthenticated, wanted)
	}
	namespace, name, err := k8s.ParseUser(s.User.Username)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidToken, err)
	}
	if !slices.Contains(s.User.Groups, accountsGroup) {
		return nil, fmt.Errorf("%w: the user %q is not in the group %s", ErrInvalidToken, s.User.Username,
			accountsGroup)
	}
	p := &spiffe.Pod{
		Namespace: namespace, ServiceAccount: name, ServiceAccountUID: s.User.UID,
		Name: s.extra(extraPodName), UID: s.extra(extraPodUID), Node: s.extra(extraNodeName),
	}
	switch {
	case p.Name != "" && !k8s.ValidName(p.Name):
		err = fmt.Errorf("%.300q is not the name of a pod", p.Name)
	case p.Node != "" && !k8s.ValidName(p.Node):
		err = fmt.Errorf("%.300q is not the name of a node", p.Node)
	case !validUID(p.ServiceAccountUID) || !validUID(p.UID):
		err = errors.New("a UID has more than 128 bytes, or some that are not printable ASCII")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidToken, err)
	}
	return p, nil
}

// extra returns the first value of an extra attribute of the user, or "".
func (s *status) extra(name string) string {
	if values := s.User.Extra[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

func validUID(s string) bool { return len(s) <= 128 && bearer.Printable(s) }
