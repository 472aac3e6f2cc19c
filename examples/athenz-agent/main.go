// Athenz-agent is the identity agent of a Kubernetes node: the pods of the node take their identities of Athenz from it, over a
// Unix socket. It asks the kubelet what a pod is, has an identity document signed, and registers the pod with ZTS.
//
// Environment variables configure it, which -help lists; README.md has the others beside it.
//
// "athenz-agent flexvolume" is the driver by which the kubelet mounts the socket into pods.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return
	}
	if errors.Is(err, errAnswered) {
		os.Exit(1)
	}
	fmt.Fprintln(os.Stderr, "athenz-agent:", err)
	if _, usage := errors.AsType[usageError](err); usage {
		os.Exit(2)
	}
	os.Exit(1)
}

// usageError says what is wrong with the arguments or the environment.
type usageError struct{ error }

// Unwrap returns the error.
func (e usageError) Unwrap() error { return e.error }

// run is the program. It returns nil when a signal ends it.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	if len(args) > 0 && args[0] == "flexvolume" {
		return flexvolume(args[1:], environ, out)
	}
	fs := flag.NewFlagSet("athenz-agent", flag.ContinueOnError)
	fs.SetOutput(errOut)
	show := fs.Bool("version", false, "print the version, and end")
	fs.Usage = func() {
		fmt.Fprintln(errOut, "Usage: athenz-agent [flags]\n       athenz-agent flexvolume init | mount PATH OPTIONS | unmount PATH")
		fs.PrintDefaults()
		fmt.Fprintln(errOut, "\nEnvironment:")
		writeHelp(errOut)
	}
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return err
	case err != nil:
		return usageError{err}
	case fs.NArg() > 0:
		return usageError{fmt.Errorf("%q is not understood; flags begin with a hyphen", fs.Arg(0))}
	case *show:
		_, err := fmt.Fprintln(out, "athenz-agent", version())
		return err
	}
	s, err := read(environ)
	if err != nil {
		return usageError{err}
	}
	level := new(slog.LevelVar)
	_ = level.UnmarshalText([]byte(s["LOG_LEVEL"])) // one of the choices
	return serve(ctx, s, out, slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level})))
}

// version is that of the module, with the revision of its source and the version of Go.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	var revision, modified string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = ", revision " + s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = " (modified)"
		}
	}
	return info.Main.Version + revision + modified + ", " + info.GoVersion
}

// listen opens the port of a variable, and writes to out where. It returns nil if that is off.
func listen(s settings, name string, out io.Writer) (net.Listener, error) {
	if s[name] == off {
		return nil, nil //nolint:nilnil // there is none
	}
	l, err := net.Listen("tcp", s[name])
	if err != nil {
		return nil, s.reject(name, err)
	}
	fmt.Fprintf(out, "%s: %s\n", name, l.Addr())
	return l, nil
}

// together runs parts until ctx is done, or one of them fails, whose error it returns.
func together(ctx context.Context, parts ...func(context.Context) error) (failed error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var once sync.Once
	for _, part := range parts {
		wg.Go(func() {
			if err := part(ctx); err != nil {
				once.Do(func() { failed = err })
				cancel()
			}
		})
	}
	wg.Wait()
	return failed
}
