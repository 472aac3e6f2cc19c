package jws

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"strings"
)

// CheckURL refuses the URL of an issuer's document if others could change the document in transit.
func CheckURL(text string) error {
	u, err := url.Parse(text)
	if err != nil {
		return errors.New("it is no URL")
	}
	switch {
	case u.Host == "" || u.User != nil || u.Fragment != "":
		return fmt.Errorf("%.256q is no URL of a document: it needs a host, and neither a user nor a fragment",
			u.Redacted())
	case u.Scheme != "https" && !(u.Scheme == "http" && Loopback(u.Hostname())):
		return fmt.Errorf("the scheme is %.20q; it is https, or http with a host on loopback: "+
			"others could change the keys on their way", u.Scheme)
	}
	return nil
}

// Loopback reports whether a host is localhost or a loopback address.
func Loopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && addr.IsLoopback()
}

// CheckIssuer refuses an issuer URL with which verifiers could not find the issuer's documents (OpenID Connect
// Discovery 1.0 section 2): they compare the URL byte for byte, and append paths to it.
func CheckIssuer(text string) error {
	if err := CheckURL(text); err != nil {
		return err
	}
	if strings.ContainsAny(text, "?#") || strings.HasSuffix(text, "/") || strings.HasSuffix(text, Discovery) {
		return fmt.Errorf("%.256q is no URL of an issuer: it has no query, "+
			"and does not end in a slash or with %s, which verifiers append", text, Discovery)
	}
	return nil
}

// Discovery is the path of the discovery document below the URL of an issuer (section 4).
const Discovery = "/.well-known/openid-configuration"
