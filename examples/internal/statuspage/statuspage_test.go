package statuspage_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var update = flag.Bool("update", false, "write testdata again")

func TestNew(t *testing.T) {
	t.Parallel()
	good := statuspage.Part{Name: "part", Source: fixed(report.Report{})}
	for want, parts := range map[string][]statuspage.Part{
		"no parts":                {},
		"part 1 needs a Name":     {{Source: good.Source}},
		"part 2 needs a Name":     {good, {Name: "a\nb", Source: good.Source}},
		"needs a Name of at most": {{Name: strings.Repeat("a", 501), Source: good.Source}},
		`two parts have the name`: {good, good},
		`part "x" has no Source`:  {{Name: "x"}},
	} {
		_, err := statuspage.New("agent", parts...)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "statuspage: new: ")
	}
	h := must.Get(statuspage.New("", good))(t)
	require.NoError(t, h.Close())
	require.NoError(t, h.Close())
}

// Serve makes the port for operators a part of a program, with the parts on the page and in the probes.
func TestServe(t *testing.T) {
	t.Parallel()
	g := program.NewGroup(t.Context())
	defer g.Stop()
	serve := func(address string, out io.Writer, parts ...statuspage.Part) error {
		return statuspage.Serve(g, "agent", address, nil, out, parts...)
	}
	var out bytes.Buffer
	part := statuspage.Part{Name: "part", Source: fixed(report.Report{})}
	require.NoError(t, serve("", &out, part))
	assert.Empty(t, out.String())
	require.ErrorContains(t, serve("127.0.0.1:none", &out, part), "-admin: ")
	require.ErrorContains(t, serve("", &out, statuspage.Part{Name: "x"}), "has no Source")
	require.NoError(t, serve("127.0.0.1:0", &out, part))
	url := regexp.MustCompile(`http://\S+/`).FindString(out.String())
	for path, want := range map[string]string{"": "<!doctype html>", "ready": "ok", "live": "ok", "metrics": "# "} {
		answer := must.Get(http.Get(url + path))(t)
		body := must.Get(io.ReadAll(answer.Body))(t)
		require.NoError(t, answer.Body.Close())
		assert.Contains(t, strings.ToLower(string(body)), want, path)
	}
}

// The page and its JSON are those in testdata.
func TestGolden(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newPage(t, statuspage.Part{Name: "sample", Source: reporter(func() report.Report { return sample(time.Now()) })})
		time.Sleep(time.Hour)
		for file, path := range map[string]string{"page.html": "/", "status.json": "/status.json"} {
			got := body(t, ask(t, h, http.MethodGet, path))
			file = filepath.Join("testdata", file)
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o600))
			}
			want := must.Get(os.ReadFile(file))(t)
			assert.Equal(t, string(want), got, "%s: go test ./examples/internal/statuspage -update", file)
		}
	})
}

// A reader without pictures, and one without script, get everything.
func TestAccessible(t *testing.T) {
	t.Parallel()
	html := page(t, of(t, sample(time.Now())))
	bars := regexp.MustCompile(`<svg [^>]*role="img">(<title>[^<]+</title>)?`).FindAllStringSubmatch(html, -1)
	assert.Len(t, bars, 2)
	for _, bar := range bars {
		assert.NotEmpty(t, bar[1])
	}
	assert.Contains(t, html, "67 % of the life from ")
	assert.Equal(t, strings.Count(html, "<table"), strings.Count(html, "<thead>"))
	for _, row := range regexp.MustCompile(`(?s)<tbody>.*?</tbody>`).FindAllString(html, -1) {
		assert.Equal(t, strings.Count(row, "<tr>"), strings.Count(row, `<th scope="row">`))
	}
	for _, id := range regexp.MustCompile(`aria-labelledby="([^"]*)"`).FindAllStringSubmatch(html, -1) {
		assert.Equal(t, 1, strings.Count(html, ` id="`+id[1]+`"`), id[1])
	}
	assert.NotRegexp(t, `(?i)<[^>]* (style|on[a-z]+)=`, html, "which the policy of the page forbids")
	assert.NotContains(t, html, "<style")
	assert.Regexp(t, `<script src="page.js" defer></script>`, html)
	assert.Equal(t, 1, strings.Count(html, "<script"))
	wellFormed(t, html)
}

// wellFormed fails unless each element of html that is begun is ended.
func wellFormed(t testing.TB, html string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(html))
	d.Strict = false
	d.AutoClose = xml.HTMLAutoClose
	d.Entity = xml.HTMLEntity
	var open []string
	for {
		token, err := d.RawToken()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		switch e := token.(type) {
		case xml.StartElement:
			if n := e.Name.Local; n != "meta" && n != "link" && n != "rect" {
				open = append(open, n)
			}
		case xml.EndElement:
			if e.Name.Local == "rect" {
				continue
			}
			require.NotEmpty(t, open)
			require.Equal(t, open[len(open)-1], e.Name.Local)
			open = open[:len(open)-1]
		}
	}
	require.Empty(t, open)
}

// hostile are texts that a client or a server has chosen.
var hostile = []string{
	`<script>alert(1)</script>`,
	`"><img src=x onerror=alert(1)>`,
	`' onmouseover='alert(1)`,
	"a\r\n\r\ndata: event: identities\n\nevent: clock",
	"\x00\x1b[31mred\u202eright\u2066\u200b",
	"\xff\xfe not UTF-8",
	`{{template "page"}}`,
	`</title></svg><script>`,
	strings.Repeat("long ", 1<<16),
	`javascript:alert(1)`,
	"-->]]>",
}

func everywhere(s string) report.Report {
	now := time.Now()
	err := errors.New(s)
	return report.Report{
		Identities: []report.Identity{{Name: s, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), Err: err}},
		Upstreams:  []report.Upstream{{Name: s, Err: err}},
		Servers: []report.Server{{
			Protocol: s, Names: map[string]string{s: s},
			Pushes: []report.Push{{Time: now, NACK: true, Names: []string{s, s}, Version: s, Client: s, Message: s}},
		}},
		Problems: []error{err},
	}
}

func TestEscaping(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	plain := everywhere("x")
	plain.Bundles = []report.Bundle{sourcereport.Bundle(ca.Bundle(), "x")}
	tags := regexp.MustCompile(`<[^<>]*`)
	elements := func(html string) (all []string) {
		for _, tag := range tags.FindAllString(html, -1) {
			name, _, _ := strings.Cut(tag, " ")
			all = append(all, name)
		}
		return all
	}
	want := elements(page(t, of(t, plain)))
	for _, s := range hostile {
		r := everywhere(s)
		r.Bundles = []report.Bundle{sourcereport.Bundle(ca.Bundle(), s)}
		h := must.Get(statuspage.New(s, statuspage.Part{Name: "part", Source: fixed(r)}))(t)
		html := page(t, h)
		assert.Equal(t, want, elements(html), "%.60q", s)
		wellFormed(t, html)
		assert.Less(t, len(html), 30_000, "%.60q", s)
		for _, bad := range []string{"\u202e", "\u2066", "\u200b", "\x00", "\x1b", "onerror=alert(1)>", "<script>"} {
			assert.NotContains(t, html, bad, "%.60q", s)
		}
		var v map[string]any
		require.NoError(t, json.Unmarshal([]byte(body(t, ask(t, h, http.MethodGet, "/status.json"))), &v))
		for _, e := range events(t, h, 1) {
			assert.Contains(t, []string{"clock", "host", "summary", "problems", "identities", "attempts", "upstreams", "servers", "names", "events", "roots"}, e.name, "%.60q", s)
		}
	}
}

func TestRequests(t *testing.T) {
	t.Parallel()
	h := of(t, sample(time.Now()))
	at := func(a net.Addr) func(*http.Request) {
		return func(r *http.Request) {
			*r = *r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, a))
		}
	}
	host := func(s string) func(*http.Request) { return func(r *http.Request) { r.Host = s } }
	site := func(s, mode, dest string) func(*http.Request) {
		return func(r *http.Request) {
			r.Header.Set("Sec-Fetch-Site", s)
			r.Header.Set("Sec-Fetch-Mode", mode)
			r.Header.Set("Sec-Fetch-Dest", dest)
		}
	}
	loopback, lan := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, &net.TCPAddr{IP: net.IPv4(192, 168, 1, 2)}
	socket := &net.UnixAddr{Name: "/run/admin.sock", Net: "unix"}
	for _, c := range []struct {
		name, method, path string
		edit               []func(*http.Request)
		code               int
	}{
		{"page", "GET", "/", nil, 200},
		{"mounted", "GET", "/admin/status/", nil, 200},
		{"JSON", "GET", "/admin/status.json", nil, 200},
		{"style", "GET", "/page.css", nil, 200},
		{"script", "GET", "/page.js", nil, 200},
		{"HEAD", "HEAD", "/", nil, 200},
		{"HEAD of events", "HEAD", "/events", nil, 200},
		{"other path", "GET", "/etc/passwd", nil, 404},
		{"mount point without a slash", "GET", "/status", nil, 404},
		{"up", "GET", "/../..", nil, 404},
		{"POST", "POST", "/", nil, 405},
		{"DELETE", "DELETE", "/status.json", nil, 405},
		{"OPTIONS", "OPTIONS", "/", nil, 405},
		{"loopback", "GET", "/", []func(*http.Request){at(loopback), host("127.0.0.1:15021")}, 200},
		{"IPv6", "GET", "/", []func(*http.Request){at(&net.TCPAddr{IP: net.IPv6loopback}), host("[::1]:15021")}, 200},
		{"network", "GET", "/", []func(*http.Request){at(lan), host("192.168.1.2:15021")}, 403},
		{"network as localhost", "GET", "/", []func(*http.Request){at(lan)}, 403},
		{"rebinding", "GET", "/", []func(*http.Request){at(loopback), host("evil.test:15021")}, 421},
		{"rebinding of events", "GET", "/events", []func(*http.Request){at(loopback), host("evil.test")}, 421},
		{"rebinding of JSON", "GET", "/status.json", []func(*http.Request){at(loopback), host("localhost.evil.test")}, 421},
		{"rebinding without an address", "GET", "/", []func(*http.Request){host("evil.test")}, 421},
		{"no host", "GET", "/", []func(*http.Request){at(loopback), host("")}, 421},
		{"Unix socket", "GET", "/", []func(*http.Request){at(socket), host("agent")}, 200},
		{"its own script", "GET", "/status.json", []func(*http.Request){site("same-origin", "cors", "empty")}, 200},
		{"typed", "GET", "/", []func(*http.Request){site("none", "navigate", "document")}, 200},
		{"a link", "GET", "/", []func(*http.Request){site("cross-site", "navigate", "document")}, 200},
		{"a frame", "GET", "/events", []func(*http.Request){site("cross-site", "navigate", "iframe")}, 403}, // or 16 of them would be all that is live
		{"fetch of another site", "GET", "/status.json", []func(*http.Request){site("cross-site", "no-cors", "image")}, 403},
		{"another port of this host", "GET", "/events", []func(*http.Request){site("same-site", "cors", "empty")}, 403},
	} {
		r := ask(t, h, c.method, c.path, c.edit...)
		assert.Equal(t, c.code, r.StatusCode, c.name)
		assert.Equal(t, "no-store", r.Header.Get("Cache-Control"), c.name)
		assert.Equal(t, "nosniff", r.Header.Get("X-Content-Type-Options"), c.name)
		assert.Equal(t, "same-origin", r.Header.Get("Cross-Origin-Resource-Policy"), c.name)
		policy := r.Header.Get("Content-Security-Policy")
		assert.Contains(t, policy, "default-src 'none'", c.name)
		assert.Contains(t, policy, "frame-ancestors 'none'", c.name)
		assert.NotContains(t, policy, "unsafe", c.name)
		if c.code == 405 {
			assert.Equal(t, "GET, HEAD", r.Header.Get("Allow"), c.name)
		}
		if c.code != 200 {
			assert.NotContains(t, body(t, r), "example.org", c.name)
		}
	}
}

func TestStates(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		in := func(d time.Duration) time.Time { return now.Add(d) }
		h := of(t, report.Report{
			Identities: []report.Identity{
				{Name: "a-missing"},
				{Name: "b-expired", NotAfter: in(-time.Second), Err: errCA},
				{Name: "c-early", NotBefore: in(time.Second), NotAfter: in(time.Hour)},
				{Name: "d-retrying", NotAfter: in(time.Hour), Err: errCA},
				{Name: "e-renewing", NotAfter: in(time.Hour), Renewal: in(-time.Second)},
				{Name: "f-valid", NotAfter: in(0), Renewal: in(time.Second)},
			},
			Upstreams: []report.Upstream{{Name: "waiting"}, {Name: "ok", LastSuccess: now}, {Name: "ok", OK: true}, {Name: "failing", OK: true, LastSuccess: now, Err: errCA}},
		})
		s := read(t, h)
		var states []string
		for _, i := range s.Identities.Rows {
			states = append(states, i.Name[2:]+" "+i.State)
		}
		assert.Equal(t, []string{"missing missing", "expired expired", "early not yet valid", "retrying retrying", "renewing renewing", "valid valid"}, states)
		for _, u := range s.Upstreams.Rows {
			assert.Equal(t, u.Name, u.State)
		}
		var problems []string
		for _, p := range s.Problems.Rows {
			problems = append(problems, p.What+" "+p.Error)
		}
		assert.Equal(t, []string{"b-expired the CA is down", "c-early not yet valid"}, problems, "the same error comes once")
	})
}

// Each thing that is not as it should be is told, also if others of the part are so, too.
func TestEachProblem(t *testing.T) {
	t.Parallel()
	now := time.Now()
	var r report.Report
	for _, name := range []string{"one", "two"} {
		empty := must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain(name+".test"), spiffe.BundleContents{}))(t)
		r.Identities = append(r.Identities, report.Identity{Name: name, NotAfter: now.Add(-time.Hour)})
		r.Bundles = append(r.Bundles, sourcereport.Bundle(empty, "CA"))
	}
	var told []string
	for _, p := range read(t, of(t, r)).Problems.Rows {
		told = append(told, p.What+": "+p.Error)
	}
	assert.ElementsMatch(t, []string{
		"one: expired", "two: expired", "one.test: the trust bundle is empty", "two.test: the trust bundle is empty",
	}, told)
}

// Origins are texts of others, too: a line in one must not begin an event.
func TestOrigin(t *testing.T) {
	t.Parallel()
	empty := must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain("empty.test"), spiffe.BundleContents{}))(t)
	h := of(t, report.Report{Bundles: []report.Bundle{sourcereport.Bundle(empty, "a\r\revent: summary\rdata: No problems"+strings.Repeat("x", 3000))}})
	assert.NotContains(t, page(t, h), "\r")
	s := read(t, h)
	require.Len(t, s.Problems.Rows, 1)
	assert.NotContains(t, s.Problems.Rows[0].Part, "\r")
	assert.Less(t, len(s.Problems.Rows[0].Part), 600)
}

// Certificates that never end (RFC 5280, 4.1.2.5) end later than a time.Duration can say, and a Reporter may say anything.
func TestFarTimes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		never := time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
		h := of(t, report.Report{
			Identities: []report.Identity{
				{Name: "a", NotBefore: now.AddDate(-100, 0, 0), NotAfter: never},
				{Name: "b", NotBefore: now, NotAfter: time.Date(30_000, 1, 1, 0, 0, 0, 0, time.UTC), Renewal: time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)},
			},
			Upstreams: []report.Upstream{{Name: "c", LastSuccess: time.Date(2, 1, 1, 0, 0, 0, 0, time.UTC)}},
		})
		html := page(t, h)
		identities := section(t, html, "identities")
		assert.Contains(t, identities, "in 8005 y", "of 365 days, from the year 2000 on, where the bubble begins")
		assert.Contains(t, identities, "1 % of the life")
		assert.Contains(t, section(t, html, "upstreams"), "1999 y ago")
		assert.Len(t, read(t, h).Identities.Rows, 2)
	})
}

// Of many rows the page has those with the next event, and the number of the others.
func TestBounds(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	now := time.Now()
	var r report.Report
	names := map[string]string{}
	const many = 10_000
	for i := range many {
		id := fmt.Sprintf("spiffe://example.org/%05d/%s", i, strings.Repeat("x", 200))
		r.Identities = append(r.Identities, report.Identity{
			Name: id, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour), Renewal: now.Add(time.Duration(many-i) * time.Second),
		})
		names[id] = "version"
		r.Upstreams = append(r.Upstreams, report.Upstream{Name: id, Err: fmt.Errorf("error %d: %w", i, errCA)})
	}
	r.Identities[7].NotAfter = now.Add(-time.Hour) // expired, with a renewal far away
	names["late"] = ""
	server := report.Server{Protocol: "SDS", Names: names}
	for i := range 1000 {
		server.Pushes = append(server.Pushes, report.Push{Time: now.Add(time.Duration(i) * time.Second), Names: make([]string, 1000), Version: fmt.Sprint(i)})
	}
	r.Servers = []report.Server{server}
	h := of(t, r)
	s := read(t, h)
	assert.Len(t, s.Identities.Rows, 200)
	assert.Equal(t, many-200, s.Identities.Omitted)
	assert.Contains(t, s.Identities.Rows[0].Name, "/00007/", "sorted by name")
	assert.Contains(t, s.Identities.Rows[199].Name, "/09999/")
	assert.Len(t, s.Names.Rows, 200)
	assert.Equal(t, "late", s.Names.Rows[0].Name)
	assert.Equal(t, many, s.Servers.Rows[0].Served)
	assert.Equal(t, 1, s.Servers.Rows[0].Waiting)
	assert.Len(t, s.Problems.Rows, 200)
	assert.Equal(t, many+1-200, s.Problems.Omitted)
	assert.Len(t, s.Upstreams.Rows, 200)
	assert.Len(t, s.Events.Rows, 50)
	assert.Equal(t, "999", s.Events.Rows[0].Version)
	assert.Len(t, s.Events.Rows[0].Names, 9)
	assert.Equal(t, "and 992 more", s.Events.Rows[0].Names[8])
	html := page(t, h)
	assert.Less(t, len(html), 1<<20)
	assert.Contains(t, section(t, html, "identities"), "and 9800 more")
	assert.Contains(t, html, "10001 problems")
}

// A program with 10,000 identities: all in order, and all with an error of their own.
func BenchmarkPage(b *testing.B) {
	now := time.Now()
	for name, failed := range map[string]func(int) error{
		"good":   func(int) error { return nil },
		"failed": func(i int) error { return fmt.Errorf("identity %d is denied", i) },
	} {
		b.Run(name, func(b *testing.B) {
			var r report.Report
			for i := range 10_000 {
				r.Identities = append(r.Identities, report.Identity{
					Name: fmt.Sprintf("spiffe://example.org/%d", i), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
					Renewal: now.Add(time.Duration(i%999) * time.Second), Err: failed(i),
				})
			}
			for b.Loop() {
				page(b, of(b, r)) // a new one, as pages are kept for a moment
			}
		})
	}
}

// The parts are asked once for what many clients load at the same moment, and no more than a part of the time.
func TestRate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		h := newPage(t, statuspage.Part{Name: "slow", Source: reporter(func() report.Report {
			asked++
			time.Sleep(time.Second)
			return report.Report{}
		})})
		for range 100 {
			page(t, h)
			read(t, h)
		}
		assert.Equal(t, 1, asked)
		time.Sleep(21 * time.Second)
		page(t, h)
		assert.Equal(t, 2, asked)
	})
}

func TestRoots(t *testing.T) {
	t.Parallel()
	ca, partner := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	empty := must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain("empty.test"), spiffe.BundleContents{}))(t)
	h := newPage(t,
		statuspage.Part{Name: "identity", Source: fixed(report.Report{Bundles: []report.Bundle{sourcereport.Bundle(ca.Bundle(), "CA"), sourcereport.Bundle(partner.Bundle(), "CA")}})},
		statuspage.Part{Name: "federation", Source: fixed(report.Report{Bundles: []report.Bundle{
			sourcereport.Bundle(partner.Bundle(), "https://partner.test"), sourcereport.Bundle(empty, ""), {TrustDomain: "late.test", Err: errors.New("not yet")},
		}})},
	)
	s := read(t, h)
	require.Len(t, s.Roots.Rows, 3)
	assert.Equal(t, "empty.test", s.Roots.Rows[0].TrustDomain)
	assert.Equal(t, "empty", s.Roots.Rows[0].State)
	assert.Equal(t, []string{"federation"}, s.Roots.Rows[0].From)
	assert.Equal(t, []string{"identity (CA)"}, s.Roots.Rows[1].From)
	assert.Equal(t, "X.509", s.Roots.Rows[1].Kind)
	assert.Len(t, s.Roots.Rows[1].SHA256, 64)
	assert.Equal(t, []string{"identity (CA)", "federation (https://partner.test)"}, s.Roots.Rows[2].From, "once, with both")
	require.Len(t, s.Problems.Rows, 1)
	assert.Equal(t, "the trust bundle is empty", s.Problems.Rows[0].Error)
}

// sse is a server-sent event.
type sse struct{ name, data string }

// listen returns the events of a page on a real server.
func listen(t testing.TB, address string) (next func() (sse, error), closeIt func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, address+"/events", nil))(t)
	resp := must.Get(http.DefaultClient.Do(r))(t)
	closeIt = func() {
		cancel()
		_ = resp.Body.Close()
	}
	t.Cleanup(closeIt)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
	in := bufio.NewReader(resp.Body)
	return func() (e sse, err error) {
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return e, err
			}
			field, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
			switch {
			case field == "event":
				e.name = value
			case field == "data":
				e.data += value + "\n"
			case line == "\n" && e.name != "":
				return e, nil
			}
		}
	}, closeIt
}

// events returns the events of the first n seconds.
func events(t testing.TB, h http.Handler, n int) (all []sse) {
	t.Helper()
	server := httptest.NewServer(h)
	defer server.Close()
	next, closeIt := listen(t, server.URL)
	defer closeIt()
	for clocks := 0; ; {
		e := must.Get(next())(t)
		if e.name == "clock" {
			if clocks++; clocks > n {
				return all
			}
		}
		all = append(all, e)
		if n == 1 && e.name == "roots" { // the last of the first time
			return all
		}
	}
}

func TestEvents(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	var failing atomic.Bool
	end := time.Now().Add(100*time.Hour + time.Minute)
	h := newPage(t, statuspage.Part{Name: "part", Source: reporter(func() (r report.Report) {
		r.Identities = []report.Identity{{Name: "spiffe://example.org/web", NotAfter: end}}
		if failing.Load() {
			r.Upstreams = []report.Upstream{{Name: "CA", Err: errCA}}
		}
		return r
	})})
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	html := page(t, h)
	next, _ := listen(t, server.URL)
	for _, want := range []string{"clock", "host", "summary", "problems", "identities", "attempts", "upstreams", "servers", "names", "events", "roots"} {
		e := must.Get(next())(t)
		require.Equal(t, want, e.name)
		if want == "identities" {
			assert.Equal(t, section(t, html, "identities"), strings.TrimSpace(e.data))
		}
	}
	failing.Store(true)
	seen := map[string]bool{}
	for !seen["upstreams"] {
		e := must.Get(next())(t)
		seen[e.name] = true
		assert.Contains(t, []string{"clock", "host", "summary", "problems", "attempts", "upstreams"}, e.name, "nothing else has changed")
		if e.name == "upstreams" {
			assert.Contains(t, e.data, "the CA is down")
		}
	}
	assert.True(t, seen["problems"])
	failing.Store(false)
	for e := (sse{}); e.name != "problems"; {
		var err error
		e, err = next()
		require.NoError(t, err)
		if e.name == "problems" {
			assert.Equal(t, "\n", e.data, "which a browser takes for empty")
		}
	}

	// Close ends it, so that the server can shut down.
	require.NoError(t, h.Close())
	defer time.AfterFunc(3*time.Second, server.CloseClientConnections).Stop()
	for {
		if _, err := next(); err != nil {
			require.ErrorIs(t, err, io.EOF)
			break
		}
	}
	r := ask(t, h, http.MethodGet, "/events")
	assert.Equal(t, http.StatusServiceUnavailable, r.StatusCode)
	assert.Equal(t, http.StatusOK, ask(t, h, http.MethodGet, "/").StatusCode)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, server.Config.Shutdown(ctx))
}

// As many pages are live as may be, half of them for one user, and a page that is closed makes room for another.
func TestEventsBound(t *testing.T) {
	t.Parallel()
	h := of(t, report.Report{})
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	t.Cleanup(func() { _ = h.Close() }) // before the server waits
	var closeOne func()
	for range 8 {
		next, closeIt := listen(t, server.URL)
		must.Get(next())(t)
		closeOne = closeIt
	}
	of := func(user string) func(*http.Request) {
		return func(r *http.Request) {
			r.RemoteAddr = "127.0.0.1:1"
			*r = *r.WithContext(peerkey.NewContext(r.Context(), user))
		}
	}
	r := ask(t, h, http.MethodGet, "/events", of("")) // as the server's clients, an address
	require.Equal(t, http.StatusServiceUnavailable, r.StatusCode)
	assert.Contains(t, body(t, r), "of which 16 can be, and 8 for one user")
	another := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(peerkey.WithUser(r.Context(), "uid 7")))
	}))
	t.Cleanup(another.Close)
	t.Cleanup(func() { _ = h.Close() })
	for range 8 {
		next, _ := listen(t, another.URL)
		must.Get(next())(t, "another user")
	}
	r = ask(t, h, http.MethodGet, "/events", of("uid 8"))
	require.Equal(t, http.StatusServiceUnavailable, r.StatusCode, "all are taken")
	assert.Equal(t, http.StatusOK, ask(t, h, http.MethodGet, "/").StatusCode)
	closeOne()
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		return ask(t, h, http.MethodGet, "/events", of(""), func(r *http.Request) { *r = *r.WithContext(ctx) }).StatusCode == http.StatusOK
	}, time.Minute, 10*time.Millisecond)
}

// stuck is a client that takes so much, and then nothing.
type stuck struct {
	http.ResponseWriter
	takes    int
	deadline time.Time
}

func (s *stuck) SetWriteDeadline(at time.Time) error {
	s.deadline = at
	return nil
}

func (s *stuck) Flush() {}

func (s *stuck) Write(b []byte) (int, error) {
	if s.takes--; s.takes >= 0 {
		return len(b), nil
	}
	if s.deadline.IsZero() {
		select {} // for ever
	}
	time.Sleep(time.Until(s.deadline))
	return 0, os.ErrDeadlineExceeded
}

// A client that does not read, and one that is gone without a word, hold a place for seconds.
func TestEventsStuck(t *testing.T) {
	t.Parallel()
	for takes, want := range map[int]time.Duration{0: 10 * time.Second, 1: 11 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			h := of(t, report.Report{})
			began := time.Now()
			for range 17 { // one after the other
				h.ServeHTTP(&stuck{ResponseWriter: httptest.NewRecorder(), takes: takes}, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/events", nil))
			}
			assert.Equal(t, 17*want, time.Since(began))
		})
	}
}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}

// sample has something of everything.
func sample(now time.Time) report.Report {
	return report.Report{
		Identities: []report.Identity{
			{Name: "spiffe://example.org/retrying", NotBefore: now.Add(-40 * time.Minute), NotAfter: now.Add(20 * time.Minute), Renewal: now.Add(30 * time.Second), Failures: 3, Err: errCA},
			{Name: "spiffe://example.org/expired", NotBefore: now.Add(-2 * time.Hour), NotAfter: now.Add(-time.Hour)},
			{Name: "spiffe://example.org/missing", Err: errors.New("not registered")},
			{Name: "file-cert:/etc/certs/cert.pem~/etc/certs/key.pem", NotAfter: now.Add(90 * 24 * time.Hour)},
		},
		Upstreams: []report.Upstream{
			{Name: "https://istiod.istio-system.svc:15012", LastSuccess: now.Add(-2 * time.Minute), NextAttempt: now.Add(30 * time.Second), Failures: 3, Err: errCA},
			{Name: "/etc/certs", LastSuccess: now.Add(-3 * time.Second)},
			{Name: "unix:///run/spire/agent.sock", NextAttempt: now.Add(time.Second)},
		},
		Servers: []report.Server{{
			Protocol: "SDS", Streams: 3, Names: map[string]string{"default": "0123456789abcdef0123456789abcdef", "ROOTCA": "fedcba9876543210fedcba9876543210", "late": ""},
			Pushes: []report.Push{
				{Time: now.Add(-5 * time.Second), Names: []string{"default"}, Version: "0123456789abcdef0123456789abcdef", Streams: 2},
				{Time: now.Add(-4 * time.Second), NACK: true, Names: []string{"default"},
					Version: "0123456789abcdef0123456789abcdef", Streams: 1, Client: "sidecar~10.1.2.3~web-1.ns~ns.svc.cluster.local",
					Message: "KEY_VALUES_MISMATCH"},
			},
		}},
		Problems: []error{errors.New("an entry of a bundle was skipped")},
	}
}

// dialled is the error of a connection.
func dialled(err error) error {
	addr := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 15012}
	return fmt.Errorf("sign: %w", &net.OpError{Op: "dial", Net: "tcp", Addr: addr, Err: err})
}

// TestWords: what has one cause is one problem, which says in words since when it lasts, when it is tried again, and what to do;
// what has expired, or ends first, comes first.
func TestWords(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		refused := dialled(os.NewSyscallError("connect", syscall.ECONNREFUSED))
		one := func(name string, end time.Duration, err error) report.Identity {
			return report.Identity{
				Name: name, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(end), Renewal: now.Add(5 * time.Second), Since: now.Add(-40 * time.Second), Failures: 2, Err: err,
			}
		}
		h := of(t, report.Report{
			Identities: []report.Identity{
				one("spiffe://example.org/late", 10*time.Minute, refused),
				one("spiffe://example.org/gone", -16*time.Second, refused),
				one("spiffe://example.org/soon", 20*time.Second, refused),
				one("spiffe://example.org/denied", 30*time.Second, errors.New("denied")),
				{Name: "spiffe://example.org/none", Err: errors.New("not registered")},
				{Name: "spiffe://example.org/file", NotBefore: now.Add(-time.Hour), NotAfter: now.Add(-20 * time.Second)},
				{Name: "spiffe://example.org/future", NotBefore: now.Add(time.Minute), NotAfter: now.Add(time.Hour)},
			},
			Upstreams: []report.Upstream{
				{Name: "CA 127.0.0.1:15012", Since: now.Add(-40 * time.Second), NextAttempt: now.Add(5 * time.Second), Err: refused},
				{Name: "files", Err: &fs.PathError{Op: "open", Path: "/etc/certs/key.pem", Err: syscall.EACCES}},
			},
			Problems: []error{errors.New("an entry was skipped")},
		})
		text := page(t, h)
		at := 0
		for _, want := range []string{
			"<code>spiffe://example.org/file</code> expired 20 s ago",
			"To do: see why what writes or renews it has no newer one: CA 127.0.0.1:15012.",
			"<code>spiffe://example.org/gone</code> expired 16 s ago; 127.0.0.1:15012 refuses connections, for 40 s; next attempt in 5 s; 3 identities",
			"To do: start what listens there, or correct the address.",
			"connection refused",
			"<code>spiffe://example.org/none</code> there is none yet; not registered",
			"<code>spiffe://example.org/denied</code> expires in 30 s; denied, for 40 s; next attempt in 5 s",
			"<code>spiffe://example.org/future</code> valid in 60 s",
			"To do: compare the clocks of this machine and of the CA.",
			"<code>files</code> this process may not open /etc/certs/key.pem",
			"To do: let the user of this process read it.",
			"an entry was skipped",
		} {
			next := strings.Index(text[at:], want)
			require.GreaterOrEqual(t, next, 0, "%s\nin %s", want, text[at:min(at+3000, len(text))])
			at += next
		}
		assert.Equal(t, 4, strings.Count(text, "To do: "), "an error whose remedy is not known has none but its own")
		assert.NotContains(t, text, "the log")
		assert.Contains(t, text, ">7 problems<", "the CA that refuses is no other one than that of the identities")
	})
}

func TestCauses(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"127.0.0.1:15012 does not answer in time":          dialled(os.ErrDeadlineExceeded),
		"the other side does not answer in time":           fmt.Errorf("sign: %w", context.DeadlineExceeded),
		"/run/agent.sock is not there":                     &net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: "/run/agent.sock", Net: "unix"}, Err: os.NewSyscallError("connect", syscall.ENOENT)},
		"/var/run/token is not there":                      fmt.Errorf("token: %w", &fs.PathError{Op: "open", Path: "/var/run/token", Err: syscall.ENOENT}),
		"no address is known for ca.test":                  dialled(&net.DNSError{Err: "no such host", Name: "ca.test", IsNotFound: true}),
		"does not lead to the roots that are trusted here": dialled(x509.UnknownAuthorityError{}),
		"something else":                                   errors.New("something else"),
	} {
		assert.Contains(t, page(t, of(t, report.Report{Problems: []error{err}})), want)
	}
}

// TestOpenSSL: serial, fingerprint and issuer are what openssl prints, of an identity that is kept for others, too.
func TestOpenSSL(t *testing.T) {
	t.Parallel()
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Skip("there is no openssl: ", err)
	}
	ca := spiffetest.NewCA(t, "example.org")
	m, err := secretcache.Start(t.Context(), secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca, CAName: "ca.test:15012"})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, m.Close()) })
	other := spiffe.MustParseID("spiffe://example.org/db")
	require.NoError(t, m.Add(other))
	chain, _, ok := must.Get(m.GenerateSecret(t.Context(), other.String()))(t).KeyPair()
	require.True(t, ok)
	svid := must.Get(m.SVID())(t)
	r := m.Report()
	text := page(t, of(t, r))
	for _, cert := range [][]byte{
		chain, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: svid.Leaf().Raw}), ca.Bundle().MarshalPEM(),
	} {
		cmd := exec.Command(openssl, "x509", "-noout", "-serial", "-fingerprint", "-sha256", "-issuer", "-nameopt", "RFC2253")
		cmd.Stdin = bytes.NewReader(cert)
		out := must.Get(cmd.Output())(t)
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSpace(line)
			if _, sum, ok := strings.Cut(line, "ingerprint="); ok {
				line = "SHA-256 " + strings.ToLower(strings.ReplaceAll(sum, ":", ""))
			} else if serial, ok := strings.CutPrefix(line, "serial="); ok { // hexadecimal has one form here
				line = "serial=" + strings.TrimLeft(strings.ToLower(serial), "0")
			}
			assert.Contains(t, text, ">"+line+"<")
		}
	}
	assert.Contains(t, text, "CA ca.test:15012")
	assert.Contains(t, text, "renewed")
	require.NotEmpty(t, r.Attempts)
}

// TestRemedyOfExpired: an identity that has expired without an error is told with where the next one comes from: a file, a socket, or
// the address of a CA.
func TestRemedyOfExpired(t *testing.T) {
	t.Parallel()
	i := report.Identity{Name: "spiffe://example.org/web", NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(-time.Minute)}
	for _, from := range []string{"/etc/certs/tls.crt", "unix:///run/agent.sock (X.509)", "CA ca.test:15012"} {
		assert.Contains(t, page(t, of(t, report.Report{Identities: []report.Identity{i}, Upstreams: []report.Upstream{{Name: from, OK: true}}})),
			"To do: see why what writes or renews it has no newer one: "+from+".")
	}
	assert.Contains(t, page(t, of(t, report.Report{Identities: []report.Identity{i}})), "To do: see why what writes or renews it has no newer one.")
}

// reporter is a part that says what it is told to.
type reporter func() report.Report

func (r reporter) Report() report.Report { return r() }

// fixed says always the same.
func fixed(r report.Report) reporter { return func() report.Report { return r } }

func newPage(t testing.TB, parts ...statuspage.Part) *statuspage.Handler {
	t.Helper()
	h := must.Get(statuspage.New("agent", parts...))(t)
	t.Cleanup(func() { assert.NoError(t, h.Close()) })
	return h
}

// of is a page of one part.
func of(t testing.TB, r report.Report) *statuspage.Handler {
	t.Helper()
	return newPage(t, statuspage.Part{Name: "part", Source: fixed(r)})
}

// ask returns the answer to a request as of a client on the same machine.
func ask(t testing.TB, h http.Handler, method, path string, edit ...func(*http.Request)) *http.Response {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // for events that should not have begun
	defer cancel()
	r := httptest.NewRequestWithContext(ctx, method, "http://localhost"+path, nil)
	for _, e := range edit {
		e(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func body(t testing.TB, r *http.Response) string {
	t.Helper()
	return string(must.Get(io.ReadAll(r.Body))(t))
}

func page(t testing.TB, h http.Handler) string {
	t.Helper()
	r := ask(t, h, http.MethodGet, "/")
	require.Equal(t, http.StatusOK, r.StatusCode)
	return body(t, r)
}

// status is the JSON form, as a client reads it.
type status struct {
	Title      string
	Problems   list[struct{ Part, What, Error string }]
	Identities list[identity]
	Roots      list[struct {
		TrustDomain               string `json:"trust_domain"`
		Kind, Name, SHA256, State string
		From                      []string
	}]
	Upstreams list[struct {
		Part, Name, State, Error string
		LastSuccess              string `json:"last_success"`
		NextAttempt              string `json:"next_attempt"`
		Failures                 int
	}]
	Servers list[struct {
		Part, Protocol           string
		Streams, Served, Waiting int
	}]
	Names  list[struct{ Part, Name, Version string }]
	Events list[struct {
		Part, Kind, Version, Client, Message string
		Names                                []string
		Streams                              int
	}]
}

type identity struct {
	Part, Name, State, Error, Renewal string
	NotBefore                         string `json:"not_before"`
	NotAfter                          string `json:"not_after"`
	Failures                          int
}

type list[T any] struct {
	Rows    []T
	Omitted int
}

func read(t testing.TB, h http.Handler) (s status) {
	t.Helper()
	r := ask(t, h, http.MethodGet, "/status.json")
	require.Equal(t, http.StatusOK, r.StatusCode)
	require.Equal(t, "application/json", r.Header.Get("Content-Type"))
	require.NoError(t, json.Unmarshal([]byte(body(t, r)), &s))
	return s
}

// section returns what is in the element of that ID that is replaced while the page is live.
func section(t testing.TB, html, id string) string {
	t.Helper()
	_, rest, ok := strings.Cut(html, ` id="`+id+`">`)
	require.True(t, ok, id)
	if end := strings.Index(rest, "</div>"); end >= 0 {
		rest = rest[:end]
	}
	return rest
}

var errCA = errors.New("the CA is down")
