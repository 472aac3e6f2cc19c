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
	maxRemembered = 1024 // chains

	// maxRememberedDER is in bytes of DER that one chain may keep alive. Three certificates of ML-DSA-65 and their
	// authority count 61 KiB and take 24, as lean counts a message once for each certificate in it.
	maxRememberedDER = 64 << 10
)

// memoryKey selects the place of a chain in the memory: by a hash of its leaf with a random seed, and by the role.
type memoryKey struct {
	leaf uint64
	role Role
}

// remembered is a chain that was verified. It never changes. It holds for one bundle and one span of time; the
// Verifier checks both.
type remembered struct {
	chain     []*x509.Certificate  // as it was presented
	bundle    weak.Pointer[Bundle] // weak, so that remembered chains keep no old bundle alive
	notBefore time.Time            // the latest on the path
	peer      *Peer
}

// recall returns the Peer of a chain that is remembered in this role, byte for byte, if it still holds: the source
// returns the same bundle, and the path is valid now.
func (v *Verifier) recall(chain []*x509.Certificate, role Role) (*Peer, bool) {
	if chain[0] == nil || len(chain[0].Raw) > maxRememberedDER {
		return nil, false
	}
	r, ok := v.memory.Find(v.key(chain, role))
	if !ok || !slices.EqualFunc(r.chain, chain, sameDER) {
		return nil, false
	}
	b, err := v.bundle(r.peer.id.TrustDomain())
	if err != nil || r.bundle.Value() != b || !r.validAt(v.now()) {
		return nil, false
	}
	return r.peer, true
}

func (v *Verifier) key(chain []*x509.Certificate, role Role) memoryKey {
	return memoryKey{maphash.Bytes(v.seed, chain[0].Raw), role}
}

func sameDER(a, b *x509.Certificate) bool { return b != nil && bytes.Equal(a.Raw, b.Raw) }

// validAt reports whether the path of r is valid at t, as crypto/x509 sees it.
func (r *remembered) validAt(t time.Time) bool {
	return !t.Before(r.notBefore) && !t.After(r.peer.notAfter)
}

// keep remembers a chain that was verified against b at the time now. It replaces a chain of the same leaf, a chain
// that is useless now, or a random one.
func (v *Verifier) keep(chain []*x509.Certificate, role Role, b *Bundle, peer *Peer, now time.Time) {
	if !lean(chain, peer.chain) {
		return
	}
	start := slices.MaxFunc(peer.chain, func(a, b *x509.Certificate) int { return a.NotBefore.Compare(b.NotBefore) })
	r := &remembered{chain: slices.Clone(chain), bundle: weak.Make(b), notBefore: start.NotBefore, peer: peer}
	v.memory.Keep(v.key(chain, role), r, func(old *remembered) int64 {
		if old.bundle.Value() == nil || !old.validAt(now) {
			return verifycache.Useless
		}
		return rand.Int64()
	})
}

// lean reports whether chain has only certificates of its path and keeps little memory alive. Otherwise a peer could
// present one leaf with different extra certificates each time. A certificate keeps alive the message that it
// arrived in, so the capacity of its bytes counts.
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
