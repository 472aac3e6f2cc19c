// Command gospiffe is the smallest program that keeps an X.509 identity with go-spiffe: it is built
// to be weighed.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

func main() {
	ctx := context.Background()
	source, err := workloadapi.NewX509Source(ctx, workloadapi.WithClientOptions(workloadapi.WithAddr(os.Args[1])))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer source.Close()
	svid, err := source.GetX509SVID()
	fmt.Println(svid.ID, err)
}
