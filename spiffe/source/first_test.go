package source_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// starting returns a candidate with a source that is running, and counts how often it is started.
func starting(name string, live *flip, started *int) source.Candidate {
	return source.Candidate{Name: name, Start: func(ctx context.Context) (source.Source, error) {
		*started++
		if err := live.life.Start(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil }, live.Ready); err != nil {
			return nil, err
		}
		return live, nil
	}}
}

var errAway = errors.New("the agent is away")

func TestFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		agent, files := &flip{Source: ca.Source("/agent")}, &flip{Source: ca.Source("/files")}
		var asked [2]int
		var log diary

		// The first is ready: the others are not started.
		c, err := source.First(t.Context(), log.logger(), starting("agent", agent, &asked[0]), starting("files", files, &asked[1]))
		require.NoError(t, err)
		assert.Same(t, agent, c)
		assert.Equal(t, [2]int{1, 0}, asked)
		assert.Contains(t, log.String(), "level=INFO msg=\"source: chosen\" name=agent")
		require.NoError(t, c.Close())
		require.Error(t, agent.life.Idle(), "Close closes it")

		// The first is away: the second is chosen, after the time that the first has, and the reasons are told.
		agent = &flip{Source: ca.Source("/agent")}
		agent.Fail(errAway)
		log = diary{}
		began := time.Now()
		c, err = source.First(t.Context(), log.logger(), starting("agent", agent, &asked[0]), starting("files", files, &asked[1]))
		require.NoError(t, err)
		assert.Equal(t, 10*time.Second, time.Since(began))
		assert.Same(t, files, c)
		assert.Contains(t, log.String(), "level=WARN")
		assert.Contains(t, log.String(), `name=files passed="agent: context deadline exceeded within 10s"`)
		require.Error(t, agent.life.Idle(), "what has failed is closed")

		// It stays with that, whatever happens to either.
		id := func() string {
			return must.Get(c.SVID())(t).ID().Path()
		}
		agent.Fail(nil)
		time.Sleep(100 * time.Hour)
		assert.Equal(t, "/files", id())
		files.Fail(errAway)
		time.Sleep(100 * time.Hour)
		require.ErrorIs(t, must.Err(c.SVID()), errAway, "and does not fail over")
		require.ErrorIs(t, must.Err(c.Snapshot()), errAway)
		require.ErrorIs(t, must.Err(c.Bundle(td)), errAway)
		files.Fail(nil)
		assert.Equal(t, "/files", id())
		assert.Equal(t, [2]int{2, 1}, asked)
		require.NoError(t, c.Close())
	})
}

// The rank of candidates is kept, although a weaker one would be ready sooner.
func TestFirstWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		agent, files := &flip{Source: ca.Source("/agent")}, &flip{Source: ca.Source("/files")}
		agent.Fail(errAway)
		time.AfterFunc(9*time.Second, func() { agent.Fail(nil) })
		var asked [2]int
		c, err := source.First(t.Context(), nil, starting("agent", agent, &asked[0]), starting("files", files, &asked[1]))
		require.NoError(t, err)
		assert.Same(t, agent, c)
		require.NoError(t, c.Close())
		// The last candidate has the time that is left, and each may have its own.
		files.Fail(errAway)
		time.AfterFunc(time.Hour, func() { files.Fail(nil) })
		slow := starting("agent", &flip{Source: agent.Source}, &asked[0])
		agent.Fail(errAway)
		slow.Within = time.Minute
		began := time.Now()
		c = must.Get(source.First(t.Context(), nil, slow, starting("files", files, &asked[1])))(t)
		assert.Same(t, files, c)
		assert.Equal(t, time.Hour, time.Since(began))
		require.NoError(t, c.Close())
	})
}

func TestFirstFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		var asked int
		failing := func(name string, err error) source.Candidate {
			return source.Candidate{Name: name, Start: func(context.Context) (source.Source, error) { return nil, err }}
		}
		other := errors.New("no files")
		_, err := source.First(t.Context(), nil, failing("agent", errAway), failing("files", other))
		must.Fail(t, err, spiffe.ErrNotReady, errAway, other)
		require.EqualError(t, err, "source: first: not ready: agent: the agent is away; files: no files")

		_, err = source.First(t.Context(), nil, failing("agent", nil))
		require.ErrorContains(t, err, "neither a source nor an error")

		// The end of the context ends the search.
		ctx, cancel := context.WithTimeoutCause(t.Context(), 15*time.Second, errors.New("the start has taken too long"))
		defer cancel()
		never := func() *flip { f := &flip{Source: ca.Source("/web")}; f.Fail(errAway); return f }
		_, err = source.First(ctx, nil, starting("one", never(), &asked), starting("two", never(), &asked), starting("three", never(), &asked))
		must.Fail(t, err, spiffe.ErrNotReady, "the start has taken too long")
		assert.Equal(t, 2, asked)

		for _, bad := range [][]source.Candidate{
			nil, {{Name: "x"}}, {failing("", errAway)}, {{Name: "x", Start: failing("x", errAway).Start, Within: -1}},
		} {
			_, err := source.First(t.Context(), nil, bad...)
			require.Error(t, err)
			require.NotErrorIs(t, err, spiffe.ErrNotReady)
		}
	})
}
