// Package statuspage shows the state of a program's identities: an [http.Handler] for a browser on the same machine, over
// the reports of the program's parts.
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
// # What it shows
//
// The identities with their lifetimes as bars and the time of the next renewal; the trust roots and which part has them
// from where; what the parts depend on, such as a CA, an agent, files or a control plane, with the last success, the
// error and the next attempt; open streams and the names that clients ask for; the last pushes and the responses that
// clients rejected; and, above all that, what is wrong now.
//
// Of more than 200 identities or roots those with the next event are shown, and of other lists the first; the number of
// the others is below.
//
// # Live
//
// The page is complete without script. With it, parts of the page that change are replaced while it is open, once a
// second at most, by server-sent events. 16 pages can be live at the same time; another one stays as it was loaded.
// The parts are asked only while a page is being loaded or is live.
//
// # Whom it answers
//
// The page has no keys and no tokens. It does have IDs, paths, addresses and errors, for operators. A request is
// answered if it came to a loopback address, or a Unix socket, and is for localhost or for an address: a page of
// another site whose name was made to lead to this machine (DNS rebinding) is refused, and what it embeds gets nothing.
// It uses neither inline script nor inline style, which its Content-Security-Policy forbids. All text in it is escaped.
//
// An operator reaches the page of a pod by kubectl port-forward.
package statuspage

import (
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
	// Name is a word of the program's choice. No two parts have the same.
	Name string

	// Source tells the state of the part: a *secretcache.Manager, a *sds.Handler, or any other [report.Reporter]. Function
	// health.FromSources makes one of other sources of identities and trust bundles.
	Source report.Reporter
}

// maxLive is how many pages can be live at the same time.
const maxLive = 16

// Handler is a status page. [New] makes one. It is safe for concurrent use, and starts no goroutine.
type Handler struct {
	title string
	parts []Part
	live  *limit.Shares[struct{}]
	done  chan struct{} // closed by Close
	close func()

	mu  sync.Mutex
	now *rendering // nil before the first
}

// New returns a page with this title over these parts, of which there is at least one. It asks them nothing yet.
func New(title string, parts ...Part) (*Handler, error) {
	if len(parts) == 0 {
		return nil, errors.New("statuspage: new: no parts, such as the source of the identity")
	}
	h := &Handler{title: title, live: limit.NewShares[struct{}](maxLive, 0), done: make(chan struct{})}
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
	}
	return h, nil
}

// Close ends the pages that are live, and refuses others from then on; what is loaded is still answered. It is for
// [http.Server.RegisterOnShutdown], as Shutdown waits for requests. It may be called twice. It returns nil.
func (h *Handler) Close() error {
	h.close()
	return nil
}

// ServeHTTP implements [http.Handler] for GET and HEAD. The last element of the path says what is asked for, so that the
// page can be mounted anywhere:
//
//	/              the page; a mount point ends with a slash
//	status.json    the same as JSON
//	events         its changes, as server-sent events
//	page.css       the style of the page
//	page.js        the script of the page
//
// Other paths are answered with 404, requests over other addresses than loopback and those of other sites with 403, and
// those for another host with 421.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	for name, value := range map[string]string{
		"Cache-Control": "no-store",
		"Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; " +
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
	switch file {
	case "":
		write("text/html; charset=utf-8", h.render().page())
	case "status.json":
		write("application/json", h.render().json())
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

// refuse says why a request is not answered, if it is not.
func refuse(r *http.Request) (code int, why string) {
	_, network := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	switch {
	case network && !loopback.Reached(r):
		return http.StatusForbidden, "this page is served over loopback only; listen at 127.0.0.1"
	case !loopback.Host(r.Host) && (network || r.Context().Value(http.LocalAddrContextKey) == nil):
		return http.StatusMisdirectedRequest, "this server is localhost; it has no other name"
	case loopback.OtherSite(r) && r.Header.Get("Sec-Fetch-Dest") != "document": // which is a link
		return http.StatusForbidden, "this page is not for other sites"
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		return http.StatusMethodNotAllowed, "method not allowed"
	}
	return 0, ""
}
