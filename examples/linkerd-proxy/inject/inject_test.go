package inject_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/inject"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var update = flag.Bool("update", false, "write the golden files")

const anchorsFile = "testdata/anchors.pem"

func anchors(t testing.TB) []byte {
	t.Helper()
	if *update {
		if _, err := os.Stat(anchorsFile); err != nil {
			require.NoError(t, os.WriteFile(anchorsFile, pki.MarshalCertificatesPEM(spiffetest.NewCA(t, "cluster.local").Root()), 0o644))
		}
	}
	return must.Get(os.ReadFile(anchorsFile))(t)
}

var mesh = linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}

func injector(t testing.TB, edit ...func(*inject.Config)) *inject.Injector {
	t.Helper()
	cfg := inject.Config{Mesh: mesh, TrustAnchors: anchors(t)}
	for _, e := range edit {
		e(&cfg)
	}
	return must.Get(inject.New(cfg))(t)
}

func seed(c *inject.Config)     { c.Mesh.FirstDesign = true }
func audience(c *inject.Config) { c.TokenAudience = "identity.l5d.io" }

func read(t testing.TB, name string) []byte {
	t.Helper()
	return must.Get(os.ReadFile(filepath.Join("testdata", name)))(t)
}

// apply applies a JSON Patch that only adds.
func apply(t testing.TB, object, patch []byte) []byte {
	t.Helper()
	decode := func(b []byte, into any) {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		require.NoError(t, d.Decode(into))
	}
	var root any
	decode(object, &root)
	if patch != nil {
		var ops []struct {
			Op, Path string
			Value    any
		}
		decode(patch, &ops)
		require.NotEmpty(t, ops)
		for _, op := range ops {
			require.Equal(t, "add", op.Op)
			steps := strings.Split(op.Path, "/")[1:]
			at := root
			for _, s := range steps[:len(steps)-1] {
				if l, ok := at.([]any); ok {
					i := must.Get(strconv.Atoi(s))(t)
					at = l[i]
					continue
				}
				next, ok := at.(map[string]any)[s]
				require.True(t, ok, "%s: no %s", op.Path, s)
				at = next
			}
			at.(map[string]any)[steps[len(steps)-1]] = op.Value
		}
	}
	return append(must.Get(json.MarshalIndent(root, "", "  "))(t), '\n')
}

// env returns the variables of the proxy.
func env(t testing.TB, pod []byte) map[string]string {
	t.Helper()
	var p struct {
		Spec struct {
			Containers []struct {
				Name string
				Env  []struct{ Name, Value string }
			}
		}
	}
	require.NoError(t, json.Unmarshal(pod, &p))
	out := map[string]string{}
	for _, c := range p.Spec.Containers {
		if c.Name == "linkerd-proxy" {
			for _, e := range c.Env {
				require.NotContains(t, out, e.Name)
				out[e.Name] = e.Value
			}
		}
	}
	return out
}

func TestGolden(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-7", "LNK-12.1-1", "LNK-12.1-2", "LNK-12.1-3", "LNK-12.1-4", "LNK-12.1-5", "LNK-12.1-6", "LNK-12.1-8", "LNK-12.2-1", "LNK-12.2-2", "LNK-12.2-3", "LNK-12.2-4", "LNK-12.2-6", "LNK-12.2-7", "LNK-12.2-12", "LNK-12.2-13", "LNK-13-1", "LNK-13-3")
	for name, edit := range map[string]func(*inject.Config){
		"seed":    seed,
		"current": audience,
		"account": func(*inject.Config) {},
		"off":     func(c *inject.Config) { c.Disabled = true },
		"composed": func(c *inject.Config) {
			audience(c)
			c.DownwardAPI = true
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in, pod := injector(t, edit), read(t, "pod.json")
			got := must.Get(in.Inject(pod, ""))(t)
			want := "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
			switch name {
			case "seed":
				want = "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local"
			case "off":
				want = ""
			}
			assert.Equal(t, want, got.Identity)
			assert.Equal(t, want != "", got.Enabled)
			patched := apply(t, pod, got.Patch)
			golden := filepath.Join("testdata", name+".golden.json")
			if *update {
				require.NoError(t, os.WriteFile(golden, patched, 0o644))
			}
			assert.Equal(t, string(must.Get(os.ReadFile(golden))(t)), string(patched))

			// Once more changes nothing.
			again := must.Get(in.Inject(patched, ""))(t)
			assert.Nil(t, again.Patch, "%s", again.Patch)
			assert.Equal(t, got.Identity, again.Identity)
		})
	}
}

// kubelet returns the environment of the proxy's container as the kubelet makes it: in order, with $(NAME) of variables before, and
// with the fields of the pod.
func kubelet(t testing.TB, pod []byte) (environ []string) {
	t.Helper()
	var p struct {
		Metadata struct{ Namespace string }
		Spec     struct {
			ServiceAccountName string
			Containers         []struct {
				Name string
				Env  []struct {
					Name, Value string
					ValueFrom   *struct {
						FieldRef struct{ APIVersion, FieldPath string }
					}
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal(pod, &p))
	fields := map[string]string{"metadata.namespace": p.Metadata.Namespace, "spec.serviceAccountName": p.Spec.ServiceAccountName}
	for _, c := range p.Spec.Containers {
		if c.Name != "linkerd-proxy" {
			continue
		}
		var before []string
		for _, e := range c.Env {
			value := strings.NewReplacer(before...).Replace(e.Value)
			if e.ValueFrom != nil {
				var ok bool
				value, ok = fields[e.ValueFrom.FieldRef.FieldPath]
				require.True(t, ok, e.ValueFrom.FieldRef.FieldPath)
			}
			before = append([]string{"$(" + e.Name + ")", value}, before...)
			environ = append(environ, e.Name+"="+value)
		}
	}
	return environ
}

// The kubelet composes the name of the workload of the fields of the pod, in either form, and the proxy takes it for its identity:
// also of a pod that has some of the variables already, in another order or with other values.
func TestDownwardAPI(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-2-1", "LNK-2-2", "LNK-12.2-15")
	for _, first := range []bool{false, true} {
		for _, before := range []string{
			"",
			`{"name": "LINKERD2_PROXY_IDENTITY_LOCAL_NAME", "value": "old"}, {"name": "LINKERD2_PROXY_LOCAL_IDENTITY_NAME", "value": "old"},`,
			`{"name": "LINKERD2_PROXY_IDENTITY_LOCAL_NAME", "value": "$(_pod_sa)"}, {"name": "LINKERD2_PROXY_LOCAL_IDENTITY_NAME", "value": "$(K8S_NS)"},
			 {"name": "_pod_sa", "value": "admin"}, {"name": "K8S_NS", "value": "kube-system"}, {"name": "K8S_SA", "value": "admin"},`,
			`{"name": "_pod_ns", "value": "kube-system"}, {"name": "_pod_sa", "value": "admin"}, {"name": "K8S_NS", "value": "kube-system"},`,
		} {
			in := injector(t, func(c *inject.Config) { c.Mesh.FirstDesign, c.DownwardAPI = first, true })
			pod := func(namespace, account string) []byte {
				return fmt.Appendf(nil, `{"kind": "Pod", "apiVersion": "v1", "metadata": {"namespace": %q}, "spec": {"serviceAccountName": %q,
					"containers": [{"name": "linkerd-proxy", "env": [%s {"name": "LINKERD2_PROXY_LOG", "value": "info"}]}]}}`, namespace, account, before)
			}
			got := must.Get(in.Inject(pod("emojivoto", "web"), ""))(t)
			patched := apply(t, pod("emojivoto", "web"), got.Patch)
			assert.Nil(t, must.Get(in.Inject(patched, ""))(t).Patch)

			// Both names are there in one of the cases; the proxy is given the one of its form.
			for _, of := range [][2]string{{"emojivoto", "web"}, {"books", "authors"}} {
				want, err := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local", FirstDesign: first}.Name(of[0], of[1])
				require.NoError(t, err)
				moved := bytes.ReplaceAll(bytes.ReplaceAll(patched, []byte(`"emojivoto"`), []byte(strconv.Quote(of[0]))), []byte(`"web"`), []byte(strconv.Quote(of[1])))
				var environ []string
				for _, line := range kubelet(t, moved) {
					if line != "LINKERD2_PROXY_IDENTITY_LOCAL_NAME=old" && line != "LINKERD2_PROXY_LOCAL_IDENTITY_NAME=old" && !strings.HasSuffix(line, "NAME=$(_pod_sa)") && !strings.HasSuffix(line, "NAME=$(K8S_NS)") {
						environ = append(environ, line)
					}
				}
				e := must.Get(linkerdproxy.FromEnviron(environ, nil))(t, "%s", moved)
				assert.Equal(t, want, e.Name, "%s", moved)
			}
		}
	}
}

// To a pod whose identity is disabled nothing is added, and its proxy is one without an identity.
func TestDisabled(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-1", "LNK-13-1")
	pod := []byte(`{"kind": "Pod", "apiVersion": "v1", "metadata": {"namespace": "emojivoto", "annotations": {"linkerd.io/identity": "disabled"}},
		"spec": {"serviceAccountName": "web", "containers": [{"name": "linkerd-proxy"}]}}`)
	got := must.Get(injector(t, func(c *inject.Config) { c.DownwardAPI = true }).Inject(pod, ""))(t)
	e := must.Get(linkerdproxy.FromEnviron(kubelet(t, apply(t, pod, got.Patch)), nil))(t)
	assert.Empty(t, e.Name)
}

// The parts of the first design's own text: the volume, and the variables that are gone.
func TestDocument(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-7", "LNK-12.1-8", "LNK-13-11")
	pod := read(t, "pod.json")
	patched := apply(t, pod, must.Get(injector(t, seed).Inject(pod, ""))(t).Patch)
	vars := env(t, patched)
	blob := must.Get(base64.StdEncoding.DecodeString(vars["LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB"]))(t)
	assert.Equal(t, anchors(t), blob)
	delete(vars, "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB")
	assert.Equal(t, map[string]string{
		"LINKERD2_PROXY_LOG":                  "info",
		"LINKERD2_PROXY_IDENTITY_STORE_DIR":   "/var/run/linkerd/identity",
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE":  "/var/run/secrets/kubernetes.io/serviceaccount/token",
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME":  "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local",
		"LINKERD2_PROXY_DESTINATION_ADDR":     "linkerd-destination.linkerd.svc.cluster.local:8086",
		"LINKERD2_PROXY_DESTINATION_IDENTITY": "linkerd-controller.linkerd.sa.linkerd-identity.linkerd.cluster.local",
		"LINKERD2_PROXY_IDENTITY_ADDR":        "linkerd-identity.linkerd.svc.cluster.local:8080",
		"LINKERD2_PROXY_IDENTITY_IDENTITY":    "linkerd-identity.linkerd.sa.linkerd-identity.linkerd.cluster.local",
	}, vars)
	var p struct {
		Spec struct {
			Containers []struct {
				VolumeMounts []struct{ Name, MountPath string }
			}
			Volumes []struct {
				Name     string
				EmptyDir *struct{ Medium string }
			}
		}
	}
	require.NoError(t, json.Unmarshal(patched, &p))
	assert.Equal(t, "linkerd-identity-store", p.Spec.Volumes[1].Name)
	assert.Equal(t, "Memory", p.Spec.Volumes[1].EmptyDir.Medium)
	assert.Len(t, p.Spec.Containers[0].VolumeMounts, 1, "only the proxy has the volume")
	assert.Contains(t, p.Spec.Containers[1].VolumeMounts, struct{ Name, MountPath string }{"linkerd-identity-store", "/var/run/linkerd/identity"})
	assert.Contains(t, string(patched), "9007199254740993", "numbers stay")
}

// The identity service's own proxy reaches it at localhost, whose name must not be set.
func TestCertifier(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-1", "LNK-1-9", "LNK-12.2-6", "LNK-12.2-14", "LNK-13-6")
	pod := bytes.ReplaceAll(bytes.ReplaceAll(read(t, "pod.json"), []byte(`"emojivoto"`), []byte(`"linkerd"`)), []byte(`"serviceAccountName": "web"`), []byte(`"serviceAccountName": "linkerd-identity"`))
	pod = bytes.Replace(pod, []byte(`{"name": "LINKERD2_PROXY_LOG", "value": "info"}`), []byte(`{"name": "LINKERD2_PROXY_IDENTITY_IDENTITY", "value": "x"}, {"name": "LINKERD2_PROXY_IDENTITY_SVC_NAME", "value": "x"}`), 1)
	for _, edit := range []func(*inject.Config){seed, audience} {
		got := must.Get(injector(t, edit).Inject(pod, ""))(t)
		assert.True(t, strings.HasPrefix(got.Identity, "linkerd-identity.linkerd."), "its own account: %s", got.Identity)
		vars := env(t, apply(t, pod, got.Patch))
		if vars["LINKERD2_PROXY_LOCAL_IDENTITY_NAME"] != "" {
			assert.Equal(t, "localhost:8080", vars["LINKERD2_PROXY_IDENTITY_ADDR"])
			assert.NotContains(t, vars, "LINKERD2_PROXY_IDENTITY_IDENTITY")
		} else {
			assert.Equal(t, "localhost.:8080", vars["LINKERD2_PROXY_IDENTITY_SVC_ADDR"])
			assert.NotContains(t, vars, "LINKERD2_PROXY_IDENTITY_SVC_NAME")
			assert.Equal(t, "8080", vars["LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS"])
		}
	}
}

const spec = `"spec":{"serviceAccountName":"web","containers":[{"name":"linkerd-proxy"}]}`

func TestObjects(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-13-1", "LNK-13-8")
	const off = `"metadata":{"name":"x","annotations":{"linkerd.io/identity":"disabled"}}`
	const on = `"metadata":{"name":"x","annotations":{"linkerd.io/identity":"enabled"}}`
	template := func(version, kind string) string {
		return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":"x","namespace":"n"},"spec":{"template":{%s}}}`, version, kind, spec)
	}
	unsupported := func(c *inject.Config) { c.Unsupported = true }
	byDefault := func(c *inject.Config) { c.Disabled = true }
	for name, v := range map[string]struct {
		object  string
		edit    func(*inject.Config)
		enabled bool
		value   string // of the annotation that is written; empty: nothing changes
		refused string
		bad     string
	}{
		"pod":                              {object: `{"apiVersion":"v1","kind":"Pod",` + spec + `}`, enabled: true, value: "enabled"},
		"pod, enabled":                     {object: `{"apiVersion":"v1","kind":"Pod",` + on + `,` + spec + `}`, enabled: true, value: "enabled"},
		"pod, enabled against the default": {object: `{"apiVersion":"v1","kind":"Pod",` + on + `,` + spec + `}`, edit: byDefault, enabled: true, value: "enabled"},
		"pod, disabled by default":         {object: `{"apiVersion":"v1","kind":"Pod",` + spec + `}`, edit: byDefault, value: "disabled"},
		"pod, disabled":                    {object: `{"apiVersion":"v1","kind":"Pod",` + off + `,` + spec + `}`},
		"pod, no identity service":         {object: `{"apiVersion":"v1","kind":"Pod",` + spec + `}`, edit: unsupported, value: "disabled"},
		"pod without a proxy":              {object: `{"apiVersion":"v1","kind":"Pod",` + on + `,"spec":{"containers":[{"name":"web"}]}}`},
		"native sidecar":                   {object: `{"apiVersion":"v1","kind":"Pod","spec":{"serviceAccountName":"web","containers":[],"initContainers":[{"name":"linkerd-proxy"}]}}`, enabled: true, value: "enabled"},
		"Deployment":                       {object: template("apps/v1", "Deployment"), enabled: true, value: "enabled"},
		"Job":                              {object: template("batch/v1", "Job"), enabled: true, value: "enabled"},
		"ReplicationController":            {object: template("v1", "ReplicationController"), enabled: true, value: "enabled"},
		"CronJob":                          {object: `{"apiVersion":"batch/v1","kind":"CronJob","metadata":{"name":"x"},"spec":{"jobTemplate":{"spec":{"template":{` + spec + `}}}}}`, enabled: true, value: "enabled"},
		"Deployment, disabled itself":      {object: `{"apiVersion":"apps/v1","kind":"Deployment",` + off + `,"spec":{"template":{` + spec + `}}}`, enabled: true, value: "enabled"},
		"Job of others":                    {object: `{"apiVersion":"batch.volcano.sh/v1","kind":"Job","metadata":{"name":"x"},"spec":{"tasks":[]}}`},
		"Service":                          {object: `{"apiVersion":"v1","kind":"Service","metadata":{"name":"x"}}`},
		"Service, disabled":                {object: `{"apiVersion":"v1","kind":"Service",` + off + `}`},
		"own token":                        {object: `{"apiVersion":"v1","kind":"Pod","spec":{"automountServiceAccountToken":false,"containers":[{"name":"linkerd-proxy"}]}}`, edit: audience, enabled: true, value: "enabled"},

		"enabled, no identity service": {object: `{"apiVersion":"v1","kind":"Pod",` + on + `,` + spec + `}`, edit: unsupported, refused: "the control plane has no identity service"},
		"Service, enabled":             {object: `{"apiVersion":"v1","kind":"Service",` + on + `}`, refused: "not a pod"},
		"Deployment, enabled itself":   {object: `{"apiVersion":"apps/v1","kind":"Deployment",` + on + `,"spec":{"template":{` + spec + `}}}`, refused: "pod template"},
		"another value":                {object: `{"apiVersion":"v1","kind":"Pod","metadata":{"annotations":{"linkerd.io/identity":"Enabled"}},` + spec + `}`, refused: `"Enabled"`},
		"no token":                     {object: `{"apiVersion":"v1","kind":"Pod","spec":{"automountServiceAccountToken":false,"containers":[{"name":"linkerd-proxy"}]}}`, refused: "automountServiceAccountToken"},
		"an account with a dot":        {object: `{"apiVersion":"v1","kind":"Pod","spec":{"serviceAccountName":"web.v1","containers":[{"name":"linkerd-proxy"}]}}`, refused: `"web.v1"`},
		"another mounts the store":     {object: `{"apiVersion":"v1","kind":"Pod","spec":{"containers":[{"name":"linkerd-proxy"},{"name":"spy","volumeMounts":[{"name":"linkerd-identity-end-entity","mountPath":"/x"}]}]}}`, refused: `"spy"`},
		"an init container mounts it":  {object: `{"apiVersion":"v1","kind":"Pod","spec":{"containers":[{"name":"linkerd-proxy"}],"initContainers":[{"name":"spy","volumeMounts":[{"name":"linkerd-identity-token","mountPath":"/x"}]}]}}`, edit: audience, refused: `"spy"`},

		"empty":            {object: ``, bad: "the object"},
		"no kind":          {object: `{}`, bad: "no kind"},
		"no spec":          {object: `{"apiVersion":"v1","kind":"Pod"}`, bad: "no spec"},
		"no template":      {object: `{"apiVersion":"apps/v1","kind":"Deployment","spec":{}}`, bad: "no spec"},
		"twice":            {object: `{"apiVersion":"v1","kind":"Service","kind":"Pod",` + spec + `}`, bad: "twice"},
		"annotations":      {object: `{"apiVersion":"v1","kind":"Pod","metadata":{"annotations":{"linkerd.io/identity":true}},` + spec + `}`, bad: `"annotations"`},
		"containers":       {object: `{"apiVersion":"v1","kind":"Pod","spec":{"containers":{}}}`, bad: `"containers"`},
		"variables":        {object: `{"apiVersion":"v1","kind":"Pod","spec":{"containers":[{"name":"linkerd-proxy","env":[1]}]}}`, bad: `"env"`},
		"mounts":           {object: `{"apiVersion":"v1","kind":"Pod","spec":{"containers":[{"name":"linkerd-proxy","volumeMounts":7}]}}`, bad: `"volumeMounts"`},
		"volumes":          {object: `{"apiVersion":"v1","kind":"Pod","spec":{"volumes":{},"containers":[{"name":"linkerd-proxy"}]}}`, bad: `"volumes"`},
		"name of a volume": {object: `{"apiVersion":"v1","kind":"Pod","spec":{"volumes":[{"name":1}],"containers":[{"name":"linkerd-proxy"}]}}`, bad: `"name"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			edit := v.edit
			if edit == nil {
				edit = func(*inject.Config) {}
			}
			got, err := injector(t, edit).Inject([]byte(v.object), "n")
			switch {
			case v.refused != "":
				require.ErrorIs(t, err, inject.ErrRefused)
				assert.ErrorContains(t, err, v.refused)
				return
			case v.bad != "":
				require.NotErrorIs(t, err, inject.ErrRefused)
				require.ErrorContains(t, err, v.bad)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, v.enabled, got.Enabled)
			if v.enabled {
				assert.Contains(t, got.Identity, ".n.serviceaccount.identity.linkerd.cluster.local")
			} else {
				assert.Empty(t, got.Identity)
			}
			if v.value == "" {
				assert.Nil(t, got.Patch)
				return
			}
			patched := apply(t, []byte(v.object), got.Patch)
			assert.Contains(t, string(patched), `"linkerd.io/identity": "`+v.value+`"`)
			assert.Equal(t, v.enabled, bytes.Contains(patched, []byte("LINKERD2_PROXY_IDENTITY_LOCAL_NAME")))
		})
	}
}

// The token of the account is mounted where the proxy reads it.
func TestAccountToken(t *testing.T) {
	t.Parallel()
	pod := read(t, "pod.json")
	got := must.Get(injector(t).Inject(pod, ""))(t)
	assert.Equal(t, 2, strings.Count(string(apply(t, pod, got.Patch)), `"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"`))
}

func TestSetTrustAnchors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-13-3")
	in, pod := injector(t), read(t, "pod.json")
	before := must.Get(in.Inject(pod, ""))(t)
	for _, bad := range []string{"", "x", "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"} {
		require.Error(t, in.SetTrustAnchors([]byte(bad)))
	}
	one := pki.MarshalCertificatesPEM(spiffetest.NewCA(t, "cluster.local").Root())
	most := bytes.Repeat(one, 90<<10/len(one))
	require.ErrorIs(t, in.SetTrustAnchors(append(most, one...)), spiffe.ErrTooLarge)
	full := must.Get(injector(t, seed, func(c *inject.Config) { c.TrustAnchors = most }).Inject(pod, ""))(t)
	for name, value := range env(t, apply(t, pod, full.Patch)) {
		require.Less(t, len(name)+len("=")+len(value), 128<<10, "of more Linux makes no variable")
	}
	assert.Equal(t, before, must.Get(in.Inject(pod, ""))(t))
	next := pki.MarshalCertificatesPEM(spiffetest.NewCA(t, "cluster.local").Root())
	require.NoError(t, in.SetTrustAnchors(next))
	clear(next)
	// A pod that was admitted before has the old ones, and gets the new ones when it is created again.
	after := must.Get(in.Inject(apply(t, pod, before.Patch), ""))(t)
	assert.Contains(t, string(after.Patch), "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS")
	assert.Contains(t, string(after.Patch), "-----BEGIN CERTIFICATE-----")
}

func TestIdentity(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-7", "LNK-15-2", "LNK-15-3")
	in, pod := injector(t), read(t, "pod.json")
	got := must.Get(in.Inject(pod, ""))(t)
	ours := string(apply(t, pod, got.Patch))
	const note = `"example.org/kept": "yes"`
	for name, v := range map[string]struct {
		pod  string
		port uint16
		want string
	}{
		"ours":              {ours, 80, "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"},
		"not injected":      {string(pod), 80, ""},
		"another mesh":      {strings.Replace(ours, `"linkerd.io/control-plane-ns": "linkerd"`, `"linkerd.io/control-plane-ns": "other"`, 1), 80, ""},
		"disabled":          {strings.Replace(ours, `"linkerd.io/identity": "enabled"`, `"linkerd.io/identity": "disabled"`, 1), 80, ""},
		"skipped":           {strings.Replace(ours, note, note+`,"config.linkerd.io/skip-inbound-ports": "25,80"`, 1), 80, ""},
		"skipped, a range":  {strings.Replace(ours, note, note+`,"config.linkerd.io/skip-inbound-ports": "25, 79-81"`, 1), 80, ""},
		"skipped elsewhere": {strings.Replace(ours, note, note+`,"config.linkerd.io/skip-inbound-ports": "25,8000-8080,"`, 1), 80, "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			name := must.Get(in.Identity([]byte(v.pod), v.port))(t)
			assert.Equal(t, v.want, name)
			if name == "" {
				return
			}
			// The injector has said the same, and so does the certifier, which has the mesh.
			assert.Equal(t, got.Identity, name)
			namespace, account := must.Get2(mesh.Parse(name))(t)
			assert.Equal(t, "emojivoto web", namespace+" "+account)
		})
	}
	for name, bad := range map[string]string{
		"no JSON":      "{",
		"a Service":    `{"apiVersion":"v1","kind":"Service"}`,
		"a Deployment": `{"apiVersion":"apps/v1","kind":"Deployment","spec":{"template":{` + spec + `}}}`,
		"a port":       strings.Replace(ours, note, note+`,"config.linkerd.io/skip-inbound-ports": "http"`, 1),
		"a range":      strings.Replace(ours, note, note+`,"config.linkerd.io/skip-inbound-ports": "9-8"`, 1),
		"a large port": strings.Replace(ours, note, note+`,"config.linkerd.io/skip-inbound-ports": "65536"`, 1),
		"the account":  strings.Replace(ours, `"serviceAccountName": "web"`, `"serviceAccountName": "web.v1"`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Error(t, must.Err(in.Identity([]byte(bad), 80)))
		})
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(*inject.Config){
		"no mesh":    func(c *inject.Config) { c.Mesh = linkerdname.Mesh{} },
		"no anchors": func(c *inject.Config) { c.TrustAnchors = nil },
		"a key": func(c *inject.Config) {
			c.TrustAnchors = []byte("-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n")
		},
		"cluster domain": func(c *inject.Config) { c.ClusterDomain = "Cluster.local" },
		"container":      func(c *inject.Config) { c.Container = "a/b" },
		"short tokens":   func(c *inject.Config) { c.TokenSeconds = 599 },
		"negative":       func(c *inject.Config) { c.TokenSeconds = -1 },
	} {
		cfg := inject.Config{Mesh: mesh, TrustAnchors: anchors(t)}
		edit(&cfg)
		require.Error(t, must.Err(inject.New(cfg)), name)
	}
}

func TestWebhook(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var log bytes.Buffer
	in := injector(t, func(c *inject.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	server := httptest.NewTLSServer(in)
	t.Cleanup(server.Close)
	pod := string(read(t, "pod.json"))
	review := func(operation, kind, object string) string {
		return fmt.Sprintf(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u-1","kind":{"group":"","version":"v1","kind":%q},"namespace":"emojivoto","operation":%q,"object":%s,"oldObject":null,"newField":1}}`, kind, operation, object)
	}
	send := func(method, media, body string) (int, string) {
		req := must.Get(http.NewRequestWithContext(t.Context(), method, server.URL, strings.NewReader(body)))(t)
		req.Header.Set("Content-Type", media)
		resp := must.Get(server.Client().Do(req))(t)
		defer resp.Body.Close()
		var b bytes.Buffer
		must.Get(b.ReadFrom(resp.Body))(t)
		return resp.StatusCode, b.String()
	}
	type answer struct {
		APIVersion, Kind string
		Response         struct {
			UID       string
			Allowed   bool
			Patch     []byte
			PatchType string
			Status    struct {
				Code    int
				Message string
			}
		}
	}
	ask := func(body string) (a answer) {
		code, text := send(http.MethodPost, "application/json", body)
		require.Equal(t, http.StatusOK, code, text)
		require.NoError(t, json.Unmarshal([]byte(text), &a))
		assert.Equal(t, "admission.k8s.io/v1", a.APIVersion)
		assert.Equal(t, "AdmissionReview", a.Kind)
		assert.Equal(t, "u-1", a.Response.UID)
		return a
	}
	a := ask(review("CREATE", "Pod", pod))
	assert.True(t, a.Response.Allowed)
	assert.Equal(t, "JSONPatch", a.Response.PatchType)
	assert.Contains(t, string(apply(t, []byte(pod), a.Response.Patch)), "LINKERD2_PROXY_IDENTITY_LOCAL_NAME")

	for name, body := range map[string]string{
		"update of a pod": review("UPDATE", "Pod", pod),
		"delete":          review("DELETE", "Pod", "null"),
		"another object":  review("CREATE", "Service", `{"apiVersion":"v1","kind":"Service"}`),
	} {
		a := ask(body)
		assert.True(t, a.Response.Allowed, name)
		assert.Nil(t, a.Response.Patch, name)
	}
	a = ask(review("CREATE", "Service", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"x","annotations":{"linkerd.io/identity":"enabled"}}}`))
	assert.False(t, a.Response.Allowed)
	assert.Equal(t, http.StatusForbidden, a.Response.Status.Code)
	assert.Contains(t, a.Response.Status.Message, "not a pod")
	assert.Contains(t, log.String(), "not a pod")
	part := func(name, body string) string {
		return strings.Replace(body, `"newField":1`, fmt.Sprintf(`"subResource":%q`, name), 1)
	}
	debugged := strings.Replace(pod, `"volumes":`, `"ephemeralContainers": [{"name": "debug", "volumeMounts": [{"name": "linkerd-identity-end-entity", "mountPath": "/x"}]}], "volumes":`, 1)
	a = ask(part("ephemeralcontainers", review("UPDATE", "Pod", debugged)))
	assert.False(t, a.Response.Allowed)
	assert.Contains(t, a.Response.Status.Message, `"debug"`)

	// What cannot be refused, as the object would keep its finalizers or its old status for ever.
	const odd = `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"x"},"spec":{"template":{"metadata":{"annotations":{"linkerd.io/identity":"yes"}},"spec":{"containers":[{"name":"linkerd-proxy"}]}}}}`
	deleted := func(body string) string {
		return strings.Replace(body, `"oldObject":null`, `"oldObject":{"metadata":{"deletionTimestamp":"2026-01-01T00:00:00Z"}}`, 1)
	}
	for name, body := range map[string]string{
		"a finalizer of a pod":      review("UPDATE", "Pod", debugged),
		"the status of a pod":       part("status", review("UPDATE", "Pod", debugged)),
		"a deleted deployment":      deleted(review("UPDATE", "Deployment", odd)),
		"a status":                  part("status", review("UPDATE", "Deployment", odd)),
		"the binding of a new pod":  part("binding", review("CREATE", "Pod", `{"apiVersion":"v1","kind":"Binding","metadata":{"annotations":{"linkerd.io/identity":"enabled"}}}`)),
		"a connection, with object": review("CONNECT", "Pod", odd),
	} {
		a := ask(body)
		assert.True(t, a.Response.Allowed, "%s: %s", name, a.Response.Status.Message)
		assert.Nil(t, a.Response.Patch, name)
	}
	mine := strings.Replace(odd, `"name":"x"`, `"name":"x","deletionTimestamp":"2026-01-01T00:00:00Z"`, 1)
	for name, body := range map[string]string{
		"an update":                     review("UPDATE", "Deployment", odd),
		"one that says that it is over": review("UPDATE", "Deployment", mine),
		"a new one that says so":        deleted(review("CREATE", "Deployment", odd)),
		"a container in a deleted pod":  deleted(part("ephemeralcontainers", review("UPDATE", "Pod", debugged))),
	} {
		a := ask(body)
		assert.False(t, a.Response.Allowed, name)
	}
	a = ask(review("CREATE", "Pod", `{"kind":"Pod"}`))
	assert.False(t, a.Response.Allowed)
	assert.Equal(t, http.StatusBadRequest, a.Response.Status.Code)

	for name, v := range map[string]struct {
		method, media, body string
		code                int
	}{
		"GET":          {http.MethodGet, "application/json", "", http.StatusMethodNotAllowed},
		"a form":       {http.MethodPost, "application/x-www-form-urlencoded", review("CREATE", "Pod", pod), http.StatusUnsupportedMediaType},
		"no media":     {http.MethodPost, "", review("CREATE", "Pod", pod), http.StatusUnsupportedMediaType},
		"no JSON":      {http.MethodPost, "application/json", "{", http.StatusBadRequest},
		"no review":    {http.MethodPost, "application/json", "{}", http.StatusBadRequest},
		"v1beta1":      {http.MethodPost, "application/json", strings.Replace(review("CREATE", "Pod", pod), "k8s.io/v1", "k8s.io/v1beta1", 1), http.StatusBadRequest},
		"no UID":       {http.MethodPost, "application/json", strings.Replace(review("CREATE", "Pod", pod), "u-1", "", 1), http.StatusBadRequest},
		"two requests": {http.MethodPost, "application/json", `{"request":{},"request":{}}`, http.StatusBadRequest},
		"a request":    {http.MethodPost, "application/json", `{"request":1}`, http.StatusBadRequest},
		"too large":    {http.MethodPost, "application/json", strings.Repeat(" ", 8<<20) + "{}", http.StatusRequestEntityTooLarge},
	} {
		code, text := send(v.method, v.media, v.body)
		assert.Equal(t, v.code, code, "%s: %s", name, text)
	}
}

// Clients that send slowly, or nothing, do not keep the API server waiting, and do not stay.
func TestWebhookSlowClients(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := memconn.Listen()
		server := &http.Server{Handler: injector(t)}
		go func() { _ = server.Serve(l) }()
		defer time.Sleep(time.Second) // net/http lingers after an answer that ends a connection
		defer server.Close()
		send := func(length int, body, more string) net.Conn {
			c := must.Get(l.DialContext(t.Context(), "tcp", ""))(t)
			_, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s", length, more, body)
			require.NoError(t, err)
			return c
		}
		var slow []net.Conn
		for range 40 {
			slow = append(slow, send(100, "{", ""))
		}
		synctest.Wait()
		begun := time.Now()
		body := `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"DELETE"}}`
		c := send(len(body), body, "Connection: close\r\n")
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
		assert.Contains(t, string(must.Get(io.ReadAll(c))(t)), "HTTP/1.1 200 OK")
		assert.Zero(t, time.Since(begun))
		for _, c := range slow {
			require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
			assert.Contains(t, string(must.Get(io.ReadAll(c))(t)), "HTTP/1.1 400 Bad Request")
		}
		assert.LessOrEqual(t, time.Since(begun), 15*time.Second)

		// Nor does one that says that it has much to send.
		for i := range 5 {
			c := send(8<<20, "{", "")
			synctest.Wait()
			if i < 4 {
				defer c.Close()
				continue
			}
			answer := must.Get(io.ReadAll(c))(t)
			assert.Contains(t, string(answer), "HTTP/1.1 503 Service Unavailable", "of this peer, more than its share")
		}
	})
}

// An object of many tiny values, of which the memory is many times that of its text, is refused before it is taken apart.
func TestManyValues(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	in := injector(t)
	n := rounds.Of(75_000)
	pod := func(note, containers, env string) []byte {
		return []byte(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x","annotations":{"a":"` + note + `"}},"spec":{"containers":[` + containers + `{"name":"linkerd-proxy","env":[` + env + `{"name":"a"}]}]}}`)
	}
	var members strings.Builder
	for i := range n {
		fmt.Fprintf(&members, `"%x":0,`, i)
	}
	for name, object := range map[string][]byte{
		"containers":      pod("", strings.Repeat("{},", n), ""),
		"variables":       pod("", "", strings.Repeat("{},", n)),
		"of many":         pod("", strings.Repeat(`{"env":[`+strings.Repeat("{},", 100)+`{}]},`, n/100), ""),
		"members":         []byte("{" + members.String() + `"kind":"Pod"}`),
		"of a member":     []byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"annotations":{` + members.String() + `"x":""}}}`),
		"behind a string": pod(`\\\"`, strings.Repeat("{},", n), ""),
	} {
		require.ErrorContains(t, must.Err(in.Inject(object, "emojivoto")), "too many ", name)
	}
	got, err := in.Inject(pod(strings.Repeat(`{,[\",`, n), "", strings.Repeat(`{"name":"b","value":"1,2"},`, 10_000)), "emojivoto")
	require.NoError(t, err)
	assert.True(t, got.Enabled)
}

func FuzzInject(f *testing.F) {
	in := must.Get(inject.New(inject.Config{Mesh: mesh, TrustAnchors: anchors(f), TokenAudience: "identity.l5d.io"}))(f)
	f.Add(read(f, "pod.json"))
	f.Add([]byte(`{"apiVersion":"apps/v1","kind":"Deployment","metadata":null,"spec":{"template":{"metadata":null,` + spec + `}}}`))
	f.Add([]byte(`{"apiVersion":"v1","kind":"Pod","spec":{"volumes":null,"containers":[{"name":"linkerd-proxy","env":null,"volumeMounts":[null]}]}}`))
	f.Add([]byte(`{"apiVersion":"v1","kind":"Service"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := in.Inject(data, "n")
		if err != nil {
			return
		}
		if !got.Enabled {
			assert.Empty(t, got.Identity)
			return
		}
		patched := data
		if got.Patch != nil {
			patched = apply(t, data, got.Patch)
		}
		again := must.Get(in.Inject(patched, "n"))(t)
		assert.Equal(t, got.Identity, again.Identity)
		assert.Nil(t, again.Patch, "%s\n%s", got.Patch, again.Patch)
	})
}

// A pod of the mesh has the label of this control plane: one without gets it, one of another control plane gets it in the place of that, and the other
// labels stay. A pod without an identity keeps what it has.
func TestControlPlaneLabel(t *testing.T) {
	t.Parallel()
	const owner = "linkerd.io/control-plane-ns"
	for name, labels := range map[string]map[string]string{
		"none":                     nil,
		"others":                   {"app": "web", "linkerd.io/proxy-deployment": "web"},
		"its own":                  {"app": "web", owner: "linkerd"},
		"of another control plane": {"app": "web", owner: "linkerd-old"},
		"empty":                    {owner: ""},
	} {
		for annotation, joined := range map[string]bool{"enabled": true, "disabled": false} {
			text := must.Get(json.Marshal(labels))(t)
			for _, form := range []string{
				`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x","labels":%s,"annotations":{"linkerd.io/identity":%q}},` + spec + `}`,
				`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"x"},"spec":{"template":{"metadata":{"labels":%s,"annotations":{"linkerd.io/identity":%q}},` + spec + `}}}`,
			} {
				object := fmt.Appendf(nil, form, text, annotation)
				got := must.Get(injector(t).Inject(object, "n"))(t)
				require.Equal(t, joined, got.Enabled)
				type meta struct{ Labels map[string]string }
				var patched struct {
					Metadata meta
					Spec     struct{ Template struct{ Metadata meta } }
				}
				require.NoError(t, json.Unmarshal(apply(t, object, got.Patch), &patched))
				want := maps.Clone(labels)
				if joined {
					if want == nil {
						want = map[string]string{}
					}
					want[owner] = "linkerd"
				}
				is := patched.Metadata.Labels
				if is == nil {
					is = patched.Spec.Template.Metadata.Labels
				}
				assert.Equal(t, want, is, "%s, %s", name, annotation)
			}
		}
	}
}
