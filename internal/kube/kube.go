// Package kube is a small client for a Kubernetes API server: JSON over net/http. It has no types for objects
// other than [Pod]: callers bring their own structs.
//
// [New] makes a [Client]; [Path] builds the paths that it takes. A refusal by the server is a
// [*StatusError].
//
// # What it does not do
//
// It does not retry: callers decide, with the help of [StatusError.RetryAfter] and [MayHaveLanded]. It reads no
// kubeconfig: a program outside a cluster passes the URL and an http.Client that authenticates itself.
package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

const (
	maxAnswer      = 4 << 20          // bytes of an answer, and of one event of a watch
	requestTimeout = 10 * time.Second // unless the context has a deadline
)

// ErrTooLarge means that an answer was larger than 4 MiB. Lists can be read in pages, with limit.
var ErrTooLarge = errors.New("the answer is larger")

// Options select the API server and its client. The zero value is for a process in a pod: the API server of its
// cluster, with the token of its service account.
type Options struct {
	// URL is the https URL of the API server, with a path if the API is below one. Unencrypted http is for loopback
	// addresses, and needs a Client. Empty means the cluster that this process runs in, according to
	// KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT.
	URL string

	// Client sends the requests and authenticates them; it is copied. Redirects are not followed, and its Timeout
	// does not apply to watches. Nil means a client for the service account of this process, whose files are read
	// again for each request. When ca.crt changes, the next request closes the connections verified with the previous
	// one, and aborts their requests. Such a client uses no proxy.
	Client *http.Client

	// PostQuantum allows a Client made from the service account only the key exchange X25519MLKEM768.
	PostQuantum bool

	// MaxAnswer is the maximum size, in bytes, of an answer that is not an event; 0 means 4 MiB. A kubelet answers
	// with all pods of its node.
	MaxAnswer int
}

// Client is a client of one API server, made by [New]. It is safe for concurrent use.
type Client struct {
	redacted
	base    *url.URL
	http    *http.Client
	watch   *http.Client     // the same without a Timeout
	account *serviceAccount  // nil if the caller's http.Client authenticates itself
	conns   *conns.Transport // of the account
	limit   int              // of an answer
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// New checks the options. It opens no file and sends nothing. If options need a cluster and the process is not in
// one, the error says so.
func New(o Options) (*Client, error) { return newClient(o, process()) }

func newClient(o Options, env environment) (*Client, error) {
	raw := o.URL
	if raw == "" {
		var err error
		if raw, err = env.serverURL(); err != nil {
			return nil, fmt.Errorf("kube: %w", err)
		}
	}
	base, err := parseBase(raw, o.Client != nil)
	if err != nil {
		return nil, fmt.Errorf("kube: API server %q: %w", display(raw), err)
	}
	c := &Client{redacted: redact.New("kube.Client(" + base.String() + ")"), base: base,
		limit: cmp.Or(o.MaxAnswer, maxAnswer)}
	hc := http.Client{}
	if o.Client != nil {
		hc = *o.Client
	} else {
		c.account = &serviceAccount{root: env.files, postQuantum: o.PostQuantum}
		c.conns = conns.NewTransport(env.dial, c.account.transport)
		hc.Transport = c.conns
	}
	// A redirect would take the request, and the credentials that a transport adds, to another host.
	hc.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.http = &hc
	watch := hc
	watch.Timeout = 0
	c.watch = &watch
	return c, nil
}

func parseBase(raw string, ownClient bool) (*url.URL, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return nil, errors.New("not a URL")
	case u.User != nil:
		return nil, errors.New("a URL with a user or a password: let the http.Client authenticate itself")
	case u.Opaque != "" || u.Hostname() == "":
		return nil, errors.New("a URL without a host")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, errors.New("a URL with a query or a fragment")
	case u.Scheme == "http" && !ownClient:
		return nil, errors.New("the token of the service account is not sent without TLS: use https, or give an " +
			"http.Client")
	case u.Scheme == "http" && !loopback(u.Hostname()):
		return nil, errors.New("http is for loopback addresses: use https")
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, errors.New("want an https URL")
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host, Path: strings.TrimRight(u.Path, "/")}, nil
}

// display keeps a password in a URL out of an error.
func display(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "…"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

func loopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

// Path joins and escapes the segments of a path, such as Path("api", "v1", "namespaces", ns, "secrets"). A request
// that uses the path refuses an empty segment, "." and "..".
func Path(segments ...string) string {
	var b strings.Builder
	for _, s := range segments {
		b.WriteByte('/')
		b.WriteString(url.PathEscape(s))
	}
	return b.String()
}

// ValidName reports whether s can be the name of an object: an RFC 1123 subdomain of at most 253
// bytes, in lower case.
func ValidName(s string) bool {
	for label := range strings.SplitSeq(s, ".") {
		if !plainLabel(label) {
			return false
		}
	}
	return len(s) <= 253
}

// ValidLabel reports whether s can be the name of a namespace: an RFC 1123 label of at most 63 bytes,
// in lower case.
func ValidLabel(s string) bool { return len(s) <= 63 && plainLabel(s) }

func plainLabel(s string) bool {
	for i := range len(s) {
		c := s[i]
		inner := i > 0 && i < len(s)-1
		if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' && inner) {
			return false
		}
	}
	return s != ""
}

// Get reads the object or the list at path into out, a pointer for encoding/json. The query may be nil. A list is
// read like any other object; a watch starts from its metadata.resourceVersion.
//
// As with every method, the path begins with a slash and is escaped, see [Path]; a context without a deadline means
// ten seconds; an answer of more than 4 MiB is an error. A refusal by the server is a [*StatusError]: see [NotFound]
// and its siblings.
func (c *Client) Get(ctx context.Context, path string, query url.Values, out any) error {
	return c.do(ctx, http.MethodGet, path, query, nil, out)
}

// Create posts in, encoded with encoding/json, to the collection or subresource at path, and reads the answer into
// out unless that is nil. See [MayHaveLanded] for errors.
func (c *Client) Create(ctx context.Context, path string, in, out any) error {
	return c.do(ctx, http.MethodPost, path, nil, in, out)
}

// Update replaces the object or the subresource at path with in, and reads the answer into out unless that is nil. If
// in has a metadata.resourceVersion and the object has changed since, [Conflict] holds for the error; without one,
// the last write wins. See [MayHaveLanded] for errors.
func (c *Client) Update(ctx context.Context, path string, in, out any) error {
	return c.do(ctx, http.MethodPut, path, nil, in, out)
}

// Patch sends in as a JSON merge patch (RFC 7396) for the object at path: members of in are changed, others stay. See
// [MayHaveLanded] for errors.
func (c *Client) Patch(ctx context.Context, path string, in any) error {
	return c.do(ctx, http.MethodPatch, path, nil, in, nil)
}

// Delete removes the object at path. See [MayHaveLanded] for errors.
func (c *Client) Delete(ctx context.Context, path string) error {
	return c.do(ctx, http.MethodDelete, path, nil, nil, nil)
}

// ObjectMeta has the metadata fields that programs use most. A program that updates an object needs the other fields,
// too.
type ObjectMeta struct {
	Name              string            `json:"name,omitempty"`
	Namespace         string            `json:"namespace,omitempty"`
	UID               string            `json:"uid,omitempty"`
	ResourceVersion   string            `json:"resourceVersion,omitempty"`
	CreationTimestamp *time.Time        `json:"creationTimestamp,omitempty"`
	DeletionTimestamp *time.Time        `json:"deletionTimestamp,omitempty"`
	Labels            map[string]string `json:"labels,omitempty"`
	Annotations       map[string]string `json:"annotations,omitempty"`
}

// Pod is the part of a pod that this library reads.
type Pod struct {
	Metadata ObjectMeta `json:"metadata"`
	Spec     struct {
		ServiceAccountName string `json:"serviceAccountName"`
		NodeName           string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		Phase  string `json:"phase"`
		PodIP  string `json:"podIP"`
		PodIPs []struct {
			IP string `json:"ip"`
		} `json:"podIPs"`
	} `json:"status"`
}

// Pod reads a pod, and checks that the answer is about it.
func (c *Client) Pod(ctx context.Context, namespace, name string) (p Pod, err error) {
	err = c.Get(ctx, Path("api", "v1", "namespaces", namespace, "pods", name), nil, &p)
	if err == nil && (p.Metadata.Name != name || p.Metadata.Namespace != namespace) {
		err = errors.New("the API server answered with another object")
	}
	return p, err
}

// PodEnded returns why a pod in a phase must no longer be served, or "" if it may be.
func PodEnded(phase string, deleting bool) string {
	switch {
	case phase == "Succeeded" || phase == "Failed":
		return "it has ended: its phase is " + phase
	case deleting:
		return "it is being deleted"
	}
	return ""
}

// Close closes the connections that the Client has made, which ends their requests. The owner of an http.Client in
// the Options closes that client's connections. Later requests make a new connection. The error is always nil.
func (c *Client) Close() error {
	c.conns.Close()
	return nil
}

// exchange is one request, with the data for its errors.
type exchange struct {
	method, path string
	body         []byte // that is sent
	token        string // that is sent
}

func (c *Client) do(ctx context.Context, method, path string, query url.Values, in, out any) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, requestTimeout)
		defer cancel()
	}
	x := &exchange{method: method, path: path}
	if in != nil {
		var err error
		if x.body, err = json.Marshal(in); err != nil {
			return x.fail(false, fmt.Errorf("encode the %T: %w", in, err))
		}
	}
	response, err := c.send(ctx, c.http, x, query)
	if err != nil {
		return err
	}
	defer response.Body.Close() // the answer is read or given up
	data, err := io.ReadAll(io.LimitReader(response.Body, int64(c.limit)+1))
	switch {
	case err != nil:
		return x.fail(true, fmt.Errorf("read the answer: %w", x.transportError(response.Request.Context(), err)))
	case len(data) > c.limit:
		return x.fail(true, fmt.Errorf("%w than %d MiB", ErrTooLarge, c.limit>>20))
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil {
		return x.fail(true, fmt.Errorf("the answer is not the JSON of a %T: %s", out, describe(err)))
	}
	return nil
}

// send returns the successful answer to a request; the caller closes the body.
func (c *Client) send(ctx context.Context, hc *http.Client, x *exchange, query url.Values) (*http.Response, error) {
	request, err := c.request(ctx, x, query)
	if err != nil {
		return nil, x.fail(false, err)
	}
	response, err := hc.Do(request)
	if err != nil {
		return nil, x.fail(!neverSent(err), x.transportError(ctx, err))
	}
	switch {
	case response.StatusCode/100 != 2:
		err = x.refused(response)
	case !isJSON(response.Header):
		err = x.fail(true, fmt.Errorf("the answer is not application/json: is %s a Kubernetes API server?", c.base))
	default:
		return response, nil
	}
	_ = response.Body.Close() // the rest is not read
	return nil, err
}

// request makes a request, with the token of the service account if there is one.
func (c *Client) request(ctx context.Context, x *exchange, query url.Values) (*http.Request, error) {
	target, err := c.target(x.path, query)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, x.method, target, bytes.NewReader(x.body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Accept", "application/json")
	request.Header.Set("User-Agent", "svidkit")
	switch {
	case x.method == http.MethodPatch:
		request.Header.Set("Content-Type", "application/merge-patch+json")
	case x.body != nil:
		request.Header.Set("Content-Type", "application/json")
	}
	if c.account == nil {
		return request, nil
	}
	if x.token, err = c.account.token(); err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+x.token)
	if c.account.renewed() {
		c.conns.Close()
	}
	return request, nil
}

func (c *Client) target(path string, query url.Values) (string, error) {
	rest, ok := strings.CutPrefix(path, "/")
	if !ok {
		return "", errors.New("the path does not begin with a slash")
	}
	for s := range strings.SplitSeq(rest, "/") {
		plain, err := url.PathUnescape(s)
		if err != nil || plain == "" || plain == "." || plain == ".." {
			return "", fmt.Errorf("the path has the segment %q", s)
		}
	}
	u := *c.base
	joined, err := url.Parse(u.EscapedPath() + path)
	if err != nil {
		return "", errors.New("the path is not escaped")
	}
	u.Path, u.RawPath, u.RawQuery = joined.Path, joined.RawPath, query.Encode()
	return u.String(), nil
}

func (x *exchange) fail(sent bool, err error) error {
	return &requestError{method: x.method, path: x.path, sent: sent, err: err}
}

// neverSent reports whether no connection could have carried the request.
func neverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "dial" || op.Op == "proxyconnect")
}

// transportError drops the URL that net/http puts before its errors, because requestError has it, and adds why the
// context ended.
func (x *exchange) transportError(ctx context.Context, err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	err = bearer.RedactError(err, x.secrets()...)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", cause, err)
	}
	return err
}

// describe removes the data from an error of encoding/json.
func describe(err error) string {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Sprintf("byte %d: the member %q has a value that cannot be read", e.Offset, e.Field)
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Sprintf("syntax error at byte %d", e.Offset)
	}
	return "a value that cannot be read"
}

func isJSON(h http.Header) bool {
	kind, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	return err == nil && kind == "application/json"
}
