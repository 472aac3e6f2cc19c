package federation_test

import (
	"bytes"
	"context"
	"crypto/fips140"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// https_web over a real socket.
func TestFetchWeb(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-1", "FED-23", "FED-50", "FED-51", "FED-52", "IST-1.6-7", "IST-1.7-2")
	web, ca := spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "partner.test")
	want := bundleOf(t, ca, new(uint64(7)), 5*time.Minute)
	s, url := listen(t, webCert(web, "127.0.0.1"), serving(t, want))
	fetch := func(url string, profile federation.Profile) (*spiffe.Bundle, error) {
		return federation.Fetch(t.Context(), federation.Relationship{TrustDomain: partner, URL: url, Profile: profile}, nil)
	}

	got := must.Get(fetch(url, webRoots(web)))(t)
	assert.True(t, want.Equal(got))
	asked := s.asked()
	require.Len(t, asked, 1)
	assert.Equal(t, http.MethodGet, asked[0].Method)
	assert.Equal(t, "application/json", asked[0].Header.Get("Accept"))
	assert.Empty(t, asked[0].TLS.PeerCertificates)

	// The host's own roots do not know this one.
	_, err := fetch(url, federation.Web{})
	requireCode(t, err, authentication)
	_, ok := errors.AsType[x509.UnknownAuthorityError](err)
	assert.True(t, ok, "%v", err)

	// Another host than the certificate's, and one whose only name is a common name or a SPIFFE ID.
	_, err = fetch(strings.Replace(url, "127.0.0.1", "localhost", 1), webRoots(web))
	requireCode(t, err, authentication)
	_, ok = errors.AsType[x509.HostnameError](err)
	assert.True(t, ok, "%v", err)
	chain, key := web.Certificate("/x", func(c *x509.Certificate) { c.Subject.CommonName = "127.0.0.1" })
	s.present(&tls.Certificate{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key})
	_, err = fetch(url, webRoots(web))
	requireCode(t, err, authentication)

	// Expired.
	expired := webCert(web, "127.0.0.1")
	chain, key = web.Certificate("/x", func(c *x509.Certificate) {
		c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore.Add(-time.Minute)
	})
	expired.Certificate, expired.PrivateKey, expired.Leaf = [][]byte{chain[0].Raw}, key, nil
	s.present(expired)
	_, err = fetch(url, webRoots(web))
	requireCode(t, err, authentication)
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, x509.Expired, invalid.Reason)
	assert.Empty(t, s.asked(), "nothing is asked of whom we do not know")
}

// https_spiffe over a real socket: the exact ID counts, and no name of a host.
func TestFetchSPIFFE(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-17", "FED-21", "FED-23", "FED-61", "FED-62", "FED-65")
	ca := spiffetest.NewCA(t, "partner.test")
	id := spiffe.MustParseID("spiffe://partner.test/endpoint")
	want := bundleOf(t, ca, new(uint64(7)), 5*time.Minute)
	s, url := listen(t, svidCert(ca, "/endpoint"), serving(t, want))
	r := federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: id, Initial: ca.Bundle()}}
	got := must.Get(federation.Fetch(t.Context(), r, nil))(t)
	assert.True(t, want.Equal(got))
	s.asked()

	// What is wrong with an identity is found, and what it is.
	refused := func(t *testing.T, cert *tls.Certificate) *spiffe.VerifyError {
		t.Helper()
		s.present(cert)
		_, err := federation.Fetch(t.Context(), r, nil)
		requireCode(t, err, authentication)
		e, ok := errors.AsType[*spiffe.VerifyError](err)
		require.True(t, ok, "%v", err)
		assert.Empty(t, s.asked())
		return e
	}
	e := refused(t, svidCert(ca, "/endpoint/other"))
	require.ErrorIs(t, e, spiffe.ErrDenied)
	e = refused(t, svidCert(spiffetest.NewCA(t, "other.test"), "/endpoint"))
	require.ErrorIs(t, e, spiffe.ErrUnknownTrustDomain)
	e = refused(t, webCert(ca, "127.0.0.1"))
	assert.Equal(t, "X5-3", e.Rule, "never a try with the other profile")
	for _, f := range spiffetest.Faults() {
		if !slices.Contains(f.Refused, spiffe.ServerRole) || f.Name == "NoURI" {
			continue
		}
		chain, key := ca.Broken(f.Name)
		cert := &tls.Certificate{PrivateKey: key}
		for _, c := range chain {
			cert.Certificate = append(cert.Certificate, c.Raw)
		}
		assert.Equal(t, f.Rule, refused(t, cert).Rule, "%v", f.Name)
	}

	// The wrong profile, the other way round.
	s.present(svidCert(ca, "/endpoint"))
	r.Profile = webRoots(ca)
	_, err := federation.Fetch(t.Context(), r, nil)
	requireCode(t, err, authentication)
}

// An endpoint in another trust domain, which is verified by the newest bundle of that one.
func TestFetchFromAnotherDomain(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-63", "FED-68")
	parent, ca := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "prod.example.org")
	td := ca.TrustDomain()
	s, url := listen(t, svidCert(parent, "/endpoint"), serving(t, ca.Bundle()))
	source := &source{}
	r := federation.Relationship{TrustDomain: td, URL: url, Profile: federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://example.org/endpoint"), Bundles: source}}

	_, err := federation.Fetch(t.Context(), r, nil) // the root of example.org is not known yet
	requireCode(t, err, authentication)
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	source.b = parent.Bundle()
	must.Get(federation.Fetch(t.Context(), r, nil))(t)
	s.asked()

	parent.Rotate()
	s.present(svidCert(parent, "/endpoint"))
	_, err = federation.Fetch(t.Context(), r, nil)
	requireCode(t, err, authentication)
	source.b = parent.Bundle()
	must.Get(federation.Fetch(t.Context(), r, nil))(t)

	// Without authorities nothing is sent.
	source.b = must.Get(spiffe.NewBundle(home, spiffe.BundleContents{}))(t)
	s.asked()
	_, err = federation.Fetch(t.Context(), r, nil)
	requireCode(t, err, authentication)
	require.ErrorIs(t, err, spiffe.ErrNoAuthority)
	source.b = nil
	source.silent = true
	_, err = federation.Fetch(t.Context(), r, nil)
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	assert.Empty(t, s.asked())
}

// source is a BundleSource that can be changed between two fetches.
type source struct {
	b      *spiffe.Bundle
	silent bool
}

func (s *source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if s.b == nil && !s.silent {
		return nil, fmt.Errorf("not configured: %w", spiffe.ErrUnknownTrustDomain)
	}
	return s.b, nil
}

// Redirects are followed to what may be an endpoint itself, and prove the same there.
func TestRedirects(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-40", "FED-41", "FED-43", "FED-66")
	for _, c := range []struct {
		name, to string
		status   int
		spiffe   bool
		want     string // "" for success
		dialled  []string
	}{
		{name: "302", to: "https://b.test/x", status: 302, dialled: []string{"a.test:443", "b.test:443"}},
		{name: "307", to: "https://b.test:8443/x?y=z", status: 307, dialled: []string{"a.test:443", "b.test:8443"}},
		{name: "301", to: "https://b.test/x", status: 301, dialled: []string{"a.test:443", "b.test:443"}},
		{name: "303", to: "https://b.test/x", status: 303, dialled: []string{"a.test:443", "b.test:443"}},
		{name: "308", to: "https://b.test/x", status: 308, dialled: []string{"a.test:443", "b.test:443"}},
		{name: "same ID", to: "https://b.test/x", status: 302, spiffe: true, dialled: []string{"a.test:443", "b.test:443"}},
		{name: "relative", to: "/again", status: 302, want: "more than 5", dialled: []string{"a.test:443", "a.test:443", "a.test:443", "a.test:443", "a.test:443", "a.test:443"}},
		{name: "downgrade", to: "http://b.test/x", status: 302, want: "does not begin with https://", dialled: []string{"a.test:443"}},
		{name: "user", to: "https://u:secret@b.test/x", status: 302, want: "user name or password", dialled: []string{"a.test:443"}},
		{name: "no host", to: "https:///x", status: 302, want: "has no host", dialled: []string{"a.test:443"}},
		{name: "no location", to: "", status: 302, want: "without a usable Location", dialled: []string{"a.test:443"}},
		{name: "no URL", to: "https://b.test:x/", status: 302, want: "without a usable Location", dialled: []string{"a.test:443"}},
		{name: "long", to: "https://b.test/" + strings.Repeat("x", 9000), status: 302, want: "without a usable Location", dialled: []string{"a.test:443"}},
		{name: "300", to: "https://b.test/x", status: 300, want: "HTTP status 300", dialled: []string{"a.test:443"}},
		{name: "wrong name", to: "https://c.test/x", status: 302, want: "certificate is valid for", dialled: []string{"a.test:443", "c.test:443"}},
		{name: "another ID", to: "https://c.test/x", status: 302, spiffe: true, want: "not allowed by policy", dialled: []string{"a.test:443", "c.test:443"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			world, web, ca := newInternet(), spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "partner.test")
			a, b, wrong := webCert(web, "a.test"), webCert(web, "b.test"), webCert(web, "other.test")
			r := federation.Relationship{TrustDomain: partner, URL: "https://a.test/", Profile: webRoots(web)}
			if c.spiffe {
				a, b, wrong = svidCert(ca, "/endpoint"), svidCert(ca, "/endpoint"), svidCert(ca, "/other")
				r.Profile = federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/endpoint"), Initial: ca.Bundle()}
			}
			world.host(t, "a.test", a, redirect(c.status, c.to))
			second := world.host(t, "b.test", b, serving(t, ca.Bundle()))
			third := world.host(t, "c.test", wrong, serving(t, ca.Bundle()))
			diary := &diary{}
			opts := world.options(diary.logger())
			_, err := federation.Fetch(t.Context(), r, &opts)
			assert.Equal(t, c.dialled, world.dialled())
			assert.Empty(t, third.asked())
			if c.want == "" {
				require.NoError(t, err)
				asked := second.asked()
				require.Len(t, asked, 1)
				assert.Empty(t, asked[0].Header.Get("Referer"), "the next host need not know where we come from")
				return
			}
			require.ErrorContains(t, err, c.want)
			assert.NotContains(t, err.Error(), "secret")
			switch c.name {
			case "wrong name", "another ID":
				e := requireCode(t, err, authentication)
				assert.Equal(t, "https://c.test/x", e.URL, "the error names the endpoint that failed")
				assert.Equal(t, "none", diary.read()[0]["peer"])
			case "300":
				requireCode(t, err, badStatus)
			default:
				requireCode(t, err, redirected)
			}
		})
	}
}

// Hostile answers of an endpoint, and the bounds on what they cost.
func TestHostileEndpoints(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-45", "DIV-11", "BND-33", "FED-36", "IST-1.7-13")
	stream := func(chunk []byte, pause time.Duration) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				if _, err := w.Write(chunk); err != nil {
					return
				}
				_ = http.NewResponseController(w).Flush()
				select {
				case <-r.Context().Done():
					panic(http.ErrAbortHandler) // or else the body would have an end, which the client may see first
				case <-time.After(pause):
				}
			}
		}
	}
	// raw takes over the connection.
	raw := func(f func(net.Conn)) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				defer conn.Close()
				f(conn)
			}
		}
	}
	entries := []byte(`{"keys":[` + strings.Repeat(`{},`, 99_999) + `{}]}`)
	for _, c := range []struct {
		name    string
		handler func(good []byte) http.HandlerFunc
		code    kind
		cause   string
		status  int
		took    time.Duration // exactly; 0 for at once
	}{
		{name: "500 with a good body", handler: func(good []byte) http.HandlerFunc { return answer(500, good) }, code: badStatus, status: 500, cause: "HTTP status 500"},
		{name: "203 with a good body", handler: func(good []byte) http.HandlerFunc { return answer(203, good) }, code: badStatus, status: 203},
		{name: "404", handler: func([]byte) http.HandlerFunc { return answer(404, nil) }, code: badStatus, status: 404},
		{name: "304 to an unconditional request", handler: func([]byte) http.HandlerFunc { return answer(304, nil) }, code: badStatus, status: 304},
		{name: "empty body", handler: func([]byte) http.HandlerFunc { return answer(200, nil) }, code: badDocument, status: 200},
		{name: "HTML", handler: func([]byte) http.HandlerFunc { return answer(200, []byte("<html>503</html>")) }, code: badDocument, cause: "BND-8"},
		{name: "a byte order mark", handler: func(good []byte) http.HandlerFunc { return answer(200, append([]byte("\ufeff"), good...)) }, code: badDocument, cause: "BND-8"},
		{name: "not UTF-8", handler: func(good []byte) http.HandlerFunc { return answer(200, append(good, 0xff)) }, code: badDocument, cause: "BND-28"},
		{name: "compressed", handler: func(good []byte) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				assert.Equal(t, "identity", r.Header.Get("Accept-Encoding"))
				assert.Equal(t, "true", r.Header.Get("Svidkit-Ml-Dsa"), "it passes such roots on")
				w.Header().Set("Content-Encoding", "gzip")
				_, _ = w.Write([]byte("\x1f\x8b\x08"))
			}
		}, code: connection, cause: `the answer has the content coding "gzip", which was not asked for; switch it off`},
		{name: "100,000 keys", handler: func([]byte) http.HandlerFunc { return answer(200, entries) }, code: badDocument, cause: "more than 1000 keys"},
		{name: "one byte too much", handler: func(good []byte) http.HandlerFunc {
			return answer(200, append(good, bytes.Repeat([]byte(" "), jws.MaxSetSize+1-len(good))...))
		}, code: tooLarge},
		{name: "endless body", handler: func([]byte) http.HandlerFunc { return stream(bytes.Repeat([]byte(" "), 32<<10), 0) }, code: tooLarge},
		{name: "announced body", handler: func([]byte) http.HandlerFunc {
			return func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Length", "1000000000000")
				_, _ = w.Write([]byte("{"))
			}
		}, code: tooLarge},
		{name: "slow body", handler: func([]byte) http.HandlerFunc { return stream([]byte(" "), 9*time.Second) }, code: timedOut, cause: "not done within 30s", took: 30 * time.Second},
		{name: "silent body", handler: func([]byte) http.HandlerFunc { return stream([]byte(" "), time.Hour) }, code: timedOut, cause: "not done within 30s", took: 30 * time.Second},
		{name: "silent", handler: func([]byte) http.HandlerFunc { return mute }, code: timedOut, cause: "not done within 30s", took: 30 * time.Second},
		{name: "cut off", handler: func([]byte) http.HandlerFunc {
			return raw(func(c net.Conn) {
				_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"keys\":[]}"))
			})
		}, code: connection, cause: "unexpected EOF"},
		{name: "hung up", handler: func([]byte) http.HandlerFunc { return raw(func(net.Conn) {}) }, code: connection},
		{name: "not HTTP", handler: func([]byte) http.HandlerFunc {
			return raw(func(c net.Conn) { _, _ = c.Write([]byte("220 smtp.test ESMTP\r\n")) })
		}, code: connection},
		{name: "not HTTP, at length", handler: func([]byte) http.HandlerFunc {
			return raw(func(c net.Conn) { _, _ = c.Write([]byte("HTTP/1.1 2" + strings.Repeat("é", 10_000) + "\r\n\r\n")) })
		}, code: connection, cause: "…"},
		{name: "endless header", handler: func([]byte) http.HandlerFunc {
			return raw(func(c net.Conn) {
				_, err := c.Write([]byte("HTTP/1.1 200 OK\r\n"))
				for i := 0; err == nil; i++ {
					_, err = fmt.Fprintf(c, "X-%d: %s\r\n", i, strings.Repeat("x", 1000))
				}
			})
		}, code: tooLarge, cause: "over 65536 bytes"},
		{name: "endless 103", handler: func([]byte) http.HandlerFunc {
			return raw(func(c net.Conn) {
				var err error
				for err == nil {
					_, err = c.Write([]byte("HTTP/1.1 103 Early Hints\r\n\r\n"))
				}
			})
		}, code: tooLarge},
		{name: "redirect loop", handler: func([]byte) http.HandlerFunc { return redirect(302, "https://a.test/loop") }, code: redirected},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				world, web, ca := newInternet(), spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "partner.test")
				good := bundleOf(t, ca, new(uint64(7)), 5*time.Minute)
				// Without a tag, so that the second answer cannot be a mere 304.
				s := world.host(t, "a.test", webCert(web, "a.test"), answer(200, documentOf(t, good)))
				m := newManager(t, federation.Config{
					Relationships: []federation.Relationship{{TrustDomain: partner, URL: "https://a.test/", Profile: webRoots(web)}},
					DialContext:   world.dial,
				})
				running(t, m)
				synctest.Wait()
				before := inForce(t, m, partner)
				assert.True(t, before.Equal(good))
				assert.True(t, statusOf(t, m, partner).Fresh)
				assert.Len(t, s.asked(), 1)

				s.serve(c.handler(documentOf(t, good)))
				start := statusOf(t, m, partner).NextAttempt
				time.Sleep(time.Until(start) + c.took)
				synctest.Wait()
				status := statusOf(t, m, partner)
				e := requireCode(t, status.Err, c.code)
				require.Contains(t, withRules(e), c.cause)
				if c.code == badStatus {
					require.ErrorContains(t, e, fmt.Sprintf("HTTP status %d", c.status))
				}
				switch c.code {
				case tooLarge:
					require.ErrorIs(t, e, spiffe.ErrTooLarge)
				case timedOut:
					require.ErrorIs(t, e, context.DeadlineExceeded)
				case badDocument:
					_, ok := errors.AsType[*spiffe.ParseError](e)
					assert.True(t, ok, "%v", e)
				}
				assert.Less(t, len(e.Error()), 700)
				assert.Equal(t, 1, status.Failures)
				assertStale(t, status)
				assert.Same(t, before, inForce(t, m, partner), "the last good bundle stays in force")
				assert.True(t, trusts(t, m, ca))

				// It comes back at the next interval.
				s.serve(serving(t, good))
				time.Sleep(time.Until(status.NextAttempt))
				synctest.Wait()
				assert.True(t, statusOf(t, m, partner).Fresh)
			})
		})
	}
}

// Hosts that speak no TLS, or stop in the middle of it. A dialer that waits is not waited for longer.
func TestHostileHandshakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		dial  func(ctx context.Context, network, addr string) (net.Conn, error)
		code  kind
		cause string
		took  time.Duration
	}{
		"refused": {func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("refused") }, connection, "refused", 0},
		"hangs": {func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, timedOut, "not done within 30s", 30 * time.Second},
		"silent": {pipe(func(c net.Conn) { _, _ = c.Read(make([]byte, 1<<20)) }), timedOut, "not done within 30s", 30 * time.Second},
		"reads nothing": {func(context.Context, string, string) (net.Conn, error) {
			a, _ := net.Pipe() // which has no buffer
			return a, nil
		}, timedOut, "not done within 30s", 30 * time.Second},
		"hangs up":   {pipe(func(c net.Conn) { _ = c.Close() }), connection, "", 0},
		"plain HTTP": {pipe(func(c net.Conn) { _, _ = c.Write([]byte("HTTP/1.1 200 OK\r\n\r\n")) }), connection, "tls: first record does not look like a TLS handshake", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := federation.Relationship{TrustDomain: partner, URL: "https://a.test/", Profile: federation.Web{}}
				start := time.Now()
				var open atomic.Int64
				dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := c.dial(ctx, network, addr)
					if err != nil {
						return nil, err
					}
					open.Add(1)
					return &closing{Conn: conn, closed: sync.OnceFunc(func() { open.Add(-1) })}, nil
				}
				_, err := federation.Fetch(t.Context(), r, &federation.Config{DialContext: dial})
				requireCode(t, err, c.code)
				assert.Zero(t, open.Load(), "connections that were not closed")
				require.ErrorContains(t, err, c.cause)
				assert.Equal(t, c.took, time.Since(start))

				// A caller whose context has ended gets its cause.
				if c.took > 0 {
					ctx, cancel := context.WithCancelCause(t.Context())
					go func() {
						time.Sleep(time.Second)
						cancel(errOver)
					}()
					_, err = federation.Fetch(ctx, r, &federation.Config{DialContext: c.dial})
					requireCode(t, err, canceled)
					require.ErrorIs(t, err, errOver)
					ctx, stop := context.WithTimeout(t.Context(), time.Second)
					defer stop()
					_, err = federation.Fetch(ctx, r, &federation.Config{DialContext: c.dial})
					requireCode(t, err, timedOut)
					require.ErrorIs(t, err, context.DeadlineExceeded)
				}
			})
		})
	}
}

// A server in the way presents a certificate, and its names are in the error: without line breaks for a log
// and without control characters for a terminal.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	web := spiffetest.NewCA(t, "web.test")
	n := newInternet()
	n.host(t, "partner.test", webCert(web, "a\x1b[2Jb.test", "c.test\nlevel=INFO msg=\"all is well\""), serving(t, web.Bundle()))
	opts := n.options(nil)
	_, err := federation.Fetch(t.Context(), federation.Relationship{TrustDomain: partner, URL: "https://partner.test/", Profile: webRoots(web)}, &opts)
	e := requireCode(t, err, authentication)
	assert.ErrorContains(t, err, "a\uFFFD[2Jb.test, c.test\uFFFDlevel=INFO")
	assert.ErrorContains(t, e.Err, "a\x1b[2Jb.test", "the cause is as it was")
	long := &federation.FetchError{TrustDomain: partner, Err: errors.New(strings.Repeat("é\x00", 10_000))}
	assert.Less(t, len(long.Error()), 1500)
	assert.True(t, utf8.ValidString(long.Error()))
}

// closing tells when it is closed.
type closing struct {
	net.Conn
	closed func()
}

func (c *closing) Close() error {
	c.closed()
	return c.Conn.Close()
}

// pipe is a dialer whose other end does f.
func pipe(f func(net.Conn)) func(context.Context, string, string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		a, b := memconn.Pipe()
		go f(b)
		return a, nil
	}
}

// An endpoint cannot make the Manager keep much memory. Not parallel: it counts memory.
func TestHostileMemory(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates too")
	}
	web := spiffetest.NewCA(t, "web.test")
	chunk := bytes.Repeat([]byte(" "), 32<<10)
	_, url := listen(t, webCert(web, "127.0.0.1"), func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	r := federation.Relationship{TrustDomain: partner, URL: url, Profile: webRoots(web)}
	_, err := federation.Fetch(t.Context(), r, nil)
	requireCode(t, err, tooLarge)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	_, err = federation.Fetch(t.Context(), r, nil)
	runtime.ReadMemStats(&after)
	requireCode(t, err, tooLarge)
	assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(8<<20), "both sides, garbage included")
	assert.Less(t, time.Since(start), 5*time.Second)
}

// Proxies that the environment names are not used.
func TestNoProxyFromEnvironment(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://proxy.test:3128")
	t.Setenv("https_proxy", "http://proxy.test:3128")
	world, web, ca := newInternet(), spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "partner.test")
	world.host(t, "a.test", webCert(web, "a.test"), serving(t, ca.Bundle()))
	opts := world.options(nil)
	_, err := federation.Fetch(t.Context(), federation.Relationship{TrustDomain: partner, URL: "https://a.test/", Profile: webRoots(web)}, &opts)
	require.NoError(t, err)
	assert.Equal(t, []string{"a.test:443"}, world.dialled())
}

// What is sent as ClientHello keeps to the suites and curves of FED-25, too.
func TestClientHello(t *testing.T) {
	t.Parallel()
	var hello *tls.ClientHelloInfo
	seen := make(chan struct{})
	dial := func(context.Context, string, string) (net.Conn, error) {
		a, b := memconn.Pipe()
		go func() {
			defer b.Close()
			defer close(seen)
			_ = tls.Server(b, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
				hello = h
				return nil, errors.New("seen enough")
			}}).Handshake()
		}()
		return a, nil
	}
	_, err := federation.Fetch(t.Context(), federation.Relationship{TrustDomain: partner, URL: "https://a.test/", Profile: federation.Web{}}, &federation.Config{DialContext: dial})
	requireCode(t, err, connection)
	<-seen
	assert.Equal(t, "a.test", hello.ServerName)
	assert.Equal(t, []string{"http/1.1"}, hello.SupportedProtos)
	assert.ElementsMatch(t, []uint16{tls.VersionTLS13, tls.VersionTLS12}, hello.SupportedVersions)
	for _, id := range hello.CipherSuites {
		name := tls.CipherSuiteName(id)
		assert.True(t, strings.Contains(name, "GCM") || strings.Contains(name, "CHACHA20"), name)
		assert.NotContains(t, name, "TLS_RSA_", name)
	}
	curves := []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256, tls.CurveP384}
	if fips140.Enabled() {
		curves = slices.DeleteFunc(curves, notApproved)
	}
	assert.ElementsMatch(t, curves, hello.SupportedCurves)
}

// notApproved reports whether the FIPS mode of Go leaves out a curve.
func notApproved(c tls.CurveID) bool { return c == tls.X25519 }

// withRules is the text of err with the ids of the rules that it wraps behind it, as texts leave them out.
func withRules(err error) string {
	var text strings.Builder
	text.WriteString(err.Error())
	for e, ok := errors.AsType[*spiffe.ParseError](err); ok; e, ok = errors.AsType[*spiffe.ParseError](e.Err) {
		text.WriteString(" " + e.Rule)
	}
	return text.String()
}
