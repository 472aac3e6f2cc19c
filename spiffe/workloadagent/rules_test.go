package workloadagent_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadagent"
)

// whole has every key.
const whole = `{
  "workloads": [
    {
      "match": {"uid": 1000, "gid": 1000, "executable": "/usr/bin/web", "unit": "web.service", "pod": "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22"},
      "identities": [
        {
          "id": "spiffe://example.org/web", "hint": "internal", "audiences": ["db", "*"],
          "files": [
            {"folder": "/run/web", "layout": "delivery", "gid": 1000, "mode": "0644", "key_mode": "0640"},
            {"folder": "/run/old-web", "layout": "split"}
          ]
        },
        {"id": "spiffe://example.org/web/admin"}
      ]
    },
    {"identities": [{"id": "spiffe://example.org/batch", "files": [{"folder": "/run/batch"}]}]}
  ]
}`

var exampleOrg = spiffe.MustParseTrustDomain("example.org")

// A bad file is refused with the line, the column and what to do.
func TestCheck(t *testing.T) {
	t.Parallel()
	require.NoError(t, workloadagent.Check([]byte(whole), exampleOrg))
	require.NoError(t, workloadagent.Check([]byte(whole), spiffe.TrustDomain{}))
	require.NoError(t, workloadagent.Check([]byte(`{}`), exampleOrg), "no process has anything")
	one := func(match, identity string) string {
		return "{\"workloads\": [\n{\"match\": " + match + ",\n\"identities\": [" + identity + "]}]}"
	}
	const uid, web = `{"uid": 1}`, `{"id": "spiffe://example.org/web"}`
	for data, want := range map[string]string{
		``:                           "line 1, column 1: ",
		`[]`:                         "line 1, column 1: the file has to be an object, in braces",
		"{\n  \"workload\": []}":     "line 2, column 15: \"workload\" is not known here: the file can have workloads",
		`{"workloads": {}}`:          "line 1, column 15: workloads has to be a list, in brackets",
		"{\"workloads\": [\n]} x":    "line 2, column 4: ",
		"{\"workloads\": [\n{},\n]}": "line 3, column 1: ",
		"{\"workloads\": [],\n\"workloads\": []}": "line 2, column ",
		"{\"workloads\": [\n// comment\n]}":       "see that it is JSON",
		`{"workloads": ["` + "\xff" + `"]}`:       "not UTF-8",
		one(uid, ``):                              "line 2, column 1: the workload has no identities: add at least one",
		`{"workloads": [{"identities": [{"id": "spiffe://example.org/web"}]}]}`: "has neither a match nor files",
		one(`{}`, web):                                "line 2, column 11: an empty match is for no process",
		one(`{"uid": "1"}`, web):                      "line 2, column 19: uid has to be a number without quotes, as the command id prints it",
		one(`{"uid": -1}`, web):                       "uid has to be a number",
		one(`{"uid": 1.5}`, web):                      "uid has to be a number",
		one(`{"gid": 4294967295}`, web):               "gid has to be a number",
		one(`{"user": "web"}`, web):                   "match can have executable, gid, pod, uid, unit",
		one(`{"executable": "web"}`, web):             `executable is "web": want an absolute path`,
		one(`{"executable": "/a/../b"}`, web):         "want an absolute path",
		one(`{"executable": ""}`, web):                "not empty",
		one(`{"unit": "web"}`, web):                   "such as web.service",
		one(`{"unit": "a/web.service"}`, web):         "such as web.service",
		one(`{"pod": "web-0"}`, web):                  "want a UID, as kubectl get pod",
		one(uid, `{}`):                                "line 3, column 16: the identity has no id",
		one(uid, `{"id": "web"}`):                     `id is "web": `,
		one(uid, `{"id": "spiffe://example.org"}`):    "add the path of the workload",
		one(uid, `{"id": "spiffe://other.test/web"}`): "this agent is for the trust domain example.org",
		one(uid, web+","+web):                         "the workload has it already",
		one(uid, `{"id": "spiffe://example.org/a", "hint": "x"}, {"id": "spiffe://example.org/b", "hint": "x"}`): "choose another",
		one(uid, `{"id": "spiffe://example.org/a", "audiences": "*"}`):                                           "audiences has to be a list",
		one(uid, `{"id": "spiffe://example.org/a", "audiences": [""]}`):                                          "an audience has to be a text",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{}]}`):                                              "the files have no folder",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "web"}]}`):                               "want an absolute path",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "layout": "x"}]}`):                 "want delivery",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "mode": "0666"}]}`):                "want 0644",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a", "key_mode": 384}]}`):               "key_mode has to be a text in quotes",
		one(uid, `{"id": "spiffe://example.org/a", "files": [{"folder": "/a"}, {"folder": "/a"}]}`):              "a folder has one",
	} {
		assert.ErrorContains(t, workloadagent.Check([]byte(data), exampleOrg), want, "%s", data)
	}
}

func FuzzCheck(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte(`{"workloads": [{"match": {"uid": 1}, "identities": [{}]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := workloadagent.Check(data, exampleOrg); err != nil {
			assert.Regexp(t, `^line [0-9]+, column [0-9]+: `, err.Error())
		}
	})
}
