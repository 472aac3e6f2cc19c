package peers_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"maps"
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
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/bearer"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	workloadSocket = "var/run/secrets/workload-spiffe-uds/socket"
	secretService  = "/envoy.service.secret.v3.SecretDiscoveryService/"
	secretType     = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
)

// facts are what was seen of an agent: what a value is, by what it is of. Values say nothing that is different by chance,
// such as a serial number.
type facts map[string]string

// meshCA is a CA of ours with Istio's API for agents with one token.
type meshCA struct {
	*ca.Authority
	token string
	roots []byte // in PEM
}

func newMeshCA(t *testing.T) *meshCA {
	t.Helper()
	authority, err := ca.New(ca.Config{TrustDomain: domain})
	require.NoError(t, err)
	return &meshCA{authority, "a-token-of-the-workload", authority.Bundle().MarshalPEM()}
}

// serve serves the CA.
func (m *meshCA) serve(t *testing.T, l net.Listener) {
	t.Helper()
	server, err := caserver.New(caserver.Options{
		CA: m.Authority, ID: spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/ca"), Names: []pki.SAN{pki.IPSAN(net.IPv4(127, 0, 0, 1))},
		Istio: &istioca.Options{Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
			if token, ok := bearer.Token(r.Header); ok && token == m.token && bearer.Confidential(r) {
				return &authn.Caller{ID: webID, Method: "test"}, nil
			}
			return nil, errors.New("test: another token")
		})},
	})
	require.NoError(t, err)
	background(t, func(ctx context.Context) { _ = server.Run(ctx, caserver.Listeners{Istio: l}) })
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
	f[of+" lifetime"] = time.Until(leaf.NotAfter).Round(time.Minute).String()
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

// files lists the files, sockets and folders below a folder, with their modes.
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
		"default":                 {"default"},
		"ROOTCA":                  {"ROOTCA"},
		"both":                    {"default", "ROOTCA"},
		"file-cert":               {"file-cert:" + in("etc/istio/ingressgateway-certs/tls.crt") + "~" + in("etc/istio/ingressgateway-certs/tls.key")},
		"file-cert, relative":     {"file-cert:./etc/istio/ingressgateway-certs/tls.crt~./etc/istio/ingressgateway-certs/tls.key"},
		"file-cert, no files":     {"file-cert:" + in("etc/istio/ingressgateway-certs/no.crt") + "~" + in("etc/istio/ingressgateway-certs/no.key")},
		"file-cert, no key":       {"file-cert:" + in("etc/istio/ingressgateway-certs/tls.crt")},
		"file-cert, other folder": {"file-cert:" + in("elsewhere/tls.crt") + "~" + in("elsewhere/tls.key")},
		"file-cert, mounted":      {"file-cert:" + in("mounted/cert-chain.pem") + "~" + in("mounted/key.pem")},
		"file-root":               {"file-root:" + in("etc/istio/ingressgateway-ca-certs/ca.crt")},
		"file-root, mounted":      {"file-root:" + in("mounted/root-cert.pem")},
		"file-root:system":        {"file-root:system"},
		"unknown name":            {"no-such-secret"},
		"default without a node":  {"default"},
	}
}

// observe notes what an agent has made in its folder besides before, and what its socket answers.
func (m *meshCA) observe(t *testing.T, a *agent, before map[string]fs.FileMode) facts {
	t.Helper()
	f := facts{}
	client := grpchttp.NewClient(sds.UnixClient(filepath.Join(a.dir, workloadSocket)), "http://localhost", 1<<20)
	var mu sync.Mutex
	var asking sync.WaitGroup
	for what, names := range asked(a.dir) {
		asking.Go(func() {
			node := &envoysds.Node{Id: "sidecar~127.0.0.1~web-1.prod~prod.svc.cluster.local"}
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
	for _, method := range []string{"DeltaSecrets", "FetchSecrets"} {
		request, err := proto.Marshal(&envoysds.DeltaDiscoveryRequest{Node: &envoysds.Node{Id: "x"}, TypeUrl: secretType})
		require.NoError(t, err)
		if method == "FetchSecrets" {
			request, err = proto.Marshal(&envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: "x"}, TypeUrl: secretType, ResourceNames: []string{"default"}})
			require.NoError(t, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		stream := client.Open(ctx, secretService+method, nil)
		_ = stream.Send(request) // Receive says what is wrong
		_, err = stream.Receive()
		f[method] = outcome(ctx, err)
		_ = stream.Close()
		cancel()
	}
	for name, mode := range files(t, a.dir) {
		if was, ok := before[name]; ok && was == mode {
			continue
		}
		f["file "+name+" mode"] = mode.String()
		if mode.IsRegular() && strings.HasPrefix(name, "certs/") {
			data, err := os.ReadFile(filepath.Join(a.dir, name))
			require.NoError(t, err)
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
	case ctx.Err() != nil:
		return "nothing"
	case isStatus:
		return fmt.Sprintf("code %v", e.Code)
	}
	return err.Error()
}

// ask opens a stream for names, acknowledges the answer, and notes what comes.
func (m *meshCA) ask(t *testing.T, client *grpchttp.Client, what string, node *envoysds.Node, names []string) facts {
	f := facts{}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	stream := client.Open(ctx, secretService+"StreamSecrets", nil)
	defer stream.Close()
	request := &envoysds.DiscoveryRequest{Node: node, ResourceNames: names, TypeUrl: secretType}
	var response envoysds.DiscoveryResponse
	exchange := func() error {
		msg, err := proto.Marshal(request)
		if err != nil {
			return err
		}
		_ = stream.Send(msg) // Receive says what is wrong
		if msg, err = stream.Receive(); err != nil {
			return err
		}
		response.Reset()
		return proto.Unmarshal(msg, &response)
	}
	err := exchange()
	if f[what] = outcome(ctx, err); err != nil {
		return f
	}
	f[what+" type"] = response.GetTypeUrl()
	f[what+" version and nonce"] = fmt.Sprint(response.GetVersionInfo() != "", response.GetNonce() != "")
	f[what+" resources"] = fmt.Sprint(len(response.Resources))
	for _, r := range response.Resources {
		var s envoysds.Secret
		if err := proto.Unmarshal(r.GetValue(), &s); err != nil || r.GetTypeUrl() != secretType {
			f[what+" resource"] = fmt.Sprint(r.GetTypeUrl(), err)
			continue
		}
		of := what + " secret " + fmt.Sprint(slices.Index(names, s.GetName()))
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
	}
	request.VersionInfo, request.ResponseNonce, request.Node = response.GetVersionInfo(), response.GetNonce(), nil
	f[what+" after ACK"] = outcome(ctx, exchange())
	return f
}

// moves are environments that are moved over, and what they find in their folder besides the token and the roots.
var moves = map[string]struct {
	env   []string // DIR is the folder
	files func(t *testing.T, dir string)
}{
	"sidecar":          {env: []string{"SECRET_TTL=1h"}},
}

func TestObservePilotAgent(t *testing.T) {
	m := newMeshCA(t)
	other := spiffetest.NewCA(t, "other.example")
	for name, move := range moves {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			podFolder(t, dir, m.token, m.roots)
			m.mount(t, dir, other)
			before := files(t, dir)
			environment := podEnvironment(t, dir)
			for _, e := range move.env {
				environment = append(environment, strings.ReplaceAll(e, "DIR", dir))
			}
			a := startPilotAgent(t, dir, environment)
			m.serve(t, a.ca)
			a.Ready(t, func() error { _, err := os.Stat(filepath.Join(dir, workloadSocket)); return err })
			a.Ready(t, func() error { _, err := os.Stat(filepath.Join(dir, "etc/istio/proxy/envoy-rev.json")); return err })
			f := m.observe(t, a, before)
			for _, k := range slices.Sorted(maps.Keys(f)) {
				fmt.Printf("%s\t= %s\n", k, f[k])
			}
		})
	}
	_ = peers.Names
	_ = assert.Equal
}

// mount puts files into the folder that Envoy may ask for by name.
func (m *meshCA) mount(t *testing.T, dir string, other *spiffetest.CA) {
	t.Helper()
	for _, at := range []string{"etc/istio/ingressgateway-certs/tls.crt etc/istio/ingressgateway-certs/tls.key etc/istio/ingressgateway-ca-certs/ca.crt",
		"elsewhere/tls.crt elsewhere/tls.key elsewhere/ca.crt", "mounted/cert-chain.pem mounted/key.pem mounted/root-cert.pem"} {
		names := strings.Fields(at)
		certs, key, err := other.SVID("/ns/prod/sa/files").MarshalPEM()
		require.NoError(t, err)
		write(t, filepath.Join(dir, names[0]), string(certs))
		write(t, filepath.Join(dir, names[1]), string(key))
		write(t, filepath.Join(dir, names[2]), string(other.Bundle().MarshalPEM()))
	}
}
