package main

import (
	"context"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// caOptions are the flags that say where identities come from.
type caOptions struct {
	from, roots, tokenFile, tokenCommand     string
	cluster, mount, role, login, fingerprint string
	impersonate, create                      bool
	lifetime                                 time.Duration
}

func (c *caOptions) register(flags *flag.FlagSet) {
	flags.StringVar(&c.from, "ca", "", "`where` the identities come from: istio:URL, vault:URL, step:URL, google:POOL, dir:FOLDER of a CA of this machine, or spire:unix:///PATH of an agent")
	flags.StringVar(&c.roots, "ca-roots", "", "`file` with the roots of the CA, in PEM")
	flags.StringVar(&c.tokenFile, "token-file", "", "`file` with the token for the CA, read for each request")
	flags.StringVar(&c.tokenCommand, "token-command", "", "`command` that prints a token for a request, such as \"step ca token {id}\"; {id} is the SPIFFE ID")
	flags.StringVar(&c.cluster, "istio-cluster", "Kubernetes", "`name` of the cluster that the token for istio: is from")
	flags.BoolVar(&c.impersonate, "impersonate", false, "with istio:, ask for each identity by name, which the CA permits to agents of nodes")
	flags.StringVar(&c.role, "vault-role", "", "`role` of the PKI engine of vault:, which signs")
	flags.StringVar(&c.mount, "vault-mount", "", "`path` of the PKI engine (default pki)")
	flags.StringVar(&c.login, "vault-login", "", "`role` of the auth method jwt, to log in with the token; empty: it is a token of Vault")
	flags.StringVar(&c.fingerprint, "step-fingerprint", "", "`SHA-256` of the root of step:, in place of -ca-roots")
	flags.BoolVar(&c.create, "create", false, "with dir:, make a CA if the folder has none")
	flags.DurationVar(&c.lifetime, "lifetime", 0, "`time` to ask for with each certificate (default: the CA decides)")
}

// origin is where identities come from.
type origin struct {
	source interface {
		sds.Source
		report.Reporter
		Bundles() *spiffe.BundleSet
		Changed() <-chan struct{}
	}
	issue    func(ctx context.Context, id spiffe.ID, audience []string) (string, error)
	validate func(ctx context.Context, audience, token string) (spiffe.ID, map[string]any, error)
	parts    map[string]func(context.Context) error // to run
}

// source makes the origin that -ca names.
func (c *caOptions) source(ctx context.Context, o *options) (*origin, error) {
	kind, where, _ := strings.Cut(c.from, ":")
	if kind == "spire" {
		return fromAgent(where, o)
	}
	if o.td.IsZero() {
		return nil, misused("-trust-domain is needed, and -ca")
	}
	endpoint := caclient.Endpoint{URL: where, TrustDomain: o.td, RootsFile: c.roots, TokenFile: c.tokenFile, Logger: o.log}
	if c.tokenCommand != "" {
		endpoint.Token = c.token
	}
	var from caclient.CA
	var err error
	switch kind {
	case "dir":
		return c.fromFolder(ctx, where, o)
	case "istio":
		from, err = istioca.New(istioca.Options{Endpoint: endpoint, ClusterID: c.cluster})
	case "vault":
		opts := vault.Options{Endpoint: endpoint, Role: c.role, Mount: c.mount}
		if c.login != "" {
			opts.Login = vault.KubernetesLogin("jwt", c.login)
		}
		from, err = vault.New(opts)
	case "step":
		from, err = stepca.New(stepca.Options{Endpoint: endpoint, Fingerprint: c.fingerprint})
	case "google":
		endpoint.URL = ""
		from, err = googlecas.New(googlecas.Options{Endpoint: endpoint, Pool: where})
	default:
		return nil, misused("-ca is %q, and has to begin with istio:, vault:, step:, google:, dir: or spire:", c.from)
	}
	if err != nil {
		return nil, usageError{err}
	}
	return c.manage(named{from}, o)
}

// manage returns the origin of a CA.
func (c *caOptions) manage(from caclient.CA, o *options) (*origin, error) {
	m, err := secretcache.New(secretcache.Config{TrustDomain: o.td, CA: from, Lifetime: c.lifetime, Logger: o.log})
	if err != nil {
		return nil, err
	}
	return &origin{source: m, parts: map[string]func(context.Context) error{"identities": m.Run}}, nil
}

type idKey struct{}

// named tells -token-command for which ID a request is.
type named struct{ caclient.CA }

func (n named) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	id, err := csr.ID()
	if err != nil {
		return nil, err
	}
	return n.CA.Sign(context.WithValue(ctx, idKey{}, id.String()), csr, lifetime)
}

// token runs -token-command. What it prints is not in errors.
func (c *caOptions) token(ctx context.Context) (string, error) {
	id, _ := ctx.Value(idKey{}).(string)
	args := strings.Fields(c.tokenCommand)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "{id}", id)
	}
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).Output()
	if err != nil {
		return "", fmt.Errorf("-token-command: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// fromFolder is a CA in this process, whose keys are in a folder.
func (c *caOptions) fromFolder(ctx context.Context, folder string, o *options) (*origin, error) {
	store, err := ca.NewDirStore(folder)
	if err != nil {
		return nil, err
	}
	authority, err := ca.Open(ctx, ca.Config{TrustDomain: o.td, JWT: &ca.JWTConfig{}, Create: c.create}, store)
	if errors.Is(err, ca.ErrNoRecord) {
		return nil, misused("there is no CA in %s: restore it, or make a new one with -create", folder)
	}
	if err != nil {
		return nil, err
	}
	return c.fromAuthority(authority, o)
}

func (c *caOptions) fromAuthority(authority *ca.Authority, o *options) (*origin, error) {
	// This process is the one caller, and asks for the identities of its file.
	issuer, err := local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) { return csr.ID() })
	if err != nil {
		return nil, err
	}
	from, err := c.manage(issuer, o)
	if err != nil {
		return nil, err
	}
	validator, err := jwtsvid.NewAgentValidator(from.source.(*secretcache.Manager), nil)
	if err != nil {
		return nil, err
	}
	from.issue, from.validate, from.parts["CA"] = authority.IssueJWTSVID, validator.ValidateJWTSVID, authority.Run
	return from, nil
}

// fromAgent takes the identities of this process from another agent, such as SPIRE's.
func fromAgent(address string, o *options) (*origin, error) {
	client, err := workloadapi.NewClient(address, nil)
	if err != nil {
		return nil, misused("-ca spire: %w", err)
	}
	src, err := workloadapi.New(workloadapi.Config{Client: client, JWTBundles: true, Logger: o.log})
	if err != nil {
		return nil, err
	}
	return &origin{
		source: src, validate: client.ValidateJWTSVID, parts: map[string]func(context.Context) error{"identities": src.Run},
		issue: func(ctx context.Context, id spiffe.ID, audience []string) (string, error) {
			tokens, err := client.FetchJWTSVIDs(ctx, id, audience...)
			if err != nil {
				return "", err
			}
			return tokens[0].Token(), nil
		},
	}, nil
}
