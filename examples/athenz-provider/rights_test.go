package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
)

// The provider has all the rights that it uses and uses all that it has, as its manifest gives them: it compares documents with pods of each
// namespace, and notes which were used.
func TestRightsOfTheManifest(t *testing.T) {
	t.Parallel()
	text := must.Get(os.ReadFile("install.yaml"))(t)
	var manifest bytes.Buffer
	require.NoError(t, (&program.Manifest{Text: strings.ReplaceAll(string(text), "=? ", "=value ")}).Print(&manifest))
	require.Contains(t, manifest.String(), "{name: USED_DOCUMENTS, value: k8s-admin/used-documents}")
	rights := must.Get(kubetest.Rights(manifest.String()))(t)
	p := athenztest.NewPlace(t)
	api, server := kubetest.StartGuard(t, rights["k8s-admin/athenz-callback"])
	api.Put("/api/v1/namespaces/k8s-admin/configmaps/used-documents", map[string]any{})
	at := programtest.Serve(t, daemon.Run, environ(p, "KUBERNETES_API="+server, "USED_DOCUMENTS=k8s-admin/used-documents", "SIGNING_ADDR=off", "HEALTH_ADDR=off"), io.Discard, 1)
	signer := must.Get(athenz.NewSigner(p.Path("private"), "", 0))(t)
	for namespace, domain := range map[string]string{"media-sports": "media.sports", "media-news": "media.news"} {
		for _, name := range []string{"web-0", "web-1"} {
			subject := athenztest.Subject()
			subject.Namespace, subject.Pod, subject.Service.Domain = namespace, name, domain
			api.Put("/api/v1/namespaces/"+namespace+"/pods/"+name, map[string]any{
				"metadata": map[string]any{"uid": "1"}, "spec": map[string]any{"serviceAccountName": "frontend"}, "status": map[string]any{"phase": "Running", "podIP": "10.1.2.3"},
			})
			document := must.Get(signer.SignDocument(t.Context(), subject))(t)
			body, err := json.Marshal(map[string]any{
				"provider": athenztest.Provider().String(), "domain": domain, "service": "frontend", "attestationData": document, "attributes": map[string]string{"instanceId": name},
			})
			require.NoError(t, err)
			answer, err := p.MutualTLS(cafake.ZTSName).Post("https://"+at["PROVIDER_ADDR"]+"/instance", "application/json", bytes.NewReader(body))
			require.NoError(t, err)
			said := must.Get(io.ReadAll(answer.Body))(t)
			require.NoError(t, answer.Body.Close())
			assert.Equal(t, http.StatusOK, answer.StatusCode, "%s", said)
		}
	}
	api.Done(t, nil)
}
