package ca_test

import (
	"crypto"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// workload is one end of a mesh: it polls the bundle of one replica, and renews its identity with another one.
type workload struct {
	key    crypto.Signer
	csr    *pki.CSR
	svid   *spiffe.SVID
	bundle *spiffe.Bundle
	polled time.Time
	renews time.Time
}

func newWorkload(t *testing.T) *workload {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	return &workload{key: key, csr: csr}
}

func (w *workload) SVID() (*spiffe.SVID, error) { return w.svid, nil }
func (w *workload) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return w.bundle.Bundle(td)
}

func (w *workload) read(from *ca.Authority) { w.bundle, w.polled = from.Bundle(), time.Now() }

func (w *workload) renew(t *testing.T, with *ca.Authority, ttl time.Duration) {
	t.Helper()
	chain := must.Get(with.Sign(t.Context(), ca.Request{CSR: w.csr, ID: web, TTL: ttl}))(t)
	w.svid = must.Get(spiffe.NewSVID(chain, w.key))(t)
}

// pipe is a connection in memory.
func pipe(*testing.T) (client, server net.Conn) { return memconn.Pipe() }

// handshake is one connection, with both ends verified.
func handshake(t *testing.T, client, server *workload) error {
	t.Helper()
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: client, Peers: client, Allow: spiffe.AllowIDs(web)}))(t)
	cc := must.Get(endpoint.ClientConfig())(t)
	endpoint = must.Get(spiffetls.New(spiffetls.Config{Self: server, Peers: server, Allow: spiffe.AllowIDs(web)}))(t)
	sc := must.Get(endpoint.ServerConfig())(t)
	cc.CurvePreferences = []tls.CurveID{tls.X25519} // the cheapest
	a, b := pipe(t)
	served := make(chan error, 1)
	go func() {
		defer b.Close()
		served <- tls.Server(b, sc).HandshakeContext(t.Context())
	}()
	conn := tls.Client(a, cc)
	err := conn.HandshakeContext(t.Context())
	if err == nil {
		_, _ = conn.Read(make([]byte, 1)) // the server judges the client after that
	}
	a.Close()
	if serr := <-served; serr != nil {
		return serr
	}
	return err
}

// mesh is workloads that shake hands while the root of their CA rotates. Each polls the bundle and renews at phases of
// its own, some leaves are kept to their last moment, and the pairs are those that a wrong order of a rotation breaks
// first: a leaf of this moment with the oldest bundle that a workload may have, and the leaf that is the next to end with
// the newest bundle.
type mesh struct {
	replicas []*ca.Authority
	poll     time.Duration    // of the workloads; FED-3 wants three to five in a Propagation
	longest  time.Duration    // of a leaf
	begun    func(old string) // if set, called with the active root when a rotation has begun

	rng            *rand.Rand
	workloads      []*workload
	hoard          []*workload // by the end of their leaves
	tried, failed  int
	rotations      int
	rotated, hoped time.Time
}

const (
	members = 10
	tick    = 5 * time.Millisecond // 200 handshakes in a second
)

func (m *mesh) any() *ca.Authority { return m.replicas[m.rng.IntN(len(m.replicas))] }

// run shakes hands until there were so many rotations and as long as the last of their old roots may be needed, or
// until some have failed.
func (m *mesh) run(t *testing.T, rotations int) {
	t.Helper()
	m.rng = rand.New(rand.NewPCG(1, uint64(len(m.replicas))))
	start := time.Now()
	for range members {
		w := newWorkload(t)
		w.read(m.any())
		w.polled = w.polled.Add(-time.Duration(m.rng.Int64N(int64(m.poll)))) // phases
		m.renew(t, w)
		m.workloads = append(m.workloads, w)
	}
	fresh := newWorkload(t)
	m.rotated = start
	for i := 0; m.rotations < rotations || time.Since(m.rotated) < m.longest+4*m.poll; i++ {
		if few := rounds.Of(1) == 1; few && m.rotations == rotations && time.Since(m.rotated) > 4*m.poll {
			time.Sleep(15 * tick)
		}
		polled := m.refresh(t)
		switch i % 4 {
		case 0, 2: // the newest leaf, the oldest bundle
			fresh.renew(t, m.any(), 0)
			fresh.read(m.any())
			m.shake(t, fresh, slices.MinFunc(m.workloads, func(a, b *workload) int { return a.polled.Compare(b.polled) }))
		case 1: // the oldest leaf, the newest bundle
			if len(m.hoard) == 0 {
				break
			}
			fresh.read(m.any())
			m.hoard[0].bundle = fresh.bundle
			m.shake(t, m.hoard[0], fresh)
		default:
			two := m.rng.Perm(members)
			m.shake(t, m.workloads[two[0]], m.workloads[two[1]])
		}
		if m.failed > 5 {
			return
		}
		// A rotation begins right after a workload has read the bundle, which it does not do again for as long as possible.
		if roots := m.replicas[0].Roots(); polled && m.rotations < rotations && roots[len(roots)-1].Phase == "active" {
			if _, err := m.any().Rotate(t.Context()); err == nil {
				m.rotations++
				m.rotated = time.Now()
				if m.begun != nil {
					m.begun(roots[len(roots)-1].ID)
				}
			}
		}
		time.Sleep(tick)
	}
	t.Logf("%d handshakes, %d failed, %d rotations, %.0f in a second", m.tried, m.failed, m.rotations, float64(m.tried)/time.Since(start).Seconds())
}

// refresh does what is due, and reports whether a workload has read the bundle.
func (m *mesh) refresh(t *testing.T) (polled bool) {
	t.Helper()
	now := time.Now()
	for _, w := range m.workloads {
		if now.Sub(w.polled) >= m.poll {
			w.read(m.any())
			polled = true
		}
		if !now.Before(w.renews) {
			m.renew(t, w)
		}
	}
	m.hoard = slices.DeleteFunc(m.hoard, func(w *workload) bool { return !now.Add(tick).Before(w.svid.NotAfter()) })
	if now.After(m.hoped) {
		w := newWorkload(t)
		w.renew(t, m.any(), m.longest)
		m.hoard = append(m.hoard, w)
		slices.SortStableFunc(m.hoard, func(a, b *workload) int { return a.svid.NotAfter().Compare(b.svid.NotAfter()) })
		m.hoped = now.Add(time.Duration(m.rng.Int64N(int64(m.poll))))
	}
	return polled
}

// renew gives w a leaf with a lifetime, and a time to renew, of its own.
func (m *mesh) renew(t *testing.T, w *workload) {
	t.Helper()
	w.renew(t, m.any(), time.Second+time.Duration(m.rng.Int64N(int64(m.longest-time.Second)+1)))
	left := time.Until(w.svid.NotAfter()) - tick
	if m.rng.IntN(3) > 0 { // else to its end
		left = time.Duration(float64(left) * m.rng.Float64())
	}
	w.renews = time.Now().Add(left)
}

func (m *mesh) shake(t *testing.T, client, server *workload) {
	t.Helper()
	start := time.Now()
	for _, w := range []*workload{client, server} {
		if !start.Add(tick).Before(w.svid.NotAfter()) { // the certificate's seconds are whole
			return
		}
	}
	err := handshake(t, client, server)
	if m.tried++; err != nil {
		m.failed++
		t.Logf("after %d rotations: bundle of %v ago: %v", m.rotations, start.Sub(server.polled), err)
	}
}

// fast are settings with which a rotation takes no time, and leaves live as long as whole seconds let them.
func fast(longest, propagation time.Duration) func(*ca.Config) {
	return func(c *ca.Config) {
		c.DefaultTTL, c.MaxTTL, c.Backdate, c.Rotation.Propagation = longest, longest, 20*time.Millisecond, propagation
	}
}

func TestNoHandshakeFails(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	const poll, longest = 40 * time.Millisecond, 2 * time.Second
	for _, replicas := range []int{0, 1, 2} { // 0: without a store
		t.Run(fmt.Sprint(replicas, " replicas"), func(t *testing.T) {
			if replicas < 2 {
				rounds.Slow(t)
			}
			bubble.Test(t, func(t *testing.T) {
				m := &mesh{poll: poll, longest: longest, replicas: []*ca.Authority{newAuthority(t, fast(longest, 3*poll))}}
				if replicas > 0 {
					store := ca.NewMemoryStore()
					m.replicas[0] = open(t, store, fast(longest, 3*poll))
					for len(m.replicas) < replicas {
						m.replicas = append(m.replicas, open(t, store, fast(longest, 3*poll)))
					}
				}
				for _, a := range m.replicas {
					run(t, a)
				}
				start, rotations := time.Now(), rounds.Of(3)
				if *long {
					rotations = 1000
				}
				m.run(t, rotations)
				assert.Zero(t, m.failed, "of %d handshakes", m.tried)
				assert.Equal(t, rotations, m.rotations)
				assert.GreaterOrEqual(t, float64(m.tried), float64(min(35*rounds.Of(rounds.Of(1)), 190))*time.Since(start).Seconds())
			})
		})
	}
	// What a deliberately wrong order does: a root that signs before all verifiers that poll have heard of it, by a little, and at once.
	for _, propagation := range []time.Duration{poll - tick, poll / 2, 1} {
		t.Run(fmt.Sprint("activates after ", propagation), func(t *testing.T) {
			if propagation > 1 {
				rounds.Slow(t)
			}
			bubble.Test(t, func(t *testing.T) {
				m := &mesh{poll: poll, longest: longest, replicas: []*ca.Authority{newAuthority(t, fast(longest, propagation))}}
				run(t, m.replicas[0])
				m.run(t, rounds.Of(10))
				assert.Greater(t, m.failed, 5)
			})
		})
	}
	// And to take the old root away before its leaves are dead: at half of their life.
	t.Run("retires before the leaves are dead", func(t *testing.T) {
		rounds.Slow(t)
		bubble.Test(t, func(t *testing.T) {
			m := &mesh{poll: poll, longest: longest}
			m.replicas = []*ca.Authority{open(t, ca.NewMemoryStore(), fast(longest, 3*poll))}
			m.replicas[0].SetTaintGrace(longest / 2)
			m.begun = func(old string) { // a tainted root retires after TaintGrace
				require.NoError(t, m.replicas[0].Taint(t.Context(), old))
			}
			run(t, m.replicas[0])
			m.run(t, 30)
			assert.Greater(t, m.failed, 5)
		})
	})
}
