// Svid answers questions about SPIFFE identities: what a file contains, why a peer is refused, whether the agent
// answers, and what changed in the trust bundle.
//
//	svid inspect FILE|HOST:PORT|-    show certificates, a token, a trust bundle or a TLS server
//	svid verify FILE|HOST:PORT|-     judge a chain or a token by a bundle and a policy
//	svid fetch -dir DIR              write the identity of this workload to files
//	svid watch -dir DIR              keep these files fresh, and run a command after each change
//	svid bundle convert FILE         write a trust bundle in another form
//	svid bundle oidc DIR             write the files of an issuer of OpenID Connect
//	svid bundle diff OLD NEW         say which authorities came and went
//	svid doctor                      go through everything between a workload and its identity
//
// Each command explains its flags with -h; svid -version prints the version. Flags come before other arguments; "-"
// is standard input. Output is for people, with colour on a terminal unless -no-color or the variable NO_COLOR is
// set, or one JSON document with -json. Without -socket, SPIFFE_ENDPOINT_SOCKET is the address of the Workload API.
//
// The exit code is
//
//	0    yes: it is in order, verified, written or equal
//	1    no: a rule is broken, the peer is refused, the bundles differ, or a step failed
//	2    the command line is wrong
//	3    the question could not be answered: a file cannot be read, an agent or a server does not answer
//
// It never shows private keys, nor a token's signature and values of claims that the token's standard does not name.
// Rules have the ids of spiffe/CONFORMANCE.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
)

func main() {
	time.Local = time.UTC // print all times in UTC
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	terminal := func(f *os.File) bool {
		info, err := f.Stat()
		return err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	a := &app{
		in: os.Stdin, out: os.Stdout, errOut: os.Stderr, getenv: os.Getenv,
		terminal: terminal(os.Stdout), errTerminal: terminal(os.Stderr), retry: retry,
	}
	os.Exit(a.run(ctx, os.Args[1:]))
}

// The exit codes.
const (
	exitYes = iota
	exitNo
	exitUsage
	exitUnknown
)

const exitCodes = "Exit codes: 0 yes, 1 no, 2 wrong command line, 3 could not be found out."

// errNo is the answer no. Its reasons were printed, unless another error wraps it.
var errNo = errors.New("no")

// app is the program with its input and output.
type app struct {
	in          io.Reader
	out, errOut io.Writer
	getenv      func(string) string
	terminal    bool          // out is one
	errTerminal bool          // errOut is one
	retry       time.Duration // the wait after a command of watch, or a write, has failed

	json, plain bool // flags of all commands
	stream      bool // each JSON document is one line
}

// command is one command of the command line.
type command struct {
	words, args, doc string
	run              func(*app, context.Context, *flag.FlagSet, []string) error // adds its flags and parses
}

var commands = []command{inspectCommand, verifyCommand, fetchCommand, watchCommand, convertCommand, oidcCommand,
	diffCommand, doctorCommand}

// run executes a command line, and returns the exit code.
func (a *app) run(ctx context.Context, args []string) int {
	for _, c := range commands {
		words := strings.Fields(c.words)
		if len(args) < len(words) || strings.Join(args[:len(words)], " ") != c.words {
			continue
		}
		fs := flag.NewFlagSet("svid "+c.words, flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		fs.Usage = func() {}
		fs.BoolVar(&a.json, "json", false, "print JSON")
		fs.BoolVar(&a.plain, "no-color", a.getenv("NO_COLOR") != "",
			"no colours, also on a terminal; NO_COLOR does the same")
		err := c.run(a, ctx, fs, args[len(words):])
		if errors.Is(err, flag.ErrHelp) {
			_ = program.Help{Args: c.args, Doc: c.doc, Exit: exitCodes}.Write(a.out, fs)
			return exitYes
		}
		return a.exit(c.words, err)
	}
	if len(args) > 0 && (args[0] == "-version" || args[0] == "--version") {
		fmt.Fprintln(a.out, "svid", program.Version())
		return exitYes
	}
	out, code := a.errOut, exitUsage
	if len(args) > 0 && (args[0] == "-h" || args[0] == "-help" || args[0] == "--help" || args[0] == "help") {
		out, code = a.out, exitYes
	} else if len(args) > 0 {
		a.say("svid: there is no command %.64q; there are those below", strings.Join(args[:min(len(args), 2)], " "))
	}
	fmt.Fprintln(out, "Usage: svid COMMAND [flags] [arguments]")
	for _, c := range commands {
		summary, _, _ := strings.Cut(c.doc, "\n")
		fmt.Fprintf(out, "  %-15s %s\n", c.words, summary)
	}
	fmt.Fprintln(out, "Each command explains itself with -h; svid -version prints the version.\n"+
		exitCodes)
	return code
}

// exit reports err, and returns the exit code.
func (a *app) exit(words string, err error) int {
	code := exitUnknown
	wrong := false
	switch {
	case err == nil:
		return exitYes
	case err == errNo: // a wrapped one has more to report
		return exitNo
	case errors.Is(err, errNo):
		code = exitNo
	default:
		if _, wrong = errors.AsType[program.UsageError](err); wrong {
			code = exitUsage
		}
	}
	text := clean(strings.TrimSuffix(err.Error(), ": "+errNo.Error()))
	if a.json {
		_ = a.print(record{{"error", text}})
	}
	a.say("svid %s: %s", words, text)
	if wrong {
		a.say("svid %s -h explains it", words)
	}
	return code
}

// parse parses the flags, which must precede the arguments. want is the number of arguments.
func parse(fs *flag.FlagSet, args []string, want int) error {
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return program.UsageError{Err: program.Explain(fs, err)}
	}
	for _, arg := range fs.Args() {
		if len(arg) > 1 && arg[0] == '-' {
			return program.Misused("the flag %s comes after an argument; flags come first", arg)
		}
	}
	if n := fs.NArg(); n != want {
		return program.Misused("%d arguments, and there must be %d", n, want)
	}
	return nil
}
