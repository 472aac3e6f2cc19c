package kubetest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
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
	old, new object // nil if there was none, or is none; of a deletion, old has its version
	before   object // old as it was
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
	return failure(http.StatusUnprocessableEntity, "Invalid", "%s %q is invalid: %s", k.kind, name,
		fmt.Sprintf(format, args...))
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

// list returns a collection, or a page of it. All pages are of the version of the first one, which is what the
// token in continue says, with the number of the next item.
func (s *store) list(t target, sel selection, limit, token string) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size, version, from := math.MaxInt, s.version, 0
	if limit != "" && limit != "0" {
		var err error
		if size, err = strconv.Atoi(limit); err != nil || size < 0 {
			return nil, failure(http.StatusBadRequest, "BadRequest", "limit is not a number")
		}
	}
	if token != "" {
		if _, err := fmt.Sscanf(token, "%d,%d", &version, &from); err != nil || version > s.version {
			return nil, failure(http.StatusBadRequest, "BadRequest", "continue key is not valid")
		}
		if version < s.first {
			return nil, failure(http.StatusGone, "Expired",
				"The provided continue parameter is too old to display a consistent list result.")
		}
	}
	then := maps.Clone(s.objects)
	for _, c := range slices.Backward(s.log) {
		if c.version <= version {
			break
		}
		if c.before == nil {
			delete(then, c.key)
		} else {
			then[c.key] = c.before
		}
	}
	items := []object{}
	for _, k := range sorted(then, t) {
		if o := then[k]; sel.matches(o) {
			o = maps.Clone(o)
			delete(o, "kind") // items of a list have neither
			delete(o, "apiVersion")
			items = append(items, o)
		}
	}
	meta := map[string]any{"resourceVersion": format(version)}
	items = items[min(from, len(items)):]
	if len(items) > size {
		items = items[:size]
		meta["continue"] = fmt.Sprintf("%d,%d", version, from+size)
	}
	return object{"kind": t.kind + "List", "apiVersion": t.apiVersion(), "metadata": meta, "items": items}, nil
}

// sorted returns the keys of a collection.
func sorted(objects map[key]object, t target) []key {
	var keys []key
	for k := range objects {
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
		return nil, failure(http.StatusInternalServerError, "",
			"resourceVersion should not be set on objects to be created")
	}
	name, _ := meta["name"].(string)
	if name == "" {
		return nil, invalid(t.resource, "", "metadata.name: Required value: name is required")
	}
	plain := name
	if t.kind == "ClusterTrustBundle" { // which has colons for the slashes of its signer
		plain = strings.ReplaceAll(name, ":", ".")
	}
	if len(name) > 253 || !subdomain.MatchString(plain) {
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
		return nil, conflict(k, "the object has been modified; please apply your changes to the latest version "+
			"and try again")
	}
	if uid, _ := meta["uid"].(string); uid != "" && uid != old.text("metadata", "uid") {
		return nil, conflict(k, "Precondition failed: UID in precondition: "+uid)
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
	for _, kept := range []string{"uid", "creationTimestamp", "resourceVersion"} {
		if v, ok := old.meta()[kept]; ok {
			meta[kept] = v
		} else {
			delete(meta, kept)
		}
	}
	if reflect.DeepEqual(old, o) {
		return old, nil // no change, no new version
	}
	return s.commit(k, old, o), nil
}

// patch updates an object by a JSON merge patch (RFC 7396).
func (s *store) patch(t target, patch object) (object, error) {
	for {
		old, err := s.get(t)
		if err != nil {
			return nil, err
		}
		next := object(merge(old.clone(), patch))
		o, err := s.update(t, next)
		if e, ok := err.(*status); ok && e.code == http.StatusConflict &&
			patch.text("metadata", "resourceVersion") == "" {
			continue // it has changed meanwhile
		}
		return o, err
	}
}

// merge returns what a merge patch makes of an object, which is left as it is.
func merge(old, patch map[string]any) map[string]any {
	next := maps.Clone(old)
	if next == nil {
		next = make(map[string]any)
	}
	for k, v := range patch {
		before, _ := next[k].(map[string]any)
		switch v := v.(type) {
		case nil:
			delete(next, k)
		case map[string]any:
			next[k] = merge(before, v)
		default:
			next[k] = v
		}
	}
	return next
}

func conflict(k key, why string) error {
	return failure(http.StatusConflict, "Conflict", "Operation cannot be fulfilled on %s %q: %s",
		k.qualified(), k.name, why)
}

func (s *store) delete(t target, uid, version string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := t.key()
	old := s.objects[k]
	if old == nil {
		return notFound(k)
	}
	if uid != "" && uid != old.text("metadata", "uid") {
		return conflict(k, "Precondition failed: UID in precondition: "+uid)
	}
	if version != "" && version != old.text("metadata", "resourceVersion") {
		return conflict(k, "Precondition failed: ResourceVersion in precondition: "+version)
	}
	s.commit(k, old, nil)
	return nil
}

// commit makes a change and gives it a version; mu is held.
func (s *store) commit(k key, old, o object) object {
	s.version += 1 + s.random.Uint64N(3)
	before := old
	if o != nil {
		o.meta()["resourceVersion"] = format(s.version)
		s.objects[k] = o
	} else {
		delete(s.objects, k)
		old = old.clone()
		old.meta()["resourceVersion"] = format(s.version) // watchers get the version of the deletion
	}
	s.log = append(s.log, change{s.version, k, old, o, before})
	s.wake()
	return o
}

func format(v uint64) string { return strconv.FormatUint(v, 10) }

func (s *store) uid() string {
	h := sha256.Sum256([]byte(strconv.FormatUint(s.random.Uint64(), 16)))
	h[6], h[8] = h[6]&0x0f|0x40, h[8]&0x3f|0x80
	x := hex.EncodeToString(h[:16])
	return x[:8] + "-" + x[8:12] + "-" + x[12:16] + "-" + x[16:20] + "-" + x[20:]
}

// objectAt returns what the path of an object names. A test that has another path is wrong.
func objectAt(path string) target {
	t, ok := parsePath(path)
	if !ok || t.name == "" || t.subresource != "" {
		panic("kubetest: " + path + " is not the path of an object")
	}
	return t
}

// Put stores an object at the path of its own, such as /api/v1/namespaces/NS/pods/NAME, whether there
// is one or not, and without the rules about what may be changed. It is anything that encoding/json
// encodes as an object. It returns the object's resourceVersion.
func (s *Server) Put(path string, o any) string {
	t := objectAt(path)
	in, err := decodeObject(mustJSON(o))
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
	t := objectAt(path)
	o, err := s.store.get(t)
	if err != nil {
		return false
	}
	if err := json.Unmarshal(mustJSON(o), out); err != nil {
		panic(err)
	}
	return true
}

// History returns every state in which the object at a path has been, oldest first, as JSON. A deletion
// is null.
func (s *Server) History(path string) []json.RawMessage {
	t := objectAt(path)
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	var all []json.RawMessage
	for _, c := range s.store.log {
		if c.key == t.key() {
			all = append(all, mustJSON(c.new))
		}
	}
	return all
}

// Remove deletes the object at a path, and reports whether there was one.
func (s *Server) Remove(path string) bool {
	t := objectAt(path)
	return s.store.delete(t, "", "") == nil
}

// mustJSON encodes what came from JSON, or is a test's own.
func mustJSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

// selection are the selectors of a list or a watch: strings that members equal, or not.
type selection []requirement

type requirement struct {
	path  []string
	not   bool
	value string
}

func parseSelection(t target, q url.Values) (selection, error) {
	var sel selection
	for _, kind := range []string{"fieldSelector", "labelSelector"} {
		for part := range strings.SplitSeq(q.Get(kind), ",") {
			if part == "" {
				continue
			}
			name, value, ok := strings.Cut(part, "=")
			name, not := strings.CutSuffix(name, "!")
			if !ok || strings.ContainsAny(name, " ()!<>") {
				return nil, failure(http.StatusBadRequest, "BadRequest",
					"kubetest knows only selectors of the form name=value and name!=value: %q", part)
			}
			path := []string{"metadata", "labels", name}
			if kind == "fieldSelector" {
				if path = strings.Split(name, "."); name != "metadata.name" && name != "metadata.namespace" &&
					!slices.Contains(t.fields, name) {
					return nil, failure(http.StatusBadRequest, "BadRequest", "field label not supported: %s", name)
				}
			}
			sel = append(sel, requirement{path, not, strings.TrimPrefix(value, "=")})
		}
	}
	return sel, nil
}

func (s selection) matches(o object) bool {
	if o == nil {
		return false
	}
	for _, r := range s {
		if (o.at(r.path...) == r.value) == r.not {
			return false
		}
	}
	return true
}
