package compare

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/linkerd/linkerd2-proxy-api/go/identity"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// meshCertifier is an identity service by the published messages and grpc-go. Its first answer is that the token is not known yet.
type meshCertifier struct {
	identity.UnimplementedIdentityServer
	ca *spiffetest.CA

	mu       sync.Mutex
	requests []*identity.CertifyRequest
	metadata []metadata.MD
}

func (c *meshCertifier) Certify(ctx context.Context, r *identity.CertifyRequest) (*identity.CertifyResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	md, _ := metadata.FromIncomingContext(ctx)
	c.requests, c.metadata = append(c.requests, r), append(c.metadata, md)
	if len(c.requests) == 1 {
		return nil, status.Error(codes.InvalidArgument, "the token is not known")
	}
	csr, err := pki.ParseCSR(r.GetCertificateSigningRequest())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	chain, err := c.ca.Certify(ctx, csr, []pki.SAN{pki.DNSSAN(r.GetIdentity())}, 2*time.Second)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	answer := &identity.CertifyResponse{LeafCertificate: chain[0].Raw, ValidUntil: timestamppb.New(chain[0].NotAfter)}
	for _, between := range append(chain[1:], c.ca.Root()) {
		answer.IntermediateCertificates = append(answer.IntermediateCertificates, between.Raw)
	}
	return answer, nil
}

// meshTLS is the TLS of a mesh for grpc-go, whose own wants ALPN.
type meshTLS struct{ config *tls.Config }

func (m meshTLS) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return m.handshake(context.Background(), tls.Server(c, m.config))
}

func (m meshTLS) ClientHandshake(ctx context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return m.handshake(ctx, tls.Client(c, m.config))
}

func (m meshTLS) handshake(ctx context.Context, c *tls.Conn) (net.Conn, credentials.AuthInfo, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, nil, err
	}
	state := c.ConnectionState()
	if state.NegotiatedProtocol != "" || state.Version != tls.VersionTLS13 {
		return nil, nil, fmt.Errorf("not the TLS of a mesh: %q, %s", state.NegotiatedProtocol, tls.VersionName(state.Version))
	}
	level := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return c, credentials.TLSInfo{State: state, CommonAuthInfo: level}, nil
}

func (m meshTLS) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}
func (m meshTLS) Clone() credentials.TransportCredentials { return m }
func (m meshTLS) OverrideServerName(string) error         { return nil }

// TestLinkerdProxy: a proxy takes and renews its certificate from a server of grpc-go with Linkerd's published messages, by TLS
// as between pods, and in the clear as within that of the identity service.
func TestLinkerdProxy(t *testing.T) {
	t.Parallel()
	const (
		web       = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
		certifier = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"
	)
	for name, secure := range map[string]bool{"TLS": true, "loopback": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &meshCertifier{ca: spiffetest.NewCA(t, "cluster.local")}
			l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
			creds, service := insecure.NewCredentials(), linkerdproxy.Service{Addr: l.Addr().String()}
			if secure {
				key := must.Get(pki.NewKey("ecdsa-p256"))(t)
				csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
				chain := must.Get(c.ca.Certify(t.Context(), csr, []pki.SAN{pki.DNSSAN(certifier)}, time.Hour))(t)
				creds = meshTLS{&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}}}}
				// It leads to this host, too, and is no loopback address.
				service = linkerdproxy.Service{Addr: fmt.Sprintf("0.0.0.0:%d", l.Addr().(*net.TCPAddr).Port), Name: certifier}
			}
			server := grpc.NewServer(grpc.Creds(creds))
			identity.RegisterIdentityServer(server, c)
			done := make(chan error, 1)
			go func() { done <- server.Serve(l) }()
			defer func() {
				server.Stop()
				require.NoError(t, <-done)
			}()

			token := filepath.Join(t.TempDir(), "token")
			require.NoError(t, os.WriteFile(token, []byte("the-token\n"), 0o600))
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			id, err := linkerdproxy.Start(ctx, linkerdproxy.Config{
				Name: web, Anchors: c.ca.Bundle().MarshalPEM(), TokenFile: token, Certifier: service, MinRefresh: 100 * time.Millisecond,
			})
			require.NoError(t, err)
			defer id.Close()
			first := must.Get(id.Credential())(t)
			for held, changed := first, id.Changed(); held.Leaf().Equal(first.Leaf()); changed = id.Changed() {
				select {
				case <-changed:
				case <-ctx.Done():
					t.Fatal(id.Report().Identities[0].Err)
				}
				held = must.Get(id.Credential())(t)
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			require.GreaterOrEqual(t, len(c.requests), 3)
			for i, r := range c.requests {
				assert.Equal(t, web, r.GetIdentity())
				assert.Equal(t, "the-token", string(r.GetToken()))
				assert.Equal(t, c.requests[0].GetCertificateSigningRequest(), r.GetCertificateSigningRequest())
				assert.Empty(t, c.metadata[i].Get("authorization"))
			}
		})
	}
}
