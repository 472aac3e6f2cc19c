package athenzprog_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/athenzprog"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/pki/athenzname"
)

const usedObject = "/api/v1/namespaces/athenz/configmaps/used-documents"

// replicas are providers of one cluster.
type replicas struct {
	*place
	api    *kubetest.Server
	client *http.Client
	urls   []string
	log    record
	signed time.Duration
}

// record is a log that the test reads.
type record struct {
	mu   sync.Mutex
	text strings.Builder
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

func newReplicas(t *testing.T) *replicas {
	t.Helper()
	r := &replicas{place: newPlace(t), api: kubetest.Start(t)}
	r.api.Put("/api/v1/namespaces/media-sports/pods/web-0", map[string]any{
		"metadata": map[string]any{"uid": "1"}, "spec": map[string]any{"serviceAccountName": "frontend"}, "status": map[string]any{"phase": "Running", "podIP": "10.1.2.3"},
	})
	r.client = r.mutual(cafake.ZTSName)
	for range 2 {
		r.add()
	}
	return r
}

// add starts a replica.
func (r *replicas) add() {
	r.t.Helper()
	at := r.start(athenzprog.Provider(), &r.log, "KUBERNETES_API="+r.api.URL(), "USED_DOCUMENTS=athenz/used-documents", "HEALTH_ADDR=off")
	r.urls = append(r.urls, "https://"+at["PROVIDER_ADDR"].String()+"/instance")
}

// sign returns another document each time.
func (r *replicas) sign() string {
	r.t.Helper()
	r.signed += time.Second
	signer, err := athenz.NewSigner(athenz.SignerOptions{Dir: r.path("private"), Lifetime: time.Minute + r.signed})
	require.NoError(r.t, err)
	text, err := signer.SignDocument(r.t.Context(), athenz.PodSubject{
		Namespace: "media-sports", Pod: "web-0", Service: athenzname.Service{Domain: "media.sports", Name: "frontend"}, IP: netip.MustParseAddr("10.1.2.3"),
	})
	require.NoError(r.t, err)
	return text
}

// confirm shows a document to a replica.
func (r *replicas) confirm(replica int, document string) int {
	body, err := json.Marshal(map[string]any{
		"provider": providerName, "domain": "media.sports", "service": "frontend", "attestationData": document, "attributes": map[string]string{"instanceId": "web-0"},
	})
	if !assert.NoError(r.t, err) {
		return 0
	}
	answer, err := r.client.Post(r.urls[replica], "application/json", bytes.NewReader(body))
	if !assert.NoError(r.t, err) {
		return 0
	}
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode
}

// TestUsedDocuments has two replicas be shown documents at the same time: each is good once, and after a restart no more.
func TestUsedDocuments(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-12-12")
	r := newReplicas(t)
	r.api.Put(usedObject, map[string]any{"metadata": map[string]any{"labels": map[string]any{"team": "a"}}, "data": map[string]any{"other": "text"}})
	var documents []string
	for range 12 {
		documents = append(documents, r.sign())
	}
	var mu sync.Mutex
	codes := map[string]map[int]int{}
	var wg sync.WaitGroup
	for _, document := range documents {
		codes[document] = map[int]int{}
		for n := range 4 {
			wg.Go(func() {
				code := r.confirm(n%2, document)
				mu.Lock()
				defer mu.Unlock()
				codes[document][code]++
			})
		}
	}
	wg.Wait()
	for _, document := range documents {
		assert.Equal(t, map[int]int{200: 1, 403: 3}, codes[document])
	}
	r.add()
	assert.Equal(t, 403, r.confirm(2, documents[0]))
	assert.Equal(t, 200, r.confirm(2, r.sign()))

	var object struct {
		Metadata struct{ Labels map[string]string }
		Data     map[string]string
	}
	require.True(t, r.api.Get(usedObject, &object))
	assert.Equal(t, "a", object.Metadata.Labels["team"], "what others have written stays")
	assert.Equal(t, "text", object.Data["other"])
	var used map[string]int64
	require.NoError(t, json.Unmarshal([]byte(object.Data["documents"]), &used))
	assert.Len(t, used, 13)
	first := documents[0]
	sum := sha256.Sum256([]byte(first[:strings.LastIndexByte(first, '.')]))
	assert.InDelta(t, time.Now().Add(2*time.Minute).Unix(), used[base64.RawURLEncoding.EncodeToString(sum[:])], 20)
	assert.NotContains(t, object.Data["documents"], "eyJ")
}

// TestClocksApart has the clock of the provider be ahead of that of the signing service: a document is good for some seconds
// more, and even then once.
func TestClocksApart(t *testing.T) {
	t.Parallel()
	r := newReplicas(t)
	r.api.Put(usedObject, map[string]any{})
	signer, err := athenz.NewSigner(athenz.SignerOptions{Dir: r.path("private"), Lifetime: time.Second})
	require.NoError(t, err)
	document, err := signer.SignDocument(t.Context(), athenz.PodSubject{
		Namespace: "media-sports", Pod: "web-0", Service: athenzname.Service{Domain: "media.sports", Name: "frontend"}, IP: netip.MustParseAddr("10.1.2.3"),
	})
	require.NoError(t, err)
	time.Sleep(1100 * time.Millisecond)
	assert.Equal(t, 200, r.confirm(0, document))
	assert.Equal(t, 403, r.confirm(1, document))
}

// TestUsedDocumentsFail has the ConfigMap be missing, wrong, full and away. None of that lets a document through, or refuses
// another one for good.
func TestUsedDocumentsFail(t *testing.T) {
	t.Parallel()
	r := newReplicas(t)
	assert.Equal(t, 503, r.confirm(0, r.sign()), "there is none")
	assert.Contains(t, r.log.String(), "create it, without data")
	put := func(text string) {
		r.api.Put(usedObject, map[string]any{"data": map[string]any{"documents": text}})
	}
	for _, text := range []string{"x", "[]", "null", `"x"`, `{"a":"b"}`, `{"a":null}{}`} {
		put(text)
		assert.Equal(t, 503, r.confirm(0, r.sign()), text)
	}
	many := func(until time.Time) string {
		used := map[string]int64{}
		for n := range 4096 {
			used[fmt.Sprint(n)] = until.Unix()
		}
		text, err := json.Marshal(used)
		require.NoError(t, err)
		return string(text)
	}
	put(many(time.Now().Add(time.Hour)))
	assert.Equal(t, 503, r.confirm(0, r.sign()), "it is full")
	assert.Contains(t, r.log.String(), "TOKEN_EXPIRY")
	put(many(time.Now().Add(-time.Second)))
	assert.Equal(t, 200, r.confirm(0, r.sign()), "what has expired is forgotten")
	var object struct{ Data map[string]string }
	require.True(t, r.api.Get(usedObject, &object))
	assert.Less(t, len(object.Data["documents"]), 100)

	at := func(method string) func(*http.Request) bool {
		return func(r *http.Request) bool { return r.Method == method && r.URL.Path == usedObject }
	}
	for _, method := range []string{http.MethodGet, http.MethodPut} {
		for _, fault := range []kubetest.Fault{{Code: 403, Reason: "Forbidden"}, {Code: 500}, {Code: 429}, {Code: 422, Reason: "Invalid"}, {}} {
			if method == http.MethodGet && fault.Code == 0 {
				continue // net/http repeats it
			}
			document := r.sign()
			r.api.FailNext(1, fault, at(method))
			assert.Equal(t, 503, r.confirm(0, document), "%s %+v", method, fault)
			assert.Equal(t, 200, r.confirm(1, document), "%s %+v", method, fault)
		}
	}
	// It is not known whether the note was written: it was.
	document := r.sign()
	r.api.FailNext(1, kubetest.Fault{Code: 504, Landed: true}, at(http.MethodPut))
	assert.Equal(t, 503, r.confirm(0, document))
	assert.Equal(t, 403, r.confirm(1, document))
	r.api.FailNext(5, kubetest.Fault{Code: 409, Reason: "Conflict"}, at(http.MethodPut))
	assert.Equal(t, 200, r.confirm(0, r.sign()), "another replica was faster")
	assert.NotContains(t, r.log.String(), "eyJ")
}
