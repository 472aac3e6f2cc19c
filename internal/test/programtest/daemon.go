package programtest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/internal/settings"
)

// Main is the function of a program that has environment variables in the place of flags.
type Main func(ctx context.Context, args, environ []string, out, errOut io.Writer) error

// Serve runs a program in the test's process until the test ends. It returns the addresses that the program prints for
// so many ports, by name.
func Serve(t *testing.T, run Main, environ []string, log io.Writer, ports int) map[string]string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	lines, ended := make(chan string, 10), make(chan error, 1)
	go func() { ended <- run(ctx, nil, environ, Writer(func(line string) { lines <- line }), log) }()
	at := map[string]string{}
	for range ports {
		select {
		case line := <-lines:
			name, addr, _ := strings.Cut(strings.TrimSpace(line), ": ")
			at[name] = addr
		case err := <-ended:
			cancel()
			t.Fatalf("the program has ended: %v", err)
		}
	}
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the program has ended: %v", err)
		}
	})
	return at
}

// Writer is a function that takes what a program writes.
type Writer func(string)

// Write implements [io.Writer].
func (w Writer) Write(p []byte) (int, error) {
	w(string(p))
	return len(p), nil
}

// Get asks the port of HEALTH_ADDR.
func Get(t *testing.T, at map[string]string, path string) (int, string) {
	t.Helper()
	return Page(t, "http://"+at["HEALTH_ADDR"]+path)
}

// Page returns the status and the body of an answer.
func Page(t testing.TB, url string) (int, string) {
	t.Helper()
	answer, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

// Command requires what all programs with variables have in common: -help, -version, the errors of usage, and the
// table in README.md, which it writes with update.
func Command(t *testing.T, run Main, name string, variables []settings.Variable, update bool) {
	t.Helper()
	var table, out, help bytes.Buffer
	if err := (settings.Table{Variables: variables}).Write(&table, true); err != nil {
		t.Fatal(err)
	}
	Section(t, update, "README.md", "<!-- environment -->\n", "<!-- end of environment -->\n",
		"\n"+table.String()+"\n")
	if err := run(t.Context(), []string{"-help"}, nil, &help, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Error(err)
	}
	for _, v := range variables {
		if !strings.Contains(help.String(), "  "+v.Name) {
			t.Errorf("-help does not list %s", v.Name)
		}
	}
	err := run(t.Context(), []string{"-version"}, nil, &out, io.Discard)
	if !errors.Is(err, flag.ErrHelp) || !regexp.MustCompile(`^`+name+` \S.*, go\S+\n$`).MatchString(out.String()) {
		t.Errorf("-version prints %q: %v", out.String(), err)
	}
	for want, c := range map[string]struct{ args, environ []string }{
		`"surplus"`: {[]string{"surplus"}, nil},
		"-surplus":  {[]string{"-surplus"}, nil},
		"LOG_LEVEL": {nil, []string{"LOG_LEVEL=loud"}},
	} {
		err := run(t.Context(), c.args, c.environ, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) { // ExitCodes has the exit codes
			t.Errorf("%v %v: %v", c.args, c.environ, err)
		}
	}
}
