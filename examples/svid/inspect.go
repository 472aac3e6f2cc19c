package main

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var inspectCommand = command{
	"inspect", "FILE|HOST:PORT|-", `show and judge certificates, a token, a bundle or a TLS server

A file has certificates in PEM or DER, a JWT-SVID or WIT-SVID, a SPIFFE trust
bundle or a bundle map. HOST:PORT is dialled: the chain of the server is shown
and judged, and with -socket, or -cert and -key, this side presents an identity.
Without a bundle the form and the time are judged and nothing is verified. The
exit code is 1 if a check fails.`,
	func(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
		return a.look(ctx, fs, args, false)
	},
}

var verifyCommand = command{
	"verify", "FILE|HOST:PORT|-", `judge a chain or a token by a bundle and a policy

It is inspect with -allow and with -bundle or -socket required, and shows the
judgement alone: which check failed, for which certificate (1 is the leaf), and
which rule of the standards it breaks, by its id in spiffe/CONFORMANCE.md.`,
	func(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
		return a.look(ctx, fs, args, true)
	},
}

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(v string) error { *l = append(*l, v); return nil }

// lookFlags are the flags of inspect and verify.
type lookFlags struct {
	bundles     list
	td          spiffe.TrustDomain
	allow, role string
	audience    string
	algorithms  spiffe.Algorithms
	socket      string
	cert, key   string
	timeout     time.Duration
}

// look is inspect, or verify if only the verdict is shown.
func (a *app) look(ctx context.Context, fs *flag.FlagSet, args []string, only bool) error {
	var f lookFlags
	fs.Var(&f.bundles, "bundle", "trust bundle as `[NAME=]FILE`: a SPIFFE document, a bundle map or roots in PEM; "+
		"may be repeated")
	fs.TextVar(&f.td, "trust-domain", spiffe.TrustDomain{}, "the trust domain `NAME` of bundles that do not name it")
	fs.StringVar(&f.allow, "allow", "", "the `POLICY` by which the ID is judged, such as "+
		"spiffe://example.org/ns/prod/*")
	fs.StringVar(&f.role, "role", "any", "the `ROLE` of the certificate: server, client, both or any")
	program.Algorithms(fs, &f.algorithms, "certificates and tokens may have, up to the authority")
	fs.StringVar(&f.audience, "audience", "", "the `NAME` of the receiver, for a JWT-SVID")
	fs.StringVar(&f.socket, "socket", "", "take the bundles, and the identity to present, from the Workload API at "+
		"this `ADDRESS`")
	fs.StringVar(&f.cert, "cert", "", "the `FILE` of the certificates to present to a server, in PEM")
	fs.StringVar(&f.key, "key", "", "and the `FILE` of their private key")
	fs.DurationVar(&f.timeout, "timeout", 10*time.Second, "how long a server or an agent may take")
	if err := parse(fs, args, 1); err != nil {
		return err
	}
	target := fs.Arg(0)
	dial := live(target)
	if err := f.check(only, dial); err != nil {
		return err
	}
	var in *input
	var err error
	if !dial {
		if in, err = a.input(ctx, target); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("no answer in %s; see -timeout", f.timeout))
	defer cancel()
	j, self, err := a.judgement(ctx, &f, in != nil && in.form == "token")
	if err != nil {
		return err
	}
	var shown record
	var checks []check
	if dial {
		shown, checks, err = a.server(ctx, target, j, self)
	} else {
		shown, checks, err = in.show(j, f.td)
	}
	if err != nil {
		return err
	}
	if only {
		if kind := shown[0].value; kind != "certificates" && kind != "TLS server" && kind != "JWT-SVID" &&
			kind != "WIT-SVID" {
			return fmt.Errorf("verify judges a chain or a token, and found: %s", kind)
		}
		shown = shown.only("kind", "address", "spiffe_id", "audience", "expires")
		answer := accepted
		if verdict(checks) != nil {
			answer = refused
		}
		shown = append(shown, field{"verdict", answer})
	}
	if err := a.print(append(shown, field{"checks", checks})); err != nil {
		return err
	}
	return verdict(checks)
}

// only returns the fields with these names.
func (r record) only(names ...string) (out record) {
	for _, f := range r {
		for _, name := range names {
			if f.name == name {
				out = append(out, f)
			}
		}
	}
	return out
}

var roles = map[string]spiffe.Role{"any": spiffe.AnyRole, "server": spiffe.ServerRole, "client": spiffe.ClientRole,
	"both": spiffe.BothRoles}

// check refuses flags that do not fit together. only means verify, dial a server.
func (f *lookFlags) check(only, dial bool) error {
	_, known := roles[f.role]
	switch {
	case !known:
		return program.Misused("-role is %q, not server, client, both or any", f.role)
	case (f.cert == "") != (f.key == ""):
		return program.Misused("-cert and -key belong together")
	case f.cert != "" && f.socket != "":
		return program.Misused("-cert and -socket are both an identity to present; give one")
	case f.cert != "" && !dial:
		return program.Misused("-cert and -key are for a server, and the argument is a file")
	case f.socket != "" && len(f.bundles) > 0:
		return program.Misused("-bundle and -socket both have trust bundles; give one")
	case only && len(f.bundles) == 0 && f.socket == "":
		return program.Misused("verify needs a -bundle, or a -socket to take it from")
	case only && f.allow == "":
		return program.Misused(`verify needs a policy in -allow; "*" allows every workload`)
	}
	return nil
}

// judgement returns the judgement that the flags configure. If tokens is set, it also fetches their keys from a
// Workload API. self is the identity to present, or nil.
func (a *app) judgement(ctx context.Context, f *lookFlags, tokens bool) (j *judgement, self spiffe.SVIDSource,
	err error) {
	j = &judgement{audience: f.audience, role: roles[f.role], algorithms: f.algorithms}
	if f.allow != "" {
		if j.policy, err = spiffe.ParsePolicy(f.allow); err != nil {
			return nil, nil, program.Misused("-allow: %w", err)
		}
	}
	switch {
	case f.cert != "":
		certs, err := a.read(ctx, f.cert)
		if err != nil {
			return nil, nil, err
		}
		key, err := a.read(ctx, f.key)
		if err != nil {
			return nil, nil, err
		}
		if self, err = spiffe.ParseSVIDPEM(certs, key); err != nil {
			return nil, nil, err
		}
	case f.socket != "":
		snap, err := snapshot(ctx, workloadapi.Config{Address: f.socket, JWTBundles: tokens})
		if err != nil {
			return nil, nil, err
		}
		self, j.bundles = snap, snap.Bundles()
	}
	if len(f.bundles) > 0 {
		if j.bundles, err = a.bundles(ctx, f.bundles, f.td); err == nil {
			err = oneNamed(j.bundles)
		}
	}
	return j, self, err
}

// live reports whether the target is an address and not a file.
func live(target string) bool {
	if _, err := os.Stat(target); err == nil || !errors.Is(err, fs.ErrNotExist) || target == "-" {
		return false
	}
	host, port, err := net.SplitHostPort(target)
	return err == nil && host != "" && port != "" && !strings.ContainsAny(target, "/\\")
}

// show describes a file's contents, and judges them.
func (in *input) show(j *judgement, td spiffe.TrustDomain) (record, []check, error) {
	switch in.form {
	case "token":
		r, checks := j.token(string(in.text))
		return r, checks, nil
	case "trust bundle", "bundle map":
		set, err := in.bundles(td)
		if err != nil {
			return nil, nil, err
		}
		return record{{"kind", in.form}, {"bundles", describeBundles(set)}}, authorities(set), nil
	}
	also := field{"also_there", in.other}
	if len(in.certs) == 0 {
		return record{{"kind", "no certificate"}, {"form", in.form}, also}, nil, nil
	}
	roots := chainID(in.certs).Path() == "" // otherwise it is a leaf, if a bad one
	for _, c := range in.certs {
		roots = roots && c.IsCA
	}
	if roots {
		set, err := in.bundles(td)
		if err != nil {
			return nil, nil, err
		}
		return record{{"kind", "CA certificates"}, {"form", in.form}, also,
			{"certificates", describeAll(in.certs)}}, authorities(set), nil
	}
	r := record{{"kind", "certificates"}, {"form", in.form}, {"spiffe_id", idText(chainID(in.certs))}, also,
		{"certificates", describeAll(in.certs)}}
	checks, err := j.chain(in.certs)
	return r, checks, err
}

func describeAll(certs []*x509.Certificate) (all []record) {
	for _, c := range certs {
		all = append(all, describe(c))
	}
	return all
}

// describe returns a certificate as a record.
func describe(c *x509.Certificate) record {
	var names []string
	sans, err := pki.ParseSANs(c.Extensions)
	for _, san := range sans {
		names = append(names, cut(san.String()))
	}
	if err != nil {
		names = []string{err.Error()}
	}
	var ca string
	if c.IsCA {
		ca = "yes"
	}
	sum := sha256.Sum256(c.Raw)
	return record{
		{"names", few(names)}, {"subject", cut(c.Subject.String())}, {"issuer", cut(c.Issuer.String())},
		{"not_before", c.NotBefore}, {"not_after", c.NotAfter}, {"key", keyName(c)}, {"signature",
			c.SignatureAlgorithm.String()},
		{"usage", usages(c)}, {"ca", ca}, {"serial", cut(c.SerialNumber.Text(16))}, {"sha256",
			hex.EncodeToString(sum[:])},
		{"key_id", short(c.SubjectKeyId)}, {"signed_by_key_id", short(c.AuthorityKeyId)},
	}
}

// cut bounds a certificate's own texts.
func cut(text string) string {
	const most = 256
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// few returns the beginning of a list, with the number of omitted items.
func few(list []string) []string {
	const most = 20
	if len(list) <= most {
		return list
	}
	return append(list[:most:most], fmt.Sprintf("%d more", len(list)-most))
}

func keyName(of any) string {
	switch k := of.(type) {
	case *x509.Certificate:
		if alg, _ := mldsa.InCertificate(k); alg != "" {
			return alg
		}
		return keyName(k.PublicKey)
	case *ecdsa.PublicKey:
		return "ECDSA " + k.Curve.Params().Name
	case *rsa.PublicKey:
		return fmt.Sprintf("RSA %d", k.N.BitLen())
	case ed25519.PublicKey:
		return "Ed25519"
	}
	return cmp.Or(mldsa.JOSE(of), fmt.Sprintf("%T", of))
}

func usages(c *x509.Certificate) (names []string) {
	for i, name := range []string{
		"digital signature", "content commitment", "key encipherment", "data encipherment", "key agreement",
		"certificate signing", "CRL signing", "encipher only", "decipher only",
	} {
		if c.KeyUsage&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	for _, usage := range c.ExtKeyUsage {
		switch usage {
		case x509.ExtKeyUsageServerAuth:
			names = append(names, "server authentication")
		case x509.ExtKeyUsageClientAuth:
			names = append(names, "client authentication")
		default:
			names = append(names, fmt.Sprintf("extended usage %d", usage))
		}
	}
	return names
}
