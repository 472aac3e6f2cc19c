package sdssource_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
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

	files, err := sdssource.NewFiles(sdssource.FilesConfig{Allow: []string{certs}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer files.Close()
	go func() { _ = files.Run(ctx) }()
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

// The roots of two trust domains, from the source of the identity and from federation, in both forms
// that Envoy has for them.
func ExampleFromIdentityWithAllRoots() {
	ctx := context.Background()
	ca, partner := spiffetest.NewCA(new(testing.T), "example.org"), spiffetest.NewCA(new(testing.T), "partner.test")
	own := manager{ca.Source("/ns/demo/sa/web")} // a *secretcache.Manager

	federated := abroad{partner.Source("/x"), partner} // a *federation.Manager
	all, err := source.NewMerge(ca.TrustDomain(), own, federated)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer all.Close()
	src := sdssource.FromIdentityWithAllRoots(all)
	roots, err := src.GenerateSecret(ctx, "ROOTCA") // Istio's form
	if err != nil {
		fmt.Println(err)
		return
	}
	pem, _ := roots.Roots()
	fmt.Println("ROOTCA has", strings.Count(string(pem), "BEGIN CERTIFICATE"))
	domains, err := src.GenerateSecret(ctx, "ALL") // for Envoy's SPIFFE validator
	if err != nil {
		fmt.Println(err)
		return
	}
	each, _ := domains.TrustDomains()
	byName := func(a, b spiffe.TrustDomain) int { return strings.Compare(a.String(), b.String()) }
	for _, td := range slices.SortedFunc(maps.Keys(each), byName) {
		fmt.Println("ALL has", strings.Count(string(each[td]), "BEGIN CERTIFICATE"), "of", td)
	}
	// Output:
	// ROOTCA has 2
	// ALL has 1 of example.org
	// ALL has 1 of partner.test
}

// manager has what a source needs beside what spiffetest has.
type manager struct{ *spiffetest.Source }

func (manager) Ready(context.Context) error { return nil }
func (manager) Close() error                { return nil }

// abroad has the bundles of another trust domain.
type abroad struct {
	*spiffetest.Source
	ca *spiffetest.CA
}

func (a abroad) Bundles() *spiffe.BundleSet { return a.ca.Bundles() }
