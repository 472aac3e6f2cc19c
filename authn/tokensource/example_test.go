package tokensource_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/svidkit/svidkit/authn/tokensource"
)

// The projected token of a Kubernetes pod, exchanged for one that another server accepts.
func Example() {
	sts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println("asked for", r.FormValue("audience"))
		_, _ = io.WriteString(w, `{"access_token":"t0ken","token_type":"Bearer","expires_in":3600}`)
	}))
	defer sts.Close()

	pod := tokensource.Static("eyJhbGciOiJSUzI1NiJ9.e30.c2ln") // tokensource.File(path) in a pod
	federated, err := tokensource.Exchange(pod, tokensource.ClientOptions{URL: sts.URL, Audience: "https://ca.example"})
	if err != nil {
		log.Fatal(err)
	}
	for range 3 {
		token, err := federated.Token(context.Background())
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(len(token), "bytes")
	}
	// Output:
	// asked for https://ca.example
	// 5 bytes
	// 5 bytes
	// 5 bytes
}

// A file that may be missing, as the caller may have a client certificate.
func ExampleFile() {
	source := tokensource.File("/var/run/secrets/tokens/none")
	if _, err := source.Token(context.Background()); errors.Is(err, tokensource.ErrNoToken) {
		fmt.Println("go on with the client certificate alone")
	}
	// Output: go on with the client certificate alone
}
