package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	maxInput = 16 << 20 // bytes of an input: a bundle map, the largest, may have as many
	maxPEM   = 1 << 20  // bytes of PEM and DER
)

// input is the parsed contents of a file.
type input struct {
	form  string              // "PEM", "DER", "token", "trust bundle" or "bundle map"
	certs []*x509.Certificate // of PEM and DER
	other []string            // labels of other blocks, such as a private key
	text  []byte              // of a token or a document
}

// read reads a file, or standard input for "-", until ctx is done: an operator may be typing it.
func (a *app) read(ctx context.Context, name string) ([]byte, error) {
	var data []byte
	done := make(chan error, 1)
	go func() { // until the end of the input, or of the program
		in, what := a.in, "standard input"
		var err error
		if name != "-" {
			var f *os.File
			if f, err = os.Open(name); err != nil {
				done <- err
				return
			}
			defer f.Close()
			in, what = f, name
		}
		if data, err = io.ReadAll(io.LimitReader(in, maxInput+1)); err == nil && len(data) > maxInput {
			err = fmt.Errorf("%s has more than %d MiB", what, maxInput>>20)
		}
		done <- err
	}()
	select {
	case err := <-done:
		return data, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// input reads a file and detects its form. No error repeats the contents, which may be secret.
func (a *app) input(ctx context.Context, name string) (*input, error) {
	data, err := a.read(ctx, name)
	if err != nil {
		return nil, err
	}
	in, err := recognise(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", map[bool]string{true: "standard input", false: name}[name == "-"], err)
	}
	return in, nil
}

func recognise(data []byte) (*input, error) {
	trimmed := bytes.TrimPrefix(bytes.TrimSpace(data), []byte("Bearer ")) // as copied from a header
	switch {
	case len(trimmed) == 0:
		return nil, errors.New("it is empty")
	case trimmed[0] == '{':
		return recogniseJSON(trimmed)
	case bytes.Contains(data, []byte("-----BEGIN ")):
		return readPEM(data)
	case bytes.Count(trimmed, []byte(".")) == 2 && !bytes.ContainsAny(trimmed, " \t\r\n\x00"):
		return &input{form: "token", text: trimmed}, nil
	case data[0] == 0x30:
		return readDER(data)
	}
	return nil, errors.New("it is neither certificates in PEM or DER, nor a token, a trust bundle or a bundle map")
}

func recogniseJSON(doc []byte) (*input, error) {
	var top map[string]json.RawMessage
	if err := json.Unmarshal(doc, &top); err != nil {
		return nil, errors.New("it begins like a trust bundle, and is not a JSON object")
	}
	switch {
	case top["trust_domains"] != nil:
		return &input{form: "bundle map", text: doc}, nil
	case top["keys"] != nil:
		return &input{form: "trust bundle", text: doc}, nil
	}
	return nil, errors.New(`it is JSON, and has neither "keys", as a trust bundle, nor "trust_domains", ` +
		"as a bundle map")
}

// readPEM reads the certificates, and records the labels of all other blocks.
func readPEM(data []byte) (*input, error) {
	if len(data) > maxPEM {
		return nil, fmt.Errorf("%d bytes of PEM, the limit is %d", len(data), maxPEM)
	}
	in := &input{form: "PEM"}
	blocks, err := certpem.Read(data, 2*certpem.MaxCertificates) // keys may be among them
	if err != nil {
		return nil, err
	}
	var certs bytes.Buffer
	for _, block := range blocks {
		if block.Type != "CERTIFICATE" {
			in.other = append(in.other, label(block.Type))
			continue
		}
		if err := pem.Encode(&certs, &pem.Block{Type: block.Type, Bytes: block.Bytes}); err != nil {
			return nil, err
		}
	}
	if certs.Len() == 0 {
		return in, nil
	}
	in.certs, err = pki.ParseCertificatesPEM(certs.Bytes())
	return in, err
}

// label returns the label of a PEM block if it is a usual one; any other text could be secret.
func label(typ string) string {
	if len(typ) > 40 || strings.Trim(typ, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ") != "" {
		return "something else"
	}
	if strings.HasSuffix(typ, "PRIVATE KEY") {
		return typ + " (not shown)"
	}
	return typ
}

func readDER(data []byte) (*input, error) {
	if len(data) > maxPEM {
		return nil, fmt.Errorf("%d bytes of DER, the limit is %d", len(data), maxPEM)
	}
	in := &input{form: "DER"}
	certs, err := x509.ParseCertificates(data)
	if err == nil {
		in.certs = certs
		return in, nil
	}
	for _, parse := range []func([]byte) (any, error){
		x509.ParsePKCS8PrivateKey,
		func(der []byte) (any, error) { return x509.ParsePKCS1PrivateKey(der) },
		func(der []byte) (any, error) { return x509.ParseECPrivateKey(der) },
	} {
		if _, err := parse(data); err == nil {
			in.other = []string{label("PRIVATE KEY")}
			return in, nil
		}
	}
	return nil, errors.New("it begins like DER, and has no certificate that can be read")
}

// bundles reads trust bundles, each from a file as in "roots.pem" or "example.org=roots.pem". td is the trust domain
// of bundles that name none; it may be zero.
func (a *app) bundles(ctx context.Context, specs []string, td spiffe.TrustDomain) (*spiffe.BundleSet, error) {
	all, err := spiffe.NewBundleSet()
	if err != nil {
		return nil, err
	}
	for _, spec := range specs {
		of, file := td, spec
		if name, rest, ok := strings.Cut(spec, "="); ok {
			if named, err := spiffe.ParseTrustDomain(name); err == nil {
				of, file = named, rest
			}
		}
		in, err := a.input(ctx, file)
		if err != nil {
			return nil, err
		}
		set, err := in.bundles(of)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for b := range set.All() {
			if _, err := all.Bundle(b.TrustDomain()); err == nil {
				return nil, program.Misused("there are two bundles of %q", b.TrustDomain())
			}
			all = all.With(b)
		}
	}
	return all, nil
}

// bundles returns the trust bundles in an input. td is the trust domain of a bundle without an authority that names
// it; it may be zero.
func (in *input) bundles(td spiffe.TrustDomain) (*spiffe.BundleSet, error) {
	var b *spiffe.Bundle
	var err error
	switch in.form {
	case "bundle map":
		return spiffe.ParseBundleMap(in.text)
	case "trust bundle":
		if b, err = spiffe.ParseBundleWIT(orUnnamed(td), in.text); err == nil && td.IsZero() {
			certs := b.Contents().X509Authorities
			if named := nameIn(certs); !named.IsZero() {
				b, err = spiffe.ParseBundleWIT(named, in.text)
			}
		}
	case "PEM", "DER":
		if len(in.certs) == 0 {
			return nil, errors.New("there is no certificate in it")
		}
		for i, c := range in.certs {
			if !c.IsCA {
				return nil, fmt.Errorf("certificate %d, of %s, is a leaf and not one of a CA: a trust bundle has "+
					"the CA certificates (roots) that sign those of workloads",
					i+1, cmp.Or(idText(chainID(in.certs[i:])), "no SPIFFE ID"))
			}
		}
		if td.IsZero() {
			td = nameIn(in.certs)
		}
		b, err = spiffe.NewBundle(orUnnamed(td), spiffe.BundleContents{X509Authorities: in.certs})
	default:
		return nil, fmt.Errorf("it is a %s and not a trust bundle", in.form)
	}
	if err != nil {
		return nil, err
	}
	return spiffe.NewBundleSet(b)
}

// unnamed stands for the unknown trust domain of a bundle.
var unnamed = spiffe.MustParseID("spiffe://unnamed.invalid/x").TrustDomain()

func orUnnamed(td spiffe.TrustDomain) spiffe.TrustDomain {
	if td.IsZero() {
		return unnamed
	}
	return td
}

// nameIn returns the trust domain that the authorities name, or zero if they name none or several.
func nameIn(certs []*x509.Certificate) (td spiffe.TrustDomain) {
	for _, c := range certs {
		id, err := spiffe.IDFromCertificate(c)
		if err != nil {
			continue
		}
		if !td.IsZero() && id.TrustDomain() != td {
			return spiffe.TrustDomain{}
		}
		td = id.TrustDomain()
	}
	return td
}

// oneNamed refuses bundles of unknown trust domains.
func oneNamed(set *spiffe.BundleSet) error {
	if _, err := set.Bundle(unnamed); err == nil {
		return program.Misused("the bundle does not name its trust domain: add -trust-domain NAME, or write NAME=FILE")
	}
	return nil
}
