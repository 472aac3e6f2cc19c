package istioagent

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/private"
)

// object and list are JSON.
type (
	object = map[string]any
	list   = []any
)

// node is how an Envoy, or a program with gRPC, introduces itself to the control plane.
func (c *Config) node() object {
	metadata := object{
		"NAMESPACE": c.namespace, "SERVICE_ACCOUNT": c.serviceAccount, "CLUSTER_ID": c.clusterID, "NAME": c.pod, "INSTANCE_IPS": c.address,
		"ENVOY_STATUS_PORT": c.Envoy.readyPort, "ENVOY_PROMETHEUS_PORT": c.Envoy.metricsPort,
		"PROXY_CONFIG": c.Envoy.proxyConfig, "LABELS": c.podInfo("labels"), "ANNOTATIONS": c.podInfo("annotations"),
	}
	for name, value := range c.metadata {
		metadata[name] = value
	}
	namespace := cmp.Or(c.namespace, "default")
	return object{
		"id": fmt.Sprintf("%s~%s~%s.%s~%s", cmp.Or(c.Envoy.Role, "sidecar"), cmp.Or(c.address, "127.0.0.1"), cmp.Or(c.pod, "pod"), namespace,
			cmp.Or(c.Envoy.Domain, namespace+".svc.cluster.local")),
		"cluster": cmp.Or(c.Envoy.cluster, cmp.Or(c.serviceAccount, "proxy")+"."+namespace), "metadata": metadata,
	}
}

// writeGRPC writes the bootstrap for programs with gRPC and without a proxy.
func (c *Config) writeGRPC() error {
	bootstrap := object{
		"xds_servers": list{object{
			"server_uri": "unix://" + c.xdsSocket(), "channel_creds": list{object{"type": "insecure"}}, "server_features": list{"xds_v3"},
		}},
		"node":                                   c.node(),
		"server_listener_resource_name_template": "xds.istio.io/grpc/lds/inbound/%s",
	}
	if dir := c.path(c.outputCerts); c.outputCerts != "" {
		bootstrap["certificate_providers"] = object{"default": object{"plugin_name": "file_watcher", "config": object{
			"certificate_file": filepath.Join(dir, certName), "private_key_file": filepath.Join(dir, keyName),
			"ca_certificate_file": filepath.Join(dir, rootsName), "refresh_interval": "900s",
		}}}
	}
	data, err := json.MarshalIndent(bootstrap, "", "  ")
	if err != nil {
		return err
	}
	name := c.path(c.grpcBootstrap)
	// Not into a folder of another user, who could have the programs take their identities from elsewhere. One that
	// others can write to, such as an emptyDir, is what the pod's operator has chosen.
	dir, err := private.MakeDir(filepath.Dir(name), private.Options{Mode: 0o700, Warn: func(err error) {
		c.Logger.Info("istioagent: other users can replace the bootstrap for gRPC", slog.Any("err", err))
	}})
	if err != nil {
		return err
	}
	defer dir.Close()
	return fileset.Replace(dir, filepath.Base(name), fileset.File{Data: data, Mode: 0o644})
}

// Bootstrap writes a configuration for an Envoy, in JSON, which Envoy takes as --config-path FILE.json. It has the
// cluster sds-grpc at the workload socket, by whose name control planes refer to it. With Config.XDS, listeners and
// clusters come from the control plane by ADS, through the socket XDS. Without, there is a listener at
// 127.0.0.1:15443 that requires client certificates of the trust domain, takes its secrets by SDS in its incremental
// form, with which an Envoy starts although a secret is missing, and says hello. Config.Envoy has the ports of the
// admin interface, which is on loopback, and of two listeners that are there as in Istio's bootstrap: /healthz/ready
// is that of the cluster agent, and /stats/prometheus that of the admin interface. In a pod, and with Envoy.Started,
// these two are at all addresses.
func (a *Agent) Bootstrap(w io.Writer) error {
	c := &a.cfg
	address := func(port int) object {
		return object{"socket_address": object{"address": "127.0.0.1", "port_value": port}}
	}
	at := func(name string, address object) object {
		return object{
			"name": name, "type": "STATIC", "connect_timeout": "1s",
			"load_assignment": object{"cluster_name": name, "endpoints": list{object{"lb_endpoints": list{
				object{"endpoint": object{"address": address}},
			}}}},
		}
	}
	cluster := func(name, socket string) object {
		c := at(name, object{"pipe": object{"path": socket}})
		c["typed_extension_protocol_options"] = object{"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": object{
			"@type":                "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
			"explicit_http_config": object{"http2_protocol_options": object{}},
		}}
		return c
	}
	api := func(kind, cluster string) object {
		return object{
			"api_type": kind, "transport_api_version": "V3", "set_node_on_first_message_only": true,
			"grpc_services": list{object{"envoy_grpc": object{"cluster_name": cluster}}},
		}
	}
	clusters, listeners := list{cluster("sds-grpc", a.cfg.Socket)}, list{}
	everywhere := c.inPod || c.Envoy.Started
	// forward adds a listener that forwards requests for one path to a port of loopback.
	forward := func(port int, path, name string, to int) {
		if port == 0 || to == 0 {
			return
		}
		on := object{"address": "127.0.0.1", "port_value": port}
		if strings.Contains(c.address, ":") && everywhere {
			on["address"], on["ipv4_compat"] = "::", true
		} else if everywhere {
			on["address"] = "0.0.0.0"
		}
		clusters = append(clusters, at(name, address(to)))
		listeners = append(listeners, object{
			"name": fmt.Sprint(name, "_", port), "address": object{"socket_address": on}, "ignore_global_conn_limit": true,
			"filter_chains": list{object{"filters": list{object{
				"name": "envoy.filters.network.http_connection_manager", "typed_config": object{
					"@type":       "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
					"stat_prefix": name, "route_config": object{"virtual_hosts": list{object{"name": name, "domains": list{"*"}, "routes": list{
						object{"match": object{"path": path}, "route": object{"cluster": name}},
					}}}},
					"http_filters": list{object{"name": "envoy.filters.http.router", "typed_config": object{
						"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
					}}},
				},
			}}}},
		})
	}
	forward(c.Envoy.readyPort, "/healthz/ready", "agent", c.Envoy.StatusPort)
	forward(c.Envoy.metricsPort, "/stats/prometheus", "prometheus_stats", c.Envoy.AdminPort)
	bootstrap := object{"node": c.node(), "admin": object{"address": address(c.Envoy.AdminPort)}}
	if c.Envoy.XDS {
		clusters = append(clusters, cluster("xds-grpc", c.xdsSocket()))
		kind := map[bool]string{false: "GRPC", true: "DELTA_GRPC"}[c.Envoy.deltaADS]
		ads := object{"ads": object{}, "resource_api_version": "V3", "initial_fetch_timeout": "0s"} // it is ready with the control plane's answer
		bootstrap["dynamic_resources"] = object{"ads_config": api(kind, "xds-grpc"), "lds_config": ads, "cds_config": ads}
	} else {
		secret := func(name string) object {
			return object{"name": name, "sds_config": object{"resource_api_version": "V3", "api_config_source": api("DELTA_GRPC", "sds-grpc")}}
		}
		common := object{
			"tls_certificate_sds_secret_configs":   list{secret("default")},
			"validation_context_sds_secret_config": secret("ROOTCA"),
		}
		if c.postQuantum {
			common["tls_params"] = object{
				"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3", "ecdh_curves": list{"X25519MLKEM768"},
			}
		}
		listeners = append(listeners, object{
			"name": "mtls", "address": address(15443), "filter_chains": list{object{
				"transport_socket": object{"name": "envoy.transport_sockets.tls", "typed_config": object{
					"@type":                      "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
					"require_client_certificate": true,
					"common_tls_context":         common,
				}},
				"filters": list{object{"name": "envoy.filters.network.direct_response", "typed_config": object{
					"@type":    "type.googleapis.com/envoy.extensions.filters.network.direct_response.v3.Config",
					"response": object{"inline_string": "hello from Envoy\n"},
				}}},
			}},
		})
	}
	bootstrap["static_resources"] = object{"clusters": clusters, "listeners": listeners}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(bootstrap)
}
