package grpchttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

const limit = 1 << 20 // bytes of a message

// serve serves h in memory and returns a client without anything of the package.
func serve(t testing.TB, h http.Handler) *http.Client {
	t.Helper()
	l := memconn.Listen()
	c := &http.Client{Transport: transport(t, l.DialContext)}
	serveOn(t, l, h)
	return c
}

func transport(t testing.TB, dial func(context.Context, string, string) (net.Conn, error)) *http.Transport {
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: dial}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

func serveOn(t testing.TB, l net.Listener, h http.Handler) {
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols), ErrorLog: log.New(io.Discard, "", 0)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	srv.Protocols.SetHTTP1(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		_ = srv.Close()
		<-done
	})
}

// dial returns a client of ours for a handler.
func dial(t testing.TB, h http.Handler) *grpchttp.Client {
	t.Helper()
	return grpchttp.NewClient(serve(t, h), "http://localhost", limit)
}

func handler(methods map[string]grpchttp.Method) *grpchttp.Handler {
	return &grpchttp.Handler{Methods: methods, Name: "test", MaxMessage: limit}
}

// code returns the Error that err is.
func asError(t testing.TB, err error) *grpchttp.Error {
	t.Helper()
	return must.As[*grpchttp.Error](err)(t)
}

func echo(_ context.Context, request []byte) ([]byte, error) { return request, nil }

// parrot answers each message with the same, as it comes.
func parrot(_ context.Context, c *grpchttp.Call) error {
	for {
		msg, err := c.Receive()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := c.Send(msg); err != nil {
			return err
		}
	}
}

// count answers one message with itself, as often as it is long.
func count(_ context.Context, c *grpchttp.Call) error {
	msg, err := c.ReceiveOnly()
	if err != nil {
		return err
	}
	for range msg {
		if err := c.Send(msg); err != nil {
			return err
		}
	}
	return nil
}

func TestCalls(t *testing.T) {
	t.Parallel()
	c := dial(t, handler(map[string]grpchttp.Method{"/S/Echo": grpchttp.Unary(echo), "/S/Count": count}))
	for _, size := range []int{0, 1, 4091, 4092, grpchttp.FirstRead - 1, grpchttp.FirstRead, grpchttp.FirstRead + 1, 3 * grpchttp.FirstRead, limit} {
		assert.Len(t, must.Get(c.Unary(t.Context(), "/S/Echo", nil, []byte(strings.Repeat("x", size))))(t), size)
	}
	_, err := c.Unary(t.Context(), "/S/Echo", nil, make([]byte, limit+1))
	e := asError(t, err)
	assert.Equal(t, grpchttp.ResourceExhausted, e.Code)
	assert.True(t, e.Remote, "the server has said so")

	for n := range 4 {
		s, err := c.Stream(t.Context(), "/S/Count", nil, make([]byte, n))
		require.NoError(t, err)
		for range n {
			assert.Len(t, must.Get(s.Receive())(t), n)
		}
		for range 3 {
			assert.Equal(t, io.EOF, must.Err(s.Receive()))
		}
		assert.NoError(t, s.Close())
		_, err = c.Unary(t.Context(), "/S/Count", nil, make([]byte, n))
		assert.Equal(t, n == 1, err == nil, "one response is wanted")
	}
	_, err = c.Unary(t.Context(), "/S/Other", nil, nil)
	assert.Equal(t, grpchttp.Unimplemented, asError(t, err).Code)
	assert.True(t, asError(t, err).Remote)
}

// Metadata goes to the server, and none of it can pass for the protocol's own.
func TestMetadata(t *testing.T) {
	t.Parallel()
	c := dial(t, handler(map[string]grpchttp.Method{"/S/M": func(ctx context.Context, c *grpchttp.Call) error {
		msg, err := c.ReceiveOnly()
		if err != nil {
			return err
		}
		for _, name := range []string{"one", "two"} {
			assert.Equal(t, []string{"a", "b"}, c.Header().Values(name))
		}
		assert.Equal(t, "application/grpc", c.Header().Get("Content-Type"))
		assert.Equal(t, "trailers", c.Header().Get("Te"))
		assert.Equal(t, "identity", c.Header().Get("Grpc-Accept-Encoding"))
		assert.Equal(t, "identity", c.Header().Get("Accept-Encoding"), "not even that of HTTP")
		assert.Empty(t, c.Header().Get("Grpc-Encoding"))
		assert.NotEmpty(t, c.Header().Get("User-Agent"))
		if len(msg) > 0 {
			if err := c.Send(msg); err != nil {
				return err
			}
		}
		if len(msg) > 1 {
			return grpchttp.Errorf(grpchttp.Aborted, "enough")
		}
		return nil
	}}))
	for n := range 3 { // without a message, with one, and with an error after it
		s, err := c.Stream(t.Context(), "/S/M", http.Header{
			"One": {"a", "b"}, "two": {"a", "b"}, "Content-Type": {"text/plain"}, "grpc-encoding": {"gzip"}, "Te": {"x"},
		}, make([]byte, n))
		require.NoError(t, err)
		if n > 0 {
			must.Get(s.Receive())(t)
		}
		_, err = s.Receive()
		if n < 2 {
			require.Equal(t, io.EOF, err)
		} else {
			require.Equal(t, grpchttp.Aborted, asError(t, err).Code)
		}
		assert.Equal(t, []string{"application/grpc"}, s.Header().Values("Content-Type"))
	}
}

var messages = []string{"", "plain", "100%", "%41", "a\nb\r\n", "größer", "日本語", "\x00\x7f", "\xff\xfe", strings.Repeat("x%", 2000), " spaces "}

// Every code and every text arrives as it was sent, with and without messages before it.
func TestStatus(t *testing.T) {
	t.Parallel()
	var status error
	before := 0
	c := dial(t, handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
		for range before {
			if err := c.Send([]byte("m")); err != nil {
				return err
			}
		}
		return status
	}}))
	call := func() error {
		s := must.Get(c.Stream(t.Context(), "/S/M", nil, nil))(t)
		for range before {
			must.Get(s.Receive())(t)
		}
		return must.Err(s.Receive())
	}
	for before = range 3 {
		for code := grpchttp.Canceled; code <= grpchttp.Unauthenticated+1; code++ {
			for _, text := range messages {
				status = &grpchttp.Error{Code: code, Message: text}
				assert.Equal(t, &grpchttp.Error{Code: code, Message: text, Remote: true}, call())
			}
		}
		for want, err := range map[grpchttp.Code]error{
			grpchttp.Unknown:          errors.New("what the method says"),
			grpchttp.Canceled:         fmt.Errorf("x: %w", context.Canceled),
			grpchttp.DeadlineExceeded: fmt.Errorf("x: %w", context.DeadlineExceeded),
			grpchttp.NotFound:         fmt.Errorf("x: %w", grpchttp.Errorf(grpchttp.NotFound, "no")),
		} {
			status = err
			assert.Equal(t, want, asError(t, call()).Code)
		}
		status = nil
		assert.Equal(t, io.EOF, call())
	}
}

func TestErrorf(t *testing.T) {
	t.Parallel()
	e := grpchttp.Errorf(grpchttp.DataLoss, "lost: %w", io.ErrNoProgress)
	assert.EqualError(t, e, "data_loss: lost: "+io.ErrNoProgress.Error())
	assert.ErrorIs(t, e, io.ErrNoProgress)
	assert.False(t, e.Remote)
	assert.NoError(t, grpchttp.Errorf(grpchttp.DataLoss, "x").Unwrap())
	seen := map[string]bool{}
	for c := grpchttp.OK; c <= grpchttp.Unauthenticated; c++ {
		assert.Regexp(t, "^[a-z_]+$", c.String())
		seen[c.String()] = true
	}
	assert.Len(t, seen, 17)
	assert.Equal(t, "code_17", grpchttp.Code(17).String())
	assert.Equal(t, "code_4294967295", grpchttp.Code(math.MaxUint32).String())
}

// A deadline is the same on both sides; what is behind an error can be found in it.
func TestDeadline(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var left time.Duration
		c := dial(t, handler(map[string]grpchttp.Method{
			"/S/Wait": func(ctx context.Context, c *grpchttp.Call) error {
				left = 0
				if d, ok := ctx.Deadline(); ok {
					left = time.Until(d)
				}
				<-ctx.Done()
				return ctx.Err()
			},
			"/S/Late": func(ctx context.Context, c *grpchttp.Call) error { // does not look at its context
				time.Sleep(time.Hour)
				return c.Send(nil)
			},
		}))
		for _, d := range []time.Duration{time.Nanosecond, 1500 * time.Microsecond, time.Second, 90 * time.Minute, 90 * 24 * time.Hour} {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			start := time.Now()
			_, err := c.Unary(ctx, "/S/Wait", nil, nil)
			assert.Equal(t, grpchttp.DeadlineExceeded, asError(t, err).Code, "%v", err)
			assert.Equal(t, d, time.Since(start))
			synctest.Wait()
			if d > time.Second {
				assert.Equal(t, d, left)
			}
			cancel()
		}
		cause := errors.New("the cause")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, cause)
		defer cancel()
		_, err := c.Unary(ctx, "/S/Late", nil, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, cause)
		assert.False(t, asError(t, err).Remote)
		require.ErrorIs(t, must.Err(c.Unary(ctx, "/S/Late", nil, nil)), cause, "it was over before")

		// The timeout of an http.Client is one too.
		hc := serve(t, handler(map[string]grpchttp.Method{"/S/Late": func(ctx context.Context, c *grpchttp.Call) error {
			<-ctx.Done()
			return ctx.Err()
		}}))
		hc.Timeout = time.Second
		_, err = grpchttp.NewClient(hc, "http://localhost", limit).Unary(t.Context(), "/S/Late", nil, nil)
		assert.Equal(t, grpchttp.DeadlineExceeded, asError(t, err).Code, "%v", err)
		time.Sleep(time.Hour)
	})
}

// Who goes away is noticed on the other side.
func TestCancel(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var ended sync.WaitGroup
		c := dial(t, handler(map[string]grpchttp.Method{"/S/M": func(ctx context.Context, c *grpchttp.Call) error {
			defer ended.Done()
			if err := c.Send([]byte("m")); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}}))
		for _, leave := range []func(s *grpchttp.Stream, cancel context.CancelCauseFunc){
			func(s *grpchttp.Stream, _ context.CancelCauseFunc) { assert.NoError(t, s.Close()) },
			func(_ *grpchttp.Stream, cancel context.CancelCauseFunc) { cancel(io.ErrClosedPipe) },
		} {
			ended.Add(1)
			ctx, cancel := context.WithCancelCause(t.Context())
			s, err := c.Stream(ctx, "/S/M", nil, nil)
			require.NoError(t, err)
			must.Get(s.Receive())(t)
			leave(s, cancel)
			_, err = s.Receive()
			require.Error(t, err)
			if ctx.Err() != nil {
				assert.Equal(t, grpchttp.Canceled, asError(t, err).Code)
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorIs(t, err, io.ErrClosedPipe)
			}
			ended.Wait()
			cancel(nil)
		}
		// The client waits for an answer, and then not any more.
		ctx, cancel := context.WithCancel(t.Context())
		slow := dial(t, handler(map[string]grpchttp.Method{"/S/M": func(ctx context.Context, c *grpchttp.Call) error {
			<-ctx.Done()
			return nil
		}}))
		time.AfterFunc(time.Minute, cancel)
		assert.Equal(t, grpchttp.Canceled, asError(t, must.Err(slow.Stream(ctx, "/S/M", nil, nil))).Code)
	})
}

// A request that stops in the middle is given up: after the time that is set, at its deadline, or when the
// server goes. Who answers while the client is silent is not disturbed.
func TestReceiveTimeout(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		timeout, deadline, shutdown time.Duration
		sent                        string
		pause                       time.Duration // between two parts of the request
		code                        grpchttp.Code
		after                       time.Duration
	}{
		"nothing comes":       {timeout: time.Minute, code: grpchttp.DeadlineExceeded, after: time.Minute},
		"half a prefix":       {timeout: time.Minute, sent: "\x00\x00", code: grpchttp.DeadlineExceeded, after: time.Minute},
		"half a message":      {timeout: time.Minute, sent: "\x00\x00\x00\x00\x05ab", code: grpchttp.DeadlineExceeded, after: time.Minute},
		"no end":              {timeout: time.Minute, sent: "\x00\x00\x00\x00\x02ab", code: grpchttp.DeadlineExceeded, after: time.Minute},
		"byte by byte":        {timeout: time.Minute, sent: "\x00\x00\x00\x00\x05abcd", pause: 50 * time.Second, code: grpchttp.DeadlineExceeded, after: time.Minute},
		"its deadline":        {timeout: time.Minute, deadline: time.Second, sent: "\x00", code: grpchttp.DeadlineExceeded, after: time.Second},
		"no limit":            {deadline: time.Hour, sent: "\x00", code: grpchttp.DeadlineExceeded, after: time.Hour},
		"the server goes":     {timeout: time.Minute, shutdown: time.Second, sent: "\x00", code: grpchttp.Canceled, after: time.Second},
		"the server goes too": {shutdown: time.Second, sent: "\x00", code: grpchttp.Canceled, after: time.Second},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			h := handler(map[string]grpchttp.Method{"/S/Echo": grpchttp.Unary(echo)})
			h.ReceiveTimeout = test.timeout
			c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if test.shutdown > 0 {
					ctx, cancel := context.WithCancel(r.Context())
					defer cancel()
					time.AfterFunc(test.shutdown, cancel)
					r = r.WithContext(ctx)
				}
				h.ServeHTTP(w, r)
			}))
			in, out := io.Pipe()
			defer out.Close()
			req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/S/Echo", in))(t)
			req.Header.Set("Content-Type", "application/grpc")
			if test.deadline > 0 {
				req.Header.Set("Grpc-Timeout", grpchttp.FormatTimeout(test.deadline))
			}
			go func() {
				for i := range test.sent {
					if _, err := out.Write([]byte(test.sent[i : i+1])); err != nil {
						return
					}
					time.Sleep(test.pause)
				}
			}()
			start := time.Now()
			resp := must.Get(c.Do(req))(t)
			assert.Equal(t, test.after, time.Since(start))
			assert.Equal(t, strconv.Itoa(int(test.code)), resp.Header.Get("Grpc-Status"))
			require.NoError(t, resp.Body.Close())
			time.Sleep(test.pause) // of the one who still writes
		})
	}
	synctest.Test(t, func(t *testing.T) { // the time is for each message, and for nothing but to receive
		h := handler(map[string]grpchttp.Method{"/S/P": parrot, "/S/Slow": func(_ context.Context, c *grpchttp.Call) error {
			if _, err := c.ReceiveOnly(); err != nil {
				return err
			}
			time.Sleep(time.Hour)
			if err := c.Send([]byte("m")); err != nil {
				return err
			}
			time.Sleep(time.Hour)
			return c.Send([]byte("m"))
		}})
		h.ReceiveTimeout = time.Minute
		hc := serve(t, h)
		s, err := grpchttp.NewClient(hc, "http://localhost", limit).Stream(t.Context(), "/S/Slow", nil, nil)
		for range 2 {
			require.NoError(t, err)
			_, err = s.Receive()
		}
		require.NoError(t, err)
		require.Equal(t, io.EOF, must.Err(s.Receive()))

		in, out := io.Pipe()
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/S/P", in))(t)
		req.Header.Set("Content-Type", "application/grpc")
		go func() {
			defer out.Close()
			for range 5 {
				time.Sleep(50 * time.Second)
				_, _ = out.Write(append(grpchttp.AppendPrefix(nil, 1), 'x'))
			}
		}()
		resp := must.Get(hc.Do(req))(t)
		assert.Len(t, must.Get(io.ReadAll(resp.Body))(t), 5*6)
		assert.Equal(t, "0", resp.Trailer.Get("Grpc-Status"))
	})
}

// A panic is Internal for the client, and the server lives.
func TestPanic(t *testing.T) {
	t.Parallel()
	c := dial(t, handler(map[string]grpchttp.Method{
		"/S/Echo":  grpchttp.Unary(echo),
		"/S/Panic": func(context.Context, *grpchttp.Call) error { panic("told to") },
		"/S/Later": func(_ context.Context, c *grpchttp.Call) error { _ = c.Send(nil); panic(http.ErrAbortHandler) },
	}))
	for range 2 {
		for _, m := range []string{"/S/Panic", "/S/Later"} {
			s, err := c.Stream(t.Context(), m, nil, nil)
			for err == nil {
				_, err = s.Receive()
			}
			e := asError(t, err)
			assert.Equal(t, grpchttp.Internal, e.Code, "%s: %v", m, err)
			assert.False(t, e.Remote)
		}
		must.Get(c.Unary(t.Context(), "/S/Echo", nil, nil))(t)
	}
}

// Where responses cannot be flushed there are none.
func TestNoFlush(t *testing.T) {
	t.Parallel()
	h := handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
		err := c.Send([]byte("m"))
		assert.ErrorIs(t, err, http.ErrNotSupported)
		return err
	}})
	c := dial(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(struct{ http.ResponseWriter }{w}, r)
	}))
	s, err := c.Stream(t.Context(), "/S/M", nil, nil)
	for err == nil {
		_, err = s.Receive()
	}
	assert.Equal(t, grpchttp.Unavailable, asError(t, err).Code)
}

func TestMessageEncoding(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":            "",
		"plain text~": "plain text~",
		"100%":        "100%25",
		"a\nb":        "a%0Ab",
		"ö":           "%C3%B6",
		"\x7f\x00":    "%7F%00",
	} {
		assert.Equal(t, want, grpchttp.EncodeMessage(in))
	}
	for in, want := range map[string]string{
		"%41%61%7e": "Aa~", "%": "%", "%4": "%4", "%zz": "%zz", "100%": "100%", "%%41": "%A", "%c3%B6": "ö", "%ff": "\xff", "a%2": "a%2", "%4g%41": "%4gA",
	} {
		assert.Equal(t, want, grpchttp.DecodeMessage(in))
	}
}

func TestTimeouts(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0n", 0: "0n", 1: "1n", 99_999_999: "99999999n", 100_000_000: "100000u", 100_000_001: "100001u",
		time.Second: "1000000u", 100 * time.Second: "100000m", 100*time.Second + 1: "100001m", 48 * time.Hour: "172800S",
		1157 * 24 * time.Hour: "99964800S", 10_000 * 24 * time.Hour: "14400000M", 200 * 365 * 24 * time.Hour: "1752000H",
		math.MaxInt64: "2562048H",
	} {
		got := grpchttp.FormatTimeout(d)
		assert.Equal(t, want, got)
		back, ok := grpchttp.ParseTimeout(got)
		require.True(t, ok, got)
		assert.GreaterOrEqual(t, back, d, got)
	}
	for in, want := range map[string]time.Duration{
		"1n": 1, "2u": 2 * time.Microsecond, "3m": 3 * time.Millisecond, "4S": 4 * time.Second, "5M": 5 * time.Minute, "6H": 6 * time.Hour,
		"00000001S": time.Second, "99999999H": math.MaxInt64, "2562047H": 2562047 * time.Hour, "2562048H": math.MaxInt64, "0S": 0,
	} {
		got, ok := grpchttp.ParseTimeout(in)
		require.True(t, ok, in)
		assert.Equal(t, want, got, in)
	}
	for _, bad := range []string{"", "1", "n", "S1", "1s", "1h", "-1S", "+1S", "1.5S", "1 S", " 1S", "1S ", "100000000n", "1ms", "٣S", "0x1S", "1SS"} {
		_, ok := grpchttp.ParseTimeout(bad)
		assert.False(t, ok, bad)
	}
}

// promise is a reader of one message that promises size bytes and has fewer. It notes what is asked for.
type promise struct {
	r    io.Reader
	have int
	most int
}

func (p *promise) Read(b []byte) (int, error) {
	p.most = max(p.most, len(b))
	n, err := p.r.Read(b[:min(len(b), 1000)])
	p.have += n
	return n, err
}

// What is set aside for a message follows what has come, not what was promised.
func TestReadFrame(t *testing.T) {
	t.Parallel()
	for _, have := range []int{0, 1, grpchttp.FirstRead - 1, grpchttp.FirstRead, 100_000, 1 << 20} {
		p := &promise{r: io.MultiReader(strings.NewReader(string(grpchttp.AppendPrefix(nil, 1<<30))), strings.NewReader(strings.Repeat("x", have)))}
		_, err := grpchttp.ReadFrame(p, 1<<30)
		assert.Equal(t, grpchttp.ErrShort, err)
		assert.LessOrEqual(t, p.most, max(grpchttp.FirstRead, have))
	}
	p := &promise{r: strings.NewReader(string(grpchttp.AppendPrefix(nil, limit+1)) + strings.Repeat("x", limit+1))}
	_, err := grpchttp.ReadFrame(p, limit)
	assert.Equal(t, grpchttp.ResourceExhausted, asError(t, err).Code)
	assert.Equal(t, 5, p.have, "nothing but the prefix is read")
	for n := range 5 {
		_, err := grpchttp.ReadFrame(strings.NewReader("\x00\x00\x00\x00\x01"[:n]), limit)
		assert.Equal(t, n == 0, err == io.EOF)
		assert.Equal(t, n != 0, err == grpchttp.ErrShort)
	}
	_, err = grpchttp.ReadFrame(io.MultiReader(strings.NewReader("\x00\x00"), iotest{io.ErrUnexpectedEOF}), limit)
	assert.Equal(t, io.ErrUnexpectedEOF, err, "a connection that was cut")
}

type iotest struct{ err error }

func (r iotest) Read([]byte) (int, error) { return 0, r.err }

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x03abc\x01\x00\x00\x00\x00"), 10)
	f.Add([]byte("\x00\xff\xff\xff\xff"), 1<<30)
	f.Add([]byte("\x00\x00\x00\x80\x00"+strings.Repeat("x", 1<<15)), 1<<15)
	f.Fuzz(func(t *testing.T, data []byte, limit int) {
		if limit < 0 {
			return
		}
		r := strings.NewReader(string(data))
		var back []byte
		for {
			msg, err := grpchttp.ReadFrame(r, limit)
			if err != nil {
				if err != io.EOF && err != grpchttp.ErrShort {
					assert.Contains(t, []grpchttp.Code{grpchttp.ResourceExhausted, grpchttp.Internal}, asError(t, err).Code)
				}
				if err == io.EOF {
					assert.Equal(t, data, append([]byte{}, back...))
				}
				return
			}
			assert.LessOrEqual(t, len(msg), limit)
			back = append(append(back, grpchttp.AppendPrefix(nil, len(msg))...), msg...)
		}
	})
}

func FuzzMessage(f *testing.F) {
	for _, s := range messages {
		f.Add(s)
	}
	f.Add("%e3%8")
	f.Fuzz(func(t *testing.T, s string) {
		sent := grpchttp.EncodeMessage(s)
		for _, c := range []byte(sent) {
			assert.True(t, c >= ' ' && c <= '~')
		}
		assert.Equal(t, s, grpchttp.DecodeMessage(sent))
		assert.LessOrEqual(t, len(grpchttp.DecodeMessage(s)), len(s))
	})
}

// The context of a method says which peer is calling, for limits by peer.
func TestPeer(t *testing.T) {
	t.Parallel()
	h := handler(map[string]grpchttp.Method{
		"/who": grpchttp.Unary(func(ctx context.Context, _ []byte) ([]byte, error) { return []byte(peerkey.FromContext(ctx)), nil }),
	})
	srv := httptest.NewUnstartedServer(h)
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	answer := must.Get(grpchttp.NewClient(srv.Client(), srv.URL, limit).Unary(t.Context(), "/who", nil, nil))(t)
	assert.Equal(t, "127.0.0.1", string(answer))
}
