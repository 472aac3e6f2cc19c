// Package istioca is a client of Istio's certificate API: of istiod, of package pki/caserver/istioca, or of
// any other server that speaks it.
//
// [New] makes a [CA], which is a [caclient.CA]. Hand it to package secretcache. A program that calls it
// directly puts [caclient.New] around it, for deadlines, repeated attempts and the check of every answer.
//
//	ca, err := istioca.New(istioca.Options{
//		URL:         "https://istiod.istio-system.svc:15012",
//		HTTPClient:  &http.Client{Transport: transport}, // which trusts istiod
//		TrustDomain: spiffe.MustParseTrustDomain("cluster.local"),
//		TokenFile:   "/var/run/secrets/tokens/istio-token",
//		RootsFile:   "/var/run/secrets/istio/root-cert.pem",
//		ClusterID:   "Kubernetes",
//	})
//	…
//	m, err := secretcache.New(secretcache.Config{ID: web, CA: ca})
//
// # Trust bundles
//
// The API has no method for trust bundles: roots come only with certificates. So the bundle consists of
//
//   - what Options.Roots or Options.RootsFile have, read again each time;
//   - the roots that came with the newest certificate;
//   - roots that came with an older one, for as long as a certificate that was issued until then may
//     live, as peers still have such certificates. Their lifetime is taken for that of our own.
//
// A root that was in Options.Roots or Options.RootsFile and is gone from there is dropped at once, so
// that an operator can withdraw one. It comes back if the CA still sends it with a certificate.
//
// With neither of the two, the first [CA.FetchBundles] asks the CA for a certificate for a key that is
// thrown away, only to learn the roots; a CA that looks for names in the request may refuse it. After that,
// new roots arrive only with our own renewals. That is too late if the CA lets a new root sign before half
// of the life of a certificate has passed. It is better to mount the roots, as Istio does in every pod, or
// to fetch them from a bundle endpoint.
//
// # What it promises
//
// A token goes to the host of Options.URL and nowhere else: redirects are not followed, and a connection
// without TLS is refused unless Options.AllowPlaintext allows it. No error and no log record has the token.
//
// # What it does not do
//
// It sets no deadline, repeats nothing and does not judge the certificates that it gets: package caclient
// does.
package istioca

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certchain"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// method is the path of the API's one method.
const method = "/istio.v1.auth.IstioCertificateService/CreateCertificate"

const (
	maxResponse = 2 << 20 // bytes
	maxToken    = 64 << 10
	maxRoots    = 256
	maxTexts    = 1000 // of an answer; most have one for each certificate
)

// Options are the choices of [New]. URL and TrustDomain are required.
type Options struct {
	// URL is where the CA is, such as https://istiod.istio-system.svc:15012, without a path.
	URL string

	// HTTPClient reaches the CA over HTTP/2. Its transport decides which servers are trusted and which
	// client certificate is presented, such as one of spiffetls.Transport. Nil means a transport that trusts
	// the roots in RootsFile, which it reads for each connection, or those of the host without a RootsFile. It
	// is copied; the copy follows no redirects and keeps no cookies.
	HTTPClient *http.Client

	// TrustDomain is the one that the CA's roots speak for.
	TrustDomain spiffe.TrustDomain

	// Roots has the bundle of TrustDomain from elsewhere, such as a federation.Manager or a bundle that
	// never changes. It is asked at each [CA.FetchBundles]. Set at most one of Roots and RootsFile.
	Roots spiffe.BundleSource

	// RootsFile is a file of CA certificates in PEM that is read at each [CA.FetchBundles], such as
	// Istio's /var/run/secrets/istio/root-cert.pem.
	RootsFile string

	// Token returns the token to send, for each call; empty means none. Its error fails the call.
	// Set at most one of Token and TokenFile.
	Token func(ctx context.Context) (string, error)

	// TokenFile is a file with the token, which is read for each call, without the white space around
	// it. If it cannot be read, the call is made without a token, as the transport may have a certificate.
	// If the CA then answers Unauthenticated, the error has the reason.
	TokenFile string

	// ClusterID is the name of the cluster that the token is from.
	ClusterID string

	// CertSigner names one of several signers behind the CA.
	CertSigner string

	// Header has further metadata to send, as Istio's CA_HEADER_ variables give it.
	Header http.Header

	// AllowPlaintext lets URL begin with http, for tests and for a proxy on the same host that adds TLS. The
	// token is readable on the connection.
	AllowPlaintext bool

	// Logger gets failures that do not end a call, at level Warn. Nil discards them.
	Logger *slog.Logger
}

// CA is a [caclient.CA] that also has bundles to watch; [New] makes one. It is safe for concurrent use.
type CA struct {
	opts  Options
	http  *http.Client
	rpc   *grpchttp.Client
	roots roots

	metadata []byte      // encoded field 4 of a request
	stale    atomic.Bool // the next call is to make a new connection
}

// New returns a CA. It does not connect and reads no file. The error says which option is wrong.
func New(o Options) (*CA, error) {
	u, err := o.check()
	if err != nil {
		return nil, fmt.Errorf("istioca: invalid Options: %w", err)
	}
	o.Header = o.Header.Clone()
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	c := &CA{opts: o, http: httpClient(o.HTTPClient, o.RootsFile)}
	c.roots.td = o.TrustDomain
	c.rpc = grpchttp.NewClient(c.http, u.Scheme+"://"+u.Host, maxResponse)
	c.metadata, err = encodeMetadata(o.CertSigner)
	if err != nil {
		return nil, fmt.Errorf("istioca: invalid Options: CertSigner: %w", err)
	}
	return c, nil
}

// encodeMetadata returns the field metadata of an IstioCertificateRequest, a google.protobuf.Struct.
// Istio's own client always sends CertSigner, even if it is empty.
func encodeMetadata(signer string) ([]byte, error) {
	value, err := protofield.Write(func(w *protofield.Writer) { w.AddText(3, signer) }) // string_value
	if err != nil {
		return nil, err
	}
	return protofield.Write(func(w *protofield.Writer) {
		w.Message(4, func(w *protofield.Writer) { w.Entry(1, "CertSigner", value) })
	})
}

func (o *Options) check() (*url.URL, error) {
	u, err := url.Parse(o.URL)
	switch {
	case err != nil:
		return nil, errors.New("URL is not a URL") // the cause repeats it, and it may have a password
	case u.Scheme == "http" && !o.AllowPlaintext:
		return nil, errors.New("URL is without TLS; set AllowPlaintext if tokens may be read on the way")
	case u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		return nil, errors.New("URL has to be https://host:port")
	case u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("URL has more than a scheme, a host and a port")
	case o.TrustDomain.IsZero():
		return nil, fmt.Errorf("TrustDomain: %w", spiffe.ErrZero)
	case o.Roots != nil && o.RootsFile != "":
		return nil, errors.New("both Roots and RootsFile are set")
	case o.Token != nil && o.TokenFile != "":
		return nil, errors.New("both Token and TokenFile are set")
	case !isText(o.ClusterID):
		return nil, errors.New("ClusterID is not printable ASCII")
	}
	for name, values := range o.Header {
		if !mayBeSet(name) {
			return nil, fmt.Errorf("the name %q in Header is not one for metadata, or not yours to set", name)
		}
		for _, v := range values {
			if !isText(v) {
				return nil, fmt.Errorf("a value of %q in Header is not printable ASCII", name)
			}
		}
	}
	return u, nil
}

// isText reports whether s can be the value of a header.
func isText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}

// mayBeSet reports whether name is that of metadata, and not of a header that has a meaning here.
func mayBeSet(name string) bool {
	lower := strings.ToLower(name)
	switch lower {
	case "", "authorization", "clusterid", "content-type", "te", "host", "connection", "content-length", "transfer-encoding", "upgrade",
		"trailer", "user-agent", "accept-encoding", "content-encoding", "keep-alive", "proxy-connection", "expect":
		return false
	}
	return !strings.HasPrefix(lower, "grpc-") && !strings.HasPrefix(lower, "connect-") &&
		!strings.ContainsFunc(lower, func(r rune) bool {
			return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-' || r == '_' || r == '.')
		})
}

func httpClient(from *http.Client, rootsFile string) *http.Client {
	var c http.Client
	if from != nil {
		c = *from
	} else {
		var protocols http.Protocols
		protocols.SetHTTP2(true)
		protocols.SetUnencryptedHTTP2(true) // for a URL that says so
		t := &http.Transport{
			Proxy:                  http.ProxyFromEnvironment,
			Protocols:              &protocols,
			TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    10 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
			IdleConnTimeout:        90 * time.Second,
			HTTP2:                  &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 10 * time.Second},
		}
		if rootsFile != "" {
			t.Proxy, t.DialTLSContext = nil, dialWithRoots(rootsFile)
		}
		c.Transport = t
	}
	c.Jar = nil
	return &c
}

// dialWithRoots connects to servers that the roots in the file vouch for. The file is read for each
// connection, as the certificate of the CA follows its roots.
func dialWithRoots(file string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		pem, err := readFile(file, maxFile+1)
		if err != nil {
			return nil, err
		}
		certs, err := pki.ParseCertificatesPEM(pem)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		roots := x509.NewCertPool()
		for _, c := range certs {
			roots.AddCert(c)
		}
		d := tls.Dialer{Config: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, NextProtos: []string{"h2"}}}
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		return d.DialContext(ctx, network, addr)
	}
}

// String names the CA and no secret.
func (c *CA) String() string { return "istioca.CA(" + c.opts.URL + ")" }

// GoString is String: the verb %#v must not walk to the header.
func (c *CA) GoString() string { return c.String() }

// LogValue is String as a log value.
func (c *CA) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Sign implements [caclient.CA]. The lifetime is sent in whole seconds, at least one. The roots that come
// with the chain are in the next [CA.FetchBundles]. The error is a [*caclient.Error], unless ctx is
// done.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	switch {
	case csr == nil:
		return nil, signError(caclient.ErrInvalid, errors.New("there is no signing request; pki.NewCSR makes one"))
	case lifetime < 0:
		return nil, signError(caclient.ErrInvalid, fmt.Errorf("the lifetime is negative (%v)", lifetime))
	case lifetime > 0:
		lifetime = max(lifetime, time.Second)
	}
	request, err := protofield.Write(func(w *protofield.Writer) {
		w.Bytes(1, csr.PEM())
		w.Varint(3, uint64(lifetime/time.Second))
		w.Raw(c.metadata)
	})
	if err != nil {
		return nil, signError(caclient.ErrInvalid, err)
	}
	header := http.Header{}
	maps.Copy(header, c.opts.Header)
	header.Set("ClusterID", c.opts.ClusterID)
	token, missing, err := c.token(ctx)
	if err != nil {
		return nil, err
	}
	if token != "" {
		header.Set("Authorization", "Bearer "+token)
	}
	if c.stale.Swap(false) {
		// The new one has the client certificate and the roots of this moment. Calls on the old one go on. It is
		// closed only now, as a connection is not idle yet when a call has just failed on it.
		c.http.CloseIdleConnections()
	}
	response, err := c.rpc.Unary(ctx, method, header, request)
	if err != nil {
		return nil, c.callError(ctx, err, token, missing)
	}
	chain, roots, err := readResponse(response)
	if err == nil && !pki.PublicKeysEqual(chain[0].PublicKey, csr.PublicKey()) {
		err = errors.New("the leaf's public key is not that of the request")
	}
	if err == nil {
		err = c.roots.learn(roots, chain[0])
	}
	if err != nil {
		return nil, signError(caclient.ErrBadAnswer, err)
	}
	return chain, nil
}

func signError(kind, err error) *caclient.Error {
	return &caclient.Error{Op: "sign", Kind: kind, Err: fmt.Errorf("istioca: %w", err)}
}

// token returns the token to send, and why there is none if there should be one.
func (c *CA) token(ctx context.Context) (token string, missing, err error) {
	switch {
	case c.opts.Token != nil:
		token, err = c.opts.Token(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return "", nil, fmt.Errorf("istioca: sign: %w", context.Cause(ctx))
			}
			if _, ok := errors.AsType[*caclient.Error](err); ok {
				return "", nil, err
			}
			return "", nil, signError(caclient.ErrUnavailable, fmt.Errorf("get a token: %w", err))
		}
	case c.opts.TokenFile != "":
		token, missing = readToken(c.opts.TokenFile)
		if missing != nil {
			c.opts.Logger.LogAttrs(ctx, slog.LevelWarn, "istioca: no token to send", slog.Any("err", missing))
		}
	}
	if len(token) > maxToken || !isText(token) || strings.Contains(token, " ") {
		return "", nil, signError(caclient.ErrInvalid, errors.New("the token is too long, or has characters that no token has"))
	}
	return token, missing, nil
}

func readToken(name string) (string, error) {
	b, err := readFile(name, maxToken+1024)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(b))
	if token == "" {
		return "", fmt.Errorf("%s is empty", name)
	}
	return token, nil
}

// readFile returns a file, up to a limit.
func readFile(name string, limit int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}

// readResponse reads an IstioCertificateResponse, which is a list of texts: the last one has the roots, and
// those before it the chain, with any number of certificates in each.
func readResponse(response []byte) (chain, roots []*x509.Certificate, err error) {
	var texts []string
	err = protofield.Read(response, func(f *protofield.Field) {
		if f.Number == 1 && f.Data != nil {
			if len(texts) == maxTexts {
				f.Fail(fmt.Errorf("the answer has more than %d texts", maxTexts))
				return
			}
			var text string
			f.Text(&text)
			texts = append(texts, text)
		}
	})
	if err != nil {
		return nil, nil, err
	}
	return readChain(texts)
}

func readChain(texts []string) (chain, roots []*x509.Certificate, err error) {
	if len(texts) < 2 {
		return nil, nil, fmt.Errorf("the answer has %d texts; there must be a chain, and roots in the last one", len(texts))
	}
	if chain, err = pki.ParseCertificatesPEM([]byte(strings.Join(texts[:len(texts)-1], "\n"))); err != nil {
		return nil, nil, fmt.Errorf("chain: %w", err)
	}
	if roots, err = pki.ParseCertificatesPEM([]byte(texts[len(texts)-1])); err != nil {
		return nil, nil, fmt.Errorf("roots: %w", err)
	}
	if len(roots) > maxRoots {
		return nil, nil, fmt.Errorf("the answer has %d roots, the limit is %d", len(roots), maxRoots)
	}
	leaf := chain[0]
	out := []*x509.Certificate{leaf}
	for _, c := range chain[1:] { // peers have the roots; plugged-in chains have them, too, and twice
		if !certchain.SelfSigned(c) && !slices.ContainsFunc(out, c.Equal) {
			out = append(out, c)
		}
	}
	return out, roots, nil
}
