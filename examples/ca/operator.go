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
)

// do carries out one command against the store. A server that runs on the same store sees what was
// changed within -refresh-hint at the latest, and usually within 30 seconds.
func (c *config) do(ctx context.Context, in io.Reader, out io.Writer) error {
	var csr *pki.CSR
	if c.command == "once" { // before the clock runs, and before a CA is made for what is no request
		var err error
		if csr, err = c.readCSR(ctx, in); err != nil {
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

// readCSR reads the request for -once. A read of standard input ends with ctx, as an operator may type.
func (c *config) readCSR(ctx context.Context, in io.Reader) (*pki.CSR, error) {
	if c.argument != "-" {
		f, err := os.Open(c.argument)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
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
