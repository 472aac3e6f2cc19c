package spiffe

// Remembered returns the chains that v remembers, the useless ones too, and the DER that they hold.
func Remembered(v *Verifier) (chains, der int) {
	if v.memory == nil {
		return 0, 0
	}
	for r := range v.memory.All() {
		chains++
		for _, c := range r.chain {
			der += cap(c.Raw)
		}
	}
	return chains, der
}
