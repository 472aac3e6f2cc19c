package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

// do carries out one command against the store. A server that runs on the same store sees what was
// changed within -refresh-hint at the latest, and usually within 30 seconds.
func (c *config) do(ctx context.Context, in io.Reader, out io.Writer) error {
	var csr *pki.CSR
	if c.command == "once" || c.command == "verify-audit" { // before there is a CA for a request that is none
		if c.argument != "-" {
			f, err := os.Open(c.argument)
			if err != nil {
				return fmt.Errorf("-%s: %w", c.command, err)
			}
			defer f.Close()
			in = f
		}
		if c.command == "verify-audit" {
			return verifyAudit(in, out)
		}
		var err error
		if csr, err = readCSR(ctx, in); err != nil {
			return fmt.Errorf("-once: %w", err)
		}
	}
	wait, late := 30*time.Second, "the store does not answer"
	if c.externalCA != "" {
		wait, late = 75*time.Second, "the signer of the cluster does not answer" // it has a minute
	}
	ctx, cancel := context.WithTimeoutCause(ctx, wait, errors.New(late))
	defer cancel()
	a, err := newAuthority(ctx, c, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer a.close()
	if a.own == nil && c.command != "once" {
		return errors.New("with -external-ca the keys are the cluster's; there is only -once")
	}
	caller := fmt.Sprintf("uid %d", os.Getuid()) // for the audit log
	switch c.command {
	case "once": // the chain, leaf first, and then the roots
		chain, err := a.Sign(ctx, ca.Request{CSR: csr, ID: c.id, TTL: c.ttl, Caller: caller, Method: "command"})
		if err != nil {
			return err
		}
		_, err = out.Write(append(pki.MarshalCertificatesPEM(chain...), a.Bundle().MarshalPEM()...))
		return err
	case "jwt":
		token, err := a.own.SignJWT(ctx, ca.JWTRequest{ID: c.id, Audience: []string{c.argument}, TTL: c.ttl, Caller: caller, Method: "command"})
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(out, token)
		return err
	case "rotate":
		_, err = a.own.Rotate(ctx)
	case "taint":
		err = a.own.Taint(ctx, c.argument)
	case "revoke":
		err = a.own.Revoke(ctx, c.argument)
	}
	if err != nil {
		return err
	}
	a.describe(out)
	return nil
}

// readCSR reads a signing request until ctx is done, as an operator may be typing it.
func readCSR(ctx context.Context, in io.Reader) (*pki.CSR, error) {
	var text []byte
	read := make(chan error, 1)
	go func() { // until the end of the input, or of the program
		b, err := io.ReadAll(io.LimitReader(in, 1<<20))
		text = b
		read <- err
	}()
	select {
	case err := <-read:
		if err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return pki.ParseCSRPEM(text)
}

// verifyAudit reads an audit log. A line that a crash left unfinished is in order: nothing was issued for it.
func verifyAudit(in io.Reader, out io.Writer) error {
	records, wrong := 0, 0
	for _, err := range auditlog.Read(in) {
		switch {
		case err == nil:
			records++
			continue
		case errors.Is(err, auditlog.ErrChain), errors.Is(err, auditlog.ErrMalformed):
			wrong++
		case !errors.Is(err, auditlog.ErrTorn):
			return fmt.Errorf("-verify-audit: %w", err)
		}
		fmt.Fprintln(out, err)
	}
	if wrong > 0 {
		return fmt.Errorf("-verify-audit: %d of the lines are not what was written", wrong)
	}
	fmt.Fprintf(out, "%d records are as they were written\n", records)
	return nil
}
