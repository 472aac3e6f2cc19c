package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

const demoFile = `{
  "workloads": [
    {
      "match": {"uid": %d},
      "identities": [%s]
    }
  ]
}
`

// demo runs the agent with a CA in memory, and is a workload of it: it prints each identity that it gets, while certificates
// rotate and the file changes. It ends with an error if it has lost an identity that the file did not take away.
func demo(ctx context.Context, o options) (err error) {
	dir, err := os.MkdirTemp("", "workload-agent")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	const life = 20 * time.Second
	o.td, o.file, o.socket = spiffe.MustParseTrustDomain("demo.test"), filepath.Join(dir, "workloads.json"), filepath.Join(dir, "agent.sock")
	authority, err := ca.New(ca.Config{TrustDomain: o.td, DefaultTTL: life, MaxTTL: life, Backdate: time.Second, JWT: &ca.JWTConfig{}})
	if err != nil {
		return err
	}
	from, err := o.ca.fromAuthority(authority, &o)
	if err != nil {
		return err
	}
	write := func(identities string) error {
		return os.WriteFile(o.file, fmt.Appendf(nil, demoFile, os.Getuid(), identities), 0o600)
	}
	const web, db = `{"id": "spiffe://demo.test/web", "audiences": ["*"]}`, `{"id": "spiffe://demo.test/db", "hint": "database"}`
	if err := write(web); err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	done := make(chan error, 1)
	go func() { done <- watch(ctx, o) }()
	go func() {
		for _, identities := range []string{web + ", " + db, web + ", ", web} {
			select {
			case <-time.After(2 * time.Second):
			case <-ctx.Done():
				return
			}
			fmt.Fprintf(o.out, "the file has identities: [%s]\n", identities)
			if err := write(identities); err != nil {
				fail(err)
			}
		}
	}()
	fmt.Fprintf(o.out, "try: SPIFFE_ENDPOINT_SOCKET=unix://%s go run ./examples/svid fetch\n", o.socket)
	err = serve(ctx, o, from)
	fail(nil)
	return errors.Join(err, <-done)
}

// watch is the workload.
func watch(ctx context.Context, o options) error {
	client, err := workloadapi.NewClient((&url.URL{Scheme: "unix", Path: filepath.ToSlash(o.socket)}).String(), nil)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	updates := 0
	for update, err := range client.WatchX509SVIDs(ctx) {
		switch {
		case errors.Is(err, workloadapi.ErrDenied):
			return fmt.Errorf("the identity is lost: %w", err)
		case err != nil: // it is tried again
			continue
		}
		updates++
		for _, one := range update.Identities {
			fmt.Fprintf(o.out, "workload: has %s %q until %s\n", one.SVID.ID(), one.Hint, one.SVID.NotAfter().Local().Format(time.TimeOnly))
		}
	}
	if updates == 0 {
		return errors.New("no identity has come")
	}
	return nil
}
