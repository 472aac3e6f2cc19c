package main

import (
	"context"
	_ "embed"
	"strings"
	"sync/atomic"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// envoyBootstrap configures a real Envoy, with SOCKET in place of the path: a listener that requires client
// certificates and takes all secrets for that from the socket.
//
//go:embed envoy.yaml
var envoyBootstrap string

// startSDS serves the secrets of w on a Unix socket and takes them from there, as Envoy would. It returns a counter
// of the secrets taken.
func startSDS(g *group, n *narrator, w *workload, socket string) (updates *atomic.Int64, err error) {
	handler, err := sds.NewHandler(w.manager, nil)
	if err != nil {
		return nil, err
	}
	server := &unixsocket.Server{Path: socket, Handler: handler}
	if err := server.Listen(); err != nil {
		return nil, err
	}
	g.run("SDS server", server.Run)
	n.say(event{Who: "sds", What: "listening", Detail: socket})

	updates = new(atomic.Int64)
	g.run("SDS client", func(ctx context.Context) error {
		client := sds.UnixClient(socket)
		defer client.CloseIdleConnections()
		for secret, err := range sds.NewClient(client, "http://localhost").Watch(ctx, "default", "ROOTCA") {
			if err != nil {
				n.say(event{Who: "sds", What: "stream broken, tried again", Detail: err.Error()})
				continue
			}
			updates.Add(1)
			n.say(event{Who: "sds", What: "served " + secret.Name(), Serial: serials(secret)})
		}
		return nil
	})
	return updates, nil
}

// serials lists the certificates in a secret: the leaf, or the roots.
func serials(s *pki.Secret) string {
	pem, _, pair := s.KeyPair()
	if !pair {
		pem, _ = s.Roots()
	}
	certs, err := pki.ParseCertificatesPEM(pem)
	if err != nil {
		return err.Error()
	}
	var list []string
	for _, c := range certs {
		list = append(list, short(c))
	}
	return strings.Join(list, " and ")
}
