// Package athenzdemo shows the programs athenz-agent, athenz-provider and athenz-sia at work: a pod's life with an
// agent, a provider with its signing service, a kubelet that is made up, and a ZTS of cafake, with mutual TLS on
// loopback. The API server is either made up, or that of a test. Relays between the programs note what they say to
// each other:
//
//	go test -v -run Athenz ./internal/test
package athenzdemo

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/examples/athenz-agent/nodeagent"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/sequence"
	"github.com/svidkit/svidkit/pki"
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
	Namespace = athenztest.Namespace
	Account   = athenztest.Account

	limit = 30 * time.Second // for what is waited for
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

// demo is what is shown.
type demo struct {
	*sequence.Trace
	*athenztest.Place
	t        testing.TB
	kube     Kubernetes
	programs string // their directory
	logs     programtest.Log

	kubelet, signing string // URLs
	volumes          nodeagent.Volumes
	agent            *programtest.Program

	mu       sync.Mutex
	caller   string   // of ZTS and the signing service
	answered chan int // of the agent
}

// Build builds the programs and returns their directory.
func Build(t testing.TB) (programs string) {
	t.Helper()
	return programtest.Build(t, "athenz-agent", "athenz-provider", "athenz-sia")
}

// Show shows a pod's life, with the programs in a directory. What is not as it has to be ends t.
func Show(t testing.TB, programs string, out io.Writer, k Kubernetes) *sequence.Trace {
	t.Helper()
	d := &demo{
		Trace: sequence.New(out, false, participants...), Place: athenztest.NewPlace(
			t), t: t, kube: k, programs: programs,
		caller: agent, answered: make(chan int, 100),
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the programs have logged:\n%s", &d.logs)
		}
	})
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

// begin starts everything.
func (d *demo) begin() {
	d.volumes = nodeagent.Volumes(d.Path("volumes"))
	d.must(os.Mkdir(d.Path("agent"), 0o700))

	p := d.start("athenz-provider",
		"PROVIDER_SERVICE="+athenztest.Provider().String(), "ADMIN_DOMAIN=k8s.admin", "PROVIDER_ADDR=127.0.0.1:0",
		"SIGNING_ADDR=127.0.0.1:0",
		"CERT_FILE="+d.Path("provider.pem"), "KEY_FILE="+d.Path("provider.key"), "SERVER_CA_CERT="+d.Path(
			"roots.pem"), "SERVICE_CA_CERT="+d.Path("roots.pem"),
		"ZTS_NAME="+cafake.ZTSName, "NODE_NAMES="+athenztest.Node, "PRIVATE_KEY_DIR="+d.Path(
			"private"), "PUBLIC_KEY_DIR="+d.Path("public"),
		"KUBERNETES_API="+d.serve(d.relay(d.kube.URL, d.kube.Client, func(r *http.Request) (from, to, what string) {
			return provider, apiServer, r.Method + " " + r.URL.Path
		}, func(code int) bool { return code != http.StatusOK }), nil))
	callback := d.serve(d.relay("https://"+p.Addr("PROVIDER_ADDR"), d.MutualTLS(cafake.ZTSName),
		func(r *http.Request) (from, to, what string) {
			return zts, provider, r.Method + " " + r.URL.Path
		}, always), d.between(cafake.ZTSName, athenztest.Provider().String()))
	d.signing = d.serve(d.relay("https://"+p.Addr("SIGNING_ADDR"), d.MutualTLS(athenztest.Node),
		func(r *http.Request) (from, to, what string) {
			return d.from(), signing, r.Method + " " + r.URL.Path
		}, always), d.between(athenztest.Node, "relay"))
	d.ZTS.Change(func(r *cafake.ZTSRules) {
		r.Callback = callback
		r.Services = append(r.Services, "media.sports.backend")
		r.Observe = func(q *http.Request, code int) {
			if code == 0 {
				d.Event(d.from(), zts, "POST "+strings.ReplaceAll(q.URL.Path, "/"+athenztest.Provider().String()+"/",
					"/PROVIDER/"))
			} else {
				d.Event(zts, d.from(), fmt.Sprintf("answers %d", code))
			}
		}
	})
	d.kubelet = d.serve(http.HandlerFunc(d.serveKubelet), nil)

	// Pods reach the agent by a relay, too.
	socket, err := net.Listen("unix", d.Path("relay.sock"))
	d.must(err)
	server := &http.Server{ReadHeaderTimeout: limit, Handler: d.relay("http://agent",
		&http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", d.Path("agent", "agent.sock"))
			}, DisableKeepAlives: true,
		}}, func(r *http.Request) (from, to, what string) {
			path, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/"), "/") // without the handle
			return sia, agent, r.Method + " /v1/" + path
		}, func(code int) bool {
			defer func() { d.answered <- code }()
			return true
		})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(socket) })
	d.t.Cleanup(func() { _ = server.Close(); wg.Wait() })
	d.startAgent()
}

func always(int) bool { return true }

// relay passes requests on to another server, and notes them, and the answers that noted says.
func (d *demo) relay(target string, client *http.Client, note func(*http.Request) (from, to, what string),
	noted func(code int) bool) http.Handler {
	to, err := url.Parse(target)
	d.must(err)
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			d.Event(note(r.In))
			r.SetURL(to)
		},
		Transport: roundTripper{client},
		ModifyResponse: func(r *http.Response) error {
			if from, to, _ := note(r.Request); noted(r.StatusCode) {
				d.Event(to, from, fmt.Sprintf("answers %d", r.StatusCode))
			}
			return nil
		},
		ErrorLog: slog.NewLogLogger(slog.NewTextHandler(&d.logs, nil), slog.LevelError),
	}
}

// roundTripper is the transport of a client.
type roundTripper struct{ *http.Client }

func (t roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	if t.Transport == nil {
		return http.DefaultTransport.RoundTrip(r)
	}
	return t.Transport.RoundTrip(r)
}

// serve serves a handler until the demo ends, and returns its URL.
func (d *demo) serve(h http.Handler, cfg *tls.Config) string {
	s := httptest.NewUnstartedServer(h)
	d.t.Cleanup(s.Close)
	if cfg == nil {
		s.Start()
	} else {
		s.TLS = cfg
		s.StartTLS()
	}
	return s.URL
}

// between is for a relay of a client with a common name to a server with one.
func (d *demo) between(client, server string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*d.ZTS.Credential(server).TLSCertificate()},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: d.CA.Bundle().CertPool(),
		VerifyConnection: func(cs tls.ConnectionState) error {
			if got := cs.PeerCertificates[0].Subject.CommonName; got != client {
				return fmt.Errorf("the client is %s and not %s", got, client)
			}
			return nil
		},
	}
}

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

// start runs a program until it is stopped, or the demo ends.
func (d *demo) start(name string, environ ...string) *programtest.Program {
	d.t.Helper()
	return programtest.Start(d.t, filepath.Join(d.programs, name), &d.logs, append(environ, "HEALTH_ADDR=127.0.0.1:0",
		"LOG_LEVEL=debug"))
}

func (d *demo) startAgent() {
	roots := d.Path("roots.pem")
	d.agent = d.start("athenz-agent",
		"PROVIDER_SERVICE="+athenztest.Provider().String(), "ADMIN_DOMAIN=k8s.admin",
		"ZTS_ENDPOINT="+d.ZTS.Endpoint().URL, "SERVER_CA_CERT="+roots, "SERVICE_CA_CERT="+roots,
		"SIGNING_ENDPOINT="+d.signing, "CERT_FILE="+d.Path("node.pem"), "KEY_FILE="+d.Path(
			"node.key"), "KUBELET_ENDPOINT="+d.kubelet,
		"VOLUMES_DIR="+d.Path("volumes"), "AGENT_SOCKET="+d.Path("agent", "agent.sock"))
	answer, err := http.Get("http://" + d.agent.Addr("HEALTH_ADDR") + "/ready") // its socket is open by then
	d.must(err)
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		d.t.Fatalf("the agent is not ready: %s", answer.Status)
	}
}

// mount is the driver of volumes for a new pod; it returns the environment of the client in it.
func (d *demo) mount(pod string) []string {
	handle, err := d.volumes.Add("/var/lib/kubelet/pods/"+pod+
		"/volumes/athenz.kubernetes.io~athenz-volume-driver/sia-identity", Namespace, pod)
	d.must(err)
	d.Event(kubelet, sia, "mounts a volume with its handle and the agent's socket")
	return []string{
		"ENDPOINT=unix://" + d.Path("relay.sock"), "ID_FILE=" + d.Path("volumes", handle, "mount",
			"id"), "KEY_FILE=" + d.Path(pod, "tls", "service.key"),
		"CERT_FILE=" + d.Path(pod, "tls", "service.cert"), "CA_CERT_FILE=" + d.Path(pod, "tls",
			"cacert.pem"), "TOKEN_FILE=" + d.Path(pod, "tokens", "ntoken"),
	}
}

// launch creates a pod, whose init container gets the first identity.
func (d *demo) launch(pod, ip string) (environ []string) {
	d.Event(operator, apiServer, "creates the pod "+pod)
	d.kube.Create(pod, ip)
	d.must(os.MkdirAll(d.Path(pod, "tokens"), 0o755))
	environ = d.mount(pod)
	programtest.Run(d.t, filepath.Join(d.programs, "athenz-sia"), &d.logs, append(environ, "MODE=init"))
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

// credential reads the certificate and the key that a pod has.
func (d *demo) credential(pod string) (*pki.Credential, error) {
	certs, err := os.ReadFile(d.Path(pod, "tls", "service.cert"))
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(d.Path(pod, "tls", "service.key"))
	if err != nil {
		return nil, err
	}
	return pki.ParseCredentialPEM(certs, key)
}

// check looks at what a pod has.
func (d *demo) check(pod, ip string) {
	credential, err := d.credential(pod)
	d.must(err)
	leaf := credential.Leaf()
	for _, c := range []struct{ what, got, want string }{
		{"common name", leaf.Subject.CommonName, "media.sports.frontend"},
		{"names", strings.Join(leaf.DNSNames, " "), "frontend.media-sports.svc.cluster.local " + pod +
			".instanceid.athenz.svc.cluster.local"},
		{"URIs", fmt.Sprint(leaf.URIs), "[spiffe://media.sports/sa/frontend]"},
		{"addresses", fmt.Sprint(leaf.IPAddresses), "[" + ip + "]"},
	} {
		if c.got != c.want {
			d.t.Fatalf("the certificate of %s has the %s %s, want %s", pod, c.what, c.got, c.want)
		}
	}
	token, err := os.ReadFile(d.Path(pod, "tokens", "ntoken"))
	d.must(err)
	text, err := os.ReadFile(d.Path(pod, "tls", "cacert.pem"))
	d.must(err)
	roots, err := pki.ParseCertificatesPEM(text)
	d.must(err)
	if !strings.HasPrefix(string(token), "v=S1;d=media.sports;n=frontend;") || len(roots) != 1 ||
		!roots[0].Equal(d.CA.Root()) {
		d.t.Fatalf("%s has no service token, or not the CA certificate", pod)
	}
	for name, mode := range map[string]fs.FileMode{"tls/service.key": 0o440, "tls/service.cert": 0o444,
		"tls/cacert.pem": 0o444, "tokens/ntoken": 0o440} {
		info, err := os.Stat(d.Path(pod, filepath.FromSlash(name)))
		d.must(err)
		if info.Mode() != mode {
			d.t.Fatalf("%s has the mode %v", name, info.Mode())
		}
	}
	d.Event(sia, sia, "writes key, certificate, CA certificates and token of "+pod)
}

// refresh runs the sidecar of a pod until the agent has answered its first request with a status.
func (d *demo) refresh(pod, ip string, environ []string, status int) {
	before, err := d.credential(pod)
	d.must(err)
	d.drain()
	p := d.start("athenz-sia", append(environ, "MODE=refresh")...)
	select {
	case got := <-d.answered:
		if got != status {
			d.t.Fatalf("the agent answers the sidecar of %s with %d, want %d", pod, got, status)
		}
	case <-time.After(limit):
		d.t.Fatalf("the sidecar of %s has asked for nothing", pod)
	}
	changed := func() bool {
		now, err := d.credential(pod) // of two files, which change one after the other
		return err == nil && !now.Leaf().Equal(before.Leaf())
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
	p.Stop()
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
	d.logs.Healthy(d.t)

	d.Phase("The signing key is rotated")
	d.Event(operator, provider, "public key v2")
	d.NewKey(athenztest.Secret + ".v2")
	d.must(os.Rename(d.Path("private", athenztest.Secret+".v2"), d.Path("v2")))
	d.Event(operator, signing, "private key v2")
	d.must(os.Rename(d.Path("v2"), d.Path("private", athenztest.Secret+".v2")))
	d.Event(operator, provider, "takes the public key v1 away")
	d.must(os.Remove(d.Path("public", athenztest.Secret+".v1")))
	d.launch("web-1", "10.1.2.4")

	d.Phase("The sidecar is restarted")
	d.refresh("web-0", "10.1.2.3", first, http.StatusOK)

	d.Phase("The agent is restarted")
	d.Event(operator, agent, "stops it")
	d.agent.Stop()
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
	honest := athenz.PodSubject{Namespace: Namespace, Pod: "web-2",
		Service: athenzname.Service{Domain: "media.sports", Name: Account}, IP: netip.MustParseAddr("10.1.2.5")}
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
	client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: d.Path("roots.pem"),
		CertificateFile: d.Path("node.pem"), KeyFile: d.Path("node.key")})
	d.must(err)
	defer client.CloseIdleConnections()
	c, err := athenz.NewSigningClient(d.signing, client)
	d.must(err)
	text, err := c(d.t.Context(), s)
	d.must(err)
	return text
}

// register shows a document to ZTS, with the names that belong to it.
func (d *demo) register(s athenz.PodSubject, document string) error {
	id, err := s.Service.ID()
	d.must(err)
	i := athenzname.Instance{Provider: athenztest.Provider(), Service: s.Service, ID: s.Pod,
		Suffix: athenztest.Suffix, IPs: []netip.Addr{s.IP}, SPIFFE: id}
	ca, err := ztsclient.New(ztsclient.Options{Instance: i, ServerRootsFile: d.Path("roots.pem"),
		Endpoint: caclient.Endpoint{
			URL: d.ZTS.Endpoint().URL, TrustDomain: d.CA.TrustDomain(), RootsFile: d.Path("roots.pem"),
			Token: func(context.Context) (string, error) { return document, nil },
		}})
	d.must(err)
	want, err := ztsclient.Expectation(i, d.CA.TrustDomain())
	d.must(err)
	key, err := pki.NewKey("ecdsa-p256")
	d.must(err)
	csr, err := pki.NewCSR(key, pki.CSROptions{CommonName: s.Service.String(), SANs: want.Names()})
	d.must(err)
	_, err = ca.Sign(d.t.Context(), csr, 0)
	return err
}

// noSecrets requires that there are no keys, documents and tokens in the logs, nor in the files of the agent.
func (d *demo) noSecrets() {
	look := func(where string, data []byte) {
		for _, secret := range []string{"eyJ", "PRIVATE KEY", "MII", ";s="} {
			if bytes.Contains(data, []byte(secret)) {
				d.t.Fatalf("there is a secret in %s", where)
			}
		}
	}
	look("the logs", []byte(d.logs.String()))
	d.must(filepath.WalkDir(d.Path("volumes"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		look(path, data)
		return err
	}))
	d.Say("no key, document or token is in a log, or in a file of the agent")
}
