package main

import (
	"context"
	"strings"
	"sync/atomic"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

// proxy takes the frontend's secrets from the socket, as Envoy would.
type proxy struct {
	n       *narrator
	socket  string
	updates atomic.Int64
}

func (p *proxy) run(ctx context.Context) error {
	hc := sds.UnixClient(p.socket)
	defer hc.CloseIdleConnections()
	for secret, err := range sds.NewClient(hc, "http://localhost").Watch(ctx, "default", "ROOTCA") {
		if err != nil {
			p.n.say(event{Who: "sds", What: "stream broken, tried again", Detail: err.Error()})
			continue
		}
		p.updates.Add(1)
		p.n.say(event{Who: "sds", What: "served " + secret.Name(), Serial: serials(secret)})
	}
	return nil
}

// serials lists the certificates in a secret: the leaf, or the roots.
func serials(s *pki.Secret) string {
	pem, _, pair := s.KeyPair()
	if !pair {
		pem, _ = s.Roots()
	}
	certs, err := pki.ParseCertificatesPEM(pem)
	if err != nil {
		return err.Error()
	}
	var list []string
	for _, c := range certs {
		list = append(list, short(c))
	}
	return strings.Join(list, " and ")
}

// bootstrap is a configuration for a real Envoy: a listener that asks for client certificates, with
// everything it needs for that from the socket.
func bootstrap(socket string) string {
	return strings.ReplaceAll(envoyBootstrap, "SOCKET", socket)
}

const envoyBootstrap = `
An Envoy takes the frontend's certificates from here with this bootstrap (envoy -c envoy.yaml):

node: {id: frontend, cluster: quickstart}
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
static_resources:
  clusters:
  - name: sds
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: sds
      endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: "SOCKET"}}}}]}]
  listeners:
  - name: mtls
    address: {socket_address: {address: 127.0.0.1, port_value: 8443}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          common_tls_context:
            tls_certificate_sds_secret_configs:
            - name: default
              sds_config: &sds
                resource_api_version: V3
                api_config_source:
                  api_type: GRPC
                  transport_api_version: V3
                  grpc_services: [{envoy_grpc: {cluster_name: sds}}]
            validation_context_sds_secret_config: {name: ROOTCA, sds_config: *sds}
      filters:
      - name: envoy.filters.network.direct_response
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.direct_response.v3.Config
          response: {inline_string: "hello from Envoy\n"}

Then look at http://127.0.0.1:9901/certs: the serial numbers follow the ones above.

`
