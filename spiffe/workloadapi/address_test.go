package workloadapi_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// addressVector is one line of testdata/addresses.jsonl.
type addressVector struct {
	ID      string
	In      string
	OK      bool
	Network string
	Target  string // for tcp: host, a space, port
	Why     string
}

func addressVectors(t testing.TB) []addressVector {
	t.Helper()
	data := must.Get(os.ReadFile(filepath.Join("testdata", "addresses.jsonl")))(t)
	var all []addressVector
	for line := range bytes.Lines(data) {
		var v addressVector
		require.NoError(t, json.Unmarshal(line, &v), "%s", line)
		all = append(all, v)
	}
	return all
}

func TestAddressVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-11", "WEP-12", "WEP-13")
	vectors := addressVectors(t)
	require.Len(t, vectors, 40)
	for i, v := range vectors {
		require.Equal(t, fmt.Sprintf("AV-%02d", i+1), v.ID)
		t.Run(v.ID, func(t *testing.T) {
			t.Parallel()
			a, err := workloadapi.ParseAddress(v.In)
			if !v.OK {
				_, ok := workloadapi.Corrected(err)
				require.True(t, ok, "%s: got %v, %v", v.Why, a, err)
				assert.Zero(t, a)
				assert.ErrorContains(t, err, fmt.Sprintf("%q", v.In))
				_, again := workloadapi.NewClient(v.In, nil)
				assert.Equal(t, err, again)
				return
			}
			require.NoError(t, err, v.Why)
			assert.Equal(t, v.Network, a.Network)
			target := a.Target
			if v.Network == "tcp" {
				host, port := must.Get2(net.SplitHostPort(target))(t)
				target = host + " " + port
			}
			assert.Equal(t, v.Target, target)
			assert.Equal(t, a, must.Get(workloadapi.ParseAddress(a.String()))(t))
			assert.Regexp(t, `^(unix|tcp)://`, a.String())
		})
	}
}

// The address of a Broker API may have a DNS name; in all else it is like that of a Workload API.
func TestAddressNames(t *testing.T) {
	t.Parallel()
	parse := func(s string) (workloadwire.Address, error) { return workloadwire.ParseAddress(s, "X", true) }
	names := map[string]string{
		"tcp://localhost:8000": "localhost:8000", "tcp://api.example.org:8000": "api.example.org:8000",
		"tcp://BROKER.Example.com:8443": "broker.example.com:8443", "tcp://broker.:1": "broker.:1",
		"tcp://1a.b4:65535": "1a.b4:65535", "tcp://xn--80ak6aa92e.example:1": "xn--80ak6aa92e.example:1",
		"TCP://a-b.c-d.e:1": "a-b.c-d.e:1", "tcp://" + strings.Repeat("a", 63) + ":1": strings.Repeat("a", 63) + ":1",
	}
	for in, want := range names {
		a := must.Get(parse(in))(t)
		assert.Equal(t, workloadwire.Address{Network: "tcp", Target: want}, a)
		assert.Equal(t, a, must.Get(parse(a.String()))(t))
		require.Error(t, must.Err(workloadapi.ParseAddress(in)))
	}
	vectors := 0
	for _, v := range addressVectors(t) {
		if names[v.In] != "" {
			vectors++
			continue
		}
		want, err := workloadapi.ParseAddress(v.In)
		got, named := parse(v.In)
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
		a, err := parse(bad)
		require.Error(t, err, "%s: %v", bad, a)
	}
	must.Fail(t, must.Err(parse("")), "set X to")
}

// What was probably meant is in the error.
func TestAddressCorrected(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "DIV-10")
	for in, want := range map[string]string{
		"unix://run/a.sock":           "unix:///run/a.sock",
		"unix://localhost/run/a.sock": "unix:///run/a.sock",
		"unix:run/a.sock":             "unix:///run/a.sock",
		"/run/a.sock":                 "unix:///run/a.sock",
		" unix:///run/a.sock":         "unix:///run/a.sock",
		"unix:///run/a.sock\n":        "unix:///run/a.sock",
		"unix:///":                    "",
		"unix:///run/":                "",
		"unix:":                       "",
		"unix:///run/%00":             "",
		"tcp://[::1:8000":             "",
		"tcp://[fe80::1%25eth0]:8000": "",
		"tcp://[fe80::1%eth0]:8000":   "",
		"tcp://127.0.0.1:0":           "",
		"tcp://127.0.0.1:+80":         "",
		"tcp://127.0.0.1":             "",
		"tcp://api.example.org:8000":  "",
		"npipe:spire-agent":           "",
		"unix-abstract:a":             "",
		"unix:@agent":                 "",
		"unix://@agent":               "",
		"unix:%00agent":               "",
		"unix://\x00agent":            "",
		`"unix:///run/a.sock"`:        "unix:///run/a.sock",
		` "/run/a.sock" `:             "unix:///run/a.sock",
		`"nonsense"`:                  "",
		`"`:                           "",
		"":                            "",
		"nonsense":                    "",
		"1:2":                         "",
	} {
		_, err := workloadapi.ParseAddress(in)
		corrected, ok := workloadapi.Corrected(err)
		assert.True(t, ok, "%q: %v", in, err)
		assert.Equal(t, want, corrected, "%q: %v", in, err)
	}
	_, err := workloadapi.ParseAddress("unix://run/a.sock")
	assert.EqualError(t, err, `workloadapi: address "unix://run/a.sock": "run" is in the place of a host, because a path begins with a slash of its own; write unix:///run/a.sock`)
	assert.ErrorContains(t, must.Err(workloadapi.ParseAddress("npipe:spire-agent")), "named pipes")
	_, err = workloadapi.ParseAddress("x" + strings.Repeat("y", 10_000))
	assert.Less(t, len(err.Error()), 500)
}

// Without an address there is a clear error, which names the variable (WEP-10).
func TestAddressMissing(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-10")
	assert.Equal(t, "SPIFFE_ENDPOINT_SOCKET", workloadapi.SocketEnv)
	assert.ErrorContains(t, must.Err(workloadapi.New(workloadapi.Config{})), "set SPIFFE_ENDPOINT_SOCKET")
}

func FuzzParseAddress(f *testing.F) {
	for _, v := range addressVectors(f) {
		f.Add(v.In)
	}
	f.Add("tcp://[::ffff:1.2.3.4]:80")
	f.Add("unix:////a//../b")
	f.Add("tcp://broker.example.com:8443")
	f.Fuzz(func(t *testing.T, in string) {
		if a, err := workloadwire.ParseAddress(in, "", true); err == nil {
			require.Equal(t, a, must.Get(workloadwire.ParseAddress(a.String(), "", true))(t))
		}
		a, err := workloadapi.ParseAddress(in)
		if err != nil {
			corrected, ok := workloadapi.Corrected(err)
			require.True(t, ok)
			require.LessOrEqual(t, len(err.Error()), 1024+len(corrected))
			if corrected != "" {
				must.Get(workloadapi.ParseAddress(corrected))(t, "the corrected address of %q", in)
			}
			return
		}
		again := must.Get(workloadapi.ParseAddress(a.String()))(t)
		require.Equal(t, a, again)
		require.Equal(t, a.String(), again.String())
		if a.Network == "tcp" {
			must.Get2(net.SplitHostPort(a.Target))(t)
		} else {
			require.True(t, filepath.IsAbs(a.Target))
		}
	})
}
