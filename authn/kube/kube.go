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
// Answers are not trusted: the user name must be that of a service account, in four parts with names that
// Kubernetes allows, and the groups must agree.
//
// A review ends after ten seconds at the latest, unless an option says otherwise. No error contains a token.
//
// # Limits
//
// Before the review of its token a caller has proven nothing, so the work that it can cause is bounded: at most 64
// reviews at a time and 500 in a second ([ReviewerOptions]). One peer has at most half of these in a second, and 256 running or
// waiting. A peer is the address of a TLS connection, or a user of this machine. After 64 refused tokens a peer
// gets one review a second; its other tokens are refused without a review, as is every token for a second after it was
// refused. A request that is given up during its review counts as refused. Good tokens do not count, so an address that
// stands for many callers is not held back unless one of them sends bad tokens all the time. Behind a proxy that ends TLS
// only the total limits apply, because all requests have the address of the proxy.
//
// A token is refused without a review if its own claims, which are not proven, rule it out: it ended more than 5 minutes ago,
// it is for other audiences, or it has another issuer than the cluster ([ReviewerOptions].Issuers). A token without these
// claims, such as one from a Secret, is reviewed, and so is one that is no JWT, because a webhook of the API server may know it.
//
// A request that a limit refuses gets an error that wraps [ErrReviewFailed] and has a method Retryable, which says when to
// come back.
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
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// Errors of [Reviewer.Review] to test for with [errors.Is]. Each of its errors wraps exactly one.
var (
	// ErrNotAuthenticated says that the API server does not know the token, or that the token was not
	// issued for this server.
	ErrNotAuthenticated = errors.New("token not authenticated")

	// ErrInvalidToken says that the API server found the token invalid, such as expired, or that the
	// token is not that of a service account.
	ErrInvalidToken = errors.New("invalid token")

	// ErrReviewFailed says that nothing is known about the token: the API server did not answer, or
	// does not allow this server to ask.
	ErrReviewFailed = errors.New("token review failed")
)

const (
	defaultTimeout = 10 * time.Second
	maxCacheFor    = 10 * time.Second
	maxToken       = jws.MaxSize // bytes

	clockLeeway = 5 * time.Minute // that our clock may differ from that of the API server

	// The limits on reviews, and on what a NodeAuthorizer reads.
	defaultConcurrent = 64
	defaultPerSecond  = 500
	maxWaiting        = 1000
	maxPerPeer        = 256         // of one peer, in progress or waiting
	maxRefused        = 50          // of one peer at once, and then
	refusedPerSecond  = 1           // of them
	rememberRefused   = time.Second // so long a token that was refused is refused without a review
	busyFor           = time.Second // until a caller should come back, where that is not known
)

// ReviewerOptions configure a [Reviewer]. The zero value is for a program in a pod, which asks the
// API server of its own cluster.
type ReviewerOptions struct {
	// APIServer is the URL of the API server, https or, on loopback, http. Empty means that of the
	// cluster that this process runs in.
	APIServer string

	// HTTPClient authenticates this program to the API server. Nil means as the service account of this
	// process, whose token and CA certificate are read again when they rotate.
	HTTPClient *http.Client

	// Timeout is how long one review may take, with all its requests; 0 means 10 seconds.
	Timeout time.Duration

	// CacheFor is how long a good answer counts for the same token and audiences, at most 10 seconds
	// and never beyond the expiry of the token; 0 means that every request is a review. A cache lets a
	// token outlive its pod. It is for servers that judge many requests of the same callers; a workload
	// that asks for a certificate a few times a day gains nothing.
	CacheFor time.Duration

	// MaxConcurrent is how many reviews there are at the same time; 0 means 64. Up to 1,000 requests wait for their turn.
	MaxConcurrent int

	// MaxPerSecond is how many reviews begin in a second, after up to two seconds' worth of them at once; 0 means 500. One
	// peer may have half of them.
	MaxPerSecond int

	// Issuers are the issuers of the cluster's tokens, the API server's --service-account-issuer: all of them, and
	// "kubernetes/serviceaccount" if tokens in Secrets are in use. A token that names another one is refused without a
	// review. Nil means that every issuer is asked about.
	Issuers []string

	// AnyAudience asks again without audiences when the API server refuses a token for its audiences,
	// and accepts a token that is good then. It is for clusters whose pods have no tokens for this
	// server, as Linkerd allows. Every token for the API server is then good for this server too.
	AnyAudience bool
}

// Reviewer asks the API server of one cluster about tokens. It is safe for concurrent use.
type Reviewer struct {
	api         *k8s.Client
	timeout     time.Duration
	anyAudience bool
	issuers     []string
	cache       *cache // nil for none
	refused     *cache
	limits      limits
}

// NewReviewer returns a Reviewer. It opens no file and sends nothing; see [Reviewer.Check]. The options
// may be nil.
func NewReviewer(opts *ReviewerOptions) (*Reviewer, error) {
	var o ReviewerOptions
	if opts != nil {
		o = *opts
	}
	switch {
	case o.Timeout < 0:
		return nil, fmt.Errorf("authn/kube: new reviewer: the timeout is %v", o.Timeout)
	case o.MaxConcurrent < 0 || o.MaxPerSecond < 0:
		return nil, errors.New("authn/kube: new reviewer: MaxConcurrent or MaxPerSecond is negative")
	case o.CacheFor < 0 || o.CacheFor > maxCacheFor:
		return nil, fmt.Errorf("authn/kube: new reviewer: CacheFor is %v, the limit is %v", o.CacheFor, maxCacheFor)
	}
	api, err := k8s.New(k8s.Options{URL: o.APIServer, Client: o.HTTPClient})
	if err != nil {
		return nil, fmt.Errorf("authn/kube: new reviewer: %w", err)
	}
	r := &Reviewer{
		api:         api,
		timeout:     cmp.Or(o.Timeout, defaultTimeout),
		anyAudience: o.AnyAudience,
		issuers:     slices.Clone(o.Issuers),
		refused:     newCache(rememberRefused),
		limits:      newLimits(cmp.Or(o.MaxConcurrent, defaultConcurrent), cmp.Or(o.MaxPerSecond, defaultPerSecond)),
	}
	if o.CacheFor > 0 {
		r.cache = newCache(o.CacheFor)
	}
	return r, nil
}

// Close closes the connections to the API server that the Reviewer has made; those of ReviewerOptions.HTTPClient are up to its
// owner. A Reviewer may be used after it. The error is always nil.
func (r *Reviewer) Close() error { return r.api.Close() }

// Account is the service account that a token belongs to, as the API server says.
type Account struct {
	Namespace      string // an RFC 1123 label
	ServiceAccount string // an RFC 1123 subdomain: it may have dots
	UID            string // of the service account

	// The pod that the token is bound to, and its node. Empty if the token is not bound to a pod, or
	// the API server does not say.
	PodName, PodUID, NodeName string

	// NotAfter is when the token expires; zero if it does not say.
	NotAfter time.Time
}

// Review asks the API server for the account of a token, which must be good for one of the audiences; at least one is
// required. A line break at the end of the token, as in a file, is removed. The error wraps [ErrNotAuthenticated],
// [ErrInvalidToken] or [ErrReviewFailed], and with the last one the cause, such as that of ctx's end. The caller may change
// the Account.
func (r *Reviewer) Review(ctx context.Context, token string, audiences []string) (*Account, error) {
	a, err := r.review(ctx, strings.TrimRight(token, "\r\n"), audiences)
	if err != nil {
		return nil, fmt.Errorf("authn/kube: token review: %w", err)
	}
	return a, nil
}

func (r *Reviewer) review(ctx context.Context, token string, audiences []string) (*Account, error) {
	switch {
	case len(audiences) == 0 || slices.Contains(audiences, ""):
		return nil, fmt.Errorf("%w: no audience, or an empty one: every token of the cluster would be accepted", ErrReviewFailed)
	case token == "":
		return nil, fmt.Errorf("%w: it is empty", ErrInvalidToken)
	case len(token) > maxToken:
		return nil, fmt.Errorf("%w: it has %d bytes, the limit is %d", ErrInvalidToken, len(token), maxToken)
	case strings.ContainsFunc(token, func(c rune) bool { return c <= ' ' || c > '~' }):
		return nil, fmt.Errorf("%w: it is not one word of printable ASCII", ErrInvalidToken)
	}
	key := cacheKey(token, audiences)
	if a, err, ok := r.cache.get(key); ok {
		return a, err
	}
	c, _ := jws.ReadClaims(token)
	if err := r.ruleOut(c, audiences); err != nil {
		return nil, err
	}
	if a, err, ok := r.refused.get(key); ok {
		return a, err
	}
	caller := ctx
	ctx, cancel := limited(ctx, r.timeout)
	defer cancel()
	a, err := r.limits.do(ctx, caller, func() (*Account, error) { return r.judge(ctx, token, audiences) })
	switch {
	case err == nil:
		a.NotAfter = c.Expires
		r.cache.put(key, *a, nil, a.NotAfter)
	case !errors.Is(err, ErrReviewFailed):
		r.refused.put(key, Account{}, err, time.Now().Add(rememberRefused))
	}
	return a, err
}

// judge asks the API server about the token, which names none of the audiences that it must not name.
func (r *Reviewer) judge(ctx context.Context, token string, audiences []string) (*Account, error) {
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

// ruleOut refuses a token by its unproven claims if the API server would refuse it, too, or could not see its holder. The API server judges claims that
// cannot be read, and tokens that are no JWT, because a webhook of it may know them.
func (r *Reviewer) ruleOut(c jws.Claims, audiences []string) error {
	switch {
	case c.Bound:
		return fmt.Errorf(`%w: "cnf" binds it to a key, and a review does not tell whether its sender has that`, ErrInvalidToken)
	case !c.Expires.IsZero() && time.Now().Round(0).After(c.Expires.Add(clockLeeway)):
		return fmt.Errorf("%w: it has expired: it ended at %s", ErrInvalidToken, c.Expires.UTC().Format(time.RFC3339))
	case len(c.Audience) > 0 && !r.anyAudience && !slices.ContainsFunc(c.Audience, func(a string) bool { return slices.Contains(audiences, a) }):
		return fmt.Errorf("%w: it is for the audiences %.256q, and not for one of %.256q", ErrInvalidToken, c.Audience, audiences)
	case c.Issuer != "" && r.issuers != nil && !slices.Contains(r.issuers, c.Issuer):
		return fmt.Errorf("%w: its issuer %.256q is not one of %.256q", ErrInvalidToken, c.Issuer, r.issuers)
	}
	return nil
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

// maxValues is how many values the answer to a review may have. Of a user in many groups it has hundreds.
const maxValues = 10_000

// reviewed is an answer. Its number of values is bounded, because a million values of a byte or two, which fit into 4 MiB,
// would take many times that in memory.
type reviewed struct{ tokenReview }

// UnmarshalJSON implements [json.Unmarshaler].
func (a *reviewed) UnmarshalJSON(b []byte) error {
	if n := bytes.Count(b, []byte{','}); n > maxValues {
		return fmt.Errorf("it has more than %d values", maxValues)
	}
	return json.Unmarshal(b, &a.tokenReview)
}

// ask asks the API server about the token.
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

const reviewRemedy = "bind the ClusterRole system:auth-delegator, or one that may create tokenreviews in the group authentication.k8s.io, to the service account of this program"

// Check asks the API server whether this program may ask for reviews, so that a program finds out when it
// starts and not from its first caller. If not, the error says which role to bind to which account.
func (r *Reviewer) Check(ctx context.Context) error {
	err := checkAccess(ctx, r.api, r.timeout, reviewRemedy,
		k8s.Access{Group: "authentication.k8s.io", Version: "v1", Resource: "tokenreviews", Verb: "create"})
	if err != nil {
		return fmt.Errorf("authn/kube: %w", err)
	}
	return nil
}
