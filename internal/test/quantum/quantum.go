// Package quantum is for tests of ML-DSA.
package quantum

import (
	"testing"

	"github.com/svidkit/svidkit/internal/mldsa"
)

// Need skips a test in a program without ML-DSA: one built with Go 1.26, or in FIPS 140-3 mode with an older module.
func Need(t testing.TB) {
	t.Helper()
	if !mldsa.Available() {
		t.Skip(mldsa.ErrMissing)
	}
}
