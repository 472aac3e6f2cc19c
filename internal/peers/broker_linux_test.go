package peers_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

const shop, bank = "shop", "bank"

const brokerFile = `{
  "brokers": [{"id": "spiffe://example.org/proxy", "references": ["pods", "serviceaccounts"], "namespaces": ["shop"],
    "identities": ["spiffe://example.org/*"]}],
  "workloads": [
    {"match": {"uid": %d}, "identities": [{"id": "spiffe://example.org/proxy"}]},
    {"match": {"namespace": "shop"}, "identities": [{"id": "spiffe://example.org/shop"}]},
    {"match": {"namespace": "shop", "account": "cart"}, "identities": [{"id": "spiffe://example.org/cart"}]},
    {"match": {"namespace": "shop", "labels": {"tier": "gold"}}, "identities": [{"id": "spiffe://example.org/gold"}]},
    {"match": {"namespace": "bank"}, "identities": [{"id": "spiffe://example.org/bank"}]}
  ]
}`

// testBrokers runs examples/workload-agent as in a pod, with the rights that its manifest gives it, and names the
// pods of its node and service accounts.
func testBrokers(t *testing.T, c *cluster) {
	dir := buildPrograms(t, "workload-agent")
	objects := ofRole(objectsOf(t, install(t, dir, "workload-agent", "namespace=broker-agent")), "-workload-agent")
	for _, o := range objects {
		require.NoError(t, apply(c.Admin(), c.URL, "kubectl", o), "%s", o.text)
	}
	for _, namespace := range []string{shop, bank} {
		c.Account(t, namespace, "cart")
		c.Account(t, namespace, "default")
	}
	cart, far := c.Pod(t, shop, "cart", "cart-1", "node-a"), c.Pod(t, shop, "cart", "far", "node-b")
	till := c.Pod(t, bank, "cart", "till", "node-a")
	const inShop = "/api/v1/namespaces/" + shop + "/"
	account := func() string {
		var o struct{ Metadata struct{ UID string } }
		c.Do(t, "GET", inShop+"serviceaccounts/cart", nil, &o)
		return o.Metadata.UID
	}
	holdsAll(t, c.Cluster, objects, rule{})

	at := shortDir(t)
	for name, data := range map[string]string{
		"workloads.json": fmt.Sprintf(brokerFile, os.Getuid()), "pod/namespace": "broker-agent",
		"pod/ca.crt": string(must.Get(os.ReadFile(c.RootsFile()))(t)),
		"pod/token":  c.Token(t, "broker-agent", "workload-agent", "", peers.Issuer),
	} {
		write(t, filepath.Join(at, name), data)
	}
	socket := "unix://" + filepath.Join(at, "s")
	p := peers.StartInPod(t, filepath.Join(dir, "log"), exec.Command(filepath.Join(dir, "workload-agent"),
		"-trust-domain=example.org", "-ca=dir:"+filepath.Join(at,
			"ca"), "-ca-option=create=true", "-node=node-a", "-admin=",
		"-file="+filepath.Join(at, "workloads.json"), "-socket="+filepath.Join(at, "s"),
		"-broker=unix://"+filepath.Join(at, "b"), "-broker-id=spiffe://example.org/agent"), c.Cluster, filepath.Join(
		at, "pod"))
	p.Ready(t, func() error {
		return errors.Join(must.Err(os.Stat(filepath.Join(at, "s"))), must.Err(os.Stat(filepath.Join(at, "b"))))
	})
	own := must.Get(workloadapi.Start(t.Context(), workloadapi.Config{Address: socket}))(t)
	t.Cleanup(func() { _ = own.Close() })
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: own, Peers: own,
		Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/agent"))}))(t)
	client := must.Get(broker.NewClient("unix://"+filepath.Join(at, "b"), endpoint))(t)
	t.Cleanup(func() { _ = client.Close() })

	object := func(plural, namespace, name, uid string) *workloadapi.Client {
		return must.Get(client.For(broker.Reference{Object: broker.Object{
			Plural: plural, Group: "core", Namespace: namespace, Name: name, UID: uid}}))(t)
	}
	told := func(u *workloadapi.Update, err error) (paths string) {
		if e, ok := errors.AsType[*workloadapi.Error](err); ok {
			return fmt.Sprint("status ", e.Code)
		}
		for _, one := range u.Identities {
			paths += one.SVID.ID().Path()
		}
		return paths
	}
	follow := func(c *workloadapi.Client) <-chan string {
		all := make(chan string, 100)
		go func() {
			for u, err := range c.WatchX509SVIDs(t.Context()) {
				all <- told(u, err)
			}
		}()
		return all
	}
	const denied, ended = "status 7", "status 5"
	await := func(from <-chan string, want string) {
		t.Helper()
		select {
		case got := <-from:
			require.Equal(t, want, got)
		case <-time.After(passing):
			require.Fail(t, "nothing came")
		}
	}
	var asking sync.WaitGroup // what is not found is waited for
	for w, want := range map[*workloadapi.Client]string{
		object("pods", shop, "cart-1", ""): "/shop/cart", object("pods", "", "", cart): "/shop/cart",
		object("pods", shop, "cart-1", cart): "/shop/cart", object("pods", shop, "cart-1", far): ended,
		object("pods", shop, "far", ""): ended, object("pods", "", "", far): ended,
		object("pods", bank, "till", ""): denied, object("pods", "", "", till): denied,
		object("serviceaccounts", shop, "cart", ""): "/shop/cart", object("serviceaccounts", "", "",
			account()): "/shop/cart",
		object("serviceaccounts", shop, "default", ""): "/shop", object("serviceaccounts", "", "", cart): ended,
		object("serviceaccounts", bank, "cart", ""): denied,
	} {
		asking.Go(func() {
			for u, err := range w.WatchX509SVIDs(t.Context()) {
				assert.Equal(t, want, told(u, err), "%v", err)
				break
			}
		})
	}
	for _, kind := range []string{"pods", "serviceaccounts"} {
		name, uid := "cart-1", cart
		if kind == "serviceaccounts" {
			name, uid = "cart", account()
		}
		named, pinned := follow(object(kind, shop, name, "")), follow(object(kind, "", "", uid))
		for _, one := range []<-chan string{named, pinned} {
			await(one, "/shop/cart")
		}
		for _, tier := range []string{"gold", "tin"} { // of which an account has no use
			label := map[string]any{"metadata": map[string]any{"labels": map[string]string{"tier": tier}}}
			if c.Do(t, "PATCH", inShop+kind+"/"+name, label, nil); kind == "pods" {
				await(named, map[string]string{"gold": "/shop/cart/gold", "tin": "/shop/cart"}[tier])
				await(pinned, map[string]string{"gold": "/shop/cart/gold", "tin": "/shop/cart"}[tier])
			}
		}
		began := time.Now()
		if c.Do(t, "DELETE", inShop+kind+"/"+name+"?gracePeriodSeconds=0", nil, nil); kind == "pods" {
			require.NotEqual(t, cart, c.Pod(t, shop, "cart", name, "node-a"))
		} else {
			c.Account(t, shop, "cart")
			require.NotEqual(t, uid, account())
		}
		await(named, ended)
		await(pinned, ended)
		assert.Less(t, time.Since(began), time.Second)
		t.Logf("the streams of one of the %s ended in %v", kind, time.Since(began))
		await(follow(object(kind, shop, name, "")), "/shop/cart")
		again := object(kind, "", "", uid)
		asking.Go(func() {
			for u, err := range again.WatchX509SVIDs(t.Context()) {
				assert.Equal(t, ended, told(u, err), "it is another object")
				break
			}
		})
	}
	asking.Wait()
}
