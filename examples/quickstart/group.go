package main

import (
	"context"
	"fmt"
	"sync"
)

// group runs the parts of the program until its context is done, or one of them fails.
type group struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once
	err    error
}

func newGroup(ctx context.Context) *group {
	g := new(group)
	g.ctx, g.cancel = context.WithCancel(ctx)
	return g
}

// run starts a part. If it fails before the context is done, the others end too.
func (g *group) run(name string, part func(context.Context) error) {
	g.wg.Go(func() {
		if err := part(g.ctx); err != nil && g.ctx.Err() == nil {
			g.end(fmt.Errorf("%s: %w", name, err))
		}
	})
}

// end cancels the context of the parts. The first call sets the error of the group, which may be nil.
func (g *group) end(err error) {
	g.once.Do(func() { g.err = err })
	g.cancel()
}

// wait waits for the end of the context and of all parts. It returns the error of the part that failed, or nil.
func (g *group) wait() error {
	<-g.ctx.Done()
	g.end(nil)
	g.wg.Wait()
	return g.err
}
