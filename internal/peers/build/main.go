// Command build makes what package peers runs, or those peers that are named, one after the other, and says how long
// each took. Run it in the directory of package peers:
//
//	go run ./build [NAME...]
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/svidkit/svidkit/internal/peers"
)

func main() {
	names := os.Args[1:]
	if len(names) == 0 {
		names = peers.Names()
	}
	failed := false
	for _, name := range names {
		start := time.Now()
		path, err := peers.Build(name)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			failed = true
			continue
		}
		fmt.Printf("%6.1fs  %s\n", time.Since(start).Seconds(), path)
	}
	if failed {
		os.Exit(1)
	}
}
