module github.com/svidkit/svidkit/spiffe/spiffegrpc

go 1.26.0

require (
	github.com/stretchr/testify v1.12.1
	github.com/svidkit/svidkit v0.1.0
	google.golang.org/grpc v1.79.3
)

require (
	github.com/go-jose/go-jose/v4 v4.1.9 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/crypto v0.58.0 // indirect
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20251202230838-ff82c1b0f217 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace github.com/svidkit/svidkit => ../..
