module github.com/svidkit/svidkit/pki/tpmkey

go 1.26.0

require (
	github.com/google/go-tpm v0.9.8
	github.com/stretchr/testify v1.12.1
	github.com/svidkit/svidkit v0.1.0
)

require (
	github.com/fsnotify/fsnotify v1.10.1 // indirect
	github.com/go-jose/go-jose/v4 v4.1.9 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/crypto v0.58.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace github.com/svidkit/svidkit => ../..
