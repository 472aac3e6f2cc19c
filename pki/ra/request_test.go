package ra_test

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/hostilecsr"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// rawCSR makes a request with crypto/x509, which asks for anything.
func rawCSR(t testing.TB, edit func(*x509.CertificateRequest)) *pki.CSR {
	t.Helper()
	tmpl := &x509.CertificateRequest{URIs: []*url.URL{mustURL(t, webID.String())}}
	edit(tmpl)
	der := must.Get(x509.CreateCertificateRequest(rand.Reader, tmpl, newKey(t)))(t)
	csr := must.Get(pki.ParseCSR(der))(t)
	return csr
}

// The requests of agents that exist.
func TestRequests(t *testing.T) {
	t.Parallel()
	f := newFamily(t)
	for name, edit := range map[string]func(*x509.CertificateRequest){
		"no subject": func(*x509.CertificateRequest) {},
		"an empty organization": func(r *x509.CertificateRequest) {
			r.RawSubject = []byte("\x30\x0b\x31\x09\x30\x07\x06\x03\x55\x04\x0a\x13\x00")
		},
		"an empty common name": func(r *x509.CertificateRequest) {
			r.RawSubject = []byte("\x30\x0b\x31\x09\x30\x07\x06\x03\x55\x04\x03\x0c\x00")
		},
		"the common name": func(r *x509.CertificateRequest) { r.Subject.CommonName = "web" },
		"granted further names": func(r *x509.CertificateRequest) {
			r.DNSNames, r.IPAddresses = []string{"web.test"}, []net.IP{ip("192.0.2.1")}
		},
		"a name that is granted": func(r *x509.CertificateRequest) { r.DNSNames = []string{"web.test"} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := ca.Request{CSR: rawCSR(t, edit), ID: webID, CommonName: "web", DNSNames: []string{"web.test"}, IPs: []net.IP{ip("192.0.2.1")}}
			must.Get(answers(t, f, r, func(r *x509.CertificateRequest) []byte { return encode(f.root.leaf(t, r, time.Hour)) }))(t)
		})
	}
}

// What is asked for and was not granted is refused before anything is sent to the cluster.
func TestRequestsRefused(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.8-3")
	root := newAuthority(t, "root", nil)
	c := start(t, bubble(t), nil)
	a := c.ra(trust(t, root), func(c *ra.Config) { c.MaxTTL = 24 * time.Hour })
	id := spiffe.MustParseID
	asks := func(edit func(*x509.CertificateRequest)) func(*ca.Request) {
		return func(r *ca.Request) { r.CSR = rawCSR(t, edit) }
	}
	uris := func(ids ...string) func(*ca.Request) {
		return asks(func(r *x509.CertificateRequest) {
			r.URIs = nil
			for _, id := range ids {
				r.URIs = append(r.URIs, mustURL(t, id))
			}
		})
	}
	ext := func(oid asn1.ObjectIdentifier, value string) func(*ca.Request) {
		return asks(func(r *x509.CertificateRequest) {
			r.ExtraExtensions = []pkix.Extension{{Id: oid, Value: []byte(value)}}
		})
	}
	same := webID.String()
	for _, x := range []struct {
		name string
		edit func(*ca.Request)
		kind error
		text string
	}{
		{"no request", func(r *ca.Request) { r.CSR = nil }, ca.ErrCSR, "there is none"},
		{"the zero request", func(r *ca.Request) { r.CSR = &pki.CSR{} }, ca.ErrCSR, "there is none"},
		{"zero ID", func(r *ca.Request) { r.ID = spiffe.ID{} }, ca.ErrIdentity, "ID"},
		{"foreign ID", func(r *ca.Request) { r.ID = id("spiffe://example.com/ns/prod/sa/web") }, ca.ErrIdentity, "not in the trust domain"},
		{"ID of the trust domain", func(r *ca.Request) { r.ID = td.ID() }, ca.ErrIdentity, "names no workload"},
		{"an address that is none", func(r *ca.Request) { r.IPs = []net.IP{{1, 2, 3}} }, ca.ErrIdentity, "IP address"},
		{"unknown profile", func(r *ca.Request) { r.Profile = 7 }, ca.ErrIdentity, "unknown profile 7"},
		{"an ID in a certificate without", func(r *ca.Request) { r.Profile = ca.DNSOnly }, ca.ErrIdentity, "has no ID"},
		{"no name in a certificate without ID", func(r *ca.Request) { r.Profile, r.ID = ca.DNSOnly, spiffe.ID{} }, ca.ErrIdentity, "needs one"},
		{"nothing that is granted in a certificate without ID", func(r *ca.Request) {
			r.Profile, r.ID, r.DNSNames = ca.DNSOnly, spiffe.ID{}, []string{"web.test"}
		}, ca.ErrCSR, "not granted"},

		{"TTL over the limit", func(r *ca.Request) { r.TTL = 24*time.Hour + 1 }, ca.ErrTTL, "the longest is 24h0m0s"},
		{"TTL under the limit", func(r *ca.Request) { r.TTL = 10*time.Minute - 1 }, ca.ErrTTL, "the shortest that Kubernetes allows is 10m0s"},
		{"TTL of a nanosecond", func(r *ca.Request) { r.TTL = 1 }, ca.ErrTTL, "shortest"},

		{"another ID", uris("spiffe://example.org/ns/prod/sa/db"), ca.ErrCSR, "sa/db\", which is not granted"},
		{"another trust domain", uris("spiffe://example.com/ns/prod/sa/web"), ca.ErrCSR, "not granted"},
		{"two IDs", uris(same, "spiffe://example.org/ns/prod/sa/db"), ca.ErrCSR, "not granted"},
		{"the ID twice", uris(same, same), ca.ErrCSR, "twice"},
		{"an ID in other letters", uris("spiffe://example.org/ns/prod/sa/Web"), ca.ErrCSR, "not granted"},
		{"another scheme", uris(same, "https://example.org"), ca.ErrCSR, "not granted"},
		{"no name", uris(), ca.ErrCSR, "does not ask for the ID"},
		{"a DNS name", asks(func(r *x509.CertificateRequest) { r.DNSNames = []string{"db.test"} }), ca.ErrCSR, "DNS:db.test"},
		{"the ID as a DNS name", asks(func(r *x509.CertificateRequest) { r.URIs, r.DNSNames = nil, []string{same} }), ca.ErrCSR, "not granted"},
		{"an address", asks(func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{ip("192.0.2.2")} }), ca.ErrCSR, "IP:192.0.2.2"},
		{"an e-mail", asks(func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"a@example.org"} }), ca.ErrCSR, "not granted"},
		{"only what is granted beside the ID", func(r *ca.Request) {
			r.DNSNames = []string{"web.test"}
			r.CSR = newCSR(t, pki.DNSSAN("web.test"))
		}, ca.ErrCSR, "does not ask for the ID"},

		{"a common name", asks(func(r *x509.CertificateRequest) { r.Subject.CommonName = "admin" }), ca.ErrCSR, "2.5.4.3"},
		{"the ID as common name", asks(func(r *x509.CertificateRequest) { r.Subject.CommonName = same }), ca.ErrCSR, "2.5.4.3"},
		{"an organization", asks(func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:masters"} }), ca.ErrCSR, "2.5.4.10"},
		{"an organization behind an empty one", asks(func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"", "system:masters"} }), ca.ErrCSR, "2.5.4.10"},
		{"a unit", asks(func(r *x509.CertificateRequest) { r.Subject.OrganizationalUnit = []string{""} }), ca.ErrCSR, "2.5.4.11"},
		{"a serial number", asks(func(r *x509.CertificateRequest) { r.Subject.SerialNumber = "1" }), ca.ErrCSR, "2.5.4.5"},
		{"a user ID", asks(func(r *x509.CertificateRequest) {
			r.Subject.ExtraNames = []pkix.AttributeTypeAndValue{{Type: asn1.ObjectIdentifier{0, 9, 2342, 19200300, 100, 1, 1}, Value: "root"}}
		}), ca.ErrCSR, "0.9.2342.19200300.100.1.1"},

		{"to be a CA", ext(asn1.ObjectIdentifier{2, 5, 29, 19}, "\x30\x03\x01\x01\xff"), ca.ErrCSR, "the extension 2.5.29.19"},
		{"not to be a CA", ext(asn1.ObjectIdentifier{2, 5, 29, 19}, "\x30\x00"), ca.ErrCSR, "the extension 2.5.29.19"},
		{"key usage", ext(asn1.ObjectIdentifier{2, 5, 29, 15}, "\x03\x02\x02\x04"), ca.ErrCSR, "the extension 2.5.29.15"},
		{"extended key usage", ext(asn1.ObjectIdentifier{2, 5, 29, 37}, "\x30\x0a\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x03"), ca.ErrCSR, "the extension 2.5.29.37"},
		{"an unknown extension", ext(asn1.ObjectIdentifier{1, 2, 3, 4}, "\x05\x00"), ca.ErrCSR, "the extension 1.2.3.4"},

		{"a signer, and there is no domain", func(r *ca.Request) { r.Signer = "mesh" }, ca.ErrCSR, `the signer "mesh", and there is no signer domain`},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := web(t)
			x.edit(&r)
			chain, err := a.Sign(t.Context(), r)
			e := signError(t, err, x.kind, x.text)
			switch {
			case x.kind != ca.ErrTTL:
				assert.Zero(t, e.Granted)
			case e.Asked > time.Hour:
				assert.Equal(t, []time.Duration{r.TTL, 24 * time.Hour}, []time.Duration{e.Asked, e.Granted})
			default:
				assert.Equal(t, []time.Duration{r.TTL, 10 * time.Minute}, []time.Duration{e.Asked, e.Granted})
			}
			assert.Equal(t, r.ID, e.ID)
			assert.Nil(t, chain)
		})
	}
	assert.Empty(t, c.Requests(), "a request was sent to the cluster")
}

// A signer that gives whatever it is asked for makes nothing of a hostile request but the certificate
// that the caller may have.
func TestHostileRequests(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.8-2")
	root := newAuthority(t, "root", nil)
	c := start(t, bubble(t), certifying(t, root))
	a := c.ra(trust(t, root))
	signed := 0
	for _, x := range hostilecsr.Some(t) {
		csr, err := pki.ParseCSRPEM(x.PEM)
		if err != nil {
			continue // refused before Sign
		}
		before := c.Count("POST", csrs)
		chain, err := a.Sign(t.Context(), ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{hostilecsr.Name}})
		if err != nil {
			signError(t, err, ca.ErrCSR)
			assert.Equal(t, before, c.Count("POST", csrs), "%s: a request was sent to the cluster", x.Name)
			continue
		}
		signed++
		leaf := chain[0]
		require.True(t, x.Signable, x.Name)
		assert.True(t, pki.PublicKeysEqual(leaf.PublicKey, x.Key), x.Name)
		sans, err := pki.ParseSANs(leaf.Extensions)
		require.NoError(t, err, x.Name)
		assert.Equal(t, []pki.SAN{pki.DNSSAN(hostilecsr.Name)}, sans, x.Name)
		assert.False(t, leaf.IsCA, x.Name)
		assert.Empty(t, leaf.Subject.String(), x.Name)
		for _, e := range leaf.Extensions {
			switch e.Id.String() {
			case "2.5.29.15", "2.5.29.17", "2.5.29.19", "2.5.29.35", "2.5.29.37": // those of the signer's template, and the names
			default:
				t.Errorf("%s: the certificate has the extension %s", x.Name, e.Id)
			}
		}
	}
	assert.Positive(t, signed)
	assert.Less(t, signed, 40, "most ask for something")
	assert.Zero(t, c.left())
}

// Attributes that a CA might read names from, or that would become public.
func TestAttributesRefused(t *testing.T) {
	t.Parallel()
	a := start(t, bubble(t), nil).ra(trust(t, newAuthority(t, "root", nil)))
	refused := 0
	for _, x := range hostilecsr.Cases(t) {
		if !strings.Contains(x.Name, "challenge password") && !strings.Contains(x.Name, "Microsoft's") {
			continue
		}
		csr, err := pki.ParseCSRPEM(x.PEM)
		require.NoError(t, err, x.Name)
		_, err = a.Sign(t.Context(), ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{hostilecsr.Name}})
		signError(t, err, ca.ErrCSR, "it has the attribute 1.")
		refused++
	}
	assert.GreaterOrEqual(t, refused, 4)
}

// Which signer is asked.
func TestSigners(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.8-4")
	root, other := newAuthority(t, "root", nil), newAuthority(t, "other", nil)
	sign := func(t *testing.T, requested string, edit ...func(*ra.Config)) (string, error) {
		t.Helper()
		c := start(t, bubble(t), certifying(t, root))
		r := web(t)
		r.Signer = requested
		_, err := c.ra(edit...).Sign(t.Context(), r)
		if seen := c.approved(); len(seen) > 0 {
			return seen[0].Spec.SignerName, err
		}
		assert.Zero(t, c.Count("POST", csrs))
		return "", err
	}
	domain := func(c *ra.Config) { c.SignerDomain = "signers.test" }
	noDefault := func(c *ra.Config) { c.Signer = "" }
	for _, x := range []struct {
		name, requested, want string
		edit                  []func(*ra.Config)
		kind                  error
		text                  string
	}{
		{"default", "", signerName, []func(*ra.Config){trust(t, root)}, nil, ""},
		{"default beside a domain", "", signerName, []func(*ra.Config){trust(t, root), domain}, nil, ""},
		{"of the domain", "mesh", "signers.test/mesh", []func(*ra.Config){trust(t, root), domain}, nil, ""},
		{"of the domain, without a default", "mesh.v1", "signers.test/mesh.v1", []func(*ra.Config){trust(t, root), domain, noDefault}, nil, ""},

		{"roots of another", "", signerName, []func(*ra.Config){trust(t, other)}, ca.ErrGeneration, "unknown authority"},
		{"none, and no default", "", "", []func(*ra.Config){trust(t, root), domain, noDefault}, ca.ErrCSR, "names no signer, and there is no default"},
		{"no domain", "mesh", "", []func(*ra.Config){trust(t, root)}, ca.ErrCSR, "no signer domain"},
		{"a full name", "signers.test/mesh", "", []func(*ra.Config){trust(t, root), domain}, ca.ErrCSR, "is not the name of a signer"},
		{"out of the domain", "../kubernetes.io/kube-apiserver-client", "", []func(*ra.Config){trust(t, root), domain}, ca.ErrCSR, "is not the name"},
		{"upper case", "Mesh", "", []func(*ra.Config){trust(t, root), domain}, ca.ErrCSR, "is not the name"},
		{"a blank", "mesh ", "", []func(*ra.Config){trust(t, root), domain}, ca.ErrCSR, "is not the name"},
		{"a line break", "mesh\n", "", []func(*ra.Config){trust(t, root), domain}, ca.ErrCSR, "is not the name"},
		{"a dot", ".", "", []func(*ra.Config){trust(t, root), domain}, ca.ErrCSR, "is not the name"},
		{"long", strings.Repeat("a", 10_000), "", []func(*ra.Config){trust(t, root), domain}, ca.ErrCSR, "is not the name"},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			got, err := sign(t, x.requested, x.edit...)
			assert.Equal(t, x.want, got)
			if x.kind == nil {
				require.NoError(t, err)
				return
			}
			signError(t, err, x.kind, x.text)
		})
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	base := func() ra.Config {
		return ra.Config{TrustDomain: td, Signer: signerName, Roots: bundle(t, root), APIServer: "https://api.example.org"}
	}
	for name, edit := range map[string]func(*ra.Config){
		"no trust domain":            func(c *ra.Config) { c.TrustDomain = spiffe.TrustDomain{} },
		"no signer":                  func(c *ra.Config) { c.Signer = "" },
		"signer without a domain":    func(c *ra.Config) { c.Signer = "mesh" },
		"signer without a name":      func(c *ra.Config) { c.Signer = "example.com/" },
		"signer in a top domain":     func(c *ra.Config) { c.Signer = "com/mesh" },
		"signer with two slashes":    func(c *ra.Config) { c.Signer = "example.com/a/b" },
		"signer in upper case":       func(c *ra.Config) { c.Signer = "example.com/Mesh" },
		"domain with a slash":        func(c *ra.Config) { c.SignerDomain = "example.com/" },
		"top domain":                 func(c *ra.Config) { c.SignerDomain = "com" },
		"domain of Kubernetes":       func(c *ra.Config) { c.SignerDomain = "kubernetes.io" },
		"domain below Kubernetes":    func(c *ra.Config) { c.SignerDomain = "x.kubernetes.io" },
		"no roots":                   func(c *ra.Config) { c.Roots = nil },
		"no roots, domain":           func(c *ra.Config) { c.Roots, c.Signer, c.SignerDomain = nil, "", "example.com" },
		"MaxTTL under ten minutes":   func(c *ra.Config) { c.MaxTTL = 10*time.Minute - 1 },
		"negative MaxTTL":            func(c *ra.Config) { c.MaxTTL = -1 },
		"MaxTTL beyond Kubernetes'":  func(c *ra.Config) { c.MaxTTL = (1 << 31) * time.Second },
		"plain http to another host": func(c *ra.Config) { c.APIServer = "http://api.example.org" },
	} {
		c := base()
		edit(&c)
		_, err := ra.New(c)
		require.Error(t, err, name)
		assert.True(t, strings.HasPrefix(err.Error(), "ra: "), err)
	}
	for name, edit := range map[string]func(*ra.Config){
		"as it is":               func(*ra.Config) {},
		"Kubernetes' own":        func(c *ra.Config) { c.Signer = "kubernetes.io/legacy-unknown" },
		"domain only":            func(c *ra.Config) { c.Signer, c.SignerDomain = "", "issuers.cert-manager.io" },
		"a name with kubernetes": func(c *ra.Config) { c.SignerDomain = "notkubernetes.io" },
		"learning":               func(c *ra.Config) { c.Roots, c.LearnRoots = nil, true },
		"the shortest MaxTTL":    func(c *ra.Config) { c.MaxTTL = 10 * time.Minute },
	} {
		c := base()
		edit(&c)
		_, err := ra.New(c)
		require.NoError(t, err, name)
	}
}

// Requests in any form that package pki reads go to the cluster as they were signed, or not at all.
func FuzzRequest(f *testing.F) {
	root := newAuthority(f, "root", nil)
	var sent []byte
	a := instant(func(o *object) []byte {
		sent = o.Spec.Request
		return []byte("no certificate")
	}).ra(f, trust(f, root))
	for _, x := range hostilecsr.Some(f) {
		if x.Signable {
			f.Add(x.DER)
		}
	}
	f.Fuzz(func(t *testing.T, der []byte) {
		csr, err := pki.ParseCSR(der)
		if err != nil {
			return
		}
		r := ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{hostilecsr.Name}}
		sent = nil
		_, err = a.Sign(t.Context(), r)
		if sent == nil {
			signError(t, err, ca.ErrCSR)
			return
		}
		signError(t, err, ca.ErrGeneration, "there is no certificate in PEM")
		block, _ := pem.Decode(sent)
		std, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil || !bytes.Equal(std.Raw, der) {
			t.Fatalf("crypto/x509 reads something else: %v", err)
		}
		if len(std.DNSNames) != 1 || std.DNSNames[0] != hostilecsr.Name || len(std.URIs)+len(std.IPAddresses)+len(std.EmailAddresses) > 0 {
			t.Fatalf("it asks for %q %v %v %q", std.DNSNames, std.URIs, std.IPAddresses, std.EmailAddresses)
		}
		if len(std.Extensions) != 1 || strings.Trim(std.Subject.String(), "O=+,") != "" {
			t.Fatalf("it has the subject %q and %d extensions", std.Subject, len(std.Extensions))
		}
	})
}
