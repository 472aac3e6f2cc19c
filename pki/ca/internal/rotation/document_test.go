package rotation

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The document names a private key at a custodian from before it is made until it has been destroyed.
func TestAccount(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	before := &Document{Authority: "a"}
	name, had := before.Stake("root x", now, time.Minute)
	assert.False(t, had)
	other, had := before.Stake("root x", now.Add(59*time.Second), time.Minute)
	assert.False(t, had)
	assert.NotEqual(t, name, other, "the first attempt may be under way")
	again, had := before.Stake("root x", now.Add(time.Minute), time.Minute)
	assert.True(t, had)
	assert.Equal(t, name, again)

	after := before.Clone()
	after.Keys[Root] = []Key{{ID: "1", Name: "unknown"}}
	require.ErrorContains(t, after.Account(before, now), "unknown is not for a next key")
	after.Keys[Root] = []Key{{ID: "1", Name: name}}
	require.NoError(t, after.Account(before, now))
	assert.Len(t, after.Loose, 1)
	assert.True(t, after.Names(name))

	last := after.Clone()
	last.Keys[Root] = nil
	require.NoError(t, last.Account(after, now))
	gone := Loose{Name: name, Since: now}
	assert.Contains(t, last.Loose, gone)
	back := last.Clone()
	back.Keys[Root] = after.Keys[Root]
	require.Error(t, back.Account(last, now), "it may be destroyed by now")

	staked := last.Loose[0]
	assert.True(t, last.Discard(staked, now))
	assert.Contains(t, last.Loose, Loose{Name: other, Since: now}, "it is destroyed first")
	assert.False(t, last.Discard(staked, now))
	assert.True(t, last.Names(other))
	assert.True(t, last.Discard(gone, now))
	assert.False(t, last.Names(name))
}
