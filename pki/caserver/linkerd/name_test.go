package linkerd_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki/caserver/linkerd"
)

func seedMesh(t testing.TB) linkerd.Mesh {
	t.Helper()
	m, err := linkerd.NewMesh("linkerd", "cluster.local", linkerd.Seed)
	require.NoError(t, err)
	return m
}

func TestNames(t *testing.T) {
	t.Parallel()
	n, err := mesh(t).Name("emojivoto", "web")
	require.NoError(t, err)
	assert.Equal(t, "web.emojivoto.serviceaccount.identity.linkerd.cluster.local", n.String())
	assert.Equal(t, "emojivoto", n.Namespace())
	assert.Equal(t, "web", n.ServiceAccount())
	assert.False(t, n.IsZero())
	seed, err := seedMesh(t).Name("emojivoto", "web")
	require.NoError(t, err)
	assert.Equal(t, "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local", seed.String())
	for _, m := range []linkerd.Mesh{mesh(t), seedMesh(t)} {
		a, err := m.Name("ns", "sa")
		require.NoError(t, err)
		b, err := m.Parse(a.String())
		require.NoError(t, err)
		assert.True(t, a == b)
		c, err := m.UserName("system:serviceaccount:ns:sa")
		require.NoError(t, err)
		assert.True(t, a == c)
	}
	var zero linkerd.Name
	assert.True(t, zero.IsZero())
	assert.Empty(t, zero.String()+zero.Namespace()+zero.ServiceAccount())
}

func TestWellKnownNames(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		get  func() (linkerd.Name, error)
		want string
	}{
		{mesh(t).Certifier, "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"},
		{mesh(t).Destination, "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local"},
		{seedMesh(t).Certifier, "linkerd-identity.linkerd.sa.linkerd-identity.linkerd.cluster.local"},
		{seedMesh(t).Destination, "linkerd-controller.linkerd.sa.linkerd-identity.linkerd.cluster.local"},
	} {
		n, err := test.get()
		require.NoError(t, err)
		assert.Equal(t, test.want, n.String())
	}
	assert.Equal(t, "identity.linkerd.cluster.local", mesh(t).IssuerName())
	assert.Empty(t, linkerd.Mesh{}.IssuerName())
	assert.Equal(t, "serviceaccount.identity.linkerd.cluster.local", mesh(t).String())
}

func TestNewMesh(t *testing.T) {
	t.Parallel()
	label63, label64 := strings.Repeat("a", 63), strings.Repeat("a", 64)
	long := strings.Repeat("a.", 126) + "b" // 253 bytes
	for _, good := range [][2]string{
		{"linkerd", "cluster.local"}, {"l", "l"}, {label63, label63}, {"l5d", "a.b.c.d.e.f"}, {"0", "0-0"}, {"linkerd", long},
	} {
		m, err := linkerd.NewMesh(good[0], good[1], linkerd.Current)
		require.NoError(t, err, good)
		assert.Equal(t, good, [2]string{m.ControlNamespace(), m.TrustDomain()})
		assert.Equal(t, linkerd.Current, m.Form())
	}
	for _, bad := range [][2]string{
		{"", "cluster.local"}, {"linkerd", ""}, {"l.d", "cluster.local"}, {label64, "cluster.local"}, {"linkerd", label64},
		{"Linkerd", "cluster.local"}, {"linkerd", "Cluster.local"}, {"linkerd", "cluster.local."}, {"linkerd", ".cluster.local"},
		{"linkerd", "cluster..local"}, {"-linkerd", "cluster.local"}, {"linkerd-", "cluster.local"}, {"linkerd", "cluster-.local"},
		{"linkerd", "cluster_local"}, {"linkerd", "cluster.local\n"}, {"linkérd", "cluster.local"}, {"linkerd", "*.local"}, {"linkerd", long + "b"},
	} {
		_, err := linkerd.NewMesh(bad[0], bad[1], linkerd.Current)
		assert.ErrorIs(t, err, linkerd.ErrName, bad)
	}
	_, err := linkerd.NewMesh("linkerd", "cluster.local", 2)
	assert.ErrorIs(t, err, linkerd.ErrName)
	assert.Equal(t, "current seed Form(2)", linkerd.Current.String()+" "+linkerd.Seed.String()+" "+linkerd.Form(2).String())
}

func TestBadNames(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	for _, bad := range [][2]string{
		{"", "web"}, {"emojivoto", ""}, {"emoji.voto", "web"}, {"emojivoto", "web.v1"}, {"Emojivoto", "web"}, {"emojivoto", "Web"},
		{"-", "web"}, {"emojivoto", "-web"}, {"emojivoto", "web-"}, {"emojivoto", "w_b"}, {"emojivoto", "web\x00"}, {"emojivoto", "wéb"},
		{"emojivoto", "*"}, {"emojivoto", strings.Repeat("a", 64)}, {"emojivoto", " web"},
	} {
		_, err := m.Name(bad[0], bad[1])
		assert.ErrorIs(t, err, linkerd.ErrName, bad)
	}
	_, err := linkerd.Mesh{}.Name("emojivoto", "web")
	assert.ErrorIs(t, err, linkerd.ErrName)

	// The whole has a limit as well as the parts.
	fill := func(last int) linkerd.Mesh { // 36 bytes stand before the trust domain
		m, err := linkerd.NewMesh("linkerd", strings.Repeat(strings.Repeat("a", 63)+".", 3)+strings.Repeat("b", last), linkerd.Current)
		require.NoError(t, err)
		return m
	}
	n, err := fill(25).Name("b", "a")
	require.NoError(t, err)
	assert.Len(t, n.String(), 253)
	_, err = fill(26).Name("b", "a")
	assert.ErrorIs(t, err, linkerd.ErrName)

	for _, user := range []string{
		"system:node:worker-1", "kubernetes-admin", "", "system:serviceaccount:emojivoto:web.v1", "system:serviceaccount:emojivoto",
		"system:serviceaccount:emojivoto:web:x", "System:serviceaccount:emojivoto:web", "system:serviceaccounts:emojivoto:web",
		"system:serviceaccount::web", "system:serviceaccount:emojivoto:", "user:serviceaccount:emojivoto:web", ":::",
		"system:serviceaccount:emojivoto:web ", "system:node:emojivoto:web",
	} {
		_, err := m.UserName(user)
		assert.ErrorIs(t, err, linkerd.ErrName, user)
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	deep, err := linkerd.NewMesh("identity", "serviceaccount.identity.identity.a.b", linkerd.Current)
	require.NoError(t, err)
	n, err := deep.Parse("a.b.serviceaccount.identity.identity.serviceaccount.identity.identity.a.b")
	require.NoError(t, err, "read from the left")
	assert.Equal(t, "a b", n.ServiceAccount()+" "+n.Namespace())

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
		n, err := mesh(t).Parse(bad)
		assert.ErrorIs(t, err, linkerd.ErrName, "%q", bad)
		assert.True(t, n.IsZero())
	}
	_, err = seedMesh(t).Parse(web)
	require.ErrorIs(t, err, linkerd.ErrName)
	_, err = linkerd.Mesh{}.Parse(web)
	require.ErrorIs(t, err, linkerd.ErrName)
}

func TestMatch(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		match, identity string
		want            bool
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
		{strings.Repeat("a", 100), strings.Repeat("a", 100), true}, // no limit of 63 here
	} {
		m, err := linkerd.ParseMatch(test.match)
		require.NoError(t, err, test.match)
		assert.Equal(t, test.match, m.String())
		assert.Equal(t, test.want, m.Matches(test.identity), "%s against %s", test.match, test.identity)
	}
	for _, bad := range []string{
		"", ".", "*.", "**", "*a.b", "*-a.b", "a.*", "a.*.b", "*.*.a", ".a", "a.", "a..b", "A.b", "a_b", "-a", "a-", "a b", "a\n", "é",
		"spiffe:", "spiffe://", "spiffe://TD/x", "spiffe://td/x/", "spiffe://td//x", "spiffe://td/./x", "spiffe://td/x?y", "spiffe://td/x#y",
		"spiffe://u@td/x", "spiffe://td:1/x", "spiffe://td/*", "SPIFFE://td/x", "http://td/x",
	} {
		m, err := linkerd.ParseMatch(bad)
		assert.ErrorIs(t, err, linkerd.ErrName, "%q", bad)
		assert.False(t, m.Matches(bad), "%q", bad)
		assert.False(t, m.Matches(web), "%q", bad)
	}
	m, err := mesh(t).Namespace("emojivoto")
	require.NoError(t, err)
	assert.Equal(t, "*.emojivoto.serviceaccount.identity.linkerd.cluster.local", m.String())
	assert.True(t, m.Matches(web))
	_, err = mesh(t).Namespace("emoji.voto")
	require.ErrorIs(t, err, linkerd.ErrName)
	_, err = linkerd.Mesh{}.Namespace("emojivoto")
	require.ErrorIs(t, err, linkerd.ErrName)
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{web, "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local", "*.a.b", "spiffe://td/x", "", "a.b.c.d.e.f", "*"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, m := range []linkerd.Mesh{mesh(t), seedMesh(t)} {
			n, err := m.Parse(s)
			if err != nil {
				assert.ErrorIs(t, err, linkerd.ErrName)
				assert.True(t, n.IsZero())
				continue
			}
			again, err := m.Name(n.Namespace(), n.ServiceAccount())
			require.NoError(t, err)
			assert.Equal(t, s, again.String())
		}
		m, err := linkerd.ParseMatch(s)
		if err == nil && s[0] != '*' {
			assert.True(t, m.Matches(s))
		}
		if err != nil {
			assert.False(t, m.Matches(s))
		}
	})
}
