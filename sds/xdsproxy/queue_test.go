package xdsproxy

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// putting puts a message, and returns a channel with the result.
func putting(ctx context.Context, q *queue, size int) <-chan error {
	result := make(chan error, 1)
	go func() { result <- q.put(ctx, make([]byte, size)) }()
	synctest.Wait()
	return result
}

// took takes the next message and says that it was sent.
func took(t *testing.T, q *queue, size int) {
	t.Helper()
	msg, ok := q.next(t.Context())
	require.True(t, ok)
	require.Len(t, msg, size)
	q.sent(msg)
	synctest.Wait()
}

// codeOf returns the status that a stream ends with.
func codeOf(err error) grpchttp.Code {
	if e, ok := errors.AsType[*grpchttp.Error](err); ok {
		return e.Code
	}
	return grpchttp.Unknown
}

func holder(t *testing.T, user string) peerkey.Holder {
	r := httptest.NewRequestWithContext(peerkey.NewContext(t.Context(), user), http.MethodPost, "/", nil)
	return peerkey.HolderOf(r)
}

// A queue takes what fits, to the last byte, and a message that is larger than itself if it is empty. What does not fit waits for
// those before it, and for no longer.
func TestQueueRoom(t *testing.T) {
	t.Parallel()
	const whole = maxQueue - besideMessage
	for _, first := range []int{whole, whole + 1, 2 * whole, 0, 1} {
		synctest.Test(t, func(t *testing.T) {
			q := newQueue(limit.NewShares[peerkey.Holder](0, 0), peerkey.Holder{})
			begun := time.Now()
			require.NoError(t, <-putting(t.Context(), q, first), "%d bytes", first)
			if rest := whole - first - besideMessage; rest > 0 {
				require.NoError(t, <-putting(t.Context(), q, rest), "exactly the rest")
				waits := putting(t.Context(), q, 0)
				require.Empty(t, waits)
				took(t, q, first)
				require.NoError(t, <-waits)
				took(t, q, rest)
			} else {
				waits := putting(t.Context(), q, 0)
				require.Empty(t, waits, "after %d bytes", first)
				msg, ok := q.next(t.Context())
				require.True(t, ok)
				require.Len(t, msg, first)
				synctest.Wait()
				require.Empty(t, waits, "what is being sent counts")
				q.sent(msg)
				require.NoError(t, <-waits)
			}
			took(t, q, 0)
			require.NoError(t, <-putting(t.Context(), q, 2*whole), "it is empty again")
			assert.Zero(t, time.Since(begun))
		})
	}
}

// A full queue gives up after half a minute without progress, counted anew from each message that was sent, and at once when the
// stream ends or the server has gone.
func TestQueueWaits(t *testing.T) {
	t.Parallel()
	const whole = maxQueue - besideMessage
	full := func(t *testing.T, messages int) *queue {
		q := newQueue(limit.NewShares[peerkey.Holder](0, 0), peerkey.Holder{})
		for range messages {
			require.NoError(t, <-putting(t.Context(), q, maxQueue/messages-besideMessage))
		}
		return q
	}
	t.Run("no progress", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			q, begun := full(t, 1), time.Now()
			err := <-putting(t.Context(), q, 1)
			require.Equal(t, grpchttp.Unavailable, codeOf(err), "%v", err)
			require.Equal(t, stalled, time.Since(begun))
		})
	})
	t.Run("some progress", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			q, begun := full(t, 4), time.Now()
			waits := putting(t.Context(), q, whole)
			for range 3 {
				time.Sleep(stalled - time.Second)
				took(t, q, maxQueue/4-besideMessage)
				require.Empty(t, waits)
			}
			err := <-waits
			require.Equal(t, grpchttp.Unavailable, codeOf(err), "%v", err)
			require.Equal(t, 3*(stalled-time.Second)+stalled, time.Since(begun))
		})
	})
	t.Run("the stream ends", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			why := errors.New("the stream has ended")
			ctx, cancel := context.WithCancelCause(t.Context())
			q, begun := full(t, 1), time.Now()
			waits := putting(ctx, q, 1)
			cancel(why)
			require.ErrorIs(t, <-waits, why)
			require.Zero(t, time.Since(begun))
		})
	})
	t.Run("the server has gone", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			q, begun := full(t, 1), time.Now()
			waits := putting(t.Context(), q, 1)
			q.discard()
			require.NoError(t, <-waits)
			require.NoError(t, <-putting(t.Context(), q, 2*whole), "and all that follow")
			_, ok := q.next(t.Context())
			require.False(t, ok)
			require.Zero(t, time.Since(begun))
		})
	})
	t.Run("the end", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			q, begun := full(t, 2), time.Now()
			q.end()
			took(t, q, maxQueue/2-besideMessage)
			took(t, q, maxQueue/2-besideMessage)
			_, ok := q.next(t.Context())
			require.False(t, ok, "what was put is taken, and Next waits for nothing more")
			require.Zero(t, time.Since(begun))
		})
	})
}

// The share of a peer is given back for each message once, whatever becomes of it, and a message without room takes none.
func TestQueueShares(t *testing.T) {
	t.Parallel()
	const size = 1000
	for taken := range 4 {
		for sent := range taken + 1 {
			for _, late := range []bool{false, true} { // whether what was taken is sent after the server has gone
				shares := limit.NewShares[peerkey.Holder](10*(size+besideMessage), 4*(size+besideMessage))
				peer, other := holder(t, "a"), holder(t, "b")
				q := newQueue(shares, peer)
				for range 4 {
					require.NoError(t, q.put(t.Context(), make([]byte, size)))
				}
				require.Equal(t, grpchttp.ResourceExhausted, codeOf(q.put(t.Context(), nil)), "the peer's share is taken")
				require.Equal(t, 4*(size+besideMessage), shares.Held())
				require.NoError(t, newQueue(shares, other).put(t.Context(), make([]byte, size)), "that of another is not")
				var rest [][]byte
				for i := range taken {
					msg, ok := q.next(t.Context())
					require.True(t, ok)
					if i < sent {
						q.sent(msg)
					} else {
						rest = append(rest, msg)
					}
				}
				give := func() {
					for _, msg := range rest {
						q.sent(msg)
					}
				}
				if !late {
					give()
				}
				q.discard()
				if late {
					give()
				}
				q.discard()
				require.Equal(t, size+besideMessage, shares.Held(), "%d taken, %d sent, late: %v", taken, sent, late)
				require.NoError(t, q.put(t.Context(), make([]byte, size)))
				require.Equal(t, size+besideMessage, shares.Held(), "a queue without a server holds nothing")
			}
		}
	}
}
