// Package program is what the programs of the folder examples have in common: how they begin and end, how operators
// configure them by flags and environment variables, and how they serve on ports. It is part of the examples, for
// them to be read without that: no package of the library imports it, and a user who copies a program copies it, too.
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
// other failure. It prints the error to standard error, but [ErrAnswered] and the flag.ErrHelp of [Parse]. SIGINT and
// SIGTERM end the context of run; a second one ends the process at once. All times that the program prints are in
// UTC.
func Main(name string, run func(ctx context.Context) error) {
	time.Local = time.UTC // as those of certificates are
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50) // what a flood of requests leaves behind is small, in a container that is small
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

// ErrAnswered is the error of a run that has told the caller already what is wrong.
var ErrAnswered = errors.New("the caller has been told")

// UsageError says what is wrong with the command line or the environment.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e UsageError) Unwrap() error { return e.Err }

// Misused returns a [UsageError] with a text as of fmt.Errorf.
func Misused(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// Version returns the version of the module, which has the revision of its source, and that of Go.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return info.Main.Version + ", " + info.GoVersion
}

// Parse is [ParseFlags] for a program of flags alone: an argument that is left is a [UsageError].
func Parse(flags *flag.FlagSet, args []string, out io.Writer, help Help) error {
	err := ParseFlags(flags, args, out, help)
	if err == nil && flags.NArg() > 0 {
		return Misused("%.64q is not understood: there are no words here, and flags begin with a hyphen; -h lists "+
			"them", flags.Arg(0))
	}
	return err
}

// ParseFlags reads the flags of a program from args, and -version. Its error is a [UsageError], or flag.ErrHelp after
// -version -install or -h, with the help, have written to out.
func ParseFlags(flags *flag.FlagSet, args []string, out io.Writer, help Help) error {
	version := flags.Bool("version", false, "print the version, and end")
	flags.SetOutput(io.Discard) // or it prints all of them for each error
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

// Explain returns the error of flags.Parse with what a value has to be in the place of "parse error".
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

// Unparsed is [Explain] for the error of f.Value.Set.
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

// BadDuration says what a duration has to be.
const BadDuration = "it is not a number with a unit, such as 90m or 24h, which is a day"

// Service has the flags of a program that runs until a signal ends it.
type Service struct {
	LogFormat string        // text or json
	For       time.Duration // after which it ends by itself; zero means never
}

// Demo sets the time after which a demo ends by itself, unless -for has set another, and says so.
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

// Begin returns the context and the logger of the program, and what the caller calls at its end. The logger writes to
// w what is of that level or above. With json, what package log prints, such as net/http's server, goes there, too.
func (s *Service) Begin(ctx context.Context, w io.Writer, level slog.Level) (context.Context, *slog.Logger, func(),
	error) {
	var handler slog.Handler
	withUnits := func(_ []string, a slog.Attr) slog.Attr {
		if a.Value.Kind() == slog.KindDuration { // which JSON has in nanoseconds
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
	ctx, cancel := context.WithCancel(ctx) // and no deadline, which a dial may see before ctx.Err has it
	if s.For > 0 {
		time.AfterFunc(s.For, cancel)
	}
	return ctx, slog.New(handler), cancel, nil
}

// Answer logs the error of a program whose log is in JSON, in which no other line is to be, and returns one for
// [Main].
func (s *Service) Answer(log *slog.Logger, err error) error {
	if err == nil || s.LogFormat != "json" || errors.Is(err, ErrAnswered) || errors.Is(err, flag.ErrHelp) {
		return err
	}
	log.Error(err.Error())
	return fmt.Errorf("%w: %w", ErrAnswered, err)
}

// Lines logs each line that is written to it, but those in JSON, which go to To as they are.
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
	if len(l.rest) > 64<<10 { // without an end
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

// Go starts a part. If it fails before the context is done, the others end, too. Its error gets the name, if that is
// not empty.
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

// End ends the context of the parts. The error of the first call, which may be nil, is that of the Group.
func (g *Group) End(err error) {
	g.once.Do(func() { g.err = err })
	g.cancel()
}

// Wait waits until the context is done, and then for all parts. It returns the error of the part that has failed, if
// one has.
func (g *Group) Wait() error {
	<-g.ctx.Done()
	return g.Stop()
}

// Stop ends all parts, and returns as Wait does.
func (g *Group) Stop() error {
	g.End(nil)
	g.wg.Wait()
	return g.err
}

// Together runs parts as a [Group] does, and returns its error.
func Together(ctx context.Context, parts ...func(context.Context) error) error {
	g := NewGroup(ctx)
	for _, part := range parts {
		g.Go("", part)
	}
	return g.Wait()
}
