package conns

import (
	"io"
	"net/http"
	"time"
)

// bodyTime is how long the body of a request may take to arrive.
const bodyTime = 10 * time.Second

// ReadBody reads the body of a request, of at most most bytes. The error is an [http.MaxBytesError] for a longer
// body, and an [os.ErrDeadlineExceeded] if the body has not arrived within 10 seconds.
func ReadBody(w http.ResponseWriter, r *http.Request, most int64) ([]byte, error) {
	wire := http.NewResponseController(w)
	_ = wire.SetReadDeadline(time.Now().Add(bodyTime)) // a test's recorder has no deadlines
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	if err == nil {
		_ = wire.SetReadDeadline(time.Time{})
	}
	return data, err
}

// Body returns a handler that serves as next does, and gives a client of HTTP/1 the time long to send the rest of a
// body that next has not read. net/http reads that rest before the next request, without a time limit, so a client
// that never sends it would keep its connection.
func Body(next http.Handler, long time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r)
		if isHTTP1(r) && r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(long)) // for this request only
		}
	})
}

// isHTTP1 reports whether a request came by HTTP/1. In net/http a PRI request with a body counts as HTTP/2.
func isHTTP1(r *http.Request) bool { return r.ProtoMajor == 1 || r.Method == "PRI" }
