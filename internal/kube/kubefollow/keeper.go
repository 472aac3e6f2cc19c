package kubefollow

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
)

// Again is the time between two writes of one object that another program may write, too.
const Again = 10 * time.Second

// Keeper reconciles objects: it rewrites objects that others change or delete. All replicas of a program may run one.
// Set the fields before [Keeper.Run]; News notifies it of changes.
type Keeper struct {
	Name   string // of the kept objects, for the log
	Remedy string // for missing rights
	// the consequence if the cluster cannot be followed or written; empty means "roots are not handed out"
	Fails string
	Again time.Duration // between two writes of one object, and between two calls of Behind
	News  renew.Signal
	Log   *ratelog.Log

	// Behind returns functions that write the outdated objects, by object name. Only Run calls it.
	Behind func() map[string]func(context.Context) error
}

// Run follows the collections and writes until ctx is done.
func (k *Keeper) Run(ctx context.Context, follow ...func(context.Context)) {
	var running sync.WaitGroup
	defer running.Wait()
	for _, f := range follow {
		running.Go(func() { f(ctx) })
	}
	next := make(map[string]time.Time) // when an object may be written again
	for ctx.Err() == nil {
		changed := k.News.Changed()
		maps.DeleteFunc(next, func(_ string, at time.Time) bool { return time.Until(at) <= 0 })
		for name, write := range k.Behind() {
			if _, soon := next[name]; soon {
				continue
			}
			next[name] = time.Now().Add(k.Again)
			switch err := write(ctx); {
			case err == nil:
				k.Log.Log(slog.LevelInfo, k.Name+": roots written", "the object was not up to date",
					slog.String("object", name))
			// another replica was faster, or its namespace ends
			case ctx.Err() != nil, kube.AlreadyExists(err), kube.Conflict(err), kube.NotFound(err):
			default:
				k.Warn("an object cannot be written", fmt.Errorf("%s: %w", name, err))
			}
		}
		renew.Wait(ctx, k.Again, changed)
	}
}

// Warn logs why objects are not kept, with the remedy if rights are missing.
func (k *Keeper) Warn(reason string, err error) {
	if kube.Forbidden(err) {
		err = fmt.Errorf("%w; %s", err, k.Remedy)
	}
	k.Log.Warn(k.Name+": "+cmp.Or(k.Fails, "roots are not handed out"), reason, slog.Any("err", err))
}

// Objects are the objects of a collection, which Run follows.
type Objects[T any] struct {
	Follower[T] // API, Path, Query and Kind are set

	Name   func(*T) string // returns the key of an object
	Keeper *Keeper         // notified of changes by News, and of failures by Warn

	mu      sync.Mutex
	present map[string]T // nil until they are listed
}

// Run follows the collection until ctx is done.
func (o *Objects[T]) Run(ctx context.Context) {
	var listed map[string]T
	o.State = func(_ context.Context, err error, _ time.Duration) {
		if err != nil {
			o.Keeper.Warn("the cluster cannot be followed", err)
		}
	}
	o.Page = func(_ context.Context, items []T, first, last bool) {
		if first {
			listed = make(map[string]T)
		}
		for i := range items {
			listed[o.Name(&items[i])] = items[i]
		}
		if last {
			o.mu.Lock()
			o.present = listed
			o.mu.Unlock()
			o.Keeper.News.Notify()
		}
	}
	o.Event = func(_ context.Context, change string, item *T) bool {
		o.mu.Lock()
		if o.present[o.Name(item)] = *item; change == kube.Deleted {
			delete(o.present, o.Name(item))
		}
		o.mu.Unlock()
		o.Keeper.News.Notify()
		return o.Name(item) != ""
	}
	o.Follower.Run(ctx)
}

// Find returns the object with a key or, if the key is empty, one that match accepts. known is false until the first
// list is complete.
func (o *Objects[T]) Find(key string, match func(*T) bool) (item T, found, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if item, found = o.present[key]; key == "" {
		for _, item = range o.present {
			if match(&item) {
				return item, true, true
			}
		}
	}
	return item, found, o.present != nil
}

// All returns a copy of the objects; nil until the first list is complete.
func (o *Objects[T]) All() map[string]T {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.present)
}
