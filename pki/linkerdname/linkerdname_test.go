package linkerdname_test

import (
	"fmt"
	"log"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

const (
	web     = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	invalid = "invalid name" // is in every error
)

var (
	mesh = linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
	seed = linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local", FirstDesign: true}
)

// An injector and a destination service have the names of a mesh in common with its certifier.
func Example() {
	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
	name, err := mesh.Name("emojivoto", "web")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(name)
	namespace, account, err := mesh.Parse("voting.emojivoto.serviceaccount.identity.linkerd.cluster.local")
	fmt.Println(account, namespace, err)
	pattern, err := mesh.Namespace("emojivoto")
	if err != nil {
		log.Fatal(err)
	}
	matched, err := linkerdname.Match(pattern, name)
	fmt.Println(pattern, matched, err)
	// Output:
	// web.emojivoto.serviceaccount.identity.linkerd.cluster.local
	// voting emojivoto <nil>
	// *.emojivoto.serviceaccount.identity.linkerd.cluster.local true <nil>
}

func TestNames(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-2-1", "LNK-2-2", "LNK-17-1", "LNK-17-2")
	for m, want := range map[linkerdname.Mesh]string{mesh: web, seed: "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local"} {
		name := must.Get(m.Name("emojivoto", "web"))(t)
		assert.Equal(t, want, name)
		namespace, account, err := m.Parse(name)
		require.NoError(t, err)
		assert.Equal(t, "emojivoto web", namespace+" "+account)
	}
}

func TestWellKnownNames(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-2-5", "LNK-2-14", "LNK-2-15")
	for _, test := range []struct {
		get  func() (string, error)
		want string
	}{
		{mesh.Certifier, "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"},
		{mesh.Destination, "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local"},
		{seed.Certifier, "linkerd-identity.linkerd.sa.linkerd-identity.linkerd.cluster.local"},
		{seed.Destination, "linkerd-controller.linkerd.sa.linkerd-identity.linkerd.cluster.local"},
		{mesh.Issuer, "identity.linkerd.cluster.local"},
	} {
		assert.Equal(t, test.want, must.Get(test.get())(t))
	}
}

func TestMesh(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-2-9")
	label63, label64 := strings.Repeat("a", 63), strings.Repeat("a", 64)
	long := strings.Repeat("a.", 126) + "b" // 253 bytes
	for _, good := range [][2]string{
		{"linkerd", "cluster.local"}, {"l", "l"}, {label63, label63}, {"l5d", "a.b.c.d.e.f"}, {"0", "0-0"}, {"linkerd", long},
	} {
		name, err := linkerdname.Mesh{ControlNamespace: good[0], TrustDomain: good[1]}.Issuer()
		require.NoError(t, err, good)
		assert.Equal(t, "identity."+good[0]+"."+good[1], name)
	}
	for _, bad := range [][2]string{
		{"", ""}, {"", "cluster.local"}, {"linkerd", ""}, {"l.d", "cluster.local"}, {label64, "cluster.local"}, {"linkerd", label64},
		{"Linkerd", "cluster.local"}, {"linkerd", "Cluster.local"}, {"linkerd", "cluster.local."}, {"linkerd", ".cluster.local"},
		{"linkerd", "cluster..local"}, {"-linkerd", "cluster.local"}, {"linkerd-", "cluster.local"}, {"linkerd", "cluster-.local"},
		{"linkerd", "cluster_local"}, {"linkerd", "cluster.local\n"}, {"linkérd", "cluster.local"}, {"linkerd", "*.local"}, {"linkerd", long + "b"},
	} {
		for _, isSeed := range []bool{false, true} {
			m := linkerdname.Mesh{ControlNamespace: bad[0], TrustDomain: bad[1], FirstDesign: isSeed}
			for what, call := range map[string]func() (string, error){
				"Name":        func() (string, error) { return m.Name("emojivoto", "web") },
				"Namespace":   func() (string, error) { return m.Namespace("emojivoto") },
				"Certifier":   m.Certifier,
				"Destination": m.Destination,
				"Issuer":      m.Issuer,
				"Parse": func() (string, error) {
					namespace, account, err := m.Parse("web.emojivoto.serviceaccount.identity." + bad[0] + "." + bad[1])
					return namespace + account, err
				},
			} {
				name, err := call()
				assert.ErrorContains(t, err, invalid, "%s of %q", what, bad)
				assert.Empty(t, name)
			}
		}
	}
}

func TestBadNames(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-2-8", "LNK-2-10")
	for _, bad := range [][2]string{
		{"", "web"}, {"emojivoto", ""}, {"emoji.voto", "web"}, {"emojivoto", "web.v1"}, {"Emojivoto", "web"}, {"emojivoto", "Web"},
		{"-", "web"}, {"emojivoto", "-web"}, {"emojivoto", "web-"}, {"emojivoto", "w_b"}, {"emojivoto", "web\x00"}, {"emojivoto", "wéb"},
		{"emojivoto", "*"}, {"emojivoto", strings.Repeat("a", 64)}, {"emojivoto", " web"},
	} {
		name, err := mesh.Name(bad[0], bad[1])
		assert.ErrorContains(t, err, invalid, bad)
		assert.Empty(t, name)
	}
	require.ErrorContains(t, must.Err(mesh.Namespace("emoji.voto")), invalid)

	// The whole name has a limit as well as its parts.
	fill := func(last int) linkerdname.Mesh { // 36 bytes stand before the trust domain
		return linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: strings.Repeat(strings.Repeat("a", 63)+".", 3) + strings.Repeat("b", last)}
	}
	assert.Len(t, must.Get(fill(25).Name("b", "a"))(t), 253)
	assert.ErrorContains(t, must.Err(fill(26).Name("b", "a")), invalid)
}

func TestParse(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-2-11", "LNK-2-12", "LNK-2-13")
	deep := linkerdname.Mesh{ControlNamespace: "identity", TrustDomain: "serviceaccount.identity.identity.a.b"}
	namespace, account, err := deep.Parse("a.b.serviceaccount.identity.identity.serviceaccount.identity.identity.a.b")
	require.NoError(t, err, "read from the left")
	assert.Equal(t, "a b", account+" "+namespace)

	for _, bad := range []string{
		"", ".", "web", "web.emojivoto", "web.emojivoto.serviceaccount.identity.linkerd", "web.emojivoto.serviceaccount.identity.linkerd.",
		web + ".", "." + web, strings.ToUpper(web), " " + web, web + "\n", "x." + web,
		"web.emojivoto.sa.linkerd-identity.linkerd.cluster.local", "web.emojivoto.sa.identity.linkerd.cluster.local",
		"web.emojivoto.serviceaccount.linkerd-identity.linkerd.cluster.local", "web.emojivoto.serviceaccount.identity.other.cluster.local",
		"web.emojivoto.serviceaccount.identity.linkerd.cluster.other", "web.emojivoto.serviceaccount.identity.linkerd.local",
		"web.emojivoto.serviceaccount.identity.linkerd.a.cluster.local", "web.emojivoto.serviceaccount.identity.linkerd.cluster.local.evil",
		"web.v1.emojivoto.serviceaccount.identity.linkerd.cluster.local", ".emojivoto.serviceaccount.identity.linkerd.cluster.local",
		"web..serviceaccount.identity.linkerd.cluster.local", "Web.emojivoto.serviceaccount.identity.linkerd.cluster.local",
		"*.emojivoto.serviceaccount.identity.linkerd.cluster.local", "spiffe://cluster.local/ns/emojivoto/sa/web",
		"web.emojivoto.ServiceAccount.identity.linkerd.cluster.local", "w\x00b.emojivoto.serviceaccount.identity.linkerd.cluster.local",
	} {
		namespace, account, err := mesh.Parse(bad)
		assert.ErrorContains(t, err, invalid, "%q", bad)
		assert.Empty(t, namespace+account)
	}
	_, _, err = seed.Parse(web)
	require.ErrorContains(t, err, invalid)
}

func TestMatch(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-15-4", "LNK-17-12", "LNK-17-13", "LNK-17-14")
	for _, test := range []struct {
		pattern, identity string
		want              bool
	}{
		{"*.emojivoto.serviceaccount.identity.linkerd.cluster.local", web, true},
		{"*.serviceaccount.identity.linkerd.cluster.local", web, true},
		{"*.voto.serviceaccount.identity.linkerd.cluster.local", web, false},
		{"*", web, true},
		{"*", "a", true},
		{"*", "", false},
		{"*", "spiffe://td/x", false},
		{"*.td", "spiffe://td/x", false},
		{"*.td", "spiffe://a.td", false},
		{"spiffe://td/x", "spiffe://td/x", true},
		{"spiffe://td/x", "spiffe://td/x/y", false},
		{"spiffe://td/x", "td", false},
		{"*.a.b", "a.b", false},
		{"*.a.b", ".a.b", false},
		{"*.a.b", "x.a.b", true},
		{"*.a.b", "x.y.a.b", true},
		{"*.a.b", "xa.b", false},
		{"*.a.b", "x.A.b", false},
		{"*.a.b", "x.a.b.", false},
		{web, web, true},
		{web, "x." + web, false},
		{web, strings.ToUpper(web), false},
		{web, "", false},
		{strings.Repeat("a", 100), strings.Repeat("a", 100), true}, // no limit of 63 here
	} {
		matched, err := linkerdname.Match(test.pattern, test.identity)
		require.NoError(t, err, test.pattern)
		assert.Equal(t, test.want, matched, "%s against %s", test.pattern, test.identity)
	}
	for _, bad := range []string{
		"", ".", "*.", "**", "*a.b", "*-a.b", "a.*", "a.*.b", "*.*.a", ".a", "a.", "a..b", "A.b", "a_b", "-a", "a-", "a b", "a\n", "é",
		"spiffe:", "spiffe://", "spiffe://TD/x", "spiffe://td/x/", "spiffe://td//x", "spiffe://td/./x", "spiffe://td/x?y", "spiffe://td/x#y",
		"spiffe://u@td/x", "spiffe://td:1/x", "spiffe://td/*", "SPIFFE://td/x", "http://td/x",
	} {
		for _, identity := range []string{bad, web, ""} {
			matched, err := linkerdname.Match(bad, identity)
			assert.ErrorContains(t, err, invalid, "%q", bad)
			assert.False(t, matched, "%q", bad)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{web, "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local", "*.a.b", "spiffe://td/x", "", "a.b.c.d.e.f", "*"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, m := range []linkerdname.Mesh{mesh, seed} {
			namespace, account, err := m.Parse(s)
			if err != nil {
				assert.ErrorContains(t, err, invalid)
				assert.Empty(t, namespace+account)
				continue
			}
			assert.Equal(t, s, must.Get(m.Name(namespace, account))(t))
		}
		matched, err := linkerdname.Match(s, s)
		if err != nil {
			assert.False(t, matched)
		} else if s[0] != '*' {
			assert.True(t, matched)
		}
	})
}
