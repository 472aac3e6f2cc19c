package federation_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Names stay inside the directory and apart, whatever they are.
func TestFileNames(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, name := range []string{
		"example.org", ".", "..", "...", "con", "nul", "-", "_", "a.json", "a", "td-a.json", "aux", "lpt1",
	} {
		file := federation.FileName(spiffe.MustParseTrustDomain(name))
		assert.Equal(t, file, filepath.Base(file))
		assert.True(t, filepath.IsLocal(file), file)
		assert.True(t, strings.HasPrefix(file, "td-") && strings.HasSuffix(file, ".json"), file)
		assert.Empty(t, seen[file], name)
		seen[file] = name
	}
	assert.Equal(t, "td-example.org.json", federation.FileName(spiffe.MustParseTrustDomain("example.org")))
}

// A restart goes on with the last good bundle, whatever the endpoint does.
func TestStore(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-10", "FED-67", "FED-18")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		dir := filepath.Join(t.TempDir(), "a", "store")
		file := filepath.Join(dir, "td-partner.test.json")
		w.cfg.Dir = dir
		w.cfg.Relationships[0].Profile = federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/endpoint"), Initial: w.ca.Bundle()}
		w.site.present(svidCert(w.ca, "/endpoint"))
		w.ca.Rotate()
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(7)), 0)))
		m := newManager(t, w.cfg)
		_, err := os.Stat(dir)
		require.ErrorIs(t, err, os.ErrNotExist, "New does nothing")
		stop := running(t, m)
		synctest.Wait()
		first := inForce(t, m, partner)
		doc := must.Get(os.ReadFile(file))(t)
		assert.Equal(t, string(documentOf(t, first)), string(doc))
		if runtime.GOOS != "windows" {
			for name, mode := range map[string]os.FileMode{dir: 0o700, file: 0o600} {
				info := must.Get(os.Stat(name))(t)
				assert.Equal(t, mode, info.Mode().Perm(), name)
			}
		}
		entries := must.Get(os.ReadDir(dir))(t)
		assert.Len(t, entries, 1, "no drafts are left")
		stop()

		// The endpoint is down.
		w.site.serve(answer(500, nil))
		m = newManager(t, w.cfg)
		stop = running(t, m)
		synctest.Wait()
		assert.True(t, first.Equal(inForce(t, m, partner)))
		s := statusOf(t, m, partner)
		assertStale(t, s)
		assert.Zero(t, s.LastSuccess)
		assert.True(t, trusts(t, m, w.ca))
		stop()

		// It is back with a root that the configured bundle does not know, but the stored one does. Its number
		// has gone back, which a restart must not hide.
		w.ca.DropOldRoots()
		w.site.present(svidCert(w.ca, "/endpoint"))
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(6)), 0)))
		m = newManager(t, w.cfg)
		stop = running(t, m)
		synctest.Wait()
		requireCode(t, statusOf(t, m, partner).Err, outOfSequence)
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(8)), 0)))
		next(t, m, partner)
		assert.True(t, statusOf(t, m, partner).Fresh)
		second := inForce(t, m, partner)
		require.NoError(t, os.Rename(file, file+".moved"))
		next(t, m, partner)
		_, err = os.Stat(file)
		require.ErrorIs(t, err, os.ErrNotExist, "what has not changed is not written again")
		require.NoError(t, os.Rename(file+".moved", file))
		stop()

		// What an operator sets is stored, too, also while Run does not run.
		m = newManager(t, w.cfg)
		require.NoError(t, m.Set(first))
		doc = must.Get(os.ReadFile(file))(t)
		assert.Equal(t, string(documentOf(t, first)), string(doc))
		require.NoError(t, m.Set(second))

		// A relationship that is added later is loaded when it is.
		later := w.cfg
		later.Relationships = nil
		m = newManager(t, later)
		stop = running(t, m)
		synctest.Wait()
		w.site.serve(answer(500, nil))
		require.NoError(t, m.Add(w.cfg.Relationships[0]))
		synctest.Wait()
		assert.True(t, second.Equal(inForce(t, m, partner)))

		// The end of a relationship is the end of its file.
		require.NoError(t, m.Remove(partner))
		_, err = os.Stat(file)
		require.ErrorIs(t, err, os.ErrNotExist)
		require.NoError(t, m.Remove(partner))
		stop()
		require.NoError(t, os.RemoveAll(dir))
		m = newManager(t, w.cfg)
		require.NoError(t, m.Remove(partner), "without a directory there is nothing to delete")
	})
}

// Files that cannot be used are ignored, with a warning, and replaced by the next good bundle.
func TestStoreBroken(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-10")
	for name, damage := range map[string]func(file string) error{
		"garbage":     func(file string) error { return os.WriteFile(file, []byte("garbage"), 0o600) },
		"empty":       func(file string) error { return os.WriteFile(file, nil, 0o600) },
		"huge":        func(file string) error { return os.WriteFile(file, make([]byte, jws.MaxSetSize*2), 0o600) },
		"a directory": func(file string) error { return os.Mkdir(file, 0o700) },
		"a link":      func(file string) error { return os.Symlink(filepath.Join(filepath.Dir(file), "elsewhere"), file) },
		"for others": func(file string) error {
			doc := documentOf(t, spiffetest.NewCA(t, "partner.test").Bundle())
			return errors.Join(os.WriteFile(file, doc, 0o600), os.Chmod(file, 0o620))
		},
		"a draft":      func(file string) error { return os.WriteFile(file+".new", []byte("{"), 0o600) },
		"another name": func(file string) error { return os.WriteFile(file+".json", []byte("{"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "for others" && runtime.GOOS == "windows" {
				t.Skip("the bits say nothing there")
			}
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.cfg.Dir = filepath.Join(t.TempDir(), "store")
				file := filepath.Join(w.cfg.Dir, "td-partner.test.json")
				require.NoError(t, os.Mkdir(w.cfg.Dir, 0o700))
				require.NoError(t, os.WriteFile(filepath.Join(w.cfg.Dir, "elsewhere"), documentOf(t, spiffetest.NewCA(t, "partner.test").Bundle()), 0o600))
				require.NoError(t, damage(file))
				w.site.serve(answer(500, nil))
				m := newManager(t, w.cfg)
				running(t, m)
				synctest.Wait()
				_, err := m.Bundle(partner)
				require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
				warned := false
				for _, line := range w.diary.read() {
					warned = warned || line["msg"] == "federation: stored bundle ignored" && line["level"] == "WARN"
				}
				assert.Equal(t, name != "a draft" && name != "another name", warned)

				w.site.serve(serving(t, w.ca.Bundle()))
				next(t, m, partner)
				assert.True(t, trusts(t, m, w.ca), "a failing disk does not keep the bundle out of force")
				doc, err := os.ReadFile(file)
				if name == "a directory" {
					lines := w.diary.read()
					assert.Equal(t, "federation: bundle not stored", lines[len(lines)-1]["msg"])
					require.NoError(t, os.Remove(file))
					next(t, m, partner)
					doc, err = os.ReadFile(file)
				}
				require.NoError(t, err)
				assert.Equal(t, string(documentOf(t, w.ca.Bundle())), string(doc))
			})
		})
	}
}

// hooked is a diary that does something at some messages.
type hooked struct {
	*diary
	at map[string]func()
}

func (h hooked) Handle(ctx context.Context, r slog.Record) error {
	err := h.diary.Handle(ctx, r)
	if f := h.at[r.Message]; f != nil {
		f()
	}
	return err
}

// Only bundles of present relationships are stored, although Add and Remove come between a decision and the
// write.
func TestStoreMeanwhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.cfg.Dir = filepath.Join(t.TempDir(), "store")
		file := filepath.Join(w.cfg.Dir, "td-partner.test.json")
		at := map[string]func(){}
		w.cfg.Logger = slog.New(hooked{w.diary, at})
		m := newManager(t, w.cfg)

		// It ends when its bundle was fetched and not stored yet.
		at["federation: bundle fetched"] = func() {
			delete(at, "federation: bundle fetched")
			assert.NoError(t, m.Remove(partner))
		}
		running(t, m)
		synctest.Wait()
		assert.NoFileExists(t, file)
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)

		// It begins again before the end of the last one has come to the disk.
		require.NoError(t, m.Add(w.cfg.Relationships[0]))
		synctest.Wait()
		assert.FileExists(t, file)
		at["federation: relationship ended"] = func() {
			delete(at, "federation: relationship ended")
			assert.NoError(t, m.Add(w.cfg.Relationships[0]))
			assert.NoError(t, m.Set(w.ca.Bundle()))
		}
		require.NoError(t, m.Remove(partner))
		assert.FileExists(t, file)
		inForce(t, m, partner)
	})
}

// A directory that others can write to decides nothing.
func TestStoreDirectory(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-22")
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.ErrorContains(t, newManager(t, federation.Config{Dir: file}).Run(t.Context()), "federation: run: Config.Dir: ")
	require.ErrorContains(t, newManager(t, federation.Config{Dir: filepath.Join(file, "x")}).Run(t.Context()), "federation: run: Config.Dir: ")
	if runtime.GOOS == "windows" {
		t.Skip("the bits say nothing there")
	}
	// Nothing in it is believed: the files are in a directory of the Manager's own.
	open := filepath.Join(dir, "open")
	require.NoError(t, os.Mkdir(open, 0o700))
	require.NoError(t, os.Chmod(open, 0o777))
	w := newWorld(t)
	require.NoError(t, os.WriteFile(filepath.Join(open, "td-partner.test.json"), documentOf(t, spiffetest.NewCA(t, "partner.test").Bundle()), 0o600))
	w.cfg.Dir = open
	w.site.serve(answer(500, nil))
	m := newManager(t, w.cfg)
	running(t, m)
	require.Eventually(t, func() bool { return len(w.dialled()) > 0 }, time.Minute, time.Millisecond, "Run has looked at the directory")
	require.NoError(t, m.Set(w.ca.Bundle()))
	require.NoError(t, m.Set(spiffetest.NewCA(t, "partner.test").Bundle()))
	require.NoError(t, m.Set(w.ca.Bundle()))
	own := filepath.Join(open, "svidkit-bundles")
	info := must.Get(os.Stat(own))(t)
	assert.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	doc := must.Get(os.ReadFile(filepath.Join(own, "td-partner.test.json")))(t)
	assert.Equal(t, string(documentOf(t, w.ca.Bundle())), string(doc))
	warnings := 0
	for _, line := range w.diary.read() {
		require.NotEqual(t, "federation: stored bundle loaded", line["msg"])
		require.NotEqual(t, "federation: bundle not stored", line["msg"])
		if line["level"] == "WARN" && strings.Contains(line["msg"], "Config.Dir") {
			warnings++
			assert.Contains(t, line["err"], "chmod o-w")
		}
	}
	assert.Equal(t, 1, warnings)

	require.NoError(t, os.Chmod(own, 0o777))
	require.ErrorIs(t, newManager(t, w.cfg).Run(t.Context()), private.ErrUnsafe)
	require.NoError(t, m.Set(spiffetest.NewCA(t, "partner.test").Bundle()), "it is in force, and not stored")
	assert.True(t, slices.ContainsFunc(w.diary.read(), func(line map[string]string) bool { return line["msg"] == "federation: bundle not stored" }))
	require.NoError(t, os.Chmod(own, 0o700))
}

// Directories and files of another user decide nothing.
func TestStoreOwners(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-22")
	if os.Geteuid() != 0 {
		t.Skip("gives files to another user, which takes root")
	}
	const other = 54321
	for _, mode := range []os.FileMode{0o755, 0o777} {
		w := newWorld(t)
		above := filepath.Join(t.TempDir(), "above")
		w.cfg.Dir = filepath.Join(above, "dir")
		require.NoError(t, os.MkdirAll(w.cfg.Dir, 0o700))
		require.NoError(t, os.Chmod(w.cfg.Dir, mode))
		for _, path := range []string{above, w.cfg.Dir} {
			require.NoError(t, os.Chown(path, other, -1))
			err := newManager(t, w.cfg).Run(t.Context())
			require.ErrorIs(t, err, private.ErrUnsafe)
			require.ErrorContains(t, err, fmt.Sprintf("Config.Dir: %s: ", path))
			require.ErrorContains(t, err, fmt.Sprintf("run: chown 0 %q", path))
			require.NoError(t, os.Chown(path, 0, -1))
		}
		assert.Empty(t, w.dialled())
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.cfg.Dir = t.TempDir()
		file := filepath.Join(w.cfg.Dir, "td-partner.test.json")
		require.NoError(t, os.WriteFile(file, documentOf(t, spiffetest.NewCA(t, "partner.test").Bundle()), 0o600))
		require.NoError(t, os.Chown(file, other, -1))
		w.site.serve(answer(500, nil))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		warned := false
		for _, line := range w.diary.read() {
			warned = warned || line["msg"] == "federation: stored bundle ignored" && strings.Contains(fmt.Sprint(line["err"]), "belongs to user 54321")
		}
		assert.True(t, warned)
	})
}
