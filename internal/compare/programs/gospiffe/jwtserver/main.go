// Command jwtserver serves clients with a token of their own over HTTP, with go-spiffe:
//
//	jwtserver ADDRESS
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	x509Source, err := workloadapi.NewX509Source(ctx)
	if err != nil {
		return err
	}
	defer x509Source.Close()
	jwtSource, err := workloadapi.NewJWTSource(ctx)
	if err != nil {
		return err
	}
	defer jwtSource.Close()
	server := &http.Server{
		Addr:      os.Args[1],
		Handler:   protect(jwtSource, http.HandlerFunc(hello)),
		TLSConfig: tlsconfig.TLSServerConfig(x509Source),
	}
	return server.ListenAndServeTLS("", "")
}

type callerKey struct{}

func protect(bundles *workloadapi.JWTSource, next http.Handler) http.Handler {
	client := spiffeid.RequireFromString("spiffe://example.org/client")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " ")
		if !ok || !strings.EqualFold(scheme, "Bearer") {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "a token is required", http.StatusUnauthorized)
			return
		}
		svid, err := jwtsvid.ParseAndValidate(token, bundles, []string{"jwtserver"})
		if err != nil {
			w.Header().Set("WWW-Authenticate", `Bearer error="invalid_token"`)
			http.Error(w, "the token is not valid", http.StatusUnauthorized)
			return
		}
		if svid.ID != client {
			http.Error(w, "forbidden", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, svid.ID)))
	})
}

func hello(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintln(w, "hello", r.Context().Value(callerKey{}))
}
