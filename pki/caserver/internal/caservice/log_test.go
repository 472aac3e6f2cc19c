package caservice_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
)

// A second caller that is refused for the same reason is seen in the log: by its proven name, else by its address.
func TestRefusedCallersAreNamed(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	refused := errors.New("no such pod")
	h := caservice.Service{
		Name: "test", Path: "/test/Sign", Logger: slog.New(slog.NewTextHandler(&log, nil)), Reasons: []error{refused},
		Answer: func(_ context.Context, c *caservice.Call) ([]byte, error) {
			if name := c.Request().Header.Get("Name"); name != "" {
				c.Attrs = []slog.Attr{slog.String("caller", name)}
			} else {
				c.Attrs = []slog.Attr{slog.String("identity", rand.Text())} // what an unknown caller says
			}
			return nil, caservice.Refuse(grpchttp.PermissionDenied, "no", refused)
		},
	}.Handler()
	for _, from := range []string{"192.0.2.1", "192.0.2.2"} {
		for _, name := range []string{"", "web", "db"} {
			for port := range 20 {
				r := httptest.NewRequest(http.MethodPost, "/test/Sign", bytes.NewReader(make([]byte, 5)))
				r.Proto, r.ProtoMajor, r.ProtoMinor, r.RemoteAddr = "HTTP/2.0", 2, 0, fmt.Sprint(from, ":", port+1)
				r.Header.Set("Content-Type", "application/grpc")
				r.Header.Set("Name", name)
				h.ServeHTTP(httptest.NewRecorder(), r)
			}
		}
	}
	for _, says := range []string{"peer=192.0.2.1:1 ", "peer=192.0.2.2:1 ", "caller=web peer=192.0.2.1:1 ", "caller=db peer=192.0.2.1:1 "} {
		assert.Contains(t, log.String(), says)
	}
	assert.Equal(t, 4, strings.Count(log.String(), "\n"), log.String())
}
