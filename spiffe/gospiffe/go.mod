module github.com/svidkit/svidkit/spiffe/gospiffe

go 1.26.0

require (
	github.com/spiffe/go-spiffe/v2 v2.9.0
	github.com/stretchr/testify v1.12.1
	github.com/svidkit/svidkit v0.0.0
)

require (
	github.com/go-jose/go-jose/v4 v4.1.8 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/crypto v0.58.0 // indirect
)

replace github.com/svidkit/svidkit => ../..
