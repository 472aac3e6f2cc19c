// Athenz-agent is the identity agent of a Kubernetes node: the node's pods obtain their Athenz identities from it
// over a Unix socket. For each pod it asks the kubelet, obtains a signed identity document, and registers the pod
// with ZTS.
//
// Environment variables configure it: -help lists them, and README.md has more.
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
