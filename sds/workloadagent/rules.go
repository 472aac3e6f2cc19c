package workloadagent

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// What permits each audience, and each namespace.
const anyAudience, anyNamespace = "*", "*"

// rules is the content of a file, with the state of its identities. Only that state changes.
type rules struct {
	workloads  []workload
	identities map[spiffe.ID]*identity
	outputs    []*output
	brokers    map[spiffe.ID]*broker.Grant
}

// workload is a rule: which processes get which identities.
type workload struct {
	match  *match // nil for no process
	grants []grant
}

// match has the selectors of a rule. A process must meet all of them; empty selectors are not set.
type match struct {
	uid, gid              *uint32
	executable, unit, pod string
	namespace, account    string // of the pod
	labels                map[string]string
}

// caller is the calling process. process and pod are called only if a selector needs them, and return false if nothing
// is certain.
type caller struct {
	unixsocket.Peer
	process func() (unixsocket.Process, bool)
	pod     func() (pod, bool)
}

// grant is an identity for the processes of a rule.
type grant struct {
	id        spiffe.ID
	hint      string
	audiences []string
}

// output is a directory for the files of an identity.
type output struct {
	id     spiffe.ID
	config filesink.Config // what the file says of it
	sink   *filesink.Sink
}

// meets reports whether a process meets all selectors.
func (m *match) meets(c caller) bool {
	if m == nil || m.uid != nil && *m.uid != c.UID || m.gid != nil && *m.gid != c.GID {
		return false
	}
	if m.executable != "" || m.unit != "" || m.pod != "" {
		p, ok := c.process()
		if !ok || m.executable != "" && m.executable != p.Executable || m.unit != "" && m.unit != p.Unit ||
			m.pod != "" && m.pod != p.Pod {
			return false
		}
	}
	if m.namespace == "" {
		return true
	}
	p, ok := c.pod()
	for key, value := range m.labels {
		have, there := p.Metadata.Labels[key]
		ok = ok && there && have == value
	}
	return ok && m.namespace == p.Metadata.Namespace && (m.account == "" || m.account == p.account())
}

// granted returns the identities of a process, the default one first, with distinct hints.
func (r *rules) granted(c caller) (all []grant) {
	for i := range r.workloads {
		if !r.workloads[i].match.meets(c) {
			continue
		}
		for _, g := range r.workloads[i].grants {
			if at := slices.IndexFunc(all, func(have grant) bool { return have.id == g.id }); at >= 0 {
				all[at].audiences = slices.Concat(all[at].audiences, g.audiences)
				continue
			}
			if slices.ContainsFunc(all, func(have grant) bool { return have.hint == g.hint }) {
				g.hint = "" // the earlier identity keeps the hint
			}
			all = append(all, g)
		}
	}
	return all
}

// permits reports whether the identity may have a token for all audiences.
func (g grant) permits(audiences []string) bool {
	return !slices.ContainsFunc(audiences, func(one string) bool {
		return !slices.Contains(g.audiences, one) && !slices.Contains(g.audiences, anyAudience)
	})
}

// parser reads a file. It keeps the first error, with its place.
type parser struct {
	*strictjson.Reader
	rules
	data []byte
	cfg  *Config
	err  error
}

func parse(data []byte, cfg *Config) (*rules, error) {
	p := &parser{Reader: strictjson.NewReader(data), data: data, cfg: cfg,
		rules: rules{identities: map[spiffe.ID]*identity{}, brokers: map[spiffe.ID]*broker.Grant{}}}
	p.object("the file", members{
		"workloads": func() { p.array("workloads", p.workload) },
		"brokers":   func() { p.array("brokers", p.broker) },
	})
	if !cfg.Broker.IsZero() {
		p.identities[cfg.Broker] = nil
	}
	if e, ok := errors.AsType[*strictjson.Error](p.End()); ok {
		p.err = nil // it may be about members missing after that
		p.fail(e.Offset, "%s; see that it is JSON: names and texts in double quotes, commas between, none after "+
			"the last, no comments", e.Reason)
	}
	return &p.rules, p.err
}

// fail records the first error, with its line and column.
func (p *parser) fail(at int, format string, args ...any) {
	if p.err == nil {
		before := p.data[:min(at, len(p.data))]
		line, column := bytes.Count(before, []byte("\n"))+1, len(before)-bytes.LastIndexByte(before, '\n')
		p.err = fmt.Errorf("line %d, column %d: %w", line, column, fmt.Errorf(format, args...))
	}
}

// is records an error, and skips the value, unless that is of the kind.
func (p *parser) is(kind strictjson.Kind, format string, args ...any) {
	if p.Kind() != kind {
		p.fail(p.Offset(), format, args...)
		p.Skip()
	}
}

// members read the values of an object's members.
type members map[string]func()

func (p *parser) object(what string, known members) {
	p.is(strictjson.Object, "%s has to be an object, in braces", what)
	for name := range p.Members() {
		if read := known[string(name)]; read != nil {
			read()
		} else {
			p.fail(p.Offset(), "%.64q is not known here: %s can have %s", name, what,
				strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
	}
}

func (p *parser) array(what string, element func()) {
	p.is(strictjson.Array, "%s has to be a list, in brackets", what)
	for range p.Elements() {
		element()
	}
}

// form is the required form of a text.
type form struct {
	pattern *regexp.Regexp
	want    string
}

var (
	labelForm = form{regexp.MustCompile(`^[-._A-Za-z0-9]*$`), "want the value of a label, in quotes"}
	anyForm   = form{regexp.MustCompile(`(?s).`), "want a text in quotes that is not empty"}
	pathForm  = form{regexp.MustCompile(`^(/([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+))+$`),
		"want an absolute path, without double slashes and dots"}
	unitForm = form{regexp.MustCompile(`^[^/]+\.(service|scope)$`),
		"want the whole name of a service or scope, such as web.service"}
	podForm = form{regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`),
		"want a UID, as kubectl get pod NAME -o jsonpath={.metadata.uid} prints it"}
	nameForm   = form{regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$`), "want a name, as kubectl prints it"}
	spaceForm  = form{regexp.MustCompile(`^([a-z0-9]([-.a-z0-9]*[a-z0-9])?|\*)$`), "want a namespace, or * for any"}
	kindForm   = form{regexp.MustCompile(`^(pid|pods|serviceaccounts)$`), "want pid, pods or serviceaccounts"}
	layoutForm = form{regexp.MustCompile(`^(delivery|split)$`),
		"want delivery, for credential-bundle.private-key.x509.pem, or split, for cert-chain.pem, key.pem and " +
			"root-cert.pem"}
	modeForm = form{regexp.MustCompile(`^0[46](44|40|00)$`), "want 0644, 0640, 0600, 0444, 0440 or 0400, in quotes"}
)

func (p *parser) text(name string, f form) string {
	at := p.Offset()
	text, ok := p.Text()
	if !ok || !f.pattern.Match(text) {
		p.fail(at, "%s is %.256q: %s", name, text, f.want)
	}
	return string(text)
}

// number reads the number of a user or a group.
func (p *parser) number(name string) uint32 {
	at := p.Offset()
	text, _ := p.Number()
	n, err := strconv.ParseUint(string(text), 10, 32)
	if err != nil || n == 1<<32-1 { // this number is no user
		p.fail(at, "%s has to be a number without quotes, as the command id prints it", name)
	}
	return uint32(n)
}

func (p *parser) mode(name string) fs.FileMode {
	mode, _ := strconv.ParseUint(p.text(name, modeForm), 8, 32)
	return fs.FileMode(mode)
}

func (p *parser) workload() {
	var w workload
	at, before := p.Offset(), len(p.outputs)
	p.object("a workload", members{
		"match":      func() { w.match = p.match() },
		"identities": func() { p.array("identities", func() { w.grants = append(w.grants, p.identity(w.grants)) }) },
	})
	if len(w.grants) == 0 {
		p.fail(at, "the workload has no identities: add at least one")
	} else if w.match == nil && len(p.outputs) == before {
		p.fail(at, "the workload has neither a match nor files, so that nothing gets its identities: add one")
	}
	p.workloads = append(p.workloads, w)
}

func (p *parser) match() *match {
	m := new(match)
	at := p.Offset()
	p.object("match", members{
		"uid":        func() { m.uid = new(p.number("uid")) },
		"gid":        func() { m.gid = new(p.number("gid")) },
		"executable": func() { m.executable = p.text("executable", pathForm) },
		"unit":       func() { m.unit = p.text("unit", unitForm) },
		"pod":        func() { m.pod = p.text("pod", podForm) },
		"namespace":  func() { m.namespace = p.text("namespace", nameForm) },
		"account":    func() { m.account = p.text("account", nameForm) },
		"labels":     func() { m.labels = p.texts("labels", "the value for each key", labelForm) },
	})
	switch {
	case m.namespace == "" && (m.account != "" || m.labels != nil):
		p.fail(at, "accounts and labels say something in their namespace alone: add a namespace")
	case m.namespace != "" && p.cfg.Node == "":
		p.fail(at, "this agent does not know the pods of the cluster, as workload-agent does with -node: select "+
			"by pod, and take the namespace out")
	case m.uid == nil && m.gid == nil && m.unit == "" && m.pod == "" && m.namespace == "":
		p.fail(at, "any user can run an executable with code of his own, so it needs something beside it: add a "+
			"uid, gid, unit, pod or namespace")
	}
	return m
}

func (p *parser) identity(others []grant) (g grant) {
	at, before := p.Offset(), len(p.outputs)
	p.object("an identity", members{
		"id": func() { g.id = p.id(others) },
		"hint": func() {
			at := p.Offset()
			g.hint = p.text("hint", anyForm)
			if len(g.hint) > 1024 || slices.ContainsFunc(others, func(o grant) bool { return o.hint == g.hint }) {
				p.fail(at, "the hint has more than 1024 bytes, or another identity of the workload has it: "+
					"choose another")
			}
		},
		"audiences": func() { g.audiences = p.list("audiences", anyForm) },
		"files":     func() { p.array("files", p.output) },
	})
	if g.id.IsZero() {
		p.fail(at, "the identity has no id")
	}
	for _, o := range p.outputs[before:] {
		o.id = g.id
	}
	p.identities[g.id] = nil
	return g
}

// list reads a list of texts.
func (p *parser) list(name string, f form) (all []string) {
	p.array(name, func() { all = append(all, p.text("one of "+name, f)) })
	return all
}

// broker reads what a broker may ask for.
func (p *parser) broker() {
	var id spiffe.ID
	var ids []string
	var err error
	g, at := new(broker.Grant), p.Offset()
	p.object("a broker", members{
		"id":         func() { id = p.id(nil) },
		"references": func() { g.References = p.list("references", kindForm) },
		"namespaces": func() { g.Namespaces = p.list("namespaces", spaceForm) },
		"audiences":  func() { g.Audiences = p.list("audiences", anyForm) },
		"identities": func() { ids = p.list("identities", anyForm) },
	})
	g.Identities, err = spiffe.ParsePolicy(strings.Join(ids, ", "))
	switch {
	case p.cfg.Broker.IsZero():
		p.fail(at, "this agent serves no brokers, as workload-agent does with -broker: take them out")
	case id.IsZero() || p.brokers[id] != nil || len(g.References) == 0:
		p.fail(at, "a broker needs an id that no other has, and references")
	case err != nil:
		p.fail(at, "a broker needs identities: IDs, or all below a path with /* at its end: %w", err)
	case p.cfg.Node == "" && g.Namespaces == nil:
		g.Namespaces = []string{anyNamespace} // none is known
	}
	p.brokers[id] = g
}

func (p *parser) id(others []grant) spiffe.ID {
	at := p.Offset()
	text := p.text("id", anyForm)
	id, err := spiffe.ParseID(text)
	switch {
	case err != nil:
	case id.Path() == "":
		err = errors.New("it names a trust domain: add the path of the workload")
	case !p.cfg.TrustDomain.IsZero() && !id.MemberOf(p.cfg.TrustDomain):
		err = fmt.Errorf("this agent is for the trust domain %s", p.cfg.TrustDomain)
	case slices.ContainsFunc(others, func(o grant) bool { return o.id == id }):
		err = errors.New("the workload has it already")
	}
	if err != nil {
		p.fail(at, "id is %.256q: %w", text, err)
	}
	return id
}

// texts reads an object whose values are texts; want describes it in errors.
func (p *parser) texts(name, want string, value form) map[string]string {
	all := map[string]string{}
	p.is(strictjson.Object, "%s have to be an object, in braces: %s", name, want)
	for key := range p.Members() {
		key := string(key) // a copy: the next call overwrites key
		all[key] = p.text(fmt.Sprintf("%.64q in %s", key, name), value)
	}
	return all
}

func (p *parser) output() {
	c := filesink.Config{Delivery: true}
	at := p.Offset()
	p.object("files", members{
		"folder":   func() { c.Dir = p.text("folder", pathForm) },
		"layout":   func() { c.Delivery = p.text("layout", layoutForm) == "delivery" },
		"mode":     func() { c.Mode = p.mode("mode") },
		"key_mode": func() { c.KeyMode = p.mode("key_mode") },
		"tokens":   func() { c.Tokens = p.texts("tokens", "the audience for the name of each file", anyForm) },
	})
	if c.Dir == "" || slices.ContainsFunc(p.outputs, func(o *output) bool { return o.config.Dir == c.Dir }) {
		p.fail(at, "the files need a directory, to which no other identity is written")
	}
	p.outputs = append(p.outputs, &output{config: c})
}
