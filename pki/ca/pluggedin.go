package ca

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// PluggedIn is an operator's CA in files, for [Load].
type PluggedIn struct {
	// Dir is the directory with the files, under one of the sets of names in [pki.ReadKeyCertBundle]. It is required.
	Dir string

	// Key returns the CA's private key if it is not in a file, but in an HSM or a KMS; nil means that it is in a
	// file. It is a function so that nothing prints the key. The key must be safe for concurrent use. New files must
	// match the key that Key returns then.
	Key func() crypto.Signer

	// MultiRoot allows the root file to change while the authority runs.
	MultiRoot bool

	// Tokens keeps the keys of JWT-SVIDs. It must not be another CA's store. Nil keeps them in memory, for a single
	// replica with short tokens: the keys, and with them the tokens, are lost when the process ends.
	Tokens Store

	fsys fs.FS // for tests, in place of Dir
}

// Load makes an authority whose CA is in files that an operator provides and replaces in time. If there are none, the
// error wraps [fs.ErrNotExist], so that a program can make its own CA with [Open]. Incomplete files, or files that do
// not verify, give another error. Config.Rotation applies only to the keys of JWT-SVIDs.
//
// The bundle has the roots of the root file, and a chain from [Authority.Sign] has the certificates between leaf and
// root. Before Load uses a CA, the CA signs a test leaf for a throwaway key, which is verified as a peer would. So a
// CA of another trust domain, an expired CA, and a CA whose constraints or path length forbid leaves are refused at
// the start, rather than by the peers. A leaf never outlives the certificates above it: near their end the default
// lifetime shrinks from one signature to the next.
//
// # New files
//
// [Authority.Run] follows the files, even through the links that Kubernetes swaps. It reads them when the system
// announces a change, and every few seconds, and accepts contents that two readings 100 milliseconds apart agree on.
// With the same roots the new CA takes over at once. A change of the roots is refused, unless MultiRoot says that
// consumers accept several. Then roots may be added or removed, but not exchanged in one step: the operator must give
// consumers time to learn of a root before it signs. A refused change leaves the CA as it was, and is in the log and
// in Status.
//
// The bundle's sequence number is the newest file's time when it was read, in milliseconds since 1970, and grows by
// at least one when the roots change. So a restart does not lower it, unless the files are exchanged for older ones.
// Rotations of the JWT-SVID keys raise it too.
//
// The methods Rotate, Taint and Revoke refuse to change the roots.
//
// # Who may write the files
//
// The files decide which CA a trust domain has. So the files, the directory, the directories above it and each link
// on the way must belong to root or to the user of this process, and no other user may be able to change or replace
// them. A directory that all users can write to needs the sticky bit, which volumes of Kubernetes Secrets have, and a
// group that can write must be root's or one of this process's. Otherwise the error wraps [ErrUnfit] and says which
// chown or chmod helps. A private key that all users can read is used, with a warning unless it is in a Kubernetes
// volume.
func Load(ctx context.Context, cfg Config, from PluggedIn) (*Authority, error) {
	if from.Dir == "" && from.fsys == nil {
		return nil, errors.New("ca: Load needs a directory")
	}
	a, err := newAuthority(cfg)
	if err != nil {
		return nil, err
	}
	f := &pluggedFiles{a: a, dir: from.Dir, multiRoot: from.MultiRoot, key: from.Key}
	paths, o := slices.Clone(fileNames), &follow.Options{FS: from.fsys, Open: f.open, Logger: a.cfg.Logger}
	if from.fsys != nil {
		o.Poll = time.Second
	} else {
		for i, name := range paths {
			paths[i] = filepath.Join(f.dir, name)
		}
	}
	f.follower = follow.New(paths, f.take, o)
	a.files = f
	if err := f.follower.Read(ctx); err != nil {
		return nil, fmt.Errorf("ca: load the CA of %s: %w", a.cfg.TrustDomain, err)
	}
	if from.Tokens != nil {
		a.store = from.Tokens
		return a, a.open(ctx)
	}
	d := newDocument()
	d.Sequence = 0 // there may be no keys of ours, so the number of the files is enough
	if err := a.createInMemory(d); err != nil {
		return nil, err
	}
	a.opened(ctx)
	return a, nil
}

// plugged is a CA from files. It never changes.
type plugged struct {
	pair        *pki.KeyCertBundle
	key         rotation.Key        // with the CA's certificate
	above       []*x509.Certificate // between a leaf and the root
	roots       []*x509.Certificate
	from, until time.Time // all certificates are valid in this time
	read        time.Time
	sequence    uint64
}

// status describes the roots: the root that signs leaves itself is active, the others are trusted.
func (p *plugged) status() []KeyStatus {
	out := make([]KeyStatus, len(p.roots))
	for i, c := range p.roots {
		out[i] = KeyStatus{ID: rotation.Serial(c), Phase: "trusted", Certificate: c, Prepared: p.read,
			Activates: p.read}
		if c.Equal(p.key.Cert) {
			out[i].Phase = "active"
		}
		out[i] = out[i].worded()
	}
	return out
}

// pluggedFiles are the files of a plugged-in CA.
type pluggedFiles struct {
	a         *Authority
	dir       string
	multiRoot bool
	key       func() crypto.Signer
	follower  *follow.Follower
	first     *plugged // the CA that Load found
	told      bool     // the log says that all users can read the key; only the follower uses it
}

// open opens a file that no other user can have made or can change.
func (f *pluggedFiles) open(path string) (*os.File, error) {
	file, err := private.OpenFile(path, os.O_RDONLY, private.Options{})
	if err != nil {
		return nil, lasting(err)
	}
	if f.told || !slices.Contains(keyNames, filepath.Base(path)) {
		return file, nil
	}
	if err := private.CheckKeyFile(path, file); err != nil {
		f.told = true
		f.a.cfg.Logger.Warn("other users can read the private key of the CA", slog.Any("err", err),
			slog.String("run", fmt.Sprintf("chmod 0600 %q", path)))
	}
	return file, nil
}

// keyNames are the files with private keys.
var keyNames = []string{"ca-key.pem", "tls.key", "key.pem"}

// fileNames are the files to watch for a change of the CA.
var fileNames = []string{
	"ca-cert.pem", "ca-key.pem", "cert-chain.pem", "root-cert.pem", "ca-crl.pem",
	"tls.crt", "tls.key", "ca.crt", "ca-bundle.crt", "crt.pem", "key.pem",
}

// take makes the CA in the files the current one, if the rules allow it. Only the follower calls it.
func (f *pluggedFiles) take(ctx context.Context, read follow.Files) error {
	folder := follow.Files{}
	for path, file := range read {
		folder[filepath.Base(path)] = file
	}
	next, err := f.parse(folder, time.Now())
	if err != nil {
		return err
	}
	a := f.a
	if f.first == nil { // during Load, nothing else uses the authority yet
		f.first = next
		return nil
	}
	a.mu.Lock()
	s, steps := a.advance(time.Now())
	taken, err := a.replacePlugged(s, next)
	a.mu.Unlock()
	a.happened("", steps...)
	if taken {
		a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "CA files taken over",
			slog.String("serial", next.key.ID), slog.Int("roots", len(next.roots)), slog.Time("not_after", next.until))
		a.keep(a.keyEvent(rotation.Replaced, &s.plugged.key, time.Now(), next.key.ID, "new files in "+f.dir))
	}
	return err
}

// replacePlugged replaces the CA in s by next, which is not published yet, unless they are the same; mu of the
// authority is held.
func (a *Authority) replacePlugged(s *state, next *plugged) (bool, error) {
	old := s.plugged
	if next.pair.Equal(old.pair) {
		return false, nil
	}
	same, err := mayReplace(old.roots, next.roots, a.files.multiRoot)
	if err != nil {
		return false, err
	}
	if same {
		next.sequence, next.roots = old.sequence, old.roots
	} else {
		next.sequence = max(next.sequence, old.sequence+1)
	}
	after, err := a.newState(s, s.Document, s.version, next)
	if err != nil {
		return false, err
	}
	after.dirty = s.dirty
	a.publish(after)
	return true, nil
}

// mayReplace reports whether the roots of a running CA may change from old to next, both without duplicates, and
// whether they are the same. Other roots are refused, because verifiers with the old roots would refuse the new CA's
// leaves, unless multiRoot says that consumers accept several roots and one set contains the other.
func mayReplace(old, next []*x509.Certificate, multiRoot bool) (same bool, err error) {
	within := func(some, all []*x509.Certificate) bool {
		return !slices.ContainsFunc(some, func(c *x509.Certificate) bool { return !slices.ContainsFunc(all, c.Equal) })
	}
	kept, known := within(old, next), within(next, old)
	switch {
	case kept && known:
		return true, nil
	case !multiRoot:
		return false, errors.New("the roots have changed, which needs support for several roots at a time: restart " +
			"with the new ones, or turn that on")
	case !kept && !known:
		return false, errors.New("the roots have been swapped: first add the new roots beside the old ones, and " +
			"take the old ones away when all workloads have the new")
	}
	return false, nil
}

// parse returns the CA in the files, if it is fit to sign for the trust domain.
func (f *pluggedFiles) parse(folder follow.Files, now time.Time) (*plugged, error) {
	var signer crypto.Signer
	if f.key != nil {
		signer = f.key()
	}
	pair, err := pki.ReadKeyCertBundle(folder, signer, now)
	if err != nil {
		return nil, err
	}
	p := &plugged{pair: pair, roots: pair.Roots(), read: now.Round(0)}
	bundle, err := spiffe.NewBundle(f.a.cfg.TrustDomain, spiffe.BundleContents{X509Authorities: p.roots})
	if err != nil {
		return nil, err
	}
	for _, r := range p.roots {
		if r.CheckSignatureFrom(r) != nil {
			return nil, fmt.Errorf("%q is among the roots, and %q has signed it: the root file takes the root, and "+
				"the file of the chain what is below", r.Subject, r.Issuer)
		}
	}
	issuer := pair.Issuer()
	cert := issuer.Certificate()
	p.key = rotation.Key{ID: rotation.Serial(cert), Cert: cert, Issuer: issuer, Phase: rotation.Active}
	p.until = cert.NotAfter
	chain := issuer.Chain()
	for _, c := range chain {
		if !slices.ContainsFunc(p.roots, c.Equal) {
			p.above = append(p.above, c)
		}
		p.from, p.until = later(p.from, c.NotBefore), rotation.Earlier(p.until, c.NotAfter)
	}
	if end := lastEnd(p.roots, chain[len(chain)-1]); !end.IsZero() {
		p.until = rotation.Earlier(p.until, end)
	}
	if err := probe(f.a.cfg.TrustDomain, issuer, p.above, bundle, now); err != nil {
		return nil, err
	}
	for file := range maps.Values(folder) {
		p.sequence = max(p.sequence, uint64(max(1, file.Info.ModTime().UnixMilli())))
	}
	return p, nil
}

// lastEnd returns the end of the root that top is or, if several have signed it, of the one that ends last.
func lastEnd(roots []*x509.Certificate, top *x509.Certificate) (end time.Time) {
	for _, r := range roots {
		if r.Equal(top) || top.CheckSignatureFrom(r) == nil {
			end = later(end, r.NotAfter)
		}
	}
	return end
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// probe signs a leaf of the trust domain with issuer, for a throwaway key, and verifies it in either role, as a peer
// with the bundle would.
func probe(td spiffe.TrustDomain, issuer *pki.Issuer, above []*x509.Certificate, bundle *spiffe.Bundle,
	now time.Time) error {
	fail := func(err error) error {
		return fmt.Errorf("%q cannot sign for the trust domain %q: %w", issuer.Certificate().Subject, td, err)
	}
	id := spiffe.MustParseID(td.ID().String() + "/probe")
	signer, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return fail(err)
	}
	leaf, err := issuer.Issue(pki.CertificateOptions{
		PublicKey: signer.Public(), SANs: []pki.SAN{pki.IDSAN(id)},
		NotBefore: now.Add(-time.Minute), NotAfter: rotation.Earlier(now.Add(time.Minute),
			issuer.Certificate().NotAfter),
	})
	if err != nil {
		return fail(err)
	}
	v, err := spiffe.NewVerifier(bundle, spiffe.AllowIDs(id), func() time.Time { return now })
	if err != nil {
		return fail(err)
	}
	for _, role := range []spiffe.Role{spiffe.ServerRole, spiffe.ClientRole} {
		chain := append([]*x509.Certificate{leaf}, above...)
		if _, err := v.WithAlgorithms(spiffe.AnyAlgorithm()).VerifyChain(chain, role); err != nil {
			return fail(err)
		}
	}
	return nil
}
