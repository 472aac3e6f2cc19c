// Athenz-sia is the client in a pod: as an init container it gets the first identity from the agent of the node, and as a sidecar
// it keeps it fresh, in files that the other containers read.
//
//	go run ./examples/athenz-sia -demo
//
// It is configured by environment variables, which -help lists; README.md has the others beside it.
package main

import (
	"github.com/svidkit/svidkit/internal/athenzdemo"
	"github.com/svidkit/svidkit/internal/athenzprog"
)

func main() { athenzprog.SIA().Main(athenzdemo.Run) }
