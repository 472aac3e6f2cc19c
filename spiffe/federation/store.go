package federation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// fileName returns the name of the file with the bundle of td. The prefix makes names such as ".." and the device
// names of some systems harmless. A name that is too long for the file system is an error there.
func fileName(td spiffe.TrustDomain) string { return "td-" + td.String() + ".json" }

// ownDir is the directory of the files in a Config.Dir that others can write to.
const ownDir = "svidkit-bundles"

// newStore returns the store of bundles in Config.Dir, or nil without one.
func newStore(cfg *Config) *store.Store {
	if cfg.Dir == "" {
		return nil
	}
	return store.New(cfg.Dir, ownDir, func(err error) {
		const warning = "federation: Config.Dir is in a directory that others can write to, and can lose its bundles"
		cfg.Logger.Warn(warning, slog.Any("err", err))
	})
}

// stored calls f with the directory, if there is one, while no other goroutine reads or writes it.
func (m *Manager) stored(f func(dir *store.Folder) error) error {
	if m.store == nil {
		return nil
	}
	if err := m.store.Use(f); err != nil {
		return fmt.Errorf("Config.Dir: %w", err)
	}
	return nil
}

// load puts the stored bundle of r in force, if there is none yet. Only the first call reads the store.
func (m *Manager) load(ctx context.Context, r *relation) {
	r.loaded.Do(func() {
		var b *spiffe.Bundle
		err := m.stored(func(dir *store.Folder) error {
			doc, err := dir.Read(fileName(r.e.td), jws.MaxSetSize, false)
			if err == nil {
				b, err = spiffe.ParseBundle(r.e.td, doc)
			}
			return err
		})
		td := slog.String("trust_domain", r.e.td.String())
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			m.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "federation: stored bundle ignored", td, slog.Any("err", err))
		} else if b != nil && m.use(r, b) {
			m.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "federation: stored bundle loaded", append(describe(b), td)...)
		}
	})
}

// use puts a stored bundle in force, and reports whether it did.
func (m *Manager) use(r *relation, b *spiffe.Bundle) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Removed() || r.bundle.Load() != nil {
		return false
	}
	r.saved = b
	m.publish(r, b)
	return true
}

// save stores the bundle of r if it is not stored yet. A failure is tried again after the next fetch.
func (m *Manager) save(ctx context.Context, r *relation) {
	err := m.stored(func(dir *store.Folder) error {
		m.mu.Lock()
		b := r.bundle.Load()
		needless := r.Removed() || b == nil || b == r.saved
		m.mu.Unlock()
		if needless {
			return nil
		}
		doc, err := b.Marshal()
		if err == nil {
			err = dir.Write(fileName(b.TrustDomain()), doc)
		}
		if err == nil {
			m.mu.Lock()
			r.saved = b
			m.mu.Unlock()
		}
		return err
	})
	if err != nil {
		td := slog.String("trust_domain", r.e.td.String())
		m.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "federation: bundle not stored", td, slog.Any("err", err))
	}
}

// unsave deletes the file of a trust domain, unless there is a relationship with it again.
func (m *Manager) unsave(td spiffe.TrustDomain) error {
	return m.stored(func(dir *store.Folder) error {
		if m.all()[td] != nil {
			return nil
		}
		return dir.Remove(fileName(td))
	})
}
