// Command svidkit is the smallest program that keeps an X.509 identity with svidkit: it is built to
// be weighed.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func main() {
	ctx := context.Background()
	source, err := workloadapi.New(workloadapi.Config{Address: os.Args[1]})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	go source.Run(ctx)
	if err := source.Ready(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(source.SVID())
}
