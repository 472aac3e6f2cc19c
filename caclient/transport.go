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
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
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
	roots parsed[x509.CertPool]
	pair  parsed[pki.Credential]
	conns *conns // nil before the first request
}

type redacted = redact.Text

// parsed is the last good content of files.
type parsed[T any] struct {
	value  *T // nil if there was none
	digest [sha256.Size]byte
}

// read reads the files. It changes nothing if they are unchanged, or after an error.
func (p *parsed[T]) read(limit int, parse func(contents [][]byte) (*T, error), names ...string) error {
	var contents [][]byte
	var digests []byte
	for _, name := range names {
		data, err := files.Read(name, limit)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		contents, digests = append(contents, data), append(digests, sum[:]...)
	}
	digest := sha256.Sum256(digests)
	if digest == p.digest {
		return nil
	}
	value, err := parse(contents)
	if err != nil {
		return fmt.Errorf("%s: %w", strings.Join(names, " and "), err)
	}
	p.value, p.digest = value, digest
	return nil
}

// conns are the connections made with given roots and a pair.
type conns struct {
	*http.Transport
	roots *x509.CertPool  // nil: the host's
	pair  *pki.Credential // nil: no certificate is presented
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
	c, err := t.current()
	if r.URL.Scheme != "https" {
		err = errors.New("caclient: the URL is not https, and this client uses nothing else")
	}
	if err == nil {
		return c.RoundTrip(r)
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

const noCertificate = "caclient: no client certificate is presented to the CA"

// current returns the connections for the files' current content. The error says why there are no roots.
func (t *transport) current() (*conns, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.o.RootsFile != "" {
		err := t.roots.read(maxRootsFile, parseRoots, t.o.RootsFile)
		if err != nil && t.roots.value == nil {
			return nil, fmt.Errorf("caclient: roots of the CA connection: %w", err)
		}
		if err != nil {
			t.log.Warn("caclient: the roots of the CA connection cannot be used; the last good ones stay",
				"not usable", slog.Any("err", err))
		}
	}
	pair := t.certificate()
	if old := t.conns; old == nil || old.roots != t.roots.value || old.pair != pair {
		t.conns = t.connect(t.roots.value, pair)
		if old != nil {
			old.CloseIdleConnections() // busy connections end when they have been idle for long
		}
	}
	return t.conns, nil
}

// certificate returns the pair to present; nil if there is none. A pair whose files are gone is withdrawn. Any other
// error changes nothing, because the two files are not replaced at the same moment. The caller holds mu.
func (t *transport) certificate() *pki.Credential {
	if t.o.CertificateFile == "" {
		return nil
	}
	err := t.pair.read(maxPairFile, parsePair, t.o.CertificateFile, t.o.KeyFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		t.pair = parsed[pki.Credential]{}
		t.log.Log(slog.LevelInfo, noCertificate, "there is none", slog.Any("err", err))
	case err != nil:
		const message = "caclient: the client certificate for the CA cannot be used; the last good one stays until it ends"
		t.log.Warn(message, "not usable", slog.Any("err", err))
	}
	pair := t.pair.value
	if pair != nil && !time.Now().Before(pair.NotAfter()) {
		t.log.Warn(noCertificate, "expired", slog.String("file", t.o.CertificateFile),
			slog.Time("not_after", pair.NotAfter()))
		return nil
	}
	return pair
}

func parseRoots(contents [][]byte) (*x509.CertPool, error) { return certpem.Pool(contents[0]) }

// parsePair parses a certificate with its intermediates, and its key.
func parsePair(contents [][]byte) (*pki.Credential, error) {
	chain, err := pki.ParseCertificatesPEM(contents[0])
	if err == nil {
		err = certchain.CheckSize(chain)
	}
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	key, err := pki.ParsePrivateKeyPEM(contents[1])
	if err != nil {
		return nil, fmt.Errorf("key: %w", err)
	}
	return pki.NewCredential(certchain.Tidy(chain, key.Public()), key)
}

// connect returns a transport without connections yet. nil roots mean the host's, and a nil pair means none.
func (t *transport) connect(roots *x509.CertPool, pair *pki.Credential) *conns {
	cfg := &tls.Config{MinVersion: cmp.Or(t.o.MinVersion, tls.VersionTLS13), ServerName: t.o.ServerName,
		Time: certchain.Now, RootCAs: roots}
	if t.o.PostQuantum {
		cfg.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768}
	}
	if pair != nil {
		cfg.GetClientCertificate = func(asked *tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if err := asked.SupportsCertificate(pair.TLSCertificate()); err != nil {
				t.log.Warn(noCertificate, "the CA does not accept such a one", slog.Any("err", err))
				return &tls.Certificate{}, nil
			}
			return pair.TLSCertificate(), nil
		}
	}
	tr := tlsalert.NewTransport(nil, false, (&net.Dialer{Timeout: connectTimeout}).DialContext)
	tr.TLSClientConfig = cfg
	return &conns{tr, roots, pair}
}
