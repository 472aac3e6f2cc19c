package grpchttp_test

import (
	"context"
	"encoding/base64"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

// handlerTransport is an http.RoundTripper that calls a handler.
type handlerTransport struct{ handler http.Handler }

func (h handlerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	in := r.Clone(r.Context())
	in.ProtoMajor, in.ProtoMinor = 2, 0
	w := httptest.NewRecorder()
	h.handler.ServeHTTP(w, in)
	resp := w.Result()
	resp.ProtoMajor = 2
	return resp, nil
}

// fail calls a handler and returns the status that the client sees.
func fail(t testing.TB, h http.Handler) *grpchttp.Error {
	t.Helper()
	c := grpchttp.NewClient(&http.Client{Transport: handlerTransport{h}}, "http://server.test", 1<<10)
	_, err := c.Unary(t.Context(), "/S/M", nil, nil)
	e, ok := err.(*grpchttp.Error)
	require.True(t, ok, "%v", err)
	return e
}

// statusWith returns a google.rpc.Status with details, which are Anys of a type and a value.
func statusWith(details ...[2]string) string {
	b := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 14)
	for _, d := range details {
		a, err := proto.Marshal(&anypb.Any{TypeUrl: d[0], Value: []byte(d[1])})
		if err != nil {
			panic(err)
		}
		b = protowire.AppendBytes(protowire.AppendTag(b, 3, protowire.BytesType), a)
	}
	return string(b)
}

const retryInfoType = "type.googleapis.com/google.rpc.RetryInfo"

// A time to come back is never too early, and never one that a client takes for "do not come back".
func TestServerRetryAfter(t *testing.T) {
	t.Parallel()
	for after, want := range map[time.Duration]time.Duration{
		1:                          time.Millisecond,
		time.Millisecond:           2 * time.Millisecond,
		1500 * time.Millisecond:    1501 * time.Millisecond,
		time.Hour:                  time.Hour + time.Millisecond,
		24 * time.Hour:             24 * time.Hour,
		math.MaxInt64:              24 * time.Hour,
		math.MaxInt64 - 1000000:    24 * time.Hour,
		100 * 365 * 24 * time.Hour: 24 * time.Hour,
		0:                          0,
		-1:                         0,
		math.MinInt64:              0,
	} {
		var sent http.Header
		h := &grpchttp.Handler{Methods: map[string]grpchttp.Method{"/S/M": func(context.Context, *grpchttp.Call) error {
			return &grpchttp.Error{Code: grpchttp.Unavailable, Message: "déjà vu", RetryAfter: after}
		}}}
		e := fail(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h.ServeHTTP(w, r)
			sent = w.Header()
		}))
		assert.Equal(t, want, e.RetryAfter, after)
		assert.Equal(t, "déjà vu", e.Message)
		if want == 0 {
			assert.Empty(t, sent.Values("Grpc-Retry-Pushback-Ms"))
			assert.Empty(t, sent.Values("Grpc-Status-Details-Bin"))
			continue
		}
		assert.Equal(t, []string{strconv.FormatInt(want.Milliseconds(), 10)}, sent.Values("Grpc-Retry-Pushback-Ms"))
		details, err := base64.RawStdEncoding.DecodeString(sent.Get("Grpc-Status-Details-Bin"))
		require.NoError(t, err)
		d, err := proto.Marshal(durationpb.New(want))
		require.NoError(t, err)
		info := string(protowire.AppendBytes([]byte{0x0a}, d))
		wantDetails := statusWith([2]string{retryInfoType, info})
		assert.Equal(t, wantDetails[:2]+"\x12\x09déjà vu"+wantDetails[2:], string(details), after)
	}
}

// TestClientRetryAfter has what servers may send.
func TestClientRetryAfter(t *testing.T) {
	t.Parallel()
	info := func(d time.Duration) string {
		b, err := proto.Marshal(durationpb.New(d))
		require.NoError(t, err)
		return string(protowire.AppendBytes([]byte{0x0a}, b))
	}
	for name, test := range map[string]struct {
		details, pushback string
		want              time.Duration
	}{
		"nothing":                 {"", "", 0},
		"RetryInfo":               {statusWith([2]string{retryInfoType, info(1500 * time.Millisecond)}), "", 1500 * time.Millisecond},
		"RetryInfo of an hour":    {statusWith([2]string{retryInfoType, info(time.Hour)}), "", time.Hour},
		"pushback":                {"", "250", 250 * time.Millisecond},
		"both":                    {statusWith([2]string{retryInfoType, info(time.Second)}), "250", time.Second},
		"behind another detail":   {statusWith([2]string{"type.googleapis.com/google.rpc.ErrorInfo", "\x0a\x01x"}, [2]string{retryInfoType, info(time.Second)}), "", time.Second},
		"another detail":          {statusWith([2]string{"type.googleapis.com/google.rpc.ErrorInfo", info(time.Second)}), "", 0},
		"RetryInfo is negative":   {statusWith([2]string{retryInfoType, info(-time.Hour)}), "", 0},
		"RetryInfo is garbage":    {statusWith([2]string{retryInfoType, "\xff"}), "", 0},
		"RetryInfo is empty":      {statusWith([2]string{retryInfoType, ""}), "", 0},
		"its Duration is garbage": {statusWith([2]string{retryInfoType, "\x0a\x01\xff"}), "", 0},
		"its Duration is cut":     {statusWith([2]string{retryInfoType, "\x0a\x01\x08"}), "", 0},
		"RetryInfo is an age":     {statusWith([2]string{retryInfoType, "\x0a\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f"}), "", 0},
		"a second in nanoseconds": {statusWith([2]string{retryInfoType, "\x0a\x06\x10\x80\x94\xeb\xdc\x03"}), "", 0},
		"the status is garbage":   {"\xff", "", 0},
		"garbage, and pushback":   {statusWith([2]string{retryInfoType, "\xff"}), "250", 250 * time.Millisecond},
		"pushback is negative":    {"", "-1", 0},
		"pushback is garbage":     {"", "soon", 0},
		"pushback is too large":   {"", "9999999999999", 0},
	} {
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.StdEncoding} {
			e := fail(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				h := w.Header()
				h.Set("Content-Type", "application/grpc")
				h.Set("Grpc-Status", "14")
				h.Set("Grpc-Status-Details-Bin", encoding.EncodeToString([]byte(test.details)))
				h.Set("Grpc-Retry-Pushback-Ms", test.pushback)
			}))
			assert.Equal(t, grpchttp.Unavailable, e.Code, name)
			assert.Equal(t, test.want, e.RetryAfter, name)
		}
	}
}
