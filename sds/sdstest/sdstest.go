// Package sdstest is a conformance suite for servers of Envoy's Secret Discovery Service, version 3. [Run] checks a
// server case by case against the rules of the protocol, and [RunModel] against a reference model, with random
// clients that come and go, reject, and do not read. The server may be written in any language: the suite reaches it
// by an HTTP client, and changes its secrets by [Server].Set.
//
//	func TestConformance(t *testing.T) {
//		sdstest.Run(t, func(t testing.TB, o sdstest.Options) *sdstest.Server {
//			// start a server with o, and stop it with t.Cleanup
//			return &sdstest.Server{Client: sds.UnixClient(path), URL: "http://localhost", Set: set}
//		})
//	}
//
// # Scripts
//
// Cases, and the failures that [RunModel] prints, are scripts, which [RunScript] runs. Each line is one of these.
// NAMES are separated by spaces; "_" is an empty name, "@N" one of N bytes, and "#N" stands for N names.
//
//	maxnames N            at the beginning: Options.MaxNames
//	set NAME CONTENT      the source has CONTENT under NAME from now on; "-" is nothing
//	fetch NAMES want ITEMS, fetch NAMES ends CODES    FetchSecrets
//	S ask NAMES           stream S asks for NAMES (SotW), and acknowledges the last response
//	S sub NAMES, S unsub NAMES                        stream S changes its subscription (delta)
//	S ack, S nack         stream S answers the last response
//	S send FIELDS         stream S sends a request with just these fields: names= sub= unsub= have= nonce= version=
//	                      type= node= error=, with lists separated by commas. A nonce may be "last" or "prev",
//	                      a type "none"; have=NAME is the version that the server gave, and have=NAME:V is V
//	S raw TEXT            stream S sends a message that is not a request
//	S want ITEMS          stream S receives just ITEMS, and acknowledges all but the last response that they come in
//	S sync ack, S sync nack   stream S receives, and answers, until it is up to date
//	S barrier             stream S asks for one more name, and receives just that: the server has taken all before it
//	S flush               the same, but stream S receives and answers all that it is due, too
//	S quiet               stream S has received everything: it ends its requests, and the server ends it with OK
//	S ends CODES          the server ends stream S, with one of these codes of gRPC, such as invalid_argument
//	S close               stream S goes away; its next request is on a new stream
//	finish                at the end: every stream comes to have what the source has, and nothing more comes
//
// Streams whose names begin with "d" are delta, others are SotW. ITEMS are NAME=CONTENT, and -NAME for what a delta
// response removes. CONTENT is a number from 1 to 9, which are different roots, or pair, otherpair, tickets, generic,
// values or domains.
//
// Each response must have a type, a version, a nonce that is new on the stream, no secret twice, only names that the
// client has asked for, and content that the source has had, none of it older than the client's.
package sdstest

import (
	"net/http"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/pki"
)

// Options are a case's requirements of the server.
type Options struct {
	// MaxNames is how many names one stream may ask for; 0 means 100 or more.
	MaxNames int
}

// Server is a server started for one case.
type Server struct {
	Client *http.Client // speaks HTTP/2 with it, and has no Timeout
	URL    string       // the part before the paths of the methods, such as "http://localhost"

	// Set makes the server serve s under a name, or nothing if s is nil. The server must soon tell streams with the
	// name, and show the change at once to a request for a name that no stream has. One goroutine at a time calls
	// Set.
	Set func(name string, s *pki.Secret)

	// Name returns the server's name for what the scripts call name, and another one for each: for a server to which
	// names such as "a" mean nothing. Set gets the server's name. Nil means that they are the same. It is not called
	// for "" and "*".
	Name func(name string) string

	// Lacks lists known gaps of the server: the names of cases that it fails, or "sotw", "delta" or "fetch" for all
	// of a method. They are played all the same: a case that the server passes is an error, too.
	Lacks []string
}

// Start starts a server that serves nothing, until the test ends. Nil means that the server cannot have such options;
// the case is then skipped.
type Start func(t testing.TB, o Options) *Server

// Run runs each case of the suite against a new server.
func Run(t *testing.T, start Start) {
	contents := newContents(t)
	for _, c := range cases() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			run(t, start, contents, c)
		})
	}
}

// RunScript runs one script.
func RunScript(t *testing.T, start Start, script string) {
	run(t, start, newContents(t), parseCases("case script\n" + script)[0])
}

func run(t testing.TB, start Start, contents *contents, c testCase) {
	s := start(t, c.options)
	if s == nil {
		t.Skipf("the server cannot be started with %+v", c.options)
	}
	lacks, wait := false, patience
	for _, gap := range s.Lacks {
		if c.name == gap || strings.HasPrefix(c.name, gap+": ") {
			lacks, wait = true, impatience
		}
	}
	switch err := play(t.Context(), s, contents, wait, c.lines); {
	case err == nil && lacks:
		t.Error("the server passes this case, which its Lacks list")
	case lacks:
		t.Skipf("the server is known to lack this: %v", err)
	case err != nil:
		t.Errorf("%v\nthe script:\n%s", err, strings.Join(c.lines, "\n"))
	}
}

// testCase is one script.
type testCase struct {
	name    string
	options Options
	lines   []string
}

// parseCases reads scripts, each of which begins with a line "case NAME". It ignores empty lines and lines that begin
// with //.
func parseCases(text string) []testCase {
	var all []testCase
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		words := strings.Fields(line)
		switch name, ok := strings.CutPrefix(line, "case "); {
		case ok:
			all = append(all, testCase{name: name})
		case len(words) == 0 || strings.HasPrefix(line, "//"):
		case words[0] == "maxnames":
			all[len(all)-1].options.MaxNames = number(words[1])
		default:
			all[len(all)-1].lines = append(all[len(all)-1].lines, line)
		}
	}
	return all
}
