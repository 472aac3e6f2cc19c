package tokensource

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// MetadataOptions are the choices of [GCE], [Azure] and [AWS] that have a default.
type MetadataOptions struct {
	// URL is where the metadata server is, or a proxy of it; empty means http://169.254.169.254. With http, its host must
	// be localhost or an IP address that is loopback, link-local, fd00:ec2::254 or fd20:ce::254.
	URL string

	// Account says which of several identities of the machine is meant: the email address of a service account
	// with GCE, the client ID of a user-assigned identity with Azure. Empty means the default one. AWS has
	// only one.
	Account string

	// HTTPClient sends the requests. It is copied; the copy follows no redirects and keeps no cookies. A Transport that
	// is an *http.Transport with a Proxy is refused. Nil, or a nil Transport, means one that uses no proxy.
	HTTPClient *http.Client

	// Logger is told of each new token (Debug) and of fetches that failed while no call waited for them (Warn). Nil
	// means silence.
	Logger *slog.Logger
}

// metadata is a metadata server.
type metadata struct {
	http    *http.Client
	base    string
	account string
	logger  *slog.Logger
}

func newMetadata(o *MetadataOptions) (*metadata, error) {
	if o == nil {
		o = &MetadataOptions{}
	}
	u, err := checkURL(cmp.Or(o.URL, "http://169.254.169.254"), ofMetadata)
	if err != nil {
		return nil, err
	}
	if u.RawQuery != "" {
		return nil, errors.New("URL has a query")
	}
	c, err := newClient(o.HTTPClient, false)
	if err != nil {
		return nil, err
	}
	return &metadata{http: c, base: strings.TrimRight(u.String(), "/"), account: o.Account, logger: o.Logger}, nil
}

// ofMetadata reports whether a is where metadata servers are asked without TLS: on this machine or its link. The two
// last are those of AWS and Google, which are not in the range of link-local addresses.
func ofMetadata(a netip.Addr) bool {
	return a.IsLoopback() || a.IsLinkLocalUnicast() ||
		a == netip.AddrFrom16([16]byte{0xfd, 0x00, 0x0e, 0xc2, 14: 0x02, 15: 0x54}) || a == netip.AddrFrom16([16]byte{0xfd, 0x20, 0x00, 0xce, 14: 0x02, 15: 0x54})
}

// GCE returns a Source of identity tokens of a Google machine, or of the service account that GKE gives a pod: JWTs
// that Google has signed, for the audience, which is the whole identity of the server that they are for. The metadata
// server must show that it is Google's by the header Metadata-Flavor.
func GCE(audience string, o *MetadataOptions) (*Source, error) {
	m, err := newMetadata(o)
	if err == nil && audience == "" {
		err = errors.New("no audience")
	}
	if err != nil {
		return nil, fmt.Errorf("tokensource: GCE: %w", err)
	}
	r := &request{
		method: http.MethodGet,
		url: m.base + "/computeMetadata/v1/instance/service-accounts/" + url.PathEscape(cmp.Or(m.account, "default")) + "/identity?" +
			url.Values{"audience": {audience}, "format": {"full"}}.Encode(),
		header: http.Header{"Metadata-Flavor": {"Google"}},
	}
	return newSource(fmt.Sprintf("GCE, for %.256q", audience), m.logger, func(ctx context.Context) (token, error) {
		data, header, err := r.send(ctx, m.http)
		if err != nil {
			return token{}, err
		}
		return parseGCE(data, header, audience)
	}), nil
}

func parseGCE(data []byte, header http.Header, audience string) (token, error) {
	if header.Get("Metadata-Flavor") != "Google" {
		return token{}, errors.New("the answer is without the header Metadata-Flavor: Google, so it is not from Google's metadata server")
	}
	return newToken(strings.TrimSpace(string(data)), time.Time{}, audience)
}

// Azure returns a Source of access tokens of a managed identity of an Azure machine, for the resource: an application ID
// URI such as api://svidkit.example, for which Microsoft Entra issues them.
func Azure(resource string, o *MetadataOptions) (*Source, error) {
	m, err := newMetadata(o)
	if err == nil && resource == "" {
		err = errors.New("no resource")
	}
	if err != nil {
		return nil, fmt.Errorf("tokensource: Azure: %w", err)
	}
	query := url.Values{"api-version": {"2018-02-01"}, "resource": {resource}}
	if m.account != "" {
		query.Set("client_id", m.account)
	}
	r := &request{
		method:  http.MethodGet,
		url:     m.base + "/metadata/identity/oauth2/token?" + query.Encode(),
		header:  http.Header{"Metadata": {"true"}},
		passing: []int{http.StatusNotFound, http.StatusGone}, // while the server is updated
	}
	return newSource(fmt.Sprintf("Azure, for %.256q", resource), m.logger, func(ctx context.Context) (token, error) {
		start := time.Now()
		data, _, err := r.send(ctx, m.http)
		if err != nil {
			return token{}, err
		}
		return parseAccessToken(data, start)
	}), nil
}

// AWS returns a Source of the identity document of an EC2 instance, signed by AWS: a PKCS #7 message (the one that AWS
// calls rsa2048) in base64 on one line, with the document in it. The session that IMDSv2 demands is opened for each
// fetch.
//
// The document has no audience and no end: a server that was sent one can use it at another server that accepts
// it, for as long as the instance exists. Servers should accept it once for each instance, soon after its launch. Where
// there is a choice, take a token with an audience: in EKS that is a [File]. This package does not give credentials for
// AWS's own API, with which a server could act as the machine.
func AWS(o *MetadataOptions) (*Source, error) {
	m, err := newMetadata(o)
	if err == nil && m.account != "" {
		err = errors.New("an instance has one identity: leave Account empty")
	}
	if err != nil {
		return nil, fmt.Errorf("tokensource: AWS: %w", err)
	}
	return newSource("AWS", m.logger, func(ctx context.Context) (token, error) {
		open := &request{method: http.MethodPut, url: m.base + "/latest/api/token", header: http.Header{"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": {"60"}}}
		data, _, err := open.send(ctx, m.http)
		if _, silent := errors.AsType[*networkError](err); silent {
			return token{}, fmt.Errorf("open a session: %w (in a container, the hop limit of the instance's metadata options must be 2 or more)", err)
		}
		if err != nil {
			return token{}, fmt.Errorf("open a session: %w", err)
		}
		session, err := newToken(strings.TrimSpace(string(data)), time.Time{})
		if err != nil {
			return token{}, fmt.Errorf("open a session: %w", err)
		}
		read := &request{
			method: http.MethodGet, url: m.base + "/latest/dynamic/instance-identity/rsa2048",
			header: http.Header{"X-Aws-Ec2-Metadata-Token": {session.text}}, secrets: []string{session.text},
		}
		if data, _, err = read.send(ctx, m.http); err != nil {
			return token{}, err
		}
		return parsePKCS7(data)
	}), nil
}

// parsePKCS7 reads a message in base64 with line breaks. What it says is for its verifier.
func parsePKCS7(data []byte) (token, error) {
	der, err := base64.StdEncoding.Strict().DecodeString(string(data)) // which skips line breaks
	if err != nil || len(der) < 2 || der[0] != 0x30 {
		return token{}, errors.New("the answer is not a PKCS #7 message in base64")
	}
	return newToken(base64.StdEncoding.EncodeToString(der), time.Time{})
}
