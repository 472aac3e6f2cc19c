package istioagent

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// asAnnotation is a configuration as annotations have it.
const asAnnotation = `
# of the mesh
discoveryAddress: istiod.istio-system.svc:15012   # with a port
terminationDrainDuration: 20s
concurrency: 2
holdApplicationUntilProxyStarts: true
proxyMetadata:
  ISTIO_META_DNS_CAPTURE: "true"
  OUTPUT_CERTS: '/etc/istio-output-certs'
  HASH: "a # b"
  NOTHING:
proxyStatsMatcher:
    inclusionRegexps:
    - ".*circuit.*"
    - it's
    inclusionPrefixes: [a, 'b, c', "d"]
tracing: {sampling: 10.5}
gatewayTopology: {numTrustedProxies: 1, "key two": x}
image: {"imageType": "distroless"}
extraStatTags: []
`

var yamlTexts = []string{
	asAnnotation, `{"discoveryAddress":"a:1"}`, "{}", "", "a: 1", "---\na: b\r\nc: d\n", "\"a b\": 1\n'c': 2", "a:\n- 1\n- true\nb: null", "a: {}\nb: []",
	"  a: 1\n  b:\n    c: 1", "{a: 1, b: 'x'}", "a: 10.0.0.1:15012", "a: 45s", "a: -1.25", "a: http://x/#y", "a: \"\\u00e9\\n\"", "{\n\"a\": 1\n}", "a: C++ - x", "a: ~",
}

// TestReadYAML: what is read is what a reader of all of YAML makes of it.
func TestReadYAML(t *testing.T) {
	t.Parallel()
	for _, text := range yamlTexts {
		got, err := readYAML(text)
		require.NoError(t, err, text)
		sameYAML(t, text, got)
	}
	got, err := readYAML(asAnnotation)
	require.NoError(t, err)
	assert.Equal(t, map[string]any{"ISTIO_META_DNS_CAPTURE": "true", "OUTPUT_CERTS": "/etc/istio-output-certs", "HASH": "a # b", "NOTHING": nil}, got["proxyMetadata"])
	assert.Equal(t, []any{"a", "b, c", "d"}, got["proxyStatsMatcher"].(map[string]any)["inclusionPrefixes"])
	assert.InDelta(t, 2, got["concurrency"], 0)

	for text, want := range map[string]string{
		"a: 1\nb: |\n  x":      "line 2:",
		"a: 1\n\n\tb: 1":       "line 3: it is indented by a tab",
		"a: 1\n  b: 1":         "line 2: it is indented more",
		"a:\n    b: 1\n  c: 1": "line 3:",
		"  a: 1\nb: 1":         "line 2: its indentation",
		"a: 1\na: 2":           `line 2: "a" is there twice`,
		"a":                    "line 1: it is not KEY: VALUE",
		"- a":                  "line 1:",
		"a: &x 1":              "line 1:",
		"a: *x":                "line 1:",
		"a: !!str 1":           "line 1:",
		"a: yes":               `"yes" is a text for some readers`,
		"a: 0777":              "line 1:",
		"a: 1_000":             "line 1:",
		"a: 2026-01-02":        "line 1:",
		"a: b: c":              "line 1:",
		"a: \"x":               "not a text in double quotes",
		"a: 'x":                "not a text in single quotes",
		"a: \"x\" y":           "line 1:",
		"a: [1, [2, x]]":       "JSON",
		"a: [1":                "line 1:",
		"a: [x,,y]":            "empty",
		"a: {b}":               "KEY: VALUE",
		"a: {b: 1, b: 2}":      "line 1:",
		"a:\n- b: c":           "line 2:",
		"a:\n-\n  - b":         "line 3:",
		"1: x":                 "line 1:",
		"<<: x":                "line 1:",
		"a: 1\n---\nb: 1":      "line 2: one document",
		"%YAML 1.2\n---\na: 1": "line 1:",
		"{\n\"a\": x}":         "invalid character",
	} {
		_, err := readYAML(text)
		require.ErrorContains(t, err, want, "%q", text)
	}
	var deep strings.Builder
	for i := range 40 {
		deep.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	_, err = readYAML(deep.String())
	require.ErrorContains(t, err, "line 17: it is in too many mappings")
	_, err = readYAML(strings.Repeat("#", maxYAML+1))
	require.ErrorContains(t, err, "may have")
}

// sameYAML compares a value with what the reader of the assertions makes of a text.
func sameYAML(t *testing.T, text string, value map[string]any) {
	t.Helper()
	data, err := json.Marshal(value)
	require.NoError(t, err)
	if value == nil {
		data = nil
	}
	assert.YAMLEq(t, text, string(data), text)
}

// FuzzReadYAML: whatever a text is, it is read in little time, and what is read is read from JSON in the same way.
func FuzzReadYAML(f *testing.F) {
	for _, text := range yamlTexts {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		begun := time.Now()
		value, err := readYAML(text)
		require.Less(t, time.Since(begun), time.Second)
		if err != nil || value == nil {
			return
		}
		data, err := json.Marshal(value)
		require.NoError(t, err)
		again, err := readYAML(string(data))
		require.NoError(t, err)
		require.Equal(t, value, again)
	})
}
