package testtree

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Section compares text with what is between the marks begin and end in a page, or with update writes it there.
func Section(t testing.TB, update bool, page, begin, end, text string) {
	t.Helper()
	got, err := os.ReadFile(page)
	require.NoError(t, err)
	head, rest, ok := strings.Cut(string(got), begin)
	require.True(t, ok, "%s lacks %q", page, begin)
	_, tail, ok := strings.Cut(rest, end)
	require.True(t, ok, "%s lacks %q after %q", page, end, begin)
	want := head + begin + text + end + tail
	if update {
		require.NoError(t, os.WriteFile(page, []byte(want), 0o644))
		return
	}
	assert.Equal(t, want, string(got), "%s is stale: run this test with -update", page)
}
