package test_test

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/athenzdemo"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

var update = flag.Bool("update", false, "write the diagram in the README of examples/athenz-sia")

// The demo ends well, and the README has its trace. The programs end with the right codes.
func TestAthenzDemo(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	conformance.Covers(t, "ATH-1-1", "ATH-1-2", "ATH-1-3", "ATH-1-4", "ATH-1-5", "ATH-1-6", "ATH-7.1-1", "ATH-7.1-3", "ATH-7.1-4", "ATH-7.2-1", "ATH-7.2-2", "ATH-7.2-3",
		"ATH-7.2-4", "ATH-7.2-5", "ATH-8-1", "ATH-8-2", "ATH-8-3", "ATH-8-4", "ATH-8-5", "ATH-8-7", "ATH-18-6")
	programs := athenzdemo.Build(t)
	programtest.ExitCodes(t, programs, map[string]string{"athenz-agent": "ZTS_ENDPOINT=none", "athenz-provider": "PROVIDER_ADDR=none", "athenz-sia": "MODE=none"})
	api := kubetest.Start(t)
	pods := "/api/v1/namespaces/" + athenzdemo.Namespace + "/pods"
	put := func(pod, ip, phase string) {
		api.Put(pods+"/"+pod, map[string]any{
			"metadata": map[string]any{"uid": "uid-of-" + pod},
			"spec":     map[string]any{"serviceAccountName": athenzdemo.Account},
			"status":   map[string]any{"phase": phase, "podIP": ip, "podIPs": []any{map[string]any{"ip": ip}}},
		})
	}
	var out bytes.Buffer
	trace := athenzdemo.Show(t, programs, io.MultiWriter(&out, t.Output()), athenzdemo.Kubernetes{
		URL: api.URL(), Client: api.Client(),
		List:   func() ([]byte, error) { return getBody(api.Client(), api.URL()+pods) },
		Create: func(pod, ip string) { put(pod, ip, "Running") },
		Phase:  put,
		Delete: func(pod string) { api.Remove(pods + "/" + pod) },
	})
	assert.Contains(t, out.String(), "no key, document or token is in a log")
	programtest.Section(t, *update, "../../examples/athenz-sia/README.md", "```mermaid\n", "```\n", trace.Diagram())
}

func getBody(client *http.Client, url string) ([]byte, error) {
	answer, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = errors.New(answer.Status)
	}
	return data, err
}
