// Athenz-sia is the client in a pod: as an init container it gets the first identity from the agent of the node, and
// as a sidecar it keeps it fresh, in files that the other containers read.
//
// Environment variables configure it, which -help lists; README.md has the others beside it.
package main

import (
	_ "embed"

	"github.com/svidkit/svidkit/examples/internal/program"
)

//go:embed install.yaml
var manifest string

var daemon = program.Daemon{Name: "athenz-sia", Variables: variables, Manifest: manifest, Serve: serve}

func main() { daemon.Main() }
