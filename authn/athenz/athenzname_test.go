package athenz_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

func TestNameMapping(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-2-1", "ATH-2-2", "ATH-2-3", "ATH-2-4", "ATH-2-5", "ATH-2-6", "ATH-2-8")
	m := athenzname.Mapping{AdminDomain: "k8s.admin", SystemNamespaces: []string{"istio-system"}}
	for namespace, domain := range map[string]string{
		"foo-bar--baz": "foo.bar-baz", "media-sports": "media.sports", "user-apps": "user.apps", "a---b": "a-.b", "web": "web", "a----b": "a--b", "a-----b": "a--.b",
		"kube-system": "k8s.admin.kube-system", "istio-system": "k8s.admin.istio-system", "k8s-admin": "k8s.admin",
	} {
		got := must.Get(m.Domain(namespace))(t)
		assert.Equal(t, domain, got)
		back := must.Get(m.Namespace(domain))(t)
		assert.Equal(t, namespace, back)
	}
	plain := athenzname.Mapping{}
	got := must.Get(plain.Domain("kube-system"))(t)
	assert.Equal(t, "kube.system", got, "without an admin domain")
	s := must.Get(m.Service("media-sports", "frontend"))(t)
	assert.Equal(t, athenzname.Service{Domain: "media.sports", Name: "frontend"}, s)

	for _, namespace := range []string{
		"", "-", "a-", "-a", "A", "a.b", "a_b", "a/b", "ä", strings.Repeat("a", 64),
		"k8s-admin-kube--system", // would be the domain of kube-system
		"k8s-admin-x",
	} {
		require.Error(t, must.Err(m.Domain(namespace)), namespace)
		require.Error(t, must.Err(m.Service(namespace, "web")), namespace)
	}
	for _, domain := range []string{
		"", ".", "a.", ".a", "a..b", "A.b", "a_b", "a/b", "-a", "a.-b", "k8s.admin.media", "k8s.admin.", "k8s.admin.kube-system.x", strings.Repeat("a", 64),
	} {
		require.Error(t, must.Err(m.Namespace(domain)), domain)
	}
	for _, account := range []string{"", "a.b", "A", "-a", "a/b"} {
		require.Error(t, must.Err(m.Service("web", account)), account)
	}
	for _, admin := range []string{"A", ".", "a..b"} {
		require.Error(t, must.Err(athenzname.Mapping{AdminDomain: admin}.Domain("web")), admin)
	}
}

func FuzzNameMapping(f *testing.F) {
	for _, s := range []string{"foo-bar--baz", "a---b", "kube-system", "k8s-admin-x", "x--"} {
		f.Add(s)
	}
	m := athenzname.Mapping{AdminDomain: "k8s.admin"}
	f.Fuzz(func(t *testing.T, s string) {
		if domain, err := m.Domain(s); err == nil {
			back := must.Get(m.Namespace(domain))(t)
			require.Equal(t, s, back)
		}
		if namespace, err := m.Namespace(s); err == nil {
			back := must.Get(m.Domain(namespace))(t)
			require.Equal(t, s, back)
		}
	})
}

func TestNames(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-2-10", "ATH-2-11", "ATH-2-12", "ATH-13-1", "ATH-13-2", "ATH-18-7", "ATH-18-8")
	s := must.Get(athenzname.ParseService("foo.bar-baz.front_end"))(t)
	assert.Equal(t, athenzname.Service{Domain: "foo.bar-baz", Name: "front_end"}, s)
	assert.Equal(t, "foo.bar-baz.front_end", s.String())
	assert.Equal(t, "front_end.foo-bar-baz.svc.cluster.local", s.DNSName("svc.cluster.local"))
	id := must.Get(s.ID())(t)
	assert.Equal(t, "spiffe://foo.bar-baz/sa/front_end", id.String())
	in := must.Get(s.IDIn(spiffe.MustParseTrustDomain("athenz.io"), "default"))(t)
	assert.Equal(t, "spiffe://athenz.io/ns/default/sa/foo.bar-baz.front_end", in.String())
	for id, namespace := range map[spiffe.ID]string{id: "", in: "default"} {
		got, ns, err := athenzname.ServiceOfID(id)
		require.NoError(t, err)
		assert.Equal(t, s, got)
		assert.Equal(t, namespace, ns)
	}
	for _, bad := range []string{"", ".", "a", "a.", ".a", "a..b", "A.b", "a.B", "a.-b", "-a.b", "a/b.c", "a b.c", "a.b:role.c", "ä.b", strings.Repeat("a.", 200) + "b"} {
		require.Error(t, must.Err(athenzname.ParseService(bad)), bad)
	}
	for _, bad := range []athenzname.Service{{}, {Domain: "a"}, {Name: "a"}, {Domain: "a", Name: "b.c"}, {Domain: "a/..", Name: "b"}} {
		require.Error(t, must.Err(bad.ID()))
		require.Error(t, must.Err(bad.IDIn(spiffe.MustParseTrustDomain("athenz.io"), "default")))
	}
	require.Error(t, must.Err(s.IDIn(spiffe.TrustDomain{}, "default")))
	require.Error(t, must.Err(s.IDIn(spiffe.MustParseTrustDomain("athenz.io"), "a/b")))
	for _, bad := range []string{
		"spiffe://athenz.io", "spiffe://athenz.io/sa", "spiffe://athenz.io/sa/a.b", "spiffe://athenz.io/sa/a/b", "spiffe://athenz.io/ns/default/sa/frontend",
		"spiffe://athenz.io/ns/default/ra/a.b", "spiffe://athenz.io/ns/default/sa/a.b/c", "spiffe://athenz.io/ns/Default/sa/a.b", "spiffe://athenz.io/ns/default/sa/A.b",
		"spiffe://media.sports/ra/reader", "spiffe://athenz.io/ns/default/ca/default",
	} {
		_, _, err := athenzname.ServiceOfID(spiffe.MustParseID(bad))
		require.Error(t, err, bad)
	}
	_, _, err := athenzname.ServiceOfID(spiffe.ID{})
	require.Error(t, err)

	got := must.Get(athenzname.ParseService(strings.ToLower("Media.Sports.Frontend")))(t)
	assert.Equal(t, "media.sports.frontend", got.String())
	for _, cn := range []string{"", "frontend", "media.sports:role.reader", "joe@example.org"} {
		require.Error(t, must.Err(athenzname.ParseService(strings.ToLower(cn))), cn)
	}
}

func instance() athenzname.Instance {
	return athenzname.Instance{
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, Service: athenzname.Service{Domain: "media.sports", Name: "frontend"},
		ID: "web-0", Suffix: "svc.cluster.local", IPs: []netip.Addr{netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::3")},
		SPIFFE: spiffe.MustParseID("spiffe://media.sports/sa/frontend"),
	}
}

func TestInstanceNames(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-9-3", "ATH-9-6", "ATH-9-8", "ATH-9-9", "ATH-9-10", "ATH-9-13")
	require.NoError(t, instance().Check())
	own := instance()
	own.Provider, own.ID = athenzname.Service{}, ""
	require.NoError(t, own.Check(), "a service with a key of its own")
	for name, edit := range map[string]func(*athenzname.Instance){
		"provider": func(i *athenzname.Instance) { i.Provider = athenzname.Service{} },
		"service":  func(i *athenzname.Instance) { i.Service.Name = "" },
		"ID":       func(i *athenzname.Instance) { i.ID = "" },
		"ID path":  func(i *athenzname.Instance) { i.ID = "a/b" },
		"ID case":  func(i *athenzname.Instance) { i.ID = "Web-0" },
		"ID long":  func(i *athenzname.Instance) { i.ID = strings.Repeat("a.", 120) + "a" },
		"suffix":   func(i *athenzname.Instance) { i.Suffix = ".local" },
		"address":  func(i *athenzname.Instance) { i.IPs = []netip.Addr{{}} },
		"zone":     func(i *athenzname.Instance) { i.IPs = []netip.Addr{netip.MustParseAddr("fe80::1%eth0")} },
		"other ID": func(i *athenzname.Instance) { i.SPIFFE = spiffe.MustParseID("spiffe://media.sports/sa/backend") },
		"no ID":    func(i *athenzname.Instance) { i.SPIFFE = spiffe.MustParseID("spiffe://media.sports/x") },
	} {
		i := instance()
		edit(&i)
		require.Error(t, i.Check(), name)
	}
}
