package spiffetls_test

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// asked is a policy that counts its questions.
type asked struct {
	spiffe.PolicySource
	n *atomic.Int32
}

func (a asked) Policy() spiffe.Policy {
	a.n.Add(1)
	return a.PolicySource.Policy()
}

// TestSpellings: whatever way a client writes a path, no guard behind a ServeMux lets it read what another one guards.
// Files are served by http.FileServer, which cleans paths itself.
func TestSpellings(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"admin/x", "public/x"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("the file "+name), 0o600))
	}
	ca := spiffetest.NewCA(t, "example.org")
	self, ops, web := ca.SVID("/db"), spiffe.AllowIDs(ca.SVID("/ops").ID()), ca.SVID("/web")
	everyone := spiffe.AllowMembersOf(ca.TrustDomain())
	files := http.FileServer(http.Dir(dir))
	guarded := func(h http.Handler, err error) http.Handler {
		require.NoError(t, err)
		return h
	}
	policies := new(atomic.Int32)
	peers := http.NewServeMux()
	peers.Handle("/", guarded(spiffetls.RequirePeer(asked{everyone, policies}, files)))
	peers.Handle("/public/", guarded(spiffetls.RequirePeer(asked{everyone, policies}, files)))
	peers.Handle("/admin/", guarded(spiffetls.RequirePeer(asked{ops, policies}, files)))

	callers := http.NewServeMux()
	for pattern, allow := range map[string]spiffe.Policy{"/": everyone, "/public/": everyone, "/admin/": ops} {
		v := must.Get(spiffe.NewVerifier(ca.Bundle(), allow, nil))(t)
		certificate := authn.ClientCertificate(v)
		callers.Handle(pattern, authn.Require(authn.Func(func(r *http.Request) (*authn.Caller, error) {
			policies.Add(1)
			return certificate.Authenticate(r)
		}), files, slog.New(slog.DiscardHandler)))
	}
	for name, mux := range map[string]*http.ServeMux{"RequirePeer": peers, "authn.Require": callers} {
		var failures spiffetls.Metrics
		s := &http.Server{Handler: mux}
		require.NoError(t, configureServer(s, spiffetls.Config{Self: self, Peers: ca.Bundle(), Allow: everyone, Metrics: &failures}))
		addr := strings.TrimPrefix(serve(t, s, nil), "https://")
		for proto, ask := range map[string]func(c *tls.Conn, method, path string) (int, string){"http/1.1": rawHTTP1, "h2": rawHTTP2} {
			try := func(method, path string) (int, string, int32) {
				config, err := clientConfig(spiffetls.Config{Self: web, Peers: ca.Bundle(), Allow: spiffe.AllowIDs(self.ID()), NextProtos: []string{proto}})
				require.NoError(t, err)
				config.CurvePreferences = []tls.CurveID{tls.CurveP256} // the cheapest
				c := must.Get(tls.Dial("tcp", addr, config))(t)
				defer c.Close()
				require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
				before := policies.Load()
				status, body := ask(c, method, path)
				return status, body, policies.Load() - before
			}
			status, body, _ := try("GET", "/public/x")
			require.Equal(t, 200, status, name)
			require.Equal(t, "the file public/x", body)
			status, _, questions := try("GET", "/admin/x")
			assert.Contains(t, []int{403, 401}, status, name)
			assert.EqualValues(t, 1, questions)
			for _, path := range []string{
				"/public/../admin/x", "//admin/x", "/./admin/x", "/%61dmin/x", "/public/%2e%2e/admin/x", "/public%2f..%2fadmin/x", "/admin%2fx", "/public/..%2Fadmin/x",
			} {
				for _, method := range []string{"GET", "CONNECT", "OPTIONS", "POST"}[:min(4, 2*rounds.Of(1))] {
					status, body, questions := try(method, path)
					assert.NotContains(t, body, "the file", "%s: %s %s", name, method, path)
					if path == "/%61dmin/x" && method != "CONNECT" { // which a ServeMux reads as /admin/x
						assert.Contains(t, []int{403, 401}, status, "%s: %s %s", name, method, path)
						continue
					}
					assert.Contains(t, []int{400, 301, 307, reset}, status, "%s: %s %s", name, method, path) // 301 and 307 by the ServeMux
					assert.Zero(t, questions, "%s: %s %s", name, method, path)
				}
			}
		}
		if name == "RequirePeer" {
			kinds := slices.Sorted(maps.Keys(failuresOf(t, &failures)))
			assert.Equal(t, []string{"request denied", "request unclear_path"}, kinds)
			for _, err := range failures.Report().Problems {
				assert.Regexp(t, "not allowed by policy|its path can be read in two ways: ", err)
			}
		}
	}
}

// rawHTTP1 sends a request as it stands.
func rawHTTP1(c *tls.Conn, method, path string) (int, string) {
	fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: web.test\r\n\r\n", method, path)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

const reset = -1 // the stream, by the server

// rawHTTP2 sends a request as it stands, in frames made here (RFC 9113), as no client of net/http sends such a CONNECT.
func rawHTTP2(c *tls.Conn, method, path string) (int, string) {
	frame := func(kind, flags byte, stream uint32, payload string) string {
		head := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
		return string(binary.BigEndian.AppendUint32(append(head, flags), stream)) + payload
	}
	var block strings.Builder
	for _, f := range [][2]string{{":method", method}, {":scheme", "https"}, {":authority", "web.test"}, {":path", path}} {
		block.WriteString("\x00" + string(rune(len(f[0]))) + f[0] + string(rune(len(f[1]))) + f[1]) // literals without Huffman's code
	}
	const headers, rstStream, settings, data, goAway = 1, 3, 4, 0, 7
	fmt.Fprint(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(settings, 0, 0, ""), frame(headers, 0x5, 1, block.String()))
	status, body := 0, ""
	for {
		var head [9]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return status, body + err.Error()
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(c, payload); err != nil {
			return status, body + err.Error()
		}
		switch head[3] {
		case headers: // the status is the first field: an index of RFC 7541's table, or a literal of three digits
			if known, ok := map[byte]int{0x88: 200, 0x8c: 400, 0x8d: 404}[payload[0]]; ok {
				status = known
			} else if payload[1]&0x80 == 0 {
				status, _ = strconv.Atoi(string(payload[2:5]))
			} else {
				status = huffmanDigits(payload[2:])
			}
		case data:
			body += string(payload)
		case rstStream, goAway:
			return reset, body
		}
		if (head[3] == headers || head[3] == data) && head[4]&1 != 0 {
			return status, body
		}
	}
}

// huffmanDigits reads three digits in RFC 7541's code, of which 0, 1 and 2 have five bits and the others six.
func huffmanDigits(b []byte) (n int) {
	bits := uint(b[0])<<16 | uint(b[1])<<8 | uint(b[2])
	left := uint(24)
	for range 3 {
		if five := bits >> (left - 5) & 0x1f; five < 3 {
			n, left = n*10+int(five), left-5
		} else {
			n, left = n*10+int(bits>>(left-6)&0x3f)-0x19+3, left-6
		}
	}
	return n
}
