package tokens_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

func TestBearerRedactError(t *testing.T) {
	t.Parallel()
	const secret = "abcdefghijklmnopqrst"
	fit := fmt.Errorf("read: %w", io.ErrUnexpectedEOF)
	assert.Same(t, fit, bearer.RedactError(fit, secret))
	for _, cause := range []error{
		&net.OpError{Op: "read", Err: io.ErrUnexpectedEOF},
		&tls.CertificateVerificationError{Err: io.ErrUnexpectedEOF},
	} {
		err := bearer.RedactError(fmt.Errorf("malformed HTTP response %q: %w", secret, cause), secret)
		assert.NotContains(t, err.Error(), "efgh")
		assert.ErrorIs(t, err, cause)
	}
	quoted := errors.New("malformed: " + secret)
	err := bearer.RedactError(fmt.Errorf("transport: %w", quoted), secret)
	assert.EqualError(t, err, "transport: malformed: [redacted]")
	assert.NotErrorIs(t, err, quoted)
	far := errors.New(strings.Repeat("x", 2000) + secret)
	assert.NotContains(t, bearer.RedactError(far, secret).Error(), secret, "what is cut")
}
