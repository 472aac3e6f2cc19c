package caprogram

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// do runs a command against the store. A server on the same store sees the change within -refresh-hint, and usually
// within 30 seconds.
func (o *options) do(ctx context.Context, in io.Reader, out io.Writer) error {
	var csr *pki.CSR
	if o.command == "verify-audit" {
		return o.verifyAudit(in, out)
	}
	if o.command == "once" { // a malformed request fails before there is a CA
		if o.argument != "-" {
			f, err := os.Open(o.argument)
			if err != nil {
				return fmt.Errorf("-once: %w", err)
			}
			defer f.Close()
			in = f
		}
		var err error
		if csr, err = readCSR(ctx, in); err != nil {
			return fmt.Errorf("-once: %w", err)
		}
	}
	wait, late := 30*time.Second, "the store does not answer"
	if o.Custody.Any() { // which may take a minute to make a key
		wait, late = 75*time.Second, "the store or a custodian does not answer"
	}
	if o.ExternalCA != "" {
		// The signer has a minute.
		if wait, late = 75*time.Second, "the signer of the cluster does not answer"; o.command != "once" {
			return program.Misused("with -external-ca the keys are the cluster's; there is only -once")
		}
	}
	caller := fmt.Sprintf("uid %d", os.Getuid()) // for the audit log
	request := ca.Request{CSR: csr, ID: o.id, TTL: o.ttl, Caller: caller, Method: "command"}
	token := ca.JWTRequest{ID: o.id, Audience: []string{o.argument}, TTL: o.ttl, Caller: caller, Method: "command"}
	if o.ExternalCA == "" {
		if err := o.wouldSign(ctx, request, token); err != nil {
			return o.advise(nil, err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, wait, errors.New(late))
	defer cancel()
	a, err := o.Open(ctx, caconfig.OpenOptions{Existing: o.command != "once" && o.command != "jwt",
		ReadOnly: o.command == "status"})
	if err != nil {
		return err
	}
	defer a.Close()
	switch o.command {
	case "once": // the chain, leaf first, and then the roots
		chain, err := a.Sign(ctx, request)
		if err != nil {
			return o.advise(a, err)
		}
		_, err = out.Write(append(pki.MarshalCertificatesPEM(chain...), a.Bundle().MarshalPEM()...))
		return err
	case "jwt":
		signed, err := a.Own.SignJWT(ctx, token)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(out, signed)
		return err
	case "rotate":
		_, err = a.Own.Rotate(ctx)
	case "rotate-jwt":
		_, err = a.Own.RotateJWT(ctx)
	case "reseal": // Open has written it
		form := "in the clear, as without -seal"
		if o.Custody.Seal != "" {
			form = "sealed"
		}
		fmt.Fprintf(out, "the CA %s is %s\n", a.Where, form)
	case "taint":
		err = a.Own.Taint(ctx, o.argument)
	case "revoke":
		var done string
		done, err = a.Own.Revoke(ctx, o.argument, o.now)
		switch {
		case err != nil:
		case o.now:
			fmt.Fprintln(out, done)
		default:
			o.follows(a.Own.Status(), out)
		}
	}
	if err != nil {
		return o.advise(a, err)
	}
	a.WriteStatus(out)
	s := a.Own.Status()
	if slices.ContainsFunc(append(s.Roots, s.JWTKeys...), func(k ca.KeyStatus) bool {
		return k.Phase == "distributing" && time.Until(k.Activates) < 0 || !k.Retires.IsZero() &&
			time.Until(k.Retires) < 0
	}) {
		fmt.Fprintln(out, "a time here has passed: no server runs on this store, and the next one takes the step, "+
			"or has a root wait that no peer was told of")
	}
	if what := o.missingRoot(a); what != "" {
		fmt.Fprintln(out, what)
	}
	orphans, err := a.Own.Orphans(ctx)
	for _, name := range orphans {
		fmt.Fprintf(out, "private key %s: the store does not know it; destroy it at the custodian, if no other copy of "+
			"the store does\n", name)
	}
	if err != nil && o.command != "status" { // the command is done
		_, err = fmt.Fprintln(out, message(err))
	}
	return err
}

// wouldSign refuses requests that no CA with these flags signs, before a CA exists: a failed command writes nothing.
func (o *options) wouldSign(ctx context.Context, r ca.Request, token ca.JWTRequest) error {
	cfg := o.CA
	cfg.Rotation.KeyAlgorithm = "" // RSA keys take long to make
	if o.command != "once" && o.command != "jwt" {
		return nil
	}
	a, err := ca.New(cfg) // in memory
	if err == nil && o.command == "once" {
		_, err = a.Sign(ctx, r)
	} else if err == nil {
		_, err = a.SignJWT(ctx, token)
	}
	return err
}

// follows describes the future of a tainted root whose successor was revoked.
func (o *options) follows(s ca.Status, out io.Writer) {
	quantum := func(k ca.KeyStatus) bool { return strings.HasPrefix(certpem.Kind(k.Certificate.PublicKey), "ml-dsa") }
	for _, k := range s.Roots {
		if k.Phase == "active" && k.Tainted && !slices.ContainsFunc(s.Roots, func(other ca.KeyStatus) bool {
			return other.Phase == "distributing" && quantum(other) == quantum(k)
		}) {
			fmt.Fprintf(out, "root %s is tainted, and signs on without a successor: a server that runs on this "+
				"store prepares another one; -rotate does it now, and -revoke %[1]s -now has it sign at once\n", k.ID)
		}
	}
}

// advise adds the helpful flag to a command's error.
func (o *options) advise(a *caconfig.Authority, err error) error {
	if errors.Is(err, ca.ErrUnknownKey) {
		return fmt.Errorf("%w; -status lists the serial numbers and key IDs", err)
	}
	if e, ok := errors.AsType[*ca.SignError](err); ok {
		if e.Granted > 0 && e.Asked > e.Granted {
			err = fmt.Errorf("%w; -max-ttl is for more", err)
		}
		return err // possibly an error of the cluster's signer
	}
	s := a.Own.Status()
	for _, k := range append(s.Roots, s.JWTKeys...) {
		if o.command == "revoke" && !o.now && k.ID == o.argument && k.Phase == "active" {
			return fmt.Errorf("%w; that is -taint %[2]s and, later, -revoke %[2]s; or -revoke %[2]s -now", err, k.ID)
		}
	}
	return err
}

// readCSR reads a signing request until ctx is done: an operator may be typing it.
func readCSR(ctx context.Context, in io.Reader) (*pki.CSR, error) {
	var text []byte
	read := make(chan error, 1)
	go func() { // until the end of the input, or of the program
		var err error
		text, err = io.ReadAll(io.LimitReader(in, 1<<20))
		read <- err
	}()
	select {
	case err := <-read:
		if err != nil {
			return nil, err
		}
		return pki.ParseCSRPEM(text)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
