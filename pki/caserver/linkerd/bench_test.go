package linkerd_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	wire "github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
)

// BenchmarkCertify is a request over HTTP/2 and TLS on loopback, with signing.
func BenchmarkCertify(b *testing.B) {
	for _, clients := range []int{1, 32} {
		b.Run(fmt.Sprint(clients, " clients"), func(b *testing.B) {
			o := linkerd.Options{Mesh: mesh, Signer: newSigner(b), Review: review}
			srv, err := linkerd.New(o)
			require.NoError(b, err)
			bench(b, srv, clients)
		})
		b.Run(fmt.Sprint(clients, " clients, empty handler"), func(b *testing.B) {
			answer := marshal(b, &wire.CertifyResponse{LeafCertificate: make([]byte, 500), IntermediateCertificates: [][]byte{make([]byte, 400)}})
			bench(b, &grpchttp.Handler{MaxMessage: 1 << 20, Methods: map[string]grpchttp.Method{
				linkerd.Certify: grpchttp.Unary(func(context.Context, []byte) ([]byte, error) { return answer, nil }),
			}}, clients)
		})
	}
}

func bench(b *testing.B, h http.Handler, clients int) {
	addr := caservertest.Serve(b, caserver.ServeOptions{Handler: h})
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(b, err)
	der := csr(b, key, func(*x509.CertificateRequest) {})
	r := &wire.CertifyRequest{Identity: web, Token: []byte(webToken), CertificateSigningRequest: der}
	var wg sync.WaitGroup
	var left atomic.Int64
	left.Store(int64(b.N))
	b.ResetTimer()
	for range clients {
		c := newClient(caservertest.ProxyClient(b), "http://"+addr)
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if _, err := c.call(b.Context(), r); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}
