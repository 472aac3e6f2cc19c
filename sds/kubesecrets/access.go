package kubesecrets

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

const (
	reviewInterval = 30 * time.Second
	reviewGood     = time.Hour        // how long an answer counts without a newer one
	reviewTime     = 10 * time.Second // of one caller
	reviewSlots    = 4
	maxCallers     = 10_000
	maxCallersEach = 1000 // of one namespace
	idleIntervals  = 3    // after which a caller without a stream is forgotten
)

// Resolve implements the option Resolve of an sds.Handler behind [authn.Require]. It permits a name, and adds the
// namespace, if all of these hold:
//
//   - The caller has an ID of Config.TrustDomain, which names a service account of this cluster.
//   - The name has no namespace, or the caller's namespace.
//   - The API server answers a SubjectAccessReview that the service account may list or get the Secrets of that
//     namespace.
//
// Resolve does not block: it refuses an unknown caller and asks the API server in the background. It asks again every
// Config.ReviewInterval while a stream needs the answer, and calls the functions of [Source.OnAccess] when the answer
// changes; without such a function no stream learns of it. While the API server does not answer, the last answer
// counts for an hour. 10,000 callers can be known, and 1,000 of one namespace; more are refused.
//
// Errors never say whether a Secret exists.
func (s *Source) Resolve(ctx context.Context, resourceName string) (sourceName string, err error) {
	who, err := s.caller(ctx)
	if err != nil {
		return "", fmt.Errorf("kubesecrets: %w", err)
	}
	k, _, err := parse(resourceName)
	switch {
	case err != nil:
		return "", fmt.Errorf("kubesecrets: %.256q: %w", resourceName, err)
	case k.namespace == "":
		k.namespace = who.namespace
	case k.namespace != who.namespace:
		return "", fmt.Errorf("kubesecrets: the caller is of namespace %q and may not have Secrets of %q",
			who.namespace, k.namespace)
	}
	if err := s.access.decide(who); err != nil {
		return "", fmt.Errorf("kubesecrets: service account %s/%s: %w", who.namespace, who.name, err)
	}
	return k.String(), nil
}

// caller returns the service account that sends a request.
func (s *Source) caller(ctx context.Context) (key, error) {
	c, ok := authn.CallerFromContext(ctx)
	if !ok {
		return key{}, errors.New("the caller is not proven: serve through authn.Require")
	}
	namespace, account, ok := c.ID.Kubernetes()
	switch {
	case s.cfg.TrustDomain.IsZero():
		return key{}, errors.New("no caller may have Secrets, as there is no Config.TrustDomain")
	case c.ID.TrustDomain() != s.cfg.TrustDomain:
		return key{}, fmt.Errorf("the caller %q is not of trust domain %q", c, s.cfg.TrustDomain)
	case !ok || !kube.ValidLabel(namespace) || !kube.ValidName(account):
		return key{}, fmt.Errorf("the ID of the caller %q does not name a service account", c)
	case c.Pod != nil && c.Pod.Cluster != "":
		return key{}, fmt.Errorf("the caller %q is of the cluster %.253q, and not of this one", c, c.Pod.Cluster)
	}
	return key{namespace, account}, nil
}

// OnAccess registers f to be called when [Source.Resolve] might return a different answer. Typically f is the
// handler's Refresh method. f must return at once. cancel ends the registration.
func (s *Source) OnAccess(f func()) (cancel func()) {
	return s.access.subs.Add(func(string) { f() })
}

// access holds the rights of callers.
type access struct {
	api   *kube.Client
	every time.Duration
	log   *slog.Logger
	subs  secretset.Subscribers

	mu      sync.Mutex
	loop    renew.Loop[*rights]
	callers map[key]*rights       // by service account
	places  *limit.Shares[string] // of callers, by namespace
}

// rights are the rights of one service account. access.mu guards them.
type rights struct {
	renew.Entry
	who      key
	reviewed time.Time // zero if there is no answer yet
	allowed  bool
	err      error // of the last review
	asked    time.Time
}

func (a *access) init(api *kube.Client, every time.Duration, log *slog.Logger) {
	a.api, a.every, a.log, a.callers = api, every, log, map[key]*rights{}
	a.places = limit.NewShares[string](maxCallers, maxCallersEach)
	a.loop.Mu, a.loop.Attempt, a.loop.Slots = &a.mu, a.review, reviewSlots
}

// decide returns nil if a service account may have the Secrets of its namespace.
func (a *access) decide(who key) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	r := a.callers[who]
	if r == nil {
		if err := a.places.Take(who.namespace, 1); err != nil {
			return fmt.Errorf("the rights of %d service accounts can be known at a time, and of %d of one "+
				"namespace: %w", maxCallers, maxCallersEach, err)
		}
		r = &rights{who: who}
		a.callers[who] = r
		a.loop.Put(r, 0)
	}
	r.asked = now
	switch {
	case r.reviewed.IsZero() && r.err != nil:
		return fmt.Errorf("its rights are not known: %w", r.err)
	case r.reviewed.IsZero():
		return errors.New("its rights are not known yet")
	case renew.Elapsed(r.reviewed, now) > reviewGood:
		return fmt.Errorf("its rights have not been known for %v: %w", reviewGood, cmp.Or(r.err, errNotAsked))
	case !r.allowed:
		return errors.New("it may neither list nor get secrets: bind it to a Role in its namespace with the verbs " +
			"get, list and watch for secrets")
	}
	return nil
}

var errNotAsked = errors.New("the Source is not running, or this machine was suspended")

// run reviews callers until ctx is done.
func (a *access) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { a.loop.Run(ctx) })
	for renew.Sleep(ctx, a.every) == nil {
		a.tell() // streams ask again: this marks active callers and ends outdated permissions
	}
}

func (a *access) tell() { <-a.subs.Tell(func() []string { return []string{""} }) }

// review is one attempt of the loop.
func (a *access) review(running context.Context, r *rights) {
	ctx, cancel := context.WithTimeout(running, reviewTime)
	defer cancel()
	allowed, err := a.may(ctx, r.who)
	a.mu.Lock()
	first := err != nil && r.err == nil && running.Err() == nil
	changed := a.learned(r, allowed, err)
	a.mu.Unlock()
	account := slog.String("account", r.who.namespace+"/"+r.who.name)
	switch {
	case first:
		a.log.LogAttrs(ctx, slog.LevelWarn, "kubesecrets: the rights of a caller cannot be reviewed", account,
			slog.String("err", bearer.Redact(err.Error())))
	case changed:
		a.log.LogAttrs(ctx, slog.LevelInfo, "kubesecrets: rights of a caller", account, slog.Bool("allowed", allowed))
		a.tell()
	}
}

// may asks the API server whether a service account may list or get the Secrets of its namespace.
func (a *access) may(ctx context.Context, who key) (allowed bool, err error) {
	for _, verb := range []string{"list", "get"} {
		to := kube.Access{Namespace: who.namespace, Version: "v1", Resource: "secrets", Verb: verb}
		if allowed, _, err = a.api.Review(ctx, who.namespace, who.name, to); allowed || err != nil {
			break
		}
	}
	if kube.Forbidden(err) {
		err = fmt.Errorf("this program may not ask for the rights of others: bind the ClusterRole "+
			"system:auth-delegator, or one that may create subjectaccessreviews in the group authorization.k8s.io, "+
			"to its service account: %w", err)
	}
	return allowed, err
}

// learned stores an answer, and reports whether it changes the caller's rights. a.mu is held.
func (a *access) learned(r *rights, allowed bool, err error) (changed bool) {
	now, wait := time.Now(), time.Duration(0)
	if err != nil {
		f := r.Failed(err)
		f.Wish = kube.Wish(err)
		wait = min(kubefollow.Patience.WaitEndless(f, rand.Float64()), a.every)
	} else {
		r.Succeeded()
		changed = r.reviewed.IsZero() || r.allowed != allowed || renew.Elapsed(r.reviewed, now) > reviewGood
		r.reviewed, r.allowed = now, allowed
		wait = renew.Poll(a.every, a.every/2, a.every, rand.Float64())
	}
	r.err = err
	outage := err != nil && !r.reviewed.IsZero() && renew.Elapsed(r.reviewed, now) <= reviewGood
	if renew.Elapsed(r.asked, now) > idleIntervals*a.every && !outage { // during an outage the last answer counts
		delete(a.callers, r.who)
		a.places.Give(r.who.namespace, 1)
		a.loop.Remove(r)
	}
	a.loop.Done(r, wait)
	return changed
}
