package main

import (
	"cmp"
	"context"
	"log/slog"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/pkcs11key"
	"github.com/svidkit/svidkit/pki/tpmkey"
)

// custodians are what -custodian and the like name here besides openbao.
var custodians = map[string]caconfig.CustodianKind{
	"pkcs11": {
		Required: []string{"module", "token", "pin_file"}, Optional: []string{"seal_key"},
		New: func(ctx context.Context, o map[string]string, _ *slog.Logger) (ca.Custodian, func(), error) {
			token, err := pkcs11key.Open(ctx, pkcs11key.Options{Module: o["module"], Token: o["token"],
				PINFile: o["pin_file"], SealKey: o["seal_key"]})
			if err != nil {
				return nil, nil, err
			}
			return token, func() { _ = token.Close() }, nil // which logs out
		},
	},
	"tpm": {
		Required: []string{"directory"}, Optional: []string{"device"},
		New: func(_ context.Context, o map[string]string, _ *slog.Logger) (ca.Custodian, func(), error) {
			tpm, err := tpmkey.Open(cmp.Or(o["device"], "/dev/tpmrm0"))
			if err != nil {
				return nil, nil, err
			}
			closes := func() { _ = tpm.Close() } // nothing is under way
			keys, err := tpm.Custodian(o["directory"])
			if err != nil {
				closes()
				return nil, nil, err
			}
			return keys, closes, nil
		},
	},
}
