// Package kubefollow follows a collection of an API server: it lists and watches the objects, and starts again when
// that ends or fails. A [Keeper] rewrites objects that were changed or deleted.
package kubefollow

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	pageSize = 100
	maxPages = 100_000
	brief    = 5 * time.Second // a watch that ends sooner counts as failed
)

// Patience is the wait after failed requests.
var Patience = renew.Patience{Low: 500 * time.Millisecond, Impatient: 5 * time.Second,
	Longest: 30 * time.Second, Wish: time.Minute}

var errBrief = errors.New("the API server has ended the watch at once")

// Follower follows a collection whose objects decode into T. Only Run calls its functions.
type Follower[T any] struct {
	API   *kube.Client
	Path  string     // of the collection
	Query url.Values // that selects
	Kind  string     // of one object, such as Secret

	// Page is called with each page of a list. Objects that are in no page are gone after the last one.
	Page func(ctx context.Context, items []T, first, last bool)

	// Event is called with the type of a change, which is never a bookmark, and the object. It reports whether the
	// object is of the Kind; if not, the objects are listed again.
	Event func(ctx context.Context, change string, item *T) bool

	// State is called with the reason why the API server is not followed, and the wait before the next attempt; nil
	// if it is followed.
	State func(ctx context.Context, err error, retryIn time.Duration)

	// Again reports whether to list again after a watch that ended normally; nil means never.
	Again func() bool
}

// Run follows the collection until ctx is done.
func (f *Follower[T]) Run(ctx context.Context) {
	version, failures, listed := "", 0, false
	for ctx.Err() == nil {
		var err error
		if version == "" {
			version, err = f.list(ctx)
			listed = listed || err == nil
		}
		steady := false
		if err == nil {
			version, steady, err = f.watch(ctx, version)
		}
		if steady {
			failures = 0
		}
		if ctx.Err() != nil {
			return
		}
		if steady && (err == nil || kube.Gone(err)) { // go on at once
			if err != nil || f.Again != nil && f.Again() {
				version = ""
			}
			continue
		}
		failures++
		if kube.Gone(err) || failures >= 3 { // an unwatchable collection may still be readable
			version = ""
		}
		f.wait(ctx, cmp.Or(err, errBrief), failures, listed)
	}
}

// wait reports a failure and waits before the next attempt.
func (f *Follower[T]) wait(ctx context.Context, err error, failures int, listed bool) {
	failure := renew.NewFailure(failures, err)
	failure.Wish = kube.Wish(err)
	wait := Patience.Wait(failure, 0, 0, rand.Float64())
	if listed {
		wait = Patience.WaitEndless(failure, rand.Float64())
	}
	f.State(ctx, err, wait)
	renew.Wait(ctx, wait, nil)
}

// list reads all objects, page by page, and returns the version to watch from.
func (f *Follower[T]) list(ctx context.Context) (version string, err error) {
	query, limit, first := url.Values{}, pageSize, true
	maps.Copy(query, f.Query)
	for range maxPages {
		query.Set("limit", strconv.Itoa(limit))
		var page struct {
			Kind     string `json:"kind"`
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
				Continue        string `json:"continue"`
			} `json:"metadata"`
			Items []T `json:"items"`
		}
		err := f.API.Get(ctx, f.Path, query, &page)
		switch {
		case errors.Is(err, kube.ErrTooLarge) && limit > 1:
			limit = max(limit/10, 1)
			continue
		case err != nil:
			return "", err
		case page.Kind != f.Kind+"List" || page.Metadata.ResourceVersion == "":
			return "", fmt.Errorf("the API server answered with something else than %ss: is its URL right?", f.Kind)
		}
		f.Page(ctx, page.Items, first, page.Metadata.Continue == "")
		first = false
		if page.Metadata.Continue == "" {
			f.State(ctx, nil, 0)
			return page.Metadata.ResourceVersion, nil
		}
		query.Set("continue", page.Metadata.Continue)
		limit = min(2*limit, pageSize) // later objects may be smaller
	}
	return "", fmt.Errorf("the list of %ss has more than %d pages", f.Kind, maxPages)
}

// watch follows the objects from a version on. It returns the last version seen, and whether the watch was steady. An
// event is no sign of that: otherwise a server that sends one event and ends each watch would be called in a loop
// without a wait.
func (f *Follower[T]) watch(ctx context.Context, from string) (version string, steady bool, err error) {
	query := url.Values{"resourceVersion": {from}, "allowWatchBookmarks": {"true"}}
	maps.Copy(query, f.Query)
	start, seen := time.Now(), false
	lasted := func() bool { return time.Since(start) >= brief }
	version = from
	for event, err := range f.API.Watch(ctx, f.Path, query) {
		if err != nil {
			return version, lasted(), err
		}
		if !seen {
			seen = true
			f.State(ctx, nil, 0)
		}
		if event.Type != kube.Bookmark {
			item := new(T)
			if json.Unmarshal(event.Object, item) != nil || !f.Event(ctx, event.Type, item) {
				return "", lasted(), fmt.Errorf("the API server has sent an event that is not of a %s", f.Kind)
			}
		}
		version = event.ResourceVersion
	}
	if steady = lasted(); steady && !seen {
		f.State(ctx, nil, 0)
	}
	return version, steady, nil
}
