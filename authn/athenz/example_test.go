package athenz_test

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/caclient"
	zts "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe"
)

// The agent of a node. The client has the certificate of the node.
func ExampleNewAgent() {
	client := new(http.Client) // of caclient.NewHTTPClient, for example
	td := spiffe.MustParseTrustDomain("athenz.example")
	signing, err := athenz.NewSigningClient("https://jwt-service.k8s-admin.svc:4443", client)
	if err != nil {
		fmt.Println(err)
		return
	}
	kubelet, err := athenz.NewKubelet("http://127.0.0.1:10255", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	agent, err := athenz.NewAgent(athenz.AgentConfig{
		Volumes: athenz.NewVolumes("/var/athenz/volumes"), Pods: kubelet, Signer: signing,
		CA: func(r athenz.AgentRequest) (athenz.InstanceCA, error) {
			ca, err := zts.New(zts.Options{
				Endpoint: caclient.Endpoint{URL: "https://zts.athenz.svc:4443", TrustDomain: td, RootsFile: "/var/cluster/athenz-service.pem", Token: r.Token},
				Instance: r.Instance, Certificate: r.Certificate, WithServiceToken: true, ServerRootsFile: "/var/cluster/athenz.pem",
			})
			if err != nil {
				return nil, err
			}
			return ca, nil
		},
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, Suffix: "svc.cluster.local", TrustDomain: td,
		Mapping: athenzname.Mapping{AdminDomain: "k8s.admin"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	server := &unixsocket.Server{Path: "/var/athenz/agent/agent.sock", DirMode: 0o755, SocketMode: 0o666, Handler: agent}
	fmt.Println(server.Path)
	// Output: /var/athenz/agent/agent.sock
}

// A sidecar that keeps the identity of its pod in memory.
func ExampleStartSidecar() {
	dir, err := os.MkdirTemp("", "sidecar")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	client, err := athenz.NewAgentClient("/identity/connect/agent.sock", filepath.Join(dir, "id")) // /identity/id in a pod
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // there is no agent here, to wait for
	sidecar, err := athenz.StartSidecar(ctx, athenz.SidecarConfig{Agent: client})
	if err != nil {
		fmt.Println("no identity")
		return
	}
	defer sidecar.Close()
	// Output: no identity
}

// The subject of an identity document says what the provider compares with the live pod.
func ExamplePodSubject() {
	s := athenz.PodSubject{
		Namespace: "media-sports", Pod: "web-0", Service: athenzname.Service{Domain: "media.sports", Name: "frontend"}, IP: netip.MustParseAddr("fd00::1"),
	}
	fmt.Println(s)
	// Output: pod:media-sports/web-0?d=media.sports&n=frontend&i=fd00%3A%3A1
}
