package sidecar

import (
	"context"
	"log/slog"

	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/pki"
)

// Agent is a client of the agent.
type Agent = agent

// NewWith is New with another agent, another place for the identity, and one to begin with.
func NewWith(cfg Config, from Agent, keep func(context.Context, *Identity) error, first *Identity) (*Sidecar, error) {
	return newSidecar(cfg, from, keep, first)
}

// StartWith is Start for a Sidecar of NewWith.
func StartWith(ctx context.Context, cfg Config, from Agent, keep func(context.Context, *Identity) error, first *Identity) (*Sidecar, error) {
	s, err := newSidecar(cfg, from, keep, first)
	if err != nil {
		return nil, err
	}
	return start(ctx, s)
}

// IdentityOf returns an Identity.
func IdentityOf(c *pki.Credential) *Identity { return newIdentity(c, nil, nil) }

// IdentityFrom returns that of an answer.
func IdentityFrom(a *agentapi.Answer) *Identity { return newIdentity(a.Credential, a.Roots, a.Token) }

// Check is check.
func (f Files) Check() error { return f.check() }

// Write writes an identity into the files.
func (f Files) Write(ctx context.Context, i *Identity, log *slog.Logger) error {
	return store{f, log}.write(ctx, i)
}

// Read reads an identity from the files.
func (f Files) Read(log *slog.Logger) (*Identity, error) { return store{f, log}.read() }
