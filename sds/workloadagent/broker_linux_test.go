package workloadagent_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var agentID = spiffe.MustParseID("spiffe://example.org/agent")

// granting is a broker of the file, which may name references in namespaces, and have all identities if more does not
// say which.
func granting(path, references, namespaces string, more ...string) string {
	list := func(name, words string) string {
		return strings.ReplaceAll(fmt.Sprintf("%q: %q", name, strings.Fields(words)), `" "`, `", "`)
	}
	if !strings.Contains(strings.Join(more, ""), `"identities"`) {
		more = append(more, `"identities": ["spiffe://example.org/*"]`)
	}
	return id(path, append(more, list("references", references), list("namespaces", namespaces))...)
}

// serveBrokers runs the agent over a CA of tests, with the Broker API on a socket beside the other.
func (p *place) serveBrokers() *place {
	p.home = spiffetest.NewCA(p.t, "example.org")
	p.manager = must.Get(secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: p.home}))(p.t)
	p.run(workloadagent.Config{Source: p.manager, TrustDomain: exampleOrg, Broker: agentID,
		IssueJWTSVID: func(_ context.Context, id spiffe.ID, audience []string) (string, error) {
			return p.home.JWTSVID(id.Path(), audience...), nil
		}}, p.manager.Run)
	h, _ := p.agent.Broker()
	server := &unixsocket.Server{Path: p.sock + "b", Handler: h, Serve: p.endpoint(agentID.Path()).Serve}
	require.NoError(p.t, server.Listen())
	background(p.t, server.Run)
	return p
}

func (p *place) endpoint(path string) *spiffetls.Endpoint {
	own := p.home.Source(path)
	return must.Get(spiffetls.New(spiffetls.Config{Self: own, Peers: own, Allow: spiffe.AllowAnyPeer()}))(p.t)
}

// served waits until all identities and objects are known.
func (p *place) served() {
	require.Eventually(p.t, func() bool { return len(p.agent.Report().Problems) == 0 }, 4*passing, often)
}

// startAPI starts the API server, which fails while away is true.
func (p *place) startAPI() (away *atomic.Bool) {
	away, p.api = new(atomic.Bool), kubetest.Start(p.t)
	p.api.Faults(func(*http.Request) *kubetest.Fault {
		if away.Load() {
			return &kubetest.Fault{Code: http.StatusServiceUnavailable}
		}
		return nil
	})
	return away
}

// broker returns a broker with an ID.
func (p *place) broker(path string) *broker.Client {
	c := must.Get(broker.NewClient("unix://"+p.sock+"b", p.endpoint(path)))(p.t)
	p.t.Cleanup(func() { _ = c.Close() })
	return c
}

// code returns the name of the status in an error.
func code(err error) string {
	if e, ok := errors.AsType[*workloadapi.Error](err); ok && e.Code != 0 {
		return grpchttp.Code(e.Code).String()
	}
	return err.Error()
}

// ask returns the IDs that a broker is given first for a workload, or the name of the status.
func ask(t testing.TB, c *broker.Client, r broker.Reference) string {
	w, err := c.For(r)
	if err != nil {
		return err.Error()
	}
	for u, err := range w.WatchX509SVIDs(t.Context()) {
		if err != nil {
			return code(err)
		}
		return told(u)
	}
	return "nothing"
}

// put stores a service account, or a pod of an account, of this node unless it is far.
func (p *place) put(object, account string, labels map[string]string) {
	o := map[string]any{"metadata": map[string]any{"labels": labels}}
	if strings.HasPrefix(object, "pods") {
		node := map[bool]string{true: "node-b", false: "node-a"}[strings.HasSuffix(object, "/far")]
		o["spec"] = map[string]any{"nodeName": node, "serviceAccountName": account}
	}
	p.api.Put(pathOf(object), o)
}

// pathOf returns the path of an object such as pods shop/cart.
func pathOf(text string) string {
	o := object(text).Object
	return "/api/v1/namespaces/" + o.Namespace + "/" + o.Plural + "/" + o.Name
}

// uid returns the UID of an object of the API server.
func (p *place) uid(object string) string {
	var o struct{ Metadata struct{ UID string } }
	require.True(p.t, p.api.Get(pathOf(object), &o))
	return o.Metadata.UID
}

// object returns the reference that a text has: the kind, the namespace with the name, or -, and the UID, if any.
func object(text ...string) broker.Reference {
	var o broker.Object
	var name string
	_, _ = fmt.Sscan(strings.Join(text, " "), &o.Plural, &name, &o.UID)
	o.Namespace, o.Name, _ = strings.Cut(strings.TrimPrefix(name, "-"), "/")
	if o.Plural, o.Group, _ = strings.Cut(o.Plural, "."); o.Group == "" {
		o.Group = "core"
	}
	return broker.Reference{Object: o}
}

func selecting(match, path string, more ...string) string {
	return `{"match": {` + match + `}, "identities": [` + id(path, more...) + `]}`
}

var gold = map[string]string{"tier": "gold"}

// A broker names a pod of the node or a service account by its name, its UID or both, and gets what the rules give by
// its namespace, account, labels and UID, and nothing by what only processes have.
func TestBrokerNamesObjects(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	p := newPlace(t)
	p.api = kubetest.Start(t)
	p.put("pods shop/cart", "cart", gold)
	p.put("pods shop/plain", "", nil)
	p.put("pods shop/far", "cart", gold)
	p.put("pods bank/till", "cart", gold)
	p.put("pods none/cart", "cart", gold)
	p.put("serviceaccounts shop/cart", "", gold)
	p.put("serviceaccounts shop/default", "", nil)
	pod, plain, far := p.uid("pods shop/cart"), p.uid("pods shop/plain"), p.uid("pods shop/far")
	account, till := p.uid("serviceaccounts shop/cart"), p.uid("pods bank/till")
	p.brokers = []string{
		granting("/proxy", "pods serviceaccounts", "shop none"), granting("/pods", "pods", "*"),
		granting("/narrow", "pods", "*", `"identities": ["spiffe://example.org/cart", "spiffe://example.org/bank"]`),
		granting("/nowhere", "pods", ""),
	}
	p.write(
		selecting(`"namespace": "shop"`, "/shop"), selecting(`"namespace": "shop", "account": "cart"`, "/cart"),
		selecting(`"namespace": "shop", "account": "default"`, "/default"),
		selecting(`"namespace": "shop", "labels": {"tier": "gold"}`, "/gold"),
		selecting(`"namespace": "bank"`, "/bank"), selecting(`"pod": "`+pod+`"`, "/pod"),
		selecting(`"pod": "`+account+`"`, "/no-pod"),
		selecting(fmt.Sprintf(`"uid": %d`, os.Getuid()), "/user"), selecting(fmt.Sprintf(`"gid": %d`, os.Getgid()),
			"/group"),
		selecting(`"uid": 0`, "/root"), selecting(`"uid": 4294967294`, "/last"),
		selecting(`"uid": 0, "namespace": "shop"`, "/user-in-shop"), selecting(`"unit": "web.service"`, "/unit"),
		selecting(`"namespace": "shop", "executable": "`+os.Args[0]+`"`, "/executable"),
	)
	p.serveBrokers().served()
	var asking sync.WaitGroup // what is not found is waited for
	const ofPod, ofAccount, missing, denied = "/shop /cart /gold /pod", "/shop /cart", "not_found", "permission_denied"
	for text, want := range map[string]string{
		"/proxy pods shop/cart": ofPod, "/proxy pods - " + pod: ofPod, "/proxy pods shop/cart " + pod: ofPod,
		"/proxy pods shop/plain": "/shop /default", "/proxy pods none/cart": denied, "/proxy pods /cart": missing,
		"/proxy pods shop/cart " + plain: missing, "/proxy pods none/cart " + pod: missing,
		"/proxy pods shop/cart 6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22": missing, "/proxy pods - " + account: missing,
		"/proxy pods shop/far": missing, "/pods pods - " + far: missing, // of another node
		"/proxy serviceaccounts shop/cart": ofAccount, "/proxy serviceaccounts - " + account: ofAccount,
		"/proxy serviceaccounts shop/cart " + account: ofAccount, "/pods serviceaccounts shop/cart": denied,
		"/proxy serviceaccounts - " + pod: missing, "/proxy pods shop/card": missing,
		"/proxy pods bank/till": denied, "/proxy pods - " + till: denied, "/pods pods - " + till: "/bank",
		"/nowhere pods - " + pod: denied, "/narrow pods shop/cart": "/cart", "/narrow pods shop/plain": denied,
		"/proxy serviceaccounts shop/default": "/shop /default", "/proxy deployments.apps shop/cart": denied,
		"/proxy pods.metrics.k8s.io shop/cart": denied, "/proxy": denied, // by PID
		"/other pods shop/cart": denied, "/agent pods shop/cart": denied,
	} {
		path, name, _ := strings.Cut(text, " ")
		r, by := object(name), p.broker(path)
		if name == "" {
			r = broker.Reference{PID: int32(os.Getpid())}
		}
		asking.Go(func() { assert.Equal(t, want, ask(t, by, r), text) })
	}
	asking.Wait()
}

// Before the API server has told which objects there are, none is said to be missing.
func TestBrokerBeforeObjectsAreListed(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	p := newPlace(t)
	p.startAPI().Store(true)
	p.put("pods shop/cart", "cart", nil)
	p.brokers = []string{granting("/proxy", "pid pods serviceaccounts", "shop")}
	p.write(me(id("/web")))
	p.serveBrokers()
	problems, uid := errors.Join(p.agent.Report().Problems...), p.uid("pods shop/cart")
	assert.ErrorContains(t, problems, "has not told node node-a of the pods yet")
	assert.ErrorContains(t, problems, "has not told node node-a of the serviceaccounts yet")
	all := []broker.Reference{object("pods shop/cart"), object("pods -", uid), object("serviceaccounts shop/cart")}
	if os.Getuid() == 0 {
		all = append(all, process(t, 7, "kubepods/pod"+uid, "sleep", "1000"))
	}
	c := p.broker("/proxy")
	var asking sync.WaitGroup
	for _, r := range all {
		asking.Go(func() { assert.Equal(t, "unavailable", ask(t, c, r), r) })
	}
	asking.Wait()
}

// What the API server says of an object takes effect on open streams: its labels, and its end, which is no denial,
// also if another object has its name at once. While the API server is away nothing ends.
func TestBrokerAndChangesOfObjects(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	p := newPlace(t)
	away := p.startAPI()
	p.brokers = []string{granting("/proxy", "pods serviceaccounts", "shop")}
	p.write(selecting(`"namespace": "shop"`, "/shop"), selecting(`"namespace": "shop", "labels": {"tier": "gold"}`,
		"/gold"))
	p.put("pods shop/cart", "cart", nil)
	p.serveBrokers().served()
	c, cart, late := p.broker("/proxy"), object("pods shop/cart"), object("pods shop/late")
	updates, errs := follow(t, must.Get(c.For(cart))(t))
	require.Equal(t, "/shop", told(next(t, updates)))
	p.put("pods shop/cart", "cart", gold)
	require.Equal(t, "/shop /gold", told(next(t, updates)))
	p.put("pods shop/cart", "cart", nil)
	require.Equal(t, "/shop", told(next(t, updates)))

	time.AfterFunc(300*time.Millisecond, func() { p.put("pods shop/late", "late", gold) })
	require.Equal(t, "/shop /gold", ask(t, c, late), "a new pod is waited for")

	away.Store(true)
	asked := p.api.Count("GET", "/api/v1/")
	p.api.EndWatches()
	require.Eventually(t, func() bool { return p.api.Count("GET", "/api/v1/") >= asked+2 }, passing, often)
	p.put("serviceaccounts shop/cart", "", nil)
	p.api.Remove(pathOf("pods shop/late"))
	require.Equal(t, "/shop /gold", ask(t, c, late), "it is not known to have gone")
	require.Never(t, func() bool { return len(errs)+len(updates) > 0 }, time.Second, often)
	away.Store(false)
	for ask(t, c, late) != "not_found" || ask(t, c, object("serviceaccounts shop/cart")) != "/shop" {
	}
	require.Empty(t, errs)

	for n := range rounds.Of(10) {
		plural := []string{"pods ", "serviceaccounts "}[n%2]
		cart, uid := object(plural+"shop/cart"), p.uid(plural+"shop/cart")
		updates, named := follow(t, must.Get(c.For(cart))(t))
		others, pinned := follow(t, must.Get(c.For(object(plural+"-", uid)))(t))
		next(t, updates)
		next(t, others)
		p.api.Remove(pathOf(plural + "shop/cart"))
		began := time.Now()
		if n%4 < 2 {
			p.put(plural+"shop/cart", "cart", nil)
			require.NotEqual(t, uid, p.uid(plural+"shop/cart"))
		}
		for _, errs := range []<-chan error{named, pinned} {
			err := next(t, errs)
			require.ErrorIs(t, err, broker.ErrEnded)
			require.Equal(t, "not_found", code(err))
			require.True(t, must.As[*workloadapi.Error](err)(t).Final)
		}
		assert.Less(t, time.Since(began), passing/2)
		p.put(plural+"shop/cart", "cart", nil)
		require.Equal(t, "/shop", ask(t, c, cart), "the name is another object's")
	}
	require.Equal(t, "not_found", code(next(t, errs)), "the first pod has ended in the first round")
}

// process starts a process of a user and its group, in a control group if that has a name, and returns it.
func process(t *testing.T, user uint32, group string, args ...string) broker.Reference {
	if os.Getuid() != 0 {
		t.Skip("only root can be other users and make control groups")
	}
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user + 1}}
	_ = must.Get(cmd.StdinPipe())(t)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	if group != "" {
		require.NoError(t, os.WriteFile(controlGroup(t, group), fmt.Append(nil, cmd.Process.Pid), 0o600))
	}
	return broker.Reference{PID: int32(cmd.Process.Pid)}
}

// A broker names a process by its PID, and gets what the process would get if it asked itself, in the namespaces that
// the broker may ask about.
func TestBrokerNamesProcesses(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	p := newPlace(t)
	p.api = kubetest.Start(t)
	p.put("pods shop/cart", "cart", nil)
	p.put("pods bank/till", "till", nil)
	cart, till := p.uid("pods shop/cart"), p.uid("pods bank/till")
	unit := fmt.Sprintf("svidkit-test-%d.service", os.Getpid())
	sleep := must.Get(filepath.EvalSymlinks(must.Get(exec.LookPath("sleep"))(t)))(t)
	shell := must.Get(filepath.EvalSymlinks(must.Get(exec.LookPath("sh"))(t)))(t)
	p.brokers = []string{granting("/any", "pid", "*"), granting("/shop", "pid", "shop")}
	p.write(
		selecting(`"uid": 4242`, "/user"), selecting(`"gid": 4243`, "/group"), selecting(`"uid": 0`, "/root"),
		selecting(`"uid": 4242, "executable": "`+sleep+`"`, "/sleep"), selecting(
			`"uid": 4242, "executable": "`+shell+`"`, "/shell"),
		selecting(`"unit": "`+unit+`"`, "/unit"), selecting(`"pod": "`+cart+`"`, "/pod"), selecting(
			`"namespace": "bank"`, "/bank"),
		selecting(`"namespace": "shop", "account": "cart", "uid": 7`, "/cart"),
	)
	p.serveBrokers().served()
	all, shop := p.broker("/any"), p.broker("/shop")
	shopping := process(t, 7, "kubepods/pod"+cart, sleep, "1000")
	for name, c := range map[string]struct {
		r           broker.Reference
		want, there string // for a broker of any namespace, and for one of the namespace shop
	}{
		"user and program":  {process(t, 4242, "", sleep, "1000"), "/user /group /sleep", "permission_denied"},
		"another program":   {process(t, 4242, "", shell, "-c", "read x"), "/user /group /shell", "permission_denied"},
		"no rule":           {process(t, 8, "", sleep, "1000"), "permission_denied", "permission_denied"},
		"unit":              {process(t, 8, "system.slice/"+unit, sleep, "1000"), "/unit", "permission_denied"},
		"pod":               {shopping, "/pod /cart", "/pod /cart"},
		"another namespace": {process(t, 7, "kubepods/pod"+till, sleep, "1000"), "/bank", "permission_denied"},
		"own process":       {broker.Reference{PID: int32(os.Getpid())}, "/root", "permission_denied"},
	} {
		assert.Equal(t, c.want, ask(t, all, c.r), name)
		assert.Equal(t, c.there, ask(t, shop, c.r), name)
	}
	unknown := process(t, 4242, "kubepods/pod6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22", sleep, "1000")
	var asking sync.WaitGroup // a pod that the API server does not know is waited for
	defer asking.Wait()
	asking.Go(func() { assert.Equal(t, "/user /group /sleep", ask(t, all, unknown)) })
	asking.Go(func() { assert.Equal(t, "permission_denied", ask(t, shop, unknown)) })
	updates, errs := follow(t, must.Get(shop.For(shopping))(t))
	require.Equal(t, "/pod /cart", told(next(t, updates)))
	require.NoError(t, syscall.Kill(int(shopping.PID), syscall.SIGKILL))
	require.Equal(t, "not_found", code(next(t, errs)))
}

// What a new version of the file takes from a broker ends on its open streams, and on no others.
func TestBrokerAndChangesOfFile(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	p.api = kubetest.Start(t)
	p.put("pods shop/cart", "cart", nil)
	rule := []string{selecting(`"namespace": "shop"`, "/a"), selecting(`"namespace": "shop"`, "/b")}
	whole, other := granting("/proxy", "pods", "shop"), granting("/other", "pods", "shop")
	write := func(brokers ...string) { p.brokers = append(brokers, other); p.write(rule...) }
	write(whole)
	p.serveBrokers().served()
	cart := object("pods shop/cart")
	kept, keptErrs := follow(t, must.Get(p.broker("/other").For(cart))(t))
	require.Equal(t, "/a /b", told(next(t, kept)))
	for name, c := range map[string]struct{ next, want string }{
		"out of the file":  {"", "permission_denied"},
		"fewer identities": {granting("/proxy", "pods", "shop", `"identities": ["spiffe://example.org/b"]`), "/b"},
		"other identities": {granting("/proxy", "pods", "shop", `"identities": ["spiffe://example.org/c"]`),
			"permission_denied"},
		"other namespaces":  {granting("/proxy", "pods", "bank"), "permission_denied"},
		"no namespaces":     {granting("/proxy", "pods", ""), "permission_denied"},
		"other references":  {granting("/proxy", "pid serviceaccounts", "shop"), "permission_denied"},
		"no such namespace": {granting("/proxy", "pods", "shops"), "permission_denied"},
	} {
		write(whole)
		c.next = cmp.Or(c.next, granting("/third", "pods", ""))
		client := p.broker("/proxy")
		require.Eventually(t, func() bool { return ask(t, client, cart) == "/a /b" }, passing, often, name)
		updates, errs := follow(t, must.Get(client.For(cart))(t))
		require.Equal(t, "/a /b", told(next(t, updates)), name)
		write(c.next)
		select {
		case u := <-updates:
			require.Equal(t, c.want, told(u), name)
		case err := <-errs:
			require.Equal(t, c.want, code(err), name)
		case <-time.After(passing):
			require.Fail(t, name)
		}
	}
	assert.Empty(t, kept, "nothing has changed for another broker")
	assert.Empty(t, keptErrs)

	rule = []string{selecting(`"pod": "`+p.uid("pods shop/cart")+`"`, "/a")}
	write()
	require.Equal(t, "/a", told(next(t, kept)))
	p.api.Remove(pathOf("pods shop/cart"))
	require.Equal(t, "not_found", code(next(t, keptErrs)), "also by a rule that the API server has no part in")
}

// A broker has tokens of a workload for audiences that the file permits for both. An agent outside of a cluster knows
// no objects.
func TestBrokerOfAMachine(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	p.brokers = []string{granting("/some", "pid", "", `"audiences": ["db", "bank"]`),
		granting("/any", "pid", "", `"audiences": ["*"]`),
		granting("/none", "pid pods serviceaccounts", "")}
	p.write(me(id("/web", `"audiences": ["db", "cache"]`), id("/other", `"audiences": ["*"]`)))
	p.serveBrokers().served()
	for _, plural := range []string{"pods", "serviceaccounts"} {
		assert.Equal(t, "invalid_argument", ask(t, p.broker("/none"), object(plural, "shop/cart")))
	}
	web, other := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/other")
	for by, audiences := range map[string]map[string][2]bool{ // for web, and for other
		"/some": {"db": {true, true}, "bank": {false, true}, "cache": {false, false}, "db bank": {false, true},
			"db cache": {false, false}, "*": {false, false}},
		"/any":  {"db": {true, true}, "bank": {false, true}, "db cache": {true, true}, "cache bank": {false, true}},
		"/none": {"db": {false, false}},
	} {
		w := must.Get(p.broker(by).For(broker.Reference{PID: int32(os.Getpid())}))(t)
		for audience, want := range audiences {
			for i, of := range []spiffe.ID{web, other} {
				tokens, err := w.FetchJWTSVIDs(t.Context(), of, strings.Fields(audience)...)
				if assert.Equal(t, want[i], err == nil, "%s for %s, %s: %v", by, of, audience, err); err == nil {
					assert.Equal(t, of, tokens[0].ID)
				} else {
					assert.Equal(t, "permission_denied", code(err))
				}
			}
		}
	}
}

// The agent's own identity is for its TLS. No workload has it, unless a rule says so.
func TestIdentityOfAgent(t *testing.T) {
	t.Parallel()
	p := newPlace(t, me(id("/web")))
	p.serveBrokers()
	updates, errs := p.updates()
	require.Equal(t, "/web", told(next(t, updates)))
	_, own := p.agent.Broker()
	p.served()
	assert.Equal(t, agentID, must.Get(must.Get(own.Snapshot())(t).SVID())(t).ID())
	require.Error(t, must.Err(p.secret(t, agentID.String())), "nor by SDS")
	p.write(me(id("/web"), id("/agent")))
	require.Equal(t, "/web /agent", told(next(t, updates)))
	p.write(me(id("/web")))
	require.Equal(t, "/web", told(next(t, updates)))
	assert.Equal(t, []string{"/agent", "/web"}, owned(p.manager), "it stays without a rule")
	p.write()
	for err := next(t, errs); !errors.Is(err, workloadapi.ErrDenied); err = next(t, errs) {
	}
	require.NoError(t, p.agent.Report().NotReady)

	m := must.Get(secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: noCA{}}))(t)
	cfg := workloadagent.Config{File: p.file, Source: m, TrustDomain: exampleOrg}
	h, none := must.Get(workloadagent.New(cfg))(t).Broker()
	assert.True(t, h == nil && none == nil)
	for of, want := range map[string]string{
		"spiffe://other.test/agent": "not in the trust domain", "spiffe://example.org": "names a trust domain",
	} {
		cfg.Broker = spiffe.MustParseID(of)
		require.ErrorContains(t, must.Err(workloadagent.New(cfg)), want)
	}

	// A source that does not have it leaves the others with theirs.
	api := workloadapitest.NewServer(t, p.home, "/web")
	src := must.Get(workloadapi.New(api.Config()))(t)
	cfg = workloadagent.Config{Source: upstream{src, sdssource.FromIdentity(src)}, Broker: agentID}
	relay := newPlace(t, me(id("/web"))).run(cfg, src.Run)
	updates, _ = relay.updates()
	require.Equal(t, "/web", told(next(t, updates)))
	_, own = relay.agent.Broker()
	require.Error(t, must.Err(own.Snapshot()))
	assert.ErrorContains(t, errors.Join(relay.agent.Report().Problems...), agentID.String())
}

// A broker with as many streams as one may have takes nothing from another broker, nor from the workloads themselves,
// and leaves nothing behind.
func TestBrokerWithManyStreams(t *testing.T) {
	rounds.NotShort(t)
	const streams = 1000
	p := newPlace(t)
	p.api = kubetest.Start(t)
	pods := []string{}
	for n := range 100 {
		pods = append(pods, fmt.Sprint("cart-", n))
		p.put("pods shop/"+pods[n], "cart", nil)
	}
	p.brokers = []string{granting("/proxy", "pods", "*"), granting("/other", "pid pods", "*")}
	p.write(selecting(`"namespace": "shop"`, "/shop"), me(id("/web")))
	p.serveBrokers().served()
	updates, errs := p.updates()
	c, other, first := p.broker("/proxy"), p.broker("/other"), object("pods shop/cart-0")
	require.Equal(t, "/web /shop", told(next(t, updates))+" "+ask(t, c, first))
	before, began := runtime.NumGoroutine(), time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got, ended := make(chan string, streams), make(chan string, streams)
	for n := range streams {
		w := must.Get(c.For(object("pods shop/" + pods[n%len(pods)])))(t)
		go func() {
			for u, err := range w.WatchX509SVIDs(ctx) {
				if err != nil {
					ended <- code(err)
					return
				}
				got <- told(u)
			}
			ended <- "canceled"
		}()
	}
	for range streams {
		require.Equal(t, "/shop", next(t, got))
	}
	t.Logf("%d streams in %v, %d goroutines", streams, time.Since(began), runtime.NumGoroutine()-before)
	require.Equal(t, "resource_exhausted", ask(t, c, first), "one more")
	require.Equal(t, "/shop", ask(t, other, first))
	require.Equal(t, "/web", ask(t, other, broker.Reference{PID: int32(os.Getpid())}))
	again, _ := p.updates()
	require.Equal(t, "/web", told(next(t, again)))

	began = time.Now()
	p.write(selecting(`"namespace": "shop"`, "/shop"), selecting(`"namespace": "shop"`, "/more"), me(id("/web")))
	for told := range streams {
		require.Equal(t, "/shop /more", next(t, got), told)
	}
	t.Logf("all told of another identity in %v", time.Since(began))
	began = time.Now()
	p.api.Remove(pathOf("pods shop/cart-0"))
	for range streams / len(pods) {
		require.Equal(t, "not_found", next(t, ended))
	}
	t.Logf("the streams of a pod ended in %v", time.Since(began))
	cancel()
	for range streams - streams/len(pods) {
		require.Equal(t, "canceled", next(t, ended))
	}
	assert.Empty(t, got)
	assert.Empty(t, errs)
	require.Eventually(t, func() bool { return runtime.NumGoroutine() < before+50 }, passing, often)
}
