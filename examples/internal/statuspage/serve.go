package statuspage

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// Serve makes the port of a program for operators a part of g: the page of the other parts, and /ready, /live and
// /metrics. It prints the address, which -admin has given; with an empty one it checks the parts and serves nothing.
func Serve(g *program.Group, name, address string, log *slog.Logger, out io.Writer, parts ...Part) error {
	parts[0].Links = []string{"metrics", "ready", "live"}
	page, err := New(name, parts...)
	if err != nil {
		return err
	}
	context.AfterFunc(g.Context(), func() { _ = page.Close() })
	var healths []health.Part
	for _, p := range parts {
		healths = append(healths, health.Part{Name: p.Name, Source: p.Source})
	}
	probes, err := health.New(healths...)
	if err != nil || address == "" {
		return err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("-admin: %w", err)
	}
	fmt.Fprintf(out, "health: http://%s/ready (also /live and /metrics)\nstatus page: http://%[1]s/\n", l.Addr())
	mux := http.NewServeMux()
	mux.Handle("/", page)
	for _, path := range []string{"/ready", "/live", "/metrics"} {
		mux.Handle(path, probes)
	}
	// These connections count in the process's budget, which leaves descriptors for the sockets and the renewal.
	g.Go("-admin", (&unixsocket.Server{Listener: l, Handler: program.Local(mux), Logger: log}).Run)
	return nil
}
