package agentapi

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/pki"
)

// Answer is an identity that an agent gave.
type Answer struct {
	Credential *pki.Credential
	Roots      []*x509.Certificate // of the certificates that ZTS issues
	Token      func() string       // a service token, or ""; a func, so that no printer shows it
}

// Client obtains this pod's identity from the node's agent. It is safe for concurrent use, and sends one request at a
// time, as two refreshes of the same certificate would conflict.
type Client struct {
	handleFile string
	client     http.Client
	turn       chan struct{}
}

// NewClient returns a client of the agent on a Unix socket, such as /identity/connect/agent.sock, for the pod whose
// handle is in handleFile, such as /identity/id. It connects to nothing and reads nothing yet.
func NewClient(socket, handleFile string) (*Client, error) {
	if socket == "" || handleFile == "" {
		return nil, errors.New("the path of the agent's socket or of the file with the handle is empty")
	}
	t := token.BaseTransport(socket)
	t.DisableKeepAlives = true // one request an hour
	t.ForceAttemptHTTP2 = false
	return &Client{handleFile, http.Client{Transport: t}, make(chan struct{}, 1)}, nil
}

// Init returns the first identity of the pod. The agent gives it only once.
func (c *Client) Init(ctx context.Context) (*Answer, error) {
	a, err := c.ask(ctx, "init", nil)
	if err != nil {
		return nil, fmt.Errorf("init: %w", err)
	}
	return a, nil
}

// Refresh returns the identity that follows current, whose key must be exportable. Use only the new one from then on,
// and save it before forgetting current: the agent refuses all but the last two.
func (c *Client) Refresh(ctx context.Context, current *pki.Credential) (*Answer, error) {
	certs, key, err := current.MarshalPEM()
	var a *Answer
	if err == nil {
		a, err = c.ask(ctx, "refresh", Held{Key: key, Cert: certs}, string(key),
			base64.StdEncoding.EncodeToString(key))
	}
	if err != nil {
		return nil, fmt.Errorf("refresh: %w", err)
	}
	return a, nil
}

func (c *Client) ask(ctx context.Context, what string, in any, secrets ...string) (*Answer, error) {
	data, err := files.Read(c.handleFile, 4<<10)
	if err != nil {
		return nil, fmt.Errorf("handle of the volume: %w", err)
	}
	handle := strings.TrimSpace(string(data))
	if !IsHandle(handle) {
		return nil, fmt.Errorf("handle of the volume: the file %q has none, which is 43 letters of base64 for URLs",
			c.handleFile)
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var given Given
	if err := jsonapi.Call(ctx, &c.client, http.MethodPost, "http://agent/v1/"+what+"/"+handle, in, &given,
		append(secrets, handle)...); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: this user may not connect to the agent", err)
		}
		return nil, err
	}
	a := &Answer{Token: func() string { return given.Token }}
	if a.Credential, err = pki.ParseCredentialPEM(given.Cert, given.Key); err != nil {
		return nil, fmt.Errorf("the answer of the agent: %w", err)
	}
	if !time.Now().Before(a.Credential.NotAfter()) {
		return nil, errors.New("the answer of the agent: the certificate has expired")
	}
	if len(given.CA) > 0 {
		if a.Roots, err = pki.ParseCertificatesPEM(given.CA); err != nil {
			return nil, fmt.Errorf("the answer of the agent: roots: %w", err)
		}
	}
	return a, nil
}
