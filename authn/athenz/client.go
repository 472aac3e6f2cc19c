package athenz

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/pki"
)

// Identity is what a pod is given by the agent of its node.
type Identity struct {
	// Credential is the certificate with its key. If the certificate has a SPIFFE ID, its PEM makes an X.509-SVID, too.
	Credential *pki.Credential

	// Roots are those of the certificates that ZTS issues.
	Roots []*x509.Certificate

	token func() string // a func, because no printer shows what it holds; nil for none
}

// ServiceToken returns the service token that came with the certificate; empty if none did. It is a secret.
func (i *Identity) ServiceToken() string {
	if i.token == nil {
		return ""
	}
	return i.token()
}

// String names the certificate, and no secret.
func (i *Identity) String() string {
	if i == nil || i.Credential == nil {
		return "athenz.Identity()"
	}
	return "athenz.Identity(" + i.Credential.Leaf().Subject.CommonName + " until " + token.Stamp(i.Credential.NotAfter()) + ")"
}

// GoString is String: the verb %#v must not walk to the key and the token.
func (i *Identity) GoString() string { return i.String() }

// LogValue is String as a log value.
func (i *Identity) LogValue() slog.Value { return slog.StringValue(i.String()) }

// AgentClient asks the agent of a node for the identity of this pod. It is safe for concurrent use, and asks for one thing
// at a time: two that refresh the same certificate would get in each other's way.
type AgentClient struct {
	handleFile string
	client     http.Client
	turn       chan struct{}
}

// NewAgentClient returns a client of the agent that serves on a Unix socket, such as /identity/connect/agent.sock, for the
// pod whose handle is in a file, such as /identity/id. It connects to nothing and reads nothing.
func NewAgentClient(socket, handleFile string) (*AgentClient, error) {
	if socket == "" || handleFile == "" {
		return nil, errors.New("athenz: new agent client: the path of the socket or of the file with the handle is empty")
	}
	t := token.BaseTransport(socket)
	t.DisableKeepAlives = true // it is asked once in an hour
	t.ForceAttemptHTTP2 = false
	return &AgentClient{handleFile, http.Client{Transport: t}, make(chan struct{}, 1)}, nil
}

// Init returns the first identity of the pod. The agent gives it once.
func (c *AgentClient) Init(ctx context.Context) (*Identity, error) {
	i, err := c.ask(ctx, "init", nil)
	if err != nil {
		return nil, fmt.Errorf("athenz: init: %w", err)
	}
	return i, nil
}

// Refresh returns the identity that follows current, whose key can be exported. It is used from then on, and current no
// more: the agent refuses what is older than the last two. Keep the new one safe before the old one is forgotten.
func (c *AgentClient) Refresh(ctx context.Context, current *pki.Credential) (*Identity, error) {
	if current == nil {
		return nil, errors.New("athenz: refresh: there is no current identity: use Init")
	}
	certs, key, err := current.MarshalPEM()
	var i *Identity
	if err == nil {
		i, err = c.ask(ctx, "refresh", heldIdentity{Key: key, Cert: certs}, string(key), base64.StdEncoding.EncodeToString(key))
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: refresh: %w", err)
	}
	return i, nil
}

func (c *AgentClient) ask(ctx context.Context, what string, in any, secrets ...string) (*Identity, error) {
	data, err := files.Read(c.handleFile, 4<<10)
	if err != nil {
		return nil, fmt.Errorf("handle of the volume: %w", err)
	}
	handle := strings.TrimSpace(string(data))
	if !isHandle(handle) {
		return nil, fmt.Errorf("handle of the volume: the file %q has none, which is 43 letters of base64 for URLs", c.handleFile)
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var given givenIdentity
	if err := post(ctx, &c.client, "http://agent/v1/"+what+"/"+handle, in, &given, append(secrets, handle)...); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: this user may not connect to the agent", err)
		}
		return nil, err
	}
	i := &Identity{token: func() string { return given.Token }}
	if i.Credential, err = pki.ParseCredentialPEM(given.Cert, given.Key); err != nil {
		return nil, fmt.Errorf("the answer of the agent: %w", err)
	}
	if !time.Now().Before(i.Credential.NotAfter()) {
		return nil, errors.New("the answer of the agent: the certificate has expired")
	}
	if len(given.CA) > 0 {
		if i.Roots, err = pki.ParseCertificatesPEM(given.CA); err != nil {
			return nil, fmt.Errorf("the answer of the agent: roots: %w", err)
		}
	}
	return i, nil
}
