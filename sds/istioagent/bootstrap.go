package istioagent

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/private"
)

// object and list are JSON values.
type (
	object = map[string]any
	list   = []any
)

// node returns the node by which an Envoy, or a gRPC program, introduces itself to the control plane.
func (c *Config) node() object {
	namespace, account := c.text("POD_NAMESPACE"), c.text("SERVICE_ACCOUNT")
	pod, address := c.text("POD_NAME"), c.text("INSTANCE_IP")
	metadata := object{
		"NAMESPACE": namespace, "SERVICE_ACCOUNT": account, "CLUSTER_ID": c.clusterID, "NAME": pod,
		"INSTANCE_IPS":      address,
		"ENVOY_STATUS_PORT": c.v.Int("ENVOY_STATUS_PORT"), "ENVOY_PROMETHEUS_PORT": c.v.Int("ENVOY_PROMETHEUS_PORT"),
		"PROXY_CONFIG": c.proxy.all, "LABELS": c.podInfo("labels"), "ANNOTATIONS": c.podInfo("annotations"),
	}
	for name, value := range c.v.Prefixed("ISTIO_META_*") {
		metadata[name] = value
	}
	namespace = cmp.Or(namespace, "default")
	return object{
		"id": fmt.Sprintf("%s~%s~%s.%s~%s", cmp.Or(c.Envoy.Role, "sidecar"), cmp.Or(address, "127.0.0.1"),
			cmp.Or(pod, "pod"), namespace, cmp.Or(c.Envoy.Domain, namespace+".svc.cluster.local")),
		"cluster":  cmp.Or(c.proxy.ServiceCluster, cmp.Or(account, "proxy")+"."+namespace),
		"metadata": metadata,
	}
}

// writeGRPC writes the bootstrap for gRPC programs without a proxy.
func (c *Config) writeGRPC() error {
	bootstrap := object{
		"xds_servers": list{object{
			"server_uri": "unix://" + c.xdsSocket(), "channel_creds": list{object{"type": "insecure"}},
			"server_features": list{"xds_v3"},
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
	name := c.path(c.text("GRPC_XDS_BOOTSTRAP"))
	// Refuse another user's directory: that user could make the programs take their identities from elsewhere. A
	// directory that others can write to, such as an emptyDir, was chosen by the pod's operator.
	dir, err := private.MakeDir(filepath.Dir(name), private.Options{Mode: 0o700, Warn: func(err error) {
		c.Logger.Info("istioagent: other users can replace the bootstrap for gRPC", slog.Any("err", err))
	}})
	if err != nil {
		return err
	}
	defer dir.Close()
	return fileset.Replace(dir, filepath.Base(name), fileset.File{Data: data, Mode: 0o644})
}

// bootstrapParts has the parts of a bootstrap by their names, with values such as "{NAME}" to fill in.
//
//go:embed bootstrap.json
var bootstrapParts []byte

// filled returns a part of the bootstrap with its placeholders filled in. values are names and values in turn.
func filled(part string, values ...any) json.RawMessage {
	var parts map[string]json.RawMessage
	if err := json.Unmarshal(bootstrapParts, &parts); err != nil {
		panic("istioagent: bootstrap.json: " + err.Error()) // bootstrap.json is part of the program
	}
	var pairs []string
	for i := 0; i < len(values); i += 2 {
		value, _ := json.Marshal(values[i+1]) // texts, numbers and JSON always encode
		pairs = append(pairs, fmt.Sprintf(`"{%s}"`, values[i]), string(value))
	}
	return json.RawMessage(strings.NewReplacer(pairs...).Replace(string(parts[part])))
}

// Bootstrap writes a configuration for an Envoy, in JSON, which Envoy takes as --config-path FILE.json. It has the
// cluster sds-grpc for the workload socket; control planes refer to it by this name. With Envoy.XDS, listeners and
// clusters come from the control plane by ADS, through the socket XDS. Otherwise there is a listener at
// 127.0.0.1:15443 that requires client certificates of the trust domain and says hello. It takes its secrets by
// incremental SDS, so that Envoy starts even if a secret is missing. The admin interface is on loopback. Two
// listeners are as in Istio's bootstrap: /healthz/ready asks the status port of the agent, and /stats/prometheus the
// admin interface. In a pod, and with Envoy.Started, these two listen on all addresses.
func (a *Agent) Bootstrap(w io.Writer) error {
	c := &a.cfg
	clusters, listeners := list{filled("grpc", "NAME", "sds-grpc", "SOCKET", c.Socket)}, list{}
	forward := func(port int, path, name string, to int) {
		if port != 0 && to != 0 {
			listener := fmt.Sprint(name, "_", port)
			clusters = append(clusters,
				filled("cluster", "NAME", name, "ADDRESS", object{"socket_address": onLoopback(to)}))
			listeners = append(listeners,
				filled("forward", "LISTENER", listener, "ADDRESS", c.reachable(port), "NAME", name, "PATH", path))
		}
	}
	forward(c.v.Int("ENVOY_STATUS_PORT"), "/healthz/ready", "agent", c.Envoy.StatusPort)
	forward(c.v.Int("ENVOY_PROMETHEUS_PORT"), "/stats/prometheus", "prometheus_stats", c.Envoy.AdminPort)
	bootstrap := object{
		"node":  c.node(),
		"admin": object{"address": object{"socket_address": onLoopback(c.Envoy.AdminPort)}},
	}
	if c.Envoy.XDS {
		clusters = append(clusters, filled("grpc", "NAME", "xds-grpc", "SOCKET", c.xdsSocket()))
		api := map[bool]string{false: "GRPC", true: "DELTA_GRPC"}[c.v.Bool("ISTIO_DELTA_XDS")]
		bootstrap["dynamic_resources"] = filled("dynamic", "API", api)
	} else {
		var params object // null means Envoy's defaults
		if c.postQuantum {
			params = object{
				"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3",
				"ecdh_curves": list{"X25519MLKEM768"},
			}
		}
		listeners = append(listeners, filled("mtls", "TLS", params,
			"DEFAULT", filled("secret", "NAME", "default"), "ROOTCA", filled("secret", "NAME", "ROOTCA")))
	}
	bootstrap["static_resources"] = object{"clusters": clusters, "listeners": listeners}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(bootstrap)
}

func onLoopback(port int) object { return object{"address": "127.0.0.1", "port_value": port} }

// reachable returns the address of a listener: all addresses in a pod, and if the program starts the Envoy.
func (c *Config) reachable(port int) object {
	switch everywhere := c.inPod || c.Envoy.Started; {
	case !everywhere:
		return onLoopback(port)
	case strings.Contains(c.text("INSTANCE_IP"), ":"):
		return object{"address": "::", "port_value": port, "ipv4_compat": true}
	}
	return object{"address": "0.0.0.0", "port_value": port}
}
