package caserver

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/spiffe"
)

// InsecureTokens trusts the name in a token that has the secret of this process. It is for development on one machine: a
// program that can read the file of the secret gets a certificate for any name. It refuses callers whose address is not on
// loopback, and a program that uses it must listen there only. A token is
//
//	SECRET:NAME
//
// where NAME is the ID of a workload in the trust domain, or NAMESPACE/SERVICE-ACCOUNT. [NewInsecureTokens] makes one;
// the zero value refuses every token.
type InsecureTokens struct {
	trustDomain spiffe.TrustDomain
	digest      [sha256.Size]byte // of the secret, so that what prints this shows no secret
}

// NewInsecureTokens writes a random secret to the file, which its owner alone may read and which is replaced if it exists.
// It refuses a folder that other users can change.
func NewInsecureTokens(td spiffe.TrustDomain, file string) (*InsecureTokens, error) {
	secret := rand.Text()
	if err := writeSecret(file, secret); err != nil {
		return nil, fmt.Errorf("caserver: secret of insecure tokens: %w", err)
	}
	return &InsecureTokens{td, sha256.Sum256([]byte(secret))}, nil
}

// writeSecret replaces a file. A link in its place is replaced and not followed.
func writeSecret(name, secret string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := private.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, private.Options{})
	if err != nil {
		return err
	}
	_, err = f.WriteString(secret)
	return errors.Join(err, f.Close())
}

// Authenticate implements [authn.Authenticator].
func (i *InsecureTokens) Authenticate(r *http.Request) (*authn.Caller, error) {
	token, err := authn.Bearer(r)
	if err != nil {
		return nil, fmt.Errorf("caserver: insecure token: %w", err)
	}
	id, err := i.judge(token, r.RemoteAddr)
	if err != nil {
		return nil, fmt.Errorf("caserver: insecure token: %w: %w", authn.ErrRefused, err)
	}
	caller := &authn.Caller{ID: id, Method: "developer"}
	if namespace, account, ok := id.Kubernetes(); ok {
		caller.Pod = &authn.Pod{Namespace: namespace, ServiceAccount: account}
	}
	return caller, nil
}

// Review is the same for the tokens of Linkerd's API; see linkerd.Options. The server is [Serve] or a [Server]: with
// another one the address of the caller is not known, and every token is refused.
func (i *InsecureTokens) Review(ctx context.Context, token string, _ []string) (*kube.Account, error) {
	peer := ""
	if c, ok := ctx.Value(connKey{}).(net.Conn); ok {
		peer = c.RemoteAddr().String()
	}
	id, err := i.judge(token, peer)
	if err != nil {
		return nil, fmt.Errorf("caserver: insecure token: %w: %w", kube.ErrInvalidToken, err)
	}
	namespace, account, ok := id.Kubernetes()
	if !ok {
		return nil, fmt.Errorf("caserver: insecure token: %w: %w", kube.ErrInvalidToken, errTokenName)
	}
	return &kube.Account{Namespace: namespace, ServiceAccount: account}, nil
}

// What is wrong with a token. None of them has the token, which may be a real one.
var (
	errTokenPeer   = errors.New("the caller is not on this machine")
	errTokenSecret = errors.New("it does not have the secret of this server; a token is SECRET:NAME, with the secret that the server has written to a file when it started")
	errTokenName   = errors.New("its name is not that of a workload, spiffe://TRUST-DOMAIN/PATH or NAMESPACE/SERVICE-ACCOUNT")
)

// judge returns the ID that a token of a peer names.
func (i *InsecureTokens) judge(token, peer string) (id spiffe.ID, err error) {
	if from, err := netip.ParseAddrPort(peer); err != nil || !from.Addr().Unmap().IsLoopback() { // a proxy sent it here
		return spiffe.ID{}, errTokenPeer
	}
	secret, name, _ := strings.Cut(strings.TrimSpace(token), ":")
	if digest := sha256.Sum256([]byte(strings.TrimSpace(secret))); subtle.ConstantTimeCompare(digest[:], i.digest[:]) != 1 {
		return spiffe.ID{}, errTokenSecret
	}
	if namespace, account, ok := strings.Cut(name, "/"); ok && !strings.Contains(name, ":") {
		id, err = i.trustDomain.KubernetesID(namespace, account)
	} else {
		id, err = spiffe.ParseID(name)
	}
	if err != nil || !id.MemberOf(i.trustDomain) || id.Path() == "" {
		return spiffe.ID{}, errTokenName
	}
	return id, nil
}
