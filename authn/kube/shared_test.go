package kube_test

import (
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/spiffe"
)

// Calls that wait at the same time share one answer about one pod as one caller describes it: a caller with the UID of that pod and another name,
// namespace or account gets none of it.
func TestNodeAuthorizerSharesNothingWithOthers(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*spiffe.Pod){
		"another name":      func(p *spiffe.Pod) { p.Name = "other" },
		"another namespace": func(p *spiffe.Pod) { p.Namespace = "elsewhere" },
	} {
		synctest.Test(t, func(t *testing.T) {
			s := cluster(kubetest.StartOn(t, 1, memconn.Listen()))
			defer s.Client().CloseIdleConnections()
			s.Latency(100 * time.Millisecond)
			n := nodeAuthorizer(t, s, nil)
			var wg sync.WaitGroup
			var good atomic.Int64
			for i := range 20 {
				caller := proxy()
				if i%2 == 1 {
					change(caller.Pod)
				}
				wg.Go(func() {
					err := n.Authorize(t.Context(), caller, web)
					if i%2 == 1 {
						assert.Error(t, err, name)
					} else if err == nil {
						good.Add(1)
					}
				})
			}
			wg.Wait()
			assert.EqualValues(t, 10, good.Load(), name)
			assert.Positive(t, s.Count(http.MethodGet, "/api/v1/namespaces/istio-system/pods/"))
		})
	}
}
