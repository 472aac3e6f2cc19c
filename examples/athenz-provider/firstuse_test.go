package main

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/athenz-provider/firstuse"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

const usedObject = "/api/v1/namespaces/athenz/configmaps/used-documents"

// replicas are providers of one cluster.
type replicas struct {
	*athenztest.Cluster
	t      *testing.T
	client *http.Client
	urls   []string
}

func newReplicas(t *testing.T) *replicas {
	t.Helper()
	r := &replicas{Cluster: athenztest.New(t), t: t}
	r.client = r.MutualTLS(cafake.ZTSName)
	for range 2 {
		r.add()
	}
	return r
}

// add starts a replica.
func (r *replicas) add() {
	r.t.Helper()
	cfg := r.ProviderConfig()
	var err error
	cfg.FirstUse, err = firstuse.InConfigMap(r.API.URL(), nil, "athenz/used-documents")
	require.NoError(r.t, err)
	r.urls = append(r.urls, r.ServeProvider(cfg)+"/instance")
}

// confirm shows a document to a replica.
func (r *replicas) confirm(replica int, document string) int {
	body, err := json.Marshal(confirmation(document))
	if !assert.NoError(r.t, err) {
		return 0
	}
	answer, err := r.client.Post(r.urls[replica], "application/json", strings.NewReader(string(body)))
	if !assert.NoError(r.t, err) {
		return 0
	}
	_ = answer.Body.Close()
	return answer.StatusCode
}

// confirmation is what ZTS asks about a document.
func confirmation(document string) map[string]any {
	return map[string]any{
		"provider": "k8s.admin.athenz-callback", "domain": "media.sports", "service": "frontend", "attestationData": document,
		"attributes": map[string]any{"instanceId": "web-0"},
	}
}

// TestFirstUse has two replicas be shown documents at the same time: each is good once, and after a restart no more.
func TestFirstUse(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-12-12")
	r := newReplicas(t)
	r.API.Put(usedObject, map[string]any{"metadata": map[string]any{"labels": map[string]any{"team": "a"}}, "data": map[string]any{"other": "text"}})
	var documents []string
	for range 12 {
		documents = append(documents, r.Sign(nil))
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
	assert.Equal(t, 200, r.confirm(2, r.Sign(nil)))

	var object struct {
		Metadata struct{ Labels map[string]string }
		Data     map[string]string
	}
	require.True(t, r.API.Get(usedObject, &object))
	assert.Equal(t, "a", object.Metadata.Labels["team"], "what others have written stays")
	assert.Equal(t, "text", object.Data["other"])
	var used map[string]int64
	require.NoError(t, json.Unmarshal([]byte(object.Data["documents"]), &used))
	assert.Len(t, used, 13)
	first := documents[0]
	sum := sha256.Sum256([]byte(first[:strings.LastIndexByte(first, '.')]))
	assert.InDelta(t, time.Now().Add(6*time.Minute).Unix(), used[base64.RawURLEncoding.EncodeToString(sum[:])], 20)
	assert.NotContains(t, object.Data["documents"], "eyJ")
}

// TestFirstUseFails has the ConfigMap be missing, wrong, full and away. None of that lets a document through, or refuses
// another one for good.
func TestFirstUseFails(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	r := newReplicas(t)
	assert.Equal(t, 503, r.confirm(0, r.Sign(nil)), "there is none")
	assert.Contains(t, r.Log.String(), "create it, without data")
	put := func(text string) {
		r.API.Put(usedObject, map[string]any{"data": map[string]any{"documents": text}})
	}
	for _, text := range []string{"x", "[]", "null", `"x"`, `{"a":"b"}`, `{"a":null}{}`} {
		put(text)
		assert.Equal(t, 503, r.confirm(0, r.Sign(nil)), text)
	}
	many := func(until time.Time) string {
		used := map[string]int64{}
		for n := range 4096 {
			used[fmt.Sprint(n)] = until.Unix()
		}
		text := must.Get(json.Marshal(used))(t)
		return string(text)
	}
	put(many(time.Now().Add(time.Hour)))
	assert.Equal(t, 503, r.confirm(0, r.Sign(nil)), "it is full")
	assert.Contains(t, r.Log.String(), "shorten the lifetime of documents")
	put(many(time.Now().Add(-time.Second)))
	assert.Equal(t, 200, r.confirm(0, r.Sign(nil)), "what has expired is forgotten")
	var object struct{ Data map[string]string }
	require.True(t, r.API.Get(usedObject, &object))
	assert.Less(t, len(object.Data["documents"]), 100)

	at := func(method string) func(*http.Request) bool {
		return func(r *http.Request) bool { return r.Method == method && r.URL.Path == usedObject }
	}
	for _, method := range []string{http.MethodGet, http.MethodPut} {
		for _, fault := range []kubetest.Fault{{Code: 403, Reason: "Forbidden"}, {Code: 500}, {Code: 429}, {Code: 422, Reason: "Invalid"}, {}} {
			if method == http.MethodGet && fault.Code == 0 {
				continue // net/http repeats it
			}
			document := r.Sign(nil)
			r.API.FailNext(1, fault, at(method))
			assert.Equal(t, 503, r.confirm(0, document), "%s %+v", method, fault)
			assert.Equal(t, 200, r.confirm(1, document), "%s %+v", method, fault)
		}
	}
	// It is not known whether the note was written: it was.
	document := r.Sign(nil)
	r.API.FailNext(1, kubetest.Fault{Code: 504, Landed: true}, at(http.MethodPut))
	assert.Equal(t, 503, r.confirm(0, document))
	assert.Equal(t, 403, r.confirm(1, document))
	r.API.FailNext(5, kubetest.Fault{Code: 409, Reason: "Conflict"}, at(http.MethodPut))
	assert.Equal(t, 200, r.confirm(0, r.Sign(nil)), "another replica was faster")
	assert.NotContains(t, r.Log.String(), "eyJ")
}

func TestInConfigMapRefuses(t *testing.T) {
	t.Parallel()
	for _, object := range []string{"", "used-documents", "athenz/a/b", "/used", "athenz/", "A/b"} {
		_, err := firstuse.InConfigMap("http://127.0.0.1:1", nil, object)
		require.ErrorContains(t, err, "namespace and the name", object)
	}
	_, err := firstuse.InConfigMap("http://10.0.0.1", nil, "athenz/used-documents")
	require.ErrorContains(t, err, "first use: ")
}

// A document is noted until a minute after its end, the fraction of a second included, whatever else is noted meanwhile: a replica whose clock is that far
// behind takes it for good until then. What is over makes room, and not before: a full ConfigMap takes the next one as soon as one is.
func TestUsedUntilTheMarginIsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := kubetest.StartOn(t, 1, memconn.Listen())
		defer api.Client().CloseIdleConnections()
		api.Put(usedObject, map[string]any{})
		first := must.Get(firstuse.InConfigMap(api.URL(), api.Client(), "athenz/used-documents"))(t)
		next := byte(1)
		other := func() {
			next++
			is := must.Get(first(t.Context(), [32]byte{next}, time.Now().Add(time.Hour)))(t)
			require.True(t, is)
		}
		expires := time.Now().Truncate(time.Second).Add(10*time.Second + 900*time.Millisecond)
		is := must.Get(first(t.Context(), [32]byte{1}, expires))(t)
		require.True(t, is)
		for _, after := range []time.Duration{-time.Second, 0, 59 * time.Second, time.Minute - time.Millisecond} {
			time.Sleep(time.Until(expires.Add(after)))
			other() // what is over is forgotten
			is = must.Get(first(t.Context(), [32]byte{1}, expires))(t)
			assert.False(t, is, "%v after its end", after)
		}
		time.Sleep(time.Until(expires.Add(time.Minute + time.Second)))
		other()
		var o struct{ Data map[string]string }
		require.True(t, api.Get(usedObject, &o))
		assert.NotContains(t, o.Data["documents"], "AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "it makes room")
	})
}

// As many documents are noted as the ConfigMap is said to have room for, and not one more.
func TestUsedRoom(t *testing.T) {
	t.Parallel()
	api := kubetest.Start(t)
	used := map[string]int64{}
	for i := range 4095 {
		used[strconv.Itoa(i)] = time.Now().Add(time.Hour).Unix()
	}
	data := must.Get(json.Marshal(used))(t)
	api.Put(usedObject, map[string]any{"data": map[string]string{"documents": string(data)}})
	first := must.Get(firstuse.InConfigMap(api.URL(), api.Client(), "athenz/used-documents"))(t)
	is := must.Get(first(t.Context(), [32]byte{1}, time.Now().Add(time.Hour)))(t)
	require.True(t, is)
	_, err := first(t.Context(), [32]byte{2}, time.Now().Add(time.Hour))
	require.ErrorContains(t, err, "4096 documents were used lately")
	is = must.Get(first(t.Context(), [32]byte{1}, time.Now().Add(time.Hour)))(t)
	require.False(t, is, "what is noted is known")
}
