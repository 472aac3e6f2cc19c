package sdssource_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Secrets of the SPIFFE identity and of files, by name, for one sds.Handler.
func Example() {
	ctx := context.Background()
	ca := spiffetest.NewCA(new(testing.T), "example.org")
	identity := ca.Source("/ns/demo/sa/gateway") // a *filesource.Source, for instance
	certs, err := os.MkdirTemp("", "certs")      // /etc/gateway-certs, for instance
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(certs)
	if err := os.WriteFile(filepath.Join(certs, "ca.crt"), ca.Bundle().MarshalPEM(), 0o644); err != nil {
		fmt.Println(err)
		return
	}

	files, err := sdssource.StartFiles(ctx, sdssource.FilesConfig{Allow: []string{certs}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer files.Close()
	own := sdssource.FromIdentity(identity)
	src, err := sdssource.Mux(map[string]sds.Source{"default": own, "ROOTCA": own, "file-cert:*": files, "file-root:*": files})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, name := range []string{"default", "ROOTCA", "file-root:" + filepath.Join(certs, "ca.crt"), "file-root:/etc/shadow", "other"} {
		_, err := src.GenerateSecret(ctx, name)
		fmt.Println(err == nil, errors.Is(err, fs.ErrNotExist))
	}
	// Output:
	// true false
	// true false
	// true false
	// false true
	// false true
}
