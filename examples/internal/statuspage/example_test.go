package statuspage_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The status page of a program that serves its identity to Envoy, and the same status for a script.
func Example() {
	ctx := context.Background()
	identity, err := secretcache.Start(ctx, secretcache.Config{
		ID: spiffe.MustParseID("spiffe://example.org/web"), CA: spiffetest.NewCA(new(testing.T), "example.org"),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer identity.Close()
	secrets, err := sds.NewHandler(identity, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer secrets.Close()

	page, err := statuspage.New("agent of web",
		statuspage.Part{Name: "identity", Source: identity},
		statuspage.Part{Name: "sds", Source: secrets},
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	server := httptest.NewServer(page) // in a program: an http.Server at 127.0.0.1
	defer server.Close()
	defer page.Close() // before the server waits for the pages that are live

	resp, err := http.Get(server.URL + "/status.json")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	var status struct {
		Identities struct {
			Rows []struct{ Name, State, Part string }
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&status); err != nil {
		fmt.Println(err)
		return
	}
	for _, i := range status.Identities.Rows {
		fmt.Println(i.Name, i.State, i.Part)
	}
	// Output:
	// spiffe://example.org/web valid identity
}
