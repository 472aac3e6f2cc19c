package main

import (
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/examples/athenz-provider/firstuse"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
)

// serve runs the provider and the signing service until ctx is done.
func serve(ctx context.Context, s program.Settings, out io.Writer, log *slog.Logger) error {
	roots, err := required(s)
	if err != nil {
		return program.UsageError{Err: err}
	}
	own, parts, err := ownCertificate(s, log)
	if err = errors.Join(err, s.Roots(roots...)); err != nil {
		return err
	}
	keys, err := newKeys(s)
	if err != nil {
		return err
	}
	var status []health.Part
	add := func(name, variable string, make func() (http.Handler, error)) error {
		if s.Text(variable) == program.Off {
			return nil
		}
		h, err := make()
		if err != nil {
			return err
		}
		l, err := s.Listen(variable, out)
		if err != nil {
			return err
		}
		counted := program.Count(name, h)
		status = append(status, health.Part{Name: name, Source: counted, Check: func() error {
			_, err := own()
			return errors.Join(err, s.Roots(roots...), keys.check())
		}})
		parts = append(parts, serving(l, caserver.ServeOptions{Handler: counted, TLS: serverTLS(own), Logger: log}))
		return nil
	}
	err = add("provider", "PROVIDER_ADDR", func() (http.Handler, error) { return newCallback(s, keys.verifier, log) })
	if err == nil {
		err = add("signing", "SIGNING_ADDR", func() (http.Handler, error) { return newSigning(s, keys.signer, log) })
	}
	if err == nil && s.Text("HEALTH_ADDR") != program.Off {
		err = addHealth(s, out, log, status, &parts)
	}
	if err != nil {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		_ = program.Together(ended, parts...) // closes the ports that are open
		return err
	}
	return program.Together(ctx, parts...)
}

func addHealth(s program.Settings, out io.Writer, log *slog.Logger, status []health.Part,
	parts *[]func(context.Context) error) error {
	h, err := health.New(status...)
	if err != nil {
		return err
	}
	l, err := s.Listen("HEALTH_ADDR", out)
	if err != nil {
		return err
	}
	*parts = append(*parts, serving(l, caserver.ServeOptions{Handler: h, Plaintext: true, Logger: log}))
	return nil
}

func serving(l net.Listener, o caserver.ServeOptions) func(context.Context) error {
	return func(ctx context.Context) error { return caserver.Serve(ctx, l, o) }
}

// required returns an error for missing settings, and the variables that name files of CA certificates.
func required(s program.Settings) (roots []string, err error) {
	roots, needed := []string{"SERVICE_CA_CERT"}, []string{"PROVIDER_SERVICE"}
	if s.Text("PROVIDER_ADDR") != program.Off {
		needed = append(needed, "ZTS_NAME")
	}
	switch {
	case s.Text("SERVICE_KEY_DIR") == "":
		needed = append(needed, "CERT_FILE", "KEY_FILE")
	case s.Text("CERT_FILE")+s.Text("KEY_FILE") != "":
		err = s.Reject("SERVICE_KEY_DIR", errors.New(
			"CERT_FILE or KEY_FILE is set, too: the certificate is from files, or from ZTS"))
	default:
		needed = append(needed, "ZTS_ENDPOINT")
	}
	if s.Text("PROVIDER_ADDR") != program.Off || s.Text("SERVICE_KEY_DIR") != "" {
		roots = append(roots, "SERVER_CA_CERT")
	}
	err = errors.Join(err, s.Need(append(needed, roots...)...))
	if s.Text("SIGNING_ADDR") != program.Off {
		err = errors.Join(err, s.Need("NODE_NAMES"))
	}
	if s.Text("PROVIDER_ADDR") == program.Off && s.Text("SIGNING_ADDR") == program.Off {
		err = errors.Join(err, s.Reject("PROVIDER_ADDR",
			errors.New("SIGNING_ADDR is program.Off, too: set one of them to an address")))
	}
	return roots, err
}

// keys sign and verify documents.
type keys struct {
	s        program.Settings
	signer   athenz.Signer
	verifier *athenz.Verifier
}

func newKeys(s program.Settings) (*keys, error) {
	expiry, err := time.ParseDuration(s.Text("TOKEN_EXPIRY"))
	if err != nil {
		return nil, s.Reject("TOKEN_EXPIRY", err)
	}
	k := &keys{s: s}
	if k.signer, err = athenz.NewSigner(s.Text("PRIVATE_KEY_DIR"), s.Text("SECRET_NAME"), expiry); err != nil {
		return nil, s.Reject("PRIVATE_KEY_DIR", err)
	}
	if k.verifier, err = athenz.NewVerifier(s.Text("PUBLIC_KEY_DIR"), s.Text("SECRET_NAME")); err != nil {
		return nil, s.Reject("PUBLIC_KEY_DIR", err)
	}
	return k, k.check()
}

// check signs a throwaway document, and verifies it if there are both keys.
func (k *keys) check() error {
	if k.s.Text("SIGNING_ADDR") == program.Off {
		return nil // the first real document will show it
	}
	text, err := k.signer(context.Background(), athenz.PodSubject{
		Namespace: "default", Pod: "none", Service: athenzname.Service{Domain: "default",
			Name: "none"}, IP: netip.AddrFrom4([4]byte{192, 0, 2, 1}),
	})
	if err != nil {
		return k.s.Reject("PRIVATE_KEY_DIR", fmt.Errorf(
			"%w; put a key there, and give its public key to the verifiers before", err))
	}
	if k.s.Text("PROVIDER_ADDR") != program.Off {
		if _, err := k.verifier.Verify(text); err != nil {
			return k.s.Reject("PUBLIC_KEY_DIR",
				fmt.Errorf("%w; put the public key of each version there, the newest before its private key", err))
		}
	}
	return nil
}

func newCallback(s program.Settings, verifier *athenz.Verifier, log *slog.Logger) (http.Handler, error) {
	service, err := athenzname.ParseService(s.Text("PROVIDER_SERVICE"))
	if err != nil {
		return nil, s.Reject("PROVIDER_SERVICE", err)
	}
	pods, err := athenz.NewAPIServer(s.Text("KUBERNETES_API"), nil)
	if err != nil {
		return nil, s.Reject("KUBERNETES_API", err)
	}
	td, named := s.TrustDomain()
	zts, err := athenz.ClientCertificate(td, rootsFile{td, s.Text("SERVER_CA_CERT")}, s.Text("ZTS_NAME"))
	if err != nil {
		return nil, s.Reject("ZTS_NAME", err)
	}
	cfg := athenz.ProviderConfig{
		Service: service, ZTS: zts, Verifier: verifier, Pods: pods, Suffix: s.Text("DNS_SUFFIX"), Logger: log,
		Mapping: s.Mapping(),
	}
	if named {
		cfg.TrustDomain = td
	}
	if object := s.Text("USED_DOCUMENTS"); object != "" {
		if cfg.FirstUse, err = firstuse.InConfigMap(s.Text("KUBERNETES_API"), nil, object); err != nil {
			return nil, s.Reject("USED_DOCUMENTS", err)
		}
	}
	return athenz.NewProvider(cfg)
}

func newSigning(s program.Settings, signer athenz.Signer, log *slog.Logger) (http.Handler, error) {
	td, _ := s.TrustDomain()
	nodes, err := athenz.ClientCertificate(td, rootsFile{td, s.Text("SERVICE_CA_CERT")}, s.List("NODE_NAMES")...)
	if err != nil {
		return nil, s.Reject("NODE_NAMES", err)
	}
	return athenz.NewSigningHandler(signer, nodes, log)
}

// rootsFile is a file of CA certificates, read at each use. It is a [spiffe.BundleSource].
type rootsFile struct {
	td   spiffe.TrustDomain
	path string
}

// Bundle implements [spiffe.BundleSource].
func (r rootsFile) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if td != r.td {
		return nil, spiffe.ErrUnknownTrustDomain
	}
	return program.ReadBundle(td, r.path)
}

// serverTLS requests client certificates, which the handler verifies, and reads its own certificate for each
// handshake. If reading fails, as while files are being replaced, it serves the last one until that expires.
func serverTLS(own certificate) *tls.Config {
	var mu sync.Mutex
	last, _ := own() // an error returns with the first handshake
	return &tls.Config{MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			c, err := own()
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				last = c
			} else if last == nil || !time.Now().Before(last.NotAfter()) {
				return nil, err
			}
			return last.TLSCertificate(), nil
		}}
}

// certificate returns the program's own certificate.
type certificate func() (*pki.Credential, error)

// readPair reads CERT_FILE and KEY_FILE.
func readPair(s program.Settings) (*pki.Credential, error) {
	c, err := s.Pair()
	if err == nil && s.Text("PROVIDER_ADDR") != program.Off &&
		c.Leaf().Subject.CommonName != s.Text("PROVIDER_SERVICE") {
		return nil, s.Reject("CERT_FILE", fmt.Errorf(
			"the common name is %.200q; ZTS asks for that of the provider: set it to the certificate of %s",
			c.Leaf().Subject.CommonName, s.Text("PROVIDER_SERVICE")))
	}
	return c, err
}

// ownCertificate returns the source of the program's certificate, and the parts of the program that renew it.
func ownCertificate(s program.Settings, log *slog.Logger) (own certificate, parts []func(context.Context) error,
	err error) {
	if s.Text("SERVICE_KEY_DIR") == "" {
		own = func() (*pki.Credential, error) { return readPair(s) }
		_, err = own()
		return own, nil, err
	}
	m, err := byServiceKey(s, log)
	if err != nil {
		return nil, nil, s.Reject("SERVICE_KEY_DIR", err)
	}
	own = func() (*pki.Credential, error) {
		c, err := m.Credential()
		if err == nil && time.Now().Before(c.NotAfter()) {
			return c, nil
		}
		return nil, s.Reject("SERVICE_KEY_DIR",
			errors.Join(errors.New("there is no certificate of ZTS, or it has expired"), err,
				m.Report().Identities[0].Err))
	}
	return own, []func(context.Context) error{m.Run}, nil
}

// byServiceKey returns the manager of a certificate that ZTS issues for the key that the service has registered
// there.
func byServiceKey(s program.Settings, log *slog.Logger) (*secretcache.Manager, error) {
	data, err1 := os.ReadFile(filepath.Join(s.Text("SERVICE_KEY_DIR"), "service.key"))
	version, err2 := os.ReadFile(filepath.Join(s.Text("SERVICE_KEY_DIR"), "service.version"))
	key, err := pki.ParsePrivateKeyPEM(data)
	if err = cmp.Or(err1, err2, err); err != nil {
		return nil, fmt.Errorf("service.key and service.version: %w", err)
	}
	service, _ := athenzname.ParseService(s.Text("PROVIDER_SERVICE")) // already checked
	token := athenz.ServiceToken{Service: service, KeyID: strings.TrimSpace(string(version))}
	sign := func(context.Context) (string, error) { return athenz.SignServiceToken(token, key) }
	_, err1 = sign(context.Background())
	instance := athenzname.Instance{Service: service, Suffix: s.Text("DNS_SUFFIX")}
	want, err2 := ztsclient.Expectation(instance, program.Nameless)
	zts, err := ztsclient.New(ztsclient.Options{
		Endpoint: caclient.Endpoint{URL: s.Text("ZTS_ENDPOINT"), TrustDomain: program.Nameless,
			RootsFile: s.Text("SERVICE_CA_CERT"), Token: sign, Logger: log},
		ServerRootsFile: s.Text("SERVER_CA_CERT"), Instance: instance, KeyID: token.KeyID,
	})
	if err = cmp.Or(err1, err2, err); err != nil {
		return nil, err
	}
	newKey := func() (crypto.Signer, error) { return key, nil } // the registered key
	return secretcache.New(secretcache.Config{Expect: want, CommonName: service.String(), CA: zts, NewKey: newKey,
		Logger: log})
}
