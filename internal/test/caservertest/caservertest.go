// Package caservertest has what tests of CA servers share.
package caservertest

import (
	"context"
	"testing"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// Identity returns the identity of a server for caserver.Options, which the CA that it serves signs. It is renewed
// until the test ends, or the caller closes it.
func Identity(t testing.TB, signer ca.Signer, id spiffe.ID, names ...pki.SAN) *secretcache.Manager {
	t.Helper()
	own, err := local.NewServer(signer, id, names...)
	if err != nil {
		t.Fatal(err)
	}
	m, err := secretcache.New(secretcache.Config{ID: id, CA: own, Names: names})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = m.Run(context.WithoutCancel(t.Context())) }()
	t.Cleanup(func() { _ = m.Close() })
	return m
}
