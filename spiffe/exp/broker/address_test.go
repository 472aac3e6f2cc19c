package broker_test

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// The address of a Broker API may have a DNS name; in all else it is like that of a Workload API.
func TestAddressNames(t *testing.T) {
	t.Parallel()
	plain := func(s string) (workloadwire.Address, error) { return workloadwire.ParseAddress("x", s, "X", nil) }
	names := map[string]string{
		"tcp://localhost:8000": "localhost:8000", "tcp://api.example.org:8000": "api.example.org:8000",
		"tcp://BROKER.Example.com:8443": "broker.example.com:8443", "tcp://broker.:1": "broker.:1",
		"tcp://1a.b4:65535": "1a.b4:65535", "tcp://xn--80ak6aa92e.example:1": "xn--80ak6aa92e.example:1",
		"TCP://a-b.c-d.e:1": "a-b.c-d.e:1", "tcp://" + strings.Repeat("a", 63) + ":1": strings.Repeat("a", 63) + ":1",
	}
	for in, want := range names {
		a := must.Get(broker.ParseAddress(in))(t)
		assert.Equal(t, workloadwire.Address{Network: "tcp", Target: want}, a)
		assert.Equal(t, a, must.Get(broker.ParseAddress(a.String()))(t))
		require.Error(t, must.Err(plain(in)))
	}
	vectors := 0
	data := must.Get(os.ReadFile("../../workloadapi/testdata/addresses.jsonl"))(t)
	for line := range bytes.Lines(data) {
		var v struct{ In string }
		require.NoError(t, json.Unmarshal(line, &v), "%s", line)
		if names[v.In] != "" {
			vectors++
			continue
		}
		want, err := plain(v.In)
		got, named := broker.ParseAddress(v.In)
		assert.Equal(t, want, got, v.In)
		assert.Equal(t, err == nil, named == nil, v.In)
	}
	assert.Equal(t, 2, vectors)
	for _, bad := range []string{
		"tcp://broker", "tcp://broker:", "tcp://broker:0", "tcp://broker:65536", "tcp://broker:-1", "tcp://broker:https",
		"tcp://:8443", "tcp://broker:1/", "tcp://broker:1/x", "tcp://broker:1?x", "tcp://broker:1#x", "tcp://u@broker:1",
		"tcp://-broker:1", "tcp://broker-:1", "tcp://a..b:1", "tcp://.a:1", "tcp://a_b:1", "tcp://a b:1", "tcp://*.a:1",
		"tcp://1:1", "tcp://127.1:1", "tcp://1.2.3.4.5:1", "tcp://a.1:1", "tcp://0x7f000001:1", "tcp://[broker]:1",
		"tcp://[fe80::1%25eth0]:1", "tcp://größe.example:1", "tcp://%62roker:1", "tcp:broker:1", "tcp:/broker:1",
		"broker:1", "https://broker:1", "unix://broker/run/s", "tcp://" + strings.Repeat("a", 64) + ":1",
	} {
		a, err := broker.ParseAddress(bad)
		require.Error(t, err, "%s: %v", bad, a)
	}
	must.Fail(t, must.Err(broker.ParseAddress("")), "set SPIFFE_BROKER_SOCKET to")
}
