package ca_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/diskcrash"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
)

// record is what the save of that number writes.
func savedRecord(version string, save int) ca.Record {
	return ca.NewRecord(version, map[string][]byte{"key": fmt.Appendf(nil, "secret %d", save), "svidkit-state.json": fmt.Appendf(nil, `{"authority":"a","revision":%d}`, save)})
}

const lastSave = 3

// history has a store make some saves, one of which turns back, and returns what it did to its directory.
func saveHistory(t testing.TB) []diskcrash.Write {
	dir := filepath.Join(t.TempDir(), "ca")
	j := &diskcrash.Journal{}
	inner := must.Get(ca.NewDirStore(dir))(t)
	s := ca.OnDisk(inner, j)
	version := ""
	for save := 1; save <= lastSave; save++ {
		if save == 2 {
			ctx, cancel := context.WithCancel(t.Context())
			j.Fail = func(w diskcrash.Write) bool {
				if w.Op == "sync" && w.Name == "tmp-record.json" {
					cancel()
				}
				return false
			}
			_, err := s.Save(ctx, savedRecord(version, 99))
			require.ErrorIs(t, err, context.Canceled)
			j.Fail = nil
		}
		version = must.Get(s.Save(t.Context(), savedRecord(version, save)))(t)
		j.Saved(save)
	}
	return j.Writes
}

// check is goesOn for [diskcrash.Survives].
func check(t testing.TB) func(dir string, saved int) error {
	return func(dir string, saved int) error { return goesOn(t, dir, saved) }
}

// goesOn checks a directory after a crash: its record is the last that a save has returned for, or the one after that, and an
// authority can go on with it.
func goesOn(t testing.TB, dir string, saved int) error {
	inner, err := ca.NewDirStore(dir)
	if err != nil {
		return err
	}
	s := ca.OnDisk(inner, &diskcrash.Journal{}) // which does not wait for a disk
	have := -1
	r, err := s.Load(t.Context())
	switch {
	case errors.Is(err, ca.ErrNoRecord):
		have = 0
	case err != nil:
		return err
	default:
		for _, save := range []int{saved, saved + 1} {
			if maps.EqualFunc(r.Data(), savedRecord("", save).Data(), bytes.Equal) {
				have = save
			}
		}
	}
	if have != saved && have != saved+1 {
		return fmt.Errorf("it has %q (%v)", r.Data(), err)
	}
	for range 2 {
		version, err := s.Save(t.Context(), savedRecord(r.Version, 100))
		if err != nil {
			return fmt.Errorf("the save after it: %w", err)
		}
		if r, err = s.Load(t.Context()); err != nil || r.Version != version || string(r.Data()["key"]) != "secret 100" {
			return fmt.Errorf("after the save after it there is %q (%w)", r.Data(), err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		return fmt.Errorf("record.json and lock are to be left, there are %v (%w)", entries, err)
	}
	return nil
}

// Whatever a crash of the machine leaves of what was not made durable, the store has the old record or the new one, and
// the new one once the save has returned.
func TestDirStoreSurvivesCrashes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	step := max(1, 4/rounds.Of(1))
	if *long {
		step = 1
	}
	require.NoError(t, diskcrash.Survives(t, saveHistory(t), step, check(t)))
}

// The test before notices when a store leaves out one of its kinds of fsync, or commits before them.
func TestDirStoreCrashesAreNoticed(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	onlyUnix(t)
	writes := saveHistory(t)
	for _, op := range []string{"sync", "syncdir"} {
		without := slices.DeleteFunc(slices.Clone(writes), func(w diskcrash.Write) bool { return w.Op == op })
		require.Error(t, diskcrash.Survives(t, without, 1, check(t)), op)
	}
	early := slices.Clone(writes)
	i := slices.IndexFunc(early, func(w diskcrash.Write) bool { return w.Op == "rename" })
	require.Equal(t, "sync", early[i-1].Op)
	early[i-1], early[i] = early[i], early[i-1]
	early[i].Name = "record.json"
	require.Error(t, diskcrash.Survives(t, early, 1, check(t)), "commit first")
}

// A disk that fails at any one write leaves the old record or the new one, and the store goes on when the disk does.
func TestDirStoreDiskFails(t *testing.T) {
	t.Parallel()
	for n := 0; ; n++ {
		dir := filepath.Join(t.TempDir(), "ca")
		inner := must.Get(ca.NewDirStore(dir))(t)
		j := &diskcrash.Journal{}
		s := ca.OnDisk(inner, j)
		first := must.Get(s.Save(t.Context(), savedRecord("", 1)))(t)
		left := n
		j.Fail = func(diskcrash.Write) bool { left--; return left == -1 }
		_, err := s.Save(t.Context(), savedRecord(first, 2))
		committed := err == nil
		if left >= 0 {
			require.NoError(t, err)
			require.Greater(t, n, 4, "it writes more often")
			return
		}
		r, lerr := s.Load(t.Context())
		require.NoError(t, lerr, "write %d failed: %v", n, err)
		if committed || r.Version != first {
			require.Equal(t, savedRecord("", 2).Data(), r.Data())
		} else {
			require.ErrorIs(t, err, diskcrash.ErrFault)
			require.Equal(t, savedRecord("", 1).Data(), r.Data())
		}
		require.NoError(t, goesOn(t, dir, int(r.Data()["key"][len("secret ")]-'0')), "write %d", n)
	}
}
