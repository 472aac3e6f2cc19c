package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe/health"
)

// serve obtains the first identity, or keeps it fresh until ctx is done.
func serve(ctx context.Context, v program.Settings, out io.Writer, log *slog.Logger) error {
	interval, err := time.ParseDuration(v.Text("REFRESH_INTERVAL"))
	if err != nil {
		return program.UsageError{Err: v.Reject("REFRESH_INTERVAL", err)}
	}
	cfg := sidecar.Config{
		Socket: strings.TrimPrefix(v.Text("ENDPOINT"), "unix://"), HandleFile: v.Text("ID_FILE"),
		Files: sidecar.Files{KeyFile: v.Text("KEY_FILE"), CertificateFile: v.Text("CERT_FILE"),
			RootsFile: v.Text("CA_CERT_FILE"), TokenFile: v.Text("TOKEN_FILE")},
		Interval: interval, Logger: log,
	}
	s, err := sidecar.New(cfg)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return err
	}
	if err != nil {
		return program.UsageError{Err: v.Reject("KEY_FILE",
			fmt.Errorf("%w; set KEY_FILE, CERT_FILE and CA_CERT_FILE to three paths in one directory", err))}
	}
	if v.Text("MODE") == "init" {
		if i, err := s.Identity(); err == nil {
			// The agent gives no first identity twice.
			log.Info("the files have an identity that is still valid", slog.Any("identity", i))
			return nil
		}
		parts := program.NewGroup(ctx)
		parts.Go("", s.Run)
		err := s.Ready(parts.Context())
		return cmp.Or(parts.Stop(), err)
	}
	status, err := health.New(health.Part{Name: "identity", Source: s})
	if err != nil {
		return err
	}
	l, err := v.Listen("HEALTH_ADDR", out)
	if err != nil {
		return err
	}
	parts := []func(context.Context) error{s.Run}
	if l != nil {
		parts = append(parts, func(ctx context.Context) error {
			return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: status, Plaintext: true, Logger: log})
		})
	}
	return program.Together(ctx, parts...)
}
