package sealtest

import (
	"context"
	"go/types"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

const (
	ready   = "ready"   // the zero value works
	refused = "refused" // with an error, by what takes it
	told    = "told"    // the field is one that this library fills in
)

// fields are those of exported structs that lead to another exported struct of this library: what becomes of a zero one.
var fields = map[string]struct {
	what string
	use  func(t *testing.T, source *spiffetest.Source) error
}{
	"authn.Caller.Pod":            {what: told},
	"sidecar.Identity.Credential": {what: told},
	"caconfig.Authority.Own":      {what: told},
	"federation.Status.Bundle":    {what: told},
	"federation.Status.Refused":   {what: told},
	"workloadapi.Identity.SVID":   {what: told},
	"workloadapi.Update.Bundles":  {what: told},

	"athenz.ProviderConfig.Verifier": {refused, func(*testing.T, *spiffetest.Source) error {
		_, err := athenz.NewProvider(athenz.ProviderConfig{
			Service: athenzname.Service{Domain: "k8s.admin", Name: "callback"}, Verifier: new(athenz.Verifier), Suffix: "svc.cluster.local",
			ZTS: authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, authn.ErrNoCredential }), Pods: noPods{},
		})
		return err
	}},
	"ca.Config.JWT": {ready, func(t *testing.T, _ *spiffetest.Source) error {
		a, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), JWT: new(ca.JWTConfig)})
		require.NoError(t, err)
		_, err = a.SignJWT(t.Context(), ca.JWTRequest{ID: spiffe.MustParseID("spiffe://example.org/web"), Audience: []string{"a"}})
		return err
	}},
	"ca.Request.CSR": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		a, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
		require.NoError(t, err)
		_, err = a.Sign(t.Context(), ca.Request{ID: spiffe.MustParseID("spiffe://example.org/web"), CSR: new(pki.CSR)})
		return err
	}},
	"caserver.Options.Istio": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		return serverOf(t, caserver.Options{Istio: new(istioca.Options)})
	}},
	"caserver.Options.Linkerd": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		return serverOf(t, caserver.Options{Linkerd: new(linkerd.Options)})
	}},
	"secretcache.Config.Previous": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		_, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: spiffetest.NewCA(t, "example.org"), Previous: new(spiffe.Snapshot)})
		return err
	}},
	"kube.TokenReviewOptions.Reviewer": {refused, func(*testing.T, *spiffetest.Source) error {
		_, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: new(kube.Reviewer), TrustDomain: spiffe.MustParseTrustDomain("example.org"), Audiences: []string{"a"}})
		return err
	}},
	"tokensource.ClientOptions.ClientAssertion": {refused, func(_ *testing.T, _ *spiffetest.Source) error {
		_, err := tokensource.ClientCredentials(tokensource.ClientOptions{URL: "https://sts.example/token", Issuer: "https://sts.example", ClientAssertion: new(tokensource.Source)})
		return err
	}},
	"federation.SPIFFE.Initial": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		m, err := federation.New(federation.Config{})
		require.NoError(t, err)
		return m.Add(federation.Relationship{
			TrustDomain: spiffe.MustParseTrustDomain("other.test"), URL: "https://other.test/",
			Profile: federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://other.test/endpoint"), Initial: new(spiffe.Bundle)},
		})
	}},
	"spiffetls.Config.Metrics": {ready, func(t *testing.T, s *spiffetest.Source) error {
		return handshakes(t, s, spiffetls.Config{Metrics: new(spiffetls.Metrics)})
	}},
	"spiffetls.Config.Governor": {ready, func(t *testing.T, s *spiffetest.Source) error {
		return handshakes(t, s, spiffetls.Config{Governor: new(spiffetls.Governor)})
	}},
	"workloadapi.Config.Client": {refused, func(_ *testing.T, _ *spiffetest.Source) error {
		_, err := workloadapi.New(workloadapi.Config{Client: new(workloadapi.Client)})
		return err
	}},
	"workloadserver.Identity.SVID": {refused, func(t *testing.T, s *spiffetest.Source) error {
		h, err := workloadserver.NewHandler(s, &workloadserver.Options{Identities: func(context.Context) ([]workloadserver.Identity, error) {
			return []workloadserver.Identity{{SVID: new(spiffe.SVID)}}, nil
		}})
		require.NoError(t, err)
		defer h.Close()
		srv := httptest.NewUnstartedServer(h)
		srv.Config.Protocols = new(http.Protocols)
		srv.Config.Protocols.SetUnencryptedHTTP2(true)
		srv.Start()
		defer srv.Close()
		c, err := workloadapi.NewClient("tcp://"+srv.Listener.Addr().String(), nil)
		require.NoError(t, err)
		defer c.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		for _, err := range c.WatchX509SVIDs(ctx) {
			return err
		}
		return ctx.Err()
	}},
}

var _ = sidecar.Identity{} // its fields are above

type noPods struct{}

func (noPods) Pod(context.Context, string, string) (*athenz.Pod, error) { return nil, athenz.ErrNoPod }

func serverOf(t *testing.T, o caserver.Options) error {
	a, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	require.NoError(t, err)
	id := spiffe.MustParseID("spiffe://example.org/ca")
	o.CA, o.TrustDomain, o.Identity = a, id.TrustDomain(), caservertest.Identity(t, a, id)
	_, err = caserver.New(o)
	return err
}

// handshakes makes two, as the first may leave a lock.
func handshakes(t *testing.T, s *spiffetest.Source, c spiffetls.Config) error {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer inner.Close()
	c.Self, c.Peers, c.Allow = s, s, spiffe.AllowAnyPeer()
	endpoint, err := spiffetls.New(c)
	if err != nil {
		return err
	}
	l, err := endpoint.Listener(inner)
	if err != nil {
		return err
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "hello")
			_ = c.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 2 {
		c, err := endpoint.DialContext(ctx, "tcp", inner.Addr().String())
		if err != nil {
			return err
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_, err = io.ReadAll(c)
		_ = c.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// TestZeroFields: what is given a zero struct of this library works with it, or refuses it. Each field that can have one is in
// the table.
func TestZeroFields(t *testing.T) {
	t.Parallel()
	there := map[string]bool{}
	for _, p := range packages(t) {
		for _, id := range p.Scope().Names() {
			o, ok := p.Scope().Lookup(id).(*types.TypeName)
			if !ok || !o.Exported() {
				continue
			}
			s, ok := o.Type().Underlying().(*types.Struct)
			if !ok {
				continue
			}
			for f := range s.Fields() {
				to, ok := f.Type().(*types.Pointer)
				if !ok || !f.Exported() {
					continue
				}
				named, ok := to.Elem().(*types.Named)
				if !ok || named.Obj().Pkg() == nil || !strings.HasPrefix(named.Obj().Pkg().Path(), module) {
					continue
				}
				if _, ok := named.Underlying().(*types.Struct); ok {
					name := p.Name() + "." + id + "." + f.Name()
					there[name] = true
					if _, ok := fields[name]; !ok {
						t.Errorf("say what becomes of a zero %s", name)
					}
				}
			}
		}
	}
	source := spiffetest.NewCA(t, "example.org").Source("/web")
	for name, f := range fields {
		assert.True(t, there[name], "%s is no more", name)
		if f.use == nil {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var err error
			require.NotPanics(t, func() { err = f.use(t, source) })
			if f.what == ready {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
				t.Log(err)
			}
		})
	}
}
