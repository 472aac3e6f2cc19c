// Package sealtest shows that no exported type of the module prints a private key, and that no zero value of one keeps
// a caller waiting. There is no code to import here, only tests.
package sealtest

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/sds/istioagent"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

var (
	td = spiffe.MustParseTrustDomain("example.org")
	id = spiffe.MustParseID("spiffe://example.org/web")
)

// holder is a value that holds private keys, and the keys in it that are known.
type holder struct {
	value any
	keys  []crypto.Signer
}

// values returns a value of each exported type that can hold a key, by its name, with keys of an algorithm: some are bytes in
// memory, which packages follow everywhere, and some are pointers to numbers.
func values(t *testing.T, alg string) map[string]holder {
	t.Helper()
	key, root, token := newKey(t, alg), newKey(t, alg), newKey(t, "ecdsa-p256")
	issuer, err := pki.NewRoot(root, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour)})
	require.NoError(t, err)
	leaf, err := issuer.Issue(pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(id)}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	svid := must.Get(spiffe.NewSVID([]*x509.Certificate{leaf}, key))(t)
	bundle := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: []*x509.Certificate{issuer.Certificate()}}))(t)
	set := must.Get(spiffe.NewBundleSet(bundle))(t)
	snapshot := spiffe.NewSnapshot(svid, set)
	credential := must.Get(pki.NewCredential(svid.Chain(), svid.Signer()))(t)
	secret := must.Get(pki.NewKeyPairSecret("default", svid))(t)

	// A plugged-in CA.
	dir := t.TempDir()
	rootPEM := must.Get(pki.MarshalPrivateKeyPEM(root))(t)
	for name, b := range map[string][]byte{
		"ca-cert.pem": pki.MarshalCertificatesPEM(issuer.Certificate()), "ca-key.pem": rootPEM,
		"cert-chain.pem": pki.MarshalCertificatesPEM(issuer.Certificate()), "root-cert.pem": pki.MarshalCertificatesPEM(issuer.Certificate()),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), b, 0o600))
	}
	pair := must.Get(pki.ReadKeyCertBundle(os.DirFS(dir), nil, time.Now()))(t)
	pluggedIn := ca.PluggedIn{Dir: dir, Key: func() crypto.Signer { return root }}

	// A CA of its own, whose key is in its store.
	store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
	authority, err := ca.Open(t.Context(), ca.Config{TrustDomain: td, Create: true, JWT: &ca.JWTConfig{}, Rotation: ca.Rotation{KeyAlgorithm: alg}}, store)
	require.NoError(t, err)
	record := must.Get(store.Load(t.Context()))(t)
	own := must.Get(pki.ParsePrivateKeyPEM(record.Data()["ca-key.pem"]))(t)
	owns := []crypto.Signer{own}
	client := must.Get(local.New(authority, id))(t)
	server := must.Get(caserver.New(caserver.Options{CA: authority, TrustDomain: td, Identity: snapshot}))(t)
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	config, err := caconfig.Parse(fs, []string{"-trust-domain", td.String(), "-root-ca-dir", dir, "-state-dir", t.TempDir()}, func(string) string { return "" })
	require.NoError(t, err)

	// What renews itself.
	cacheConfig := secretcache.Config{ID: id, CA: client, NewKey: func() (crypto.Signer, error) { return key, nil }}
	manager := must.Get(secretcache.New(cacheConfig))(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = manager.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	must.Get(manager.GenerateSecret(t.Context(), "default"))(t)

	// What another program has put into files.
	certsPEM, keyPEM := must.Get2(svid.MarshalPEM())(t)
	mounted := filepath.Join(t.TempDir(), "identity.pem")
	require.NoError(t, os.WriteFile(mounted, append(keyPEM, certsPEM...), 0o600))
	files := must.Get(filesource.Start(t.Context(), filesource.Config{CertFile: mounted}))(t)
	t.Cleanup(func() { require.NoError(t, files.Close()) })
	byName := must.Get(sdssource.NewFiles(sdssource.FilesConfig{Allow: []string{mounted}}))(t)
	go func() { _ = byName.Run(context.Background()) }()
	t.Cleanup(func() { require.NoError(t, byName.Close()) })
	must.Get(byName.GenerateSecret(t.Context(), "file-cert:"+mounted+"~"+mounted))(t)

	// What an API server has.
	cluster := kubetest.Start(t)
	cluster.Put("/api/v1/namespaces/gw/secrets/web", map[string]any{"data": map[string][]byte{"tls.crt": certsPEM, "tls.key": keyPEM}})
	gateway, err := kubesecrets.New(kubesecrets.Config{Namespace: "gw", APIServer: cluster.URL(), HTTPClient: cluster.Client()})
	require.NoError(t, err)
	go func() { _ = gateway.Run(context.Background()) }()
	t.Cleanup(func() { require.NoError(t, gateway.Close()) })
	must.Get(gateway.GenerateSecret(t.Context(), "kubernetes://web"))(t)

	written := must.Get(filesink.New(filesink.Config{Source: manager, Dir: t.TempDir()}))(t)
	must.Get(written.Write())(t)

	// An agent, over files that another program has written.
	folder, err := os.MkdirTemp("", "seal") // t.TempDir is too long for a Unix socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	roots := filepath.Join(t.TempDir(), "roots.pem")
	require.NoError(t, os.WriteFile(roots, bundle.MarshalPEM(), 0o600))
	agentConfig := must.Get(istioagent.FromEnvironment([]string{
		"TRUST_DOMAIN=" + td.String(), "FILE_MOUNTED_CERTS=true", "PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=0s",
		"ISTIO_META_TLS_CLIENT_CERT_CHAIN=" + mounted, "ISTIO_META_TLS_CLIENT_KEY=" + mounted, "ISTIO_META_TLS_CLIENT_ROOT_CERT=" + roots,
	}))(t)
	agentConfig.Root = folder
	agent := must.Get(istioagent.New(must.Get(istioagent.Choose(t.Context(), agentConfig))(t)))(t)
	go func() { _ = agent.Run(context.Background()) }()
	require.NoError(t, agent.Ready(t.Context()))
	t.Cleanup(func() { require.NoError(t, agent.Close()) })

	api := must.Get(workloadserver.NewHandler(manager, nil))(t)
	socket := &unixsocket.Server{Path: filepath.Join(folder, "api.sock"), Handler: api}
	require.NoError(t, socket.Listen())
	go func() { _ = socket.Run(ctx) }()
	workload := must.Get(workloadapi.Start(t.Context(), workloadapi.Config{Address: "unix://" + socket.Path}))(t)
	t.Cleanup(func() { require.NoError(t, workload.Close()) })

	tokens := must.Get(jwtsvid.NewIssuer(td, "k", token, nil))(t)
	wits := must.Get(witsvid.NewIssuer(td, "w", token, nil))(t)

	testCA := spiffetest.NewCA(t, td.String())
	endpoint, served := federationtest.NewEndpoint(t, testCA), workloadapitest.NewServer(t, testCA, "/web")
	keys, signers := []crypto.Signer{key}, []crypto.Signer{token}
	other := newKey(t, "ecdsa-p256") // of a workload; an issuer refuses its own
	witSVID := wit(t, wits, other)
	proving := must.Get(spiffetls.New(spiffetls.Config{Self: svid, Peers: set, Allow: spiffe.AllowIDs(id)}))(t)
	speaking := must.Get(broker.NewClient("tcp://127.0.0.1:1", proving))(t)
	step := must.Get(stepca.New(stepca.Options{
		Endpoint:    caclient.Endpoint{URL: "https://ca.example.org", TrustDomain: td},
		Certificate: func() *tls.Certificate { return svid.TLSCertificate() },
	}))(t)
	vaultCA := must.Get(vault.New(vault.Options{Endpoint: caclient.Endpoint{
		URL: "https://vault.example.org", TrustDomain: td, HTTPClient: httpClient(t, leaf, key),
	}, Mount: "pki", Role: "web"}))(t)
	member, memberKey := linkerdProxy(t, issuer)
	instance := athenzname.Instance{
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "provider"}, Service: athenzname.Service{Domain: "media", Name: "web"}, ID: "web-0", Suffix: "example.org",
	}
	ztsCA := must.Get(ztsclient.New(ztsclient.Options{
		Endpoint: caclient.Endpoint{URL: "https://zts.example.org", TrustDomain: td, RootsFile: "roots.pem"}, Instance: instance,
		Certificate: func() *tls.Certificate { return svid.TLSCertificate() },
	}))(t)
	podFiles := t.TempDir()
	for name, b := range map[string][]byte{"cert": certsPEM, "key": keyPEM} {
		require.NoError(t, os.WriteFile(filepath.Join(podFiles, name), b, 0o600))
	}
	pod := must.Get(sidecar.New(sidecar.Config{Socket: "agent.sock", HandleFile: "id", Files: sidecar.Files{
		KeyFile: filepath.Join(podFiles, "key"), CertificateFile: filepath.Join(podFiles, "cert"), RootsFile: filepath.Join(podFiles, "roots"),
	}}))(t)
	podIdentity := must.Get(pod.Identity())(t)
	return map[string]holder{
		"examples/linkerd-proxy/linkerdproxy.Identity": {member, memberKey},
		"examples/athenz-sia/sidecar.Identity":         {podIdentity, keys},
		"examples/athenz-sia/sidecar.Sidecar":          {pod, keys},
		"caclient/athenz.CA":                           {ztsCA, keys},
		"caclient.NewHTTPClient":                       {httpClient(t, leaf, key), keys},
		"caclient/stepca.CA":                           {step, keys},
		"caclient/vault.CA":                            {vaultCA, keys},
		"caclient/local.CA":                            {client, owns},
		"pki.Credential":                               {credential, keys},
		"pki.Issuer":                                   {issuer, []crypto.Signer{root}},
		"pki.KeyCertBundle":                            {pair, []crypto.Signer{root}},
		"pki.Secret":                                   {secret, keys},
		"pki/ca.Authority":                             {authority, owns},
		"pki/ca.PluggedIn":                             {&pluggedIn, []crypto.Signer{root}},
		"pki/ca.Record":                                {&record, owns},
		"pki/caserver.Server":                          {server, owns},
		"examples/ca/caconfig.Authority":               {&caconfig.Authority{Signer: authority, Own: authority}, owns},
		"examples/ca/caconfig.Config":                  {config, []crypto.Signer{root}},
		"secretcache.Config":                           {&cacheConfig, append(append(owns, key), keys...)},
		"secretcache.Manager":                          {manager, append(owns, key)},
		"spiffe.SVID":                                  {svid, keys},
		"spiffe/filesource.Source":                     {files, keys},
		"sds/istioagent.Agent":                         {agent, keys},
		"sds/sdssource.Files":                          {byName, keys},
		"sds/kubesecrets.Source":                       {gateway, keys},
		"spiffe/filesink.Sink":                         {written, append(owns, key)},
		"spiffe/filesink.Config":                       {filesink.Config{Source: manager}, append(owns, key)},
		"spiffe.Snapshot":                              {snapshot, keys},
		"spiffe/jwtsvid.Issuer":                        {tokens, signers},
		"spiffe/exp/broker.Client":                     {speaking, keys},
		"spiffe/exp/witsvid.Issuer":                    {wits, signers},
		"spiffe/exp/witsvid.Prover":                    {&witsvid.Prover{Source: func() (*witsvid.SVID, error) { return witSVID, nil }}, []crypto.Signer{other}},
		"spiffe/exp/witsvid.SVID":                      {witSVID, []crypto.Signer{other}},
		"spiffe/spiffetls.Endpoint":                    {proving, keys},
		"spiffe/spiffetls.Governor":                    {new(spiffetls.Governor), nil},
		"spiffe/spiffetest.CA":                         {testCA, nil},
		"spiffe/spiffetest/federationtest.Endpoint":    {endpoint, nil},
		"spiffe/spiffetest/workloadapitest.Server":     {served, nil},
		"spiffe/workloadapi.Identity":                  {&workloadapi.Identity{SVID: svid}, keys},
		"spiffe/workloadapi.Update":                    {&workloadapi.Update{Identities: []workloadapi.Identity{{SVID: svid}}}, keys},
		"spiffe/workloadserver.Handler":                {api, []crypto.Signer{key}},
		"spiffe/workloadserver.Identity":               {&workloadserver.Identity{SVID: svid}, keys},
	}
}

func newKey(t *testing.T, alg string) crypto.Signer {
	t.Helper()
	return must.Get(pki.NewKey(alg))(t)
}

// linkerdProxy returns a proxy's identity that has read its key, of which it takes ECDSA only, and asks a certifier that is not there.
func linkerdProxy(t *testing.T, issuer *pki.Issuer) (*linkerdproxy.Identity, []crypto.Signer) {
	t.Helper()
	const name = "web.emojivoto.serviceaccount.identity.linkerd.example.org"
	key, dir := newKey(t, "ecdsa-p256"), t.TempDir()
	der := must.Get(x509.MarshalPKCS8PrivateKey(key))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN(name)}}))(t)
	for file, b := range map[string][]byte{"key.der": der, "csr.p8": csr.DER(), "token": []byte("t")} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), b, 0o600))
	}
	id := must.Get(linkerdproxy.New(linkerdproxy.Config{
		Name: name, Anchors: pki.MarshalCertificatesPEM(issuer.Certificate()), Certifier: linkerdproxy.Service{Addr: "127.0.0.1:1"},
		TokenFile: filepath.Join(dir, "token"), KeyFile: filepath.Join(dir, "key.der"), CSRFile: filepath.Join(dir, "csr.p8"),
	}))(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- id.Run(ctx) }()
	for end := time.Now().Add(20 * time.Second); id.Report().Identities[0].Err == nil && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // until it has asked, with its key
	}
	cancel()
	require.NoError(t, <-done)
	require.ErrorContains(t, id.Report().Identities[0].Err, "refused")
	return id, []crypto.Signer{key}
}

func wit(t *testing.T, by *witsvid.Issuer, key crypto.Signer) *witsvid.SVID {
	t.Helper()
	text := must.Get(by.Issue(id, key.Public()))(t)
	return must.Get(witsvid.NewSVID(text, key))(t)
}

// verbs are those of package fmt, with the flags that change what is printed.
var verbs = []string{"%v", "%+v", "%#v", "%s", "%+s", "%#s", "%q", "%#q", "%x", "%X", "%#x", "% x", "%d", "%+d", "%o", "%b", "%c", "%U", "%e", "%g", "%t", "%p", "%T", "%w", "%!"}

// The ways in which a value is a part of another one.
type (
	exported   struct{ V any }
	unexported struct{ v any }
	nested     struct{ inner *unexported }
)

// wrapped returns v, what it points to, and values that have it in them.
func wrapped(v any) map[string]any {
	all := map[string]any{
		"itself": v, "field": exported{v}, "unexported field": unexported{v}, "pointer to a field": &unexported{v}, "two levels": nested{&unexported{v}},
		"slice": []any{v}, "array": [1]any{v}, "map": map[string]any{"k": v}, "pointer": &v, "pointer to a slice": &[]any{v},
		"slice in a field": exported{[]any{v}}, "map in an unexported field": unexported{map[string]any{"k": v}}, "error": fmt.Errorf("with %w", wrapper{v}),
	}
	r := reflect.ValueOf(v)
	if r.Kind() == reflect.Pointer {
		// A field, a slice and a map of the type itself, and not of an interface.
		pv := reflect.New(r.Type())
		pv.Elem().Set(r)
		slice := reflect.Append(reflect.MakeSlice(reflect.SliceOf(r.Type()), 0, 1), r)
		m := reflect.MakeMap(reflect.MapOf(reflect.TypeFor[int](), r.Type()))
		m.SetMapIndex(reflect.ValueOf(1), r)
		all["typed pointer"], all["typed slice"], all["typed map"] = pv.Interface(), slice.Interface(), m.Interface()
		all["unexported typed slice"], all["unexported typed map"] = unexported{slice.Interface()}, unexported{m.Interface()}
		if copyable(r.Elem().Type()) {
			e := r.Elem().Interface()
			values := reflect.Append(reflect.MakeSlice(reflect.SliceOf(r.Elem().Type()), 0, 1), r.Elem())
			all["value"], all["value in a field"], all["value in an unexported field"] = e, exported{e}, unexported{e}
			all["values"], all["unexported values"] = values.Interface(), unexported{values.Interface()}
		}
	}
	return all
}

// wrapper is an error that has a value in it.
type wrapper struct{ v any }

func (wrapper) Error() string { return "an error" }

// copyable reports whether values of t may be copied: those with a lock or an atomic value in them may not.
func copyable(t reflect.Type) bool {
	if strings.HasPrefix(t.PkgPath(), "sync") {
		return false
	}
	switch t.Kind() {
	case reflect.Struct:
		for f := range t.Fields() {
			if !copyable(f.Type) {
				return false
			}
		}
	case reflect.Array:
		return copyable(t.Elem())
	}
	return true
}

// secrets are the bytes of a private key that nothing may print, and the numbers as which it is in memory.
func secrets(t *testing.T, key crypto.Signer) (texts [][]byte, words []big.Word) {
	t.Helper()
	number := func(n *big.Int) { // package json writes it in digits
		texts, words = append(texts, n.Bytes(), []byte(n.String())), append(words, n.Bits()...)
	}
	switch k := key.(type) {
	case *ecdsa.PrivateKey:
		//lint:ignore SA1019 it is what would be printed
		number(k.D)
	case *rsa.PrivateKey:
		number(k.D)
		number(k.Primes[0])
	case ed25519.PrivateKey:
		texts = append(texts, k.Seed())
	default:
		t.Fatalf("%T", key)
	}
	return append(texts, must.Get(pki.MarshalPrivateKeyPEM(key))(t)), words
}

// needles are what of key may be in what fmt prints with verb.
func needles(t *testing.T, verb string, key crypto.Signer) (needles []string) {
	t.Helper()
	texts, words := secrets(t, key)
	for _, b := range texts {
		// From the middle of it, as printers may cut.
		part := b[len(b)/2 : len(b)/2+9]
		needles = append(needles, string(part), hex.EncodeToString(part), strings.ToUpper(hex.EncodeToString(part)), base64.StdEncoding.EncodeToString(b[3*(len(b)/6):3*(len(b)/6)+12]))
		for _, v := range []string{verb, "%v", "%#v"} {
			list := fmt.Sprintf(v, part)
			if i, j := strings.IndexAny(list, "[{"), strings.LastIndexAny(list, "]}"); i >= 0 && j > i {
				list = list[i+1 : j]
			}
			needles = append(needles, list)
		}
	}
	for _, w := range words {
		for _, v := range []string{verb, "%d", "%x"} {
			if text := fmt.Sprintf(v, w); len(text) > 12 && !strings.Contains(text, "%!") {
				needles = append(needles, text)
			}
		}
	}
	return slices.DeleteFunc(needles, func(n string) bool { return len(n) <= 8 })
}

// leak returns which of the needles is in out; empty for none.
func leak(out string, needles []string) string {
	if i := slices.IndexFunc(needles, func(n string) bool { return strings.Contains(out, n) }); i >= 0 {
		return needles[i]
	}
	return ""
}

// printed returns v as each printer writes it, by the name of the printer; the verb is in the name for those of fmt.
func printed(v any) map[string]string {
	all := map[string]string{}
	for _, verb := range verbs {
		all[verb] = fmt.Sprintf(verb, v)
	}
	if b, err := json.Marshal(v); err == nil {
		all["json"] = string(b)
	} else {
		all["json"] = err.Error()
	}
	for name, handler := range map[string]func(w io.Writer) slog.Handler{
		"slog text": func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, nil) },
		"slog json": func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, nil) },
	} {
		var b bytes.Buffer
		slog.New(handler(&b)).With("with", v).Info("m", "v", v, slog.Group("g", "v", v))
		all[name] = b.String()
	}
	return all
}

// TestNothingPrints prints a value of each exported type that holds a key, in every way.
func TestNothingPrints(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if rounds.Race {
		t.Skip("package fmt reads the fields of values that goroutines are changing")
	}
	for _, alg := range []string{"ed25519", "ecdsa-p256"} {
		for name, h := range values(t, alg) {
			all := map[string][]string{} // by printer
			for printer := range printed(nil) {
				for _, key := range h.keys {
					all[printer] = append(all[printer], needles(t, printer, key)...)
				}
			}
			for how, v := range wrapped(h.value) {
				for printer, out := range printed(v) {
					if found := leak(out, all[printer]); found != "" {
						assert.Fail(t, name+" prints its key", "%s, %s: %.40q…", how, printer, found)
					}
				}
			}
		}
	}
}

// TestLeaksAreFound shows that the search finds a key that is not sealed, however it is printed.
func TestLeaksAreFound(t *testing.T) {
	t.Parallel()
	for _, alg := range []string{"ecdsa-p256", "rsa-2048", "ed25519"} {
		key := newKey(t, alg)
		pem := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
		for name, tt := range map[string]struct {
			v     any
			least int // printers
		}{
			"key": {key, 6}, "field": {exported{key}, 2}, "slice": {[]crypto.Signer{key}, 2}, "slice in a field": {exported{[]any{key}}, 2},
			"bytes": {unexported{pem}, 10}, "text": {unexported{string(pem)}, 5}, "items": {unexported{map[string][]byte{"k": pem}}, 10},
			"unexported": {unexported{key}, map[string]int{"ed25519": 10}[alg]}, // fmt does not follow the pointers that others are
		} {
			found := 0
			out := printed(tt.v)
			for printer := range out {
				if leak(out[printer], needles(t, printer, key)) != "" {
					found++
				}
			}
			assert.GreaterOrEqual(t, found, tt.least, "%v %s", alg, name)
		}
	}
}

// httpClient returns a client that presents a certificate with the key, and has read its files.
func httpClient(t *testing.T, leaf *x509.Certificate, key crypto.Signer) *http.Client {
	t.Helper()
	dir := t.TempDir()
	pem := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	cert, private := filepath.Join(dir, "cert-chain.pem"), filepath.Join(dir, "key.pem")
	require.NoError(t, os.WriteFile(cert, pki.MarshalCertificatesPEM(leaf), 0o600))
	require.NoError(t, os.WriteFile(private, pem, 0o600))
	c := must.Get(caclient.NewHTTPClient(caclient.TLSOptions{CertificateFile: cert, KeyFile: private}))(t)
	require.Error(t, must.Err(c.Get("https://127.0.0.1:1/")))
	return c
}

// TestNoTokenPrints prints a value of each exported type that holds a token, in every way, and the errors that come out of it.
func TestNoTokenPrints(t *testing.T) {
	t.Parallel()
	if rounds.Race {
		t.Skip("package fmt reads the fields of values that goroutines are changing")
	}
	const token = "sesame-open-sesame-open"
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/good" {
			_, _ = fmt.Fprintf(w, `{"access_token":%q,"expires_in":3600}`, token)
			return
		}
		w.WriteHeader(http.StatusBadRequest)
		_, _ = fmt.Fprintf(w, `{"error":%q,"error_description":%q}`, token, string(body)+r.Header.Get("Authorization"))
	}))
	t.Cleanup(echo.Close)
	static := tokensource.Static(token)
	exchange := func(path string) *tokensource.Source {
		return must.Get(tokensource.Exchange(static, tokensource.ClientOptions{URL: echo.URL + path}))(t)
	}
	kept, refused := exchange("/good"), exchange("/bad")
	require.Equal(t, token, must.Get(kept.Token(t.Context()))(t))
	_, refusal := refused.Token(t.Context())
	require.Error(t, refusal)
	ca := must.Get(istioca.New(istioca.Options{Endpoint: caclient.Endpoint{
		URL: "https://127.0.0.1:1", TrustDomain: td, Token: func(context.Context) (string, error) { return token, nil },
	}}))(t)
	for name, v := range map[string]any{
		"a static token": static, "a token that is kept": kept, "a token that was refused": refused, "the refusal": refusal,
		"options": &tokensource.ClientOptions{Issuer: "i", ClientAssertion: static}, "a CA client": ca,
	} {
		for how, v := range wrapped(v) {
			for printer, out := range printed(v) {
				for _, needle := range []string{token[3:], hex.EncodeToString([]byte(token[3:])), strings.ToUpper(hex.EncodeToString([]byte(token[3:]))), base64.StdEncoding.EncodeToString([]byte(token[3:18])), strings.Trim(fmt.Sprint([]byte(token[3:])), "[]")} {
					assert.NotContains(t, out, needle, "%s, %s: %s", name, how, printer)
				}
			}
		}
	}
}
