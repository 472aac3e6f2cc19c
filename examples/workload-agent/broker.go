package main

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// brokers listens for brokers at -broker, and returns the parts that serve them; none without -broker.
func (o *options) brokers(agent *workloadagent.Agent) (parts []func(context.Context) error, err error) {
	handler, own := agent.Broker()
	if handler == nil {
		return nil, nil
	}
	governor := new(spiffetls.Governor)
	endpoint, err := spiffetls.New(spiffetls.Config{Self: self{own}, Peers: self{own}, Allow: spiffe.AllowAnyPeer(),
		Governor: governor, Logger: o.log}) // the handler knows which peers are brokers
	if err != nil {
		return nil, err
	}
	server := &unixsocket.Server{DirMode: 0o755, SocketMode: 0o660, Handler: handler, Serve: endpoint.Serve,
		Logger: o.log}
	path, unix := strings.CutPrefix(o.broker, "unix://")
	address, tcp := strings.CutPrefix(o.broker, "tcp://")
	switch {
	case unix:
		server.Path = path
	case tcp:
		server.Listener, err = net.Listen("tcp", address)
	default:
		return nil, program.Misused("-broker: want unix:///PATH or tcp://HOST:PORT, not %.64q", o.broker)
	}
	if err == nil {
		err = server.Listen()
	}
	if err != nil {
		return nil, fmt.Errorf("-broker: %w", err)
	}
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
