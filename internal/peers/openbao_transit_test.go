package peers_test

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// transitPolicy is the policy that the documentation of Transit asks for.
func transitPolicy(t testing.TB) string {
	t.Helper()
	source := must.Get(os.ReadFile("../../caclient/vault/transit.go"))(t)
	lines := regexp.MustCompile(`(?m)^//\t(path .*|  .*)$`).FindAllStringSubmatch(string(source), -1)
	require.NotEmpty(t, lines)
	var policy strings.Builder
	for _, line := range lines {
		policy.WriteString(line[1] + "\n")
	}
	return policy.String()
}

// mountTransit mounts an engine with the key that seals, as the documentation says.
func mountTransit(t testing.TB, b *peers.OpenBao, namespace string) {
	t.Helper()
	b.Do(t, namespace, http.MethodPost, "sys/mounts/transit", doc{"type": "transit"}, nil)
	b.Do(t, namespace, http.MethodPost, "transit/keys/seal", doc{"type": "aes256-gcm96"}, nil)
}

// newTransit returns our client of it.
func newTransit(t testing.TB, b *peers.OpenBao, token string, edit ...func(*vault.TransitOptions)) *vault.Transit {
	t.Helper()
	o := vault.TransitOptions{SealKey: "seal", Endpoint: caclient.Endpoint{URL: b.URL, RootsFile: b.RootsFile}}
	if token != "" {
		o.Token = func(context.Context) (string, error) { return token, nil }
	}
	for _, e := range edit {
		e(&o)
	}
	return must.Get(vault.NewTransit(o))(t)
}

// TestOpenBaoTransit has a real OpenBao pass the suites, with exactly the documented policy.
func TestOpenBaoTransit(t *testing.T) {
	t.Parallel()
	b := peers.NewOpenBao(t)
	mountTransit(t, b, "")
	token := b.Token(t, transitPolicy(t))
	with := func(key string) func(testing.TB) ca.Sealer {
		return func(t testing.TB) ca.Sealer {
			return newTransit(t, b, token, func(o *vault.TransitOptions) { o.SealKey = key })
		}
	}
	custodiantest.Run(t, func(t testing.TB) ca.Custodian { return newTransit(t, b, token) }, custodiantest.Options{})
	b.Do(t, "", http.MethodPost, "transit/keys/other", doc{"type": "aes256-gcm96"}, nil)
	b.Policy(t, "of-a-token", strings.NewReplacer("/seal\"", "/+\"").Replace(transitPolicy(t)))
	custodiantest.Sealer(t, with("seal"), with("other"), with("missing"))
}

var (
	_ = rand.Reader
	_ = sha256.New
	_ = tls.VersionTLS13
	_ = x509.NewCertPool
	_ = pem.Decode
	_ = errors.New
	_ = fs.ErrExist
	_ = time.Now
	_ = assert.Equal
	_ = spiffe.ParseID
	_ = pki.NewKey
	_ crypto.Signer
)
