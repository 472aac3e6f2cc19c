package caconfig

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

func TestParseJWTPolicy(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{"": false, "third-party-jwt": false, "first-party-jwt": true} {
		assert.Equal(t, want, must.Get(parseJWTPolicy(text))(t), text)
	}
	for _, text := range []string{"none", "first-party-jwt ", "FIRST-PARTY-JWT", "third-party"} {
		_, err := parseJWTPolicy(text)
		require.ErrorContains(t, err, "neither third-party-jwt nor first-party-jwt")
	}
}
