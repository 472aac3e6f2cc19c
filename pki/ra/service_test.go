package ra_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/ra"
)

// An RA takes the place of an authority behind all services.
var _ ca.Signer = (*ra.RA)(nil)

// Istio's service over a signer of the cluster: what an agent gets is leaf, intermediate and root.
func TestBehindIstioCA(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	between := newAuthority(t, "between", root)
	c := start(t, bubble(t), func(o *object) {
		o.Status.Certificate = encode(between.leaf(t, o.csr(t), o.life()), between.cert)
	})
	server := must.Get(istioca.New(istioca.Options{
		Signer:        c.ra(trust(t, root)),
		Authenticator: authn.Func(func(*http.Request) (*authn.Caller, error) { return &authn.Caller{ID: webID, Method: "test"}, nil }),
	}))(t)
	srv := httptest.NewUnstartedServer(server)
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(srv.Close)

	// gRPC by hand: a message is a zero byte, its length and itself; ours have strings in field 1.
	ask := func(csr *pki.CSR) (status string, chain [][]byte) {
		text := csr.PEM()
		message := append(binary.AppendUvarint([]byte{0x0a}, uint64(len(text))), text...)
		request := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, srv.URL+istioca.CreateCertificate, bytes.NewReader(request)))(t)
		r.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
		resp := must.Get(srv.Client().Do(r))(t)
		defer func() { _ = resp.Body.Close() }()
		body := must.Get(io.ReadAll(resp.Body))(t)
		for body = body[min(5, len(body)):]; len(body) > 0; {
			require.EqualValues(t, 0x0a, body[0])
			n, size := binary.Uvarint(body[1:])
			body = body[1+size:]
			chain, body = append(chain, body[:n]), body[n:]
		}
		return resp.Trailer.Get("Grpc-Status") + resp.Header.Get("Grpc-Status"), chain
	}
	code, chain := ask(newCSR(t, pki.IDSAN(webID)))
	require.Equal(t, "0", code)
	require.Len(t, chain, 3)
	assert.Equal(t, encode(between.cert), chain[1])
	assert.Equal(t, encode(root.cert), chain[2])
	leaf := must.Get(pki.ParseCertificatesPEM(chain[0]))(t)
	assert.WithinDuration(t, time.Now().Add(time.Hour), leaf[0].NotAfter, time.Minute)

	code, _ = ask(newCSR(t, pki.IDSAN(webID), pki.DNSSAN("admin.test")))
	assert.Equal(t, "3", code, "INVALID_ARGUMENT, as Istio's CA says")
	assert.Zero(t, c.left())
}
