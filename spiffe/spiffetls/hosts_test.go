package spiffetls_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

var (
	billingID = spiffe.MustParseID("spiffe://example.org/billing")
	dbID      = spiffe.MustParseID("spiffe://example.org/db")
)

// names is a network in which a test says which server is where.
type names struct {
	mu    sync.Mutex
	at    map[string]*memconn.Listener // by what is dialled
	dials []string
}

func (n *names) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	n.dials = append(n.dials, addr)
	l := n.at[addr]
	n.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("no server at %s", addr)
	}
	return l.Dial(ctx)
}

func (n *names) put(addr string, l *memconn.Listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.at[addr] = l
}

// dialled returns what was dialled since the last call.
func (n *names) dialled() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	dials := n.dials
	n.dials = nil
	return dials
}

// street has servers that a client tells apart by the hosts that it calls. Each answers with the ID that it has.
type street struct {
	ca       *spiffetest.CA
	names    *names
	requests atomic.Int64 // that a handler got
}

func newStreet(t *testing.T) *street {
	return &street{ca: spiffetest.NewCA(t, "example.org"), names: &names{at: map[string]*memconn.Listener{}}}
}

// server serves with the identity of path until the test ends. The path /to/URL redirects.
func (s *street) server(t *testing.T, path string, opts *spiffetls.Config) *memconn.Listener {
	t.Helper()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		if url, ok := strings.CutPrefix(r.URL.Path, "/to/"); ok {
			http.Redirect(w, r, url, http.StatusTemporaryRedirect)
			return
		}
		fmt.Fprint(w, path)
	})}
	require.NoError(t, configureServer(server, with(opts, s.ca.SVID(path), s.ca.Bundle(), spiffe.AllowAnyPeer())))
	return inMemory(t, server)
}

func (s *street) client(t testing.TB, allow spiffe.PolicySource, opts *spiffetls.Config) (*http.Client, *http.Transport) {
	t.Helper()
	transport := must.Get(newTransport(with(opts, s.ca.SVID("/web"), s.ca.Bundle(), allow)))(t)
	transport.DialContext = s.names.dial
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}, transport
}

func bothVersionsOfHTTP(t *testing.T, f func(t *testing.T, opts *spiffetls.Config)) {
	t.Run("HTTP/2", func(t *testing.T) { t.Parallel(); f(t, nil) })
	t.Run("HTTP/1.1", func(t *testing.T) { t.Parallel(); f(t, http1) })
}

// refusedAt checks that a request was refused by the policy, before or after a server had proved its ID.
func refusedAt(t *testing.T, c *http.Client, url string) error {
	t.Helper()
	resp, err := c.Get(url)
	if !assert.Error(t, err, url) {
		_ = resp.Body.Close()
		return nil
	}
	assert.ErrorIs(t, err, spiffe.ErrDenied, url)
	return err
}

// Pain: with one policy for all hosts, an allowed neighbour can answer for billing.example.
func TestNeighbourCannotAnswer(t *testing.T) {
	t.Parallel()
	bothVersionsOfHTTP(t, func(t *testing.T, opts *spiffetls.Config) {
		s := newStreet(t)
		billing, db := s.server(t, "/billing", nil), s.server(t, "/db", nil)
		c, transport := s.client(t, hostPolicies{
			"billing.example:443":  spiffe.AllowIDs(billingID),
			"billing.example:8443": spiffe.AllowIDs(dbID),
			"db.example":           spiffe.AllowIDs(dbID),
			"192.0.2.7":            spiffe.AllowIDs(dbID),
			"[2001:db8::1]:444":    spiffe.AllowIDs(dbID),
			"2001:db8::2":          spiffe.AllowIDs(dbID),
		}, opts)
		for addr, l := range map[string]*memconn.Listener{
			"billing.example:443": billing, "billing.example:8443": db, "db.example:443": db, "db.example:1": db,
			"192.0.2.7:443": db, "[2001:db8::1]:444": db, "[2001:db8::2]:443": db, "BILLING.Example:443": billing,
			// that the client must not reach
			"[2001:db8::1]:443": db, "unknown.example:443": db, "billing.example:444": billing, "db.example.:443": db, "sub.db.example:443": db,
		} {
			s.names.put(addr, l)
		}
		for url, want := range map[string]string{
			"https://billing.example/": "/billing", "https://billing.example:443/": "/billing", "https://BILLING.Example/": "/billing",
			"https://billing.example:8443/": "/db", "https://db.example/": "/db", "https://db.example:1/": "/db",
			"https://192.0.2.7/": "/db", "https://[2001:db8::1]:444/": "/db", "https://[2001:db8::2]/": "/db",
		} {
			assert.Equal(t, want, get(t, c, url), url)
		}

		s.names.dialled()
		for _, url := range []string{
			"https://unknown.example/", "https://billing.example:444/", "https://db.example./", "https://sub.db.example/",
			"https://[2001:db8::1]/", "https://192.0.2.8/", "https://example/", "https://db.example@unknown.example/",
		} {
			err := refusedAt(t, c, url)
			assert.ErrorContains(t, err, "is no known host", url)
		}
		assert.Empty(t, s.names.dialled(), "a host without a policy is refused before it is dialled")

		transport.CloseIdleConnections()
		before := s.requests.Load()
		s.names.put("billing.example:443", db) // the neighbour has taken the address
		err := refusedAt(t, c, "https://billing.example/")
		e := verifyError(t, err, "policy")
		assert.Equal(t, dbID, e.ID)
		assert.Equal(t, before, s.requests.Load())
		assert.Equal(t, "/db", get(t, c, "https://db.example/"))
	})
}

func TestRedirectIsCheckedByItsHost(t *testing.T) {
	t.Parallel()
	bothVersionsOfHTTP(t, func(t *testing.T, opts *spiffetls.Config) {
		s := newStreet(t)
		billing := s.server(t, "/billing", nil)
		for _, addr := range []string{"billing.example:443", "db.example:443", "unknown.example:443"} {
			s.names.put(addr, billing)
		}
		c, _ := s.client(t, hostPolicies{"billing.example": spiffe.AllowIDs(billingID), "db.example": spiffe.AllowIDs(dbID)}, opts)
		assert.Equal(t, "/billing", get(t, c, "https://billing.example/to/https://billing.example/there"))
		verifyError(t, refusedAt(t, c, "https://billing.example/to/https://db.example/"), "policy")
		s.names.dialled()
		refusedAt(t, c, "https://billing.example/to/https://unknown.example/")
		assert.Empty(t, s.names.dialled())
		_, err := c.Get("https://billing.example/to/http://billing.example/")
		assert.ErrorContains(t, err, "without TLS")
	})
}

// TestPooledConnectionIsOfOneHost: a connection is not used for another host, whatever address that has and
// whatever its server may prove.
func TestPooledConnectionIsOfOneHost(t *testing.T) {
	t.Parallel()
	bothVersionsOfHTTP(t, func(t *testing.T, opts *spiffetls.Config) {
		s := newStreet(t)
		billing := s.server(t, "/billing", nil)
		s.names.put("billing.example:443", billing)
		s.names.put("billing.example:444", billing)
		s.names.put("db.example:443", billing)
		c, _ := s.client(t, hostPolicies{
			"billing.example:443": spiffe.AllowIDs(billingID), "billing.example:444": spiffe.AllowIDs(dbID), "db.example": spiffe.AllowIDs(dbID),
		}, opts)
		for range 3 {
			assert.Equal(t, "/billing", get(t, c, "https://billing.example/"))
			refusedAt(t, c, "https://billing.example:444/")
			refusedAt(t, c, "https://db.example/")
		}
		assert.Equal(t, 1, count(s.names.dialled(), "billing.example:443"))
		assert.EqualValues(t, 3, s.requests.Load())
	})
}

func count(all []string, one string) int {
	n := 0
	for _, s := range all {
		if s == one {
			n++
		}
	}
	return n
}

func TestBadHosts(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	allow := spiffe.AllowIDs(dbID)
	for key, policy := range map[string]spiffe.PolicySource{"db": nil, "nobody": spiffe.Policy{}} {
		_, err := newTransport(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Hosts: map[string]spiffe.PolicySource{key: policy}})
		assert.ErrorContains(t, err, fmt.Sprintf("%q: ", key))
	}
	_, err := newTransport(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Hosts: map[string]spiffe.PolicySource{}})
	assert.ErrorContains(t, err, "Hosts has no host")
	for _, key := range []string{
		"", ":443", "*.example", "https://db", "db/", "DB.example", "[db]:1", "2001:DB8:0::1", "[2001:db8:0::1]:443", "[2001:db8::1]", "a:b:c",
		"bücher.example", "db:65536", "db:https",
	} {
		_, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Hosts: map[string]spiffe.PolicySource{key: allow}})
		assert.ErrorContains(t, err, fmt.Sprintf("%q: want a host", key))
	}
}

// TestHostsWhereNoAddressIsKnown: everything that does not know what was dialled refuses.
func TestHostsWhereNoAddressIsKnown(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	e := must.Get(spiffetls.New(spiffetls.Config{
		Self: ca.SVID("/web"), Peers: ca.Bundle(), Hosts: map[string]spiffe.PolicySource{"db": spiffe.AllowAnyPeer()},
	}))(t)
	_, err := e.ClientConfig()
	assert.ErrorContains(t, err, "does not know the address")
	_, err = e.ServerConfig()
	assert.ErrorContains(t, err, "Hosts is about servers")
	assert.ErrorContains(t, e.ConfigureServer(&http.Server{}), "Hosts is about servers")

	// The function that knows the address was taken out.
	transport := must.Get(e.Transport())(t)
	server := must.Get(serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
	config := transport.TLSClientConfig.Clone()
	config.ServerName = "db"
	_, c := connect(t, server, config)
	_, ok := errors.AsType[*tls.CertificateVerificationError](c.err)
	assert.True(t, ok, "%v", c.err)
}

// TestGovernorWithHosts: a connection is judged by the policy of its own host, at once when that changes.
func TestGovernorWithHosts(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	s := newStreet(t)
	db := s.server(t, "/db", nil)
	s.names.put("a.example:443", db)
	s.names.put("b.example:443", db)
	var atA spiffe.LivePolicy
	require.NoError(t, atA.Set(spiffe.AllowIDs(dbID)))
	g := &spiffetls.Governor{Grace: -1, Jitter: -1, Interval: time.Hour}
	govern(t, g)
	c, _ := s.client(t, hostPolicies{"a.example": &atA, "b.example": spiffe.AllowIDs(dbID)}, &spiffetls.Config{Governor: g})
	get(t, c, "https://a.example/")
	get(t, c, "https://b.example/")
	require.Equal(t, 2, statusOf(t, g).Open)
	require.NoError(t, atA.Set(spiffe.AllowIDs(billingID)))
	assert.Eventually(t, func() bool { return statusOf(t, g).Open == 1 }, time.Minute, 10*time.Millisecond)
	s.names.dialled()
	get(t, c, "https://b.example/")
	assert.Empty(t, s.names.dialled())
}
