// Package kubetest is a Kubernetes API server for tests: an http.Handler that keeps objects in
// memory, with the rules that clients depend on. [Start] serves one on 127.0.0.1.
//
// It has resource versions that grow with each change; 409 AlreadyExists and 409 Conflict; updates without a
// version, where the last one wins; preconditions of deletions; uid and creationTimestamp; lists, in pages too,
// and watches from a version, with bookmarks, with a timeout, and with 410 Gone after [Server.Compact]; secrets
// in base64 whose type does not change; the approval and status subresources of certificate signing requests;
// the status of pod certificate requests; cluster trust bundles; and reviews of tokens and of access, which
// functions of the test answer.
//
// Tests inject faults with [Server.Latency], [Server.FailNext] and [Server.Faults]. Resources are secrets,
// configmaps, pods, serviceaccounts, certificatesigningrequests, podcertificaterequests and
// clustertrustbundles. There is no admission and no RBAC, and namespaces need not exist.
package kubetest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Server is a fake API server, made by [New], [Start] or [StartOn]. Its methods are safe for concurrent
// use.
type Server struct {
	store *store

	mu          sync.Mutex
	random      *rand.Rand
	latency     time.Duration
	faults      []*queued
	decide      func(*http.Request) *Fault
	tokenReview func(TokenReviewSpec) TokenReviewStatus
	access      func(AccessReviewSpec) AccessReviewStatus
	requests    []Request
	release     chan struct{} // closed when requests that hang go on

	url    string
	client *http.Client
}

// Request is one request that was received, without its body and its headers.
type Request struct {
	Method, Path string
	Query        url.Values
	Code         int // of the answer; 0 if there was none, or not yet
}

// New returns a server without a listener. The seed decides everything that is random.
func New(seed uint64) *Server {
	random := rand.New(rand.NewPCG(seed, 0x6b756265))
	s := &Server{random: random, release: make(chan struct{})}
	s.store = newStore(rand.New(rand.NewPCG(seed, 0x74657374)))
	return s
}

// Start serves on 127.0.0.1, without TLS, until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("kubetest: %v", err)
	}
	return StartOn(t, 1, l)
}

// StartOn serves on a listener until the test ends. If the listener has a DialContext, as that of
// internal/test/memconn has, [Server.Client] uses it, so that server and clients fit into a synctest
// bubble.
func StartOn(t testing.TB, seed uint64, l net.Listener) *Server {
	t.Helper()
	s := New(seed)
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	s.url = "http://" + l.Addr().String()
	if d, ok := l.(interface {
		DialContext(ctx context.Context, network, addr string) (net.Conn, error)
	}); ok {
		transport.DialContext = d.DialContext
		s.url = "http://127.0.0.1"
	}
	s.client = &http.Client{Transport: transport}
	srv := &http.Server{Handler: s, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(l) }) // always http.ErrServerClosed
	t.Cleanup(func() {
		_ = srv.Close()
		s.Release()
		wg.Wait()
		transport.CloseIdleConnections()
	})
	return s
}

// URL returns the address of a server that was started.
func (s *Server) URL() string { return s.url }

// Client returns a client for a server that was started. It sends no token and is shared.
func (s *Server) Client() *http.Client { return s.client }

// Latency makes each request take d on average, from half to one and a half of it: one part of it
// before the request is carried out, and one after. Watches wait before they begin.
func (s *Server) Latency(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.latency = d
}

// Fault is what goes wrong with a request.
type Fault struct {
	// Code is the status of the answer; 0 means that the connection is cut.
	Code    int
	Reason  string // of the Status object
	Message string

	RetryAfter time.Duration // whole seconds

	// Landed says that the request is carried out first, so that a change happens of which the
	// client does not learn. It has no effect on watches.
	Landed bool

	// Hang says that the fault waits until [Server.Release], or until the client has gone.
	Hang bool
}

type queued struct {
	n     int
	fault Fault
	only  func(*http.Request) bool
}

// FailNext makes the next n requests fail, of those for which only returns true; nil means all.
// Faults are used in the order in which they were set.
func (s *Server) FailNext(n int, f Fault, only func(*http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, &queued{n, f, only})
}

// Faults sets a function that is asked about each request for which FailNext has no fault. It returns
// nil for requests that succeed, and is not called concurrently. A nil function ends this.
func (s *Server) Faults(decide func(*http.Request) *Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.decide = decide
}

// Release ends the wait of all requests that hang.
func (s *Server) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.release)
	s.release = make(chan struct{})
}

// Requests returns the requests received so far, in order.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Count returns the number of requests with the method and a path with the prefix.
func (s *Server) Count(method, prefix string) int {
	n := 0
	for _, r := range s.Requests() {
		if r.Method == method && strings.HasPrefix(r.Path, prefix) {
			n++
		}
	}
	return n
}

// ServeHTTP answers as an API server does, or with a fault.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	index := len(s.requests)
	s.requests = append(s.requests, Request{Method: r.Method, Path: r.URL.Path, Query: r.URL.Query()})
	fault := s.nextFault(r)
	var before, after time.Duration
	if s.latency > 0 {
		total := s.latency/2 + time.Duration(s.random.Int64N(int64(s.latency)))
		before = time.Duration(s.random.Int64N(int64(total)))
		after = total - before
	}
	release := s.release
	s.mu.Unlock()

	// The body is read before anything waits: only then does net/http notice that a client has gone.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	w = &recorder{w, func(code int) {
		s.mu.Lock()
		s.requests[index].Code = code
		s.mu.Unlock()
	}}
	if err != nil {
		write(w, failure(http.StatusRequestEntityTooLarge, "RequestEntityTooLarge",
			"the body cannot be read, or is larger than 3 MiB"))
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	pause(r.Context(), before)
	if r.Context().Err() != nil && before > 0 {
		panic(http.ErrAbortHandler) // the client left before the request arrived
	}
	if fault != nil {
		if fault.Landed && !isWatch(r) {
			s.serve(httptest.NewRecorder(), r, body)
		}
		if fault.Hang {
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		if fault.Code == 0 {
			panic(http.ErrAbortHandler)
		}
		e := failure(fault.Code, fault.Reason, "%s", fault.Message)
		e.retryAfter = fault.RetryAfter
		pause(r.Context(), after)
		write(w, e)
		return
	}
	if isWatch(r) {
		s.serve(w, r, body)
		return
	}
	answer := httptest.NewRecorder()
	s.serve(answer, r, body)
	pause(r.Context(), after)
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // net/http may hand an answer to a caller whose time is over
	}
	maps.Copy(w.Header(), answer.Header())
	w.WriteHeader(answer.Code)
	_, _ = w.Write(answer.Body.Bytes()) // an error means that the client is gone
}

// nextFault returns the fault of a request, or nil; s.mu is held.
func (s *Server) nextFault(r *http.Request) *Fault {
	for i, q := range s.faults {
		if q.only != nil && !q.only(r) {
			continue
		}
		f := q.fault
		if q.n--; q.n <= 0 {
			s.faults = slices.Delete(s.faults, i, i+1)
		}
		return &f
	}
	if s.decide != nil {
		return s.decide(r)
	}
	return nil
}

func isWatch(r *http.Request) bool {
	v := r.URL.Query().Get("watch")
	return r.Method == http.MethodGet && (v == "true" || v == "1")
}

func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// recorder notes the status of an answer.
type recorder struct {
	http.ResponseWriter
	note func(code int)
}

func (r *recorder) WriteHeader(code int) {
	r.note(code)
	r.ResponseWriter.WriteHeader(code)
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// status is an answer that is not an object: a Status.
type status struct {
	code            int
	reason, message string
	retryAfter      time.Duration
}

func (e *status) Error() string { return fmt.Sprintf("%d %s: %s", e.code, e.reason, e.message) }

func failure(code int, reason, format string, args ...any) *status {
	return &status{code: code, reason: reason, message: fmt.Sprintf(format, args...)}
}

func (e *status) object() map[string]any {
	result := "Failure"
	if e.code < 300 {
		result = "Success"
	}
	o := map[string]any{"kind": "Status", "apiVersion": "v1", "metadata": map[string]any{}, "status": result,
		"code": e.code}
	if e.message != "" {
		o["message"] = e.message
	}
	if e.reason != "" {
		o["reason"] = e.reason
	}
	if e.retryAfter > 0 {
		o["details"] = map[string]any{"retryAfterSeconds": int(e.retryAfter / time.Second)}
	}
	return o
}

func write(w http.ResponseWriter, e *status) {
	if e.retryAfter > 0 {
		w.Header().Set("Retry-After", fmt.Sprint(int(e.retryAfter/time.Second)))
	}
	writeJSON(w, e.code, e.object())
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	data := mustJSON(v)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(data, '\n')) // an error means that the client is gone
}
