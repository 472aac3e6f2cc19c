package filesource_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// exampleTB is what a test function is given; an example has none, and these do not fail.
type exampleTB struct{ testing.TB }

func (exampleTB) Helper() {}

// mount writes files as another program does, and returns the directory.
func mount(files map[string][]byte) string {
	dir, err := os.MkdirTemp("", "identity")
	if err != nil {
		panic(err)
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			panic(err)
		}
	}
	return dir
}

func printAll(src *filesource.Source) {
	if svid, err := src.SVID(); err == nil {
		fmt.Println(svid.ID())
	}
	for b := range src.Bundles().All() {
		fmt.Println(b.TrustDomain(), len(slices.Collect(b.X509Authorities())))
	}
}

// The Secret of cert-manager, or the volume of csi-driver-spiffe, which has files of the same names.
func Example() {
	ca := spiffetest.NewCA(exampleTB{}, "example.org")
	certs, key, _ := ca.SVID("/ns/prod/sa/web").MarshalPEM()
	dir := mount(map[string][]byte{"tls.crt": certs, "tls.key": key, "ca.crt": ca.Bundle().MarshalPEM()})
	defer os.RemoveAll(dir)

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	src, err := filesource.Start(ctx, filesource.Config{
		CertFile: filepath.Join(dir, "tls.crt"),
		KeyFile:  filepath.Join(dir, "tls.key"),
		ID:       spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web"),
		Bundles:  []filesource.BundleFile{{Path: filepath.Join(dir, "ca.crt")}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer src.Close()
	printAll(src)
	// Output:
	// spiffe://example.org/ns/prod/sa/web
	// example.org 1
}

// The projected volume of a pod with a PodCertificate, which is one file with the key and the chain, and the
// ClusterTrustBundles of its own trust domain and of a partner.
func Example_podCertificate() {
	ca, other := spiffetest.NewCA(exampleTB{}, "example.org"), spiffetest.NewCA(exampleTB{}, "partner.test")
	certs, key, _ := ca.SVID("/ns/prod/sa/web").MarshalPEM()
	dir := mount(map[string][]byte{
		"credentialbundle.pem": slices.Concat(key, certs),
		"example-org.pem":      ca.Bundle().MarshalPEM(), "partner.pem": other.Bundle().MarshalPEM(),
	})
	defer os.RemoveAll(dir)

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	src, err := filesource.Start(ctx, filesource.Config{
		CertFile: filepath.Join(dir, "credentialbundle.pem"),
		Bundles: []filesource.BundleFile{
			{Path: filepath.Join(dir, "example-org.pem"), TrustDomain: spiffe.MustParseTrustDomain("example.org")},
			{Path: filepath.Join(dir, "partner.pem"), TrustDomain: spiffe.MustParseTrustDomain("partner.test")},
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer src.Close()
	printAll(src)
	// Output:
	// spiffe://example.org/ns/prod/sa/web
	// example.org 1
	// partner.test 1
}

// The files of spiffe-helper. A program that wants to know of each renewal follows the source.
func Example_spiffeHelper() {
	ca := spiffetest.NewCA(exampleTB{}, "example.org")
	certs, key, _ := ca.SVID("/web").MarshalPEM()
	dir := mount(map[string][]byte{"svid.pem": certs, "svid_key.pem": key, "svid_bundle.pem": ca.Bundle().MarshalPEM()})
	defer os.RemoveAll(dir)

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	src, err := filesource.Start(ctx, filesource.Config{
		CertFile: filepath.Join(dir, "svid.pem"),
		KeyFile:  filepath.Join(dir, "svid_key.pem"),
		Bundles:  []filesource.BundleFile{{Path: filepath.Join(dir, "svid_bundle.pem")}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer src.Close()
	renewed := ca.SVID("/web", func(c *x509.Certificate) { c.NotAfter = c.NotAfter.Add(time.Hour) })
	for ctx.Err() == nil {
		changed := src.Changed() // before reading, so that no change is missed
		svid, err := src.SVID()
		if err != nil {
			fmt.Println(err)
			return
		}
		if svid.NotAfter().Equal(renewed.NotAfter()) {
			fmt.Println("renewed")
			break
		}
		fmt.Println(svid.ID())
		certs, key, _ := renewed.MarshalPEM()
		os.WriteFile(filepath.Join(dir, "svid.pem"), certs, 0o600)
		os.WriteFile(filepath.Join(dir, "svid_key.pem"), key, 0o600)
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	// Output:
	// spiffe://example.org/web
	// renewed
}
