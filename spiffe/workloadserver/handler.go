package workloadserver

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
	"github.com/svidkit/svidkit/spiffe/workloadserver/internal/descriptors"
)

// Handler serves the Workload API. It is safe for concurrent use. An idle stream costs one goroutine. Close ends the
// streams.
type Handler struct {
	src     Provider
	opts    Options
	grpc    *grpchttp.Handler
	done    chan struct{} // closed by stop
	stop    func()
	refresh renew.Signal
	enc     encodings
	shares  *limit.Shares[peerkey.Holder] // of requests being answered
	log     *ratelog.Log
	counts  counts
}

// NewHandler returns a handler that serves the identity and bundles of src. opts may be nil, and is copied.
func NewHandler(src Provider, opts *Options) (*Handler, error) {
	if src == nil {
		return nil, errors.New("workloadserver: new handler: the provider is nil")
	}
	h := &Handler{src: src, opts: *cmp.Or(opts, &Options{}), done: make(chan struct{})}
	if h.opts.MaxStreams < 0 || h.opts.MaxPeerStreams < 0 {
		return nil, errors.New("workloadserver: new handler: MaxStreams or MaxPeerStreams is negative; 0 means " +
			"10,000 and 1,000")
	}
	h.stop = sync.OnceFunc(func() { close(h.done) })
	h.shares = limit.NewShares[peerkey.Holder](cmp.Or(h.opts.MaxStreams, maxStreams),
		cmp.Or(h.opts.MaxPeerStreams, maxPeerStreams))
	h.log = ratelog.New(h.opts.Logger, 0)
	h.counts.init(h)

	h.grpc = &grpchttp.Handler{Name: "workloadserver", Methods: h.methods(), Admit: h.admit, MaxMessage: maxRequest,
		ReceiveTimeout: requestTimeout, SendTimeout: sendTimeout,
		Incoming: grpchttp.NewIncoming("workloadserver", maxIncoming, maxPeerIncoming)}
	return h, nil
}

// methods returns the methods by path: reflection, and the API methods that the options enable.
func (h *Handler) methods() map[string]grpchttp.Method {
	methods := reflection(func(ctx context.Context) []byte {
		if front := workloadwire.FrontOf(ctx); front != nil {
			return front.Descriptors()
		}
		return descriptors.WorkloadAPI
	})
	unary := func(name string, f func(ctx context.Context, request []byte) ([]byte, error)) {
		methods[workloadwire.Service+name] = grpchttp.Unary(func(ctx context.Context, request []byte) ([]byte, error) {
			ctx, cancel := context.WithTimeout(ctx, hookTimeout)
			defer cancel()
			ctx, request, err := fronted(ctx, request)
			if err != nil {
				return nil, err
			}
			return f(ctx, request)
		})
	}
	stream := func(name string, begin begin) {
		methods[workloadwire.Service+name] = func(ctx context.Context, c *grpchttp.Call) error {
			return h.serve(ctx, c, begin)
		}
	}
	stream(workloadwire.FetchX509SVID, always(h.svids))
	bundles := func(name string, p *workloadwire.Profile) {
		stream(name, always(func(snap *spiffe.Snapshot, _ []Identity, reads bool) ([]byte, error) {
			return h.bundles(snap, p, reads)
		}))
	}
	bundles(workloadwire.FetchX509Bundles, workloadwire.X509)
	bundles(workloadwire.FetchJWTBundles, workloadwire.JWT)
	if h.opts.IssueJWTSVID != nil {
		unary(workloadwire.FetchJWTSVID, h.fetchJWTSVID)
	}
	if h.opts.ValidateJWTSVID != nil {
		unary(workloadwire.ValidateJWTSVID, h.validateJWTSVID)
	}
	if h.opts.IssueWITSVID != nil {
		stream(workloadwire.FetchWITSVID, h.fetchWITSVID)
		bundles(workloadwire.FetchWITBundles, workloadwire.WIT)
	}
	for path, method := range methods {
		methods[path] = h.counted(method)
	}
	return methods
}

// ServeHTTP serves one request; a stream lasts until its context ends. Unknown methods, and methods that [Options] do
// not enable, answer Unimplemented. A request that is not gRPC gets 415, and one that is not HTTP/2 gets 505.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.grpc.ServeHTTP(w, r) }

// admit checks a request before its body is read.
func (h *Handler) admit(r *http.Request) error { return h.told(r.Context(), r, h.judge(r)) }

func (h *Handler) judge(r *http.Request) error {
	front, header := workloadwire.FrontOf(r.Context()), r.Header.Values(workloadwire.Header)
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	ip := from.Addr().Unmap()
	switch {
	case front != nil:
		if e := front.Admit(); e != nil {
			return refusal(e)
		}
	case len(header) != 1 || header[0] != "true":
		return refuse(grpchttp.InvalidArgument, "no_header", `send the metadata "workload.spiffe.io: true", once`)
	case err == nil && !h.opts.AnyNetwork && !ip.IsLoopback() && !ip.IsLinkLocalUnicast():
		return refuse(grpchttp.PermissionDenied, "another_machine", "callers from other machines are not served")
	}
	select {
	case <-h.done:
		return errClosing()
	default:
		return nil
	}
}

// counted wraps a method: its requests count against the shares, and its errors become what callers may see.
func (h *Handler) counted(method grpchttp.Method) grpchttp.Method {
	return func(ctx context.Context, c *grpchttp.Call) error {
		p := peerkey.HolderOf(c.Request())
		if err := h.shares.Take(p, 1); err != nil {
			return h.told(ctx, c.Request(), tooMany(err))
		}
		defer h.shares.Give(p, 1)
		return tell(ctx, h.told(ctx, c.Request(), method(ctx, c)))
	}
}

// tell returns an answer as the Front of ctx gives it, if there is one.
func tell(ctx context.Context, answer error) error {
	front := workloadwire.FrontOf(ctx)
	if e, ok := answer.(*grpchttp.Error); ok && front != nil {
		front.Tell(e)
	}
	return answer
}

// fronted returns the context and the message of a request, as a Front makes them if there is one.
func fronted(ctx context.Context, request []byte) (context.Context, []byte, error) {
	front := workloadwire.FrontOf(ctx)
	if front == nil {
		return ctx, request, nil
	}
	of, request, err := front.Workload(ctx, request)
	if err != nil {
		return ctx, nil, refusal(err)
	}
	if of.Err() != nil { // the caller may not be who it was any more
		return ctx, nil, ended(of)
	}
	return of, request, nil
}

// view is the snapshot and the identities to serve to one caller.
type view struct {
	snap *spiffe.Snapshot
	ids  []Identity // at least one, each with an SVID

	news []<-chan struct{} // closed when another look may find a change
}

// look returns the current view of a caller.
func (h *Handler) look(ctx context.Context) (v view, err error) {
	// taken before the snapshot, so that no change is missed
	v.news = []<-chan struct{}{h.refresh.Changed(), h.src.Changed()}
	v.snap, err = snapshot(h.src)
	if h.opts.Identities == nil {
		if err != nil {
			return v, failure("provider", err)
		}
		svid, _ := v.snap.SVID() // of a snapshot: never an error
		if v.ids, err = permitted(ctx, []Identity{{SVID: svid}}); err != nil {
			return v, failure("identities", err)
		}
		return v, nil
	}
	hook, cancel := context.WithTimeout(ctx, hookTimeout)
	defer cancel()
	ids, denied := h.opts.Identities(hook)
	if errors.Is(context.Cause(ctx), fs.ErrNotExist) { // the hook has noticed that the workload of a Front has ended
		return v, ended(ctx)
	}
	if denied == nil {
		denied = v.take(ctx, ids)
	}
	if err != nil && !errors.Is(denied, ErrDenied) { // a denial holds even if the provider fails
		return v, failure("provider", err)
	}
	if denied != nil {
		return v, failure("identities", denied)
	}
	return v, nil
}

func snapshot(p Provider) (*spiffe.Snapshot, error) {
	snap, err := p.Snapshot()
	if err == nil && snap == nil {
		err = errors.New("it returned no snapshot and no error")
	}
	return snap, err
}

// take adopts the identities that the Identities hook returned. It leaves out those whose Provider is denied.
func (v *view) take(ctx context.Context, ids []Identity) (err error) {
	if err := checkIdentities(ids); err != nil {
		return err
	}
	for _, id := range ids {
		if id.Provider == nil {
			v.ids = append(v.ids, id)
			continue
		}
		v.news = append(v.news, id.Provider.Changed())
		snap, err := snapshot(id.Provider)
		if errors.Is(err, ErrDenied) {
			continue
		}
		if err != nil {
			return fmt.Errorf("the Provider of an Identity: %w", err)
		}
		svid, _ := snap.SVID() // of a snapshot: never an error
		v.ids = append(v.ids, Identity{SVID: svid, Hint: id.Hint})
	}
	v.ids, err = permitted(ctx, v.ids)
	return err
}

// permitted returns the identities that the Front of ctx permits, if there is one.
func permitted(ctx context.Context, ids []Identity) ([]Identity, error) {
	if front := workloadwire.FrontOf(ctx); front != nil {
		ids = slices.DeleteFunc(ids, func(id Identity) bool { return !front.Permits(id.SVID.ID()) })
	}
	if len(ids) == 0 {
		return nil, ErrDenied
	}
	return ids, nil
}

// checkIdentities validates the identities that the Identities hook returned.
func checkIdentities(ids []Identity) error {
	if len(ids) == 0 {
		return ErrDenied
	}
	hints := make(map[string]bool)
	for _, id := range ids {
		switch {
		case id.SVID == nil && id.Provider == nil:
			return errors.New("an Identity has no SVID and no Provider")
		case id.SVID != nil && id.Provider != nil:
			return errors.New("an Identity has an SVID and a Provider; one of them says what to serve")
		case len(id.Hint) > maxHint:
			return fmt.Errorf("a hint has %d bytes, the limit is %d", len(id.Hint), maxHint)
		case !utf8.ValidString(id.Hint):
			return fmt.Errorf("the hint %.128q is not UTF-8", id.Hint)
		case id.Hint != "" && hints[id.Hint]:
			return fmt.Errorf("two identities have the hint %.128q", id.Hint)
		}
		hints[id.Hint] = true
	}
	return nil
}

func (h *Handler) crls() [][]byte {
	if p, ok := h.src.(interface{ CRLs() [][]byte }); ok {
		return p.CRLs()
	}
	return nil
}

// answer makes the current response of a stream. next is when the response must be made again; zero means no such
// time.
type answer func(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (m []byte, next time.Time, err error)

// begin returns the answer for one request for a stream.
type begin func(r *http.Request, request []byte) (answer, error)

// always returns a begin for streams whose response depends neither on the time nor on more of the request than whether
// its client reads ML-DSA.
func always(f func(snap *spiffe.Snapshot, ids []Identity, reads bool) ([]byte, error)) begin {
	return func(r *http.Request, _ []byte) (answer, error) {
		reads := r.Header.Get(mldsa.Header) == "true"
		return func(_ context.Context, snap *spiffe.Snapshot, ids []Identity) ([]byte, time.Time, error) {
			m, err := f(snap, ids, reads)
			if err != nil {
				err = failure("response", err)
			}
			return m, time.Time{}, err
		}, nil
	}
}

// serve answers one request with a stream: the first response at once, and another one after each change. A caller
// that does not read for a while misses the intermediate changes and gets the newest state.
//
// A stream checks for changes when it is notified of one, and when nextCheck says so. If a check of the second kind
// fails, the stream goes on and the caller does not learn of it.
func (h *Handler) serve(ctx context.Context, c *grpchttp.Call, begin begin) error {
	request, err := c.ReceiveOnly()
	if err != nil {
		if ctx.Err() != nil {
			return ended(ctx)
		}
		return err
	}
	if ctx, request, err = fronted(ctx, request); err != nil {
		return err
	}
	answer, err := begin(c.Request(), request)
	if err != nil {
		return err
	}
	var last []byte
	failures := 0
	told := true // the check follows a notification
	for {
		v, err := h.look(ctx)
		var m []byte
		var next time.Time
		if err == nil {
			m, next, err = answer(ctx, v.snap, v.ids)
		}
		switch {
		case err == nil:
			failures = 0
			if !bytes.Equal(m, last) {
				if err := c.Send(m); err != nil {
					return err
				}
				h.counts.responses.Inc()
			}
			last = m
		case told || !hasFailed(ctx, err):
			return err
		default:
			failures++
			_ = h.told(ctx, c.Request(), err) // the stream goes on
		}
		wait, expired := nextCheck(v.ids, failures, err, time.Now())
		if !expired.IsZero() {
			h.warn(ctx, c.Request(), "workloadserver: an identity that is served has expired",
				"its source has no other", slog.String("id", expired.String()))
		}
		if !next.IsZero() {
			wait = min(wait, time.Until(next))
		}
		if told, err = h.await(ctx, wait, v.news); err != nil {
			return err
		}
	}
}

// await waits for that long, or until one of the channels is closed, which told reports. A nil channel is never
// closed. The error says that the stream must end.
func (h *Handler) await(ctx context.Context, wait time.Duration, news []<-chan struct{}) (told bool, err error) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	receive := func(c any) reflect.SelectCase {
		return reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)}
	}
	cases := []reflect.SelectCase{receive(timer.C), receive(ctx.Done()), receive(h.done)}
	for _, c := range news {
		cases = append(cases, receive(c))
	}
	switch i, _, _ := reflect.Select(cases); i {
	case 0:
		return false, nil
	case 1:
		return false, ended(ctx)
	case 2:
		return false, errClosing()
	}
	return true, nil
}

func (h *Handler) fetchJWTSVID(ctx context.Context, request []byte) ([]byte, error) {
	audience, want, err := readJWTSVIDRequest(request)
	if err != nil {
		return nil, err
	}
	v, err := h.look(ctx)
	if err != nil {
		return nil, err
	}
	m, none := &workloadwire.SVIDs{}, errDenied(want)
	for _, id := range v.ids {
		if !want.IsZero() && id.SVID.ID() != want {
			continue
		}
		token, err := h.opts.IssueJWTSVID(ctx, id.SVID.ID(), audience)
		if err == nil && token == "" {
			err = errors.New("it returned no token and no error")
		}
		if errors.Is(err, ErrDenied) { // another identity may have a token
			none = errAudience(id.SVID.ID(), audience, err)
			continue
		}
		if err != nil {
			return nil, issuerError(id.SVID.ID(), err)
		}
		m.SVIDs = append(m.SVIDs,
			workloadwire.SVID{ID: id.SVID.ID().String(), Hint: id.Hint, Parts: [3][]byte{[]byte(token)}})
	}
	if len(m.SVIDs) == 0 {
		return nil, none
	}
	return workloadwire.JWT.WriteSVIDs(m)
}

// readJWTSVIDRequest returns the audiences and the wanted ID in a request. The zero ID means all identities.
func readJWTSVIDRequest(request []byte) (audience []string, want spiffe.ID, err error) {
	audience, id, err := workloadwire.ReadJWTSVIDRequest(request, maxAudiences+8)
	switch {
	case err != nil:
		return nil, want, badRequest("the request is not a JWTSVIDRequest, or has too many audiences")
	case len(audience) == 0 || len(audience) > maxAudiences:
		return nil, want, badRequest("name an audience, and at most 64")
	case slices.Contains(audience, ""):
		return nil, want, badRequest("an audience is empty")
	case len(strings.Join(audience, "")) > maxAudience:
		return nil, want, badRequest("the audiences have more than 8 KiB, and no token has room for them")
	}
	want, err = parseWanted(id)
	return audience, want, err
}

// parseWanted parses the ID in a request. "" is the zero ID.
func parseWanted(id string) (spiffe.ID, error) {
	if id == "" {
		return spiffe.ID{}, nil
	}
	want, err := spiffe.ParseID(id)
	if err != nil {
		return spiffe.ID{}, badRequest("spiffe_id is not a SPIFFE ID")
	}
	return want, nil
}

func (h *Handler) validateJWTSVID(ctx context.Context, request []byte) ([]byte, error) {
	var audience, token string
	if workloadwire.ReadTexts(request, &audience, &token) != nil {
		return nil, badRequest("the request is not a ValidateJWTSVIDRequest")
	}
	if audience == "" || token == "" {
		return nil, badRequest("the audience or the svid is empty")
	}
	id, claims, err := h.opts.ValidateJWTSVID(ctx, audience, token)
	switch {
	case err != nil && unjudged(err):
		return nil, failure("validator", err)
	case err != nil: // an answer about the token, not a refusal of the caller
		return nil, status(grpchttp.InvalidArgument, "the JWT-SVID is not valid: "+plain(err.Error()))
	case len(claims) == 0 || id.IsZero():
		return nil, failure("validator", errors.New("it returned no claims or no ID, and no error"))
	}
	return workloadwire.WriteClaims(id.String(), claims)
}

// Refresh makes each stream call [Options].Identities again at once. Call it when the result of the hook may have
// changed, for instance after a workload was registered or removed. Otherwise streams notice within about five
// minutes.
func (h *Handler) Refresh() { h.refresh.Notify() }

// Close ends all streams with code Unavailable, so that clients keep their identities and look for another server. It
// does not wait for the streams, which belong to the http.Server. Later requests are refused. Close may be called
// twice; it returns nil.
func (h *Handler) Close() error {
	h.stop()
	return nil
}
