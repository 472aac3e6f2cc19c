package kube_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

// thing is an object of a cluster.
type thing struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Text string `json:"text"`
}

// things answers lists page by page, as the test lets it, and watches with events of the test.
type things struct {
	pages  chan []string // one for each request of a page; the last page of a list is marked by ""
	events chan string   // "ADDED name text"; "" ends the watch
}

func (c *things) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("watch") == "" {
		items, next := []any{}, "more"
		var names []string
		select {
		case names = <-c.pages:
		case <-r.Context().Done():
			return
		}
		for _, name := range names {
			if name == "" {
				next = ""
				continue
			}
			items = append(items, map[string]any{"kind": "Thing", "metadata": map[string]any{"name": name}, "text": "listed"})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "ThingList", "metadata": map[string]any{"resourceVersion": "1", "continue": next}, "items": items})
		return
	}
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	for {
		select {
		case e := <-c.events:
			parts := strings.Fields(e)
			if len(parts) == 0 {
				fmt.Fprintln(w, `{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "expired"}}`)
				return
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"type": parts[0], "object": map[string]any{
				"kind": "Thing", "metadata": map[string]any{"name": parts[1], "resourceVersion": "2"}, "text": parts[2],
			}})
			_ = http.NewResponseController(w).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// A list counts when its last page is there, not before: until then what later pages have would be taken for missing. A second
// list replaces the first as a whole.
func TestFollowListOfPages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &things{pages: make(chan []string), events: make(chan string)}
		l := memconn.Listen()
		srv := &http.Server{Handler: c}
		var running sync.WaitGroup
		running.Go(func() { _ = srv.Serve(l) })
		transport := &http.Transport{DialContext: l.DialContext}
		api := must.Get(kube.New(kube.Options{URL: "http://127.0.0.1", Client: &http.Client{Transport: transport}}))(t)
		k := &kubefollow.Keeper{Name: "things", Log: ratelog.New(nil, 0)}
		o := &kubefollow.Objects[thing]{
			Follower: kubefollow.Follower[thing]{API: api, Path: kube.Path("api", "v1", "things"), Kind: "Thing"},
			Name:     func(one *thing) string { return one.Metadata.Name }, Keeper: k,
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer func() {
			cancel()
			_ = srv.Close()
			transport.CloseIdleConnections()
			running.Wait()
		}()
		running.Go(func() { o.Run(ctx) })
		names := func() []string { return slices.Sorted(maps.Keys(o.All())) }
		news := k.News.Changed()
		told := func() bool {
			select {
			case <-news:
				news = k.News.Changed()
				return true
			default:
				return false
			}
		}
		page := func(names ...string) {
			c.pages <- names
			synctest.Wait()
		}

		require.Nil(t, o.All(), "nothing was listed")
		page("a", "b")
		require.Nil(t, o.All(), "a page is no list")
		page("c")
		require.Nil(t, o.All())
		require.False(t, told())
		page("d", "")
		require.Equal(t, []string{"a", "b", "c", "d"}, names())
		require.True(t, told())

		before := o.All()
		for _, event := range []string{"ADDED e new", "MODIFIED a changed", "DELETED b old"} {
			c.events <- event
			synctest.Wait()
			require.True(t, told(), event)
		}
		require.Equal(t, []string{"a", "c", "d", "e"}, names())
		require.Equal(t, "changed", o.All()["a"].Text)
		require.Len(t, before, 4, "what was read is a copy")
		require.Equal(t, "listed", before["a"].Text)

		time.Sleep(time.Minute) // a watch that has lasted is followed by a list at once
		c.events <- ""
		page("a")
		require.Equal(t, []string{"a", "c", "d", "e"}, names(), "the list before counts until the next is whole")
		require.Equal(t, "changed", o.All()["a"].Text)
		require.False(t, told())
		page("f", "")
		require.Equal(t, []string{"a", "f"}, names(), "what is in no page is gone")
		require.Equal(t, "listed", o.All()["a"].Text)
		require.True(t, told())

		time.Sleep(time.Minute)
		c.events <- ""
		page("")
		require.NotNil(t, o.All(), "an empty list is one")
		require.Empty(t, o.All())
		require.True(t, told())
	})
}

// An object is written when it is not as it should be, at once and then not before Again is over, whether that went well or not,
// and each for itself.
func TestKeeperWritesAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		behind, writes := map[string]error{}, map[string][]time.Duration{}
		begun := time.Now()
		k := &kubefollow.Keeper{Name: "things", Again: kubefollow.Again, Log: ratelog.New(nil, 0), Remedy: "grant it"}
		k.Behind = func() map[string]func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			all := map[string]func(context.Context) error{}
			for name, err := range behind {
				all[name] = func(context.Context) error {
					mu.Lock()
					defer mu.Unlock()
					writes[name] = append(writes[name], time.Since(begun))
					return err
				}
			}
			return all
		}
		set := func(name string, err error) {
			mu.Lock()
			behind[name] = err
			mu.Unlock()
			k.News.Notify()
			synctest.Wait()
		}
		gone := func(name string) {
			mu.Lock()
			delete(behind, name)
			mu.Unlock()
			k.News.Notify()
			synctest.Wait()
		}
		of := func(name string) []time.Duration { mu.Lock(); defer mu.Unlock(); return slices.Clone(writes[name]) }
		ctx, cancel := context.WithCancel(t.Context())
		var followed atomic.Int32
		done := make(chan struct{})
		go func() {
			defer close(done)
			follow := func(ctx context.Context) { followed.Add(1); <-ctx.Done(); followed.Add(-1) }
			k.Run(ctx, follow, follow)
		}()
		synctest.Wait()
		require.EqualValues(t, 2, followed.Load())

		set("a", nil)
		require.Equal(t, []time.Duration{0}, of("a"), "at once")
		time.Sleep(time.Second)
		set("b", &kube.StatusError{Code: http.StatusInternalServerError})
		require.Equal(t, []time.Duration{time.Second}, of("b"), "and another, too")
		require.Len(t, of("a"), 1, "another program may write it, too")
		time.Sleep(kubefollow.Again - time.Second - 1)
		k.News.Notify()
		synctest.Wait()
		require.Len(t, of("a"), 1)
		time.Sleep(kubefollow.Again)
		synctest.Wait()
		require.Len(t, of("a"), 2, "by itself")
		require.Len(t, of("b"), 2)

		// What is in order again is not written, and what is behind once more is written at once when its time is over.
		gone("a")
		gone("b")
		time.Sleep(time.Hour)
		require.Len(t, of("a"), 2)
		set("a", nil)
		require.Equal(t, time.Since(begun), of("a")[2])
		cancel()
		<-done
		require.Zero(t, followed.Load(), "what Run started has ended")
	})
}

// What another replica did first is no failure; a lack of rights is told with its remedy.
func TestKeeperWhatIsTold(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want []string // in the log
		not  string
	}{
		{nil, []string{"level=INFO", "roots written", "object=thing"}, "WARN"},
		{&kube.StatusError{Code: http.StatusConflict, Reason: "AlreadyExists"}, nil, "level"},
		{&kube.StatusError{Code: http.StatusConflict, Reason: "Conflict"}, nil, "level"},
		{&kube.StatusError{Code: http.StatusNotFound, Reason: "NotFound"}, nil, "level"},
		{&kube.StatusError{Code: http.StatusNotFound}, []string{"level=WARN"}, "grant it"}, // of a proxy, which knows no objects
		{&kube.StatusError{Code: http.StatusForbidden}, []string{"level=WARN", "thing", "grant it"}, "INFO"},
		{&kube.StatusError{Code: http.StatusInternalServerError}, []string{"level=WARN", "thing"}, "grant it"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var out bytes.Buffer
			k := &kubefollow.Keeper{Name: "things", Again: kubefollow.Again, Log: ratelog.New(slog.New(slog.NewTextHandler(&out, nil)), 0), Remedy: "grant it"}
			k.Behind = func() map[string]func(context.Context) error {
				return map[string]func(context.Context) error{"thing": func(context.Context) error { return c.err }}
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); k.Run(ctx) }()
			synctest.Wait()
			cancel()
			<-done
			time.Sleep(time.Hour) // until the log has said all
			synctest.Wait()
			for _, text := range c.want {
				assert.Contains(t, out.String(), text, "%v", c.err)
			}
			assert.NotContains(t, out.String(), c.not, "%v", c.err)
		})
	}
}
