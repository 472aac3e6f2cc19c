package sdssource

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Prefixes and names of secrets from files.
const (
	certPrefix = "file-cert:"
	rootPrefix = "file-root:"
	separator  = "~"
	systemRoot = rootPrefix + "system"
)

const (
	maxPath  = 4 << 10 // bytes of a path in a name
	maxNames = 256
	idle     = time.Minute // after which a name without a secret can be forgotten for another
)

// FilesConfig configures [Files].
type FilesConfig struct {
	// Allow lists the files that clients may name, and directories below which they may name any file. A link in a
	// directory may lead only to files below one of Allow; a listed file may link to any file. No other is opened.
	Allow []string

	// SystemRoots is the file for the name file-root:system. Empty means the file with the roots that the operating
	// system trusts; if there is none, the name does not exist.
	SystemRoots string

	// Refuse lists directories whose files are never read: the directories to which this program writes its identity.
	Refuse []string

	// Logger gets the files that were read (Info) or refused (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Files is an [sds.Source] of the secrets in files that another program renews. It uses Istio's names:
//
//	file-cert:CERT~KEY   the key pair in two files, in PEM, leaf first; they may be one file
//	file-root:PATH       the roots in a file, in PEM
//	file-root:system     the roots of the operating system
//
// Paths are absolute and clean, as [filepath.Clean] returns them, so that each file has one name.
//
// Files follows a name once a client has asked for it: it reads the files when the system announces a change, and
// every five seconds. The last good secret stays while a file is missing, cannot be parsed, has another owner or can
// be changed by other users, while a key belongs to another certificate, and while a certificate has expired or is
// not valid yet. The reason is in the log and in [Files.Report]. Certificates that cannot be parsed, or are no CA
// certificates, are left out of roots, if others remain. File owners are checked as in package filesource.
//
// One goroutine follows all names. A name with a secret is followed until Close, even without a subscriber. A name
// without a secret is forgotten if another name needs its place and no client asked for it in the last minute.
//
// [NewFiles] creates one. Its methods are safe for concurrent use.
type Files struct {
	cfg      FilesConfig
	log      *slog.Logger
	bad      *ratelog.Log // of names that clients asked for
	follower *follow.Follower
	life     lifecycle.Life
	news     renew.Signal
	subs     secretset.Subscribers

	mu     sync.Mutex
	names  map[string]*entry
	warned map[string]bool  // about directories
	loose  map[string]error // by path, why a file may not be read as a private key
}

// entry is a requested name. Files.mu guards the fields after the paths.
type entry struct {
	name, cert, key string // key is empty for roots
	asked           time.Time
	read            bool // the files have been read
	sum             [sha256.Size]byte
	secret          *pki.Secret // the last good secret
	err             error       // why the files are not in use
	note            error       // about the secret in use
}

// NewFiles checks cfg and returns Files. It starts no goroutine and opens no file.
func NewFiles(cfg FilesConfig) (*Files, error) {
	cfg.Allow, cfg.Refuse = slices.Clone(cfg.Allow), slices.Clone(cfg.Refuse)
	for i, path := range cfg.Allow {
		if path == "" || filepath.Dir(path) == path {
			return nil, fmt.Errorf("sdssource: files: Allow[%d] is %q, and must be a file or a directory below the "+
				"root of the file system", i, path)
		}
		abs, err := filepath.Abs(path)
		if err != nil {
			return nil, fmt.Errorf("sdssource: files: %w", err)
		}
		cfg.Allow[i] = abs
	}
	if cfg.SystemRoots == "" {
		cfg.SystemRoots = findSystemRoots()
	} else if abs, err := filepath.Abs(cfg.SystemRoots); err == nil { // it fails only without a working directory
		cfg.SystemRoots = abs
	}
	f := &Files{cfg: cfg, log: ratelog.Patient(cfg.Logger), names: map[string]*entry{}, warned: map[string]bool{},
		loose: map[string]error{}}
	f.bad = ratelog.New(f.log, 0)
	f.follower = follow.New(nil, f.take, &follow.Options{Open: f.open, Each: true})
	return f, nil
}

// Run follows the files. It blocks until ctx is done or [Files.Close] is
// called, and then returns nil. It is an error to call it while it runs, or after Close.
func (f *Files) Run(ctx context.Context) error {
	return f.life.RunAs(ctx, "sdssource", f.follower.Run)
}

// Close stops Files for good, waits for its goroutines, and returns nil. The last secrets stay readable.
func (f *Files) Close() error { return f.life.Close() }

// findSystemRoots returns the file with the roots that the operating system trusts: the first usual path that exists,
// or "".
func findSystemRoots() string {
	for _, path := range []string{
		"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
		"/etc/pki/tls/cacert.pem", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/ssl/cert.pem",
		"/usr/local/etc/ssl/cert.pem", "/etc/ssl/certs/ca-certificates",
	} {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

// parse returns the files for a name. The key is empty for roots.
func (f *Files) parse(name string) (cert, key string, err error) {
	pair, isPair := strings.CutPrefix(name, certPrefix)
	root, isRoot := strings.CutPrefix(name, rootPrefix)
	switch {
	case name == systemRoot:
		if f.cfg.SystemRoots == "" {
			return "", "", errors.New("no roots of the operating system were found; set FilesConfig.SystemRoots")
		}
		return f.cfg.SystemRoots, "", nil
	case isPair:
		parts := strings.Split(pair, separator)
		if len(parts) != 2 {
			return "", "", errors.New(`it wants two paths, with one "~" between them`)
		}
		if cert, key = parts[0], parts[1]; f.allowed(cert) == nil {
			return cert, key, f.allowed(key)
		}
		return "", "", f.allowed(cert)
	case isRoot && strings.Contains(root, separator):
		return "", "", errors.New(`it wants one path, without a "~"`)
	case isRoot:
		return root, "", f.allowed(root)
	}
	return "", "", errors.New(`the names are "file-cert:CERT~KEY", "file-root:PATH" and "file-root:system"`)
}

// allowed returns an error if a path from a client is outside Allow.
func (f *Files) allowed(path string) error {
	switch {
	case len(path) > maxPath || strings.ContainsRune(path, 0):
		return fmt.Errorf("a path is longer than %d bytes, or has a zero byte", maxPath)
	case !filepath.IsAbs(path) || filepath.Clean(path) != path:
		return errors.New(`a path must be absolute, without ".", ".." and double slashes`)
	case !slices.ContainsFunc(f.cfg.Allow, func(a string) bool { return path == a || below(path, a) }):
		return errors.New("a path is not below one of FilesConfig.Allow")
	}
	return nil
}

// below reports whether path is in directory. Both have their links resolved.
func below(path, folder string) bool {
	rel, err := filepath.Rel(folder, path)
	return err == nil && filepath.IsLocal(rel) && rel != "."
}

// GenerateSecret returns the secret with the given resource name; see [Files]. For a name that is not allowed, the
// error wraps [fs.ErrNotExist]. If the files are missing or not good, or the certificate has expired, it returns
// another error, and follows the files while clients ask for the name. GenerateSecret blocks until the files have
// been read for the first time, or ctx is done.
func (f *Files) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	e, err := f.entry(resourceName)
	if err != nil {
		return nil, err
	}
	var secret *pki.Secret
	ended := f.life.Await(ctx, f.news.Changed, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		secret, err = e.secret, e.err
		return e.read
	})
	switch {
	case secret != nil && secretset.Expired(secret):
		return nil, fmt.Errorf("sdssource: %.256q: the certificate has expired at %s, and there is no newer one: %w",
			resourceName, stamp(secret.NotAfter()), cmp.Or(err, errSame))
	case secret != nil:
		return secret, nil
	case ended == nil:
		return nil, err
	}
	if idle := f.life.Idle(); idle != nil {
		ended = idle
	}
	return nil, fmt.Errorf("sdssource: %.256q: the files were not read yet: %w", resourceName, ended)
}

var errSame = errors.New("the files are as they were")

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// entry returns the entry of a name and follows the name from now on.
func (f *Files) entry(name string) (*entry, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if e := f.names[name]; e != nil {
		e.asked = now
		return e, nil
	}
	cert, key, err := f.parse(name)
	if err != nil {
		return nil, fmt.Errorf("sdssource: no secret %.256q: %w: %w", name, err, fs.ErrNotExist)
	}
	if len(f.names) >= maxNames {
		var oldest *entry
		for _, e := range f.names {
			if e.secret == nil && now.Sub(e.asked) >= idle && (oldest == nil || e.asked.Before(oldest.asked)) {
				oldest = e
			}
		}
		if oldest == nil {
			return nil, fmt.Errorf("sdssource: %.256q: there are %d names already, and no more may be",
				name, len(f.names))
		}
		delete(f.names, oldest.name)
	}
	e := &entry{name: name, cert: cert, key: key, asked: now}
	f.names[name] = e
	f.follow()
	return e, nil
}

// follow updates the list of files for the follower, which then calls take. f.mu is held.
func (f *Files) follow() {
	paths := map[string]bool{}
	for _, e := range f.names {
		paths[e.cert] = true
		if e.key != "" {
			paths[e.key] = true
		}
	}
	maps.DeleteFunc(f.loose, func(path string, _ error) bool { return !paths[path] })
	f.follower.Set(slices.Sorted(maps.Keys(paths)))
}

// Subscribe registers g to be called with each name whose secret has changed or appeared: roots first. cancel ends
// the subscription; it may be called from g, and more than once. Calls come one at a time, after the change, from the
// goroutine that follows the files; g must return at once.
func (f *Files) Subscribe(g func(resourceName string)) (cancel func()) { return f.subs.Add(g) }

// take puts the good secrets in the files into use, and returns why the rest is refused.
func (f *Files) take(ctx context.Context, read follow.Files) error {
	f.mu.Lock()
	entries := slices.SortedFunc(maps.Values(f.names), func(a, b *entry) int {
		// roots first
		return cmp.Or(-strings.Compare(a.name[:len(certPrefix)], b.name[:len(certPrefix)]),
			strings.Compare(a.name, b.name))
	})
	f.mu.Unlock()
	var changed []string
	var refused error
	for _, e := range entries {
		if _, ok := read[e.cert]; !ok { // requested since the files were read
			continue
		}
		if _, ok := read[e.key]; !ok && e.key != "" {
			continue
		}
		next, err := e.load(read)
		f.mu.Lock()
		if loose := f.loose[e.key]; loose != nil {
			err = fmt.Errorf("sdssource: %w", loose)
		}
		before := *e
		e.read, e.err = true, err
		if err == nil {
			e.sum, e.secret, e.note = next.sum, next.secret, next.note
		}
		f.mu.Unlock()
		if err != nil {
			refused = err // the follower needs only one error
		}
		if err == nil && next.secret != before.secret {
			changed = append(changed, e.name)
			f.logUpdate(ctx, e, &next)
		}
		if err != nil && (before.err == nil || before.err.Error() != err.Error()) {
			f.logRefusal(ctx, e, before.secret != nil, err)
		}
	}
	f.news.Notify()
	<-f.subs.Tell(func() []string { return changed })
	return refused
}

func (f *Files) logUpdate(ctx context.Context, e, next *entry) {
	attrs := []slog.Attr{slog.String("name", e.name)}
	if e.key != "" {
		attrs = append(attrs, slog.Time("not_after", next.secret.NotAfter()))
	}
	f.log.LogAttrs(ctx, slog.LevelInfo, "sdssource: update", attrs...)
	if next.note != nil {
		f.log.LogAttrs(ctx, slog.LevelWarn, "sdssource: needs attention", slog.String("name", e.name),
			slog.Any("err", next.note))
	}
}

func (f *Files) logRefusal(ctx context.Context, e *entry, has bool, err error) {
	name, cause := slog.String("name", e.name), slog.Any("err", err)
	if has {
		f.log.LogAttrs(ctx, slog.LevelWarn, "sdssource: files refused, the last good ones stay in use", name, cause)
		return
	}
	// Clients can cause this at will, so the log is limited.
	f.bad.LogOf(slog.LevelWarn, e.name, "sdssource: files refused", "there is no secret for a name", name, cause)
}

// load returns the content of e's files, or e's own secret if that is unchanged. Errors do not wrap errors of package
// fs, because package sds does not ask again after an fs.ErrNotExist.
func (e *entry) load(read follow.Files) (next entry, err error) {
	certs, key := read[e.cert], read[e.key]
	for _, file := range []follow.File{certs, key} {
		if file.Err != nil {
			return next, fmt.Errorf("sdssource: %v", file.Err)
		}
	}
	one, two := sha256.Sum256(certs.Data), sha256.Sum256(key.Data)
	next.sum = sha256.Sum256(append(one[:], two[:]...))
	if e.secret != nil && next.sum == e.sum {
		return *e, nil
	}
	if e.key == "" {
		if next.secret, next.note, err = secretset.Roots(e.name, certs.Data); err != nil {
			return next, fmt.Errorf("sdssource: %s: %w", e.cert, err)
		}
		if next.note != nil {
			next.note = fmt.Errorf("sdssource: %w", next.note)
		}
		return next, nil
	}
	if next.secret, err = e.pair(certs.Data, key.Data); err != nil {
		return next, fmt.Errorf("sdssource: %s and %s: %w", e.cert, e.key, err)
	}
	return next, nil
}

// pair returns the key pair in two files, or in one, if it is valid now.
func (e *entry) pair(certsPEM, keyPEM []byte) (*pki.Secret, error) {
	if e.cert == e.key {
		certs, err := certpem.CertificatesAmongKeys(certsPEM)
		if err != nil {
			return nil, err
		}
		key, err := certpem.PrivateKeyAmongCertificates(keyPEM)
		if err != nil {
			return nil, err
		}
		certsPEM = certpem.EncodeCertificates(certs)
		if keyPEM, err = certpem.EncodePrivateKey(key); err != nil {
			return nil, err
		}
	}
	return secretset.KeyPair(e.name, certsPEM, keyPEM)
}

// Report implements [report.Reporter] with each requested name: its certificate, if any, and its files as an
// upstream. Certificates that were left out are problems. The metrics have names that begin with
// svidkit_sdssource_files.
func (f *Files) Report() (r report.Report) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var refused float64
	var end time.Time // the first end of a certificate
	for _, name := range slices.Sorted(maps.Keys(f.names)) {
		e := f.names[name]
		r.Upstreams = append(r.Upstreams, report.Upstream{Name: name, OK: e.secret != nil, Err: e.err})
		if e.secret != nil && !e.secret.NotAfter().IsZero() {
			r.Identities = append(r.Identities, report.Identity{Name: name, NotAfter: e.secret.NotAfter()})
			if end.IsZero() || e.secret.NotAfter().Before(end) {
				end = e.secret.NotAfter()
			}
		}
		if e.note != nil {
			r.Problems = append(r.Problems, e.note)
		}
		if e.err != nil {
			refused++
		}
	}
	m := new(metrics.Set)
	m.Value("svidkit_sdssource_files_names", "The number of names that were asked for.", float64(len(f.names)))
	m.Value("svidkit_sdssource_files_refused",
		"The number of names whose files are not in use as they are now.", refused)
	m.Gauge("svidkit_sdssource_files_end_timestamp_seconds",
		"When the first of the certificates expires, in seconds since 1970.",
		func() (float64, bool) { return float64(end.Unix()), !end.IsZero() })
	r.Metrics = m.Write
	return r
}

// open opens a file that may be read.
func (f *Files) open(path string) (*os.File, error) {
	file, err := private.OpenGiven(path, false, f.cfg.Refuse, private.Options{Warn: func(err error) {
		f.mu.Lock()
		known := f.warned[err.Error()]
		f.warned[err.Error()] = true
		f.mu.Unlock()
		if !known {
			f.log.Warn("sdssource: other users can replace the files", slog.Any("err", err))
		}
	}})
	if err != nil {
		return nil, err
	}
	if err := f.inside(path, file); err != nil {
		file.Close()
		return nil, err
	}
	// Do not refuse the file: a client can name another pair's roots as its key.
	loose := private.CheckKeyFile(path, file)
	f.mu.Lock()
	defer f.mu.Unlock()
	// The follower compares contents, which do not show this.
	if before := f.loose[path]; (before == nil) != (loose == nil) {
		f.loose[path] = loose
		f.follow()
	}
	return file, nil
}

// inside returns an error if an open file is outside the places that its path permits.
func (f *Files) inside(path string, file *os.File) error {
	if path == f.cfg.SystemRoots || slices.Contains(f.cfg.Allow, path) {
		return nil
	}
	real, err := filepath.EvalSymlinks(file.Name())
	if err != nil {
		return err
	}
	for _, a := range f.cfg.Allow {
		if folder, err := filepath.EvalSymlinks(a); err == nil && (real == folder || below(real, folder)) {
			return nil
		}
	}
	return fmt.Errorf("%s is a link to a file that is not below one of FilesConfig.Allow", path)
}
