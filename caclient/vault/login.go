package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/redact"
)

const (
	longestLease = 32 * 24 * time.Hour // how long a token is used at most, whatever Vault says: its own default limit
	maxToken     = 16 << 10            // bytes
	renewTimeout = 2 * time.Second     // while there is a token that works
	renewAgain   = time.Minute         // after a failure, or for a request that the policies forbid
)

// client is what the clients of all engines have.
type client struct {
	redacted
	conn                  *caconn.Conn
	mount                 string // /v1/MOUNT
	space                 string
	loginRole, loginMount string
	certificate           bool // the login is by the client certificate of the connection
	renews                bool // a token that is no login's is renewed

	session  atomic.Pointer[session] // nil before a login or renewal, and after Vault has refused a login's token
	turn     chan struct{}           // held by the call that logs in
	renewing atomic.Bool             // a call renews
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// connect fills c. The error says which option is wrong.
func (c *client) connect(cfg caconn.Config, mount, space, loginRole, loginMount string) (err error) {
	o := cfg.Endpoint
	token := o.Token != nil || o.TokenFile != ""
	c.mount, c.space, c.loginRole, c.turn = "/v1/"+mount, strings.Trim(space, "/"), loginRole, make(chan struct{}, 1)
	c.certificate = !token && o.HTTPClient != nil
	c.loginMount = cmp.Or(strings.Trim(loginMount, "/"), map[bool]string{true: "cert"}[c.certificate], "kubernetes")
	cfg.Name = "vault"
	c.conn, err = caconn.New(cfg)
	switch {
	case err != nil:
	case !isPath(c.mount):
		err = errors.New("the Mount is not the path of an engine, such as pki or team-a/pki")
	case c.space != "" && !isPath(c.space):
		err = errors.New("the Namespace is not a path, such as team-a/prod")
	case c.loginRole != "" && !isName(c.loginRole) || !isPath(c.loginMount):
		err = errors.New("the LoginRole is not a name, or the LoginMount not a path")
	case c.loginRole == "" && loginMount != "":
		err = errors.New("LoginMount is set, and LoginRole is not")
	case c.loginRole != "" && !token && !c.certificate:
		err = errors.New("LoginRole needs Token or TokenFile, with the token of the service account, or an " +
			"HTTPClient with a client certificate")
	}
	return err
}

// do sends a request that needs a token. It logs in again, once, if Vault refuses the token of an earlier login: at
// once if Vault does not know the token, and once a minute if its policies forbid the request, as those of a new one may
// not. The error is a [*caclient.Error] with a [*caconn.Status] if there was an answer, unless ctx is done.
func (c *client) do(ctx context.Context, r caconn.Request, answer any) error {
	for again := false; ; again = true {
		token, used, missing, err := c.token(ctx, r.Op)
		if err != nil {
			return err
		}
		err = c.call(ctx, r, token, answer)
		if used != nil && !again && (errors.Is(err, caclient.ErrUnauthenticated) ||
			errors.Is(err, caclient.ErrDenied) && time.Since(used.since) > renewAgain) {
			c.session.CompareAndSwap(used, nil) // the lease may have been revoked, or Vault was restored from a backup
			continue
		}
		caconn.ExplainMissing(err, missing)
		return err
	}
}

// call sends a request with the headers of Vault. The error is a [*caclient.Error] with a [*caconn.Status], unless ctx
// is done.
func (c *client) call(ctx context.Context, r caconn.Request, token string, answer any) error {
	header := http.Header{"X-Vault-Request": {"true"}}
	maps.Copy(header, r.Header)
	r.Header = header
	if c.space != "" {
		r.Header.Set("X-Vault-Namespace", c.space+"/")
	}
	if token != "" {
		r.Header.Set("X-Vault-Token", token)
	}
	r.Secrets = append(r.Secrets, token)
	r.Message = message
	err := c.conn.Do(ctx, r, answer)
	e, told := errors.AsType[*caclient.Error](err)
	s, ok := errors.AsType[*caconn.Status](err)
	if told && ok {
		refine(e, s, r.Op != fetchBundles)
		if e.Kind == caclient.ErrUnavailable { // the kind itself
			c.conn.Reconnect() // a proxy in front may choose another server
		}
	}
	return err
}

// session is the token of a login. It never changes.
type session struct {
	token              func() string // a function hides it from printers
	since, renew, ends time.Time     // from renew on the client logs in again; after ends the token is not used
}

// token returns the token to send, or the reason why an expected token is missing. used is the session of an earlier
// call that the token is from; nil if the token is fresh.
func (c *client) token(ctx context.Context, op string) (token string, used *session, missing, err error) {
	if c.loginRole == "" {
		if token, missing, err = c.conn.Token(ctx, op); c.renews && token != "" && err == nil {
			c.keepAlive(ctx, op, token)
		}
		return token, nil, missing, err
	}
	limit := longestLease
	if used = c.session.Load(); used.usable() {
		limit = renewTimeout // then the token that there is goes on
		if time.Now().Before(used.renew) {
			return used.token(), used, nil, nil
		}
		select {
		case c.turn <- struct{}{}:
		default: // another call logs in
			return used.token(), used, nil, nil
		}
	} else {
		select {
		case c.turn <- struct{}{}:
		case <-ctx.Done():
			return "", nil, nil, fmt.Errorf("vault: %s: %w", op, context.Cause(ctx))
		}
	}
	defer func() { <-c.turn }()
	if now := c.session.Load(); now != used && now.usable() { // another call has logged in meanwhile
		return now.token(), now, nil, nil
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	text, lease, err := c.logIn(limited, op)
	now := time.Now()
	if err == nil {
		c.session.Store(&session{redact.Seal(text), now, now.Add(lease * 2 / 3), now.Add(lease)})
		return text, nil, nil, nil
	}
	if limit != renewTimeout || ctx.Err() != nil {
		return "", nil, nil, err
	}
	c.conn.Endpoint.Logger.WarnContext(ctx, "vault: the login failed; the token of the last one stays", "err", err)
	again := &session{used.token, used.since, now.Add(used.ends.Sub(now) / 4), used.ends}
	if !c.session.CompareAndSwap(used, again) {
		return "", nil, nil, err // Vault has refused the token meanwhile
	}
	return again.token(), again, nil, nil
}

// usable reports whether there is a token, and it has not ended.
func (s *session) usable() bool { return s != nil && time.Now().Before(s.ends) }

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
func (c *client) logIn(ctx context.Context, op string) (string, time.Duration, error) {
	jwt, why, err := c.conn.Token(ctx, op)
	if err != nil {
		return "", 0, err
	}
	body := map[string]string{"role": c.loginRole, "jwt": jwt}
	if c.certificate {
		body = map[string]string{"name": c.loginRole}
	} else if jwt == "" {
		return "", 0, c.conn.Error(op, caclient.ErrUnauthenticated,
			fmt.Errorf("log in: there is no token: %w", cmp.Or(why, errors.New("the source gave none"))))
	}
	request := caconn.Request{Op: op, Method: http.MethodPost, Path: "/v1/auth/" + c.loginMount + "/login",
		Body: body, Secrets: []string{jwt}}
	var answer loginAnswer
	err = c.call(ctx, request, "", &answer)
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		s, ok := errors.AsType[*caconn.Status](err)
		if ok && (s.Code == http.StatusBadRequest || s.Code == http.StatusForbidden) {
			e.Kind = caclient.ErrUnauthenticated // the methods differ in the status for a bad credential
		}
		e.Err = fmt.Errorf("log in: %w", e.Err)
		c.conn.Reconnect() // the connection may have an old certificate
	}
	text, lease, bad := answer.token()
	if err == nil && bad != nil {
		err = c.conn.Error(op, caclient.ErrBadAnswer, fmt.Errorf("log in: %w", bad))
	}
	return text, lease, err
}

// keepAlive renews a token that is no login's when a third of its life is over. One call at a time does that, shortly;
// others use the token as it is.
func (c *client) keepAlive(ctx context.Context, op, token string) {
	s := c.session.Load()
	if s != nil && s.token() == token && time.Now().Before(s.renew) || !c.renewing.CompareAndSwap(false, true) {
		return
	}
	defer c.renewing.Store(false)
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	var answer loginAnswer
	err := c.call(ctx, caconn.Request{Op: op, Method: http.MethodPost, Path: "/v1/auth/token/renew-self",
		Body: struct{}{}}, token, &answer)
	_, lease, bad := answer.token()
	if err = cmp.Or(err, bad); err != nil {
		lease = 3 * renewAgain
		if errors.Is(err, caclient.ErrInvalid) || errors.Is(err, caclient.ErrDenied) { // a token that is not renewable
			lease *= 10
		}
		c.conn.Endpoint.Logger.WarnContext(ctx, "vault: the token was not renewed; it stays in use", "err", err)
	}
	now := time.Now()
	c.session.Store(&session{redact.Seal(token), now, now.Add(lease / 3), now.Add(lease)})
}
