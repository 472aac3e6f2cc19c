package xdsproxy_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/sds/xdsproxy"
)

// A second client whose stream is refused for the same reason is seen in the log.
func TestRefusedClientsAreNamed(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	h := newProxy(t, memory(), func(c *xdsproxy.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	for port := range 5 {
		for _, from := range []string{"127.0.0.1", "127.0.0.2"} {
			r := httptest.NewRequest(http.MethodPost, stream, bytes.NewReader([]byte{0, 0xff, 0xff, 0xff, 0xff}))
			r.Header.Set("Content-Type", "application/grpc")
			r.Proto, r.ProtoMajor, r.ProtoMinor, r.RemoteAddr = "HTTP/2.0", 2, 0, fmt.Sprint(from, ":", port+1)
			h.ServeHTTP(httptest.NewRecorder(), r)
			assert.Regexp(t, `reason=\S+ err=.* remote=`+from+`:1\n`, log.String())
		}
	}
	assert.Equal(t, 2, strings.Count(log.String(), "refused or has failed"), log.String())
}
