// Package kube proves callers by the tokens of their Kubernetes service accounts.
//
// A pod has a token that says which service account it runs as. A server that gets such a token asks
// the API server of the cluster whether it is good: a TokenReview. [NewReviewer] makes what asks, and
// [TokenReview] an [authn.Authenticator] for HTTP and gRPC requests with the token in their
// authorization header, as Istio's agents send it. Who gets tokens in another way calls
// [Reviewer.Review].
//
//	reviewer, err := kube.NewReviewer(nil) // of the cluster that this program runs in
//	…
//	if err := reviewer.Check(ctx); err != nil { … } // at start: may we ask?
//	who, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: td})
//
// A [NodeAuthorizer] answers another question: whether a proxy that serves all pods of its node may
// have the certificate of one of them.
//
// # What it promises
//
// A token counts only if it was made for us. Every review names audiences, and an answer that does not
// name one of them in return is no proof, as an API server that knows nothing of audiences does not.
//
// An answer is read as if it came from a stranger: the user name has to be that of a service account,
// in four parts with names that Kubernetes allows, and the groups have to agree.
//
// A review ends: after ten seconds at the latest, unless told otherwise. Tokens are in no error.
//
// # What it does not do
//
// It does not verify tokens itself: the API server also knows whether the pod and the account still
// exist. It decides nothing but what [NodeAuthorizer] is for: what a caller may have is decided from
// the [authn.Caller] by others.
package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/jws"
	k8s "github.com/svidkit/svidkit/internal/kube"
)

// The kinds of errors of [Reviewer.Review], to test for with [errors.Is]. Every error of it wraps
// exactly one of them.
var (
	// ErrNotAuthenticated says that the API server does not vouch for the token, or not to us.
	ErrNotAuthenticated = errors.New("token not authenticated")

	// ErrInvalidToken says that the API server found the token invalid, such as expired, or that it
	// is a token of somebody who is not a service account.
	ErrInvalidToken = errors.New("invalid token")

	// ErrReviewFailed says that nothing is known about the token: the API server did not answer, or
	// does not let us ask.
	ErrReviewFailed = errors.New("token review failed")
)

const (
	defaultTimeout = 10 * time.Second
	maxCacheFor    = 10 * time.Second
	maxToken       = jws.MaxSize // bytes
)

// ReviewerOptions configure a [Reviewer]. The zero value is for a program in a pod, which asks the
// API server of its own cluster.
type ReviewerOptions struct {
	// APIServer is the URL of the API server, https or, on loopback, http. Empty means that of the
	// cluster that this process runs in.
	APIServer string

	// HTTPClient authenticates us to the API server. Nil means as the service account of this
	// process, whose token and CA certificate are read anew when they rotate.
	HTTPClient *http.Client

	// Timeout is how long one review may take, with all that belongs to it; 0 means 10 seconds.
	Timeout time.Duration

	// CacheFor is how long a good answer counts for the same token and audiences, at most 10 seconds
	// and never beyond the end of the token; 0 means that every request is a review. A workload asks
	// for a certificate a few times a day, so that a cache saves little and lets a token live longer
	// than its pod; it is for programs that judge many requests of the same callers.
	CacheFor time.Duration

	// AnyAudience asks again without audiences when the API server refuses a token for its audiences,
	// and takes what is good then. It is for clusters whose pods have no tokens of their own for us,
	// as Linkerd allows: then every token that anybody sent to the API server is good here, too.
	AnyAudience bool
}

// Reviewer has tokens judged by the API server of one cluster. It is safe for concurrent use.
type Reviewer struct {
	api         *k8s.Client
	timeout     time.Duration
	anyAudience bool
	cache       *cache // nil for none
}

// NewReviewer returns a Reviewer. It opens no file and asks nothing; see [Reviewer.Check]. The options
// may be nil.
func NewReviewer(opts *ReviewerOptions) (*Reviewer, error) {
	var o ReviewerOptions
	if opts != nil {
		o = *opts
	}
	switch {
	case o.Timeout < 0:
		return nil, fmt.Errorf("authn/kube: new reviewer: the timeout is %v", o.Timeout)
	case o.CacheFor < 0 || o.CacheFor > maxCacheFor:
		return nil, fmt.Errorf("authn/kube: new reviewer: CacheFor is %v, the limit is %v", o.CacheFor, maxCacheFor)
	}
	api, err := k8s.New(k8s.Options{URL: o.APIServer, Client: o.HTTPClient})
	if err != nil {
		return nil, fmt.Errorf("authn/kube: new reviewer: %w", err)
	}
	r := &Reviewer{api: api, timeout: cmp.Or(o.Timeout, defaultTimeout), anyAudience: o.AnyAudience}
	if o.CacheFor > 0 {
		r.cache = newCache(o.CacheFor)
	}
	return r, nil
}

// Account is the service account that a token belongs to, as the API server says.
type Account struct {
	Namespace      string // an RFC 1123 label
	ServiceAccount string // an RFC 1123 subdomain: it may have dots
	UID            string // of the service account

	// The pod that the token is bound to, and its node. Empty if the token is not bound to a pod, or
	// the API server does not say.
	PodName, PodUID, NodeName string

	// NotAfter is when the token ends; zero if it does not say.
	NotAfter time.Time
}

// Review asks the API server for the account of a token, which must be good for one of the audiences;
// there must be at least one. A line break at the end of the token, as a file may have it, is cut
// off. The error wraps [ErrNotAuthenticated], [ErrInvalidToken] or [ErrReviewFailed], and with the
// last one the cause, such as that of ctx's end. The Account is the caller's.
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
		return nil, fmt.Errorf("%w: no audience, or an empty one: every token of the cluster would do", ErrReviewFailed)
	case token == "":
		return nil, fmt.Errorf("%w: it is empty", ErrInvalidToken)
	case len(token) > maxToken:
		return nil, fmt.Errorf("%w: it has %d bytes, the limit is %d", ErrInvalidToken, len(token), maxToken)
	case strings.ContainsFunc(token, func(c rune) bool { return c <= ' ' || c > '~' }):
		return nil, fmt.Errorf("%w: it is not one word of printable ASCII", ErrInvalidToken)
	}
	key := cacheKey(token, audiences)
	if a, ok := r.cache.get(key); ok {
		return a, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeout, fmt.Errorf("no answer within %v", r.timeout))
	defer cancel()
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
	a, err := s.account(token, wanted)
	if err != nil {
		return nil, err
	}
	a.NotAfter = expiry(token)
	r.cache.put(key, a)
	return a, nil
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

// ask has the API server judge the token.
func (r *Reviewer) ask(ctx context.Context, token string, audiences []string) (*status, error) {
	question := tokenReview{APIVersion: reviewVersion, Kind: reviewKind}
	question.Spec.Token, question.Spec.Audiences = token, audiences
	var answer tokenReview
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

// Check asks the API server whether we may ask for reviews, so that a program can find out when it
// starts and not from its first caller. If not, the error says what to bind to whom.
func (r *Reviewer) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeout, fmt.Errorf("no answer within %v", r.timeout))
	defer cancel()
	err := mayI(ctx, r.api, access{Group: "authentication.k8s.io", Version: "v1", Resource: "tokenreviews", Verb: "create"})
	if errors.Is(err, errMayNot) {
		return fmt.Errorf("authn/kube: %w; %s", err, reviewRemedy)
	}
	if err != nil {
		return fmt.Errorf("authn/kube: check: %w", err)
	}
	return nil
}
