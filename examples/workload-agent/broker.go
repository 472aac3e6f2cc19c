package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// checkBroker returns what is wrong with -broker and -broker-id.
func (o *options) checkBroker() error {
	path, unix := strings.CutPrefix(o.broker, "unix://")
	switch {
	case (o.broker == "") != o.brokerID.IsZero():
		return program.Misused("-broker and -broker-id go together")
	case o.broker != "" && !(unix && filepath.IsAbs(path)) && !strings.HasPrefix(o.broker, "tcp://"):
		return program.Misused("-broker: want unix:///PATH or tcp://HOST:PORT, not %.64q", o.broker)
	}
	return nil
}

// brokers listens for brokers at -broker, and returns the parts that serve them; none without -broker.
func (o *options) brokers(agent *workloadagent.Agent, out io.Writer) (parts []func(context.Context) error, err error) {
	handler, own := agent.Broker()
	if handler == nil {
		return nil, nil
	}
	governor := new(spiffetls.Governor)
	endpoint, err := spiffetls.New(spiffetls.Config{Self: self{own}, Peers: self{own}, Allow: spiffe.AllowAnyPeer(),
		Algorithms: o.algorithms, Governor: governor, Logger: o.log}) // the handler knows which peers are brokers
	if err != nil {
		return nil, err
	}
	server := &unixsocket.Server{DirMode: 0o755, SocketMode: 0o660, Handler: handler, Serve: endpoint.Serve,
		Logger: o.log}
	at := o.broker
	if address, tcp := strings.CutPrefix(o.broker, "tcp://"); tcp {
		if server.Listener, err = net.Listen("tcp", address); err == nil {
			at = "tcp://" + server.Listener.Addr().String()
		}
	} else {
		server.Path = strings.TrimPrefix(o.broker, "unix://")
	}
	if err == nil {
		err = server.Listen()
	}
	if err != nil {
		return nil, fmt.Errorf("-broker: %w", err)
	}
	fmt.Fprintf(out, "broker: SPIFFE_BROKER_SOCKET=%s\n", at)
	return []func(context.Context) error{governor.Run, server.Run}, nil
}

// self is the agent's own identity with its trust bundles.
type self struct{ workloadserver.Provider }

// SVID implements [spiffe.SVIDSource].
func (s self) SVID() (*spiffe.SVID, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle implements [spiffe.BundleSource].
func (s self) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.Bundle(td)
}
