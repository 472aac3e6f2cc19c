package compare

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/linkerd/linkerd2-proxy-api/go/identity"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	security "istio.io/api/security/v1alpha1"

	"github.com/svidkit/svidkit/internal/test/must"
)

// TestCAProgram starts examples/ca as a user does, and gets certificates from it over both APIs with
// clients of grpc-go that are built from the published definitions.
func TestCAProgram(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds a program")
	}
	dir := t.TempDir()
	program := filepath.Join(dir, "ca")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./examples/ca")
	build.Dir = filepath.Join("..", "..")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	cmd := exec.Command(program, "-state-dir", filepath.Join(dir, "state"), "-create",
		"-istio-addr", "127.0.0.1:0", "-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "", "-admin-addr", "")
	stdout := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		assert.NoError(t, cmd.Wait())
	})
	at := make(map[string]string) // what the program says
	for lines := bufio.NewScanner(stdout); at["Linkerd's API"] == "" && lines.Scan(); {
		what, where, _ := strings.Cut(lines.Text(), ":")
		at[what] = strings.TrimSpace(where)
	}
	host := func(what string) string {
		u := must.Get(url.Parse(at[what]))(t)
		require.NotEmpty(t, u.Host, "%s in %v", what, at)
		return u.Host
	}
	file := must.Get(os.ReadFile(at["roots in PEM"]))(t)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(file))
	creds := credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: "localhost"})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	secret := must.Get(os.ReadFile(filepath.Join(filepath.Dir(at["roots in PEM"]), "token-secret")))(t)
	der, _ := requestFor(t)
	bearer := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+string(secret)+":demo/web")
	istio, err := security.NewIstioCertificateServiceClient(dial(t, host("Istio's API"), creds)).CreateCertificate(bearer, &security.IstioCertificateRequest{
		Csr:              string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})),
		ValidityDuration: 3600,
	})
	require.NoError(t, err)
	block, _ := pem.Decode([]byte(istio.GetCertChain()[0]))
	leaf := must.Get(x509.ParseCertificate(block.Bytes))(t)
	must.Get(leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}))(t)
	require.Len(t, leaf.URIs, 1)
	assert.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", leaf.URIs[0].String())

	const name = "web.demo.serviceaccount.identity.linkerd.cluster.local"
	der, _ = requestFor(t, name)
	answer, err := identity.NewIdentityClient(dial(t, host("Linkerd's API"), creds)).Certify(ctx, &identity.CertifyRequest{
		Identity: name, Token: []byte(string(secret) + ":demo/web"), CertificateSigningRequest: der,
	})
	require.NoError(t, err)
	leaf = must.Get(x509.ParseCertificate(answer.GetLeafCertificate()))(t)
	must.Get(leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}))(t)
	assert.True(t, leaf.NotAfter.Equal(answer.GetValidUntil().AsTime()))
}
