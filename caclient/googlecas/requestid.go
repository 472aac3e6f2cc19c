package googlecas

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/svidkit/svidkit/caclient"
)

const (
	maxRequests = 4096
	maxAge      = 50 * time.Minute // the service remembers an ID for at least 60
)

// requestKey is what makes two calls of Sign the same request.
type requestKey struct {
	csr      [32]byte
	lifetime time.Duration
}

// requestIDs are the IDs of the requests that may have been carried out although no call has their result: those under
// way, and those that failed on the way. The zero value is ready. Its methods are safe for concurrent use.
type requestIDs struct {
	mu  sync.Mutex
	ids map[requestKey]requestID
}

type requestID struct {
	id    string
	since time.Time
}

// take returns the ID for a call, a UUID.
func (r *requestIDs) take(key requestKey) string {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if known, ok := r.ids[key]; ok && now.Sub(known.since) < maxAge {
		return known.id
	}
	if len(r.ids) >= maxRequests {
		r.drop(now)
	}
	if r.ids == nil {
		r.ids = map[requestKey]requestID{}
	}
	id := newUUID()
	r.ids[key] = requestID{id, now}
	return id
}

// drop makes room: the old ones go, or all of them, after which a repetition costs a certificate. mu is held.
func (r *requestIDs) drop(now time.Time) {
	for key, known := range r.ids {
		if now.Sub(known.since) >= maxAge {
			delete(r.ids, key)
		}
	}
	if len(r.ids) >= maxRequests {
		clear(r.ids)
	}
}

// done ends a call. The ID stays for the next call with the same key, if keep is set.
func (r *requestIDs) done(key requestKey, id string, keep bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !keep && r.ids[key].id == id {
		delete(r.ids, key)
	}
}

// newUUID returns a random UUID, of version 4.
func newUUID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// mayHaveLanded reports whether the service may have issued a certificate although the call failed with err.
func mayHaveLanded(ctx context.Context, err error) bool {
	e, told := errors.AsType[*caclient.Error](err)
	return err != nil && (ctx.Err() != nil || !told || e.Kind == caclient.ErrUnavailable) //nolint:errorlint // the kind itself
}
