package kubesecrets

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
)

// work follows the API server until ctx is done.
func (s *Source) work(ctx context.Context) error {
	defer s.api.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.access.run(ctx) })
	f := kubefollow.Follower[document]{API: s.api, Path: s.path, Query: s.query, Kind: "Secret", Page: s.page,
		Event: s.event, State: s.follows}
	f.Again = func() bool { // there may now be room for more, and a certificate may have become valid
		s.mu.Lock()
		defer s.mu.Unlock()
		again := len(s.crowded) > 0
		for _, o := range s.objects {
			again = again || o.pair.err != nil
		}
		return again
	}
	f.Run(ctx)
	return nil
}

// page handles a page of a list. After the last page it withdraws the Secrets that were on none.
func (s *Source) page(ctx context.Context, items []document, first, last bool) {
	if first {
		s.mu.Lock()
		s.round++
		s.mu.Unlock()
	}
	var c changes
	for i := range items {
		s.take(ctx, &items[i], &c)
	}
	s.tell(c)
	if !last {
		return
	}
	c = changes{}
	s.sweep(ctx, &c)
	s.mu.Lock()
	s.listed, s.err = true, nil
	s.mu.Unlock()
	s.tell(c)
}

// event handles a change of a Secret.
func (s *Source) event(ctx context.Context, change string, d *document) bool {
	if d.Metadata.Name == "" || d.Metadata.Namespace == "" {
		return false
	}
	var c changes
	if change == kube.Deleted {
		s.withdraw(ctx, key{d.Metadata.Namespace, d.Metadata.Name}, &c)
	} else {
		s.take(ctx, d, &c)
	}
	if len(c.roots)+len(c.pairs) > 0 {
		s.tell(c)
	}
	return true
}

// follows notes why the API server is not followed; nil means that it is.
func (s *Source) follows(ctx context.Context, err error, retryIn time.Duration) {
	err = s.remedy(err)
	s.mu.Lock()
	s.err = err
	s.mu.Unlock()
	s.news.Notify()
	if err != nil {
		s.log.LogAttrs(ctx, slog.LevelWarn,
			"kubesecrets: the API server cannot be followed, what was read stays in use",
			slog.Any("err", err), slog.Duration("retry_in", retryIn))
	}
}

// remedy adds to err what the operator can do about it.
func (s *Source) remedy(err error) error {
	switch {
	case !kube.Forbidden(err):
		return err
	case s.cfg.AllNamespaces:
		return fmt.Errorf("the service account of this program may not read the Secrets of all namespaces: bind "+
			"it to a ClusterRole with the verbs list and watch for secrets: %w", err)
	}
	return fmt.Errorf("the service account of this program may not read the Secrets: "+
		"bind it to a Role in namespace %q with the verbs list and watch for secrets: %w", s.cfg.Namespace, err)
}
