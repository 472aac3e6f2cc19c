// Athenz-provider is the provider and the signing service of Athenz on Kubernetes. ZTS, Athenz's certificate
// authority, asks the provider whether a pod matches its identity document; the signing service signs these documents
// for the nodes' agents.
//
// Environment variables configure it: -help lists them, and README.md has more.
package main

import (
	_ "embed"

	"github.com/svidkit/svidkit/examples/internal/program"
)

//go:embed install.yaml
var manifest string

var daemon = program.Daemon{Name: "athenz-provider", Variables: variables, Manifest: manifest, Serve: serve}

func main() { daemon.Main() }
