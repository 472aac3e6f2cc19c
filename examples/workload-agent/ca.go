package main

import (
	"context"
	"crypto"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// caOptions are the flags that choose the source of identities.
type caOptions struct {
	from, roots, tokenFile string
	more                   map[string]string
}

func (c *caOptions) register(flags *flag.FlagSet) {
	c.more = make(map[string]string)
	flags.StringVar(&c.from, "ca", "", "`where` the identities come from: istio:URL, vault:URL, step:URL, "+
		"google:POOL, dir:DIRECTORY of a CA of this machine, or spire:unix:///PATH of an agent")
	flags.StringVar(&c.roots, "ca-roots", "", "`file` with the roots of the CA, in PEM")
	flags.StringVar(&c.tokenFile, "token-file", "", "`file` with the token for the CA, read for each request")
	flags.Func("ca-option", "`NAME=VALUE` for -ca: cluster, impersonate=true (istio), role, mount, login (vault), "+
		"fingerprint (step), create=true, root-keys, and issuer and algorithm of tokens (dir); may be repeated", func(
		text string) error {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return errors.New("want NAME=VALUE")
		}
		c.more[name] = value
		return nil
	})
}

// option returns the value of an option, and marks it as known.
func (c *caOptions) option(name string) string {
	defer delete(c.more, name)
	return c.more[name]
}

// chosen reports whether an option is true. An option with another value stays unknown.
func (c *caOptions) chosen(name string) bool { return c.more[name] == "true" && c.option(name) != "" }

// origin is the source of identities, with the signers and verifiers of tokens and the parts that must run for them.
type origin struct {
	workloadagent.Config
	run []func(context.Context) error
}

// origin opens the source that -ca names.
func (o *options) origin(ctx context.Context) (from *origin, err error) {
	c := &o.ca
	kind, where, _ := strings.Cut(c.from, ":")
	if o.td.IsZero() && kind != "spire" {
		return nil, program.Misused("it is needed, and so is -trust-domain")
	}
	endpoint := caclient.Endpoint{URL: where, TrustDomain: o.td, RootsFile: c.roots, TokenFile: c.tokenFile,
		Logger: o.log}
	var issuer caclient.CA
	switch kind {
	case "spire":
		if o.keys != "" {
			return nil, program.Misused("with spire: there is no -keys: that agent makes the keys")
		}
		from, err = fromAgent(where, o)
	case "dir":
		from, err = fromFolder(ctx, where, o)
	case "istio":
		issuer, err = istioca.New(istioca.Options{Endpoint: endpoint, ClusterID: c.option("cluster"),
			Impersonate: c.chosen("impersonate")})
	case "vault":
		opts := vault.Options{Endpoint: endpoint, Role: c.option("role"), Mount: c.option("mount")}
		if login := c.option("login"); login != "" {
			opts.LoginRole, opts.LoginMount = login, "jwt"
		}
		issuer, err = vault.New(opts)
	case "step":
		issuer, err = stepca.New(stepca.Options{Endpoint: endpoint, Fingerprint: c.option("fingerprint")})
	case "google":
		endpoint.URL = ""
		issuer, err = googlecas.New(googlecas.Options{Endpoint: endpoint, Pool: where})
	default:
		return nil, program.Misused("it begins with istio:, vault:, step:, google:, dir: or spire:, and not as %q "+
			"does", c.from)
	}
	if err == nil && from == nil {
		from, err = fromCA(issuer, o)
	}
	for name, value := range c.more {
		if err != nil && kind == "dir" { // the directory was not created yet
			break
		}
		err = program.Misused("%s: -ca-option %s=%.64q: there is %s", kind, name, value, caOptionsOf[kind])
	}
	if err != nil && kind != "dir" {
		err = program.UsageError{Err: err}
	}
	return from, err
}

// caOptionsOf lists the names and values of -ca-option.
var caOptionsOf = map[string]string{
	"istio": "cluster=NAME and impersonate=true", "vault": "role=NAME, mount=PATH and login=ROLE",
	"step": "fingerprint=HEX",
	"dir":  "create=true, root-keys=NAME[,NAME], issuer=URL and algorithm=NAME", "google": "none", "spire": "none",
}

// fromCA returns an origin that uses a CA.
func fromCA(issuer caclient.CA, o *options) (*origin, error) {
	first, second, _ := strings.Cut(o.keys, ",")
	m, err := secretcache.New(secretcache.Config{TrustDomain: o.td, CA: issuer, CAName: o.ca.from, NewKey: maker(first),
		NewAlternative: maker(second), Logger: o.log})
	if err != nil {
		return nil, err
	}
	return &origin{workloadagent.Config{Source: m}, []func(context.Context) error{m.Run}}, nil
}

// maker returns a function that makes keys of an algorithm; nil for "".
func maker(algorithm string) func() (crypto.Signer, error) {
	if algorithm == "" {
		return nil
	}
	return func() (crypto.Signer, error) { return pki.NewKey(algorithm) }
}

// fromFolder returns an origin with a CA in this process, whose keys are in a directory.
func fromFolder(ctx context.Context, folder string, o *options) (*origin, error) {
	var roots ca.Rotation
	if keys := o.ca.option("root-keys"); keys != "" {
		var err error
		if roots.KeyAlgorithm, err = program.Keys(keys); err != nil {
			return nil, program.Misused("-ca-option root-keys: %w", err)
		}
	}
	store, err := ca.NewDirStore(folder)
	var authority *ca.Authority
	if err == nil {
		authority, err = ca.Open(ctx, ca.Config{TrustDomain: o.td, JWT: &ca.JWTConfig{Issuer: o.ca.option("issuer"),
			Algorithm: o.ca.option("algorithm")}, Rotation: roots, Algorithms: spiffe.AnyAlgorithm(),
			Create: o.ca.chosen("create"), Logger: o.log}, store)
	}
	switch {
	case errors.Is(err, ca.ErrNoRecord):
		return nil, program.Misused("there is no CA in %s: restore it, or make a new one with -ca-option create=true",
			folder)
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS):
		return nil, fmt.Errorf("%w; give the directory to user %d, as which this runs, or name one that it may "+
			"write to",
			err, os.Getuid())
	case err != nil:
		return nil, err
	}
	// This process is the only caller; it asks for the identities in its file.
	issuer, err := local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) {
		return csr.ID()
	})
	if err != nil {
		return nil, err
	}
	from, err := fromCA(issuer, o)
	if err != nil {
		return nil, err
	}
	validator, err := jwtsvid.NewAgentValidator(from.Source.(*secretcache.Manager),
		&jwtsvid.ValidatorOptions{Algorithms: o.algorithms})
	if err != nil {
		return nil, err
	}
	from.IssueJWTSVID, from.ValidateJWTSVID, from.run = authority.IssueJWTSVID, validator.ValidateJWTSVID, append(
		from.run, authority.Run)
	return from, nil
}

// upstream is another agent, whose identities it serves as secrets.
type upstream struct {
	*workloadapi.Source
	secrets
}

type secrets = sds.Source

// fromAgent returns an origin that takes this process's identities from another agent, such as SPIRE's.
func fromAgent(address string, o *options) (*origin, error) {
	client, err := workloadapi.NewClient(address, nil)
	if err != nil {
		return nil, err
	}
	src, err := workloadapi.New(workloadapi.Config{Client: client, JWTBundles: true, Logger: o.log})
	if err != nil {
		return nil, err
	}
	issue := func(ctx context.Context, id spiffe.ID, audience []string) (string, error) {
		tokens, err := client.FetchJWTSVIDs(ctx, id, audience...)
		if err != nil {
			return "", err
		}
		return tokens[0].Token(), nil
	}
	from := upstream{src, sdssource.FromIdentity(src)}
	return &origin{workloadagent.Config{Source: from, IssueJWTSVID: issue, ValidateJWTSVID: client.ValidateJWTSVID},
		[]func(context.Context) error{src.Run}}, nil
}
