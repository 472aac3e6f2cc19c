// Ca-full is the program examples/ca with databases and with custodians of keys that need modules of others.
//
//	ca-full -store 'postgres://ca@db.example.org/ca' -store-schema | psql …
//	ca-full -store 'postgres://ca@db.example.org/ca' -store-identity /run/identity -create
//	ca-full -custodian pkcs11:/etc/svidkit/hsm.json
//
// It has all flags, commands and files of examples/ca, and these:
//
//   - -store postgres://USER@HOST/DATABASE and mysql://USER@HOST/DATABASE (also for MariaDB) keep the CA in a row of a
//     database, which all replicas share. -store-schema prints the table and the rights of its role. Parameters of the
//     URL are those of the drivers pgx and go-sql-driver/mysql, except for passwords and TLS, which have flags.
//   - -custodian pkcs11:FILE keeps keys in a token with PKCS #11, if the program was built with cgo, and tpm:FILE in a
//     TPM 2.0.
//
// A connection to a database on another machine has TLS: -store-identity names a directory as svid watch writes it,
// whose files are followed. examples/REPLICAS.md and examples/CUSTODY.md show both step by step.
package main

import (
	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/examples/ca/caprogram"
)

func main() {
	var d databases
	caprogram.Main(caprogram.Program{Name: "ca-full", Kinds: caconfig.Kinds{
		Flags: d.define, Custodians: custodians,
		Stores: map[string]caconfig.StoreKind{
			"postgres": {Open: d.postgres, Schema: schema("postgres")},
			"mysql":    {Open: d.mysql, Schema: schema("mysql")},
		},
	}})
}
