package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

var convertCommand = command{
	"bundle convert", "FILE|-", `write a trust bundle in another form

The forms are a SPIFFE bundle document, a bundle map of several trust domains,
and roots in PEM. The result goes to standard output. What the other form cannot
hold is left out, and named on standard error: PEM has no keys for tokens, no
sequence number and no refresh hint, and a map no refresh hint.`,
	convert,
}

var diffCommand = command{
	"bundle diff", "OLD NEW", `say which authorities came and went between two bundles

Both may have any form. Authorities are compared by their fingerprints: the
SHA-256 of a certificate, or of a public key in DER (SubjectPublicKeyInfo). The
exit code is 0 if the authorities are the same, and 1 if not; a sequence number
or refresh hint that differs is shown, and does not count.`,
	diff,
}

var oidcCommand = command{
	"bundle oidc", "DIR", `write the files of an issuer of OpenID Connect

DIR is for a web server or a bucket that answers at the URL of the issuer, to
verifiers that do not know SPIFFE: .well-known/openid-configuration and keys,
with the JWT keys of the bundle, both to be served as application/json. Files
that would not change are left, and readers see the old or the new one, and
never a part. Run it again when the bundle changes; for svid watch, which writes
bundles.json with -jwt-bundles,

    -exec 'svid bundle oidc -issuer URL -bundle "$SVID_DIR/bundles.json" DIR'`,
	oidc,
}

func oidc(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
	var td spiffe.TrustDomain
	issuer := fs.String("issuer", "", "the `URL` of the issuer, as it is in the tokens (iss); required")
	from := fs.String("bundle", "-", "the `FILE` of the bundle, a SPIFFE bundle document or a bundle map; - is "+
		"standard input")
	fs.TextVar(&td, "trust-domain", spiffe.TrustDomain{},
		"the `NAME` of a bundle that does not name it, and the one to take from a map")
	if err := parse(fs, args, 1); err != nil {
		return err
	}
	if *issuer == "" {
		return program.Misused("there is no -issuer")
	}
	set, err := a.bundles(ctx, []string{*from}, td)
	if err != nil {
		return err
	}
	b, err := single(set, td)
	if err != nil {
		return err
	}
	files, err := jwtsvid.OIDCFiles(b, *issuer)
	if err != nil {
		return err
	}
	var written []string
	// The keys come before the document that names them.
	for _, name := range slices.Backward(slices.Sorted(maps.Keys(files))) {
		path := filepath.Join(fs.Arg(0), filepath.FromSlash(name))
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, files[name]) {
			continue
		}
		if err := replace(path, files[name]); err != nil {
			return err
		}
		written = append(written, name)
	}
	var keys []string
	for id := range b.JWTAuthorities() {
		keys = append(keys, id)
	}
	return a.print(record{{"issuer", *issuer}, {"key_ids", keys}, {"dir", fs.Arg(0)}, {"written", written}})
}

// replace writes a public file atomically.
func replace(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Chmod(f.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

func convert(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
	var td spiffe.TrustDomain
	to := fs.String("to", "spiffe", "the `FORM` to write: spiffe, map or pem")
	fs.TextVar(&td, "trust-domain", spiffe.TrustDomain{},
		"the `NAME` of a bundle that does not name it, and the one to take from a map")
	if err := parse(fs, args, 1); err != nil {
		return err
	}
	if *to != "spiffe" && *to != "map" && *to != "pem" {
		return program.Misused("-to is %q, not spiffe, map or pem", *to)
	}
	set, err := a.bundles(ctx, []string{fs.Arg(0)}, td)
	if err != nil {
		return err
	}
	if *to != "pem" {
		if err := oneNamed(set); err != nil {
			return err
		}
	}
	for b := range set.All() {
		for _, err := range b.Skipped() {
			a.say("svid: left out: %s", clean(err.Error()))
		}
	}
	var doc []byte
	if *to == "map" {
		for b := range set.All() {
			if d, hinted := b.RefreshHint(); hinted {
				a.say("svid: left out: the refresh hint of %q, %s", b.TrustDomain(), d)
			}
		}
		doc, err = set.Marshal()
	} else {
		var b *spiffe.Bundle
		if b, err = single(set, td); err != nil {
			return err
		}
		if *to == "spiffe" {
			doc, err = b.Marshal()
		} else if doc = b.MarshalPEM(); len(doc) == 0 {
			err = spiffe.ErrNoAuthority
		}
		if tokens := len(b.Contents().JWTAuthorities) + len(b.Contents().WITAuthorities); *to == "pem" && tokens > 0 {
			a.say("svid: left out: %d keys for tokens", tokens)
		}
	}
	if err != nil {
		return err
	}
	if *to != "pem" {
		doc = append(doc, '\n')
	}
	_, err = a.out.Write(doc)
	return err
}

// single returns the bundle of td, or the only one. It never pools roots of several trust domains.
func single(set *spiffe.BundleSet, td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if set.Len() == 1 && td.IsZero() {
		for b := range set.All() {
			return b, nil
		}
	}
	if td.IsZero() {
		return nil, program.Misused("there are bundles of %d trust domains; pick one with -trust-domain", set.Len())
	}
	return set.Bundle(td)
}

func diff(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
	var td spiffe.TrustDomain
	fs.TextVar(&td, "trust-domain", spiffe.TrustDomain{}, "the trust domain `NAME` of bundles that do not name it")
	if err := parse(fs, args, 2); err != nil {
		return err
	}
	var sets [2]*spiffe.BundleSet
	for i, name := range fs.Args() {
		var err error
		if sets[i], err = a.bundles(ctx, []string{name}, td); err != nil {
			return err
		}
	}
	var out record
	same := true
	domains := make(map[spiffe.TrustDomain]bool)
	for _, set := range sets {
		for b := range set.All() {
			domains[b.TrustDomain()] = true
		}
	}
	var all []record
	byName := func(a, b spiffe.TrustDomain) int { return strings.Compare(a.String(), b.String()) }
	for _, domain := range slices.SortedFunc(maps.Keys(domains), byName) {
		before, _ := sets[0].Bundle(domain) // nil if it has none
		after, _ := sets[1].Bundle(domain)
		r, equal := compare(before, after)
		same = same && equal
		if len(r) > 0 {
			all = append(all, append(record{{"trust_domain", domain.String()}}, r...))
		}
	}
	out = record{{"same_authorities", same}, {"bundles", all}}
	if err := a.print(out); err != nil {
		return err
	}
	if !same {
		return errNo
	}
	return nil
}

// compare reports the changes between two bundles. One of them may be nil.
func compare(before, after *spiffe.Bundle) (r record, same bool) {
	old, now := fingerprints(before), fingerprints(after)
	var removed, added []record
	for _, one := range old {
		if !slices.ContainsFunc(now, one.equal) {
			removed = append(removed, one.record)
		}
	}
	for _, one := range now {
		if !slices.ContainsFunc(old, one.equal) {
			added = append(added, one.record)
		}
	}
	switch {
	case before == nil:
		r = append(r, field{"bundle", "added"})
	case after == nil:
		r = append(r, field{"bundle", "removed"})
	default:
		for _, f := range []struct {
			name string
			text func(*spiffe.Bundle) string
		}{{"sequence", sequence}, {"refresh_hint", refreshHint}} {
			if was, is := cmp.Or(f.text(before), "none"), cmp.Or(f.text(after), "none"); was != is {
				r = append(r, field{f.name, was + " → " + is})
			}
		}
	}
	r = append(r, field{"removed", removed}, field{"added", added}).filled()
	return r, len(removed)+len(added) == 0 && (before == nil) == (after == nil)
}

func sequence(b *spiffe.Bundle) string {
	if n, numbered := b.Sequence(); numbered {
		return strconv.FormatUint(n, 10)
	}
	return ""
}

func refreshHint(b *spiffe.Bundle) string {
	if d, hinted := b.RefreshHint(); hinted {
		return d.String()
	}
	return ""
}

// authority is a certificate or a key of a bundle.
type authority struct {
	kind, fingerprint string
	record            record
}

func (a authority) equal(b authority) bool {
	return a.kind == b.kind && a.fingerprint == b.fingerprint
}

// fingerprints returns the authorities of a bundle, which may be nil.
func fingerprints(b *spiffe.Bundle) (all []authority) {
	if b == nil {
		return nil
	}
	add := func(kind string, der []byte, r record) {
		sum := sha256.Sum256(der)
		print := hex.EncodeToString(sum[:])
		all = append(all, authority{kind, print, append(record{{"kind", kind}, {"sha256", print}}, r...)})
	}
	for c := range b.X509Authorities() {
		add("X.509", c.Raw, record{
			{"subject", cut(c.Subject.String())}, {"not_before", c.NotBefore}, {"not_after", c.NotAfter},
			{"key", keyName(c)}, {"key_id", short(c.SubjectKeyId)},
		})
	}
	key := func(kind, id string, pub any) {
		der, err := x509.MarshalPKIXPublicKey(pub)
		if err != nil { // always nil for a key in a bundle
			der = []byte(err.Error())
		}
		// A token names its key by the ID, so a key with another ID is another authority.
		add(kind, der, record{{"key_id", cut(id)}, {"key", keyName(pub)}})
		all[len(all)-1].fingerprint += " " + id
	}
	for id, pub := range b.JWTAuthorities() {
		key("JWT", id, pub)
	}
	wit := b.Contents().WITAuthorities
	for _, id := range slices.Sorted(maps.Keys(wit)) {
		key("WIT", id, wit[id])
	}
	return all
}

// describeBundles returns bundles as records.
func describeBundles(set *spiffe.BundleSet) (all []record) {
	for b := range set.All() {
		name := b.TrustDomain().String()
		if b.TrustDomain() == unnamed {
			name = "not named"
		}
		var list []record
		for _, one := range fingerprints(b) {
			list = append(list, one.record)
		}
		var left []string
		for _, err := range b.Skipped() {
			left = append(left, inner(err))
		}
		all = append(all, record{{"trust_domain", name}, {"sequence", sequence(b)}, {"refresh_hint", refreshHint(b)},
			{"skipped", few(left)}, {"authorities", list}})
	}
	return all
}

// authorities judges bundles: without a currently valid authority, a bundle verifies no peer.
func authorities(set *spiffe.BundleSet) (checks []check) {
	now := time.Now()
	for b := range set.All() {
		good, bad := 0, 0
		for c := range b.X509Authorities() {
			if now.Before(c.NotBefore) || now.After(c.NotAfter) {
				bad++
			} else {
				good++
			}
		}
		c := check{Name: "authorities", Result: ok, Detail: fmt.Sprintf("%d for X.509-SVIDs", good)}
		if tokens := len(b.Contents().JWTAuthorities) + len(b.Contents().WITAuthorities); tokens > 0 {
			c.Detail += fmt.Sprintf(", %d for tokens", tokens)
			if bad == 0 {
				good += tokens
			}
		}
		if bad > 0 {
			c.Detail += fmt.Sprintf(", and %d out of their time", bad)
		}
		if good == 0 {
			c.Result, c.Remedy = failed, "no X.509-SVID of this trust domain can be verified"
		}
		if b.TrustDomain() != unnamed {
			c.Detail = fmt.Sprintf("%s: %s", b.TrustDomain(), c.Detail)
		}
		checks = append(checks, c)
	}
	return checks
}
