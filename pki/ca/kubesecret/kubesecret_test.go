package kubesecret_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/caclienttest/storetest"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
)

const (
	secrets = "/api/v1/namespaces/istio-system/secrets"
	path    = secrets + "/" + "istio-ca-secret"
	private = "a-value-that-is-private"
)

// secret is what we look at in a Secret.
type secret struct {
	Type     string
	Data     map[string][]byte
	Metadata map[string]any
}

func (s secret) version() string { return s.Metadata["resourceVersion"].(string) }

func storeOf(t *testing.T, s *kubetest.Server, name string) *kubesecret.Store {
	t.Helper()
	store, err := kubesecret.New(kubesecret.Options{Name: name, Namespace: "istio-system", APIServer: s.URL(), HTTPClient: s.Client()})
	require.NoError(t, err)
	return store
}

func stored(t *testing.T, s *kubetest.Server, path string) (out secret) {
	t.Helper()
	require.True(t, s.Get(path, &out), "there is no %s", path)
	return out
}

func record(version, root string) ca.Record {
	return ca.NewRecord(version, map[string][]byte{
		"ca-cert.pem": []byte(root), "ca-key.pem": []byte(private), "cert-chain.pem": {}, "key.pem": nil, "root-cert.pem": []byte(root), "svidkit-state.json": []byte("{}"),
	})
}

func TestStores(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) storetest.Place {
		t.Parallel()
		s := kubetest.Start(t)
		faulty := func(f kubetest.Fault) func() func() {
			return func() func() {
				s.Faults(func(*http.Request) *kubetest.Fault { return &f })
				return func() { s.Faults(nil); s.Release() }
			}
		}
		return storetest.Place{
			Open:  func() (ca.Store, error) { return storeOf(t, s, ""), nil },
			Cut:   func(func()) { s.FailNext(1, kubetest.Fault{Landed: true}, isWrite) }, // nothing happens meanwhile
			Break: faulty(kubetest.Fault{}),
			Hang:  faulty(kubetest.Fault{Hang: true}),
			Dump: func() func() {
				var o map[string]any
				require.True(t, s.Get(path, &o))
				return func() { s.Put(path, o) }
			},
		}
	})
}

// TestRecord has the Secret of a record.
func TestRecord(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	store, ctx := storeOf(t, s, ""), t.Context()
	_, err := store.Load(ctx)
	assert.EqualError(t, err, "kubesecret: load Secret istio-system/istio-ca-secret: no record")
	first := must.Get(store.Save(ctx, record("", "first")))(t)
	o := stored(t, s, path)
	assert.Equal(t, first, o.version())
	assert.Equal(t, "istio.io/ca-root", o.Type)
	assert.Equal(t, map[string][]byte{
		"ca-cert.pem": []byte("first"), "ca-key.pem": []byte(private), "cert-chain.pem": {}, "key.pem": {},
		"root-cert.pem": []byte("first"), "svidkit-state.json": []byte("{}"),
	}, o.Data)
	must.Get(store.Save(ctx, ca.NewRecord(first, map[string][]byte{"ca-cert.pem": []byte("second"), "svidkit-more": {1}})))(t)
	assert.Len(t, stored(t, s, path).Data, 2)
	require.True(t, s.Remove(path))
	assert.ErrorIs(t, must.Err(store.Save(ctx, record(first, "x"))), ca.ErrConflict, "the record is not there against expectation")
	for _, q := range s.Requests() {
		assert.Empty(t, q.Query, "with a resourceVersion, reads could come from a cache")
	}
}

// TestForeign shows that what others have put into the Secret is not in the record, and survives a
// change of it.
func TestForeign(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	store, ctx := storeOf(t, s, ""), t.Context()
	metadata := map[string]any{
		"labels": map[string]any{"app": "istiod"}, "annotations": map[string]any{"note": "<&>"}, "finalizers": []string{"example.org/keep"},
		"ownerReferences": []any{map[string]any{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1", "controller": true}},
		"managedFields":   []any{map[string]any{"manager": "helm", "fieldsV1": map[string]any{"f:data": map[string]any{}}}},
	}
	version := s.Put(path, map[string]any{
		"type": "istio.io/ca-root", "immutable": false, "metadata": metadata, "x-new": 1e9,
		"data": map[string][]byte{"ca-cert.pem": []byte("old"), "key.pem": {}, "tls.crt": []byte("foreign"), "empty": {}, "CA-CERT.PEM": []byte("other")},
	})
	r := must.Get(store.Load(ctx))(t)
	assert.Equal(t, ca.NewRecord(version, map[string][]byte{"ca-cert.pem": []byte("old"), "key.pem": {}}).Data(), r.Data())
	var before, after map[string]any
	require.True(t, s.Get(path, &before))
	must.Get(store.Save(ctx, ca.NewRecord(version, map[string][]byte{"ca-cert.pem": []byte("new")})))(t)
	require.True(t, s.Get(path, &after))
	assert.Equal(t, map[string]any{"ca-cert.pem": "bmV3", "tls.crt": "Zm9yZWlnbg==", "empty": "", "CA-CERT.PEM": "b3RoZXI="}, after["data"])
	delete(before, "data")
	delete(after, "data")
	for _, o := range []map[string]any{before, after} {
		delete(o["metadata"].(map[string]any), "resourceVersion")
	}
	assert.Equal(t, before, after)
	assert.Contains(t, after, "x-new")
}

// TestPrepared shows that an empty Secret, which an operator has made so that RBAC can name it, is
// like none, and that one of many replicas that race to fill it wins.
func TestPrepared(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	s.Put(path, map[string]any{"type": "istio.io/ca-root", "metadata": map[string]any{"labels": map[string]any{"app": "istiod"}}, "data": map[string][]byte{"ca-key.pem": {}, "note": {1}}})
	s.FailNext(1<<20, kubetest.Fault{Code: 403, Reason: "Forbidden"}, func(r *http.Request) bool { return r.Method == http.MethodPost })
	s.Latency(2 * time.Millisecond)
	var mu sync.Mutex
	var won []string
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			store := storeOf(t, s, "")
			_, err := store.Load(t.Context())
			if errors.Is(err, ca.ErrNoRecord) {
				var version string
				if version, err = store.Save(t.Context(), record("", fmt.Sprint(i))); err == nil {
					mu.Lock()
					won = append(won, version)
					mu.Unlock()
					return
				}
				assert.ErrorIs(t, err, ca.ErrConflict)
				return
			}
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	require.Len(t, won, 1)
	o := stored(t, s, path)
	assert.Equal(t, won[0], o.version())
	assert.Equal(t, []byte{1}, o.Data["note"])
	assert.Equal(t, map[string]any{"app": "istiod"}, o.Metadata["labels"])
}

// TestCACerts shows the mark by which Istio knows a generated CA in the Secret for those of operators.
func TestCACerts(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.1-2", "IST-3.1-6", "IST-3.5-3", "IST-3.7-4")
	s := kubetest.Start(t)
	store, ctx := storeOf(t, s, "cacerts"), t.Context()
	version := must.Get(store.Save(ctx, record("", "root")))(t)
	where := secrets + "/cacerts"
	mark, ok := stored(t, s, where).Data["istio-generated"]
	assert.True(t, ok)
	assert.Empty(t, mark)
	must.Get(store.Save(ctx, record(version, "next")))(t)
	assert.Contains(t, stored(t, s, where).Data, "istio-generated")
	r := must.Get(store.Load(ctx))(t)
	assert.NotContains(t, r.Data(), "istio-generated")

	// Without the mark, it is the operator's.
	s.Put(where, map[string]any{"type": "istio.io/ca-root", "data": map[string][]byte{"ca-cert.pem": []byte("theirs"), "ca-key.pem": []byte(private)}})
	o := stored(t, s, where)
	_, err := store.Load(ctx)
	assert.ErrorContains(t, err, "has no istio-generated in it, so an operator has made this CA: load it as a plugged-in CA")
	for _, version := range []string{"", o.version()} {
		_, err = store.Save(ctx, record(version, "ours"))
		assert.ErrorContains(t, err, "an operator has made this CA")
		assert.NotErrorIs(t, err, ca.ErrConflict)
	}
	assert.Equal(t, o, stored(t, s, where))

	// One that is empty holds no CA yet.
	s.Put(where, map[string]any{"type": "istio.io/ca-root"})
	must.Get(store.Save(ctx, record("", "root")))(t)
	assert.Contains(t, stored(t, s, where).Data, "istio-generated")

	must.Get(storeOf(t, s, "").Save(ctx, record("", "root")))(t)
	assert.NotContains(t, stored(t, s, path).Data, "istio-generated", "only that Secret has it")
}

// TestUnfit has Secrets in which no CA can be kept. They are not taken for missing, and not changed.
func TestUnfit(t *testing.T) {
	t.Parallel()
	data := map[string][]byte{"ca-cert.pem": []byte("x"), "ca-key.pem": []byte(private)}
	for want, o := range map[string]map[string]any{
		`has the type "Opaque", not "istio.io/ca-root": use another name`: {"type": "Opaque", "data": data},
		`has the type "kubernetes.io/tls"`:                                {"type": "kubernetes.io/tls"},
		`has the type "istio.io/ca-root "`:                                {"type": "istio.io/ca-root ", "data": data},
		`is immutable, so a root in it could never be replaced`:           {"type": "istio.io/ca-root", "immutable": true, "data": data},
	} {
		s := kubetest.Start(t)
		store := storeOf(t, s, "")
		version := s.Put(path, o)
		_, err := store.Load(t.Context())
		require.ErrorContains(t, err, want)
		assert.NotErrorIs(t, err, ca.ErrNoRecord)
		for _, v := range []string{"", version, "1"} {
			_, err = store.Save(t.Context(), record(v, "r"))
			require.ErrorContains(t, err, want)
			assert.NotErrorIs(t, err, ca.ErrConflict)
		}
		assert.Equal(t, version, stored(t, s, path).version())
	}
}

// lying is an API server that answers everything in one way.
type lying struct {
	code int
	kind string // the Content-Type; empty means JSON
	body string
}

func (l lying) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_, _ = io.Copy(io.Discard, r.Body)
		_ = r.Body.Close()
	}
	kind := l.kind
	if kind == "" {
		kind = "application/json"
	}
	return &http.Response{
		StatusCode: l.code, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{"Content-Type": {kind}},
		Body: io.NopCloser(strings.NewReader(l.body)), ContentLength: int64(len(l.body)), Request: r,
	}, nil
}

func (l lying) store(t testing.TB) *kubesecret.Store {
	t.Helper()
	store, err := kubesecret.New(kubesecret.Options{Namespace: "istio-system", APIServer: "https://kubernetes", HTTPClient: &http.Client{Transport: l}})
	require.NoError(t, err)
	return store
}

// TestLoadErrors has answers that do not say whether there is a record. None of them may make an
// authority create a second CA.
func TestLoadErrors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.5-6")
	good := func(edit string) string {
		o := `{"kind":"Secret","apiVersion":"v1","type":"istio.io/ca-root","metadata":{"name":"istio-ca-secret","namespace":"istio-system","resourceVersion":"7"},"data":{"ca-key.pem":"AAAA"}}`
		from, to, _ := strings.Cut(edit, "=>")
		require.Contains(t, o, from)
		return strings.Replace(o, from, to, 1)
	}
	r := must.Get(lying{200, "", good("=>")}.store(t).Load(t.Context()))(t)
	assert.Equal(t, "7", r.Version)
	for _, c := range []struct {
		want string
		l    lying
	}{
		{"404 Not Found", lying{404, "text/html", "<html>"}},
		{"404 Not Found", lying{404, "", `{"error":"not found"}`}},
		{"404 Not Found", lying{404, "", `{"kind":"Status","message":"no such host"}`}},
		{"may not get the Secret: bind it to a Role in namespace \"istio-system\" with the verbs get, create and update", lying{403, "", `{"kind":"Status","reason":"Forbidden"}`}},
		{"401 Unauthorized", lying{401, "", `{"kind":"Status","reason":"Unauthorized"}`}},
		{"410", lying{410, "", `{}`}},
		{"500", lying{500, "", `{"kind":"Status","reason":"NotFound"}`}},
		{"503", lying{503, "text/plain", ``}},
		{"is not application/json", lying{200, "text/html", "<html>"}},
		{"redirects", lying{302, "", ""}},
		{"not the JSON", lying{200, "", ""}},
		{"not the JSON", lying{200, "", "{"}},
		{"something else", lying{200, "", "{}"}},
		{"something else", lying{200, "", "null"}},
		{"something else", lying{200, "", good(`"kind":"Secret"=>"kind":"ConfigMap"`)}},
		{"something else", lying{200, "", good(`"kind":"Secret",=>`)}},
		{"something else", lying{200, "", good(`"name":"istio-ca-secret"=>"name":"other"`)}},
		{"something else", lying{200, "", good(`"namespace":"istio-system"=>"namespace":"other"`)}},
		{"something else", lying{200, "", good(`"resourceVersion":"7"=>"resourceVersion":""`)}},
		{"has the type \"\"", lying{200, "", good(`"type":"istio.io/ca-root",=>`)}},
		{"cannot be read", lying{200, "", good(`AAAA=>AAA`)}},
		{"cannot be read", lying{200, "", good(`AAAA=>` + private)}},
		{"cannot be read", lying{200, "", good(`"AAAA"=>7`)}},
		{"cannot be read", lying{200, "", good(`{"ca-key.pem":"AAAA"}=>[]`)}},
		{"larger than 4 MiB", lying{200, "", good(`AAAA=>` + strings.Repeat("AAAA", 1<<20))}},
	} {
		_, err := c.l.store(t).Load(t.Context())
		require.ErrorContains(t, err, c.want, "%d %.100s", c.l.code, c.l.body)
		assert.ErrorContains(t, err, "kubesecret: load Secret istio-system/istio-ca-secret: ")
		assert.NotErrorIs(t, err, ca.ErrNoRecord)
		assert.NotContains(t, err.Error(), private)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestWhatIsSent looks at the Secret that is sent, to a server that does not answer with what it made.
func TestWhatIsSent(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.1-1", "IST-3.1-3")
	var sent string
	store, err := kubesecret.New(kubesecret.Options{Namespace: "n", APIServer: "https://kubernetes", HTTPClient: &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Method == http.MethodGet {
			return lying{404, "", `{"kind":"Status","reason":"NotFound"}`}.RoundTrip(r)
		}
		body, err := io.ReadAll(r.Body)
		sent = string(body)
		assert.NoError(t, err)
		return lying{201, "", `{}`}.RoundTrip(r)
	})}})
	require.NoError(t, err)
	_, err = store.Save(t.Context(), ca.NewRecord("", map[string][]byte{"ca-cert.pem": []byte("c"), "cert-chain.pem": {}, "key.pem": nil}))
	assert.ErrorContains(t, err, "does not say as which version: load it again")
	assert.JSONEq(t, `{"apiVersion":"v1","kind":"Secret","type":"istio.io/ca-root","metadata":{"name":"istio-ca-secret","namespace":"n"},"data":{"ca-cert.pem":"Yw==","cert-chain.pem":"","key.pem":""}}`, sent)
}

// TestUncertain has changes whose outcome is not known. The error tells the engine
// to look, and what it finds is right in either case.
func TestUncertain(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := kubetest.StartOn(t, 1, memconn.Listen())
		store, ctx := storeOf(t, s, ""), t.Context()
		changes := func(r *http.Request) bool { return r.Method != http.MethodGet }
		version, root := "", "none"
		for i, fault := range []kubetest.Fault{{}, {Code: 500}, {Code: 503}, {Code: 504}, {Hang: true}} {
			for _, fault.Landed = range []bool{false, true, false, true} {
				next := fmt.Sprint(i, fault.Landed, version)
				s.FailNext(1, fault, changes)
				start := time.Now()
				_, err := store.Save(ctx, record(version, next))
				require.ErrorContains(t, err, "it is not known whether the Secret was written, so load it again")
				assert.NotErrorIs(t, err, ca.ErrConflict)
				if fault.Hang {
					assert.Equal(t, 10*time.Second, time.Since(start))
					assert.ErrorIs(t, err, context.DeadlineExceeded)
				}
				r, err := store.Load(ctx)
				if !fault.Landed && version == "" {
					require.ErrorIs(t, err, ca.ErrNoRecord)
					continue
				}
				require.NoError(t, err)
				if fault.Landed {
					root = next
				}
				assert.Equal(t, root, string(r.Data()["ca-cert.pem"]))
				assert.Equal(t, fault.Landed, r.Version != version)
				version = r.Version
			}
		}
	})
}

// TestRefusedChanges has changes that the API server refuses for certain.
func TestRefusedChanges(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	store, ctx := storeOf(t, s, ""), t.Context()
	changes := func(r *http.Request) bool { return r.Method != http.MethodGet }
	version := ""
	for _, verb := range []string{"create", "update"} {
		for _, c := range []struct {
			fault kubetest.Fault
			want  string
			is    error
		}{
			{kubetest.Fault{Code: 403, Reason: "Forbidden"}, "the service account may not " + verb + " the Secret: bind it to a Role", nil},
			{kubetest.Fault{Code: 401, Reason: "Unauthorized"}, "401 Unauthorized", nil},
			{kubetest.Fault{Code: 422, Reason: "Invalid", Message: "quoting " + private}, "422 Invalid", nil},
			{kubetest.Fault{Code: 429}, "429", nil},
			{kubetest.Fault{Code: 409, Reason: "Conflict"}, "", ca.ErrConflict},
			{kubetest.Fault{Code: 409, Reason: "AlreadyExists"}, "", ca.ErrConflict},
			{kubetest.Fault{Code: 404, Reason: "NotFound"}, "", nil},
		} {
			s.FailNext(1, c.fault, changes)
			_, err := store.Save(ctx, record(version, "r"))
			require.ErrorContains(t, err, c.want)
			assert.NotContains(t, err.Error(), "it is not known")
			assert.NotContains(t, err.Error(), private)
			switch {
			case c.is != nil:
				assert.ErrorIs(t, err, c.is)
			case c.fault.Code == 404 && verb == "create":
				assert.ErrorContains(t, err, `is there a namespace "istio-system"?`)
				assert.NotErrorIs(t, err, ca.ErrNoRecord)
			case c.fault.Code == 404:
				assert.ErrorIs(t, err, ca.ErrConflict)
			default:
				assert.NotErrorIs(t, err, ca.ErrConflict)
			}
		}
		version = must.Get(store.Save(ctx, record(version, "r")))(t)
	}
	// An error of the read before the change is told apart from one of the change.
	s.FailNext(1, kubetest.Fault{Code: 500}, nil)
	_, err := store.Save(ctx, record(version, "x"))
	require.ErrorContains(t, err, "500")
	assert.NotContains(t, err.Error(), "it is not known")
}

// TestRecordsThatAreRefused are not sent.
func TestRecordsThatAreRefused(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	store := storeOf(t, s, "")
	for _, name := range []string{"tls.crt", "istio-generated", ""} {
		for _, version := range []string{"", "1"} {
			err := must.Err(store.Save(t.Context(), ca.NewRecord(version, map[string][]byte{"ca-cert.pem": {1}, name: {1}})))
			assert.ErrorContains(t, err, fmt.Sprintf("the name %q is not one of a record", name))
		}
	}
	assert.Zero(t, s.Count(http.MethodPost, "/")+s.Count(http.MethodPut, "/"))
	assert.ErrorContains(t, must.Err(store.Save(t.Context(), ca.NewRecord("", map[string][]byte{"svidkit-a/b": {1}}))), "422 Invalid")
}

// TestOptions has options that are refused, by what the error says.
func TestOptions(t *testing.T) {
	t.Parallel()
	hc := &http.Client{}
	for _, c := range []struct {
		want string
		o    kubesecret.Options
	}{
		{`Name "Secret" cannot be`, kubesecret.Options{Name: "Secret", Namespace: "n", APIServer: "https://k", HTTPClient: hc}},
		{`Name "a/b" cannot be`, kubesecret.Options{Name: "a/b", Namespace: "n", APIServer: "https://k", HTTPClient: hc}},
		{`Name ".." cannot be`, kubesecret.Options{Name: "..", Namespace: "n", APIServer: "https://k", HTTPClient: hc}},
		{`Namespace "a.b" cannot be`, kubesecret.Options{Namespace: "a.b", APIServer: "https://k", HTTPClient: hc}},
		{`Namespace "../x" cannot be`, kubesecret.Options{Namespace: "../x", APIServer: "https://k", HTTPClient: hc}},
		{"set Namespace", kubesecret.Options{APIServer: "https://k", HTTPClient: hc}}, // no test runs in a pod
		{"want an https URL", kubesecret.Options{Namespace: "n", APIServer: "unix://k", HTTPClient: hc}},
		{"http is for loopback addresses", kubesecret.Options{Namespace: "n", APIServer: "http://k", HTTPClient: hc}},
		{"not sent without TLS", kubesecret.Options{Namespace: "n", APIServer: "http://127.0.0.1"}},
	} {
		_, err := kubesecret.New(c.o)
		assert.ErrorContains(t, err, c.want)
		assert.ErrorContains(t, err, "kubesecret: invalid Options: ")
	}
}

// TestPrinting shows that a Store prints where it keeps its record, and nothing else.
func TestPrinting(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	store := storeOf(t, s, "")
	must.Get(store.Save(t.Context(), record("", "root")))(t)
	must.Get(store.Load(t.Context()))(t)
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "store", store)
	for verb := range strings.FieldsSeq("%v %+v %#v %s") {
		log.WriteString(fmt.Sprintf(verb, store))
	}
	assert.NotContains(t, log.String(), private)
	assert.Equal(t, 5, strings.Count(log.String(), "istio-system/istio-ca-secret"))
}

// FuzzSecret has hostile answers of an API server: what is loaded is what a Secret says, and an
// answer that is not a Secret is never taken for the absence of one.
func FuzzSecret(f *testing.F) {
	const o = `{"kind":"Secret","type":"istio.io/ca-root","metadata":{"name":"istio-ca-secret","namespace":"istio-system","resourceVersion":"7"},"data":{"ca-key.pem":"AAAA","x":"AA=="}}`
	f.Add([]byte(o))
	f.Add([]byte(strings.Replace(o, "AAAA", "", 1)))
	f.Add([]byte(strings.Replace(o, `{"ca-key.pem":"AAAA","x":"AA=="}`, "null", 1)))
	f.Add([]byte(`{"kind":"Status","reason":"NotFound","code":404}`))
	f.Add([]byte(`{"data":{"ca-key.pem":"not base64"}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		store := lying{200, "", string(body)}.store(t)
		r, err := store.Load(t.Context())
		var want struct {
			Kind string            `json:"kind"`
			Type string            `json:"type"`
			Data map[string][]byte `json:"data"`
		}
		if json.Unmarshal(body, &want) != nil || want.Kind != "Secret" || want.Type != "istio.io/ca-root" {
			if err == nil || errors.Is(err, ca.ErrNoRecord) {
				t.Fatalf("%q gives %v", body, err)
			}
			return
		}
		if err != nil {
			return
		}
		if r.Version == "" || len(r.Data()) == 0 {
			t.Errorf("%q gives %v", body, r)
		}
		for name, value := range r.Data() {
			if !bytes.Equal(value, want.Data[name]) {
				t.Errorf("%q gives another %s", body, name)
			}
		}
	})
}
