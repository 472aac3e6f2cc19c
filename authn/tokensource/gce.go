package tokensource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// GCEOptions are the optional settings of [GCE].
type GCEOptions struct {
	// URL is the URL of the metadata server or of a proxy for it; empty means http://169.254.169.254. With http, its
	// host must be localhost or an IP address that is loopback, link-local or fd20:ce::254.
	URL string

	// HTTPClient sends the requests. It is copied; the copy follows no redirects and keeps no cookies. An
	// *http.Transport with a Proxy is refused. If the client or its Transport is nil, no proxy is used.
	HTTPClient *http.Client

	// Logger is as in [ClientOptions].
	Logger *slog.Logger
}

// ofMetadata reports whether a may be a metadata server without TLS: an address of this machine or its link, or
// Google's IPv6 address, which is outside the link-local range.
func ofMetadata(a netip.Addr) bool {
	return a.IsLoopback() || a.IsLinkLocalUnicast() ||
		a == netip.AddrFrom16([16]byte{0xfd, 0x20, 0x00, 0xce, 14: 0x02, 15: 0x54})
}

// GCE returns a Source of identity tokens of a Google machine, or of the service account that GKE gives a pod: JWTs
// signed by Google for the audience, which is the whole identity of the receiving server. The metadata server must
// identify itself as Google's by the header Metadata-Flavor.
func GCE(audience string, o *GCEOptions) (*Source, error) {
	o = cmp.Or(o, &GCEOptions{})
	c := newClient(o.HTTPClient, nil)
	t, _ := c.Transport.(*http.Transport)
	u, err := checkURL(cmp.Or(o.URL, "http://169.254.169.254"), ofMetadata)
	switch {
	case err != nil:
		return nil, fmt.Errorf("tokensource: GCE: %w", err)
	case u.RawQuery != "":
		return nil, errors.New("tokensource: GCE: URL has a query")
	case audience == "":
		return nil, errors.New("tokensource: GCE: no audience")
	case t != nil && t.Proxy != nil:
		return nil, errors.New("tokensource: GCE: the transport of HTTPClient has a proxy, and a metadata server must " +
			"be asked directly: set Proxy to nil")
	}
	r := &request{
		method: http.MethodGet,
		url: strings.TrimRight(u.String(), "/") + "/computeMetadata/v1/instance/service-accounts/default/identity?" +
			url.Values{"audience": {audience}, "format": {"full"}}.Encode(),
		header: http.Header{"Metadata-Flavor": {"Google"}},
	}
	return newSource(fmt.Sprintf("GCE, for %.256q", audience), o.Logger, func(ctx context.Context) (token, error) {
		data, header, err := r.send(ctx, c)
		switch {
		case err != nil:
			return token{}, err
		case header.Get("Metadata-Flavor") != "Google":
			return token{}, errors.New("the answer is without the header Metadata-Flavor: Google, so it is not from " +
				"Google's metadata server")
		}
		return newToken(strings.TrimSpace(string(data)), time.Time{}, audience)
	}), nil
}
