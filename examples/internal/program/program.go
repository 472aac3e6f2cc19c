// Package program is the common part of the programs in the directory examples: start and end, configuration by flags
// and environment variables, and ports. It belongs to the examples, so that each can be read on its own: no package
// of the library imports it, and a user who copies a program copies it too.
package program

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Main runs the program called name and ends the process: with 0; with 2 for a [UsageError]; and with 1 after any
// other failure. It prints the error to standard error, except [ErrAnswered] and the flag.ErrHelp of [Parse]. SIGINT
// and SIGTERM end the context of run; a second one ends the process at once. The program prints all times in UTC.
func Main(name string, run func(ctx context.Context) error) {
	time.Local = time.UTC // like the times in certificates
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50) // keeps the garbage of a flood small in a small container
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err := run(ctx)
	stop()
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return
	}
	if !errors.Is(err, ErrAnswered) {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	}
	if _, usage := errors.AsType[UsageError](err); usage {
		os.Exit(2)
	}
	os.Exit(1)
}

// ErrAnswered is returned by a run that has already told the caller what is wrong.
var ErrAnswered = errors.New("the caller has been told")

// UsageError is an error of the command line or the environment.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e UsageError) Unwrap() error { return e.Err }

// Misused returns a [UsageError] with a text formatted like fmt.Errorf's.
func Misused(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// Version returns the version of the module, with its source revision, and the version of Go.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return info.Main.Version + ", " + info.GoVersion
}

// Parse is [ParseFlags] for a program with only flags: a remaining argument is a [UsageError].
func Parse(flags *flag.FlagSet, args []string, out io.Writer, help Help) error {
	err := ParseFlags(flags, args, out, help)
	if err == nil && flags.NArg() > 0 {
		return Misused("%.64q is not understood: there are no words here, and flags begin with a hyphen; -h lists "+
			"them", flags.Arg(0))
	}
	return err
}

// ParseFlags parses a program's flags, and -version. Its error is a [UsageError], or flag.ErrHelp after -version,
// -install or -h has written to out.
func ParseFlags(flags *flag.FlagSet, args []string, out io.Writer, help Help) error {
	version := flags.Bool("version", false, "print the version, and end")
	flags.SetOutput(io.Discard) // or it prints all flags for each error
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return errors.Join(err, help.Write(out, flags))
	case err != nil:
		return Misused("%w; -h lists the flags", Explain(flags, err))
	case *version:
		_, err := fmt.Fprintln(out, flags.Name(), Version())
		return errors.Join(flag.ErrHelp, err)
	}
	if f := flags.Lookup("install"); f != nil {
		switch m, ok := f.Value.(*Manifest); {
		case ok && m.scheme != "":
			return cmp.Or(m.Print(out), flag.ErrHelp)
		case ok && m.Given():
			return Misused("-with: it is for -install kubernetes")
		}
	}
	return nil
}

// Explain returns the error of flags.Parse, with a description of valid values in place of "parse error".
func Explain(flags *flag.FlagSet, err error) error {
	text := strings.TrimSuffix(err.Error(), ": parse error")
	name := text[strings.LastIndex(text, " -")+2:] // the last word
	if f := flags.Lookup(name); f != nil {
		return Unparsed(f, err)
	}
	if text, ok := strings.CutPrefix(text, "flag provided but not defined: "); ok {
		return fmt.Errorf("there is no flag %.64s", text)
	}
	return err
}

// Unparsed is like [Explain], for the error of f.Value.Set.
func Unparsed(f *flag.Flag, err error) error {
	text, unparsed := strings.CutSuffix(err.Error(), "parse error")
	g, ok := f.Value.(flag.Getter)
	if !ok || !unparsed {
		return err
	}
	switch g.Get().(type) {
	case time.Duration:
		text += BadDuration
	case bool:
		text += "it is neither true nor false"
	case float64:
		text += "it is not a number, such as 10 or 0.5"
	default:
		text += "it is not a whole number, such as 10"
	}
	return errors.New(text)
}

// BadDuration describes a valid duration.
const BadDuration = "it is not a number with a unit, such as 90m or 24h, which is a day"

// Service holds the flags of a program that runs until a signal ends it.
type Service struct {
	LogFormat string        // text or json
	For       time.Duration // until it ends by itself; zero means never
}

// Demo sets the time after which a demo ends, unless -for has set it, and prints it.
func (s *Service) Demo(out io.Writer, time time.Duration) {
	s.For = cmp.Or(s.For, time)
	fmt.Fprintf(out, "ends: in %v, or with Ctrl-C; -for sets another time\n", s.For)
}

// Register adds -log-format and -for.
func (s *Service) Register(flags *flag.FlagSet) {
	flags.StringVar(&s.LogFormat, "log-format", "text", "`text` or json")
	flags.DurationVar(&s.For, "for", 0, "end after this `time`, such as 1m (default: when a signal comes, and a "+
		"demo after some minutes)")
}

// Begin returns the program's context and logger, and a function to call at the end. The logger writes records of the
// level and above to w. With json, the output of package log, such as net/http's server, goes there too.
func (s *Service) Begin(ctx context.Context, w io.Writer, level slog.Level) (context.Context, *slog.Logger, func(),
	error) {
	var handler slog.Handler
	withUnits := func(_ []string, a slog.Attr) slog.Attr {
		if a.Value.Kind() == slog.KindDuration { // JSON would have nanoseconds
			a.Value = slog.StringValue(a.Value.Duration().String())
		}
		return a
	}
	switch opts := (&slog.HandlerOptions{Level: level, ReplaceAttr: withUnits}); s.LogFormat {
	case "text":
		handler = slog.NewTextHandler(w, opts)
	case "json":
		handler = slog.NewJSONHandler(w, opts)
		slog.SetDefault(slog.New(handler))
	default:
		return nil, nil, nil, Misused("-log-format is %q, and has to be text or json", s.LogFormat)
	}
	if s.For < 0 {
		return nil, nil, nil, Misused("-for is %v, and may not be negative", s.For)
	}
	ctx, cancel := context.WithCancel(ctx) // and no deadline, which a dial may see before ctx.Err reports it
	if s.For > 0 {
		time.AfterFunc(s.For, cancel)
	}
	return ctx, slog.New(handler), cancel, nil
}

// Answer logs the error of a program whose log is JSON and must have no other lines, and returns an error for [Main].
func (s *Service) Answer(log *slog.Logger, err error) error {
	if err == nil || s.LogFormat != "json" || errors.Is(err, ErrAnswered) || errors.Is(err, flag.ErrHelp) {
		return err
	}
	log.Error(err.Error())
	return fmt.Errorf("%w: %w", ErrAnswered, err)
}

// Lines logs each line that is written to it. It passes JSON lines on to To unchanged.
type Lines struct {
	Log *slog.Logger
	To  io.Writer

	mu   sync.Mutex
	rest []byte
}

// Write implements [io.Writer].
func (l *Lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	l.rest = append(l.rest, p...)
	whole := bytes.LastIndexByte(l.rest, '\n') + 1
	if len(l.rest) > 64<<10 { // a line without an end
		whole = len(l.rest)
	}
	lines := bytes.Clone(l.rest[:whole])
	l.rest = l.rest[whole:]
	l.mu.Unlock()
	var err error
	for line := range bytes.Lines(lines) {
		switch line = bytes.TrimRight(line, "\r\n"); {
		case len(line) == 0:
		case line[0] == '{' && json.Valid(line):
			_, bad := fmt.Fprintf(l.To, "%s\n", line)
			err = cmp.Or(err, bad)
		default:
			l.Log.Info(string(line))
		}
	}
	return len(p), err
}

// Group runs the parts of a program until its context is done, or one of them fails. [NewGroup] makes one.
type Group struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once
	err    error
}

// NewGroup returns a Group whose context ends with ctx.
func NewGroup(ctx context.Context) *Group {
	g := new(Group)
	g.ctx, g.cancel = context.WithCancel(ctx)
	return g
}

// Context returns the context of the parts.
func (g *Group) Context() context.Context { return g.ctx }

// Go starts a part. If it fails before the context is done, the others end too. A non-empty name prefixes its error.
func (g *Group) Go(name string, part func(context.Context) error) {
	g.wg.Go(func() {
		if err := part(g.ctx); err != nil && g.ctx.Err() == nil {
			if name != "" {
				err = fmt.Errorf("%s: %w", name, err)
			}
			g.End(err)
		}
	})
}

// End ends the context of the parts. The first call sets the Group's error, which may be nil.
func (g *Group) End(err error) {
	g.once.Do(func() { g.err = err })
	g.cancel()
}

// Wait waits until the context is done and all parts have ended. It returns the error of the part that failed, if
// any.
func (g *Group) Wait() error {
	<-g.ctx.Done()
	return g.Stop()
}

// Stop ends all parts, and then returns like Wait.
func (g *Group) Stop() error {
	g.End(nil)
	g.wg.Wait()
	return g.err
}

// Together runs parts like a [Group], and returns its error.
func Together(ctx context.Context, parts ...func(context.Context) error) error {
	g := NewGroup(ctx)
	for _, part := range parts {
		g.Go("", part)
	}
	return g.Wait()
}
