package cafake

import (
	"bytes"
	"crypto/subtle"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
)

// statusOf returns the status for the kind of e, and sets the header Retry-After.
func statusOf(w http.ResponseWriter, e *caclient.Error) int {
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int((e.RetryAfter+time.Second-1)/time.Second)))
	}
	switch e.Kind {
	case caclient.ErrInvalid:
		return http.StatusBadRequest
	case caclient.ErrUnauthenticated:
		return http.StatusUnauthorized
	case caclient.ErrDenied:
		return http.StatusForbidden
	case caclient.ErrUnavailable:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

func answerJSON(w http.ResponseWriter, code int, answer any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

// pems returns each certificate as a text.
func pems(certs []*x509.Certificate) []string {
	out := make([]string, 0, len(certs))
	for _, c := range certs {
		out = append(out, string(pki.MarshalCertificatesPEM(c)))
	}
	return out
}

// readJSON reads the body of a request.
func readJSON(r *http.Request, body any) bool {
	return json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(body) == nil
}

// garbled answers with success and a text.
func garbled(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
}

// Message is a connection to a server that answers each call of gRPC with this message.
type Message []byte

// RoundTrip implements [http.RoundTripper].
func (m Message) RoundTrip(r *http.Request) (*http.Response, error) {
	frame := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m))), m...)
	return &http.Response{
		StatusCode: http.StatusOK, ProtoMajor: 2, Request: r, Body: io.NopCloser(bytes.NewReader(frame)),
		Header: http.Header{"Content-Type": {"application/grpc"}}, Trailer: http.Header{"Grpc-Status": {"0"}},
	}, nil
}

// SameToken compares tokens in constant time.
func SameToken(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
