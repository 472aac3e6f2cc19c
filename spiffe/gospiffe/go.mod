module github.com/svidkit/svidkit/spiffe/gospiffe

go 1.26.0

require (
	github.com/spiffe/go-spiffe/v2 v2.9.0
	github.com/svidkit/svidkit v0.0.0
)

require github.com/go-jose/go-jose/v4 v4.1.8 // indirect

replace github.com/svidkit/svidkit => ../..
