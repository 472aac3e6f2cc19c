package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/examples/internal/devtoken"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/istioagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// demonstration runs a CA and two workloads with an agent each. The agents are configured as in pods; the workloads
// read the files that their agents write.
type demonstration struct {
	options
	lifetime time.Duration
	out      io.Writer
	begun    time.Time
	saying   sync.Mutex
	dir      string
	secret   string // that tokens begin with

	*program.Group // runs all parts

	rotations, pushes, requests, failed atomic.Int64
}

var demoDomain = spiffe.MustParseTrustDomain("demo.test")

// demo runs a demonstration until ctx is done. It fails at the first failed request.
func demo(ctx context.Context, o options, lifetime time.Duration, out io.Writer) (err error) {
	d := &demonstration{options: o, lifetime: lifetime, out: out, begun: time.Now(), Group: program.NewGroup(ctx)}
	if d.dir, err = os.MkdirTemp("", "agent"); err != nil {
		return err
	}
	defer os.RemoveAll(d.dir)
	if err = d.start(); err == nil {
		err = d.Wait()
	} else {
		err = cmp.Or(d.Stop(), err) // prefer the error of the part that failed
	}
	if ctx.Err() != nil {
		err = nil
	}
	if failed := d.failed.Load(); err == nil && failed > 0 {
		err = fmt.Errorf("%d requests have failed", failed)
	}
	d.say("%d certificates rotated, %d pushes by SDS, %d requests with a handshake each, %d failed",
		d.rotations.Load(), d.pushes.Load(), d.requests.Load(), d.failed.Load())
	return err
}

func (d *demonstration) say(format string, args ...any) {
	d.saying.Lock()
	defer d.saying.Unlock()
	fmt.Fprintf(d.out, "%5.1fs  %s\n", time.Since(d.begun).Seconds(), fmt.Sprintf(format, args...))
}

func (d *demonstration) start() error {
	address, roots, err := d.startCA()
	if err != nil {
		return err
	}
	web, stop, err := d.startWorkload("web", address, roots)
	if err != nil {
		return err
	}
	db, _, err := d.startWorkload("db", address, roots)
	if err != nil {
		return err
	}
	stop()
	return d.startTraffic(web, db)
}

// startCA serves a CA with Istio's API, and rotates its root. Its tokens prove only that the holder can read the
// demonstration's directory.
func (d *demonstration) startCA() (address, roots string, err error) {
	authority, err := ca.New(ca.Config{
		TrustDomain: demoDomain, DefaultTTL: d.lifetime, MaxTTL: d.lifetime, Backdate: time.Second,
		RefreshHint: time.Second,
		Rotation:    ca.Rotation{Propagation: d.lifetime}, // agents learn of a new root when they renew
	})
	if err != nil {
		return "", "", err
	}
	file := filepath.Join(d.dir, "token-secret")
	tokens, err := devtoken.New(demoDomain, file)
	if err != nil {
		return "", "", err
	}
	secret, err := os.ReadFile(file)
	if err != nil {
		return "", "", err
	}
	d.secret, roots = string(secret), filepath.Join(d.dir, "root-cert.pem")
	id, err := demoDomain.WorkloadID("ns", "istio-system", "sa", "istiod")
	if err != nil {
		return "", "", err
	}
	ready := make(chan struct{})
	loopback := pki.IPSAN(net.IPv4(127, 0, 0, 1))
	own, err := local.NewServer(authority, id, loopback)
	if err != nil {
		return "", "", err
	}
	identity, err := secretcache.New(secretcache.Config{ID: id, CA: own, Names: []pki.SAN{loopback}})
	if err != nil {
		return "", "", err
	}
	d.Go("identity of the CA's server", identity.Run)
	server, err := caserver.New(caserver.Options{
		CA: authority, TrustDomain: demoDomain, Identity: identity, Istio: &istioca.Options{Authenticator: tokens},
		RootsFile: roots, Ready: func() { close(ready) },
	})
	if err != nil {
		return "", "", err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", err
	}
	d.Go("CA", func(ctx context.Context) error { return server.Run(ctx, caserver.Listeners{Istio: l}) })
	select {
	case <-ready:
	case <-d.Context().Done():
		return "", "", d.Context().Err()
	}
	d.Go("rotation of the root", func(ctx context.Context) error {
		for {
			select {
			case <-time.After(2 * d.lifetime):
			case <-ctx.Done():
				return nil
			}
			if _, err := authority.Rotate(ctx); err == nil { // one rotation at a time
				d.say("CA: a new root; it signs in %v, when all agents know it", d.lifetime)
			}
		}
	})
	d.say("CA: %s for %s", l.Addr(), demoDomain)
	return l.Addr().String(), roots, nil
}

// startWorkload runs an agent, and returns the identity that the workload reads from the agent's files.
func (d *demonstration) startWorkload(name, address, roots string) (src *filesource.Source, done func(), err error) {
	root := filepath.Join(d.dir, name)
	token := filepath.Join(root, "var/run/secrets/tokens/istio-token")
	// The reader watches output.
	for _, dir := range []string{filepath.Dir(token), filepath.Join(root, "output")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, nil, err
		}
	}
	if err := os.WriteFile(token, []byte(d.secret+":demo/"+name), 0o600); err != nil {
		return nil, nil, err
	}
	environ := []string{
		"TRUST_DOMAIN=" + demoDomain.String(), "POD_NAMESPACE=demo", "SERVICE_ACCOUNT=" + name,
		"CA_ADDR=" + address, "CA_ROOT_CA=" + roots,
		"OUTPUT_CERTS=output", "SECRET_TTL=" + d.lifetime.String(), "SECRET_GRACE_PERIOD_RATIO=0.75",
		"SECRET_GRACE_PERIOD_RATIO_JITTER=0.1", "ECC_SIGNATURE_ALGORITHM=ECDSA",
		"PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=0s",
	}
	d.say("%s: its agent has %s", name, strings.Join(environ, " "))
	cfg, err := istioagent.FromEnvironment(environ)
	if err != nil {
		return nil, nil, err
	}
	cfg.Root = root
	if cfg, err = istioagent.Choose(d.Context(), cfg); err != nil {
		return nil, nil, err
	}
	agent, err := istioagent.New(cfg)
	if err != nil {
		return nil, nil, err
	}
	d.say("%s: its identity comes from the origin %s", name, cfg.Origin)
	done = func() {}
	if name == "web" {
		bootstrap := filepath.Join(d.dir, "envoy.json")
		if err := writeBootstrap(agent, bootstrap); err != nil {
			return nil, nil, errors.Join(err, agent.Close())
		}
		stop, err := admin(agent, new(proxy), d.admin, d.out, nil)
		if err != nil {
			return nil, nil, errors.Join(err, agent.Close())
		}
		d.Go("", func(ctx context.Context) error {
			<-ctx.Done()
			stop()
			return nil
		})
		done = func() { d.say("for an Envoy with the identity of web: envoy -c %s", bootstrap) }
		d.watch(cfg.Socket)
	}
	d.Go("agent of "+name, func(ctx context.Context) error {
		err := agent.Run(ctx)
		if err == nil { // /quitquitquit also ends the agent
			d.End(nil)
		}
		return err
	})
	src, err = filesource.New(filesource.Config{
		CertFile: filepath.Join(root, "output/cert-chain.pem"), KeyFile: filepath.Join(root, "output/key.pem"),
		Bundles: []filesource.BundleFile{{Path: filepath.Join(root, "output/root-cert.pem")}},
	})
	if err != nil {
		return nil, nil, err
	}
	d.Go(name, src.Run)
	if err := src.Ready(d.Context()); err != nil {
		return nil, nil, errors.Join(d.Context().Err(), err)
	}
	d.Go(name, func(ctx context.Context) error {
		var serial string
		for {
			changed := src.Changed() // before reading, so that no change is missed
			if svid, err := src.SVID(); err == nil && svid.Leaf().SerialNumber.Text(16) != serial {
				if serial != "" {
					d.rotations.Add(1)
				}
				serial = svid.Leaf().SerialNumber.Text(16)
				d.say("%s: has %s, certificate %.8s… until %s", name, svid.ID(), serial,
					svid.NotAfter().UTC().Format("15:04:05Z"))
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return nil
			}
		}
	})
	return src, done, nil
}

func writeBootstrap(agent *istioagent.Agent, name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(agent.Bootstrap(f), f.Close())
}

// watch takes an agent's secrets over SDS, as Envoy would.
func (d *demonstration) watch(socket string) {
	d.Go("SDS client", func(ctx context.Context) error {
		client := sds.UnixClient(socket)
		defer client.CloseIdleConnections()
		for _, err := range sds.NewClient(client, "http://localhost").Watch(ctx, "default", "ROOTCA") {
			if err == nil { // otherwise the loop tries again
				d.pushes.Add(1)
			}
		}
		return nil
	})
}

// startTraffic sends requests from web to db, each with a new handshake.
func (d *demonstration) startTraffic(web, db *filesource.Source) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	caller, err := demoDomain.WorkloadID("ns", "demo", "sa", "web")
	if err != nil {
		return err
	}
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if peer, ok := spiffetls.PeerFromContext(r.Context()); ok {
				fmt.Fprintf(w, "hello %s", peer.ID())
			}
		})}
	serving, err := spiffetls.New(spiffetls.Config{Self: db, Peers: db, Allow: spiffe.AllowIDs(caller)})
	if err != nil {
		return err
	}
	if err := serving.ConfigureServer(server); err != nil {
		return err
	}
	asking, err := spiffetls.New(spiffetls.Config{Self: web, Peers: web, Allow: spiffe.AllowMembersOf(demoDomain)})
	if err != nil {
		return err
	}
	transport, err := asking.Transport()
	if err != nil {
		return err
	}
	transport.DisableKeepAlives = true
	d.Go("db", func(context.Context) error { return server.ServeTLS(l, "", "") })
	d.Go("", func(ctx context.Context) error {
		<-ctx.Done()
		_ = server.Close()
		return nil
	})
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	d.Go("traffic", func(ctx context.Context) error {
		for tick := time.Tick(50 * time.Millisecond); ; {
			if err := ask(ctx, client, "https://"+l.Addr().String()); ctx.Err() == nil {
				if d.requests.Add(1); err != nil {
					d.failed.Add(1)
					d.say("web: a request has failed: %v", err)
				}
			}
			select {
			case <-tick:
			case <-ctx.Done():
				return nil
			}
		}
	})
	d.say("web asks db at %s, 20 times a second", l.Addr())
	return nil
}

func ask(ctx context.Context, client *http.Client, url string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<10))
	return err
}
