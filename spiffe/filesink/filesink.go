// Package filesink writes the identity and trust bundles of any source to files, and keeps the files current, for
// programs that read certificates from files.
//
//	sink, err := filesink.Start(ctx, filesink.Config{Source: src, Dir: "/run/identity"})
//	if err != nil { … }
//	defer sink.Close()
//
// A [Sink] follows a *workloadapi.Source, a *secretcache.Manager (its default identity), a *filesource.Source or a
// source of package source, and writes on every change. [Sink.Write] writes once. Package filesource reads what a
// Sink writes.
//
// # Which files
//
//	cert-chain.pem    the certificates of the identity, leaf first
//	key.pem           the private key, in PKCS#8; see Config.TraditionalKey
//	root-cert.pem     the authorities of its trust domain
//
// [Config] can rename them, and add files with the bundles of other trust domains and with tokens. The Sink makes a
// missing directory, with mode 0755. To replace OUTPUT_CERTS of Istio's agent, set Plain, both modes to 0600 (0644 in
// a pod), and TraditionalKey unless PKCS8_KEY is set.
//
// # What readers see
//
// A reader never sees part of a file. The names are links, as in the volumes of Kubernetes: at every moment, after a
// crash too, all of them lead to files of one version. A reader can still get the old key and the new certificates, or
// the reverse, if both are replaced between its two reads. If they do not match, it must read again.
//
// With [Config].Plain the files are first written beside their names, durably, and then moved into place one by one:
// roots and bundles, then the key, then the certificates. A new certificate may need the new roots, and readers
// usually watch the certificates, so the key is in place before that notification. A reader that watches the directory
// gets its last notification when the set is complete. A reader that reads twice, and uses only files that agree,
// never uses a mixed set. If a process is killed between two moves, the next process first finishes them. With the
// same name for key and certificates there is one file, which always matches.
//
// # When something fails
//
// A failure changes no file. It is logged and in [Sink.Report], and the Sink retries after a share of the remaining
// life of the written identity. It does not write an expired identity. The files stay while the source has no
// identity, even after a withdrawal. Unchanged files are not written again. Every minute the Sink repairs files that
// another program has changed or removed.
//
// # Whose directory
//
// The directory, those above it and each link on the way must belong to the user of this process or to root, and other
// users must not be able to write to the directory. An error says which chown or chmod helps. A link in the place of a
// file is replaced, never followed. On Windows owners and modes are not checked.
package filesink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/files/delivery"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Config configures a [Sink]. Source and Dir are required; the fields explain the other zero values. [New] copies it.
type Config struct {
	// Source supplies the identity and the bundles, as published together, and a channel that is closed when they
	// change. Its methods must not block, and must be safe for concurrent use. The caller starts and closes it.
	Source interface {
		Snapshot() (*spiffe.Snapshot, error)
		Changed() <-chan struct{}
	}

	// Dir is the directory of the files. Only one Sink at a time may write to it.
	Dir string

	// Plain writes plain files, each replaced by a rename. Otherwise the names are links through "..data", which is
	// replaced in one step.
	Plain bool

	// CertName, KeyName and RootsName are the names of the files. Empty means the name in the package comment.
	// CertName and KeyName may be the same, for one file with the key and then the certificates.
	CertName, KeyName, RootsName string

	// Delivery writes a credential directory as in the draft SPIFFE Filesystem Delivery (spiffe/spiffe#376): the key
	// and the certificates in credential-bundle.private-key.x509.pem, and the authorities of each trust domain in
	// TRUST-DOMAIN.spiffe-trust-bundle.x509.pem. The other names must be empty. TraditionalKey must be unset, and so
	// must Plain, which would leave the files of removed bundles.
	Delivery bool

	// BundlesName is the name of a file with the bundles of all trust domains, own and federated, as a bundle map; see
	// [spiffe.ParseBundleMap]. Empty means no such file.
	BundlesName string

	// FederatedName, if set, returns the name of the file with the authorities of a federated trust domain, in PEM. An
	// empty name means no such file.
	FederatedName func(spiffe.TrustDomain) string

	// Tokens are files with JWT-SVIDs, for programs that read a token from a file. The map has the audience of each
	// token by file name; the files have KeyMode. The Sink renews a token when half of its life is over. If it cannot
	// get a new token, the file stays as it is, even across a restart. A token must be for the same identity as the
	// certificate: others are not written, and an existing one is removed or, with Plain, emptied. TokenSource fetches
	// the tokens: a *workloadapi.Source, or any source that returns a new token for each call and is safe for
	// concurrent use.
	Tokens      map[string]string
	TokenSource interface {
		Fetch(ctx context.Context, audience ...string) (token string, err error)
	}

	// Mode is the mode of the files without a private key: 0644, 0640, 0600 or the same without write permission. Zero
	// means 0644.
	Mode fs.FileMode

	// KeyMode is the mode of the file with the private key, with the same choices. Zero means 0600. With 0644 or 0444
	// every user that can enter the directory can read the key, and New logs a warning; use it in a pod where each
	// container runs as its own user.
	KeyMode fs.FileMode

	// TraditionalKey writes RSA keys in PKCS#1 and ECDSA keys in SEC 1, for programs that do not read PKCS#8. Other
	// keys have no such form and stay in PKCS#8.
	TraditionalKey bool

	// AllowWritable accepts, with a warning, a directory that other users can write to, such as a Kubernetes emptyDir.
	// Those users can replace the files.
	AllowWritable bool

	// Logger gets each write (Info), failures and problems (Warn), and that the source is not ready yet (Debug). Nil
	// means no logs.
	Logger *slog.Logger
}

// Sink keeps files current. [New] and [Start] make one. Its methods are safe for concurrent use.
type Sink struct {
	cfg  Config
	log  *slog.Logger
	life lifecycle.Life
	news renew.Signal

	writing sync.Mutex        // held while files are written; guards the next four
	folder  *fileset.Folder   // nil if it is not open
	running bool              // so the directory stays open
	warn    func(error)       // about the directory, once
	tokens  map[string]*token // by the names of their files; nil before the first attempt

	mu     sync.Mutex // guards status
	status status
}

// status is the state of a [Sink] at one moment.
type status struct {
	// at least one check without a failure found or put the files in order
	Ready     bool
	ID        spiffe.ID     // of the identity in the files; zero before Ready
	NotAfter  time.Time     // when its certificate ends
	Writes    uint64        // how often files were written; unchanged files do not count
	LastWrite time.Time     // when files were last written
	Checked   time.Time     // when the files were last found or put in order
	Err       error         // why the last check since then failed, or nil
	tokens    error         // why not all tokens are as they should be, or nil
	lifetime  time.Duration // how long the written identity lives
}

const (
	look = time.Minute // between checks of the files without a notification

	defaultCert, defaultKey, defaultRoots = "cert-chain.pem", "key.pem", "root-cert.pem"
)

// patience bounds the waits between attempts after a failure.
var patience = renew.Patience{Impatient: 30 * time.Second, Longest: look}

// New checks cfg and returns a Sink. It starts no goroutine and opens no file.
func New(cfg Config) (*Sink, error) {
	if cfg.Delivery {
		if cfg.CertName != "" || cfg.KeyName != "" || cfg.RootsName != "" || cfg.FederatedName != nil ||
			cfg.TraditionalKey || cfg.Plain {
			return nil, errors.New("filesink: new: Config.Delivery has its own names and form of the key: " +
				"CertName, KeyName, RootsName, FederatedName, TraditionalKey and Plain must be empty")
		}
		cfg.CertName, cfg.KeyName, cfg.FederatedName = delivery.Credential, delivery.Credential, delivery.Bundle
	}
	cfg.CertName, cfg.KeyName = cmp.Or(cfg.CertName, defaultCert), cmp.Or(cfg.KeyName, defaultKey)
	cfg.RootsName = cmp.Or(cfg.RootsName, defaultRoots)
	cfg.Mode, cfg.KeyMode = cmp.Or(cfg.Mode, 0o644), cmp.Or(cfg.KeyMode, 0o600)
	s := &Sink{cfg: cfg, log: ratelog.Patient(cfg.Logger)}
	s.cfg.Tokens = maps.Clone(cfg.Tokens)
	s.warn = private.Once(func(err error) {
		s.log.Warn("filesink: other users can replace the files", slog.Any("err", err))
	})
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("filesink: new: %w", err)
	}
	if cfg.KeyMode&0o004 != 0 {
		s.log.Info("filesink: all users that can enter the directory can read the private key, by Config.KeyMode",
			slog.String("dir", cfg.Dir))
	}
	return s, nil
}

// check checks the configuration.
func (s *Sink) check() error {
	cfg := &s.cfg
	switch {
	case cfg.Source == nil:
		return errors.New("Config has no Source")
	case cfg.Dir == "":
		return errors.New("Config has no Dir")
	}
	for _, mode := range []fs.FileMode{cfg.Mode, cfg.KeyMode} {
		if !slices.Contains([]fs.FileMode{0o644, 0o640, 0o600, 0o444, 0o440, 0o400}, mode) {
			return fmt.Errorf("Config has the mode %04o, and files can have 0644, 0640, 0600, 0444, 0440 and 0400",
				mode)
		}
	}
	if len(cfg.Tokens) > 0 && cfg.TokenSource == nil {
		return errors.New("Config has Tokens and no TokenSource")
	}
	names := []string{cfg.KeyName, cfg.CertName, cfg.RootsName, cfg.BundlesName}
	for name, audience := range cfg.Tokens {
		if name == "" || audience == "" {
			return errors.New("Config.Tokens has an empty name or audience")
		}
		names = append(names, name)
	}
	for i, name := range names {
		switch {
		case name == "": // no BundlesName
		case !isName(name):
			return fmt.Errorf("Config has %q, %w", name, errNoName)
		case i > 1 && slices.Contains(names[:i], name):
			return fmt.Errorf("Config has two files with the name %q", name)
		}
	}
	return nil
}

var errNoName = errors.New("which is not the name of a file, or begins with two dots")

// isName reports whether name can be the name of a file in the directory.
func isName(name string) bool {
	return name == filepath.Base(name) && !strings.HasPrefix(name, "..") && name != "." && filepath.IsLocal(name)
}

// Start makes a Sink, runs it in the background and waits until the files have the identity of the source. ctx bounds
// only the wait: the Sink runs until [Sink.Close]. On failure Start leaves nothing running, and returns the error of
// [New] or [Sink.Ready].
func Start(ctx context.Context, cfg Config) (*Sink, error) {
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, s, &s.life, s.work)
}

// Run keeps the files current, for programs that do not use [Start]. It blocks until ctx is done or [Sink.Close] is
// called, and then returns nil: a failed write does not end it. The files stay. It is an error to call Run while it
// runs, or after Close.
func (s *Sink) Run(ctx context.Context) error {
	return s.life.RunAs(ctx, "filesink", s.work)
}

func (s *Sink) work(ctx context.Context) error {
	s.setRunning(true)
	defer s.setRunning(false)
	for failures := 0; ctx.Err() == nil; {
		changed := s.cfg.Source.Changed()
		_, wait, err, _ := s.round(ctx)
		if err != nil {
			failures++
			wait = min(wait, s.wait(renew.NewFailure(failures, err)))
		} else {
			failures = 0
		}
		renew.Wait(ctx, wait, changed)
	}
	return nil
}

// setRunning says whether the directory stays open between writes.
func (s *Sink) setRunning(running bool) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.running = running
	s.release()
}

// release closes the directory, unless it stays open; writing is held.
func (s *Sink) release() {
	if s.folder != nil && !s.running {
		_ = s.folder.Close() // everything written is durable
		s.folder = nil
	}
}

// wait returns how long to wait after a failure.
func (s *Sink) wait(f renew.Failure) time.Duration {
	st := s.state()
	var left time.Duration
	if st.lifetime > 0 {
		left = time.Until(st.NotAfter)
	}
	return min(patience.Wait(f, st.lifetime, left, rand.Float64()), look)
}

// Write writes the current identity and bundles once, and reports whether anything in the directory changed. It works
// without [Sink.Run], for programs that write once and exit, and alongside it. It also fetches the tokens that are
// due, which takes up to 5 seconds. It fails if a source fails, the identity has expired, other users can write to the
// directory, or a file cannot be written.
func (s *Sink) Write() (changed bool, err error) {
	changed, _, err, tokens := s.round(context.Background())
	if err == nil && tokens != nil {
		err = fmt.Errorf("filesink: %w", tokens)
	}
	return changed, err
}

// round fetches the tokens that are due, and writes the files. wait is how long until tokens are due or a file may
// need repair.
func (s *Sink) round(ctx context.Context) (changed bool, wait time.Duration, err, tokens error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	defer s.release()
	wait, tokens = s.fetchTokens(ctx)
	svid, changed, err := s.write()
	if err != nil {
		err = fmt.Errorf("filesink: %w", err)
	}
	s.note(ctx, svid, changed, err, tokens)
	return changed, wait, err, tokens
}

// write is Write without the notification of readers; writing is held. It opens the directory first, so that problems
// with it are known, and the work of an earlier process is finished, before the source is ready.
func (s *Sink) write() (*spiffe.SVID, bool, error) {
	if err := s.open(); err != nil {
		return nil, false, err
	}
	snap, err := s.cfg.Source.Snapshot()
	if err != nil {
		return nil, false, err
	}
	svid, _ := snap.SVID() // of a snapshot: never an error
	if err := certchain.InTime(svid.Leaf(), time.Now()); err != nil {
		return nil, false, fmt.Errorf("the identity %q of the source is not written, and the files stay as they "+
			"are: %w", svid.ID(), err)
	}
	files, err := s.files(snap, svid)
	if err != nil {
		return nil, false, err
	}
	changed, err := s.folder.Write(files)
	return svid, changed, err
}

// open opens the directory. It reopens it if the path leads to another directory or is no longer safe.
func (s *Sink) open() error {
	if s.folder != nil {
		if s.folder.Check() == nil {
			return nil
		}
		_ = s.folder.Close()
		s.folder = nil
	}
	o := fileset.Options{Program: "this program", Plain: s.cfg.Plain, Last: []string{s.cfg.KeyName, s.cfg.CertName}}
	if s.cfg.AllowWritable {
		o.Warn = s.warn
	}
	var err error
	s.folder, err = fileset.Open(s.cfg.Dir, o)
	return err
}

// files returns the files that must be in the directory.
func (s *Sink) files(snap *spiffe.Snapshot, svid *spiffe.SVID) (map[string]fileset.File, error) {
	certs, key, err := svid.MarshalPEM()
	if err != nil {
		return nil, err
	}
	bundle, err := snap.Bundle(svid.ID().TrustDomain())
	if err != nil {
		return nil, err
	}
	cfg := &s.cfg
	if cfg.TraditionalKey {
		if key, err = certpem.TraditionalKey(key); err != nil {
			return nil, err
		}
	}
	roots := cfg.RootsName
	if cfg.Delivery {
		roots = delivery.Bundle(bundle.TrustDomain())
	}
	files := map[string]fileset.File{
		cfg.CertName: {Data: certs, Mode: cfg.Mode}, roots: {Data: bundle.MarshalPEM(), Mode: cfg.Mode},
	}
	if cfg.KeyName == cfg.CertName {
		key = append(key, certs...)
	}
	files[cfg.KeyName] = fileset.File{Data: key, Mode: cfg.KeyMode}
	if cfg.BundlesName != "" {
		all, err := snap.Bundles().Marshal()
		if err != nil {
			return nil, err
		}
		files[cfg.BundlesName] = fileset.File{Data: append(all, '\n'), Mode: cfg.Mode}
	}
	return files, s.addMore(files, snap, svid)
}

// addMore adds the bundles of other trust domains and the tokens to files.
func (s *Sink) addMore(files map[string]fileset.File, snap *spiffe.Snapshot, svid *spiffe.SVID) error {
	cfg := &s.cfg
	add := func(field, name string, file fileset.File) error {
		if !isName(name) {
			return fmt.Errorf("%s has %q, %w", field, name, errNoName)
		}
		if _, twice := files[name]; twice {
			return fmt.Errorf("%s has %q, which is the name of another file", field, name)
		}
		files[name] = file
		return nil
	}
	if cfg.FederatedName != nil {
		for b := range snap.Bundles().All() {
			td := b.TrustDomain()
			if td == svid.ID().TrustDomain() {
				continue
			}
			if name := cfg.FederatedName(td); name != "" {
				file := fileset.File{Data: b.MarshalPEM(), Mode: cfg.Mode}
				if err := add("Config.FederatedName", name, file); err != nil {
					return err
				}
			}
		}
	}
	for name := range cfg.Tokens {
		t := s.tokens[name]
		text := t.text
		if !t.of(svid.ID().String()) { // a token of the previous identity must not stand beside this certificate
			if text = ""; !cfg.Plain || t.subject == "" {
				continue
			}
		}
		if err := add("Config.Tokens", name, fileset.File{Data: []byte(text), Mode: cfg.KeyMode}); err != nil {
			return err
		}
	}
	return nil
}

// note records the result of an attempt to write svid, logs it and notifies readers; writing is held.
func (s *Sink) note(ctx context.Context, svid *spiffe.SVID, changed bool, err, tokens error) {
	now := time.Now().Round(0)
	s.mu.Lock()
	st := &s.status
	before := *st
	st.Err, st.tokens = err, tokens
	if err == nil {
		st.Ready, st.ID, st.NotAfter, st.Checked = true, svid.ID(), svid.NotAfter(), now
		st.lifetime = svid.NotAfter().Sub(svid.Leaf().NotBefore)
	}
	if changed {
		st.Writes++
		st.LastWrite = now
	}
	if changed || st.Ready != before.Ready {
		s.news.Notify() // before readers see the state, so that the next notification means the next change
	}
	s.mu.Unlock()
	dir := slog.String("dir", s.cfg.Dir)
	if tokens != nil && before.tokens == nil && ctx.Err() == nil {
		s.log.LogAttrs(ctx, slog.LevelWarn,
			"filesink: not all JWT-SVIDs could be fetched, and their files stay as they are", dir,
			slog.Any("err", tokens))
	}
	switch {
	case errors.Is(err, spiffe.ErrNotReady) && !before.Ready: // normal during a start
		s.log.LogAttrs(ctx, slog.LevelDebug, "filesink: the source is not ready yet", dir, slog.Any("err", err))
	case err != nil && (before.Err == nil || before.Err.Error() != err.Error()):
		s.log.LogAttrs(ctx, slog.LevelWarn, "filesink: the files could not be written", dir, slog.Any("err", err))
	case err == nil && (changed || before.Err != nil):
		s.log.LogAttrs(ctx, slog.LevelInfo, "filesink: the files are current", dir, slog.Bool("written", changed),
			slog.String("id", svid.ID().String()), slog.Time("not_after", svid.NotAfter()))
	}
}

// Ready waits until the files have the identity of the source. The error wraps [spiffe.ErrNotReady], the cause of ctx
// and the last failure. After [Sink.Close] Ready does not wait for ctx. If Run was never called, the error says so.
func (s *Sink) Ready(ctx context.Context) error {
	return s.life.Ready(ctx, s.Changed, func() bool { return s.state().Ready }, func() error {
		return s.life.NotReady("filesink", s.state().Err, "nothing was written yet")
	})
}

// Close stops the Sink for good, waits for its goroutines, and returns nil. The files stay.
func (s *Sink) Close() error { return s.life.Close() }

// Changed returns a channel that is closed after a write of the files, and when the Sink becomes ready, for programs
// that tell a reader to reload them. Take the channel before calling [Sink.Report], so that no change is missed.
func (s *Sink) Changed() <-chan struct{} { return s.news.Changed() }

// Report implements [report.Reporter] with the identity in the files; its upstreams are the files and, if set, the
// source of tokens. The Sink is not ready before the files have an identity, and while writes fail and that identity
// has less than a quarter of its life left. The names of the metrics begin with svidkit_filesink.
func (s *Sink) Report() report.Report {
	st := s.state()
	r := report.Report{Upstreams: []report.Upstream{{Name: "files that it writes", LastSuccess: st.Checked,
		Err: st.Err}}}
	switch {
	case !st.Ready:
		r.NotReady = fmt.Errorf("%w: the files do not have the identity yet", spiffe.ErrNotReady)
		if st.Err != nil {
			r.NotReady = fmt.Errorf("%w: %w", r.NotReady, st.Err)
		}
	case st.Err != nil && time.Until(st.NotAfter) < st.lifetime/4:
		r.NotReady = fmt.Errorf("the identity in the files ends at %s, and they cannot be written: %w",
			st.NotAfter.UTC().Format(time.RFC3339), st.Err)
	}
	if len(s.cfg.Tokens) > 0 {
		r.Upstreams = append(r.Upstreams,
			report.Upstream{Name: "JWT-SVIDs for files", OK: st.tokens == nil, Err: st.tokens})
	}
	if !st.ID.IsZero() {
		r.Identities = []report.Identity{{Name: st.ID.String(), NotAfter: st.NotAfter, LastSuccess: st.LastWrite}}
	}
	m := new(metrics.Set)
	m.Value("svidkit_filesink_ready", "Whether the files have had the identity of the source.", metrics.Bool(st.Ready))
	m.Value("svidkit_filesink_in_order", "Whether the files had what the source has at the last look.",
		metrics.Bool(st.Err == nil))
	m.Totals("svidkit_filesink_writes_total", "How often the files were written.",
		func(add metrics.Add) { add(float64(st.Writes)) })
	m.Time("svidkit_filesink_write_timestamp_seconds",
		"When the files were last written, in seconds since 1970.", st.LastWrite)
	m.Time("svidkit_filesink_checked_timestamp_seconds",
		"When the files were last found or put in order, in seconds since 1970.", st.Checked)
	m.Time("svidkit_filesink_svid_end_timestamp_seconds",
		"When the certificate in the files expires, in seconds since 1970.", st.NotAfter)
	r.Metrics = m.Write
	return r
}

func (s *Sink) state() status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}
