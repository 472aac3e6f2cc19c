package istioagent

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/report"
)

// traditional is a source with keys in PKCS#1 and SEC 1.
type traditional struct{ sds.Source }

func (t traditional) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	s, err := t.Source.GenerateSecret(ctx, resourceName)
	if err != nil {
		return nil, err
	}
	chain, key, ok := s.KeyPair()
	if !ok {
		return s, nil
	}
	if key, err = certpem.TraditionalKey(key); err != nil {
		return nil, err
	}
	return pki.NewKeyPairSecret(resourceName,
		written{func() ([]byte, []byte, error) { return chain, key, nil }, s.NotAfter()})
}

// written is a key pair in PEM. It cannot print the key.
type written struct {
	marshal func() (certs, key []byte, err error)
	end     time.Time
}

func (w written) MarshalPEM() (certs, key []byte, err error) { return w.marshal() }
func (w written) NotAfter() time.Time                        { return w.end }

// rooted is an identity with the roots from a file.
type rooted struct {
	identity part
	roots    *filesource.Source
	news     renew.Signal
}

func (r *rooted) Snapshot() (*spiffe.Snapshot, error) {
	svid, err := r.identity.SVID()
	if err != nil {
		return nil, err
	}
	return spiffe.NewSnapshot(svid, r.roots.Bundles()), nil
}

func (r *rooted) Changed() <-chan struct{} { return r.news.Changed() }

// run reports changes until ctx is done.
func (r *rooted) run(ctx context.Context) error {
	for ctx.Err() == nil {
		identity, roots := r.identity.Changed(), r.roots.Changed()
		r.news.Notify()
		select {
		case <-identity:
		case <-roots:
		case <-ctx.Done():
		}
	}
	return nil
}

// gateway serves the Secrets of the pod's namespace. It contacts the API server only after a client asks for the
// first name: sidecars ask for none, and have no right to read Secrets.
type gateway struct {
	*kubesecrets.Source
	once  sync.Once
	asked chan struct{} // closed once a client has asked for a name
}

// newGateway returns nil outside of pods.
func (c *Config) newGateway() *gateway {
	if !c.inPod {
		return nil
	}
	src, err := kubesecrets.New(kubesecrets.Config{
		Namespace: c.text("POD_NAMESPACE"), APIServer: c.kube.server, HTTPClient: c.kube.client,
		PostQuantum: c.postQuantum, Logger: c.Logger,
	})
	if err != nil { // a sidecar does not need to know
		c.Logger.Info("istioagent: names of secrets such as kubernetes://NAME do not exist", slog.Any("err", err))
		return nil
	}
	return &gateway{Source: src, asked: make(chan struct{})}
}

func (g *gateway) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	g.once.Do(func() { close(g.asked) })
	return g.Source.GenerateSecret(ctx, resourceName)
}

func (g *gateway) Run(ctx context.Context) error {
	select {
	case <-g.asked:
		return g.Source.Run(ctx)
	case <-ctx.Done():
		return nil
	}
}

// Report is empty before the first name is requested, because the source would be reported as down.
func (g *gateway) Report() report.Report {
	select {
	case <-g.asked:
		return g.Source.Report()
	default:
		return report.Report{}
	}
}
