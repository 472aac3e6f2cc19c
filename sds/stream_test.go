package sds

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// writer is a ResponseWriter that calls a function for each Write.
type writer struct {
	*httptest.ResponseRecorder
	write func()
}

func (w writer) Write(p []byte) (int, error) {
	w.write()
	return w.ResponseRecorder.Write(p)
}

// A push may have begun when its stream ends, and be waiting for the lock that the end has. The end waits
// for it: net/http forbids the use of a ResponseWriter after its handler has returned.
func TestStreamEndWaitsForPush(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	e := must.Get(newEntry("web", pair(t, ca, "web"), nil))(t)
	src := newAnswers()
	src.set("web", func(ctx context.Context) (*pki.Secret, error) {
		<-ctx.Done() // so that no news but that of the test comes
		return nil, ctx.Err()
	})
	h := must.Get(NewHandler(src, nil))(t)
	defer h.Close()

	var it *item
	ended, writes := make(chan struct{}), 0
	method := func(ctx context.Context, call *grpchttp.Call) error {
		s := must.Get(h.newStream(ctx, call, false))(t)
		out, err := s.session.request(ask("web"))
		if err != nil {
			return err
		}
		it = out.added[0]
		it.watch = h.table.watch(it.name, it.name, &s.inbox, it, h.table.turn.Load())
		s.session.news(it, &state{entry: e})
		s.mu.Lock()
		go func() {
			defer close(ended)
			s.close()
		}()
		time.Sleep(20 * time.Millisecond) // both wait for the lock, which they get in this order
		s.inbox.wake()
		time.Sleep(20 * time.Millisecond)
		s.mu.Unlock()
		<-ended
		s.pushes.Wait() // so that a failure is one of this test
		return nil
	}
	w := writer{httptest.NewRecorder(), func() {
		writes++
		assert.Nil(t, it.watch, "the push came first")
		select {
		case <-ended:
			assert.Fail(t, "the stream has ended, and its push writes")
		case <-time.After(100 * time.Millisecond):
		}
	}}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/S/M", nil)
	r.ProtoMajor = 2
	r.Header.Set("Content-Type", "application/grpc")
	(&grpchttp.Handler{Methods: map[string]grpchttp.Method{"/S/M": method}}).ServeHTTP(w, r)
	assert.Equal(t, 1, writes)
}

// A push that finds its stream closed, and its name refused, leaves nothing behind.
func TestStreamEndLeavesNothing(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	e := must.Get(newEntry("web", pair(t, ca, "web"), nil))(t)
	denied := false
	h := must.Get(NewHandler(newAnswers(), &Options{Resolve: Allow(func(context.Context, string) error {
		if denied {
			return errDown
		}
		return nil
	})}))(t)
	defer h.Close()
	method := func(ctx context.Context, call *grpchttp.Call) error {
		s := must.Get(h.newStream(ctx, call, false))(t)
		out := must.Get(s.session.request(ask("web")))(t)
		s.mu.Lock() // the table pushes as soon as it has looked the name up
		assert.True(t, s.resolve(out.added[0]))
		s.mu.Unlock()
		s.close()
		denied = true
		s.session.news(out.added[0], &state{entry: e})
		s.push()
		return nil
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/S/M", nil)
	r.ProtoMajor = 2
	r.Header.Set("Content-Type", "application/grpc")
	(&grpchttp.Handler{Methods: map[string]grpchttp.Method{"/S/M": method}}).ServeHTTP(httptest.NewRecorder(), r)
	assert.Empty(t, h.table.names)
}
