package caconfig

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/pki/ca"
)

// clusterOptions are the flags of a CA that replaces Istio's.
type clusterOptions struct {
	getenv          func(string) string
	caServer        bool
	rootConfigMap   string
	tlsCert, tlsKey string
	wait            time.Duration
}

const (
	readAgain = 5 * time.Second               // while waiting for a CA
	istiodTLS = "/var/run/secrets/istiod/tls" // where istiod finds its certificate
)

func (c *Config) defineCluster(fs *flag.FlagSet) {
	fs.BoolVar(&c.caServer, "ca-server", true,
		"serve the certificate APIs; without them the bundle, metrics and health remain [ENABLE_CA_SERVER]")
	fs.DurationVar(&c.wait, "wait", 0, "`duration`, such as 20m: how long a start waits for a CA that is not there "+
		"and may not be made, or for "+
		"a store that does not answer (default: not at all, and without end) [CA_WAIT]")
	fs.StringVar(&c.rootConfigMap, "root-configmap", "",
		"`name` of the ConfigMap of each namespace that is to have the roots, as pods of Istio mount "+
			"istio-ca-root-cert; empty: none [PILOT_CA_CERT_CONFIGMAP]")
	fs.Func("remote-cluster", "another `cluster` whose pods are callers, as ID=URL,DIRECTORY, with ca.crt and token "+
		"of a service account there; may be repeated", c.setRemote)
	fs.StringVar(&c.tlsCert, "tls-cert", "", "`file` with the certificates of the server, instead of one of its "+
		"own CA (default in a pod "+istiodTLS+"/tls.crt, if that is there)")
	fs.StringVar(&c.tlsKey, "tls-key", "", "`file` with the key for -tls-cert (default in a pod tls.key in the "+
		"same directory)")
}

func (c *Config) setRemote(text string) error {
	id, rest, _ := strings.Cut(text, "=")
	url, dir, _ := strings.Cut(rest, ",")
	if id == "" || !strings.HasPrefix(url, "https://") || !filepath.IsAbs(dir) {
		return errors.New("it is not ID=https://HOST:PORT,/DIRECTORY")
	}
	client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: filepath.Join(dir, "ca.crt"),
		MinVersion: tls.VersionTLS12})
	if err != nil {
		return err
	}
	client.Transport = fileToken{client.Transport, filepath.Join(dir, "token")}
	if c.cluster.Remotes == nil {
		c.cluster.Remotes = map[string]kube.ReviewerOptions{}
	}
	c.cluster.Remotes[id] = kube.ReviewerOptions{APIServer: url, HTTPClient: client}
	return nil
}

// fileToken sends the token in a file, which it reads for each request.
type fileToken struct {
	http.RoundTripper
	file string
}

// RoundTrip implements [http.RoundTripper].
func (t fileToken) RoundTrip(r *http.Request) (*http.Response, error) {
	token, err := files.Read(t.file, 64<<10)
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	return t.RoundTripper.RoundTrip(r)
}

// await opens the CA, and retries for the duration of -wait.
func (c *Config) await(ctx context.Context, log *slog.Logger) (*Authority, error) {
	if c.wait == 0 {
		return c.Open(ctx, OpenOptions{Logger: log})
	}
	ctx, cancel := context.WithTimeoutCause(ctx, c.wait, fmt.Errorf("-wait: it has taken %v", c.wait))
	defer cancel()
	var missing error
	for {
		a, err := c.Open(ctx, OpenOptions{Logger: log})
		switch {
		case err == nil:
			return a, nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("%w: %w", context.Cause(ctx), cmp.Or(missing, err))
		case !errors.Is(err, ca.ErrNoRecord):
			return nil, err
		case missing == nil:
			log.Info("caconfig: -wait: waiting for a CA, and making none", "err", err, "at_most", c.wait)
		}
		missing = err
		renew.Wait(ctx, readAgain, nil)
	}
}

// tlsFiles returns the files of -tls-cert and -tls-key, or a pod's default ones.
func (c *Config) tlsFiles() (cert, key string) {
	if c.tlsCert == "" && c.inCluster {
		if _, err := os.Stat(istiodTLS + "/tls.crt"); err == nil {
			return istiodTLS + "/tls.crt", istiodTLS + "/tls.key"
		}
	}
	return c.tlsCert, c.tlsKey
}

// followTLS serves the certificate in two files and follows their changes until stop is called. It returns nil
// without files. If a new pair is invalid, it keeps the last good one.
func followTLS(ctx context.Context, name, cert, key string, log *slog.Logger) (get func(*tls.ClientHelloInfo) (
	*tls.Certificate, error), stop func(), err error) {
	if cert == "" {
		return nil, func() {}, nil
	}
	var current atomic.Pointer[tls.Certificate]
	f := follow.New([]string{cert, key}, func(_ context.Context, read follow.Files) error {
		for _, path := range []string{cert, key} { // tls.X509KeyPair skips torn blocks
			if _, err := certpem.Read(read[path].Data, certpem.MaxCertificates); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
		pair, err := tls.X509KeyPair(read[cert].Data, read[key].Data)
		if err != nil {
			return fmt.Errorf("%s and %s: %w", cert, key, err)
		}
		now, old := time.Now(), current.Load()
		if err := certchain.InTime(pair.Leaf, now); err != nil && (now.After(pair.Leaf.NotAfter) || old != nil &&
			now.Before(old.Leaf.NotAfter)) {
			return fmt.Errorf("%s: %w", cert, err)
		}
		current.Store(&pair)
		log.Info("caconfig: "+name+": certificate taken over", "serial", pair.Leaf.SerialNumber.Text(16), "not_after",
			pair.Leaf.NotAfter)
		return nil
	}, &follow.Options{Logger: log, Open: func(path string) (*os.File, error) {
		return private.OpenFile(path, os.O_RDONLY, private.Options{})
	}})
	if err := f.Read(ctx); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	stop = background(ctx, func(ctx context.Context) { _ = f.Run(ctx) })
	return func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return current.Load(), nil }, stop, nil
}

// background runs run until stop is called, which waits for its end.
func background(ctx context.Context, run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { run(ctx) })
	return func() { cancel(); running.Wait() }
}

const noLists = "no revocation lists are handed out: roots and keys are revoked, and leaves end by themselves"

// without lists variables of Istio's CA that have no effect here, with the reason.
var without = map[string]string{
	"USE_REMOTE_CERTS":    "a CA of another cluster is given as files in ROOT_CA_DIR",
	"PILOT_ENABLE_CA_CRL": noLists,
	"PILOT_CRL_CONFIGMAP": noLists,
	"XDS_AUTH":            "callers are always authenticated",
	"XDS_AUTH_PLAINTEXT":  "the certificate APIs take no tokens without TLS",
	"PILOT_CERT_PROVIDER": "the certificate of the server is of its own CA, or in -tls-cert",
	"PILOT_ENABLE_XDS_IDENTITY_CHECK": "this program serves no configuration of proxies, and a certificate is " +
		"always for the caller itself",
	"PILOT_SKIP_VALIDATE_TRUST_DOMAIN": "the trust domain of a caller is always checked",
	"SPIFFE_BUNDLE_ENDPOINTS":          "callers of other trust domains get no certificates",
	"KUBECONFIG":                       "-kubernetes-api and -remote-cluster name other clusters",
	"REVISION":                         "-dns-names has further names of the server",
}

// variables warns about variables in the environment that have no effect or look misspelled.
func (c *Config) variables(log *slog.Logger) {
	known := slices.Collect(maps.Keys(without))
	c.flags.VisitAll(func(f *flag.Flag) {
		if v := variable(f); v != "" {
			known = append(known, v)
		}
	})
	for _, line := range os.Environ() {
		name, _, _ := strings.Cut(line, "=")
		if c.getenv(name) == "" || settings.ServiceLink(line) {
			continue
		}
		why := without[name]
		if right, ok := settings.Near(name, known); ok {
			log.Warn("caconfig: a variable is not known, and looks like another one", "variable", name, "known", right)
			continue
		}
		if why == "" && !slices.Contains(known, name) && (strings.HasPrefix(name, "PILOT_") || strings.HasPrefix(name,
			"CITADEL_")) {
			why = "it is not one of a CA; -help lists those"
		}
		if why != "" {
			log.Info("caconfig: a variable has no effect", "variable", name, "because", why)
		}
	}
}
