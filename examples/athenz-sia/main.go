// Athenz-sia is the client in a pod: as an init container it gets the first identity from the agent of the node, and as a sidecar
// it keeps it fresh, in files that the other containers read.
//
// Environment variables configure it, which -help lists; README.md has the others beside it.
package main

import (
	"context"
	_ "embed"
	"io"
	"os"

	"github.com/svidkit/svidkit/examples/program"
)

//go:embed install.yaml
var manifest string

func main() {
	program.Main("athenz-sia", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	})
}

// run is the program. It returns nil when a signal ends it.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	d := program.Daemon{Name: "athenz-sia", Variables: variables, Manifest: manifest, Serve: serve}
	return d.Run(ctx, args, environ, out, errOut)
}
