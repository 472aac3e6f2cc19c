package ca

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// Why something happens to a key, in the words of events and the log.
const (
	asked    = "asked for"
	due      = "due"
	followed = "another process wrote it"
	unnamed  = "its kind is no longer named"
)

// maxEvents bounds the events that wait for the Auditor. Beyond that, the oldest are only in the log.
const maxEvents = 256

const (
	eventPatience = 5 * time.Second  // for one record
	eventRetry    = 10 * time.Second // after a failure, while Run runs
)

// events are key events that are not recorded yet.
type events struct {
	mu      sync.Mutex
	waiting []*KeyEvent
	err     error        // of the last attempt; nil if it worked
	kept    renew.Signal // wakes Run: an event may be kept after its state was published

	recording sync.Mutex // held while recording, so that records are in order
}

// happened logs key events, and keeps them for [Authority.record]. It does not block.
func (a *Authority) happened(why string, all ...rotation.Event) {
	kept := make([]*KeyEvent, len(all))
	for i, e := range all {
		kind, k := e.Key.Kind(), a.keyEvent(e.What, &e.Key, e.At, e.Successor, why)
		level, attrs := slog.LevelInfo, []slog.Attr{slog.String(kind.IDName(), k.Serial)}
		if e.What == rotation.Tainted || e.What == rotation.Revoked || e.What == rotation.Replaced {
			level = slog.LevelWarn
		}
		if k.Successor != "" {
			attrs = append(attrs, slog.String("successor", k.Successor))
		}
		if k.Detail != "" {
			attrs = append(attrs, slog.String("detail", k.Detail))
		}
		a.cfg.Logger.LogAttrs(context.Background(), level, kind.String()+" "+e.What, attrs...)
		kept[i] = k
	}
	a.keep(kept...)
}

// keyEvent describes an event of k.
func (a *Authority) keyEvent(what string, k *rotation.Key, at time.Time, successor, detail string) *KeyEvent {
	e := &KeyEvent{Time: at.Round(0), Event: what, Key: "root", Serial: k.ID, Successor: successor, Detail: detail,
		Actor: a.cfg.Actor}
	if k.Kind() == rotation.Token {
		e.Key = "jwt"
	} else {
		sum := sha256.Sum256(k.Cert.Raw)
		e.NotAfter, e.Fingerprint = k.Cert.NotAfter, hex.EncodeToString(sum[:])
	}
	if what == rotation.Prepared || what == rotation.Postponed {
		e.Detail = strings.TrimPrefix(detail+"; ", "; ") + "signs from " + k.Activates.UTC().Format(time.RFC3339)
	}
	return e
}

// keep keeps events for the Auditor, if there is one.
func (a *Authority) keep(all ...*KeyEvent) {
	if _, ok := a.cfg.Auditor.(keyAuditor); !ok || len(all) == 0 {
		return
	}
	ev := &a.events
	ev.mu.Lock()
	defer ev.mu.Unlock()
	ev.waiting = append(ev.waiting, all...)
	if more := len(ev.waiting) - maxEvents; more > 0 {
		ev.waiting = slices.Delete(ev.waiting, 0, more)
	}
	ev.kept.Notify()
}

// record writes pending key events to the Auditor until all are written, a write fails or ctx is done, and reports
// whether any remain. A write that has begun is finished.
func (a *Authority) record(ctx context.Context) (left bool) {
	auditor, ok := a.cfg.Auditor.(keyAuditor)
	if !ok {
		return false
	}
	ev := &a.events
	ev.recording.Lock()
	defer ev.recording.Unlock()
	for ctx.Err() == nil {
		ev.mu.Lock()
		if len(ev.waiting) == 0 {
			ev.err = nil
			ev.mu.Unlock()
			return false
		}
		e := ev.waiting[0]
		ev.mu.Unlock()
		patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), eventPatience)
		err := auditor.RecordKeyEvent(patient, e)
		cancel()
		ev.mu.Lock()
		again := ev.err != nil && err != nil && ev.err.Error() == err.Error()
		if ev.err = err; err == nil && len(ev.waiting) > 0 && ev.waiting[0] == e {
			ev.waiting = ev.waiting[1:]
		}
		n := len(ev.waiting)
		ev.mu.Unlock()
		if err == nil {
			continue
		}
		if !again {
			a.cfg.Logger.LogAttrs(ctx, slog.LevelError, "key event not recorded", slog.Any("err", err),
				slog.Int("waiting", n), slog.String("event", e.Event), slog.String("key", e.Key),
				slog.String("serial", e.Serial), slog.Any("actor", e.Actor))
		}
		return true
	}
	return true
}

// settle records the events of an operation that a caller requested, even if ctx is done: the process may be about to
// end. The event that it has loaded the CA is recorded with them, or by Run: a command that fails records nothing.
func (a *Authority) settle(ctx context.Context) {
	a.events.mu.Lock()
	done := slices.ContainsFunc(a.events.waiting, func(e *KeyEvent) bool { return e.Event != loaded })
	a.events.mu.Unlock()
	if done {
		a.record(context.WithoutCancel(ctx))
	}
}

// started reports how the authority began: its CA was "created", "adopted" or "loaded".
func (a *Authority) started(ctx context.Context, how, where string) {
	s := a.current()
	k := s.active()
	level := slog.LevelInfo
	if how == adopted {
		level = slog.LevelWarn
	}
	a.cfg.Logger.LogAttrs(ctx, level, "CA "+how, slog.String("serial", k.ID),
		slog.Time("not_after", k.Cert.NotAfter), slog.String("where", where))
	a.keep(a.keyEvent(how, k, time.Now(), "", where))
	for _, kind := range rotation.Kinds {
		if more := s.In(kind, rotation.Active); how == created && more != nil && more != k {
			a.keep(a.keyEvent(how, more, time.Now(), "", where))
		}
	}
	a.settle(ctx)
}

// How an authority may begin.
const (
	created = "created"
	adopted = "adopted"
	loaded  = "loaded"
)

// unrecorded returns why events have no record; nil if all have one, or no attempt was made yet.
func (a *Authority) unrecorded() error {
	a.events.mu.Lock()
	defer a.events.mu.Unlock()
	if a.events.err == nil {
		return nil
	}
	return fmt.Errorf("ca: audit record of a key of %s: %w", a.cfg.TrustDomain, a.events.err)
}
