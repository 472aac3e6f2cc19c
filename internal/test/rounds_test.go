package test_test

import (
	"flag"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
)

var _ = flag.Bool("long", false, "is set by the test")

// What .ci/run and the long run before a release leave out unnoticed is proven nowhere.
func TestRounds(t *testing.T) {
	for _, c := range []struct {
		rounds, long string
		of           int
		slow         bool
	}{
		{"", "false", 3, false}, {"0", "false", 3, false}, {"x", "false", 3, false}, {"1", "false", 3, true}, {"4", "false", 12, true},
		{"", "true", 12, true}, {"1", "true", 12, true}, {"8", "true", 24, true},
	} {
		t.Run(c.rounds+" "+c.long, func(t *testing.T) {
			t.Setenv("SVIDKIT_ROUNDS", c.rounds)
			before := flag.Lookup("long").Value.String()
			require.NoError(t, flag.Set("long", c.long))
			t.Cleanup(func() { _ = flag.Set("long", before) })
			assert.Equal(t, c.of, rounds.Of(3))
			ran := false
			t.Run("slow", func(t *testing.T) {
				rounds.Slow(t)
				ran = true
			})
			assert.Equal(t, c.slow, ran)
		})
	}
}
