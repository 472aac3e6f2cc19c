package kubesecrets

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	pageSize = 100
	maxPages = 100_000
	brief    = 5 * time.Second // a watch that ends sooner counts as failed
)

// patience is for lists and watches that fail.
var patience = renew.Patience{Low: 500 * time.Millisecond, Impatient: 5 * time.Second, Longest: 30 * time.Second, Wish: time.Minute}

var errBrief = errors.New("the API server has ended the watch at once")

// work follows the API server until ctx is done.
func (s *Source) work(ctx context.Context) error {
	defer s.api.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.promote(ctx) })
	wg.Go(func() { s.access.run(ctx) })
	version, failures := "", 0
	for ctx.Err() == nil {
		var err error
		if version == "" {
			version, err = s.list(ctx)
		}
		steady := false
		if err == nil {
			version, steady, err = s.watch(ctx, version)
		}
		if ctx.Err() != nil {
			break
		}
		if steady {
			failures = 0
		}
		s.mu.Lock()
		crowded, listed := len(s.crowded) > 0, s.listed
		s.mu.Unlock()
		switch {
		case kube.Gone(err) && steady: // list again, at once
			version = ""
			continue
		case err == nil && steady:
			if crowded { // there may be room now
				version = ""
			}
			continue
		case err == nil:
			err = errBrief
		}
		failures++
		if kube.Gone(err) || failures >= 3 { // what cannot be watched can perhaps be read
			version = ""
		}
		f := renew.NewFailure(failures, err)
		if e, ok := errors.AsType[*kube.StatusError](err); ok {
			f.Wish = e.RetryAfter
		}
		wait := patience.Wait(f, 0, 0, rand.Float64())
		if listed {
			wait = patience.WaitEndless(f, rand.Float64())
		}
		err = s.remedy(err)
		s.state(err)
		s.log.LogAttrs(ctx, slog.LevelWarn, "kubesecrets: the API server cannot be followed, what was read stays in use",
			slog.Any("err", err), slog.Duration("retry_in", wait))
		renew.Wait(ctx, wait, nil)
	}
	return nil
}

// state notes why the API server is not followed; nil if it is.
func (s *Source) state(err error) {
	s.mu.Lock()
	s.err = err
	s.mu.Unlock()
	s.news.Notify()
}

// remedy says what to do about an error.
func (s *Source) remedy(err error) error {
	switch {
	case !kube.Forbidden(err):
		return err
	case s.cfg.AllNamespaces:
		return fmt.Errorf("the service account of this program may not read the Secrets of all namespaces: bind it to a ClusterRole with the verbs list and watch for secrets: %w", err)
	}
	return fmt.Errorf("the service account of this program may not read the Secrets: "+
		"bind it to a Role in namespace %q with the verbs list and watch for secrets: %w", s.cfg.Namespace, err)
}

// list reads all Secrets, page by page, and returns the version to watch from.
func (s *Source) list(ctx context.Context) (version string, err error) {
	s.mu.Lock()
	s.round++
	s.mu.Unlock()
	query, limit := maps.Clone(s.query), pageSize
	for range maxPages {
		query.Set("limit", strconv.Itoa(limit))
		var page struct {
			Kind     string `json:"kind"`
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
				Continue        string `json:"continue"`
			} `json:"metadata"`
			Items []document `json:"items"`
		}
		err := s.api.Get(ctx, s.path, query, &page)
		switch {
		case errors.Is(err, kube.ErrTooLarge) && limit > 1:
			limit = max(limit/10, 1)
			continue
		case err != nil:
			return "", err
		case page.Kind != "SecretList" || page.Metadata.ResourceVersion == "":
			return "", errors.New("the API server answered with something else than Secrets: is its URL right?")
		}
		var c changes
		for i := range page.Items {
			s.take(ctx, &page.Items[i], &c)
		}
		s.tell(c)
		if page.Metadata.Continue != "" {
			query.Set("continue", page.Metadata.Continue)
			limit = min(2*limit, pageSize) // not all Secrets are large
			continue
		}
		c = changes{}
		s.sweep(ctx, &c)
		s.mu.Lock()
		s.listed, s.err = true, nil
		s.mu.Unlock()
		s.tell(c)
		return page.Metadata.ResourceVersion, nil
	}
	return "", fmt.Errorf("the list of Secrets has more than %d pages", maxPages)
}

// watch follows the Secrets from a version on, and returns the last one that it has seen, and whether it has lasted. An
// event is no sign of that: a server that sends one and ends each watch would be asked in a loop without a wait.
func (s *Source) watch(ctx context.Context, from string) (version string, steady bool, err error) {
	query := url.Values{"resourceVersion": {from}, "allowWatchBookmarks": {"true"}}
	maps.Copy(query, s.query)
	start, seen := time.Now(), false
	lasted := func() bool { return time.Since(start) >= brief }
	version = from
	for event, err := range s.api.Watch(ctx, s.path, query) {
		if err != nil {
			return version, lasted(), err
		}
		if !seen {
			seen = true
			s.state(nil)
		}
		var c changes
		if event.Type != kube.Bookmark {
			var d document
			if json.Unmarshal(event.Object, &d) != nil || d.Metadata.Name == "" || d.Metadata.Namespace == "" {
				return "", lasted(), errors.New("the API server has sent an event that is not of a Secret")
			}
			if event.Type == kube.Deleted {
				s.withdraw(ctx, key{d.Metadata.Namespace, d.Metadata.Name}, &c)
			} else {
				s.take(ctx, &d, &c)
			}
		}
		version = event.ResourceVersion
		if len(c.roots)+len(c.pairs) > 0 {
			s.tell(c)
		}
	}
	if steady = lasted(); steady && !seen {
		s.state(nil)
	}
	return version, steady, nil
}
