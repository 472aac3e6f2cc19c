package kube_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

const pods = "/api/v1/namespaces/default/pods"

func pod(node string) map[string]any { return map[string]any{"spec": map[string]any{"nodeName": node}} }

// nameOf returns the type and the name of an event.
func nameOf(t *testing.T, e kube.Event) string {
	t.Helper()
	var o struct {
		Metadata kube.ObjectMeta `json:"metadata"`
	}
	require.NoError(t, json.Unmarshal(e.Object, &o))
	assert.Equal(t, o.Metadata.ResourceVersion, e.ResourceVersion)
	return strings.TrimSpace(e.Type + " " + o.Metadata.Name)
}

// TestWatch follows the pods of one node from a list on, over the ends of watches and over what the
// server forgets.
func TestWatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := kubetest.StartOn(t, 1, memconn.Listen())
		c := clientOf(t, s)
		s.Put(pods+"/old", pod("n1"))
		var list struct {
			Metadata kube.ObjectMeta
			Items    []struct{ Metadata kube.ObjectMeta }
		}
		here := url.Values{"fieldSelector": {"spec.nodeName=n1"}, "allowWatchBookmarks": {"true"}, "timeoutSeconds": {"90"}}
		require.NoError(t, c.Get(t.Context(), "/api/v1/pods", url.Values{"fieldSelector": {"spec.nodeName=n1"}}, &list))
		require.Len(t, list.Items, 1)
		start := list.Metadata.ResourceVersion

		// watch collects what one watch brings while f runs.
		watch := func(from string, f func(stop func())) (got []string, last string, err error) {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			last = from
			q := url.Values{"resourceVersion": {from}}
			maps.Copy(q, here)
			done := make(chan struct{})
			go func() {
				defer close(done)
				for e, failed := range c.Watch(ctx, "/api/v1/pods", q) {
					if failed != nil {
						err = failed
						return
					}
					got, last = append(got, nameOf(t, e)), e.ResourceVersion
				}
			}()
			synctest.Wait()
			f(stop)
			<-done
			return got, last, err
		}

		got, last, err := watch(start, func(func()) {
			s.Put(pods+"/a", pod("n1"))
			s.Put(pods+"/b", pod("n2"))
			s.Put("/api/v1/namespaces/other/pods/c", pod("n1"))
			s.Put(pods+"/a", map[string]any{"metadata": map[string]any{"labels": map[string]any{"x": "y"}}, "spec": map[string]any{"nodeName": "n1"}})
			s.Remove(pods + "/a")
			s.Put(pods+"/b", pod("n1"))
			s.Put(pods+"/b", pod("n2"))
		})
		require.NoError(t, err, "the server ended it after 90 seconds")
		assert.Equal(t, []string{"ADDED a", "ADDED c", "MODIFIED a", "DELETED a", "ADDED b", "DELETED b", "BOOKMARK", "BOOKMARK"}, got)

		s.Put(pods+"/late", pod("n1"))
		got, last = must.Get2(watch(last, func(func()) { s.Bookmark(); synctest.Wait(); s.EndWatches() }))(t)
		assert.Equal(t, []string{"ADDED late", "BOOKMARK"}, got, "nothing is lost between two watches")

		_, last, err = watch(last, func(stop func()) { stop() })
		assert.ErrorIs(t, err, context.Canceled)
		_, _, err = watch(last, func(func()) { s.ExpireWatches() })
		assert.True(t, kube.Gone(err), err)
		forms := map[bool]bool{}
		s.Remove(pods + "/late")
		s.Compact()
		for range 20 {
			got, _, err = watch(last, func(func()) {})
			require.True(t, kube.Gone(err), "%v", err)
			assert.Empty(t, got)
			forms[strings.Contains(err.Error(), "watch: ")] = true
		}
		assert.Len(t, forms, 2, "as the status of the answer, and as an event")
		got, _, err = watch("0", func(func()) { s.EndWatches() })
		require.NoError(t, err)
		assert.Equal(t, []string{"ADDED old", "ADDED c"}, got, "what is there is an event, without a version to start from")
	})
}

// TestWatchEnds shows that no watch hangs: not on a server that does not answer, and not on one that
// does not end it.
func TestWatchEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := memconn.Listen()
		var answering atomic.Bool
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if answering.Load() {
				w.Header().Set("Content-Type", "application/json")
				assert.NoError(t, http.NewResponseController(w).Flush())
			}
			<-r.Context().Done()
			panic(http.ErrAbortHandler) // or else the watch would have an end, which the client may see first
		})}
		go srv.Serve(l)
		t.Cleanup(func() { _ = srv.Close() })
		transport := &http.Transport{DialContext: l.DialContext}
		t.Cleanup(transport.CloseIdleConnections)
		c := must.Get(kube.New(kube.Options{URL: "http://127.0.0.1", Client: &http.Client{Transport: transport}}))(t)

		end := func(q url.Values) (time.Duration, error) {
			start := time.Now()
			rounds, err := 0, error(nil)
			for _, failed := range c.Watch(t.Context(), pods, q) {
				rounds++
				err = failed
			}
			assert.Equal(t, 1, rounds, "the error is the last round")
			return time.Since(start), err
		}
		took, err := end(nil)
		assert.Equal(t, 10*time.Second, took)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		answering.Store(true)
		took, err = end(url.Values{"timeoutSeconds": {"30"}})
		assert.Equal(t, 40*time.Second, took)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		took, err = end(nil)
		assert.Equal(t, 310*time.Second, took)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		why := errors.New("shutting down")
		ctx, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { stop(why) })
		for _, err = range c.Watch(ctx, pods, nil) {
		}
		assert.ErrorIs(t, err, why)
	})
}

// TestWatchQuery shows what is added to a query, and that the caller's stays as it was.
func TestWatchQuery(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	c := clientOf(t, s)
	q := url.Values{"labelSelector": {"a=b"}}
	s.Put(pods+"/x", map[string]any{"metadata": map[string]any{"labels": map[string]any{"a": "b"}}})
	for range 3 {
		for e, err := range c.Watch(t.Context(), pods, q) {
			require.NoError(t, err)
			assert.Equal(t, "ADDED x", nameOf(t, e))
			break // ends the watch
		}
	}
	assert.Equal(t, url.Values{"labelSelector": {"a=b"}}, q)
	require.Len(t, s.Requests(), 3)
	assert.Equal(t, url.Values{"labelSelector": {"a=b"}, "watch": {"true"}, "timeoutSeconds": {"300"}}, s.Requests()[0].Query)
	for _, refused := range []url.Values{{"fieldSelector": {"spec.x=y"}}, {"resourceVersion": {"x"}}} {
		for _, err := range c.Watch(t.Context(), pods, refused) {
			assert.ErrorContains(t, err, "400 BadRequest")
		}
	}
	for _, err := range c.Watch(t.Context(), "pods", nil) {
		assert.ErrorContains(t, err, "slash")
	}
}

// TestWatchOfSomethingElse has an answer that is not a stream of events.
func TestWatchOfSomethingElse(t *testing.T) {
	t.Parallel()
	c := asks(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") })
	for _, err := range c.Watch(t.Context(), pods, nil) {
		assert.ErrorContains(t, err, "is not application/json")
	}
	c = asks(t, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, event("ADDED", "1"))
		assert.NoError(t, http.NewResponseController(w).Flush())
		panic(http.ErrAbortHandler)
	})
	var last error
	for _, last = range c.Watch(t.Context(), pods, nil) {
	}
	assert.ErrorIs(t, last, io.ErrUnexpectedEOF, "a connection that breaks is not the end of a watch")
}

func event(kind, version string) string {
	return fmt.Sprintf(`{"type":%q,"object":{"kind":"Pod","metadata":{"name":"a","resourceVersion":%q}}}`, kind, version) + "\n"
}

// TestStreams has streams of events, by what their last round says.
func TestStreams(t *testing.T) {
	t.Parallel()
	good := event("ADDED", "1")
	for _, c := range []struct {
		stream string
		rounds int
		want   string // "" for the end of the stream
	}{
		{"", 0, ""},
		{"\n \r\n\n", 0, ""},
		{good + event("BOOKMARK", "2") + event("MODIFIED", "3") + event("DELETED", "4"), 4, ""},
		{strings.TrimSpace(good), 1, ""},
		{strings.ReplaceAll(good, "\n", "\r\n"), 1, ""},
		{`{"type":"ADDED","object":{"metadata":{"resourceVersion":"1"}},"new":7}`, 1, ""},
		{good + `{"type":"ERROR","object":{"kind":"Status","reason":"Expired","code":410}}`, 2, "410 Expired"},
		{`{"type":"ERROR","object":{"kind":"Status","reason":"InternalError"}}`, 1, "500 InternalError"},
		{`{"type":"ERROR","object":{}}`, 1, "500 Internal Server Error"},
		{`{"type":"ERROR"}`, 1, "500 Internal Server Error"},
		{good + strings.TrimSpace(good)[:20], 2, "not JSON: syntax error"},
		{good + strings.TrimSpace(good) + good, 2, "not JSON: syntax error"},
		{good + "null\n" + good, 2, `unknown type ""`},
		{"[]\n", 1, "cannot be read"},
		{"7\n", 1, "cannot be read"},
		{`{"type":"ADDED"}`, 1, "has no object that can be read"},
		{`{"type":"ADDED","object":null}`, 1, "has no object that can be read"},
		{`{"type":"ADDED","object":[]}`, 1, "has no object that can be read"},
		{`{"type":"ADDED","object":{}}`, 1, "has no object that can be read"},
		{`{"type":"ADDED","object":{"metadata":7}}`, 1, "has no object that can be read"},
		{`{"type":"ADDED","object":{"metadata":{"resourceVersion":7}}}`, 1, "has no object that can be read"},
		{`{"type":"added","object":{"metadata":{"resourceVersion":"1"}}}`, 1, `unknown type "added"`},
		{`{"object":{"metadata":{"resourceVersion":"1"}}}`, 1, `unknown type ""`},
		{`{"type":7,"object":{"metadata":{"resourceVersion":"1"}}}`, 1, "cannot be read"},
		{good + strings.Repeat(" ", kube.MaxAnswer) + good, 2, "larger than 4 MiB"},
		{strings.Repeat("[", 1<<20), 1, "not JSON"},
	} {
		rounds, last := 0, error(nil)
		for e, err := range kube.Events(strings.NewReader(c.stream)) {
			rounds++
			require.NoError(t, last, "the error is the last round")
			last = err
			if err == nil {
				assert.True(t, json.Valid(e.Object))
			}
		}
		assert.Equal(t, c.rounds, rounds, "%.200s", c.stream)
		if c.want == "" {
			assert.NoError(t, last, "%.200s", c.stream)
		} else {
			assert.ErrorContains(t, last, c.want, "%.200s", c.stream)
		}
	}
}

// TestEventsAreTheCallers shows that an event does not change while the next one is read.
func TestEventsAreTheCallers(t *testing.T) {
	t.Parallel()
	var kept []kube.Event
	for e, err := range kube.Events(strings.NewReader(event("ADDED", "1") + event("ADDED", "2"))) {
		require.NoError(t, err)
		kept = append(kept, e)
	}
	assert.Contains(t, string(kept[0].Object), `"resourceVersion":"1"`)
	assert.Contains(t, string(kept[1].Object), `"resourceVersion":"2"`)
}

// FuzzEvents has hostile streams: what comes out is complete, and ends with the first error.
func FuzzEvents(f *testing.F) {
	f.Add([]byte(event("ADDED", "1") + event("BOOKMARK", "2")))
	f.Add([]byte(`{"type":"ERROR","object":{"kind":"Status","code":410}}`))
	f.Add([]byte(event("DELETED", "1") + "{"))
	f.Add([]byte("{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"resourceVersion\":\"1\"},\"a\":[[[{}]]]}}\r\nnull"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		var last error
		for e, err := range kube.Events(strings.NewReader(string(stream))) {
			if last != nil {
				t.Fatal("something comes after an error")
			}
			if last = err; err != nil {
				if s, ok := errors.AsType[*kube.StatusError](err); ok && s.Code < 100 {
					t.Errorf("code %d", s.Code)
				}
				continue
			}
			if !json.Valid(e.Object) || e.ResourceVersion == "" || e.Type == "ERROR" {
				t.Errorf("%+v", e)
			}
		}
	})
}
