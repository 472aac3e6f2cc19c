package athenzprog

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
)

// clockLeeway is how far the clocks of a signing service and of a provider may be apart, which are on different nodes if there
// are replicas.
const clockLeeway = 5 * time.Second

// Provider is the provider's callback with the signing service.
func Provider() Program {
	return Program{Name: "athenz-provider", run: runProvider, Table: settings.Table{Variables: []settings.Variable{
		provider, suffix, admin, namespaces, spiffeTD,
		{Name: "PROVIDER_ADDR", Default: ":4443", Check: isAddr, Doc: "address of the callback that ZTS calls, or off", Origin: here},
		{Name: "SIGNING_ADDR", Default: ":4444", Check: isAddr, Doc: "address of the signing service that the nodes call, or off", Origin: here},
		{Name: "CERT_FILE", Form: settings.Path, Doc: "certificate with its intermediates, in PEM, whose common name is PROVIDER_SERVICE; required", Origin: here},
		{Name: "KEY_FILE", Form: settings.Path, Doc: "its key, in PEM; required", Origin: here},
		{Name: "SERVER_CA_CERT", Form: settings.Path, Doc: "CA certificates of ZTS itself, in PEM; required with PROVIDER_ADDR", Origin: athenzs},
		roots,
		{Name: "ZTS_NAME", Check: isCommonName, Doc: "common name of ZTS, such as zts.example.cloud; required with PROVIDER_ADDR", Origin: here},
		{Name: "NODE_NAMES", Form: settings.List, Check: isCommonName, Doc: "common names of the nodes that may have documents signed, such as k8s.admin.k8s-node; required with SIGNING_ADDR", Origin: here},
		{Name: "KUBERNETES_API", Check: isAPI, Doc: "URL of the API server; not set: that of the cluster that the program runs in", Origin: here},
		{Name: "USED_DOCUMENTS", Check: isObject, Doc: "ConfigMap, as NAMESPACE/NAME, in which the replicas of the provider note which documents were used; not set: each replica remembers that by itself", Origin: here},
		{Name: "PRIVATE_KEY_DIR", Form: settings.Path, Default: "/var/keys/private", Doc: "folder of the private keys, in PEM, one file for each version: SECRET_NAME.v1 and so on", Origin: here},
		{Name: "PUBLIC_KEY_DIR", Form: settings.Path, Default: "/var/keys/public", Doc: "folder of the public keys, likewise", Origin: here},
		{Name: "SECRET_NAME", Default: "athenz-init-secret", Check: isDNSName, Doc: "name of the key", Origin: here},
		{Name: "TOKEN_EXPIRY", Form: settings.Duration, Default: "5m", Check: isExpiry, Doc: "lifetime of a document, at most 15m", Origin: athenzs},
		healthAddr, logLevel,
	}}}
}

func isCommonName(s string) error {
	for name := range strings.SplitSeq(s, ",") {
		if name = strings.TrimSpace(name); name == "" || name != strings.ToLower(name) || strings.ContainsAny(name, ": ") {
			return errors.New("set it to a common name in lower case, such as k8s.admin.k8s-node")
		}
	}
	return nil
}

func isExpiry(s string) error {
	if d, _ := time.ParseDuration(s); d < time.Second || d > 15*time.Minute {
		return errors.New("set it to a time from 1s to 15m")
	}
	return nil
}

func runProvider(ctx context.Context, v *settings.Values, o Options) error {
	if err := need(v, "PROVIDER_SERVICE", "CERT_FILE", "KEY_FILE", "SERVICE_CA_CERT"); err != nil {
		return err
	}
	callback, signs := v.Text("PROVIDER_ADDR") != off, v.Text("SIGNING_ADDR") != off
	rootsFiles := []string{"SERVICE_CA_CERT"}
	var missing error
	if callback {
		missing = need(v, "SERVER_CA_CERT", "ZTS_NAME")
		rootsFiles = append(rootsFiles, "SERVER_CA_CERT")
	}
	if signs {
		missing = errors.Join(missing, need(v, "NODE_NAMES"))
	}
	if !callback && !signs {
		missing = v.Reject("PROVIDER_ADDR", errors.New("SIGNING_ADDR is off, too: set one of them to an address"))
	}
	if missing != nil {
		return missing
	}
	if err := readable(v, "CERT_FILE", "KEY_FILE", rootsFiles...); err != nil {
		return err
	}
	service, err := athenzname.ParseService(v.Text("PROVIDER_SERVICE"))
	if err != nil {
		return v.Reject("PROVIDER_SERVICE", err)
	}
	own, err := readPair(v.Text("CERT_FILE"), v.Text("KEY_FILE"))
	if err != nil {
		return v.Reject("CERT_FILE", err)
	}
	if cn := own.Leaf().Subject.CommonName; callback && cn != service.String() {
		return v.Reject("CERT_FILE", fmt.Errorf("the common name is %.200q; ZTS asks for that of the provider: set it to the certificate of %s", cn, service))
	}
	signer, err := athenz.NewSigner(athenz.SignerOptions{Dir: v.Text("PRIVATE_KEY_DIR"), KeyName: v.Text("SECRET_NAME"), Lifetime: v.Duration("TOKEN_EXPIRY"), Logger: o.Logger})
	if err != nil {
		return v.Reject("PRIVATE_KEY_DIR", err)
	}
	verifier, err := athenz.NewVerifier(athenz.VerifierOptions{Dir: v.Text("PUBLIC_KEY_DIR"), KeyName: v.Text("SECRET_NAME"), Leeway: clockLeeway})
	if err != nil {
		return v.Reject("PUBLIC_KEY_DIR", err)
	}
	keysWork := func() error { return checkKeys(v, signer, verifier, signs, callback) }
	if err := keysWork(); err != nil {
		return err
	}
	ready := func() error { return errors.Join(readable(v, "CERT_FILE", "KEY_FILE", rootsFiles...), keysWork()) }
	td, named := trustDomain(v)
	var confirms, documents *requests
	if callback {
		if confirms, err = newCallback(v, o, service, verifier, td, named); err != nil {
			return err
		}
	}
	if signs {
		if documents, err = newSigning(v, o, signer, td); err != nil {
			return err
		}
	}
	g := newGroup(ctx, v, o)
	var parts []health.Part
	if callback {
		g.listen(v, "PROVIDER_ADDR", confirms, serverTLS(v))
		parts = append(parts, health.Part{Name: "provider", Source: confirms, Check: ready})
	}
	if signs {
		g.listen(v, "SIGNING_ADDR", documents, serverTLS(v))
		parts = append(parts, health.Part{Name: "signing", Source: documents, Check: ready})
	}
	g.health(v, parts...)
	return g.wait()
}

func newCallback(v *settings.Values, o Options, service athenzname.Service, verifier *athenz.Verifier, td spiffe.TrustDomain, named bool) (*requests, error) {
	api, err := athenz.NewAPIServer(v.Text("KUBERNETES_API"), o.Kubernetes)
	if err != nil {
		return nil, v.Reject("KUBERNETES_API", err)
	}
	zts, err := athenz.ClientCertificate(td, rootsFile{td, v.Text("SERVER_CA_CERT")}, v.Text("ZTS_NAME"))
	if err != nil {
		return nil, v.Reject("ZTS_NAME", err)
	}
	cfg := athenz.ProviderConfig{
		Service: service, ZTS: zts, Verifier: verifier, Pods: api, Suffix: v.Text("DNS_SUFFIX"), Mapping: mapping(v), Logger: o.Logger,
	}
	if named {
		cfg.TrustDomain = td
	}
	if object := v.Text("USED_DOCUMENTS"); object != "" {
		used, err := newUsedDocuments(object, kube.Options{URL: v.Text("KUBERNETES_API"), Client: o.Kubernetes})
		if err != nil {
			return nil, v.Reject("KUBERNETES_API", err)
		}
		cfg.FirstUse = used.first
	}
	p, err := athenz.NewProvider(cfg)
	if err != nil {
		return nil, err
	}
	return o.count("provider", p), nil
}

func newSigning(v *settings.Values, o Options, signer *athenz.Signer, td spiffe.TrustDomain) (*requests, error) {
	nodes, err := athenz.ClientCertificate(td, rootsFile{td, v.Text("SERVICE_CA_CERT")}, v.List("NODE_NAMES")...)
	if err != nil {
		return nil, v.Reject("NODE_NAMES", err)
	}
	handler, err := athenz.NewSigningHandler(signer, nodes, o.Logger)
	if err != nil {
		return nil, err
	}
	return o.count("signing", handler), nil
}

// checkKeys signs a document that is never used, and verifies it if there are both.
func checkKeys(v *settings.Values, signer *athenz.Signer, verifier *athenz.Verifier, signs, verifies bool) error {
	if !signs {
		return nil // what the nodes present will show it
	}
	text, err := signer.SignDocument(context.Background(), athenz.PodSubject{
		Namespace: "default", Pod: "none", Service: athenzname.Service{Domain: "default", Name: "none"}, IP: netip.AddrFrom4([4]byte{192, 0, 2, 1}),
	})
	if err != nil {
		return v.Reject("PRIVATE_KEY_DIR", fmt.Errorf("%w; put a key there, and give its public key to the verifiers before", err))
	}
	if verifies {
		if _, err := verifier.Verify(text); err != nil {
			return v.Reject("PUBLIC_KEY_DIR", fmt.Errorf("%w; put the public key of each version there, the newest before its private key", err))
		}
	}
	return nil
}
