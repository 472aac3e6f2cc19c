package kube

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// accountDir is the kubelet's directory for the files of a pod's service account, below the root.
const accountDir = "var/run/secrets/kubernetes.io/serviceaccount"

// environment is the process's information about its cluster.
type environment struct {
	getenv func(string) string
	files  fs.FS // of the root directory
	dial   func(ctx context.Context, network, addr string) (net.Conn, error)
}

func process() environment {
	d := &net.Dialer{Timeout: requestTimeout}
	return environment{getenv: os.Getenv, files: os.DirFS("/"), dial: d.DialContext}
}

// Namespace returns the namespace of the pod that this process runs in. Outside a pod the error wraps
// [fs.ErrNotExist].
func Namespace() (string, error) { return process().namespace() }

func (e environment) namespace() (string, error) {
	s, err := readFile(e.files, "namespace", 1<<10)
	if err != nil {
		return "", fmt.Errorf("kube: namespace of this pod: %w", err)
	}
	if !ValidLabel(s) {
		return "", fmt.Errorf("kube: namespace of this pod: /%s/namespace has %q in it", accountDir, s)
	}
	return s, nil
}

// ParseUser parses the user name of a service account, as in an answer about a token and in the token itself:
// system:serviceaccount:NAMESPACE:NAME.
func ParseUser(s string) (namespace, name string, err error) {
	parts := strings.SplitN(s, ":", 5)
	switch {
	case len(parts) != 4 || parts[0] != "system" || parts[1] != "serviceaccount":
		return "", "", fmt.Errorf("the user %.300q is not a service account (system:serviceaccount:NAMESPACE:NAME)", s)
	case !ValidLabel(parts[2]):
		return "", "", fmt.Errorf("%.300q in the user name is not a namespace (an RFC 1123 label)", parts[2])
	case !ValidName(parts[3]):
		return "", "", fmt.Errorf("%.300q in the user name is not a service account's name (an RFC 1123 "+
			"subdomain)", parts[3])
	}
	return parts[2], parts[3], nil
}

func (e environment) serverURL() (string, error) {
	host, port := e.getenv("KUBERNETES_SERVICE_HOST"), e.getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return "", errors.New("this process is not in a cluster, for KUBERNETES_SERVICE_HOST or " +
			"KUBERNETES_SERVICE_PORT is not set: give the URL of the API server")
	}
	return "https://" + net.JoinHostPort(host, port), nil
}

// serviceAccount is the identity that Kubernetes gives to a pod. It stores no token and no CA certificates: they are
// read for each request, at little cost.
type serviceAccount struct {
	root        fs.FS // of the machine
	postQuantum bool
	ca          atomic.Pointer[[sha256.Size]byte] // the digest of the CA certificates read last
}

// renewed reports whether the CA certificates have changed since the previous call. Unreadable ones count as
// unchanged.
func (a *serviceAccount) renewed() bool {
	pem, err := readFile(a.root, "ca.crt", maxRoots)
	if err != nil {
		return false
	}
	sum := sha256.Sum256([]byte(pem))
	before := a.ca.Swap(&sum)
	return before != nil && *before != sum
}

const maxRoots = 1 << 20 // bytes

func (a *serviceAccount) token() (string, error) {
	token, err := readFile(a.root, "token", 64<<10)
	if err != nil {
		return "", fmt.Errorf("token of the service account: %w", err)
	}
	if strings.ContainsFunc(token, func(c rune) bool { return !bearer.TokenRune(c) }) {
		return "", fmt.Errorf("token of the service account: /%s/token is not a bearer token", accountDir)
	}
	return token, nil
}

func (a *serviceAccount) roots() (*x509.CertPool, error) {
	pem, err := readFile(a.root, "ca.crt", maxRoots)
	if err != nil {
		return nil, fmt.Errorf("CA of the API server: %w", err)
	}
	pool, err := certpem.Pool([]byte(pem))
	if err != nil {
		return nil, fmt.Errorf("CA of the API server: /%s/ca.crt: %w", accountDir, err)
	}
	return pool, nil
}

func (a *serviceAccount) transport(dial conns.Dial) *http.Transport {
	return &http.Transport{
		DialTLSContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := a.connect(ctx, dial, network, addr)
			if err == nil || neverSent(err) {
				return conn, err
			}
			return nil, &net.OpError{Op: "dial", Net: network, Err: err} // so that neverSent knows
		},
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("not https")
		},
		ForceAttemptHTTP2:      true,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: 256 << 10,
	}
}

func (a *serviceAccount) connect(ctx context.Context, dial conns.Dial, network, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	roots, err := a.roots()
	if err != nil {
		return nil, err
	}
	raw, err := dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Time: certchain.Now, ServerName: host,
		NextProtos: []string{"h2", "http/1.1"}}
	if a.postQuantum {
		cfg.MinVersion, cfg.CurvePreferences = tls.VersionTLS13, []tls.CurveID{tls.X25519MLKEM768}
	}
	conn := tls.Client(raw, cfg)
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = raw.Close() // nothing was sent on it
		return nil, err
	}
	return conn, nil
}

// readFile reads a small file of the service account, without white space around it.
func readFile(root fs.FS, name string, limit int) (string, error) {
	f, err := root.Open(path.Join(accountDir, name))
	if err != nil {
		return "", fmt.Errorf("not in a pod with a service account token? %w", err)
	}
	defer f.Close() // only read
	data, err := files.ReadAll(f, "/"+accountDir+"/"+name, limit)
	s := strings.TrimSpace(string(data))
	if err == nil && s == "" {
		err = fmt.Errorf("/%s/%s is empty", accountDir, name)
	}
	return s, err
}
