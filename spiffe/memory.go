package spiffe

import (
	"bytes"
	"crypto/x509"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"
	"weak"
)

const (
	defaultRemembered = 1024
	maxRemembered     = 1 << 20
	maxRememberedDER  = 32 << 10 // bytes of DER that one chain may keep alive
	memoryWays        = 4        // places that one chain may take
)

// memory holds chains that were verified. It decides nothing: what find returns was true for one bundle
// and in one span of time, and the Verifier checks both.
//
// It is a table of places in sets; the hash of the leaf selects the set. Readers take no lock and
// write nothing. Two writers may take each other's place, which costs a verification.
type memory struct {
	seed       maphash.Seed
	sets, ways int
	places     atomic.Pointer[[]place] // made for the first chain, as many verifiers never need it
}

type place = atomic.Pointer[remembered]

// remembered is one chain. It never changes.
type remembered struct {
	sum       uint64
	role      Role
	chain     []*x509.Certificate  // as it was presented
	bundle    weak.Pointer[Bundle] // weak, so that remembered chains keep no old bundle alive
	notBefore time.Time            // the latest on the path
	peer      *Peer
}

// newMemory returns a memory of at most n chains, or nil for none.
func newMemory(n int) *memory {
	if n <= 0 {
		return nil
	}
	ways := min(n, memoryWays)
	return &memory{seed: maphash.MakeSeed(), sets: n / ways, ways: ways}
}

// set returns the places that the chain with this sum may take.
func (m *memory) set(places []place, sum uint64) []place {
	i := int(sum%uint64(m.sets)) * m.ways
	return places[i : i+m.ways]
}

// find returns the chain if it is remembered in this role, and else nil. It compares all bytes.
func (m *memory) find(chain []*x509.Certificate, role Role) *remembered {
	if m == nil || chain[0] == nil {
		return nil
	}
	places := m.places.Load()
	if places == nil || len(chain[0].Raw) > maxRememberedDER {
		return nil
	}
	sum := maphash.Bytes(m.seed, chain[0].Raw)
	set := m.set(*places, sum)
	for i := range set {
		if r := set[i].Load(); r != nil && r.sum == sum && r.is(chain, role) {
			return r
		}
	}
	return nil
}

func (r *remembered) is(chain []*x509.Certificate, role Role) bool {
	return r.role == role && slices.EqualFunc(r.chain, chain, sameDER)
}

func sameDER(a, b *x509.Certificate) bool { return b != nil && bytes.Equal(a.Raw, b.Raw) }

// validAt reports whether the path of r is valid at t, as crypto/x509 sees it.
func (r *remembered) validAt(t time.Time) bool {
	return !t.Before(r.notBefore) && !t.After(r.peer.notAfter)
}

// keep remembers a chain that was verified against b at the time now.
func (m *memory) keep(chain []*x509.Certificate, role Role, b *Bundle, peer *Peer, now time.Time) {
	if m == nil || !lean(chain, peer.chain) {
		return
	}
	if m.places.Load() == nil {
		fresh := make([]place, m.sets*m.ways)
		m.places.CompareAndSwap(nil, &fresh) // or another goroutine was faster
	}
	r := &remembered{
		sum:       maphash.Bytes(m.seed, chain[0].Raw),
		role:      role,
		chain:     slices.Clone(chain),
		bundle:    weak.Make(b),
		notBefore: latestStart(peer.chain),
		peer:      peer,
	}
	set := m.set(*m.places.Load(), r.sum)
	at := rand.IntN(len(set))
	for i := range set {
		old := set[i].Load()
		if old != nil && old.sum == r.sum && old.is(chain, role) {
			at = i
			break
		}
		if old == nil || old.bundle.Value() == nil || !old.validAt(now) {
			at = i // free or useless
		}
	}
	set[at].Store(r)
}

// lean reports whether chain has only certificates of its path, and keeps little memory alive. A peer
// could present one leaf with different other certificates each time. A certificate keeps the message
// alive that it came in, so the capacity of its bytes counts.
func lean(chain, path []*x509.Certificate) bool {
	size := 0
	for _, c := range path {
		size += len(c.Raw)
	}
	for _, c := range chain {
		size += cap(c.Raw)
		if !slices.ContainsFunc(path, func(p *x509.Certificate) bool { return sameDER(p, c) }) {
			return false
		}
	}
	return size <= maxRememberedDER && len(chain) <= len(path)
}

func latestStart(chain []*x509.Certificate) time.Time {
	start := chain[0].NotBefore
	for _, c := range chain[1:] {
		if c.NotBefore.After(start) {
			start = c.NotBefore
		}
	}
	return start
}
