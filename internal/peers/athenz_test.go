package peers_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/athenzdemo"
	"github.com/svidkit/svidkit/internal/test/must"
)

// testAthenz takes pods of the cluster through their lives with the programs of Athenz. The kubelet is made up: it has
// the pods of the API server. What happens is what happens with an API server that is made up.
func testAthenz(t *testing.T, c *cluster) {
	const namespace, pods = athenzdemo.Namespace, "/api/v1/namespaces/" + athenzdemo.Namespace + "/pods"
	c.Account(t, "k8s-admin", "athenz-callback")
	grant(t, c.Cluster, "k8s-admin", "athenz-callback", "ClusterRole", documented(t, "authn/athenz"))
	c.Account(t, namespace, athenzdemo.Account)
	phase := func(pod, ip, phase string) {
		c.Do(t, "PATCH", pods+"/"+pod+"/status", map[string]any{"status": map[string]any{"phase": phase, "podIP": ip, "podIPs": []any{map[string]any{"ip": ip}}}}, nil)
	}
	trace := athenzdemo.Show(t, athenzdemo.Build(t), io.Discard, athenzdemo.Kubernetes{
		URL: c.URL, Client: c.ClientOf(t, "k8s-admin", "athenz-callback"),
		List: func() ([]byte, error) {
			answer, err := c.Admin().Get(c.URL + pods)
			if err != nil {
				return nil, err
			}
			defer answer.Body.Close()
			var list json.RawMessage
			if answer.StatusCode != http.StatusOK {
				return nil, errors.New(answer.Status)
			}
			err = json.NewDecoder(answer.Body).Decode(&list)
			return list, err
		},
		Create: func(pod, ip string) {
			c.Pod(t, namespace, athenzdemo.Account, pod, "node-a")
			phase(pod, ip, "Running")
		},
		Phase:  phase,
		Delete: func(pod string) { c.DeletePod(t, namespace, pod) },
	})
	readme := must.Get(os.ReadFile("../../examples/athenz-sia/README.md"))(t)
	require.Contains(t, string(readme), trace.Diagram())
}
