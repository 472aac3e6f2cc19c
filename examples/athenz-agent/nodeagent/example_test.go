package nodeagent_test

import (
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/examples/athenz-agent/nodeagent"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// The agent of a node. The client has the certificate of the node.
func ExampleNew() {
	client := new(http.Client) // of caclient.NewHTTPClient, for example
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
	agent, err := nodeagent.New(nodeagent.Config{
		Volumes: "/var/athenz/volumes", Pods: kubelet, Signer: signing,
		ZTS: ztsclient.Options{
			Endpoint:        caclient.Endpoint{URL: "https://zts.athenz.svc:4443", TrustDomain: spiffe.MustParseTrustDomain("athenz.example"), RootsFile: "/var/cluster/athenz-service.pem"},
			ServerRootsFile: "/var/cluster/athenz.pem",
		},
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, Suffix: "svc.cluster.local",
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
