package istioagent

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
)

// The order of the files with roots, for the connection to the CA and that for xDS. "-" is the host's roots, and "!" an error
// that has the text.
func TestRootsFile(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.3-1", "IST-6.3-2", "IST-6.3-3", "IST-6.3-4", "IST-6.3-5", "IST-6.3-6", "IST-6.3-7", "IST-6.3-8", "IST-9.2-3", "IST-9.2-4", "IST-9.2-8")
	const etc, pod = "./etc/certs/root-cert.pem", "./var/run/secrets/istio/root-cert.pem"
	for _, c := range []struct{ env, files, ca, xds string }{
		// The last rule.
		{"", pod, pod, pod},
		{"", "", "!no regular file " + pod + ", and it is the default: set CA_ROOT_CA", "!no regular file " + pod + ", and it is the default: set XDS_ROOT_CA"},
		{"PILOT_CERT_PROVIDER=istiod", pod, pod, pod},
		{"PILOT_CERT_PROVIDER=k8s.io/signer", pod, pod, pod},
		{"", pod + " " + etc, pod, etc},
		{"", etc, "!no regular file " + pod, etc},

		// The first two rules, before everything.
		{"CA_ROOT_CA=SYSTEM XDS_ROOT_CA=SYSTEM", "", "-", "-"},
		{"CA_ROOT_CA=SYSTEM XDS_ROOT_CA=SYSTEM PROV_CERT=/p PILOT_CERT_PROVIDER=none FILE_MOUNTED_CERTS=true", etc, "-", "-"},
		{"CA_ROOT_CA=./ca XDS_ROOT_CA=./xds", "./ca ./xds", "./ca", "./xds"},
		{"CA_ROOT_CA=./ca XDS_ROOT_CA=./xds PROV_CERT=/p PILOT_CERT_PROVIDER=none FILE_MOUNTED_CERTS=true", "./ca ./xds " + etc, "./ca", "./xds"},
		{"CA_ROOT_CA=./ca XDS_ROOT_CA=./xds PILOT_CERT_PROVIDER=custom", "./ca ./xds " + etc, "./ca", "./xds"},
		{"CA_ROOT_CA=./ca XDS_ROOT_CA=./xds", pod + " " + etc, "!no regular file ./ca, and CA_ROOT_CA names it: set CA_ROOT_CA",
			"!no regular file ./xds, and XDS_ROOT_CA names it: set XDS_ROOT_CA"},
		{"CA_ROOT_CA=system XDS_ROOT_CA=system", "", "!no regular file system", "!no regular file system"},
		{"CA_ROOT_CA=./ca", "./ca " + pod, "./ca", pod},
		{"XDS_ROOT_CA=./xds", "./xds " + pod, pod, "./xds"},

		// A custom provider, which counts before PROV_CERT, and for the CA only.
		{"PILOT_CERT_PROVIDER=custom", etc, etc, etc},
		{"PILOT_CERT_PROVIDER=custom PROV_CERT=/p", etc, etc, etc},
		{"PILOT_CERT_PROVIDER=custom", pod, "!no regular file " + etc + ", and PILOT_CERT_PROVIDER is custom: set CA_ROOT_CA", pod},
		{"PILOT_CERT_PROVIDER=custom PROV_CERT=/p", pod, "!no regular file " + etc, "/p/root-cert.pem"},

		// PROV_CERT, which is not looked for.
		{"PROV_CERT=/p", "", "/p/root-cert.pem", "/p/root-cert.pem"},
		{"PROV_CERT=/p/", pod, "/p/root-cert.pem", "/p/root-cert.pem"},
		{"PROV_CERT=/p", pod + " " + etc, "/p/root-cert.pem", etc},
		{"PROV_CERT=/p PILOT_CERT_PROVIDER=none", "", "/p/root-cert.pem", "/p/root-cert.pem"},
		{"PROV_CERT=/p FILE_MOUNTED_CERTS=true ISTIO_META_TLS_CLIENT_ROOT_CERT=/m", pod, "/p/root-cert.pem", "/p/root-cert.pem"},

		// Mounted files, for xDS only.
		{"FILE_MOUNTED_CERTS=true ISTIO_META_TLS_CLIENT_ROOT_CERT=/m", pod, pod, "/m"},
		{"FILE_MOUNTED_CERTS=true ISTIO_META_TLS_CLIENT_ROOT_CERT=/m", pod + " " + etc, pod, etc},
		{"FILE_MOUNTED_CERTS=true PILOT_CERT_PROVIDER=none ISTIO_META_TLS_CLIENT_ROOT_CERT=/m", pod, "!PILOT_CERT_PROVIDER is none", "/m"},
		{"FILE_MOUNTED_CERTS=false ISTIO_META_TLS_CLIENT_ROOT_CERT=/m", pod, pod, pod},
		{"ISTIO_META_TLS_CLIENT_ROOT_CERT=/m", pod, pod, pod},

		// No provider.
		{"PILOT_CERT_PROVIDER=none", pod, "!PILOT_CERT_PROVIDER is none: set CA_ROOT_CA", "!PILOT_CERT_PROVIDER is none: set XDS_ROOT_CA"},
		{"PILOT_CERT_PROVIDER=none", pod + " " + etc, "!PILOT_CERT_PROVIDER is none", etc},
	} {
		v := must.Get(variables.Read(strings.Fields(c.env)))(t)
		cfg := Config{Root: t.TempDir(), v: v, mountedRoots: v.Text("ISTIO_META_TLS_CLIENT_ROOT_CERT")}
		for name := range strings.FieldsSeq(c.files) {
			write(t, cfg.Root, name, []byte("roots"))
		}
		check := func(what, want string, find func() (string, error)) {
			got, err := find()
			at := fmt.Sprintf("%s with %q and %q", what, c.env, c.files)
			if text, bad := strings.CutPrefix(want, "!"); bad {
				require.ErrorContains(t, err, text, at)
				require.ErrorContains(t, err, "roots: ", at)
				assert.Empty(t, got, at)
				return
			}
			require.NoError(t, err, at)
			assert.Equal(t, strings.TrimPrefix(want, "-"), got, at)
		}
		check("CA", c.ca, cfg.caRootsFile)
		check("XDS", c.xds, cfg.xdsRootsFile)
	}
}
