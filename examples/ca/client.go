package main

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/svidkit/svidkit/caclient/istioca"
	linkerdwire "github.com/svidkit/svidkit/internal/wire/linkerd"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// newClient returns an HTTP client that talks to the server by the roots of b, from one connection
// to the next. It shows the certificate, which may be nil.
func newClient(b *spiffe.Bundle, own *tls.Certificate) *http.Client {
	cfg := &tls.Config{RootCAs: b.CertPool(), ServerName: "localhost", MinVersion: tls.VersionTLS13}
	if own != nil {
		cfg.Certificates = []tls.Certificate{*own}
	}
	return &http.Client{
		Transport: &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true},
		Timeout:   10 * time.Second,
	}
}

// istioRequest asks Istio's API for a certificate, as an agent does: with a token, or with an empty
// one if the client shows a certificate. It returns the chain, leaf first, and the roots that came
// with it.
func istioRequest(ctx context.Context, c *http.Client, url string, td spiffe.TrustDomain, token string, key crypto.Signer) (chain, roots []*x509.Certificate, err error) {
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		return nil, nil, err
	}
	return istioCSR(ctx, c, url, td, token, csr)
}

func istioCSR(ctx context.Context, c *http.Client, url string, td spiffe.TrustDomain, token string, csr *pki.CSR) (chain, roots []*x509.Certificate, err error) {
	client, err := istioca.New(istioca.Options{
		URL: url, HTTPClient: c, TrustDomain: td,
		Token: func(context.Context) (string, error) { return token, nil },
	})
	if err != nil {
		return nil, nil, err
	}
	if chain, err = client.Sign(ctx, csr, 0); err != nil {
		return nil, nil, err
	}
	set, err := client.FetchBundles(ctx)
	if err != nil {
		return nil, nil, err
	}
	b, err := set.Bundle(td)
	if err != nil {
		return nil, nil, err
	}
	return chain, slices.Collect(b.X509Authorities()), nil
}

// linkerdRequest asks Linkerd's API for a certificate for name, as a proxy does.
func linkerdRequest(ctx context.Context, c *http.Client, url, token, name string, key crypto.Signer) ([]*x509.Certificate, error) {
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN(name)}})
	if err != nil {
		return nil, err
	}
	rpc := connect.NewClient[linkerdwire.CertifyRequest, linkerdwire.CertifyResponse](c, url+linkerdwire.Certify, connect.WithGRPC())
	resp, err := rpc.CallUnary(ctx, connect.NewRequest(&linkerdwire.CertifyRequest{
		Identity: name, Token: []byte(token), CertificateSigningRequest: csr.DER(),
	}))
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(resp.Msg.GetLeafCertificate())
	if err != nil {
		return nil, err
	}
	chain := []*x509.Certificate{leaf}
	for _, der := range resp.Msg.GetIntermediateCertificates() {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		chain = append(chain, cert)
	}
	return chain, nil
}

// checkLinkerd verifies a chain as Linkerd's proxies do: by the name, against the trust anchors.
func checkLinkerd(chain []*x509.Certificate, name string, b *spiffe.Bundle) error {
	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		DNSName: name, Roots: b.CertPool(), Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	if err != nil {
		return fmt.Errorf("certificate for %s: %w", name, err)
	}
	return nil
}
