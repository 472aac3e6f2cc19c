package spiffe

import "github.com/svidkit/svidkit/internal/tokens/verifycache"

// Remember makes v remember at most n chains.
func Remember(v *Verifier, n int) { v.memory = verifycache.New[memoryKey, *remembered](n) }
