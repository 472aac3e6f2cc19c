package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	ownDir       = "svidkit-last-good" // in a Dir that other users can write to
	bundleFile   = "bundles.json"
	identityFile = "identity.pem"
	// alternativeFile is of its own, so that older releases read the other.
	alternativeFile = "alternative.pem"

	maxBundles  = 17 << 20 // bytes: a bundle map and the time
	maxIdentity = 1 << 20

	maxAhead = time.Hour // how far the time in a file may lie in the future, in case the clock was set back
)

// stored is the content of the files. It never changes.
type stored struct {
	snap         *spiffe.Snapshot // nil if there is no identity
	bundles      *spiffe.BundleSet
	saved, until time.Time
}

// identity returns the snapshot with the stored identity, if it has not expired.
func (st *stored) identity() *spiffe.Snapshot {
	if st.snap == nil {
		return nil
	}
	svid, _ := st.snap.SVID() // of a snapshot: never an error
	if !time.Now().Before(svid.NotAfter()) {
		return nil
	}
	return st.snap
}

// load starts to use the stored state, unless the live source has been ready.
func (l *LastGood) load(ctx context.Context) {
	if l.live.Load() { // since an earlier Run
		return
	}
	var st *stored
	err := l.store.Use(func(dir *store.Folder) (err error) {
		st, err = l.read(dir)
		return err
	})
	if err != nil {
		err = fmt.Errorf("what is stored in %s is not used: %w", l.cfg.Dir, err)
		if !errors.Is(err, fs.ErrNotExist) {
			l.log.LogAttrs(ctx, slog.LevelWarn, "source: stored state refused", slog.Any("err", err))
		}
	}
	l.mu.Lock()
	l.refused = err
	if st != nil {
		l.saved = st.saved
	}
	l.mu.Unlock()
	if st == nil {
		return
	}
	l.stored.Store(st)
	attrs := []slog.Attr{slog.Time("saved", st.saved), slog.Int("trust_domains", st.bundles.Len())}
	if st.snap != nil {
		svid, _ := st.snap.SVID() // of a snapshot: never an error
		attrs = append(attrs, slog.String("id", svid.ID().String()), slog.Time("not_after", svid.NotAfter()))
	}
	l.log.LogAttrs(ctx, slog.LevelInfo, "source: what was stored is handed out until the live source is ready",
		attrs...)
}

// read returns the content of the files. If it returns both an error and a result, the error is about the identity.
func (l *LastGood) read(dir *store.Folder) (*stored, error) {
	if !l.cfg.Identity {
		if err := errors.Join(dir.Remove(identityFile), dir.Remove(alternativeFile)); err != nil {
			return nil, err
		}
	}
	doc, err := dir.Read(bundleFile, maxBundles, false)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	st := &stored{}
	if st.saved, st.bundles, err = parse(doc); err != nil {
		return nil, fmt.Errorf("%s: %w", bundleFile, err)
	}
	st.until = st.saved.Add(l.cfg.MaxAge)
	switch {
	case st.saved.After(now.Add(maxAhead)):
		return nil, fmt.Errorf("%s was written at %s, which is in the future; compare the clocks", bundleFile,
			stamp(st.saved))
	case !now.Before(st.until):
		return nil, fmt.Errorf("%s was written at %s, longer ago than the %v of MaxAge", bundleFile, stamp(st.saved),
			l.cfg.MaxAge)
	case !l.cfg.Identity:
		return st, nil
	}
	svid, err := identity(dir, identityFile, st.bundles, now)
	if err != nil {
		return st, err
	}
	if other, err := identity(dir, alternativeFile, st.bundles, now); err == nil {
		if both, err := svid.WithAlternative(other); err == nil {
			svid = both
		}
	}
	st.snap = spiffe.NewSnapshot(svid, st.bundles)
	return st, nil
}

// identity returns the SVID in a file, if peers accept it.
func identity(dir *store.Folder, name string, bundles *spiffe.BundleSet, now time.Time) (*spiffe.SVID, error) {
	pem, err := dir.Read(name, maxIdentity, true)
	if err != nil {
		return nil, err
	}
	svid, err := spiffe.ParseSVIDPEM(pem, pem)
	if err == nil {
		err = usable(svid, bundles, now)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return svid, nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// usable returns why peers would refuse svid.
func usable(svid *spiffe.SVID, bundles *spiffe.BundleSet, now time.Time) error {
	if err := certchain.InTime(svid.Leaf(), now); err != nil {
		return fmt.Errorf("%q: %w", svid.ID(), err)
	}
	return sourcereport.Refused(svid, bundles, now)
}

// savedMember is the member of the bundle map that says when it was last confirmed, in seconds since 1970.
const savedMember = "svidkit_saved"

// parse returns the content of a bundle file.
func parse(doc []byte) (saved time.Time, bundles *spiffe.BundleSet, err error) {
	if bundles, err = spiffe.ParseBundleMap(doc); err != nil {
		return time.Time{}, nil, err
	}
	err = strictjson.ReadObject(doc, func(name string, r *strictjson.Reader) {
		if name != savedMember {
			return
		}
		lit, _ := r.Number() // empty if it is not a number
		if n, err := strconv.ParseInt(string(lit), 10, 64); err == nil && n > 0 && n < 1<<40 {
			saved = time.Unix(n, 0).UTC()
		}
	})
	if err == nil && saved.IsZero() {
		err = fmt.Errorf("the member %q is missing, or not a time", savedMember)
	}
	return saved, bundles, err
}

// document returns the bundle file that [parse] reads.
func document(saved time.Time, bundles *spiffe.BundleSet) ([]byte, error) {
	doc, err := bundles.Marshal()
	if err != nil {
		return nil, err
	}
	return append(fmt.Appendf(nil, `{%q:%d,`, savedMember, saved.Unix()), doc[1:]...), nil
}

// keep stores the state of the live source: when the source becomes ready, at each change, and regularly, to confirm
// that unchanged state is still good. It deletes the stored state after a withdrawal.
func (l *LastGood) keep(ctx context.Context) {
	usual := max(min(l.cfg.MaxAge/10, time.Hour), time.Second)
	var svid *spiffe.SVID
	var bundles *spiffe.BundleSet
	var due time.Time
	for ctx.Err() == nil {
		changed, wait := l.news.Changed(), usual
		live := l.live.Load()
		s, b, err := l.current()
		switch now := time.Now(); {
		case sourcereport.Withdrawn(err):
			svid, bundles = nil, nil
			l.forget(ctx, err)
		case err != nil || !live:
		case s != svid || b != bundles || !now.Before(due):
			if err := l.save(s, b, now); err != nil {
				l.fail(ctx, "source: the last good was not stored", err)
				svid, bundles, wait = nil, nil, min(usual, time.Minute)
			} else {
				svid, bundles, due = s, b, now.Add(usual)
			}
		default:
			wait = due.Sub(now)
		}
		renew.Wait(ctx, wait, changed)
	}
}

// save writes the files.
func (l *LastGood) save(svid *spiffe.SVID, bundles *spiffe.BundleSet, now time.Time) error {
	doc, err := document(now, bundles)
	if err != nil {
		return err
	}
	var pem, other []byte
	var unfit error
	if svid != nil && l.cfg.Identity {
		pem, unfit = marshal(svid)
		if svid.Alternative() != nil {
			other, _ = marshal(svid.Alternative()) // it goes without one whose key cannot be exported
		}
	}
	err = l.store.Use(func(dir *store.Folder) error {
		// The bundles first: an identity that they do not verify is not used.
		if err := dir.Write(bundleFile, doc); err != nil || unfit != nil || pem == nil {
			return cmp.Or(err, unfit)
		}
		if err := dir.Write(identityFile, pem); err != nil || other == nil {
			return cmp.Or(err, dir.Remove(alternativeFile))
		}
		return dir.Write(alternativeFile, other)
	})
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.saved, l.failed, l.deleted = now.Round(0), nil, false
	return nil
}

// marshal returns the content of an identity's file.
func marshal(svid *spiffe.SVID) ([]byte, error) {
	certs, key, err := svid.MarshalPEM()
	return append(key, certs...), err
}

// forget deletes the stored state, because why says that the server has withdrawn the identity.
func (l *LastGood) forget(ctx context.Context, why error) {
	l.stored.Store(nil)
	l.mu.Lock()
	deleted := l.deleted
	l.mu.Unlock()
	if deleted {
		return
	}
	l.log.LogAttrs(ctx, slog.LevelWarn, "source: what is stored is deleted, because the server refuses the identity",
		slog.Any("err", why))
	err := l.store.Use(func(dir *store.Folder) error {
		return errors.Join(dir.Remove(alternativeFile), dir.Remove(identityFile), dir.Remove(bundleFile))
	})
	if err != nil {
		l.fail(ctx, "source: what is stored was not deleted", err)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.saved, l.deleted = time.Time{}, true
	l.refused = fmt.Errorf("what was stored in %s was deleted: %w", l.cfg.Dir, why)
}
