package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
)

// Login is a way to get a Vault token. The client uses the token until a third of its lease is left, then logs in
// again; if that fails, the token stays in use until its end. If Vault refuses it earlier, the client logs in again
// at once and repeats the call.
type Login struct {
	method, mount, role string
}

// KubernetesLogin logs in with the token of the Endpoint, which must belong to a Kubernetes service account, by the
// auth method kubernetes at mount; empty means "kubernetes". The method jwt takes the same request: pass its mount.
// The role is a role of the auth method.
func KubernetesLogin(mount, role string) Login { return Login{"kubernetes", mount, role} }

// CertLogin logs in with the client certificate of the Endpoint's HTTPClient, by the auth method cert at mount; empty
// means "cert". The certificate needs a common name, which an X.509-SVID seldom has: without one Vault has no name
// for the caller. name selects a certificate role; if empty, Vault tries all.
func CertLogin(mount, name string) Login { return Login{"cert", mount, name} }

func (l *Login) check(e caclient.Endpoint) error {
	hasToken := e.Token != nil || e.TokenFile != ""
	switch l.method {
	case "":
		return nil
	case "kubernetes":
		if l.role == "" || !hasToken {
			return errors.New("KubernetesLogin needs a role, " +
				"and Token or TokenFile with the token of the service account")
		}
	case "cert":
		if hasToken || e.HTTPClient == nil {
			return errors.New("CertLogin needs an HTTPClient that has a client certificate, " +
				"and neither Token nor TokenFile")
		}
	}
	if l.mount = strings.Trim(l.mount, "/"); l.mount == "" {
		l.mount = l.method
	}
	if !isPath(l.mount) || l.role != "" && !isName(l.role) {
		return errors.New("the Login has a mount that is no path, or a role that is no name")
	}
	return nil
}

const (
	longestLease = 32 * 24 * time.Hour // how long a token is used at most, whatever Vault says: its own default limit
	maxToken     = 16 << 10            // bytes
)

// session is the token of a login. Its methods are safe for concurrent use.
type session struct {
	mu          sync.Mutex
	text        sealed
	renew, ends time.Time // from renew on the client logs in again; after ends the token is not used
	flight      *flight   // the running login; nil for none
}

// sealed is a token, or empty. A function hides it from printers.
type sealed func() string

func (s sealed) get() string {
	if s == nil {
		return ""
	}
	return s()
}

// flight is a login that several calls wait for.
type flight struct {
	done  chan struct{} // closed at the end
	token sealed
	err   error
}

// token is a token to send.
type token struct {
	text string
	old  bool // from a login before this call
}

// token returns the token to send, or the reason why an expected token is missing.
func (c *CA) token(ctx context.Context) (t token, missing, err error) {
	if c.login.method == "" {
		t.text, missing, err = c.conn.Token(ctx, "sign")
		return t, missing, err
	}
	for {
		known, f, first := c.board()
		switch {
		case f == nil:
			return known, nil, nil
		case first:
			t, err = c.fly(ctx, f, known)
			return t, nil, err
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			return t, nil, fmt.Errorf("vault: sign: %w", context.Cause(ctx))
		}
		if _, told := errors.AsType[*caclient.Error](f.err); f.err == nil || told {
			return token{text: f.token.get()}, nil, f.err
		} // else another call's context ended
	}
}

// board returns the known token, and the login to wait for. If first is true, the caller makes that login. The login
// is nil if the known token is good enough.
func (c *CA) board() (known token, f *flight, first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	known = token{text: c.text.get(), old: true}
	if known.text != "" && now.Before(c.ends) && (now.Before(c.renew) || c.flight != nil) {
		return known, nil, false
	}
	if c.flight != nil {
		return known, c.flight, false
	}
	c.flight = &flight{done: make(chan struct{})}
	return known, c.flight, true
}

// fly makes the login f. If it fails, the known token stays in use while it can.
func (c *CA) fly(ctx context.Context, f *flight, known token) (token, error) {
	text, lease, err := c.logIn(ctx)
	f.token, f.err = func() string { return text }, err
	c.mu.Lock()
	c.flight = nil
	now, usable := time.Now(), false
	if f.err == nil {
		c.text, c.renew, c.ends = f.token, now.Add(lease*2/3), now.Add(lease)
	} else if usable = known.text != "" && c.text.get() == known.text && now.Before(c.ends); usable {
		c.renew = now.Add(c.ends.Sub(now) / 4)
	}
	c.mu.Unlock()
	close(f.done)
	if usable && ctx.Err() == nil {
		c.conn.Endpoint.Logger.WarnContext(ctx, "vault: the login failed; the token of the last one stays", "err",
			f.err)
		return known, nil
	}
	return token{text: f.token.get()}, f.err
}

// drop forgets a token that Vault has refused, unless a newer one has replaced it.
func (c *CA) drop(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.text.get() == text {
		c.text = nil
	}
}

// loginAnswer is the answer of auth/MOUNT/login.
type loginAnswer struct {
	Auth struct {
		ClientToken   string `json:"client_token"`
		LeaseDuration int64  `json:"lease_duration"` // in seconds; 0 means no end
	} `json:"auth"`
}

// token returns the token and its lease.
func (a *loginAnswer) token() (string, time.Duration, error) {
	t, lease := a.Auth.ClientToken, a.Auth.LeaseDuration
	switch {
	case t == "":
		return "", 0, errors.New("the answer has no token; a login that needs a second factor is not for workloads")
	case len(t) > maxToken || !caconn.IsText(t) || strings.Contains(t, " "):
		return "", 0, errors.New("the answer has a token that cannot be sent")
	case lease < 0:
		return "", 0, errors.New("the token of the answer has ended")
	case lease == 0 || lease > int64(longestLease/time.Second):
		return t, longestLease, nil
	}
	return t, time.Duration(lease) * time.Second, nil
}

// logIn asks for a token. The error is a [*caclient.Error], unless ctx is done.
func (c *CA) logIn(ctx context.Context) (string, time.Duration, error) {
	request := caconn.Request{Op: "sign", Method: http.MethodPost, Path: "/v1/auth/" + c.login.mount + "/login"}
	if c.login.method == "kubernetes" {
		jwt, why, err := c.conn.Token(ctx, "sign")
		if err != nil {
			return "", 0, err
		}
		if jwt == "" {
			return "", 0, c.conn.Error("sign", caclient.ErrUnauthenticated,
				fmt.Errorf("log in: there is no token: %w", cmp.Or(why, errors.New("the source gave none"))))
		}
		request.Body = map[string]string{"role": c.login.role, "jwt": jwt}
		request.Secrets = []string{jwt}
	} else {
		request.Body = map[string]string{"name": c.login.role}
	}
	var answer loginAnswer
	err := c.call(ctx, request, "", &answer)
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		s, ok := errors.AsType[*caconn.Status](err)
		switch {
		case ok && (s.Code == http.StatusBadRequest || s.Code == http.StatusForbidden):
			e.Kind = caclient.ErrUnauthenticated // the methods differ in the status for a bad credential
		case ok && strings.Contains(s.Message, "missing name in alias"): // permanent, although it is a 500
			e.Kind = caclient.ErrUnauthenticated
			e.Err = fmt.Errorf("%w: the auth method cert names its callers by the common name of their certificate, "+
				"and this one has none: give it one, or log in with a token", e.Err)
		}
		e.Err = fmt.Errorf("log in: %w", e.Err)
	}
	if err != nil {
		return "", 0, err
	}
	text, lease, err := answer.token()
	if err != nil {
		return "", 0, c.conn.Error("sign", caclient.ErrBadAnswer, fmt.Errorf("log in: %w", err))
	}
	return text, lease, nil
}
