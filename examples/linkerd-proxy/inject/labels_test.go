package inject_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// A pod of the mesh has the label of this control plane: one without gets it, one of another control plane gets it in the place of that, and the other
// labels stay. A pod without an identity keeps what it has.
func TestControlPlaneLabel(t *testing.T) {
	t.Parallel()
	const owner = "linkerd.io/control-plane-ns"
	for name, labels := range map[string]map[string]string{
		"none":                     nil,
		"others":                   {"app": "web", "linkerd.io/proxy-deployment": "web"},
		"its own":                  {"app": "web", owner: "linkerd"},
		"of another control plane": {"app": "web", owner: "linkerd-old"},
		"empty":                    {owner: ""},
	} {
		for annotation, joined := range map[string]bool{"enabled": true, "disabled": false} {
			text := must.Get(json.Marshal(labels))(t)
			for _, form := range []string{
				`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x","labels":%s,"annotations":{"linkerd.io/identity":%q}},` + spec + `}`,
				`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"x"},"spec":{"template":{"metadata":{"labels":%s,"annotations":{"linkerd.io/identity":%q}},` + spec + `}}}`,
			} {
				object := fmt.Appendf(nil, form, text, annotation)
				got := must.Get(injector(t).Inject(object, "n"))(t)
				require.Equal(t, joined, got.Enabled)
				type meta struct{ Labels map[string]string }
				var patched struct {
					Metadata meta
					Spec     struct{ Template struct{ Metadata meta } }
				}
				require.NoError(t, json.Unmarshal(apply(t, object, got.Patch), &patched))
				want := maps.Clone(labels)
				if joined {
					if want == nil {
						want = map[string]string{}
					}
					want[owner] = "linkerd"
				}
				is := patched.Metadata.Labels
				if is == nil {
					is = patched.Spec.Template.Metadata.Labels
				}
				assert.Equal(t, want, is, "%s, %s", name, annotation)
			}
		}
	}
}
