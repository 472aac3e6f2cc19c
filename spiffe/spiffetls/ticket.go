package spiffetls

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"

	"github.com/svidkit/svidkit/spiffe"
)

// ticketPrefix begins this package's entry in the extra data of a session, which other layers may share. After it
// come the SHA-256 of the server's own leaf, or of both, and the client's chain in DER, which is empty for a client
// without a certificate.
const ticketPrefix = "svidkit/spiffetls/1:"

// maxTicketEntry keeps tickets, which hold the chain twice, well below the 64 KiB that fit into a message.
// A client with a longer chain, of more than four certificates of ML-DSA-65, gets a ticket that will be declined.
const maxTicketEntry = 24 << 10

// checkTickets makes a server with the configuration c decline a session ticket, so that a full handshake follows,
// if the session's client would now be refused, or if the server now has another certificate or none.
//
// crypto/tls also has the client's chain in the ticket, but does not show it before the session is resumed, when
// VerifyConnection can only refuse. A client cannot ask for the server's new certificate either.
func (e *Endpoint) checkTickets(c *tls.Config) {
	c.WrapSession = func(cs tls.ConnectionState, ss *tls.SessionState) ([]byte, error) {
		if entry := e.ticketEntry(cs.PeerCertificates); entry != nil {
			ss.Extra = append(ss.Extra, entry)
		} else { // declined; without the chain, as one of twelve certificates of ML-DSA-65 is longer than a ticket
			ss = &tls.SessionState{}
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
func (e *Endpoint) ticketEntry(client []*x509.Certificate) []byte {
	cert, err := e.certificate(true, func(*tls.Certificate) bool { return false })
	if err != nil {
		return nil
	}
	own := sha256.New()
	own.Write(cert.Certificate[0])
	if svid, err := e.config.Self.SVID(); err == nil && svid.Alternative() != nil {
		own.Write(svid.Alternative().Leaf().Raw)
	}
	entry := own.Sum([]byte(ticketPrefix))
	for _, c := range client {
		entry = append(entry, c.Raw...)
	}
	if len(entry) > maxTicketEntry {
		return nil
	}
	return entry
}

func (e *Endpoint) resumable(ss *tls.SessionState) bool {
	for _, entry := range ss.Extra {
		const fixed = len(ticketPrefix) + sha256.Size
		if len(entry) < fixed || !bytes.HasPrefix(entry, []byte(ticketPrefix)) {
			continue
		}
		client, err := x509.ParseCertificates(entry[fixed:])
		if err != nil || !bytes.Equal(entry, e.ticketEntry(client)) {
			return false // this server has another certificate now, or none
		}
		_, err = e.judge(client, spiffe.ClientRole, "", hostport{})
		return err == nil
	}
	return false
}
