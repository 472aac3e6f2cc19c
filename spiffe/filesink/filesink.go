// Package filesink writes an identity and trust bundles of any source to files, and keeps these files current, for
// programs that read certificates from files.
//
//	sink, err := filesink.Start(ctx, filesink.Config{Source: src, Dir: "/run/identity"})
//	if err != nil { … }
//	defer sink.Close()
//
// A [Sink] follows a *workloadapi.Source, a *secretcache.Manager (its default identity), a *filesource.Source or what
// package source makes of them, and writes on every change. [Sink.Write] writes once. Package filesource reads what a
// Sink writes.
//
// # Which files
//
//	cert-chain.pem    the certificates of the identity, leaf first
//	key.pem           the private key, in PKCS#8
//	root-cert.pem     the authorities of its trust domain
//
// Config has other names for them, and one for a file with the bundles of all trust domains. The folder is made, with
// mode 0755, if it is missing. For the OUTPUT_CERTS of Istio's agent the layout is [Plain] and both modes are 0600, or
// 0644 in a pod.
//
// # What readers see
//
// A reader never sees a part of a file. With [Links], which is the layout of the volumes of Kubernetes, all names lead
// to the files of one version at every moment, after a crash too. A reader that reads the key and the certificates
// while they are replaced can still have one of each; it reads again if they do not match, or always reads twice.
//
// With [Plain] the files are written and made durable beside their names first, and then moved there one by one, with
// nothing in between: the roots (and the bundles), the key, and last the certificates. The roots come first, as a new
// certificate may need them. The certificates come last, as that is the file that readers follow: when its change is
// announced, the key that belongs to it is there. A reader that follows the folder gets its last notification when the
// whole set is there, and one that takes what it has read twice at an interval does not read the same mixed set twice.
// A process that is killed between two of the moves leaves files of two versions; the next one finishes the moves
// before it does anything else, and without the source. One name for the key and the certificates makes one file of
// them, which always match.
//
// # When something fails
//
// A failure changes nothing in the files, is in the log and in [Sink.Status], and is retried, at intervals that are a
// share of the life that the written identity has left. An expired identity is not written. While the source has no
// identity, also because it was withdrawn, the files stay. Files that are equal already are not written again, and
// every minute files that were changed or removed by another program are put in order.
//
// # Whose folder
//
// The folder, those above it and each link on the way must belong to the user of this process or to root, and other
// users must not be able to write to the folder. An error about this wraps [ErrUnsafe] and says which chown or chmod
// helps. A link in the place of a file is replaced, and never followed. On Windows owners and modes are not checked.
package filesink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/fileset"
	"github.com/svidkit/svidkit/internal/life"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/private"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Errors to test for with [errors.Is].
var (
	// ErrNotReady says that the files do not have the identity of the source yet. The error around it has the reason.
	// It has the method Retryable and reports that a later attempt may succeed.
	ErrNotReady error = notReady{}

	// ErrUnsafe says that another user of this machine may have made or may change the folder.
	ErrUnsafe = private.ErrUnsafe
)

type notReady struct{}

func (notReady) Error() string                                { return "not ready" }
func (notReady) Retryable() (after time.Duration, again bool) { return 0, true }

// Source is what a [Sink] follows. Its methods must not block, and must be safe for concurrent use.
type Source interface {
	// Snapshot returns the identity and the bundles as they were published together.
	Snapshot() (*spiffe.Snapshot, error)

	// Changed returns a channel that is closed when the snapshot changes.
	Changed() <-chan struct{}
}

// Layout is how the files are in the folder.
type Layout int

const (
	Links Layout = iota // links through "..data", which is replaced in one step
	Plain               // plain files, each replaced by a rename
)

// Config configures a [Sink]. Source and Dir are required; every other zero means what is said here. [New] copies it.
type Config struct {
	// Source has what is written. The Sink does not start and does not close it.
	Source Source

	// Dir is the folder of the files. One Sink at a time writes to it.
	Dir string

	// Layout is how the files are in the folder. Zero means Links.
	Layout Layout

	// CertName, KeyName and RootsName are the names of the files. Empty means those of the package comment. CertName and
	// KeyName may be the same, for one file with the key and then the certificates.
	CertName, KeyName, RootsName string

	// BundlesName is the name of a file with the bundles of all trust domains, that of the identity and the federated
	// ones, as a bundle map; see [spiffe.ParseBundleMap]. Empty means that there is none.
	BundlesName string

	// Mode is the mode of the files without a private key: 0644, 0640, 0600 or the same without write permission. Zero
	// means 0644.
	Mode fs.FileMode

	// KeyMode is the mode of the file with the private key, one of the same. Zero means 0600. With 0644 or 0444 every user
	// that can enter the folder can read the key, which is for a pod in which each container has its own user; New
	// logs a warning.
	KeyMode fs.FileMode

	// AllowWritable accepts a folder that other users can write to, with a warning, as an emptyDir of Kubernetes is
	// one: they can replace the files.
	AllowWritable bool

	// Logger gets what was written (Info), and what has failed or needs attention (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Sink keeps files current. [New] and [Start] make one. Its methods are safe for concurrent use.
type Sink struct {
	cfg  Config
	log  *slog.Logger
	life life.Life
	news renew.Signal

	writing sync.Mutex      // held while files are written; guards the next four
	folder  *fileset.Folder // nil if it is not open
	running bool            // so that folder stays open
	life0   time.Duration   // how long the written identity lives
	told    map[string]bool // about the folder

	mu     sync.Mutex // guards status
	status Status
}

// Status is the state of a [Sink] at one moment, for health checks and diagnosis. It has no secrets.
type Status struct {
	// Ready says that the files had what the source has when they were last looked at without a failure, at least once.
	Ready bool

	// ID and NotAfter are the identity in the files, and when its certificate ends; zero before Ready.
	ID       spiffe.ID
	NotAfter time.Time

	// Writes counts how often the files were written; LastWrite is when that was last. What was there already does not
	// count.
	Writes    uint64
	LastWrite time.Time

	// Checked is when the files were last found or put in order. Err says why they could not be since, or is nil.
	Checked time.Time
	Err     error
}
