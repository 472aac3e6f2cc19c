package meshdemo

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/sequence"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

var update = flag.Bool("update", false, "write the diagram in the README of examples/linkerd-proxy")

// Participants, beside the two applications and their proxies.
const (
	injector  = "injector"
	kubelet   = "kubelet"
	identity  = "identity service"
	apiServer = "API server"
	operator  = "operator"
)

func proxyOf(name string) string { return name + " proxy" }

func newTrace(out io.Writer) *sequence.Trace {
	return sequence.New(out, true, operator, injector, kubelet, "voting", proxyOf("voting"), proxyOf("web"), "web", identity, apiServer)
}

// traced is a header of requests that the trace has.
const traced = "X-Traced"

// Lives of certificates in the demo, which end with a whole second: they are up to a second more.
const (
	life      = 2 * time.Second
	shortLife = time.Second // of those that are to expire
)

// mesh is that of the demo, with names in the form of the first design.
var mesh = linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local", FirstDesign: true}

// TestDemo runs an identity service with an API server that is made up, two applications, and the program beside each of
// them, through the life of their certificates.
func TestDemo(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	dir := programtest.Build(t, "linkerd-proxy")
	programtest.ExitCodes(t, dir, map[string]string{"linkerd-proxy": "LINKERD2_PROXY_IDENTITY_DISABLED=1"})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d := &meshDemo{Trace: newTrace(t.Output()), t: t, program: filepath.Join(dir, "linkerd-proxy"), dir: memory(t)}
	defer d.wg.Wait()
	defer cancel()
	d.show(ctx)
	require.NoError(t, d.failure())
	programtest.Section(t, *update, "../../../examples/linkerd-proxy/README.md", "```mermaid\n", "```\n", d.Diagram())
}

// meshDemo is what the demo runs.
type meshDemo struct {
	*sequence.Trace
	t        *testing.T
	renewing atomic.Pointer[string] // the workload whose requests to the identity service the trace has from now on; nil for all

	program, dir string
	mesh         *meshtest.Controller
	wg           sync.WaitGroup // of the applications

	mu     sync.Mutex
	failed error // of a part that runs in the background
}

// workload is an application with its proxy.
type workload struct {
	name                     string // of the service account
	token                    string // file
	store                    string
	inbound, outbound, admin string
	log                      programtest.Log
}

// memory returns a directory of t in memory, as injectors mount one for keys; where there is none, it is on a disk.
func memory(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "mesh")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (d *meshDemo) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failed = cmp.Or(d.failed, err)
}

func (d *meshDemo) failure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

func (d *meshDemo) show(ctx context.Context) {
	// The service comes later, and the proxies know its address.
	d.mesh = meshtest.New(d.t, meshtest.Options{Life: life, Mesh: mesh, Stopped: true, Review: d.reviewed})
	d.PhaseWith("Before the identity service is there", injector, proxyOf("web"), "environment")
	web := d.start("web", d.application(ctx, "web"))
	d.Event(proxyOf("web"), proxyOf("web"), "checks anchors, token and store, then makes key.der, csr.p8 and trust-anchors.pem, each 0400")
	d.checkStore(web)
	d.probe(web, "ready", http.StatusServiceUnavailable)

	// Certificates end with whole seconds: two that are made in one second end together, and are renewed together.
	wait(ctx, time.Until(time.Now().Truncate(time.Second).Add(time.Second)))
	d.PhaseWith("Certification", identity, identity, "begins to serve")
	d.mesh.Start(d.t)
	d.until(ctx, func() bool { return d.status(web, "ready") == http.StatusOK })
	d.Event(identity, proxyOf("web"), "certificate for the name of web, alone")
	d.probe(web, "ready", http.StatusOK)
	name := must.Do(mesh.Name("emojivoto", "web"))
	voting := d.start("voting", d.application(ctx, "voting"), "-route", "web.emojivoto:80="+web.inbound+"="+name)
	d.until(ctx, func() bool { return d.status(voting, "ready") == http.StatusOK })
	d.Event(identity, proxyOf("voting"), "certificate for the name of voting, alone")
	if strings.HasPrefix(d.dir, "/dev/shm/") { // or it warns of a key on a disk
		voting.log.Healthy(d.t)
	}

	entry := voting.outbound
	d.PhaseWith("Requests", "voting", proxyOf("voting"), get(false))
	for _, http2 := range []bool{false, true} {
		require.NoError(d.t, d.request(entry, http2, true))
	}
	var good, bad atomic.Int64
	pause := d.traffic(ctx, entry, &good, &bad)

	d.renewing.Store(new("web"))
	d.PhaseWith("Renewal, with a new token", kubelet, proxyOf("web"), "another token in the token file")
	first := d.renewals(web, voting)
	d.give("web-2", web)
	d.renewed(ctx, first)
	d.Event(identity, proxyOf("web"), "certificate for the same key")

	end := d.expiry(web)
	left := time.Until(end)
	wait(ctx, time.Until(end)-left/100*85)
	d.PhaseWith("The identity service is down for 45 % of a life", operator, identity, "stops it")
	d.mesh.Stop()
	before := d.renewals(web, voting)
	wait(ctx, time.Until(end)-left/100*40)
	d.Event(operator, identity, "starts it")
	d.mesh.Life(shortLife)
	d.mesh.Start(d.t)
	d.renewed(ctx, before)
	require.Less(d.t, time.Now(), end, "the renewal has come after the end of the certificate")
	d.Event(identity, proxyOf("web"), "certificate, before the one from before ends")
	pause()
	require.Zero(d.t, bad.Load(), "requests that have failed")
	require.Positive(d.t, good.Load())

	d.PhaseWith("The account is deleted", operator, apiServer, "deletes the account web")
	d.mesh.Delete("web")
	d.until(ctx, func() bool { return d.status(web, "live") == http.StatusServiceUnavailable })
	d.probe(web, "live", http.StatusServiceUnavailable)
	c, err := tls.Dial("tcp", web.inbound, &tls.Config{ServerName: name, InsecureSkipVerify: true}) // it is to fail
	if err == nil {
		_ = c.Close()
	}
	require.Error(d.t, err, "a proxy with an expired certificate has accepted a new connection")
	d.Event(operator, proxyOf("web"), "TLS for the name of web: refused")

	d.PhaseWith("The account is there again", operator, apiServer, "makes the account web anew, with another token")
	d.give("web-3", web)
	d.until(ctx, func() bool { return d.status(web, "ready") == http.StatusOK })
	d.probe(web, "live", http.StatusOK)
	require.NoError(d.t, d.request(entry, true, true))
	d.Say(fmt.Sprintf("requests through renewal and outage %d, failed %d", good.Load(), bad.Load()))
}

// reviewed is told of each review of a token.
func (d *meshDemo) reviewed(token string, _ bool) {
	name, _, _ := strings.Cut(token, "-")
	if only := d.renewing.Load(); only == nil || *only == name { // those of several workloads come in any order
		d.Event(proxyOf(name), identity, "Certify: token, and the one signing request")
		d.Event(identity, apiServer, "TokenReview of the token of "+name+", for identity.l5d.io")
	}
}

// give makes the token good, and puts it into the file of a workload.
func (d *meshDemo) give(token string, w *workload) {
	d.mesh.Delete(w.name)
	d.mesh.Account(token, w.name)
	if err := os.WriteFile(w.token, []byte(token), 0o600); err != nil {
		d.fail(err)
	}
}

// application serves a toy application, by HTTP/1, and HTTP/2 without TLS. It returns its address.
func (d *meshDemo) application(ctx context.Context, name string) (addr string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		d.fail(err)
		return ""
	}
	s := &http.Server{Protocols: new(http.Protocols), ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client, _, _ := strings.Cut(r.Header.Get("l5d-client-id"), ".")
		if r.Header.Get(traced) != "" {
			d.Event(proxyOf(client), proxyOf(name), r.Proto+" by mutual TLS") // or there was no name
			d.Event(proxyOf(name), name, fmt.Sprintf("GET by %s, with l5d-client-id of %s", r.Proto, client))
		}
		fmt.Fprintln(w, "hello", client)
	})}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	d.wg.Go(func() { _ = s.Serve(l) })
	context.AfterFunc(ctx, func() { _ = s.Close() })
	return l.Addr().String()
}

// start runs the program beside an application, with the environment of an injector.
func (d *meshDemo) start(name, app string, flags ...string) *workload {
	w := &workload{name: name, token: filepath.Join(d.dir, name+"-token"), store: filepath.Join(d.dir, name+"-store")}
	require.NoError(d.t, os.Mkdir(w.store, 0o700))
	d.give(name+"-1", w)
	environ := d.environ(w)
	d.Event(injector, proxyOf(name), "environment")
	args := append([]string{"-app", app, "-inbound", "127.0.0.1:0", "-outbound", "127.0.0.1:0", "-admin", "127.0.0.1:0", "-client-id"}, flags...)
	p := programtest.Start(d.t, d.program, &w.log, environ, args...)
	w.inbound, w.outbound, w.admin = p.Addr("inbound"), p.Addr("outbound"), p.Addr("admin")
	return w
}

// environ returns what an injector tells the proxy of a workload.
func (d *meshDemo) environ(w *workload) []string {
	own := must.Do(mesh.Name("emojivoto", w.name))
	certifier := must.Do(mesh.Certifier())
	return []string{
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + own,
		"LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(d.mesh.Authority.Bundle().MarshalPEM()),
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=" + w.token,
		"LINKERD2_PROXY_IDENTITY_STORE_DIR=" + w.store,
		"LINKERD2_PROXY_IDENTITY_ADDR=" + d.mesh.Addr, // this host, and no loopback address: the service has to prove its name
		"LINKERD2_PROXY_IDENTITY_IDENTITY=" + certifier,
		"LINKERD2_PROXY_IDENTITY_MIN_REFRESH=100ms", // certificates live for two seconds here
		"LINKERD2_PROXY_IDENTITY_MAX_REFRESH=1s",
	}
}

// checkStore waits for the three files, and looks at their modes.
func (d *meshDemo) checkStore(w *workload) {
	for _, name := range []string{"trust-anchors.pem", "key.der", "csr.p8"} {
		var info os.FileInfo
		d.until(context.Background(), func() (ok bool) {
			var err error
			info, err = os.Stat(filepath.Join(w.store, name))
			return err == nil
		})
		require.Equal(d.t, os.FileMode(0o400), info.Mode(), name)
	}
}

// status asks the admin port of a proxy.
func (d *meshDemo) status(w *workload, path string) int {
	resp, err := http.Get("http://" + w.admin + "/" + path)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func (d *meshDemo) probe(w *workload, path string, want int) {
	got := d.status(w, path)
	require.Equal(d.t, want, got, "/%s of the proxy of %s", path, w.name)
	d.Event(kubelet, proxyOf(w.name), fmt.Sprintf("GET /%s: %d", path, got))
}

// metric returns a metric of a proxy.
func (d *meshDemo) metric(w *workload, name string) (value float64) {
	resp := must.Do(http.Get("http://" + w.admin + "/metrics"))
	defer resp.Body.Close()
	text := must.Do(io.ReadAll(resp.Body))
	for line := range strings.Lines(string(text)) {
		if n, _ := fmt.Sscanf(line, name+" %g", &value); n == 1 {
			return value
		}
	}
	require.FailNow(d.t, "there is no metric", "%s of the proxy of %s", name, w.name)
	return 0
}

// expiry returns when the certificate of a proxy ends.
func (d *meshDemo) expiry(w *workload) time.Time {
	return time.Unix(int64(d.metric(w, "control_identity_cert_expiration_timestamp_seconds")), 0)
}

// renewals returns how many certificates each proxy has got.
func (d *meshDemo) renewals(all ...*workload) (counts map[*workload]float64) {
	counts = map[*workload]float64{}
	for _, w := range all {
		counts[w] = d.metric(w, `control_identity_cert_refreshes_total{result="ok"}`)
	}
	return counts
}

// renewed waits until all proxies have got more certificates than before.
func (d *meshDemo) renewed(ctx context.Context, before map[*workload]float64) {
	for w, count := range before {
		d.until(ctx, func() bool { return d.renewals(w)[w] > count })
	}
}

// get is how the trace calls a request.
func get(http2 bool) string {
	if http2 {
		return "GET http://web.emojivoto/ by HTTP/2"
	}
	return "GET http://web.emojivoto/ by HTTP/1.1"
}

// request sends one to the web application, through both proxies.
func (d *meshDemo) request(entry string, http2, trace bool) error {
	req, err := http.NewRequest(http.MethodGet, "http://web.emojivoto/", nil)
	if err != nil {
		return err
	}
	if trace {
		req.Header.Set(traced, "yes")
		d.Event("voting", proxyOf("voting"), get(http2))
	}
	resp, err := client(entry, http2).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || string(body) != "hello voting\n" {
		return fmt.Errorf("the request was answered with %s and %q: %w", resp.Status, body, err)
	}
	return nil
}

// traffic sends requests until pause is called.
func (d *meshDemo) traffic(ctx context.Context, entry string, good, bad *atomic.Int64) (pause func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for _, http2 := range []bool{false, true} {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := d.request(entry, http2, false); err != nil {
					bad.Add(1)
					d.fail(err)
				} else {
					good.Add(1)
				}
				wait(ctx, 10*time.Millisecond)
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// client returns a client whose requests all go to a proxy, by HTTP/1 or HTTP/2 without TLS, over a connection of their own.
func client(proxy string, http2 bool) *http.Client {
	t := &http.Transport{Protocols: new(http.Protocols), DisableKeepAlives: true, DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, proxy)
	}}
	t.Protocols.SetHTTP1(!http2)
	t.Protocols.SetUnencryptedHTTP2(http2)
	return &http.Client{Transport: t, Timeout: 20 * time.Second}
}

// until waits until f is true.
func (d *meshDemo) until(ctx context.Context, f func() bool) {
	for end := time.Now().Add(20 * time.Second); !f(); {
		require.NoError(d.t, d.failure())
		require.NoError(d.t, ctx.Err())
		require.Less(d.t, time.Now(), end, "it took too long: %s", d.Current())
		wait(ctx, 10*time.Millisecond)
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
