package caconfig

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// documents returns how to serve the documents of -oidc-issuer. certificate is the one in -oidc-cert; nil means the
// server's own.
func (c *Config) documents(signer ca.Signer, identity spiffe.SVIDSource,
	certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error), log *slog.Logger) (o caserver.ServeOptions,
	err error) {
	o.Logger = log
	if o.Handler, err = jwtsvid.NewOIDCHandler(only(signer.Bundle), c.CA.TrustDomain, c.oidc.issuer); err != nil {
		return o, err
	}
	if o.TLS, err = federation.ServerConfig(identity); err != nil {
		return o, err
	}
	if certificate != nil {
		o.TLS.GetCertificate = certificate
	}
	return o, nil
}

// serveDocuments serves a.OIDC. Its failure ends the server with that cause.
func (a *Authority) serveDocuments(ctx context.Context, o caserver.ServeOptions, end context.CancelCauseFunc) {
	err := caserver.Serve(ctx, a.OIDC, o)
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		err = errors.New("it has ended by itself")
	}
	a.failed = fmt.Errorf("documents of the OpenID Connect issuer: %w", err)
	end(a.failed)
}

// only is the source of a CA's only bundle.
type only func() *spiffe.Bundle

func (o only) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if b := o(); b != nil && b.TrustDomain() == td {
		return b, nil
	}
	return nil, fmt.Errorf("the CA has no bundle of %q: %w", td, spiffe.ErrUnknownTrustDomain)
}
