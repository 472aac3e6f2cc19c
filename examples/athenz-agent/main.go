// Athenz-agent is the identity agent of a Kubernetes node: the pods of the node take their identities of Athenz from
// it, over a Unix socket. It asks the kubelet what a pod is, has an identity document signed, and registers the pod
// with ZTS.
//
// Environment variables configure it, which -help lists; README.md has the others beside it.
//
// "athenz-agent flexvolume" is the driver by which the kubelet mounts the socket into pods.
package main

import (
	"context"
	_ "embed"
	"io"
	"os"

	"github.com/svidkit/svidkit/examples/internal/program"
)

//go:embed install.yaml
var manifest string

func main() {
	program.Main("athenz-agent", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	})
}

// run is the program. It returns nil when a signal ends it.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	if len(args) > 0 && args[0] == "flexvolume" {
		return flexvolume(args[1:], environ, out)
	}
	d := program.Daemon{Name: "athenz-agent",
		Help:      "\nThe driver of FlexVolumes: athenz-agent flexvolume init | mount PATH OPTIONS | unmount PATH\n",
		Variables: variables, Manifest: manifest, Serve: serve}
	return d.Run(ctx, args, environ, out, errOut)
}
