package athenzprog

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/caclient"
	zts "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
)

// Agent is the identity agent of a node.
func Agent() Program {
	return Program{Name: "athenz-agent", run: runAgent, Table: settings.Table{Variables: []settings.Variable{
		provider, suffix, admin, namespaces,
		{Name: "ZTS_ENDPOINT", Check: isHTTPS, Doc: "URL of ZTS, without a path; required", Origin: cluster},
		ztsRoots, roots, spiffeTD,
		{Name: "SIGNING_ENDPOINT", Check: isHTTPS, Doc: "URL of the signing service, without a path; required", Origin: here},
		{Name: "CERT_FILE", Form: settings.Path, Doc: "certificate of the node with its intermediates, in PEM; required", Origin: here},
		{Name: "KEY_FILE", Form: settings.Path, Doc: "key of the node, in PEM; required", Origin: here},
		{Name: "KUBELET_ENDPOINT", Default: "https://127.0.0.1:10250", Check: isAPI, Doc: "URL of the kubelet's API", Origin: here},
		{Name: "VOLUMES_DIR", Form: settings.Path, Default: "/var/athenz/volumes", Doc: "folder with a folder for each volume", Origin: here},
		{Name: "AGENT_SOCKET", Form: settings.Path, Default: "/var/athenz/agent/agent.sock", Check: isAbsolute, Doc: "Unix socket that is mounted into pods", Origin: here},
		healthAddr, logLevel,
	}}}
}

func isAbsolute(s string) error {
	if !filepath.IsAbs(s) {
		return errors.New("set it to a path that begins with a slash")
	}
	return nil
}

func runAgent(ctx context.Context, v *settings.Values, o Options) error {
	if err := need(v, "PROVIDER_SERVICE", "ZTS_ENDPOINT", "SERVER_CA_CERT", "SERVICE_CA_CERT", "SIGNING_ENDPOINT", "CERT_FILE", "KEY_FILE"); err != nil {
		return err
	}
	if err := readable(v, "CERT_FILE", "KEY_FILE", "SERVER_CA_CERT", "SERVICE_CA_CERT"); err != nil {
		return err
	}
	td, named := trustDomain(v)
	own, err := caclient.NewHTTPClient(caclient.TLSOptions{
		RootsFile: v.Text("SERVICE_CA_CERT"), CertificateFile: v.Text("CERT_FILE"), KeyFile: v.Text("KEY_FILE"), Logger: o.Logger,
	})
	if err != nil {
		return err
	}
	signing, err := athenz.NewSigningClient(v.Text("SIGNING_ENDPOINT"), own)
	if err != nil {
		return v.Reject("SIGNING_ENDPOINT", err)
	}
	kubelet, err := athenz.NewKubelet(v.Text("KUBELET_ENDPOINT"), o.Kubernetes)
	if err != nil {
		return v.Reject("KUBELET_ENDPOINT", err)
	}
	service, err := athenzname.ParseService(v.Text("PROVIDER_SERVICE"))
	if err != nil {
		return v.Reject("PROVIDER_SERVICE", err)
	}
	cfg := athenz.AgentConfig{
		Volumes: athenz.NewVolumes(v.Text("VOLUMES_DIR")), Pods: kubelet, Signer: signing, Provider: service,
		Suffix: v.Text("DNS_SUFFIX"), TrustDomain: td, Mapping: mapping(v), Logger: o.Logger,
		CA: func(r athenz.AgentRequest) (athenz.InstanceCA, error) {
			ca, err := zts.New(zts.Options{
				Endpoint:        caclient.Endpoint{URL: v.Text("ZTS_ENDPOINT"), TrustDomain: td, RootsFile: v.Text("SERVICE_CA_CERT"), Token: r.Token, Logger: o.Logger},
				ServerRootsFile: v.Text("SERVER_CA_CERT"), Instance: r.Instance, Certificate: r.Certificate, WithServiceToken: true,
			})
			if err != nil {
				return nil, err
			}
			return ca, nil
		},
	}
	if named {
		cfg.SPIFFE = func(s athenzname.Service, pod *athenz.Pod) (spiffe.ID, error) { return s.IDIn(td, pod.Namespace) }
	}
	agent, err := athenz.NewAgent(cfg)
	if err != nil {
		return err
	}
	counted := o.count("agent", agent)
	g := newGroup(ctx, v, o)
	g.health(v, health.Part{Name: "agent", Source: counted, Check: func() error { return readable(v, "CERT_FILE", "KEY_FILE", "SERVER_CA_CERT", "SERVICE_CA_CERT") }})
	server := &unixsocket.Server{Path: v.Text("AGENT_SOCKET"), DirMode: 0o755, SocketMode: 0o666, Handler: counted, Logger: o.Logger}
	if g.failed == nil {
		if err := server.Listen(); err != nil {
			g.failed = v.Reject("AGENT_SOCKET", err)
		} else {
			g.part(server.Run)
		}
	}
	return g.wait()
}
