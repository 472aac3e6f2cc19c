package main

import (
	"context"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/pkcs11key"
	"github.com/svidkit/svidkit/pki/tpmkey"
)

// custodians are what -custodian and the like name here besides openbao.
var custodians = map[string]caconfig.CustodianKind{
	"pkcs11": {
		Options: []string{"module", "token", "pin_file", "seal_key"},
		New: func(ctx context.Context, o map[string]string) (ca.Custodian, error) {
			return pkcs11key.Open(ctx, pkcs11key.Options{Module: o["module"], Token: o["token"],
				PINFile: o["pin_file"], SealKey: o["seal_key"]})
		},
	},
	"tpm": {
		Options: []string{"device", "directory"},
		New: func(_ context.Context, o map[string]string) (ca.Custodian, error) {
			tpm, err := tpmkey.Open(cmp.Or(o["device"], "/dev/tpmrm0"))
			if err != nil {
				return nil, err
			}
			keys, err := tpm.Custodian(o["directory"])
			if err != nil {
				_ = tpm.Close() // nothing is under way
				return nil, err
			}
			return chip{keys, tpm}, nil
		},
	},
}
