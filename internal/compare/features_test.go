package compare

import (
	"crypto/tls"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	peerwit "github.com/spiffe/go-spiffe/v2/exp/svid/witsvid"
	peerfederation "github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffegrpc/grpccredentials"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	peertls "github.com/spiffe/go-spiffe/v2/spiffetls"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// features are what either exports. A function stands for "yes" and is named, a text for itself, and
// nil for "no".
var features = []struct {
	name       string
	ours, peer any
}{
	{"parse a SPIFFE ID", spiffe.ParseID, spiffeid.FromString},
	{"longest SPIFFE ID that is accepted", "2,048 bytes", "no bound"},
	{"policies as values", spiffe.AllowIDs, spiffeid.MatchID},
	{"policies as text", spiffe.ParsePolicy, nil},
	{"bundle documents", spiffe.ParseBundle, spiffebundle.Parse},
	{"an entry of a bundle document that cannot be used", "is skipped", "refuses the document"},
	{"bundle maps", spiffe.ParseBundleMap, nil},
	{"verify an X.509-SVID", spiffe.NewVerifier, x509svid.Verify},
	{"verified chains that are remembered", "1,024", "0"},
	{"mutual TLS", spiffetls.New, tlsconfig.MTLSServerConfig},
	{"lowest TLS version by default", minVersion(ourEndpoint().ServerConfig()),
		minVersion(tlsconfig.MTLSServerConfig(nil, nil, tlsconfig.AuthorizeAny()), nil)},
	{"TLS with an identity on one side", "`OptionalIdentity`, `AllowAnonymousClients`", tlsconfig.TLSServerConfig},
	{"TLS with a certificate of the web on one side", "`WebCertificate`, `WebRoots`", tlsconfig.MTLSWebServerConfig},
	{"dial and listen", "`Endpoint.DialContext`, `Endpoint.Listener`", peertls.Dial},
	{"the peer of a net/http request", spiffetls.PeerFromContext, nil},
	{"a policy for each host", "`Config.Hosts`", nil},
	{"transport credentials for grpc-go", spiffegrpc.ServerCredentials, grpccredentials.MTLSServerCredentials},
	{"validate a JWT-SVID", jwtsvid.NewValidator, peerjwt.ParseAndValidate},
	{"validated tokens that are remembered", "1,000", "0"},
	{"issue a JWT-SVID", jwtsvid.NewIssuer, nil},
	{"keep JWT-SVIDs that were fetched", jwtsvid.NewCache, nil},
	{"present and check JWT-SVIDs in net/http", jwtsvid.Middleware, nil},
	{"validate a WIT-SVID", witsvid.NewValidator, peerwit.ParseAndValidate},
	{"issue a WIT-SVID", witsvid.NewIssuer, nil},
	{"prove possession of a WIT-SVID", (*witsvid.Prover).Prove, nil},
	{"Workload API, client", workloadapi.NewClient, peerapi.New},
	{"Workload API, identity that stays current", workloadapi.Start, peerapi.NewX509Source},
	{"Workload API, server", workloadserver.NewHandler, nil},
	{"Workload API, named pipes of Windows", "with a client of the caller's", "`workloadapi.WithNamedPipeName`"},
	{"federation, fetch a bundle", federation.Fetch, peerfederation.FetchBundle},
	{"federation, serve a bundle", federation.NewHandler, peerfederation.NewHandler},
	{"signing requests and certificates", pki.NewCSR, nil},
	{"a certificate authority", ca.New, nil},
	{"identities kept current by signing requests", secretcache.Start, nil},
	{"Envoy's secret discovery, server", sds.NewHandler, nil},
	{"identities for tests", spiffetest.NewCA, nil},
}

func printFeatures(w io.Writer) {
	fmt.Fprintln(w, "| feature | svidkit | go-spiffe |")
	fmt.Fprintln(w, "|---|---|---|")
	for _, f := range features {
		fmt.Fprintf(w, "| %s | %s | %s |\n", f.name, describe(f.ours), describe(f.peer))
	}
}

func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "no"
	case string:
		return v
	}
	name := runtime.FuncForPC(reflect.ValueOf(v).Pointer()).Name()
	return "`" + name[strings.LastIndexByte(name, '/')+1:] + "`"
}

func ourEndpoint() *spiffetls.Endpoint {
	e, err := spiffetls.New(spiffetls.Config{Self: nothing{}, Peers: nothing{}, Allow: spiffe.AllowAnyPeer()})
	if err != nil {
		panic(err)
	}
	return e
}

func minVersion(c *tls.Config, err error) string {
	if err != nil {
		return err.Error()
	}
	return tls.VersionName(c.MinVersion)
}

// nothing is a source that is never asked.
type nothing struct{}

func (nothing) SVID() (*spiffe.SVID, error)                       { return nil, spiffe.ErrZero }
func (nothing) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, spiffe.ErrZero }
