package source_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

type exampleTB struct{ testing.TB }

func (exampleTB) Helper() {}

// A program that runs where there is an agent, and where there are files of cert-manager.
func ExampleFirst() {
	ca := spiffetest.NewCA(exampleTB{}, "example.org")
	dir, err := os.MkdirTemp("", "identity")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	certs, key, _ := ca.SVID("/web").MarshalPEM()
	for name, data := range map[string][]byte{"tls.crt": certs, "tls.key": key, "ca.crt": ca.Bundle().MarshalPEM()} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			panic(err)
		}
	}

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	src, err := source.First(ctx, nil,
		source.Candidate{Name: "agent", Within: 100 * time.Millisecond, Start: func(ctx context.Context) (source.Source, error) {
			return workloadapi.Start(ctx, workloadapi.Config{Address: "unix://" + filepath.Join(dir, "agent.sock")})
		}},
		source.Candidate{Name: "files", Start: func(ctx context.Context) (source.Source, error) {
			return filesource.Start(ctx, filesource.Config{
				CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"),
				Bundles: []filesource.BundleFile{{Path: filepath.Join(dir, "ca.crt")}},
			})
		}},
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer src.Close()
	svid, err := src.SVID()
	fmt.Println(svid, err)
	// Output: spiffe://example.org/web <nil>
}
