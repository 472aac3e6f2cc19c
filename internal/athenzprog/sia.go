package athenzprog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/spiffe/health"
)

// SIA is the client in a pod: an init container and a sidecar.
func SIA() Program {
	return Program{Name: "athenz-sia", run: runSIA, Table: settings.Table{Variables: []settings.Variable{
		{Name: "MODE", Default: "init", Choices: []string{"init", "refresh"}, Doc: "init gets the first identity and ends, refresh keeps it fresh", Origin: athenzs},
		{Name: "ENDPOINT", Default: "unix:///identity/connect/agent.sock", Check: isUnix, Doc: "socket of the node's agent", Origin: athenzs},
		{Name: "ID_FILE", Form: settings.Path, Default: "/identity/id", Doc: "file with the handle of the pod's volume", Origin: here},
		{Name: "KEY_FILE", Form: settings.Path, Default: "/tls/service.key", Doc: "gets the key; in the folder of CERT_FILE and CA_CERT_FILE", Origin: athenzs},
		{Name: "CERT_FILE", Form: settings.Path, Default: "/tls/service.cert", Doc: "gets the certificate", Origin: athenzs},
		{Name: "CA_CERT_FILE", Form: settings.Path, Default: "/tls/cacert.pem", Doc: "gets the CA certificates", Origin: athenzs},
		{Name: "TOKEN_FILE", Form: settings.Path, Default: "/tokens/ntoken", Doc: "gets the service token", Origin: here},
		{Name: "REFRESH_INTERVAL", Form: settings.Duration, Default: "1h", Check: isInterval, Doc: "time between refreshes, give or take a tenth", Origin: athenzs},
		healthAddr, logLevel,
	}}}
}

func isUnix(s string) error {
	path, ok := strings.CutPrefix(s, "unix://")
	if !ok || !filepath.IsAbs(path) {
		return errors.New("set it to the address of a Unix socket, such as unix:///identity/connect/agent.sock")
	}
	return nil
}

func isInterval(s string) error {
	if d, _ := time.ParseDuration(s); d < time.Minute {
		return errors.New("set it to a minute or more, such as 1h")
	}
	return nil
}

func runSIA(ctx context.Context, v *settings.Values, o Options) error {
	files := athenz.IdentityFiles{KeyFile: v.Text("KEY_FILE"), CertificateFile: v.Text("CERT_FILE"), RootsFile: v.Text("CA_CERT_FILE"), TokenFile: v.Text("TOKEN_FILE"), Logger: o.Logger}
	if err := files.Check(); err != nil {
		return v.Reject("KEY_FILE", fmt.Errorf("%w; set KEY_FILE, CERT_FILE and CA_CERT_FILE to three paths in one folder", err))
	}
	client, err := athenz.NewAgentClient(strings.TrimPrefix(v.Text("ENDPOINT"), "unix://"), v.Text("ID_FILE"))
	if err != nil {
		return v.Reject("ENDPOINT", err)
	}
	identity, err := files.Read()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		o.Logger.Warn("the files have no identity that can be used", slog.Any("err", err)) // the agent says whether a new one is to be had
	}
	cfg := athenz.SidecarConfig{Agent: client, Identity: identity, Keep: files.Write, Interval: v.Duration("REFRESH_INTERVAL"), Logger: o.Logger}
	if v.Text("MODE") == "init" {
		if identity != nil && time.Now().Before(identity.Credential.NotAfter()) {
			o.Logger.Info("the files have an identity that is still valid", slog.Any("identity", identity)) // the agent gives none a second time
			return nil
		}
		s, err := athenz.StartSidecar(ctx, cfg)
		if err != nil {
			return err
		}
		return s.Close()
	}
	s, err := athenz.NewSidecar(cfg)
	if err != nil {
		return err
	}
	g := newGroup(ctx, v, o)
	g.health(v, health.Part{Name: "identity", Source: s})
	g.part(s.Run)
	return g.wait()
}
