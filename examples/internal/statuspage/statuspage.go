// Package statuspage shows the state of a program's identities: an [http.Handler] for a browser on the same machine,
// built from the reports of the program's parts.
//
//	page, err := statuspage.New("agent",
//		statuspage.Part{Name: "workload", Source: manager}, // a *secretcache.Manager
//		statuspage.Part{Name: "sds", Source: secrets},      // a *sds.Handler
//	)
//	…
//	server := &http.Server{Addr: "127.0.0.1:15021", Handler: page, ReadHeaderTimeout: 10 * time.Second}
//	server.RegisterOnShutdown(func() { _ = page.Close() })
//	err = server.ListenAndServe()
//
// Package report describes how a program adds its own part.
//
// # What it shows
//
// First come the current problems, in words. Effects with one cause are one problem, with its beginning, the next
// attempt, the number of affected identities and the remedy; expired identities come first, then those that end
// first. Then the page shows the identities with their lifetimes and next renewals; the last attempts to renew them;
// the parts' upstreams, such as a CA, an agent, files or a control plane, with the last success, the error and the
// next attempt; open streams and the names that clients ask for; the last pushes and rejections; and the trust roots,
// with the parts that have them. Serial numbers, fingerprints and issuers have the form of "openssl x509 -serial
// -fingerprint -sha256 -issuer -nameopt RFC2253". Empty lists are hidden, except identities and roots.
//
// It shows at most 200 identities and 200 roots (the next to expire or to be renewed), and the first rows of other
// lists. Below each list is the number of omitted rows.
//
// # Live
//
// The page is complete without script. With script, server-sent events replace changed sections, at most once a
// second. 16 pages can be live at the same time; others stay as loaded. The parts are asked only while a page is
// being loaded or is live.
//
// # Who gets an answer
//
// The page shows operators IDs, paths, addresses and errors, but no keys and no tokens. A request must come to a
// loopback address or a Unix socket, and be for localhost or an IP address. So it refuses a site whose name resolves
// to this machine (DNS rebinding), and other sites cannot embed it. Its Content-Security-Policy forbids inline
// scripts and styles. All text is escaped.
//
// Operators reach the page of a pod by kubectl port-forward.
package statuspage

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/loopback"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Part is a part of a program.
type Part struct {
	// Name identifies the part on the page. It must be unique.
	Name string

	// Source reports the state of the part: a *secretcache.Manager, a *sds.Handler, or any other [report.Reporter].
	// Function health.FromSources makes one from other sources of identities and trust bundles.
	Source report.Reporter

	// Links are further paths of the program for the page to link, such as /metrics, as mounted beside it.
	Links []string
}

// The numbers of live pages, in total and for one peer. A peer is a user of this machine if the server knows it, as
// package unixsocket's server does, and otherwise an address.
const (
	maxLive     = 16
	maxLiveEach = 8
)

// Handler is a status page. [New] makes one. It is safe for concurrent use and starts no goroutine.
type Handler struct {
	title string
	parts []Part
	links []string
	live  *limit.Shares[string]
	done  chan struct{} // closed by Close
	close func()

	html, json limit.Page

	mu  sync.Mutex
	now *rendering // nil before the first
}

// New returns a page with this title and at least one part. It does not ask the parts yet.
func New(title string, parts ...Part) (*Handler, error) {
	if len(parts) == 0 {
		return nil, errors.New("statuspage: new: no parts, such as the source of the identity")
	}
	h := &Handler{title: title, live: limit.NewShares[string](maxLive, maxLiveEach), done: make(chan struct{})}
	h.close = sync.OnceFunc(func() { close(h.done) })
	for i, p := range parts {
		switch {
		case p.Name == "" || bearer.Redact(p.Name) != p.Name:
			return nil, fmt.Errorf("statuspage: new: part %d needs a Name of at most 500 printable characters", i+1)
		case slices.ContainsFunc(h.parts, func(q Part) bool { return q.Name == p.Name }):
			return nil, fmt.Errorf("statuspage: new: two parts have the name %q", p.Name)
		case p.Source == nil:
			return nil, fmt.Errorf("statuspage: new: part %q has no Source", p.Name)
		}
		h.parts = append(h.parts, p)
		h.links = append(h.links, p.Links...)
	}
	return h, nil
}

// Close ends the live pages and refuses new ones; a page can still be loaded. Use it with
// [http.Server.RegisterOnShutdown], as Shutdown waits for requests. It may be called twice. It returns nil.
func (h *Handler) Close() error {
	h.close()
	return nil
}

// ServeHTTP implements [http.Handler] for GET and HEAD. Only the last element of the path counts, so the page can be
// mounted anywhere:
//
//	/              the page; a mount point ends with a slash
//	status.json    the same as JSON
//	events         its changes, as server-sent events
//	page.css       the style of the page
//	page.js        the script of the page
//
// Other paths get 404, requests from the network or from other sites 403, and requests for another host 421.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	for name, value := range map[string]string{
		"Cache-Control": "no-store",
		"Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; " +
			"img-src data:; " +
			"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
		"Cross-Origin-Opener-Policy":   "same-origin",
		"Cross-Origin-Resource-Policy": "same-origin",
		"Referrer-Policy":              "no-referrer",
		"X-Content-Type-Options":       "nosniff",
	} {
		header.Set(name, value)
	}
	if code, err := refuse(r); err != "" {
		if code == http.StatusMethodNotAllowed {
			header.Set("Allow", "GET, HEAD")
		}
		http.Error(w, err, code)
		return
	}
	file := "" // the page
	if !strings.HasSuffix(r.URL.Path, "/") {
		file = path.Base(r.URL.Path)
	}
	write := func(contentType string, body []byte) {
		header.Set("Content-Type", contentType)
		_, _ = w.Write(body) // an error means that the client is gone
	}
	share := func(contentType string, p *limit.Page, of func(*rendering) []byte) {
		body, done, _ := p.Get(func(b *bytes.Buffer) error {
			_, err := b.Write(of(h.render()))
			return err
		})
		defer done()
		write(contentType, body)
	}
	switch file {
	case "":
		share("text/html; charset=utf-8", &h.html, (*rendering).page)
	case "status.json":
		share("application/json", &h.json, (*rendering).json)
	case "events":
		h.serveEvents(w, r)
	case "page.css":
		write("text/css; charset=utf-8", css)
	case "page.js":
		write("text/javascript; charset=utf-8", script)
	default:
		http.NotFound(w, r)
	}
}

// refuse returns a status and a reason if the request must not be answered, and otherwise 0.
func refuse(r *http.Request) (code int, why string) {
	_, network := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	switch {
	case network && !loopback.Reached(r):
		return http.StatusForbidden, "this page is served over loopback only; listen at 127.0.0.1"
	case !loopback.Host(r.Host) && (network || r.Context().Value(http.LocalAddrContextKey) == nil):
		return http.StatusMisdirectedRequest, "this server is localhost; it has no other name"
	case loopback.OtherSite(r) && r.Header.Get("Sec-Fetch-Dest") != "document": // a link
		return http.StatusForbidden, "this page is not for other sites"
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		return http.StatusMethodNotAllowed, "method not allowed"
	}
	return 0, ""
}
