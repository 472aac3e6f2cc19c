package readme_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

const symptoms = "../../../examples/SYMPTOMS.md"

// lines is a log, and may be read while it is written.
type lines = logtest.Buffer

// symptom is what the two sides of one failure see.
type symptom struct{ client, server string }

var code = regexp.MustCompile("`([^`]+)`")

// fragments returns what a cell quotes, without the dots of what is left out.
func fragments(cell string) []string {
	var all []string
	for _, m := range code.FindAllStringSubmatch(cell, -1) {
		all = append(all, strings.Trim(m[1], "… "))
	}
	return all
}

// table returns the rows below a heading of a page, by cells.
func table(t *testing.T, page, heading string) [][]string {
	_, section, ok := strings.Cut(string(must.Get(os.ReadFile(page))(t)), "\n## "+heading+"\n")
	require.True(t, ok, heading)
	section, _, _ = strings.Cut(section, "\n## ")
	var rows [][]string
	for line := range strings.Lines(section) {
		if strings.HasPrefix(line, "| ") {
			rows = append(rows, strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | "))
		}
	}
	require.Greater(t, len(rows), 1)
	return rows[1:]
}

// plain asks without TLS.
type plain struct{}

func (plain) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme = "http"
	return http.DefaultTransport.RoundTrip(r)
}

// TestSymptoms makes the failures of the first two tables of SYMPTOMS.md. Each has a row with what both sides see, and each row is
// of one that was made.
func TestSymptoms(t *testing.T) {
	t.Parallel()
	rows := append(table(t, symptoms, "A handshake fails"), table(t, symptoms, "A request is refused")...)
	elsewhere := map[string]string{ // and where those are shown
		"gRPC `Unavailable`":      "spiffegrpc: TestCredentials",
		"gRPC `PermissionDenied`": "spiffegrpc: TestRequirePeer",
		"gRPC `Unauthenticated`":  "spiffegrpc: TestRequireCaller",
	}
	made := map[string]symptom{}
	var mu sync.Mutex
	t.Run("make", func(t *testing.T) {
		for name, fail := range failures(t) {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := fail(t)
				require.NotEmpty(t, s.client)
				mu.Lock()
				defer mu.Unlock()
				made[name] = s
			})
		}
	})
	// The client sees one of what the first cell quotes, and the log has all of the second.
	shown := func(s symptom, row []string) bool {
		anyOf := func(text string, of []string) bool {
			for _, f := range of {
				if strings.Contains(text, f) {
					return true
				}
			}
			return false
		}
		allOf := func(text string, of []string) bool {
			for _, f := range of {
				if !strings.Contains(text, f) {
					return false
				}
			}
			return true
		}
		quoted := fragments(row[0])
		return anyOf(s.client, quoted) && allOf(s.server, fragments(row[1])) && (row[1] != "nothing" || s.server == "")
	}
	for name, s := range made {
		found := false
		for _, row := range rows {
			found = found || shown(s, row)
		}
		assert.True(t, found, "no row for %s:\n  client: %s\n  server: %s", name, s.client, s.server)
	}
	for _, row := range rows {
		if elsewhere[strings.TrimSpace(row[0])] != "" {
			continue
		}
		found := false
		for _, s := range made {
			found = found || shown(s, row)
		}
		assert.True(t, found, "nothing that was made is %v", row[:2])
	}
}

func failures(t *testing.T) map[string]func(*testing.T) symptom {
	ours, anew, partner := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	web, db := ours.SVID("/web"), ours.SVID("/db")
	all := spiffe.AllowMembersOf(ours.TrustDomain())
	gone := ours.Source("/gone")
	gone.Fail(errors.New("the agent is away"))

	// handshake lets a client of its own TLS configuration ask a server.
	handshake := func(t *testing.T, self spiffe.SVIDSource, bundles spiffe.BundleSource, allow spiffe.PolicySource, client http.RoundTripper, handler http.Handler, algorithms ...spiffe.Algorithms) symptom {
		log := new(lines)
		s := httptest.NewUnstartedServer(handler)
		endpoint := must.Get(spiffetls.New(spiffetls.Config{
			Self: self, Peers: bundles, Allow: allow, Logger: slog.New(slog.NewTextHandler(log, nil)), Algorithms: append(algorithms, spiffe.Algorithms{})[0],
		}))(t)
		require.NoError(t, endpoint.ConfigureServer(s.Config))
		spiffetest.StartTLS(s, s.Config.TLSConfig)
		c := &http.Client{Transport: client, Timeout: 10 * time.Second}
		resp, err := c.Get(s.URL)
		result := symptom{}
		if err != nil {
			result.client = err.Error()
		} else {
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			result.client = resp.Status + " " + string(body)
		}
		if client != (plain{}) { // of which there is nothing in the log
			assert.Eventually(t, func() bool { return log.String() != "" }, time.Minute, time.Millisecond)
		}
		c.CloseIdleConnections()
		s.Close()
		result.server = log.String()
		return result
	}
	nothing := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	ask := func(self spiffe.SVIDSource, bundles spiffe.BundleSource, allow spiffe.PolicySource) http.RoundTripper {
		endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: bundles, Allow: allow}))(t)
		return must.Get(endpoint.Transport())(t)
	}
	broken := func(fault string) func(*testing.T) symptom {
		return func(t *testing.T) symptom {
			chain, key := ours.Broken(fault)
			return handshake(t, db, ours.Bundle(), all, &http.Transport{TLSClientConfig: spiffetest.TLSConfig(chain, key)}, nothing)
		}
	}

	// token has a request with a token refused.
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	issuer := must.Get(jwtsvid.NewIssuer(ours.TrustDomain(), "k1", key, nil))(t)
	contents := ours.Bundle().Contents()
	contents.JWTAuthorities = map[string]crypto.PublicKey{"k1": key.Public()}
	bundle := must.Get(spiffe.NewBundle(ours.TrustDomain(), contents))(t)
	token := func(url, header string) func(*testing.T) symptom {
		return func(t *testing.T) symptom {
			log := new(lines)
			v := must.Get(jwtsvid.NewValidator(bundle, []string{"db"}, nil))(t)
			wrap := must.Get(jwtsvid.Middleware(v, all, &jwtsvid.MiddlewareOptions{Logger: slog.New(slog.NewTextHandler(log, nil))}))(t)
			r := httptest.NewRequest(http.MethodGet, url, nil)
			if header != "" {
				r.Header.Set("Authorization", header)
			}
			w := httptest.NewRecorder()
			wrap(nothing).ServeHTTP(w, r)
			return symptom{w.Result().Status + " " + w.Header().Get("WWW-Authenticate"), log.String()}
		}
	}
	elsewhere := must.Get(issuer.Issue(jwtsvid.Request{ID: web.ID(), Audience: []string{"cache"}}))(t)

	return map[string]func(*testing.T) symptom{
		"policy": func(t *testing.T) symptom {
			return handshake(t, db, ours.Bundle(), spiffe.AllowIDs(db.ID()), ask(web, ours.Bundle(), all), nothing)
		},
		"trust domain": func(t *testing.T) symptom {
			return handshake(t, db, ours.Bundle(), all, ask(partner.SVID("/web"), ours.Bundle(), all), nothing)
		},
		"kind of key": func(t *testing.T) symptom {
			return handshake(t, db, ours.Bundle(), all, ask(web, ours.Bundle(), all), nothing, must.Get(spiffe.ParseAlgorithms("rsa"))(t))
		},
		"unknown authority":    broken("ForeignCA"),
		"missing intermediate": broken("MissingIntermediate"),
		"expired":              broken("Expired"),
		"not valid yet":        broken("NotYetValid"),
		"two names":            broken("TwoURIs"),
		"a CA":                 broken("CALeaf"),
		"for servers":          broken("ServerOnly"),
		"server without": func(t *testing.T) symptom {
			return handshake(t, gone, ours.Bundle(), all, ask(web, ours.Bundle(), all), nothing)
		},
		"client presents none": func(t *testing.T) symptom {
			config := &tls.Config{InsecureSkipVerify: true} // the server is what is looked at
			return handshake(t, db, ours.Bundle(), all, &http.Transport{TLSClientConfig: config}, nothing)
		},
		"client refuses": func(t *testing.T) symptom {
			return handshake(t, db, ours.Bundle(), all, ask(web, anew.Bundle(), all), nothing)
		},
		"client without": func(t *testing.T) symptom {
			return handshake(t, db, ours.Bundle(), all, ask(gone, ours.Bundle(), all), nothing)
		},
		"plain text to TLS": func(t *testing.T) symptom {
			return handshake(t, db, ours.Bundle(), all, plain{}, nothing)
		},
		"TLS to plain text": func(t *testing.T) symptom {
			l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
			defer l.Close()
			go func() { // a server of another protocol
				if c, err := l.Accept(); err == nil {
					_, _ = c.Write([]byte("+OK hello\r\n"))
				}
			}()
			_, err := (&http.Client{Transport: ask(web, ours.Bundle(), all), Timeout: 10 * time.Second}).Get("https://" + l.Addr().String())
			require.Error(t, err)
			return symptom{client: err.Error()}
		},
		"request": func(t *testing.T) symptom {
			only := must.Get(spiffetls.RequirePeer(spiffe.AllowIDs(db.ID()), nothing))(t)
			return handshake(t, db, ours.Bundle(), all, ask(web, ours.Bundle(), all), only)
		},
		"no token":       token("https://db.example/", ""),
		"readable":       token("http://db.example/", "Bearer x"),
		"no JWT":         token("https://db.example/", "Bearer x"),
		"other audience": token("https://db.example/", "Bearer "+elsewhere),
		"CA": func(t *testing.T) symptom {
			log := new(lines)
			authority := must.Get(ca.New(ca.Config{TrustDomain: ours.TrustDomain()}))(t)
			refuse := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, authn.ErrRefused })
			h, err := server.New(server.Options{Signer: authority, Authenticator: refuse, Logger: slog.New(slog.NewTextHandler(log, nil))})
			require.NoError(t, err)
			s := httptest.NewUnstartedServer(h)
			s.EnableHTTP2 = true
			s.StartTLS()
			t.Cleanup(s.Close)
			c := must.Get(istioca.New(istioca.Options{Endpoint: caclient.Endpoint{
				URL: s.URL, HTTPClient: s.Client(), TrustDomain: ours.TrustDomain(), Token: func(context.Context) (string, error) { return "x", nil },
			}}))(t)
			k := must.Get(pki.NewKey("ecdsa-p256"))(t)
			csr := must.Get(pki.NewCSR(k, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(web.ID())}}))(t)
			_, err = c.Sign(t.Context(), csr, time.Hour)
			require.Error(t, err)
			return symptom{err.Error(), log.String()}
		},
	}
}
