package ca

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
)

// The errors that a [Store] wraps.
var (
	// ErrNoRecord says that the store was read, and that there is no record in it. An authority
	// answers it by making a new CA, so a store returns it only when that is certain.
	ErrNoRecord = errors.New("no record")

	// ErrConflict says that the record is not the one that was to be replaced: somebody else wrote
	// in between.
	ErrConflict = errors.New("the record was changed by somebody else")
)

// Store keeps the one record of an authority: a small set of named blobs that is replaced as a
// whole. It holds private keys. Several authorities, in one process or in many, may share a store,
// and then are replicas of one CA; see [Open]. All methods must be safe for concurrent use and
// return when ctx is done.
type Store interface {
	// Load returns the record that the last Save to finish before the call has written, or a later
	// one: not an older one from a cache or a lagging copy. It wraps [ErrNoRecord] if there is none;
	// any other error says that the question could not be answered. The caller owns the result.
	Load(ctx context.Context) (Record, error)

	// Save replaces the record whose version is r.Version by r.Data, all of it or nothing, and
	// returns the new version once the data would survive a crash. An empty r.Version means that
	// there must be no record. It wraps [ErrConflict] if the record has another version, or is
	// there or not there against expectation. After any other error the record may or may not have
	// been replaced. Save does not keep or change r.Data.
	Save(ctx context.Context, r Record) (version string, err error)
}

// Record is what a [Store] keeps.
type Record struct {
	// Version names this state of the record. Only the store knows what it means. No two states of
	// a record have the same version.
	Version string

	// Data are the contents by name: letters, digits, dots, hyphens and underscores, as in a
	// Kubernetes Secret. They hold private keys.
	Data map[string][]byte
}

// String returns the version and no contents.
func (r Record) String() string {
	return fmt.Sprintf("ca.Record(%q, %d items)", r.Version, len(r.Data))
}

// GoString returns the same as String, so that %#v shows no keys.
func (r Record) GoString() string { return r.String() }

// Format writes the same as String for every verb, so that none shows a key.
func (r Record) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(r.String())) }

// MarshalJSON refuses: a record holds private keys.
func (r Record) MarshalJSON() ([]byte, error) {
	return nil, errors.New("ca: a Record holds private keys and is not for JSON")
}

// clone returns a copy that shares nothing with r.
func (r Record) clone() Record {
	data := make(map[string][]byte, len(r.Data))
	for name, b := range r.Data {
		data[name] = bytes.Clone(b)
	}
	return Record{Version: r.Version, Data: data}
}

// The limits on a record, which are those of a Kubernetes Secret.
const (
	maxRecordBytes = 1 << 20
	maxRecordItems = 64
	maxNameBytes   = 253
)

// checkRecord says whether every store could keep data.
func checkRecord(data map[string][]byte) error {
	if len(data) > maxRecordItems {
		return fmt.Errorf("ca: the record has %d items, the limit is %d", len(data), maxRecordItems)
	}
	total := 0
	for name, b := range data {
		if err := checkName(name); err != nil {
			return err
		}
		total += len(b)
	}
	if total > maxRecordBytes {
		return fmt.Errorf("ca: the record has %d bytes, the limit is %d", total, maxRecordBytes)
	}
	return nil
}

func checkName(name string) error {
	ok := name != "" && len(name) <= maxNameBytes && name != "." && name != ".."
	for _, c := range []byte(name) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_')
	}
	if !ok {
		return fmt.Errorf("ca: %.64q is no name in a record; use letters, digits, '.', '-' and '_'", name)
	}
	return nil
}

// MemoryStore is a [Store] for tests, and for authorities of one process that share a CA. It is
// lost when the process ends. [NewMemoryStore] makes one.
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
	if m.record.Data == nil {
		return Record{}, fmt.Errorf("ca: load from memory: %w", ErrNoRecord)
	}
	return m.record.clone(), nil
}

// Save implements [Store].
func (m *MemoryStore) Save(ctx context.Context, r Record) (string, error) {
	if ctx.Err() != nil {
		return "", fmt.Errorf("ca: save to memory: %w", context.Cause(ctx))
	}
	if err := checkRecord(r.Data); err != nil {
		return "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Version != m.record.Version {
		return "", fmt.Errorf("ca: save to memory: %w: version %q was to be replaced, there is %q", ErrConflict, r.Version, m.record.Version)
	}
	m.n++
	m.record = r.clone()
	m.record.Version = strconv.FormatUint(m.n, 10)
	return m.record.Version, nil
}

// String returns no contents.
func (m *MemoryStore) String() string { return "ca.MemoryStore" }

// GoString returns the same as String.
func (m *MemoryStore) GoString() string { return m.String() }

// Format writes the same as String for every verb, so that none shows a key.
func (m *MemoryStore) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(m.String())) }

// sortedNames returns the names in data, sorted.
func sortedNames(data map[string][]byte) []string {
	return slices.Sorted(maps.Keys(data))
}
