// Command ca is Istio's certificate authority without the rest of istiod: its CA in a Secret of the cluster, and its
// gRPC server with its authenticators by client certificate and by token review, and its node authorizer if
// CA_TRUSTED_NODE_ACCOUNTS is set. When it serves, it writes its address as one line to standard output.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	meshconfig "istio.io/api/mesh/v1alpha1"
	"istio.io/istio/pilot/pkg/features"
	"istio.io/istio/pkg/kube"
	"istio.io/istio/pkg/kube/multicluster"
	"istio.io/istio/pkg/security"
	"istio.io/istio/security/pkg/pki/ca"
	caserver "istio.io/istio/security/pkg/server/ca"
	"istio.io/istio/security/pkg/server/ca/authenticate"
	"istio.io/istio/security/pkg/server/ca/authenticate/kubeauth"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

type options struct {
	api         rest.Config
	namespace   string
	trustDomain string
}

func main() {
	var o options
	flag.StringVar(&o.api.Host, "api", "", "URL of the API server")
	flag.StringVar(&o.api.CAFile, "api-roots", "", "file with the roots of the API server")
	flag.StringVar(&o.api.BearerTokenFile, "api-token", "", "file with the token for the API server")
	flag.StringVar(&o.namespace, "namespace", "istio-system", "namespace of the Secret")
	flag.StringVar(&o.trustDomain, "trust-domain", "cluster.local", "trust domain")
	flag.Parse()
	if err := o.run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// mesh is the configuration of the mesh, which never changes.
type mesh struct{ *meshconfig.MeshConfig }

func (m mesh) Mesh() *meshconfig.MeshConfig { return m.MeshConfig }

func (o *options) run() error {
	o.api.QPS, o.api.Burst = 80, 160 // as istiod has them; client-go's default is 5
	client, err := kubernetes.NewForConfig(&o.api)
	if err != nil {
		return err
	}
	opts, err := ca.NewSelfSignedIstioCAOptions(context.Background(), 20, 10*365*24*time.Hour, time.Hour, 24*time.Hour, 90*24*time.Hour,
		o.trustDomain, false, true, o.namespace, client.CoreV1(), "", true, 2048)
	if err != nil {
		return err
	}
	authority, err := ca.NewIstioCA(opts)
	if err != nil {
		return err
	}
	authority.Run(make(chan struct{}))

	cert, key, err := authority.GenKeyCert([]string{"127.0.0.1"}, time.Hour, false)
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return err
	}
	callers := x509.NewCertPool()
	if !callers.AppendCertsFromPEM(authority.GetCAKeyCertBundle().GetRootCertPem()) {
		return errors.New("the CA has no root")
	}
	clusters := multicluster.NewFakeController()
	server, err := caserver.New(authority, 24*time.Hour, []security.Authenticator{
		&authenticate.ClientCertAuthenticator{},
		kubeauth.NewKubeJWTAuthenticator(mesh{&meshconfig.MeshConfig{TrustDomain: o.trustDomain}}, client, "Kubernetes", nil, nil),
	}, clusters)
	if err != nil {
		return err
	}
	if len(features.CATrustedNodeAccounts) > 0 {
		pods, err := kube.NewClient(clientcmd.NewDefaultClientConfig(api.Config{
			Clusters:       map[string]*api.Cluster{"": {Server: o.api.Host, CertificateAuthority: o.api.CAFile}},
			AuthInfos:      map[string]*api.AuthInfo{"": {TokenFile: o.api.BearerTokenFile}},
			Contexts:       map[string]*api.Context{"": {}},
			CurrentContext: "",
		}, nil), "Kubernetes")
		if err != nil {
			return err
		}
		stop := make(chan struct{})
		clusters.Add("Kubernetes", pods, stop)
		if !pods.RunAndWait(stop) {
			return errors.New("the pods are not known")
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: callers,
	})))
	server.Register(s)
	fmt.Println(l.Addr())
	return s.Serve(l)
}
