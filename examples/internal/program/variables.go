package program

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/settings"
)

// Var returns a variable that accepts any text, or with check, texts that check accepts.
func Var(name, def, doc, origin string, check func(value string) error) settings.Variable {
	return settings.Variable{Name: name, Default: def, Doc: doc, Origin: origin, Check: check}
}

// List returns v as a list.
func List(v settings.Variable) settings.Variable {
	v.Form = settings.List
	return v
}

// Settings are the values of a [Daemon]'s variables.
type Settings struct{ *settings.Values }

// Daemon is a program with environment variables in place of flags. One of them is LOG_LEVEL.
type Daemon struct {
	Name      string
	Help      string // a line for -h; may be empty
	Variables []settings.Variable
	Manifest  string // the Text of its [Manifest]

	// Serve runs the program until ctx is done, and returns nil then. It writes its addresses to out.
	Serve func(ctx context.Context, s Settings, out io.Writer, log *slog.Logger) error
}

// Main runs the program like [Main], with the process's arguments and environment.
func (d Daemon) Main() {
	Main(d.Name, func(ctx context.Context) error {
		return d.Run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	})
}

// Run runs the program. Its errors are like those of [Parse]; an error of the environment names each bad value and
// the remedy.
func (d Daemon) Run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	flags := flag.NewFlagSet(d.Name, flag.ContinueOnError)
	(&Manifest{Text: d.Manifest}).Register(flags)
	if err := Parse(flags, args, out, Help{More: d.writeHelp}); err != nil {
		return err
	}
	s, err := d.Read(environ)
	if err != nil {
		return UsageError{err}
	}
	level := new(slog.LevelVar)
	_ = level.UnmarshalText([]byte(s.Text("LOG_LEVEL"))) // Read has checked it
	return d.Serve(ctx, s, out, slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level})))
}

// Read returns the settings in an environment, in the form of os.Environ.
func (d Daemon) Read(environ []string) (Settings, error) {
	values, err := settings.Table{Variables: d.Variables}.Read(environ)
	return Settings{values}, err
}

func (d Daemon) writeHelp(w io.Writer) error {
	err := settings.Table{Variables: d.Variables}.Write(w, false)
	_, err2 := io.WriteString(w, d.Help)
	return cmp.Or(err, err2)
}

// Need returns an error for each unset variable.
func (s Settings) Need(names ...string) error {
	var missing []error
	for _, name := range names {
		if !s.Set(name) {
			missing = append(missing, s.Reject(name, errors.New("it is not set, and the program needs it")))
		}
	}
	return errors.Join(missing...)
}

// Off is the value of an address variable that means no port.
const Off = "off"

// Listen opens a variable's port, and writes its address to out. It returns nil if the variable is [Off].
func (s Settings) Listen(name string, out io.Writer) (net.Listener, error) {
	if s.Text(name) == Off {
		return nil, nil // there is none
	}
	l, err := net.Listen("tcp", s.Text(name))
	if err != nil {
		return nil, s.Reject(name, err)
	}
	fmt.Fprintf(out, "%s: %s\n", name, l.Addr())
	return l, nil
}

// check returns a check whose error is the remedy.
func check(remedy string, good func(value string) bool) func(value string) error {
	return func(value string) error {
		if !good(value) {
			return errors.New(remedy)
		}
		return nil
	}
}

// all reports whether each text of a list is good.
func all(good func(text string) bool) func(list string) bool {
	return func(list string) bool {
		for text := range strings.SplitSeq(list, ",") {
			if !good(strings.TrimSpace(text)) {
				return false
			}
		}
		return true
	}
}

// Checks of values.
var (
	// IsAddr accepts HOST:PORT, and [Off].
	IsAddr = check("set it to HOST:PORT with a number for the port, such as 127.0.0.1:9080, or to off",
		func(s string) bool {
			_, port, err := net.SplitHostPort(s)
			_, bad := strconv.ParseUint(port, 10, 16)
			return s == Off || err == nil && bad == nil
		})

	// IsAbsolute accepts an absolute path.
	IsAbsolute = check("set it to a path that begins with a slash", filepath.IsAbs)

	// IsDNSName accepts a DNS name in lower case.
	IsDNSName = check("set it to a DNS name, such as svc.cluster.local", isDNSName)

	// AreNamespaces accepts names of Kubernetes namespaces with commas between.
	AreNamespaces = check("set it to names of namespaces with commas between", all(isLabel))

	// IsObject accepts NAMESPACE/NAME of a Kubernetes object.
	IsObject = check("set it to a namespace and a name, such as athenz/used-documents", func(s string) bool {
		namespace, name, _ := strings.Cut(s, "/")
		return isLabel(namespace) && isDNSName(name)
	})

	// IsHTTPS accepts an https URL without a path.
	IsHTTPS = check("set it to an https URL without a path, such as https://zts.athenz.svc:4443", func(s string) bool {
		u, ok := origin(s)
		return ok && u.Scheme == "https"
	})

	// IsAPI accepts what IsHTTPS accepts, and http for an address of this machine.
	IsAPI = check("set it to an https URL without a path; http is for addresses of this machine, such as 127.0.0.1",
		func(s string) bool {
			u, ok := origin(s)
			if !ok {
				return false
			}
			ip, err := netip.ParseAddr(u.Hostname())
			return u.Scheme == "https" || u.Scheme == "http" && err == nil && ip.IsLoopback()
		})
)

// isLabel reports whether s is a label of a DNS name, and so can be the name of a namespace.
func isLabel(s string) bool {
	return s != "" && len(s) <= 63 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && s[0] != '-' &&
		s[len(s)-1] != '-'
}

func isDNSName(s string) bool {
	return !slices.ContainsFunc(strings.Split(s, "."), func(label string) bool { return !isLabel(label) })
}

// origin parses a URL without user, path and query.
func origin(s string) (u *url.URL, ok bool) {
	u, err := url.Parse(s)
	return u, err == nil && u.Host != "" && u.User == nil && strings.Trim(u.Path, "/") == "" && u.RawQuery == ""
}

// OneOf returns a check for choices.
func OneOf(choices ...string) func(string) error {
	return check("set it to one of "+strings.Join(choices, ", "), func(s string) bool {
		return slices.Contains(choices, s)
	})
}
