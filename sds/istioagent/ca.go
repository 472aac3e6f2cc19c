package istioagent

import (
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// newManager returns the identity from the CA.
func (c *Config) newManager() (*secretcache.Manager, error) {
	id, err := c.trustDomain.WorkloadID("ns", c.text("POD_NAMESPACE"), "sa", c.text("SERVICE_ACCOUNT"))
	if err != nil {
		return nil, fmt.Errorf("set TRUST_DOMAIN, POD_NAMESPACE and SERVICE_ACCOUNT: %w", err)
	}
	var ca remoteCA
	if c.google() {
		ca, err = c.newGoogleCA()
	} else {
		ca, err = c.newIstioCA()
	}
	if err != nil {
		return nil, fmt.Errorf("CA (CA_ADDR %q): %w", c.text("CA_ADDR"), err)
	}
	grace, jitter := timing(c.v.Ratio("SECRET_GRACE_PERIOD_RATIO"), c.v.Ratio("SECRET_GRACE_PERIOD_RATIO_JITTER"))
	key := c.keyAlgorithm
	return secretcache.New(secretcache.Config{
		ID: id, CA: counted{ca, c.requests}, CAName: cmp.Or(c.text("CA_ADDR"), c.proxy.DiscoveryAddress),
		Lifetime: c.v.Duration("SECRET_TTL"), GraceRatio: grace, Jitter: jitter,
		NewKey: func() (crypto.Signer, error) { return pki.NewKey(key) }, Logger: c.Logger,
	})
}

// remoteCA is a CA that reports new bundles itself.
type remoteCA interface {
	caclient.CA
	WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error]
}

// counted counts the requests to a CA, for metrics with the names of Istio's agent.
type counted struct {
	remoteCA
	requests *requests
}

// requests counts requests for certificates.
type requests struct {
	all, failed, retries *metrics.Counter
	nanoseconds          atomic.Int64

	failing atomic.Bool // the last request failed, so the next one is a retry
}

func (r *requests) init(set *metrics.Set) {
	counter := func(name, help string) *metrics.Counter {
		return set.Counters(name, help, "request_type", "csr")["csr"]
	}
	r.all = counter("istio_agent_num_outgoing_requests", "The number of requests to the CA.")
	r.failed = counter("istio_agent_num_failed_outgoing_requests",
		"The number of requests to the CA that have failed.")
	r.retries = counter("istio_agent_num_outgoing_retries",
		"The number of requests to the CA that followed one that had failed.")
	set.Totals("istio_agent_outgoing_latency", "The time that requests to the CA have taken, in milliseconds.",
		func(add metrics.Add) {
			add(float64(r.nanoseconds.Load())/float64(time.Millisecond), "request_type", "csr")
		})
}

func (c counted) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	begun := time.Now()
	c.requests.all.Inc()
	if c.requests.failing.Load() {
		c.requests.retries.Inc()
	}
	chain, err := c.remoteCA.Sign(ctx, csr, lifetime)
	if err != nil {
		c.requests.failed.Inc()
		// the wording of our CA and of Istio's
		if text := err.Error(); errors.Is(err, caclient.ErrInvalid) &&
			(strings.Contains(text, "lifetime") || strings.Contains(text, "TTL")) {
			err = fmt.Errorf("%w; SECRET_TTL is %v: set it to what the CA grants", err, lifetime)
		}
	}
	c.requests.failing.Store(err != nil)
	c.requests.nanoseconds.Add(int64(time.Since(begun)))
	return chain, err
}

// newIstioCA returns the client of a CA with Istio's API.
func (c *Config) newIstioCA() (*istioca.CA, error) {
	address := cmp.Or(c.text("CA_ADDR"), c.proxy.DiscoveryAddress)
	o := istioca.Options{
		Endpoint:  caclient.Endpoint{URL: "https://" + address, TrustDomain: c.trustDomain, Logger: c.Logger},
		ClusterID: c.clusterID, CertSigner: c.text("ISTIO_META_CERT_SIGNER"), Header: c.header("CA_HEADER_*"),
	}
	if plaintext(address) {
		c.Logger.Warn("istioagent: the connection to the CA has no TLS (its port is 15010): the token is readable",
			slog.String("address", address))
		o.URL, o.AllowPlaintext = "http://"+address, true
	} else {
		roots, err := c.rootsFor(c.caRootsFile)
		if err != nil {
			return nil, err
		}
		if roots == c.path(podRoots) { // these roots also vouch for workloads; others vouch only for the server
			o.RootsFile = roots
		}
		if o.HTTPClient, err = c.client(address, roots, "CA_ROOT_CA", c.text("CA_ADDR") == ""); err != nil {
			return nil, err
		}
	}
	if machine, err := c.machineToken(); err != nil {
		return nil, err
	} else if machine != nil {
		o.Token = machine.Token
	} else {
		o.TokenFile = c.path(c.TokenFile)
	}
	return istioca.New(o)
}

// newGoogleCA returns the client of Google's service, with an exchanged token.
func (c *Config) newGoogleCA() (*googlecas.CA, error) {
	machine, err := c.machineToken()
	if err != nil {
		return nil, err
	}
	file := tokensource.File(c.path(c.TokenFile))
	var exchange *http.Client // nil means the default client
	if c.postQuantum {
		if exchange, err = c.newClient(caclient.TLSOptions{Logger: c.Logger}, "CA_ROOT_CA"); err != nil {
			return nil, err
		}
	}
	token, err := tokensource.Exchange(cmp.Or(machine, file), tokensource.ClientOptions{
		HTTPClient: exchange, URL: cmp.Or(c.urls.exchange, "https://sts.googleapis.com/v1/token"),
		Audience: "identitynamespace:" + c.trustDomain.String() + ":" + c.identityProvider,
		Scope:    "https://www.googleapis.com/auth/cloud-platform",
		Logger:   c.Logger,
	})
	if err != nil {
		return nil, err
	}
	service := caclient.Endpoint{URL: c.urls.service, TrustDomain: c.trustDomain, Token: token.Token, Logger: c.Logger}
	o := googlecas.Options{Endpoint: service, Pool: c.text("CA_ADDR")}
	if c.text("CA_ROOT_CA") != "" || c.postQuantum {
		roots := ""
		if c.text("CA_ROOT_CA") != "" {
			if roots, err = c.rootsFor(c.caRootsFile); err != nil {
				return nil, err
			}
		}
		o.HTTPClient, err = c.newClient(caclient.TLSOptions{RootsFile: roots, Logger: c.Logger}, "CA_ROOT_CA")
		if err != nil {
			return nil, err
		}
	}
	return googlecas.New(o)
}

// machineToken returns the source of the machine's tokens, or nil if a file has them.
func (c *Config) machineToken() (*tokensource.Source, error) {
	if c.text("CREDENTIAL_FETCHER_TYPE") != "GoogleComputeEngine" {
		return nil, nil
	}
	return tokensource.GCE(c.trustDomain.String(),
		&tokensource.GCEOptions{URL: c.urls.metadata, Logger: c.Logger})
}

// newXDS creates the handler that forwards ADS to the control plane.
func (a *Agent) newXDS() error {
	c := &a.cfg
	if !c.Envoy.XDS {
		return nil
	}
	address, policy := c.proxy.DiscoveryAddress, c.proxy.ControlPlaneAuthPolicy
	x := xdsproxy.Config{URL: "https://" + address, Header: c.header("XDS_HEADER_*"), Logger: c.Logger}
	x.Header.Set("ClusterID", c.clusterID)
	if a.secrets != nil {
		x.Secrets = a.secrets
	}
	if policy == "NONE" || policy == 0.0 || plaintext(address) {
		c.Logger.Warn("istioagent: the connection to the control plane has no TLS: the token is readable on it",
			slog.String("address", address))
		x.URL, x.AllowPlaintext, x.HTTPClient = "http://"+address, true, c.plaintextClient()
	} else {
		roots, err := c.rootsFor(c.xdsRootsFile)
		if err != nil {
			return err
		}
		if x.HTTPClient, err = c.client(address, roots, "XDS_ROOT_CA", true); err != nil {
			return err
		}
	}
	machine, err := c.machineToken()
	if err != nil {
		return err
	}
	x.Token = cmp.Or(machine, tokensource.File(c.path(c.TokenFile))).Token
	if c.text("PROV_CERT") != "" || c.v.Bool("FILE_MOUNTED_CERTS") {
		x.Token = replaceable(x.Token)
	}
	if a.xds, err = xdsproxy.NewHandler(x); err != nil {
		return err
	}
	a.add("xds", a.xds, nil)
	a.serve(c.xdsSocket(), a.xds)
	return nil
}

// replaceable returns token for a machine with a certificate, which replaces the token that the machine started with:
// one that has expired counts as missing.
func replaceable(token func(context.Context) (string, error)) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		text, err := token(ctx)
		if errors.Is(err, tokensource.ErrExpired) {
			err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
		}
		return text, err
	}
}

// plaintextClient returns a client of HTTP/2 without TLS.
func (c *Config) plaintextClient() *http.Client {
	// Without the limit an Envoy waits for minutes to hear that a host is gone.
	t := tlsalert.NewTransport(nil, true, (&net.Dialer{Timeout: dialTimeout}).DialContext)
	t.Proxy = nil
	client := &http.Client{Transport: t}
	c.clients = append(c.clients, client)
	return client
}

// rootsFor returns the file with the roots for a server, or "" for the roots of the host.
func (c *Config) rootsFor(rule func() (string, error)) (string, error) {
	file, err := rule()
	if err != nil {
		return "", fmt.Errorf("%w; relative paths are below %s", err, c.path(""))
	}
	if file == "" {
		return "", nil
	}
	if name := c.path(file); c.text("PROV_CERT") != "" && filepath.Dir(name) == c.path(c.text("PROV_CERT")) {
		if _, err := os.Stat(filepath.Dir(name)); errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("roots: PROV_CERT is %q, and there is no such directory, so nothing vouches for "+
				"the server: set it to the directory with %s, or leave it out", c.text("PROV_CERT"), rootsName)
		}
	}
	return c.path(file), nil
}

// client returns a client for the server at address. It presents a certificate if there is one. variable is the name
// of the environment variable that sets another file with roots.
func (c *Config) client(address, roots, variable string, controlPlane bool) (*http.Client, error) {
	o := caclient.TLSOptions{RootsFile: roots, Logger: c.Logger}
	if c.text("COMPLIANCE_POLICY") == "fips-140-2" {
		o.MinVersion = tls.VersionTLS12
	}
	switch host, _, err := net.SplitHostPort(address); {
	case err != nil:
		return nil, fmt.Errorf("the address %q is not HOST:PORT: %w", address, err)
	case controlPlane && c.text("ISTIOD_SAN") != "":
		o.ServerName = c.text("ISTIOD_SAN")
	case strings.Contains(host, "localhost"): // a forwarded port of the control plane
		o.ServerName = istiodName
	}
	switch {
	case c.text("PROV_CERT") != "":
		o.CertificateFile = c.path(filepath.Join(c.text("PROV_CERT"), certName))
		o.KeyFile = c.path(filepath.Join(c.text("PROV_CERT"), keyName))
	case c.v.Bool("FILE_MOUNTED_CERTS"):
		o.CertificateFile, o.KeyFile = c.path(c.mountedCert), c.path(c.mountedKey)
	}
	return c.newClient(o, variable)
}

// newClient returns a client whose connections end with the Agent, and whose errors name the variable for the roots.
func (c *Config) newClient(o caclient.TLSOptions, variable string) (*http.Client, error) {
	o.PostQuantum = c.postQuantum
	client, err := caclient.NewHTTPClient(o)
	if err == nil {
		c.clients = append(c.clients, &http.Client{Transport: client.Transport})
		client.Transport = vouched{client.Transport, cmp.Or(o.RootsFile, "SYSTEM"), variable}
	}
	return client, err
}

// vouched adds to a TLS error which file and which variable are wrong, if the roots do not vouch for the server.
type vouched struct {
	http.RoundTripper
	roots, variable string
}

// RoundTrip implements [http.RoundTripper].
func (v vouched) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := v.RoundTripper.RoundTrip(r)
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		err = fmt.Errorf("%w: the roots in %s do not vouch for the server at %s: set %s to the file with its roots",
			err, v.roots, r.URL.Host, v.variable)
	}
	return resp, err
}
