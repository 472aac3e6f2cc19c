package xdsproxy_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/sds/xdsproxy"
)

// Requests keep their order, and a report, of which only the last counts, comes after all that wait: a server that heard of
// the health before the request for listeners would not know whose it is.
func TestQueueOrder(t *testing.T) {
	t.Parallel()
	done, cancel := context.WithCancel(t.Context())
	cancel() // so that nothing is waited for
	for before := range 5 {
		for after := range 3 {
			q := xdsproxy.NewQueue()
			var want []string
			put := func(n int) {
				for range n {
					want = append(want, fmt.Sprint("request ", len(want)))
					require.NoError(t, q.Put(t.Context(), []byte(want[len(want)-1])))
				}
			}
			put(before)
			q.SetReport([]byte("an old report"))
			q.SetReport([]byte("the report"))
			put(after)
			want = append(want, "the report")
			for _, text := range want {
				msg, size, ok := q.Next(done)
				require.True(t, ok, "%q is lost", text)
				assert.Equal(t, text, string(msg), "%d requests before it, %d after", before, after)
				assert.Equal(t, text == "the report", size == 0, "a report is not counted")
			}
			_, _, ok := q.Next(done)
			require.False(t, ok, "there is no more")
		}
	}
}
