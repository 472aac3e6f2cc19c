// Package workloadapitest gives tests a Workload API whose faults the test injects.
//
//	ca := spiffetest.NewCA(t, "example.org")
//	api := workloadapitest.NewServer(t, ca, "/web")
//	source, err := workloadapi.Start(t.Context(), api.Config()) // and Close it
//	…
//	api.Rotate()          // the identity is renewed, and pushed
//	api.ExpireIn(time.Minute)
//	api.Deny()            // it is withdrawn
//	api.Mend()            // it is there again
//
// The methods Deny, Hang, Garble and Drop of a [Server] each inject one fault, replacing the last, and Mend ends it.
// They simulate a workload that is no longer registered, and an agent that is stuck, speaks another protocol, or is
// gone.
//
// Clients back off, for seconds. [NewInMemory] makes a server without a socket, so that in a testing/synctest bubble
// those seconds take no time.
//
// All callers get the same identities, whatever their process. Use it in tests only.
package workloadapitest

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/test/faulty"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// Server is a Workload API for tests. [NewServer] and [NewInMemory] make one, which serves until the test is over.
// Its methods are safe for concurrent use; those that mint identities call t.Fatal if they fail and must be called
// from the test's own goroutine.
//
// It serves the bundles of its CA as they change, with a key for JWT-SVIDs added to the CA's bundle, which all
// servers of the CA share, and issues and validates JWT-SVIDs. It watches the CA, so make it before the CA fails.
//
// It also has these methods, which it shares with a federationtest.Endpoint:
//
//	Deny()          // withdraws the identities: requests and open streams end with PermissionDenied
//	Hang()          // answers nothing; open streams stay open and silent, and are told at Mend
//	Garble()        // cuts the connections, and answers every request with a message that makes no sense
//	Drop()          // cuts the connections, open and new ones, like a server that keeps crashing
//	Mend()          // ends the fault, and answers the requests that hung
//	Requests() int  // the number of requests so far, whatever their answer; a stream is one
type Server struct {
	redacted
	t       testing.TB
	ca      *spiffetest.CA
	address string
	client  *workloadapi.Client // in memory; else nil
	*dial
	handler  *workloadserver.Handler
	jwtKeyID string // unique, because a validator may trust several servers
	jwtKey   crypto.PublicKey

	mu      sync.Mutex
	ids     []workloadserver.Identity
	snap    *spiffe.Snapshot
	told    told          // the state that clients see, not the newest while the server hangs
	changed chan struct{} // closed when that changes
}

type told struct {
	ids  []workloadserver.Identity
	snap *spiffe.Snapshot
}

// Aliases, so that the embedded fields are not exported.
type (
	dial     = faulty.Dial
	redacted = redact.Text
)

// NewServer serves an identity of the CA's trust domain for each path, such as "/web", on a Unix
// socket in a temporary directory. The first is the default identity. At least one is needed. The
// identities last an hour.
func NewServer(t testing.TB, ca *spiffetest.CA, paths ...string) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "wlapi") // the directory of t.TempDir may be too long for a socket
	if err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "api.sock"))
	if err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	return newServer(t, ca, l, "unix://"+l.Addr().String(), paths)
}

// NewInMemory is [NewServer] without a socket: only the clients of [Server.Config] reach it. Call it inside the
// bubble.
func NewInMemory(t testing.TB, ca *spiffetest.CA, paths ...string) *Server {
	t.Helper()
	l := memconn.Listen()
	s := newServer(t, ca, l, "", paths)
	transport := &http.Transport{Protocols: new(http.Protocols), DialContext: l.DialContext}
	transport.Protocols.SetUnencryptedHTTP2(true)
	var err error
	s.client, err = workloadapi.NewClient("", &http.Client{Transport: transport})
	if err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	t.Cleanup(s.client.CloseIdleConnections)
	return s
}

// jwtKeys has the JWT-SVID key of each CA with running servers, so that these validate each other's tokens.
var jwtKeys sync.Map // *spiffetest.CA to jwtKey

type jwtKey struct {
	id string
	*ecdsa.PrivateKey
}

func newServer(t testing.TB, ca *spiffetest.CA, l net.Listener, address string, paths []string) *Server {
	t.Helper()
	if len(paths) == 0 {
		t.Fatalf("workloadapitest: no identity to serve: give a path, such as \"/web\"")
	}
	fresh, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	of, _ := jwtKeys.LoadOrStore(ca, jwtKey{"jwt-" + rand.Text(), fresh})
	t.Cleanup(func() { jwtKeys.CompareAndDelete(ca, of) })
	key := of.(jwtKey)
	s := &Server{
		redacted: redact.New("workloadapitest.Server(" + cmp.Or(address, "in memory") + ")"),
		t:        t, ca: ca, address: address, jwtKeyID: key.id, jwtKey: key.Public(), changed: make(chan struct{}),
	}
	issuer, err := jwtsvid.NewIssuer(ca.TrustDomain(), key.id, key, &jwtsvid.IssuerOptions{WideAudience: true})
	if err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	for _, path := range paths {
		s.ids = append(s.ids, workloadserver.Identity{SVID: ca.SVID(path)})
	}
	if err := s.publish(s.ids); err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	s.told = told{s.ids, s.snap}
	validator, err := jwtsvid.NewAgentValidator(service{s}, nil)
	if err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	s.handler, err = workloadserver.NewHandler(service{s}, &workloadserver.Options{
		Identities: s.identities, IssueJWTSVID: issuer.IssueJWTSVID, ValidateJWTSVID: validator.ValidateJWTSVID,
	})
	if err != nil {
		t.Fatalf("workloadapitest: %v", err)
	}
	s.dial = faulty.Start(t, faulty.Config{
		Listener: l, Handler: s.handler, Deny: denied, Garble: garbled, ConnContext: unixsocket.ConnContext,
		Turned: s.wake,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.follow(ctx) })
	t.Cleanup(func() {
		cancel()
		_ = s.handler.Close()
		wg.Wait()
	})
	return s
}

// Config returns the configuration of a source for this server. It has the address of the server or, if that
// is in memory, a client that reaches it.
func (s *Server) Config() workloadapi.Config {
	return workloadapi.Config{Address: s.address, Client: s.client}
}

// Rotate renews all identities for an hour, with new keys and from the active root, and pushes them.
func (s *Server) Rotate() {
	s.t.Helper()
	s.mint(func(*x509.Certificate) {})
}

// ExpireIn replaces all identities by new ones that expire in d, which may be negative. They are not renewed until
// [Server.Rotate]. A *workloadapi.Source does not adopt an expired one.
func (s *Server) ExpireIn(d time.Duration) {
	s.t.Helper()
	s.mint(faulty.Ending(d))
}

// SetIdentities serves these identities from now on, in this order and with their hints. They must be of the CA's
// trust domain or a federated one. Rotate and ExpireIn replace only identities of the CA's trust domain.
func (s *Server) SetIdentities(ids ...workloadserver.Identity) {
	s.t.Helper()
	if len(ids) == 0 {
		s.t.Fatalf("workloadapitest: no identity to serve: to withdraw them use Deny")
	}
	s.update(ids)
}

// Snapshot returns the default identity and the served bundles, including federated ones.
func (s *Server) Snapshot() *spiffe.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snap
}

// wake makes open streams check for changes, unless they hang.
func (s *Server) wake() {
	if faulty.PositionOf(s.dial) == faulty.Hang {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told = told{s.ids, s.snap}
	close(s.changed)
	s.changed = make(chan struct{})
}

// mint replaces all identities of the CA's trust domain.
func (s *Server) mint(edit func(*x509.Certificate)) {
	s.t.Helper()
	s.mu.Lock()
	ids := slices.Clone(s.ids)
	s.mu.Unlock()
	for i, id := range ids {
		if id.SVID.ID().MemberOf(s.ca.TrustDomain()) {
			ids[i].SVID = s.ca.SVID(id.SVID.ID().Path(), edit)
		}
	}
	s.update(ids)
}

func (s *Server) update(ids []workloadserver.Identity) {
	s.t.Helper()
	if err := s.publish(ids); err != nil {
		s.t.Fatalf("workloadapitest: %v", err)
	}
	s.wake()
}

// follow publishes the bundles of the CA as they change.
func (s *Server) follow(ctx context.Context) {
	for _, err := range s.ca.WatchBundles(ctx) {
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = s.publish(nil)
		}
		if err != nil {
			s.t.Errorf("workloadapitest: bundles of the CA: %v", err)
			continue
		}
		s.wake()
	}
}

// publish publishes a snapshot of the identities and the CA's bundles. Nil ids keep the current identities.
func (s *Server) publish(ids []workloadserver.Identity) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ids == nil {
		ids = s.ids
	}
	bundles := s.ca.Bundles()
	own, err := bundles.Bundle(s.ca.TrustDomain())
	if err != nil {
		return err
	}
	c := own.Contents()
	c.JWTAuthorities = map[string]crypto.PublicKey{s.jwtKeyID: s.jwtKey}
	if own, err = spiffe.NewBundle(own.TrustDomain(), c); err != nil {
		return err
	}
	s.ids, s.snap = slices.Clone(ids), spiffe.NewSnapshot(ids[0].SVID, bundles.With(own))
	return nil
}

// service is the provider of the handler.
type service struct{ s *Server }

// Snapshot implements [workloadserver.Provider].
func (s service) Snapshot() (*spiffe.Snapshot, error) {
	s.s.mu.Lock()
	defer s.s.mu.Unlock()
	return s.s.told.snap, nil
}

// Changed implements [workloadserver.Provider].
func (s service) Changed() <-chan struct{} {
	s.s.mu.Lock()
	defer s.s.mu.Unlock()
	return s.s.changed
}

// Bundle implements [spiffe.BundleSource].
func (s service) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return s.s.Snapshot().Bundle(td)
}

func (s *Server) identities(context.Context) ([]workloadserver.Identity, error) {
	if faulty.PositionOf(s.dial) == faulty.Deny {
		return nil, workloadserver.ErrDenied
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.told.ids, nil
}

// denied answers with the status PermissionDenied of gRPC.
var denied = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("Grpc-Status", strconv.Itoa(7))
	w.Header().Set("Grpc-Message", "told to deny")
})

// garbled answers with a gRPC message that does not parse.
var garbled = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	nonsense := []byte("\xff\xff\xff\xff this is not the message that you wait for")
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	_, _ = w.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(nonsense))), nonsense...))
})
