package program

import (
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
)

// Variable is an environment variable of a program. One that is set to the empty text is like one that is not set.
type Variable struct {
	Name, Default, Doc string
	From               string                   // where the name comes from
	Check              func(value string) error // of one that is set; nil means any text
}

// Var returns a [Variable].
func Var(name, def, doc, from string, check func(value string) error) Variable {
	return Variable{name, def, doc, from, check}
}

// Settings are the values of variables by their names, with the defaults.
type Settings map[string]string

// Daemon is a program that has environment variables in the place of flags. One of them is LOG_LEVEL.
type Daemon struct {
	Name      string
	Help      string // a line for -h; may be empty
	Variables []Variable
	Manifest  string // the Text of its [Manifest]

	// Serve is the program. It returns nil when ctx is done, and writes to out where it listens.
	Serve func(ctx context.Context, s Settings, out io.Writer, log *slog.Logger) error
}

// Main is [Main] for the program, with what the process has.
func (d Daemon) Main() {
	Main(d.Name, func(ctx context.Context) error { return d.Run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr) })
}

// Run runs the program. Its errors are as those of [Parse]; the one about the environment names each bad value, and what to set.
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
	_ = level.UnmarshalText([]byte(s["LOG_LEVEL"])) // it was checked
	return d.Serve(ctx, s, out, slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level})))
}

// Read returns the settings of an environment, as [os.Environ] has it.
func (d Daemon) Read(environ []string) (Settings, error) {
	s := Settings{}
	for _, v := range d.Variables {
		s[v.Name] = v.Default
	}
	set := map[string]bool{}
	for _, line := range environ {
		name, value, _ := strings.Cut(line, "=")
		if _, ours := s[name]; ours && value != "" {
			s[name], set[name] = value, true
		}
	}
	var bad []error
	for _, v := range d.Variables {
		if set[v.Name] && v.Check != nil {
			if err := v.Check(s[v.Name]); err != nil {
				bad = append(bad, s.Reject(v.Name, err))
			}
		}
	}
	return s, errors.Join(bad...)
}

func (d Daemon) writeHelp(w io.Writer) error {
	for _, v := range d.Variables {
		def := ""
		if v.Default != "" {
			def = " (default " + v.Default + ")"
		}
		fmt.Fprintf(w, "  %s%s\n        %s\n", v.Name, def, v.Doc)
	}
	_, err := io.WriteString(w, d.Help)
	return err
}

// Reject returns the error of a variable that the program cannot use.
func (s Settings) Reject(name string, why error) error {
	if s[name] == "" {
		return fmt.Errorf("environment variable %s: %w", name, why)
	}
	return fmt.Errorf("environment variable %s=%.80q: %w", name, s[name], why)
}

// Need returns an error for each of the variables that is not set.
func (s Settings) Need(names ...string) error {
	var missing []error
	for _, name := range names {
		if s[name] == "" {
			missing = append(missing, s.Reject(name, errors.New("it is not set, and the program needs it")))
		}
	}
	return errors.Join(missing...)
}

// List returns the texts of a variable with commas between.
func (s Settings) List(name string) (all []string) {
	for text := range strings.SplitSeq(s[name], ",") {
		if text = strings.TrimSpace(text); text != "" {
			all = append(all, text)
		}
	}
	return all
}

// Off is a value of variables with an address: there is no such port.
const Off = "off"

// Listen opens the port of a variable, and writes to out where. It returns nil if that is [Off].
func (s Settings) Listen(name string, out io.Writer) (net.Listener, error) {
	if s[name] == Off {
		return nil, nil //nolint:nilnil // there is none
	}
	l, err := net.Listen("tcp", s[name])
	if err != nil {
		return nil, s.Reject(name, err)
	}
	fmt.Fprintf(out, "%s: %s\n", name, l.Addr())
	return l, nil
}

// IsAddr is a check for HOST:PORT, or [Off].
func IsAddr(s string) error {
	_, port, err := net.SplitHostPort(s)
	if n, bad := strconv.ParseUint(port, 10, 16); s != Off && (err != nil || bad != nil || n > 65535) {
		return errors.New("set it to HOST:PORT with a number for the port, such as 127.0.0.1:9080, or to off")
	}
	return nil
}

// IsAbsolute is a check for a path.
func IsAbsolute(s string) error {
	if !filepath.IsAbs(s) {
		return errors.New("set it to a path that begins with a slash")
	}
	return nil
}

// IsDNSName is a check for a DNS name in lower case.
func IsDNSName(s string) error {
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return errors.New("set it to a DNS name, such as svc.cluster.local")
		}
	}
	return nil
}

// isLabel reports whether s is a label of a DNS name, which is the name of a namespace, too.
func isLabel(s string) bool {
	return s != "" && len(s) <= 63 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && s[0] != '-' && s[len(s)-1] != '-'
}

// AreNamespaces is a check for names of Kubernetes namespaces with commas between.
func AreNamespaces(s string) error {
	for name := range strings.SplitSeq(s, ",") {
		if !isLabel(strings.TrimSpace(name)) {
			return errors.New("set it to names of namespaces with commas between")
		}
	}
	return nil
}

// IsObject is a check for NAMESPACE/NAME of a Kubernetes object.
func IsObject(s string) error {
	if namespace, name, _ := strings.Cut(s, "/"); !isLabel(namespace) || IsDNSName(name) != nil {
		return errors.New("set it to a namespace and a name, such as athenz/used-documents")
	}
	return nil
}

// IsHTTPS is a check for an https URL without a path.
func IsHTTPS(s string) error {
	if u, err := origin(s); err != nil || u.Scheme != "https" {
		return errors.New("set it to an https URL without a path, such as https://zts.athenz.svc:4443")
	}
	return nil
}

// IsAPI is [IsHTTPS] that lets http through for an address of this machine.
func IsAPI(s string) error {
	u, err := origin(s)
	if err != nil {
		return errors.New("set it to a URL without a path, such as https://kubernetes.default.svc")
	}
	if ip, err := netip.ParseAddr(u.Hostname()); u.Scheme != "https" && (u.Scheme != "http" || err != nil || !ip.IsLoopback()) {
		return errors.New("set it to an https URL; http is for addresses of this machine, such as 127.0.0.1")
	}
	return nil
}

func origin(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err == nil && (u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "") {
		err = errors.New("it is no URL without a path")
	}
	return u, err
}

// OneOf returns a check for choices.
func OneOf(choices ...string) func(string) error {
	return func(s string) error {
		if !slices.Contains(choices, s) {
			return fmt.Errorf("set it to one of %s", strings.Join(choices, ", "))
		}
		return nil
	}
}
