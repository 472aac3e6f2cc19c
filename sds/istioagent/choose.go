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

// The origins of an identity.
const (
	fromSocket = "socket" // another program serves the secrets
	fromFiles  = "files"
	fromCA     = "ca"
)

// Choose determines, once, where the identity will come from; the order is in the package comment. It returns cfg
// with the result. Choose fails if something other than a socket is at the path of the socket, if the server there
// does not speak HTTP/2, and if the configuration requires a server or files that are missing.
func Choose(ctx context.Context, cfg Config) (Config, error) {
	c := cfg
	if c.v == nil {
		return Config{}, errors.New("istioagent: choose: the zero Config; FromEnvironment makes one")
	}
	socketFile := c.text("WORKLOAD_IDENTITY_SOCKET_FILE")
	c.Socket, c.Origin, c.cert, c.key, c.roots = c.path(filepath.Join(socketDir, socketFile)), fromCA, "", "", ""
	live, found, err := probe(ctx, c.Socket)
	switch {
	case err != nil:
		return Config{}, fmt.Errorf("istioagent: choose: workload socket: %w", err)
	case live:
		c.Origin, c.why = fromSocket, found
		return c, nil
	case socketFile != socketName:
		return Config{}, fmt.Errorf("istioagent: choose: workload socket: %s, and WORKLOAD_IDENTITY_SOCKET_FILE "+
			"requires a server: start that, or leave the variable out", found)
	}
	if err := c.chooseFiles(); err != nil {
		return Config{}, fmt.Errorf("istioagent: choose: %w", err)
	}
	c.why = found + "; " + c.why
	return c, nil
}

// useFiles makes files the origin.
func (c *Config) useFiles(dir, cert, key, roots, why string) {
	in := func(name string) string { return c.path(filepath.Join(dir, name)) }
	c.Origin, c.why, c.cert, c.key, c.roots = fromFiles, why, in(cert), in(key), in(roots)
}

// chooseFiles chooses files if they exist.
func (c *Config) chooseFiles() error {
	switch {
	case c.v.Bool("FILE_MOUNTED_CERTS"):
		c.useFiles("", c.mountedCert, c.mountedKey, c.mountedRoots, "FILE_MOUNTED_CERTS is set")
		for _, file := range []string{c.cert, c.key, c.roots} {
			if c.isOwn(filepath.Dir(file)) {
				return fmt.Errorf("%s is in the directory to which this agent writes (OUTPUT_CERTS): "+
					"mount the files in another one", file)
			}
		}
	case c.text("CA_PROVIDER") == gke:
		why := "the CA provider is " + gke
		c.useFiles(credentials, "certificates.pem", "private_key.pem", "ca_certificates.pem", why)
		for _, file := range []string{c.cert, c.key, c.roots} {
			if !c.isFile(file) {
				return fmt.Errorf("there is no file %s, which CA_PROVIDER=%s requires", file, gke)
			}
		}
	default:
		c.findFiles()
	}
	return nil
}

// findFiles looks for files at the places where a workload is usually given them.
func (c *Config) findFiles() {
	var passed []string
	for _, dir := range []string{credentials, mounted} {
		cert, key := c.isFile(filepath.Join(dir, certName)), c.isFile(filepath.Join(dir, keyName))
		switch at := c.path(dir); {
		case c.isOwn(at):
			passed = append(passed, at+" is for the control plane or for output")
		case cert || key:
			// A second file may be on its way, or one was lost: neither is a reason to take another identity.
			why := "there are files in " + at
			if !cert {
				why += ", without " + certName + " so far"
			} else if !key {
				why += ", without " + keyName + " so far"
			}
			c.useFiles(dir, certName, keyName, rootsName, why)
			return
		case dir == mounted && c.isFile(etcRoots):
			c.roots = c.path(etcRoots)
			passed = append(passed, "ROOTCA is "+c.roots+", without a certificate and a key")
		default:
			passed = append(passed, "no files in "+at)
		}
	}
	c.why = strings.Join(passed, "; ")
}

// otherGone is how long another program's server may be away, as in a restart. After that only a new Choose helps.
const otherGone = time.Minute

// watchOther returns an error when another program's server has not answered for that long. An agent that started
// while its predecessor drained ends this way, and chooses again after its restart.
func (a *Agent) watchOther(ctx context.Context) error {
	gone := cmp.Or(a.cfg.otherGone, otherGone)
	for last := time.Now(); renew.Sleep(ctx, gone/20) == nil; {
		if live, _, _ := probe(ctx, a.cfg.Socket); live {
			last = time.Now()
		} else if time.Since(last) >= gone {
			return fmt.Errorf("no server has answered there for %v: the agent ends, so that it looks anew where "+
				"the identity comes from when it is started again", gone)
		}
	}
	return nil
}

// answerTime is how long a server at the workload socket has to answer.
const answerTime = time.Second

// probe reports whether an HTTP/2 server answers at a socket, and describes the result. A missing socket, and a
// socket on which no process listens, are not errors.
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
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	// The preface of HTTP/2 with an empty SETTINGS frame, to which a server answers with its own (RFC 9113 section
	// 3.4).
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
		return false, "", fmt.Errorf("a process listens at %s and does not answer with HTTP/2 within %v: stop it, "+
			"or remove the socket: %w", socket, answerTime, err)
	}
	return true, "a server answers at " + socket, nil
}
