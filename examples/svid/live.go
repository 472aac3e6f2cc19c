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

// In TLS 1.3 a server refuses a client after the handshake. We wait for that ten times as long as the handshake took,
// within these bounds.
const (
	minAlert = 200 * time.Millisecond
	maxAlert = 2 * time.Second
)

// server dials a TLS server, and judges its chain as a server's. It sends nothing on the connection.
func (a *app) server(ctx context.Context, addr string, j *judgement, self spiffe.SVIDSource) (record, []check, error) {
	var chain []*x509.Certificate
	var asked, presented bool
	host, _, _ := net.SplitHostPort(addr) // live has checked it
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
	begin := time.Now()
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", addr)
	refusal := err
	if err == nil {
		defer conn.Close()
		refusal = alert(conn, min(max(10*time.Since(begin), minAlert), maxAlert))
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
		r = append(r, field{"version", tls.VersionName(cs.Version)},
			field{"cipher_suite", tls.CipherSuiteName(cs.CipherSuite)}, field{"protocol", cs.NegotiatedProtocol})
	}
	r = append(r, field{"certificates", describeAll(chain)})

	server := *j
	server.role = spiffe.ServerRole
	checks, err := server.chain(chain)
	client := check{Name: "client", Result: ok, Detail: "the server does not ask for a certificate"}
	switch {
	case refusal != nil && presented:
		client = check{Name: "client", Result: failed, Detail: "the server refuses our identity: " + refusal.Error(),
			Remedy: "its log has the reason"}
	case refusal != nil && asked:
		client = check{Name: "client", Result: failed, Detail: "the server asks for a certificate: " +
			refusal.Error(), Remedy: "present one with -socket, or -cert and -key"}
	case refusal != nil:
		client = check{Name: "client", Result: failed, Detail: refusal.Error()}
	case presented:
		client.Detail = "the server accepts our identity"
	case asked:
		client.Detail = "the server asks for a certificate, and does not need one"
	}
	return r, append(checks, client), err
}

// alert returns the alert with which a server ends a connection after its handshake, if one comes within wait.
func alert(conn net.Conn, wait time.Duration) error {
	_ = conn.SetReadDeadline(time.Now().Add(wait))
	_, err := conn.Read(make([]byte, 1))
	if e, ok := errors.AsType[*net.OpError](err); ok && !errors.Is(err, os.ErrDeadlineExceeded) {
		return e
	}
	return nil
}
