package kube

import (
	"context"
	"io/fs"
	"net"
)

// Machine is what a process is told about its cluster.
type Machine struct {
	Env   map[string]string
	Files fs.FS
	Dial  func(ctx context.Context, network, addr string) (net.Conn, error)
}

func (m Machine) environment() environment {
	return environment{func(name string) string { return m.Env[name] }, m.Files, m.Dial}
}

// New is the function of the same name, on another machine.
func (m Machine) New(o Options) (*Client, error) { return newClient(o, m.environment()) }

// Namespace is the function of the same name, on another machine.
func (m Machine) Namespace() (string, error) { return m.environment().namespace() }

// Events reads a stream of events.
var Events = events

// ParseStatus reads a Status object that answers a request with the given body and token.
func ParseStatus(code int, data []byte, body, token string) *StatusError {
	e := &StatusError{Code: code}
	e.fill(data, &exchange{body: []byte(body), token: token})
	return e
}

// The limits.
const (
	MaxAnswer  = maxAnswer
	AccountDir = accountDir
)
