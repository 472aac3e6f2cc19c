package witsvid

import (
	"hash/maphash"
	"strings"
	"sync/atomic"
	"weak"

	"github.com/svidkit/svidkit/spiffe"
)

// memory remembers tokens whose signature was verified, each in the one slot that its hash names. It
// decides nothing: times and the policy are looked at each time, and a proof is asked for each time. A
// nil memory is empty.
type memory struct {
	seed  maphash.Seed
	slots []atomic.Pointer[memo]
}

// memo is a token that was verified with a bundle. It is worth nothing with any other: a bundle never
// changes, so its address is its generation.
type memo struct {
	token  string
	parsed *parsed
	bundle weak.Pointer[spiffe.Bundle]
}

// longestRemembered is how long a token may be to be remembered, in bytes.
const longestRemembered = 4 << 10

func newMemory(count int) *memory {
	return &memory{seed: maphash.MakeSeed(), slots: make([]atomic.Pointer[memo], count)}
}

func (m *memory) slot(token string) *atomic.Pointer[memo] {
	return &m.slots[maphash.String(m.seed, token)%uint64(len(m.slots))]
}

// find returns what is remembered of a token, or nil.
func (m *memory) find(token string) *memo {
	if m == nil || len(token) > longestRemembered {
		return nil
	}
	if e := m.slot(token).Load(); e != nil && e.token == token {
		return e
	}
	return nil
}

// keep remembers a token that was verified with b.
func (m *memory) keep(token string, p *parsed, b *spiffe.Bundle) {
	if m == nil || len(token) > longestRemembered {
		return
	}
	slim := *p
	slim.input, slim.sig = nil, nil // verified
	token = strings.Clone(token)    // which may be a small part of something large
	m.slot(token).Store(&memo{token: token, parsed: &slim, bundle: weak.Make(b)})
}
