// Package filesource reads an identity and trust bundles from files that another program writes and renews, such as
// cert-manager, spiffe-helper or the kubelet.
//
//	src, err := filesource.Start(ctx, filesource.Config{
//		CertFile: "/etc/identity/tls.crt",
//		KeyFile:  "/etc/identity/tls.key",
//		Bundles:  []filesource.BundleFile{{Path: "/etc/identity/ca.crt"}},
//	})
//	if err != nil { … }
//	defer src.Close()
//
// # Which files
//
//	cert-manager, a mounted Secret    CertFile tls.crt, KeyFile tls.key, Bundles {Path: ca.crt}
//	csi-driver-spiffe                 the same, in /var/run/secrets/spiffe.io
//	spiffe-helper                     CertFile svid.pem, KeyFile svid_key.pem, Bundles {Path: svid_bundle.pem}
//	a credential folder               Folder, or no Config and the environment variable SPIFFE_CREDENTIAL_FOLDER
//	Kubernetes PodCertificate         CertFile credentialbundle.pem (its credentialBundlePath), no KeyFile
//	Kubernetes ClusterTrustBundle     Bundles {Path: trust-bundle.pem, TrustDomain: …}
//	a SPIFFE bundle document          Bundles {Path: …, TrustDomain: …}
//	a bundle map                      Bundles {Path: …, Map: true}
//	the keys of an OIDC issuer        Bundles {Path: …, JWKS: true, TrustDomain: …}
//
// The draft SPIFFE Filesystem Delivery (spiffe/spiffe#376) defines the credential folder; volumes of Kubernetes 1.37
// can have its form: see package podcert.
//
// # When files change
//
// The source reads the files when the system announces a change, and every five seconds. It adopts their contents when
// two readings 100 milliseconds apart agree. So it does not matter whether they are written in place, by a rename, or
// by the links that Kubernetes swaps.
//
// A file has 1 MiB at most, and a bundle map 16 MiB. All other files together have 8 MiB at most: beyond that the
// largest count as bad.
//
// A bad file replaces nothing. The identity is one part, and each bundle file is another. If a part is missing, does
// not parse or must not be used, its last good state stays, and the other parts still change. The log and
// [Source.Report] say why. The part recovers once its files are good.
//
// A new certificate replaces the old one if the key belongs to it; it is an X.509-SVID by the rules of
// [spiffe.NewSVID]; it is valid now; its ID is Config.ID or, without one, in the trust domain of the first identity;
// its extended key usages permit all that the certificate in force permits; and it chains to the bundle of its trust
// domain. If no file has a bundle of that trust domain, the chain is not checked, and Config.ID is required if there
// are other bundles.
//
// A new bundle replaces the old one at once, even if it no longer verifies the identity in force, because a removed
// authority may have been revoked; the Report says so. A bundle document with a lower sequence number than the one in
// force is refused until the program restarts.
//
// # Whose files
//
// The files, the directories above them and each link on the way must belong to the user of this process, to root, or
// to one of Config.Owners: a helper in the same pod that runs as another user gives its key file a mode such as 0640
// and a group that this process is in. A file that other users can write to is refused, and so is a key file that
// other users can read. A directory in which all users can write, such as an emptyDir of Kubernetes, is used with a
// warning, unless there are bundles of several trust domains, as in a credential folder: see Config.AllowWritable.
// This process's groups and root's group do not count as other users, because they include the fsGroup of a pod. In a
// Kubernetes volume, whose files are behind directories like ..2026_01_02_15_04_05.123, modes are not checked, because
// the volume sets them. Do not mount single files with subPath: Kubernetes never renews those, and their modes are
// checked. An error says which chown or chmod helps. On Windows none of this is checked.
package filesource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/files/delivery"
	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Config configures a [Source]. Set Folder, or else CertFile, Bundles or both; the fields explain the other zero
// values. If all three are empty, Folder is the value of the environment variable SPIFFE_CREDENTIAL_FOLDER. [New]
// copies it.
type Config struct {
	// Folder is a credential folder: the private key and the certificates are in
	// credential-bundle.private-key.x509.pem, and the bundle of each trust domain in
	// TRUST-DOMAIN.spiffe-trust-bundle.x509.pem, all in PEM. Bundles may come and go while the first file is there;
	// the bundle of the identity's own trust domain is required. CertFile, KeyFile and Bundles must be empty.
	Folder string

	// CertFile has the certificates of the identity in PEM, leaf first, and KeyFile its unencrypted private key in
	// PEM. If one file has both, in any order, leave KeyFile empty or set both to it. Without a CertFile the source
	// has only bundles, for programs that verify peers and present no identity.
	CertFile, KeyFile string

	// ID is the identity that the certificate must have. The zero ID means any in the trust domain of the first
	// accepted certificate.
	ID spiffe.ID

	// Bundles are the files with trust bundles. If several are for one trust domain, its bundle has the authorities of
	// all of them and no sequence number.
	Bundles []BundleFile

	// Owners are the numeric IDs of further users whose files and directories are trusted, besides this process's user
	// and root: for example the user of a helper that writes the files in the same pod. These users can replace the
	// identity and the roots.
	Owners []int

	// AllowWritable accepts, with a warning, bundles of several trust domains (which a Folder always has) in a
	// directory that other users can write to. By renaming files those users can give one trust domain the roots of
	// another.
	AllowWritable bool

	// Refuse lists directories whose files are never read, whatever path leads to them. Name those that this program
	// writes to, so that it does not take its own output for a new identity.
	Refuse []string

	// Logger gets each change (Info), and refusals and problems (Warn). Nil means no logs.
	Logger *slog.Logger
}

// BundleFile is a file with trust bundles: CA certificates in PEM as of [spiffe.ParseBundlePEM], or, if it begins with
// {, a SPIFFE bundle document as of [spiffe.ParseBundle], unless a field says that it is something else.
type BundleFile struct {
	// Path is the path of the file.
	Path string

	// Map says that the file has the bundle documents of many trust domains; see [spiffe.ParseBundleMap].
	Map bool

	// JWKS says that the file has the keys of an issuer of tokens, for JWT-SVIDs; see [spiffe.ParseJWKS].
	JWKS bool

	// TrustDomain is the trust domain of the bundle. Zero means the trust domain of the identity. It must be zero for
	// a Map, which names its trust domains itself.
	TrustDomain spiffe.TrustDomain
}

// Source holds the current identity and bundles from the files. [New] and [Start] make one. Its methods are safe for
// concurrent use. Those that read work before, during and after [Source.Run].
type Source struct {
	cfg      Config
	keyFile  string // with the private key; empty if there is none
	strict   bool   // refuse directories that other users can write to
	log      *slog.Logger
	follower *follow.Follower
	life     lifecycle.Life

	cur  atomic.Pointer[state] // what readers read; only take writes it
	news renew.Signal

	found []string    // in the directory; only the follower uses it
	files files       // only take uses it
	warn  func(error) // about directories, once; only the follower uses it
}

// state holds values that were published together. It never changes.
type state struct {
	snap    *spiffe.Snapshot // nil if there is no identity
	bundles *spiffe.BundleSet
	ready   bool
	at      time.Time // when the last update was
	notes   []error
}

// svid returns the identity, or nil.
func (st *state) svid() *spiffe.SVID {
	if st.snap == nil {
		return nil
	}
	svid, _ := st.snap.SVID() // of a snapshot: never an error
	return svid
}

// New checks cfg and returns a Source. It starts no goroutine and opens no file.
func New(cfg Config) (*Source, error) {
	cfg.Bundles, cfg.Refuse, cfg.Owners = slices.Clone(cfg.Bundles), slices.Clone(cfg.Refuse), slices.Clone(cfg.Owners)
	if cfg.Folder == "" && cfg.CertFile == "" && cfg.KeyFile == "" && len(cfg.Bundles) == 0 {
		cfg.Folder = os.Getenv(delivery.Variable)
	}
	s := &Source{cfg: cfg, log: ratelog.Patient(cfg.Logger)}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("filesource: new: %w", err)
	}
	s.cur.Store(&state{bundles: new(spiffe.BundleSet)})
	s.warn = private.Once(func(err error) {
		s.log.Warn("filesource: other users can replace the files", slog.Any("err", err))
	})
	var paths []string
	var find func() []string
	if cfg.Folder != "" {
		cfg.CertFile, find = filepath.Join(cfg.Folder, delivery.Credential), s.find
		s.cfg.CertFile = cfg.CertFile
	}
	if cfg.CertFile != "" {
		s.keyFile = cmp.Or(cfg.KeyFile, cfg.CertFile)
		paths = append(paths, cfg.CertFile, s.keyFile)
	}
	domains, size, total := map[spiffe.TrustDomain]bool{}, int64(maxPart), int64(maxTotal)
	for _, b := range cfg.Bundles {
		paths = append(paths, b.Path)
		if b.Map {
			size, total = maxMap, maxTotal+maxMap
		} else {
			domains[b.TrustDomain] = true
		}
	}
	s.strict = !cfg.AllowWritable && (cfg.Folder != "" || len(domains) > 1)
	slices.Sort(paths)
	s.files.source, s.files.of, s.files.parts = s, cfg.Bundles, make([]part, len(cfg.Bundles))
	s.follower = follow.New(slices.Compact(paths), s.files.take,
		&follow.Options{Open: s.open, Find: find, MaxSize: size, MaxTotal: total, Each: true, Logger: s.log})
	return s, nil
}

// check checks the configuration.
func (s *Source) check() error {
	cfg := &s.cfg
	switch {
	case cfg.Folder != "" && (cfg.CertFile != "" || cfg.KeyFile != "" || len(cfg.Bundles) > 0):
		return errors.New("Config has a Folder, and a CertFile, a KeyFile or Bundles beside it")
	case cfg.Folder != "":
	case cfg.CertFile == "" && cfg.KeyFile != "":
		return errors.New("Config has a KeyFile and no CertFile")
	case cfg.CertFile == "" && len(cfg.Bundles) == 0:
		return errors.New("Config has neither a Folder nor a CertFile nor Bundles, and the environment has no " +
			delivery.Variable)
	case cfg.CertFile == "" && !cfg.ID.IsZero():
		return errors.New("Config has an ID, and no CertFile that could have it")
	case !cfg.ID.IsZero() && cfg.ID.Path() == "":
		return fmt.Errorf("Config.ID is %q, which is that of a trust domain and not of a workload", cfg.ID)
	}
	for i, b := range cfg.Bundles {
		switch {
		case b.Path == "":
			return fmt.Errorf("Config.Bundles[%d] has no Path", i)
		case b.Map && b.JWKS:
			return fmt.Errorf("Config.Bundles[%d] is a Map and a JWKS", i)
		case b.Map && !b.TrustDomain.IsZero():
			return fmt.Errorf("Config.Bundles[%d] is a Map, which names its trust domains, and has a TrustDomain", i)
		case !b.Map && b.TrustDomain.IsZero() && cfg.CertFile == "":
			return fmt.Errorf("Config.Bundles[%d] has no TrustDomain, and there is no CertFile whose trust "+
				"domain could be meant: %w", i, spiffe.ErrZero)
		case b.Path == cmp.Or(cfg.KeyFile, cfg.CertFile):
			return fmt.Errorf("Config.Bundles[%d] is the file with the private key", i)
		}
	}
	return nil
}

// Start makes a Source, runs it in the background and waits until it is ready. ctx bounds only the wait: the source
// runs until [Source.Close]. On failure Start leaves nothing running, and returns the error of [New] or
// [Source.Ready].
func Start(ctx context.Context, cfg Config) (*Source, error) {
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, s, &s.life, s.work)
}

// Run keeps the source current, for programs that do not use [Start]. It blocks until ctx is done or [Source.Close] is
// called, and then returns nil. The last identity and bundles stay readable. It is an error to call Run while it runs,
// or after Close.
func (s *Source) Run(ctx context.Context) error {
	return s.life.RunAs(ctx, "filesource", s.work)
}

func (s *Source) work(ctx context.Context) error {
	if err := s.follower.Read(ctx); err != nil && ctx.Err() == nil {
		s.log.LogAttrs(ctx, slog.LevelWarn, "filesource: files refused", slog.Any("err", err))
	}
	return s.follower.Run(ctx)
}

// Ready waits until the source has the identity, if it is configured with one, and the contents of each bundle file.
// The error wraps [spiffe.ErrNotReady], the cause of ctx and why the files were refused. After [Source.Close] Ready
// does not wait for ctx. If Run was never called, the error says so.
func (s *Source) Ready(ctx context.Context) error {
	return s.life.Ready(ctx, s.Changed, func() bool { return s.cur.Load().ready }, s.notReady)
}

// notReady returns the error that says what is missing.
func (s *Source) notReady() error {
	_, cause := s.follower.Status()
	return s.life.NotReady("filesource", cause, "the files were not read yet")
}

// Close stops the source for good, waits for its goroutines, and returns nil. The last identity and bundles stay
// readable.
func (s *Source) Close() error { return s.life.Close() }

// SVID returns the identity in force, with its key. It does not block or check the clock: the identity stays until the
// files have a better one, even after it has expired. Before the first identity, and without a CertFile, the error
// wraps [spiffe.ErrNotReady].
func (s *Source) SVID() (*spiffe.SVID, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Snapshot returns the identity and the bundles, as published together. It does not block. It fails like
// [Source.SVID].
func (s *Source) Snapshot() (*spiffe.Snapshot, error) {
	if snap := s.cur.Load().snap; snap != nil {
		return snap, nil
	}
	if s.cfg.CertFile == "" {
		return nil, fmt.Errorf("filesource: %w: Config has no CertFile, so there are bundles only", spiffe.ErrNotReady)
	}
	return nil, s.notReady()
}

// Bundle returns the current bundle of td. It does not block. For a trust domain without a file, the error wraps
// [spiffe.ErrUnknownTrustDomain]; before the files were read it wraps [spiffe.ErrNotReady] as well.
func (s *Source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	st := s.cur.Load()
	b, err := st.bundles.Bundle(td)
	if err != nil && !st.ready {
		return nil, fmt.Errorf("%w: %w", s.notReady(), err)
	}
	return b, err
}

// Bundles returns all current bundles.
func (s *Source) Bundles() *spiffe.BundleSet { return s.cur.Load().bundles }

// Changed returns a channel that is closed when the identity or the bundles change, or when Ready might return. Take
// the channel before reading, so that no change is missed:
//
//	for {
//		changed := src.Changed()
//		use(src.Snapshot())
//		<-changed
//	}
func (s *Source) Changed() <-chan struct{} { return s.news.Changed() }

// Report implements [report.Reporter] with the identity, the trust bundles, and the files as the upstream. Its
// problems are about the current state: skipped entries of bundles, and an identity that peers will refuse. The names
// of the metrics begin with svidkit_filesource.
func (s *Source) Report() report.Report {
	st := s.cur.Load()
	checked, err := s.follower.Status()
	var identity spiffe.SVIDSource
	if s.cfg.CertFile != "" {
		identity = s
	}
	var bundles spiffe.BundleSource
	if len(s.cfg.Bundles) > 0 || s.cfg.Folder != "" {
		bundles = s
	}
	r := sourcereport.Of(identity, bundles, "files")
	if identity == nil && !st.ready {
		r.NotReady = s.notReady()
	}
	r.Upstreams = []report.Upstream{{Name: cmp.Or(s.cfg.Folder, s.cfg.CertFile, "files"), LastSuccess: checked,
		Err: err}}
	r.Problems = slices.Clone(st.notes)
	m := new(metrics.Set)
	gauge := func(name, help string, value float64, ok bool) {
		m.Gauge("svidkit_filesource_"+name, help, func() (float64, bool) { return value, ok })
	}
	at := func(name, help string, t time.Time) {
		gauge(name+"_timestamp_seconds", help+", in seconds since 1970.", metrics.Seconds(t), !t.IsZero())
	}
	gauge("ready", "Whether there is all that the source is configured for.", metrics.Bool(st.ready), true)
	gauge("in_order", "Whether all files were in order when they were read last.", metrics.Bool(err == nil), true)
	at("checked", "When all files were last found in order", checked)
	at("update", "When something was last taken over from the files", st.at)
	if svid := st.svid(); svid != nil {
		at("svid_end", "When the certificate of the identity expires", svid.NotAfter())
	}
	gauge("trust_domains", "The number of trust domains with a bundle.", float64(st.bundles.Len()), true)
	r.Metrics = m.Write
	return r
}

// open opens a file. It refuses a file that another user made or can change, and a key file that another user can
// read.
func (s *Source) open(path string) (*os.File, error) {
	o := private.Options{Owners: s.cfg.Owners}
	if !s.strict {
		o.Warn = s.warn
	}
	file, err := private.OpenGiven(path, path == s.keyFile, s.cfg.Refuse, o)
	if errors.Is(err, private.ErrUnsafe) {
		err = fmt.Errorf("%w; or see Config.Owners and Config.AllowWritable", err)
	}
	return file, err
}
