package peers_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// handshake has a client and a server of TLS prove themselves to each other, without a session of before.
func handshake(client, server *tls.Config) error {
	below, above := memconn.Pipe()
	done := make(chan error, 1)
	go func() {
		c := tls.Server(below, server)
		_, err := c.Write([]byte{1}) // after the handshake
		_ = below.Close()            // the client has the byte or the reason
		done <- err
	}()
	c := tls.Client(above, client)
	_, err := io.ReadFull(c, make([]byte, 1))
	_ = above.Close() // the same
	return errors.Join(err, <-done)
}

// beats is something that is done each 100 ms.
type beats struct {
	what   string
	n      int
	failed []string
}

// beat does something each 100 ms until the end of the test or of ctx.
func beat(ctx context.Context, all *sync.WaitGroup, what string, do func() error) *beats {
	b := &beats{what: what}
	all.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			if err := do(); err != nil && ctx.Err() == nil {
				b.failed = append(b.failed, fmt.Sprintf("%s: %v", time.Now().Format("15:04:05.000"), err))
			}
			b.n++
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	return b
}

func (b *beats) String() string { return fmt.Sprintf("%s: %d, failed: %d", b.what, b.n, len(b.failed)) }

// eventually waits up to a minute, in the goroutine of the test.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for begin := time.Now(); !ok(); time.Sleep(20 * time.Millisecond) {
		require.Less(t, time.Since(begin), time.Minute, what)
	}
}

// workload is a program with an identity of a SPIRE.
type workload struct {
	*workloadapi.Source
	client, server *tls.Config
}

// newWorkload has an identity within a minute, which peers of some trust domains are shown.
func newWorkload(t *testing.T, s *peers.SPIRE, allow ...spiffe.TrustDomain) *workload {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	src := must.Get(workloadapi.Start(ctx, workloadapi.Config{Address: s.WorkloadAPI(), JWTBundles: true}))(t)
	t.Cleanup(func() { _ = src.Close() })
	w := &workload{Source: src}
	w.client, w.server = configs(t, src, src, allow...)
	return w
}

// configs are what an endpoint of TLS uses as a client and as a server.
func configs(t *testing.T, self spiffe.SVIDSource, known spiffe.BundleSource, allow ...spiffe.TrustDomain,
) (client, server *tls.Config) {
	t.Helper()
	e := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: known, Allow: spiffe.AllowMembersOf(allow...)}))(t)
	client, server = must.Get(e.ClientConfig())(t), must.Get(e.ServerConfig())(t)
	server.SessionTicketsDisabled = true
	return client, server
}

// TestSPIRE has the identity of a workload from a real SPIRE, whose agent is then killed and comes back by itself.
func TestSPIRE(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{})
	id := s.Register(t, "/web")
	for range 2 {
		w := newWorkload(t, s, s.TrustDomain)
		assert.Equal(t, id, must.Get(w.SVID())(t).ID())
		require.NoError(t, w.Close())
		s.Agent.Kill()
		s.StartAgent(t)
	}
}

var partnerDomain = spiffe.MustParseTrustDomain("partner.example")

// partner is a trust domain of ours with a bundle endpoint, which is federated with a SPIRE both ways.
type partner struct {
	*ca.Authority
	web            *secretcache.Manager // a workload
	known          *federation.Manager  // what it knows of the SPIRE
	client, server *tls.Config          // of the workload

	first *spiffe.Bundle                // of its own
	old   atomic.Pointer[spiffe.Bundle] // what the endpoint serves instead, if set
}

// Bundle is for the endpoint.
func (p *partner) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if old := p.old.Load(); old != nil {
		return old, nil
	}
	return p.Authority.Bundle(), nil
}

// newPartner federates with a SPIRE by a profile. SPIRE fetches a bundle each 15 seconds at most, so that roots and
// keys are in the bundle for 20 before they sign.
func newPartner(t *testing.T, s *peers.SPIRE, profile string) *partner {
	t.Helper()
	p := &partner{Authority: newPartnerCA(t)}
	p.first = p.Authority.Bundle()
	run(t, p.Authority)
	identity := func(path string) *secretcache.Manager {
		id := spiffe.MustParseID(partnerDomain.ID().String() + path)
		m := must.Get(secretcache.Start(t.Context(), secretcache.Config{ID: id, Lifetime: 8 * time.Second,
			CA: must.Get(local.New(p.Authority, id))(t)}))(t)
		t.Cleanup(func() { _ = m.Close() })
		return m
	}
	p.web = identity("/web")
	endpoint := identity("/bundles")

	config := must.Get(federation.ServerConfig(endpoint))(t)
	theirs := federation.Relationship{TrustDomain: s.TrustDomain, URL: s.BundleURL}
	ours := []string{"federation", "create", "-trustDomain", partnerDomain.String(), "-bundleEndpointProfile", profile}
	switch profile {
	case "https_web":
		certificate := s.WebCertificate(t)
		config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate, nil }
		theirs.Profile = federation.Web{Roots: s.WebRoots()}
	case "https_spiffe":
		file := filepath.Join(t.TempDir(), "bundle.json")
		require.NoError(t, os.WriteFile(file, must.Get(p.Authority.Bundle().Marshal())(t), 0o600))
		ours = append(ours, "-endpointSpiffeID", must.Get(endpoint.SVID())(t).ID().String(),
			"-trustDomainBundlePath", file, "-trustDomainBundleFormat", "spiffe")
		theirs.Profile = federation.SPIFFE{EndpointID: s.ID("/spire/server"), Initial: s.Bundle(t)}
	}
	server := httptest.NewUnstartedServer(must.Get(federation.NewHandler(p, partnerDomain))(t))
	spiffetest.StartTLS(server, config)
	t.Cleanup(server.Close)
	p.known = must.Get(federation.Start(t.Context(), federation.Config{Relationships: []federation.Relationship{theirs},
		MinInterval: time.Second, MaxInterval: time.Second}))(t)
	t.Cleanup(func() { _ = p.known.Close() })
	s.ServerCLI(t, append(ours, "-bundleEndpointURL", server.URL)...)
	p.client, p.server = configs(t, p.web, p.known, s.TrustDomain)
	return p
}

func newPartnerCA(t *testing.T) *ca.Authority {
	t.Helper()
	return must.Get(ca.New(ca.Config{TrustDomain: partnerDomain, Backdate: time.Second, RefreshHint: time.Second,
		MaxTTL:   8 * time.Second,
		Rotation: ca.Rotation{Manual: true, Propagation: 20 * time.Second},
		JWT:      &ca.JWTConfig{DefaultTTL: 8 * time.Second, MaxTTL: 8 * time.Second}}))(t)
}

// token returns a token of the workload.
func (p *partner) token(ctx context.Context) (string, error) {
	svid, err := p.web.SVID()
	if err != nil {
		return "", err
	}
	return p.IssueJWTSVID(ctx, svid.ID(), []string{"db"})
}

// keyOf returns the ID of the key of a token.
func keyOf(t *testing.T, token string) string {
	t.Helper()
	return must.Get(jwtsvid.ParseUnverified(token))(t).KeyID
}

// authorities are what a bundle trusts.
func authorities(b *spiffe.Bundle) (all []string) {
	for c := range b.X509Authorities() {
		all = append(all, fmt.Sprintf("root %x", c.SubjectKeyId))
	}
	for id := range b.JWTAuthorities() {
		all = append(all, "key "+id)
	}
	slices.Sort(all)
	return all
}

// TestSPIREFederation has a SPIRE and a trust domain of ours verify the certificates and tokens of each other while
// both replace all roots and keys.
func TestSPIREFederation(t *testing.T) {
	t.Parallel()
	for _, profile := range []string{"https_web", "https_spiffe"} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			s := peers.NewSPIRE(t, peers.SPIREOptions{TrustDomain: "spire.example", Profile: profile})
			p := newPartner(t, s, profile)
			mutual(t, s, p)
			rolledBack(t, s, p)
		})
	}
}

// mutual has them verify each other through a rotation of both.
func mutual(t *testing.T, s *peers.SPIRE, p *partner) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	eventually(t, "SPIRE has fetched our bundle", func() bool {
		s.ServerCLI(t, "federation", "refresh", "-id", partnerDomain.ID().String())
		return strings.Contains(s.ServerCLI(t, "bundle", "list"), partnerDomain.String())
	})
	s.Register(t, "/web", "-federatesWith", partnerDomain.ID().String())
	w := newWorkload(t, s, partnerDomain)
	validator := must.Get(jwtsvid.NewValidator(p.known, []string{"db"}, nil))(t)
	agent := must.Get(workloadapi.NewClient(s.WorkloadAPI(), nil))(t)
	peer := must.Get(peerapi.NewX509Source(ctx, peerapi.WithClientOptions(peerapi.WithAddr(s.WorkloadAPI()))))(t)
	t.Cleanup(func() { _ = peer.Close() })
	other := tlsconfig.AuthorizeMemberOf(spiffeid.RequireTrustDomainFromString(partnerDomain.String()))

	begin := must.Get(w.SVID())(t)
	tokenOfBegin := must.Get(w.Fetch(ctx, "db"))(t)
	theirs, ours := authorities(s.Bundle(t)), authorities(p.Authority.Bundle())
	sees := func(source spiffe.BundleSource, td spiffe.TrustDomain, ok func(now []string) bool, what string) {
		t.Helper()
		eventually(t, what, func() bool {
			b, err := source.Bundle(td)
			return err == nil && ok(authorities(b))
		})
	}
	sees(w, partnerDomain, func(now []string) bool { return slices.Equal(now, ours) }, "SPIRE has our bundle")
	validated := func(token string) error { return must.Err2(agent.ValidateJWTSVID(ctx, "db", token)) }
	eventually(t, "the agent verifies with our bundle", func() bool {
		return validated(must.Get(p.token(ctx))(t)) == nil
	})

	var all sync.WaitGroup
	defer func() { cancel(); all.Wait() }()
	acts := []*beats{
		beat(ctx, &all, "go-spiffe with SPIRE to us", func() error {
			return handshake(tlsconfig.MTLSClientConfig(peer, peer, other), p.server)
		}),
		beat(ctx, &all, "we to go-spiffe with SPIRE", func() error {
			return handshake(p.client, tlsconfig.MTLSServerConfig(peer, peer, other))
		}),
		beat(ctx, &all, "a workload of ours with SPIRE to us", func() error { return handshake(w.client, p.server) }),
		beat(ctx, &all, "tokens of SPIRE", func() error {
			token, err := w.Fetch(ctx, "db")
			if err == nil {
				_, err = validator.Validate(token)
			}
			return err
		}),
		beat(ctx, &all, "our tokens", func() error {
			token, err := p.token(ctx)
			if err == nil {
				err = validated(token)
			}
			return err
		}),
	}

	must.Get(p.Rotate(ctx))(t)
	must.Get(p.RotateJWT(ctx))(t)
	for _, kind := range []string{"x509", "jwt"} {
		s.LocalAuthority(t, kind, "prepare")
	}
	sees(p.known, s.TrustDomain, func(now []string) bool { return len(now) == 4 }, "we have what SPIRE has prepared")
	for _, kind := range []string{"x509", "jwt"} {
		s.LocalAuthority(t, kind, "activate")
	}
	eventually(t, "what SPIRE issues is of the new root and key", func() bool {
		return keyOf(t, must.Get(w.Fetch(ctx, "db"))(t)) != keyOf(t, tokenOfBegin) &&
			!bytes.Equal(must.Get(w.SVID())(t).Leaf().AuthorityKeyId, begin.Leaf().AuthorityKeyId)
	})
	for _, kind := range []string{"x509", "jwt"} {
		s.LocalAuthority(t, kind, "taint")
		s.LocalAuthority(t, kind, "revoke")
	}
	gone := func(before []string) func([]string) bool {
		return func(now []string) bool {
			return len(now) == 2 && !slices.ContainsFunc(now, func(a string) bool { return slices.Contains(before, a) })
		}
	}
	sees(p.known, s.TrustDomain, gone(theirs), "we have nothing of before of SPIRE")
	sees(w, partnerDomain, gone(ours), "SPIRE has nothing of before of us")

	revoked, _ := configs(t, begin, w, partnerDomain)
	assert.ErrorContains(t, handshake(revoked, p.server), "certificate signed by unknown authority")
	assert.ErrorContains(t, must.Err(validator.Validate(tokenOfBegin)), "unknown key")
	stolen, _ := configs(t, spiffetest.NewCA(t, partnerDomain.String()).SVID("/web"), p.known, s.TrustDomain)
	assert.ErrorContains(t, handshake(stolen, w.server), "certificate signed by unknown authority")
	good := must.Get(p.token(ctx))(t)
	thief := must.Get(jwtsvid.NewIssuer(partnerDomain, keyOf(t, good), must.Get(pki.NewKey(""))(t), nil))(t)
	forged := must.Get(thief.IssueJWTSVID(ctx, must.Get(p.web.SVID())(t).ID(), []string{"db"}))(t)
	validate := []string{"api", "validate", "jwt", "-audience", "db", "-svid"}
	must.Get(s.AgentCLI(append(validate, good)...))(t)
	must.Fail(t, must.Err(s.AgentCLI(append(validate, forged)...)), "SVID is not valid")
	cancel()
	all.Wait()
	for _, b := range acts {
		t.Log(b)
		assert.Empty(t, b.failed, b.what)
		assert.Positive(t, b.n)
	}
}

// rolledBack has the server of SPIRE restored from a backup of before its last change, and us publish a bundle of
// before ours.
func rolledBack(t *testing.T, s *peers.SPIRE, p *partner) {
	sequence := func(b *spiffe.Bundle) uint64 {
		n, ok := b.Sequence()
		require.True(t, ok)
		return n
	}
	restore := s.Backup(t)
	before := sequence(s.Bundle(t))
	s.LocalAuthority(t, "x509", "prepare")
	after := sequence(s.Bundle(t))
	require.Greater(t, after, before)
	inForce := func() *spiffe.Bundle { return must.Get(p.known.Bundle(s.TrustDomain))(t) }
	eventually(t, "we have the change", func() bool { return sequence(inForce()) == after })
	restore()
	eventually(t, "the lower number is refused", func() bool { return p.known.Status()[0].Refused != nil })
	status := p.known.Status()[0]
	assert.Equal(t, before, sequence(status.Refused))
	assert.ErrorContains(t, status.Err, "sequence")
	assert.Equal(t, after, sequence(inForce()), "the bundle is held")
	require.NoError(t, p.known.Set(status.Refused))
	eventually(t, "it agrees with the endpoint", func() bool { return p.known.Status()[0].Fresh })
	assert.Equal(t, before, sequence(inForce()), "the operator has accepted it")

	p.old.Store(p.first)
	s.ServerCLI(t, "federation", "refresh", "-id", partnerDomain.ID().String())
	time.Sleep(2 * time.Second) // which only a line of the log needs
	has := must.Get(spiffe.ParseBundle(partnerDomain, []byte(s.ServerCLI(t, "bundle", "list", "-id",
		partnerDomain.ID().String(), "-format", "spiffe"))))(t)
	t.Logf("after a bundle of ours with sequence %d, not %d, SPIRE has the lower one: %v", sequence(p.first),
		sequence(p.Authority.Bundle()), slices.Equal(authorities(has), authorities(p.first)))
}
