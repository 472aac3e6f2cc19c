package caclient_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient"
)

func TestKinds(t *testing.T) {
	t.Parallel()
	kinds := []error{caclient.ErrUnavailable, caclient.ErrInvalid, caclient.ErrUnauthenticated, caclient.ErrDenied, caclient.ErrBadAnswer, nil}
	for i, text := range []string{"unavailable: ", "invalid request: ", "not authenticated: ", "denied: ", "bad answer: ", ""} {
		cause := errors.New("cause")
		e := &caclient.Error{Op: "sign", Kind: kinds[i], RetryAfter: 3 * time.Second, Err: cause}
		assert.Equal(t, "caclient: sign: "+text+"cause", e.Error())
		assert.ErrorIs(t, e, cause)
		for _, other := range kinds[:5] {
			assert.Equal(t, other == kinds[i], errors.Is(e, other))
		}
		after, ok := caclient.Retryable(fmt.Errorf("outer: %w", e))
		assert.Equal(t, i == 0, ok)
		if ok {
			assert.Equal(t, 3*time.Second, after)
		} else {
			assert.Zero(t, after)
		}
		e.MayPass = true
		after, ok = caclient.Retryable(fmt.Errorf("outer: %w", e))
		assert.True(t, ok, "it says so itself")
		assert.Equal(t, 3*time.Second, after)
	}
}

type opinion struct {
	error
	after time.Duration
	ok    bool
}

func (o opinion) Retryable() (time.Duration, bool) { return o.after, o.ok }

func TestRetryable(t *testing.T) {
	t.Parallel()
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	verification := &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}
	get := func(err error) error { return &url.Error{Op: "Get", URL: "https://ca.test", Err: err} }
	for _, tt := range []struct {
		name  string
		err   error
		after time.Duration
		ok    bool
	}{
		{"nil", nil, 0, false},
		{"anything", errors.New("anything"), 0, false},
		{"refused connection", refused, 0, true},
		{"refused connection over HTTP", get(refused), 0, true},
		{"a name that is not found", get(&net.DNSError{Err: "no such host", Name: "ca.test", IsNotFound: true}), 0, true},
		{"no answer in time", os.ErrDeadlineExceeded, 0, true},
		{"deadline", context.DeadlineExceeded, 0, true},
		{"deadline over HTTP", get(context.DeadlineExceeded), 0, true},
		{"cancelled", context.Canceled, 0, false},
		{"cancelled over HTTP", get(context.Canceled), 0, false},
		{"cancelled while dialling", &net.OpError{Op: "dial", Err: context.Canceled}, 0, false},
		{"cut off", get(io.EOF), 0, true},
		{"cut off in the middle", fmt.Errorf("read: %w", io.ErrUnexpectedEOF), 0, true},
		{"closed connection", net.ErrClosed, 0, true},
		{"a server that is not trusted", get(verification), 0, false},
		{"a server that is not trusted, inside a network error", &net.OpError{Op: "remote error", Err: verification}, 0, false},
		{"a bad URL", get(errors.New("unsupported protocol scheme")), 0, false},
		{"an error with an opinion", opinion{io.EOF, 0, false}, 0, false},
		{"an error with another opinion", opinion{errors.New("x"), time.Minute, true}, time.Minute, true},
		{"the outermost opinion counts", &caclient.Error{Kind: caclient.ErrDenied, Err: opinion{io.EOF, time.Minute, true}}, 0, false},
		{"an error that says cancelled and is retryable all the same", &caclient.Error{Kind: caclient.ErrUnavailable, Err: context.Canceled}, 0, true},
		{"inside joined errors", errors.Join(errors.New("x"), &caclient.Error{Kind: caclient.ErrUnavailable, RetryAfter: 1, Err: io.EOF}), 1, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			after, ok := caclient.Retryable(tt.err)
			assert.Equal(t, tt.ok, ok)
			assert.Equal(t, tt.after, after)
		})
	}
}
