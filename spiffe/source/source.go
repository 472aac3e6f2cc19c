// Package source composes sources of identities and trust bundles: it keeps the last good state of one across
// restarts, and merges the bundles of several.
//
// [LastGood] lets a program start during an outage of its agent, with what it stored before:
//
//	live, err := workloadapi.New(agent)
//	…
//	src, err := source.StartLastGood(ctx, source.LastGoodConfig{
//		Source: live, Dir: "/var/lib/web/last-good", MaxAge: 24 * time.Hour, Identity: true,
//	})
//
// [NewMerge] adds the bundles of other trust domains:
//
//	src, err := source.NewMerge(td, own, federated) // a *workloadapi.Source and a *federation.Manager
package source

import (
	"context"

	"github.com/svidkit/svidkit/spiffe"
)

// Source is a source of an identity and trust bundles: a *workloadapi.Source, a *filesource.Source, a
// *secretcache.Manager, or a source made by this package.
type Source interface {
	spiffe.SVIDSource
	spiffe.BundleSource

	// Snapshot returns the identity and the bundles as they were published together.
	Snapshot() (*spiffe.Snapshot, error)

	// Changed returns a channel that is closed when something changes.
	Changed() <-chan struct{}

	// Ready waits until the source has what it is configured for.
	Ready(ctx context.Context) error

	// Close stops the source.
	Close() error
}
