module github.com/svidkit/svidkit/spiffe/spiffegrpc

go 1.26.0

require (
	github.com/svidkit/svidkit v0.0.0
	google.golang.org/grpc v1.79.3
)

require (
	golang.org/x/net v0.48.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.32.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20251202230838-ff82c1b0f217 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace github.com/svidkit/svidkit => ../..
