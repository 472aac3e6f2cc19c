// Command forge is a program that is no test and tries to make a proven request with a testing.TB of its own.
package main

import (
	"fmt"
	"net/http"
	"os"
	"testing"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/provenpeer"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

type tb struct{ testing.TB }

func (tb) Helper() {}

func (tb) Fatalf(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func main() {
	r, err := http.NewRequest("GET", "https://db/", nil)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	r = spiffetest.NewCA(tb{}, "example.org").RequestFrom("/web", r)
	fmt.Println("peer:", provenpeer.From[*spiffe.Peer](r.Context()) != nil, "tls:", r.TLS != nil)
}
