package istioca_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/binary"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/hostilecsr"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// frame puts a message into gRPC's envelope.
func frame(flags byte, msg []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(msg))), msg...)
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	return must.Get(proto.Marshal(m))(t)
}

// TestBytes speaks to the server with bytes made by hand, both ways.
func TestBytes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-2", "IST-4.1-3", "IST-4.1-4", "IST-4.1-5", "IST-4.1-7", "IST-4.1-9", "IST-4.1-10")
	a := authority(t)
	s := serve(t, istioca.Options{Signer: a})
	csr := newCSR(t, pki.CSROptions{})
	require.Less(t, len(csr), 1<<14)
	msg := "\x0a" + string([]byte{byte(len(csr)&0x7f | 0x80), byte(len(csr) >> 7)}) + csr + "\x18\x90\x1c" // csr = 1, validity_duration = 3: 3600
	resp, body := post(t.Context(), t, s.client, s.url, "web", bytes.NewReader(frame(0, []byte(msg))), nil)
	require.Equal(t, 2, resp.ProtoMajor)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, "application/grpc", resp.Header.Get("Content-Type"))
	require.Equal(t, "0", resp.Trailer.Get("Grpc-Status"))
	require.Empty(t, resp.Header.Get("Grpc-Status"), "the status is behind the message, in the trailers")
	require.Equal(t, byte(0), body[0])
	require.Len(t, body[5:], int(binary.BigEndian.Uint32(body[1:])))
	var out wire.IstioCertificateResponse
	require.NoError(t, proto.Unmarshal(body[5:], &out))
	assert.Equal(t, body[5:], marshal(t, &out), "the one encoding")
	chain := parse(t, out.GetCertChain())
	require.Len(t, chain, 2)
	assert.WithinRange(t, chain[0][0].NotAfter, time.Now().Add(59*time.Minute), time.Now().Add(time.Hour))
}

// TestHostileBodies has requests of callers that authenticated well.
func TestHostileBodies(t *testing.T) {
	t.Parallel()
	s := serve(t, istioca.Options{})
	good := marshal(t, goodRequest(t))
	const (
		invalid       = "3"
		exhausted     = "8"
		unimplemented = "12"
		internal      = "13"
	)
	tests := map[string]struct {
		body   []byte
		edit   func(*http.Request)
		status string // of gRPC
		text   string
	}{
		"no frame":                      {nil, nil, internal, ""},
		"two frames":                    {append(frame(0, good), frame(0, good)...), nil, internal, ""},
		"two frames, the second is bad": {append(frame(0, good), frame(0, []byte{0xff})...), nil, internal, ""},
		"half a prefix":                 {[]byte{0, 0}, nil, internal, ""},
		"half a message":                {frame(0, good)[:len(good)/2], nil, internal, ""},
		"text after the frame":          {append(frame(0, good), 0), nil, internal, ""},
		"an empty message":              {frame(0, nil), nil, invalid, "CSR signing error (pki: invalid certificate signing request: 0 PEM blocks, want one)"},
		"garbage":                       {frame(0, []byte("\xff\xff\xff")), nil, invalid, "CSR signing error (the message is not an IstioCertificateRequest)"},
		"a CSR that is not UTF-8":       {frame(0, []byte("\x0a\x01\xff")), nil, invalid, "CSR signing error (the message is not an IstioCertificateRequest)"},
		"metadata that is garbage":      {frame(0, append([]byte("\x22\x01\xff"), good...)), nil, invalid, "CSR signing error (the message is not an IstioCertificateRequest)"},
		"JSON":                          {frame(0, []byte(`{"csr":""}`)), nil, invalid, ""},
		"5 MiB":                         {frame(0, append([]byte("\x0a\x80\x80\xc0\x02"), make([]byte, 5<<20)...)), nil, exhausted, ""},
		"4 GiB promised":                {append([]byte{0, 0xff, 0xff, 0xff, 0xff}, good...), nil, exhausted, ""},
		"200 KiB of metadata":           {frame(0, append(bytes.Repeat([]byte("\x22\x00"), 100<<10), good...)), nil, exhausted, ""},
		"said to be compressed":         {frame(1, good), nil, internal, ""},
		"compressed":                    {frame(1, good), func(r *http.Request) { r.Header.Set("Grpc-Encoding", "gzip") }, unimplemented, ""},
		"a strange flag":                {frame(2, good), nil, "", ""},
		"a strange deadline":            {frame(0, good), func(r *http.Request) { r.Header.Set("Grpc-Timeout", "soon") }, internal, ""},
	}
	t.Cleanup(func() {
		assert.Equal(t, "0", s.metric(t, "success_cert_issuance_count"))
		// Two of them are refused by their headers, before they are a call of the method.
		assert.Equal(t, strconv.Itoa(len(tests)-2), s.metric(t, "csr_count"))
		assert.Equal(t, strconv.Itoa(len(tests)-2), s.metric(t, "csr_parsing_err_count"))
		assert.Contains(t, s.logs.String(), "the request could not be read")
	})
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			resp, body := post(t.Context(), t, s.client, s.url, "web", bytes.NewReader(test.body), test.edit)
			require.Equal(t, http.StatusOK, resp.StatusCode)
			assert.Empty(t, body)
			if test.status == "" {
				assert.NotContains(t, []string{"", "0"}, resp.Trailer.Get("Grpc-Status"))
			} else {
				assert.Equal(t, test.status, resp.Trailer.Get("Grpc-Status"), resp.Trailer.Get("Grpc-Message"))
			}
			if test.text != "" {
				assert.Equal(t, test.text, resp.Trailer.Get("Grpc-Message"))
			}
		})
	}
}

// An unknown caller is refused before any of the body has arrived. A known caller does not
// keep the server waiting for ever.
func TestSlowBodies(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := serve(t, istioca.Options{AllowPlaintext: true})
		for token, want := range map[string]struct {
			status string
			after  time.Duration
		}{"": {"16", 0}, "web": {"4", 10 * time.Second}} {
			body, w := io.Pipe() // which the transport closes when it gives up sending
			go func() { _, _ = w.Write(frame(0, make([]byte, 100))[:50]) }()
			began := time.Now()
			resp, _ := post(t.Context(), t, s.client, s.url, token, body, nil)
			assert.Equal(t, want.status, resp.Trailer.Get("Grpc-Status"), resp.Trailer.Get("Grpc-Message"))
			assert.Equal(t, want.after, time.Since(began))
		}
	})
}

// A client that takes nothing of its answer does not keep the server either.
func TestClientThatDoesNotRead(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := serve(t, istioca.Options{AllowPlaintext: true})
		conn := must.Get(s.net.Dial(t.Context()))(t)
		defer conn.Close()
		began := time.Now()
		// The preface; SETTINGS with INITIAL_WINDOW_SIZE 0; HEADERS of stream 1 without END_STREAM; DATA.
		headers := []byte{0x83, 0x86} // :method POST, :scheme http
		literal := func(name, value string) {
			headers = append(headers, 0, byte(len(name)))
			headers = append(headers, name...)
			headers = append(headers, byte(len(value)))
			headers = append(headers, value...)
		}
		literal(":path", istioca.CreateCertificate)
		literal(":authority", "ca.test")
		literal("content-type", "application/grpc")
		literal("te", "trailers")
		literal("authorization", "Bearer web")
		h2 := func(kind, flags byte, stream uint32, payload []byte) []byte {
			b := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
			return append(binary.BigEndian.AppendUint32(b, stream), payload...)
		}
		msg := frame(0, marshal(t, goodRequest(t)))
		for _, b := range [][]byte{
			[]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
			h2(4, 0, 0, []byte{0, 4, 0, 0, 0, 0}),
			h2(1, 4, 1, headers),
			h2(0, 1, 1, msg),
		} {
			must.Get(conn.Write(b))(t)
		}
		for kind := byte(0); kind != 3; { // a frame that ends the stream
			head := make([]byte, 9)
			must.Get(io.ReadFull(conn, head))(t)
			kind = head[3]
			must.Get(io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(head)>>8)))(t)
		}
		assert.Equal(t, 10*time.Second, time.Since(began))
	})
}

func TestHTTP(t *testing.T) {
	t.Parallel()
	s := serve(t, istioca.Options{})
	good := frame(0, marshal(t, goodRequest(t)))
	for name, test := range map[string]struct {
		edit   func(*http.Request)
		status int
		grpc   string
	}{
		"as it should be":      {nil, 200, "0"},
		"with its codec":       {func(r *http.Request) { r.Header.Set("Content-Type", "application/grpc+proto") }, 200, "0"},
		"in capitals":          {func(r *http.Request) { r.Header.Set("Content-Type", "Application/gRPC") }, 200, "0"},
		"with a parameter":     {func(r *http.Request) { r.Header.Set("Content-Type", "application/grpc; charset=utf-8") }, 200, "0"},
		"JSON in gRPC":         {func(r *http.Request) { r.Header.Set("Content-Type", "application/grpc+json") }, 415, ""},
		"gRPC-Web":             {func(r *http.Request) { r.Header.Set("Content-Type", "application/grpc-web+proto") }, 415, ""},
		"Connect":              {func(r *http.Request) { r.Header.Set("Content-Type", "application/proto") }, 415, ""},
		"Connect in JSON":      {func(r *http.Request) { r.Header.Set("Content-Type", "application/json") }, 415, ""},
		"no media type":        {func(r *http.Request) { r.Header.Del("Content-Type") }, 415, ""},
		"a longer media type":  {func(r *http.Request) { r.Header.Set("Content-Type", "application/grpcx") }, 415, ""},
		"GET":                  {func(r *http.Request) { r.Method = http.MethodGet }, 405, ""},
		"PUT":                  {func(r *http.Request) { r.Method = http.MethodPut }, 405, ""},
		"another method":       {func(r *http.Request) { r.URL.Path += "s" }, 200, "12"},
		"another service":      {func(r *http.Request) { r.URL.Path = "/grpc.health.v1.Health/Check" }, 200, "12"},
		"a path in lower case": {func(r *http.Request) { r.URL.Path = strings.ToLower(r.URL.Path) }, 200, "12"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			resp, _ := post(t.Context(), t, s.client, s.url, "web", bytes.NewReader(good), test.edit)
			assert.Equal(t, test.status, resp.StatusCode)
			assert.Equal(t, test.grpc, resp.Trailer.Get("Grpc-Status"))
		})
	}
	t.Run("HTTP/1.1", func(t *testing.T) {
		t.Parallel()
		cfg := s.tls.Clone()
		cfg.NextProtos = []string{"http/1.1"}
		tr := &http.Transport{TLSClientConfig: cfg}
		defer tr.CloseIdleConnections()
		resp, _ := post(t.Context(), t, &http.Client{Transport: tr}, s.url, "web", bytes.NewReader(good), nil)
		assert.Equal(t, http.StatusHTTPVersionNotSupported, resp.StatusCode)
	})
}

// TestHostileCSRs: whatever a request asks for, the certificate has the names of the policy and the key of
// the request, and nothing else of it.
func TestHostileCSRs(t *testing.T) {
	t.Parallel()
	s := serve(t, istioca.Options{})
	want := s.issue(t, "web", goodRequest(t))[0][0]
	signed := 0
	for _, c := range hostilecsr.Some(t) {
		resp, err := s.call(t, "web", &wire.IstioCertificateRequest{Csr: strings.ToValidUTF8(string(c.PEM), "?")})
		if err != nil {
			e := must.As[*grpchttp.Error](err)(t, "%s: %v", c.Name, err)
			code := e.Code
			if len(c.PEM) > 128<<10 && code == grpchttp.ResourceExhausted {
				continue
			}
			require.Equal(t, grpchttp.InvalidArgument, code, "%s: %v", c.Name, err)
			continue
		}
		require.True(t, c.Signable, c.Name)
		signed++
		leaf := parse(t, resp.GetCertChain())[0][0]
		require.True(t, pki.PublicKeysEqual(c.Key, leaf.PublicKey), c.Name)
		require.Equal(t, want.URIs, leaf.URIs, c.Name)
		require.Empty(t, leaf.DNSNames, c.Name)
		require.Empty(t, leaf.IPAddresses, c.Name)
		require.Empty(t, leaf.EmailAddresses, c.Name)
		require.False(t, leaf.IsCA, c.Name)
		require.Zero(t, leaf.KeyUsage&^(x509.KeyUsageDigitalSignature|x509.KeyUsageKeyEncipherment), c.Name)
		require.Equal(t, want.ExtKeyUsage, leaf.ExtKeyUsage, c.Name)
		require.Len(t, leaf.Extensions, len(want.Extensions), c.Name)
		if cn := leaf.Subject.CommonName; cn != "" {
			require.Equal(t, webID, cn, c.Name)
			require.Len(t, leaf.Subject.Names, 1, c.Name)
		} else {
			require.Equal(t, "O=svidkit", leaf.Subject.String(), c.Name)
		}
	}
	assert.Greater(t, signed, 10)
}

// Metadata that is deep, wide or of many kinds costs what it is long.
func TestMetadataIsCheap(t *testing.T) {
	wide := make([]*structpb.Value, 40_000) // four bytes each on the wire
	for i := range wide {
		wide[i] = structpb.NewBoolValue(true)
	}
	m := goodRequest(t)
	m.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{"x": structpb.NewListValue(&structpb.ListValue{Values: wide})}}
	body := marshal(t, m)
	require.Less(t, len(body), 192<<10)
	var deep []byte         // lists in lists
	for len(deep) < 8<<10 { // list_value = 6 of one element, values = 1
		deep = append([]byte{0x0a}, appendLen(deep)...)
		deep = append([]byte{0x32}, appendLen(deep)...)
	}
	entry := append([]byte("\x0a\x01x\x12"), appendLen(deep)...)
	nested := append([]byte{0x22}, appendLen(append([]byte{0x0a}, appendLen(entry)...))...)
	s := serve(t, istioca.Options{})
	for _, b := range [][]byte{body, append(nested, marshal(t, goodRequest(t))...)} {
		resp, _ := post(t.Context(), t, s.client, s.url, "web", bytes.NewReader(frame(0, b)), nil)
		assert.Equal(t, "0", resp.Trailer.Get("Grpc-Status"), resp.Trailer.Get("Grpc-Message"))
	}
	o := istioca.Options{Signer: authority(t), Authenticator: callers}
	o.Policy = func(context.Context, *authn.Caller) (istioca.Grant, error) { // is asked when the message has been read
		return istioca.Grant{}, ca.ErrIdentity
	}
	reader := newServer(t, o)
	costs := func(msg []byte) float64 {
		msg = frame(0, msg)
		return testing.AllocsPerRun(10, func() {
			resp, _ := exchange(t, reader, msg)
			require.Equal(t, "7", resp.Trailer.Get("Grpc-Status"))
		})
	}
	if !rounds.Race {
		for _, b := range [][]byte{nested, body, bytes.Repeat([]byte("\x22\x04\x0a\x02\x12\x00"), 30_000)} {
			unknown := append([]byte{0x7a}, appendLen(make([]byte, len(b)-4))...) // a field that is as long
			assert.LessOrEqual(t, costs(b), costs(unknown)+1)                     // for the CSR
			assert.LessOrEqual(t, costs(b), costs(nil)+20, "but for the growth of the buffer, as many as of nothing")
		}
	}
}

func appendLen(b []byte) []byte { return append(binary.AppendUvarint(nil, uint64(len(b))), b...) }

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

// exchange has h answer a request of web with a body.
func exchange(t testing.TB, h http.Handler, body []byte) (*http.Response, []byte) {
	t.Helper()
	return post(t.Context(), t, caservertest.Direct(h), "https://ca.test", "web", bytes.NewReader(body), nil)
}

// FuzzDecode compares the reader of requests with the generated one.
func FuzzDecode(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	a := wrap(authority(f))
	srv := newServer(f, istioca.Options{
		Signer: a, Authenticator: callers,
		NodeAuthorizer: func(context.Context, *authn.Caller, spiffe.ID) error { return nil },
	})
	// asked returns what the server answers to a message, and what it has had signed.
	asked := func(t testing.TB, msg []byte) (string, ca.Request) {
		a.last = ca.Request{}
		resp, _ := exchange(t, srv, frame(0, msg))
		return resp.Trailer.Get("Grpc-Status") + resp.Trailer.Get("Grpc-Message"), a.last
	}
	td, lastCSR := spiffe.MustParseTrustDomain("example.org"), marshal(f, goodRequest(f))
	f.Fuzz(func(t *testing.T, data []byte) {
		var m wire.IstioCertificateRequest
		if len(data) > 100<<10 || proto.Unmarshal(data, &m) != nil {
			return // ours may take what has garbage deep inside of metadata that it does not read
		}
		text := func(key string) string { return m.GetMetadata().GetFields()[key].GetStringValue() }
		fields := map[string]*structpb.Value{}
		for _, key := range []string{"CertSigner", "ImpersonatedIdentity"} {
			fields[key] = structpb.NewStringValue(text(key))
		}
		same := &wire.IstioCertificateRequest{
			Csr: m.GetCsr(), ValidityDuration: m.GetValidityDuration(), Metadata: &structpb.Struct{Fields: fields},
		}
		want, wantSigned := asked(t, marshal(t, same))
		got, signed := asked(t, data)
		assert.Equal(t, want, got)
		assert.Equal(t, wantSigned, signed)

		_, signed = asked(t, slices.Concat(data, lastCSR)) // the last one counts
		id, _ := spiffe.ParseID(cmp.Or(text("ImpersonatedIdentity"), webID))
		if !id.MemberOf(td) || id.Path() == "" {
			assert.Zero(t, signed)
			return
		}
		assert.Equal(t, id, signed.ID)
		assert.Equal(t, text("CertSigner"), signed.Signer)
		seconds := min(max(m.GetValidityDuration(), 0), math.MaxInt64/int64(time.Second))
		assert.InDelta(t, seconds, signed.TTL/time.Second, 0)
	})
}

// What the reader refuses.
func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-4")
	srv := newServer(t, istioca.Options{Signer: authority(t), Authenticator: callers})
	for _, bad := range []string{
		"\xff", "\x0a", "\x0a\x02x", "\x0a\x01\xff", "\x18", "\x18\xff", "\x00\x00", "\x0c", "\x0b", "\x12\x02x", "\x0f",
		"\x22\x01\xff", "\x22\x02\x0a\x01", "\x22\x03\x0a\x01\xff", "\x22\x05\x0a\x03\x0a\x01\xff", "\x22\x04\x0a\x02\x12\x01",
		"\x22\x06\x0a\x04\x12\x02\x1a\x01", "\x22\x07\x0a\x05\x12\x03\x1a\x01\xff", "\x22\x05\x0a\x03\x12\x01\xff",
	} {
		resp, _ := exchange(t, srv, frame(0, []byte(bad)))
		text := resp.Trailer.Get("Grpc-Message")
		require.Equal(t, "CSR signing error (the message is not an IstioCertificateRequest)", text, "%q", bad)
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
	srv := newServer(f, istioca.Options{Signer: authority(f), Authenticator: callers})
	f.Fuzz(func(t *testing.T, body []byte) {
		resp, answer := exchange(t, srv, body)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		status := resp.Trailer.Get("Grpc-Status")
		require.NotEmpty(t, status)
		if status != "0" {
			require.Empty(t, answer)
			return
		}
		var m wire.IstioCertificateResponse
		require.NoError(t, proto.Unmarshal(answer[5:], &m))
		certs := must.Get(pki.ParseCertificatesPEM([]byte(m.GetCertChain()[0])))(t)
		require.Len(t, certs, 1)
		require.Len(t, certs[0].URIs, 1)
		require.Equal(t, webID, certs[0].URIs[0].String())
	})
}

// TestChain has the forms in which a signer can return a chain, and what becomes of them.
func TestChain(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.2-6", "IST-4.4-1", "IST-4.4-2", "IST-4.4-3", "IST-4.4-5")
	td := spiffe.MustParseTrustDomain("example.org")
	root, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	upper := root.Intermediate()
	lower := upper.Intermediate()
	chain, chainKey := lower.Certificate("/ns/prod/sa/web") // leaf, lower, upper
	require.Len(t, chain, 3)
	direct, directKey := root.Certificate("/ns/prod/sa/web")
	stranger, _ := root.Certificate("/ns/prod/sa/web")
	caChain, caKey := root.Certificate("/ns/prod/sa/web", func(c *x509.Certificate) { c.BasicConstraintsValid, c.IsCA = true, true })
	keys := map[*x509.Certificate]crypto.Signer{chain[0]: chainKey, direct[0]: directKey, caChain[0]: caKey}
	bundle := func(certs ...*x509.Certificate) *spiffe.Bundle {
		return must.Get(spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: certs}))(t)
	}
	r, o := root.Root(), other.Root()
	type certs = []*x509.Certificate
	for name, test := range map[string]struct {
		chain  certs
		bundle *spiffe.Bundle
		want   []certs // nil: no answer
	}{
		"self-signed":                              {direct, bundle(r), []certs{{direct[0]}, {r}}},
		"two roots":                                {direct, bundle(r, o), []certs{{direct[0]}, {r, o}}},
		"intermediates":                            {chain, bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"intermediates, two roots":                 {chain, bundle(o, r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {o, r}}},
		"root at the end":                          {append(chain[:3:3], r), bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"a root in the middle":                     {certs{chain[0], r, chain[1], chain[2]}, bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"another root at the end":                  {append(chain[:3:3], o), bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"an intermediate twice":                    {certs{chain[0], chain[1], chain[1], chain[2], chain[1]}, bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"the anchor is an intermediate":            {chain, bundle(chain[2]), []certs{{chain[0]}, {chain[1]}, {chain[2]}}},
		"one anchor is an intermediate":            {chain, bundle(chain[1], r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {chain[1], r}}},
		"no bundle, root at the end":               {append(chain[:3:3], r), nil, nil},
		"no bundle, leaf and root":                 {certs{direct[0], r}, nil, nil},
		"empty bundle, root at the end":            {append(chain[:3:3], r), bundle(), nil},
		"no bundle, a leaf":                        {direct, nil, nil},
		"no chain":                                 {nil, bundle(r), nil},
		"the certificate of another key":           {stranger, bundle(r), nil},
		"the certificate of a CA":                  {caChain, bundle(r), nil},
		"a nil certificate":                        {certs{direct[0], nil}, bundle(r), nil},
		"more certificates than peers put up with": {append(certs{direct[0]}, bytesOf(chain[1], 16)...), bundle(r), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, istioca.Options{Signer: &signer{
				sign:   func(context.Context, ca.Request) ([]*x509.Certificate, error) { return test.chain, nil },
				bundle: func() *spiffe.Bundle { return test.bundle },
			}})
			request := goodRequest(t)
			if len(test.chain) > 0 && keys[test.chain[0]] != nil {
				request = requestFor(t, keys[test.chain[0]])
			}
			if test.want == nil {
				_, err := s.call(t, "web", request)
				refused(t, err, grpchttp.Internal, "CSR signing error (the answer of the signer cannot be used)")
				assert.Equal(t, "0", s.metric(t, "success_cert_issuance_count"))
				return
			}
			got := s.issue(t, "web", request)
			require.Len(t, got, len(test.want))
			for i := range got {
				assert.Equal(t, raw(test.want[i]), raw(got[i]), "text %d", i)
			}
			last := test.want[len(test.want)-1]
			assert.Equal(t, strconv.FormatInt(last[0].NotAfter.Unix(), 10), s.metric(t, "root_cert_expiry_timestamp"))
			signing := ""
			if len(test.want) > 2 {
				signing = strconv.FormatInt(test.want[1][0].NotAfter.Unix(), 10)
			}
			assert.Equal(t, signing, s.metric(t, "cert_chain_expiry_timestamp"))
		})
	}
}

func bytesOf(c *x509.Certificate, n int) []*x509.Certificate {
	var out []*x509.Certificate
	for range n {
		out = append(out, c)
	}
	return out
}

// A new root is in the very next answer, though nothing else has changed.
func TestRotation(t *testing.T) {
	t.Parallel()
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")}))(t)
	s := serve(t, istioca.Options{Signer: a})
	roots := func() [][]byte {
		got := s.issue(t, "web", goodRequest(t))
		require.Len(t, got, 2)
		return raw(got[1])
	}
	require.Len(t, roots(), 1)
	first := roots()[0]
	must.Get(a.Rotate(t.Context()))(t)
	got := roots()
	require.Len(t, got, 2)
	assert.Equal(t, first, got[0])
	assert.Len(t, roots(), 2)
}

// A leaf goes with its own intermediates, also when they change under the same roots.
func TestIntermediatesChange(t *testing.T) {
	t.Parallel()
	root := spiffetest.NewCA(t, "example.org")
	bundle := root.Bundle()
	var chains [][]*x509.Certificate
	var keys []crypto.Signer
	for _, issuer := range []*spiffetest.CA{root.Intermediate(), root.Intermediate(), root} {
		chain, key := issuer.Certificate("/ns/prod/sa/web")
		chains, keys = append(chains, chain), append(keys, key)
	}
	next := make(chan []*x509.Certificate, 1)
	s := serve(t, istioca.Options{Signer: &signer{
		sign:   func(context.Context, ca.Request) ([]*x509.Certificate, error) { return <-next, nil },
		bundle: func() *spiffe.Bundle { return bundle },
	}})
	for _, i := range []int{0, 1, 2, 0, 0, 1} {
		next <- chains[i]
		var got [][]byte
		for _, text := range s.issue(t, "web", requestFor(t, keys[i])) {
			got = append(got, raw(text)...)
		}
		assert.Equal(t, append(raw(chains[i]), root.Root().Raw), got)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.6-1")
	a := authority(t)
	s := serve(t, istioca.Options{Signer: a})
	var b bytes.Buffer
	require.NoError(t, s.Report().Metrics(&b))
	var names []string
	for line := range strings.SplitSeq(b.String(), "\n") {
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			names = append(names, rest)
		}
	}
	assert.Equal(t, []string{
		"citadel_server_csr_count counter",
		"citadel_server_authentication_failure_count counter",
		"citadel_server_csr_parsing_err_count counter",
		"citadel_server_id_extraction_err_count counter",
		"citadel_server_csr_sign_err_count counter",
		"citadel_server_success_cert_issuance_count counter",
		"citadel_server_root_cert_expiry_timestamp gauge",
		"citadel_server_root_cert_expiry_seconds gauge",
	}, names)
	end := a.Status().Roots[0].Certificate.NotAfter
	assert.Equal(t, strconv.FormatInt(end.Unix(), 10), s.metric(t, "root_cert_expiry_timestamp"))
	left := must.Get(strconv.ParseFloat(s.metric(t, "root_cert_expiry_seconds"), 64))(t)
	assert.InDelta(t, time.Until(end).Seconds(), left, 60)
}
