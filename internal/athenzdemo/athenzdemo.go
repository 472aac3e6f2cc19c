// Package athenzdemo shows the programs of package athenzprog at work: a pod's life with an agent, a provider with its signing
// service, a kubelet that is made up, and a ZTS of caclienttest, with mutual TLS on loopback. The API server is either made up,
// or that of a test.
package athenzdemo

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/athenzprog"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/sequence"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// participants are in the order of the diagram.
var participants = []string{operator, apiServer, kubelet, sia, agent, signing, zts, provider, intruder}

const (
	operator  = "operator"
	apiServer = "API server"
	kubelet   = "kubelet"
	sia       = "athenz-sia"
	agent     = "athenz-agent"
	signing   = "signing service"
	zts       = "ZTS"
	provider  = "athenz-provider"
	intruder  = "intruder"
)

// The names of the demo.
const (
	Namespace = "media-sports"
	Account   = "frontend"

	node    = "k8s.admin.k8s-node"
	keyName = "athenz-init-secret"
	suffix  = "svc.cluster.local"
	limit   = 30 * time.Second // for what is waited for
)

// Kubernetes is an API server, and what the demo does there as operator and as kubelet.
type Kubernetes struct {
	URL    string
	Client *http.Client // of the provider, which may get pods

	List   func() ([]byte, error)      // of the pods in Namespace
	Create func(pod, ip string)        // with the account Account, which runs
	Phase  func(pod, ip, phase string) // sets the status
	Delete func(pod string)            // at once
}

// Run runs the demo beside an API server that is made up, and writes what happens to out.
func Run(ctx context.Context, out io.Writer) error {
	_, err := run(ctx, out)
	return err
}

func run(ctx context.Context, out io.Writer) (trace *sequence.Trace, err error) {
	err = outside(ctx, func(t testing.TB) {
		api := kubetest.Start(t)
		pods := "/api/v1/namespaces/" + Namespace + "/pods"
		put := func(pod, ip, phase string) {
			api.Put(pods+"/"+pod, map[string]any{
				"metadata": map[string]any{"uid": "uid-of-" + pod},
				"spec":     map[string]any{"serviceAccountName": Account},
				"status":   map[string]any{"phase": phase, "podIP": ip, "podIPs": []any{map[string]any{"ip": ip}}},
			})
		}
		trace = Show(t, out, Kubernetes{
			URL: api.URL(), Client: api.Client(),
			List:   func() ([]byte, error) { return get(api.Client(), api.URL()+pods) },
			Create: func(pod, ip string) { put(pod, ip, "Running") },
			Phase:  put,
			Delete: func(pod string) { api.Remove(pods + "/" + pod) },
		})
	})
	return trace, err
}

func get(client *http.Client, url string) ([]byte, error) {
	answer, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = errors.New(answer.Status)
	}
	return data, err
}

// demo is what is shown.
type demo struct {
	*sequence.Trace
	t    testing.TB
	ca   *spiffetest.CA
	zts  *cafake.ZTS
	kube Kubernetes
	dir  string

	kubelet           string // URL
	callback, signing net.Addr
	volumes           *athenz.Volumes
	stopAgent         func()
	provider          athenzname.Service

	mu       sync.Mutex
	caller   string   // of ZTS and the signing service
	answered chan int // of the agent
	logs     bytes.Buffer
}

// Show shows a pod's life. What is not as it has to be ends t.
func Show(t testing.TB, out io.Writer, k Kubernetes) *sequence.Trace {
	d := &demo{
		Trace: sequence.New(out, false, participants...), t: t, ca: spiffetest.NewCA(t, "athenz.io"), kube: k,
		caller: agent, answered: make(chan int, 100), provider: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"},
	}
	dir, err := os.MkdirTemp("", "athenz") // a path that a Unix socket may have
	d.must(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	d.dir = dir
	d.begin()
	d.life()
	d.intrusions()
	d.noSecrets()
	return d.Trace
}

func (d *demo) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatalf("%v", err)
	}
}

func (d *demo) path(names ...string) string {
	return filepath.Join(append([]string{d.dir}, names...)...)
}

// begin starts everything but the agent.
func (d *demo) begin() {
	d.zts = cafake.NewZTS(d.t, d.ca, "/ns/"+Namespace+"/sa/"+Account)
	d.volumes = athenz.NewVolumes(d.path("volumes"))
	for _, dir := range []string{"private", "public", "agent"} {
		d.must(os.Mkdir(d.path(dir), 0o700))
	}
	d.newKey("v1")
	d.publish("v1")
	d.write("roots.pem", d.ca.Bundle().MarshalPEM())
	for file, cn := range map[string]string{"node": node, "provider": d.provider.String()} {
		certs, key, err := d.zts.Credential(cn).MarshalPEM()
		d.must(err)
		d.write(file+".pem", certs)
		d.write(file+".key", key)
	}

	at := d.start(athenzprog.Provider(), athenzprog.Options{Kubernetes: &http.Client{Transport: tracing{d, d.kube.Client}}},
		"PROVIDER_SERVICE="+d.provider.String(), "ADMIN_DOMAIN=k8s.admin", "PROVIDER_ADDR=127.0.0.1:0", "SIGNING_ADDR=127.0.0.1:0",
		"CERT_FILE="+d.path("provider.pem"), "KEY_FILE="+d.path("provider.key"), "SERVER_CA_CERT="+d.path("roots.pem"), "SERVICE_CA_CERT="+d.path("roots.pem"),
		"ZTS_NAME="+cafake.ZTSName, "NODE_NAMES="+node, "KUBERNETES_API="+d.kube.URL, "PRIVATE_KEY_DIR="+d.path("private"), "PUBLIC_KEY_DIR="+d.path("public")).at
	d.callback, d.signing = at["PROVIDER_ADDR"], at["SIGNING_ADDR"]
	d.zts.Change(func(r *cafake.ZTSRules) {
		r.Callback = "https://" + d.callback.String()
		r.Services = append(r.Services, "media.sports.backend")
		r.Observe = func(q *http.Request, code int) {
			if code == 0 {
				d.Event(d.from(), zts, "POST "+strings.ReplaceAll(q.URL.Path, "/"+d.provider.String()+"/", "/PROVIDER/"))
			} else {
				d.Event(zts, d.from(), fmt.Sprintf("answers %d", code))
			}
		}
	})

	fake := httptest.NewUnstartedServer(http.HandlerFunc(d.serveKubelet))
	fake.TLS = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*d.zts.Credential("kubelet").TLSCertificate()}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: d.ca.Bundle().CertPool()}
	fake.StartTLS()
	d.t.Cleanup(fake.Close)
	d.kubelet = fake.URL
	d.startAgent()
}

func (d *demo) write(name string, data []byte) { d.must(os.WriteFile(d.path(name), data, 0o600)) }

// from returns the one that calls ZTS and the signing service.
func (d *demo) from() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.caller
}

func (d *demo) setCaller(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.caller = name
}

// serveKubelet is a kubelet: it has the pods of the API server.
func (d *demo) serveKubelet(w http.ResponseWriter, r *http.Request) {
	d.Event(agent, kubelet, r.Method+" "+r.URL.Path)
	data, err := d.kube.List()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(data)
}

// tracing notes what the provider asks the API server.
type tracing struct {
	*demo
	client *http.Client
}

func (tr tracing) RoundTrip(r *http.Request) (*http.Response, error) {
	tr.Event(provider, apiServer, r.Method+" "+r.URL.Path)
	next := tr.client.Transport
	if next == nil {
		next = http.DefaultTransport
	}
	answer, err := next.RoundTrip(r)
	if err == nil && answer.StatusCode != http.StatusOK {
		tr.Event(apiServer, provider, fmt.Sprintf("answers %d", answer.StatusCode))
	}
	return answer, err
}

// traced notes the requests of the programs.
func (d *demo) traced(part string, r *http.Request, code int) {
	from, to := sia, agent
	path, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/"), "/")
	switch part {
	case "agent":
		path = "/v1/" + path
		if code != 0 {
			defer func() { d.answered <- code }()
		}
	case "signing":
		from, to, path = d.from(), signing, r.URL.Path
	case "provider":
		from, to, path = zts, provider, r.URL.Path
	}
	if code == 0 {
		d.Event(from, to, r.Method+" "+path)
	} else {
		d.Event(to, from, fmt.Sprintf("answers %d", code))
	}
}

// Write gets the logs of the programs.
func (d *demo) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.logs.Write(p)
}

// running is a program that runs.
type running struct {
	at   map[string]net.Addr
	stop func()
}

// start runs a program until stop is called, or the demo ends.
func (d *demo) start(p athenzprog.Program, o athenzprog.Options, environ ...string) running {
	d.t.Helper()
	up, ended := make(chan map[string]net.Addr, 1), make(chan error, 1)
	ctx, cancel := context.WithCancel(context.WithoutCancel(d.t.Context()))
	o.Environ = append(environ, "HEALTH_ADDR=127.0.0.1:0")
	o.Logger, o.Trace = slog.New(slog.NewTextHandler(d, &slog.HandlerOptions{Level: slog.LevelDebug})), d.traced
	o.Started = func(at map[string]net.Addr) { up <- at }
	go func() { ended <- p.Run(ctx, o) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			d.t.Errorf("%s: %v", p.Name, err)
		}
	})
	select {
	case at := <-up:
		d.t.Cleanup(stop)
		return running{at, stop}
	case err := <-ended:
		cancel()
		d.t.Fatalf("%s has ended: %v", p.Name, err)
	}
	return running{}
}

func (d *demo) startAgent() {
	roots := d.path("roots.pem")
	client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: roots, CertificateFile: d.path("node.pem"), KeyFile: d.path("node.key")})
	d.must(err)
	r := d.start(athenzprog.Agent(), athenzprog.Options{Kubernetes: client},
		"PROVIDER_SERVICE="+d.provider.String(), "ADMIN_DOMAIN=k8s.admin", "ZTS_ENDPOINT="+d.zts.Endpoint().URL, "SERVER_CA_CERT="+roots, "SERVICE_CA_CERT="+roots,
		"SIGNING_ENDPOINT=https://"+d.signing.String(), "CERT_FILE="+d.path("node.pem"), "KEY_FILE="+d.path("node.key"), "KUBELET_ENDPOINT="+d.kubelet,
		"VOLUMES_DIR="+d.path("volumes"), "AGENT_SOCKET="+d.path("agent", "agent.sock"))
	d.stopAgent = r.stop
	answer, err := http.Get("http://" + r.at["HEALTH_ADDR"].String() + "/ready")
	d.must(err)
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		d.t.Fatalf("the agent is not ready: %s", answer.Status)
	}
}

// newKey makes a version of the key that signs documents, and keeps its public part for publish.
func (d *demo) newKey(version string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	d.must(err)
	text, err := pki.MarshalPrivateKeyPEM(key)
	d.must(err)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	d.must(err)
	d.write("private-"+version, text)
	d.write(filepath.Join("public", keyName+"."+version), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

// publish gives a version to the signing service.
func (d *demo) publish(version string) {
	d.must(os.Rename(d.path("private-"+version), d.path("private", keyName+"."+version)))
}

// mount is the driver of volumes for a new pod; it returns the environment of the client in it.
func (d *demo) mount(pod string) []string {
	handle, err := d.volumes.Add("/var/lib/kubelet/pods/"+pod+"/volumes/athenz.kubernetes.io~athenz-volume-driver/sia-identity", Namespace, pod)
	d.must(err)
	d.Event(kubelet, sia, "mounts a volume with its handle and the agent's socket")
	return []string{
		"ENDPOINT=unix://" + d.path("agent", "agent.sock"), "ID_FILE=" + d.path("volumes", handle, "mount", "id"), "KEY_FILE=" + d.path(pod, "tls", "service.key"),
		"CERT_FILE=" + d.path(pod, "tls", "service.cert"), "CA_CERT_FILE=" + d.path(pod, "tls", "cacert.pem"), "TOKEN_FILE=" + d.path(pod, "tokens", "ntoken"),
	}
}

// launch creates a pod, whose init container gets the first identity.
func (d *demo) launch(pod, ip string) (environ []string) {
	d.Event(operator, apiServer, "creates the pod "+pod)
	d.kube.Create(pod, ip)
	d.must(os.MkdirAll(d.path(pod, "tokens"), 0o755))
	environ = d.mount(pod)
	ctx, cancel := context.WithTimeout(d.t.Context(), limit)
	defer cancel()
	d.must(athenzprog.SIA().Run(ctx, athenzprog.Options{Environ: append(environ, "MODE=init"), Logger: slog.New(slog.NewTextHandler(d, nil))}))
	d.drain()
	d.check(pod, ip)
	return environ
}

// drain forgets the answers of the agent until now.
func (d *demo) drain() {
	for len(d.answered) > 0 {
		<-d.answered
	}
}

func (d *demo) files(pod string) athenz.IdentityFiles {
	return athenz.IdentityFiles{KeyFile: d.path(pod, "tls", "service.key"), CertificateFile: d.path(pod, "tls", "service.cert"), RootsFile: d.path(pod, "tls", "cacert.pem"), TokenFile: d.path(pod, "tokens", "ntoken")}
}

// check looks at what a pod has, and returns it.
func (d *demo) check(pod, ip string) *athenz.Identity {
	i, err := d.files(pod).Read()
	d.must(err)
	leaf := i.Credential.Leaf()
	for _, c := range []struct{ what, got, want string }{
		{"common name", leaf.Subject.CommonName, "media.sports.frontend"},
		{"names", strings.Join(leaf.DNSNames, " "), "frontend.media-sports.svc.cluster.local " + pod + ".instanceid.athenz.svc.cluster.local"},
		{"URIs", fmt.Sprint(leaf.URIs), "[spiffe://media.sports/sa/frontend]"},
		{"addresses", fmt.Sprint(leaf.IPAddresses), "[" + ip + "]"},
	} {
		if c.got != c.want {
			d.t.Fatalf("the certificate of %s has the %s %s, want %s", pod, c.what, c.got, c.want)
		}
	}
	if !strings.HasPrefix(i.ServiceToken(), "v=S1;d=media.sports;n=frontend;") || len(i.Roots) != 1 || !i.Roots[0].Equal(d.ca.Root()) {
		d.t.Fatalf("%s has no service token, or not the CA certificate", pod)
	}
	for name, mode := range map[string]fs.FileMode{"tls/service.key": 0o440, "tls/service.cert": 0o444, "tls/cacert.pem": 0o444, "tokens/ntoken": 0o440} {
		info, err := os.Stat(d.path(pod, filepath.FromSlash(name)))
		d.must(err)
		if info.Mode() != mode {
			d.t.Fatalf("%s has the mode %v", name, info.Mode())
		}
	}
	d.Event(sia, sia, "writes key, certificate, CA certificates and token of "+pod)
	return i
}

// refresh runs the sidecar of a pod until the agent has answered its first request with a status.
func (d *demo) refresh(pod, ip string, environ []string, status int) {
	before, err := d.files(pod).Read()
	d.must(err)
	d.drain()
	r := d.start(athenzprog.SIA(), athenzprog.Options{}, append(environ, "MODE=refresh")...)
	select {
	case got := <-d.answered:
		if got != status {
			d.t.Fatalf("the agent answers the sidecar of %s with %d, want %d", pod, got, status)
		}
	case <-time.After(limit):
		d.t.Fatalf("the sidecar of %s has asked for nothing", pod)
	}
	changed := func() bool {
		now, err := d.files(pod).Read()
		return err == nil && !now.Credential.Leaf().Equal(before.Credential.Leaf())
	}
	if status == http.StatusOK {
		for end := time.Now().Add(limit); !changed(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				d.t.Fatalf("the sidecar of %s does not write what it was given", pod)
			}
		}
		d.check(pod, ip)
	}
	d.Pause()
	r.stop()
	if status != http.StatusOK && changed() {
		d.t.Fatalf("the identity of %s has changed, though the agent has refused it", pod)
	}
}

// life is that of two pods.
func (d *demo) life() {
	d.Phase("A pod is launched")
	first := d.launch("web-0", "10.1.2.3")

	d.Phase("Its sidecar refreshes the identity")
	d.refresh("web-0", "10.1.2.3", first, http.StatusOK)

	d.Phase("The signing key is rotated")
	d.Event(operator, provider, "public key v2")
	d.newKey("v2")
	d.Event(operator, signing, "private key v2")
	d.publish("v2")
	d.Event(operator, provider, "takes the public key v1 away")
	d.must(os.Remove(d.path("public", keyName+".v1")))
	d.launch("web-1", "10.1.2.4")

	d.Phase("The sidecar is restarted")
	d.refresh("web-0", "10.1.2.3", first, http.StatusOK)

	d.Phase("The agent is restarted")
	d.Event(operator, agent, "stops it")
	d.stopAgent()
	d.Event(operator, agent, "starts it")
	d.startAgent()
	d.refresh("web-0", "10.1.2.3", first, http.StatusOK)

	d.Phase("The pod is deleted")
	d.Event(operator, apiServer, "deletes the pod web-0")
	d.kube.Delete("web-0")
	d.refresh("web-0", "10.1.2.3", first, http.StatusInternalServerError)
	d.logged("there is no such pod")
}

// logged requires that the programs have logged a text.
func (d *demo) logged(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !strings.Contains(d.logs.String(), text) {
		d.t.Fatalf("no program has logged %q", text)
	}
}

// intrusions are by a node whose certificate was stolen: it has documents signed for what it likes.
func (d *demo) intrusions() {
	d.setCaller(intruder)
	d.Phase("A document is replayed")
	d.Event(operator, apiServer, "creates the pod web-2")
	d.kube.Create("web-2", "10.1.2.5")
	honest := athenz.PodSubject{Namespace: Namespace, Pod: "web-2", Service: athenzname.Service{Domain: "media.sports", Name: Account}, IP: netip.MustParseAddr("10.1.2.5")}
	document, begun := d.document(honest), time.Now()
	d.must(d.register(honest, document))
	d.refused(d.register(honest, document), "used before")

	d.Phase("A document has another address than the pod")
	other := honest
	other.IP = netip.MustParseAddr("10.9.9.9")
	d.refused(d.register(other, d.document(other)), "the address of the pod is not that of its document")

	d.Phase("A document has another account than the pod")
	other = honest
	other.Service.Name = "backend"
	d.refused(d.register(other, d.document(other)), "service account")

	d.Phase("The pod has ended")
	d.Event(kubelet, apiServer, "sets the phase of web-2 to Succeeded")
	d.kube.Phase("web-2", "10.1.2.5", "Succeeded")
	time.Sleep(time.Until(begun.Add(time.Second))) // two documents of one second are the same
	d.refused(d.register(honest, d.document(honest)), "its phase is Succeeded")
	d.Pause()
}

// refused requires that ZTS has refused a registration for a reason.
func (d *demo) refused(err error, reason string) {
	d.t.Helper()
	if !errors.Is(err, caclient.ErrDenied) || !strings.Contains(err.Error(), reason) {
		d.t.Fatalf("the registration is to be refused with %q: %v", reason, err)
	}
	d.Event(intruder, intruder, "is refused: "+reason)
}

// document has the signing service sign for a subject.
func (d *demo) document(s athenz.PodSubject) string {
	client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: d.path("roots.pem"), CertificateFile: d.path("node.pem"), KeyFile: d.path("node.key")})
	d.must(err)
	defer client.CloseIdleConnections()
	c, err := athenz.NewSigningClient("https://"+d.signing.String(), client)
	d.must(err)
	text, err := c.SignDocument(d.t.Context(), s)
	d.must(err)
	return text
}

// register shows a document to ZTS, with the names that belong to it.
func (d *demo) register(s athenz.PodSubject, document string) error {
	id, err := s.Service.ID()
	d.must(err)
	i := athenzname.Instance{Provider: d.provider, Service: s.Service, ID: s.Pod, Suffix: suffix, IPs: []netip.Addr{s.IP}, SPIFFE: id}
	ca, err := ztsclient.New(ztsclient.Options{Instance: i, ServerRootsFile: d.path("roots.pem"), Endpoint: caclient.Endpoint{
		URL: d.zts.Endpoint().URL, TrustDomain: d.ca.TrustDomain(), RootsFile: d.path("roots.pem"),
		Token: func(context.Context) (string, error) { return document, nil },
	}})
	d.must(err)
	want, err := i.Expectation(d.ca.TrustDomain())
	d.must(err)
	key, err := pki.NewKey(pki.ECDSAP256)
	d.must(err)
	csr, err := pki.NewCSR(key, pki.CSROptions{CommonName: s.Service.String(), SANs: want.Names()})
	d.must(err)
	_, err = ca.Sign(d.t.Context(), csr, 0)
	return err
}

// noSecrets requires that there are no keys, documents and tokens in the logs, nor in the files of the agent.
func (d *demo) noSecrets() {
	d.mu.Lock()
	defer d.mu.Unlock()
	look := func(where string, data []byte) {
		for _, secret := range []string{"eyJ", "PRIVATE KEY", "MII", ";s="} {
			if bytes.Contains(data, []byte(secret)) {
				d.t.Fatalf("there is a secret in %s", where)
			}
		}
	}
	look("the logs", d.logs.Bytes())
	d.must(filepath.WalkDir(d.path("volumes"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		look(path, data)
		return err
	}))
	d.Say("no key, document or token is in a log, or in a file of the agent")
}
