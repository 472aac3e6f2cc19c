package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

var errNoCA = errors.New("there is no CA yet; it is made when the server starts, or with -once")

// do carries out one command against the store. A server that runs on the same store sees what was
// changed within -refresh-hint at the latest, and usually within 30 seconds.
func (c *config) do(outer context.Context, in io.Reader, out io.Writer, log *slog.Logger) error {
	if c.audit != "" {
		return c.verifyAudit(in, out)
	}
	var csr *pki.CSR
	if c.once != "" { // before the clock runs, and before there is a CA for a request that is none
		var err error
		if csr, err = c.readCSR(outer, in); err != nil {
			return err
		}
	}
	wait, late := storeTimeout, "the store does not answer"
	if c.externalCA != "" {
		wait, late = signerTimeout, "the signer of the cluster does not answer"
	}
	ctx, cancel := context.WithTimeoutCause(outer, wait, errors.New(late))
	defer cancel()
	if c.once == "" && c.jwt == "" {
		c.auditLog = "none" // as nothing is signed
	}
	if c.once == "" && c.jwt == "" && c.externalCA == "" && !c.isPluggedIn() {
		// To look, or to change what is there, must not make something new.
		store, where, err := c.openStore(c.secretName(), "ca")
		if err != nil {
			return err
		}
		if _, err := store.Load(ctx); errors.Is(err, ca.ErrNoRecord) {
			return fmt.Errorf("%s: %w", where, errNoCA)
		}
	}
	p, err := build(ctx, c, log)
	if err != nil {
		return err
	}
	defer p.close()
	if c.once != "" {
		return c.signOnce(ctx, p, csr, out)
	}
	if p.authority == nil {
		return errors.New("with -external-ca the keys are the cluster's; there is only -once")
	}
	switch {
	case c.jwt != "":
		return c.signToken(ctx, p, out)
	case c.rotate:
		if _, err := p.authority.Rotate(ctx); err != nil {
			return err
		}
	case c.taint != "":
		if err := p.authority.Taint(ctx, c.taint); err != nil {
			return err
		}
	case c.revoke != "":
		if err := p.authority.Revoke(ctx, c.revoke); err != nil {
			return err
		}
	}
	p.describe(out)
	return nil
}

// verifyAudit reads an audit log. A line that a crash left unfinished is in order: nothing was issued for it.
func (c *config) verifyAudit(in io.Reader, out io.Writer) error {
	if c.audit != "-" {
		f, err := os.Open(c.audit)
		if err != nil {
			return fmt.Errorf("-verify-audit: %w", err)
		}
		defer f.Close()
		in = f
	}
	records, wrong := 0, 0
	for _, err := range auditlog.Read(in) {
		if err != nil {
			fmt.Fprintln(out, err)
		}
		switch {
		case err == nil:
			records++
		case errors.Is(err, auditlog.ErrChain), errors.Is(err, auditlog.ErrMalformed):
			wrong++
		case !errors.Is(err, auditlog.ErrTorn):
			return fmt.Errorf("-verify-audit: %w", err)
		}
	}
	if wrong > 0 {
		return fmt.Errorf("-verify-audit: %d of the lines are not what was written", wrong)
	}
	fmt.Fprintf(out, "%d records are as they were written\n", records)
	return nil
}

// isPluggedIn reports whether somebody put a CA into -root-ca-dir, be it one that cannot be used.
func (c *config) isPluggedIn() bool {
	_, err := pki.ReadKeyCertBundle(os.DirFS(c.rootDir), nil, time.Now())
	return !errors.Is(err, fs.ErrNotExist)
}

// readCSR reads the request for -once. Standard input may be somebody who types, and may give up.
func (c *config) readCSR(ctx context.Context, in io.Reader) (*pki.CSR, error) {
	if c.once != "-" {
		f, err := os.Open(c.once)
		if err != nil {
			return nil, fmt.Errorf("-once: %w", err)
		}
		defer f.Close()
		in = f
	}
	type text struct {
		b   []byte
		err error
	}
	read := make(chan text, 1)
	go func() { // until there is an end of it, or of the program
		b, err := io.ReadAll(io.LimitReader(in, 1<<20))
		read <- text{b, err}
	}()
	var got text
	select {
	case got = <-read:
	case <-ctx.Done():
		return nil, fmt.Errorf("-once: %w", context.Cause(ctx))
	}
	if got.err != nil {
		return nil, fmt.Errorf("-once: %w", got.err)
	}
	csr, err := pki.ParseCSRPEM(got.b)
	if err != nil {
		return nil, fmt.Errorf("-once: %w", err)
	}
	return csr, nil
}

// signOnce signs a request for -id and prints the chain, leaf first, and then the roots.
func (c *config) signOnce(ctx context.Context, p *parts, csr *pki.CSR, out io.Writer) error {
	chain, err := p.signer.Sign(ctx, ca.Request{CSR: csr, ID: c.id, TTL: c.ttl, Caller: operator(), Method: "command"})
	if err != nil {
		return err
	}
	_, err = out.Write(append(pki.MarshalCertificatesPEM(chain...), p.roots()...))
	return err
}

// signToken prints a JWT-SVID.
func (c *config) signToken(ctx context.Context, p *parts, out io.Writer) error {
	token, err := p.authority.SignJWT(ctx, ca.JWTRequest{ID: c.id, Audience: []string{c.jwt}, TTL: c.ttl, Caller: operator(), Method: "command"})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, token)
	return err
}

// operator is the name for the audit log: who has the right to read the store is not asked more.
func operator() string { return fmt.Sprintf("uid %d", os.Getuid()) }

// describe prints the state of the CA.
func (p *parts) describe(out io.Writer) {
	if p.authority == nil {
		fmt.Fprintf(out, "CA %s\n", p.where)
		for root := range p.signer.Bundle().X509Authorities() {
			fmt.Fprintf(out, "root %x, until %s\n", root.SerialNumber, root.NotAfter.UTC().Format(time.RFC3339))
		}
		return
	}
	s := p.authority.Status()
	fmt.Fprintf(out, "CA of %s, %s, bundle %d\n", s.TrustDomain, p.where, s.Sequence)
	for _, r := range s.Roots {
		fmt.Fprintf(out, "%s, until %s\n", r, r.Certificate.NotAfter.UTC().Format(time.RFC3339))
	}
	for _, k := range s.JWTKeys {
		fmt.Fprintln(out, k)
	}
	if g, ok := p.store.(*glance); ok && g.held() {
		fmt.Fprintln(out, "(servers that are running may take their next step earlier)")
	}
	if s.SyncError != nil {
		fmt.Fprintf(out, "the store: %v\n", s.SyncError)
	}
}
