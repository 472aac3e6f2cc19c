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
	"runtime"

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

// openDir makes the directory if it is missing, and refuses one that others can write to: who writes
// there decides who is trusted.
func (m *Manager) openDir() error {
	if m.cfg.Dir == "" {
		return nil
	}
	if err := os.MkdirAll(m.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("Config.Dir: %w", err)
	}
	info, err := os.Stat(m.cfg.Dir)
	switch {
	case err != nil:
		return fmt.Errorf("Config.Dir: %w", err)
	case !info.IsDir():
		return fmt.Errorf("Config.Dir: %s is not a directory", m.cfg.Dir)
	case writableByOthers(info):
		return fmt.Errorf("Config.Dir: %s can be written to by others (%v); use a directory with mode 0700", m.cfg.Dir, info.Mode())
	}
	return nil
}

// writableByOthers is false on Windows, where the bits say nothing.
func writableByOthers(info fs.FileInfo) bool {
	return runtime.GOOS != "windows" && info.Mode().Perm()&0o022 != 0
}

// load puts the stored bundle of r in force, if there is none yet.
func (m *Manager) load(ctx context.Context, r *relation) {
	if m.cfg.Dir == "" {
		return
	}
	m.mu.Lock()
	loaded := r.loaded
	r.loaded = true
	m.mu.Unlock()
	if loaded {
		return
	}
	m.storing.Lock()
	b, err := m.read(r.e.td)
	m.storing.Unlock()
	td := slog.String("trust_domain", r.e.td.String())
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			m.fetch.Logger.LogAttrs(ctx, slog.LevelWarn, "federation: stored bundle ignored", td, slog.Any("err", err))
		}
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

func (m *Manager) read(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	dir, err := os.OpenRoot(m.cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	name := fileName(td)
	info, err := dir.Lstat(name)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file", name)
	case writableByOthers(info):
		return nil, fmt.Errorf("%s can be written to by others (%v)", name, info.Mode())
	}
	f, err := dir.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	doc, err := io.ReadAll(io.LimitReader(f, spiffe.MaxBundleSize+1))
	if err != nil {
		return nil, err
	}
	return spiffe.ParseBundle(td, doc)
}

// save stores the bundle of r if it is not stored yet. A failure is tried again after the next fetch.
func (m *Manager) save(ctx context.Context, r *relation) {
	if m.cfg.Dir == "" {
		return
	}
	m.storing.Lock()
	defer m.storing.Unlock()
	m.mu.Lock()
	b := r.bundle.Load()
	needless := r.Removed() || b == nil || b == r.saved
	m.mu.Unlock()
	if needless {
		return
	}
	err := m.write(b)
	if err != nil {
		m.fetch.Logger.LogAttrs(ctx, slog.LevelWarn, "federation: bundle not stored", slog.String("trust_domain", r.e.td.String()), slog.Any("err", err))
		return
	}
	m.mu.Lock()
	r.saved = b
	m.mu.Unlock()
}

// write replaces the file of a bundle. A crash leaves the old file or the new one.
func (m *Manager) write(b *spiffe.Bundle) error {
	doc, err := b.Marshal()
	if err != nil {
		return err
	}
	if err := m.openDir(); err != nil { // Set may come before Run
		return err
	}
	dir, err := os.OpenRoot(m.cfg.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	name := fileName(b.TrustDomain())
	draft := name + ".new"
	if err := dir.Remove(draft); err != nil && !errors.Is(err, fs.ErrNotExist) {
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

// unsave deletes the file of a trust domain, unless there is a relationship with it again.
func (m *Manager) unsave(td spiffe.TrustDomain) error {
	if m.cfg.Dir == "" {
		return nil
	}
	m.storing.Lock()
	defer m.storing.Unlock()
	if (*m.relations.Load())[td] != nil {
		return nil
	}
	dir, err := os.OpenRoot(m.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := dir.Remove(fileName(td)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
