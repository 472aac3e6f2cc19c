package spiffetls

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"

	"github.com/svidkit/svidkit/spiffe"
)

// ticketEntry begins this package's entry among the extra data of a session, which other layers may
// share. The SHA-256 of the server's own leaf follows, then the client's chain in DER.
const ticketEntry = "svidkit/spiffetls/1:"

// maxTicketEntry keeps tickets, which hold the chain twice, well below the 64 KiB that fit into a message.
// A client with a longer chain gets a ticket that will be declined.
const maxTicketEntry = 16 << 10

// checkTickets makes a server decline a session ticket, so that a full handshake follows, if the
// session's client would now be refused, or if the server itself has a new SVID or none.
//
// crypto/tls has the client's chain in the ticket too, but does not show it before the session is
// resumed, when VerifyConnection can only refuse. A client cannot ask for the server's new certificate
// either.
func (e *endpoint) checkTickets(c *tls.Config) {
	c.WrapSession = func(cs tls.ConnectionState, ss *tls.SessionState) ([]byte, error) {
		if entry := e.ticketEntry(cs.PeerCertificates); entry != nil {
			ss.Extra = append(ss.Extra, entry)
		}
		return c.EncryptTicket(cs, ss)
	}
	c.UnwrapSession = func(identity []byte, cs tls.ConnectionState) (*tls.SessionState, error) {
		ss, err := c.DecryptTicket(identity, cs)
		if err != nil || ss == nil || !e.resumable(ss) {
			return nil, err
		}
		return ss, nil
	}
}

// ticketEntry returns the entry of a session, or nil if it must not be resumed.
func (e *endpoint) ticketEntry(client []*x509.Certificate) []byte {
	own, err := e.certificate(true)
	if err != nil {
		return nil
	}
	leaf := sha256.Sum256(own.Certificate[0])
	entry := append([]byte(ticketEntry), leaf[:]...)
	for _, cert := range client {
		entry = append(entry, cert.Raw...)
	}
	if len(entry) > maxTicketEntry {
		return nil
	}
	return entry
}

func (e *endpoint) resumable(ss *tls.SessionState) bool {
	for _, extra := range ss.Extra {
		entry, ok := bytes.CutPrefix(extra, []byte(ticketEntry))
		if !ok || len(entry) < sha256.Size {
			continue
		}
		own, err := e.certificate(true)
		if err != nil || sha256.Sum256(own.Certificate[0]) != [sha256.Size]byte(entry) {
			return false
		}
		client, err := x509.ParseCertificates(entry[sha256.Size:])
		if err != nil {
			return false
		}
		_, err = e.verifier.VerifyChain(client, spiffe.ClientRole)
		return err == nil
	}
	return false
}
