package ca

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"io/fs"
	"strconv"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// Errors that no caller has to tell from others.
var (
	ErrRecord    = errRecord
	ErrActive    = rotation.ErrActive
	ErrPluggedIn = errPluggedIn
)

// Roots returns the roots that are in the bundle, oldest first.
func (a *Authority) Roots() []KeyStatus { return a.Status().Roots }

// TrustDomain returns the trust domain that the authority serves.
func (a *Authority) TrustDomain() spiffe.TrustDomain { return a.cfg.TrustDomain }

// Signer returns the serial number of the CA certificate that signs.
func (a *Authority) Signer() string { return a.current().active().ID }

// In has p read from a file system that is polled once a second, in place of a directory of the host.
func (p PluggedIn) In(fsys fs.FS) PluggedIn {
	p.fsys = fsys
	return p
}

// MayReplace reports whether the roots of a plugged-in CA may change from old to next.
func MayReplace(old, next []*x509.Certificate, multiRoot bool) (same bool, err error) {
	return mayReplace(old, next, multiRoot)
}

// MemoryStore is a [Store] for tests. [NewMemoryStore] makes one.
type MemoryStore struct {
	mu     sync.Mutex
	n      uint64 // the number of saves, and the version
	record Record // Data is nil for none
}

// NewMemoryStore returns a store without a record.
func NewMemoryStore() *MemoryStore { return new(MemoryStore) }

// Load implements [Store].
func (m *MemoryStore) Load(ctx context.Context) (Record, error) {
	if ctx.Err() != nil {
		return Record{}, fmt.Errorf("ca: load from memory: %w", context.Cause(ctx))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.record.Data() == nil {
		return Record{}, fmt.Errorf("ca: load from memory: %w", ErrNoRecord)
	}
	return clone(m.record), nil
}

// Save implements [Store].
func (m *MemoryStore) Save(ctx context.Context, r Record) (string, error) {
	if ctx.Err() != nil {
		return "", fmt.Errorf("ca: save to memory: %w", context.Cause(ctx))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Version != m.record.Version {
		return "", fmt.Errorf("ca: save to memory: %w: version %q was to be replaced, there is %q", ErrConflict, r.Version, m.record.Version)
	}
	m.n++
	m.record = clone(r)
	m.record.Version = strconv.FormatUint(m.n, 10)
	return m.record.Version, nil
}

// clone returns a copy that shares nothing with r.
func clone(r Record) Record {
	data := make(map[string][]byte, len(r.Data()))
	for name, b := range r.Data() {
		data[name] = bytes.Clone(b)
	}
	return NewRecord(r.Version, data)
}

// OnDisk has a store of [NewDirStore] change its directory through another disk.
func OnDisk(s Store, d disk.Disk) Store {
	s.(*dirStore).disk = d
	return s
}

// ReadSeldom has Run read the store every six minutes, if consumers have the default time. It is called before Run.
func (a *Authority) ReadSeldom() {
	if a.cfg.Rotation.Propagation >= 24*time.Minute {
		a.syncInterval = 6 * time.Minute
	}
}

// SetSyncInterval sets how often Run reads the store. It is called before Run.
func (a *Authority) SetSyncInterval(d time.Duration) { a.syncInterval = d }

// SetTaintGrace sets how long a tainted root stays. It is called before any is tainted.
func (a *Authority) SetTaintGrace(d time.Duration) { a.taintGrace = d }
