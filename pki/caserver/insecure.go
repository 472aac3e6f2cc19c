package caserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/spiffe"
)

// InsecureTokens takes the text of a token for the name of the caller, without proof. It is for development
// on one machine: it refuses callers whose address is not on loopback, and a program that uses it must
// listen there only. A token is the ID of a workload in the trust domain, or NAMESPACE/SERVICE-ACCOUNT.
type InsecureTokens struct{ TrustDomain spiffe.TrustDomain }

// Authenticate implements [authn.Authenticator].
func (i InsecureTokens) Authenticate(r *http.Request) (*authn.Caller, error) {
	token, err := authn.Bearer(r)
	if err != nil {
		return nil, fmt.Errorf("caserver: insecure token: %w", err)
	}
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || !from.Addr().IsLoopback() { // a proxy sent it here
		return nil, fmt.Errorf("caserver: insecure token: %w: the caller is not on this machine", authn.ErrRefused)
	}
	id, err := i.id(token)
	if err != nil {
		return nil, fmt.Errorf("caserver: insecure token: %w: %w", authn.ErrRefused, err)
	}
	caller := &authn.Caller{ID: id, Method: "developer"}
	if namespace, account, ok := id.Kubernetes(); ok {
		caller.Pod = &authn.Pod{Namespace: namespace, ServiceAccount: account}
	}
	return caller, nil
}

// Review is the same for the tokens of Linkerd's API; see linkerd.Options. The connection is not known here.
func (i InsecureTokens) Review(_ context.Context, token string, _ []string) (*kube.Account, error) {
	id, err := i.id(token)
	namespace, account, ok := id.Kubernetes()
	if err != nil || !ok {
		return nil, fmt.Errorf("caserver: insecure token: %w: %w", kube.ErrInvalidToken, errTokenName)
	}
	return &kube.Account{Namespace: namespace, ServiceAccount: account}, nil
}

// errTokenName does not have the token, which may be a real one.
var errTokenName = errors.New("it must be the name of the caller, spiffe://TRUST-DOMAIN/PATH or NAMESPACE/SERVICE-ACCOUNT")

// id returns the ID that a token names.
func (i InsecureTokens) id(token string) (id spiffe.ID, err error) {
	token = strings.TrimSpace(token)
	if namespace, account, ok := strings.Cut(token, "/"); ok && !strings.Contains(token, ":") {
		id, err = i.TrustDomain.KubernetesID(namespace, account)
	} else {
		id, err = spiffe.ParseID(token)
	}
	if err != nil || !id.MemberOf(i.TrustDomain) || id.Path() == "" {
		return spiffe.ID{}, errTokenName
	}
	return id, nil
}
