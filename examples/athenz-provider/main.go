// Athenz-provider is the provider that ZTS, Athenz's certificate authority, asks whether a pod of Kubernetes is what its identity
// document says, and the signing service that signs the documents for the agents of the nodes.
//
//	go run ./examples/athenz-provider -demo
//
// It is configured by environment variables, which -help lists; README.md has the others beside it.
package main

import (
	"github.com/svidkit/svidkit/internal/athenzdemo"
	"github.com/svidkit/svidkit/internal/athenzprog"
)

func main() { athenzprog.Provider().Main(athenzdemo.Run) }
