package spiffetls_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
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
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// journal is a Logger's output, a line at a time.
type journal struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.Write(p)
}

func (j *journal) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(j, nil)) }

// take returns the lines since the last call.
func (j *journal) take(t testing.TB) (lines []map[string]any) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range strings.Lines(j.b.String()) {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		lines = append(lines, m)
	}
	j.b.Reset()
	return lines
}

// TestLogger is a server that is not net/http's, as that of grpc-go, whose configuration would refuse clients without a
// word: one line for each reason, and then their number.
func TestLogger(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, foreign := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
		db := newParty(ca.SVID("/db"), ca.Bundles())
		var j, own journal
		server := db.server(t, spiffe.AllowIDs(ca.SVID("/web").ID()), &spiffetls.Config{Logger: j.logger()})
		party := func(svid *spiffe.SVID) *tls.Config {
			return newParty(svid, ca.Bundles()).client(t, spiffe.AllowAnyPeer(), nil)
		}

		s, c := connect(t, server, party(ca.SVID("/web")))
		require.NoError(t, s.err)
		require.NoError(t, c.err)
		synctest.Wait()
		assert.Empty(t, j.take(t), "nothing was refused")

		serverOnly, serverKey := ca.Broken("ServerOnly")
		faulty, faultyKey := ca.Broken("NoKeyUsage")
		old := ca.SVID("/web", func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore.Add(-time.Minute)
		})
		impostor := spiffetest.NewCA(t, "example.org").SVID("/web")
		for _, tt := range []struct {
			reason, id, message string
			client              *tls.Config
		}{
			{"denied", "spiffe://example.org/api", "spiffetls: handshake failed", party(ca.SVID("/api"))},
			{"unknown_trust_domain", "spiffe://other.test/web", "spiffetls: handshake failed", party(foreign.SVID("/web"))},
			{"unknown_authority", "spiffe://example.org/web", "spiffetls: handshake failed", party(impostor)},
			{"expired", "spiffe://example.org/web", "spiffetls: handshake failed", bare(old.Chain(), old.Signer())},
			{"wrong_role", "spiffe://example.org/broken", "spiffetls: handshake failed", bare(serverOnly, serverKey)},
			{"not_an_svid", "spiffe://example.org/broken", "spiffetls: handshake failed", bare(faulty, faultyKey)},
		} {
			for range rounds.Of(13) {
				s, _ := connect(t, server, tt.client)
				require.Error(t, s.err)
			}
			synctest.Wait()
			lines := j.take(t)
			require.Len(t, lines, 1, tt.reason)
			line := lines[0]
			assert.Equal(t, tt.message, line["msg"], tt.reason)
			assert.Equal(t, "WARN", line["level"])
			assert.Equal(t, tt.reason, line["reason"])
			assert.NotEmpty(t, line["remote"])
			assert.NotEmpty(t, line["err"])
			assert.NotContains(t, line, "id", "it was not proved")
			if tt.id == "" {
				assert.NotContains(t, line, "unverified_id")
			} else {
				assert.Equal(t, tt.id, line["unverified_id"], "%v", line)
			}
			time.Sleep(time.Minute + time.Second)
			lines = j.take(t)
			require.Len(t, lines, 1, tt.reason)
			assert.EqualValues(t, rounds.Of(13)-1, lines[0]["count"])
			assert.Equal(t, tt.reason, lines[0]["reason"])
			time.Sleep(time.Minute)
			assert.Empty(t, j.take(t))
		}

		// A second ID that the policy denies has a line of its own. Names that a stranger makes up have none.
		for _, client := range []*tls.Config{party(ca.SVID("/api")), party(ca.SVID("/api")), party(ca.SVID("/job")), party(foreign.SVID("/a")), party(foreign.SVID("/b"))} {
			s, _ := connect(t, server, client)
			require.Error(t, s.err)
		}
		synctest.Wait()
		var ids []any
		for _, line := range j.take(t) {
			ids = append(ids, line["unverified_id"])
		}
		assert.Equal(t, []any{"spiffe://example.org/api", "spiffe://example.org/job", "spiffe://other.test/a"}, ids)
		time.Sleep(3 * time.Minute)
		j.take(t)

		// The side that dials, and a side without an identity.
		s, c = connect(t, db.server(t, spiffe.AllowAnyPeer(), nil), newParty(ca.SVID("/web"), ca.Bundles()).client(t, spiffe.AllowIDs(ca.SVID("/none").ID()), &spiffetls.Config{Logger: own.logger()}))
		require.Error(t, c.err)
		lines := own.take(t)
		require.Len(t, lines, 1)
		assert.Equal(t, "spiffetls: handshake failed", lines[0]["msg"])
		assert.Equal(t, "spiffe://example.org/db", lines[0]["unverified_id"])
		none := newParty(old, ca.Bundles())
		s, _ = connect(t, none.server(t, spiffe.AllowAnyPeer(), &spiffetls.Config{Logger: j.logger()}), party(ca.SVID("/web")))
		require.Error(t, s.err)
		synctest.Wait()
		lines = j.take(t)
		require.Len(t, lines, 1)
		assert.Equal(t, "spiffetls: handshake failed", lines[0]["msg"])
	})
}

// TestLoggerReasons: there are few, whatever a peer or a source says, and a peer cannot make a line long.
func TestLoggerReasons(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	empty := must.Get(spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{}))(t)
	broken := func(f string) []*x509.Certificate {
		chain, _ := ca.Broken(f)
		return chain
	}
	fails := bundleFunc(func(spiffe.TrustDomain) (*spiffe.Bundle, error) {
		return nil, errors.New(strings.Repeat("down ", 1000))
	})
	for want, c := range map[string]struct {
		peers spiffe.BundleSource
		chain []*x509.Certificate
	}{
		"no_authority": {empty, ca.SVID("/web").Chain()},
		"no_bundle":    {fails, ca.SVID("/web").Chain()},
		"invalid":      {ca.Bundle(), broken("UnknownExtension")},
		"expired":      {ca.Bundle(), broken("NotYetValid")},
		"wrong_role":   {ca.Bundle(), broken("ClientOnly")},
		"not_an_svid":  {ca.Bundle(), broken("TwoURIs")},
	} {
		var j journal
		config, err := clientConfig(spiffetls.Config{Self: ca.SVID("/api"), Peers: c.peers, Allow: spiffe.AllowAnyPeer(), Logger: j.logger()})
		require.NoError(t, err)
		require.Error(t, config.VerifyConnection(tls.ConnectionState{PeerCertificates: c.chain, ServerName: "db.test"}))
		lines := j.take(t)
		require.Len(t, lines, 1, want)
		assert.Equal(t, want, lines[0]["reason"])
		assert.Equal(t, "spiffetls: handshake failed", lines[0]["msg"])
		assert.Equal(t, "db.test", lines[0]["remote"])
		assert.Less(t, len(lines[0]["err"].(string)), 1100)
		if strings.Contains(want, "expired") {
			assert.Contains(t, lines[0]["err"], "compare the clocks")
		}
	}

	// A server that speaks another version of TLS, or no TLS.
	var j journal
	transport, err := newTransport(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Logger: j.logger()})
	require.NoError(t, err)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
			_ = conn.Close()
		}
	}()
	_, err = (&http.Client{Transport: transport}).Get("https://" + l.Addr().String())
	require.Error(t, err)
	lines := j.take(t)
	require.Len(t, lines, 1)
	assert.Equal(t, "not_tls", lines[0]["reason"])
	assert.Equal(t, "spiffetls: handshake failed", lines[0]["msg"])
	assert.NotContains(t, lines[0], "unverified_id")
}

// TestLoggerAddress: the line has the address and the proved ID of a client whose request was denied.
func TestLoggerAddress(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var j journal
	opts := &spiffetls.Config{Logger: j.logger()}
	admin := must.Get(spiffetls.RequirePeer(spiffe.AllowIDs(ca.SVID("/admin").ID()), who))(t)
	s := &http.Server{Handler: admin}
	require.NoError(t, configureServer(s, with(opts, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()))))
	url := serve(t, s, nil)
	for range 3 {
		response := must.Get(clientOf(t, ca, "/web", nil).Get(url))(t)
		assert.Equal(t, http.StatusForbidden, response.StatusCode)
		_ = response.Body.Close()
	}
	lines := j.take(t)
	require.Len(t, lines, 1)
	assert.Equal(t, "spiffetls: request denied", lines[0]["msg"])
	assert.Equal(t, "spiffe://example.org/web", lines[0]["id"])
	assert.Regexp(t, `^127\.0\.0\.1:\d+$`, lines[0]["remote"])
}

// TestErrorLog is a server of net/http, which writes a line for each failed handshake: that goes to the Logger at Debug and
// is counted, unless the server has an ErrorLog of its own.
func TestErrorLog(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, own := range []bool{false, true} {
		var j, theirs journal
		s := &http.Server{Handler: who}
		if own {
			s.ErrorLog = slog.NewLogLogger(slog.NewJSONHandler(&theirs, nil), slog.LevelInfo)
		}
		logger := slog.New(slog.NewJSONHandler(&j, &slog.HandlerOptions{Level: slog.LevelDebug}))
		require.NoError(t, configureServer(s, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Logger: logger}))
		l := memconn.Listen()
		var wg sync.WaitGroup
		wg.Go(func() { assert.ErrorIs(t, s.ServeTLS(l, "", ""), http.ErrServerClosed) })
		for range 5 {
			c := must.Get(l.DialContext(t.Context(), "", ""))(t)
			must.Get(c.Write([]byte("GET / HTTP/1.1\r\n\r\n")))(t)
			_, _ = io.Copy(io.Discard, c) // until the server has closed it
			require.NoError(t, c.Close())
		}
		require.NoError(t, s.Shutdown(t.Context()))
		wg.Wait()
		var debug []map[string]any
		for _, line := range j.take(t) {
			if line["msg"] == "http: TLS handshake error" {
				debug = append(debug, line)
			}
		}
		if own {
			assert.Empty(t, debug)
			assert.Len(t, theirs.take(t), 5)
			continue
		}
		require.Len(t, debug, 1)
		assert.Equal(t, "DEBUG", debug[0]["level"])
		assert.NotEmpty(t, debug[0]["err"])
	}
}
