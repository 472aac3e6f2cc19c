// Command jwtclient asks a server over HTTP and proves itself with a token, with go-spiffe:
//
//	jwtclient ADDRESS
package main

import (
	"context"
	"io"
	"log"
	"net/http"
	"os"

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
	svid, err := jwtSource.FetchJWTSVID(ctx, jwtsvid.Params{Audience: "jwtserver"})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+os.Args[1], nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+svid.Marshal())
	server := tlsconfig.AuthorizeID(spiffeid.RequireFromString("spiffe://example.org/server"))
	client := &http.Client{
		Transport: &http.Transport{
			TLSClientConfig: tlsconfig.TLSClientConfig(x509Source, server),
		},
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(os.Stdout, resp.Body)
	return err
}
