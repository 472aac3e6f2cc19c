package istioagent

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// proxyConfigs are configurations as annotations have them, in YAML, and as the injector writes them, in JSON.
var proxyConfigs = []struct{ yaml, json string }{
	{`
# of the mesh
discoveryAddress: istiod.istio-system.svc:15012   # with a port
terminationDrainDuration: 20s
concurrency: 2
holdApplicationUntilProxyStarts: true
proxyMetadata:
  ISTIO_META_DNS_CAPTURE: "true"
  OUTPUT_CERTS: '/etc/istio-output-certs'
  HASH: "a # b"
  DATE: 2026-01-02
proxyStatsMatcher:
    inclusionRegexps:
    - ".*circuit.*"
    - it's
    inclusionPrefixes: [a, 'b, c', "d"]
tracing: {sampling: 10.5, zipkin: {address: "z:9411"}}
gatewayTopology: {numTrustedProxies: 1, "key two": x}
extraStatTags: []
serviceCluster: |-
  web.shop
runtimeValues: {}
image: ~
`, `{"discoveryAddress":"istiod.istio-system.svc:15012","terminationDrainDuration":"20s","concurrency":2,"holdApplicationUntilProxyStarts":true,
	"proxyMetadata":{"ISTIO_META_DNS_CAPTURE":"true","OUTPUT_CERTS":"/etc/istio-output-certs","HASH":"a # b","DATE":"2026-01-02"},
	"proxyStatsMatcher":{"inclusionRegexps":[".*circuit.*","it's"],"inclusionPrefixes":["a","b, c","d"]},"tracing":{"sampling":10.5,"zipkin":{"address":"z:9411"}},
	"gatewayTopology":{"numTrustedProxies":1,"key two":"x"},"extraStatTags":[],"serviceCluster":"web.shop","runtimeValues":{},"image":null}`},
	{"drainDuration: 1.5s\nserviceCluster: &c x\nbinaryPath: *c\ndiscoveryAddress: !!str 1", `{"drainDuration":"1.5s","serviceCluster":"x","binaryPath":"x","discoveryAddress":"1"}`},
	{"# nothing\n{}", "{}"},
	{"---\r\nconfigPath: /x\r\n", `{"configPath":"/x"}`},
	{"controlPlaneAuthPolicy: 1\nstatusPort: 0", "{\"controlPlaneAuthPolicy\":1,\n\t\"statusPort\":0}"},
	{"serviceCluster: \"\\u00e9\\n\"\nbinaryPath: http://x/#y", `{"serviceCluster":"\u00e9\n","binaryPath":"http://x/#y"}`},
}

func readProxyConfig(text string) (*proxyConfig, error) {
	p := &proxyConfig{StatusPort: 15020}
	return p, p.read(text)
}

// TestProxyConfig: JSON and YAML are read in the same way, and what JSON cannot have is refused.
func TestProxyConfig(t *testing.T) {
	t.Parallel()
	for _, c := range proxyConfigs {
		fromYAML, err := readProxyConfig(c.yaml)
		require.NoError(t, err, c.yaml)
		fromJSON, err := readProxyConfig(c.json)
		require.NoError(t, err, c.json)
		assert.Equal(t, fromJSON, fromYAML)
		var all map[string]any
		require.NoError(t, json.Unmarshal([]byte(c.json), &all))
		assert.JSONEq(t, c.json, string(must.Get(json.Marshal(fromYAML.all))(t)), "as a reader of JSON has it")
	}
	p := must.Get(readProxyConfig(proxyConfigs[0].yaml))(t)
	assert.Equal(t, "istiod.istio-system.svc:15012", p.DiscoveryAddress)
	assert.Equal(t, duration(20*time.Second), p.TerminationDrainDuration)
	assert.Equal(t, uint32(2), p.Concurrency)
	assert.Equal(t, uint16(15020), p.StatusPort, "what is not there")

	var bomb strings.Builder
	bomb.WriteString("a: &a [x,x,x,x,x,x,x,x,x]\n")
	for i := range 9 {
		bomb.WriteString(string(rune('b'+i)) + ": &" + string(rune('b'+i)) + " [" + strings.Repeat("*"+string(rune('a'+i))+",", 8) + "]\n")
	}
	for text, want := range map[string]string{
		bomb.String():        "excessive aliasing",
		"a: &a [*a]":         "contains itself",
		"a: *x":              "unknown anchor",
		"<<: {b: 1}":         "line 1: the key \"<<\" is no text",
		"a: 1\nb: 2\na: 3":   `line 3: mapping key "a" already defined at line 1`,
		`{"a":1,"a":2}`:      `mapping key "a" already defined`,
		"a: {b: 1, b: 2}":    `mapping key "b" already defined`,
		"[]":                 "no mapping",
		"- a":                "no mapping",
		"text":               "no mapping",
		"null":               "no mapping",
		"a: !!int x":         "cannot decode !!str `x` as a !!int",
		"1: x":               "line 1: the key \"1\" is no text",
		"a: {? [b] : c}":     "is no text",
		"a: {true: x}":       "line 1: the key \"true\" is no text",
		"a: .inf":            "unsupported value",
		"a: 1\n\tb: 1":       "line 2:",
		"a: [1":              "line 1:",
		`{"a":"\/"}`:         "unknown escape", // which is in JSON alone, and written by no injector
		"a: \x00":            "control characters",
		"concurrency: many":  "the value of concurrency is of another kind",
		"drainDuration: 1m":  `"1m" is not in seconds`,
		"drainDuration: -1s": "not in seconds",
		"drainDuration: 5":   "the value of drainDuration is of another kind",
		"statusPort: 70000":  "the value of statusPort is of another kind than it has to be, or out of range",
	} {
		begun := time.Now()
		_, err := readProxyConfig(text)
		require.ErrorContains(t, err, want, "%.300q", text)
		require.NotContains(t, err.Error(), "interface", "no word of Go")
		require.NotContains(t, err.Error(), "\n", "one line")
		require.Less(t, time.Since(begun), time.Second)
	}
}

// FuzzProxyConfig: whatever a text is, it is read in little time, and what is read is read from JSON in the same way.
func FuzzProxyConfig(f *testing.F) {
	for _, c := range proxyConfigs {
		f.Add(c.yaml)
		f.Add(c.json)
	}
	f.Fuzz(func(t *testing.T, text string) {
		begun := time.Now()
		p, err := readProxyConfig(text)
		require.Less(t, time.Since(begun), 2*time.Second)
		if err != nil || p.all == nil { // nothing but comments
			return
		}
		data := must.Get(json.Marshal(p.all))(t)
		unfit := func(r rune) bool { return unicode.IsControl(r) || r == '\ufeff' || r == '\ufffe' || r == '\uffff' } // without escape
		if len(data) > 1<<10 || strings.ContainsFunc(string(data), unfit) {                                           // and keys of YAML have 1 KiB
			return
		}
		again, err := readProxyConfig(string(data))
		require.NoError(t, err, "%s", data)
		require.JSONEq(t, string(data), string(must.Get(json.Marshal(again.all))(t)))
		again.all = p.all // whose numbers may have other types
		require.Equal(t, p, again)
	})
}
