package workloadapi

import (
	"context"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// For tests.
const (
	MaxIdentities = maxIdentities
	MaxElements   = maxElements
	SilenceLimit  = silenceLimit
)

// Address is what an address was parsed to.
type Address = address

// Network returns "unix" or "tcp".
func (a Address) Network() string { return a.network }

// Target returns the path of the socket, or host and port.
func (a Address) Target() string { return a.target }

// ParseAddress parses the address of a Workload API.
func ParseAddress(s string) (Address, error) { return parseAddress(s) }

// Corrected returns the address that err suggests, and whether err is one for an address.
func Corrected(err error) (address string, ok bool) {
	if err == nil || !strings.HasPrefix(err.Error(), "workloadapi: address ") {
		return "", false
	}
	_, address, _ = strings.Cut(err.Error(), "; write ")
	return address, true
}

// HTTPClient returns the http.Client that is made for an address, with another way to dial.
func HTTPClient(dial func(ctx context.Context, network, address string) (net.Conn, error)) *http.Client {
	c := httpClient(address{}, new(conns.Dialed))
	c.Transport.(*http.Transport).DialContext = dial
	return c
}

// SetDial has the connections of a source without a Config.Client dialed by dial.
func SetDial(s *Source, dial func(ctx context.Context) (net.Conn, error)) {
	s.client.http.Transport.(*http.Transport).DialContext = s.client.conns.Dial(func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) })
}

// ClientOf returns the client of a source.
func ClientOf(s *Source) *Client { return s.client }

// Reader reads responses as a watch does.
type Reader struct{ r reader }

func (r *Reader) X509SVIDs(data []byte) (*Update, error)   { return r.r.x509SVIDs(data) }
func (r *Reader) X509Bundles(data []byte) (*Update, error) { return r.r.x509Bundles(data) }
func (r *Reader) JWTBundles(data []byte) (*Update, error)  { return r.r.jwtBundles(data) }

func ReadJWTSVIDs(data []byte) ([]TokenSVID, error) {
	return readTokens(workloadwire.JWT, data, spiffe.ID{})
}
func ReadWITSVIDs(data []byte) ([]TokenSVID, error) {
	return readTokens(workloadwire.WIT, data, spiffe.ID{})
}
func ReadClaims(data []byte) (map[string]any, error) { _, c, err := readClaims(data); return c, err }
func ReadWITBundles(data []byte) (int, error)        { m, err := readWITBundles(data); return len(m), err }

// Wait waits as a watch does after a stream that failed with err.
func Wait(ctx context.Context, c *Client, err *Error) { c.wait(ctx, err) }

// Pace returns how a watch decides when the next stream is opened, after streams that failed or had a good message.
func Pace() func(good bool, received, end, now time.Time, u float64) time.Duration {
	var p pace
	return func(good bool, received, end, now time.Time, u float64) time.Duration {
		return p.next(&Error{Err: errEnded}, good, received, end, now, u)
	}
}

// X509 returns the update of which a source has its identities and bundles.
func (s *Source) X509() (*Update, error) {
	if st := s.cur.Load(); len(st.update.Identities) > 0 {
		return st.update, nil
	}
	return nil, s.notReady()
}

// Status is the state of a source.
type Status struct {
	ID        spiffe.ID // of the identity that it hands out
	NotAfter  time.Time
	Ready     bool
	X509, JWT StreamStatus
}

// StreamStatus is the state of one stream.
type StreamStatus struct {
	Open        bool
	Updates     uint64
	LastUpdate  time.Time
	Failures    int
	Err         error
	NextAttempt time.Time
	Skipped     []error
}

func (t *track) status() StreamStatus {
	return StreamStatus{t.open, t.updates, t.success, t.failures, t.err, t.next, t.skipped}
}

// Status returns the state of s.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{Ready: s.cur.Load().ready, X509: s.x509.status(), JWT: s.jwt.status()}
	st.JWT.Skipped = slices.Concat(s.jwt.skipped, s.unmerged)
	if svid := s.cur.Load().svid(); svid != nil {
		st.ID, st.NotAfter = svid.ID(), svid.NotAfter()
	}
	return st
}

// Server returns the address of the server of s.
func (s *Source) Server() string { return s.client.server }
