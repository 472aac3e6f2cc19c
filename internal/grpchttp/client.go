package grpchttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Client calls methods of one server. It is safe for concurrent use.
type Client struct {
	http *http.Client
	url  string
	max  int
}

// NewClient returns a client that sends its requests with c, which must speak HTTP/2 with the server. The path of the
// method is appended to url: "http://localhost" + "/Service/Method". Redirects are not followed. A received message
// may have at most maxMessage bytes.
func NewClient(c *http.Client, url string, maxMessage int) *Client {
	one := *c
	one.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Client{http: &one, url: url, max: maxMessage}
}

// Unary calls a method with one request and one response. metadata may be nil. The server gets ctx's deadline.
func (c *Client) Unary(ctx context.Context, method string, metadata http.Header, request []byte) ([]byte, error) {
	s, err := c.Stream(ctx, method, metadata, request)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return s.ReceiveOnly()
}

// Stream calls a method with one request and any number of responses. It returns when the server begins to answer.
// The Stream ends when the caller has received its end, when it is closed, or when ctx is done.
func (c *Client) Stream(ctx context.Context, method string, metadata http.Header, request []byte) (*Stream, error) {
	req, err := c.request(ctx, method, metadata, bytes.NewReader(frame(request)))
	if err != nil {
		return nil, err
	}
	s := &Stream{ctx: ctx, max: c.max, begun: make(chan struct{})}
	s.begin(c.http, req)
	if s.err != nil {
		return nil, s.err
	}
	return s, nil
}

// Open calls a method with any number of requests and responses, which need not wait for each other. It returns at
// once: [Stream.Receive] returns a failure to reach the server. The caller must close the Stream, unless ctx ends.
func (c *Client) Open(ctx context.Context, method string, metadata http.Header) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	body, requests := io.Pipe()
	s := &Stream{ctx: ctx, cancel: cancel, requests: requests, max: c.max, begun: make(chan struct{})}
	// net/http does not notice the end of ctx while it waits for more of the body, or for the server to read.
	context.AfterFunc(ctx, func() {
		_ = requests.CloseWithError(context.Cause(ctx))
		_ = s.Close()
	})
	req, err := c.request(ctx, method, metadata, body)
	if err != nil {
		s.err = err
		close(s.begun)
		cancel()
		return s
	}
	go s.begin(c.http, req) // servers may wait for a request before they begin to answer
	return s
}

// request returns the HTTP request of a call.
func (c *Client) request(ctx context.Context, method string, metadata http.Header, body io.Reader) (*http.Request,
	error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+method, body)
	if err != nil {
		return nil, &Error{Code: Internal, Message: err.Error(), Err: err}
	}
	for name, values := range metadata {
		if !reserved(name) {
			req.Header[http.CanonicalHeaderKey(name)] = values
		}
	}
	h := req.Header
	h.Set("Content-Type", "application/grpc")
	h.Set("Te", "trailers")
	h.Set("Accept-Encoding", identity) // otherwise net/http asks for gzip
	h.Set(headerAcceptEncoding, identity)
	if h.Get("User-Agent") == "" {
		h.Set("User-Agent", "grpc-go-svidkit")
	}
	if deadline, ok := ctx.Deadline(); ok {
		h.Set(headerTimeout, formatTimeout(time.Until(deadline)))
	}
	return req, nil
}

// Stream is a call whose responses are received one by one. One goroutine at a time may send requests, and one may
// receive, concurrently. Close may be called at any time.
type Stream struct {
	ctx      context.Context
	cancel   context.CancelFunc // nil unless requests are sent
	requests *io.PipeWriter     // nil unless requests are sent
	max      int

	begun chan struct{} // closed when the answer has begun, or failed to begin; then resp or err is set
	resp  *http.Response
	some  bool  // at least one byte has been received
	err   error // how the call ended

	prefix [prefixSize]byte
}

// begin sends the request and waits for the answer to begin.
func (s *Stream) begin(c *http.Client, req *http.Request) {
	defer close(s.begun)
	resp, err := c.Do(req)
	if err != nil {
		s.err = transportError(s.ctx, err)
		return
	}
	s.resp = resp
	if err := s.check(); err != nil {
		s.err = err
		_ = resp.Body.Close()
	}
}

// Send sends a request of a call that [Client.Open] began. It blocks while the server does not read. Its error only
// says that the call has ended; [Stream.Receive] has the reason.
func (s *Stream) Send(msg []byte) error {
	if _, err := s.requests.Write(frame(msg)); err != nil {
		return Errorf(Unavailable, "the request cannot be sent: %w", err)
	}
	return nil
}

// CloseSend tells the server that there are no more requests.
func (s *Stream) CloseSend() { _ = s.requests.Close() }

// otherPort is the most frequent mistake when a server of another kind answers.
const otherPort = ": this is not the port of the API that was called; see the address"

// check returns an error for an answer that is not gRPC over HTTP/2.
func (s *Stream) check() error {
	h := s.resp.Header
	switch contentType, encoding := h.Get("Content-Type"), h.Get(headerEncoding); {
	case s.resp.StatusCode == http.StatusNotFound, s.resp.StatusCode == http.StatusMethodNotAllowed:
		return Errorf(fromHTTP(s.resp.StatusCode), "the answer has HTTP status %d%s", s.resp.StatusCode, otherPort)
	case s.resp.StatusCode != http.StatusOK:
		return Errorf(fromHTTP(s.resp.StatusCode), "the answer has HTTP status %d", s.resp.StatusCode)
	case s.resp.ProtoMajor < 2:
		return Errorf(Internal, "the answer is %.20q; gRPC needs HTTP/2", s.resp.Proto)
	case !isGRPC(contentType):
		return Errorf(Unknown, "the answer is %.60q and not gRPC%s", contentType, otherPort)
	case encoding != "" && encoding != identity:
		return Errorf(Internal, "the answer is compressed with %.40q, which was not offered", encoding)
	}
	return nil
}

// Header waits for the answer to begin and returns the metadata before the responses; nil without an answer. The
// result is shared.
func (s *Stream) Header() http.Header {
	if <-s.begun; s.resp == nil {
		return nil
	}
	return s.resp.Header
}

// Receive returns the next response, which the caller may keep. After the last one it returns io.EOF if the server
// ended the call with OK, and otherwise an [*Error].
func (s *Stream) Receive() ([]byte, error) {
	<-s.begun
	if s.err != nil {
		return nil, s.err
	}
	msg, err := s.receive()
	if err != nil {
		s.err = err
		_ = s.Close()
		return nil, err
	}
	return msg, nil
}

// ReceiveOnly returns the response of a method that has exactly one.
func (s *Stream) ReceiveOnly() ([]byte, error) {
	msg, err := s.Receive()
	if err == nil {
		if _, err = s.Receive(); err == nil {
			return nil, Errorf(Internal, "the server sent more than one response")
		}
		if err == io.EOF {
			return msg, nil
		}
	}
	if err == io.EOF {
		return nil, Errorf(Internal, "the server sent no response")
	}
	return nil, err
}

func (s *Stream) receive() ([]byte, error) {
	msg, err := readFrame((*streamBody)(s), &s.prefix, s.max, nil)
	switch e, ok := err.(*Error); {
	case err == nil:
		return msg, nil
	case ok:
		return nil, e
	case err == io.EOF:
		return nil, s.status()
	case err == errShort: // the status gives the reason, if it is not OK
		if err := s.status(); err != io.EOF {
			return nil, err
		}
		return nil, Errorf(Internal, "the answer ends in the middle of a message")
	}
	return nil, transportError(s.ctx, err)
}

// streamBody reads the body, and notes whether there is one.
type streamBody Stream

func (s *streamBody) Read(p []byte) (int, error) {
	n, err := s.resp.Body.Read(p)
	s.some = s.some || n > 0
	return n, err
}

// status returns the status with which the call ended: io.EOF for OK. Without messages it may be in the header.
func (s *Stream) status() error {
	h := s.resp.Trailer
	if h.Get(headerStatus) == "" && !s.some {
		h = s.resp.Header
	}
	text := h.Get(headerStatus)
	if text == "" {
		if err := fromContext(s.ctx); err != nil {
			return err
		}
		return Errorf(Internal, "the answer ends without grpc-status")
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return Errorf(Internal, "grpc-status %.20q is not a number", text)
	}
	if n == 0 {
		return io.EOF
	}
	e := &Error{Code: Code(n), Message: decodeMessage(h.Get(headerMessage)), Remote: true}
	e.readDetails(h)
	return e
}

// Close ends the call, if it has not ended, and releases its resources.
func (s *Stream) Close() error {
	if s.cancel != nil {
		s.cancel()
	}
	if <-s.begun; s.resp == nil {
		return nil
	}
	return s.resp.Body.Close()
}

// transportError returns an error of net/http as an Error.
func transportError(ctx context.Context, err error) *Error {
	if e := fromContext(ctx); e != nil {
		return e
	}
	if e, ok := errors.AsType[*url.Error](err); ok {
		if e.Timeout() && errors.Is(e, context.DeadlineExceeded) { // the http.Client's own timeout
			return &Error{Code: DeadlineExceeded, Message: err.Error(), Err: err}
		}
		err = e.Err // every such error has the same URL
	}
	if errors.Is(err, http.ErrSchemeMismatch) { // such as a port without TLS
		err = fmt.Errorf("%w%s", err, otherPort)
	}
	code := Unavailable
	if e, ok := errors.AsType[streamError](err); ok {
		code = fromReset(e.Code)
		// A server cancels a stream whose deadline has passed, and may do so before our own timer.
		if d, ok := ctx.Deadline(); ok && code == Canceled && !d.After(time.Now()) {
			return toError(fmt.Errorf("%w: %w", context.DeadlineExceeded, err))
		}
	}
	return &Error{Code: code, Message: err.Error(), Err: err}
}

// streamError has the fields of net/http's error for a reset stream. Its method As sets any such struct.
type streamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (e streamError) Error() string {
	return fmt.Sprintf("stream %d was reset with code %d", e.StreamID, e.Code)
}

// fromReset returns the code for a stream that was reset with an error code of HTTP/2 (RFC 9113 section 7).
func fromReset(code uint32) Code {
	switch code {
	case 0x7: // REFUSED_STREAM: the server did no work
		return Unavailable
	case 0x8: // CANCEL
		return Canceled
	case 0xb: // ENHANCE_YOUR_CALM
		return ResourceExhausted
	case 0xc: // INADEQUATE_SECURITY
		return PermissionDenied
	case 0xd: // HTTP_1_1_REQUIRED
		return Unknown
	}
	return Internal
}
