package grpchttp_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

// frame is a message on the wire, made with no code of the package.
func frame(flags byte, msg string) string {
	return string(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(msg)))) + msg
}

// What a server answers to requests of which each has one thing wrong.
func TestServerProtocol(t *testing.T) {
	t.Parallel()
	good := frame(0, "hi")
	refuse := grpchttp.Errorf(grpchttp.Unauthenticated, "who are you")
	h := handler(map[string]grpchttp.Method{"/S/Echo": grpchttp.Unary(echo)})
	h.MaxMessage = 100
	h.Admit = func(r *http.Request) error {
		if r.Header.Get("refuse") != "" {
			return refuse
		}
		return nil
	}
	c := serve(t, h)
	for name, test := range map[string]struct {
		method, path, body string
		header             http.Header
		http               int
		status             string // "" if the answer is not gRPC
		message            string // part of it
	}{
		"good":                      {body: good, status: "0"},
		"good, with a parameter":    {body: good, header: http.Header{"Content-Type": {"application/grpc; x=y"}}, status: "0"},
		"good, by its full name":    {body: good, header: http.Header{"Content-Type": {"application/grpc+proto"}}, status: "0"},
		"good, identity":            {body: good, header: http.Header{"Grpc-Encoding": {"identity"}}, status: "0"},
		"good, without te":          {body: good, header: http.Header{"Te": nil}, status: "0"},
		"empty message":             {body: frame(0, ""), status: "0"},
		"largest message":           {body: frame(0, strings.Repeat("x", 100)), status: "0"},
		"no content type":           {body: good, header: http.Header{"Content-Type": nil}, http: 415},
		"JSON":                      {body: good, header: http.Header{"Content-Type": {"application/grpc+json"}}, http: 415},
		"web":                       {body: good, header: http.Header{"Content-Type": {"application/grpc-web"}}, http: 415},
		"connect":                   {body: good, header: http.Header{"Content-Type": {"application/proto"}}, http: 415},
		"a prefix of it":            {body: good, header: http.Header{"Content-Type": {"application/grpcx"}}, http: 415},
		"an odd content type":       {body: good, header: http.Header{"Content-Type": {"application/grpc; x"}}, http: 415},
		"GET":                       {method: "GET", http: 405},
		"PUT":                       {method: "PUT", body: good, http: 405},
		"not admitted":              {body: good, header: http.Header{"Refuse": {"1"}}, status: "16", message: "who are you"},
		"not admitted, no method":   {path: "/S/Other", header: http.Header{"Refuse": {"1"}}, status: "16"},
		"no such method":            {path: "/S/Other", body: good, status: "12", message: "test: this server does not implement the method"},
		"a path with a slash more":  {path: "/S/Echo/", body: good, status: "12"},
		"compressed":                {body: frame(1, "hi"), header: http.Header{"Grpc-Encoding": {"gzip"}}, status: "12", message: "gzip"},
		"compressed by chance":      {body: good, header: http.Header{"Grpc-Encoding": {"br"}}, status: "12"},
		"flag without encoding":     {body: frame(1, "hi"), status: "13"},
		"flag with identity":        {body: frame(1, "hi"), header: http.Header{"Grpc-Encoding": {"identity"}}, status: "13"},
		"unknown flags":             {body: frame(2, "hi"), status: "13"},
		"all flags":                 {body: frame(0xff, "hi"), status: "13"},
		"nothing":                   {body: "", status: "13", message: "no request"},
		"half a prefix":             {body: good[:3], status: "13"},
		"a prefix":                  {body: good[:5], status: "13"},
		"half a message":            {body: good[:6], status: "13"},
		"too large":                 {body: frame(0, strings.Repeat("x", 101)), status: "8", message: "101"},
		"4 GiB":                     {body: "\x00\xff\xff\xff\xff", status: "8"},
		"two messages":              {body: good + good, status: "13", message: "more than one"},
		"a message and half of one": {body: good + good[:4], status: "13"},
		"timeout of nothing":        {body: good, header: http.Header{"Grpc-Timeout": {"S"}}, status: "13"},
		"timeout without unit":      {body: good, header: http.Header{"Grpc-Timeout": {"10"}}, status: "13"},
		"timeout that is negative":  {body: good, header: http.Header{"Grpc-Timeout": {"-1S"}}, status: "13"},
		"timeout of nine digits":    {body: good, header: http.Header{"Grpc-Timeout": {"123456789n"}}, status: "13"},
		"timeout of 11,000 years":   {body: good, header: http.Header{"Grpc-Timeout": {"99999999H"}}, status: "0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			method, path := test.method, test.path
			if method == "" {
				method = http.MethodPost
			}
			if path == "" {
				path = "/S/Echo"
			}
			req, err := http.NewRequestWithContext(t.Context(), method, "http://localhost"+path, strings.NewReader(test.body))
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/grpc")
			req.Header.Set("Te", "trailers")
			for k, v := range test.header {
				if delete(req.Header, k); v != nil {
					req.Header[k] = v
				}
			}
			resp := must.Get(c.Do(req))(t)
			defer resp.Body.Close()
			body := must.Get(io.ReadAll(resp.Body))(t)
			if test.status == "" {
				assert.Equal(t, test.http, resp.StatusCode)
				assert.Empty(t, body)
				assert.Empty(t, resp.Header.Get("Grpc-Status"))
				assert.Equal(t, test.http == 415, resp.Header.Get("Accept-Post") != "")
				assert.Equal(t, test.http == 405, resp.Header.Get("Allow") == "POST")
				return
			}
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			assert.Equal(t, "application/grpc", resp.Header.Get("Content-Type"))
			assert.Equal(t, "identity", resp.Header.Get("Grpc-Accept-Encoding"))
			end, other := resp.Trailer, resp.Header
			if test.status != "0" { // an answer of trailers only
				end, other = resp.Header, resp.Trailer
				assert.Empty(t, body)
			} else {
				assert.Equal(t, test.body, string(body))
			}
			assert.Equal(t, []string{test.status}, end.Values("Grpc-Status"), end.Get("Grpc-Message"))
			assert.Contains(t, end.Get("Grpc-Message"), test.message)
			assert.Empty(t, other.Values("Grpc-Status"))
		})
	}
	t.Run("HTTP/1.1", func(t *testing.T) {
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		serveOn(t, l, h)
		resp, err := http.Post("http://"+l.Addr().String()+"/S/Echo", "application/grpc", strings.NewReader(good))
		require.NoError(t, err)
		defer resp.Body.Close()
		assert.Equal(t, http.StatusHTTPVersionNotSupported, resp.StatusCode)
		_, err = grpchttp.NewClient(http.DefaultClient, "http://"+l.Addr().String(), limit).Unary(t.Context(), "/S/Echo", nil, nil)
		assert.Equal(t, grpchttp.Unknown, asError(t, err).Code)
		assert.ErrorContains(t, err, "505")
	})
}

// A body that is cut off in the middle does not pass for a message, and a client that is gone does no harm.
func TestServerCut(t *testing.T) {
	t.Parallel()
	got := make(chan error, 1)
	c := serve(t, handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
		_, err := c.ReceiveOnly()
		got <- err
		return err
	}}))
	for _, sent := range []string{"", "\x00\x00", "\x00\x00\x00\x00\x05ab"} {
		in, out := io.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		req := must.Get(http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/S/M", in))(t)
		req.Header.Set("Content-Type", "application/grpc")
		go func() {
			_, _ = out.Write([]byte(sent))
			_ = out.CloseWithError(errors.New("torn"))
		}()
		require.Error(t, must.Err(c.Do(req)))
		assert.Equal(t, grpchttp.Canceled, asError(t, <-got).Code)
		cancel()
	}
}

// What a client makes of answers of which each has one thing wrong.
func TestClientProtocol(t *testing.T) {
	t.Parallel()
	good := frame(0, "hi")
	trailer := func(w http.ResponseWriter, name, value string) { w.Header().Set(http.TrailerPrefix+name, value) }
	end := func(w http.ResponseWriter, status, message string) {
		trailer(w, "Grpc-Status", status)
		trailer(w, "Grpc-Message", message)
	}
	type answer func(w http.ResponseWriter)
	body := func(b string, status string) answer {
		return func(w http.ResponseWriter) {
			_, _ = io.WriteString(w, b)
			end(w, status, "as%20sent")
		}
	}
	status := func(n int) answer {
		return func(w http.ResponseWriter) {
			w.Header().Set("Grpc-Status", "7") // by a proxy
			w.WriteHeader(n)
		}
	}
	field := func(name, value string) answer {
		return func(w http.ResponseWriter) {
			w.Header().Set(name, value)
			body(good, "0")(w)
		}
	}
	type want struct {
		code   grpchttp.Code
		remote bool
		text   string
	}
	for name, test := range map[string]struct {
		answer answer
		want   want // OK is a good answer
	}{
		"good":                     {body(good, "0"), want{}},
		"good, by its full name":   {field("Content-Type", "application/grpc+proto"), want{}},
		"good, with a parameter":   {field("Content-Type", "application/grpc; x=y"), want{}},
		"good, identity":           {field("Grpc-Encoding", "identity"), want{}},
		"an error":                 {body("", "5"), want{grpchttp.NotFound, true, "as sent"}},
		"an error after a message": {body(good, "5"), want{grpchttp.NotFound, true, "as sent"}},
		"an error in a message":    {body(good[:6], "5"), want{grpchttp.NotFound, true, "as sent"}},
		"an error in a prefix":     {body(good[:2], "5"), want{grpchttp.NotFound, true, "as sent"}},
		"trailers only": {func(w http.ResponseWriter) {
			w.Header().Set("Grpc-Status", "7")
			w.Header().Set("Grpc-Message", "no")
		}, want{grpchttp.PermissionDenied, true, "no"}},
		"trailers only, flushed": {func(w http.ResponseWriter) { w.Header().Set("Grpc-Status", "7"); w.(http.Flusher).Flush() }, want{grpchttp.PermissionDenied, true, ""}},
		"trailers only, OK":      {func(w http.ResponseWriter) { w.Header().Set("Grpc-Status", "0") }, want{grpchttp.Internal, false, "no response"}},
		"status before a message": {func(w http.ResponseWriter) {
			w.Header().Set("Grpc-Status", "7")
			_, _ = io.WriteString(w, good)
		}, want{grpchttp.Internal, false, "without grpc-status"}},
		"two statuses, the last is OK": {func(w http.ResponseWriter) { w.Header().Set("Grpc-Status", "7"); body(good, "0")(w) }, want{}},
		"status 17":                    {body("", "17"), want{17, true, "as sent"}},
		"status 4294967295":            {body("", "4294967295"), want{4294967295, true, "as sent"}},
		"status 4294967296":            {body("", "4294967296"), want{grpchttp.Internal, false, "not a number"}},
		"status -1":                    {body("", "-1"), want{grpchttp.Internal, false, "not a number"}},
		"status x":                     {body(good, "x"), want{grpchttp.Internal, false, "not a number"}},
		"no status":                    {func(w http.ResponseWriter) { _, _ = io.WriteString(w, good) }, want{grpchttp.Internal, false, "without grpc-status"}},
		"nothing at all":               {func(http.ResponseWriter) {}, want{grpchttp.Internal, false, "without grpc-status"}},
		"no message":                   {body("", "0"), want{grpchttp.Internal, false, "no response"}},
		"two messages":                 {body(good+good, "0"), want{grpchttp.Internal, false, "more than one"}},
		"half a prefix":                {body(good[:2], "0"), want{grpchttp.Internal, false, "middle of a message"}},
		"half a message":               {body(good[:6], "0"), want{grpchttp.Internal, false, "middle of a message"}},
		"junk":                         {body("not gRPC at all", "0"), want{grpchttp.ResourceExhausted, false, "larger than the limit"}},
		"too large":                    {body("\x00\x00\x10\x00\x01", "0"), want{grpchttp.ResourceExhausted, false, "larger than the limit"}},
		"4 GiB":                        {body("\x00\xff\xff\xff\xff", "0"), want{grpchttp.ResourceExhausted, false, "larger than the limit"}},
		"compressed":                   {field("Grpc-Encoding", "gzip"), want{grpchttp.Internal, false, "gzip"}},
		"flag without encoding":        {body(frame(1, "hi"), "0"), want{grpchttp.Internal, false, "compressed"}},
		"unknown flags":                {body(frame(0x80, "hi"), "0"), want{grpchttp.Internal, false, "0x80"}},
		"not gRPC":                     {field("Content-Type", "text/html"), want{grpchttp.Unknown, false, "text/html"}},
		"another kind of gRPC":         {field("Content-Type", "application/grpc+json"), want{grpchttp.Unknown, false, "json"}},
		"no content type":              {field("Content-Type", ""), want{grpchttp.Unknown, false, "not gRPC"}},
		"HTTP 204":                     {status(204), want{grpchttp.Unknown, false, "204"}},
		"HTTP 307":                     {func(w http.ResponseWriter) { w.Header().Set("Location", "/S/M"); w.WriteHeader(307) }, want{grpchttp.Unknown, false, "307"}},
		"HTTP 400":                     {status(400), want{grpchttp.Internal, false, "400"}},
		"HTTP 401":                     {status(401), want{grpchttp.Unauthenticated, false, "401"}},
		"HTTP 403":                     {status(403), want{grpchttp.PermissionDenied, false, "403"}},
		"HTTP 404":                     {status(404), want{grpchttp.Unimplemented, false, "404"}},
		"HTTP 418":                     {status(418), want{grpchttp.Unknown, false, "418"}},
		"HTTP 429":                     {status(429), want{grpchttp.Unavailable, false, "429"}},
		"HTTP 500":                     {status(500), want{grpchttp.Unknown, false, "500"}},
		"HTTP 502":                     {status(502), want{grpchttp.Unavailable, false, "502"}},
		"HTTP 503":                     {status(503), want{grpchttp.Unavailable, false, "503"}},
		"HTTP 504":                     {status(504), want{grpchttp.Unavailable, false, "504"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requests := 0
			c := dial(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				requests++
				b, err := io.ReadAll(r.Body)
				assert.NoError(t, err)
				assert.Equal(t, frame(0, "ask"), string(b))
				w.Header().Set("Content-Type", "application/grpc")
				test.answer(w)
			}))
			got, err := c.Unary(t.Context(), "/S/M", nil, []byte("ask"))
			assert.Equal(t, 1, requests)
			if test.want.code == grpchttp.OK {
				require.NoError(t, err)
				assert.Equal(t, "hi", string(got))
				return
			}
			e := asError(t, err)
			assert.Equal(t, test.want.code, e.Code, "%v", e)
			assert.Equal(t, test.want.remote, e.Remote, "%v", e)
			assert.Contains(t, e.Message, test.want.text)
		})
	}
}

// What answers as gRPC does but in HTTP/1.1 is none: it has no way to reset a stream, and proxies drop its
// trailers.
func TestClientHTTP1(t *testing.T) {
	t.Parallel()
	l := memconn.Listen()
	serveOn(t, l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Trailer", "Grpc-Status")
		_, _ = io.WriteString(w, frame(0, "hi"))
		w.Header().Set("Grpc-Status", "0")
	}))
	tr := &http.Transport{DialContext: l.DialContext}
	t.Cleanup(tr.CloseIdleConnections)
	_, err := grpchttp.NewClient(&http.Client{Transport: tr}, "http://localhost", limit).Unary(t.Context(), "/S/M", nil, nil)
	e := asError(t, err)
	assert.Equal(t, grpchttp.Internal, e.Code, "%v", err)
	assert.Contains(t, e.Message, "gRPC needs HTTP/2")
}

// A call that has failed here is over there too: the server is told, and keeps no stream for it.
func TestClientHangsUp(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(w http.ResponseWriter){
		"not gRPC":        func(w http.ResponseWriter) { w.Header().Set("Content-Type", "text/html") },
		"compressed":      func(w http.ResponseWriter) { w.Header().Set("Grpc-Encoding", "gzip") },
		"another status":  func(w http.ResponseWriter) { w.WriteHeader(http.StatusAccepted) },
		"unknown flags":   func(w http.ResponseWriter) { _, _ = io.WriteString(w, frame(0x80, "hi")) },
		"too large":       func(w http.ResponseWriter) { _, _ = io.WriteString(w, "\x00\xff\xff\xff\xff") },
		"second response": func(w http.ResponseWriter) { _, _ = io.WriteString(w, frame(0, "hi")+frame(0, "hi")) },
	} {
		bubble.Run(t, name, func(t *testing.T) {
			left := make(chan struct{})
			c := dial(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer close(left)
				w.Header().Set("Content-Type", "application/grpc")
				answer(w)
				_ = http.NewResponseController(w).Flush()
				select {
				case <-r.Context().Done():
				case <-time.After(time.Hour):
					t.Error("the client did not say that it has left")
				}
			}))
			require.Error(t, must.Err(c.Unary(t.Context(), "/S/M", nil, nil)))
			<-left
		})
	}
	synctest.Test(t, func(t *testing.T) { // a stream is over at its first error, on whichever side it ends
		left := make(chan struct{})
		c := dial(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer close(left)
			w.Header().Set("Content-Type", "application/grpc")
			_, _ = io.WriteString(w, frame(0x80, "hi"))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}))
		s := must.Get(c.Stream(t.Context(), "/S/M", nil, nil))(t)
		_, first := s.Receive()
		require.Error(t, first)
		<-left
		assert.Same(t, first, must.Err(s.Receive()))
	})
}

// rawServer answers the first request on each connection with these bytes of HTTP/2, and then hangs up
// if it is told to.
func rawServer(t testing.TB, hangUp bool, answer ...[]byte) *grpchttp.Client {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				if _, err := io.CopyN(io.Discard, r, 24); err != nil { // the preface
					return
				}
				_, _ = c.Write(h2frame(4, 0, 0, nil)) // settings
				for {
					var head [9]byte
					if _, err := io.ReadFull(r, head[:]); err != nil {
						return
					}
					size := int64(head[0])<<16 | int64(head[1])<<8 | int64(head[2])
					if _, err := io.CopyN(io.Discard, r, size); err != nil {
						return
					}
					if head[3] != 1 { // not the header of a request
						continue
					}
					_, _ = c.Write(bytes.Join(answer, nil))
					if hangUp {
						return
					}
				}
			}()
		}
	}()
	var dialer net.Dialer
	hc := &http.Client{Transport: transport(t, func(ctx context.Context, _, _ string) (net.Conn, error) {
		return dialer.DialContext(ctx, "tcp", l.Addr().String())
	})}
	return grpchttp.NewClient(hc, "http://localhost", limit)
}

// h2frame is a frame of HTTP/2 (RFC 9113 section 4.1).
func h2frame(kind, flags byte, stream uint32, payload []byte) []byte {
	n := len(payload)
	b := []byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags}
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

// late is a context whose deadline has passed, and whose timer is late.
type late struct{ context.Context }

func (late) Deadline() (time.Time, bool) { return time.Now().Add(-time.Second), true }

// What becomes of streams that are reset and of connections that break.
func TestReset(t *testing.T) {
	t.Parallel()
	begin := append([]byte{0x88}, "\x00\x0ccontent-type\x10application/grpc"...) // ":status: 200" and a literal (RFC 7541)
	header := h2frame(1, 4, 1, begin)
	message := h2frame(0, 0, 1, []byte(frame(0, "hi")))
	half := h2frame(0, 0, 1, []byte(frame(0, "hi")[:6]))
	reset := func(code uint32) []byte { return h2frame(3, 0, 1, binary.BigEndian.AppendUint32(nil, code)) }
	for code, want := range map[uint32]grpchttp.Code{
		0x0: grpchttp.Internal, 0x1: grpchttp.Internal, 0x2: grpchttp.Internal, 0x3: grpchttp.Internal, 0x4: grpchttp.Internal,
		0x5: grpchttp.Internal, 0x6: grpchttp.Internal, 0x7: grpchttp.Unavailable, 0x8: grpchttp.Canceled, 0x9: grpchttp.Internal,
		0xa: grpchttp.Internal, 0xb: grpchttp.ResourceExhausted, 0xc: grpchttp.PermissionDenied, 0xd: grpchttp.Unknown, 0x1234: grpchttp.Internal,
	} {
		for name, before := range map[string][]byte{"first": nil, "after the header": header, "after a message": append(bytes.Clone(header), message...), "in a message": append(bytes.Clone(header), half...)} {
			if (code == 7 || code == 1) && before == nil {
				continue // net/http tries these again, as it may
			}
			t.Run(fmt.Sprintf("%#x %s", code, name), func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				_, err := rawServer(t, false, before, reset(code)).Unary(ctx, "/S/M", nil, nil)
				e := asError(t, err)
				assert.Equal(t, want, e.Code, "%v", err)
				assert.False(t, e.Remote, "not even a denial")
			})
		}
	}
	for name, answer := range map[string][][]byte{
		"cut at once":          nil,
		"cut after the header": {header},
		"cut after a message":  {header, message},
		"cut in a message":     {header, half},
		"cut in a frame":       {header, message[:12]},
		"going away":           {h2frame(7, 0, 0, make([]byte, 8)), header},
		"not HTTP/2":           {[]byte("HTTP/1.1 200 OK\r\n\r\n")},
		"a broken header":      {h2frame(1, 4, 1, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			s, err := rawServer(t, true, answer...).Stream(ctx, "/S/M", nil, nil)
			for err == nil {
				_, err = s.Receive()
			}
			e := asError(t, err)
			if name == "a broken header" {
				assert.Contains(t, []grpchttp.Code{grpchttp.Internal, grpchttp.Unavailable}, e.Code, "%v", err)
			} else {
				assert.Equal(t, grpchttp.Unavailable, e.Code, "%v", err)
			}
			assert.False(t, e.Remote)
		})
	}
	t.Run("canceled when its deadline has passed", func(t *testing.T) {
		t.Parallel()
		ctx := late{t.Context()}
		_, err := rawServer(t, false, header, reset(8)).Unary(ctx, "/S/M", nil, nil)
		assert.Equal(t, grpchttp.DeadlineExceeded, asError(t, err).Code, "%v", err)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
	t.Run("no listener", func(t *testing.T) {
		t.Parallel()
		var dialer net.Dialer
		missing := t.TempDir() + "/s"
		c := grpchttp.NewClient(&http.Client{Transport: transport(t, func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", missing)
		})}, "http://localhost", limit)
		_, err := c.Unary(t.Context(), "/S/M", nil, nil)
		assert.Equal(t, grpchttp.Unavailable, asError(t, err).Code)
		require.ErrorIs(t, err, syscall.ENOENT)
		assert.NotContains(t, err.Error(), "localhost", "that is nowhere")
		assert.Equal(t, grpchttp.Internal, asError(t, must.Err(c.Unary(t.Context(), "\x7f", nil, nil))).Code)
	})
}

// A time to come back is never too early, and never one that a client takes for "do not come back".
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	var status *grpchttp.Error
	before := 0
	hc := serve(t, handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
		for range before {
			if err := c.Send(nil); err != nil {
				return err
			}
		}
		return status
	}}))
	c := grpchttp.NewClient(hc, "http://localhost", limit)
	call := func() (*grpchttp.Error, http.Header) {
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/S/M", nil))(t)
		req.Header.Set("Content-Type", "application/grpc")
		resp := must.Get(hc.Do(req))(t)
		must.Get(io.ReadAll(resp.Body))(t)
		s, err := c.Stream(t.Context(), "/S/M", nil, nil)
		for err == nil {
			_, err = s.Receive()
		}
		if before == 0 {
			return asError(t, err), resp.Header
		}
		return asError(t, err), resp.Trailer
	}
	for before = range 2 {
		for after, want := range map[time.Duration]time.Duration{
			1:                          time.Millisecond,
			time.Millisecond:           2 * time.Millisecond,
			1500 * time.Millisecond:    1501 * time.Millisecond,
			time.Hour:                  time.Hour + time.Millisecond,
			24 * time.Hour:             24 * time.Hour,
			math.MaxInt64:              24 * time.Hour,
			math.MaxInt64 - 1000000:    24 * time.Hour,
			100 * 365 * 24 * time.Hour: 24 * time.Hour,
		} {
			for _, text := range []string{"later", "", "größer\xff"} {
				status = &grpchttp.Error{Code: grpchttp.Unavailable, Message: text, RetryAfter: after}
				e, h := call()
				assert.Equal(t, &grpchttp.Error{Code: grpchttp.Unavailable, Message: text, Remote: true, RetryAfter: want}, e)
				assert.Equal(t, strconv.FormatInt(want.Milliseconds(), 10), h.Get("Grpc-Retry-Pushback-Ms"))
				details := must.Get(base64.RawStdEncoding.DecodeString(h.Get("Grpc-Status-Details-Bin")))(t)
				assert.Equal(t, wantDetails(t, text, want), details)
			}
		}
		for _, after := range []time.Duration{0, -1, math.MinInt64} {
			status = &grpchttp.Error{Code: grpchttp.Unavailable, Message: "x", RetryAfter: after}
			e, h := call()
			assert.Zero(t, e.RetryAfter)
			assert.Empty(t, h.Get("Grpc-Retry-Pushback-Ms"))
			assert.Empty(t, h.Get("Grpc-Status-Details-Bin"))
		}
	}
}

// details is an encoded google.rpc.Status with the message and the details given.
func details(t testing.TB, message string, all ...*anypb.Any) []byte {
	b := []byte{0x08, byte(grpchttp.Unavailable)}
	if message != "" {
		b = protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), message)
	}
	for _, a := range all {
		v := must.Get(proto.Marshal(a))(t)
		b = protowire.AppendBytes(protowire.AppendTag(b, 3, protowire.BytesType), v)
	}
	return b
}

// wantDetails is what a server sends that has this message and wants its client back after this time.
func wantDetails(t testing.TB, message string, after time.Duration) []byte {
	return details(t, strings.ToValidUTF8(message, "\uFFFD"), retryInfo(t, durationpb.New(after)))
}

const retryInfoType = "type.googleapis.com/google.rpc.RetryInfo"

func retryInfo(t testing.TB, d *durationpb.Duration) *anypb.Any {
	v := must.Get(proto.Marshal(d))(t)
	return &anypb.Any{TypeUrl: retryInfoType, Value: protowire.AppendBytes([]byte{0x0a}, v)}
}

// What servers say of when to come back is read in both forms, and what is malformed or out of bounds says
// nothing.
func TestReadRetryAfter(t *testing.T) {
	t.Parallel()
	other := &anypb.Any{TypeUrl: "type.googleapis.com/google.rpc.DebugInfo", Value: []byte{0xff}}
	second := retryInfo(t, durationpb.New(time.Second))
	raw := func(value string) []byte {
		return details(t, "", &anypb.Any{TypeUrl: retryInfoType, Value: []byte(value)})
	}
	var send map[string]string
	c := dial(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", "14")
		for name, value := range send {
			w.Header().Set(name, value)
		}
	}))
	for name, test := range map[string]struct {
		details  []byte
		pushback string
		want     time.Duration
	}{
		"neither":                 {nil, "", 0},
		"pushback":                {nil, "1500", 1500 * time.Millisecond},
		"details":                 {details(t, "", second), "", time.Second},
		"details of an hour":      {details(t, "", retryInfo(t, durationpb.New(time.Hour))), "", time.Hour},
		"details first":           {details(t, "", second), "1500", time.Second},
		"after another":           {details(t, "", other, second), "", time.Second},
		"of two the first":        {details(t, "", second, retryInfo(t, durationpb.New(time.Hour))), "", time.Second},
		"none among them":         {details(t, "", other), "1500", 1500 * time.Millisecond},
		"another of that form":    {details(t, "", &anypb.Any{TypeUrl: other.TypeUrl, Value: second.Value}), "", 0},
		"do not come back":        {nil, "-1", 0},
		"not a number":            {nil, "soon", 0},
		"a long time":             {nil, "2147483647", math.MaxInt32 * time.Millisecond},
		"too long":                {nil, "2147483648", 0},
		"much too long":           {nil, "9999999999999", 0},
		"malformed":               {[]byte{0xff}, "", 0},
		"malformed, and pushback": {[]byte{0xff}, "1500", 1500 * time.Millisecond},
		"RetryInfo is malformed":  {raw("\xff"), "", 0},
		"so, and pushback":        {raw("\xff"), "250", 250 * time.Millisecond},
		"RetryInfo is empty":      {raw(""), "", 0},
		"its Duration malformed":  {raw("\x0a\x01\xff"), "", 0},
		"its Duration is cut":     {raw("\x0a\x01\x08"), "", 0},
		"negative":                {details(t, "", retryInfo(t, durationpb.New(-time.Hour))), "", 0},
		"nanoseconds overflow":    {details(t, "", retryInfo(t, &durationpb.Duration{Nanos: 1e9})), "", 0},
		"seconds overflow":        {details(t, "", retryInfo(t, &durationpb.Duration{Seconds: 1 << 40})), "7", 7 * time.Millisecond},
		"the most seconds":        {raw("\x0a\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f"), "", 0},
	} {
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.StdEncoding} {
			send = map[string]string{"Grpc-Status-Details-Bin": encoding.EncodeToString(test.details), "Grpc-Retry-Pushback-Ms": test.pushback}
			_, err := c.Unary(t.Context(), "/S/M", nil, nil)
			assert.Equal(t, &grpchttp.Error{Code: grpchttp.Unavailable, Remote: true, RetryAfter: test.want}, err, name)
		}
	}
	send = map[string]string{"Grpc-Status-Details-Bin": "%%%", "Grpc-Retry-Pushback-Ms": "1500"}
	_, err := c.Unary(t.Context(), "/S/M", nil, nil)
	assert.Equal(t, 1500*time.Millisecond, asError(t, err).RetryAfter, "details that are not base64")
}

// errorInfo is a google.rpc.ErrorInfo with a reason in a domain, and metadata.
func errorInfo(reason, domain string) *anypb.Any {
	b := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), reason)
	b = protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), domain)
	return &anypb.Any{TypeUrl: errorInfoType, Value: append(b, "\x1a\x06\x0a\x01a\x12\x01b"...)}
}

const errorInfoType = "type.googleapis.com/google.rpc.ErrorInfo"

// The reason of an error goes with when to come back, or alone, and is read if it is of the domain spiffe.io.
func TestReason(t *testing.T) {
	t.Parallel()
	var status *grpchttp.Error
	answer := func(context.Context, *grpchttp.Call) error { return status }
	hc := serve(t, handler(map[string]grpchttp.Method{"/S/M": answer}))
	for _, after := range []time.Duration{0, time.Second} {
		for _, reason := range []string{"", "A_REASON"} {
			status = &grpchttp.Error{Code: grpchttp.NotFound, Message: "x", Reason: reason, RetryAfter: after}
			want := &grpchttp.Error{Code: grpchttp.NotFound, Message: "x", Reason: reason, Remote: true, RetryAfter: after}
			if after > 0 {
				want.RetryAfter += time.Millisecond
			}
			_, err := grpchttp.NewClient(hc, "http://localhost", limit).Unary(t.Context(), "/S/M", nil, nil)
			assert.Equal(t, want, err)
		}
	}

	good, second := errorInfo("A", "spiffe.io"), retryInfo(t, durationpb.New(time.Second))
	raw := func(value string) *anypb.Any { return &anypb.Any{TypeUrl: errorInfoType, Value: []byte(value)} }
	var send []byte
	c := dial(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", "14")
		w.Header().Set("Grpc-Status-Details-Bin", base64.RawStdEncoding.EncodeToString(send))
	}))
	for name, test := range map[string]struct {
		details []*anypb.Any
		reason  string
		after   time.Duration
	}{
		"none":                    {nil, "", 0},
		"alone":                   {[]*anypb.Any{good}, "A", 0},
		"first":                   {[]*anypb.Any{good, second}, "A", time.Second},
		"second":                  {[]*anypb.Any{second, good}, "A", time.Second},
		"another domain":          {[]*anypb.Any{errorInfo("A", "example.org")}, "", 0},
		"no domain":               {[]*anypb.Any{errorInfo("A", "")}, "", 0},
		"after another domain":    {[]*anypb.Any{errorInfo("B", "example.org"), good}, "A", 0},
		"of two the first":        {[]*anypb.Any{good, errorInfo("B", "spiffe.io")}, "A", 0},
		"another type":            {[]*anypb.Any{{TypeUrl: retryInfoType + "x", Value: good.Value}}, "", 0},
		"of a RetryInfo":          {[]*anypb.Any{{TypeUrl: retryInfoType, Value: good.Value}}, "", 0},
		"malformed":               {[]*anypb.Any{raw("\xff"), second}, "", time.Second},
		"malformed at its end":    {[]*anypb.Any{raw(string(good.Value) + "\x0a")}, "", 0},
		"not UTF-8":               {[]*anypb.Any{errorInfo("\xff", "spiffe.io")}, "", 0},
		"a number for the reason": {[]*anypb.Any{raw("\x08\x01\x12\x09spiffe.io")}, "", 0},
	} {
		send = details(t, "", test.details...)
		_, err := c.Unary(t.Context(), "/S/M", nil, nil)
		want := &grpchttp.Error{Code: grpchttp.Unavailable, Remote: true, Reason: test.reason, RetryAfter: test.after}
		assert.Equal(t, want, err, name)
	}
}

// FuzzRetryInfo compares with the generated reader of a Duration.
func FuzzRetryInfo(f *testing.F) {
	for _, d := range []time.Duration{0, 1, time.Second, -time.Second, time.Hour + 1, math.MaxInt64} {
		f.Add([]byte(retryInfo(f, durationpb.New(d)).Value))
	}
	f.Add([]byte("\x0a\x02\x08\x01\x12\x00"))
	f.Add([]byte("\x0a\x02\x08\x01\x0a\x02\x10\x01"))
	f.Add([]byte("\x0a\x0b\x10\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")) // more nanoseconds than fit into their type
	f.Add([]byte("\x0b\x0c"))
	f.Add([]byte("\x0a\x05\x0d\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := grpchttp.ReadRetryInfo(b)
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
