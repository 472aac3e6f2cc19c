package istioagent

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/internal/settings"
)

// Envoy configures the Envoy beside an [Agent]. [Agent.Bootstrap] uses it, and so does a program that starts the
// Envoy, such as examples/agent; the Agent starts none. Such a program sets the first three fields. [FromEnvironment]
// sets the others from the variables, or fields of PROXY_CONFIG, that their comments name.
type Envoy struct {
	// Started says that the program starts the Envoy. The bootstrap's listeners are then on all addresses, as in a
	// pod.
	Started bool

	// Role is "sidecar", or "router" for a gateway; empty means sidecar. Domain is the DNS domain of the node; empty
	// means NAMESPACE.svc.cluster.local.
	Role, Domain string

	// Disabled says that the program starts no Envoy: DISABLE_ENVOY. The Agent ignores it.
	Disabled bool

	// Path is the program: binaryPath. Empty means envoy in PATH. ConfigFile is a bootstrap to use instead of
	// [Agent.Bootstrap]: customConfigFile. Dir is the directory for the bootstrap and for the agent's socket XDS:
	// configPath.
	Path, ConfigFile, Dir string

	// XDS says that the agent forwards the configuration of the control plane (ADS): PROXY_XDS_VIA_AGENT.
	XDS bool

	// AdminPort is the port of the admin interface, on loopback: proxyAdminPort. StatusPort is where the program
	// serves [Agent.ServeHTTP]: statusPort; 0 means none.
	AdminPort, StatusPort int

	// DrainTime is how long connections may go on while listeners drain: drainDuration.
	DrainTime time.Duration

	// Concurrency is the number of threads: concurrency, or ISTIO_CPU_LIMIT. 0 means one for each processor.
	Concurrency int
}

// proxyFields are the fields of PROXY_CONFIG that have an effect.
var proxyFields = []string{
	"discoveryAddress", "configPath", "controlPlaneAuthPolicy", "serviceCluster", "terminationDrainDuration",
	"statusPort", "proxyAdminPort", "binaryPath", "customConfigFile", "drainDuration", "concurrency",
}

// proxyConfig has the fields of PROXY_CONFIG that are used.
type proxyConfig struct {
	DiscoveryAddress, ConfigPath, ServiceCluster string
	BinaryPath, CustomConfigFile                 string
	ControlPlaneAuthPolicy                       any // a name, or its number
	DrainDuration, TerminationDrainDuration      duration
	Concurrency                                  uint32
	StatusPort, ProxyAdminPort                   uint16

	all map[string]any // for the metadata of the node
}

// duration is a duration in protobuf's JSON: seconds. The control plane is told it in the same form.
type duration time.Duration

var seconds = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?s$`)

func (d *duration) UnmarshalText(text []byte) error {
	if !seconds.Match(text) {
		return fmt.Errorf("the duration %.80q is not in seconds, such as 45s", text)
	}
	parsed, err := time.ParseDuration(string(text))
	*d = duration(parsed)
	return err
}

// read reads PROXY_CONFIG, in YAML, which includes JSON. Fields that are not set there stay unchanged.
func (p *proxyConfig) read(text string) error {
	var document yaml.Node
	err := cmp.Or(yaml.Unmarshal([]byte(text), &document), plain(&document), document.Decode(&p.all))
	data, notJSON := json.Marshal(p.all)
	err = cmp.Or(err, notJSON, json.Unmarshal(data, p))
	if twice, ok := errors.AsType[*yaml.TypeError](err); ok {
		err = errors.New(strings.Join(twice.Errors, "; "))
	}
	if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		// Some releases of encoding/json report the name of the Go field.
		first, size := utf8.DecodeRuneInString(kind.Field)
		err = fmt.Errorf("the value of %c%s is of another kind than it has to be, or out of range",
			unicode.ToLower(first), kind.Field[size:])
	}
	return err
}

// plain returns an error for YAML that is not JSON: a value other than a mapping, and keys that are not texts. It
// treats dates as texts.
func plain(n *yaml.Node) error {
	if n.Kind == yaml.DocumentNode && n.Content[0].Kind != yaml.MappingNode {
		return errors.New("it is no mapping of fields to values")
	}
	if n.Tag == "!!timestamp" {
		n.Tag = "!!str"
	}
	for i, inner := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 && inner.Tag != "!!str" {
			return fmt.Errorf("line %d: the key %.80q is no text; put it into quotes", inner.Line, inner.Value)
		}
		if err := plain(inner); err != nil {
			return err
		}
	}
	return nil
}

func checkProxyConfig(value string) error {
	if err := new(proxyConfig).read(value); err != nil {
		return fmt.Errorf("set it to the configuration of a proxy in JSON, as the injected one is, or in YAML: %w",
			err)
	}
	return nil
}

// remark notes which fields of PROXY_CONFIG and which variables have no effect, or are probably misspelled.
func (c *Config) remark(fields map[string]any, v *settings.Values) {
	for _, name := range v.Unknown() {
		c.notes = append(c.notes,
			fmt.Sprintf("environment variable %s: the agent has none of that name; -h lists them", name))
	}
	for _, row := range v.Unused() {
		c.unused = append(c.unused, fmt.Sprintf("environment variable %s is not used: %s", row.Name, row.Doc))
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if right, slip := settings.Near(name, proxyFields); slip {
			c.notes = append(c.notes, fmt.Sprintf("PROXY_CONFIG: there is no field %.80q; there is %s", name, right))
		} else if !slices.Contains(proxyFields, name) {
			c.unused = append(c.unused, fmt.Sprintf("PROXY_CONFIG: the field %.80q is not used: nothing of it is in "+
				"the bootstrap, though the injector may have used it; customConfigFile names another", name))
		}
	}
}

// podInfo returns labels or annotations of the pod from a file of the downward API. It is nil if there is no file.
func (c *Config) podInfo(name string) map[string]string {
	data, err := os.ReadFile(c.path("./etc/istio/pod/" + name))
	if err != nil {
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
