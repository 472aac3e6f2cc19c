package kubetest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// object is a JSON object. Those in the store never change.
type object map[string]any

// meta returns the metadata, which is made if it is missing.
func (o object) meta() map[string]any {
	m, ok := o["metadata"].(map[string]any)
	if !ok {
		m = map[string]any{}
		o["metadata"] = m
	}
	return m
}

// at returns the value at a path, or nil.
func (o object) at(path ...string) any {
	var v any = map[string]any(o)
	for _, p := range path {
		m, _ := v.(map[string]any)
		v = m[p]
	}
	return v
}

// text returns the string at a path, or "".
func (o object) text(path ...string) string {
	s, _ := o.at(path...).(string)
	return s
}

// clone copies an object, deep enough to change members of metadata, spec, status and data.
func (o object) clone() object {
	c := maps.Clone(o)
	for k, v := range c {
		if m, ok := v.(map[string]any); ok {
			c[k] = maps.Clone(m)
		}
	}
	return c
}

type key struct {
	*resource
	namespace, name string
}

type change struct {
	version  uint64
	key      key
	old, new object // nil if there was none, or is none
}

type store struct {
	mu      sync.Mutex
	random  *rand.Rand
	version uint64
	objects map[key]object
	log     []change      // those after compacted
	first   uint64        // the oldest version that can be watched from
	changed chan struct{} // closed at each change and with each signal
	watches watchSignals
}

// watchSignals tell all open watches to do something; each is a count.
type watchSignals struct{ end, expire, bookmark int }

func newStore(random *rand.Rand) *store {
	v := 1000 + random.Uint64N(9000)
	return &store{random: random, version: v, first: v, objects: map[key]object{}, changed: make(chan struct{})}
}

func (s *store) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (t target) key() key { return key{t.resource, t.namespace, t.name} }

func notFound(k key) error {
	return failure(http.StatusNotFound, "NotFound", "%s %q not found", k.qualified(), k.name)
}

func invalid(k *resource, name, format string, args ...any) error {
	return failure(http.StatusUnprocessableEntity, "Invalid", "%s %q is invalid: %s", k.kind, name, fmt.Sprintf(format, args...))
}

func (s *store) get(t target) (object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[t.key()]
	if !ok {
		return nil, notFound(t.key())
	}
	return o, nil
}

func (s *store) list(t target, sel selection) object {
	s.mu.Lock()
	defer s.mu.Unlock()
	items := []object{}
	for _, k := range s.sorted(t) {
		if o := s.objects[k]; sel.matches(o) {
			o = maps.Clone(o)
			delete(o, "kind") // the items of a list do not say what they are
			delete(o, "apiVersion")
			items = append(items, o)
		}
	}
	return object{
		"kind": t.kind + "List", "apiVersion": t.apiVersion(),
		"metadata": map[string]any{"resourceVersion": format(s.version)}, "items": items,
	}
}

// sorted returns the keys of a collection; mu is held.
func (s *store) sorted(t target) []key {
	var keys []key
	for k := range s.objects {
		if k.resource == t.resource && (t.everywhere || k.namespace == t.namespace) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b key) int {
		return strings.Compare(a.namespace+"/"+a.name, b.namespace+"/"+b.name)
	})
	return keys
}

var subdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

func (s *store) create(t target, o object) (object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	meta := o.meta()
	if v, _ := meta["resourceVersion"].(string); v != "" {
		return nil, failure(http.StatusInternalServerError, "", "resourceVersion should not be set on objects to be created")
	}
	name, _ := meta["name"].(string)
	if prefix, _ := meta["generateName"].(string); name == "" && prefix != "" {
		prefix = prefix[:min(len(prefix), 58)]
		for name == "" || s.objects[key{t.resource, t.namespace, name}] != nil {
			name = prefix + s.letters(5)
		}
		meta["name"] = name
	}
	if name == "" {
		return nil, invalid(t.resource, "", "metadata.name: Required value: name or generateName is required")
	}
	if len(name) > 253 || !subdomain.MatchString(name) {
		return nil, invalid(t.resource, name, "metadata.name: Invalid value: a lowercase RFC 1123 subdomain is wanted")
	}
	k := key{t.resource, t.namespace, name}
	if t.check != nil {
		if err := t.check(nil, o, ""); err != nil {
			return nil, err
		}
	}
	if s.objects[k] != nil {
		return nil, failure(http.StatusConflict, "AlreadyExists", "%s %q already exists", k.qualified(), name)
	}
	for _, ignored := range []string{"deletionTimestamp", "selfLink", "generation", "managedFields"} {
		delete(meta, ignored)
	}
	meta["uid"] = s.uid()
	meta["creationTimestamp"] = time.Now().UTC().Format(time.RFC3339)
	return s.commit(k, nil, o), nil
}

func (s *store) update(t target, o object) (object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := t.key()
	old := s.objects[k]
	if old == nil {
		return nil, notFound(k)
	}
	meta := o.meta()
	if v, _ := meta["resourceVersion"].(string); v != "" && v != old.text("metadata", "resourceVersion") {
		return nil, modified(k)
	}
	if uid, _ := meta["uid"].(string); uid != "" && uid != old.text("metadata", "uid") {
		return nil, failure(http.StatusConflict, "Conflict", "Operation cannot be fulfilled on %s %q: Precondition failed: UID in precondition: %s, UID in object meta: %s", k.qualified(), k.name, uid, old.text("metadata", "uid"))
	}
	if t.subresource == "status" && t.check == nil { // the status and nothing else
		next := old.clone()
		next["status"] = o["status"]
		o, meta = next, next.meta()
	}
	if t.subresource == "" && slices.Contains(t.subresources, "status") { // anything but the status
		if st, ok := old["status"]; ok {
			o["status"] = st
		} else {
			delete(o, "status")
		}
	}
	if t.check != nil {
		if err := t.check(old, o, t.subresource); err != nil {
			return nil, err
		}
	}
	for _, kept := range []string{"uid", "creationTimestamp", "resourceVersion", "generateName"} {
		if v, ok := old.meta()[kept]; ok {
			meta[kept] = v
		} else {
			delete(meta, kept)
		}
	}
	if reflect.DeepEqual(old, o) {
		return old, nil // a change of nothing is none
	}
	return s.commit(k, old, o), nil
}

func modified(k key) error {
	return failure(http.StatusConflict, "Conflict", "Operation cannot be fulfilled on %s %q: the object has been modified; please apply your changes to the latest version and try again", k.qualified(), k.name)
}

func (s *store) delete(t target, uid, version string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := t.key()
	old := s.objects[k]
	if old == nil {
		return notFound(k)
	}
	if have := old.text("metadata", "uid"); uid != "" && uid != have {
		return failure(http.StatusConflict, "Conflict", "Operation cannot be fulfilled on %s %q: Precondition failed: UID in precondition: %s, UID in object meta: %s", k.qualified(), k.name, uid, have)
	}
	if have := old.text("metadata", "resourceVersion"); version != "" && version != have {
		return failure(http.StatusConflict, "Conflict", "Operation cannot be fulfilled on %s %q: Precondition failed: ResourceVersion in precondition: %s, ResourceVersion in object meta: %s", k.qualified(), k.name, version, have)
	}
	s.commit(k, old, nil)
	return nil
}

// commit makes a change and gives it a version; mu is held.
func (s *store) commit(k key, old, o object) object {
	s.version += 1 + s.random.Uint64N(3)
	if o != nil {
		o.meta()["resourceVersion"] = format(s.version)
		s.objects[k] = o
	} else {
		delete(s.objects, k)
		old = old.clone()
		old.meta()["resourceVersion"] = format(s.version) // watchers get the version of the deletion
	}
	s.log = append(s.log, change{s.version, k, old, o})
	s.wake()
	return o
}

func format(v uint64) string { return strconv.FormatUint(v, 10) }

func (s *store) letters(n int) string {
	const alphabet = "bcdfghjklmnpqrstvwxz2456789"
	b := make([]byte, n)
	for i := range b {
		b[i] = alphabet[s.random.IntN(len(alphabet))]
	}
	return string(b)
}

func (s *store) uid() string {
	h := sha256.Sum256([]byte(strconv.FormatUint(s.random.Uint64(), 16)))
	h[6], h[8] = h[6]&0x0f|0x40, h[8]&0x3f|0x80
	x := hex.EncodeToString(h[:16])
	return x[:8] + "-" + x[8:12] + "-" + x[12:16] + "-" + x[16:20] + "-" + x[20:]
}

// Put stores an object at the path of its own, such as /api/v1/namespaces/NS/pods/NAME, whether there
// is one or not, and without the rules about what may be changed. It is anything that encoding/json
// encodes as an object. It returns the object's resourceVersion.
func (s *Server) Put(path string, o any) string {
	t, ok := parsePath(path)
	if !ok || t.name == "" || t.subresource != "" {
		panic("kubetest: " + path + " is not the path of an object")
	}
	data, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	in, err := decodeObject(data)
	if err != nil {
		panic(err)
	}
	in["kind"], in["apiVersion"] = t.kind, t.apiVersion()
	meta := in.meta()
	meta["name"] = t.name
	if t.namespaced {
		meta["namespace"] = t.namespace
	}
	if t.kind == "Secret" && in.text("type") == "" {
		in["type"] = "Opaque"
	}
	st := s.store
	st.mu.Lock()
	defer st.mu.Unlock()
	old := st.objects[t.key()]
	var uid, created any = st.uid(), time.Now().UTC().Format(time.RFC3339)
	if old != nil {
		uid, created = old.meta()["uid"], old.meta()["creationTimestamp"]
	}
	if meta["uid"] == nil {
		meta["uid"] = uid
	}
	meta["creationTimestamp"] = created
	return st.commit(t.key(), old, in).text("metadata", "resourceVersion")
}

// Get reads the object at a path into out, a pointer for encoding/json, and reports whether there is
// one. It is not a request.
func (s *Server) Get(path string, out any) bool {
	t, ok := parsePath(path)
	if !ok {
		panic("kubetest: " + path + " is not the path of an object")
	}
	o, err := s.store.get(t)
	if err != nil {
		return false
	}
	data, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(data, out)
	}
	if err != nil {
		panic(err)
	}
	return true
}

// History returns every state in which the object at a path has been, oldest first, as JSON. A deletion
// is null.
func (s *Server) History(path string) []json.RawMessage {
	t, ok := parsePath(path)
	if !ok {
		panic("kubetest: " + path + " is not the path of an object")
	}
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	var all []json.RawMessage
	for _, c := range s.store.log {
		if c.key != t.key() {
			continue
		}
		data, err := json.Marshal(c.new)
		if err != nil {
			panic(err) // impossible: it came from JSON
		}
		all = append(all, data)
	}
	return all
}

// Remove deletes the object at a path, and reports whether there was one.
func (s *Server) Remove(path string) bool {
	t, ok := parsePath(path)
	if !ok {
		panic("kubetest: " + path + " is not the path of an object")
	}
	return s.store.delete(t, "", "") == nil
}

// selection is what of a collection a list or a watch is about.
type selection struct {
	fields, labels []requirement
}

type requirement struct {
	path   []string
	op     string // "=", "!=", "exists" or "!exists"
	value  string
	labels bool
}

func parseSelection(t target, q url.Values) (selection, error) {
	var sel selection
	if t.name != "" {
		return sel, nil
	}
	for part := range strings.SplitSeq(q.Get("fieldSelector"), ",") {
		if part == "" {
			continue
		}
		r := requirement{op: "="}
		name, value, ok := strings.Cut(part, "=")
		if !ok {
			return sel, failure(http.StatusBadRequest, "BadRequest", "unable to parse field selector %q", part)
		}
		if n, found := strings.CutSuffix(name, "!"); found {
			name, r.op = n, "!="
		}
		r.value = strings.TrimPrefix(value, "=")
		if name != "metadata.name" && name != "metadata.namespace" && !slices.Contains(t.fields, name) {
			return sel, failure(http.StatusBadRequest, "BadRequest", "field label not supported: %s", name)
		}
		r.path = strings.Split(name, ".")
		sel.fields = append(sel.fields, r)
	}
	for part := range strings.SplitSeq(q.Get("labelSelector"), ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		r := requirement{op: "exists", labels: true}
		if name, value, ok := strings.Cut(part, "="); ok {
			r.op = "="
			if n, found := strings.CutSuffix(name, "!"); found {
				name, r.op = n, "!="
			}
			part, r.value = name, strings.TrimPrefix(value, "=")
		} else if n, found := strings.CutPrefix(part, "!"); found {
			part, r.op = n, "!exists"
		}
		if part == "" || strings.ContainsAny(part, " ()!<>") {
			return sel, failure(http.StatusBadRequest, "BadRequest", "kubetest cannot parse the label selector at %q", part)
		}
		r.path = []string{"metadata", "labels", part}
		sel.labels = append(sel.labels, r)
	}
	return sel, nil
}

func (s selection) matches(o object) bool {
	if o == nil {
		return false
	}
	for _, r := range slices.Concat(s.fields, s.labels) {
		v, found := o.at(r.path...).(string)
		var ok bool
		switch r.op {
		case "=":
			ok = v == r.value && (found || !r.labels)
		case "!=":
			ok = v != r.value
		case "exists":
			ok = found
		default:
			ok = !found
		}
		if !ok {
			return false
		}
	}
	return true
}
