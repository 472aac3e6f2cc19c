// Package devtoken authenticates callers of a development CA by a secret of this machine.
package devtoken

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/spiffe"
)

// Tokens trusts the name in a token with this machine's secret. It is for development on one machine: a
// program that can read the file with the secret gets a certificate for any name. It refuses callers from addresses
// that are not loopback, and a program that uses it must listen only there. A token is
//
//	SECRET.NAME
//
// where NAME is NAMESPACE/SERVICE-ACCOUNT, or a workload's ID in the trust domain without "spiffe:", such as
// //example.org/web: so it has only the characters of a bearer token (RFC 6750 section 2.1), as clients demand. A
// colon in place of the dot, and a complete ID after it, are also accepted. [New] makes one; the zero
// value refuses every token.
type Tokens struct {
	trustDomain spiffe.TrustDomain
	digest      [sha256.Size]byte // of the secret, so that printing this shows no secret
}

// New reads the secret in the file, so that tokens outlive a restart. If there is none, or other users
// can read it, it writes a new random one. It refuses a directory that other users can change.
func New(td spiffe.TrustDomain, file string) (*Tokens, error) {
	secret, err := keepSecret(file)
	if err != nil {
		return nil, fmt.Errorf("secret of developers' tokens: %w", err)
	}
	return &Tokens{td, sha256.Sum256(secret)}, nil
}

// keepSecret returns the secret in a file, or replaces the file by a new one. It replaces a link instead of following
// it.
func keepSecret(file string) ([]byte, error) {
	dir, err := private.OpenDir(filepath.Dir(file), private.Options{})
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fresh, name := []byte(rand.Text()), filepath.Base(file)
	// otherwise the file was cut short, or is no secret
	if info, err := dir.Lstat(name); err == nil && info.Mode().IsRegular() && info.Size() == int64(len(fresh)) {
		if f, err := private.OpenIn(dir, name, private.Options{Keys: true}); err == nil {
			defer f.Close()
			secret := make([]byte, len(fresh))
			_, err = io.ReadFull(f, secret)
			return secret, err
		}
	}
	return fresh, fileset.Replace(dir, name, fileset.File{Data: fresh, Mode: 0o600})
}

// Authenticate implements [authn.Authenticator].
func (i *Tokens) Authenticate(r *http.Request) (*authn.Caller, error) {
	token, err := authn.Bearer(r)
	if err != nil {
		return nil, fmt.Errorf("developer's token: %w", err)
	}
	// A proxy may have forwarded it.
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	id, err := i.judge(token, err == nil && from.Addr().Unmap().IsLoopback())
	if err != nil {
		return nil, fmt.Errorf("developer's token: %w: %w", authn.ErrRefused, err)
	}
	caller := &authn.Caller{ID: id, Method: "developer"}
	if namespace, account, ok := id.Kubernetes(); ok {
		caller.Pod = &spiffe.Pod{Namespace: namespace, ServiceAccount: account}
	}
	return caller, nil
}

// Review does the same for the tokens of Linkerd's API; see linkerd.Options. The request must have arrived at a
// loopback address.
func (i *Tokens) Review(ctx context.Context, token string, _ []string) (*spiffe.Pod, error) {
	at, ok := ctx.Value(http.LocalAddrContextKey).(*net.TCPAddr)
	id, err := i.judge(token, ok && at.IP.IsLoopback())
	if err != nil {
		return nil, fmt.Errorf("developer's token: %w: %w", kube.ErrInvalidToken, err)
	}
	namespace, account, ok := id.Kubernetes()
	if !ok {
		return nil, fmt.Errorf("developer's token: %w: %w", kube.ErrInvalidToken, errTokenName)
	}
	return &spiffe.Pod{Namespace: namespace, ServiceAccount: account}, nil
}

// The faults of a token. No error contains the token, which may be a real one.
var (
	errTokenPeer   = errors.New("the caller is not on this machine")
	errTokenSecret = errors.New("it does not have the secret of this server; a token is SECRET.NAME, with the " +
		"secret in the file of the server")
	errTokenName = errors.New("its name is not that of a workload, spiffe://TRUST-DOMAIN/PATH or " +
		"NAMESPACE/SERVICE-ACCOUNT")
)

// judge returns the ID in the token of a caller on this machine.
func (i *Tokens) judge(token string, local bool) (id spiffe.ID, err error) {
	if !local {
		return spiffe.ID{}, errTokenPeer
	}
	token = strings.TrimSpace(token)
	var secret, name string
	if i := strings.IndexAny(token, ".:"); i >= 0 {
		secret, name = token[:i], token[i+1:]
	}
	if digest := sha256.Sum256([]byte(strings.TrimSpace(secret))); subtle.ConstantTimeCompare(digest[:],
		i.digest[:]) != 1 {
		return spiffe.ID{}, errTokenSecret
	}
	if strings.HasPrefix(name, "//") {
		name = "spiffe:" + name
	}
	if namespace, account, ok := strings.Cut(name, "/"); ok && !strings.Contains(name, ":") {
		id, err = i.trustDomain.WorkloadID("ns", namespace, "sa", account)
	} else {
		id, err = spiffe.ParseID(name)
	}
	if err != nil || !id.MemberOf(i.trustDomain) || id.Path() == "" {
		return spiffe.ID{}, errTokenName
	}
	return id, nil
}
