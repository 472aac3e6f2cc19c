package ca

import (
	"context"
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/redact"
)

// The errors that a [Store] wraps.
var (
	// ErrNoRecord says that the store was read and has no record. An authority then makes a new CA, if
	// [Config.Create] allows that, so a store must return it only when it is certain.
	ErrNoRecord = errors.New("no record")

	// ErrUnfit says that an operator must act: the store is no place for keys, such as a directory that others may
	// read, or its contents are not a usable record. [Open] fails with it at once. It expects other errors of a
	// store, except ErrNoRecord, to pass.
	ErrUnfit = errors.New("unfit")

	// ErrConflict says that the record is not the one to replace: another writer was faster.
	ErrConflict = errors.New("another writer has changed the record")
)

// Store keeps the one record of an authority: a small set of named blobs that is replaced as a unit. It holds private
// keys, unless [Custody] keeps them elsewhere. Authorities in one or more processes that share a store are replicas of
// one CA; see [Open]. All methods must be safe for concurrent use and return when ctx is done.
//
// A store may have one more method, which [Authority.Run] calls:
//
//	Watch(ctx context.Context, changed func())
//
// It calls changed when another process may have changed the record, so that the authority reads it at once and not
// only every 30 seconds, and returns when ctx is done. The function changed does not block.
type Store interface {
	// Load returns the record of the last Save that finished before the call, or a later one: never an older one from
	// a cache or a lagging copy. The error wraps [ErrNoRecord] if there is none; any other error says that the store
	// could not tell. The caller owns the result. Other programs' data beside the record is not part of it: the
	// authority saves only its own items.
	Load(ctx context.Context) (Record, error)

	// Save replaces the record whose version is r.Version by r.Data(), all of it or nothing, and returns the new
	// version once the data would survive a crash. An empty r.Version means that there must be no record. The error
	// wraps [ErrConflict] if the record has another version, exists unexpectedly, or is missing. After any other
	// error the record may or may not have been replaced. Save does not keep or change r.Data().
	Save(ctx context.Context, r Record) (version string, err error)
}

// watched is a [Store] that announces changes.
type watched interface {
	Watch(ctx context.Context, changed func())
}

// Record is the contents of a [Store]. [NewRecord] makes one. It holds private keys and never prints them, even
// inside another value.
type Record struct {
	redacted

	// Version names this state of the record. Only the store understands it. No two states of a record have the
	// same version.
	Version string

	data func() map[string][]byte // packages fmt, slog and json do not look into a func; nil for none
}

// NewRecord returns a record with the given version and contents, which are not copied.
func NewRecord(version string, data map[string][]byte) Record {
	return Record{
		redacted: redact.New(fmt.Sprintf("ca.Record(%q, %d items)", version, len(data))),
		Version:  version, data: redact.Seal(data),
	}
}

// Data returns the contents by name, as in a Kubernetes Secret. They hold private keys. Data returns the map of
// [NewRecord], not a copy.
func (r Record) Data() map[string][]byte {
	if r.data == nil {
		return nil
	}
	return r.data()
}
