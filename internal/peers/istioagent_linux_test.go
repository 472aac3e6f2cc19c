package peers_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const (
	workloadSocket = "var/run/secrets/workload-spiffe-uds/socket"
	secretService  = "/envoy.service.secret.v3.SecretDiscoveryService/"
	secretType     = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
)

// facts are what was seen of an agent: what a value is, by what it is of. Values say nothing that is different by
// chance, such as a serial number.
type facts map[string]string

// meshCA is a CA of ours with Istio's API for agents with one token.
type meshCA struct {
	*ca.Authority
	token string
	roots []byte // in PEM
}

func newMeshCA(t *testing.T) *meshCA {
	t.Helper()
	authority := must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
	return &meshCA{authority, "a-token-of-the-workload", authority.Bundle().MarshalPEM()}
}

// serve serves the CA as istiod does, and returns what the first call said besides its message. An ads that is not nil
// serves ADS to the same callers.
func (m *meshCA) serve(t *testing.T, l net.Listener, ads http.Handler) func() facts {
	t.Helper()
	var mu sync.Mutex
	first := facts{}
	proven := authn.Func(func(r *http.Request) (*authn.Caller, error) {
		if token, ok := bearer.Token(r.Header); ok && token == m.token && bearer.Confidential(r) {
			return &authn.Caller{ID: webID, Method: "test"}, nil
		}
		return nil, errors.New("test: another token")
	})
	api := must.Get(istioca.New(istioca.Options{Signer: m.Authority, Authenticator: proven}))(t)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/envoy.service.discovery.v3.") {
			if _, err := proven(r); err != nil || ads == nil {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			ads.ServeHTTP(w, r)
			return
		}
		mu.Lock()
		if len(first) == 0 {
			for name, values := range r.Header {
				if !slices.Contains([]string{"User-Agent", "Grpc-Accept-Encoding", "Grpc-Timeout", "Content-Length", "Accept-Encoding"}, name) {
					first["call of the CA "+name] = strings.Join(values, ", ")
				}
			}
		}
		mu.Unlock()
		api.ServeHTTP(w, r)
	})
	istiod := m.svid(t, spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/istiod"), net.IPv4(127, 0, 0, 1))
	background(t, func(ctx context.Context) {
		_ = caserver.Serve(ctx, l, caserver.ServeOptions{Handler: handler, TLS: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*istiod.TLSCertificate()}}})
	})
	return func() facts {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(first)
	}
}

// svid returns an identity for an hour. With addresses it is that of istiod, and has its name.
func (m *meshCA) svid(t *testing.T, id spiffe.ID, ips ...net.IP) *spiffe.SVID {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	var names []string
	if len(ips) > 0 {
		names = []string{"istiod.istio-system.svc"}
	}
	chain := must.Get(m.Sign(t.Context(), ca.Request{CSR: csr, ID: id, IPs: ips, DNSNames: names, TTL: time.Hour}))(t)
	return must.Get(spiffe.NewSVID(chain, key))(t)
}

// see notes the facts about certificates or a key in PEM.
func (m *meshCA) see(f facts, of string, data []byte) {
	var kinds []string
	var chain []*x509.Certificate
	rest := data
	for {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		kinds = append(kinds, b.Type)
		switch b.Type {
		case "CERTIFICATE":
			c, err := x509.ParseCertificate(b.Bytes)
			if err != nil {
				f[of+" is"] = err.Error()
				return
			}
			chain = append(chain, c)
		default:
			key, err := pki.ParsePrivateKeyPEM(pem.EncodeToMemory(b))
			if err != nil {
				f[of+" is"] = err.Error()
				return
			}
			f[of+" key"] = algorithm(key.Public())
		}
	}
	f[of+" PEM"] = strings.Join(kinds, ", ")
	f[of+" is more than PEM"] = fmt.Sprint(len(bytes.TrimSpace(rest)) != 0)
	f[of+" ends with a newline"] = fmt.Sprint(bytes.HasSuffix(data, []byte("\n")))
	if len(chain) == 0 {
		return
	}
	ofMesh := 0
	for _, c := range chain {
		for root := range m.Bundle().X509Authorities() {
			if c.Equal(root) {
				ofMesh++
			}
		}
	}
	f[of+" roots of the mesh"] = fmt.Sprint(ofMesh)
	leaf := chain[0]
	f[of+" CA"] = fmt.Sprint(leaf.IsCA)
	f[of+" URI"] = fmt.Sprint(leaf.URIs)
	f[of+" DNS"] = fmt.Sprint(leaf.DNSNames)
	f[of+" subject"] = leaf.Subject.String()
	f[of+" key"] = algorithm(leaf.PublicKey)
	f[of+" lifetime"] = time.Until(leaf.NotAfter).Round(time.Hour).String()
}

func algorithm(public any) string {
	switch k := public.(type) {
	case *rsa.PublicKey:
		return fmt.Sprintf("RSA %d", k.N.BitLen())
	case *ecdsa.PublicKey:
		return "ECDSA " + k.Curve.Params().Name
	}
	return fmt.Sprintf("%T", public)
}

// files lists the files, sockets and directories below a directory, with their modes.
func files(t *testing.T, dir string) map[string]fs.FileMode {
	t.Helper()
	found := map[string]fs.FileMode{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil {
			found[strings.TrimPrefix(path, dir+"/")] = info.Mode()
		}
		return err
	}))
	return found
}

// asked are the requests of observe, by what they are: names, and whether there is a node.
func asked(dir string) map[string][]string {
	in := func(name string) string { return filepath.Join(dir, name) }
	return map[string][]string{
		"default":                    {"default"},
		"ROOTCA":                     {"ROOTCA"},
		"both":                       {"default", "ROOTCA"},
		"file-cert":                  {"file-cert:" + in("etc/istio/ingressgateway-certs/tls.crt") + "~" + in("etc/istio/ingressgateway-certs/tls.key")},
		"file-cert, relative":        {"file-cert:./etc/istio/ingressgateway-certs/tls.crt~./etc/istio/ingressgateway-certs/tls.key"},
		"file-cert, no files":        {"file-cert:" + in("etc/istio/ingressgateway-certs/no.crt") + "~" + in("etc/istio/ingressgateway-certs/no.key")},
		"file-cert, no key":          {"file-cert:" + in("etc/istio/ingressgateway-certs/tls.crt")},
		"file-cert, key for all":     {"file-cert:" + in("etc/istio/ingressgateway-certs/tls.crt") + "~" + in("etc/istio/ingressgateway-certs/for-all.key")},
		"file-cert, other directory": {"file-cert:" + in("elsewhere/tls.crt") + "~" + in("elsewhere/tls.key")},
		"file-cert, mounted":         {"file-cert:" + in("mounted/cert-chain.pem") + "~" + in("mounted/key.pem")},
		"file-root":                  {"file-root:" + in("etc/istio/ingressgateway-ca-certs/ca.crt")},
		"file-root, mounted":         {"file-root:" + in("mounted/root-cert.pem")},
		"file-root:system":           {"file-root:system"},
		"unknown name":               {"no-such-secret"},
		"default without a node":     {"default"},
	}
}

// observe notes what an agent has made in its directory besides before, and what its socket answers.
func (m *meshCA) observe(t *testing.T, a *agent, before map[string]fs.FileMode) facts {
	t.Helper()
	f := facts{}
	client := grpchttp.NewClient(sds.UnixClient(filepath.Join(a.dir, workloadSocket)), "http://localhost", 1<<20)
	node := &envoysds.Node{Id: "sidecar~127.0.0.1~web-1.prod~prod.svc.cluster.local"}
	a.Ready(t, func() error { _, err := os.Stat(filepath.Join(a.dir, "etc/istio/proxy/XDS")); return err })
	a.Ready(t, func() error {
		if got := m.ask(t, client, "default", node, []string{"default"})["default"]; got == "code unavailable" {
			return errors.New(got)
		}
		return nil
	})
	for range 2 { // after which nothing is pushed on its own account
		m.ask(t, client, "ROOTCA", node, []string{"ROOTCA"})
	}
	var mu sync.Mutex
	var asking sync.WaitGroup
	for what, names := range asked(a.dir) {
		asking.Go(func() {
			node := node
			if strings.HasSuffix(what, "without a node") {
				node = nil
			}
			got := m.ask(t, client, what, node, names)
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(f, got)
		})
	}
	asking.Wait()
	request, err := proto.Marshal(&envoysds.DeltaDiscoveryRequest{Node: node, TypeUrl: secretType, ResourceNamesSubscribe: []string{"default"}})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	stream := client.Open(ctx, secretService+"DeltaSecrets", nil)
	_ = stream.Send(request) // Receive says what is wrong
	_, err = stream.Receive()
	f["DeltaSecrets"] = outcome(ctx, err)
	_ = stream.Close()
	request, err = proto.Marshal(&envoysds.DiscoveryRequest{Node: node, TypeUrl: secretType, ResourceNames: []string{"default"}})
	require.NoError(t, err)
	_, err = client.Unary(ctx, secretService+"FetchSecrets", nil, request)
	f["FetchSecrets"] = outcome(ctx, err)
	for name, mode := range files(t, a.dir) {
		if was, ok := before[name]; ok && was == mode {
			continue
		}
		f["file "+name+" mode"] = mode.String()
		if mode.IsRegular() && strings.HasPrefix(name, "certs/") {
			data := must.Get(os.ReadFile(filepath.Join(a.dir, name)))(t)
			m.see(f, "file "+name, data)
		}
	}
	return f
}

func outcome(ctx context.Context, err error) string {
	e, isStatus := errors.AsType[*grpchttp.Error](err)
	switch {
	case err == nil:
		return "answered"
	case ctx.Err() != nil, isStatus && (e.Code == grpchttp.DeadlineExceeded || e.Code == grpchttp.Canceled):
		return "nothing"
	case isStatus:
		return fmt.Sprintf("code %v", e.Code)
	}
	return err.Error()
}

// ask opens a stream for names, acknowledges what comes, and notes it. A server may answer for several names at once
// or one after the other.
func (m *meshCA) ask(t *testing.T, client *grpchttp.Client, what string, node *envoysds.Node, names []string) facts {
	f := facts{}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	stream := client.Open(ctx, secretService+"StreamSecrets", nil)
	defer stream.Close()
	request := &envoysds.DiscoveryRequest{Node: node, ResourceNames: names, TypeUrl: secretType}
	seen := map[string]bool{}
	for len(seen) < len(names) {
		var response envoysds.DiscoveryResponse
		msg, err := proto.Marshal(request)
		require.NoError(t, err)
		_ = stream.Send(msg) // Receive says what is wrong
		if msg, err = stream.Receive(); err == nil {
			err = proto.Unmarshal(msg, &response)
		}
		if f[what] = outcome(ctx, err); err != nil {
			return f
		}
		f[what+" type"] = response.GetTypeUrl()
		f[what+" version and nonce"] = fmt.Sprint(response.GetVersionInfo() != "", response.GetNonce() != "")
		for _, r := range response.Resources {
			var s envoysds.Secret
			if err := proto.Unmarshal(r.GetValue(), &s); err != nil || r.GetTypeUrl() != secretType {
				f[what+" resource"] = fmt.Sprint(r.GetTypeUrl(), err)
				return f
			}
			of := what + " secret " + strconv.Itoa(slices.Index(names, s.GetName()))
			switch k := s.GetType().(type) {
			case *envoysds.Secret_TlsCertificate:
				m.see(f, of+" chain", k.TlsCertificate.GetCertificateChain().GetInlineBytes())
				m.see(f, of+" private key", k.TlsCertificate.GetPrivateKey().GetInlineBytes())
			case *envoysds.Secret_ValidationContext:
				m.see(f, of+" trusted CA", k.ValidationContext.GetTrustedCa().GetInlineBytes())
			default:
				f[of] = fmt.Sprintf("%T", k)
			}
			f[of+" other fields"] = fmt.Sprintf("%x", s.ProtoReflect().GetUnknown())
			seen[s.GetName()] = true
		}
		request.VersionInfo, request.ResponseNonce, request.Node = response.GetVersionInfo(), response.GetNonce(), nil
	}
	msg := must.Get(proto.Marshal(request))(t)
	_ = stream.Send(msg) // Receive says what is wrong
	quiet := time.AfterFunc(500*time.Millisecond, cancel)
	defer quiet.Stop()
	_, err := stream.Receive()
	f[what+" after ACK"] = outcome(ctx, err)
	return f
}

// moves are environments that are moved over, and what they find in their directory besides the token and the roots.
var moves = map[string]struct {
	env   []string // DIR is the directory
	files func(t *testing.T, m *meshCA, dir string)
}{
	"sidecar":  {env: []string{"SECRET_TTL=1h"}},
	"in a pod": {env: []string{"SECRET_TTL=1h", "KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=6443"}},
	"P-256":    {env: []string{"SECRET_TTL=2h", "ECC_SIGNATURE_ALGORITHM=ECDSA", "PKCS8_KEY=true", "CA_HEADER_X_TENANT=blue"}},
	"P-384":    {env: []string{"SECRET_TTL=2h", "ECC_SIGNATURE_ALGORITHM=ECDSA", "ECC_CURVE=P384", "CREDENTIAL_FETCHER_TYPE=JWT"}},
	"roots of the CA elsewhere": {
		env: []string{"SECRET_TTL=1h", "PKCS8_KEY=true", "CA_ROOT_CA=DIR/other/roots.pem", "XDS_ROOT_CA=DIR/other/roots.pem", "CA_PROVIDER=Citadel"},
		files: func(t *testing.T, m *meshCA, dir string) {
			write(t, filepath.Join(dir, "other/roots.pem"), string(m.roots))
			require.NoError(t, os.Remove(filepath.Join(dir, "var/run/secrets/istio/root-cert.pem")))
		},
	},
	"virtual machine": {
		env: []string{"SECRET_TTL=1h", "PKCS8_KEY=true", "PROV_CERT=DIR/certs"},
		files: func(t *testing.T, m *meshCA, dir string) {
			write(t, filepath.Join(dir, "certs/root-cert.pem"), string(m.roots))
		},
	},
	"files": {
		files: func(t *testing.T, m *meshCA, dir string) { m.credentials(t, filepath.Join(dir, "etc/certs")) },
	},
	"files in a volume of Kubernetes": {
		env: []string{"KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=6443"},
		files: func(t *testing.T, m *meshCA, dir string) {
			const version = "..2026_01_02_15_04_05.123456789"
			at := filepath.Join(dir, "etc/certs")
			m.credentials(t, filepath.Join(at, version))
			require.NoError(t, os.Symlink(version, filepath.Join(at, "..data")))
			for _, name := range []string{"cert-chain.pem", "key.pem", "root-cert.pem"} {
				require.NoError(t, os.Chmod(filepath.Join(at, version, name), 0o644)) // the usual mode there
				require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(at, name)))
			}
		},
	},
	"credentials of the platform": {
		env: []string{"PROV_CERT=DIR/prov"},
		files: func(t *testing.T, m *meshCA, dir string) {
			m.credentials(t, filepath.Join(dir, "var/run/secrets/workload-spiffe-credentials"))
			m.credentials(t, filepath.Join(dir, "prov"))
		},
	},
	"dead socket": {
		env: []string{"SECRET_TTL=1h", "PKCS8_KEY=true"},
		files: func(t *testing.T, m *meshCA, dir string) {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, workloadSocket), Net: "unix"})
			require.NoError(t, err)
			l.SetUnlinkOnClose(false)
			require.NoError(t, l.Close())
		},
	},
	"live socket": {
		env: []string{"SECRET_TTL=1h"},
		files: func(t *testing.T, m *meshCA, dir string) {
			issuer := must.Get(local.New(m.Authority, webID))(t)
			manager := must.Get(secretcache.Start(t.Context(), secretcache.Config{ID: webID, CA: issuer}))(t)
			t.Cleanup(func() { _ = manager.Close() })
			h := must.Get(sds.NewHandler(manager, nil))(t)
			server := &unixsocket.Server{Path: filepath.Join(dir, workloadSocket), Handler: h}
			require.NoError(t, server.Listen())
			background(t, func(ctx context.Context) { _ = server.Run(ctx) })
		},
	},
	"mounted files": {env: []string{
		"FILE_MOUNTED_CERTS=true", "ISTIO_META_TLS_CLIENT_CERT_CHAIN=DIR/mounted/cert-chain.pem", "ISTIO_META_TLS_CLIENT_KEY=DIR/mounted/key.pem",
		"ISTIO_META_TLS_CLIENT_ROOT_CERT=DIR/mounted/root-cert.pem",
	}},
}

// A difference is one between the two agents, and why it is meant.
type difference struct {
	rows        string // of the description of Istio's agent
	move, what  string // regular expressions
	istio, ours string // "*" is any value
	why         string
}

const withCA = "sidecar|in a pod|P-256|P-384|roots of the CA elsewhere|virtual machine|dead socket"

var differences = []difference{
	{"8.3-3", ".*", "DeltaSecrets|FetchSecrets", "code unimplemented", "answered", "the protocol has these methods, and Envoy's documentation recommends the first"},
	{"8.3-5", ".*", "default without a node", "code invalid_argument", "answered", "what a client says about itself decides nothing"},
	{"7.2-7", ".*", "unknown name", "*", "nothing", "a name that does not exist must not be a name for the workload's key"},
	{"7.2-7", ".*", "file-cert, no key", "*", "nothing", "the same: the name is not whole"},
	{"7.2-3", ".*", "file-cert, other directory", "answered", "nothing", "names come from clients: files are of the directories in the configuration"},
	{"7.2-3, 7.2-4", withCA + "|files.*|credentials of the platform", "file-(cert|root), mounted", "answered", "nothing", "the same: these files are not configured"},
	{"7.2-3", ".*", "file-cert, relative", "answered", "nothing", "the same: a name does not depend on where the agent was started"},
	{"7.2-3", ".*", "file-cert, key for all", "answered", "nothing", "a key that other users can read, outside a volume of Kubernetes, is no secret"},
	{"7.5-6", withCA, "(default|both) secret 0 chain PEM|file certs/cert-chain.pem PEM", "CERTIFICATE, CERTIFICATE", "CERTIFICATE", "a peer has the root, or does not trust it"},
	{"7.5-6", withCA, "(default|both) secret 0 chain roots of the mesh|file certs/cert-chain.pem roots of the mesh", "1", "0", "the same"},
	{"7.7-2", ".*", ".* ends with a newline", "false", "true", "a file of text ends with a newline, as what the CA sends does"},
	{"8.1-4", ".*", "file (etc/istio/proxy/XDS|" + workloadSocket + ") mode", "Srw-rw-rw-", "Srw-------", "not every user of the machine may have the key"},
	{"9.1-9, 9.1-11", ".*", "file etc/istio/proxy/(envoy-rev|grpc-bootstrap).json mode", "-rw-r--r--", "", "our agent starts no Envoy; it writes a bootstrap when it is asked to"},
	{"7.2-7", "files.*", "call of the CA .*", "*", "", "with files the CA is never asked, not for the names above either"},
	{"8.1-2", "live socket", "file var/run/secrets/credential-uds(/files-socket)? mode", "*", "", "with a live socket our agent serves no secrets, by the names of files neither"},
	{"7.5-1", "mounted files", "default|ROOTCA|both", "code unknown", "answered", "the mounted files are an identity under every name"},
	{"7.9-1", "mounted files", "file certs/.*", "", "*", "and are written to OUTPUT_CERTS"},
	{"7.9-1", ".*", `file certs/\.\.lock.*`, "", "*", "OUTPUT_CERTS is locked by a file that no other user can open"},
}

// TestIstioEnvironment moves environments of Istio's agent over to ours, unchanged, and compares all that both make,
// ask and answer. What is different is in differences, with the reason, and nothing else is.
func TestIstioEnvironment(t *testing.T) {
	conformance.Covers(t, "IST-7.2-1", "IST-7.2-2", "IST-7.2-3", "IST-7.2-4", "IST-7.2-5", "IST-7.4-1", "IST-7.4-2", "IST-7.5-2", "IST-7.5-3", "IST-7.5-4", "IST-7.5-8",
		"IST-7.8-1", "IST-7.8-2", "IST-7.8-4", "IST-7.9-1", "IST-7.9-2", "IST-8.1-1", "IST-8.2-1", "IST-8.2-2", "IST-8.2-4", "IST-8.2-5", "IST-8.3-1", "IST-8.3-2", "IST-8.3-4", "IST-8.3-9",
		"IST-8.4-2", "IST-8.6-1", "IST-8.6-2", "IST-9.1-6", "IST-9.2-1", "IST-9.2-2", "IST-9.2-3", "IST-9.2-4", "IST-9.2-5", "IST-9.2-8", "IST-9.2-9", "IST-9.2-10", "IST-9.2-11", "IST-9.2-12",
		"IST-9.2-13", "IST-9.2-17", "IST-9.2-18", "IST-9.2-19", "IST-9.2-20", "IST-9.2-21", "IST-9.2-22", "IST-9.2-26", "IST-9.2-27", "IST-9.2-42")
	t.Parallel()
	peers.Program(t, "pilot-agent")
	startOurs, m := ourAgent(t), newMeshCA(t)
	other := spiffetest.NewCA(t, "other.example")
	var mu sync.Mutex
	ran, used := 0, map[int]bool{}
	t.Cleanup(func() {
		for i, d := range differences {
			if !t.Failed() && ran == len(moves) {
				assert.True(t, used[i], "there is no such difference any more: %v", d)
			}
		}
	})
	for move, o := range moves {
		t.Run(move, func(t *testing.T) {
			t.Parallel()
			see := func(start func(t *testing.T, dir string, environment []string) *agent) facts {
				dir := shortDir(t)
				podFolder(t, dir, m.token, m.roots)
				m.mount(t, dir, other)
				if o.files != nil {
					o.files(t, m, dir)
				}
				before := files(t, dir)
				env := slices.Clone(o.env)
				for i := range env {
					env[i] = strings.ReplaceAll(env[i], "DIR", dir)
				}
				a := start(t, dir, podEnvironment(t, dir, env...))
				calls := m.serve(t, a.ca, nil)
				f := m.observe(t, a, before)
				maps.Copy(f, calls())
				a.Kill()
				return f
			}
			istios, ours := see(startPilotAgent), see(startOurs)
			whats := map[string]bool{}
			for what := range istios {
				whats[what] = true
			}
			for what := range ours {
				whats[what] = true
			}
			for _, what := range slices.Sorted(maps.Keys(whats)) {
				// Of an answer that only one has given, it is enough to say so.
				if of := answerTo(what); istios[what] == ours[what] || of != what && istios[of] != ours[of] {
					continue
				}
				i := slices.IndexFunc(differences, func(d difference) bool {
					matches := func(pattern, text string) bool { return regexp.MustCompile("^(?:" + pattern + ")$").MatchString(text) }
					return matches(d.move, move) && matches(d.what, what) && (d.istio == "*" || d.istio == istios[what]) && (d.ours == "*" || d.ours == ours[what])
				})
				if assert.GreaterOrEqual(t, i, 0, "%s: Istio's agent has %q, and ours %q", what, istios[what], ours[what]) {
					mu.Lock()
					used[i] = true
					mu.Unlock()
				}
			}
			mu.Lock()
			defer mu.Unlock()
			ran++
			t.Logf("%d facts", len(whats))
		})
	}
}

// answerTo returns which request a fact belongs to, or the fact itself.
func answerTo(what string) string {
	requests := asked("")
	if requests[what] != nil {
		return what
	}
	of := ""
	for request := range requests {
		if strings.HasPrefix(what, request+" ") && len(request) > len(of) {
			of = request
		}
	}
	return cmp.Or(of, what)
}

// ourAgent builds our agent, and returns what starts it with an environment of Istio's.
func ourAgent(t *testing.T) (start func(t *testing.T, dir string, environment []string) *agent) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "agent")
	build := exec.Command("go", "build", "-o", program, "./examples/agent")
	build.Dir = filepath.Join("..", "..")
	build.Env = append(os.Environ(), "GOWORK=off")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return func(t *testing.T, dir string, environment []string) *agent {
		t.Helper()
		a, cmd := &agent{dir: dir}, exec.Command(program)
		cmd.Dir, cmd.Env = dir, environment
		a.Process, a.ca = peers.StartIsolated(t, filepath.Join(dir, "log"), cmd, 15012)
		return a
	}
}

// mount puts files into the directory that Envoy may ask for by name.
func (m *meshCA) mount(t *testing.T, dir string, other *spiffetest.CA) {
	t.Helper()
	for _, at := range []string{"etc/istio/ingressgateway-certs/tls.crt etc/istio/ingressgateway-certs/tls.key etc/istio/ingressgateway-ca-certs/ca.crt",
		"elsewhere/tls.crt elsewhere/tls.key elsewhere/ca.crt", "mounted/cert-chain.pem mounted/key.pem mounted/root-cert.pem"} {
		names := strings.Fields(at)
		certs, key := must.Get2(other.SVID("/ns/prod/sa/files").MarshalPEM())(t)
		write(t, filepath.Join(dir, names[0]), string(certs))
		write(t, filepath.Join(dir, names[1]), string(key))
		require.NoError(t, os.Chmod(filepath.Join(dir, names[1]), 0o600))
		write(t, filepath.Join(dir, filepath.Dir(names[1]), "for-all.key"), string(key))
		write(t, filepath.Join(dir, names[2]), string(other.Bundle().MarshalPEM()))
	}
}

// credentials puts an identity of the mesh into a directory.
func (m *meshCA) credentials(t *testing.T, dir string) {
	t.Helper()
	certs, key := must.Get2(m.svid(t, webID).MarshalPEM())(t)
	write(t, filepath.Join(dir, "cert-chain.pem"), string(certs))
	write(t, filepath.Join(dir, "key.pem"), string(key))
	write(t, filepath.Join(dir, "root-cert.pem"), string(m.roots))
	require.NoError(t, os.Chmod(filepath.Join(dir, "key.pem"), 0o600))
}

// inbound is a listener for mTLS that says hello, with secrets as istiod's listeners have them.
func inbound(t *testing.T) []byte {
	t.Helper()
	type w = *protofield.Writer
	from := func(name string) func(w) { // a SdsSecretConfig
		return func(m w) {
			m.AddText(1, name)
			m.Message(2, func(m w) {
				m.Message(2, func(m w) {
					m.AddVarint(1, 2) // GRPC
					m.Message(4, func(m w) { m.Message(1, func(m w) { m.AddText(1, "sds-grpc") }) })
					m.AddVarint(7, 1) // set_node_on_first_message_only
					m.AddVarint(8, 2) // V3
				})
				m.Message(4, func(w) {}) // initial_fetch_timeout: 0s
				m.AddVarint(6, 2)        // V3
			})
		}
	}
	extension := func(m w, n protofield.Number, name, typeURL string, content func(w)) {
		m.AddText(1, name)
		m.Message(n, func(m w) {
			m.AddText(1, "type.googleapis.com/envoy.extensions."+typeURL)
			m.Message(2, content)
		})
	}
	b := must.Get(protofield.Write(func(m w) {
		m.AddText(1, "virtualInbound")
		m.Message(2, func(m w) { m.Message(1, func(m w) { m.AddText(2, "127.0.0.1"); m.AddVarint(3, 15006) }) })
		m.Message(3, func(m w) {
			m.Message(3, func(m w) {
				extension(m, 4, "hcm", "filters.network.http_connection_manager.v3.HttpConnectionManager", func(m w) {
					m.AddText(2, "inbound")
					m.Message(4, func(m w) {
						m.Message(2, func(m w) {
							m.AddText(1, "all")
							m.AddText(2, "*")
							m.Message(3, func(m w) {
								m.Message(1, func(m w) { m.AddText(1, "/") })
								m.Message(7, func(m w) { m.AddVarint(1, 200); m.Message(2, func(m w) { m.AddText(3, "hello") }) })
							})
						})
					})
					m.Message(5, func(m w) { extension(m, 4, "router", "filters.http.router.v3.Router", func(w) {}) })
				})
			})
			m.Message(6, func(m w) {
				extension(m, 3, "tls", "transport_sockets.tls.v3.DownstreamTlsContext", func(m w) {
					m.Message(1, func(m w) {
						m.Message(6, from("default"))
						m.Message(7, from("ROOTCA"))
					})
					m.Message(2, func(m w) { m.AddVarint(1, 1) }) // require_client_certificate
				})
			})
		})
		m.AddVarint(16, 1) // traffic_direction: INBOUND
	}))(t)
	return b
}

// controlPlane answers for ADS as istiod does, with the listener inbound and no clusters. It notes the nodes that ask, and what they
// refuse.
func controlPlane(t *testing.T, nodes *sync.Map) http.Handler {
	t.Helper()
	const service, listeners = "/envoy.service.discovery.v3.AggregatedDiscoveryService/", "type.googleapis.com/envoy.config.listener.v3.Listener"
	listener := inbound(t)
	return &grpchttp.Handler{MaxMessage: 1 << 20, Methods: map[string]grpchttp.Method{service + "DeltaAggregatedResources": func(ctx context.Context, c *grpchttp.Call) error {
		if err := c.SendHeader(); err != nil {
			return err
		}
		answered := map[string]bool{}
		for {
			msg, err := c.Receive()
			if err != nil {
				return err
			}
			var r envoysds.DeltaDiscoveryRequest
			if err := proto.Unmarshal(msg, &r); err != nil {
				return err
			}
			if r.GetNode().GetId() != "" {
				nodes.Store(r.GetNode().GetId(), true)
			}
			if r.GetErrorDetail() != nil {
				nodes.Store("refused: "+r.GetErrorDetail().GetMessage(), true)
			}
			if answered[r.GetTypeUrl()] {
				continue
			}
			answered[r.GetTypeUrl()] = true
			answer := &envoysds.DeltaDiscoveryResponse{TypeUrl: r.GetTypeUrl(), Nonce: "1", SystemVersionInfo: "1"}
			if r.GetTypeUrl() == listeners {
				answer.Resources = []*envoysds.Resource{{Name: "virtualInbound", Version: "1", Resource: &anypb.Any{TypeUrl: listeners, Value: listener}}}
			}
			if msg, err = proto.Marshal(answer); err != nil {
				return err
			}
			if err := c.Send(msg); err != nil {
				return err
			}
		}
	}}}
}

// TestIstioBootstrap gives the bootstrap that Istio's agent has written to a real Envoy, which it starts as Istio's
// agent does, in a directory where our agent has taken the place of Istio's. Envoy has its listener through our agent,
// and the certificates in it.
func TestIstioBootstrap(t *testing.T) {
	conformance.Covers(t, "IST-8.2-2", "IST-8.6-7", "IST-9.4-1", "IST-9.4-4")
	t.Parallel()
	peers.Program(t, "pilot-agent")
	bins := append([]string{envoytest.Binary(t)}, envoytest.Old(t)...)
	startOurs, m := ourAgent(t), newMeshCA(t)
	dir := shortDir(t)
	podFolder(t, dir, m.token, m.roots)
	environment := podEnvironment(t, dir, "SECRET_TTL=6s")
	istios := startPilotAgent(t, dir, environment)
	m.serve(t, istios.ca, nil)
	var arguments []string
	istios.Ready(t, func() error {
		log, err := os.ReadFile(filepath.Join(dir, "log"))
		if err != nil {
			return err
		}
		command := regexp.MustCompile(`Envoy command: \[(.*)\]`).FindSubmatch(log)
		if command == nil {
			return errors.New("it has not started Envoy")
		}
		arguments = strings.Fields(string(command[1]))
		return nil
	})
	istios.Kill() // which leaves its sockets, too
	require.Contains(t, arguments, filepath.Join(dir, "etc/istio/proxy/envoy-rev.json"))

	var nodes sync.Map
	ads := controlPlane(t, &nodes)
	ours := startOurs(t, dir, environment)
	m.serve(t, ours.ca, ads)

	probe := m.svid(t, spiffe.MustParseID("spiffe://example.org/ns/prod/sa/probe"))
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(m.roots))
	t.Run("Envoy", func(t *testing.T) {
		for _, bin := range bins {
			t.Run(envoytest.Version(t, bin), func(t *testing.T) {
				t.Parallel()
				cmd := exec.Command(must.Get(filepath.Abs(bin))(t), arguments...)
				cmd.Dir = dir
				envoy, _ := peers.StartIsolated(t, filepath.Join(t.TempDir(), "log"), cmd, 9) // with a port that it does not need
				client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
					DisableKeepAlives: true,
					DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
						return envoy.Dial(network, address)
					},
					TLSClientConfig: &tls.Config{
						MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*probe.TLSCertificate()}, InsecureSkipVerify: true, // there is no DNS name
						VerifyConnection: func(c tls.ConnectionState) error {
							return must.Err(c.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots}))
						},
					},
				}}
				// ask returns the serial number of Envoy's certificate.
				ask := func() (serial string, err error) {
					response, err := client.Get("https://127.0.0.1:15006")
					if err != nil {
						return "", err
					}
					defer response.Body.Close()
					said, err := io.ReadAll(response.Body)
					if err == nil && string(said) != "hello" {
						err = fmt.Errorf("it says %d %q", response.StatusCode, said)
					}
					return response.TLS.PeerCertificates[0].SerialNumber.String(), err
				}
				seen := map[string]bool{}
				envoy.Ready(t, func() error {
					serial, err := ask()
					if err != nil {
						require.Empty(t, seen, "there was an Envoy, and now %v", err)
						return err
					}
					if seen[serial] = true; len(seen) < 3 {
						return errors.New("its certificate has not been renewed twice")
					}
					return nil
				})
			})
		}
	})
	nodes.Range(func(id, _ any) bool {
		assert.Equal(t, "sidecar~127.0.0.1~web-1.prod~prod.svc.cluster.local", id)
		return true
	})
}

// TestOurAgentOfIstioCA has our agent take its identity from Istio's CA server, as on a virtual machine: with a token
// at first, and then with the certificate that it has written itself.
func TestOurAgentOfIstioCA(t *testing.T) {
	conformance.Covers(t, "IST-6.6-1", "IST-6.6-2", "IST-7.9-1", "IST-9.2-1", "IST-9.2-9", "IST-9.2-10")
	t.Parallel()
	peers.Program(t, "istio-ca") // before an API server is started
	startOurs := ourAgent(t)
	c := peers.NewCluster(t)
	c.Account(t, "istio-system", "istiod")
	grant(t, c, "istio-system", "istiod", "ClusterRole", istiodRules)
	c.Account(t, "prod", "web")
	c.Pod(t, "prod", "web", "web-1", "node-a")
	authority := startIstioCA(t, c, "istio-system")
	roots := secretOf(t, c, "istio-system")["ca-cert.pem"]
	bundle := mustBundle(t, roots)

	dir := shortDir(t)
	token := filepath.Join(dir, "var/run/secrets/tokens/istio-token")
	podFolder(t, dir, c.Token(t, "prod", "web", "web-1", "istio-ca"), roots)
	write(t, filepath.Join(dir, "certs/root-cert.pem"), string(roots)) // as PROV_CERT is where the roots of the CA are, too
	environment := podEnvironment(t, dir, "SECRET_TTL=6s", "PROV_CERT="+filepath.Join(dir, "certs"), "MINIMUM_DRAIN_DURATION=0s")
	start := func() *agent {
		a := startOurs(t, dir, environment)
		background(t, func(ctx context.Context) { forward(ctx, a.ca, strings.TrimPrefix(authority.url, "https://")) })
		a.Ready(t, func() error { _, err := os.Stat(filepath.Join(dir, workloadSocket)); return err })
		return a
	}
	a := start()
	seen := map[string]bool{}
	// renewed waits for n more certificates by SDS.
	renewed := func(n int) {
		t.Helper()
		n += len(seen)
		for svid := range subscribe(t, filepath.Join(dir, workloadSocket)) {
			require.Equal(t, webID, svid.ID())
			verifies(t, bundle, svid.Chain())
			if seen[svid.Leaf().SerialNumber.String()] = true; len(seen) >= n {
				return
			}
		}
	}
	written := func() (serial string) {
		a.Ready(t, func() error {
			svid, err := a.output()
			if err == nil {
				verifies(t, bundle, svid.Chain())
				serial = svid.Leaf().SerialNumber.String()
			}
			return err
		})
		return serial
	}
	renewed(1)
	first := written()
	require.NoError(t, os.Remove(token))
	renewed(3)
	require.NotEqual(t, first, written())
	a.Stop()
	a = start() // without a token, too
	renewed(2)
	got := must.Get(os.ReadFile(filepath.Join(dir, "certs/root-cert.pem")))(t)
	require.True(t, mustBundle(t, got).Equal(bundle))
}

// forward forwards connections to an address until ctx is done.
func forward(ctx context.Context, l net.Listener, address string) {
	context.AfterFunc(ctx, func() { _ = l.Close() })
	var all sync.WaitGroup
	defer all.Wait()
	for {
		near, err := l.Accept()
		if err != nil {
			return
		}
		all.Go(func() {
			far, err := net.Dial("tcp", address)
			if err != nil {
				_ = near.Close()
				return
			}
			end := func() { _ = near.Close(); _ = far.Close() }
			stop := context.AfterFunc(ctx, end)
			defer stop()
			all.Go(func() { defer end(); _, _ = io.Copy(far, near) })
			defer end()
			_, _ = io.Copy(near, far)
		})
	}
}

// agent is Istio's agent in a directory of its own, as in a pod.
type agent struct {
	*peers.Process
	dir string
	ca  net.Listener // where it calls the CA
}

// startAgent starts Istio's agent with a token. Its Envoy is a program that does nothing.
func startAgent(t *testing.T, dir, token string, roots []byte) *agent {
	t.Helper()
	peers.Program(t, "pilot-agent")
	podFolder(t, dir, token, roots)
	return startPilotAgent(t, dir, podEnvironment(t, dir, "SECRET_TTL=4s"))
}

// podFolder puts into a directory what the files of a pod are to Istio's agent.
func podFolder(t *testing.T, dir, token string, roots []byte) {
	t.Helper()
	for name, data := range map[string]string{
		"var/run/secrets/tokens/istio-token":   token,
		"var/run/secrets/istio/root-cert.pem":  string(roots),
		"var/run/secrets/workload-spiffe-uds/": "",
		"etc/istio/proxy/":                     "",
		"certs/":                               "",
		"envoy":                                "#!/bin/sh\nexec sleep 60\n",
	} {
		write(t, filepath.Join(dir, name)+strings.Repeat("/", strings.Count(name[len(name)-1:], "/")), data)
	}
}

// podEnvironment is the environment of Istio's agent in a directory that podFolder has filled, with more variables.
func podEnvironment(t *testing.T, dir string, more ...string) []string {
	t.Helper()
	module := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "istio.io/istio")
	module.Dir = filepath.Join("programs", "istio")
	module.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	source := must.Get(module.Output())(t)
	metadata := map[string]string{} // which the injector makes variables of, too
	for _, e := range more {
		if name, value, _ := strings.Cut(e, "="); strings.HasPrefix(name, "ISTIO_META_") {
			metadata[name] = value
		}
	}
	config := must.Get(json.Marshal(map[string]any{
		"proxyMetadata": metadata,
		"binaryPath":    filepath.Join(dir, "envoy"), "configPath": filepath.Join(dir, "etc/istio/proxy"), "discoveryAddress": "127.0.0.1:15012", "terminationDrainDuration": "1s",
		"proxyBootstrapTemplatePath": filepath.Join(strings.TrimSpace(string(source)), "tools/packaging/common/envoy_bootstrap.json"),
	}))(t)
	return append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "CA_ADDR=127.0.0.1:15012", "TRUST_DOMAIN=" + domain.String(), "POD_NAMESPACE=prod", "SERVICE_ACCOUNT=web",
		"POD_NAME=web-1", "INSTANCE_IP=127.0.0.1", "OUTPUT_CERTS=" + filepath.Join(dir, "certs"), "SECRET_GRACE_PERIOD_RATIO=0.5",
		"ISTIO_META_CLUSTER_ID=Kubernetes", "JWT_POLICY=third-party-jwt", "PILOT_CERT_PROVIDER=istiod", "TOKEN_AUDIENCES=istio-ca", "PROXY_CONFIG=" + string(config),
	}, more...)
}

// startPilotAgent starts Istio's agent with an environment.
func startPilotAgent(t *testing.T, dir string, environment []string) *agent {
	t.Helper()
	cmd := exec.Command(peers.Program(t, "pilot-agent"), "proxy", "sidecar", "--domain", "prod.svc.cluster.local", "--proxyLogLevel=warning")
	cmd.Dir, cmd.Env = dir, environment
	a := &agent{dir: dir}
	a.Process, a.ca = peers.StartIsolated(t, filepath.Join(dir, "log"), cmd, 15012)
	return a
}

// TestPilotAgent runs Istio's agent against our CA, which asks a real API server about its token, and beside our SDS
// socket.
func TestPilotAgent(t *testing.T) {
	t.Parallel()
	peers.Program(t, "pilot-agent")
	c := peers.NewCluster(t)
	c.Account(t, "istio-system", "ca")
	grant(t, c, "istio-system", "ca", "ClusterRole", documented(t, "authn/kube"))
	c.Account(t, "prod", "web")
	c.Pod(t, "prod", "web", "web-1", "node-a")
	token := c.Token(t, "prod", "web", "web-1", "istio-ca")

	authority := must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
	var roots []byte
	for root := range authority.Bundle().X509Authorities() {
		roots = append(roots, pki.MarshalCertificatesPEM(root)...)
	}
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: c.ClientOf(t, "istio-system", "ca")})
	require.NoError(t, err)
	tokens, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: domain, Cluster: "Kubernetes"})
	require.NoError(t, err)

	// serve serves our CA where the agent calls it, and counts the calls.
	serve := func(t *testing.T, l net.Listener) *atomic.Int64 {
		var calls atomic.Int64
		server := must.Get(caserver.New(caserver.Options{
			CA: authority, TrustDomain: domain,
			Identity: caservertest.Identity(t, authority, spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/ca"), pki.IPSAN(net.IPv4(127, 0, 0, 1))),
			Istio: &istioca.Options{Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
				calls.Add(1)
				return tokens.Authenticate(r)
			})},
		}))(t)
		background(t, func(ctx context.Context) { _ = server.Run(ctx, caserver.Listeners{Istio: l}) })
		return &calls
	}

	t.Run("our CA", func(t *testing.T) {
		t.Parallel()
		a := startAgent(t, shortDir(t), token, roots)
		calls := serve(t, a.ca)
		socket := filepath.Join(a.dir, "var/run/secrets/workload-spiffe-uds/socket")
		a.Ready(t, func() error { _, err := os.Stat(socket); return err })
		seen := map[string]bool{}
		for svid := range subscribe(t, socket) {
			require.Equal(t, webID, svid.ID())
			verifies(t, authority.Bundle(), svid.Chain())
			if seen[svid.Leaf().SerialNumber.String()] = true; len(seen) == 3 {
				break
			}
		}
		require.GreaterOrEqual(t, calls.Load(), int64(3))
		a.Ready(t, func() error { // the agent writes its files one after the other
			svid, err := a.output()
			if err == nil {
				verifies(t, authority.Bundle(), svid.Chain())
			}
			return err
		})
		got := must.Get(os.ReadFile(filepath.Join(a.dir, "certs/root-cert.pem")))(t)
		require.True(t, mustBundle(t, got).Equal(mustBundle(t, roots)))
	})
	t.Run("our SDS socket", func(t *testing.T) {
		t.Parallel()
		dir := shortDir(t)
		socket := filepath.Join(dir, "var/run/secrets/workload-spiffe-uds/socket")
		require.NoError(t, os.MkdirAll(filepath.Dir(socket), 0o755))
		issuer := must.Get(local.New(authority, webID))(t)
		m := must.Get(secretcache.New(secretcache.Config{ID: webID, CA: issuer}))(t)
		h := must.Get(sds.NewHandler(m, nil))(t)
		background(t, func(ctx context.Context) { _ = m.Run(ctx) })
		server := &unixsocket.Server{Path: socket, Handler: h}
		background(t, func(ctx context.Context) { _ = server.Run(ctx) })
		require.Eventually(t, func() bool {
			conn, err := net.Dial("unix", socket)
			if err != nil {
				return false
			}
			return conn.Close() == nil
		}, passing, often)

		a := startAgent(t, dir, token, roots)
		calls := serve(t, a.ca)
		a.Ready(t, func() error {
			log, err := os.ReadFile(filepath.Join(dir, "log"))
			if err != nil {
				return err
			}
			for _, want := range []string{"Existing workload SDS socket found", "Envoy command"} {
				if !strings.Contains(string(log), want) {
					return fmt.Errorf("its log does not say %q", want)
				}
			}
			return nil
		})
		bootstrap := must.Get(os.ReadFile(filepath.Join(dir, "etc/istio/proxy/envoy-rev.json")))(t)
		require.Contains(t, string(bootstrap), "workload-spiffe-uds/socket", "Envoy is to ask our socket")
		for svid := range subscribe(t, socket) {
			require.Equal(t, webID, svid.ID())
			verifies(t, authority.Bundle(), svid.Chain())
			break
		}
		require.Zero(t, calls.Load(), "the agent itself asks no CA")
	})
}

// subscribe asks an SDS socket for the secret default as an Envoy does, and yields each one that it gets.
func subscribe(t *testing.T, socket string) iter.Seq[*spiffe.SVID] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), passing)
	t.Cleanup(cancel)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	client := grpchttp.NewClient(&http.Client{Transport: transport}, "http://localhost", 1<<20)
	return func(yield func(*spiffe.SVID) bool) {
		stream := client.Open(ctx, "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets", nil)
		defer stream.Close()
		request := &envoysds.DiscoveryRequest{
			Node: &envoysds.Node{Id: "sidecar~127.0.0.1~web-1.prod~prod.svc.cluster.local"}, ResourceNames: []string{"default"},
			TypeUrl: "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
		}
		for {
			msg := must.Get(proto.Marshal(request))(t)
			require.NoError(t, stream.Send(msg))
			var response envoysds.DiscoveryResponse
			msg = must.Get(stream.Receive())(t)
			require.NoError(t, proto.Unmarshal(msg, &response))
			for _, r := range response.Resources {
				var secret envoysds.Secret
				require.NoError(t, proto.Unmarshal(r.Value, &secret))
				pair := secret.GetTlsCertificate()
				svid, err := spiffe.ParseSVIDPEM(pair.GetCertificateChain().GetInlineBytes(), pair.GetPrivateKey().GetInlineBytes())
				require.NoError(t, err)
				if !yield(svid) {
					return
				}
			}
			request.VersionInfo, request.ResponseNonce = response.VersionInfo, response.Nonce
		}
	}
}

// output returns what the agent has written.
func (a *agent) output() (*spiffe.SVID, error) {
	chain, err := os.ReadFile(filepath.Join(a.dir, "certs/cert-chain.pem"))
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(filepath.Join(a.dir, "certs/key.pem"))
	if err != nil {
		return nil, err
	}
	return spiffe.ParseSVIDPEM(chain, key)
}

func mustBundle(t *testing.T, pem []byte) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.ParseBundlePEM(domain, pem))(t)
}
