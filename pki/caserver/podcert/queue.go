package podcert

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca"
)

// entry is a request of a pod without an answer, or whose answer the API server has not shown yet.
type entry struct {
	renew.Entry
	request request // as last read
	answer  *status // nil until there is one; signed again only when the API server would refuse it
	done    bool    // answered, or gone
	round   int
	size    int // bytes reserved for it
}

// turns spaces out the requests of each key.
type turns struct {
	every time.Duration // 0 or less: no limit
	next  map[string]time.Time
}

func newTurns(rate float64) turns {
	return turns{every: time.Duration(float64(time.Second) / rate), next: make(map[string]time.Time)}
}

// take returns how long the next request of key must wait. A quarter of a second's requests may come at once.
func (t *turns) take(key string, now time.Time) time.Duration {
	if t.every <= 0 {
		return 0
	}
	if len(t.next) > 10_000 {
		maps.DeleteFunc(t.next, func(_ string, at time.Time) bool { return at.Before(now) })
	}
	wait := max(t.next[key].Sub(now), 0)
	t.next[key] = now.Add(wait + t.every)
	return max(wait-time.Second/4, 0)
}

// take records the current state of a request. s.mu is held.
func (s *Signer) take(r *request) {
	e, node, now := s.requests[r.Metadata.UID], r.Spec.NodeName, time.Now()
	switch {
	case r.Spec.SignerName != s.opts.SignerName || r.Metadata.UID == "":
	case r.answered():
		s.forget(e)
	case e != nil:
		e.request, e.round = *r, s.round
	case s.room.Take(node, r.size()) != nil:
		s.missed = true
	default:
		e = &entry{request: *r, size: r.size(), round: s.round}
		s.requests[r.Metadata.UID] = e
		s.loop.Put(e, max(s.nodes.take(node, now), s.spaces.take(r.Metadata.Namespace, now)))
	}
}

// settle ends a request that is answered or gone. s.mu is held.
func (s *Signer) settle(e *entry) {
	if e != nil && !e.done {
		e.done = true
		s.loop.Remove(e)
		s.room.Give(e.request.Spec.NodeName, e.size)
	}
}

// forget ends a request that the API server shows as answered or deleted. s.mu is held.
func (s *Signer) forget(e *entry) {
	if s.settle(e); e != nil {
		delete(s.requests, e.request.Metadata.UID)
	}
}

// page records a page of a list. After the last page, requests that were on none are gone.
func (s *Signer) page(_ context.Context, items []request, first, last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if first {
		s.round, s.missed = s.round+1, false
	}
	for i := range items {
		s.take(&items[i])
	}
	if !last {
		return
	}
	for _, e := range s.requests {
		if e.round != s.round {
			s.forget(e)
		}
	}
}

// event records a change.
func (s *Signer) event(_ context.Context, change string, r *request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if change == kube.Deleted {
		s.forget(s.requests[r.Metadata.UID])
	} else {
		s.take(r)
	}
	return r.Metadata.UID != ""
}

// waiting returns how many requests wait, and when the oldest was made.
func (s *Signer) waiting() (n int, oldest time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.requests {
		if e.done {
			continue
		}
		n++
		if at := e.request.Metadata.CreationTimestamp; at != nil && (oldest.IsZero() || at.Before(oldest)) {
			oldest = *at
		}
	}
	return n, oldest
}

// attempt answers a request.
func (s *Signer) attempt(parent context.Context, e *entry) {
	ctx, cancel := context.WithTimeout(parent, attemptTime)
	defer cancel()
	s.mu.Lock()
	r, answer := e.request, e.answer
	s.mu.Unlock()
	var err error
	if answer != nil { // the API server may have it, or another replica's
		var now *request
		if now, err = s.read(ctx, &r); err == nil {
			if now == nil || now.answered() {
				s.end(e, "lost")
				return
			}
			if r = *now; answer.NotBefore != nil && time.Since(*answer.NotBefore) > freshFor {
				answer = nil
			}
		}
	}
	if err == nil && answer == nil {
		answer, err = s.answer(ctx, &r)
	}
	if err == nil {
		err = s.api.Patch(ctx, r.path(r.Metadata.Name, "status"),
			change{Metadata: kube.ObjectMeta{UID: r.Metadata.UID, ResourceVersion: r.Metadata.ResourceVersion},
				Status: answer})
	}
	switch {
	case err == nil:
		s.end(e, answer.Conditions[0].Type)
		s.log.Log(slog.LevelInfo, "podcert: request answered",
			answer.Conditions[0].Type+" "+answer.Conditions[0].Reason, slog.String("request", r.name()),
			slog.String("pod", r.Spec.PodName), slog.String("node", r.Spec.NodeName),
			slog.String("message", answer.Conditions[0].Message))
	case kube.NotFound(err):
		s.end(e, "lost")
	default:
		s.again(parent, e, &r, answer, err)
	}
}

// read returns a request as it is now, or nil if it is gone.
func (s *Signer) read(ctx context.Context, r *request) (*request, error) {
	var now struct {
		Items []request `json:"items"`
	}
	// a list needs no further right
	err := s.api.Get(ctx, r.path(), url.Values{"fieldSelector": {"metadata.name=" + r.Metadata.Name}}, &now)
	if err != nil || len(now.Items) != 1 || now.Items[0].Metadata.UID != r.Metadata.UID {
		return nil, err
	}
	return &now.Items[0], nil
}

// end ends an attempt for good.
func (s *Signer) end(e *entry, how string) {
	s.note(nil, 0)
	s.totals[how].Inc()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.granted = s.granted || how != "lost"
	s.settle(e)
	s.loop.Done(e, 0)
}

// again ends an attempt that must be repeated. A failure of the API server or the CA that concerns all requests holds
// all of them back. Once the API server has accepted an answer, the rights exist, so a refusal concerns one request:
// a policy for its namespace, for example.
func (s *Signer) again(ctx context.Context, e *entry, r *request, answer *status, err error) {
	conflict := kube.Conflict(err)
	s.mu.Lock()
	all := !conflict && !errors.Is(err, ca.ErrLimit) && !errors.Is(err, errOne)
	if status, ok := errors.AsType[*kube.StatusError](err); ok && all {
		refused := status.Code/100 == 4 && status.Code != http.StatusUnauthorized &&
			status.Code != http.StatusTooManyRequests
		all = !(refused && s.granted) && (status.Reason != "Invalid" || forbidden(err))
	}
	e.answer = answer
	if ctx.Err() != nil {
		s.loop.Done(e, 0)
		s.mu.Unlock()
		return
	}
	f := e.Failed(err)
	if all {
		f = renew.NewFailure(s.state.Failures+1, err)
	}
	f.Wish = max(f.Wish, kube.Wish(err))
	wait := kubefollow.Patience.Wait(f, 0, 0, rand.Float64())
	if all {
		s.hold(wait)
	}
	s.loop.Done(e, wait)
	s.mu.Unlock()
	who, of := "others go on", r.Metadata.Namespace // a policy may refuse the namespace
	if all {
		s.note(err, wait)
		who, of, err = "all wait", "", s.remedy(err)
	}
	if !conflict {
		s.log.LogOf(slog.LevelWarn, of, "podcert: a request has to wait", who, slog.String("request", r.name()),
			slog.String("node", r.Spec.NodeName), slog.Any("err", err), slog.Duration("retry_in", wait))
	}
}

// hold holds all requests back for a time. s.mu is held.
func (s *Signer) hold(wait time.Duration) {
	if s.loop.Hold {
		return
	}
	s.loop.Hold = true
	time.AfterFunc(wait, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.loop.Hold = false
		s.loop.Wake()
	})
}
