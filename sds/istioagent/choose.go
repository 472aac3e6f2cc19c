package istioagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
)

// Origin is where the identity comes from.
type Origin string

// The origins.
const (
	Socket Origin = "socket" // a server of secrets that another program runs
	Files  Origin = "files"
	CA     Origin = "ca"
)

// Choice is what [Choose] has chosen.
type Choice struct {
	Origin Origin

	// Socket is the path at which Envoy finds the secrets: that of the other program, or of this agent.
	Socket string

	// Cert, Key and Roots are the files, if they are the origin. With a CA, Roots is a file whose roots are served as ROOTCA
	// in place of those of the CA, if there is one in etc/certs without a certificate and a key.
	Cert, Key, Roots string

	// Why says why this origin was chosen, and what was not there.
	Why string
}

// String returns the origin and why.
func (c Choice) String() string { return string(c.Origin) + ": " + c.Why }

// Choose looks where the identity comes from, once: see the package comment. It changes nothing. It fails if something other
// than a socket is at the path of the socket, if the server there does not answer like one, and if the configuration requires
// a server or files that are missing.
func Choose(ctx context.Context, cfg Config) (Choice, error) {
	c := cfg.withDefaults()
	if err := c.check(); err != nil {
		return Choice{}, fmt.Errorf("istioagent: choose: %w", err)
	}
	choice := Choice{Socket: c.socket()}
	live, found, err := probe(ctx, choice.Socket)
	switch {
	case err != nil:
		return Choice{}, fmt.Errorf("istioagent: choose: workload socket: %w", err)
	case live:
		choice.Origin, choice.Why = Socket, found
		return choice, nil
	case c.SocketFile != socketName:
		return Choice{}, fmt.Errorf("istioagent: choose: workload socket: %s, and WORKLOAD_IDENTITY_SOCKET_FILE requires a server: "+
			"start that, or leave the variable out", found)
	}
	if err := c.chooseFiles(&choice); err != nil {
		return Choice{}, fmt.Errorf("istioagent: choose: %w", err)
	}
	if choice.Why = found + "; " + choice.Why; choice.Origin == "" {
		choice.Origin = CA
	}
	return choice, nil
}

// chooseFiles chooses files if there are some.
func (c *Config) chooseFiles(choice *Choice) error {
	set := func(dir, cert, key, roots, why string) {
		choice.Origin, choice.Why = Files, why
		choice.Cert, choice.Key, choice.Roots = c.path(filepath.Join(dir, cert)), c.path(filepath.Join(dir, key)), c.path(filepath.Join(dir, roots))
	}
	if c.FileMounted {
		set("", c.MountedCert, c.MountedKey, c.MountedRoots, "FILE_MOUNTED_CERTS is set")
		for _, file := range []string{choice.Cert, choice.Key, choice.Roots} {
			if c.isOwn(filepath.Dir(file)) {
				return fmt.Errorf("%s is in the folder to which this agent writes (OUTPUT_CERTS): mount the files in another one", file)
			}
		}
		return nil
	}
	if c.Provider == gke {
		set(credentials, "certificates.pem", "private_key.pem", "ca_certificates.pem", "the CA provider is "+gke)
		for _, file := range []string{choice.Cert, choice.Key, choice.Roots} {
			if !c.isFile(file) {
				return fmt.Errorf("there is no file %s, which CA_PROVIDER=%s requires", file, gke)
			}
		}
		return nil
	}
	var passed []string
	for _, dir := range []string{credentials, mounted} {
		cert, key := c.isFile(filepath.Join(dir, certName)), c.isFile(filepath.Join(dir, keyName))
		switch at := c.path(dir); {
		case c.isOwn(at):
			passed = append(passed, at+" is for the control plane or for output")
		case cert && key:
			set(dir, certName, keyName, rootsName, "there are files in "+at)
			return nil
		case cert || key: // a new one of two is on its way, or one was lost: neither is a reason to take another identity
			missing := keyName
			if key {
				missing = certName
			}
			set(dir, certName, keyName, rootsName, fmt.Sprintf("there are files in %s, without %s so far", at, missing))
			return nil
		case dir == mounted && c.isFile(mountedRoots):
			choice.Roots = c.path(mountedRoots)
			passed = append(passed, "ROOTCA is "+choice.Roots+", without a certificate and a key")
		default:
			passed = append(passed, "no files in "+at)
		}
	}
	choice.Why = strings.Join(passed, "; ")
	return nil
}

// otherGone is how long the server of another program may be away, as in a restart. Then only a new look can help.
const otherGone = time.Minute

// watchOther returns an error when the server of another program has not answered for that long. An agent that has started
// while the one before drained ends so: what restarts it has it look again.
func (a *Agent) watchOther(ctx context.Context) error {
	gone := cmp.Or(a.cfg.otherGone, otherGone)
	for last := time.Now(); renew.Sleep(ctx, gone/20) == nil; {
		if live, _, _ := probe(ctx, a.choice.Socket); live {
			last = time.Now()
		} else if time.Since(last) >= gone {
			return fmt.Errorf("no server has answered there for %v: the agent ends, so that it looks anew where the identity comes from when it is started again", gone)
		}
	}
	return nil
}

// answerTime is how long a server at the workload socket has to answer.
const answerTime = time.Second

// probe reports whether a server of HTTP/2 answers at a socket, and what was found. Nothing there, and a socket on
// which no process listens, are no errors.
func probe(ctx context.Context, socket string) (live bool, found string, err error) {
	info, err := os.Stat(socket)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, "no socket at " + socket, nil
	case err != nil:
		return false, "", err
	case info.Mode().Type() != fs.ModeSocket:
		return false, "", fmt.Errorf("%s is no socket: remove it", socket)
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return false, "no server answers at " + socket, nil
	case err != nil:
		return false, "", fmt.Errorf("%w: allow this user to connect, or remove the socket", err)
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline) // of a connection that is open
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	// The preface of HTTP/2 with an empty SETTINGS frame, to which a server answers with its own (RFC 9113 section 3.4).
	var answer [9]byte
	_, err = io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	if err == nil {
		_, err = io.ReadFull(conn, answer[:])
	}
	const settings = 4
	if err == nil && answer[3] != settings {
		err = errors.New("it answers with something else")
	}
	if err != nil {
		return false, "", fmt.Errorf("a process listens at %s and does not answer with HTTP/2 within %v: stop it, or remove the socket: %w", socket, answerTime, err)
	}
	return true, "a server answers at " + socket, nil
}
