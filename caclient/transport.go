package caclient

import (
	"cmp"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/pki"
)

// TLSOptions say how [NewHTTPClient] connects to a CA.
type TLSOptions struct {
	// RootsFile has the CA certificates, in PEM, that vouch for the server. Changes take effect at the next request.
	// Empty means the host's roots.
	RootsFile string

	// ServerName is the DNS name or IP address that the server's certificate must have. Empty means the host of the
	// URL.
	ServerName string

	// CertificateFile and KeyFile are the client certificate with its intermediates, leaf first, and its private key,
	// both in PEM, such as cert-chain.pem and key.pem in the directory that Istio calls PROV_CERT. Changes take
	// effect at the next request, and the files need not exist. Set both or none.
	CertificateFile, KeyFile string

	// MinVersion is the lowest TLS version: tls.VersionTLS13 or tls.VersionTLS12, which a server in FIPS 140-2
	// mode may need. 0 means TLS 1.3.
	MinVersion uint16

	// PostQuantum allows only the key exchange X25519MLKEM768, with TLS 1.3.
	PostQuantum bool

	// Logger gets a warning when the files cannot be used: the first time for each of a few reasons, and then at most
	// once a minute and reason. Nil means silence.
	Logger *slog.Logger
}

// NewHTTPClient returns a client for calls to a CA over TLS: an HTTPClient for each package below this one.
//
// It checks the server's certificate as web clients do: by its DNS name or IP address, against given roots. A CA
// proves itself in this way because its clients have no trust bundle yet. Between workloads with identities, package
// spiffetls checks the SPIFFE ID instead.
//
// NewHTTPClient reads no file. Each request reads all files, at little cost. If one has changed, the request is sent
// on a new connection, and earlier connections are closed after at most 90 idle seconds. Without a change,
// connections are kept. Requests fail until RootsFile has been usable once; from then on the last good roots stay.
//
// The client certificate is presented if the server asks for one and accepts its issuer. If the files do not exist,
// or the certificate has expired, none is presented, and the call's token must prove the caller. If the files exist
// but cannot be used (unreadable, not a certificate and its key, or half replaced), the last pair is presented until
// it expires. So a machine begins with a token, writes the first certificate to the two files, and needs no token
// while it renews in time, even after a restart.
//
// Requests without TLS fail, redirects are not followed, and cookies are not kept. The environment's proxy is used,
// as by net/http. The client has no timeout: the context of each call bounds it. Making a connection takes at most 10
// seconds. A client that the server refuses gets its alert, unless there is a proxy. CloseIdleConnections of the
// client works.
func NewHTTPClient(o TLSOptions) (*http.Client, error) {
	t := &transport{redacted: redact.New("caclient.transport"), o: o, log: ratelog.New(o.Logger, 0)}
	if err := t.check(); err != nil {
		return nil, fmt.Errorf("caclient: TLS of the CA connection: %w", err)
	}
	refuse := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &http.Client{Transport: t, CheckRedirect: refuse}, nil
}

// Limits of files, in bytes.
const (
	maxRootsFile = 1 << 20
	maxPairFile  = 256 << 10
)

const connectTimeout = 10 * time.Second

// transport is an [http.RoundTripper] that reads its files again at each request.
type transport struct {
	redacted
	o   TLSOptions
	log *ratelog.Log

	mu    sync.Mutex
	roots *roots   // the last good ones; nil without a file
	pair  *pair    // the last good one; nil if there is none
	conns *conns   // nil before the first request
	says  []func() // pending log records
}

type redacted = redact.Text

// roots are the content of a file. They do not change.
type roots struct {
	digest [sha256.Size]byte
	pool   *x509.CertPool
}

// pair is the content of two files. It does not change.
type pair struct {
	*pki.Credential
	digest [sha256.Size]byte
}

// conns are the connections made with given roots and a pair.
type conns struct {
	*http.Transport
	roots *roots
	pair  *pair // nil: no certificate is presented
}

func (t *transport) check() error {
	switch o := t.o; {
	case (o.CertificateFile == "") != (o.KeyFile == ""):
		return errors.New("only one of CertificateFile and KeyFile is set")
	case o.MinVersion != 0 && o.MinVersion != tls.VersionTLS12 && o.MinVersion != tls.VersionTLS13:
		return fmt.Errorf("MinVersion is %#04x, and has to be tls.VersionTLS12 or tls.VersionTLS13", o.MinVersion)
	case o.PostQuantum && o.MinVersion == tls.VersionTLS12:
		return errors.New("PostQuantum is set, and TLS 1.2 has no such key exchange")
	}
	return nil
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	err := errors.New("caclient: the URL is not https, and this client uses nothing else")
	if r.URL.Scheme == "https" {
		var c *conns
		if c, err = t.current(); err == nil {
			return c.RoundTrip(r)
		}
	}
	if r.Body != nil {
		_ = r.Body.Close() // as a RoundTripper must
	}
	return nil, err
}

// CloseIdleConnections implements http.Client.CloseIdleConnections.
func (t *transport) CloseIdleConnections() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns != nil {
		t.conns.CloseIdleConnections()
	}
}

// current returns the connections for the files' current content. The error says why there are no roots.
func (t *transport) current() (*conns, error) {
	t.mu.Lock()
	c, err := t.refresh()
	says := t.says
	t.says = nil
	t.mu.Unlock()
	for _, say := range says { // a logger can block
		say()
	}
	return c, err
}

// refresh is current without the lock; the caller holds mu.
func (t *transport) refresh() (*conns, error) {
	if t.o.RootsFile != "" {
		err := t.readRoots()
		if err != nil && t.roots == nil {
			return nil, fmt.Errorf("caclient: roots of the CA connection: %w", err)
		}
		if err != nil {
			t.warn("caclient: the roots of the CA connection cannot be used; the last good ones stay", reason(err),
				slog.Any("err", err))
		}
	}
	if t.o.CertificateFile != "" {
		t.readPair()
	}
	p := t.pair
	if p != nil && !time.Now().Before(p.NotAfter()) {
		t.warn("caclient: no client certificate is presented to the CA", "expired",
			slog.String("file", t.o.CertificateFile), slog.Time("not_after", p.NotAfter()))
		p = nil
	}
	if old := t.conns; old == nil || old.roots != t.roots || old.pair != p {
		t.conns = t.connect(t.roots, p)
		if old != nil {
			old.CloseIdleConnections() // busy connections end when they have been idle for long
		}
	}
	return t.conns, nil
}

// warn logs a warning when mu, which the caller holds, is free.
func (t *transport) warn(message, reason string, attrs ...slog.Attr) {
	t.says = append(t.says, func() { t.log.Warn(message, reason, attrs...) })
}

// badFile is the error for a file with the wrong content.
type badFile struct{ error }

func (e badFile) Unwrap() error { return e.error }

// reason returns the kind of an error of readRoots or loadPair, for the log.
func reason(err error) string {
	if _, ok := errors.AsType[badFile](err); ok {
		return "not usable"
	}
	return "not readable"
}

// readRoots reads RootsFile. It changes nothing if the file is unchanged, or after an error.
func (t *transport) readRoots() error {
	data, err := files.Read(t.o.RootsFile, maxRootsFile)
	if err != nil {
		return err
	}
	digest := sha256.Sum256(data)
	if t.roots != nil && t.roots.digest == digest {
		return nil
	}
	certs, err := pki.ParseCertificatesPEM(data)
	if err != nil {
		return badFile{fmt.Errorf("%s: %w", t.o.RootsFile, err)}
	}
	pool := x509.NewCertPool()
	for _, c := range certs {
		pool.AddCert(c)
	}
	t.roots = &roots{digest, pool}
	return nil
}

// readPair reads the client certificate and its key. A pair whose files are gone is withdrawn. Any other error
// changes nothing, because the two files are not replaced at the same moment.
func (t *transport) readPair() {
	p, err := t.loadPair()
	switch {
	case err == nil:
		t.pair = p
	case errors.Is(err, fs.ErrNotExist):
		t.pair = nil
		t.says = append(t.says, func() {
			t.log.Log(slog.LevelInfo, "caclient: no client certificate is presented to the CA", "there is none",
				slog.Any("err", err))
		})
	default:
		t.warn("caclient: the client certificate for the CA cannot be used; the last good one stays until it expires",
			reason(err), slog.Any("err", err))
	}
}

func (t *transport) loadPair() (*pair, error) {
	chainPEM, err := files.Read(t.o.CertificateFile, maxPairFile)
	if err != nil {
		return nil, err
	}
	keyPEM, err := files.Read(t.o.KeyFile, maxPairFile)
	if err != nil {
		return nil, err
	}
	chainSum, keySum := sha256.Sum256(chainPEM), sha256.Sum256(keyPEM)
	digest := sha256.Sum256(append(chainSum[:], keySum[:]...))
	if t.pair != nil && t.pair.digest == digest {
		return t.pair, nil
	}
	chain, err := pki.ParseCertificatesPEM(chainPEM)
	if err == nil {
		err = certchain.CheckSize(chain)
	}
	if err != nil {
		return nil, badFile{fmt.Errorf("%s: %w", t.o.CertificateFile, err)}
	}
	key, err := pki.ParsePrivateKeyPEM(keyPEM)
	if err != nil {
		return nil, badFile{fmt.Errorf("%s: %w", t.o.KeyFile, err)}
	}
	c, err := pki.NewCredential(certchain.Tidy(chain, key.Public()), key)
	if err != nil {
		return nil, badFile{fmt.Errorf("%s and %s: %w", t.o.CertificateFile, t.o.KeyFile, err)}
	}
	return &pair{c, digest}, nil
}

// connect returns a transport without connections yet.
func (t *transport) connect(r *roots, p *pair) *conns {
	cfg := &tls.Config{MinVersion: cmp.Or(t.o.MinVersion, tls.VersionTLS13), ServerName: t.o.ServerName,
		Time: certchain.Now}
	if t.o.PostQuantum {
		cfg.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768}
	}
	if r != nil {
		cfg.RootCAs = r.pool
	}
	if p != nil {
		cfg.GetClientCertificate = func(asked *tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if err := asked.SupportsCertificate(p.TLSCertificate()); err != nil {
				t.log.Warn("caclient: no client certificate is presented to the CA",
					"the CA does not accept such a one", slog.Any("err", err))
				return &tls.Certificate{}, nil
			}
			return p.TLSCertificate(), nil
		}
	}
	tr := tlsalert.NewTransport(nil, false, (&net.Dialer{Timeout: connectTimeout}).DialContext)
	tr.TLSClientConfig = cfg
	return &conns{tr, r, p}
}
