package federation

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"

	"github.com/svidkit/svidkit/internal/private"
	"github.com/svidkit/svidkit/spiffe"
)

// fileName returns the name of the file with the bundle of td. The prefix keeps names such as ".."
// and those that mean devices on some systems from meaning anything, and a name that is too long for
// file systems is cut and gets its hash, after a character that no trust domain has.
func fileName(td spiffe.TrustDomain) string {
	name := td.String()
	if len(name) > 200 {
		sum := sha256.Sum256([]byte(name))
		name = name[:100] + "~" + hex.EncodeToString(sum[:])
	}
	return "td-" + name + ".json"
}

// ownDir is the directory of the files in a Config.Dir that others can write to.
const ownDir = "svidkit-bundles"

// openDir opens the directory of the files, after making it if it is missing. What is in it decides which peers are
// trusted, so that no other user may have made it or be able to change it. Without a Config.Dir it returns nil.
func (m *Manager) openDir() (*os.Root, error) {
	if m.cfg.Dir == "" {
		return nil, nil
	}
	dir, err := m.makeDir(m.cfg.Dir)
	if err == nil {
		var info fs.FileInfo
		if info, err = dir.Stat("."); err == nil && writableByOthers(info) {
			err = dir.Close()
			if err == nil {
				dir, err = m.makeDir(filepath.Join(m.cfg.Dir, ownDir))
			}
			if err == nil {
				if info, err = dir.Stat("."); err == nil {
					err = private.Check(filepath.Join(m.cfg.Dir, ownDir), info, private.Options{})
				}
			}
		}
		if err != nil && dir != nil {
			_ = dir.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("Config.Dir: %w", err)
	}
	return dir, nil
}

// makeDir opens a directory whose owner is this user or root, after making it if it is missing. That others can
// replace it is in the log, once.
func (m *Manager) makeDir(path string) (*os.Root, error) {
	return private.MakeDir(path, private.Options{Warn: func(err error) {
		if !m.told[err.Error()] {
			m.told[err.Error()] = true
			m.fetch.Logger.Warn("federation: Config.Dir is in a directory that others can write to, and can lose its bundles", slog.Any("err", err))
		}
	}})
}

// stored calls f with the directory, if there is one, while no other goroutine reads or writes it.
func (m *Manager) stored(f func(dir *os.Root) error) error {
	m.storing.Lock()
	defer m.storing.Unlock()
	dir, err := m.openDir()
	if err != nil || dir == nil {
		return err
	}
	defer dir.Close()
	return f(dir)
}

// writableByOthers is false on Windows, where the bits say nothing.
func writableByOthers(info fs.FileInfo) bool {
	return runtime.GOOS != "windows" && info.Mode().Perm()&0o022 != 0
}

// load puts the stored bundle of r in force, if there is none yet.
func (m *Manager) load(ctx context.Context, r *relation) {
	m.mu.Lock()
	loaded := r.loaded
	r.loaded = true
	m.mu.Unlock()
	if loaded {
		return
	}
	var b *spiffe.Bundle
	err := m.stored(func(dir *os.Root) (err error) {
		b, err = read(dir, r.e.td)
		return err
	})
	td := slog.String("trust_domain", r.e.td.String())
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		m.fetch.Logger.LogAttrs(ctx, slog.LevelWarn, "federation: stored bundle ignored", td, slog.Any("err", err))
		return
	case b == nil:
		return
	}
	m.mu.Lock()
	used := !r.Removed() && r.bundle.Load() == nil
	if used {
		r.saved = b
		m.publish(r, b)
	}
	m.mu.Unlock()
	if used {
		m.fetch.Logger.LogAttrs(ctx, slog.LevelInfo, "federation: stored bundle loaded", append(describe(b), td)...)
	}
}

func read(dir *os.Root, td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	f, err := private.OpenIn(dir, fileName(td), private.Options{})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if writableByOthers(info) {
		return nil, fmt.Errorf("%s can be written to by others (%v)", f.Name(), info.Mode())
	}
	doc, err := io.ReadAll(io.LimitReader(f, spiffe.MaxBundleSize+1))
	if err != nil {
		return nil, err
	}
	return spiffe.ParseBundle(td, doc)
}

// save stores the bundle of r if it is not stored yet. A failure is tried again after the next fetch.
func (m *Manager) save(ctx context.Context, r *relation) {
	err := m.stored(func(dir *os.Root) error {
		m.mu.Lock()
		b := r.bundle.Load()
		needless := r.Removed() || b == nil || b == r.saved
		m.mu.Unlock()
		if needless {
			return nil
		}
		err := write(dir, b)
		if err == nil {
			m.mu.Lock()
			r.saved = b
			m.mu.Unlock()
		}
		return err
	})
	if err != nil {
		m.fetch.Logger.LogAttrs(ctx, slog.LevelWarn, "federation: bundle not stored", slog.String("trust_domain", r.e.td.String()), slog.Any("err", err))
	}
}

// write replaces the file of a bundle. A crash leaves the old file or the new one.
func write(dir *os.Root, b *spiffe.Bundle) error {
	doc, err := b.Marshal()
	if err != nil {
		return err
	}
	name := fileName(b.TrustDomain())
	draft := name + ".new"
	if err := remove(dir, draft); err != nil {
		return err
	}
	f, err := dir.OpenFile(draft, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(doc)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return dir.Rename(draft, name)
}

// remove deletes a file, if there is one.
func remove(dir *os.Root, name string) error {
	if err := dir.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// unsave deletes the file of a trust domain, unless there is a relationship with it again.
func (m *Manager) unsave(td spiffe.TrustDomain) error {
	return m.stored(func(dir *os.Root) error {
		if (*m.relations.Load())[td] != nil {
			return nil
		}
		return remove(dir, fileName(td))
	})
}
