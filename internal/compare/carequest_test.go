package compare

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	security "istio.io/api/security/v1alpha1"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

// The servers of BenchmarkCARequest run in a process of their own, so that their CPU time can be told from that of the
// clients. It is this test binary, started with the kind of the server in this variable.
const requestServer = "SVIDKIT_COMPARE_CA_SERVER"

// TestRequestServer is the process of a server: it prints its address, and answers each line with the CPU time that it has used.
func TestRequestServer(t *testing.T) {
	kind := os.Getenv(requestServer)
	if kind == "" {
		t.Skip("it is the server of BenchmarkCARequest")
	}
	serverTLS, _ := caTLS(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	switch kind {
	case "grpc-go":
		signer := newBareSigner(t)
		serverTLS.NextProtos = []string{"h2"}
		s := grpc.NewServer(grpc.Creds(credentials.NewTLS(serverTLS)))
		security.RegisterIstioCertificateServiceServer(s, signer)
		wg.Go(func() { _ = s.Serve(l) })
		context.AfterFunc(ctx, s.Stop)
	case "net-http":
		signer := newBareSigner(t)
		wg.Go(func() { _ = caserver.Serve(ctx, l, caserver.ServeOptions{Handler: signer, TLS: serverTLS}) })
	default:
		cfg := ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")}
		if kind == "svidkit+audit" {
			log := must.Get(auditlog.Open(filepath.Join(t.TempDir(), "audit.jsonl"), nil))(t)
			defer log.Close()
			cfg.Auditor = log
		}
		a := must.Get(ca.New(cfg))(t)
		id := spiffe.MustParseID("spiffe://cluster.local/ns/prod/sa/web")
		h, err := istioca.New(istioca.Options{Signer: a, Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
			if token, err := authn.Bearer(r); err != nil || token != "web" {
				return nil, errors.Join(authn.ErrRefused, err)
			}
			return &authn.Caller{ID: id, Method: "test"}, nil
		})})
		require.NoError(t, err)
		wg.Go(func() { _ = caserver.Serve(ctx, l, caserver.ServeOptions{Handler: h, TLS: serverTLS}) })
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: serverTLS.Certificates[0].Certificate[0]})
	fmt.Printf("%s %s\n", l.Addr(), url.QueryEscape(string(cert)))
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var u syscall.Rusage
		require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
		fmt.Println(time.Duration(u.Utime.Nano() + u.Stime.Nano()).Nanoseconds())
	}
	cancel()
	wg.Wait()
}

// bareSigner does what no CA can leave out: it reads the request, verifies the signature of the CSR, signs the leaf and
// answers leaf and root. It does it over grpc-go and over net/http.
type bareSigner struct {
	security.UnimplementedIstioCertificateServiceServer
	root *x509.Certificate
	pem  string
	key  *ecdsa.PrivateKey
	id   *url.URL
}

func newBareSigner(t testing.TB) *bareSigner {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key))(t)
	root := must.Get(x509.ParseCertificate(der))(t)
	id := must.Get(url.Parse("spiffe://cluster.local/ns/prod/sa/web"))(t)
	return &bareSigner{root: root, pem: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), key: key, id: id}
}

func (s *bareSigner) sign(r *security.IstioCertificateRequest) (*security.IstioCertificateResponse, error) {
	b, _ := pem.Decode([]byte(r.GetCsr()))
	if b == nil {
		return nil, errors.New("no PEM")
	}
	csr, err := x509.ParseCertificateRequest(b.Bytes)
	if err != nil {
		return nil, err
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, err
	}
	serial := make([]byte, 16)
	_, _ = rand.Read(serial)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial), NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), URIs: []*url.URL{s.id},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}, s.root, csr.PublicKey, s.key)
	if err != nil {
		return nil, err
	}
	return &security.IstioCertificateResponse{CertChain: []string{string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), s.pem}}, nil
}

// CreateCertificate is the service of grpc-go.
func (s *bareSigner) CreateCertificate(ctx context.Context, r *security.IstioCertificateRequest) (*security.IstioCertificateResponse, error) {
	if md, _ := metadata.FromIncomingContext(ctx); len(md["authorization"]) != 1 || md["authorization"][0] != "Bearer web" {
		return nil, status.Error(codes.Unauthenticated, "")
	}
	return s.sign(r)
}

// ServeHTTP is the handler of net/http.
func (s *bareSigner) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<16))
	req := new(security.IstioCertificateRequest)
	if err != nil || len(body) < 5 || r.Header.Get("Authorization") != "Bearer web" || proto.Unmarshal(body[5:], req) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	resp, err := s.sign(req)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	msg, _ := proto.Marshal(resp)
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("Trailer", "Grpc-Status")
	_, _ = w.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...))
	w.Header().Set("Grpc-Status", "0")
}

// caProcess is a server in a process of its own.
type caProcess struct {
	in    io.Writer
	out   *bufio.Scanner
	addr  string
	roots *x509.CertPool
}

func startCAProcess(t testing.TB, kind string) *caProcess {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestRequestServer$")
	cmd.Env = append(os.Environ(), requestServer+"="+kind)
	cmd.Stderr = os.Stderr
	in := must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	p := &caProcess{in: in, out: bufio.NewScanner(out), roots: x509.NewCertPool()}
	t.Cleanup(func() {
		_ = in.Close()
		for p.out.Scan() {
		}
		_ = cmd.Wait()
	})
	require.True(t, p.out.Scan())
	var cert string
	must.Get(fmt.Sscan(p.out.Text(), &p.addr, &cert))(t)
	cert = must.Get(url.QueryUnescape(cert))(t)
	require.True(t, p.roots.AppendCertsFromPEM([]byte(cert)))
	return p
}

func (p *caProcess) cpu(t testing.TB) time.Duration {
	t.Helper()
	must.Get(io.WriteString(p.in, "\n"))(t)
	require.True(t, p.out.Scan())
	n := must.Get(strconv.ParseInt(p.out.Text(), 10, 64))(t)
	return time.Duration(n)
}

// BenchmarkCARequest measures the CPU time that a server needs for a request of Istio's certificate API: 32 clients of
// grpc-go with a connection each over TLS, P-256. Beside ours stand a server of grpc-go and a handler of net/http that
// do the same cryptography and nothing else.
func BenchmarkCARequest(b *testing.B) {
	for _, kind := range []string{"grpc-go", "net-http", "svidkit", "svidkit+audit"} {
		b.Run(kind, func(b *testing.B) {
			p := startCAProcess(b, kind)
			der, _ := requestFor(b)
			req := &security.IstioCertificateRequest{Csr: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})), ValidityDuration: 3600}
			ctx := metadata.AppendToOutgoingContext(b.Context(), "authorization", "Bearer web")
			clients := make([]security.IstioCertificateServiceClient, 32)
			for i := range clients {
				clients[i] = security.NewIstioCertificateServiceClient(dial(b, p.addr, credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: p.roots, ServerName: "127.0.0.1"})))
				resp := must.Get(clients[i].CreateCertificate(ctx, req))(b) // the handshake
				require.Len(b, resp.GetCertChain(), 2)
			}
			var left atomic.Int64
			left.Store(int64(b.N))
			before := p.cpu(b)
			b.ResetTimer()
			var wg sync.WaitGroup
			for _, c := range clients {
				wg.Go(func() {
					for left.Add(-1) >= 0 {
						if _, err := c.CreateCertificate(ctx, req); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			b.ReportMetric(float64((p.cpu(b)-before).Microseconds())/float64(b.N), "server-cpu-µs/op")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}
