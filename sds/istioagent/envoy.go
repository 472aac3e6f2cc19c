package istioagent

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/settings"
)

// Envoy is how the Envoy beside an [Agent] is configured by [Agent.Bootstrap], and run by a program that starts it, as
// examples/agent does. The Agent starts none. Each comment has the variables of Istio's agent for the field, or the fields of
// PROXY_CONFIG.
type Envoy struct {
	// Started says that the program starts the Envoy. The listeners of the bootstrap are then at all addresses, as in a
	// pod, and what is for such a program is not logged as without effect.
	Started bool

	// Disabled says that there is no Envoy, and that no secrets are served at the workload socket: DISABLE_ENVOY. The files of
	// Config.OutputCerts are kept current, and ADS is forwarded, for programs with gRPC.
	Disabled bool

	// Router says that the node is a gateway, and not a sidecar. Domain is the node's DNS domain; empty means
	// NAMESPACE.svc.cluster.local. Cluster is its service cluster: serviceCluster.
	Router          bool
	Domain, Cluster string

	// Path is that of the program: ENVOY_PATH, which is none of Istio's, or binaryPath. Empty means envoy in PATH. ConfigFile is a bootstrap to use in place of that of the Agent: customConfigFile.
	// Override is a file whose content is merged into the bootstrap: ISTIO_BOOTSTRAP_OVERRIDE.
	Path, ConfigFile, Override string

	// AdminPort is the port of the admin interface, on loopback: proxyAdminPort; 0 means 15000. StatusPort is where the program
	// serves [Agent.ServeHTTP]: statusPort. ReadyPort and MetricsPort are those of listeners that forward
	// /healthz/ready to StatusPort, and /stats/prometheus to the admin interface: ENVOY_STATUS_PORT and
	// ENVOY_PROMETHEUS_PORT. 0 means none.
	AdminPort, StatusPort, ReadyPort, MetricsPort int

	// DrainTime is how long connections may go on while listeners drain: drainDuration.
	DrainTime time.Duration

	// Concurrency is the number of threads: concurrency, or ISTIO_CPU_LIMIT. 0 means one for each processor.
	Concurrency int

	// DeltaADS says that the configuration comes incrementally: ISTIO_DELTA_XDS.
	DeltaADS bool

	// Environ has variables of the Envoy's environment, in the form of os.Environ: proxyMetadata.
	Environ []string

	// AppProbers and AppMetrics are JSON about the application's probes and metrics: ISTIO_KUBE_APP_PROBERS and
	// ISTIO_PROMETHEUS_ANNOTATIONS. LocalProbes says that the application is probed on loopback, and not at Config.Address:
	// REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION.
	AppProbers, AppMetrics string
	LocalProbes            bool

	idle     []string       // what has no effect unless Started
	metadata map[string]any // of the node, besides Config.Metadata
}

// forEnvoy are the variables and fields that matter to a program which starts the Envoy alone.
var forEnvoy = []string{
	"ENVOY_PATH", "HOST_IP", "ISTIO_BOOTSTRAP_OVERRIDE", "ISTIO_CPU_LIMIT", "ISTIO_KUBE_APP_PROBERS", "ISTIO_PROMETHEUS_ANNOTATIONS", "OTEL_RESOURCE_ATTRIBUTES",
	"REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION", "binaryPath", "concurrency", "customConfigFile", "drainDuration",
}

// The fields of PROXY_CONFIG that have an effect, and the others, with why not.
var (
	usedFields = []string{
		"discoveryAddress", "configPath", "controlPlaneAuthPolicy", "serviceCluster", "binaryPath", "customConfigFile", "drainDuration", "terminationDrainDuration", "concurrency", "statusPort",
		"proxyAdminPort", "proxyMetadata",
	}
	unusedFields = map[string]string{
		"holdApplicationUntilProxyStarts": "the injector has used it, for a hook that runs wait", "interceptionMode": "the injector has used it", "image": "the injector has used it",
		"meshId": "it is in ISTIO_META_MESH_ID", "caCertificatesPem": "roots of other meshes do not come this way", "readinessProbe": "the health of a machine's application is not reported",
		"privateKeyProvider": "private keys are given to Envoy itself", "proxyBootstrapTemplatePath": "the bootstrap is no template; customConfigFile is used as it is",
	}
	statsFields = []string{
		"availabilityZone", "connectionSettings", "discoveryRefreshDelay", "envoyAccessLogService", "envoyMetricsService", "envoyMetricsServiceAddress", "extraStatTags", "fileFlushInterval",
		"fileFlushMinSizeKb", "gatewayTopology", "proxyHeaders", "proxyStatsMatcher", "runtimeValues", "sds", "statNameLength", "statsCompression", "statsdUdpAddress", "tracing", "zipkinAddress",
	}
)

// proxyConfig is what is read of PROXY_CONFIG.
type proxyConfig struct {
	DiscoveryAddress, ConfigPath, ServiceCluster string
	BinaryPath, CustomConfigFile                 string
	ControlPlaneAuthPolicy                       any // a name, or its number
	DrainDuration, TerminationDrainDuration      *duration
	Concurrency, StatusPort, ProxyAdminPort      *uint16
	ProxyMetadata                                map[string]string

	all map[string]any // with the names of fields in camel case
}

// duration is one in JSON.
type duration time.Duration

func (d *duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err == nil && parsed < 0 {
		err = errors.New("a duration is negative")
	}
	*d = duration(parsed)
	return err
}

var underscore = regexp.MustCompile(`_[a-z]`)

// readProxyConfig reads PROXY_CONFIG, in YAML or JSON. Names of fields may have underscores.
func readProxyConfig(text string) (*proxyConfig, error) {
	fields, err := readYAML(text)
	if err != nil {
		return nil, err
	}
	p := &proxyConfig{all: make(map[string]any, len(fields))}
	used := make(map[string]any)
	for name, value := range fields {
		name = underscore.ReplaceAllStringFunc(name, func(s string) string { return strings.ToUpper(s[1:]) })
		if p.all[name] = value; slices.Contains(usedFields, name) {
			used[name] = value
		}
	}
	data, err := json.Marshal(used)
	if err == nil {
		err = json.Unmarshal(data, p)
	}
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) {
		err = fmt.Errorf("%s is a %s, and has to be another kind of value; texts such as those of proxyMetadata are in quotes if they look like true, false or a number", kind.Field, kind.Value)
	}
	return p, err
}

func checkProxyConfig(value string) error {
	if _, err := readProxyConfig(value); err != nil {
		return fmt.Errorf("set it to the configuration of a proxy in JSON, as the injected one is, or in YAML: %w", err)
	}
	return nil
}

// environ returns the variables of proxyMetadata, sorted.
func (p *proxyConfig) environ() (environ []string) {
	for _, name := range slices.Sorted(maps.Keys(p.ProxyMetadata)) {
		environ = append(environ, name+"="+p.ProxyMetadata[name])
	}
	return environ
}

// envoy returns how the Envoy is run, and how long the agent goes on serving.
func (p *proxyConfig) envoy(v *settings.Values) (e Envoy, drain time.Duration) {
	or := func(n *uint16, otherwise int) int {
		if n != nil {
			return int(*n)
		}
		return otherwise
	}
	e = Envoy{
		Disabled: v.Bool("DISABLE_ENVOY"), Cluster: p.ServiceCluster, Path: cmp.Or(v.Text("ENVOY_PATH"), p.BinaryPath), ConfigFile: p.CustomConfigFile, Override: v.Text("ISTIO_BOOTSTRAP_OVERRIDE"),
		AdminPort: or(p.ProxyAdminPort, 15000), StatusPort: or(p.StatusPort, 15020), ReadyPort: v.Int("ENVOY_STATUS_PORT"), MetricsPort: v.Int("ENVOY_PROMETHEUS_PORT"),
		DrainTime: 45 * time.Second, Concurrency: or(p.Concurrency, v.Int("ISTIO_CPU_LIMIT")), DeltaADS: v.Bool("ISTIO_DELTA_XDS"), Environ: p.environ(),
		AppProbers: v.Text("ISTIO_KUBE_APP_PROBERS"), AppMetrics: v.Text("ISTIO_PROMETHEUS_ANNOTATIONS"), LocalProbes: v.Bool("REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION"),
		metadata: map[string]any{"PROXY_CONFIG": p.all},
	}
	if p.DrainDuration != nil {
		e.DrainTime = time.Duration(*p.DrainDuration)
	}
	drain, atLeast := v.Duration("MINIMUM_DRAIN_DURATION"), time.Duration(0)
	if v.Set("MINIMUM_DRAIN_DURATION") {
		atLeast = drain
	}
	if v.Set("TERMINATION_DRAIN_DURATION_SECONDS") {
		drain = max(atLeast, time.Duration(v.Int("TERMINATION_DRAIN_DURATION_SECONDS"))*time.Second)
	} else if p.TerminationDrainDuration != nil {
		drain = max(atLeast, time.Duration(*p.TerminationDrainDuration))
	}
	return e, drain
}

// remark notes which fields of PROXY_CONFIG and which variables have no effect, or are probably misspelled.
func (c *Config) remark(p *proxyConfig, v *settings.Values, environ []string) {
	known := make([]string, 0, len(variables.Variables))
	for _, row := range variables.Variables {
		known = append(known, row.Name)
	}
	unknown := v.Unknown()
	for _, line := range environ {
		name, value, _ := strings.Cut(line, "=")
		if right, ok := settings.Near(name, known); ok && value != "" {
			c.Notes = append(c.Notes, fmt.Sprintf("environment variable %s: the agent has none of that name; it has %s", name, right))
			unknown = slices.DeleteFunc(unknown, func(other string) bool { return other == name })
		}
	}
	for _, name := range unknown {
		c.Notes = append(c.Notes, fmt.Sprintf("environment variable %s: the agent has none of that name; -h lists them", name))
	}
	for _, row := range v.Unused() {
		c.Unused = append(c.Unused, fmt.Sprintf("environment variable %s is not used: %s", row.Name, row.Doc))
	}
	known = slices.Concat(usedFields, statsFields, slices.Collect(maps.Keys(unusedFields)))
	for _, name := range slices.Sorted(maps.Keys(p.all)) {
		why, unused := unusedFields[name]
		right, near := settings.Near(name, known)
		switch {
		case slices.Contains(usedFields, name):
		case near:
			c.Notes = append(c.Notes, fmt.Sprintf("PROXY_CONFIG: there is no field %.80q; there is %s", name, right))
		case unused:
			c.Unused = append(c.Unused, "PROXY_CONFIG: "+name+" is not used: "+why)
		case slices.Contains(statsFields, name):
			c.Unused = append(c.Unused, "PROXY_CONFIG: "+name+" is not used: it is not in the bootstrap of this agent; customConfigFile or ISTIO_BOOTSTRAP_OVERRIDE can have it")
		default:
			c.Unused = append(c.Unused, fmt.Sprintf("PROXY_CONFIG: there is no field %.80q", name))
		}
	}
	for _, name := range forEnvoy {
		what := "environment variable "
		_, field := p.all[name]
		if field {
			what = "PROXY_CONFIG: "
		}
		if field || v.Set(name) {
			c.Envoy.idle = append(c.Envoy.idle, what+name+" is not used: this program starts no Envoy")
		}
	}
}

func checkJSON(value string) error {
	if !json.Valid([]byte(value)) {
		return errors.New("set it to JSON, as the injector writes it")
	}
	return nil
}

// checkAnyPort refuses what is neither a port nor 0.
func checkAnyPort(value string) error {
	if port, err := strconv.Atoi(value); err != nil || port > math.MaxUint16 {
		return errors.New("set it to a port, from 1 to 65535, or to 0 for none")
	}
	return nil
}

// podInfo returns what the downward API has written to a file of the pod: labels or annotations.
func (c *Config) podInfo(name string) map[string]string {
	data, err := os.ReadFile(c.path("./etc/istio/pod/" + name))
	if err != nil || len(data) > maxYAML {
		return nil
	}
	info := make(map[string]string)
	for line := range strings.Lines(string(data)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if text, err := strconv.Unquote(value); err == nil {
			info[key] = text
		}
	}
	return info
}
