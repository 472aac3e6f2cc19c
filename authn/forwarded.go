package authn

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

// ForwardedCertificate proves a caller by the header x-forwarded-client-cert, in which a proxy that terminates TLS,
// such as Envoy, describes the client's certificate. The method of the Caller is "forwarded-certificate".
//
// The header counts if the address of the connection is one of the proxies or loopback; otherwise it is ignored, as it
// is on a Unix socket. A trusted proxy can name any caller that the policy allows; the policy does not judge callers
// without a SPIFFE ID. The proxy must have verified the certificate, and must remove or extend a header that the
// client sent. Envoy does so with these settings:
//
//   - forward_client_cert_details is SANITIZE_SET or APPEND_FORWARD. With SANITIZE there is no header. With
//     FORWARD_ONLY and ALWAYS_FORWARD_ONLY a client can name itself as any caller.
//   - set_current_client_cert_details has uri, and dns if the server needs it. Without both Envoy names nothing, and
//     the header is refused. subject, cert and chain are useless here, and can exceed the limit of 16 KiB, of which
//     a certificate of ML-DSA-65 takes 8.
//   - validation_context has trusted_ca, and trust_chain_verification is not ACCEPT_UNTRUSTED, which forwards
//     untrusted certificates like others. Each CA in trusted_ca can name members of all trust domains.
//   - The CAs in trusted_ca sign no URI and, with dns, no DNS name that contains a comma or a semicolon. Envoy escapes
//     the Subject, but not these names: the server would read the rest of such a name as names that the CA did not
//     sign. Use uri alone if the CAs sign any DNS name, but no URI other than a SPIFFE ID.
//
// If there are several elements, the last one counts: the nearest proxy added it, about its own client, which wrote
// all earlier ones. Istio's CA takes the names of all elements together, so a client behind a proxy that appends can
// add any name to its own.
//
// In that element, the URI that is a SPIFFE ID becomes the caller's ID, and valid DNS names its DNSNames. Two SPIFFE
// IDs are refused, as in a certificate; other URIs are dropped. By, Hash, Subject, Cert and Chain are not used.
// Certificate and NotAfter are not set, because the proof is the word of the proxy.
//
// The error wraps [ErrNoCredential] if there is no header or the peer is not trusted. It wraps [ErrRefused] if the
// header occurs more than once, is longer than 16 KiB, is malformed, or names nothing, or if the policy does not
// allow the ID.
func ForwardedCertificate(allow spiffe.PolicySource, proxies ...netip.Prefix) (Authenticator, error) {
	if err := spiffe.CheckPolicySource(allow); err != nil {
		return nil, fmt.Errorf("authn: forwarded certificate: %w", err)
	}
	f := &forwarded{allow, slices.Clone(proxies)}
	for i, p := range f.proxies {
		if !p.IsValid() || p.Bits() == 0 || p.Addr().Is4In6() {
			return nil, fmt.Errorf("authn: forwarded certificate: the proxy %v is no prefix, or one of all "+
				"addresses, or one of IPv4 in the form of IPv6", p)
		}
		f.proxies[i] = p.Masked()
	}
	return Func(f.authenticate), nil
}

const (
	forwardedHeader = "X-Forwarded-Client-Cert"
	maxForwarded    = 16 << 10 // bytes
)

type forwarded struct {
	allow   spiffe.PolicySource
	proxies []netip.Prefix
}

func (f *forwarded) authenticate(r *http.Request) (*Caller, error) {
	values := r.Header.Values(forwardedHeader)
	if len(values) == 0 {
		return nil, fmt.Errorf("authn: forwarded certificate: there is no header: %w", ErrNoCredential)
	}
	if !f.believes(r) {
		return nil, fmt.Errorf("authn: forwarded certificate: %w: the header is from a peer that is not one of "+
			"the proxies", ErrNoCredential)
	}
	c, err := f.read(values)
	if err != nil {
		return nil, fmt.Errorf("authn: forwarded certificate: %w: %w", ErrRefused, err)
	}
	return c, nil
}

// believes reports whether r is from a trusted proxy.
func (f *forwarded) believes(r *http.Request) bool {
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok &&
		strings.HasPrefix(local.Network(), "unix") {
		return false
	}
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	from := at.Addr().Unmap().WithZone("")
	return from.IsLoopback() || slices.ContainsFunc(f.proxies, func(p netip.Prefix) bool { return p.Contains(from) })
}

// read returns the caller that the header names, if the policy allows it.
func (f *forwarded) read(values []string) (*Caller, error) {
	if len(values) > 1 {
		return nil, errors.New("the header is there more than once")
	}
	last, err := lastElement(values[0])
	if err != nil {
		return nil, err
	}
	c := &Caller{Method: "forwarded-certificate", DNSNames: validNames(last.dns)}
	for _, text := range last.uris {
		id, err := spiffe.ParseID(text)
		switch {
		case err != nil && len(text) >= len("spiffe:") && strings.EqualFold(text[:len("spiffe:")], "spiffe:"):
			return nil, err
		case err != nil: // a URI of another kind
		case !c.ID.IsZero():
			return nil, errors.New("the certificate has more than one SPIFFE ID")
		default:
			c.ID = id
		}
	}
	if !c.proven() {
		return nil, errors.New("the certificate has neither a SPIFFE ID nor a DNS name")
	}
	if !c.ID.IsZero() {
		if err := f.allow.Policy().Check(c.ID); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// element is what one proxy says about its client.
type element struct{ uris, dns []string }

// lastElement reads a header, all of whose elements must be well-formed, and returns the last of them.
func lastElement(header string) (last element, err error) {
	if len(header) > maxForwarded {
		return element{}, fmt.Errorf("the header has %d bytes, the limit is %d", len(header), maxForwarded)
	}
	if strings.ContainsFunc(header, func(c rune) bool { return c < ' ' || c > '~' }) {
		return element{}, errors.New("the header has bytes that are not printable ASCII")
	}
	for rest, more := header, true; more; {
		if last, rest, more, err = readElement(strings.TrimLeft(rest, " ")); err != nil {
			return element{}, err
		}
	}
	return last, nil
}

// readElement reads the element that s begins with, and reports whether a comma and more follow.
func readElement(s string) (e element, rest string, more bool, err error) {
	seen := make(map[string]bool, 8)
	for {
		key, after, ok := strings.Cut(s, "=")
		if !ok {
			return e, "", false, errors.New("an element is empty, or has a part without =")
		}
		var value string
		if value, s, err = readValue(after); err != nil {
			return e, "", false, err
		}
		switch key = strings.ToLower(key); key {
		case "uri":
			e.uris = append(e.uris, value)
		case "dns":
			e.dns = append(e.dns, value)
		case "by": // may be there for each URI of the proxy's certificate
		case "subject", "hash", "cert", "chain":
			if seen[key] {
				return e, "", false, fmt.Errorf("an element has %q twice", key)
			}
			seen[key] = true
		default:
			return e, "", false, fmt.Errorf("an element has the key %.20q, which is not known", key)
		}
		if s == "" {
			return e, "", false, nil
		}
		end := s[0]
		if s = s[1:]; end == ',' {
			return e, s, true, nil
		}
	}
}

// readValue reads a value, up to the semicolon, the comma or the end that follows it. A backslash and the next
// character stay as they are, because a Subject has its own escapes.
func readValue(s string) (value, rest string, err error) {
	if !strings.HasPrefix(s, `"`) {
		n := strings.IndexAny(s, `,;"\`)
		if n < 0 {
			return s, "", nil
		}
		if s[n] == '"' || s[n] == '\\' {
			return "", "", errors.New("a value that has a quote or a backslash in it does not begin with a quote")
		}
		return s[:n], s[n:], nil
	}
	for n := 1; n < len(s); n++ {
		switch s[n] {
		case '\\':
			// Parsers disagree on whether two backslashes before a quote are one that escapes the quote.
			if run := strings.TrimLeft(s[n:], `\`); len(s[n:])-len(run) > 1 && strings.HasPrefix(run, `"`) {
				return "", "", errors.New("a value has a quote after more than one backslash")
			}
			n++
		case '"':
			value, rest = s[1:n], s[n+1:]
			if rest != "" && rest[0] != ';' && rest[0] != ',' {
				return "", "", errors.New("something follows the quote at the end of a value")
			}
			return value, rest, nil
		}
	}
	return "", "", errors.New("a quote is not closed")
}
