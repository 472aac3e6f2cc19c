package conns

import (
	"net/http"
	"sync/atomic"
)

// Transport is an [http.RoundTripper] whose connections can be closed. Later requests do not find the closed
// connections, while an http.Transport may use one for a moment after it is closed. It is safe for concurrent use.
type Transport struct {
	conns   Dialed
	another func() *http.Transport
	newest  atomic.Pointer[http.Transport]
}

// NewTransport returns a Transport that sends requests with the result of transport, which it calls again after each
// Close. transport must dial with the function that it is given.
func NewTransport(dial Dial, transport func(Dial) *http.Transport) *Transport {
	t := new(Transport)
	dial = t.conns.Dial(dial)
	t.another = func() *http.Transport { return transport(dial) }
	t.newest.Store(t.another())
	return t
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	return t.newest.Load().RoundTrip(r)
}

// CloseIdleConnections closes idle connections, as in [http.Transport], for an http.Client.
func (t *Transport) CloseIdleConnections() { t.newest.Load().CloseIdleConnections() }

// Close closes the open connections, which ends the requests on them. On nil it does nothing.
func (t *Transport) Close() {
	if t == nil {
		return
	}
	t.newest.Store(t.another()) // replace it first, or a request may find a connection that is being closed
	t.conns.Close()
}
