package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_NODE_PROXY"

const patient, often = time.Minute, 5 * time.Millisecond

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	m.Run()
}

// TestExitCodes runs the program as a process: a wrong flag ends it with 2, and everything else that is wrong with 1.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())(t)
	good := "-server-id spiffe://example.org/agent -workload-api unix:///none/a -broker unix:///none/b "
	for _, c := range []struct {
		args, out, errOut string
		code              int
	}{
		{"-version", "node-proxy ", "", 0},
		{"-h", "Usage: node-proxy [flags]", "", 0},
		{"-nonsense", "", "there is no flag -nonsense; -h lists the flags\n", 2},
		{"-max-workloads x", "", "-max-workloads: it is not a whole number, such as 10", 2},
		{"-server-id agent", "", "-server-id: ", 2},
		{"-log-format xml", "", "has to be text or json", 2},
		{"serve", "", "hyphen", 2},
		{"", "", "-server-id: it is needed", 2},
		{"-server-id spiffe://example.org/agent", "", "-workload-api: ", 2},
		{"-server-id spiffe://example.org/agent -workload-api unix:///none/a", "", "-broker: ", 2},
		{good + "-broker /none/b", "", "-broker: ", 2},
		{good + "-admin nowhere", "", "-admin: ", 1},
		{good + "-admin= -socket /sys/svidkit/s", "", "-socket: ", 1},
	} {
		cmd := exec.CommandContext(t.Context(), self, strings.Fields(c.args)...)
		cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + t.TempDir()}
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		_ = cmd.Run()
		assert.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s: %s", c.args, errOut.String())
		assert.True(t, strings.HasPrefix(out.String(), c.out), out.String())
		assert.Contains(t, errOut.String(), c.errOut, c.args)
		if c.args == "-h" {
			programtest.Help(t, out.String(), errOut.String())
			assert.NotContains(t, out.String(), "\nFlags:\n", "each is in a group")
		}
	}
}

// TestReadme looks for each flag in README.md.
func TestReadme(t *testing.T) {
	t.Parallel()
	readme := string(must.Get(os.ReadFile("README.md"))(t))
	var help bytes.Buffer
	require.Error(t, run(t.Context(), []string{"-h"}, &help, nil))
	for _, flag := range regexp.MustCompile(`(?m)^  (-[a-z-]+)`).FindAllStringSubmatch(help.String(), -1) {
		assert.Contains(t, readme, "| `"+flag[1]+"` |")
	}
}

func TestReference(t *testing.T) {
	t.Parallel()
	object := func(plural, namespace, name string) broker.Reference {
		return broker.Reference{Object: broker.Object{Plural: plural, Group: "core", Namespace: namespace, Name: name}}
	}
	for name, want := range map[string]broker.Reference{
		"1.pid":                   {PID: 1},
		"2147483647.PID":          {PID: 1<<31 - 1},
		"web-0.shop.pod":          object("pods", "shop", "web-0"),
		"Web.0.Shop.Pod":          object("pods", "shop", "web.0"),
		"cart.shop.account":       object("serviceaccounts", "shop", "cart"),
		"2147483648.pid":          {},
		"0.pid":                   {},
		"01.pid":                  {},
		"+1.pid":                  {},
		"-1.pid":                  {},
		"1.1.pid":                 {},
		".pid":                    {},
		"pid":                     {},
		"1.pid.":                  {},
		"web.pod":                 {},
		".shop.pod":               {},
		"web..pod":                {},
		"web.shop.service":        {},
		"default":                 {},
		"spiffe://example.org/db": {},
		"":                        {},
	} {
		of, err := reference(name)
		assert.Equal(t, want == broker.Reference{}, err != nil, "%q: %v", name, err)
		if err == nil {
			assert.Equal(t, want, of, name)
		}
	}
}

// cluster has pods, by namespace and name.
type cluster struct {
	ca *spiffetest.CA

	mu   sync.Mutex
	pods map[string]*pod
}

type pod struct {
	*spiffetest.Source
	end context.Context
	del func()
}

type podKey struct{}

func (c *cluster) make(names ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range names {
		p := &pod{Source: c.ca.Source("/" + name)}
		p.end, p.del = context.WithCancel(context.Background())
		c.pods[name] = p
	}
}

func (c *cluster) remove(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods[name].del()
	delete(c.pods, name)
}

// resolve is the hook of a server of the Broker API.
func (c *cluster) resolve(ctx context.Context, r broker.Reference) (context.Context, string, error) {
	if r.Kind() != "pods" {
		return nil, "", fs.ErrInvalid
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[r.Object.Namespace+"/"+r.Object.Name]
	if p == nil {
		return nil, "", fs.ErrNotExist
	}
	ctx, cancel := context.WithCancelCause(ctx)
	context.AfterFunc(p.end, func() { cancel(fs.ErrNotExist) })
	return context.WithValue(ctx, podKey{}, p), r.Object.Namespace, nil
}

// TestWorkloads follows pods: their renewals, their ends, a second one with the name of the first, names of none and
// those that no stream asks for, and more than there is room for.
func TestWorkloads(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	c := &cluster{ca: ca, pods: map[string]*pod{}}
	c.make("shop/a", "shop/b", "shop/c", "bank/a")
	api := must.Get(workloadserver.NewHandler(ca.Source("/agent"), &workloadserver.Options{
		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
			return []workloadserver.Identity{{Provider: ctx.Value(podKey{}).(*pod)}}, nil
		}}))(t)
	handler := must.Get(broker.NewHandler(api, broker.Options{Resolve: c.resolve, Grant: func(spiffe.ID) *broker.Grant {
		return &broker.Grant{References: []string{"pods", "serviceaccounts"}, Namespaces: []string{"shop"},
			Identities: spiffe.AllowAnyPeer()}
	}}))(t)
	endpoint := func(path string) *spiffetls.Endpoint {
		self := ca.Source(path)
		return must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: self, Allow: spiffe.AllowAnyPeer()}))(t)
	}
	dir, err := os.MkdirTemp("", "n") // short, for the socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	server := &unixsocket.Server{Path: filepath.Join(dir, "b"), Handler: handler, Serve: endpoint("/agent").Serve}
	require.NoError(t, server.Listen())
	ctx, cancel := context.WithCancel(t.Context())
	var parts sync.WaitGroup
	t.Cleanup(func() { cancel(); parts.Wait() })
	parts.Go(func() { _ = server.Run(ctx) })
	client := must.Get(broker.NewClient("unix://"+server.Path, endpoint("/proxy")))(t)
	t.Cleanup(func() { _ = client.Close() })

	log := new(programtest.Log)
	logger := slog.New(slog.NewTextHandler(log, nil))
	s := &workloads{ctx: ctx, client: client, most: 2, log: logger, none: ratelog.New(logger, 0),
		running: map[string]*workload{}}
	changed := make(chan string, 100)
	s.Subscribe(func(name string) { changed <- name })
	told := func(name string, until func() bool) { // of a change after which it is true
		t.Helper()
		for late := time.After(patient); ; {
			select {
			case got := <-changed:
				if got == name && until() {
					return
				}
			case <-late:
				require.Fail(t, "there is no news", name)
			}
		}
	}
	var mu sync.Mutex
	unused := ""
	parts.Go(func() {
		s.run(func() map[string]string {
			mu.Lock()
			defer mu.Unlock()
			names := map[string]string{}
			for name := range s.all() {
				names[name] = ""
			}
			delete(names, unused)
			return names
		})
	})
	get := func(name string) (*x509.Certificate, error) {
		soon, cancel := context.WithTimeout(ctx, patient)
		defer cancel()
		secret, err := s.GenerateSecret(soon, name)
		if err != nil {
			return nil, err
		}
		chain, _, _ := secret.KeyPair()
		leaf, _ := pem.Decode(chain)
		return x509.ParseCertificate(leaf.Bytes)
	}
	shows := func(name, id string) *x509.Certificate {
		t.Helper()
		got, err := get(name)
		require.NoError(t, err)
		assert.Equal(t, "spiffe://example.org/"+id, got.URIs[0].String())
		return got
	}
	gone := func(name string) {
		t.Helper()
		assert.ErrorIs(t, must.Err(get(name)), fs.ErrNotExist)
	}

	first := shows("a.shop.pod", "shop/a")
	shows("A.shop.pod", "shop/a")
	assert.ErrorContains(t, must.Err(get("b.shop.pod")), "raise -max-workloads")
	mu.Lock()
	unused = "A.shop.pod"
	mu.Unlock()
	told("A.shop.pod", func() bool { return len(s.all()) == 1 }) // for a stream that has asked meanwhile
	assert.Contains(t, log.String(), errUnused.Error())
	for _, name := range []string{"none.shop.pod", "a.bank.pod", "a.shop.account", "a_b.shop.pod", "1.pid", "default"} {
		gone(name)
		assert.Len(t, s.all(), 1, "%s takes no room", name)
	}
	shows("b.shop.pod", "shop/b")

	c.pods["shop/a"].Renew()
	told("a.shop.pod", func() bool { return shows("a.shop.pod", "shop/a").SerialNumber.Cmp(first.SerialNumber) != 0 })
	c.remove("shop/a")
	told("a.shop.pod", func() bool { return errors.Is(must.Err(get("a.shop.pod")), fs.ErrNotExist) })
	c.make("shop/a")
	shows("a.shop.pod", "shop/a")
	c.pods["shop/b"].Fail(workloadserver.ErrDenied)
	told("b.shop.pod", func() bool { return errors.Is(must.Err(get("b.shop.pod")), fs.ErrNotExist) })
	c.pods["shop/b"].Fail(nil)
	shows("b.shop.pod", "shop/b")
	var names []string
	for _, one := range s.Report().Identities {
		names = append(names, one.Name)
		assert.False(t, one.Own)
	}
	assert.Equal(t, []string{"a.shop.pod spiffe://example.org/shop/a", "b.shop.pod spiffe://example.org/shop/b"}, names)
}
