// Athenz-sia is the Athenz client in a pod: as an init container it obtains the first identity from the node's agent,
// and as a sidecar it keeps it fresh, in files that the other containers read.
//
// Environment variables configure it: -help lists them, and README.md has more.
package main

import (
	_ "embed"

	"github.com/svidkit/svidkit/examples/internal/program"
)

//go:embed install.yaml
var manifest string

var daemon = program.Daemon{Name: "athenz-sia", Variables: variables, Manifest: manifest, Serve: serve}

func main() { daemon.Main() }
