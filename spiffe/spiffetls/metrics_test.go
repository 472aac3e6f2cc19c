package spiffetls_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// written returns what a part writes, read strictly.
func written(t testing.TB, part report.Reporter) *metricstest.Text {
	t.Helper()
	text := must.Get(metricstest.Of(part.Report().Metrics))(t)
	return text
}

// tally is how often what has happened: "server full", "client failed denied", "request denied".
type tally map[string]int

// tallyOf returns what m has counted, without zeros.
func tallyOf(t testing.TB, m *spiffetls.Metrics) tally {
	got := tally{}
	for key, v := range written(t, m).Samples {
		require.NotRegexp(t, `spiffe:|example|127\.0`, key, "nothing of a peer is a label")
		if v == 0 || strings.HasPrefix(key, "svidkit_tls_algorithms_total{") {
			continue
		}
		key = strings.TrimSuffix(strings.NewReplacer("svidkit_tls_handshakes_total{", "", `svidkit_tls_denied_requests_total{`, "request,", `"`, "", "}", "").Replace(key), ",")
		words := map[string]string{}
		for field := range strings.SplitSeq(key, ",") {
			name, value, _ := strings.Cut(field, "=")
			words[name] = value
			if name == "request" {
				words["side"] = name
			}
		}
		got[strings.Join(strings.Fields(words["side"]+" "+words["outcome"]+" "+words["reason"]), " ")] += int(v)
	}
	return got
}

// governorStatus counts connections.
type governorStatus struct {
	Open     int // governed now, the draining ones included
	Draining int // about to end
	Ended    int // ended while they were draining, so far
}

// statusOf returns the counts of this moment.
func statusOf(t testing.TB, g *spiffetls.Governor) (st governorStatus) {
	t.Helper()
	for key, v := range written(t, g).Samples {
		if strings.HasPrefix(key, "svidkit_governor_ended_connections_total{") {
			st.Ended += int(v)
		} else {
			st.Open += int(v)
		}
	}
	st.Draining = int(written(t, g).Samples[`svidkit_governor_connections{state="draining"}`])
	return st
}

// counted waits until m has counted what has happened: a server notices the end of a handshake a moment later.
func counted(t *testing.T, m *spiffetls.Metrics, want tally) {
	t.Helper()
	if !assert.Eventually(t, func() bool { return maps.Equal(tallyOf(t, m), want) }, time.Minute, time.Millisecond) {
		require.Equal(t, want, tallyOf(t, m))
	}
}

// callers are clients of all kinds, as a server sees them.
type callers struct {
	ca   *spiffetest.CA
	addr string
}

// call makes a connection, asks, and returns the answer.
func (c *callers) call(config *tls.Config) (string, error) {
	conn, err := tls.Dial("tcp", c.addr, config)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	return string(answer), err
}

// raw sends text without TLS, and returns when the server has closed the connection.
func (c *callers) raw(t *testing.T, text string) {
	t.Helper()
	conn := must.Get(net.Dial("tcp", c.addr))(t)
	defer conn.Close()
	must.Get(io.WriteString(conn, text))(t)
	_, _ = io.Copy(io.Discard, conn)
}

// hello returns the first message of a client, which then says nothing more.
func hello(t *testing.T) string {
	t.Helper()
	a, b := net.Pipe()
	go func() { _ = tls.Client(a, &tls.Config{InsecureSkipVerify: true}).Handshake() }()
	buf := make([]byte, 64<<10)
	n := must.Get(b.Read(buf))(t)
	_ = a.Close()
	return string(buf[:n])
}

// TestMetricsServer: over real sockets, servers of all kinds count what really happened.
func TestMetricsServer(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	for name, c := range map[string]struct {
		start func(t *testing.T, ca *spiffetest.CA, allow spiffe.Policy, m *spiffetls.Metrics) (addr string)
		ends  bool // it notices that a handshake ends before or after the verification
	}{
		"ConfigureServer": {func(t *testing.T, ca *spiffetest.CA, allow spiffe.Policy, m *spiffetls.Metrics) string {
			s := &http.Server{Handler: who, ReadHeaderTimeout: time.Second}
			require.NoError(t, configureServer(s, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: allow, Metrics: m}))
			return strings.TrimPrefix(serve(t, s, nil), "https://")
		}, true},
		"NewListener": {func(t *testing.T, ca *spiffetest.CA, allow spiffe.Policy, m *spiffetls.Metrics) string {
			return accepting(t, func(l net.Listener) (net.Listener, error) {
				return newListener(l, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: allow, Metrics: m, HandshakeTimeout: time.Second})
			})
		}, true},
		"ServerConfig": {func(t *testing.T, ca *spiffetest.CA, allow spiffe.Policy, m *spiffetls.Metrics) string {
			return accepting(t, func(l net.Listener) (net.Listener, error) {
				config, err := serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: allow, Metrics: m})
				return tls.NewListener(l, config), err
			})
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ca, foreign, impostor := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test"), spiffetest.NewCA(t, "example.org")
			var m spiffetls.Metrics
			want := tally{}
			count := func(key string) {
				want[key]++
				counted(t, &m, want)
			}
			cs := &callers{ca, c.start(t, ca, spiffe.AllowIDs(ca.SVID("/web").ID()), &m)}
			good := must.Get(clientConfig(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
			for range 3 {
				answer := must.Get(cs.call(good))(t)
				require.NotEmpty(t, answer)
				count("server full")
			}
			resuming := good.Clone()
			resuming.ClientSessionCache = tls.NewLRUClientSessionCache(4)
			for _, outcome := range []string{"full", "resumed", "resumed"} {
				must.Get(cs.call(resuming))(t)
				count("server " + outcome)
			}

			mine := ca.SVID("/web")
			stolen, _ := ca.Certificate("/web")
			for _, refused := range []struct {
				reason string
				client *tls.Config
			}{
				{"denied", spiffetest.TLSConfig(ca.Certificate("/api"))},
				{"denied", spiffetest.TLSConfig(ca.Certificate("/api"))},
				{"expired", spiffetest.TLSConfig(ca.Broken("Expired"))},
				{"expired", spiffetest.TLSConfig(ca.Broken("NotYetValid"))},
				{"unknown_trust_domain", spiffetest.TLSConfig(foreign.Certificate("/web"))},
				{"unknown_authority", spiffetest.TLSConfig(impostor.Certificate("/web"))},
				{"not_an_svid", spiffetest.TLSConfig(ca.Broken("TwoURIs"))},
				{"wrong_role", spiffetest.TLSConfig(ca.Broken("ServerOnly"))},
				{"invalid", spiffetest.TLSConfig(ca.Broken("UnknownExtension"))},
				{"not_verified", &tls.Config{InsecureSkipVerify: true}}, // no certificate
				{"not_verified", &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}},
				{"not_verified", &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "db.test"}}, // does not trust the server
			} {
				if refused.reason == "not_verified" && !c.ends {
					continue
				}
				_, err := cs.call(refused.client)
				require.Error(t, err, refused.reason)
				count("server failed " + refused.reason)
			}
			if c.ends {
				_, err := cs.call(spiffetest.TLSConfig(stolen, mine.Signer()))
				require.Error(t, err)
				count("server failed not_proven")
				cs.raw(t, hello(t))
				count("server failed not_verified")
				cs.raw(t, "GET / HTTP/1.1\r\nHost: db.test\r\n\r\n") // not counted, as there is no hello
			}
			must.Get(cs.call(good))(t)
			count("server full")
		})
	}
}

// accepting serves a listener of TLS connections that are each given a byte.
func accepting(t *testing.T, wrap func(net.Listener) (net.Listener, error)) (addr string) {
	t.Helper()
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	l := must.Get(wrap(inner))(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_, _ = io.CopyN(conn, conn, 1)
				_ = conn.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return inner.Addr().String()
}

// TestMetricsClient: likewise the side that dials.
func TestMetricsClient(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, foreign := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	server := func(config *tls.Config) string {
		return accepting(t, func(l net.Listener) (net.Listener, error) { return tls.NewListener(l, config), nil })
	}
	plain := func(say string, stay bool) string {
		return accepting(t, func(l net.Listener) (net.Listener, error) { return saying{l, say, stay, nil}, nil })
	}
	good := must.Get(serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
	strict := spiffetest.TLSConfig(ca.Certificate("/db"))
	strict.MaxVersion = tls.VersionTLS12 // so that the refusal is part of the handshake
	strict.ClientAuth = tls.RequireAnyClientCert
	strict.VerifyConnection = func(tls.ConnectionState) error { return fmt.Errorf("no") }

	type dial func(ctx context.Context, addr string) error
	for name, client := range map[string]func(self spiffe.SVIDSource, opts *spiffetls.Config) dial{
		"Dialer": func(self spiffe.SVIDSource, opts *spiffetls.Config) dial {
			d := must.Get(spiffetls.New(with(opts, self, ca.Bundle(), spiffe.AllowIDs(ca.SVID("/db").ID()))))(t)
			return func(ctx context.Context, addr string) error {
				conn, err := d.DialContext(ctx, "tcp", addr)
				if err == nil {
					_ = conn.Close()
				}
				return err
			}
		},
		"Transport": func(self spiffe.SVIDSource, opts *spiffetls.Config) dial {
			transport := must.Get(newTransport(with(opts, self, ca.Bundle(), spiffe.AllowIDs(ca.SVID("/db").ID()))))(t)
			transport.DisableKeepAlives = true
			return func(ctx context.Context, addr string) error { // net/http goes on to dial when its caller has gone
				conn, err := transport.DialTLSContext(ctx, "tcp", addr)
				if err == nil {
					_ = conn.Close()
				}
				return err
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var m spiffetls.Metrics
			want := tally{}
			opts := &spiffetls.Config{Metrics: &m, MinVersion: tls.VersionTLS12}
			d := client(ca.SVID("/web"), opts)
			hasty := client(ca.SVID("/web"), &spiffetls.Config{Metrics: &m, HandshakeTimeout: time.Second})
			try := func(key string, d dial, addr string, fails bool) {
				t.Helper()
				err := d(t.Context(), addr)
				require.Equal(t, fails, err != nil, "%v", err)
				want[key]++
				counted(t, &m, want)
			}
			at := server(good)
			try("client full", d, at, false)
			try("client full", d, at, false)
			try("client failed denied", d, server(spiffetest.TLSConfig(ca.Certificate("/api"))), true)
			try("client failed expired", d, server(spiffetest.TLSConfig(ca.Broken("Expired"))), true)
			try("client failed unknown_trust_domain", d, server(spiffetest.TLSConfig(foreign.Certificate("/db"))), true)
			try("client failed unknown_authority", d, server(spiffetest.TLSConfig(spiffetest.NewCA(t, "example.org").Certificate("/db"))), true)
			try("client failed not_tls", d, plain("220 mail.test ESMTP\r\n", false), true)
			try("client failed closed", d, plain("", false), true)
			try("client failed timeout", hasty, plain("", true), true)
			try("client failed refused", d, server(strict), true)
			old := ca.SVID("/web", func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), time.Now().Add(-time.Minute)
			})
			try("client failed no_identity", client(old, opts), at, true)

			ctx, cancel := context.WithCancel(t.Context())
			silent := accepting(t, func(l net.Listener) (net.Listener, error) { return saying{l, "", true, cancel}, nil })
			require.ErrorIs(t, d(ctx, silent), context.Canceled)
			want["client failed canceled"]++
			counted(t, &m, want)
			require.Error(t, d(t.Context(), "127.0.0.1:1"), "no connection, and so no handshake")
			counted(t, &m, want)
		})
	}

	t.Run("resumed", func(t *testing.T) {
		t.Parallel()
		var server, client spiffetls.Metrics
		s := &http.Server{Handler: who}
		require.NoError(t, configureServer(s, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: &server}))
		url := serve(t, s, nil)
		c := clientOf(t, ca, "/web", &spiffetls.Config{Metrics: &client})
		transport := c.Transport.(*http.Transport)
		transport.DisableKeepAlives = true
		transport.TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(1)
		for range 4 {
			get(t, c, url)
		}
		counted(t, &client, tally{"client full": 1, "client resumed": 3})
		counted(t, &server, tally{"server full": 1, "server resumed": 3})
	})

	t.Run("ClientConfig", func(t *testing.T) {
		t.Parallel()
		var m spiffetls.Metrics
		web, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(ca.SVID("/db").ID()), Metrics: &m})
		require.NoError(t, err)
		config := must.Get(web.ClientConfig())(t)
		for _, addr := range []string{server(good), server(spiffetest.TLSConfig(ca.Certificate("/api")))} {
			conn, err := tls.Dial("tcp", addr, config)
			if err == nil {
				_, err = web.PeerFromState(spiffe.ServerRole, conn.ConnectionState()) // which is no handshake
				require.NoError(t, err)
				_ = conn.Close()
			}
		}
		counted(t, &m, tally{"client full": 1, "client failed denied": 1})
	})
}

// saying is a listener whose connections say something that is no TLS, and end or stay.
type saying struct {
	net.Listener
	say  string
	stay bool
	then func() // called when the hello is there, unless it is nil
}

func (s saying) Accept() (net.Conn, error) {
	conn, err := s.Listener.Accept()
	if err != nil {
		return nil, err
	}
	go func() {
		buf := make([]byte, 64<<10)
		_, _ = conn.Read(buf) // the hello, or the other side would see a reset
		if s.then != nil {
			s.then()
		}
		_, _ = io.WriteString(conn, s.say)
		for s.stay {
			if _, err := conn.Read(buf); err != nil {
				break
			}
		}
		_ = conn.Close()
	}()
	return owned{conn}, nil
}

// owned is a connection that belongs to another goroutine.
type owned struct{ net.Conn }

func (owned) Read([]byte) (int, error) { return 0, io.EOF }
func (owned) Close() error             { return nil }

// TestMetricsRequests: denied requests are counted, and not as handshakes.
func TestMetricsRequests(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var m spiffetls.Metrics
	admin := must.Get(spiffetls.RequirePeer(spiffe.AllowIDs(ca.SVID("/admin").ID()), who))(t)
	s := &http.Server{Handler: admin}
	require.NoError(t, configureServer(s, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: &m, AllowAnonymousClients: true}))
	url := serve(t, s, nil)
	web := clientOf(t, ca, "/web", nil)
	for range 3 {
		get(t, web, url)
	}
	get(t, clientOf(t, ca, "/admin", nil), url)
	transport := must.Get(newTransport(spiffetls.Config{OptionalIdentity: true, Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
	t.Cleanup(transport.CloseIdleConnections)
	get(t, &http.Client{Transport: transport}, url)
	counted(t, &m, tally{"server full": 3, "request denied": 3, "request no_certificate": 1})
}

// TestMetricsLimit: a connection over MaxHandshakes is counted.
func TestMetricsLimit(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var m spiffetls.Metrics
	addr := accepting(t, func(l net.Listener) (net.Listener, error) {
		return newListener(l, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: &m, MaxHandshakes: 1})
	})
	for range 2 {
		conn := must.Get(net.Dial("tcp", addr))(t)
		t.Cleanup(func() { _ = conn.Close() })
	}
	counted(t, &m, tally{"server failed too_many": 1})
}

// TestGovernorMetrics: connections that it holds and that it has ended, by the reason.
func TestGovernorMetrics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		g := &spiffetls.Governor{Grace: 10 * time.Second, Jitter: -1}
		govern(t, g)
		var allow spiffe.LivePolicy
		require.NoError(t, allow.Set(spiffe.AllowMembersOf(ca.TrustDomain())))
		below := memconn.Listen()
		l := must.Get(newListener(below, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: &allow, Governor: g}))(t)
		t.Cleanup(func() { _ = l.Close() })
		check := func(open, draining, ends, denied float64) {
			t.Helper()
			synctest.Wait()
			s := written(t, g).Samples
			assert.Equal(t, []float64{open, draining, ends, denied}, []float64{
				s[`svidkit_governor_connections{state="open"}`], s[`svidkit_governor_connections{state="draining"}`],
				s[`svidkit_governor_ended_connections_total{reason="proof_ends"}`], s[`svidkit_governor_ended_connections_total{reason="denied"}`],
			})
		}
		check(0, 0, 0, 0)
		soon := ca.SVID("/soon", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(10 * time.Minute) })
		for _, svid := range []*spiffe.SVID{ca.SVID("/web"), soon} {
			config := must.Get(clientConfig(spiffetls.Config{Self: svid, Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
			go func() {
				if raw, err := below.Dial(t.Context()); assert.NoError(t, err) {
					assert.NoError(t, tls.Client(raw, config).HandshakeContext(t.Context()))
				}
			}()
			conn := must.Get(l.Accept())(t)
			t.Cleanup(func() { _ = conn.Close() })
		}
		check(2, 0, 0, 0)
		time.Sleep(10*time.Minute - 10*time.Second + instant)
		check(1, 1, 0, 0)
		time.Sleep(10 * time.Second)
		check(1, 0, 1, 0)
		require.NoError(t, allow.Set(spiffe.AllowIDs(soon.ID())))
		time.Sleep(12 * time.Second)
		check(0, 0, 1, 1)
	})
}
