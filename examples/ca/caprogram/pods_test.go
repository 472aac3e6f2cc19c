package caprogram

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

func TestTemplate(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	pod := spiffe.Pod{Namespace: "shop", ServiceAccount: "web", Name: "web-0", UID: "u-1", Node: "n1.example"}
	for path, want := range map[string]string{
		"/ns/${namespace}/sa/${service-account}": "spiffe://example.org/ns/shop/sa/web",
		"/pod/${pod-uid}/on/${node}":             "spiffe://example.org/pod/u-1/on/n1.example",
		"/x/${pod}":                              "spiffe://example.org/x/web-0",
	} {
		require.Equal(t, want, must.Get(must.Get(template(td, path))(t)(pod))(t).String())
	}
	for path, want := range map[string]string{
		"":                  "template",
		"/workload":         "all pods would have one identity",
		"/ns/${namepace}":   "template",
		"ns/${namespace}":   "template",
		"/ns/${namespace}/": "template",
		"//${pod}":          "template",
		"/../${pod}":        "template",
		"/${pod}?x":         "template",
		"/${pod}#x":         "template",
		"/${pod} x":         "template",
		"/${pod}/ä":         "template",
		"/${pod":            "template",
		"/${namespace}/${}": "template",
	} {
		require.ErrorContains(t, must.Err(template(td, path)), want, path)
	}
	id := must.Get(template(td, "/ns/${namespace}/pod/${pod}"))(t)
	for _, p := range []spiffe.Pod{{Namespace: "", Name: "x"}, {Namespace: "..", Name: "x"}, {Namespace: "a", Name: "x/../../b/"}, {Namespace: "a", Name: "ü"}} {
		require.Error(t, must.Err(id(p)), "%+v", p)
	}
	got, err := id(spiffe.Pod{Namespace: "${pod}", Name: "x"}) // which no namespace is called
	require.Error(t, err, "%s", got)
}
