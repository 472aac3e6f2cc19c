package xdsproxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// stream is an ADS stream of an Envoy. The goroutine of the HTTP request receives from Envoy. For each server that
// the stream uses, one goroutine sends requests to it, and one sends its responses to Envoy.
type stream struct {
	h      *Handler
	call   *grpchttp.Call
	method string // the part of the name that both services have
	fields fields
	peer   peerkey.Holder
	ctx    context.Context
	end    context.CancelCauseFunc // with an *over if the stream ends itself
	wg     sync.WaitGroup

	up, local *leg   // nil before their first request
	node      []byte // of the first message; nil once both servers have it
	half      chan struct{}

	sending sync.Mutex

	mu     sync.Mutex
	open   int   // streams to servers that have not ended
	failed error // the first error with which a stream to a server ended; it is also the status of this stream
}

// over is the cause of the end of a stream's context: its status.
type over struct {
	status error
	envoy  bool // Envoy, not a server, could not be reached
}

func (o *over) Error() string { return "the stream has ended" }

// serveStream returns a method, given the part of its name that both services have.
func (h *Handler) serveStream(method string, fields fields) grpchttp.Method {
	return func(ctx context.Context, call *grpchttp.Call) error {
		p := peerkey.HolderOf(call.Request())
		if err := h.open.Take(p, 1); err != nil {
			err := grpchttp.Full(err, "xdsproxy", "streams")
			h.refused(ctx, p, err)
			return err
		}
		defer h.open.Give(p, 1)
		s := &stream{h: h, call: call, peer: p, method: method, fields: fields, half: make(chan struct{})}
		s.ctx, s.end = context.WithCancelCause(ctx)
		defer context.AfterFunc(s.ctx, call.StopReceiving)()
		defer context.AfterFunc(h.ctx, func() {
			s.end(&over{status: grpchttp.Errorf(grpchttp.Unavailable, "xdsproxy: the server is shutting down")})
		})()
		err := s.run()
		s.end(nil)
		s.wg.Wait()
		return err
	}
}

// run receives until the stream ends, and returns its status.
func (s *stream) run() error {
	err := s.call.SendHeader() // proxies between Envoy and here wait for it
	for err == nil {
		var msg []byte
		if msg, err = s.call.Receive(); err == nil {
			s.h.metrics.requests.Inc()
			err = s.request(msg)
		}
	}
	if err == io.EOF && s.ctx.Err() == nil { // Envoy sends no more requests
		err = s.finish()
	}
	cause := context.Cause(s.ctx)
	if o, ok := errors.AsType[*over](cause); ok {
		if o.envoy {
			s.h.metrics.envoyEnds[failed].Inc()
		}
		return o.status
	}
	if cause != nil || err == nil {
		s.h.metrics.envoyEnds[cancelled].Inc()
		return cause
	}
	s.h.metrics.envoyEnds[failed].Inc()
	s.h.refused(s.ctx, s.peer, err)
	return err
}

// finish tells the servers that there are no more requests, and waits for their last responses.
func (s *stream) finish() error {
	close(s.half)
	for _, l := range []*leg{s.up, s.local} {
		if l != nil {
			l.queue.end()
		}
	}
	if s.up != nil || s.local != nil { // the last one to end ends the stream
		<-s.ctx.Done()
	}
	return nil
}

// request forwards a message from Envoy. It blocks while the queue is full.
func (s *stream) request(msg []byte) error {
	to := &s.up
	secrets, node, err := s.fields.read(msg)
	switch {
	case s.h.cfg.Secrets == nil: // the control plane says what is malformed
	case err != nil:
		return grpchttp.Errorf(grpchttp.InvalidArgument, "xdsproxy: malformed request")
	case secrets:
		to = &s.local
	}
	if *to == nil {
		node = bytes.Clone(node)
		first := s.up == nil && s.local == nil
		if !first && node == nil {
			node = s.node
			msg = append(s.fields.encode(node), msg...) // a message with the fields of both
		}
		if s.node = nil; first && s.h.cfg.Secrets != nil {
			s.node = node
		}
		*to = s.begin(to == &s.local, node)
	}
	return (*to).queue.put(s.ctx, msg)
}

// begin starts the stream to a server.
func (s *stream) begin(local bool, node []byte) *leg {
	l := &leg{s: s, local: local, queue: newQueue(s.h.waiting, s.peer)}
	if !local {
		l.node = node
	}
	s.mu.Lock()
	s.open++
	s.mu.Unlock()
	s.wg.Go(l.run)
	return l
}

// send sends a response of one of the servers to Envoy.
func (s *stream) send(msg []byte) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.call.Send(msg)
}

// leg is a stream to one of the servers: the control plane, or the server for secrets.
type leg struct {
	s      *stream
	local  bool
	queue  *queue
	node   []byte                   // Envoy's, until the control plane has answered; nil if it has none
	redact func(text string) string // removes the token that was sent; nil if there is no token
}

// run runs the stream to the server until it ends.
func (l *leg) run() {
	remote, err := l.dial()
	if err == nil {
		l.s.wg.Go(func() { l.forward(remote) })
		err = l.receive(remote)
		_ = remote.Close()
	}
	l.queue.discard()
	l.ended(err, err != nil && remote != nil && remote.Header() != nil)
}

// dial begins the stream to the server.
func (l *leg) dial() (*grpchttp.Stream, error) {
	s, h := l.s, l.s.h
	if l.local {
		t := &inProcess{handler: h.cfg.Secrets, outer: s.call.Request(), wg: &s.wg, log: h.log}
		c := grpchttp.NewClient(&http.Client{Transport: t}, "http://localhost", maxResponse)
		return c.Open(s.ctx, secretService+s.method+"Secrets", nil), nil
	}
	metadata, token, err := h.metadata(s.ctx)
	if err != nil {
		return nil, err
	}
	// not the token itself, which would be printed
	l.redact = func(text string) string { return bearer.Redact(text, token) }
	return h.client.Open(s.ctx, service+s.method+"AggregatedResources", metadata), nil
}

// metadata returns the metadata for a stream to the control plane, and the token in it; empty if there is no token.
func (h *Handler) metadata(ctx context.Context) (metadata http.Header, token string, err error) {
	metadata = h.cfg.Header.Clone()
	if h.cfg.Token == nil {
		return metadata, "", nil
	}
	token, err = h.cfg.Token(ctx)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		h.log.Warn("xdsproxy: no token to send to the control plane", "no token", slog.Any("err", err))
		return metadata, "", nil
	case err != nil:
		return nil, "", grpchttp.Errorf(grpchttp.Unavailable, "xdsproxy: get a token for the control plane: %w", err)
	case len(token) > maxToken || strings.ContainsFunc(token, func(r rune) bool { return !bearer.TokenRune(r) }):
		return nil, "", grpchttp.Errorf(grpchttp.Internal,
			"xdsproxy: the token is too long, or has characters that no token has")
	case token != "":
		if metadata == nil {
			metadata = make(http.Header)
		}
		metadata.Set("Authorization", "Bearer "+token)
	}
	return metadata, token, nil
}

// forward sends the requests in the queue to the server.
func (l *leg) forward(remote *grpchttp.Stream) {
	for {
		msg, ok := l.queue.next(l.s.ctx)
		if !ok {
			break
		}
		err := remote.Send(msg)
		l.queue.sent(msg)
		if err != nil { // receive returns the reason
			l.queue.discard()
			return
		}
	}
	if l.queue.ended() {
		remote.CloseSend()
	}
}

// receive sends the server's responses to Envoy until one of the two streams ends. It returns the error that ended
// it, or io.EOF for the status OK.
func (l *leg) receive(remote *grpchttp.Stream) error {
	h, connected := l.s.h, false
	for {
		msg, err := remote.Receive()
		if err != nil {
			return err
		}
		if !l.local {
			h.metrics.responses.Inc()
			h.plane.answered()
			if !connected {
				connected = true
				h.envoys.join(l.node)
				defer h.envoys.leave()
				l.node = nil
			}
			switch secrets, _, err := response.read(msg); {
			case h.cfg.Secrets == nil:
			case err != nil:
				return grpchttp.Errorf(grpchttp.Internal, "xdsproxy: the control plane has sent a malformed response")
			case secrets:
				h.metrics.dropped.Inc()
				h.log.Warn("xdsproxy: a response of the control plane was dropped", "it has secrets",
					slog.Int("bytes", len(msg)))
				continue
			}
		}
		if err := l.s.send(msg); err != nil {
			l.s.end(&over{status: err, envoy: true})
			return err
		}
	}
}

// ended ends the stream after the stream to the server ended with err.
func (l *leg) ended(err error, answered bool) {
	s, h := l.s, l.s.h
	status := err
	if e, ok := errors.AsType[*grpchttp.Error](err); ok {
		told := *e
		told.Message, told.Err = bearer.Redact(e.Message), nil
		if l.redact != nil { // a server may repeat our token
			told.Message = l.redact(e.Message)
		}
		status = &told
	}
	if err == io.EOF {
		status = nil
	}
	s.mu.Lock()
	s.open--
	if s.failed == nil {
		s.failed = status
	}
	s.mu.Unlock()
	if !l.local && s.ctx.Err() == nil {
		l.count(status, answered)
		if h.cfg.Secrets != nil {
			timer := time.NewTimer(linger)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-s.half:
			case <-s.ctx.Done():
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed == nil && s.open > 0 {
		select {
		case <-s.half:
			return // the other server may still send responses
		default:
		}
	}
	s.end(&over{status: s.failed})
}

// count counts and logs the end of a stream to the control plane.
func (l *leg) count(status error, answered bool) {
	h := l.s.h
	e, _ := errors.AsType[*grpchttp.Error](status)
	switch {
	case e == nil:
		h.metrics.upstreamEnds[cancelled].Inc()
		return
	case !answered:
		h.metrics.failures.Inc()
		h.plane.failed(e)
	case e.Code == grpchttp.Canceled || e.Code == grpchttp.DeadlineExceeded:
		h.metrics.upstreamEnds[cancelled].Inc()
	default:
		h.metrics.upstreamEnds[failed].Inc()
		h.plane.failed(e)
	}
	h.log.Warn("xdsproxy: a stream to the control plane has failed", e.Code.String(), slog.Bool("answered", answered),
		slog.String("err", e.Message))
}

// refused logs that a stream or a request was refused.
func (h *Handler) refused(ctx context.Context, p peerkey.Holder, err error) {
	reason := "error"
	if e, ok := errors.AsType[*grpchttp.Error](err); ok {
		reason = e.Code.String()
	}
	attrs := []slog.Attr{slog.String("err", bearer.Redact(err.Error()))}
	if c, ok := unixsocket.PeerFromContext(ctx); ok {
		attrs = append(attrs, slog.Uint64("uid", uint64(c.UID)), slog.Int64("pid", int64(c.PID)))
	} else if remote := p.Remote(); remote != "" {
		attrs = append(attrs, slog.String("remote", remote))
	}
	h.log.LogOf(slog.LevelWarn, p.Name(), "xdsproxy: the stream of an Envoy was refused or has failed", reason,
		attrs...)
}
