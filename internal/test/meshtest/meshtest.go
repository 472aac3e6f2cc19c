// Package meshtest is the control plane of a Linkerd mesh for tests: an identity service that can be stopped and
// started again, and an API server that knows which tokens are good.
package meshtest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

// Names in the mesh.
const (
	Web       = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	Voting    = "voting.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	Certifier = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"
)

// Mesh returns the mesh.
func Mesh() linkerdname.Mesh {
	return linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
}

// Options are the choices of [New].
type Options struct {
	Life      time.Duration // of certificates, which last up to a second longer; required
	Plaintext bool          // the service is in the pod of its clients
	Authority *ca.Authority // nil means a new one
	Addr      string        // host:port of 127.0.0.1; empty means any port
	Stopped   bool          // do not start it

	Mesh linkerdname.Mesh // the zero value means that of [Mesh]

	// Review, if set, is told of each token, and whether it is good.
	Review func(token string, good bool)
}

// Controller is a control plane. Its methods are safe for concurrent use.
type Controller struct {
	Authority *ca.Authority
	Addr      string // of the identity service; not a loopback address by its text, unless that is in plaintext

	o    Options
	open atomic.Int64 // connections

	mu     sync.Mutex
	tokens map[string]spiffe.Pod
	seen   []string
	stop   func()
}

// New starts a control plane in which the tokens of [Token] are good for [Web] and [Voting]. It ends with the test.
func New(t testing.TB, o Options) *Controller {
	t.Helper()
	if o.Mesh == (linkerdname.Mesh{}) {
		o.Mesh = Mesh()
	}
	c := &Controller{Authority: o.Authority, o: o, tokens: map[string]spiffe.Pod{}, stop: func() {}}
	if c.Authority == nil {
		var err error
		td := spiffe.MustParseTrustDomain(o.Mesh.TrustDomain)
		if c.Authority, err = ca.New(ca.Config{TrustDomain: td}); err != nil {
			t.Fatal(err)
		}
	}
	c.Account(Token(Web), "web")
	c.Account(Token(Voting), "voting")
	if c.o.Addr == "" {
		c.o.Addr = "127.0.0.1:0"
	}
	if o.Stopped {
		c.reserve(t)
	} else {
		c.Start(t)
	}
	t.Cleanup(c.Stop)
	return c
}

// Token returns the token that the workload of a name has.
func Token(name string) string { return "token-of-" + name }

// Account makes a token good for a service account in the namespace emojivoto. No account makes it worthless.
func (c *Controller) Account(token, account string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if account == "" {
		delete(c.tokens, token)
		return
	}
	c.tokens[token] = spiffe.Pod{Namespace: "emojivoto", ServiceAccount: account}
}

// Delete makes all tokens of an account worthless.
func (c *Controller) Delete(account string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for token, a := range c.tokens {
		if a.ServiceAccount == account {
			delete(c.tokens, token)
		}
	}
}

func (c *Controller) review(_ context.Context, token string, audiences []string) (*spiffe.Pod, error) {
	c.mu.Lock()
	c.seen = append(c.seen, token)
	a, good := c.tokens[token]
	c.mu.Unlock()
	if c.o.Review != nil {
		c.o.Review(token, good)
	}
	if !good || len(audiences) != 1 || audiences[0] != "identity.l5d.io" {
		return nil, fmt.Errorf("the token is not known: %w", kube.ErrInvalidToken)
	}
	return &a, nil
}

// Seen returns the tokens that were looked at.
func (c *Controller) Seen() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.seen...)
}

// Open returns how many connections the identity service has.
func (c *Controller) Open() int64 { return c.open.Load() }

// Life sets the lifetime of certificates from the next Start on.
func (c *Controller) Life(life time.Duration) { c.o.Life = life }

// reserve takes an address and gives it back.
func (c *Controller) reserve(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", c.o.Addr)
	if err != nil {
		t.Fatal(err)
	}
	c.at(l)
	_ = l.Close()
}

// at notes an address. One without a host leads to this host, too, and does not count as loopback.
func (c *Controller) at(l net.Listener) {
	c.o.Addr = l.Addr().String()
	if c.Addr = c.o.Addr; !c.o.Plaintext {
		c.Addr = fmt.Sprintf("0.0.0.0:%d", l.Addr().(*net.TCPAddr).Port)
	}
}

// Start starts the identity service, at the address from before if it was stopped.
func (c *Controller) Start(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", c.o.Addr)
	if err != nil {
		t.Fatal(err)
	}
	c.at(l)
	certifier, err := c.o.Mesh.Certifier()
	if err != nil {
		t.Fatal(err)
	}
	id := spiffe.MustParseID("spiffe://" + c.o.Mesh.TrustDomain + "/ns/linkerd/sa/linkerd-identity")
	identity := caservertest.Identity(t, c.Authority, id, pki.DNSSAN(certifier))
	server, err := caserver.New(caserver.Options{
		CA: c.Authority, TrustDomain: id.TrustDomain(), Identity: identity,
		Linkerd: &linkerd.Options{
			// certificates end with whole seconds
			Mesh: c.o.Mesh, Review: c.review, Lifetime: c.o.Life, ClockSkew: time.Second,
			AllowPlaintext: c.o.Plaintext,
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		counting := memconn.Counting{Listener: l, Open: &c.open}
		done <- server.Run(ctx, caserver.Listeners{Linkerd: counting, LinkerdPlaintext: c.o.Plaintext})
	}()
	c.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		_ = identity.Close()
	})
}

// Stop stops the identity service.
func (c *Controller) Stop() { c.stop() }

// Config is a good configuration of a workload, whose token is in a file of its own.
func (c *Controller) Config(t testing.TB, name string) linkerdproxy.Config {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(Token(name)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := linkerdproxy.Config{
		Name: name, Anchors: c.Authority.Bundle().MarshalPEM(), TokenFile: token,
		Certifier: linkerdproxy.Service{Addr: c.Addr, Name: Certifier}, MinRefresh: 100 * time.Millisecond,
	}
	if c.o.Plaintext {
		cfg.Certifier.Name = ""
	}
	return cfg
}

// Certified returns an identity that has a certificate, and is renewed until the test ends.
func (c *Controller) Certified(t testing.TB, name string, edit ...func(*linkerdproxy.Config)) *linkerdproxy.Identity {
	t.Helper()
	cfg := c.Config(t, name)
	for _, e := range edit {
		e(&cfg)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	id, err := linkerdproxy.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = id.Close() })
	return id
}
