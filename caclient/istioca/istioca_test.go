package istioca_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestNew(t *testing.T) {
	t.Parallel()
	good := istioca.Options{Endpoint: caclient.Endpoint{URL: "https://ca.test:15012", TrustDomain: domain}}
	must.Get(istioca.New(good))(t)
	bundle := spiffetest.NewCA(t, "example.org").Bundle()
	for name, edit := range map[string]func(*istioca.Options){
		"no URL":              func(o *istioca.Options) { o.URL = "" },
		"no scheme":           func(o *istioca.Options) { o.URL = "ca.test:15012" },
		"another scheme":      func(o *istioca.Options) { o.URL = "ftp://ca.test" },
		"no host":             func(o *istioca.Options) { o.URL = "https://" },
		"without TLS":         func(o *istioca.Options) { o.URL = "http://ca.test" },
		"a path":              func(o *istioca.Options) { o.URL = "https://ca.test/x" },
		"a query":             func(o *istioca.Options) { o.URL = "https://ca.test?x" },
		"a fragment":          func(o *istioca.Options) { o.URL = "https://ca.test#x" },
		"a user":              func(o *istioca.Options) { o.URL = "https://u:secret@ca.test" },
		"not a URL":           func(o *istioca.Options) { o.URL = "https://u:secret@ca.test:port\x00" },
		"no trust domain":     func(o *istioca.Options) { o.TrustDomain = spiffe.TrustDomain{} },
		"two tokens":          func(o *istioca.Options) { o.Token, o.TokenFile = cafake.Give("x"), "x" },
		"two sources":         func(o *istioca.Options) { o.Roots, o.RootsFile = bundle, "x" },
		"a line in ClusterID": func(o *istioca.Options) { o.ClusterID = "a\nb" },
		"CertSigner":          func(o *istioca.Options) { o.CertSigner = "\xff" },
		"a line in a value":   func(o *istioca.Options) { o.Header = http.Header{"X": {"secret\r\nb"}} },
		"a blank in a name":   func(o *istioca.Options) { o.Header = http.Header{"a b": {"x"}} },
		"no name":             func(o *istioca.Options) { o.Header = http.Header{"": {"x"}} },
		"our token":           func(o *istioca.Options) { o.Header = http.Header{"authorization": {"secret"}} },
		"our cluster":         func(o *istioca.Options) { o.Header = http.Header{"ClusterID": {"x"}} },
		"the protocol's":      func(o *istioca.Options) { o.Header = http.Header{"Grpc-Timeout": {"1S"}} },
		"HTTP's":              func(o *istioca.Options) { o.Header = http.Header{"Content-Type": {"x"}} },
	} {
		bad := good
		edit(&bad)
		_, err := istioca.New(bad)
		require.ErrorContains(t, err, "istioca: invalid Options: ", name)
		assert.NotContains(t, err.Error(), "secret", name)
	}
	good.URL, good.AllowPlaintext = "http://127.0.0.1:15010/", true
	must.Get(istioca.New(good))(t)
}

// What is sent, as the API has it.
func TestRequest(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.1-1", "IST-6.2-9", "IST-6.2-10", "IST-6.2-11", "IST-7.5-4")
	var got *call
	var mu sync.Mutex
	url, client := listen(t, fake(func(r call) (*wire.IstioCertificateResponse, error) {
		mu.Lock()
		defer mu.Unlock()
		got = &r
		return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "no")
	}))
	csr := freshCSR(t)
	send := func(o istioca.Options, lifetime time.Duration) {
		o.URL, o.HTTPClient = url, client
		require.Error(t, must.Err(newCA(t, o).Sign(t.Context(), csr, lifetime)))
	}
	send(istioca.Options{}, 0)
	assert.Equal(t, string(csr.PEM()), got.msg.GetCsr())
	assert.Zero(t, got.msg.GetValidityDuration())
	signer, ok := got.msg.GetMetadata().GetFields()["CertSigner"]
	assert.True(t, ok, "it is always there")
	assert.Empty(t, signer.GetStringValue())
	assert.Equal(t, []string{""}, got.header.Values("Clusterid"), "and so is the cluster")
	assert.Empty(t, got.header.Values("Authorization"))
	assert.Equal(t, "application/grpc", got.header.Get("Content-Type"))

	send(istioca.Options{Endpoint: caclient.Endpoint{Token: cafake.Give(token)}, ClusterID: "Kubernetes", CertSigner: "special",
		Header: http.Header{"X_custom.a": {"1", "2"}}}, 90*time.Minute+999*time.Millisecond)
	assert.Equal(t, int64(5400), got.msg.GetValidityDuration())
	assert.Equal(t, "special", got.msg.GetMetadata().GetFields()["CertSigner"].GetStringValue())
	assert.Equal(t, []string{"Kubernetes"}, got.header.Values("Clusterid"))
	assert.Equal(t, []string{"Bearer " + token}, got.header.Values("Authorization"))
	assert.Equal(t, []string{"1", "2"}, got.header.Values("X_custom.a"))
	send(istioca.Options{}, time.Nanosecond)
	assert.Equal(t, int64(1), got.msg.GetValidityDuration())
	send(istioca.Options{Endpoint: caclient.Endpoint{Token: cafake.Give("")}}, 0)
	assert.Empty(t, got.header.Values("Authorization"))

	got = nil
	c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client}})
	_, err := c.Sign(t.Context(), nil, 0)
	requireKind(t, err, caclient.ErrInvalid)
	_, err = c.Sign(t.Context(), csr, -1)
	requireKind(t, err, caclient.ErrInvalid)
	assert.Nil(t, got)
}

func requireKind(t testing.TB, err, kind error) *caclient.Error {
	t.Helper()
	e := must.As[*caclient.Error](err)(t)
	require.Equal(t, kind, e.Kind, "%v", err)
	return e
}

func TestToken(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.5-1")
	srv := newServer(t, server.Options{Signer: newAuthority(t, ca.Config{})})
	url, client := listen(t, srv)
	csr := freshCSR(t)
	sign := func(o istioca.Options) error {
		o.URL, o.HTTPClient = url, client
		return must.Err(newCA(t, o).Sign(t.Context(), csr, 0))
	}
	require.NoError(t, sign(istioca.Options{Endpoint: caclient.Endpoint{Token: cafake.Give(token)}}))
	requireKind(t, sign(istioca.Options{}), caclient.ErrUnauthenticated)
	requireKind(t, sign(istioca.Options{Endpoint: caclient.Endpoint{Token: cafake.Give("unknown")}}), caclient.ErrUnauthenticated)
	requireKind(t, sign(istioca.Options{Endpoint: caclient.Endpoint{Token: func(context.Context) (string, error) { return "", errors.New("away") }}}), caclient.ErrUnavailable)
	own := &caclient.Error{Op: "token", Kind: caclient.ErrDenied, Err: errors.New("no")}
	require.ErrorIs(t, sign(istioca.Options{Endpoint: caclient.Endpoint{Token: func(context.Context) (string, error) { return "", fmt.Errorf("x: %w", own) }}}), own)
	for _, bad := range []string{"secret\n", "secret x", " secret", "sécret", "secret\x00", strings.Repeat("secret", 20000)} {
		err := sign(istioca.Options{Endpoint: caclient.Endpoint{Token: cafake.Give(bad)}})
		requireKind(t, err, caclient.ErrInvalid)
		assert.NotContains(t, err.Error(), "cret")
	}

	// A file is read for each call.
	file := filepath.Join(t.TempDir(), "token")
	l := new(logtest.Buffer)
	c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client, TokenFile: file, Logger: l.Logger()}})
	_, err := c.Sign(t.Context(), csr, 0)
	requireKind(t, err, caclient.ErrUnauthenticated)
	require.ErrorIs(t, err, os.ErrNotExist, "the cause behind the cause")
	assert.Contains(t, l.String(), "no token to send")
	require.NoError(t, os.WriteFile(file, []byte(" \n"), 0o600))
	require.ErrorContains(t, must.Err(c.Sign(t.Context(), csr, 0)), "is empty")
	assert.Equal(t, 1, strings.Count(l.String(), "no token to send"), "once in a minute: each error says it")
	require.NoError(t, os.WriteFile(file, []byte(token+"\n"), 0o600))
	must.Get(c.Sign(t.Context(), csr, 0))(t)
	require.NoError(t, os.WriteFile(file, []byte(strings.Repeat("secret", 20000)), 0o600))
	_, err = c.Sign(t.Context(), csr, 0)
	requireKind(t, err, caclient.ErrUnauthenticated)
	require.ErrorContains(t, err, "has more than")
	assert.NotContains(t, err.Error()+l.String(), "secret")
	assert.NotContains(t, l.String(), token)
}

func TestCodes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		code  grpchttp.Code
		after time.Duration
		want  error
		again bool
	}{
		"canceled by the CA":     {grpchttp.Canceled, 0, caclient.ErrUnavailable, true},
		"unknown":                {grpchttp.Unknown, 0, nil, false},
		"invalid":                {grpchttp.InvalidArgument, 0, caclient.ErrInvalid, false},
		"deadline":               {grpchttp.DeadlineExceeded, 0, caclient.ErrUnavailable, true},
		"not found":              {grpchttp.NotFound, 0, caclient.ErrInvalid, false},
		"already exists":         {grpchttp.AlreadyExists, 0, caclient.ErrInvalid, false},
		"denied":                 {grpchttp.PermissionDenied, 0, caclient.ErrDenied, false},
		"exhausted":              {grpchttp.ResourceExhausted, 0, caclient.ErrUnavailable, true},
		"exhausted, RetryInfo":   {grpchttp.ResourceExhausted, 1500 * time.Millisecond, caclient.ErrUnavailable, true},
		"unavailable, RetryInfo": {grpchttp.Unavailable, time.Hour, caclient.ErrUnavailable, true},
		"failed precondition":    {grpchttp.FailedPrecondition, 0, caclient.ErrInvalid, false},
		"aborted":                {grpchttp.Aborted, 0, caclient.ErrUnavailable, true},
		"out of range":           {grpchttp.OutOfRange, 0, caclient.ErrInvalid, false},
		"unimplemented":          {grpchttp.Unimplemented, 0, caclient.ErrInvalid, false},
		"internal":               {grpchttp.Internal, 0, caclient.ErrUnavailable, true},
		"unavailable":            {grpchttp.Unavailable, 0, caclient.ErrUnavailable, true},
		"data loss":              {grpchttp.DataLoss, 0, caclient.ErrUnavailable, true},
		"unauthenticated":        {grpchttp.Unauthenticated, 0, caclient.ErrUnauthenticated, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, client := listen(t, fake(func(call) (*wire.IstioCertificateResponse, error) {
				return nil, &grpchttp.Error{Code: test.code, Message: "because", RetryAfter: test.after}
			}))
			_, err := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client}}).Sign(t.Context(), freshCSR(t), 0)
			e := requireKind(t, err, test.want)
			assert.InDelta(t, test.after, e.RetryAfter, float64(time.Millisecond))
			assert.Equal(t, "sign", e.Op)
			require.ErrorContains(t, err, `"because"`)
			_, again := e.Retryable()
			assert.Equal(t, test.again, again)
		})
	}
}

// Failures of the way to the CA.
func TestNetwork(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.2-8")
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	gone := "https://" + l.Addr().String()
	require.NoError(t, l.Close())
	url, trusting := listen(t, texts())
	_, distrusting := listen(t, texts())
	status := func(code int) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) })
	}
	for name, test := range map[string]struct {
		handler http.Handler
		url     string
		client  *http.Client
		want    error
	}{
		"no server":                   {nil, gone, trusting, caclient.ErrUnavailable},
		"not trusted":                 {nil, url, distrusting, caclient.ErrUnavailable},
		"roots of the host":           {nil, url, nil, caclient.ErrUnavailable},
		"503 of a proxy":              {status(503), "", nil, caclient.ErrUnavailable},
		"429 of a proxy":              {status(429), "", nil, caclient.ErrUnavailable},
		"401 of a proxy":              {status(401), "", nil, caclient.ErrUnauthenticated},
		"403 of a proxy":              {status(403), "", nil, caclient.ErrDenied},
		"404":                         {status(404), "", nil, caclient.ErrInvalid},
		"a page":                      {status(200), "", nil, nil},
		"a connection that is cut":    {http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), "", nil, caclient.ErrUnavailable},
		"an answer that is too large": {texts(strings.Repeat("x", 3<<20)), "", nil, caclient.ErrBadAnswer},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.handler != nil {
				test.url, test.client = listen(t, test.handler)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: test.url, HTTPClient: test.client, Token: cafake.Give(token)}}).Sign(ctx, freshCSR(t), 0)
			requireKind(t, err, test.want)
			assert.NotContains(t, err.Error(), token)
		})
	}
}

// A certificate that was not there when the connection was made counts after one failure.
func TestNewConnectionAfterFailure(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.4-4")
	a := newAuthority(t, ca.Config{})
	v, err := spiffe.NewVerifier(a.Bundle(), spiffe.AllowMembersOf(domain), nil)
	require.NoError(t, err)
	srv := must.Get(server.New(server.Options{Signer: a, Authenticator: authn.ClientCertificate(v)}))(t)
	url, client := listen(t, srv)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t, key), ID: webID}))(t)
	var mu sync.Mutex
	own := &tls.Certificate{}
	handshakes := 0
	client.Transport.(*http.Transport).TLSClientConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		handshakes++
		return own, nil
	}
	c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client}})
	_, err = c.Sign(t.Context(), newCSR(t, key), 0)
	requireKind(t, err, caclient.ErrUnauthenticated)
	mu.Lock()
	own = &tls.Certificate{Certificate: raw(chain), PrivateKey: key}
	mu.Unlock()
	// A connection can be closed a moment after its last answer, when net/http has forgotten the stream.
	require.Eventually(t, func() bool {
		_, err = c.Sign(t.Context(), newCSR(t, key), 0)
		return err == nil
	}, time.Minute, 10*time.Millisecond, "%v", err)
	for range 3 {
		must.Get(c.Sign(t.Context(), newCSR(t, key), 0))(t)
	}
	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, 2, handshakes, "and no connection is made without need")
}

// The forms in which CAs have sent chains, and those that none should.
func TestChainForms(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.1-1", "IST-6.4-5", "IST-7.5-8", "IST-4.4-6")
	root, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	lower := root.Intermediate().Intermediate()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := newCSR(t, key)
	chain := must.Get(lower.Sign(t.Context(), csr, time.Hour))(t)
	require.Len(t, chain, 3)
	stranger, _ := root.Certificate("/stranger")
	leaf, mid, top, r, o := chain[0], chain[1], chain[2], root.Root(), other.Root()
	for name, test := range map[string]struct {
		texts []string
		chain []*x509.Certificate // nil: a bad answer
		roots []*x509.Certificate
	}{
		"one certificate in each":    {[]string{pem(leaf), pem(mid), pem(top), pem(r)}, chain, []*x509.Certificate{r}},
		"a chain in one text":        {[]string{pem(leaf), pem(mid, top), pem(r)}, chain, []*x509.Certificate{r}},
		"leaf and chain in one text": {[]string{pem(leaf, mid, top), pem(r)}, chain, []*x509.Certificate{r}},
		"several roots":              {[]string{pem(leaf), pem(mid), pem(top), pem(r, o)}, chain, []*x509.Certificate{r, o}},
		"the root twice":             {[]string{pem(leaf), pem(mid), pem(top), pem(r), pem(r)}, chain, []*x509.Certificate{r}},
		"an intermediate twice":      {[]string{pem(leaf), pem(mid), pem(mid, top), pem(r)}, chain, []*x509.Certificate{r}},
		"no newline at the end":      {[]string{strings.TrimSpace(pem(leaf)), strings.TrimSpace(pem(mid)), pem(top), strings.TrimSpace(pem(r))}, chain, []*x509.Certificate{r}},
		"an empty text":              {[]string{pem(leaf), "", pem(mid, top), pem(r)}, chain, []*x509.Certificate{r}},
		"leaf and root":              {[]string{pem(leaf), pem(r)}, chain[:1], []*x509.Certificate{r}},
		"no text":                    {nil, nil, nil},
		"no roots":                   {[]string{pem(leaf)}, nil, nil},
		"roots are empty":            {[]string{pem(leaf), ""}, nil, nil},
		"chain is empty":             {[]string{"", pem(r)}, nil, nil},
		"garbage":                    {[]string{"x", pem(r)}, nil, nil},
		"garbage for roots":          {[]string{pem(leaf), "x"}, nil, nil},
		"a leaf for a root":          {[]string{pem(leaf), pem(stranger[0])}, nil, nil},
		"the key of another":         {[]string{pem(stranger[0]), pem(r)}, nil, nil},
		"the leaf is not first":      {[]string{pem(mid), pem(leaf), pem(r)}, nil, nil},
		"a key":                      {[]string{pem(leaf), "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"}, nil, nil},
		"too many roots":             {[]string{pem(leaf), strings.Repeat(pem(r), 257)}, nil, nil},
		"too many texts":             {slices.Concat([]string{pem(leaf)}, slices.Repeat([]string{""}, 1000), []string{pem(r)}), nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, client := listen(t, texts(test.texts...))
			c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client, Roots: spiffetest.NewCA(t, "example.org").Bundle()}})
			before := must.Get(c.FetchBundles(t.Context()))(t)
			got, err := c.Sign(t.Context(), csr, 0)
			after, ferr := c.FetchBundles(t.Context())
			require.NoError(t, ferr)
			if test.chain == nil {
				requireKind(t, err, caclient.ErrBadAnswer)
				assert.Equal(t, raw(rootsOf(t, before)), raw(rootsOf(t, after)), "nothing is learned from it")
				return
			}
			require.NoError(t, err)
			assert.Equal(t, raw(test.chain), raw(got))
			assert.Equal(t, append(raw(rootsOf(t, before)), raw(test.roots)...), raw(rootsOf(t, after)))
		})
	}
}

func TestConformance(t *testing.T) {
	cafake.Fewer(t) // package local takes all
	t.Parallel()
	caclienttest.Run(t, caclienttest.NewIstio, func(f *caclienttest.Fake) (caclient.CA, error) {
		return istioca.New(istioca.Options{Endpoint: f.Endpoint()})
	})
}

// FuzzReadChain reads an answer, its texts parted by zero bytes.
func FuzzReadChain(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	id := spiffe.MustParseID("spiffe://example.org/web")
	key := must.Get(pki.NewKey("ecdsa-p256"))(f)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(f)
	chain := must.Get(ca.Intermediate().Certify(f.Context(), csr, []pki.SAN{pki.IDSAN(id)}, 0))(f)
	leaf, mid, root := pem(chain[0]), pem(chain[1]), pem(ca.Root())
	for _, texts := range [][]string{
		nil, {""}, {"", ""}, {leaf}, {leaf, root}, {leaf, mid, root}, {leaf + mid, root + root}, {leaf, "", root}, {root, root}, {leaf, leaf}, {leaf, "x"}, {"x", root},
		{strings.TrimSpace(leaf), strings.TrimSpace(mid), root}, {leaf[:100], root}, {strings.Repeat(leaf, 32), root}, {strings.Repeat(leaf, 33), root}, {mid, leaf, root},
	} {
		f.Add(strings.Join(texts, "\x00"))
	}
	f.Fuzz(func(t *testing.T, in string) {
		message := must.Get(protofield.Write(func(w *protofield.Writer) {
			for text := range strings.SplitSeq(in, "\x00") {
				w.AddBytes(1, []byte(text))
			}
		}))(t)
		client := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{
			URL: "https://ca.test", HTTPClient: &http.Client{Transport: cafake.Message(message)},
		}})
		chain, err := client.Sign(t.Context(), csr, 0)
		if err != nil {
			require.Empty(t, chain)
			return
		}
		require.NotEmpty(t, chain)
		if set, err := client.FetchBundles(t.Context()); err == nil {
			n := len(must.Get(set.Bundle(domain))(t).Contents().X509Authorities)
			require.True(t, 0 < n && n <= 256, n)
		}
		require.True(t, pki.PublicKeysEqual(chain[0].PublicKey, csr.PublicKey()))
		seen := map[string]bool{}
		for i, c := range chain {
			require.False(t, seen[string(c.Raw)])
			seen[string(c.Raw)] = true
			require.True(t, i == 0 || !c.IsCA || !bytes.Equal(c.RawIssuer, c.RawSubject) || c.CheckSignatureFrom(c) != nil)
		}
	})
}
