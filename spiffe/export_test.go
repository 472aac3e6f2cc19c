package spiffe

// Remembered returns the chains that v remembers, the useless ones too, and the DER that they hold.
func Remembered(v *Verifier) (chains, der int) {
	if v.memory == nil || v.memory.places.Load() == nil {
		return 0, 0
	}
	places := *v.memory.places.Load()
	for i := range places {
		if r := places[i].Load(); r != nil {
			chains++
			for _, c := range r.chain {
				der += cap(c.Raw)
			}
		}
	}
	return chains, der
}
