package spiffe

import "github.com/svidkit/svidkit/internal/tokens/verifycache"

// Remember makes v remember at most n chains.
func Remember(v *Verifier, n int) { v.memory = verifycache.New[memoryKey, *remembered](n) }

// Remembered returns the chains that v remembers, the useless ones too, and the DER that they hold.
func Remembered(v *Verifier) (chains, der int) {
	for r := range v.memory.All() {
		chains++
		for _, c := range r.chain {
			der += cap(c.Raw)
		}
	}
	return chains, der
}
