package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/spiffe"
)

// warning is what a developer is told, each time.
const warning = `*** DEVELOPMENT ONLY: whoever can reach the ports of this machine's loopback interface gets a
*** certificate for whatever name it gives as its token. Nobody proves anything. Use -kubernetes,
*** or another authn.Authenticator, for everything else.`

// believer believes everybody on this machine: the token is the name, as a SPIFFE ID or as
// NAMESPACE/SERVICE-ACCOUNT. It stands in for what reads real tokens, so that the rest of the
// program can be tried without a cluster.
type believer struct{ trustDomain spiffe.TrustDomain }

// Authenticate implements [authn.Authenticator].
func (b believer) Authenticate(r *http.Request) (*authn.Caller, error) {
	token, err := authn.Bearer(r)
	if err != nil {
		return nil, fmt.Errorf("developer: %w", err)
	}
	if err := fromHere(r.RemoteAddr); err != nil {
		return nil, err
	}
	id, err := b.name(token)
	if err != nil {
		return nil, fmt.Errorf("developer: %w: %w", authn.ErrRefused, err)
	}
	c := &authn.Caller{ID: id, Method: "developer"}
	if namespace, account, ok := id.Kubernetes(); ok {
		c.Pod = &authn.Pod{Namespace: namespace, ServiceAccount: account}
	}
	return c, nil
}

// fromHere refuses callers of other machines, though we do not listen there: a proxy may be in
// between.
func fromHere(remote string) error {
	host, _, err := net.SplitHostPort(remote)
	if err != nil || !net.ParseIP(host).IsLoopback() {
		return fmt.Errorf("developer: %w: the caller is not on this machine", authn.ErrRefused)
	}
	return nil
}

var errName = errors.New("the token has to be the name of the caller, as spiffe://TRUST-DOMAIN/PATH or NAMESPACE/SERVICE-ACCOUNT")

// name returns the ID that a token names.
func (b believer) name(token string) (spiffe.ID, error) {
	token = strings.TrimSpace(token)
	if namespace, account, ok := strings.Cut(token, "/"); ok && !strings.Contains(token, ":") {
		id, err := b.trustDomain.KubernetesID(namespace, account)
		if err != nil {
			return spiffe.ID{}, errName
		}
		return id, nil
	}
	id, err := spiffe.ParseID(token)
	if err != nil || !id.MemberOf(b.trustDomain) || id.Path() == "" {
		return spiffe.ID{}, errName
	}
	return id, nil
}

// review is the same for Linkerd's API, whose tokens are in the request.
func (b believer) review(_ context.Context, token string, _ []string) (*kube.Account, error) {
	id, err := b.name(token)
	if err != nil {
		return nil, fmt.Errorf("developer: %w: %w", kube.ErrInvalidToken, err)
	}
	namespace, account, ok := id.Kubernetes()
	if !ok {
		return nil, fmt.Errorf("developer: %w: the name is not that of a service account", kube.ErrInvalidToken)
	}
	return &kube.Account{Namespace: namespace, ServiceAccount: account}, nil
}
