package grpchttp

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// Handler serves methods by path, such as "/Service/Method". It is an http.Handler for servers that speak HTTP/2. The
// fields must be set before it is used.
//
// It answers a request that is not HTTP/2 with 505, a method other than POST with 405, and a request that is not gRPC
// with 415. An unknown path is Unimplemented.
type Handler struct {
	Methods map[string]Method

	// Name begins the error text for an unknown method.
	Name string

	// Admit, if set, runs before anything of a request is read, and before the path is checked. Its error is the
	// answer.
	Admit func(r *http.Request) error

	// MaxMessage is the largest request in bytes.
	MaxMessage int

	// Incoming, if set, limits the memory for requests that are being received, beyond the first 4 KiB of each. A
	// call returns its memory when it receives the next request, and at its end. A request that takes memory must
	// arrive within 30 seconds, or within ReceiveTimeout.
	Incoming *Incoming

	// Timeout bounds a call: its context then ends with the cause [ErrTimeout]. 0 means only the client's limit.
	Timeout time.Duration

	// ReceiveTimeout is how long [Call.Receive] waits for a whole message or for the end of the request, so that a
	// client that stops midway does not keep a goroutine and memory. 0 means no limit.
	ReceiveTimeout time.Duration

	// SendTimeout is how long a client may take to read each response, and the status after the last one. Then the
	// stream is reset. 0 means no limit.
	SendTimeout time.Duration
}

// ErrTimeout is the cause of the end of a call that has taken longer than [Handler].Timeout.
var ErrTimeout = errors.New("the server took too long")

// Method answers one call. Its error is the status of the call: OK for nil, the code of an [*Error], DeadlineExceeded
// or Canceled for the errors of package context, and otherwise Unknown. The context is done when the client has left
// or its deadline has passed. A panic becomes Internal, through net/http, which logs it.
type Method func(ctx context.Context, c *Call) error

// Unary returns a method with one request and one response.
func Unary(f func(ctx context.Context, request []byte) (response []byte, err error)) Method {
	return func(ctx context.Context, c *Call) error {
		request, err := c.ReceiveOnly()
		if err != nil {
			return err
		}
		response, err := f(ctx, request)
		if err != nil {
			return err
		}
		return c.SendOnly(response)
	}
}

// readAhead is the size of the buffer in front of a request's body: enough for a small message with its prefix,
// because net/http passes each Read of a body to the goroutine that serves the connection.
const readAhead = 512

// ServeHTTP serves one call. Its frame stays on the stack of each stream, as does the frame of serve.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if isCall(w, r) {
		c := h.call(w, r)
		c.finish(h.serve(c))
	}
}

// isCall reports whether a request is a call, and answers it otherwise.
func isCall(w http.ResponseWriter, r *http.Request) bool {
	switch {
	case r.ProtoMajor < 2:
		w.WriteHeader(http.StatusHTTPVersionNotSupported)
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		w.WriteHeader(http.StatusMethodNotAllowed)
	case !isGRPC(r.Header.Get("Content-Type")):
		w.Header().Set("Accept-Post", "application/grpc, application/grpc+proto")
		w.WriteHeader(http.StatusUnsupportedMediaType)
	default:
		return true
	}
	return false
}

//go:noinline
func (h *Handler) call(w http.ResponseWriter, r *http.Request) *Call {
	return &Call{h: h, w: w, ctl: http.NewResponseController(w), r: r, body: bufio.NewReaderSize(r.Body, readAhead)}
}

func (h *Handler) serve(c *Call) error {
	if h.Admit != nil {
		if err := h.Admit(c.r); err != nil {
			return err
		}
	}
	method := h.Methods[c.r.URL.Path]
	if method == nil {
		return Errorf(Unimplemented, "%s: this server does not implement the method", cmp.Or(h.Name, "grpc"))
	}
	if encoding := c.r.Header.Get(headerEncoding); encoding != "" && encoding != identity {
		return Errorf(Unimplemented, "the request is compressed with %.40q; send it as it is", encoding)
	}
	ctx, cancel, err := h.bounded(c.r)
	if err != nil {
		return err
	}
	defer cancel()
	// Reading a body does not check the context.
	c.ctx = ctx
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		_ = c.ctl.SetReadDeadline(time.Unix(1, 0))
	})
	defer func() {
		c.shrink()
		if !stop() {
			<-woken // net/http forbids using a ResponseWriter after its handler returns
		}
	}()
	return method(ctx, c)
}

// bounded returns the context of a call, with the deadlines of the client and of h.
func (h *Handler) bounded(r *http.Request) (context.Context, context.CancelFunc, error) {
	ctx := peerkey.WithRequest(r.Context(), r) // for limits in the method
	cancel := context.CancelFunc(func() {})
	if text := r.Header.Get(headerTimeout); text != "" {
		d, ok := parseTimeout(text)
		if !ok {
			return nil, nil, Errorf(Internal, "grpc-timeout %.20q is malformed", text)
		}
		ctx, cancel = context.WithTimeout(ctx, d)
	}
	if h.Timeout <= 0 {
		return ctx, cancel, nil
	}
	ctx, own := context.WithTimeoutCause(ctx, h.Timeout, ErrTimeout)
	return ctx, func() { own(); cancel() }, nil
}

// Call is one call that a server answers. One goroutine may receive while another sends.
type Call struct {
	h      *Handler
	ctx    context.Context
	w      http.ResponseWriter
	ctl    *http.ResponseController
	r      *http.Request
	body   *bufio.Reader
	begun  bool // the header has been sent
	grown  int  // bytes taken from Incoming
	prefix [prefixSize]byte
}

// Request returns the HTTP request, with the metadata in its header, and the client's address and TLS state. The
// request is shared. The method must not read its body.
func (c *Call) Request() *http.Request { return c.r }

// Header returns the header of the request with its metadata. It is shared.
func (c *Call) Header() http.Header { return c.r.Header }

// Receive returns the next request, which the caller may keep. After the last one it returns io.EOF. The [Method]
// must return other errors. While Receive waits it holds no memory for a large request.
func (c *Call) Receive() ([]byte, error) {
	c.shrink()
	if c.h.ReceiveTimeout > 0 {
		_ = c.ctl.SetReadDeadline(time.Now().Add(c.h.ReceiveTimeout)) // has no effect after the end of the request
	}
	return c.receive()
}

func (c *Call) grow(n int) error {
	if c.h.Incoming == nil {
		return nil
	}
	if c.grown == 0 {
		if err := conns.Large(c.r.Context()); err != nil {
			return &Error{Code: ResourceExhausted, Message: err.Error() + "; try again later",
				RetryAfter: retryFull}
		}
	}
	if err := c.h.Incoming.Take(c.r, n); err != nil {
		return err
	}
	if c.grown += n; c.h.ReceiveTimeout == 0 {
		_ = c.ctl.SetReadDeadline(time.Now().Add(incomingTime))
	}
	return nil
}

// shrink returns the bytes that grow has taken.
func (c *Call) shrink() {
	if c.grown > 0 {
		c.h.Incoming.Give(c.r, c.grown)
		c.grown = 0
	}
}

func (c *Call) receive() ([]byte, error) {
	msg, err := readFrame(c.body, &c.prefix, c.h.MaxMessage, c.grow)
	if err == nil && c.grown > 0 && c.h.ReceiveTimeout == 0 {
		_ = c.ctl.SetReadDeadline(time.Time{}) // the next one may come much later
	}
	switch e, ok := err.(*Error); {
	case err == nil:
		return msg, nil
	case err == io.EOF:
		return nil, io.EOF
	case ok:
		return nil, e
	case err == errShort:
		return nil, Errorf(Internal, "the request ends in the middle of a message")
	case !errors.Is(err, os.ErrDeadlineExceeded):
	case c.ctx.Err() != nil:
		return nil, fromContext(c.ctx)
	default:
		return nil, &Error{Code: DeadlineExceeded, Message: "the request did not come in time", Err: err}
	}
	return nil, &Error{Code: Canceled, Message: "the request was cut off", Err: err}
}

// ReceiveOnly returns the request of a method that has exactly one.
func (c *Call) ReceiveOnly() ([]byte, error) {
	msg, err := c.Receive()
	if err == io.EOF {
		return nil, Errorf(Internal, "there is no request message")
	}
	if err != nil {
		return nil, err
	}
	switch _, err := c.receive(); err { // the end arrives with the message, so one limit covers both
	case nil:
		return nil, Errorf(Internal, "there is more than one request message")
	case io.EOF:
		return msg, nil
	default:
		return nil, err
	}
}

// StopReceiving makes [Call.Receive] fail, including a call in another goroutine. A method that receives in another
// goroutine must call it before it returns, and wait for that goroutine.
func (c *Call) StopReceiving() { _ = c.r.Body.Close() }

// Send sends a response at once. It blocks while the client does not read. It neither changes nor keeps the message.
func (c *Call) Send(msg []byte) error {
	if err := c.write(msg); err != nil {
		return err
	}
	if err := c.flush(); err != nil {
		return err
	}
	conns.Known(c.r.Context())
	return nil
}

// SendOnly sends the response of a method that has exactly one. The response goes out with the status, when the
// [Method] returns, which it should do next: one write is cheaper than two.
func (c *Call) SendOnly(msg []byte) error { return c.write(msg) }

// SendHeader sends the header now instead of with the first response: proxies wait for it.
func (c *Call) SendHeader() error {
	c.begin()
	return c.flush()
}

func (c *Call) write(msg []byte) error {
	c.begin()
	_, err := c.w.Write(frame(msg))
	return cannotSend(err)
}

func (c *Call) flush() error {
	err := c.ctl.Flush()
	if err == nil && c.h.SendTimeout > 0 {
		_ = c.ctl.SetWriteDeadline(time.Time{}) // it would cut off a waiting stream
	}
	return cannotSend(err)
}

func cannotSend(err error) error {
	if err == nil {
		return nil
	}
	return &Error{Code: Unavailable, Message: "the response cannot be sent", Err: err}
}

// begin limits the time to send what follows, and sets the header.
func (c *Call) begin() {
	if c.h.SendTimeout > 0 {
		_ = c.ctl.SetWriteDeadline(time.Now().Add(c.h.SendTimeout))
	}
	if !c.begun {
		c.begun = true
		c.w.Header().Set("Content-Type", "application/grpc")
		c.w.Header().Set(headerAcceptEncoding, identity)
	}
}

// finish sends the status: in trailers, or in the header if there is nothing else.
func (c *Call) finish(err error) {
	prefix := ""
	if c.begun {
		prefix = http.TrailerPrefix
	}
	c.begin()
	h := c.w.Header()
	status := &Error{}
	if err != nil {
		status = toError(err)
	}
	h.Set(prefix+headerStatus, strconv.FormatUint(uint64(status.Code), 10))
	if status.Message != "" {
		h.Set(prefix+headerMessage, encodeMessage(status.Message))
	}
	setDetails(h, prefix, status)
}
