package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/examples/athenz-agent/nodeagent"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// serve runs the agent until ctx is done.
func serve(ctx context.Context, s program.Settings, out io.Writer, log *slog.Logger) error {
	if err := s.Need("PROVIDER_SERVICE", "ZTS_ENDPOINT", "SERVER_CA_CERT", "SERVICE_CA_CERT", "SIGNING_ENDPOINT",
		"CERT_FILE", "KEY_FILE"); err != nil {
		return program.UsageError{Err: err}
	}
	readable := func() error {
		_, err := s.Pair()
		return errors.Join(err, s.Roots("SERVER_CA_CERT", "SERVICE_CA_CERT"))
	}
	if err := readable(); err != nil {
		return err
	}
	agent, err := newAgent(s, log)
	if err != nil {
		return err
	}
	counted := program.Count("agent", agent)
	status, err := health.New(health.Part{Name: "agent", Source: counted, Check: readable})
	if err != nil {
		return err
	}
	socket := &unixsocket.Server{Path: s.Text("AGENT_SOCKET"), DirMode: 0o755, SocketMode: 0o666, Handler: counted,
		Logger: log}
	l, err := s.Listen("HEALTH_ADDR", out)
	if err != nil {
		return err
	}
	parts := []func(context.Context) error{socket.Run}
	if l != nil {
		defer l.Close() // in case it is never served
		parts = append(parts, func(ctx context.Context) error {
			return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: status, Plaintext: true, Logger: log})
		})
	}
	if err := socket.Listen(); err != nil {
		return s.Reject("AGENT_SOCKET", err)
	}
	return program.Together(ctx, parts...)
}

func newAgent(s program.Settings, log *slog.Logger) (http.Handler, error) {
	td, named := s.TrustDomain()
	node, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: s.Text("SERVICE_CA_CERT"),
		CertificateFile: s.Text("CERT_FILE"), KeyFile: s.Text("KEY_FILE"), Logger: log})
	if err != nil {
		return nil, err
	}
	signing, err := athenz.NewSigningClient(s.Text("SIGNING_ENDPOINT"), node)
	if err != nil {
		return nil, s.Reject("SIGNING_ENDPOINT", err)
	}
	kubelet, err := athenz.NewKubelet(s.Text("KUBELET_ENDPOINT"), nil)
	if err != nil {
		return nil, s.Reject("KUBELET_ENDPOINT", err)
	}
	provider, err := athenzname.ParseService(s.Text("PROVIDER_SERVICE"))
	if err != nil {
		return nil, s.Reject("PROVIDER_SERVICE", err)
	}
	cfg := nodeagent.Config{
		Volumes: nodeagent.Volumes(s.Text("VOLUMES_DIR")), Pods: kubelet, Signer: signing, Provider: provider,
		Suffix: s.Text("DNS_SUFFIX"),
		ZTS: ztsclient.Options{
			Endpoint: caclient.Endpoint{URL: s.Text("ZTS_ENDPOINT"), TrustDomain: td,
				RootsFile: s.Text("SERVICE_CA_CERT")},
			ServerRootsFile: s.Text("SERVER_CA_CERT"),
		},
		Mapping: s.Mapping(), Logger: log,
	}
	if named {
		cfg.SPIFFE = func(service athenzname.Service, pod *athenz.Pod) (spiffe.ID, error) {
			return service.IDIn(td, pod.Namespace)
		}
	}
	return nodeagent.New(cfg)
}
