package linkerd

import (
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

// SetTimeout sets the time for one request.
func (s *Server) SetTimeout(d time.Duration) { s.handler.(*grpchttp.Handler).Timeout = d }
