package ca

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Every folder that is made on the way to a store is there after a crash of the machine, too.
func TestMakeDir(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	var synced []string
	sync := func(path string) error {
		rel, err := filepath.Rel(base, path)
		synced = append(synced, rel)
		return err
	}
	require.NoError(t, makeDir(filepath.Join(base, "a", "b", "ca"), sync))
	assert.Equal(t, []string{".", "a", filepath.Join("a", "b")}, synced, "where each has its name")
	info, err := os.Stat(filepath.Join(base, "a", "b", "ca"))
	require.NoError(t, err)
	assert.True(t, info.IsDir())

	synced = nil
	require.NoError(t, makeDir(filepath.Join(base, "a", "b", "ca"), sync), "another process was faster")
	assert.Equal(t, []string{filepath.Join("a", "b")}, synced)
	broken := errors.New("broken")
	require.ErrorIs(t, makeDir(filepath.Join(base, "c", "ca"), func(string) error { return broken }), broken)
	require.NoError(t, os.WriteFile(filepath.Join(base, "file"), nil, 0o600))
	require.Error(t, makeDir(filepath.Join(base, "file", "ca"), sync))
}
