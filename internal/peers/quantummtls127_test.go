//go:build go1.27

package peers_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

var theirID, ourID = spiffe.MustParseID("spiffe://example.org/theirs"), spiffe.MustParseID("spiffe://example.org/ours")

// quantumDomain has a root and a CA below it of each kind of key, all of the trust domain example.org.
type quantumDomain map[string]*pki.Issuer

func newQuantumDomain(t testing.TB, kinds ...string) quantumDomain {
	d := quantumDomain{}
	for _, kind := range kinds {
		o := pki.CertificateOptions{CA: true, SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
		root := must.Get(pki.NewRoot(must.Get(pki.NewKey(kind))(t), o))(t)
		key := must.Get(pki.NewKey(kind))(t)
		o.PublicKey = key.Public()
		d[kind] = must.Get(pki.NewIssuer([]*x509.Certificate{must.Get(root.Issue(o))(t), root.Certificate()}, key))(t)
	}
	return d
}

// roots returns the root of each kind.
func (d quantumDomain) roots(kinds ...string) (all []*x509.Certificate) {
	for _, kind := range kinds {
		all = append(all, d[kind].Chain()[1])
	}
	return all
}

func (d quantumDomain) svid(t testing.TB, issuer, kind string, id spiffe.ID) *spiffe.SVID {
	key := must.Get(pki.NewKey(kind))(t)
	by := d[issuer].Certificate()
	leaf := must.Get(d[issuer].Issue(pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(id)},
		NotBefore: by.NotBefore, NotAfter: by.NotAfter}))(t)
	return must.Get(spiffe.NewSVID([]*x509.Certificate{leaf, by}, key))(t)
}

// tampered returns an SVID whose nth certificate has a signature that is not the issuer's.
func tampered(t testing.TB, s *spiffe.SVID, n int) *spiffe.SVID {
	chain := s.Chain()
	der := bytes.Clone(chain[n].Raw)
	der[len(der)-100] ^= 1
	chain = append(append(chain[:n:n], must.Get(x509.ParseCertificate(der))(t)), chain[n+1:]...)
	return must.Get(spiffe.NewSVID(chain, s.TLSCertificate().PrivateKey.(crypto.Signer)))(t)
}

// A judge is a program of others that speaks TLS.
type judge interface {
	// serve has a server of these credentials write the ID of each client to it.
	serve(t *testing.T, self *spiffe.SVID, roots []*x509.Certificate, more ...*spiffe.SVID) (address string)
	// dial returns the ID of a server and what that writes.
	dial(t *testing.T, address string, self *spiffe.SVID, roots []*x509.Certificate) (string, error)
}

// program is a judge with a command line.
type program []string

func (p program) command(t *testing.T, side, port string, roots []*x509.Certificate, self ...*spiffe.SVID) *exec.Cmd {
	dir, args := t.TempDir(), slices.Concat(p[1:], []string{side, port})
	file := func(name string, data []byte) {
		args = append(args, filepath.Join(dir, name))
		require.NoError(t, os.WriteFile(args[len(args)-1], data, 0o600))
	}
	file("roots.pem", pki.MarshalCertificatesPEM(roots...))
	for i, s := range self {
		certs, key := must.Get2(s.MarshalPEM())(t)
		file(fmt.Sprint("chain", i, ".pem"), certs)
		file(fmt.Sprint("key", i, ".pem"), key)
	}
	return exec.CommandContext(t.Context(), p[0], args...)
}

func (p program) serve(t *testing.T, self *spiffe.SVID, roots []*x509.Certificate, more ...*spiffe.SVID) string {
	cmd, log := p.command(t, "server", "0", roots, append([]*spiffe.SVID{self}, more...)...), new(programtest.Log)
	cmd.Stderr = log
	out := bufio.NewReader(must.Get(cmd.StdoutPipe())(t))
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it serves until then
		_ = cmd.Wait()
		if text := log.String(); text != "" {
			t.Logf("their server: %s", text)
		}
	})
	line, err := out.ReadString('\n')
	port, ok := strings.CutPrefix(strings.TrimSpace(line), "listening ")
	require.True(t, ok, "%q %v %s", line, err, log)
	return "127.0.0.1:" + port
}

func (p program) dial(t *testing.T, address string, self *spiffe.SVID, roots []*x509.Certificate) (string, error) {
	_, port := must.Get2(net.SplitHostPort(address))(t)
	cmd := p.command(t, "client", port, roots, self)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSpace(string(out)), nil
}

// standard is a judge of crypto/tls and crypto/x509 alone.
type standard struct{}

func (standard) config(self *spiffe.SVID, roots []*x509.Certificate) *tls.Config {
	pool := x509.NewCertPool()
	for _, root := range roots {
		pool.AddCert(root)
	}
	own := tls.Certificate{PrivateKey: self.TLSCertificate().PrivateKey}
	for _, c := range self.Chain() {
		own.Certificate = append(own.Certificate, c.Raw)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool, // as a server
		InsecureSkipVerify: true, VerifyConnection: func(cs tls.ConnectionState) error { // as a client: there is no host name
			o := x509.VerifyOptions{Roots: pool, Intermediates: x509.NewCertPool()}
			for _, c := range cs.PeerCertificates[1:] {
				o.Intermediates.AddCert(c)
			}
			_, err := cs.PeerCertificates[0].Verify(o)
			return err
		},
	}
}

func (s standard) serve(t *testing.T, self *spiffe.SVID, roots []*x509.Certificate, _ ...*spiffe.SVID) string {
	config := s.config(self, roots)
	config.VerifyConnection = nil
	l := must.Get(tls.Listen("tcp", "127.0.0.1:0", config))(t)
	background(t, func(context.Context) {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if conn := c.(*tls.Conn); conn.Handshake() == nil {
				_, _ = io.WriteString(conn, conn.ConnectionState().PeerCertificates[0].URIs[0].String())
			}
			_ = c.Close()
		}
	})
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

func (s standard) dial(_ *testing.T, address string, self *spiffe.SVID, roots []*x509.Certificate) (string, error) {
	c, err := tls.Dial("tcp", address, s.config(self, roots))
	if err != nil {
		return "", err
	}
	defer c.Close()
	text, err := io.ReadAll(c)
	return c.ConnectionState().PeerCertificates[0].URIs[0].String() + " " + string(text), err
}

// TestQuantumNode has Node.js, with OpenSSL 3.5, judge chains of ML-DSA that this library made. OpenSSL presents a
// certificate that is signed with ML-DSA only to peers that do not except such signatures in signature_algorithms_cert, as
// crypto/tls of Go 1.27 always does; so towards Go it needs a classical certificate beside it.
func TestQuantumNode(t *testing.T) {
	t.Parallel()
	testJudge(t, program{peers.Program(t, "node"), "testdata/quantum.js"}, false)
}

// TestQuantumRustls is TestQuantumNode with rustls, with aws-lc-rs and webpki.
func TestQuantumRustls(t *testing.T) {
	t.Parallel()
	testJudge(t, program{peers.Program(t, "rustls")}, true)
}

// TestQuantumStandard is TestQuantumNode with the standard library of Go.
func TestQuantumStandard(t *testing.T) {
	t.Parallel()
	testJudge(t, standard{}, true)
}

// Who ends the connection of a case.
type ender int

const (
	none      ender = iota
	we              // refuse their chain
	they            // refuse our chain
	dialling        // refuse our chain if they dial; as a server they name their roots, so that we present another
	notAllows       // we refuse the kind of their key
)

// testJudge has a judge as a server and as a client of an endpoint. Each case has one bad thing at most. A judge that
// does not present to Go what is signed with ML-DSA has no certificate for us instead.
func testJudge(t *testing.T, j judge, presents bool) {
	all := []string{"ecdsa-p256", "ml-dsa-44", "ml-dsa-65"}
	d, stranger := newQuantumDomain(t, all...), newQuantumDomain(t, "ml-dsa-65")
	old, ml44, ml65 := d.roots("ecdsa-p256"), d.roots("ml-dsa-44"), d.roots("ml-dsa-65")
	mixed, two := d.roots("ecdsa-p256", "ml-dsa-65"), d.roots("ecdsa-p256", "ml-dsa-44")
	ours := func(kind string) *spiffe.SVID { return d.svid(t, kind, kind, ourID) }
	theirs := func(kind string) *spiffe.SVID { return d.svid(t, kind, kind, theirID) }
	both := must.Get(ours("ecdsa-p256").WithAlternative(ours("ml-dsa-44")))(t)
	for _, c := range []struct {
		name       string
		theirs     *spiffe.SVID
		theirRoots []*x509.Certificate
		ours       *spiffe.SVID
		ourRoots   []*x509.Certificate
		ends       ender
	}{
		{"ML-DSA-44", theirs("ml-dsa-44"), ml44, ours("ml-dsa-44"), ml44, none},
		{"ML-DSA-65", theirs("ml-dsa-65"), ml65, ours("ml-dsa-65"), ml65, none},
		{"theirs is classical", theirs("ecdsa-p256"), ml65, ours("ml-dsa-65"), old, none},
		{"theirs is ML-DSA-44 of a classical CA", d.svid(t, "ecdsa-p256", "ml-dsa-44", theirID), ml65, ours("ml-dsa-65"), old, none},
		{"theirs is ML-DSA-65 of a classical CA", d.svid(t, "ecdsa-p256", "ml-dsa-65", theirID), ml44, ours("ml-dsa-44"), old, none},
		{"ours is classical", theirs("ml-dsa-65"), old, ours("ecdsa-p256"), ml65, none},
		{"both", theirs("ecdsa-p256"), ml44, both, two, none}, // they see that of ML-DSA
		{"both, and they have the classical root alone", theirs("ecdsa-p256"), old, both, two, dialling},
		{"ours of another root", theirs("ecdsa-p256"), ml65, stranger.svid(t, "ml-dsa-65", "ml-dsa-65", ourID), old, they},
		{"our leaf was changed", theirs("ecdsa-p256"), ml65, tampered(t, ours("ml-dsa-65"), 0), old, they},
		{"our CA was changed", theirs("ecdsa-p256"), ml65, tampered(t, ours("ml-dsa-65"), 1), old, they},
		{"theirs of another root", stranger.svid(t, "ml-dsa-65", "ml-dsa-65", theirID), old, ours("ecdsa-p256"), ml65, we},
		{"their leaf was changed", tampered(t, theirs("ml-dsa-65"), 0), old, ours("ecdsa-p256"), ml65, we},
		{"their CA was changed", tampered(t, theirs("ml-dsa-65"), 1), old, ours("ecdsa-p256"), ml65, we},
		{"not allowed", theirs("ml-dsa-65"), old, ours("ecdsa-p256"), mixed, notAllows},
	} {
		algorithms := spiffe.AnyAlgorithm()
		if c.ends == notAllows {
			algorithms = spiffe.Algorithms{}
		}
		endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: c.ours, Peers: bundleOf(t, c.ourRoots...), Allow: spiffe.AllowIDs(theirID),
			Algorithms: algorithms, RequireMLKEM: true}))(t)
		missing := !presents && c.theirs.Leaf().SignatureAlgorithm >= x509.MLDSA44
		check := func(t *testing.T, ends ender, want, seen string, theirErr error, o outcomeTLS) {
			t.Logf("they: %s %v; we: %v", seen, theirErr, o.err)
			verdict, refused := errors.AsType[*spiffe.VerifyError](o.err)
			switch {
			case missing:
				require.Error(t, o.err)
				assert.Regexp(t, "^(remote error: tls: handshake failure|tls: client didn't provide a certificate)$", o.err.Error())
			case ends == none:
				require.NoError(t, theirErr)
				require.NoError(t, o.err)
				assert.Equal(t, tls.X25519MLKEM768, o.state.CurveID)
				assert.Equal(t, c.theirs.Leaf().Raw, o.state.PeerCertificates[0].Raw)
				assert.Equal(t, want, seen)
			case ends == they:
				require.Error(t, o.err)
				assert.Regexp(t, "^(remote error: tls: .*|EOF)$", o.err.Error()) // Node closes the connection without an alert
			default:
				require.True(t, refused, "%v", o.err)
				assert.Equal(t, "chain", verdict.Stage)
				assert.Equal(t, ends == notAllows, errors.Is(o.err, spiffe.ErrAlgorithm))
			}
		}
		t.Run(c.name+"/they serve", func(t *testing.T) {
			t.Parallel()
			var o outcomeTLS
			var text []byte
			conn, err := endpoint.DialContext(t.Context(), "tcp", j.serve(t, c.theirs, c.theirRoots))
			if err == nil {
				o.state = conn.(*tls.Conn).ConnectionState()
				if text, err = io.ReadAll(conn); err == nil && len(text) == 0 {
					err = io.EOF
				}
				_ = conn.Close() // all of it is read
			}
			o.err = err
			ends := c.ends
			if ends == dialling {
				ends = none
			}
			check(t, ends, ourID.String(), string(text), nil, o)
		})
		t.Run(c.name+"/they dial", func(t *testing.T) {
			t.Parallel()
			l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
			defer l.Close()
			done := make(chan outcomeTLS, 1)
			go func() { done <- greet(t.Context(), endpoint, l) }()
			seen, theirErr := j.dial(t, l.Addr().String(), c.theirs, c.theirRoots)
			_ = l.Close() // if they have not called
			ends := c.ends
			if ends == dialling {
				ends = they
			}
			check(t, ends, ourID.String()+" "+theirID.String(), seen, theirErr, <-done)
			assert.Equal(t, ends != none || missing, theirErr != nil)
		})
	}
}

// outcomeTLS is what a side of a connection has seen.
type outcomeTLS struct {
	state tls.ConnectionState
	err   error
}

// greet writes the ID of a client to it.
func greet(ctx context.Context, e *spiffetls.Endpoint, l net.Listener) (o outcomeTLS) {
	below, err := l.Accept()
	if err != nil {
		return outcomeTLS{err: err}
	}
	defer below.Close() // what was written has arrived or the handshake has failed
	conn, err := e.Server(ctx, below)
	if err != nil {
		return outcomeTLS{err: err}
	}
	o.state = conn.ConnectionState()
	peer, err := e.PeerFromState(spiffe.ClientRole, o.state)
	if err == nil {
		_, err = io.WriteString(conn, peer.ID().String())
	}
	o.err = errors.Join(err, conn.Close())
	return o
}

// TestQuantumNodeWithBoth has Node.js with a certificate of each kind: Go is shown the classical one, and what offers more
// is shown the other.
func TestQuantumNodeWithBoth(t *testing.T) {
	t.Parallel()
	node := program{peers.Program(t, "node"), "testdata/quantum.js"}
	d := newQuantumDomain(t, "ecdsa-p256", "ml-dsa-65")
	roots := d.roots("ecdsa-p256", "ml-dsa-65")
	one := func(kind string) *spiffe.SVID { return d.svid(t, kind, kind, theirID) }
	address := node.serve(t, one("ecdsa-p256"), roots, one("ml-dsa-65"))
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: d.svid(t, "ml-dsa-65", "ml-dsa-65", ourID), Peers: bundleOf(t, roots...),
		Allow: spiffe.AllowIDs(theirID), Algorithms: spiffe.AnyAlgorithm()}))(t)
	conn := must.Get(endpoint.DialContext(t.Context(), "tcp", address))(t)
	defer conn.Close()
	assert.Equal(t, ourID.String(), string(must.Get(io.ReadAll(conn))(t)))
	assert.Equal(t, x509.ECDSA, conn.(*tls.Conn).ConnectionState().PeerCertificates[0].PublicKeyAlgorithm)
	seen := must.Get(node.dial(t, address, d.svid(t, "ml-dsa-65", "ml-dsa-65", ourID), d.roots("ml-dsa-65")))(t)
	assert.Equal(t, theirID.String()+" "+ourID.String(), seen, "Node.js, which has the root of ML-DSA alone, takes it")
}
