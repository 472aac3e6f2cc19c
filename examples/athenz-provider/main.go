// Athenz-provider is the provider that ZTS, Athenz's certificate authority, asks whether a pod of Kubernetes is what
// its identity document says, and the signing service that signs the documents for the agents of the nodes.
//
// Environment variables configure it, which -help lists; README.md has the others beside it.
package main

import (
	_ "embed"

	"github.com/svidkit/svidkit/examples/internal/program"
)

//go:embed install.yaml
var manifest string

var daemon = program.Daemon{Name: "athenz-provider", Variables: variables, Manifest: manifest, Serve: serve}

func main() { daemon.Main() }
