module github.com/svidkit/svidkit/spiffe/spiffegrpc

go 1.26.0

require (
	github.com/stretchr/testify v1.12.1
	github.com/svidkit/svidkit v0.0.0
	google.golang.org/grpc v1.79.3
)

replace github.com/svidkit/svidkit => ../..
