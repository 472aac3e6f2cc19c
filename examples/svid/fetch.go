package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var fetchCommand = command{
	"fetch", "", `write the identity of this workload to files

In the directory of -dir it writes

  svid.pem                 the certificates, leaf first
  svid-key.pem             the private key, in PKCS#8, with the mode of -mode
  bundle.pem               the authorities of the own trust domain
  bundle-TRUST-DOMAIN.pem  those of each trust domain that it federates with
  bundles.json             all of them as a bundle map; with -jwt-bundles, with
                           the keys for JWT-SVIDs

and the tokens of -jwt. The names are links through "..data", as in the volumes
of Kubernetes, and all of them are replaced in one step: a reader that finds a
key and a certificate that do not match reads both again. The directory is made
with mode 0755; other users must not be able to write to it. The version before
stays until the next. The command of -exec runs each time. The exit code is 1 if
the agent has no identity for this workload, or no token for an audience of
-jwt, or the command fails.`,
	func(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
		return a.fetch(ctx, fs, args, false)
	},
}

var watchCommand = command{
	"watch", "", `keep these files fresh, and run a command after each change

It is fetch that goes on until it is interrupted. While the agent is away, and
after it has withdrawn the identity, the files stay as they are, and standard
error has the reason. The command runs at the start and after each change, one
at a time. One that fails, or that is killed after its time, is reported and
runs again after half a minute or with the next change. With -json there is one
line for each change.`,
	func(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
		return a.fetch(ctx, fs, args, true)
	},
}

// retry is the wait after a command or a write has failed.
const retry = 30 * time.Second

// fetcher writes the identity and bundles of a Workload API to a directory.
type fetcher struct {
	dir, hint, socket string
	cert, key, bundle string // names of files
	jwtBundles        bool
	mode              fs.FileMode
	tokens            map[string]string // audiences, by file name
	command           string
	commandTimeout    time.Duration
	timeout           time.Duration

	source *workloadapi.Source
}

func (f *fetcher) flags(a *app, fs *flag.FlagSet) {
	fs.StringVar(&f.dir, "dir", "", "the `DIRECTORY` of the files; required")
	fs.StringVar(&f.socket, "socket", a.getenv(workloadapi.SocketEnv),
		"the `ADDRESS` of the Workload API; the default is in "+workloadapi.SocketEnv)
	fs.StringVar(&f.hint, "hint", "", "the identity with this `HINT`, in place of the default one")
	fs.StringVar(&f.cert, "cert-name", "svid.pem", "the `NAME` of the file of the certificates")
	fs.StringVar(&f.key, "key-name", "svid-key.pem", "the `NAME` of the file of the private key")
	fs.StringVar(&f.bundle, "bundle-name", "bundle.pem", "the `NAME` of the file of the own authorities")
	fs.BoolVar(&f.jwtBundles, "jwt-bundles", false, "also get the keys that verify JWT-SVIDs, for bundles.json")
	f.mode = 0o600
	fs.Func("mode", "the `MODE` of the private key and the tokens: 0600, 0400, 0640 or 0440 (default 0600)",
		func(text string) error {
			n, err := strconv.ParseUint(text, 8, 32)
			if err != nil || n&0o400 == 0 || n&^0o640 != 0 {
				return errors.New("it is not one of 0600, 0400, 0640 and 0440: the private key is for its owner, " +
					"and " +
					"at most to be read by a group")
			}
			f.mode = os.FileMode(n)
			return nil
		})
	fs.Func("jwt", "a JWT-SVID as `AUDIENCE=NAME`, for the audience and in the file of that name; may be repeated",
		func(text string) error {
			i := strings.LastIndexByte(text, '=')
			if i < 1 || i == len(text)-1 {
				return errors.New("it is not AUDIENCE=NAME")
			}
			if f.tokens[text[i+1:]] != "" {
				return errors.New("there are two for this file")
			}
			f.tokens[text[i+1:]] = text[:i]
			return nil
		})
	fs.StringVar(&f.command, "exec", "", "a `COMMAND` for /bin/sh after each change, with the directory in SVID_DIR")
	fs.DurationVar(&f.commandTimeout, "exec-timeout", 30*time.Second, "how long that command may take")
}

// check refuses flags that do not fit together.
func (f *fetcher) check() error {
	switch {
	case f.dir == "":
		return program.Misused("there is no -dir")
	case f.socket == "":
		return program.Misused("there is no -socket, and %s is not set", workloadapi.SocketEnv)
	case f.commandTimeout <= 0 || f.timeout < 0:
		return program.Misused("a time is not more than 0")
	}
	names := []string{f.cert, f.key, f.bundle, mapName}
	names = append(names, slices.Sorted(maps.Keys(f.tokens))...)
	for i, name := range names {
		if name != filepath.Base(name) || strings.HasPrefix(name, "..") || name == "." || !filepath.IsLocal(name) {
			return program.Misused("%q is not the name of a file", name)
		}
		if strings.HasPrefix(name, "bundle-") {
			return program.Misused("the names that begin with bundle- are for federated trust domains, and %q is one",
				name)
		}
		if slices.Contains(names[:i], name) {
			return program.Misused("two files are called %q", name)
		}
	}
	return nil
}

const mapName = "bundles.json"

// fetch is the command fetch, and the command watch if it goes on.
func (a *app) fetch(ctx context.Context, fs *flag.FlagSet, args []string, on bool) error {
	f := fetcher{tokens: map[string]string{}}
	f.flags(a, fs)
	wait := 30 * time.Second
	if on {
		wait = 0
	}
	fs.DurationVar(&f.timeout, "timeout", wait, "how long to wait for the first identity; 0 is without end")
	if err := parse(fs, args, 0); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	a.stream = on
	log := slog.New(slog.NewTextHandler(a.errOut, &slog.HandlerOptions{Level: slog.LevelWarn}))
	cfg := workloadapi.Config{Address: f.socket, Hint: f.hint, JWTBundles: f.jwtBundles}
	if on {
		cfg.Logger = log
	}
	if _, err := workloadapi.New(cfg); err != nil { // before creating a directory
		return program.UsageError{Err: err}
	}
	first, cancel := ctx, context.CancelFunc(func() {})
	if f.timeout > 0 {
		first, cancel = context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("no answer in %s; see -timeout",
			f.timeout))
	}
	defer cancel()
	var err error
	f.source, err = workloadapi.Start(first, cfg)
	if err != nil {
		if on && ctx.Err() != nil {
			return nil // interrupted
		}
		if errors.Is(err, workloadapi.ErrDenied) {
			return fmt.Errorf("%w: %w", err, errNo)
		}
		return err
	}
	defer f.source.Close()
	files := filesink.Config{
		Source: f.source, Dir: f.dir, CertName: f.cert, KeyName: f.key, RootsName: f.bundle, BundlesName: mapName,
		FederatedName: federatedName, Tokens: f.tokens, TokenSource: f.source, KeyMode: f.mode, Logger: cfg.Logger,
	}
	sink, err := filesink.New(files)
	if err != nil {
		return err
	}
	defer sink.Close()
	if !on {
		return a.once(ctx, &f, sink)
	}
	return a.follow(ctx, &f, sink, log)
}

// federatedName returns the file name for a federated trust domain's authorities. If the name would be too long, only
// bundles.json has them.
func federatedName(td spiffe.TrustDomain) string {
	const longest = 200
	if len(td.String()) > longest {
		return ""
	}
	return "bundle-" + td.String() + ".pem"
}

// once writes the files once.
func (a *app) once(ctx context.Context, f *fetcher, sink *filesink.Sink) error {
	if _, err := sink.Write(); errors.Is(err, workloadapi.ErrDenied) {
		return fmt.Errorf("%w: %w", err, errNo)
	} else if err != nil {
		return err
	}
	if err := a.told(f, sink); err != nil || f.command == "" {
		return err
	}
	if err := a.exec(ctx, f.command, f.dir, f.commandTimeout); err != nil {
		return fmt.Errorf("%w: %w", err, errNo)
	}
	return nil
}

// follow keeps the files fresh until ctx is done, which is no error.
func (a *app) follow(ctx context.Context, f *fetcher, sink *filesink.Sink, log *slog.Logger) error {
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	running.Go(func() { _ = sink.Run(ctx) })

	pending := f.command != "" // run at the start too: the last watch may have ended before its command did
	for written := (time.Time{}); ; {
		changed, state := sink.Changed(), sink.Report()
		if len(state.Identities) > 0 && !state.Identities[0].LastSuccess.Equal(written) {
			written, pending = state.Identities[0].LastSuccess, f.command != ""
			// A version that is gone was replaced by another, which is reported next.
			if err := a.told(f, sink); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		var again <-chan time.Time
		if pending && !state.Upstreams[0].LastSuccess.IsZero() { // the files exist
			if err := a.exec(ctx, f.command, f.dir, f.commandTimeout); err == nil {
				pending = false
			} else if ctx.Err() == nil {
				log.Warn("the command failed", slog.Any("err", err), slog.Duration("retry_in", a.retry))
				again = time.After(a.retry)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again:
		}
	}
}

// told prints the contents of the directory.
func (a *app) told(f *fetcher, sink *filesink.Sink) error {
	entries, err := os.ReadDir(filepath.Join(f.dir, "..data"))
	if err != nil {
		return err
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	identity := sink.Report().Identities[0]
	return a.print(record{{"spiffe_id", identity.Name}, {"not_after", identity.NotAfter}, {"dir", f.dir},
		{"files", names}})
}

// snapshot fetches the identity and the bundles from a Workload API.
func snapshot(ctx context.Context, cfg workloadapi.Config) (*spiffe.Snapshot, error) {
	if _, err := workloadapi.New(cfg); err != nil {
		return nil, program.UsageError{Err: err}
	}
	src, err := workloadapi.Start(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	return src.Snapshot()
}
