// Ca is a certificate authority that serves the certificate APIs of Istio and of Linkerd, the bundle endpoint of
// SPIFFE federation, metrics and health.
//
//	go run ./examples/ca
//
// Without flags it runs in development mode: it keeps a self-signed CA for each trust domain in the user's home,
// listens on 127.0.0.1, and trusts the name in any token that begins with the secret in a file there. Certificates
// last an hour at most, even if a request asks for more. An agent becomes spiffe://cluster.local/ns/demo/sa/web with
//
//	go run ./examples/agent
//
// or, if it is Istio's, with the variables in the file agent.env and a token from the printed command.
//
// In a cluster, -kubernetes keeps the CA in the Secret istio-ca-secret, which all replicas share, and lets the API
// server review service account tokens; -istio-addr=:15012 and the like open the ports to others. A plugged-in CA is
// read from -root-ca-dir, as with Istio. With -external-ca the cluster's signers sign instead.
//
// A caller of Istio's API is authenticated by the first of these that it presents, in the order of Istio's CA: a
// certificate of the CA, or of the roots in -client-roots; a token of the OpenID Connect issuer in -jwt-rule; a
// service account token, which the API server reviews; the last element of the header x-forwarded-client-cert from a
// gateway in -trusted-gateway-cidr; a token of the issuer of this server's own token, for a CA outside the cluster.
// With only -jwt-rule the CA needs no cluster, and does not run in development mode; Linkerd's API needs -kubernetes.
// A gateway's own certificate never authenticates the requests that it forwards, and while a root is tainted, the
// gateway's header is ignored.
//
// The first start makes a CA in the default directory. In any other store, including the Secret, that takes -create:
// an empty store may be a volume that is not mounted. Directories and files that other users can change are refused.
//
// -help lists the flags. One with a name in brackets can also be set by that environment variable, as with Istio's
// CA; the flag wins. Other variables are not read. The exit code is 2 if a flag or variable is wrong, and 1 after any
// other failure. -version prints what was built.
//
// # For operators
//
//	ca -status                             print the roots and what becomes of them
//	ca -rotate                             prepare a new root; the other three steps follow by time
//	ca -taint SERIAL                       a key may be stolen: replace it, and drop its root early
//	ca -revoke SERIAL                      drop a root or a token key now, if another one signs
//	ca -revoke SERIAL -now                 drop it although it signs: it is stolen. This costs: see below
//	ca -once csr.pem -id spiffe://…        sign one request
//	ca -jwt AUDIENCE -id spiffe://…        sign one token
//	ca -verify-audit audit.jsonl           see that the audit log is whole, and with -audit-head that its end is
//	ca -install kubernetes                 print what this CA needs in a cluster, as YAML; -with NAME=VALUE edits it
//	ca -install SCHEME -anchor-dir DIR     print what a Linkerd mesh begins with, as YAML
//
// The commands work on the store: they need access to it, and the flags that say where it is, but no running server.
// A server on the same store follows, usually within 30 seconds. After -taint the CA takes nothing that the key
// signed as proof, while workloads go on trusting it until they have renewed. Before -revoke of a root that was
// active, wait until -status says that another one is, or add -now: then its successor signs at once, peers that have
// not fetched the bundle refuse what that signs, and those that have refuse what the revoked root signed. The command
// says until when.
//
// Istio's API takes certificates of the CA as proof, so that a virtual machine can renew without a token, for
// -default-ttl at most each time. -renew-by-certificate=720h ends that 720 hours after the last token, and
// -renew-by-certificate=off forbids it; without the flag there is no end, as with Istio.
//
// A backup is a copy of the store: of the directory -state-dir/ca, or of the Secret. It holds the private keys. To
// restore it, stop all replicas, put it back, and start them.
//
// The audit log gets a line for each signature before it leaves, by the server or by a command, and for each change
// of keys; package auditlog documents the lines. A full or slow disk stops the CA from signing, and /ready says so.
//
// # For Linkerd
//
// With a SCHEME, -install takes the trust anchor in -anchor-dir, or makes one, makes an issuer of -issuer-ttl below
// it, and prints for kubectl apply a ConfigMap, a Secret, and the identity service with its account. SCHEME is
// kubernetes.io/tls or linkerd.io/tls, the two forms that Linkerd's identity service reads, or design, with the names
// of the first design and a key in DER. The anchor's key stays in the directory, which belongs outside the cluster. A
// CA whose -root-ca-dir is the volume of that Secret signs with the issuer, and takes over the next one without a
// restart.
//
// With -kubernetes, issued certificates, new issuers and refused files are recorded as Kubernetes Events of the
// service account, or of the Deployment linkerd-identity. The CA's service account needs the verb create for events;
// -linkerd-events=false turns them off.
//
// # For pods of Kubernetes 1.37
//
// With -pod-signer=cluster.local/spiffe, and -kubernetes, the CA signs for pods that name this signer in a volume
// (podCertificate), and keeps its roots in a ClusterTrustBundle that such a volume has beside the certificate
// (clusterTrustBundle): no agent is needed. Package podcert says which identity a pod gets.
//
// # For systems that do not know SPIFFE
//
// With -oidc-issuer=https://oidc.example.org all tokens name this issuer, and -oidc-addr serves its discovery
// document and keys, so that verifiers of OpenID Connect take the tokens: clouds, API servers, vaults. A key is
// published for a day before it signs.
//
// -demo shows a server at work in a few seconds.
package main

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

func main() {
	program.Main("ca", func(ctx context.Context) error {
		err := run(ctx, os.Args[1:], os.Getenv, os.Stdin, os.Stdout, os.Stderr)
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
func run(ctx context.Context, args []string, getenv func(string) string, in io.Reader, out, errOut io.Writer) error {
	o, err := parse(args, getenv, out)
	if err != nil {
		return err
	}
	switch o.command {
	case "":
	case "version":
		fmt.Fprintln(out, "ca", program.Version())
		return nil
	case "demo":
		return demo(ctx, o.CA.TrustDomain, 5*time.Second, out)
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
func parse(args []string, getenv func(string) string, out io.Writer) (o *options, err error) {
	o = &options{manifest: program.Manifest{Text: manifest}}
	fs := flag.NewFlagSet("ca", flag.ContinueOnError)
	fs.Usage = func() { _ = help.Write(out, fs) }
	fs.Bool("demo", false, "show a server at work in a few seconds, and end")
	fs.Bool("status", false, "print the state of the CA, and end")
	fs.String("once", "", "sign the request in the `file` (- for standard input) for -id, print the chain, and end")
	fs.String("jwt", "", "print a JWT-SVID of -id for the `audience`, and end")
	fs.TextVar(&o.id, "id", spiffe.ID{}, "`SPIFFE ID` for -once and -jwt")
	fs.DurationVar(&o.ttl, "ttl", 0, "`lifetime` for -once and -jwt (default that of the CA)")
	fs.Bool("rotate", false, "prepare a new root, and end; servers on the same store follow")
	fs.String("taint", "", "say that the key with the `serial` number or key ID may be stolen, and end")
	fs.String("revoke", "", "take the key with the `serial` number or key ID out of the bundle now, and end")
	fs.BoolVar(&o.now, "now", false, "with -revoke: also a key that signs, whose successor signs at once")
	fs.String("verify-audit", "", "verify the audit log in the `file` (- for standard input), and end")
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
	o.Config, err = caconfig.Parse(fs, args, getenv)
	if *showVersion { // whatever the environment holds
		return &options{command: "version"}, nil
	}
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"demo", "status", "once", "jwt", "rotate", "taint", "revoke", "verify-audit",
		"install"} {
		if f := fs.Lookup(name); f.Value.String() != f.DefValue {
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
	case o.auditHead != "" && o.AuditLog == "none":
		return nil, program.Misused("-audit-head: there is no audit log with -audit-log none")
	case o.auditHead != "" && o.command != "" && o.command != "verify-audit":
		return nil, program.Misused("-audit-head: it is for a server, and for -verify-audit")
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
		{Title: "Commands", Flags: "status rotate taint revoke now once jwt id ttl verify-audit"},
		{Title: "What is printed for a cluster", Flags: "install with anchor-dir issuer-ttl"},
		{Title: "The CA", Flags: "trust-domain state-dir create wait root-ca-dir replace-own-ca multi-root " +
			"use-cacerts"},
		{Title: "Certificates", Flags: "default-ttl max-ttl shorten-ttl backdate empty-subject keep-dns-names " +
			"renew-by-certificate"},
		{Title: "Roots", Flags: "root-ttl root-check-interval root-grace-percent root-jitter rsa-bits keep-key " +
			"constrain propagation refresh-hint root-configmap"},
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
