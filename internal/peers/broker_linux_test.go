package peers_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

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
	manifest := install(t, dir, "workload-agent", "namespace=broker-agent")
	const right = `- {apiGroups: [""], resources: [serviceaccounts]`
	require.Contains(t, manifest, "\n#"+right)
	objects := ofRole(objectsOf(t, strings.Replace(manifest, "#"+right, right, 1)), "-workload-agent")
	for _, o := range objects {
		require.NoError(t, apply(c.Admin(), c.URL, "kubectl", o), "%s", o.text)
	}
	for _, namespace := range []string{"shop", "bank"} {
		c.Account(t, namespace, "cart")
		c.Account(t, namespace, "default")
	}
	cart, far := c.Pod(t, "shop", "cart", "cart-1", "node-a"), c.Pod(t, "shop", "cart", "far", "node-b")
	till := c.Pod(t, "bank", "cart", "till", "node-a")
	const inShop = "/api/v1/namespaces/shop/"
	account := func() string {
		var o struct{ Metadata struct{ UID string } }
		c.Do(t, "GET", inShop+"serviceaccounts/cart", nil, &o)
		return o.Metadata.UID
	}
	holdsAll(t, c.Cluster, objects, rule{})

	at := shortDir(t)
	in := func(name string) string { return filepath.Join(at, name) }
	for name, data := range map[string]string{
		"workloads.json": fmt.Sprintf(brokerFile, os.Getuid()), "pod/namespace": "broker-agent",
		"pod/ca.crt": string(must.Get(os.ReadFile(c.RootsFile()))(t)),
		"pod/token":  c.Token(t, "broker-agent", "workload-agent", "", peers.Issuer),
	} {
		write(t, in(name), data)
	}
	agent := exec.Command(filepath.Join(dir, "workload-agent"), "-trust-domain=example.org", "-node=node-a", "-admin=",
		"-ca=dir:"+in("ca"), "-ca-option=create=true", "-file="+in("workloads.json"), "-socket="+in("s"),
		"-broker=unix://"+in("b"), "-broker-id=spiffe://example.org/agent")
	p := peers.StartInPod(t, filepath.Join(dir, "log"), agent, c.Cluster, in("pod"))
	p.Ready(t, func() error { return errors.Join(must.Err(os.Stat(in("s"))), must.Err(os.Stat(in("b")))) })
	own := must.Get(workloadapi.Start(t.Context(), workloadapi.Config{Address: "unix://" + in("s")}))(t)
	t.Cleanup(func() { _ = own.Close() })
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: own, Peers: own,
		Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/agent"))}))(t)
	client := must.Get(broker.NewClient("unix://"+in("b"), endpoint))(t)
	t.Cleanup(func() { _ = client.Close() })

	// follow returns what the broker is told of an object: the paths of its IDs, or the number of the status.
	follow := func(plural, name, uid string) <-chan string {
		o := broker.Object{Plural: plural, Group: "core", UID: uid}
		o.Namespace, o.Name, _ = strings.Cut(name, "/")
		workload, all := must.Get(client.For(broker.Reference{Object: o}))(t), make(chan string, 100)
		go func() {
			for u, err := range workload.WatchX509SVIDs(t.Context()) {
				told := ""
				if e, ok := errors.AsType[*workloadapi.Error](err); ok {
					told = fmt.Sprint("status ", e.Code)
				} else {
					for _, one := range u.Identities {
						told += one.SVID.ID().Path()
					}
				}
				all <- told
			}
		}()
		return all
	}
	await := func(from <-chan string, want string) {
		t.Helper()
		select {
		case got := <-from:
			require.Equal(t, want, got)
		case <-time.After(passing):
			require.Fail(t, "nothing came")
		}
	}
	const denied, ended, ofCart = "status 7", "status 5", "/shop/cart"
	missing := []<-chan string{ // which is waited for
		follow("pods", "shop/cart-1", far), follow("pods", "shop/far", ""), follow("pods", "", far),
		follow("serviceaccounts", "", cart), follow("serviceaccounts", "shop/cart", cart),
	}
	await(follow("pods", "shop/cart-1", cart), ofCart)
	await(follow("pods", "bank/till", ""), denied)
	await(follow("pods", "", till), denied)
	await(follow("serviceaccounts", "shop/cart", account()), ofCart)
	await(follow("serviceaccounts", "shop/default", ""), "/shop")
	await(follow("serviceaccounts", "bank/cart", ""), denied)
	for kind, name := range map[string]string{"pods": "cart-1", "serviceaccounts": "cart"} {
		uid := cart
		if kind == "serviceaccounts" {
			uid = account()
		}
		named, pinned := follow(kind, "shop/"+name, ""), follow(kind, "", uid)
		await(named, ofCart)
		await(pinned, ofCart)
		label := func(tier, want string) {
			c.Do(t, "PATCH", inShop+kind+"/"+name, map[string]any{"metadata": map[string]any{
				"labels": map[string]string{"tier": tier}}}, nil)
			if kind == "pods" { // an account has no use of labels
				await(named, want)
				await(pinned, want)
			}
		}
		label("gold", "/shop/cart/gold")
		label("tin", ofCart)
		c.Do(t, "DELETE", inShop+kind+"/"+name+"?gracePeriodSeconds=0", nil, nil)
		began := time.Now()
		if kind == "pods" {
			require.NotEqual(t, uid, c.Pod(t, "shop", "cart", name, "node-a"))
		} else {
			c.Account(t, "shop", "cart")
			require.NotEqual(t, uid, account())
		}
		await(named, ended)
		await(pinned, ended)
		t.Logf("%s: the streams of an object ended %v after its deletion", kind, time.Since(began))
		await(follow(kind, "shop/"+name, ""), ofCart)
		missing = append(missing, follow(kind, "", uid)) // the name is another object's
	}
	for _, one := range missing {
		await(one, ended)
	}
}
