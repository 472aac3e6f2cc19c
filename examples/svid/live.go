package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// afterHandshake is how long a server may take to refuse a client: in TLS 1.3 it does so after the handshake.
const afterHandshake = time.Second

// server dials a TLS server, and judges its chain as that of a server. The connection is used for nothing else.
func (a *app) server(ctx context.Context, addr string, j *judgement, self spiffe.SVIDSource) (record, []check, error) {
	var chain []*x509.Certificate
	var asked, presented bool
	host, _, _ := net.SplitHostPort(addr) // live has tried it
	config := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		ServerName:         host,
		NextProtos:         []string{"h2", "http/1.1"},
		InsecureSkipVerify: true, // the chain is judged below, and nothing is sent
		VerifyConnection: func(cs tls.ConnectionState) error {
			chain = cs.PeerCertificates
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			asked = true
			if self == nil {
				return new(tls.Certificate), nil
			}
			svid, err := self.SVID()
			if err != nil {
				return nil, err
			}
			presented = true
			return svid.TLSCertificate(), nil
		},
	}
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", addr)
	refusal := err
	if err == nil {
		defer conn.Close()
		refusal = refused(conn)
	}
	if len(chain) == 0 {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		} else if err == nil {
			err = errors.New("the server has no certificate")
		}
		return nil, nil, fmt.Errorf("%s: %w", addr, err)
	}
	r := record{{"kind", "TLS server"}, {"address", addr}, {"spiffe_id", idText(chainID(chain))}}
	if conn, isTLS := conn.(*tls.Conn); isTLS && conn != nil {
		cs := conn.ConnectionState()
		r = append(r, field{"version", tls.VersionName(cs.Version)}, field{"cipher_suite", tls.CipherSuiteName(cs.CipherSuite)}, field{"protocol", cs.NegotiatedProtocol})
	}
	r = append(r, field{"certificates", describeAll(chain)})

	server := *j
	server.role = spiffe.ServerRole
	checks, err := server.chain(chain)
	client := check{Name: "client", Result: ok, Detail: "the server does not ask for a certificate"}
	switch {
	case refusal != nil && presented:
		client = check{Name: "client", Result: failed, Detail: "the server refuses our identity: " + refusal.Error(), Remedy: "its log has the reason"}
	case refusal != nil && asked:
		client = check{Name: "client", Result: failed, Detail: "the server asks for a certificate: " + refusal.Error(), Remedy: "present one with -socket, or -cert and -key"}
	case refusal != nil:
		client = check{Name: "client", Result: failed, Detail: refusal.Error()}
	case presented:
		client.Detail = "the server accepts our identity"
	case asked:
		client.Detail = "the server asks for a certificate, and does not need one"
	}
	return r, append(checks, client), err
}

// refused returns the alert with which a server ends a connection after its handshake, if it does so soon.
func refused(conn net.Conn) error {
	_ = conn.SetReadDeadline(time.Now().Add(afterHandshake))
	_, err := conn.Read(make([]byte, 1))
	if alert, ok := errors.AsType[*net.OpError](err); ok && !errors.Is(err, os.ErrDeadlineExceeded) {
		return alert
	}
	return nil
}
