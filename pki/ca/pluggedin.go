package ca

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Load makes an authority whose CA is in files that an operator has put there, and replaces when it is
// time. The files, of which there are three sets of names, are those of [pki.ReadKeyCertBundle];
// [os.DirFS] makes a folder of the host an [fs.FS]. If there are none, the error wraps
// [fs.ErrNotExist]: some programs then take a CA of their own, by [Open]. Files that are incomplete or
// do not verify are another error.
//
// With Config.Key the private key is not in a file: a CA certificate in files whose key is in an HSM or
// a KMS signs with that. New files have to be for the same key then.
//
// The bundle has the roots of the root file, and a chain of [Authority.Sign] the certificates between
// leaf and root. Before a CA is used, it signs a leaf for the trust domain with a key that is thrown
// away, which is verified as a peer would: so a CA of another trust domain, one whose constraints or
// path length do not allow leaves, and one that is expired are refused at the start, and not by the
// peers. A leaf never outlives the certificates above it, so that the default lifetime shrinks at
// the end of their life, from signature to signature.
//
// # New files
//
// [Authority.Run] looks at the names, sizes and times of the files every Config.ReloadInterval, also
// through the links that Kubernetes swaps, and reads them when they have changed and then been left
// alone for 100 milliseconds. With an unchanged set of roots, the new CA takes over at once. A
// change of the roots is refused, unless Config.MultiRoot says that consumers take several; then
// roots may be added, or taken away, but not exchanged in one step
// ([pki.KeyCertBundle.MayReplace]): to give consumers the time to learn of a root before it signs is
// the operator's part. What is refused leaves the CA as it was, and is in the log and in Status.
//
// The sequence number of the bundle is the time of the newest file when it was read, in milliseconds
// since 1970, and at least one more than before when the roots change. So it does not go back when
// the program starts again, as long as the files are not exchanged for ones with older times.
//
// # Tokens
//
// With Config.JWT the authority also signs JWT-SVIDs, with keys of its own, which rotate. They are kept
// in store, which must not be that of another CA; the sequence number counts their changes, too. A
// nil store keeps them in memory: then they are lost when the process ends, and tokens with them,
// so that it is for a single replica with short tokens.
//
// The methods Rotate, Taint and Revoke refuse what would change the roots with [ErrPluggedIn].
func Load(ctx context.Context, cfg Config, fsys fs.FS, store Store) (*Authority, error) {
	if fsys == nil {
		return nil, errors.New("ca: Load needs a folder; os.DirFS makes one")
	}
	a, err := newAuthority(cfg)
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("ca: load the CA of %s: %w", a.cfg.TrustDomain, context.Cause(ctx))
	}
	f := &files{a: a, fsys: fsys}
	now := time.Now()
	f.seen = f.stamp()
	if f.first, err = f.read(now); err != nil {
		return nil, fmt.Errorf("ca: load the CA of %s: %w", a.cfg.TrustDomain, err)
	}
	f.say(now, nil)
	a.files = f
	if store != nil {
		a.store = store
		return a, a.open(ctx)
	}
	d, err := a.create(now)
	if err != nil {
		return nil, err
	}
	// There may be nothing at all that is ours to count, and the number of the files is enough.
	d.sequence = 0
	return a, a.install(d, "", now, now)
}

// plugged is what signs, from files. It never changes.
type plugged struct {
	pair        *pki.KeyCertBundle
	key         key                 // its certificate is that of the CA
	above       []*x509.Certificate // between a leaf and the root
	roots       []*x509.Certificate
	from, until time.Time // when all of it is valid
	read        time.Time
	sequence    uint64
}

// status describes the roots: the one that signs by itself is active, the others are trusted.
func (p *plugged) status() []RootStatus {
	out := make([]RootStatus, len(p.roots))
	for i, c := range p.roots {
		out[i] = RootStatus{Phase: Trusted, Certificate: c, Prepared: p.read, Activates: p.read}
		if c.Equal(p.key.cert) {
			out[i].Phase = Active
		}
	}
	return out
}

// files are the files of a plugged-in CA.
type files struct {
	a     *Authority
	fsys  fs.FS
	first *plugged // what Load found

	mu      sync.Mutex // held for as long as it takes to read them: nobody who signs waits for it
	seen    []stamp    // when they were last read
	pending []stamp    // seen since, and perhaps not complete
	retry   time.Time  // when to read again what was refused: time may mend it

	said    sync.Mutex // guards what Status tells; nothing else is waited for while it is held
	checked time.Time  // when they were last found to be in order
	err     error      // why they were refused since
}

// settle is how long files have to be left alone before they are read.
const settle = 100 * time.Millisecond

// retryRefused is how long files stay refused that do not change.
const retryRefused = time.Minute

// fileNames are the files whose change may be a change of the CA.
var fileNames = []string{
	"ca-cert.pem", "ca-key.pem", "cert-chain.pem", "root-cert.pem", "ca-crl.pem",
	"tls.crt", "tls.key", "ca.crt", "ca-bundle.crt", "crt.pem", "key.pem",
}

// stamp is what tells a file from the one that has its name later. It is nil for none.
type stamp struct{ info fs.FileInfo }

func (s stamp) equal(t stamp) bool {
	if s.info == nil || t.info == nil {
		return s.info == nil && t.info == nil
	}
	same := s.info.Size() == t.info.Size() && s.info.ModTime().Equal(t.info.ModTime())
	// A file of the host has a number, too. For others SameFile is always false.
	return same && (os.SameFile(s.info, t.info) || !os.SameFile(s.info, s.info))
}

func (f *files) stamp() []stamp {
	out := make([]stamp, len(fileNames))
	for i, name := range fileNames {
		if info, err := fs.Stat(f.fsys, name); err == nil {
			out[i].info = info
		}
	}
	return out
}

func (f *files) status() (checked time.Time, err error) {
	f.said.Lock()
	defer f.said.Unlock()
	return f.checked, f.err
}

// say keeps what was found at now for Status.
func (f *files) say(now time.Time, err error) {
	f.said.Lock()
	defer f.said.Unlock()
	if f.err = err; err == nil {
		f.checked = now.Round(0)
	}
}

// look takes over what has changed, and returns when to look again.
func (f *files) look(ctx context.Context) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, stamps := time.Now(), f.stamp()
	_, refused := f.status()
	switch {
	case f.pending == nil && slices.EqualFunc(stamps, f.seen, stamp.equal) && (refused == nil || now.Before(f.retry)):
		f.say(now, refused)
		return f.a.cfg.ReloadInterval
	case f.pending == nil || !slices.EqualFunc(stamps, f.pending, stamp.equal):
		f.pending = stamps // somebody may still be writing
		return settle
	}
	known := refused != nil && slices.EqualFunc(stamps, f.seen, stamp.equal)
	f.seen, f.pending = stamps, nil
	err := f.reload(ctx, now)
	f.say(now, err)
	if err != nil {
		f.retry = now.Add(retryRefused)
		if !known {
			f.a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "new CA files refused, the old CA goes on", slog.Any("trust_domain", f.a.cfg.TrustDomain), slog.Any("err", err))
		}
	}
	return f.a.cfg.ReloadInterval
}

// reload takes over what is in the files now, or says why not; mu is held.
func (f *files) reload(ctx context.Context, now time.Time) error {
	next, err := f.read(now)
	if err != nil {
		return fmt.Errorf("ca: load the CA of %s: %w", f.a.cfg.TrustDomain, err)
	}
	a := f.a
	a.mu.Lock()
	s, steps := a.advance(time.Now())
	taken, err := a.replacePlugged(s, next)
	a.mu.Unlock()
	a.log(steps)
	if taken {
		a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "CA files taken over", slog.Any("trust_domain", a.cfg.TrustDomain),
			slog.String("serial", next.key.id), slog.Int("roots", len(next.roots)), slog.Time("not_after", next.until))
	}
	return err
}

// replacePlugged puts next, which nobody has yet, in the place of what s has, unless it is the same; mu
// of the authority is held.
func (a *Authority) replacePlugged(s *state, next *plugged) (bool, error) {
	old := s.plugged
	if next.pair.Equal(old.pair) {
		return false, nil
	}
	if err := next.pair.MayReplace(old.pair, a.cfg.MultiRoot); err != nil {
		return false, fmt.Errorf("ca: load the CA of %s: %w", a.cfg.TrustDomain, err)
	}
	same := func(a, b []*x509.Certificate) bool {
		return len(a) == len(b) && !slices.ContainsFunc(a, func(c *x509.Certificate) bool { return !slices.ContainsFunc(b, c.Equal) })
	}
	if same(old.roots, next.roots) {
		next.sequence, next.roots = old.sequence, old.roots
	} else {
		next.sequence = max(next.sequence, old.sequence+1)
	}
	after, err := a.newState(s, s.document, s.version, next)
	if err != nil {
		return false, err
	}
	after.dirty = s.dirty
	a.publish(after)
	return true, nil
}

// read returns the CA in the files if it is fit to sign for the trust domain.
func (f *files) read(now time.Time) (*plugged, error) {
	pair, err := pki.ReadKeyCertBundle(f.fsys, f.a.key(), now)
	if err != nil {
		return nil, err
	}
	p := &plugged{pair: pair, roots: pair.Roots(), read: now.Round(0)}
	bundle, err := spiffe.NewBundle(f.a.cfg.TrustDomain, spiffe.BundleContents{X509Authorities: p.roots})
	if err != nil {
		return nil, err
	}
	issuer := pair.Issuer()
	cert := issuer.Certificate()
	p.key = key{id: serial(cert), cert: cert, issuer: issuer, phase: Active}
	p.from, p.until = cert.NotBefore, cert.NotAfter
	for _, c := range issuer.Chain() {
		if !slices.ContainsFunc(p.roots, c.Equal) {
			p.above = append(p.above, c)
		}
		p.from, p.until = later(p.from, c.NotBefore), earlier(p.until, c.NotAfter)
	}
	// The root that the chain leads to, or the last to end if it leads to several.
	var end time.Time
	top := issuer.Chain()[len(issuer.Chain())-1]
	for _, r := range p.roots {
		if r.Equal(top) || top.CheckSignatureFrom(r) == nil {
			end = later(end, r.NotAfter)
		}
	}
	if !end.IsZero() {
		p.until = earlier(p.until, end)
	}
	if err := probe(f.a.cfg.TrustDomain, issuer, p.above, bundle, now); err != nil {
		return nil, err
	}
	for _, name := range fileNames {
		if info, err := fs.Stat(f.fsys, name); err == nil {
			p.sequence = max(p.sequence, uint64(max(1, info.ModTime().UnixMilli())))
		}
	}
	return p, nil
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// probe has issuer sign a leaf of the trust domain, for a key that is thrown away, and verifies it as a
// peer of either role does who has the bundle.
func probe(td spiffe.TrustDomain, issuer *pki.Issuer, above []*x509.Certificate, bundle *spiffe.Bundle, now time.Time) error {
	fail := func(err error) error {
		return fmt.Errorf("%q cannot sign for the trust domain %q: %w", issuer.Certificate().Subject, td, err)
	}
	id, err := spiffe.ParseID(td.ID().String() + "/probe")
	if err != nil {
		return fail(err)
	}
	signer, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		return fail(err)
	}
	leaf, err := issuer.IssueLeaf(pki.LeafOptions{
		PublicKey: signer.Public(), ID: id,
		NotBefore: now.Add(-time.Minute), NotAfter: earlier(now.Add(time.Minute), issuer.Certificate().NotAfter),
	})
	if err != nil {
		return fail(err)
	}
	v, err := spiffe.NewVerifier(bundle, spiffe.AllowIDs(id), &spiffe.VerifierOptions{Now: func() time.Time { return now }, Remember: -1})
	if err != nil {
		return fail(err)
	}
	for _, role := range []spiffe.Role{spiffe.ServerRole, spiffe.ClientRole} {
		if _, err := v.VerifyChain(append([]*x509.Certificate{leaf}, above...), role); err != nil {
			return fail(err)
		}
	}
	return nil
}
