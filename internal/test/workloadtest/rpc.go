package workloadtest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"io"
	"net/http"
	"strconv"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
)

// RPC is a gRPC call written by hand, with no code of the packages under test.
type RPC struct {
	T        testing.TB
	Response *http.Response
}

// Post begins a call with a body of frames, and header fields, which are names and values.
func Post(ctx context.Context, t testing.TB, c *http.Client, url string, body []byte, headers ...string) *RPC {
	t.Helper()
	req := must.Get(http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body)))(t)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	for i := 0; i < len(headers); i += 2 {
		req.Header[headers[i]] = append(req.Header[headers[i]], headers[i+1])
	}
	resp := must.Get(c.Do(req))(t)
	t.Cleanup(func() { _ = resp.Body.Close() })
	return &RPC{t, resp}
}

// Frame is a message with its prefix.
func Frame(m proto.Message) []byte { return Framed(must.Do(proto.Marshal(m))) }

// Framed is an encoded message with its prefix.
func Framed(b []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}

// Receive returns the next message, or nil at the end.
func (r *RPC) Receive() []byte {
	var prefix [5]byte
	if _, err := io.ReadFull(r.Response.Body, prefix[:]); err != nil {
		return nil
	}
	b := make([]byte, binary.BigEndian.Uint32(prefix[1:]))
	must.Get(io.ReadFull(r.Response.Body, b))(r.T)
	return b
}

// Status reads to the end.
func (r *RPC) Status() (code int, message string) {
	_, _ = io.Copy(io.Discard, r.Response.Body)
	code = must.Get(strconv.Atoi(r.trailer("Grpc-Status")))(r.T, "%v %v", r.Response.Header, r.Response.Trailer)
	return code, r.trailer("Grpc-Message")
}

// Pushback is when the server wants to be asked again.
func (r *RPC) Pushback() string { return r.trailer("Grpc-Retry-Pushback-Ms") }

// Details are the details of the status, by the full names of their types.
func (r *RPC) Details() map[string][]byte {
	all := make(map[string][]byte)
	status := must.Get(base64.RawStdEncoding.DecodeString(r.trailer("Grpc-Status-Details-Bin")))(r.T)
	for _, one := range Fields(r.T, status)[3] {
		detail := Fields(r.T, one)
		all[string(detail[1][0])] = bytes.Join(detail[2], nil)
	}
	return all
}

func (r *RPC) trailer(name string) string {
	return cmp.Or(r.Response.Trailer.Get(name), r.Response.Header.Get(name))
}

// Fields are the values of the fields of a message: as they are encoded, but without the length.
func Fields(t testing.TB, b []byte) map[protowire.Number][][]byte {
	t.Helper()
	all := make(map[protowire.Number][][]byte)
	for len(b) > 0 {
		n, kind, size := protowire.ConsumeTag(b)
		if size < 0 {
			t.Fatal(protowire.ParseError(size))
		}
		b = b[size:]
		if size = protowire.ConsumeFieldValue(n, kind, b); size < 0 {
			t.Fatal(protowire.ParseError(size))
		}
		v := b[:size]
		if kind == protowire.BytesType {
			v, _ = protowire.ConsumeBytes(b)
		}
		all[n] = append(all[n], v)
		b = b[size:]
	}
	return all
}
