module github.com/svidkit/svidkit/examples/ca-full

go 1.26.0

require (
	github.com/go-sql-driver/mysql v1.10.1
	github.com/jackc/pgx/v5 v5.13.0
	github.com/stretchr/testify v1.12.1
	github.com/svidkit/svidkit v0.1.0
	github.com/svidkit/svidkit/pki/pkcs11key v0.1.0
	github.com/svidkit/svidkit/pki/tpmkey v0.1.0
)

require (
	filippo.io/edwards25519 v1.2.0 // indirect
	github.com/fsnotify/fsnotify v1.10.1 // indirect
	github.com/go-jose/go-jose/v4 v4.1.9 // indirect
	github.com/google/go-tpm v0.9.8 // indirect
	github.com/jackc/pgpassfile v1.0.0 // indirect
	github.com/jackc/pgservicefile v0.0.0-20240606120523-5a60cdf6a761 // indirect
	github.com/jackc/puddle/v2 v2.2.3 // indirect
	github.com/miekg/pkcs11 v1.1.2 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/crypto v0.58.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace (
	github.com/svidkit/svidkit => ../..
	github.com/svidkit/svidkit/pki/pkcs11key => ../../pki/pkcs11key
	github.com/svidkit/svidkit/pki/tpmkey => ../../pki/tpmkey
)
