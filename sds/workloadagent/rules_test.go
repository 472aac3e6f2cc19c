package workloadagent_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// whole has every key.
const whole = `{
  "workloads": [
    {
      "match": {"uid": 1000, "gid": 1000, "executable": "/usr/bin/web", "unit": "web.service", "pod": "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22", "namespace": "shop", "account": "cart", "labels": {"app": "cart", "example.org/tier": ""}},
      "identities": [
        {
          "id": "spiffe://example.org/web", "hint": "internal", "audiences": ["db", "*"],
          "files": [
            {"folder": "/run/web", "layout": "delivery", "mode": "0644", "key_mode": "0640", "tokens": {"aws": "sts.amazonaws.com", "db": "db"}},
            {"folder": "/run/old-web", "layout": "split"}
          ]
        },
        {"id": "spiffe://example.org/web/admin"}
      ]
    },
    {"identities": [{"id": "spiffe://example.org/batch", "files": [{"folder": "/run/batch"}]}]}
  ],
  "brokers": [
    {
      "id": "spiffe://example.org/proxy", "references": ["pid", "pods", "serviceaccounts"],
      "namespaces": ["shop", "*"], "audiences": ["db", "*"],
      "identities": ["spiffe://example.org/web", "spiffe://example.org/ns/*/sa/*", "*"]
    },
    {"id": "spiffe://example.org/csi", "references": ["pods"], "identities": ["spiffe://example.org/*"]}
  ]
}`

var exampleOrg = spiffe.MustParseTrustDomain("example.org")

// A bad file is refused with the line, the column and what to do.
func TestBadFile(t *testing.T) {
	t.Parallel()
	require.NoError(t, workloadagent.Parse([]byte(whole), exampleOrg))
	require.NoError(t, workloadagent.Parse([]byte(whole), spiffe.TrustDomain{}))
	require.NoError(t, workloadagent.Parse([]byte(strings.ReplaceAll(whole, "/usr/bin/web", "/.a/..b/...")), exampleOrg))
	require.NoError(t, workloadagent.Parse([]byte(`{}`), exampleOrg), "no process has anything")
	one := func(match, identity string) string {
		return "{\"workloads\": [\n{\"match\": " + match + ",\n\"identities\": [" + identity + "]}]}"
	}
	const uid, web = `{"uid": 1}`, `{"id": "spiffe://example.org/web"}`
	for data, want := range map[string]string{
		``:                           "line 1, column 1: ",
		`[]`:                         "line 1, column 1: the file has to be an object, in braces",
		"{\n  \"workload\": []}":     "line 2, column 15: \"workload\" is not known here: the file can have brokers, workloads",
		`{"workloads": {}}`:          "line 1, column 15: workloads has to be a list, in brackets",
		"{\"workloads\": [\n]} x":    "line 2, column 4: ",
		"{\"workloads\": [\n{},\n]}": "line 3, column 1: ",
		"{\"workloads\": [],\n\"workloads\": []}": "line 2, column ",
		"{\"workloads\": [\n// comment\n]}":       "see that it is JSON",
		`{"workloads": ["` + "\xff" + `"]}`:       "not UTF-8",
		one(uid, ``):                              "line 2, column 1: the workload has no identities: add at least one",
		`{"workloads": [{"identities": [{"id": "spiffe://example.org/web"}]}]}`: "has neither a match nor files",
		one(`{}`, web): "line 2, column 11: ",
		one(`{"executable": "/usr/bin/web"}`, web):           "any user can run an executable with code of his own, so it needs something beside it: add a uid, gid, unit, pod or namespace",
		one(`{"uid": "1"}`, web):                             "line 2, column 19: uid has to be a number without quotes, as the command id prints it",
		one(`{"uid": -1}`, web):                              "uid has to be a number",
		one(`{"uid": 1.5}`, web):                             "uid has to be a number",
		one(`{"gid": 4294967295}`, web):                      "gid has to be a number",
		one(`{"user": "web"}`, web):                          "match can have account, executable, gid, labels, namespace, pod, uid, unit",
		one(`{"executable": "web"}`, web):                    `executable is "web": want an absolute path`,
		one(`{"executable": "/a/../b"}`, web):                "want an absolute path",
		one(`{"executable": ""}`, web):                       "want an absolute path",
		one(`{"executable": "/a/./b"}`, web):                 "want an absolute path",
		one(`{"executable": "/a//b"}`, web):                  "want an absolute path",
		one(`{"executable": "/a/"}`, web):                    "want an absolute path",
		one(`{"executable": "/"}`, web):                      "want an absolute path",
		one(`{"unit": "web"}`, web):                          "such as web.service",
		one(`{"unit": "a/web.service"}`, web):                "such as web.service",
		one(`{"pod": "web-0"}`, web):                         "want a UID, as kubectl get pod",
		one(`{"account": "cart"}`, web):                      "line 2, column 11: accounts and labels say something in their namespace alone: add a namespace",
		one(`{"uid": 1, "labels": {}}`, web):                 "add a namespace",
		one(`{"namespace": "Shop"}`, web):                    `namespace is "Shop": want a name, as kubectl prints it`,
		one(`{"namespace": "a", "account": ""}`, web):        "want a name, as kubectl prints it",
		one(`{"namespace": "a", "labels": ["x"]}`, web):      "labels have to be an object, in braces: the value for each key",
		one(`{"namespace": "a", "labels": {"x": 1}}`, web):   `"x" in labels is "": want the value of a label, in quotes`,
		one(`{"namespace": "a", "labels": {"x": "*"}}`, web): `"x" in labels is "*": want the value of a label`,
		one(uid, `{}`):                                       "line 3, column 16: the identity has no id",
		one(uid, `{"id": "web"}`):                            `id is "web": `,
		one(uid, `{"id": "spiffe://example.org"}`):           "add the path of the workload",
		one(uid, `{"id": "spiffe://other.test/web"}`):        "this agent is for the trust domain example.org",
		one(uid, web+","+web):                                "the workload has it already",
		one(uid, `{"id": "spiffe://example.org/a", "hint": "x"}, {"id": "spiffe://example.org/b", "hint": "x"}`):  "choose another",
		one(uid, `{"id": "spiffe://example.org/a", "audiences": "*"}`):                                            "audiences has to be a list",
		one(uid, `{"id": "spiffe://example.org/a", "audiences": [""]}`):                                           "one of audiences is \"\": want a text in quotes that is not empty",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{}]}`):                                               "the files need a directory",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "web"}]}`):                                "want an absolute path",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "tokens": ["x"]}]}`):                "tokens have to be an object, in braces: the audience for the name of each file",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "tokens": {"x": ""}}]}`):            `"x" in tokens is "": want a text in quotes that is not empty`,
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "tokens": {"x": "a", "x": "b"}}]}`): "line 3, column ",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "layout": "x"}]}`):                  "want delivery",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "mode": "0666"}]}`):                 "want 0644",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "key_mode": 384}]}`):                "want 0644, 0640, 0600, 0444, 0440 or 0400, in quotes",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a"}, {"folder": "/a"}]}`):               "to which no other identity is written",
	} {
		assert.ErrorContains(t, workloadagent.Parse([]byte(data), exampleOrg), want, "%s", data)
	}
}

// A bad broker is refused as every other mistake in the file is.
func TestBadBroker(t *testing.T) {
	t.Parallel()
	one := func(members string) string { return "{\"brokers\": [\n{" + members + "}]}" }
	const id, references, identities = `"id": "spiffe://example.org/proxy"`, `"references": ["pid"]`,
		`"identities": ["spiffe://example.org/*"]`
	const good = id + ", " + references + ", " + identities
	const needsID, needsIDs = "line 2, column 1: a broker needs an id that no other has, and references",
		"line 2, column 1: a broker needs identities: IDs, or all below a path with /* at its end: "
	with := func(more string) string { return one(good + ",\n" + more) }
	require.NoError(t, workloadagent.Parse([]byte(one(good)), exampleOrg))
	for data, want := range map[string]string{
		`{"brokers": {}}`: "line 1, column 13: brokers has to be a list, in " +
			"brackets",
		`{"brokers": ["proxy"]}`: "line 1, column 14: a broker has to be an object, in " +
			"braces",
		one(``):                            needsID,
		one(references + `,` + identities): needsID,
		one(id + `,` + identities):         needsID,
		one(id + `,` + references):         needsIDs,
		one(good + "},\n{" + good):         strings.Replace(needsID, "line 2", "line 3", 1),
		one(good + ",\n" + id):             "line 3, column ",
		with(`"reference": ["pid"]`): `line 3, column 14: "reference" is not known here: a broker can have ` +
			"audiences, id, identities, namespaces, references",
		with(`"namespaces": "shop"`): "line 3, column 15: namespaces has to be a list, in " +
			"brackets",
		with(`"namespaces": ["Shop"]`):     `line 3, column 16: one of namespaces is "Shop": want a namespace`,
		with(`"namespaces": ["shop*"]`):    "want a namespace, or * for any",
		with(`"namespaces": [""]`):         "want a namespace, or * for any",
		with(`"namespaces": ["a", 1]`):     "line 3, column 21: one of namespaces ",
		with(`"audiences": "*"`):           "audiences has to be a list, in brackets",
		with(`"audiences": [""]`):          `line 3, column 15: one of audiences is "": want a text in quotes`,
		one(`"id": "proxy",` + references): `line 2, column 8: id is "proxy": `,
		one(`"id": "spiffe://example.org"`): "line 2, column 8: id is \"spiffe://example.org\": it " +
			"names a trust domain: add the path",
		one(`"id": "spiffe://other.test/p"`):              "this agent is for the trust domain example.org",
		one(`"id": 7`):                                    `line 2, column 8: id is "": want a text in quotes`,
		one(`"references": "pid"`):                        "references has to be a list, in brackets",
		one(id + `, "references": [],` + identities):      needsID,
		one(id + `, "references": ["pod"]`):               `one of references is "pod": want pid, pods or`,
		one(id + `, "references": ["*"]`):                 "want pid, pods or serviceaccounts",
		one(id + `, "references": ["deployments.apps"]`):  "want pid, pods or serviceaccounts",
		one(id + `, "references": ["PID"]`):               "want pid, pods or serviceaccounts",
		one(id + `,` + references + `, "identities": []`): needsIDs,
		one(id + `,` + references + `, "identities": [""]`): "one of identities is \"\": want a text in quotes " +
			"that is not empty",
		one(id + `,` + references + `, "identities": ["spiffe://example.org/a*"]`): needsIDs,
		one(id + `,` + references + `, "identities": ["spiffe://*/web"]`):          needsIDs,
		one(id + `,` + references + `, "identities": ["/web"]`):                    needsIDs,
		one(id + `,` + references + `, "identities": ["*", "*"]`):                  needsIDs,
		one(id + `,` + references + `, "identities": "*"`): "identities has to be a list, " +
			"in brackets",
	} {
		assert.ErrorContains(t, workloadagent.Parse([]byte(data), exampleOrg), want, "%s", data)
	}
	require.ErrorContains(t, workloadagent.ParseWithoutBrokers([]byte("{\"brokers\": [\n{"+good+"}]}")),
		"line 2, column 1: this agent serves no brokers, as workload-agent does with -broker: take them out")
	require.NoError(t, workloadagent.ParseWithoutBrokers([]byte(`{"brokers": []}`)))
}

// A pod is met by all that a rule says of it, and by nothing less.
func TestPods(t *testing.T) {
	t.Parallel()
	const file = `{"workloads": [
		{"match": {"namespace": "shop"}, "identities": [{"id": "spiffe://example.org/namespace"}]},
		{"match": {"namespace": "shop", "account": "cart"}, "identities": [{"id": "spiffe://example.org/account"}]},
		{"match": {"namespace": "shop", "labels": {"app": "cart", "tier": ""}}, "identities": [{"id": "spiffe://example.org/labels"}]},
		{"match": {"namespace": "shop", "account": "cart", "labels": {"app": "cart"}, "uid": 7}, "identities": [{"id": "spiffe://example.org/all"}]},
		{"match": {"namespace": "shop", "pod": "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22"}, "identities": [{"id": "spiffe://example.org/pod"}]},
		{"match": {"namespace": "shop", "unit": "web.service"}, "identities": [{"id": "spiffe://example.org/unit"}]}
	]}`
	app := map[string]string{"app": "cart", "tier": "", "more": "x"}
	for name, c := range map[string]struct {
		uid                uint32
		pod                string
		namespace, account string
		labels             map[string]string
		want               []string
	}{
		"all":                    {7, "", "shop", "cart", app, []string{"/namespace", "/account", "/labels", "/all"}},
		"another user":           {8, "", "shop", "cart", app, []string{"/namespace", "/account", "/labels"}},
		"another account":        {7, "", "shop", "card", app, []string{"/namespace", "/labels"}},
		"no labels":              {7, "", "shop", "cart", nil, []string{"/namespace", "/account"}},
		"a label with more":      {7, "", "shop", "cart", map[string]string{"app": "carts", "tier": ""}, []string{"/namespace", "/account"}},
		"a label that is absent": {7, "", "shop", "cart", map[string]string{"app": "cart"}, []string{"/namespace", "/account", "/all"}},
		"the pod":                {7, "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22", "shop", "x", nil, []string{"/namespace", "/pod"}},
		"another pod":            {7, "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c23", "shop", "x", nil, []string{"/namespace"}},
		"another namespace":      {7, "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22", "shops", "cart", app, nil},
		"no pod":                 {7, "", "", "cart", app, nil},
	} {
		got, err := workloadagent.Granted([]byte(file), unixsocket.Peer{UID: c.uid}, unixsocket.Process{Pod: c.pod}, c.namespace, c.account, c.labels)
		require.NoError(t, err)
		assert.Equal(t, c.want, got, name)
	}
}

func FuzzFile(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte(`{"workloads": [{"match": {"uid": 1}, "identities": [{}]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := workloadagent.Parse(data, exampleOrg); err != nil {
			assert.Regexp(t, `^line [0-9]+, column [0-9]+: `, err.Error())
		}
	})
}
