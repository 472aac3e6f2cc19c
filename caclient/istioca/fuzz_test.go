package istioca_test

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// FuzzReadChain reads an answer, its texts parted by zero bytes.
func FuzzReadChain(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	chain := ca.Intermediate().SVID("/web").Chain()
	leaf, mid, root := pem(chain[0]), pem(chain[1]), pem(ca.Root())
	for _, texts := range [][]string{
		nil, {""}, {"", ""}, {leaf}, {leaf, root}, {leaf, mid, root}, {leaf + mid, root + root}, {leaf, "", root}, {root, root}, {leaf, leaf}, {leaf, "x"}, {"x", root},
		{strings.TrimSpace(leaf), strings.TrimSpace(mid), root}, {leaf[:100], root},
	} {
		f.Add(strings.Join(texts, "\x00"))
	}
	f.Fuzz(func(t *testing.T, in string) {
		texts := strings.Split(in, "\x00")
		chain, roots, err := istioca.ReadChain(texts)
		if err != nil {
			require.Empty(t, chain)
			require.Empty(t, roots)
			return
		}
		require.NotEmpty(t, chain)
		require.NotEmpty(t, roots)
		require.LessOrEqual(t, len(roots), 256)
		seen := map[string]bool{}
		for i, c := range chain {
			require.False(t, seen[string(c.Raw)])
			seen[string(c.Raw)] = true
			require.True(t, i == 0 || !c.IsCA || !bytes.Equal(c.RawIssuer, c.RawSubject) || c.CheckSignatureFrom(c) != nil)
		}
	})
}

// FuzzRetryInfo compares with the generated reader of a Duration.
func FuzzRetryInfo(f *testing.F) {
	for _, d := range []time.Duration{0, 1, time.Second, -time.Second, time.Hour + 1, math.MaxInt64} {
		b, err := proto.Marshal(durationpb.New(d))
		require.NoError(f, err)
		f.Add(protowire.AppendBytes([]byte{0x0a}, b))
	}
	f.Add([]byte("\x0a\x02\x08\x01\x12\x00"))
	f.Add([]byte("\x0a\x02\x08\x01\x0a\x02\x10\x01"))
	f.Add([]byte("\x0a\x0b\x10\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")) // more nanoseconds than fit into their type
	f.Add([]byte("\x0b\x0c"))
	f.Add([]byte("\x0a\x05\x0d\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := istioca.RetryInfo(b)
		require.GreaterOrEqual(t, got, time.Duration(0))
		require.LessOrEqual(t, got, (math.MaxInt32+1)*time.Second)
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 || num != 1 || typ != protowire.BytesType {
			return
		}
		v, m := protowire.ConsumeBytes(b[n:])
		if m != len(b)-n { // only a field 1, and whole
			return
		}
		var d durationpb.Duration
		if proto.Unmarshal(v, &d) == nil && d.IsValid() && d.GetSeconds() >= 0 && d.GetSeconds() <= math.MaxInt32 && d.GetNanos() >= 0 {
			require.Equal(t, d.AsDuration(), got)
		}
	})
}
