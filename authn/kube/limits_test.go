package kube_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/spiffe"
)

// retry returns when an error says to come back.
func retry(t testing.TB, err error) time.Duration {
	t.Helper()
	var e interface {
		Retryable() (time.Duration, bool)
	}
	require.True(t, errors.As(err, &e), "%v", err)
	after, ok := e.Retryable()
	require.True(t, ok, "%v", err)
	return after
}

// A token that rules itself out costs no review.
func TestRuledOut(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return good(spec.Audiences...) })
	at := func(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).Unix(), 10) }
	any := kube.ReviewerOptions{AnyAudience: true}
	for _, c := range []struct {
		name, token string
		o           kube.ReviewerOptions
		asked       bool
		text        string
	}{
		{"expired", token(`{"exp":` + at(-5*time.Minute-2*time.Second) + `}`), kube.ReviewerOptions{}, false, "it has expired"},
		{"bound", token(`{"cnf":{"jkt":"x"}}`), any, false, "binds it to a key"},
		{"long ago", token(`{"exp":1}`), any, false, "it has expired: it ended at 1970-01-01T00:00:01Z"},
		{"another audience", token(`{"aud":["https://kubernetes.default.svc"]}`), kube.ReviewerOptions{}, false, "it is for the audiences"},
		{"an audience that is a text", token(`{"aud":"x"}`), kube.ReviewerOptions{}, false, `["x"], and not for one of ["a" "b"]`},

		{"just expired, by our clock", token(`{"exp":` + at(-4*time.Minute) + `}`), kube.ReviewerOptions{}, true, ""},
		{"one of the audiences", token(`{"aud":["x","b"]}`), kube.ReviewerOptions{}, true, ""},
		{"another audience where any is good", token(`{"aud":["x"]}`), any, true, ""},
		{"no audience, as in a Secret", token(`{"iss":"kubernetes/serviceaccount"}`), kube.ReviewerOptions{}, true, ""},
		{"no audiences", token(`{"aud":[]}`), kube.ReviewerOptions{}, true, ""},
		{"audiences that are no texts", token(`{"aud":["x",1]}`), kube.ReviewerOptions{}, true, ""},
		{"audiences that are an object", token(`{"aud":{"x":"y"}}`), kube.ReviewerOptions{}, true, ""},
		{"an end that is no number", token(`{"exp":"1"}`), kube.ReviewerOptions{}, true, ""},
		{"two ends", token(`{"exp":1,"exp":1}`), kube.ReviewerOptions{}, true, ""},
		{"no JSON", token(`{"exp":1`), kube.ReviewerOptions{}, true, ""},
		{"no JWT", "opaque", kube.ReviewerOptions{}, true, ""},
		{"any issuer", token(`{"iss":"https://other.example.org"}`), kube.ReviewerOptions{}, true, ""},
	} {
		before := s.Count(http.MethodPost, reviews)
		_, err := reviewer(t, s, c.o).Review(t.Context(), c.token, []string{"a", "b"})
		assert.Equal(t, c.asked, s.Count(http.MethodPost, reviews) > before, c.name)
		if c.asked {
			require.NoError(t, err, c.name)
			continue
		}
		require.ErrorContains(t, err, c.text, c.name)
		only(t, err, kube.ErrInvalidToken) // as if the API server had said it
		assert.NotContains(t, err.Error(), c.token)
	}
}

// A peer of which too many tokens are refused is heard once a second. Others, and those whose tokens are good, are
// heard as always.
func TestRefusedPeer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, r := inBubble(t)
		s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
			if strings.HasPrefix(spec.Token, "good") {
				return good(spec.Audiences...)
			}
			return kubetest.TokenReviewStatus{Error: "unknown"}
		})
		n := 0
		review := func(from, prefix string) error {
			n++
			_, err := r.Review(peerkey.NewContext(t.Context(), from), fmt.Sprint(prefix, n), []string{"a"})
			return err
		}
		for range 900 {
			require.NoError(t, review("nat", "good"))
			time.Sleep(10 * time.Millisecond)
		}
		for range 64 {
			require.ErrorIs(t, review("bad", "bad"), kube.ErrInvalidToken)
		}
		asked := s.Count(http.MethodPost, reviews)
		for range 200 {
			err := review("bad", "bad")
			only(t, err, kube.ErrReviewFailed)
			require.Equal(t, time.Second, retry(t, err))
		}
		require.ErrorIs(t, review("bad", "good"), kube.ErrReviewFailed, "before the review it is not known to be good")
		assert.Equal(t, asked, s.Count(http.MethodPost, reviews))
		require.NoError(t, review("other", "good"))
		for range 100 { // without a peer there are the limits of all alone
			require.ErrorIs(t, review("", "bad"), kube.ErrInvalidToken)
		}
		require.NoError(t, review("", "good"))
		time.Sleep(time.Second)
		require.NoError(t, review("bad", "good"), "as the error said")

		s.FailNext(100, kubetest.Fault{Code: 503}, nil)
		for range 100 { // an outage says nothing about the peer
			require.ErrorIs(t, review("unlucky", "good"), kube.ErrReviewFailed)
		}
		require.NoError(t, review("unlucky", "good"))
		s.Client().CloseIdleConnections()
	})
}

// A peer that goes before the answer has caused a review all the same. One that goes while it waits has not.
func TestReviewGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, r := inBubble(t)
		s.Latency(time.Second)
		review := func(long time.Duration) error {
			ctx, cancel := context.WithTimeout(peerkey.NewContext(t.Context(), "a"), long)
			defer cancel()
			_, err := r.Review(ctx, "good", []string{"a"})
			return err
		}
		var all sync.WaitGroup
		for range 200 { // 64 of them begin
			all.Go(func() { assert.ErrorIs(t, review(time.Millisecond), kube.ErrReviewFailed) })
		}
		all.Wait()
		require.Positive(t, retry(t, review(time.Minute)))
		assert.LessOrEqual(t, s.Count(http.MethodPost, reviews), 64)
		time.Sleep(time.Minute)
		require.NoError(t, review(time.Minute))
		s.Client().CloseIdleConnections()
		time.Sleep(time.Minute)
	})
}

// The reviews of all callers have a rate, and one peer may have half of it.
func TestReviewRate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, r := inBubble(t)
		passed := func(from string) (n int) {
			for range 600 {
				_, err := r.Review(peerkey.NewContext(t.Context(), from), "good", []string{"a"})
				if err == nil {
					n++
					continue
				}
				only(t, err, kube.ErrReviewFailed)
				require.Positive(t, retry(t, err))
			}
			return n
		}
		assert.Equal(t, 500, passed("a"))
		assert.Equal(t, 500, passed("b"))
		assert.Equal(t, 0, passed("c"))
		time.Sleep(time.Second)
		assert.Equal(t, 250, passed("a"))
		assert.Equal(t, 250, passed("c"))
		s.Client().CloseIdleConnections()
	})
}

// Requests wait for one of the reviews that there may be at a time, and not for longer than a review may take.
func TestReviewConcurrency(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, r := inBubble(t)
		var now, most atomic.Int32
		begin := time.Now()
		s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
			if n := now.Add(1); time.Since(begin) < 10*time.Second { // then slots are given back that the API server still works for
				most.Store(max(most.Load(), n))
			}
			time.Sleep(950 * time.Millisecond)
			now.Add(-1)
			return good(spec.Audiences...)
		})
		var failed atomic.Int32
		var all sync.WaitGroup
		for i := range 650 {
			ctx := peerkey.NewContext(t.Context(), fmt.Sprint("peer-", i%10))
			all.Go(func() {
				if _, err := r.Review(ctx, "good", []string{"a"}); err != nil {
					assert.ErrorContains(t, err, "no answer within 10s")
					failed.Add(1)
				}
			})
		}
		all.Wait()
		assert.EqualValues(t, 64, most.Load())
		assert.EqualValues(t, 10, failed.Load())
		time.Sleep(time.Minute) // for reviews that callers no longer wait for
		s.Client().CloseIdleConnections()
	})
}

// A peer is the address of a connection: bad tokens from one cost another nothing.
func TestPeerIsTheAddress(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		if spec.Token == "good" {
			return good(spec.Audiences...)
		}
		return kubetest.TokenReviewStatus{Error: "unknown"}
	})
	a, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer(t, s, kube.ReviewerOptions{}), TrustDomain: td})
	require.NoError(t, err)
	from := func(addr, token string) error {
		r := request(token)
		r.RemoteAddr = addr
		_, err := a.Authenticate(r)
		return err
	}
	for err = nil; !errors.Is(err, kube.ErrReviewFailed); err = from("192.0.2.1:1", "bad") {
		require.NotErrorIs(t, err, context.DeadlineExceeded)
	}
	require.ErrorIs(t, from("192.0.2.1:2", "good"), kube.ErrReviewFailed, "from another port of it")
	require.NoError(t, from("192.0.2.2:1", "good"))
}

// A proxy that asks for more than its node can have keeps no other waiting.
func TestNodeAuthorizerFlood(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := cluster(kubetest.StartOn(t, 1, memconn.Listen()))
		n := nodeAuthorizer(t, s, nil)
		refused := 0
		for i := range 2000 {
			err := n.Authorize(t.Context(), proxy(), spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/ns/ns-%d/sa/web", i)))
			require.Error(t, err)
			if !errors.Is(err, kube.ErrDenied) {
				refused++
				require.Positive(t, retry(t, err))
			}
		}
		assert.Greater(t, refused, 1500)
		assert.LessOrEqual(t, s.Count(http.MethodGet, "/api/v1/"), 500)
		other := proxy()
		other.Pod.Name, other.Pod.UID = "ztunnel-2", "other"
		require.ErrorIs(t, n.Authorize(t.Context(), other, web), kube.ErrDenied, "it was looked up")
		time.Sleep(time.Second)
		require.NoError(t, n.Authorize(t.Context(), proxy(), web))
		s.Client().CloseIdleConnections()
	})
}
