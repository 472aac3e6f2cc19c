// Athenz-provider is the provider that ZTS, Athenz's certificate authority, asks whether a pod of Kubernetes is what its identity
// document says, and the signing service that signs the documents for the agents of the nodes.
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
	program.Main("athenz-provider", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	})
}

// run is the program. It returns nil when a signal ends it.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	d := program.Daemon{Name: "athenz-provider", Variables: variables, Manifest: manifest, Serve: serve}
	return d.Run(ctx, args, environ, out, errOut)
}
