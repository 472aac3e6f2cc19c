package filesource

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/files/delivery"
	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// Limits in bytes: for a file, for all files together, and for a bundle map, which has its own limit. In memory
// bundles take about seven times as much.
const (
	maxPart  = 1 << 20
	maxTotal = 8 << 20
	maxMap   = 16 << 20
)

// files is the adopted content of the files. Only take uses it, and calls of take do not overlap.
type files struct {
	source *Source
	svid   *spiffe.SVID // in force, or nil
	of     []BundleFile // Config.Bundles, or what is in Config.Folder
	parts  []part       // one for each of them
}

// part is the content of a bundle file.
type part struct {
	bundles []*spiffe.Bundle
	notes   []error // why entries were skipped
	read    bool    // the file was read; it may be an empty map
}

// take adopts the good parts of the files, and returns why the rest is refused.
func (f *files) take(ctx context.Context, read follow.Files) error {
	s := f.source
	now := time.Now()
	var refused []error
	if s.cfg.Folder != "" {
		f.arrange(read)
	}
	next, err := f.readPair(read)
	if err != nil {
		refused = append(refused, err)
	}
	td := f.trustDomain(next)
	stranger := next != nil && next.ID().TrustDomain() != td // judge refuses it
	for i, b := range f.of {
		if stranger && !b.Map && b.TrustDomain.IsZero() {
			continue // the bundles beside it may be for its trust domain
		}
		if err := f.readPart(&f.parts[i], b, td, read); err != nil {
			refused = append(refused, err)
		}
	}
	old := s.cur.Load()
	bundles, notes, err := f.bundles(old.bundles)
	if err != nil {
		refused = append(refused, err)
	}
	if next != nil && next != f.svid {
		if err := f.judge(next, bundles, now); err != nil {
			refused = append(refused, fmt.Errorf("filesource: %s: %w", s.cfg.CertFile, err))
		} else {
			f.svid = next
		}
	}
	notes = append(notes, f.doubts(bundles, now)...)
	f.publish(ctx, old, bundles, notes)
	return sourcereport.Joined(refused, maxNotes)
}

// find returns the files of the directory: the identity file and the bundle files. While the directory cannot be read,
// or has no identity, it returns the files found last.
func (s *Source) find() []string {
	entries, _ := os.ReadDir(s.cfg.Folder)
	if _, err := os.Stat(s.cfg.CertFile); err == nil || s.found == nil {
		s.found = []string{s.cfg.CertFile}
		for _, e := range entries {
			if _, ok := delivery.TrustDomain(e.Name()); ok && len(s.found) <= maxFound {
				s.found = append(s.found, filepath.Join(s.cfg.Folder, e.Name()))
			}
		}
	}
	return s.found
}

// arrange makes one part for each bundle file found in the directory, and drops the parts of files that are gone.
func (f *files) arrange(read follow.Files) {
	var of []BundleFile
	for _, path := range slices.Sorted(maps.Keys(read)) {
		if td, ok := delivery.TrustDomain(filepath.Base(path)); ok {
			of = append(of, BundleFile{Path: path, TrustDomain: td})
		}
	}
	parts := make([]part, len(of))
	for i, b := range of {
		if was := slices.Index(f.of, b); was >= 0 {
			parts[i] = f.parts[was]
		}
	}
	f.of, f.parts = of, parts
}

// open returns the contents of a file.
func open(read follow.Files, path string) ([]byte, error) {
	file := read[path]
	if file.Err != nil {
		return nil, fmt.Errorf("filesource: %w", file.Err)
	}
	return file.Data, nil
}

// readPair returns the identity in the files: the one in force if the certificates are the same, and nil on error or
// if the source is configured without one.
func (f *files) readPair(read follow.Files) (*spiffe.SVID, error) {
	s := f.source
	if s.keyFile == "" {
		return nil, nil
	}
	certs, err := open(read, s.cfg.CertFile)
	if err != nil {
		return nil, err
	}
	key, err := open(read, s.keyFile)
	if err != nil {
		return nil, err
	}
	next, err := spiffe.ParseSVIDPEM(certs, key)
	if err != nil {
		return nil, fmt.Errorf("filesource: %s and %s: %w", s.cfg.CertFile, s.keyFile, err)
	}
	if f.svid != nil && slices.EqualFunc(next.Chain(), f.svid.Chain(), (*x509.Certificate).Equal) {
		return f.svid, nil
	}
	return next, nil
}

// trustDomain returns the trust domain of the expected identity, the identity in force, or the offered identity.
func (f *files) trustDomain(offered *spiffe.SVID) spiffe.TrustDomain {
	switch {
	case !f.source.cfg.ID.IsZero():
		return f.source.cfg.ID.TrustDomain()
	case f.svid != nil:
		return f.svid.ID().TrustDomain()
	case offered != nil:
		return offered.ID().TrustDomain()
	}
	return spiffe.TrustDomain{}
}

// readPart stores the content of a bundle file in p, if it is good. td is the trust domain of the identity.
func (f *files) readPart(p *part, b BundleFile, td spiffe.TrustDomain, read follow.Files) error {
	data, err := open(read, b.Path)
	if err != nil {
		return err
	}
	if !b.TrustDomain.IsZero() {
		td = b.TrustDomain
	} else if !b.Map && td.IsZero() {
		return fmt.Errorf("filesource: %s waits for the certificate, which says the trust domain", b.Path)
	}
	next := part{read: true}
	if next.bundles, err = f.parse(b, td, data); err != nil {
		return fmt.Errorf("filesource: %s: %w", b.Path, err)
	}
	for i, n := range next.bundles {
		for _, err := range n.Skipped() {
			next.notes = append(next.notes, fmt.Errorf("filesource: %s: skipped: %w", b.Path, err))
		}
		for _, o := range p.bundles {
			switch {
			case o.TrustDomain() != n.TrustDomain():
			case o.Equal(n):
				next.bundles[i] = o // the same value, because verifiers cache by bundle
			case !n.Supersedes(o):
				was, _ := o.Sequence()
				is, _ := n.Sequence()
				return fmt.Errorf("filesource: %s: the bundle of %q has the sequence number %d, and the one in "+
					"force has %d: it is an older one; restart the program to go back to it",
					b.Path, n.TrustDomain(), is, was)
			}
		}
	}
	*p = next
	return nil
}

// parse returns the bundles in a file.
func (f *files) parse(b BundleFile, td spiffe.TrustDomain, data []byte) ([]*spiffe.Bundle, error) {
	read := spiffe.ParseBundlePEM
	switch {
	case b.Map:
		set, err := spiffe.ParseBundleMap(data)
		if err != nil {
			return nil, err
		}
		return slices.Collect(set.All()), nil
	case b.JWKS:
		read = spiffe.ParseJWKS
	case bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) && f.source.cfg.Folder == "": // a folder has PEM alone
		read = spiffe.ParseBundle
	}
	bundle, err := read(td, data)
	return []*spiffe.Bundle{bundle}, err
}

// bundles returns the bundles of all files, and errors for skipped entries. Unchanged bundles are the same values as
// in old. If the parts of a bundle cannot be merged, the old bundle stays.
func (f *files) bundles(old *spiffe.BundleSet) (*spiffe.BundleSet, []error, error) {
	parts := map[spiffe.TrustDomain][]*spiffe.Bundle{}
	var notes, refused []error
	for _, p := range f.parts {
		for _, b := range p.bundles {
			parts[b.TrustDomain()] = append(parts[b.TrustDomain()], b)
		}
		notes = append(notes, p.notes[:min(len(p.notes), maxNotes-len(notes))]...)
	}
	all := make([]*spiffe.Bundle, 0, len(parts))
	for td, list := range parts {
		was, _ := old.Bundle(td) // nil if there is none
		b, err := merge(list)
		if err != nil {
			refused = append(refused, fmt.Errorf("filesource: the files for %q do not go together: %w", td, err))
		}
		if err != nil || b.Equal(was) {
			b = was
		}
		if b != nil {
			all = append(all, b)
		}
	}
	set, _ := spiffe.NewBundleSet(all...) // fails only for a nil or duplicate bundle
	if set.Equal(old) {
		set = old
	}
	return set, notes, sourcereport.Joined(refused, maxNotes)
}

// maxFound is how many bundle files of a directory are read.
const maxFound = 1000

// maxNotes is how many skipped entries are reported: a foreign trust domain's bundle may have 1,000.
const maxNotes = 20

// merge returns one bundle with the authorities of all bundles in list, which are of one trust domain.
func merge(list []*spiffe.Bundle) (*spiffe.Bundle, error) {
	if len(list) == 1 {
		return list[0], nil
	}
	all := list[0].Contents()
	all.Sequence, all.RefreshHint = nil, 0
	for _, b := range list[1:] {
		c := b.Contents()
		all.X509Authorities = append(all.X509Authorities, c.X509Authorities...)
		for id, key := range c.JWTAuthorities {
			if have := all.JWTAuthorities[id]; have != nil && !jws.SameKey(have, key) {
				return nil, fmt.Errorf("two different keys have the key ID %.64q", id)
			}
			all.JWTAuthorities[id] = key
		}
	}
	return spiffe.NewBundle(list[0].TrustDomain(), all)
}

// judge returns why svid must not replace the identity in force.
func (f *files) judge(svid *spiffe.SVID, bundles *spiffe.BundleSet, now time.Time) error {
	want, have := f.source.cfg.ID, f.svid
	td := f.trustDomain(svid)
	switch {
	case !want.IsZero() && svid.ID() != want:
		return fmt.Errorf("it is the certificate of %q, and Config.ID is %q", svid.ID(), want)
	case svid.ID().TrustDomain() != td:
		return fmt.Errorf("it is the certificate of %q, and the identity in force is of the trust domain %q",
			svid.ID(), td)
	}
	if err := certchain.InTime(svid.Leaf(), now); err != nil {
		return fmt.Errorf("%q: %w", svid.ID(), err)
	}
	if _, err := sourcereport.Usages(svid, have); err != nil {
		return err
	}
	bundle, err := bundles.Bundle(td)
	if err == nil {
		return sourcereport.Refused(svid, bundle, now)
	}
	if f.source.cfg.Folder != "" {
		return fmt.Errorf("there is no %s with the authorities that %q is verified by",
			filepath.Join(f.source.cfg.Folder, delivery.Bundle(td)), svid.ID())
	}
	if len(f.parts) > 0 && want.IsZero() {
		return fmt.Errorf("none of the files with bundles is for the trust domain of %q; if that is meant, set "+
			"Config.ID", svid.ID())
	}
	for i, b := range f.of {
		if mayHave := b.Map || b.TrustDomain.IsZero() || b.TrustDomain == td; mayHave && !f.parts[i].read {
			return fmt.Errorf("the certificate of %q cannot be verified without %s", svid.ID(), b.Path)
		}
	}
	return nil
}

// doubts returns why peers refuse the identity in force, now or later.
func (f *files) doubts(bundles *spiffe.BundleSet, now time.Time) []error {
	svid := f.svid
	if svid == nil {
		return nil
	}
	var notes []error
	if bundle, err := bundles.Bundle(svid.ID().TrustDomain()); err == nil {
		err := sourcereport.Refused(svid, bundle, now)
		// the Report has NotAfter
		if e, ok := errors.AsType[x509.CertificateInvalidError](err); err != nil && !(ok && e.Reason == x509.Expired) {
			notes = append(notes, fmt.Errorf("filesource: peers will refuse %q: %w", svid.ID(), err))
		}
	}
	if note, _ := sourcereport.Usages(svid, nil); note != nil {
		notes = append(notes, fmt.Errorf("filesource: %w", note))
	}
	return notes
}

// publish makes the adopted state visible to readers.
func (f *files) publish(ctx context.Context, old *state, bundles *spiffe.BundleSet, notes []error) {
	s := f.source
	next := &state{snap: old.snap, bundles: bundles, at: old.at, notes: notes}
	if f.svid != nil && (old.svid() != f.svid || old.bundles != bundles) {
		next.snap = spiffe.NewSnapshot(f.svid, bundles)
	}
	next.ready = (next.snap != nil || s.keyFile == "") &&
		!slices.ContainsFunc(f.parts, func(p part) bool { return !p.read })
	changed := next.snap != old.snap || bundles != old.bundles
	if changed {
		next.at = time.Now().Round(0)
	}
	s.cur.Store(next)
	if changed || next.ready != old.ready {
		s.news.Notify()
	}
	if changed {
		attrs := []slog.Attr{slog.Int("trust_domains", bundles.Len())}
		if svid := f.svid; svid != nil {
			attrs = append(attrs, slog.String("id", svid.ID().String()), slog.Time("not_after", svid.NotAfter()))
		}
		s.log.LogAttrs(ctx, slog.LevelInfo, "filesource: update", attrs...)
	}
	for _, note := range notes {
		if !slices.ContainsFunc(old.notes, func(o error) bool { return o.Error() == note.Error() }) {
			s.log.LogAttrs(ctx, slog.LevelWarn, "filesource: needs attention", slog.Any("err", note))
		}
	}
}
