package witsvid

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/tokens/token"
)

// canonicalTarget returns the canonical form of an http or https URI, which is equal for all its spellings: scheme
// and authority in lower case, no default port, and a path. Other targets are unchanged.
func canonicalTarget(target string) string {
	for _, s := range []struct{ scheme, port string }{{"https://", ":443"}, {"http://", ":80"}} {
		if len(target) <= len(s.scheme) || !strings.EqualFold(target[:len(s.scheme)], s.scheme) {
			continue
		}
		authority, path, _ := strings.Cut(target[len(s.scheme):], "/")
		return s.scheme + strings.TrimSuffix(strings.ToLower(authority), s.port) + "/" + path
	}
	return target
}

// targets are the names of a receiver, from its configuration.
type targets struct {
	origins []string // "https://authority": the path of the request follows
	exact   []string // whole values, in canonical form
}

func newTargets(list []string) (*targets, error) {
	if len(list) == 0 {
		return nil, errors.New("no targets; give the origins by which clients know this server, " +
			`such as "https://db.example.org"`)
	}
	t := &targets{}
	for _, s := range list {
		if err := (&Call{Target: s}).check(); err != nil {
			return nil, fmt.Errorf("the target %q: %w", token.Clip(s, 4*token.MaxQuoted), err)
		}
		canonical := canonicalTarget(s)
		switch {
		case strings.HasPrefix(canonical, "http://"):
			return nil, fmt.Errorf("the target %q is not on TLS; use https", token.Clip(s, 4*token.MaxQuoted))
		case !strings.HasPrefix(canonical, "https://"):
			t.exact = append(t.exact, canonical)
			continue
		}
		u, err := url.Parse(canonical)
		switch {
		case err != nil || u.Hostname() == "" || u.User != nil:
			return nil, fmt.Errorf("the target %q names no host", token.Clip(s, 4*token.MaxQuoted))
		case u.EscapedPath() == "/":
			t.origins = append(t.origins, strings.TrimSuffix(canonical, "/"))
		default:
			t.exact = append(t.exact, canonical)
		}
	}
	return t, nil
}

// accept reports whether aud names this server and, if it is an origin with a path, the path of a request. The host
// in the request plays no part.
func (t *targets) accept(aud, requestTarget string) bool {
	aud = canonicalTarget(aud)
	path := targetPath(requestTarget)
	return slices.Contains(t.exact, aud) ||
		strings.HasPrefix(path, "/") && slices.ContainsFunc(t.origins, func(o string) bool { return aud == o+path })
}

// targetPath returns the path in the target of a request as it was sent, such as "/path?query" or
// "https://host/path?query". For "*" the path is empty, which in an audience is written "/".
func targetPath(requestTarget string) string {
	path, _, _ := strings.Cut(requestTarget, "?")
	if i := strings.Index(path, "://"); i > 0 && path[0] != '/' {
		_, path, _ = strings.Cut(path[i+3:], "/")
		return "/" + path
	}
	if path == "*" {
		return "/"
	}
	return path
}

// requestTarget returns the target in the first line of a request, or in ":path": as a server received it, or as a
// client will send it.
func requestTarget(r *http.Request) string {
	return cmp.Or(r.RequestURI, r.URL.RequestURI())
}

// targetURI returns the URI that a client is about to call, without query and fragment.
func targetURI(r *http.Request) (string, error) {
	host := cmp.Or(r.Host, r.URL.Host)
	uri := canonicalTarget("https://" + host + targetPath(r.URL.RequestURI()))
	if strings.ContainsFunc(uri, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
		return "", fmt.Errorf("the host %q is not in ASCII; write it as DNS does", token.Clip(host, token.MaxQuoted))
	}
	return uri, nil
}
