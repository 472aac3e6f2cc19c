package peers_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// A podSpec is what Istio's injector has made of a pod, as far as the kubelet runs its proxy by it.
type podSpec struct {
	Containers     []container
	InitContainers []container `yaml:"initContainers"`
	Volumes        []struct {
		Name        string
		ConfigMap   *struct{ Name string }          `yaml:"configMap"`
		Projected   *struct{ Sources []any }        `yaml:"projected"`
		DownwardAPI *struct{ Items []downwardItem } `yaml:"downwardAPI"`
	}
	labels, annotations map[string]string
}

type downwardItem struct {
	Path     string
	FieldRef struct {
		FieldPath string `yaml:"fieldPath"`
	} `yaml:"fieldRef"`
}

type container struct {
	Name, Image   string
	RestartPolicy string `yaml:"restartPolicy"`
	Args          []string
	Env           []struct {
		Name, Value string
		ValueFrom   struct {
			FieldRef struct {
				FieldPath string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
			ResourceFieldRef struct{ Resource string } `yaml:"resourceFieldRef"`
		} `yaml:"valueFrom"`
	}
	VolumeMounts []struct {
		Name      string
		MountPath string `yaml:"mountPath"`
	} `yaml:"volumeMounts"`
	StartupProbe   *podProbe `yaml:"startupProbe"`
	ReadinessProbe *podProbe `yaml:"readinessProbe"`
	LivenessProbe  *podProbe `yaml:"livenessProbe"`
	Lifecycle      struct {
		PostStart struct{ Exec struct{ Command []string } } `yaml:"postStart"`
		PreStop   struct{ Exec struct{ Command []string } } `yaml:"preStop"`
	}
	SecurityContext struct {
		RunAsUser  uint32 `yaml:"runAsUser"`
		RunAsGroup uint32 `yaml:"runAsGroup"`
	} `yaml:"securityContext"`
}

type podProbe struct {
	HTTPGet struct {
		Path string
		Port int
	} `yaml:"httpGet"`
	FailureThreshold int `yaml:"failureThreshold"`
}

// injector renders pods as Istio injects them with its default profile.
type injector struct {
	istioctl, dir string
	cluster       *peers.Cluster
}

func newInjector(t *testing.T) *injector {
	t.Helper()
	i := &injector{istioctl: peers.Program(t, "istioctl"), dir: t.TempDir()}
	cluster := peers.NewCluster(t)
	i.cluster = cluster
	cluster.Account(t, "prod", "web")
	kubeconfig(t, cluster, filepath.Join(i.dir, "kubeconfig"))
	manifest := i.run(t, "manifest", "generate", "--set", "profile=default", "--set", "meshConfig.trustDomain="+domain.String())
	for documents := yaml.NewDecoder(strings.NewReader(manifest)); ; {
		var d struct {
			Kind     string
			Metadata struct{ Name string }
			Data     map[string]string
		}
		err := documents.Decode(&d)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if d.Kind == "ConfigMap" {
			for key, text := range d.Data {
				write(t, filepath.Join(i.dir, d.Metadata.Name+"-"+key), text)
			}
		}
	}
	return i
}

func (i *injector) run(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, i.istioctl, args...)
	cmd.Dir = i.dir
	cmd.Env = append(os.Environ(), "HOME="+i.dir)
	var said strings.Builder
	cmd.Stderr = &said
	return string(must.Get(cmd.Output())(t, "%s", said.String()))
}

// inject renders a pod, or the template of one in a Deployment.
func (i *injector) inject(t *testing.T, name, text string) *podSpec {
	t.Helper()
	write(t, filepath.Join(i.dir, name+".yaml"), text)
	out := i.run(t, "--kubeconfig", "kubeconfig", "kube-inject", "-f", name+".yaml", "--injectConfigFile", "istio-sidecar-injector-config",
		"--valuesFile", "istio-sidecar-injector-values", "--meshConfigFile", "istio-mesh")
	type pod struct {
		Metadata struct{ Labels, Annotations map[string]string }
		Spec     struct {
			podSpec  `yaml:",inline"`
			Template *struct {
				Metadata struct{ Labels, Annotations map[string]string }
				Spec     podSpec
			}
		}
	}
	var p pod
	require.NoError(t, yaml.NewDecoder(strings.NewReader(out)).Decode(&p))
	spec, metadata := p.Spec.podSpec, p.Metadata
	if p.Spec.Template != nil {
		spec, metadata = p.Spec.Template.Spec, p.Spec.Template.Metadata
	}
	spec.labels, spec.annotations = metadata.Labels, metadata.Annotations
	return &spec
}

// patched returns a Deployment to which the API server has applied examples/deploy/istio-pod.yaml, with a list of containers in the place
// of containers.
func (i *injector) patched(t *testing.T, text, list string) string {
	t.Helper()
	patch := must.Get(os.ReadFile("../../examples/deploy/istio-pod.yaml"))(t)
	c := i.cluster
	c.Create(t, "POST /apis/apps/v1/namespaces/prod/deployments\n"+text)
	o := objectsOf(t, strings.ReplaceAll(string(patch), "\n      containers:", "\n      "+list+":"))[0]
	require.NoError(t, apply(c.Admin(), c.URL, "svidkit&force=true", o))
	var whole map[string]any
	c.Do(t, "GET", o.path(), nil, &whole)
	delete(whole, "status")
	c.Do(t, "DELETE", o.path(), nil, nil)
	return string(must.Get(yaml.Marshal(whole))(t))
}

// proxy returns the container with the proxy, and the one with the application, if there is one.
func (s *podSpec) proxy(t *testing.T) (proxy, app *container) {
	t.Helper()
	for _, list := range [][]container{s.InitContainers, s.Containers} {
		for i := range list {
			switch c := &list[i]; c.Name {
			case "istio-proxy":
				proxy = c
				assert.Equal(t, "registry.example.org/agent:1", c.Image)
			case "app":
				app = c
			default:
				assert.NotEqual(t, "registry.example.org/agent:1", c.Image, "the container %s is left to Istio's image", c.Name)
			}
		}
	}
	require.NotNil(t, proxy)
	return proxy, app
}

const podIP = "10.244.0.7"

// field is what the downward API says.
func field(path string) string {
	return map[string]string{
		"metadata.name": "web-1", "metadata.namespace": "prod", "status.podIP": podIP, "spec.serviceAccountName": "web", "status.hostIP": "10.0.0.2", "spec.nodeName": "node-a",
		"limits.cpu": "2", "limits.memory": "1073741824",
	}[path]
}

// runningPod is a pod whose proxy runs.
type runningPod struct {
	*peers.Process
	dir     string
	istiod  net.Listener
	cmd     *exec.Cmd
	environ []string
}

// start runs the proxy as the kubelet does, in a directory that is the root of its image: with the arguments, the environment, the
// volumes and the user of the container. The agent is in the image by the name of Istio's.
func (s *podSpec) start(t *testing.T, c *container, m *meshCA, program string) *runningPod {
	t.Helper()
	dir := shortDir(t)
	require.NoError(t, os.Chmod(dir, 0o755))
	envoy := must.Get(filepath.Abs(envoytest.Binary(t)))(t)
	bin := filepath.Join(dir, "usr/local/bin")
	write(t, filepath.Join(bin, "envoy"), "the real one is bound here")
	write(t, filepath.Join(bin, "pilot-agent"), "ours is bound here")
	write(t, filepath.Join(dir, "hosts"), "127.0.0.1 localhost istiod.istio-system.svc\n")
	p := &runningPod{dir: dir}
	binds := map[string]string{"/etc/hosts": filepath.Join(dir, "hosts"), filepath.Join(bin, "envoy"): envoy, filepath.Join(bin, "pilot-agent"): program}
	for _, mount := range c.VolumeMounts {
		at := filepath.Join(dir, mount.MountPath)
		require.NoError(t, os.MkdirAll(at, 0o755))
		for _, v := range s.Volumes {
			if v.Name != mount.Name {
				continue
			}
			switch {
			case v.ConfigMap != nil && v.ConfigMap.Name == "istio-ca-root-cert":
				write(t, filepath.Join(at, "root-cert.pem"), string(m.roots))
			case v.ConfigMap != nil: // is optional, and not there
			case v.Projected != nil:
				write(t, filepath.Join(at, "istio-token"), m.token)
			case v.DownwardAPI != nil:
				for _, item := range v.DownwardAPI.Items {
					var lines strings.Builder
					for key, value := range map[string]map[string]string{"metadata.labels": s.labels, "metadata.annotations": s.annotations}[item.FieldRef.FieldPath] {
						fmt.Fprintf(&lines, "%s=%q\n", key, value)
					}
					write(t, filepath.Join(at, item.Path), lines.String())
				}
			default:
				volume := filepath.Join(dir, "volumes/kubernetes.io~empty-dir", v.Name)
				require.NoError(t, os.MkdirAll(volume, 0o755))
				require.NoError(t, os.Chmod(volume, 0o777))
				binds[at] = volume
			}
		}
	}
	p.environ = []string{"PATH=" + bin + ":/usr/bin:/bin", "HOSTNAME=web-1", "KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443", "KUBERNETES_PORT=tcp://10.96.0.1:443"}
	for _, e := range c.Env {
		value := e.Value
		if from := e.ValueFrom.FieldRef.FieldPath + e.ValueFrom.ResourceFieldRef.Resource; from != "" {
			value = field(from)
			require.NotEmpty(t, value, "%s is from %s", e.Name, from)
		}
		p.environ = append(p.environ, e.Name+"="+value)
	}
	args := make([]string, len(c.Args))
	for i, arg := range c.Args {
		args[i] = strings.ReplaceAll(arg, "$(POD_NAMESPACE)", "prod")
	}
	p.cmd = p.command(c, append([]string{"pilot-agent"}, args...))
	p.Process, p.istiod = peers.StartContainer(t, filepath.Join(dir, "log"), p.cmd, podIP, 15012, binds)
	return p
}

// command returns a command in the container.
func (p *runningPod) command(c *container, args []string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(p.dir, "usr/local/bin", args[0]), args[1:]...)
	cmd.Dir, cmd.Env = p.dir, p.environ
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.SecurityContext.RunAsUser, Gid: c.SecurityContext.RunAsGroup}}
	return cmd
}

// hook runs a hook of the container.
func (p *runningPod) hook(c *container, program string, args []string) error {
	cmd := p.command(c, args)
	cmd.Path = program // which is bound to that name in the container
	out, err := p.Exec(cmd)
	if err != nil {
		err = fmt.Errorf("%q: %w: %s", args, err, out)
	}
	return err
}

// client is the kubelet, and Prometheus: it reaches the pod at its address.
func (p *runningPod) client(config *tls.Config) *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		TLSClientConfig: config, DialContext: func(_ context.Context, network, address string) (net.Conn, error) { return p.Dial(network, address) },
	}}
}

// probe is one of the kubelet's.
func (p *runningPod) probe(probe *podProbe) error {
	code, body, _, err := p.get("http://"+net.JoinHostPort(podIP, strconv.Itoa(probe.HTTPGet.Port))+probe.HTTPGet.Path, nil)
	if err == nil && (code < 200 || code > 399) {
		err = fmt.Errorf("%d %s", code, body)
	}
	return err
}

func (p *runningPod) get(url string, config *tls.Config) (code int, body string, resp *http.Response, err error) {
	client := p.client(config)
	defer client.CloseIdleConnections()
	if resp, err = client.Get(url); err != nil {
		return 0, "", nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data), resp, err
}

// TestIstioPod runs what Istio's injector makes of Deployments in which nothing is edited but the image, as examples/deploy/istio-pod.yaml
// says and the API server does: a plain one that holds its
// application until the proxy is there, a gateway, and one with a native sidecar. The agent is examples/agent, with a real Envoy,
// our CA, and a control plane that has a listener. The pod becomes ready, serves, drains at its hook, and ends.
func TestIstioPod(t *testing.T) {
	conformance.Covers(t, "IST-9.1-1", "IST-9.1-4", "IST-9.1-11", "IST-9.1-13", "IST-9.2-28", "IST-9.2-36", "IST-9.2-40", "IST-9.2-41")
	t.Parallel()
	peers.Program(t, "istioctl") // before others are started
	envoytest.Binary(t)
	image := shortDir(t)
	require.NoError(t, os.Chmod(image, 0o755)) // for the user of the container
	program := filepath.Join(image, "agent")
	build := exec.Command("go", "build", "-o", program, "./examples/agent")
	build.Dir, build.Env = filepath.Join("..", ".."), append(os.Environ(), "GOWORK=off")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	help, err := exec.Command(program, "-h").CombinedOutput()
	require.NoError(t, err, "%s", help)
	i := newInjector(t)
	for name, pod := range map[string]struct{ list, metadata, app, node string }{
		"sidecar": {"containers", `
      labels: {app: web}
      annotations:
        prometheus.io/scrape: "true"
        prometheus.io/port: "8080"
        proxy.istio.io/config: |
          holdApplicationUntilProxyStarts: true
          terminationDrainDuration: 3s
`, `
      - name: app
        image: registry.example.org/app
        ports: [{containerPort: 8080}]
        readinessProbe: {httpGet: {path: /app-is-ready, port: 8080}}
        livenessProbe: {tcpSocket: {port: 8080}}
`, "sidecar~" + podIP + "~web-1.prod~prod.svc.cluster.local"},
		"gateway": {"containers", `
      labels: {app: web}
      annotations: {inject.istio.io/templates: gateway}
`, `
      - {name: istio-proxy, image: auto}
`, "router~" + podIP + "~web-1.prod~prod.svc.cluster.local"},
		"native sidecar": {"initContainers", `
      labels: {app: web}
      annotations: {sidecar.istio.io/nativeSidecar: "true"}
`, `
      - name: app
        image: registry.example.org/app
`, "sidecar~" + podIP + "~web-1.prod~prod.svc.cluster.local"},
	} {
		t.Run(name, func(t *testing.T) {
			spec, m := i.inject(t, strings.Fields(name)[0], i.patched(t, "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web, namespace: prod}\n"+
				"spec:\n  selector: {matchLabels: {app: web}}\n  template:\n    metadata:"+pod.metadata+"    spec:\n      serviceAccountName: web\n      containers:"+pod.app, pod.list)), newMeshCA(t)
			proxy, app := spec.proxy(t)
			p := spec.start(t, proxy, m, program)
			started := make(chan error, 1)
			if command := proxy.Lifecycle.PostStart.Exec.Command; command != nil {
				go func() { started <- p.hook(proxy, program, command) }()
			}

			time.Sleep(2 * time.Second)
			require.Error(t, p.probe(proxy.ReadinessProbe), "the CA and the control plane do not answer yet")
			var nodes sync.Map
			m.serve(t, p.istiod, controlPlane(t, &nodes))
			for _, probe := range []*podProbe{proxy.StartupProbe, proxy.ReadinessProbe} {
				if probe != nil {
					p.Ready(t, func() error { return p.probe(probe) })
				}
			}
			require.NotNil(t, proxy.ReadinessProbe)
			asked := 0
			nodes.Range(func(id, _ any) bool {
				asked++
				return assert.Equal(t, pod.node, id)
			})
			assert.Equal(t, 1, asked)
			if proxy.Lifecycle.PostStart.Exec.Command != nil {
				assert.Equal(t, "sidecar", name)
				require.NoError(t, <-started)
			}

			// It serves, with its identity.
			probe := m.svid(t, spiffe.MustParseID("spiffe://example.org/ns/prod/sa/probe"))
			hello := func(certificates ...tls.Certificate) (*http.Response, error) {
				code, body, resp, err := p.get("https://127.0.0.1:15006", &tls.Config{
					MinVersion: tls.VersionTLS12, Certificates: certificates, InsecureSkipVerify: true, // there is no DNS name
					VerifyConnection: func(c tls.ConnectionState) error {
						if _, err := c.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: m.Bundle().CertPool()}); err != nil {
							return err
						}
						id, err := spiffe.IDFromCertificate(c.PeerCertificates[0])
						if err == nil && id != webID {
							err = fmt.Errorf("it is %v", id)
						}
						return err
					},
				})
				if err == nil && (code != http.StatusOK || body != "hello") {
					err = fmt.Errorf("it says %d %q", code, body)
				}
				return resp, err
			}
			assert.False(t, must.Get(hello(*probe.TLSCertificate()))(t).Close)
			_, err := hello()
			require.Error(t, err, "a client without a certificate")

			// Its metrics are those of the Envoy, the agent and the application.
			for port, want := range map[string][]string{"15090": {"envoy_server_live"}, "15020": {"envoy_server_live", "istio_agent_cert_expiry_seconds"}} {
				code, body, _, err := p.get("http://"+net.JoinHostPort(podIP, port)+"/stats/prometheus", nil)
				require.NoError(t, err)
				assert.Equal(t, http.StatusOK, code)
				for _, metric := range want {
					assert.Contains(t, body, "\n"+metric, port)
				}
			}
			if name == "sidecar" { // whose application is probed and asked for its metrics
				require.Error(t, p.probe(app.ReadinessProbe))
				require.Error(t, p.probe(app.LivenessProbe))
				l := must.Get(p.Listen("tcp", ":8080"))(t)
				var ready sync.Map
				server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if _, ok := ready.Load(r.URL.Path); !ok {
						w.WriteHeader(http.StatusServiceUnavailable)
					}
					_, _ = io.WriteString(w, "app_requests 7\n")
				})}
				background(t, func(ctx context.Context) {
					context.AfterFunc(ctx, func() { _ = server.Close() })
					_ = server.Serve(l)
				})
				require.NoError(t, p.probe(app.LivenessProbe))
				require.Error(t, p.probe(app.ReadinessProbe))
				ready.Store("/app-is-ready", true)
				ready.Store("/metrics", true)
				require.NoError(t, p.probe(app.ReadinessProbe))
				_, body, _, err := p.get("http://"+podIP+":15020/stats/prometheus", nil)
				require.NoError(t, err)
				assert.Contains(t, body, "\napp_requests 7\n")
			}
			log := must.Get(os.ReadFile(filepath.Join(p.dir, "log")))(t)
			for scan := bufio.NewScanner(strings.NewReader(string(log))); scan.Scan(); {
				assert.NotRegexp(t, `level=(WARN|ERROR)`, scan.Text(), "the start is healthy")
			}

			// Nothing is silently different: each variable is in the help or of Go, and what has no effect is named once.
			for _, e := range proxy.Env {
				if e.Name != "GOMEMLIMIT" && e.Name != "GOMAXPROCS" && !strings.HasPrefix(e.Name, "ISTIO_META_") {
					assert.Contains(t, string(help), "\n  "+e.Name+"  (")
				}
			}
			without := []string{"environment variable HOST_IP is not used"}
			if name == "sidecar" {
				without = append(without, "the field \\\"holdApplicationUntilProxyStarts\\\" is not used")
			}
			for _, text := range without {
				assert.Equal(t, 1, strings.Count(string(log), text), text)
			}

			// It drains.
			connection := must.Get(p.Dial("tcp", podIP+":15090"))(t)
			defer connection.Close()
			begun := time.Now()
			if command := proxy.Lifecycle.PreStop.Exec.Command; command != nil {
				assert.Equal(t, "native sidecar", name)
				require.NoError(t, p.hook(proxy, program, command))
			} else {
				require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
			}
			var drains *http.Response
			require.Eventually(t, func() bool {
				drains, err = hello(*probe.TLSCertificate())
				return err == nil && drains.Close
			}, passing, often, "the Envoy goes on serving, and sends clients elsewhere")
			require.Error(t, p.probe(proxy.ReadinessProbe), "it is not ready")
			if proxy.Lifecycle.PreStop.Exec.Command != nil {
				time.Sleep(time.Until(begun.Add(6 * time.Second)))
				must.Get(hello(*probe.TLSCertificate()))(t, "it serves until it is told to end")
				begun = time.Now()
				require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
			}
			select {
			case <-p.Ended():
			case <-time.After(30 * time.Second): // the grace of a pod
				require.Fail(t, "it does not end")
			}
			assert.Zero(t, p.cmd.ProcessState.ExitCode())
			switch took := time.Since(begun); name {
			case "sidecar":
				assert.InDelta(t, 3, took.Seconds(), 2, "as terminationDrainDuration has it")
			case "gateway":
				assert.InDelta(t, 5, took.Seconds(), 2)
			default:
				assert.Less(t, took, 2*time.Second, "it has drained before")
			}
			require.NoError(t, connection.SetReadDeadline(time.Now().Add(5*time.Second)))
			require.ErrorIs(t, must.Err(connection.Read(make([]byte, 1))), io.EOF, "the Envoy has ended, too")
		})
	}
}

// TestPod runs examples/ca as in a pod: it finds the API server and its account there, keeps its CA in a Secret, its roots
// in a ConfigMap of each namespace, and reviews tokens, with the rights that the documentation names.
func TestPod(t *testing.T) {
	t.Parallel()
	c := peers.NewCluster(t)
	c.Account(t, "istio-system", "ca")
	grant(t, c, "istio-system", "ca", "Role", documented(t, "pki/ca/kubesecret"))
	grant(t, c, "istio-system", "ca", "ClusterRole", documented(t, "authn/kube")+strings.TrimPrefix(documented(t, "examples/ca/caconfig"), "rules:\n"))
	c.Account(t, "prod", "web")
	c.Pod(t, "prod", "web", "web-1", "node-a")

	dir := t.TempDir()
	program, account, state := filepath.Join(dir, "ca"), filepath.Join(dir, "account"), filepath.Join(dir, "state")
	out, err := exec.Command("go", "build", "-o", program, "github.com/svidkit/svidkit/examples/ca").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Mkdir(account, 0o755))
	write := func(name string, data []byte) {
		require.NoError(t, os.WriteFile(filepath.Join(account, name), data, 0o600))
	}
	api := must.Get(os.ReadFile(c.RootsFile()))(t)
	write("ca.crt", api)
	write("namespace", []byte("istio-system"))
	write("token", []byte(c.Token(t, "istio-system", "ca", "", peers.Issuer)))

	port := peers.FreePorts(t, 1)[0]
	cmd := exec.Command(program, "-kubernetes", "-trust-domain", domain.String(), "-state-dir", state,
		"-istio-addr", fmt.Sprint("127.0.0.1:", port), "-linkerd-addr=", "-bundle-addr=", "-admin-addr=")
	cmd.Env = append(os.Environ(), "PILOT_CA_CERT_CONFIGMAP=istio-ca-root-cert", "CA_CREATE=true")
	p := peers.StartInPod(t, filepath.Join(dir, "log"), cmd, c, account)
	roots := filepath.Join(state, "root-cert.pem")
	token := c.Token(t, "prod", "web", "web-1", "istio-ca")
	client := must.Get(istioca.New(istioca.Options{ClusterID: "Kubernetes", Endpoint: caclient.Endpoint{
		URL: fmt.Sprint("https://localhost:", port), TrustDomain: domain, RootsFile: roots,
		Token: func(context.Context) (string, error) { return token, nil },
	}}))(t)
	p.Ready(t, func() error { _, err := checked(t, client, webID); return err })

	chain := must.Get(checked(t, client, webID))(t)
	secret := must.Get(spiffe.ParseBundlePEM(domain, secretOf(t, c, "istio-system")["root-cert.pem"]))(t)
	verifies(t, secret, chain)
	pem := must.Get(os.ReadFile(roots))(t)
	require.Equal(t, serials(pem), serials(pki.MarshalCertificatesPEM(bundleCerts(secret)...)))

	mounted := func(namespace string) {
		t.Helper()
		require.Eventually(t, func() bool {
			code, answer, err := c.Send("GET", "/api/v1/namespaces/"+namespace+"/configmaps/istio-ca-root-cert", nil)
			var o struct{ Data map[string]string }
			return err == nil && code == http.StatusOK && json.Unmarshal(answer, &o) == nil && o.Data["root-cert.pem"] == string(pem)
		}, passing, often, "the roots are in namespace %s", namespace)
	}
	mounted("prod")
	mounted("default")
	c.Account(t, "later", "web")
	mounted("later")
	c.Do(t, "DELETE", "/api/v1/namespaces/prod/configmaps/istio-ca-root-cert", nil, nil)
	mounted("prod")
	other := map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "istio-ca-root-cert"}}
	other["data"] = map[string]string{"root-cert.pem": "of another", "other": "stays"}
	c.Do(t, "PUT", "/api/v1/namespaces/later/configmaps/istio-ca-root-cert", other, nil)
	mounted("later")
	_, changed := must.Get2(c.Send("GET", "/api/v1/namespaces/later/configmaps/istio-ca-root-cert", nil))(t)
	require.Contains(t, string(changed), `"other":"stays"`)
	require.Equal(t, http.StatusNotFound, c.Status(t, "GET", "/api/v1/namespaces/kube-system/configmaps/istio-ca-root-cert"))

	write("token", []byte("garbage"))
	require.ErrorIs(t, must.Err(checked(t, client, webID)), caclient.ErrUnavailable, "the CA reads its token anew")
	write("token", []byte(c.Token(t, "istio-system", "ca", "", peers.Issuer)))
	require.Eventually(t, func() bool { _, err := checked(t, client, webID); return err == nil }, passing, time.Second)
}
