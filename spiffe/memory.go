package spiffe

import (
	"bytes"
	"crypto/x509"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"time"
	"weak"

	"github.com/svidkit/svidkit/internal/tokens/verifycache"
)

const (
	defaultRemembered = 1024
	maxRemembered     = 1 << 20
	maxRememberedDER  = 32 << 10 // bytes of DER that one chain may keep alive
)

// remembered is a chain that was verified. It never changes. It was valid for one bundle and in one span of
// time, and the Verifier checks both.
type remembered struct {
	role      Role
	chain     []*x509.Certificate  // as it was presented
	bundle    weak.Pointer[Bundle] // weak, so that remembered chains keep no old bundle alive
	notBefore time.Time            // the latest on the path
	peer      *Peer
}

// find returns the chain if it is remembered in this role, and else nil. It compares all bytes.
func (v *Verifier) find(chain []*x509.Certificate, role Role) *remembered {
	if v.memory == nil || chain[0] == nil || len(chain[0].Raw) > maxRememberedDER {
		return nil
	}
	hash := maphash.Bytes(v.memory.Seed, chain[0].Raw)
	return v.memory.Find(hash, func(r *remembered) bool { return r.is(chain, role) })
}

func (r *remembered) is(chain []*x509.Certificate, role Role) bool {
	return r.role == role && slices.EqualFunc(r.chain, chain, sameDER)
}

func sameDER(a, b *x509.Certificate) bool { return b != nil && bytes.Equal(a.Raw, b.Raw) }

// validAt reports whether the path of r is valid at t, as crypto/x509 sees it.
func (r *remembered) validAt(t time.Time) bool {
	return !t.Before(r.notBefore) && !t.After(r.peer.notAfter)
}

// keep remembers a chain that was verified against b at the time now. It replaces the same chain, a chain
// that is useless now, or a random one.
func (v *Verifier) keep(chain []*x509.Certificate, role Role, b *Bundle, peer *Peer, now time.Time) {
	if v.memory == nil || !lean(chain, peer.chain) {
		return
	}
	start := slices.MaxFunc(peer.chain, func(a, b *x509.Certificate) int { return a.NotBefore.Compare(b.NotBefore) })
	r := &remembered{role: role, chain: slices.Clone(chain), bundle: weak.Make(b), notBefore: start.NotBefore, peer: peer}
	v.memory.Keep(maphash.Bytes(v.memory.Seed, chain[0].Raw), r, func(old *remembered) int64 {
		switch {
		case old.is(chain, role):
			return verifycache.Older
		case old.bundle.Value() == nil || !old.validAt(now):
			return verifycache.Older + 1
		}
		return rand.Int64()
	})
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
