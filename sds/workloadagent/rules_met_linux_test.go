package workloadagent_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// caller is a process of which the kernel says all.
type caller struct {
	unixsocket.Peer
	unixsocket.Process
	in workloadagent.Pod
}

// granted returns the identities of a process of which all is certain, or nothing but its user and group.
func (c *caller) granted(r interface {
	Granted(unixsocket.Peer, func() (unixsocket.Process, bool), func() (workloadagent.Pod, bool)) []workloadagent.Grant
}, asked *bool, certain bool) []workloadagent.Grant {
	return r.Granted(c.Peer, func() (unixsocket.Process, bool) { *asked = true; return c.Process, certain },
		func() (workloadagent.Pod, bool) { *asked = true; return c.in, certain })
}

// selector is one of a match: its value, how a process meets it, and how it fails by a little or by having nothing.
type selector struct {
	value string // in JSON
	met   func(*caller)
	unmet []func(*caller)
}

var selectors = map[string]selector{
	"uid": {`0`, func(c *caller) { c.UID = 0 }, []func(*caller){
		func(c *caller) { c.UID = 1 }, func(c *caller) { c.UID = 1<<32 - 2 },
	}},
	"gid": {`0`, func(c *caller) { c.GID = 0 }, []func(*caller){
		func(c *caller) { c.GID = 1 }, func(c *caller) { c.GID = 1<<32 - 2 },
	}},
	"executable": {`"/usr/bin/web"`, func(c *caller) { c.Executable = "/usr/bin/web" }, []func(*caller){
		func(c *caller) { c.Executable = "" }, func(c *caller) { c.Executable = "/usr/bin/web2" },
		func(c *caller) { c.Executable = "/usr/bin" }, func(c *caller) { c.Executable = "/opt/usr/bin/web" },
	}},
	"unit": {`"web.service"`, func(c *caller) { c.Unit = "web.service" }, []func(*caller){
		func(c *caller) { c.Unit = "" }, func(c *caller) { c.Unit = "db.service" }, func(c *caller) { c.Unit = "web.scope" },
		func(c *caller) { c.Unit = "my-web.service" }, func(c *caller) { c.Unit = "Web.service" },
	}},
	"pod": {`"6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22"`, func(c *caller) { c.Pod = "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22" }, []func(*caller){
		func(c *caller) { c.Pod = "" }, func(c *caller) { c.Pod = "11111111-2a49-4a8e-8f6c-2d7b6f0a1c22" },
		func(c *caller) { c.Pod = "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c23" },
	}},
	"namespace": {`"shop"`, func(c *caller) { c.in.Namespace = "shop" }, []func(*caller){
		func(c *caller) { c.in.Namespace = "" }, func(c *caller) { c.in.Namespace = "shop2" }, func(c *caller) { c.in.Namespace = "default" },
	}},
	"account": {`"cart"`, func(c *caller) { c.in.Account = "cart" }, []func(*caller){
		func(c *caller) { c.in.Account = "" }, func(c *caller) { c.in.Account = "default" }, func(c *caller) { c.in.Account = "cart2" },
	}},
	"labels": {`{"app": "cart", "tier": ""}`, func(c *caller) { c.in.Labels = map[string]string{"app": "cart", "tier": "", "more": "x"} }, []func(*caller){
		func(c *caller) { c.in.Labels = nil }, func(c *caller) { c.in.Labels = map[string]string{"app": "cart"} },
		func(c *caller) { c.in.Labels = map[string]string{"app": "cart2", "tier": ""} }, func(c *caller) { c.in.Labels = map[string]string{"tier": ""} },
		func(c *caller) { c.in.Labels = map[string]string{"app": "cart", "tier": "x"} },
	}},
}

// A rule is met by the processes that meet each of its selectors, whatever they are beside, and by no other: for all sets of
// selectors, and for all sets that a process meets.
func TestRuleIsMet(t *testing.T) {
	t.Parallel()
	// No selector is left out here.
	err := workloadagent.Parse([]byte(`{"workloads": [{"match": {"x": 1}, "identities": [`+id("/web")+`]}]}`), exampleOrg)
	require.Error(t, err)
	known := regexp.MustCompile(`match can have (.*)$`).FindStringSubmatch(err.Error())
	require.NotNil(t, known, "%v", err)
	names := slices.Sorted(maps.Keys(selectors))
	require.Equal(t, strings.Split(known[1], ", "), names, "a selector without a case in this table")

	var callers []*caller // of each set of names that is met, five that fail at the others
	for met := range 1 << len(names) {
		for variant := range 5 {
			c := &caller{}
			for i, name := range names {
				if s := selectors[name]; met>>i&1 == 1 {
					s.met(c)
				} else {
					s.unmet[variant%len(s.unmet)](c)
				}
			}
			callers = append(callers, c)
		}
	}
	rulesTested, refused := 0, 0
	for set := 1; set < 1<<len(names); set++ {
		var match []string
		for i, name := range names {
			if set>>i&1 == 1 {
				match = append(match, fmt.Sprintf("%q: %s", name, selectors[name].value))
			}
		}
		data := `{"workloads": [{"match": {` + strings.Join(match, ", ") + `}, "identities": [` + id("/web") + `]}]}`
		has := func(name string) bool { return set>>slices.Index(names, name)&1 == 1 }
		if len(match) == 1 && has("executable") || (has("account") || has("labels")) && !has("namespace") {
			require.Error(t, workloadagent.Parse([]byte(data), exampleOrg), "an executable alone, or an account or labels without a namespace")
			refused++
			continue
		}
		rules := workloadagent.Rules(t, data)
		rulesTested++
		for i, c := range callers {
			if granted := c.granted(rules, new(bool), true); (len(granted) == 1) != (set&^(i/5) == 0) {
				require.Fail(t, "granted or not", "the rule {%s} and the process %+v", strings.Join(match, ", "), *c)
			}
		}
	}
	assert.Equal(t, 1<<len(names)-1, rulesTested+refused)
	assert.Equal(t, 1<<(len(names)-3)*3+1, refused, "of the sets without a namespace those with one of the two, and an executable alone")
}

// A rule without a match is met by no process, and one that names a process by what only the kernel knows of it is met by none
// that is not certain. A rule by user and group asks for no more than these.
func TestRuleAndUncertainProcess(t *testing.T) {
	t.Parallel()
	whole := caller{}
	for _, s := range selectors {
		s.met(&whole)
	}
	for match, want := range map[string]bool{
		`"uid": 0`: true, `"gid": 0`: true, `"uid": 0, "gid": 0`: true,
		`"uid": 0, "executable": "/usr/bin/web"`: false, `"unit": "web.service"`: false, `"pod": ` + selectors["pod"].value: false,
		`"uid": 0, "unit": "web.service"`: false, `"gid": 0, "pod": ` + selectors["pod"].value: false, `"namespace": "shop"`: false, `"uid": 0, "namespace": "shop", "account": "cart"`: false,
	} {
		rules := workloadagent.Rules(t, `{"workloads": [{"match": {`+match+`}, "identities": [`+id("/web")+`]}]}`)
		asked := false
		granted := whole.granted(rules, &asked, false)
		assert.Equal(t, want, len(granted) == 1, "%s", match)
		assert.Equal(t, !want, asked, "%s", match)

		other := caller{unixsocket.Peer{UID: 7, GID: 7}, whole.Process, whole.in}
		if strings.Contains(match, `id": 0`) {
			asked = false
			assert.Empty(t, other.granted(rules, &asked, true), "%s", match)
			assert.False(t, asked, "another user is refused without a look at the process: %s", match)
		}
	}
	rules := workloadagent.Rules(t, `{"workloads": [{"identities": [`+id("/batch", `"files": [{"folder": "/run/batch"}]`)+`]}]}`)
	for _, p := range []caller{{}, whole} {
		assert.Empty(t, p.granted(rules, new(bool), true), "files are for no process")
	}
}

// A process has the identities of all rules that it meets and of no other, in the order of the file, each once, with distinct
// hints; of the rules of one identity it has all audiences.
func TestGranted(t *testing.T) {
	t.Parallel()
	workload := func(uid int, identities ...string) string {
		return fmt.Sprintf(`{"match": {"uid": %d}, "identities": [%s]}`, uid, strings.Join(identities, ", "))
	}
	by := func(group int, identities ...string) string {
		return strings.Replace(workload(group, identities...), "uid", "gid", 1)
	}
	rules := workloadagent.Rules(t, `{"workloads": [`+strings.Join([]string{
		workload(1, id("/b", `"hint": ":x"`, `"audiences": ["one"]`), id("/a")),
		workload(2, id("/other", `"hint": ":x"`, `"audiences": ["*"]`)),
		by(1, id("/c", `"hint": ":x"`), id("/a", `"hint": ":late"`, `"audiences": ["two", "three"]`), id("/d", `"hint": ":y"`)),
		by(1, id("/b", `"audiences": ["four"]`)),
		by(1, id("/e", `"hint": ":y"`)),
	}, ",\n")+`]}`)
	granted := func(uid, gid uint32) []workloadagent.Grant {
		c := caller{Peer: unixsocket.Peer{UID: uid, GID: gid}}
		return c.granted(rules, new(bool), true)
	}
	names := func(all []workloadagent.Grant) (names []string) {
		for _, g := range all {
			names = append(names, g.ID())
		}
		return names
	}
	assert.Equal(t, []string{"/b:x", "/a"}, names(granted(1, 2)))
	assert.Equal(t, []string{"/b:x", "/a", "/c", "/d:y", "/e"}, names(granted(1, 1)), "the first rule comes first, and keeps its hint")
	assert.Equal(t, []string{"/c:x", "/a:late", "/d:y", "/b", "/e"}, names(granted(3, 1)), "a hint is lost to another of the same process only")
	assert.Equal(t, []string{"/other:x", "/c", "/a:late", "/d:y", "/b", "/e"}, names(granted(2, 1)))
	assert.Empty(t, granted(3, 3))

	both := granted(1, 1)
	assert.True(t, both[0].Permits("one", "four"))
	assert.True(t, both[1].Permits("two", "three"))
	assert.False(t, both[2].Permits("one"), "an audience of another identity")
	first := granted(1, 2)
	assert.True(t, first[0].Permits("one"))
	assert.False(t, first[0].Permits("one", "four"), "an audience of a rule that is not met")
	assert.False(t, first[1].Permits("two"))
	assert.False(t, first[1].Permits("*"), "no audience")
	assert.True(t, granted(2, 2)[0].Permits("any", "at all"))
}

// What one process has by several rules changes nothing for another.
func TestGrantsAreApart(t *testing.T) {
	t.Parallel()
	for n := range 10 { // for each room that a list may have behind its end
		var common []string
		for i := range n {
			common = append(common, fmt.Sprintf("%q", fmt.Sprint("common ", i)))
		}
		rule := func(match, audiences string) string {
			return `{"match": {` + match + `}, "identities": [` + id("/web", `"audiences": [`+audiences+`]`) + `]}`
		}
		rules := workloadagent.Rules(t, `{"workloads": [`+rule(`"uid": 1`, strings.Join(common, ", "))+", "+rule(`"gid": 1`, `"first"`)+", "+rule(`"gid": 2`, `"second"`)+`]}`)
		first := (&caller{Peer: unixsocket.Peer{UID: 1, GID: 1}}).granted(rules, new(bool), true)
		second := (&caller{Peer: unixsocket.Peer{UID: 1, GID: 2}}).granted(rules, new(bool), true)
		none := (&caller{Peer: unixsocket.Peer{UID: 1, GID: 3}}).granted(rules, new(bool), true)
		require.Len(t, first, 1)
		require.Len(t, second, 1)
		require.Len(t, none, 1)
		assert.True(t, first[0].Permits("first"), "%d", n)
		assert.False(t, first[0].Permits("second"), "%d", n)
		assert.True(t, second[0].Permits("second"), "%d", n)
		assert.False(t, second[0].Permits("first"), "%d", n)
		assert.False(t, none[0].Permits("first") || none[0].Permits("second"), "%d", n)
	}
}

// The largest and the smallest values that a file can have are taken, and what is one beyond them is not.
func TestBoundsOfFile(t *testing.T) {
	t.Parallel()
	one := func(match, more string) string {
		return `{"workloads": [{"match": ` + match + `, "identities": [{"id": "spiffe://example.org/web"` + more + `}]}]}`
	}
	uid := `{"uid": 1}`
	for data, good := range map[string]bool{
		one(`{"uid": 0}`, ``): true, one(`{"uid": 4294967294}`, ``): true, one(`{"uid": 4294967295}`, ``): false, one(`{"uid": 4294967296}`, ``): false,
		one(`{"gid": 0}`, ``): true, one(`{"gid": 4294967294}`, ``): true, one(`{"gid": 4294967295}`, ``): false, one(`{"uid": 1e3}`, ``): false,
		one(uid, `, "hint": "x"`): true, one(uid, `, "hint": ""`): false,
		one(uid, `, "hint": "`+strings.Repeat("x", 1024)+`"`): true, one(uid, `, "hint": "`+strings.Repeat("x", 1025)+`"`): false,
		one(uid, `, "audiences": []`): true, one(uid, `, "files": []`): true, one(uid, `, "files": [{"folder": "/a", "tokens": {}}]`): true,
		`{"workloads": [{"identities": [{"id": "spiffe://example.org/web", "files": []}]}]}`: false,
		one(`{"unit": "a.service"}`, ``): true, one(`{"unit": "a.scope"}`, ``): true, one(`{"unit": ".service"}`, ``): false, one(`{"unit": "a.slice"}`, ``): false,
		one(`{"pod": "00000000-0000-0000-0000-000000000000"}`, ``): true, one(`{"pod": "00000000-0000-0000-0000-00000000000"}`, ``): false,
		one(`{"pod": "6F9C7A34-2A49-4A8E-8F6C-2D7B6F0A1C22"}`, ``): false, one(`{"pod": "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22 "}`, ``): false,
		one(`{"uid": 1, "executable": "/a"}`, ``): true, one(`{"gid": 1, "executable": "/a"}`, ``): true,
		one(`{"unit": "a.service", "executable": "/a"}`, ``): true, one(`{"pod": "00000000-0000-0000-0000-000000000000", "executable": "/a"}`, ``): true,
	} {
		if err := workloadagent.Parse([]byte(data), exampleOrg); good {
			assert.NoError(t, err, "%s", data)
		} else {
			assert.Error(t, err, "%s", data)
		}
	}
}
