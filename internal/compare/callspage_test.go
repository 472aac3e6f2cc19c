package compare

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// first is where the code of a row begins that needs something before it.
func first(f func() any) any { return f() }

// allowWeb is a rule of a program's own.
func allowWeb(path string) error {
	if path != "/web" {
		return fmt.Errorf("%q is not /web", path)
	}
	return nil
}

// judgedIDs are the IDs that policies are compared with.
var judgedIDs = []string{
	"spiffe://example.org/web", "spiffe://example.org/web/1", "spiffe://example.org/webx", "spiffe://example.org/db", "spiffe://other.test/web",
}

func allowed(authorize tlsconfig.Authorizer) any {
	var yes []string
	for _, s := range judgedIDs {
		if authorize(spiffeid.RequireFromString(s), nil) == nil {
			yes = append(yes, s)
		}
	}
	return yes
}

func allowedByUs(p spiffe.Policy) any {
	var yes []string
	for _, s := range judgedIDs {
		if p.Check(spiffe.MustParseID(s)) == nil {
			yes = append(yes, s)
		}
	}
	return yes
}

// met makes a connection, and returns the certificates that each side has presented.
func met(t *testing.T, server, client *tls.Config) any {
	t.Helper()
	serverSaw, clientSaw := must.Get2(handshake(t, server, client))(t)
	var seen []string
	for _, state := range []*tls.ConnectionState{serverSaw, clientSaw} {
		name := "none"
		if len(state.PeerCertificates) > 0 {
			id := must.Get(spiffe.IDFromCertificate(state.PeerCertificates[0]))(t)
			name = id.String()
		}
		seen = append(seen, name)
	}
	return seen
}

// withRoots is config for a server that is known by its host name.
func withRoots(config *tls.Config, roots *x509.CertPool) *tls.Config {
	config = config.Clone()
	config.RootCAs, config.ServerName, config.InsecureSkipVerify, config.VerifyPeerCertificate = roots, "localhost", false, nil
	return config
}

// dialed connects to a server that echoes.
func dialed(t *testing.T, addr string, config *tls.Config) any {
	t.Helper()
	conn := must.Get(tls.Dial("tcp", addr, config))(t)
	return echoed(t, conn)
}

func echoed(t *testing.T, conn net.Conn) any {
	t.Helper()
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	must.Get(conn.Write([]byte("hello")))(t)
	b := make([]byte, 5)
	must.Get(io.ReadFull(conn, b))(t)
	return string(b)
}

// echo serves the connections of l until it is closed.
func echo(t *testing.T, l net.Listener) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, io.LimitReader(conn, 5))
			}()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
}

// accepted has a client connect to l.
func accepted(t *testing.T, l net.Listener, client *tls.Config) any {
	t.Helper()
	echo(t, l)
	return dialed(t, l.Addr().String(), client)
}

// got returns what a bundle endpoint answers.
func got(t *testing.T, h http.Handler) any {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Equal(t, http.StatusOK, w.Code)
	b := must.Get(spiffe.ParseBundle(spiffe.MustParseTrustDomain("example.org"), w.Body.Bytes()))(t)
	return len(b.Contents().X509Authorities) + len(b.Contents().JWTAuthorities)
}

// watcher is an X509ContextWatcher.
type watcher struct{ update func(*peerapi.X509Context) }

func (w watcher) OnX509ContextUpdate(c *peerapi.X509Context) { w.update(c) }
func (w watcher) OnX509ContextWatchError(error)              {}

// partnerWatcher is a BundleWatcher that ends at the first bundle.
type partnerWatcher struct{ cancel context.CancelFunc }

func (w partnerWatcher) NextRefresh(time.Duration) time.Duration { return time.Minute }
func (w partnerWatcher) OnUpdate(*spiffebundle.Bundle)           { w.cancel() }
func (w partnerWatcher) OnError(error)                           {}

// program returns what the code of both sides finds, over one Workload API.
func program(t *testing.T) (theirProgram, ourProgram) {
	t.Helper()
	ctx := timeout(t)
	ca, partner := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	svid := ca.SVID("/web")
	api := workloadapitest.NewServer(t, ca, "/web")
	api.SetIdentities(workloadserver.Identity{SVID: svid}, workloadserver.Identity{SVID: ca.SVID("/batch"), Hint: "internal"})
	endpoint := federationtest.NewEndpoint(t, partner)
	relation := endpoint.Relationship()
	bundle := must.Get(api.Snapshot().Bundle(ca.TrustDomain()))(t)

	ownClient := must.Get(workloadapi.NewClient(api.Config().Address, nil))(t)
	t.Cleanup(ownClient.CloseIdleConnections)
	source := must.Get(workloadapi.Start(ctx, workloadapi.Config{Client: ownClient, JWTBundles: true}))(t)
	t.Cleanup(func() { assert.NoError(t, source.Close()) })
	at := peerapi.WithClientOptions(peerapi.WithAddr(api.Config().Address))
	peerSource := must.Get(peerapi.NewX509Source(ctx, at))(t)
	jwtSource := must.Get(peerapi.NewJWTSource(ctx, at))(t)
	client := must.Get(peerapi.New(ctx, peerapi.WithAddr(api.Config().Address)))(t)
	t.Cleanup(func() { assert.NoError(t, errors.Join(peerSource.Close(), jwtSource.Close(), client.Close())) })

	c := common{
		ctx: ctx, address: api.Config().Address, name: svid.ID().String(), url: relation.URL, chain: svid.Chain(), key: svid.Signer(), root: ca.Root(),
	}
	c.uri = must.Get(url.Parse(c.name))(t)
	c.certPEM, c.keyPEM = must.Get2(svid.MarshalPEM())(t)
	c.certDER, c.keyDER = must.Get2(svid.MarshalDER())(t)
	dir := t.TempDir()
	c.certFile, c.keyFile, c.rootsFile = filepath.Join(dir, "svid.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "roots.pem")
	for name, data := range map[string][]byte{c.certFile: c.certPEM, c.keyFile: c.keyPEM, c.rootsFile: bundle.MarshalPEM()} {
		require.NoError(t, os.WriteFile(name, data, 0o600))
	}
	block, _ := pem.Decode(bundle.MarshalPEM())
	c.rootsDER = block.Bytes
	c.doc = must.Get(bundle.Marshal())(t)
	c.keys = maps.Collect(bundle.JWTAuthorities())
	for c.keyID = range c.keys {
	}
	c.token = must.Get(source.Fetch(ctx, "db"))(t)
	c.newRoot = spiffetest.NewCA(t, "example.org").Root()
	chain, key := partner.Certificate("/endpoint", func(c *x509.Certificate) { c.DNSNames = []string{"localhost"} })
	c.webCertificate = &tls.Certificate{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key, Leaf: chain[0]}
	c.webRoots = partner.Bundle().CertPool()

	anyone := tlsconfig.AuthorizeAny()
	c.web = tlsconfig.MTLSClientConfig(peerSVID(t, svid), peerBundle(t, bundle), anyone)
	c.db = tlsconfig.MTLSClientConfig(peerSVID(t, ca.SVID("/db")), peerBundle(t, bundle), anyone)
	serverConfig := tlsconfig.MTLSServerConfig(peerSVID(t, svid), peerBundle(t, bundle), anyone)
	l := must.Get(tls.Listen("tcp", "127.0.0.1:0", serverConfig))(t)
	echo(t, l)
	c.addr = l.Addr().String()
	conn := must.Get(tls.Dial("tcp", c.addr, c.web))(t)
	c.state = conn.ConnectionState()
	require.NoError(t, conn.Close())

	profile, ok := relation.Profile.(federation.SPIFFE)
	require.True(t, ok)
	return theirProgram{
			common: c, td: peerDomain(ca.TrustDomain()), partnerTD: peerDomain(partner.TrustDomain()), id: peerID(svid.ID()), svid: peerSVID(t, svid),
			bundle: peerBundle(t, bundle), partner: peerBundle(t, profile.Initial), endpointID: peerID(profile.EndpointID), source: peerSource, jwtSource: jwtSource, client: client,
		}, ourProgram{
			common: c, td: ca.TrustDomain(), partnerTD: partner.TrustDomain(), id: svid.ID(), svid: svid,
			bundle: bundle, partner: profile.Initial, endpointID: profile.EndpointID, source: source, client: ownClient, policy: spiffe.AllowMembersOf(ca.TrustDomain()),
		}
}

// TestCalls runs each call of go-spiffe and what takes its place, and compares what they return.
func TestCalls(t *testing.T) {
	t.Parallel()
	rows := callRows(t)
	i := 0
	for _, s := range calls {
		for _, c := range s.calls {
			name := rows[i].from
			i++
			t.Run(s.subject+"/"+name[:min(len(name), 60)], func(t *testing.T) {
				theirs, ours := program(t)
				assert.Equal(t, c.from(t, theirs), c.to(t, ours), name)
			})
		}
	}
}

// codeRow is the code of a row of the page.
type codeRow struct{ from, to string }

// What stands in the code for the sake of this test.
var (
	receiver = regexp.MustCompile(`\be\.`)
	numbered = regexp.MustCompile(`\berr[23]\b`)
)

// callRows returns the code of calls_test.go as the page has it, in order.
func callRows(t *testing.T) []codeRow {
	t.Helper()
	fset := token.NewFileSet()
	file := must.Get(parser.ParseFile(fset, "calls_test.go", nil, parser.SkipObjectResolution))(t)
	renamed := map[string]string{} // the packages of go-spiffe whose names are those of ours
	for _, i := range file.Imports {
		if p, _ := strconv.Unquote(i.Path.Value); i.Name != nil {
			renamed[i.Name.Name+"."] = path.Base(p) + "."
		}
	}
	code := func(f *ast.FuncLit) string {
		body := f.Body
		ast.Inspect(body, func(n ast.Node) bool { // the row may begin further inside
			if c, ok := n.(*ast.CallExpr); ok {
				if id, ok := c.Fun.(*ast.Ident); ok && id.Name == "first" {
					body = c.Args[0].(*ast.FuncLit).Body
				}
			}
			return true
		})
		var lines []string
		for i, stmt := range body.List {
			if i > 0 && fset.Position(stmt.Pos()).Line > fset.Position(body.List[i-1].End()).Line+1 {
				break
			}
			var b strings.Builder
			require.NoError(t, (&printer.Config{Mode: printer.RawFormat}).Fprint(&b, fset, stmt))
			text := b.String()
			for alias, name := range renamed {
				text = strings.ReplaceAll(text, alias, name)
			}
			text = receiver.ReplaceAllString(text, "")
			text = numbered.ReplaceAllString(text, "err")
			for line := range strings.SplitSeq(text, "\n") {
				lines = append(lines, strings.ReplaceAll(line, "\t", "    "))
			}
		}
		require.Less(t, len(lines), 12, "%s: an empty line ends what is on the page", fset.Position(f.Pos()))
		return strings.Join(lines, "\n")
	}
	var rows []codeRow
	ast.Inspect(file, func(n ast.Node) bool {
		lit, ok := n.(*ast.CompositeLit)
		if !ok {
			return true
		}
		var r codeRow
		for _, e := range lit.Elts {
			kv, ok := e.(*ast.KeyValueExpr)
			if !ok {
				continue
			}
			f, ok := kv.Value.(*ast.FuncLit)
			if name, is := kv.Key.(*ast.Ident); ok && is {
				switch name.Name {
				case "from":
					r.from = code(f)
				case "to":
					r.to = code(f)
				}
			}
		}
		if r.from != "" {
			rows = append(rows, r)
			return false
		}
		return true
	})
	n := 0
	for _, s := range calls {
		n += len(s.calls)
	}
	require.Len(t, rows, n)
	return rows
}

// The tables of the page are between these lines.
const beginCalls, endCalls = "<!-- written by internal/compare: begin -->\n", "<!-- written by internal/compare: end -->\n"

// page returns the tables of the page.
func page(t *testing.T) string {
	t.Helper()
	cell := func(code string) string {
		lines := strings.Split(code, "\n")
		for i, l := range lines {
			indent := len(l) - len(strings.TrimLeft(l, " "))
			l = strings.ReplaceAll(l[indent:], "|", "\\|")
			lines[i] = strings.Repeat("&nbsp;", indent) + "`" + l + "`"
		}
		return strings.Join(lines, "<br>")
	}
	names := func(calls []any) string {
		var all []string
		for _, c := range calls {
			all = append(all, callName(c))
		}
		return strings.Join(all, ", ")
	}
	var b strings.Builder
	rows := callRows(t)
	for _, s := range calls {
		fmt.Fprintf(&b, "### %s\n\n| go-spiffe | svidkit | |\n|---|---|---|\n", s.subject)
		for _, c := range s.calls {
			note := c.note
			if len(c.like) > 0 {
				note = strings.TrimSpace(note + " Likewise " + names(c.like) + ".")
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", cell(rows[0].from), cell(rows[0].to), note)
			rows = rows[1:]
		}
		b.WriteString("\n")
	}
	b.WriteString("### Without a counterpart\n\n| go-spiffe | why, and what instead |\n|---|---|\n")
	for _, w := range without {
		fmt.Fprintf(&b, "| %s | %s |\n", names(w.calls), w.reason)
	}
	return b.String()
}

// callName is describe, with the name of a method as it is called.
func callName(f any) string {
	return regexp.MustCompile(`\(\*(\w+)\)\.`).ReplaceAllString(describe(f), "$1.")
}

// TestCallsPage compares the tables of the page with what is compiled here.
func TestCallsPage(t *testing.T) {
	t.Parallel()
	text := must.Get(os.ReadFile(callsPage))(t)
	before, rest, ok := strings.Cut(string(text), beginCalls)
	require.True(t, ok)
	tables, after, ok := strings.Cut(rest, endCalls)
	require.True(t, ok)
	if want := page(t); *updateCalls {
		require.NoError(t, os.WriteFile(callsPage, []byte(before+beginCalls+want+endCalls+after), 0o644))
	} else {
		require.Equal(t, want, tables, "write it again with -update-calls")
	}
}

// TestCallsComplete shows that the page names every function that go-spiffe exports outside exp, and every
// method of its sources and of its client.
func TestCallsComplete(t *testing.T) {
	t.Parallel()
	out := must.Get(exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/spiffe/go-spiffe/v2").Output())(t)
	text := page(t)
	count := 0
	for _, dir := range []string{
		"spiffeid", "svid/x509svid", "svid/jwtsvid", "bundle/x509bundle", "bundle/jwtbundle", "bundle/spiffebundle", "workloadapi", "spiffetls", "spiffetls/tlsconfig", "federation",
	} {
		files := must.Get(filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), dir, "*.go")))(t)
		require.NotEmpty(t, files)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			file := must.Get(parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution))(t)
			for _, d := range file.Decls {
				f, ok := d.(*ast.FuncDecl)
				if !ok || !f.Name.IsExported() {
					continue
				}
				count++
				if f.Recv != nil {
					star, _ := f.Recv.List[0].Type.(*ast.StarExpr)
					if star != nil && dir == "workloadapi" {
						if kind := star.X.(*ast.Ident).Name; ast.IsExported(kind) && kind != "WITSource" {
							assert.True(t, regexp.MustCompile(`\.`+f.Name.Name+`\b|\b`+f.Name.Name+`\(`).MatchString(text), "no row for the method %s of %s", f.Name.Name, kind)
						}
					}
					continue
				}
				full := file.Name.Name + "." + f.Name.Name
				assert.True(t, regexp.MustCompile(`\b`+regexp.QuoteMeta(full)+`\b`).MatchString(text), "no row for %s", full)
			}
		}
	}
	assert.Greater(t, count, 100)
}
