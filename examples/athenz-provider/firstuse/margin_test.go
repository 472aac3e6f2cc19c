package firstuse_test

import (
	"encoding/json"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/athenz-provider/firstuse"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

// A document is noted until a minute after its end, the fraction of a second included, whatever else is noted meanwhile: a replica whose clock is that far
// behind takes it for good until then. What is over makes room, and not before: a full ConfigMap takes the next one as soon as one is.
func TestUsedUntilTheMarginIsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := kubetest.StartOn(t, 1, memconn.Listen())
		defer api.Client().CloseIdleConnections()
		api.Put(usedObject, map[string]any{})
		first := must.Get(firstuse.InConfigMap(api.URL(), api.Client(), "athenz/used-documents"))(t)
		next := byte(1)
		other := func() {
			next++
			is := must.Get(first(t.Context(), [32]byte{next}, time.Now().Add(time.Hour)))(t)
			require.True(t, is)
		}
		expires := time.Now().Truncate(time.Second).Add(10*time.Second + 900*time.Millisecond)
		is := must.Get(first(t.Context(), [32]byte{1}, expires))(t)
		require.True(t, is)
		for _, after := range []time.Duration{-time.Second, 0, 59 * time.Second, time.Minute - time.Millisecond} {
			time.Sleep(time.Until(expires.Add(after)))
			other() // what is over is forgotten
			is = must.Get(first(t.Context(), [32]byte{1}, expires))(t)
			assert.False(t, is, "%v after its end", after)
		}
		time.Sleep(time.Until(expires.Add(time.Minute + time.Second)))
		other()
		var o struct{ Data map[string]string }
		require.True(t, api.Get(usedObject, &o))
		assert.NotContains(t, o.Data["documents"], "AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "it makes room")
	})
}

// As many documents are noted as the ConfigMap is said to have room for, and not one more.
func TestUsedRoom(t *testing.T) {
	t.Parallel()
	api := kubetest.Start(t)
	used := map[string]int64{}
	for i := range 4095 {
		used[strconv.Itoa(i)] = time.Now().Add(time.Hour).Unix()
	}
	data := must.Get(json.Marshal(used))(t)
	api.Put(usedObject, map[string]any{"data": map[string]string{"documents": string(data)}})
	first := must.Get(firstuse.InConfigMap(api.URL(), api.Client(), "athenz/used-documents"))(t)
	is := must.Get(first(t.Context(), [32]byte{1}, time.Now().Add(time.Hour)))(t)
	require.True(t, is)
	_, err := first(t.Context(), [32]byte{2}, time.Now().Add(time.Hour))
	require.ErrorContains(t, err, "4096 documents were used lately")
	is = must.Get(first(t.Context(), [32]byte{1}, time.Now().Add(time.Hour)))(t)
	require.False(t, is, "what is noted is known")
}
