package compare

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/linkerd/linkerd2-proxy-api/go/destination"
	"github.com/linkerd/linkerd2-proxy-api/go/identity"
	l5dnet "github.com/linkerd/linkerd2-proxy-api/go/net"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// meshDestination is a destination service by the published messages and grpc-go.
type meshDestination struct {
	destination.UnimplementedDestinationServer
	updates chan *destination.Update // nil ends the stream
	asked   chan *destination.GetDestination
	clients chan string
}

func (d *meshDestination) Get(r *destination.GetDestination, stream destination.Destination_GetServer) error {
	if r.GetPath() != "app.emojivoto.svc.cluster.local:80" {
		return status.Errorf(codes.InvalidArgument, "not a service: %s", r.GetPath())
	}
	d.asked <- r
	client := ""
	if p, ok := peer.FromContext(stream.Context()); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.PeerCertificates) > 0 {
			client = info.State.PeerCertificates[0].DNSNames[0]
		}
	}
	d.clients <- client
	for {
		select {
		case u := <-d.updates:
			if u == nil {
				return status.Error(codes.Unavailable, "the next stream has another set")
			}
			if err := stream.Send(u); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func tcpAddress(text string) *l5dnet.TcpAddress {
	a := netip.MustParseAddrPort(text)
	out := &l5dnet.TcpAddress{Port: uint32(a.Port())}
	if a.Addr().Is4() {
		v4 := a.Addr().As4()
		out.Ip = &l5dnet.IPAddress{Ip: &l5dnet.IPAddress_Ipv4{Ipv4: binary.BigEndian.Uint32(v4[:])}}
		return out
	}
	v6 := a.Addr().As16()
	out.Ip = &l5dnet.IPAddress{Ip: &l5dnet.IPAddress_Ipv6{Ipv6: &l5dnet.IPv6{First: binary.BigEndian.Uint64(v6[:]), Last: binary.BigEndian.Uint64(v6[8:])}}}
	return out
}

// TestLinkerdDestination: a proxy follows the endpoints of a service at a server of grpc-go with Linkerd's published messages, by
// mutual TLS as between pods, and in the clear on loopback: with each kind of identity, without one, and with what it cannot use.
func TestLinkerdDestination(t *testing.T) {
	t.Parallel()
	const (
		web  = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
		dst  = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local"
		path = "app.emojivoto.svc.cluster.local:80"
		uri  = "spiffe://root.linkerd.cluster.local/external-workload"
	)
	dns := func(name string) *destination.TlsIdentity_DnsLikeIdentity {
		return &destination.TlsIdentity_DnsLikeIdentity{Name: name}
	}
	add := func(all ...*destination.WeightedAddr) *destination.Update {
		return &destination.Update{Update: &destination.Update_Add{Add: &destination.WeightedAddrSet{Addrs: all, MetricLabels: map[string]string{"service": "app"}}}}
	}
	meshed := &destination.WeightedAddr{
		Addr: tcpAddress("10.1.2.3:8080"), Weight: 10_000, MetricLabels: map[string]string{"pod": "app-0"},
		TlsIdentity:  &destination.TlsIdentity{Strategy: &destination.TlsIdentity_DnsLikeIdentity_{DnsLikeIdentity: dns(web)}, ServerName: dns(web)},
		ProtocolHint: &destination.ProtocolHint{Protocol: &destination.ProtocolHint_H2_{H2: &destination.ProtocolHint_H2{}}},
	}
	external := &destination.WeightedAddr{
		Addr: tcpAddress("[fd00:1:2:3:4:5:6:7]:4143"), Weight: 10_000,
		TlsIdentity: &destination.TlsIdentity{Strategy: &destination.TlsIdentity_UriLikeIdentity_{UriLikeIdentity: &destination.TlsIdentity_UriLikeIdentity{Uri: uri}}, ServerName: dns("external.cluster.local")},
	}
	bare := &destination.WeightedAddr{Addr: tcpAddress("192.168.0.1:65535")}
	gateway := &destination.WeightedAddr{Addr: tcpAddress("192.168.0.2:4143"), AuthorityOverride: &destination.AuthorityOverride{AuthorityOverride: "app.east:80"}}
	want := []linkerdproxy.Endpoint{
		{Addr: netip.MustParseAddrPort("10.1.2.3:8080"), Identity: web, ServerName: web},
		{Addr: netip.MustParseAddrPort("192.168.0.1:65535")},
		{Addr: netip.MustParseAddrPort("[fd00:1:2:3:4:5:6:7]:4143"), Identity: uri, ServerName: "external.cluster.local"},
	}
	for name, secure := range map[string]bool{"TLS": true, "loopback": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			certifier := &meshCertifier{ca: spiffetest.NewCA(t, "cluster.local")}
			d := &meshDestination{updates: make(chan *destination.Update), asked: make(chan *destination.GetDestination, 10), clients: make(chan string, 10)}
			serve := func(creds credentials.TransportCredentials, register func(*grpc.Server)) (port int) {
				l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
				server, done := grpc.NewServer(grpc.Creds(creds)), make(chan error, 1)
				register(server)
				go func() { done <- server.Serve(l) }()
				t.Cleanup(func() {
					server.Stop()
					require.NoError(t, <-done)
				})
				return l.Addr().(*net.TCPAddr).Port
			}
			at := serve(insecure.NewCredentials(), func(s *grpc.Server) { identity.RegisterIdentityServer(s, certifier) })
			token := filepath.Join(t.TempDir(), "token")
			require.NoError(t, os.WriteFile(token, []byte("the-token\n"), 0o600))
			id := must.Get(linkerdproxy.Start(ctx, linkerdproxy.Config{
				Name: web, Anchors: certifier.ca.Bundle().MarshalPEM(), TokenFile: token,
				Certifier: linkerdproxy.Service{Addr: fmt.Sprintf("127.0.0.1:%d", at)}, MinRefresh: 100 * time.Millisecond,
			}))(t)
			defer id.Close()

			creds, service := insecure.NewCredentials(), linkerdproxy.Service{}
			if secure {
				key := must.Get(pki.NewKey("ecdsa-p256"))(t)
				csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
				chain := must.Get(certifier.ca.Certify(ctx, csr, []pki.SAN{pki.DNSSAN(dst)}, time.Hour))(t)
				creds = meshTLS{&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}}, ClientAuth: tls.RequestClientCert}}
				service = linkerdproxy.Service{Addr: "0.0.0.0", Name: dst} // it leads to this host, too, and is no loopback address
			} else {
				service.Addr = "127.0.0.1"
			}
			service.Addr = fmt.Sprintf("%s:%d", service.Addr, serve(creds, func(s *grpc.Server) { destination.RegisterDestinationServer(s, d) }))
			client := must.Get(linkerdproxy.NewDestinations(ctx, id, service, nil))(t)
			_, err := client.Endpoints(ctx, "example.org:80")
			require.ErrorIs(t, err, fs.ErrNotExist)

			send := func(u *destination.Update) {
				t.Helper()
				select {
				case d.updates <- u:
				case <-ctx.Done():
					t.Fatal("no stream takes it")
				}
			}
			has := func(want []linkerdproxy.Endpoint, why string) {
				t.Helper()
				require.Eventually(t, func() bool {
					all, err := client.Endpoints(ctx, path)
					if why != "" {
						return err != nil && errors.Is(err, fs.ErrNotExist) == (why == "absent")
					}
					return err == nil && assert.ObjectsAreEqual(want, all)
				}, time.Minute, 5*time.Millisecond)
			}
			go func() { d.updates <- add(external, meshed, bare, gateway) }() // the stream begins with the first question
			has(want, "")
			assert.Equal(t, path, (<-d.asked).GetPath())
			if got := <-d.clients; secure {
				assert.Equal(t, web, got)
			}
			send(&destination.Update{Update: &destination.Update_Remove{Remove: &destination.AddrSet{Addrs: []*l5dnet.TcpAddress{external.Addr, gateway.Addr}}}})
			has(want[:2], "")
			send(&destination.Update{Update: &destination.Update_NoEndpoints{NoEndpoints: &destination.NoEndpoints{Exists: true}}})
			has(nil, "empty")
			send(&destination.Update{Update: &destination.Update_NoEndpoints{NoEndpoints: &destination.NoEndpoints{}}})
			has(nil, "absent")
			send(add(meshed))
			has(want[:1], "")
			send(nil) // the stream ends; what was there counts until the next has begun
			<-d.asked
			has(want[:1], "")
			send(add(bare))
			has(want[1:2], "")
		})
	}
}
