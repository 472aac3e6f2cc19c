package ca_test

import (
	"crypto"
	"crypto/tls"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/memconn"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// workload is one end of a mesh: it polls the bundle of one replica, and renews its identity with
// another one.
type workload struct {
	key    crypto.Signer
	csr    *pki.CSR
	svid   *spiffe.SVID
	bundle *spiffe.Bundle
	polled time.Time
	signed time.Time
}

func newWorkload(t *testing.T) *workload {
	t.Helper()
	key, err := pki.NewKey(pki.ECDSAP256)
	require.NoError(t, err)
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	require.NoError(t, err)
	return &workload{key: key, csr: csr}
}

func (w *workload) SVID() (*spiffe.SVID, error) { return w.svid, nil }
func (w *workload) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return w.bundle.Bundle(td)
}

// renewal is often, so that there are leaves from each moment of a rotation.
const renewal = 70 * time.Millisecond

// refresh does what is due.
func (w *workload) refresh(t *testing.T, poll time.Duration, bundles, signer *ca.Authority) {
	t.Helper()
	if time.Since(w.polled) >= poll {
		w.bundle, w.polled = bundles.Bundle(), time.Now()
	}
	if time.Since(w.signed) >= renewal {
		w.signed = time.Now()
		chain, err := signer.Sign(t.Context(), ca.Request{CSR: w.csr, ID: web})
		require.NoError(t, err)
		w.svid, err = spiffe.NewSVID(chain, w.key)
		require.NoError(t, err)
	}
}

// handshake is one connection, with both ends verified.
func handshake(t *testing.T, client, server *workload) error {
	t.Helper()
	cc, err := spiffetls.ClientConfig(client, client, spiffe.AllowIDs(web), nil)
	require.NoError(t, err)
	sc, err := spiffetls.ServerConfig(server, server, spiffe.AllowIDs(web), nil)
	require.NoError(t, err)
	a, b := memconn.Pipe()
	served := make(chan error, 1)
	go func() {
		defer b.Close()
		served <- tls.Server(b, sc).HandshakeContext(t.Context())
	}()
	conn := tls.Client(a, cc)
	err = conn.HandshakeContext(t.Context())
	if err == nil {
		_, _ = conn.Read(make([]byte, 1)) // the server judges the client after that
	}
	a.Close()
	if serr := <-served; serr != nil {
		return serr
	}
	return err
}

// mesh rotates and shakes hands, a hundred times in a second, and returns how many handshakes there
// were and how many failed. The clock is that of a bubble, so that it is the same on every machine.
func mesh(t *testing.T, rotations int, poll time.Duration, replicas ...*ca.Authority) (all, failed int) {
	t.Helper()
	workloads := []*workload{newWorkload(t), newWorkload(t), newWorkload(t)}
	rotated := time.Now()
	for done, i := 0, 0; done < rotations || time.Since(rotated) < time.Second; i++ {
		for n, w := range workloads {
			w.refresh(t, poll, replicas[n%len(replicas)], replicas[(i+n)%len(replicas)])
		}
		if err := handshake(t, workloads[i%3], workloads[(i+1)%3]); err != nil {
			failed++
			t.Logf("after %d rotations: %v", done, err)
		}
		all++
		if roots := replicas[0].Roots(); done < rotations && roots[len(roots)-1].Phase == ca.Active && time.Since(rotated) > 2*poll {
			if _, err := replicas[i%len(replicas)].Rotate(t.Context()); err == nil {
				done++
				rotated = time.Now()
			}
		}
		if failed > 5 {
			return all, failed
		}
		time.Sleep(9 * time.Millisecond)
	}
	return all, failed
}

func TestNoHandshakeFails(t *testing.T) {
	t.Parallel()
	const poll = 40 * time.Millisecond // of the consumers; FED-3 wants three to five in a Propagation
	const rotations = 50
	fast := func(propagation time.Duration) func(*ca.Config) {
		return func(c *ca.Config) {
			c.DefaultTTL, c.MaxTTL, c.Backdate, c.Rotation.Propagation = 2*time.Second, 2*time.Second, time.Second, propagation
		}
	}
	for _, replicas := range []int{0, 1, 2} { // 0: without a store
		t.Run(fmt.Sprint(replicas, " replicas"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				all := []*ca.Authority{newAuthority(t, fast(3*poll))}
				if replicas > 0 {
					store := ca.NewMemoryStore()
					all[0] = open(t, store, fast(3*poll))
					for len(all) < replicas {
						all = append(all, open(t, store, fast(3*poll)))
					}
				}
				for _, a := range all {
					run(t, a)
				}
				times := rotations
				if replicas < 2 {
					times = 10 // what is different has been seen then
				}
				n, failed := mesh(t, times, poll, all...)
				assert.Zero(t, failed, "of %d handshakes", n)
				assert.GreaterOrEqual(t, float64(n)/time.Since(start).Seconds(), 100.0, "in a second")
			})
		})
	}
	// The same in a deliberately wrong order: to sign before others have heard of the root.
	t.Run("activate before distribute", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			_, failed := mesh(t, rotations, poll, newAuthority(t, fast(1)))
			assert.Greater(t, failed, 5)
		})
	})
	// And to take the old root away before its leaves are dead.
	t.Run("retire before the leaves are dead", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			a := newAuthority(t, fast(3*poll), func(c *ca.Config) { c.Rotation.TaintGrace = 1 })
			failed := 0
			workloads := []*workload{newWorkload(t), newWorkload(t)}
			for i := 0; i < 200 && failed < 6; i++ {
				for _, w := range workloads {
					w.refresh(t, poll, a, a)
				}
				if handshake(t, workloads[i%2], workloads[(i+1)%2]) != nil {
					failed++
				}
				if roots := a.Roots(); len(roots) == 1 {
					require.NoError(t, a.Taint(t.Context(), roots[0].ID))
				}
				time.Sleep(10 * time.Millisecond)
			}
			assert.Greater(t, failed, 5)
		})
	})
}
