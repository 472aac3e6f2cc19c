package tokensource_test

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/tokensource"
)

// The life of a token begins when it is asked for: an answer that was long on its way does not make it longer.
func TestLifeBeginsWithTheRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x, down := &exchanged{}, false
		x.become(func(w http.ResponseWriter, r *http.Request) {
			if down {
				text(503, "")(w, r)
				return
			}
			down = true
			time.Sleep(4 * time.Second)
			text(200, `{"access_token":"`+secret+`","token_type":"Bearer","expires_in":60}`)(w, r)
		})
		o := tokensource.ClientOptions{URL: "https://sts.example/token", HTTPClient: x.client()}
		s, asked := made(tokensource.Exchange(tokensource.Static("subject"), o)), time.Now()
		requireToken(t, secret, s)
		time.Sleep(time.Until(asked.Add(time.Minute - time.Nanosecond)))
		requireToken(t, secret, s)
		time.Sleep(time.Nanosecond)
		err := requireNone(t, s)
		require.ErrorContains(t, err, "503")
		synctest.Wait()
	})
}

// After a success failures are counted from one again: the waits of the next outage are those of the first.
func TestNextOutageBeginsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x, down := &exchanged{}, false
		x.become(func(w http.ResponseWriter, r *http.Request) {
			if down {
				text(429, "")(w, r) // which is asked once in each fetch
				return
			}
			text(200, `{"access_token":"`+secret+`","token_type":"Bearer","expires_in":3600}`)(w, r)
		})
		s := made(tokensource.Exchange(tokensource.Static("subject"), tokensource.ClientOptions{URL: "https://sts.example/token", HTTPClient: x.client()}))
		outage := func() (waits []time.Duration) {
			requireToken(t, secret, s)
			down = true
			last := time.Time{}
			for end := time.Now().Add(50 * time.Minute); time.Now().Before(end) && len(waits) < 8; time.Sleep(100 * time.Millisecond) {
				before := x.count()
				requireToken(t, secret, s)
				synctest.Wait()
				if x.count() > before {
					if !last.IsZero() {
						waits = append(waits, time.Since(last))
					}
					last = time.Now()
				}
			}
			down = false
			time.Sleep(time.Minute)
			requireToken(t, secret, s)
			synctest.Wait()
			return waits
		}
		first, second := outage(), outage()
		require.Len(t, first, 8)
		require.Len(t, second, 8)
		assert.Less(t, first[0], 3*time.Second)
		assert.Less(t, second[0], 3*time.Second, "%v", second)
		assert.Greater(t, max(first[5], first[6], first[7]), 3*time.Second, "they grow: %v", first)
	})
}
