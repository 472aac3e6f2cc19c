package conns

import (
	"net/http"
	"time"
)

// Body returns a handler that serves as next does, and gives a client of HTTP/1 that long to send the rest of a body which
// next has not read. net/http reads it before the next request, without a limit on the time, so that a client
// that never sends it would keep its connection.
func Body(next http.Handler, long time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r)
		if r.ProtoMajor == 1 && r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(long)) // of this request only
		}
	})
}
