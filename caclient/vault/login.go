package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
)

const (
	longestLease = 32 * 24 * time.Hour // how long a token is used at most, whatever Vault says: its own default limit
	maxToken     = 16 << 10            // bytes
)

// session is the token of a login. It never changes.
type session struct {
	token       sealed
	renew, ends time.Time // from renew on the client logs in again; after ends the token is not used
}

// sealed is a token. A function hides it from printers.
type sealed func() string

func newSession(token string, renew, ends time.Time) *session {
	return &session{func() string { return token }, renew, ends}
}

// token returns the token to send, or the reason why an expected token is missing. used is the session of an earlier
// call that the token is from; nil if the token is fresh.
func (c *CA) token(ctx context.Context) (token string, used *session, missing, err error) {
	if c.loginRole == "" {
		token, missing, err = c.conn.Token(ctx, "sign")
		return token, nil, missing, err
	}
	if used = c.session.Load(); used.usable() {
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
			return "", nil, nil, fmt.Errorf("vault: sign: %w", context.Cause(ctx))
		}
	}
	defer func() { <-c.turn }()
	if now := c.session.Load(); now != used && now.usable() { // another call has logged in meanwhile
		return now.token(), now, nil, nil
	}
	text, lease, err := c.logIn(ctx)
	now := time.Now()
	if err == nil {
		c.session.Store(newSession(text, now.Add(lease*2/3), now.Add(lease)))
		return text, nil, nil, nil
	}
	if !used.usable() || ctx.Err() != nil {
		return "", nil, nil, err
	}
	c.conn.Endpoint.Logger.WarnContext(ctx, "vault: the login failed; the token of the last one stays", "err", err)
	again := newSession(used.token(), now.Add(used.ends.Sub(now)/4), used.ends)
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
func (c *CA) logIn(ctx context.Context) (string, time.Duration, error) {
	jwt, why, err := c.conn.Token(ctx, "sign")
	if err != nil {
		return "", 0, err
	}
	if jwt == "" {
		return "", 0, c.conn.Error("sign", caclient.ErrUnauthenticated,
			fmt.Errorf("log in: there is no token: %w", cmp.Or(why, errors.New("the source gave none"))))
	}
	request := caconn.Request{
		Op: "sign", Method: http.MethodPost, Path: "/v1/auth/" + c.loginMount + "/login",
		Body: map[string]string{"role": c.loginRole, "jwt": jwt}, Secrets: []string{jwt},
	}
	var answer loginAnswer
	err = c.call(ctx, request, "", &answer)
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		s, ok := errors.AsType[*caconn.Status](err)
		if ok && (s.Code == http.StatusBadRequest || s.Code == http.StatusForbidden) {
			e.Kind = caclient.ErrUnauthenticated // the methods differ in the status for a bad credential
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
