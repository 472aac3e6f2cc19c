package filesink_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// exampleTB is what a test function is given; an example has none, and these do not fail.
type exampleTB struct{ testing.TB }

func (exampleTB) Helper() {}

func printFiles(dir string) {
	for _, name := range []string{"cert-chain.pem", "key.pem", "root-cert.pem"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(name, info.Mode())
	}
}

// A program keeps the files of a server current that reads certificates from files. Here the source is one for tests;
// it is a *workloadapi.Source or a *secretcache.Manager in a program.
func Example() {
	source := spiffetest.NewCA(exampleTB{}, "example.org").Source("/ns/prod/sa/web")
	dir, err := os.MkdirTemp("", "identity")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	sink, err := filesink.Start(ctx, filesink.Config{Source: source, Dir: dir})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer sink.Close()
	written := sink.Changed()
	source.Renew()
	<-written // now the server may be told to read its files
	fmt.Println(sink.Report().Identities[0].Name)
	printFiles(dir)
	// Output:
	// spiffe://example.org/ns/prod/sa/web
	// cert-chain.pem -rw-r--r--
	// key.pem -rw-------
	// root-cert.pem -rw-r--r--
}

// The OUTPUT_CERTS of Istio's agent, in a pod: one write, for a program that does not stay.
func ExampleSink_Write() {
	source := spiffetest.NewCA(exampleTB{}, "cluster.local").Source("/ns/prod/sa/web")
	dir, err := os.MkdirTemp("", "output-certs")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)

	sink, err := filesink.New(filesink.Config{Source: source, Dir: dir, Plain: true, Mode: 0o644, KeyMode: 0o644})
	if err != nil {
		fmt.Println(err)
		return
	}
	changed, err := sink.Write()
	fmt.Println(changed, err)
	changed, err = sink.Write()
	fmt.Println(changed, err)
	printFiles(dir)
	// Output:
	// true <nil>
	// false <nil>
	// cert-chain.pem -rw-r--r--
	// key.pem -rw-r--r--
	// root-cert.pem -rw-r--r--
}
