package peers_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdstest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// spireLacks has the cases of our suite that the SDS of SPIRE fails, by the reason.
var spireLacks = map[string][]string{
	"there is no DeltaSecrets": {"delta"},
	"FetchSecrets gives no version": {
		"fetch: one name", "fetch: the newest", "fetch: duplicates and empty names", "fetch: beside a stream",
		"fetch: a nonce and a version mean nothing", "fetch: a name that has gone",
	},
	"any type is taken, and is that of the answer": {
		"fetch: another type", "sotw: another type is refused", "sotw: another type on a later request is refused",
		"sotw: the type may be left out",
	},
	"no name is every name, which Envoy's API has for listeners and clusters alone": {
		"fetch: no name", "sotw: a stream without a request", "sotw: everything is nothing",
		"sotw: no names after names is nothing", "sotw: nothing, and then a name",
	},
	"a name that does not exist, or goes, ends the call, with all other names": {
		"fetch: what exists is served beside what does not", "sotw: a name that goes is not mentioned",
		"sotw: a name that comes back with other content is sent", "sotw: an unknown name does not hold up others",
		"sotw: a name that was dropped before it appeared does not come", "sotw: many names",
		"sotw: an unknown name beside a known one comes when it appears", "sotw: everything by its name is nothing",
		"sotw: an unknown name comes when it appears", "sotw: a stream that begins after a name has gone",
		"sotw: a nonce before the first response is not stale", "sotw: a rejection may drop the names",
	},
	"an answer repeats the other names of the stream, though Envoy's API asks servers to send what has changed": {
		"sotw: a rejected name that is dropped and asked for again is sent again", "sotw: reconnect",
		"sotw: a rejection may change the names", "sotw: after a stale nonce the right one counts",
		"sotw: names may be added before the first answer is in", "sotw: only what is added is answered",
		"sotw: two streams with different names", "sotw: what changed before a rejection comes after it",
		"sotw: what is asked for again is sent again", "sotw: what is asked for again is sent as it is then",
	},
	"a list of names that is longer or shorter is another one, though the names are the same": {
		"sotw: duplicates are one", "sotw: empty names are dropped",
	},
}

// TestSPIRESDS has our suite for SDS servers judge that of SPIRE. The suite's roots are those of trust domains with
// which the workload of a case federates; SPIRE itself makes the key pairs, and has no secrets of other kinds.
func TestSPIRESDS(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{SVIDTTL: 30 * time.Minute, Interval: 50 * time.Millisecond,
		AgentConfig: "sds { disable_spiffe_cert_validation = true }"}) // roots alone
	f := &fedSPIRE{SPIRE: s, dir: t.TempDir(),
		server: grpchttp.NewClient(sds.UnixClient(s.ServerSocket), "http://localhost", 1<<20)}
	self := must.Get(os.ReadFile(must.Get(os.Executable())(t)))(t)
	require.NoError(t, os.WriteFile(filepath.Join(f.dir, "relay"), self, 0o700))
	sdstest.Run(t, f.start)
}

// fedSPIRE is a SPIRE with one workload for each case of the suite.
type fedSPIRE struct {
	*peers.SPIRE
	server *grpchttp.Client // of the server's own API
	dir    string
	cases  atomic.Int64
}

// call calls a method of the server. That it has had its effect is seen at the agent.
func (f *fedSPIRE) call(t testing.TB, method string, write func(*protofield.Writer)) {
	t.Helper()
	request := must.Get(protofield.Write(write))(t)
	must.Get(f.server.Unary(context.WithoutCancel(t.Context()), "/spire.api.server."+method, nil, request))(t)
}

// start registers the workload of a case: a process of its own executable, which relays the connections of the case.
func (f *fedSPIRE) start(t testing.TB, o sdstest.Options) *sdstest.Server {
	if o.MaxNames != 0 {
		return nil // SPIRE has no such limit
	}
	if strings.Contains(t.Name(), "/delta:") && !strings.HasSuffix(t.Name(), "/delta:_answer,_acknowledge,_push") {
		t.Skip("another case shows that there is no DeltaSecrets")
	}
	id := fmt.Sprint("case-", f.cases.Add(1))
	program := filepath.Join(f.dir, id)
	require.NoError(t, os.Link(filepath.Join(f.dir, "relay"), program))
	var domains []string // with which the workload federates
	entry := func(m *protofield.Writer) {
		m.Text(1, id)
		for i, path := range []string{"/" + id, "/node"} { // the workload and its parent
			m.Message(protofield.Number(2+i), func(m *protofield.Writer) {
				m.Text(1, f.TrustDomain.String())
				m.Text(2, path)
			})
		}
		m.Message(4, func(m *protofield.Writer) {
			m.Text(1, "unix")
			m.Text(2, "path:"+program)
		})
		for _, td := range domains {
			m.AddText(6, td)
		}
	}
	f.call(t, "entry.v1.Entry/BatchCreateEntry", func(m *protofield.Writer) { m.Message(1, entry) })
	t.Cleanup(func() { f.call(t, "entry.v1.Entry/BatchDeleteEntry", func(m *protofield.Writer) { m.AddText(1, id) }) })

	transport := &http.Transport{Protocols: new(http.Protocols), DialContext: func(context.Context, string,
		string) (net.Conn, error) {
		return dialAs(program, f.AgentSocket)
	}}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport}
	fetch := func(name string) ([]byte, error) {
		request := must.Get(protofield.Write(func(m *protofield.Writer) { m.AddText(3, name) }))(t)
		return grpchttp.NewClient(client, "http://localhost", 1<<20).Unary(t.Context(),
			"/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets", nil, request)
	}
	await := func(condition func() bool) { require.Eventually(t, condition, passing, 10*time.Millisecond) }
	var svid []byte
	renewed := func() bool {
		now, err := fetch("default")
		return err == nil && !bytes.Equal(now, svid)
	}
	await(renewed)
	set := func(name string, secret *pki.Secret) {
		td := strings.TrimPrefix(name, "spiffe://")
		var roots []byte
		if secret != nil {
			var ok bool
			if roots, ok = secret.Roots(); !ok {
				t.Skip("SPIRE makes the key pairs itself, and has no secrets of other kinds")
			}
			f.call(t, "bundle.v1.Bundle/BatchSetFederatedBundle", func(m *protofield.Writer) {
				m.Message(1, func(m *protofield.Writer) {
					m.Text(1, td)
					for _, c := range must.Get(pki.ParseCertificatesPEM(roots))(t) {
						m.Message(2, func(m *protofield.Writer) { m.Bytes(1, c.Raw) })
					}
				})
			})
		}
		if i := slices.Index(domains, td); (i < 0) == (secret != nil) {
			if i < 0 {
				domains = append(domains, td)
			} else {
				domains = slices.Delete(domains, i, i+1)
			}
			svid, _ = fetch("default")
			f.call(t, "entry.v1.Entry/BatchUpdateEntry", func(m *protofield.Writer) {
				m.Message(1, entry)
				m.Message(2, func(m *protofield.Writer) { m.Varint(6, 1) }) // the field is to be updated
			})
			await(renewed) // as it is after such a change, and sent to each stream
		}
		await(func() bool {
			now, err := fetch(name)
			return (err != nil) == (secret == nil) && bytes.Contains(now, roots)
		})
	}
	var lacks []string
	for _, names := range spireLacks {
		lacks = append(lacks, names...)
	}
	return &sdstest.Server{Client: client, URL: "http://localhost", Set: set, Lacks: lacks,
		Name: func(name string) string {
			return fmt.Sprintf("spiffe://%s.%s.test", hex.EncodeToString([]byte(name)), id)
		}}
}

// asRelay makes this program connect the socket that it inherits to that which the variable names.
const asRelay = "SVIDKIT_TEST_RELAY"

// dialAs connects to a Unix socket as another program, which is a copy of this one.
func dialAs(program, socket string) (net.Conn, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	mine, its := os.NewFile(uintptr(pair[0]), ""), os.NewFile(uintptr(pair[1]), "")
	defer mine.Close() // FileConn makes another one
	defer its.Close()
	cmd := exec.Command(program)
	cmd.Env = []string{asRelay + "=" + socket}
	cmd.Stdin = its
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = cmd.Wait() }() // it ends with the connection
	return net.FileConn(mine)
}

// relayTo is the program.
func relayTo(socket string) error {
	in, err := net.FileConn(os.Stdin)
	if err != nil {
		return err
	}
	out, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- must.Err(io.Copy(in, out)) }()
	go func() { ended <- must.Err(io.Copy(out, in)) }()
	return <-ended
}

// TestSPIRESecrets has our client of SDS take secrets from SPIRE: key pairs and trust bundles by each of their names,
// which two peers use with each other, before and after the certificates and the root are renewed.
func TestSPIRESecrets(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{SVIDTTL: 20 * time.Second, Interval: 200 * time.Millisecond})
	web := s.Register(t, "/web")
	client := sds.UnixClient(s.AgentSocket)
	t.Cleanup(client.CloseIdleConnections)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	// watch returns a function that waits for the next secret with a name.
	watch := func(name string) func() *pki.Secret {
		next, stop := iter.Pull2(sds.NewClient(client, "http://localhost").Watch(ctx, name))
		t.Cleanup(stop)
		return func() *pki.Secret {
			t.Helper()
			for {
				secret, err, ok := next()
				require.True(t, ok, "nothing comes")
				if err == nil {
					return secret
				}
				require.ErrorContains(t, err, "not authorized", "the agent does not know the entry yet")
			}
		}
	}
	svid := func(secret *pki.Secret) *spiffe.SVID {
		chain, key, ok := secret.KeyPair()
		require.True(t, ok, "%v", secret)
		return must.Get(spiffe.ParseSVIDPEM(chain, key))(t)
	}
	bundle := func(secret *pki.Secret) *spiffe.Bundle {
		domains, ok := secret.TrustDomains()
		require.True(t, ok && len(domains) == 1, "%v", secret)
		return bundleOf(t, must.Get(pki.ParseCertificatesPEM(domains[s.TrustDomain]))(t)...)
	}
	// talk has two peers with these identities and bundles shake hands.
	talk := func(server, client *spiffe.SVID, ofServer, ofClient *spiffe.Bundle) {
		t.Helper()
		endpoint := func(self *spiffe.SVID, b *spiffe.Bundle) *spiffetls.Endpoint {
			return must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: b, Allow: spiffe.AllowIDs(web)}))(t)
		}
		a, b := net.Pipe()
		defer a.Close()
		done, accepts := make(chan error, 1), endpoint(server, ofServer)
		go func() {
			conn, err := accepts.Server(t.Context(), a)
			if err == nil {
				_, err = io.WriteString(conn, "hello")
			}
			done <- err
		}()
		conn := must.Get(endpoint(client, ofClient).Client(t.Context(), b, "web"))(t)
		assert.Equal(t, "hello", string(must.Get(io.ReadAll(io.LimitReader(conn, 5)))(t)))
		require.NoError(t, <-done)
	}

	byDefault, byID, roots := watch("default"), watch(web.String()), watch("ROOTCA")
	first, trusted := svid(byDefault()), bundle(roots())
	for _, name := range []string{s.TrustDomain.ID().String(), "ALL"} {
		assert.Equal(t, bundleCerts(s.Bundle(t)), bundleCerts(bundle(watch(name)())), name)
	}
	talk(first, svid(byID()), trusted, trusted)
	second := svid(byID())
	assert.NotEqual(t, first.Leaf(), second.Leaf(), "it is renewed")
	talk(first, second, trusted, trusted)

	s.LocalAuthority(t, "x509", "prepare")
	both := bundle(roots())
	require.Equal(t, bundleCerts(s.Bundle(t)), bundleCerts(both))
	s.LocalAuthority(t, "x509", "activate")
	third := svid(byDefault())
	for verifier := must.Get(spiffe.NewVerifier(trusted, spiffe.AllowIDs(web), nil))(t); ; third = svid(byDefault()) {
		if _, err := verifier.VerifyChain(third.Chain(), spiffe.AnyRole); err != nil {
			break // it is under the new root
		}
	}
	talk(third, second, both, both)
	talk(second, third, both, both)
}
