// Package kube proves callers by the tokens of their Kubernetes service accounts.
//
// A pod has a token for the service account it runs as. A server that receives such a token asks the API
// server of the cluster whether it is good, by a TokenReview. [NewReviewer] makes a [Reviewer], which asks;
// [TokenReview] makes an [authn.Authenticator] for HTTP and gRPC requests with the token in their
// authorization header, as Istio's agents send it. Servers that receive tokens in another way call
// [Reviewer.Review].
//
//	reviewer, err := kube.NewReviewer(nil) // of the cluster that this program runs in
//	…
//	if err := reviewer.Check(ctx); err != nil { … } // at start: is this program allowed to ask?
//	who, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: td})
//
// A [NodeAuthorizer] decides whether a proxy that serves all pods of its node may have the certificate of
// one of them.
//
// # What it promises
//
// A token counts only if it was issued for this server. Every review names audiences, and an answer must
// confirm one of them; API servers without support for audiences confirm none.
//
// Answers are not trusted: the user name must name a service account, in four parts with names that
// Kubernetes allows, and the groups must agree.
//
// A review ends after ten seconds at the latest. No error contains a token.
//
// # Limits
//
// Before the review of its token a caller has proven nothing, so the work that it can cause is bounded. At most 64
// reviews run at a time, with 1,000 requests waiting, and at most 500 start in a second. One peer has at most half of
// these in a second, and 256 running or waiting. A peer is the address of a TLS connection, or a user of this
// machine. After 64 refused tokens a peer gets one review a second; its other tokens are refused without a review. A
// request that is given up during its review counts as refused. Good tokens do not count, so an address that stands
// for many callers is not held back unless one of them keeps sending bad tokens. Behind a proxy that terminates TLS
// all requests have the proxy's address: they are one peer, whose refused and waiting requests are not counted.
//
// A token is refused without a review if its own, unproven claims rule it out: it ended more than 5 minutes ago, or
// it is for other audiences. A token without these claims, such as a token from a Secret, is reviewed, and so is a
// token that is not a JWT, because a webhook of the API server may know it.
//
// A request that a limit refuses gets an error that wraps [ErrReviewFailed] and has a method Retryable, which
// says when to come back if that is known.
//
// # Rights
//
// The service account of the server needs the first of these rules for a [Reviewer], and the second for a
// [NodeAuthorizer], in a ClusterRole. The ClusterRole system:auth-delegator has the first one, too.
//
//	rules:
//	- {apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]}
//	- {apiGroups: [""], resources: [pods], verbs: [get, list]}
//
// # What it does not do
//
// It does not verify tokens itself: the API server also knows whether the pod and the account still
// exist. Except for [NodeAuthorizer], it does not decide what a caller may have: servers decide that from
// the [authn.Caller].
package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// Errors of [Reviewer.Review] to test for with [errors.Is]. Each of its errors wraps exactly one.
var (
	// ErrNotAuthenticated means that the API server does not know the token, or that the token was not issued for
	// this server.
	ErrNotAuthenticated = errors.New("token not authenticated")

	// ErrInvalidToken means that the API server found the token invalid, such as expired, or that the token does not
	// belong to a service account.
	ErrInvalidToken = errors.New("invalid token")

	// ErrReviewFailed means that nothing is known about the token: the API server did not answer, or does not allow
	// this server to ask.
	ErrReviewFailed = errors.New("token review failed")
)

const (
	timeout  = 10 * time.Second // of a review or a decision, with all its requests
	maxToken = jws.MaxSize      // bytes

	clockLeeway = 5 * time.Minute // allowed difference between our clock and the API server's
)

// ReviewerOptions configure a [Reviewer]. The zero value is for a program in a pod, which asks the
// API server of its own cluster.
type ReviewerOptions struct {
	// APIServer is the URL of the API server, https or, on loopback, http. If empty, it is the API server of the
	// cluster that this process runs in.
	APIServer string

	// HTTPClient authenticates this program to the API server. If nil, requests are authenticated with
	// this process's own service account; its token and CA certificate are reloaded when they rotate.
	HTTPClient *http.Client

	// AnyAudience asks again without audiences when the API server refuses a token for its audiences, and accepts a
	// token that is good then. It is for clusters whose pods have no tokens for this server, as Linkerd allows. Every
	// token for the API server is then good for this server too.
	AnyAudience bool
}

// Reviewer asks the API server of one cluster about tokens. It is safe for concurrent use, and keeps
// its connections: make one for each cluster.
type Reviewer struct {
	api         *k8s.Client
	anyAudience bool
	limits      limits
}

// NewReviewer returns a Reviewer. It opens no file and sends nothing; see [Reviewer.Check]. The options
// may be nil.
func NewReviewer(opts *ReviewerOptions) (*Reviewer, error) {
	o := *cmp.Or(opts, &ReviewerOptions{})
	api, err := k8s.New(k8s.Options{URL: o.APIServer, Client: o.HTTPClient})
	if err != nil {
		return nil, fmt.Errorf("authn/kube: new reviewer: %w", err)
	}
	return &Reviewer{api: api, anyAudience: o.AnyAudience, limits: newLimits()}, nil
}

// Review asks the API server for the account of a token, which must be good for one of the audiences; at least one is
// required. A line break at the end of the token, as in a file, is removed. The Pod has the namespace, name and UID
// of the service account, and the name, UID and node of the pod that the token is bound to, as far as the API server
// reports them; the caller may change it. The error wraps [ErrNotAuthenticated], [ErrInvalidToken] or
// [ErrReviewFailed]; with the last it also wraps the cause, such as the cause of ctx's end.
func (r *Reviewer) Review(ctx context.Context, token string, audiences []string) (*spiffe.Pod, error) {
	pod, _, err := r.review(ctx, strings.TrimRight(token, "\r\n"), audiences)
	if err != nil {
		return nil, fmt.Errorf("authn/kube: token review: %w", err)
	}
	return pod, nil
}

// review also returns when the token expires; zero if the token does not say.
func (r *Reviewer) review(ctx context.Context, token string, audiences []string) (*spiffe.Pod, time.Time, error) {
	claims, err := r.ruleOut(token, audiences)
	if err != nil {
		return nil, time.Time{}, err
	}
	caller := ctx
	ctx, cancel := limited(ctx)
	defer cancel()
	pod, err := r.limits.do(ctx, caller, func() (*spiffe.Pod, error) { return r.judge(ctx, token, audiences) })
	return pod, claims.Expires.At, err
}

// judge asks the API server about the token for the audiences, and with AnyAudience then without them.
func (r *Reviewer) judge(ctx context.Context, token string, audiences []string) (*spiffe.Pod, error) {
	s, err := r.ask(ctx, token, audiences)
	if err != nil {
		return nil, err
	}
	wanted := audiences
	if r.anyAudience && strings.Contains(s.Error, "token audiences") {
		wanted = nil
		if s, err = r.ask(ctx, token, nil); err != nil {
			return nil, err
		}
	}
	return s.account(token, wanted)
}

// ruleOut returns the unproven claims of a token. It refuses the token if they show that the API server would refuse
// it, too, or could not see its holder. The API server judges unreadable claims, and tokens that are not JWTs,
// because one of its webhooks may know them.
func (r *Reviewer) ruleOut(token string, audiences []string) (jws.Claims, error) {
	fail := func(kind error, format string, args ...any) (jws.Claims, error) {
		return jws.Claims{}, fmt.Errorf("%w: "+format, append([]any{kind}, args...)...)
	}
	switch {
	case len(audiences) == 0 || slices.Contains(audiences, ""):
		return fail(ErrReviewFailed, "no audience, or an empty one: every token of the cluster would be accepted")
	case token == "":
		return fail(ErrInvalidToken, "it is empty")
	case len(token) > maxToken:
		return fail(ErrInvalidToken, "it has %d bytes, the limit is %d", len(token), maxToken)
	case !bearer.Printable(token):
		return fail(ErrInvalidToken, "it is not one word of printable ASCII")
	}
	c, _ := jws.ReadClaims(token)
	wanted := func(a string) bool { return slices.Contains(audiences, a) }
	switch {
	case c.Bound:
		return fail(ErrInvalidToken, `"cnf" binds it to a key, and a review does not tell whether its sender has that`)
	case !c.Expires.At.IsZero() && time.Now().Round(0).After(c.Expires.At.Add(clockLeeway)):
		return fail(ErrInvalidToken, "it has expired: it ended at %s", c.Expires.At.UTC().Format(time.RFC3339))
	case len(c.Audience) > 0 && !r.anyAudience && !slices.ContainsFunc(c.Audience, wanted):
		return fail(ErrInvalidToken, "it is for the audiences %.256q, and not for one of %.256q", c.Audience,
			audiences)
	}
	return c, nil
}

// tokenReview is the document of authentication.k8s.io/v1.
type tokenReview struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Spec       struct {
		Token     string   `json:"token"`
		Audiences []string `json:"audiences,omitempty"`
	} `json:"spec"`
	Status status `json:"status,omitzero"`
}

const (
	reviewVersion = "authentication.k8s.io/v1"
	reviewKind    = "TokenReview"
)

// maxValues is how many values the answer to a review may have. That of a user in many groups has hundreds.
const maxValues = 10_000

// reviewed is an answer. Its number of values is bounded, because a million values of a byte or two, which fit
// into 4 MiB, would take many times that in memory.
type reviewed struct{ tokenReview }

// UnmarshalJSON implements [json.Unmarshaler].
func (a *reviewed) UnmarshalJSON(b []byte) error {
	if n := bytes.Count(b, []byte{','}); n > maxValues {
		return fmt.Errorf("it has more than %d values", maxValues)
	}
	return json.Unmarshal(b, &a.tokenReview)
}

func (r *Reviewer) ask(ctx context.Context, token string, audiences []string) (*status, error) {
	question := tokenReview{APIVersion: reviewVersion, Kind: reviewKind}
	question.Spec.Token, question.Spec.Audiences = token, audiences
	var answer reviewed
	err := r.api.Create(ctx, k8s.Path("apis", "authentication.k8s.io", "v1", "tokenreviews"), &question, &answer)
	switch {
	case k8s.Forbidden(err):
		return nil, fmt.Errorf("%w: %w; %s", ErrReviewFailed, err, reviewRemedy)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrReviewFailed, err)
	case answer.APIVersion != reviewVersion || answer.Kind != reviewKind:
		return nil, fmt.Errorf("%w: the answer is not a %s of %s", ErrReviewFailed, reviewKind, reviewVersion)
	}
	return &answer.Status, nil
}

const reviewRemedy = "bind the ClusterRole system:auth-delegator, or one that may create tokenreviews in the " +
	"group authentication.k8s.io, to the service account of this program"

// Check asks the API server whether this program may request reviews, so that a program finds out at its start and
// not from its first caller. If not, the error says which role to bind to which account.
func (r *Reviewer) Check(ctx context.Context) error {
	return checkAccess(ctx, r.api, reviewRemedy,
		k8s.Access{Group: "authentication.k8s.io", Version: "v1", Resource: "tokenreviews", Verb: "create"})
}
