// Athenz-agent is the identity agent of a Kubernetes node: the pods of the node take their identities of Athenz from it, over a
// Unix socket. It asks the kubelet what a pod is, has an identity document signed, and registers the pod with ZTS.
//
//	go run ./examples/athenz-agent -demo
//
// It is configured by environment variables, which -help lists; README.md has the others beside it.
package main

import (
	"github.com/svidkit/svidkit/internal/athenzdemo"
	"github.com/svidkit/svidkit/internal/athenzprog"
)

func main() { athenzprog.Agent().Main(athenzdemo.Run) }
