package compare

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	peerfederation "github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	peertls "github.com/spiffe/go-spiffe/v2/spiffetls"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// callsPage is the page for people who come from go-spiffe. The tables in it are written from this file.
const callsPage = "../../spiffe/gospiffe/README.md"

var updateCalls = flag.Bool("update-calls", false, "write the tables of "+callsPage+" again")

// common is what the code of both sides finds in a program: values that belong to neither library.
type common struct {
	ctx                              context.Context
	address, name, certFile, keyFile string // of the Workload API, of an ID, of files
	uri                              *url.URL
	certPEM, keyPEM, certDER, keyDER []byte
	rootsFile                        string
	rootsDER, doc                    []byte
	chain                            []*x509.Certificate
	key                              crypto.Signer
	root, newRoot                    *x509.Certificate
	keys                             map[string]crypto.PublicKey
	keyID                            string
	token, url, addr                 string // addr is that of a server of go-spiffe, url that of a bundle endpoint
	webRoots                         *x509.CertPool
	webCertificate                   *tls.Certificate
	state                            tls.ConnectionState // of a connection to that server
	web, db                          *tls.Config         // clients of go-spiffe: /web and /db
}

// theirProgram is that and the values of go-spiffe, and ourProgram that and the same values of this library.
type theirProgram struct {
	common
	td, partnerTD  spiffeid.TrustDomain
	id, endpointID spiffeid.ID
	svid           *x509svid.SVID
	bundle         *spiffebundle.Bundle
	partner        *spiffebundle.Bundle
	source         *peerapi.X509Source
	jwtSource      *peerapi.JWTSource
	client         *peerapi.Client
}

type ourProgram struct {
	common
	td, partnerTD  spiffe.TrustDomain
	id, endpointID spiffe.ID
	svid           *spiffe.SVID
	bundle         *spiffe.Bundle
	partner        *spiffe.Bundle
	source         *workloadapi.Source
	client         *workloadapi.Client
	policy         spiffe.Policy
}

// call is a call of go-spiffe and what takes its place. The statements up to the first empty line are on the
// page; both run, and return the same.
type call struct {
	like []any // calls of go-spiffe to which the same applies
	note string
	from func(t *testing.T, e theirProgram) any
	to   func(t *testing.T, e ourProgram) any
}

// calls are the calls by subject, in the order of the page.
var calls = []struct {
	subject string
	calls   []call
}{
	{"IDs and trust domains", []call{
		{like: []any{spiffeid.FromStringf, spiffeid.FromURI}, note: "An ID in a certificate: `spiffe.IDFromCertificate`.", from: func(t *testing.T, e theirProgram) any {
			id, err := spiffeid.FromString(e.name)

			require.NoError(t, err)
			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			id, err := spiffe.ParseID(e.name)

			require.NoError(t, err)
			return id.String()
		}},
		{like: []any{
			spiffeid.RequireFromStringf, spiffeid.RequireFromURI, spiffeid.RequireFromPath, spiffeid.RequireFromPathf, spiffeid.RequireFromSegments,
			spiffeid.RequireFormatPath, spiffeid.RequireJoinPathSegments,
		}, note: "For constants; other text is parsed.", from: func(t *testing.T, e theirProgram) any {
			id := spiffeid.RequireFromString("spiffe://example.org/web")

			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			id := spiffe.MustParseID("spiffe://example.org/web")

			return id.String()
		}},
		{like: []any{spiffeid.JoinPathSegments, spiffeid.ValidatePathSegment}, from: func(t *testing.T, e theirProgram) any {
			id, err := spiffeid.FromSegments(e.td, "ns", "prod", "sa", "web")

			require.NoError(t, err)
			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			id, err := e.td.WorkloadID("ns", "prod", "sa", "web")

			require.NoError(t, err)
			return id.String()
		}},
		{like: []any{spiffeid.FromPathf, spiffeid.FormatPath, spiffeid.ValidatePath, spiffeid.ID.ReplacePath}, from: func(t *testing.T, e theirProgram) any {
			id, err := spiffeid.FromPath(e.td, "/ns/prod")

			require.NoError(t, err)
			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			id, err := spiffe.ParseID(e.td.ID().String() + "/ns/prod")

			require.NoError(t, err)
			return id.String()
		}},
		{like: []any{spiffeid.ID.AppendSegments}, from: func(t *testing.T, e theirProgram) any {
			id, err := e.id.AppendPath("/replica/1")

			require.NoError(t, err)
			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			id, err := spiffe.ParseID(e.id.String() + "/replica/1")

			require.NoError(t, err)
			return id.String()
		}},
		{like: []any{spiffeid.RequireTrustDomainFromString}, note: "The name alone; of an ID take `TrustDomain()`.", from: func(t *testing.T, e theirProgram) any {
			td, err := spiffeid.TrustDomainFromString("example.org")

			require.NoError(t, err)
			return td.Name()
		}, to: func(t *testing.T, e ourProgram) any {
			td, err := spiffe.ParseTrustDomain("example.org")

			require.NoError(t, err)
			return td.String()
		}},
		{like: []any{spiffeid.RequireTrustDomainFromURI}, from: func(t *testing.T, e theirProgram) any {
			td, err := spiffeid.TrustDomainFromURI(e.uri)

			require.NoError(t, err)
			return td.Name()
		}, to: func(t *testing.T, e ourProgram) any {
			id, err := spiffe.ParseID(e.uri.String())
			td := id.TrustDomain()

			require.NoError(t, err)
			return td.String()
		}},
		{note: "`Path`, `TrustDomain`, `URL`, `String`, `IsZero` and the text of JSON have the same names; the zero ID is no JSON.", from: func(t *testing.T, e theirProgram) any {
			member := e.id.MemberOf(e.td)

			return member
		}, to: func(t *testing.T, e ourProgram) any {
			member := e.id.MemberOf(e.td)

			return member
		}},
		{from: func(t *testing.T, e theirProgram) any {
			text := e.td.IDString()

			return text
		}, to: func(t *testing.T, e ourProgram) any {
			text := e.td.ID().String()

			return text
		}},
	}},
	{"Which peers are allowed", []call{
		{like: []any{spiffeid.MatchAny}, note: "A policy is a value: it prints, it is read from text, and the default allows no peer.", from: func(t *testing.T, e theirProgram) any {
			allow := tlsconfig.AuthorizeAny()

			return allowed(allow)
		}, to: func(t *testing.T, e ourProgram) any {
			allow := spiffe.AllowAnyPeer()

			return allowedByUs(allow)
		}},
		{like: []any{spiffeid.MatchID, spiffeid.MatchOneOf, tlsconfig.AuthorizeOneOf}, from: func(t *testing.T, e theirProgram) any {
			allow := tlsconfig.AuthorizeID(e.id)

			return allowed(allow)
		}, to: func(t *testing.T, e ourProgram) any {
			allow := spiffe.AllowIDs(e.id)

			return allowedByUs(allow)
		}},
		{like: []any{spiffeid.MatchMemberOf}, note: "Workloads only: not the ID of the trust domain itself.", from: func(t *testing.T, e theirProgram) any {
			allow := tlsconfig.AuthorizeMemberOf(e.td)

			return allowed(allow)
		}, to: func(t *testing.T, e ourProgram) any {
			allow := spiffe.AllowMembersOf(e.td)

			return allowedByUs(allow)
		}},
		{like: []any{spiffeid.MatchIDPrefix}, note: "`AllowPathPrefix` is what is below the path.", from: func(t *testing.T, e theirProgram) any {
			allow := tlsconfig.AuthorizeIDPrefix(e.id)

			return allowed(allow)
		}, to: func(t *testing.T, e ourProgram) any {
			allow := spiffe.AnyOf(spiffe.AllowIDs(e.id), spiffe.AllowPathPrefix(e.td, e.id.Path()))

			return allowedByUs(allow)
		}},
		{note: "A function of the program. A decision about requests rather than connections belongs into the handler.", from: func(t *testing.T, e theirProgram) any {
			allow := tlsconfig.AdaptMatcher(func(id spiffeid.ID) error { return allowWeb(id.Path()) })

			return allowed(allow)
		}, to: func(t *testing.T, e ourProgram) any {
			allow := spiffe.AllowFunc(func(id spiffe.ID) error { return allowWeb(id.Path()) })

			return allowedByUs(allow)
		}},
	}},
	{"X.509-SVIDs", []call{
		{note: "Read once, on both sides.", from: func(t *testing.T, e theirProgram) any {
			svid, err := x509svid.Load(e.certFile, e.keyFile)

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			certs, err := os.ReadFile(e.certFile)
			key, err2 := os.ReadFile(e.keyFile)
			svid, err3 := spiffe.ParseSVIDPEM(certs, key)

			require.NoError(t, errors.Join(err, err2))
			require.NoError(t, err3)
			return svid.ID().String()
		}},
		{from: func(t *testing.T, e theirProgram) any {
			svid, err := x509svid.Parse(e.certPEM, e.keyPEM)

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			svid, err := spiffe.ParseSVIDPEM(e.certPEM, e.keyPEM)

			require.NoError(t, err)
			return svid.ID().String()
		}},
		{from: func(t *testing.T, e theirProgram) any {
			svid, err := x509svid.ParseRaw(e.certDER, e.keyDER)

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			svid, err := spiffe.ParseSVID(e.certDER, e.keyDER)

			require.NoError(t, err)
			return svid.ID().String()
		}},
		{note: "Checked when it is made, and fixed from then on.", from: func(t *testing.T, e theirProgram) any {
			svid := &x509svid.SVID{ID: e.id, Certificates: e.chain, PrivateKey: e.key}

			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			svid, err := spiffe.NewSVID(e.chain, e.key)

			require.NoError(t, err)
			return svid.ID().String()
		}},
		{note: "In DER: `MarshalDER` for `MarshalRaw`.", from: func(t *testing.T, e theirProgram) any {
			certs, key, err := e.svid.Marshal()

			require.NoError(t, err)
			return string(certs) + string(key)
		}, to: func(t *testing.T, e ourProgram) any {
			certs, key, err := e.svid.MarshalPEM()

			require.NoError(t, err)
			return string(certs) + string(key)
		}},
		{from: func(t *testing.T, e theirProgram) any {
			svid, err := e.source.GetX509SVID()

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			svid, err := e.source.SVID()

			require.NoError(t, err)
			return svid.ID().String()
		}},
		{like: []any{x509svid.ParseAndVerify}, note: "The verifier is kept, and remembers the chains that it has verified. The role is the side that the peer is on.", from: func(t *testing.T, e theirProgram) any {
			id, chains, err := x509svid.Verify(e.chain, e.source)

			require.NoError(t, err)
			require.Len(t, chains, 1)
			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			verifier, err := spiffe.NewVerifier(e.source, spiffe.AllowAnyPeer(), nil)
			peer, err2 := verifier.VerifyChain(e.chain, spiffe.ClientRole)

			require.NoError(t, errors.Join(err, err2))
			return peer.ID().String()
		}},
		{from: func(t *testing.T, e theirProgram) any {
			_, _, err := x509svid.Verify(e.chain, e.source, x509svid.WithTime(time.Now().Add(24*time.Hour)))

			return err != nil
		}, to: func(t *testing.T, e ourProgram) any {
			tomorrow := func() time.Time { return time.Now().Add(24 * time.Hour) }
			verifier, err := spiffe.NewVerifier(e.source, spiffe.AllowAnyPeer(), tomorrow)

			require.NoError(t, err)
			_, err = verifier.VerifyChain(e.chain, spiffe.ClientRole)
			return err != nil
		}},
		{note: "A claim, not a proof.", from: func(t *testing.T, e theirProgram) any {
			id, err := x509svid.IDFromCert(e.chain[0])

			require.NoError(t, err)
			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			id, err := spiffe.IDFromCertificate(e.chain[0])

			require.NoError(t, err)
			return id.String()
		}},
	}},
	{"Bundles", []call{
		{like: []any{x509bundle.Read, x509bundle.Parse}, from: func(t *testing.T, e theirProgram) any {
			bundle, err := x509bundle.Load(e.td, e.rootsFile)

			require.NoError(t, err)
			return len(bundle.X509Authorities())
		}, to: func(t *testing.T, e ourProgram) any {
			roots, err := os.ReadFile(e.rootsFile)
			bundle, err2 := spiffe.ParseBundlePEM(e.td, roots)

			require.NoError(t, errors.Join(err, err2))
			return len(bundle.Contents().X509Authorities)
		}},
		{from: func(t *testing.T, e theirProgram) any {
			bundle, err := x509bundle.ParseRaw(e.td, e.rootsDER)

			require.NoError(t, err)
			return len(bundle.X509Authorities())
		}, to: func(t *testing.T, e ourProgram) any {
			certs, err := x509.ParseCertificates(e.rootsDER)
			bundle, err2 := spiffe.NewBundle(e.td, spiffe.BundleContents{X509Authorities: certs})

			require.NoError(t, errors.Join(err, err2))
			return len(bundle.Contents().X509Authorities)
		}},
		{like: []any{
			x509bundle.New, spiffebundle.New, spiffebundle.FromX509Authorities, spiffebundle.FromX509Bundle, spiffebundle.FromWITAuthorities, spiffebundle.FromWITBundle,
		}, note: "One type for all kinds of authorities.", from: func(t *testing.T, e theirProgram) any {
			bundle := x509bundle.FromX509Authorities(e.td, []*x509.Certificate{e.root})

			return bundle.HasX509Authority(e.root)
		}, to: func(t *testing.T, e ourProgram) any {
			bundle, err := spiffe.NewBundle(e.td, spiffe.BundleContents{X509Authorities: []*x509.Certificate{e.root}})

			require.NoError(t, err)
			return slices.ContainsFunc(slices.Collect(bundle.X509Authorities()), e.root.Equal)
		}},
		{like: []any{jwtbundle.New, spiffebundle.FromJWTAuthorities, spiffebundle.FromJWTBundle}, from: func(t *testing.T, e theirProgram) any {
			bundle := jwtbundle.FromJWTAuthorities(e.td, e.keys)

			return bundle.HasJWTAuthority(e.keyID)
		}, to: func(t *testing.T, e ourProgram) any {
			bundle, err := spiffe.NewBundle(e.td, spiffe.BundleContents{JWTAuthorities: e.keys})

			require.NoError(t, err)
			_, ok := bundle.JWTAuthority(e.keyID)
			return ok
		}},
		{like: []any{spiffebundle.Load, spiffebundle.Read}, note: "A document of more than 1 MiB is refused; an entry that cannot be used is skipped, see `Skipped`.", from: func(t *testing.T, e theirProgram) any {
			bundle, err := spiffebundle.Parse(e.td, e.doc)

			require.NoError(t, err)
			return len(bundle.X509Authorities()) + len(bundle.JWTAuthorities())
		}, to: func(t *testing.T, e ourProgram) any {
			bundle, err := spiffe.ParseBundle(e.td, e.doc)

			require.NoError(t, err)
			return len(bundle.Contents().X509Authorities) + len(bundle.Contents().JWTAuthorities)
		}},
		{note: "Only the X.509 authorities, in PEM: `MarshalPEM`.", from: func(t *testing.T, e theirProgram) any {
			doc, err := e.bundle.Marshal()

			require.NoError(t, err)
			back, err := spiffebundle.Parse(e.td, doc)
			require.NoError(t, err)
			return back.Equal(e.bundle)
		}, to: func(t *testing.T, e ourProgram) any {
			doc, err := e.bundle.Marshal()

			require.NoError(t, err)
			back, err := spiffe.ParseBundle(e.td, doc)
			require.NoError(t, err)
			return back.Equal(e.bundle)
		}},
		{note: "Bundles never change, so that a new one is made. `RemoveX509Authority`, `SetSequenceNumber` and the others: likewise.", from: func(t *testing.T, e theirProgram) any {
			e.bundle.AddX509Authority(e.newRoot)

			return len(e.bundle.X509Authorities())
		}, to: func(t *testing.T, e ourProgram) any {
			parts := e.bundle.Contents()
			parts.X509Authorities = append(parts.X509Authorities, e.newRoot)
			bundle, err := spiffe.NewBundle(e.td, parts)

			require.NoError(t, err)
			return len(bundle.Contents().X509Authorities)
		}},
		{from: func(t *testing.T, e theirProgram) any {
			key, ok := e.bundle.FindJWTAuthority(e.keyID)

			require.NotNil(t, key)
			return ok
		}, to: func(t *testing.T, e ourProgram) any {
			key, ok := e.bundle.JWTAuthority(e.keyID)

			require.NotNil(t, key)
			return ok
		}},
		{like: []any{x509bundle.NewSet, jwtbundle.NewSet}, note: "`Add` is `With`, `Get` is `Bundle`, `Bundles` is `All`.", from: func(t *testing.T, e theirProgram) any {
			set := spiffebundle.NewSet(e.bundle, e.partner)

			return set.Len()
		}, to: func(t *testing.T, e ourProgram) any {
			set, err := spiffe.NewBundleSet(e.bundle, e.partner)

			require.NoError(t, err)
			return set.Len()
		}},
		{like: []any{(*peerapi.BundleSource).GetJWTBundleForTrustDomain, (*peerapi.BundleSource).GetBundleForTrustDomain}, from: func(t *testing.T, e theirProgram) any {
			bundle, err := e.source.GetX509BundleForTrustDomain(e.td)

			require.NoError(t, err)
			return len(bundle.X509Authorities())
		}, to: func(t *testing.T, e ourProgram) any {
			bundle, err := e.source.Bundle(e.td)

			require.NoError(t, err)
			return len(bundle.Contents().X509Authorities)
		}},
	}},
	{"The Workload API", []call{
		{note: "It ends with `Close`, as there. `New` and `Run` are the same in two steps.", from: func(t *testing.T, e theirProgram) any {
			source, err := peerapi.NewX509Source(e.ctx, peerapi.WithClientOptions(peerapi.WithAddr(e.address)))

			require.NoError(t, err)
			defer source.Close()
			svid, err := source.GetX509SVID()
			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			source, err := workloadapi.Start(e.ctx, workloadapi.Config{Address: e.address})

			require.NoError(t, err)
			defer source.Close()
			svid, err := source.SVID()
			require.NoError(t, err)
			return svid.ID().String()
		}},
		{note: "By another rule: `source.X509` has all identities. Several at a time: a source for each hint, with one `Client`.", like: []any{peerapi.WithDefaultJWTSVIDPicker}, from: func(t *testing.T, e theirProgram) any {
			pick := peerapi.WithDefaultX509SVIDPicker(func(all []*x509svid.SVID) *x509svid.SVID {
				return all[slices.IndexFunc(all, func(s *x509svid.SVID) bool { return s.Hint == "internal" })]
			})

			source, err := peerapi.NewX509Source(e.ctx, peerapi.WithClientOptions(peerapi.WithAddr(e.address)), pick)
			require.NoError(t, err)
			defer source.Close()
			svid, err := source.GetX509SVID()
			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			config := workloadapi.Config{Address: e.address, Hint: "internal"}

			source, err := workloadapi.Start(e.ctx, config)
			require.NoError(t, err)
			defer source.Close()
			svid, err := source.SVID()
			require.NoError(t, err)
			return svid.ID().String()
		}},
		{like: []any{peerapi.WithClient}, note: "One source for both; the cache keeps tokens until half of their life is over.", from: func(t *testing.T, e theirProgram) any {
			source, err := peerapi.NewJWTSource(e.ctx, peerapi.WithClientOptions(peerapi.WithAddr(e.address)))

			require.NoError(t, err)
			defer source.Close()
			bundle, err := source.GetJWTBundleForTrustDomain(e.td)
			require.NoError(t, err)
			return len(bundle.JWTAuthorities())
		}, to: func(t *testing.T, e ourProgram) any {
			source, err := workloadapi.Start(e.ctx, workloadapi.Config{Address: e.address, JWTBundles: true})
			tokens, err2 := jwtsvid.NewCache(source, nil)

			require.NoError(t, errors.Join(err, err2))
			defer source.Close()
			_, err = tokens.Fetch(e.ctx, "db")
			require.NoError(t, err)
			bundle, err := source.Bundle(e.td)
			require.NoError(t, err)
			return len(bundle.Contents().JWTAuthorities)
		}},
		{from: func(t *testing.T, e theirProgram) any {
			source, err := peerapi.NewBundleSource(e.ctx, peerapi.WithClientOptions(peerapi.WithAddr(e.address)))

			require.NoError(t, err)
			defer source.Close()
			bundle, err := source.GetBundleForTrustDomain(e.td)
			require.NoError(t, err)
			return len(bundle.X509Authorities()) + len(bundle.JWTAuthorities())
		}, to: func(t *testing.T, e ourProgram) any {
			source, err := workloadapi.Start(e.ctx, workloadapi.Config{Address: e.address, BundlesOnly: true, JWTBundles: true})

			require.NoError(t, err)
			defer source.Close()
			bundle, err := source.Bundle(e.td)
			require.NoError(t, err)
			return len(bundle.Contents().X509Authorities) + len(bundle.Contents().JWTAuthorities)
		}},
		{like: []any{(*peerapi.JWTSource).Close, (*peerapi.BundleSource).Close}, note: "What was received stays readable.", from: func(t *testing.T, e theirProgram) any {
			source, err := peerapi.NewX509Source(e.ctx, peerapi.WithClientOptions(peerapi.WithAddr(e.address)))
			require.NoError(t, err)
			return first(func() any {
				err = source.Close()

				return err
			})
		}, to: func(t *testing.T, e ourProgram) any {
			source, err := workloadapi.Start(e.ctx, workloadapi.Config{Address: e.address})
			require.NoError(t, err)
			return first(func() any {
				err = source.Close()

				return err
			})
		}},
		{note: "For `WaitUntilUpdated(ctx)`, receive from the same channel.", like: []any{(*peerapi.JWTSource).Updated, (*peerapi.BundleSource).Updated}, from: func(t *testing.T, e theirProgram) any {
			changed := e.source.Updated()

			return changed != nil
		}, to: func(t *testing.T, e ourProgram) any {
			changed := e.source.Changed()

			return changed != nil
		}},
		{note: "It connects when it is used.", from: func(t *testing.T, e theirProgram) any {
			client, err := peerapi.New(e.ctx, peerapi.WithAddr(e.address))

			require.NoError(t, err)
			return client.Close()
		}, to: func(t *testing.T, e ourProgram) any {
			client, err := workloadapi.NewClient(e.address, nil)

			require.NoError(t, err)
			client.CloseIdleConnections()
			return nil
		}},
		{like: []any{peerapi.ValidateAddress}, note: "A program decides whether it reads the environment.", from: func(t *testing.T, e theirProgram) any {
			address, ok := peerapi.GetDefaultAddress()

			return fmt.Sprint(address, ok)
		}, to: func(t *testing.T, e ourProgram) any {
			address, ok := os.LookupEnv(workloadapi.SocketEnv)

			return fmt.Sprint(address, ok)
		}},
		{like: []any{
			peerapi.FetchX509SVIDs, peerapi.FetchX509Bundles, (*peerapi.Client).FetchX509SVID, (*peerapi.Client).FetchX509SVIDs, (*peerapi.Client).FetchX509Context, peerapi.FetchX509Context, (*peerapi.X509Context).DefaultSVID,
		}, note: "Or the first of `client.WatchX509SVIDs(ctx)`, which has all identities and bundles.", from: func(t *testing.T, e theirProgram) any {
			svid, err := peerapi.FetchX509SVID(e.ctx, peerapi.WithAddr(e.address))

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			source, err := workloadapi.Start(e.ctx, workloadapi.Config{Address: e.address})
			svid, err2 := source.SVID()

			require.NoError(t, errors.Join(err, err2))
			require.NoError(t, source.Close())
			return svid.ID().String()
		}},
		{like: []any{peerapi.WatchX509Context}, note: "A loop in the place of a watcher. An error that is final ends it.", from: func(t *testing.T, e theirProgram) any {
			ctx, cancel := context.WithCancel(e.ctx)
			defer cancel()
			w := watcher{func(c *peerapi.X509Context) { cancel() }}
			err := e.client.WatchX509Context(ctx, w)

			require.Error(t, err)
			return ctx.Err() != nil
		}, to: func(t *testing.T, e ourProgram) any {
			ctx, cancel := context.WithCancel(e.ctx)
			defer cancel()
			for update, err := range e.client.WatchX509SVIDs(ctx) {
				if err == nil && len(update.Identities) > 0 {
					cancel()
				}
			}

			return ctx.Err() != nil
		}},
		{like: []any{peerapi.WatchX509Bundles, (*peerapi.Client).FetchX509Bundles, peerapi.WatchJWTBundles, (*peerapi.Client).WatchJWTBundles, (*peerapi.Client).FetchJWTBundles}, from: func(t *testing.T, e theirProgram) any {
			ctx, cancel := context.WithCancel(e.ctx)
			defer cancel()
			w := bundleWatcher{make(chan *x509bundle.Set, 8)}
			go func() { <-w.updates; cancel() }()
			err := e.client.WatchX509Bundles(ctx, w)

			require.Error(t, err)
			return ctx.Err() != nil
		}, to: func(t *testing.T, e ourProgram) any {
			ctx, cancel := context.WithCancel(e.ctx)
			defer cancel()
			for update, err := range e.client.WatchX509Bundles(ctx) {
				if err == nil && update.Bundles.Len() > 0 {
					cancel()
				}
			}

			return ctx.Err() != nil
		}},
		{like: []any{peerapi.FetchJWTSVIDs, (*peerapi.Client).FetchJWTSVID, (*peerapi.Client).FetchJWTSVIDs}, note: "The first is the default. `Token` returns the token.", from: func(t *testing.T, e theirProgram) any {
			svid, err := peerapi.FetchJWTSVID(e.ctx, peerjwt.Params{Audience: "db", Subject: e.id}, peerapi.WithAddr(e.address))

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			svids, err := e.client.FetchJWTSVIDs(e.ctx, e.id, "db")

			require.NoError(t, err)
			return svids[0].ID.String()
		}},
		{like: []any{(*peerapi.JWTSource).FetchJWTSVIDs}, from: func(t *testing.T, e theirProgram) any {
			svid, err := e.jwtSource.FetchJWTSVID(e.ctx, peerjwt.Params{Audience: "db", ExtraAudiences: []string{"cache"}})

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			token, err := e.source.Fetch(e.ctx, "db", "cache")

			require.NoError(t, err)
			claims, err := jwtsvid.ParseUnverified(token)
			require.NoError(t, err)
			return claims.ID.String()
		}},
		{like: []any{(*peerapi.Client).ValidateJWTSVID}, from: func(t *testing.T, e theirProgram) any {
			svid, err := peerapi.ValidateJWTSVID(e.ctx, e.token, "db", peerapi.WithAddr(e.address))

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			id, claims, err := e.client.ValidateJWTSVID(e.ctx, "db", e.token)

			require.NoError(t, err)
			require.NotEmpty(t, claims)
			return id.String()
		}},
		{like: []any{peerapi.FetchJWTBundles}, from: func(t *testing.T, e theirProgram) any {
			bundles, err := e.client.FetchJWTBundles(e.ctx)

			require.NoError(t, err)
			return bundles.Has(e.td)
		}, to: func(t *testing.T, e ourProgram) any {
			bundle, err := e.source.Bundle(e.td) // with Config.JWTBundles

			require.NoError(t, err)
			return bundle.TrustDomain() == e.td
		}},
	}},
	{"TLS", []call{
		{like: []any{tlsconfig.HookMTLSServerConfig}, note: "TLS 1.3 unless `MinVersion` is 1.2. For net/http: `endpoint.ConfigureServer`.", from: func(t *testing.T, e theirProgram) any {
			config := tlsconfig.MTLSServerConfig(e.source, e.source, tlsconfig.AuthorizeMemberOf(e.td))

			return met(t, config, e.web)
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowMembersOf(e.td)})
			config, err2 := endpoint.ServerConfig()

			require.NoError(t, errors.Join(err, err2))
			return met(t, config, e.web)
		}},
		{like: []any{tlsconfig.HookMTLSClientConfig}, note: "For net/http: `endpoint.Transport`, with `Hosts` in place of `Allow` for a policy per address.", from: func(t *testing.T, e theirProgram) any {
			config := tlsconfig.MTLSClientConfig(e.source, e.source, tlsconfig.AuthorizeID(e.id))

			return dialed(t, e.addr, config)
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowIDs(e.id)})
			config, err2 := endpoint.ClientConfig()

			require.NoError(t, errors.Join(err, err2))
			return dialed(t, e.addr, config)
		}},
		{like: []any{tlsconfig.HookTLSServerConfig}, note: "A client that presents a certificate is verified.", from: func(t *testing.T, e theirProgram) any {
			config := tlsconfig.TLSServerConfig(e.source)

			return met(t, config, &tls.Config{InsecureSkipVerify: true})
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowMembersOf(e.td), AllowAnonymousClients: true})
			config, err2 := endpoint.ServerConfig()

			require.NoError(t, errors.Join(err, err2))
			return met(t, config, &tls.Config{InsecureSkipVerify: true})
		}},
		{like: []any{tlsconfig.HookTLSClientConfig}, from: func(t *testing.T, e theirProgram) any {
			config := tlsconfig.TLSClientConfig(e.source, tlsconfig.AuthorizeID(e.id))

			return met(t, tlsconfig.TLSServerConfig(e.source), config)
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{OptionalIdentity: true, Peers: e.source, Allow: spiffe.AllowIDs(e.id)})
			config, err2 := endpoint.ClientConfig()

			require.NoError(t, errors.Join(err, err2))
			anonymous, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowMembersOf(e.td), AllowAnonymousClients: true})
			require.NoError(t, err)
			server, err := anonymous.ServerConfig()
			require.NoError(t, err)
			return met(t, server, config)
		}},
		{like: []any{tlsconfig.HookMTLSWebServerConfig}, note: "Asked at each handshake, so that it may be renewed.", from: func(t *testing.T, e theirProgram) any {
			config := tlsconfig.MTLSWebServerConfig(e.webCertificate, e.source, tlsconfig.AuthorizeMemberOf(e.td))

			return met(t, config, withRoots(e.web, e.webRoots))
		}, to: func(t *testing.T, e ourProgram) any {
			web := func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return e.webCertificate, nil }
			endpoint, err := spiffetls.New(spiffetls.Config{WebCertificate: web, Peers: e.source, Allow: spiffe.AllowMembersOf(e.td)})
			config, err2 := endpoint.ServerConfig()

			require.NoError(t, errors.Join(err, err2))
			return met(t, config, withRoots(e.web, e.webRoots))
		}},
		{like: []any{tlsconfig.HookMTLSWebClientConfig}, note: "The roots of the host: `WebRoots: x509.SystemCertPool`.", from: func(t *testing.T, e theirProgram) any {
			config := tlsconfig.MTLSWebClientConfig(e.source, e.webRoots)

			config.ServerName = "localhost"
			return met(t, tlsconfig.MTLSWebServerConfig(e.webCertificate, e.source, tlsconfig.AuthorizeAny()), config)
		}, to: func(t *testing.T, e ourProgram) any {
			web := func() (*x509.CertPool, error) { return e.webRoots, nil }
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, WebRoots: web})
			config, err2 := endpoint.ClientConfig()

			require.NoError(t, errors.Join(err, err2))
			config.ServerName = "localhost"
			return met(t, tlsconfig.MTLSWebServerConfig(e.webCertificate, peerBundle(t, e.bundle).X509Bundle(), tlsconfig.AuthorizeAny()), config)
		}},
		{like: []any{tlsconfig.GetClientCertificate}, from: func(t *testing.T, e theirProgram) any {
			get := tlsconfig.GetCertificate(e.source)

			cert, err := get(&tls.ClientHelloInfo{})
			require.NoError(t, err)
			return cert.Leaf.URIs[0].String()
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: e.policy})
			config, err2 := endpoint.ServerConfig()
			get := config.GetCertificate

			require.NoError(t, errors.Join(err, err2))
			cert, err := get(&tls.ClientHelloInfo{})
			require.NoError(t, err)
			return cert.Leaf.URIs[0].String()
		}},
		{like: []any{tlsconfig.WrapVerifyPeerCertificate}, note: "It runs for resumed sessions, too.", from: func(t *testing.T, e theirProgram) any {
			verify := tlsconfig.VerifyPeerCertificate(e.source, tlsconfig.AuthorizeMemberOf(e.td))

			return verify([][]byte{e.chain[0].Raw}, nil)
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowMembersOf(e.td)})
			config, err2 := endpoint.ServerConfig()
			verify := config.VerifyConnection

			require.NoError(t, errors.Join(err, err2))
			return verify(e.state)
		}},
		{like: []any{
			peertls.Listen, peertls.NewListener, peertls.NewListenerWithMode, peertls.MTLSServer, peertls.MTLSServerWithSourceOptions,
			peertls.MTLSServerWithRawConfig, peertls.TLSServer, peertls.TLSServerWithSource, peertls.TLSServerWithSourceOptions, peertls.TLSServerWithRawConfig,
			peertls.MTLSWebServer, peertls.MTLSWebServerWithSource, peertls.MTLSWebServerWithSourceOptions, peertls.MTLSWebServerWithRawConfig,
			peertls.WithListenTLSConfigBase, peertls.WithListenTLSOptions,
		}, note: "The program owns the source. Accepted connections have done their handshake. The modes are fields of the `Config`, as above.", from: func(t *testing.T, e theirProgram) any {
			mode := peertls.MTLSServerWithSource(tlsconfig.AuthorizeMemberOf(e.td), e.source)
			l, err := peertls.ListenWithMode(e.ctx, "tcp", "127.0.0.1:0", mode)

			require.NoError(t, err)
			return accepted(t, l, e.web)
		}, to: func(t *testing.T, e ourProgram) any {
			inner, err := net.Listen("tcp", "127.0.0.1:0")
			endpoint, err2 := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowMembersOf(e.td)})
			l, err3 := endpoint.Listener(inner)

			require.NoError(t, errors.Join(err, err2, err3))
			return accepted(t, l, e.web)
		}},
		{like: []any{
			peertls.Dial, peertls.MTLSClient, peertls.MTLSClientWithSourceOptions, peertls.MTLSClientWithRawConfig, peertls.TLSClient, peertls.TLSClientWithSource,
			peertls.TLSClientWithSourceOptions, peertls.TLSClientWithRawConfig, peertls.MTLSWebClient, peertls.MTLSWebClientWithSource,
			peertls.MTLSWebClientWithSourceOptions, peertls.MTLSWebClientWithRawConfig, peertls.WithDialer, peertls.WithDialTLSConfigBase, peertls.WithDialTLSOptions,
		}, note: "The modes are fields of the `Config`, as above. A connection of another dialer: `endpoint.Client`.", from: func(t *testing.T, e theirProgram) any {
			mode := peertls.MTLSClientWithSource(tlsconfig.AuthorizeID(e.id), e.source)
			conn, err := peertls.DialWithMode(e.ctx, "tcp", e.addr, mode)

			require.NoError(t, err)
			return echoed(t, conn)
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowIDs(e.id)})
			conn, err2 := endpoint.DialContext(e.ctx, "tcp", e.addr)

			require.NoError(t, errors.Join(err, err2))
			return echoed(t, conn)
		}},
		{note: "A proof rather than a name. Of a request: `PeerFromContext` and `PeerFromRequest`.", from: func(t *testing.T, e theirProgram) any {
			conn, err := peertls.DialWithMode(e.ctx, "tcp", e.addr, peertls.MTLSClientWithSource(tlsconfig.AuthorizeID(e.id), e.source))
			require.NoError(t, err)
			defer conn.Close()
			return first(func() any {
				id, err := peertls.PeerIDFromConn(conn)

				require.NoError(t, err)
				return id.String()
			})
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: spiffe.AllowIDs(e.id)})
			require.NoError(t, err)
			conn, err := endpoint.DialContext(e.ctx, "tcp", e.addr)
			require.NoError(t, err)
			defer conn.Close()
			return first(func() any {
				peer, err := spiffetls.PeerFromConn(conn)

				require.NoError(t, err)
				return peer.ID().String()
			})
		}},
		{note: "The role is that of the peer, which is verified once more.", from: func(t *testing.T, e theirProgram) any {
			id, err := peertls.PeerIDFromConnectionState(e.state)

			require.NoError(t, err)
			return id.String()
		}, to: func(t *testing.T, e ourProgram) any {
			endpoint, err := spiffetls.New(spiffetls.Config{Self: e.source, Peers: e.source, Allow: e.policy})
			peer, err2 := endpoint.PeerFromState(spiffe.ServerRole, e.state)

			require.NoError(t, errors.Join(err, err2))
			return peer.ID().String()
		}},
	}},
	{"JWT-SVIDs", []call{
		{note: "The validator is kept, and remembers the tokens that it has verified. For net/http: `jwtsvid.Middleware`.", from: func(t *testing.T, e theirProgram) any {
			svid, err := peerjwt.ParseAndValidate(e.token, e.jwtSource, []string{"db"})

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			validator, err := jwtsvid.NewValidator(e.source, []string{"db"}, nil)
			verified, err2 := validator.Validate(e.token)

			require.NoError(t, errors.Join(err, err2))
			return verified.ID().String()
		}},
		{note: "Another type than a token that was validated.", from: func(t *testing.T, e theirProgram) any {
			svid, err := peerjwt.ParseInsecure(e.token, []string{"db"})

			require.NoError(t, err)
			return svid.ID.String()
		}, to: func(t *testing.T, e ourProgram) any {
			claims, err := jwtsvid.ParseUnverified(e.token)

			require.NoError(t, err)
			return claims.ID.String()
		}},
	}},
	{"Federation", []call{
		{from: func(t *testing.T, e theirProgram) any {
			bundle, err := peerfederation.FetchBundle(e.ctx, e.partnerTD, e.url, peerfederation.WithSPIFFEAuth(e.partner, e.endpointID))

			require.NoError(t, err)
			return len(bundle.X509Authorities())
		}, to: func(t *testing.T, e ourProgram) any {
			profile := federation.SPIFFE{EndpointID: e.endpointID, Initial: e.partner}
			bundle, err := federation.Fetch(e.ctx, federation.Relationship{TrustDomain: e.partnerTD, URL: e.url, Profile: profile}, nil)

			require.NoError(t, err)
			return len(bundle.Contents().X509Authorities)
		}},
		{from: func(t *testing.T, e theirProgram) any {
			bundle, err := peerfederation.FetchBundle(e.ctx, e.partnerTD, e.url, peerfederation.WithWebPKIRoots(e.webRoots))

			require.NoError(t, err)
			return len(bundle.X509Authorities())
		}, to: func(t *testing.T, e ourProgram) any {
			profile := federation.Web{Roots: e.webRoots}
			bundle, err := federation.Fetch(e.ctx, federation.Relationship{TrustDomain: e.partnerTD, URL: e.url, Profile: profile}, nil)

			require.NoError(t, err)
			return len(bundle.Contents().X509Authorities)
		}},
		{note: "A source of the bundles of all partners, current until `Close`; `Changed` tells of a new one.", from: func(t *testing.T, e theirProgram) any {
			ctx, cancel := context.WithCancel(e.ctx)
			defer cancel()
			w := partnerWatcher{cancel}
			err := peerfederation.WatchBundle(ctx, e.partnerTD, e.url, w, peerfederation.WithWebPKIRoots(e.webRoots))

			require.ErrorIs(t, err, context.Canceled)
			return e.partnerTD.Name()
		}, to: func(t *testing.T, e ourProgram) any {
			partner := federation.Relationship{TrustDomain: e.partnerTD, URL: e.url, Profile: federation.Web{Roots: e.webRoots}}
			bundles, err := federation.Start(e.ctx, federation.Config{Relationships: []federation.Relationship{partner}})

			require.NoError(t, err)
			defer bundles.Close()
			bundle, err := bundles.Bundle(e.partnerTD)
			require.NoError(t, err)
			return bundle.TrustDomain().String()
		}},
		{note: "`federation.ServerConfig` has the TLS for it.", from: func(t *testing.T, e theirProgram) any {
			handler, err := peerfederation.NewHandler(e.td, e.bundle)

			require.NoError(t, err)
			return got(t, handler)
		}, to: func(t *testing.T, e ourProgram) any {
			handler, err := federation.NewHandler(e.bundle, e.td)

			require.NoError(t, err)
			return got(t, handler)
		}},
	}},
}

// without are the calls of go-spiffe that nothing takes the place of.
var without = []struct {
	calls  []any
	reason string
}{
	{[]any{tlsconfig.WithTrace}, "The source is read without waiting, so that there is nothing to time. Failed handshakes: `Options.Logger` and `Options.Failures`."},
	{[]any{peerapi.WithDialOptions}, "The client is one of net/http and not of grpc-go: an `*http.Client` of `NewClient`."},
	{[]any{peerapi.WithBackoffStrategy}, "The waits follow from the life that the identity has left, so that an outage costs none."},
	{[]any{peerapi.WithLogger, peerfederation.WithLogger}, "`Config.Logger` and `Options.Logger` are a `*slog.Logger`; the handler of a bundle endpoint writes no log."},
	{[]any{"`workloadapi.WithNamedPipeName`"}, "For Windows: the `*http.Client` of `NewClient` reaches a server by other means than a socket."},
	{[]any{peerapi.TargetFromAddress}, "It is for grpc-go, which is not used."},
	{[]any{(*spiffebundle.Bundle).X509Bundle, (*spiffebundle.Bundle).JWTBundle, (*spiffebundle.Bundle).Clone}, "There is one type of bundle, and it never changes."},
	{[]any{(*peerjwt.SVID).Marshal}, "The program has the token that it gave to `Validate`; behind `jwtsvid.Middleware` it is in the Authorization header. `Claims` decodes the payload."},
	{[]any{jwtbundle.Load, jwtbundle.Parse, jwtbundle.Read}, "They read a JWK Set without the uses of SPIFFE. `spiffe.ParseBundle` skips keys whose use is not jwt-svid."},
	{[]any{
		peerapi.FetchWITSVID, peerapi.FetchWITSVIDs, peerapi.FetchWITBundles, peerapi.NewWITSource, (*peerapi.Client).WatchWITSVIDs, (*peerapi.Client).WatchWITBundles,
	}, "WIT-SVIDs are incubating, and no source keeps them: `Client.WatchWITSVIDs`, `Client.WatchWITBundles` and package witsvid."},
}
