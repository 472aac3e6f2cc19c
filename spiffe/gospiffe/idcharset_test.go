//go:build spiffeid_charset_backcompat

package gospiffe_test

import (
	"errors"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/gospiffe"
)

// TestIDsCharset needs the build tag with which go-spiffe takes characters that the standard does not allow.
func TestIDsCharset(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"spiffe://example.org/a~b", "spiffe://example.org/a:b", "spiffe://ex!ample/a", "spiffe://example.org/(a)"} {
		_, err := gospiffe.FromID(spiffeid.RequireFromString(s))
		_, ok := errors.AsType[*spiffe.ParseError](err)
		assert.True(t, ok, "%s: %v", s, err)
	}
	_, err := gospiffe.FromTrustDomain(spiffeid.RequireTrustDomainFromString("ex~ample"))
	require.Error(t, err)
}
