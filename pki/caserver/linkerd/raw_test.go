package linkerd_test

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

// frame puts a message into gRPC's envelope.
func frame(flags byte, msg []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(msg))), msg...)
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	return must.Get(proto.Marshal(m))(t)
}

// post sends a body and returns the status of gRPC, or of HTTP after "HTTP ".
func (s *service) post(t testing.TB, body []byte, edit ...func(*http.Request)) string {
	t.Helper()
	status, _ := s.exchange(t, body, edit...)
	return status
}

func (s *service) exchange(t testing.TB, body []byte, edit ...func(*http.Request)) (status string, answer []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.addr+linkerd.Certify, bytes.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	for _, f := range edit {
		f(req)
	}
	resp := must.Get(s.http.Do(req))(t)
	defer resp.Body.Close()
	answer = must.Get(io.ReadAll(resp.Body))(t)
	if resp.StatusCode != http.StatusOK {
		return "HTTP " + resp.Status[:3], answer
	}
	if st := resp.Trailer.Get("Grpc-Status"); st != "" {
		return st, answer
	}
	return resp.Header.Get("Grpc-Status"), answer
}

// direct is a client of a Server without a socket between.
func direct(t testing.TB, o linkerd.Options) *rpcClient {
	t.Helper()
	if o.Mesh == (linkerdname.Mesh{}) {
		o.Mesh = mesh
	}
	if o.Review == nil {
		o.Review = review
	}
	return newClient(&http.Client{Transport: recorder{must.Get(linkerd.New(o))(t)}}, "http://certifier")
}

// recorder answers requests with a handler.
type recorder struct{ handler http.Handler }

func (r recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	in := req.Clone(req.Context())
	in.ProtoMajor, in.ProtoMinor, in.RemoteAddr, in.TLS = 2, 0, "192.0.2.1:1", new(tls.ConnectionState)
	w := httptest.NewRecorder()
	r.handler.ServeHTTP(w, in)
	resp := w.Result()
	resp.ProtoMajor = 2
	return resp, nil
}

// TestBytes speaks to the server with bytes made by hand, both ways.
func TestBytes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-3.1-1", "LNK-3.1-2", "LNK-3.1-3", "LNK-3.2-1")
	s := serve(t, linkerd.Options{})
	der := csr(t, newKey(t), nil)
	require.Less(t, len(der), 1<<14)
	msg := "\x0a" + string([]byte{byte(len(web))}) + web + "\x12" + string([]byte{byte(len(webToken))}) + webToken +
		"\x1a" + string([]byte{byte(len(der)&0x7f | 0x80), byte(len(der) >> 7)}) + string(der)
	status, body := s.exchange(t, frame(0, []byte(msg)))
	require.Equal(t, "0", status)
	require.Equal(t, byte(0), body[0])
	require.Len(t, body[5:], int(binary.BigEndian.Uint32(body[1:])))
	var out wire.CertifyResponse
	require.NoError(t, proto.Unmarshal(body[5:], &out))
	assert.Equal(t, body[5:], marshal(t, &out), "the one encoding")
	assert.Equal(t, byte(0x0a), body[5])
	assert.Equal(t, byte(0x30), out.GetLeafCertificate()[0], "DER")
}

func TestHostileBodies(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-1")
	s := serve(t, linkerd.Options{})
	good := marshal(t, goodRequest(t))
	header := func(k, v string) func(*http.Request) { return func(r *http.Request) { r.Header.Set(k, v) } }
	nothing := func(*http.Request) {}
	for name, test := range map[string]struct {
		body   []byte
		edit   func(*http.Request)
		status string
	}{
		"good":                          {frame(0, good), nothing, "0"},
		"good with unknown fields":      {frame(0, append(bytes.Clone(good), "\x22\x01x"...)), nothing, "0"},
		"media type with a suffix":      {frame(0, good), header("Content-Type", "application/grpc+proto"), "0"},
		"media type in upper case":      {frame(0, good), header("Content-Type", "Application/gRPC"), "0"},
		"empty message":                 {frame(0, nil), nothing, "3"},
		"no message":                    {nil, nothing, "13"},
		"half a frame":                  {[]byte{0, 0, 0}, nothing, "13"},
		"a frame that is cut":           {frame(0, good)[:50], nothing, "13"},
		"garbage":                       {frame(0, []byte("\xff\xff\xff\xff")), nothing, "3"},
		"group that does not end":       {frame(0, []byte("\x0b")), nothing, "3"},
		"length over the end":           {frame(0, []byte("\x0a\x7fa")), nothing, "3"},
		"a tag of zero":                 {frame(0, []byte{0}), nothing, "3"},
		"fields of another type":        {frame(0, []byte("\x08\x01\x10\x01\x18\x01")), nothing, "3"},
		"identity that is not UTF-8":    {frame(0, []byte("\x0a\x01\xff")), nothing, "3"},
		"a claim of 4 GiB":              {[]byte{0, 0xff, 0xff, 0xff, 0xff}, nothing, "8"},
		"a message over the limit":      {frame(0, make([]byte, 192<<10+1)), nothing, "8"},
		"a MiB of empty fields":         {frame(0, bytes.Repeat([]byte("\x0a\x00"), 90<<10)), nothing, "3"},
		"two messages":                  {append(frame(0, good), frame(0, good)...), nothing, "13"},
		"compressed without a codec":    {frame(1, good), nothing, "13"},
		"compressed with gzip":          {frame(1, good), header("Grpc-Encoding", "gzip"), "12"},
		"a deadline that is no time":    {frame(0, good), header("Grpc-Timeout", "soon"), "13"},
		"a deadline in the past":        {frame(0, good), header("Grpc-Timeout", "0n"), "4"},
		"another method of the service": {frame(0, good), func(r *http.Request) { r.URL.Path += "Not" }, "12"},
		"another service":               {frame(0, good), func(r *http.Request) { r.URL.Path = "/grpc.health.v1.Health/Check" }, "12"},
		"gRPC-Web":                      {frame(0, good), header("Content-Type", "application/grpc-web+proto"), "HTTP 415"},
		"gRPC with JSON":                {frame(0, good), header("Content-Type", "application/grpc+json"), "HTTP 415"},
		"Connect":                       {good, header("Content-Type", "application/proto"), "HTTP 415"},
		"JSON":                          {[]byte("{}"), header("Content-Type", "application/json"), "HTTP 415"},
		"no media type":                 {frame(0, good), header("Content-Type", ""), "HTTP 415"},
		"GET":                           {nil, func(r *http.Request) { r.Method, r.Body, r.ContentLength = http.MethodGet, nil, 0 }, "HTTP 405"},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.status, s.post(t, test.body, test.edit))
			assert.NotContains(t, s.logs.String(), webToken)
		})
	}
	assert.Equal(t, "0", s.post(t, frame(0, good)), "it is alive")
}

func TestHTTP1(t *testing.T) {
	t.Parallel()
	srv := must.Get(linkerd.New(linkerd.Options{Mesh: mesh, Signer: newSigner(t), Review: review}))(t)
	w := httptest.NewRecorder()
	srv.ServeHTTP(w, httptest.NewRequest(http.MethodPost, linkerd.Certify, strings.NewReader("x")))
	assert.Equal(t, http.StatusHTTPVersionNotSupported, w.Code)
}

// clocked is a ResponseWriter that notes its deadlines.
type clocked struct {
	*httptest.ResponseRecorder
	read, write time.Time
}

func (c *clocked) SetReadDeadline(t time.Time) error {
	c.read = t
	return nil
}

func (c *clocked) SetWriteDeadline(t time.Time) error {
	c.write = t
	return nil
}

// A client that does not send, or does not take its answer, does not keep the server.
func TestDeadlines(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		for timeout, read := range map[time.Duration]time.Duration{0: 10 * time.Second, 75 * time.Second: 10 * time.Second, 2 * time.Second: 2 * time.Second} {
			srv, err := linkerd.New(linkerd.Options{Mesh: mesh, Signer: newSigner(t), Review: review, Timeout: timeout})
			require.NoError(t, err)
			r := httptest.NewRequest(http.MethodPost, linkerd.Certify, bytes.NewReader(frame(0, marshal(t, goodRequest(t)))))
			r.ProtoMajor, r.ProtoMinor, r.TLS = 2, 0, new(tls.ConnectionState)
			r.Header.Set("Content-Type", "application/grpc")
			w := &clocked{ResponseRecorder: httptest.NewRecorder()}
			srv.ServeHTTP(w, r)
			require.Equal(t, "0", w.Result().Trailer.Get("Grpc-Status"))
			assert.Equal(t, read, time.Until(w.read))
			assert.Equal(t, 10*time.Second, time.Until(w.write))
		}
	})
}

// FuzzCertify sends messages to a handler: the answer is a certificate for the one name that its token
// proves, or a status with a code that has been chosen.
func FuzzCertify(f *testing.F) {
	good := goodRequest(f)
	f.Add(marshal(f, good))
	f.Add([]byte("\x0a\x01a\x12\x01t\x1a\x01\x30"))
	f.Add([]byte{})
	f.Add([]byte("\x0b"))
	f.Add(marshal(f, &wire.CertifyRequest{Identity: web, Token: []byte("voting"), CertificateSigningRequest: good.GetCertificateSigningRequest()}))
	sig := newSigner(f)
	srv := must.Get(linkerd.New(linkerd.Options{Mesh: mesh, Signer: sig, Review: review}))(f)
	f.Fuzz(func(t *testing.T, msg []byte) {
		r := httptest.NewRequest(http.MethodPost, linkerd.Certify, bytes.NewReader(frame(0, msg)))
		r.ProtoMajor, r.ProtoMinor, r.TLS = 2, 0, new(tls.ConnectionState)
		r.Header.Set("Content-Type", "application/grpc")
		w := httptest.NewRecorder()
		srv.ServeHTTP(w, r)
		resp := w.Result()
		status := resp.Trailer.Get("Grpc-Status") + resp.Header.Get("Grpc-Status")
		switch status {
		case "0":
			var out wire.CertifyResponse
			require.NoError(t, proto.Unmarshal(w.Body.Bytes()[5:], &out))
			var in wire.CertifyRequest
			require.NoError(t, proto.Unmarshal(msg, &in))
			require.NotEmpty(t, out.GetLeafCertificate())
			require.NotEmpty(t, out.GetIntermediateCertificates())
			require.Contains(t, string(out.GetLeafCertificate()), in.GetIdentity())
		case "3", "8", "9", "13":
		default:
			t.Fatalf("status %q", status)
		}
	})
}
