package fileset

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/diskcrash"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// history has a directory written three times, of which the second fails when all is written and nothing of it durable, and is
// repeated, and returns what was done.
func history(t *testing.T, plain bool) []diskcrash.Write {
	dir, j := t.TempDir(), &diskcrash.Journal{}
	f := must.Get(openOn(j, dir, options(plain)))(t)
	defer f.Close()
	for version := 1; version <= 3; version++ {
		if version == 2 {
			renamed := false
			j.Fail = func(w diskcrash.Write) bool {
				renamed = renamed || w.Op == "rename"
				return renamed && w.Op == "syncdir"
			}
			require.ErrorIs(t, must.Err(f.Write(set(version))), diskcrash.ErrFault)
			j.Fail = nil
		}
		must.Get(f.Write(set(version)))(t)
		require.Equal(t, slices.Repeat([]string{fmt.Sprint(version)}, 3), versions(t, dir))
		j.Saved(version)
	}
	return j.Writes
}

// survivor checks a directory after a crash: its files are of one version, the last that was reported as written or the one
// after it, once the directory was opened, and with links before that; and it can be written.
func survivor(t *testing.T, plain bool) func(dir string, saved int) error {
	return func(dir string, saved int) error {
		look := func() error {
			have := []string{}
			for _, name := range names {
				switch data, err := os.ReadFile(filepath.Join(dir, name)); {
				case err == nil:
					have = append(have, string(data))
				case saved > 0 || !errors.Is(err, fs.ErrNotExist):
					return err
				}
			}
			slices.Sort(have)
			have = slices.Compact(have)
			if saved == 0 && len(have) == 0 || len(have) == 1 && (have[0] == fmt.Sprint(saved) || have[0] == fmt.Sprint(saved+1)) {
				return nil
			}
			return fmt.Errorf("the files are of the versions %q", have)
		}
		if !plain {
			if err := look(); err != nil {
				return err
			}
		}
		f, err := openOn(&diskcrash.Journal{}, dir, options(plain))
		if err != nil {
			return err
		}
		defer f.Close()
		if err := look(); err != nil {
			return fmt.Errorf("after it was opened: %w", err)
		}
		must.Get(f.Write(set(100)))(t)
		require.Equal(t, []string{"100", "100", "100"}, versions(t, dir))
		return nil
	}
}

// Whatever a crash of the machine leaves of what was not made durable, the files are those of one version, and the newest
// once Write has returned nil, also where an earlier Write of the same files has failed.
func TestSurvivesCrashes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("nothing is made durable there but contents")
	}
	for _, plain := range []bool{false, true} {
		writes := history(t, plain)
		require.NoError(t, diskcrash.Survives(t, writes, max(1, 16/rounds.Of(1)/rounds.Of(1)), survivor(t, plain)), "plain %v", plain)
		// That is noticed which leaves out what makes something durable.
		for _, op := range []string{"sync", "syncdir"} {
			without := slices.DeleteFunc(slices.Clone(writes), func(w diskcrash.Write) bool { return w.Op == op })
			require.Error(t, diskcrash.Survives(t, without, 1, survivor(t, plain)), "without %s, plain %v", op, plain)
		}
	}
}

// Replace leaves the old file or the new one, and the new one once it has returned.
func TestReplaceSurvivesCrashes(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("nothing is made durable there but contents")
	}
	root := must.Get(os.OpenRoot(t.TempDir()))(t)
	defer root.Close()
	j := &diskcrash.Journal{}
	for version := 1; version <= 2; version++ {
		require.NoError(t, replace(j, root, "file", File{Data: fmt.Append(nil, version), Mode: 0o600}))
		j.Saved(version)
	}
	require.NoError(t, diskcrash.Survives(t, j.Writes, 1, func(dir string, saved int) error {
		data, err := os.ReadFile(filepath.Join(dir, "file"))
		if saved == 0 && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if have := string(data); err != nil || have != fmt.Sprint(saved) && have != fmt.Sprint(saved+1) {
			return fmt.Errorf("the file has %q (%w)", have, err)
		}
		return nil
	}))
}

// The error of each sync is that of the write: what may not be durable is not said to be written.
func TestEachSyncIsHeard(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("nothing is made durable there but contents")
	}
	failing := func(j *diskcrash.Journal, nth int) (failed func() bool) {
		n := 0
		j.Fail = func(w diskcrash.Write) bool {
			if w.Op == "sync" || w.Op == "syncdir" {
				n++
				return n == nth+1
			}
			return false
		}
		return func() bool { return n > nth }
	}
	for _, plain := range []bool{false, true} {
		for nth := 0; ; nth++ {
			dir, j := t.TempDir(), &diskcrash.Journal{}
			f := must.Get(openOn(j, dir, options(plain)))(t)
			must.Get(f.Write(set(1)))(t)
			failed := failing(j, nth)
			_, err := f.Write(set(2))
			require.NoError(t, f.Close())
			if !failed() {
				require.Greater(t, nth, 4)
				break
			}
			require.ErrorIs(t, err, diskcrash.ErrFault, "the sync %d, plain %v", nth, plain)
		}
	}
	for nth := 0; ; nth++ {
		root := must.Get(os.OpenRoot(t.TempDir()))(t)
		j := &diskcrash.Journal{}
		failed := failing(j, nth)
		err := replace(j, root, "file", File{Data: []byte("x"), Mode: 0o600})
		require.NoError(t, root.Close())
		if !failed() {
			require.Equal(t, 2, nth)
			break
		}
		require.ErrorIs(t, err, diskcrash.ErrFault, "the sync %d of Replace", nth)
	}
}
