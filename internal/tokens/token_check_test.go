package tokens_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

var webID = spiffe.MustParseID("spiffe://example.org/web")

// source is a bundle source that gives what it is told to.
type source struct {
	bundle *spiffe.Bundle
	err    error
}

func (s *source) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) { return s.bundle, s.err }

func newBundle(t testing.TB, td string) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain(td), spiffe.BundleContents{}))(t)
}

func TestTokenRemembered(t *testing.T) {
	t.Parallel()
	src := &source{bundle: newBundle(t, "example.org")}
	c := must.Get(token.NewChecker[string](kind, src, nil, nil))(t)
	ends := time.Now().Add(time.Hour)
	c.Keep("one", "value", src.bundle, ends)
	got, ok, e := c.Recall("one")
	require.Nil(t, e)
	assert.True(t, ok)
	assert.Equal(t, "value", got)
	_, ok, _ = c.Recall("other")
	assert.False(t, ok)

	long := strings.Repeat("x", 8<<10)
	c.Keep(long+"x", "value", src.bundle, ends)
	_, ok, _ = c.Recall(long + "x")
	assert.False(t, ok, "too long")
	_, ok, _ = c.Recall("one")
	assert.True(t, ok)
	c.Keep(long, "long", src.bundle, ends)
	got, _, _ = c.Recall(long)
	assert.Equal(t, "long", got)

	// What the source gives now has the last word.
	src.bundle = newBundle(t, "example.org")
	_, ok, e = c.Recall(long)
	assert.False(t, ok, "another bundle")
	assert.Nil(t, e)
	for _, failing := range []*source{{err: errors.New("down")}, {}, {bundle: newBundle(t, "other.test")}, {err: spiffe.ErrUnknownTrustDomain}} {
		*src = *failing
		got, ok, e = c.Recall(long)
		assert.False(t, ok)
		require.NotNil(t, e)
		assert.Equal(t, "long", got, "what the error is about")
	}
}

// In a memory that is full, a new token takes the place of the token that ends first.
func TestTokenMemoryReplaces(t *testing.T) {
	t.Parallel()
	m, trust := token.NewMemory[int, int](4), new(int) // one set
	for i, left := range []time.Duration{10, 11, 12, 13, 9, 20} {
		m.Keep(string(rune('a'+i)), i, trust, time.Now().Add(left*time.Minute))
	}
	for text, want := range map[string]bool{"a": false, "b": true, "c": true, "d": true, "e": false, "f": true} {
		_, _, ok := m.Find(text)
		assert.Equal(t, want, ok, text)
	}
}

func TestTokenError(t *testing.T) {
	t.Parallel()
	down := errors.New("spiffe: down")
	e := &token.Error{Kind: kind, Reason: token.BundleSource, ID: webID, Rule: "R", Err: down}
	require.EqualError(t, e, `test: token of "spiffe://example.org/web": bundle source: down`)
	require.ErrorIs(t, e, down)
	require.ErrorIs(t, e, token.BundleSource)
	require.ErrorIs(t, e, token.ErrUnavailable)
	_, again := e.Retryable()
	assert.True(t, again)
	e = kind.Refuse(token.Expired, "R", "%s", strings.Repeat("é", 2000))
	require.NotErrorIs(t, e, token.ErrUnavailable)
	require.ErrorIs(t, e, token.Expired)
	assert.Less(t, len(e.Error()), 600)
	assert.True(t, strings.HasSuffix(e.Error(), "é…"))
}
