package sidecar_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
)

// A sidecar that keeps the identity of its pod in files.
func ExampleStart() {
	dir, err := os.MkdirTemp("", "sidecar") // /tls in a pod, which has an emptyDir in memory there
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // there is no agent here, to wait for
	s, err := sidecar.Start(ctx, sidecar.Config{
		Socket: "/identity/connect/agent.sock", HandleFile: "/identity/id",
		Files: sidecar.Files{
			KeyFile: filepath.Join(dir, "service.key"), CertificateFile: filepath.Join(dir, "service.cert"), RootsFile: filepath.Join(dir, "cacert.pem"),
		},
	})
	if err != nil {
		fmt.Println("no identity")
		return
	}
	defer s.Close()
	// Output: no identity
}
