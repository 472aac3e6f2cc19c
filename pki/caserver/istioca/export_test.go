package istioca

import (
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

// SetTimeout sets the time for one request.
func (s *Server) SetTimeout(d time.Duration) { s.handler.(*grpchttp.Handler).Timeout = d }

// Decoded is what the server reads out of a request.
type Decoded struct {
	CSR                 string
	Validity            int64
	Signer, Impersonate string
}

// Decode decodes a message.
func Decode(data []byte) (Decoded, error) {
	r, err := readRequest(data)
	if err != nil {
		return Decoded{}, err
	}
	return Decoded{r.csr, r.validity, r.signer, r.impersonate}, nil
}
