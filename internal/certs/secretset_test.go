package certs_test

import (
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/test/bubble"
)

func names(all ...string) func() []string { return func() []string { return all } }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Names come in order, each once as long as it waits, to every function, one call at a time, and without a lock.
func TestSecretsetSubscribers(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var s secretset.Subscribers
		assert.True(t, isClosed(s.Tell(func() []string { t.Error("names without subscribers"); return nil })))
		s.Wait()

		var mu sync.Mutex // which the caller of Tell holds, and a function takes
		var told []string
		turn := make(chan struct{})
		cancel := s.Add(func(name string) {
			<-turn
			mu.Lock()
			defer mu.Unlock()
			told = append(told, "one "+name)
		})
		var cancelSelf func()
		cancelSelf = s.Add(func(name string) {
			if name == "c" {
				cancelSelf()
				cancelSelf()
			}
			told = append(told, "two "+name)
		})
		mu.Lock()
		first := s.Tell(names("a", "b", "a"))
		synctest.Wait()
		now, changed := s.Now()
		assert.Equal(t, "a", now)
		second := s.Tell(names("b", "c"))
		assert.Equal(t, second, s.Tell(names("c", "d")), "they wait together")
		assert.Equal(t, second, s.Tell(names()), "nothing is told after what was to be told before")
		mu.Unlock()

		turn <- struct{}{}
		synctest.Wait()
		assert.True(t, isClosed(changed))
		now, _ = s.Now()
		assert.Equal(t, "b", now)
		assert.False(t, isClosed(first))
		turn <- struct{}{}
		synctest.Wait()
		assert.True(t, isClosed(first))
		assert.False(t, isClosed(second), "b waits again: it has changed since it began to be told")
		close(turn)
		s.Wait()
		assert.True(t, isClosed(second))
		now, _ = s.Now()
		assert.Empty(t, now)
		assert.Equal(t, []string{"one a", "two a", "one b", "two b", "one b", "two b", "one c", "two c", "one d"}, told)

		cancel()
		cancel()
		assert.True(t, isClosed(s.Tell(names("e"))))
		assert.Len(t, told, 9)
	})
}

// Many tell and many listen, at any time.
func TestSecretsetSubscribersAtOnce(t *testing.T) {
	t.Parallel()
	var s secretset.Subscribers
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			heard := make(chan string, 1000)
			cancel := s.Add(func(name string) { heard <- name })
			for range 50 {
				<-s.Tell(names("a", "b"))
				assert.NotEmpty(t, heard)
			}
			cancel()
			s.Wait()
		})
	}
	wg.Wait()
}
