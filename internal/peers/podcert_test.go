package peers_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
)

const (
	podSigner  = "cluster.local/spiffe"
	podBundle  = "/apis/certificates.k8s.io/v1/clustertrustbundles/cluster.local:spiffe:cluster.local"
	credential = "credential-bundle.private-key.x509.pem"
)

var long = flag.Bool("long", false, "have 5,000 pods, the API server away for twenty minutes, and outages of SPIRE for half an hour")

// nodes are the kubelets of a cluster, in one process.
type nodes struct {
	*peers.Process
	t       testing.TB
	c       *peers.Cluster
	tokens  string // directory
	volumes string // directory
	log     string
	names   []string
	cmd     func() *exec.Cmd
}

func newNodes(t testing.TB, c *peers.Cluster, n int) *nodes {
	t.Helper()
	k := &nodes{t: t, c: c, tokens: t.TempDir(), volumes: t.TempDir()}
	k.log = filepath.Join(k.tokens, "log")
	args := []string{c.URL, c.RootsFile(), k.tokens, k.volumes}
	for i := range n {
		name := peers.NodeName(i)
		require.NoError(t, os.WriteFile(filepath.Join(k.tokens, name), []byte(c.Node(t, name)), 0o600))
		k.names = append(k.names, name)
	}
	k.cmd = func() *exec.Cmd { return exec.Command(peers.Program(t, "kubelet"), append(args, k.names...)...) }
	k.Process = peers.Start(t, k.log, k.cmd())
	return k
}

// restart ends the kubelets and starts them again: they know no certificate then.
func (k *nodes) restart() {
	k.Kill()
	k.Process = peers.Start(k.t, k.log, k.cmd())
}

// pod creates a pod with the volume of the page KUBERNETES.md, and returns the directory of that.
func (k *nodes) pod(node, account, name, keyType string) (folder string) {
	k.t.Helper()
	k.c.Do(k.t, "POST", "/api/v1/namespaces/shop/pods", fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: %s}, spec: {serviceAccountName: %s, nodeName: %s,
  containers: [{name: main, image: none, volumeMounts: [{name: identity, mountPath: /identity}]}],
  volumes: [{name: identity, projected: {sources: [
    {podCertificate: {signerName: %s, keyType: %s, maxExpirationSeconds: 3600, credentialBundlePath: %s}},
    {clusterTrustBundle: {signerName: %s, labelSelector: {matchLabels: {k8s.spiffe.io/peer-trust-domain: cluster.local}}, path: cluster.local.spiffe-trust-bundle.x509.pem}}]}}]}}`,
		name, account, node, podSigner, keyType, credential, podSigner), nil)
	return filepath.Join(k.volumes, "shop", name, "identity")
}

// svid returns the identity in a directory; nil if there is none.
func svidIn(folder string) *spiffe.SVID {
	text, err := os.ReadFile(filepath.Join(folder, credential))
	if err != nil {
		return nil
	}
	svid, err := spiffe.ParseSVIDPEM(text, text)
	if err != nil {
		return nil
	}
	return svid
}

// issued waits for an identity in a directory, other than the old one, and returns it.
func (k *nodes) issued(folder string, old *spiffe.SVID) (svid *spiffe.SVID) {
	k.t.Helper()
	require.Eventually(k.t, func() bool {
		svid = svidIn(folder)
		return svid != nil && (old == nil || !svid.Leaf().Equal(old.Leaf()))
	}, 2*time.Minute, 10*time.Millisecond, "%s", folder)
	return svid
}

// podCA is a CA in several replicas, each a program with the arguments of the Deployment.
type podCA struct {
	t        testing.TB
	command  func(state string, more ...string) *exec.Cmd
	states   []string // directories
	mu       sync.Mutex
	replicas []*peers.Process
}

// newPodCA installs a CA and starts replicas of it. Further arguments come after those of the StatefulSet.
func newPodCA(t testing.TB, c *peers.Cluster, dir string, replicas int, more ...string) *podCA {
	t.Helper()
	objects := applyAll(t, c, install(t, dir, "ca", "create=true"))
	holdsAll(t, c, objects, rule{})
	o := objects[slices.IndexFunc(objects, func(o *manifestObject) bool { return o.Kind == "StatefulSet" })]
	may := newAccount(t, c, o.Metadata.Namespace, "ca")
	a := &podCA{t: t}
	a.command = func(state string, extra ...string) *exec.Cmd {
		cmd, _ := caCommand(t, dir, o, may, state, append(slices.Clone(more), extra...)...)
		return cmd
	}
	for i := range replicas {
		a.states, a.replicas = append(a.states, t.TempDir()), append(a.replicas, nil)
		a.start(i)
		if i == 0 { // which makes the CA
			a.replicas[i].Ready(t, func() error {
				return must.Err(os.Stat(filepath.Join(a.states[i], "root-cert.pem")))
			})
		}
	}
	return a
}

func (a *podCA) start(i int) {
	a.t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.replicas[i] = peers.Start(a.t, filepath.Join(a.states[i], "log"), a.command(a.states[i]))
}

// operate runs a command of an operator.
func (a *podCA) operate(args ...string) string {
	a.t.Helper()
	out, err := a.command(a.states[0], args...).CombinedOutput()
	require.NoError(a.t, err, "%s: %s", args, out)
	return string(out)
}

// active returns the serial number of the root that signs.
func (a *podCA) active() string {
	a.t.Helper()
	found := regexp.MustCompile(`(?m)^root ([0-9a-f]+)[^\n]* active`).FindStringSubmatch(a.operate("-status"))
	require.NotNil(a.t, found, "%s", a.operate("-status"))
	return found[1]
}

// relay passes connections on to a server that starts later.
func relay(t testing.TB) (addr string, to func(string)) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	target := make(chan string, 1)
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer in.Close()
				at := <-target
				target <- at
				out, err := net.Dial("tcp", at)
				if err != nil {
					return
				}
				defer out.Close()
				go func() { _, _ = io.Copy(out, in); _ = out.(*net.TCPConn).CloseWrite() }()
				_, _ = io.Copy(in, out)
			}()
		}
	}()
	return l.Addr().String(), func(at string) { target <- at }
}

// talk starts two services in two pods, each of which asks the other with a new handshake for each request. What it returns ends
// them, and demands that no request has failed.
func talk(t testing.TB, dir string, folders ...string) (stop func()) {
	t.Helper()
	var all []*peers.Process
	var logs []string
	first, toFirst := relay(t)
	second, toSecond := relay(t)
	serving := regexp.MustCompile(`serving: https://(\S+)`)
	for i, folder := range folders {
		log := filepath.Join(t.TempDir(), "log")
		cmd := exec.Command(filepath.Join(dir, "service"), "-interval=100ms", "-drain=1s", "-url=https://"+[]string{second, first}[i])
		cmd.Env = []string{"SPIFFE_CREDENTIAL_FOLDER=" + folder}
		p := peers.Start(t, log, cmd)
		var at string
		p.Ready(t, func() error {
			text, err := os.ReadFile(log)
			if found := serving.FindSubmatch(text); err == nil && found != nil {
				at = string(found[1])
				return nil
			}
			return fmt.Errorf("%s", text)
		})
		[]func(string){toFirst, toSecond}[i](at)
		all, logs = append(all, p), append(logs, log)
	}
	return func() {
		t.Helper()
		for _, p := range all {
			select {
			case <-p.Ended():
				require.Fail(t, "a service has ended, as a request failed")
			default:
			}
		}
		for _, p := range all {
			p.Signal(t, syscall.SIGTERM)
		}
		for i, p := range all {
			<-p.Ended()
			text := must.Get(os.ReadFile(logs[i]))(t)
			require.NotContains(t, string(text), "level=ERROR")
			lines := strings.Split(strings.TrimSpace(string(text)), "\n")
			found := slices.IndexFunc(lines, func(s string) bool { return strings.HasSuffix(s, ", no failure") })
			require.GreaterOrEqual(t, found, 0, "%s", lines[max(0, len(lines)-5):])
			t.Log(lines[found])
		}
	}
}

// TestPods is the life of pods whose identity the kubelet obtains from our CA, by the kubelet's own code and the rights of nodes: through
// renewals, a rotation, an emergency, the loss of replicas and that of the API server, two services talk to each other.
func TestPods(t *testing.T) {
	t.Parallel()
	c := peers.NewCluster(t)
	dir := buildPrograms(t, "ca", "service")
	a := newPodCA(t, c, dir, 3, "-refresh-hint=1s", "-propagation=15s")
	c.Account(t, "shop", "web")
	c.Account(t, "shop", "api")
	k := newNodes(t, c, 2)
	web, api := k.pod("node-0", "web", "web-0", "ECDSAP256"), k.pod("node-1", "api", "api-0", "ECDSAP256")
	webSVID, apiSVID := k.issued(web, nil), k.issued(api, nil)
	require.Equal(t, "spiffe://cluster.local/ns/shop/sa/web", webSVID.ID().String())
	require.Equal(t, "spiffe://cluster.local/ns/shop/sa/api", apiSVID.ID().String())
	require.Equal(t, time.Hour, webSVID.NotAfter().Sub(webSVID.Leaf().NotBefore))
	stop := talk(t, dir, web, api)

	// A library reads the directory without knowing more than its path.
	source := must.Get(filesource.Start(t.Context(), filesource.Config{Folder: web}))(t)
	defer source.Close()
	require.Equal(t, 1, source.Bundles().Len())

	for _, kind := range []string{"ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519", "RSA3072", "RSA4096"} {
		folder := k.pod("node-0", "web", "key-"+strings.ToLower(kind), kind)
		require.Equal(t, kind, keyType(k.issued(folder, nil).Leaf().PublicKey))
	}

	t.Run("another node", func(t *testing.T) {
		for _, v := range []struct {
			name, pod, node string // as node-1 asks
			code            int
		}{
			{"its own pod", "api-0", "node-1", http.StatusCreated},
			{"a pod of another node", "web-0", "node-0", http.StatusForbidden},
			{"a pod of another node as its own", "web-0", "node-1", http.StatusForbidden},
		} {
			code, answer := askAs(t, c, k, "node-1", v.pod, v.node)
			require.Equal(t, v.code, code, "%s: %s", v.name, answer)
		}
	})

	t.Run("denied", func(t *testing.T) {
		path := requestPod(t, c, "shop", podRequest(t, c, podSigner, "shop", "web-0", "web", "node-0", map[string]string{"example.org/role": "admin"}))
		require.Eventually(t, func() bool { return len(answerOf(t, c, path)) > 0 }, passing, often)
		got := answerOf(t, c, path)
		require.Equal(t, "Denied InvalidUnverifiedUserAnnotations", got[0].Type+" "+got[0].Reason)
		require.Contains(t, got[0].Message, "example.org/role")
	})

	renew := func() {
		t.Helper()
		k.Signal(t, syscall.SIGUSR1) // 40 minutes later
		webSVID, apiSVID = k.issued(web, webSVID), k.issued(api, apiSVID)
		k.Signal(t, syscall.SIGUSR1)
	}
	renew()

	// A rotation: the new root is in the volumes before anything is signed with it.
	old := a.active()
	a.operate("-rotate")
	roots := func(n int) func() bool {
		return func() bool {
			text, err := os.ReadFile(filepath.Join(web, "cluster.local.spiffe-trust-bundle.x509.pem"))
			return err == nil && bytes.Count(text, []byte("BEGIN CERTIFICATE")) == n
		}
	}
	require.Eventually(t, roots(2), 60*time.Second, 100*time.Millisecond)
	require.Eventually(t, func() bool { return a.active() != old }, 60*time.Second, time.Second)
	renew()
	signedBy := func(svid *spiffe.SVID) string {
		bundle := must.Get(source.Bundle(svid.ID().TrustDomain()))(t)
		for root := range bundle.X509Authorities() {
			if svid.Leaf().CheckSignatureFrom(root) == nil {
				return root.SerialNumber.Text(16)
			}
		}
		return ""
	}
	require.NotEqual(t, old, signedBy(webSVID))

	// An emergency: what the stolen key may have signed is trusted no more once all have renewed.
	stolen := a.active()
	a.operate("-taint", stolen)
	require.Eventually(t, func() bool { return a.active() != stolen }, 60*time.Second, time.Second)
	require.Eventually(t, roots(3), 60*time.Second, 100*time.Millisecond)
	k.restart() // all ask again
	webSVID, apiSVID = k.issued(web, webSVID), k.issued(api, apiSVID)
	time.Sleep(3 * time.Second) // the services have read what was written
	require.NotEqual(t, stolen, signedBy(webSVID))
	for _, serial := range []string{old, stolen} {
		a.operate("-revoke", serial)
	}
	require.Eventually(t, roots(1), 60*time.Second, 100*time.Millisecond)

	// What another program does to the bundle does not last.
	c.Do(t, "DELETE", podBundle, nil, nil)
	require.Eventually(t, func() bool { return c.Status(t, "GET", podBundle) == http.StatusOK }, time.Minute, 100*time.Millisecond)

	// Replicas are killed at random, while pods come.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var killing sync.WaitGroup
	killing.Go(func() {
		for ctx.Err() == nil {
			i := mathrand.IntN(3)
			a.replicas[i].Kill()
			select {
			case <-ctx.Done():
			case <-time.After(time.Duration(mathrand.IntN(2000)) * time.Millisecond):
			}
			a.start(i)
		}
	})
	for i := 0; ctx.Err() == nil; i++ {
		k.issued(k.pod("node-0", "web", fmt.Sprint("killed-", i), "ECDSAP256"), nil)
	}
	killing.Wait()

	// The API server goes away: what there is lasts, and goes on after that.
	away := 20 * time.Second
	if *long {
		away = 20 * time.Minute
	}
	c.KillServer()
	time.Sleep(away)
	c.StartServer(t)
	k.issued(k.pod("node-1", "api", "after", "ECDSAP256"), nil)
	renew()

	// A pod that has gone is asked for no more.
	c.DeletePod(t, "shop", "after")
	stop()

	// The records say which pod asked, on which node.
	var records []byte
	for _, state := range a.states {
		records = append(records, must.Get(os.ReadFile(filepath.Join(state, "audit.jsonl")))(t)...)
	}
	require.Regexp(t, `"caller":"system:node:node-0","method":"pod-certificate-request",[^\n]*"pod":"web-0",[^\n]*"node":"node-0",[^\n]*"request":"req-`, string(records))
}

func keyType(key crypto.PublicKey) string {
	switch key := key.(type) {
	case *ecdsa.PublicKey:
		return fmt.Sprint("ECDSAP", key.Params().BitSize)
	case ed25519.PublicKey:
		return "ED25519"
	case *rsa.PublicKey:
		return fmt.Sprint("RSA", key.N.BitLen())
	}
	return fmt.Sprintf("%T", key)
}

// podRequest returns a request for a pod, as a kubelet makes it.
func podRequest(t testing.TB, c *peers.Cluster, signer, namespace, pod, account, node string, annotations map[string]string) map[string]any {
	t.Helper()
	uid := func(path string) string {
		var o struct{ Metadata struct{ UID string } }
		code, answer := must.Get2(c.Send("GET", path, nil))(t)
		if code == http.StatusNotFound { // a node without a record
			return "00000000-0000-0000-0000-000000000000"
		}
		require.NoError(t, json.Unmarshal(answer, &o))
		return o.Metadata.UID
	}
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	der := must.Get(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key))(t)
	spec := map[string]any{
		"signerName": signer, "podName": pod, "podUID": uid("/api/v1/namespaces/" + namespace + "/pods/" + pod), "serviceAccountName": account,
		"serviceAccountUID": uid("/api/v1/namespaces/" + namespace + "/serviceaccounts/" + account), "nodeName": node, "nodeUID": uid("/api/v1/nodes/" + node),
		"maxExpirationSeconds": 3600, "stubPKCS10Request": base64.StdEncoding.EncodeToString(der),
	}
	if annotations != nil {
		spec["unverifiedUserAnnotations"] = annotations
	}
	return map[string]any{
		"apiVersion": "certificates.k8s.io/v1", "kind": "PodCertificateRequest",
		"metadata": map[string]any{"name": "req-" + strings.ToLower(rand.Text())}, "spec": spec,
	}
}

// askAs has the kubelet of a node ask for a pod on a node, and returns what the API server says.
func askAs(t testing.TB, c *peers.Cluster, k *nodes, as, pod, node string) (int, string) {
	t.Helper()
	account := strings.TrimSuffix(pod, "-0")
	body := must.Get(json.Marshal(podRequest(t, c, podSigner, "shop", pod, account, node, nil)))(t)
	token := must.Get(os.ReadFile(filepath.Join(k.tokens, as)))(t)
	r := must.Get(http.NewRequest(http.MethodPost, c.URL+podRequests("shop"), bytes.NewReader(body)))(t)
	r.Header.Set("Content-Type", "application/json")
	answer := must.Get(c.Client(string(token)).Do(r))(t)
	defer answer.Body.Close()
	return answer.StatusCode, string(must.Get(io.ReadAll(answer.Body))(t))
}

func podRequests(namespace string) string {
	return "/apis/certificates.k8s.io/v1/namespaces/" + namespace + "/podcertificaterequests"
}

type podCondition struct{ Type, Reason, Message string }

// requestPod creates a request as an administrator, and returns its path.
func requestPod(t testing.TB, c *peers.Cluster, namespace string, o map[string]any) string {
	t.Helper()
	c.Do(t, "POST", podRequests(namespace), o, nil)
	return podRequests(namespace) + "/" + o["metadata"].(map[string]any)["name"].(string)
}

// answerOf returns the answer to a request, or nothing.
func answerOf(t testing.TB, c *peers.Cluster, path string) []podCondition {
	t.Helper()
	var o struct {
		Status struct{ Conditions []podCondition }
	}
	c.Do(t, "GET", path, nil, &o)
	return o.Status.Conditions
}

// stopwatch measures how long requests wait for their answer, as a client of the API server sees it.
type stopwatch struct {
	mu    sync.Mutex
	asked map[string]time.Time
	waits []time.Duration
}

func startStopwatch(t testing.TB, c *peers.Cluster) *stopwatch {
	t.Helper()
	s := &stopwatch{asked: map[string]time.Time{}}
	api := must.Get(kube.New(kube.Options{URL: c.URL, Client: c.Admin()}))(t)
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	const path = "/apis/certificates.k8s.io/v1/podcertificaterequests"
	require.NoError(t, api.Get(t.Context(), path, nil, &list))
	go func() {
		from := list.Metadata.ResourceVersion
		for t.Context().Err() == nil {
			for event, err := range api.Watch(t.Context(), path, url.Values{"resourceVersion": {from}, "allowWatchBookmarks": {"true"}}) {
				if err != nil {
					break
				}
				from = event.ResourceVersion
				var o struct {
					Metadata struct{ UID string }
					Status   struct{ CertificateChain string }
				}
				if json.Unmarshal(event.Object, &o) != nil {
					continue
				}
				s.mu.Lock()
				at, known := s.asked[o.Metadata.UID]
				switch {
				case event.Type == kube.Added && !known:
					s.asked[o.Metadata.UID] = time.Now()
				case known && !at.IsZero() && o.Status.CertificateChain != "":
					s.waits = append(s.waits, time.Since(at))
					s.asked[o.Metadata.UID] = time.Time{}
				}
				s.mu.Unlock()
			}
		}
	}()
	return s
}

// take waits for n answers, and returns the median and the 99th percentile.
func (s *stopwatch) take(t testing.TB, n int, within time.Duration) (p50, p99 time.Duration) {
	t.Helper()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.waits) >= n
	}, within, 100*time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.waits)
	p50, p99 = s.waits[len(s.waits)/2], s.waits[len(s.waits)*99/100]
	s.waits = nil
	return p50, p99
}

// TestPodStorm starts many pods at once, and then the kubelets of all nodes again. With -long these are 5,000 pods on 40 nodes.
func TestPodStorm(t *testing.T) {
	t.Parallel()
	pods, nodes, patience := 500, 10, 2*time.Minute
	if *long {
		pods, nodes, patience = 5000, 40, 20*time.Minute
	}
	c := peers.NewCluster(t)
	a := newPodCA(t, c, buildPrograms(t, "ca"), 1)
	c.Account(t, "shop", "web")
	s := startStopwatch(t, c)
	k := newNodes(t, c, nodes)
	began := time.Now()
	var creating sync.WaitGroup
	for i := range 8 {
		creating.Go(func() {
			for n := i; n < pods; n += 8 {
				k.pod(peers.NodeName(n%nodes), "web", fmt.Sprint("web-", n), "ECDSAP256")
			}
		})
	}
	creating.Wait()
	p50, p99 := s.take(t, pods, patience)
	t.Logf("%d pods on %d nodes: all have a certificate after %v, of which half were issued within %v of the request, and 99 of 100 within %v", pods, nodes, time.Since(began), p50, p99)
	began = time.Now()
	k.restart()
	p50, p99 = s.take(t, pods, patience)
	t.Logf("restart of the kubelets: all after %v, half within %v, 99 of 100 within %v", time.Since(began), p50, p99)
	assert.Less(t, p50, patience/2)
	status := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", a.replicas[0].PID())))(t)
	peak := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	require.NotNil(t, peak)
	kilobytes := must.Get(strconv.Atoi(string(peak[1])))(t)
	t.Logf("the CA had %d MB at most", kilobytes/1024)
	require.Less(t, kilobytes, 200<<10)
}

// The rights in the comment of package podcert are those that -install prints, of which TestInstall takes each away.
func TestPodRights(t *testing.T) {
	t.Parallel()
	var said struct{ Rules []rule }
	require.NoError(t, yaml.Unmarshal([]byte(documented(t, "pki/caserver/podcert")), &said))
	var printed []rule
	for _, o := range objectsOf(t, install(t, buildPrograms(t, "ca"), "ca", "signer=example.org/spiffe")) {
		for _, r := range o.Rules {
			if slices.Contains(r.Groups, "certificates.k8s.io") {
				printed = append(printed, r)
			}
		}
	}
	require.Equal(t, printed, said.Rules)
}
