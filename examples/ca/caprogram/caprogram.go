// Package caprogram is the program examples/ca, for other programs that are the same with more kinds of stores and
// custodians, such as examples/ca-full.
package caprogram

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

//go:embed install.yaml
var manifest string

// Program is a certificate authority as a program.
type Program struct {
	Name  string         // in what it prints
	Kinds caconfig.Kinds // stores and custodians that it has beside those of package caconfig
}

// Main runs the program with the arguments and the environment of the process, and ends the process.
func Main(p Program) {
	program.Main(p.Name, func(ctx context.Context) error {
		err := p.run(ctx, os.Args[1:], os.Getenv, os.Stdin, os.Stdout, os.Stderr)
		if err == nil || errors.Is(err, flag.ErrHelp) {
			return err
		}
		said := errors.New(message(err))
		if _, usage := errors.AsType[program.UsageError](err); usage || errors.Is(err, caconfig.ErrUsage) {
			return program.UsageError{Err: said}
		}
		return said
	})
}

// message returns an error in one line, without the name of package ca, which is also the program's.
func message(err error) string {
	return strings.ReplaceAll(strings.TrimPrefix(strings.ReplaceAll(err.Error(), "\n", "; "), "ca: "), ": ca: ", ": ")
}

// run is the program. It returns nil when a signal ends it.
func (p Program) run(ctx context.Context, args []string, getenv func(string) string, in io.Reader,
	out, errOut io.Writer) error {
	o, err := p.parse(args, getenv, out)
	if err != nil {
		return err
	}
	switch o.command {
	case "":
	case "version":
		fmt.Fprintln(out, p.Name, program.Version())
		return nil
	case "demo":
		return demo(ctx, o.CA.TrustDomain, 5*time.Second, out)
	case "store-schema":
		schema, err := o.StoreSchema()
		if err == nil {
			_, err = fmt.Fprint(out, schema)
		}
		return err
	case "install":
		if o.argument == "kubernetes" {
			return o.manifest.Print(out)
		}
		return install(out, o.argument, o.anchorDir, o.mesh, o.issuerTTL, o.manifest)
	default:
		return o.do(ctx, in, out)
	}
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	o.refusals = new(refusals)
	log := slog.New(noting{slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level}), o.refusals})
	o.pods.Logger = log
	ctx, cancel := context.WithCancel(ctx)
	var keeps sync.WaitGroup
	defer func() { cancel(); keeps.Wait() }()
	reopen := make(chan os.Signal, 1)
	signal.Notify(reopen, syscall.SIGHUP)
	defer signal.Stop(reopen)
	return o.Serve(ctx, log, func(a *caconfig.Authority, at caserver.Listeners) {
		announce(out, o.Config, a, at)
		keeps.Go(func() { reopenAudit(ctx, reopen, a, log) })
		if what := o.missingRoot(a); what != "" {
			log.Warn("ca: a root is missing", "audit_log", o.AuditLog, "what", what)
		}
		if o.auditHead != "" {
			keeps.Go(func() { o.keepHead(ctx, a, log) })
		}
	})
}

// options are the flags of the program.
type options struct {
	*caconfig.Config
	command  string // to run instead of serving: the name of its flag
	argument string // of the command
	id       spiffe.ID
	ttl      time.Duration
	now      bool // of -revoke
	verbose  bool

	auditHead  string
	auditAfter string
	refusals   *refusals

	// of -install
	anchorDir string
	issuerTTL time.Duration
	mesh      linkerdname.Mesh
	manifest  program.Manifest

	pods pods
}

// parse parses the environment, then the flags.
func (p Program) parse(args []string, getenv func(string) string, out io.Writer) (o *options, err error) {
	o = &options{manifest: program.Manifest{Text: manifest}}
	fs := flag.NewFlagSet(p.Name, flag.ContinueOnError)
	fs.Usage = func() { _ = help.Write(out, fs) }
	fs.Bool("demo", false, "show a server at work in a few seconds, and end")
	fs.Bool("status", false, "print the state of the CA, and end")
	fs.String("once", "", "sign the request in the `file` (- for standard input) for -id, print the chain, and end")
	fs.String("jwt", "", "print a JWT-SVID of -id for the `audience`, and end")
	fs.TextVar(&o.id, "id", spiffe.ID{}, "`SPIFFE ID` for -once and -jwt")
	fs.DurationVar(&o.ttl, "ttl", 0, "`lifetime` for -once and -jwt (default that of the CA)")
	fs.Bool("rotate", false, "prepare a new root, and end; servers on the same store follow")
	fs.Bool("rotate-jwt", false, "prepare a new key for tokens, and end")
	if p.Kinds.Stores != nil {
		fs.Bool("store-schema", false, "print the table in the database of -store and the rights to it, as SQL, and end")
	}
	fs.Bool("reseal", false, "write what is in the store as -seal and -unseal say, and end")
	fs.String("taint", "", "say that the key with the `serial` number or key ID may be stolen, and end")
	fs.String("revoke", "", "take the key with the `serial` number or key ID out of the bundle now, and end")
	fs.BoolVar(&o.now, "now", false, "with -revoke: also a key that signs, whose successor signs at once")
	fs.String("verify-audit", "", "verify the audit log in the `file` (- for standard input), or those of several "+
		"replicas in files with commas between, and end")
	fs.StringVar(&o.auditHead, "audit-head", "",
		"`file` that those who can change the audit log cannot change, such as one on a share that "+
			"another machine keeps: the server has the hash of the last line in it, and -verify-audit sees by it "+
			"that "+
			"lines were cut off")
	fs.StringVar(&o.auditAfter, "audit-after", "",
		"`hash` of the last line in files that were archived or deleted, for -verify-audit; any: it is not known")
	fs.String("install", "", "print a ConfigMap with the trust anchors of a Linkerd mesh, a Secret with an issuer, "+
		"the account that alone may read it, and the identity service, and end; `scheme`: kubernetes.io/tls, "+
		"linkerd.io/tls or design. Or kubernetes: the objects of this CA in a cluster")
	o.manifest.RegisterWith(fs)
	fs.StringVar(&o.anchorDir, "anchor-dir", "",
		"`directory` of the trust anchor for -install, which is made if the directory is empty")
	fs.DurationVar(&o.issuerTTL, "issuer-ttl", 365*24*time.Hour, "`lifetime` of the issuer that -install makes")
	o.pods.define(fs)
	fs.BoolVar(&o.verbose, "v", false, "log more")
	showVersion := fs.Bool("version", false, "print the version, and end")
	o.Config, err = p.Kinds.Parse(fs, args, getenv)
	if *showVersion { // whatever the environment holds
		return &options{command: "version"}, nil
	}
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"demo", "status", "once", "jwt", "rotate", "rotate-jwt", "reseal", "taint", "revoke",
		"verify-audit", "install", "store-schema"} {
		if f := fs.Lookup(name); f != nil && f.Value.String() != f.DefValue {
			if o.command != "" {
				return nil, program.Misused("-%s and -%s: only one command at a time", o.command, name)
			}
			o.command, o.argument = name, f.Value.String()
		}
	}
	o.Page = o.page
	if err := o.setPods(fs); err != nil {
		return nil, err
	}
	o.mesh = linkerdname.Mesh{ControlNamespace: fs.Lookup("linkerd-namespace").Value.String(),
		TrustDomain: o.CA.TrustDomain.String()}
	switch sign := o.command == "once" || o.command == "jwt"; {
	case sign == o.id.IsZero():
		return nil, program.Misused("-id: -once and -jwt need a SPIFFE ID, such as spiffe://%s/ns/demo/sa/web, and "+
			"nothing else does", o.CA.TrustDomain)
	case o.ttl < 0:
		return nil, program.Misused("-ttl: it is negative")
	case o.ttl > 0 && !sign:
		return nil, program.Misused("-ttl: it is for -once and -jwt; a server has -default-ttl and -max-ttl")
	case o.command == "reseal" && o.Custody.Seal+o.Custody.Unseal == "":
		return nil, program.Misused("-reseal: name a custodian in -seal, or the one of before in -unseal")
	case o.auditHead != "" && o.AuditLog == "none":
		return nil, program.Misused("-audit-head: there is no audit log with -audit-log none")
	case o.auditHead != "" && o.command != "" && o.command != "verify-audit":
		return nil, program.Misused("-audit-head: it is for a server, and for -verify-audit")
	case o.command == "verify-audit" && o.auditHead+o.auditAfter != "" && strings.Contains(o.argument, ","):
		return nil, program.Misused("-verify-audit: with -audit-head or -audit-after name one log, as each has a " +
			"chain of its own")
	case o.auditAfter != "" && o.command != "verify-audit":
		return nil, program.Misused("-audit-after: it is for -verify-audit")
	case o.now && o.command != "revoke":
		return nil, program.Misused("-now: it is for -revoke")
	case o.manifest.Given() && o.command != "install":
		return nil, program.Misused("-with: it is for -install")
	case o.anchorDir != "" && (o.command != "install" || o.argument == "kubernetes"):
		return nil, program.Misused("-anchor-dir: it is for -install with a scheme of Linkerd")
	case o.issuerTTL < time.Hour:
		return nil, program.Misused("-issuer-ttl: it is less than an hour")
	}
	return o, nil
}

// help is what -h prints.
var help = program.Help{
	Doc: "Without a command it serves. A flag with a name in brackets can also be set by that environment " +
		"variable; the flag wins.",
	Groups: []program.FlagGroup{
		{Title: "Commands", Flags: "status rotate rotate-jwt taint revoke now reseal once jwt id ttl " +
			"verify-audit"},
		{Title: "What is printed for a cluster", Flags: "install with anchor-dir issuer-ttl"},
		{Title: "The CA", Flags: "trust-domain state-dir create wait root-ca-dir replace-own-ca multi-root " +
			"use-cacerts"},
		{Title: "Where the CA and its keys are", Flags: "custodian former-custodian seal unseal store " +
			"store-password-file store-identity store-server store-schema"},
		{Title: "Certificates", Flags: "algorithms default-ttl max-ttl shorten-ttl backdate empty-subject keep-dns-names " +
			"renew-by-certificate"},
		{Title: "Roots", Flags: "root-ttl root-check-interval root-grace-percent root-jitter root-keys rsa-bits " +
			"keep-key constrain propagation refresh-hint root-configmap"},
		{Title: "Ports", Flags: "istio-addr ca-server bundle-addr admin-addr dns-names tls-cert tls-key"},
		{Title: "Callers", Flags: "client-roots jwt-rule jwt-roots jwt-policy audience token-audiences " +
			"token-issuer own-token trusted-gateway-cidr trusted-node-accounts"},
		{Title: "Kubernetes", Flags: "kubernetes kubernetes-api namespace cluster-id remote-cluster pod-signer " +
			"pod-id pod-node-rate pod-namespace-rate"},
		{Title: "Linkerd", Flags: "linkerd-addr linkerd-plaintext linkerd-namespace linkerd-ttl linkerd-clock-skew " +
			"linkerd-any-audience linkerd-events"},
		{Title: "OpenID Connect", Flags: "oidc-issuer oidc-addr oidc-cert oidc-key jwt-algorithm"},
		{Title: "Another CA signs", Flags: "external-ca external-roots k8s-signer cert-signer-domain"},
		{Title: "Limits", Flags: "concurrent queue queue-time rate caller-rate"},
		{Title: "Audit log", Flags: "audit-log audit-head audit-after"},
	},
}

// warning is printed at each start in development mode.
const warning = "*** DEVELOPMENT ONLY: any program that can read the file of the secret gets a certificate for any " +
	"name, of\n" +
	"*** one hour. Use -kubernetes or -jwt-rule for everything else."

// announce prints where everything is.
func announce(out io.Writer, c *caconfig.Config, a *caconfig.Authority, at caserver.Listeners) {
	if c.Development() {
		fmt.Fprintln(out, warning)
	}
	const line = "%-19s %s\n"
	fmt.Fprintf(out, line, "trust domain:", c.CA.TrustDomain)
	fmt.Fprintf(out, line, "CA:", a.Where)
	fmt.Fprintf(out, line, "roots in PEM:", c.RootsFile)
	fmt.Fprintf(out, line, "audit log:", c.AuditLog)
	if c.Development() {
		fmt.Fprintf(out, line, "token of demo/web:", `printf %s.demo/web "$(cat '`+c.SecretFile+`')"`)
		if at.Istio != nil {
			fmt.Fprintf(out, line, "agent of demo/web:", "SVIDKIT_CA='"+c.StateDir+"' go run ./examples/agent")
		}
	}
	linkerdScheme := "https"
	if at.LinkerdPlaintext {
		linkerdScheme = "http"
	}
	for _, p := range []struct {
		name, scheme, path string
		l                  net.Listener
	}{
		{"Istio's API:", "https", istioca.CreateCertificate, at.Istio},
		{"Linkerd's API:", linkerdScheme, linkerd.Certify, at.Linkerd},
		{"bundle endpoint:", "https", "/", at.Bundle},
		{"OpenID Connect:", "https", "/.well-known/openid-configuration", a.OIDC},
		{"metrics, health:", "http", "/metrics /ready /status", at.Admin},
		{"operators' page:", "http", "/", at.Admin},
	} {
		if p.l != nil {
			fmt.Fprintf(out, line, p.name, p.scheme+"://"+p.l.Addr().String()+p.path)
		}
	}
}
