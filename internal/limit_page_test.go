package internal_test

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/limit"
)

// Readers that come while a page is rendered share the next one, and those that come later have one of their own moment. While many
// texts are not taken, the newest is shared, so that memory has a bound; when they are, a page is as new as before.
func TestLimitPage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var p limit.Page
		rendered := 0
		get := func() (string, func()) {
			text, done, err := p.Get(func(b *bytes.Buffer) error {
				rendered++
				time.Sleep(time.Second)
				fmt.Fprint(b, rendered)
				return nil
			})
			assert.NoError(t, err)
			return string(text), done
		}
		for i := 1; i <= 3; i++ {
			text, done := get()
			assert.Equal(t, fmt.Sprint(i), text, "it is new")
			done()
		}
		var last string
		var ends []func()
		for range 100 {
			text, done := get()
			last, ends = text, append(ends, done)
			time.Sleep(time.Millisecond)
		}
		assert.Equal(t, 11, rendered, "eight that are not taken")
		assert.Equal(t, "11", last)
		ends[0]()
		text, done := get()
		assert.Equal(t, "12", text)
		done()
		for _, done := range ends[1:] {
			done()
		}
		text, done = get()
		assert.Equal(t, "13", text)
		done()
	})

	var all sync.WaitGroup
	var p limit.Page
	rendered, rendering, release := 0, make(chan struct{}), make(chan struct{})
	get := func() {
		_, done, err := p.Get(func(*bytes.Buffer) error {
			if rendered++; rendered == 1 {
				close(rendering)
				<-release
			}
			return nil
		})
		assert.NoError(t, err)
		done()
	}
	all.Go(get)
	<-rendering
	for range 100 {
		all.Go(get)
	}
	time.Sleep(50 * time.Millisecond)
	close(release)
	all.Wait()
	assert.Less(t, rendered, 80, "those that wait have one for all")

	_, done, err := p.Get(func(*bytes.Buffer) error { return io.ErrShortWrite })
	assert.ErrorIs(t, err, io.ErrShortWrite)
	done()
}
