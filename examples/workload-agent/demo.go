package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

const demoFile = `{
  "workloads": [
    {"match": {"uid": %d}, "identities": [{"id": "spiffe://demo.test/web", "audiences": ["*"]}]}
  ]
}
`

// demo runs the agent with a CA in memory and a file for the user of this process.
func demo(ctx context.Context, o options) error {
	dir, err := os.MkdirTemp("", "workload-agent")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	const life = 20 * time.Second
	o.td, o.file, o.socket = spiffe.MustParseTrustDomain("demo.test"), filepath.Join(dir, "workloads.json"), filepath.Join(dir, "agent.sock")
	if err := os.WriteFile(o.file, fmt.Appendf(nil, demoFile, os.Getuid()), 0o600); err != nil {
		return err
	}
	authority, err := ca.New(ca.Config{TrustDomain: o.td, DefaultTTL: life, MaxTTL: life, Backdate: time.Second, JWT: &ca.JWTConfig{}})
	if err != nil {
		return err
	}
	from, err := fromAuthority(authority, &o)
	if err != nil {
		return err
	}
	fmt.Fprintf(o.out, "edit: %s\ntry: SPIFFE_ENDPOINT_SOCKET=unix://%s go run ./examples/svid fetch -dir /tmp/web\n", o.file, o.socket)
	return serve(ctx, o, from)
}
