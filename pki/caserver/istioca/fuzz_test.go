package istioca_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
)

// seeds are messages, good and bad.
func seeds(t testing.TB) [][]byte {
	t.Helper()
	good := goodRequest(t)
	good.ValidityDuration = -1
	good.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{
		"CertSigner": structpb.NewStringValue("s"), "ImpersonatedIdentity": structpb.NewStringValue(webID), "x": structpb.NewNumberValue(1),
	}}
	b := marshal(t, good)
	twice := append([]byte("\x0a\x01x\x18\x05\x22\x13\x0a\x11\x0a\x0aCertSigner\x12\x03\x1a\x01x"), b...)
	return [][]byte{
		nil, b, twice, b[:len(b)/2], {0xff}, []byte("\x0a\x01\xff"), []byte("\x22\x00"), []byte("\x22\x02\x0a\x00"), []byte("\x1a\x01x"), []byte("\x08\x01"),
		[]byte("\x22\x12\x0a\x10\x0a\x0aCertSigner\x12\x02\x20\x01"),                                                 // a boolean
		[]byte("\x22\x15\x0a\x13\x0a\x0aCertSigner\x12\x05\x1a\x01x\x20\x01"),                                        // a text, then a boolean
		[]byte("\x22\x15\x0a\x13\x0a\x0aCertSigner\x12\x05\x20\x01\x1a\x01x"),                                        // the other way round
		[]byte("\x22\x18\x0a\x16\x0a\x0aCertSigner\x12\x03\x1a\x01x\x12\x03\x20\x01\x08"),                            // two values
		[]byte("\x22\x0e\x0a\x0c\x0a\x0aCertSigner"),                                                                 // none
		[]byte("\x22\x21\x0a\x11\x0a\x0aCertSigner\x12\x03\x1a\x01x\x0a\x0c\x0a\x0aCertSigner"),                      // one, then none
		[]byte("\x22\x0c\x0a\x0aCertSigner"), []byte("\x0b\x0c"), []byte("\x0b"), []byte("\x0c"), []byte("\x00\x00"), // groups, field 0
	}
}

// FuzzDecode compares the reader of requests with the generated one.
func FuzzDecode(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := istioca.Decode(data)
		var m wire.IstioCertificateRequest
		if proto.Unmarshal(data, &m) != nil {
			return // ours may take what has garbage deep inside of metadata that it does not read
		}
		require.NoError(t, err)
		text := func(key string) string { return m.GetMetadata().GetFields()[key].GetStringValue() }
		assert.Equal(t, istioca.Decoded{
			CSR: m.GetCsr(), Validity: m.GetValidityDuration(), Signer: text("CertSigner"), Impersonate: text("ImpersonatedIdentity"),
		}, got)
	})
}

// What the reader refuses.
func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-4")
	for _, bad := range []string{
		"\xff", "\x0a", "\x0a\x02x", "\x0a\x01\xff", "\x18", "\x18\xff", "\x00\x00", "\x0c", "\x0b", "\x12\x02x", "\x0f",
		"\x22\x01\xff", "\x22\x02\x0a\x01", "\x22\x03\x0a\x01\xff", "\x22\x05\x0a\x03\x0a\x01\xff", "\x22\x04\x0a\x02\x12\x01",
		"\x22\x06\x0a\x04\x12\x02\x1a\x01", "\x22\x07\x0a\x05\x12\x03\x1a\x01\xff", "\x22\x05\x0a\x03\x12\x01\xff",
	} {
		require.Error(t, must.ErrorOf(istioca.Decode([]byte(bad))), "%q", bad)
		require.Error(t, proto.Unmarshal([]byte(bad), new(wire.IstioCertificateRequest)), "%q", bad)
	}
}

// FuzzServeHTTP sends a body to the server: it answers with a certificate for the caller or with a
// status, and never with anything between.
func FuzzServeHTTP(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(frame(0, s))
	}
	f.Add([]byte{})
	f.Add([]byte{0, 0, 0})
	f.Add(frame(1, nil))
	f.Add(append(frame(0, nil), frame(0, nil)...))
	srv := newServer(f, istioca.Options{Signer: authority(f), Authenticator: callers, AllowPlaintext: true})
	f.Fuzz(func(t *testing.T, body []byte) {
		r := httptest.NewRequest(http.MethodPost, istioca.CreateCertificate, io.NopCloser(bytes.NewReader(body)))
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
		r.Header.Set("Content-Type", "application/grpc")
		r.Header.Set("Authorization", "Bearer web")
		w := httptest.NewRecorder()
		srv.ServeHTTP(w, r)
		resp := w.Result()
		require.Equal(t, http.StatusOK, resp.StatusCode)
		status := resp.Trailer.Get("Grpc-Status")
		if status == "" {
			status = resp.Header.Get("Grpc-Status")
		}
		require.NotEmpty(t, status)
		if status != "0" {
			require.Zero(t, w.Body.Len())
			return
		}
		var m wire.IstioCertificateResponse
		require.NoError(t, proto.Unmarshal(w.Body.Bytes()[5:], &m))
		certs := must.Get(pki.ParseCertificatesPEM([]byte(m.GetCertChain()[0])))(t)
		require.Len(t, certs, 1)
		require.Len(t, certs[0].URIs, 1)
		require.Equal(t, webID, certs[0].URIs[0].String())
	})
}
