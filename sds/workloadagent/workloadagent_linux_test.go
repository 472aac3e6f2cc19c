package workloadagent_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

const passing, often = 10 * time.Second, 10 * time.Millisecond

// place is a machine: an agent with a file and a socket, and its CA.
type place struct {
	t               testing.TB
	dir, file, sock string
	agent           *workloadagent.Agent
	manager         *secretcache.Manager
	refused         atomic.Pointer[spiffe.ID] // by the CA
	api             *kubetest.Server          // of the node; may be nil
	brokers         []string                  // in the file
	home            *spiffetest.CA            // of brokers, and of this agent
}

// write replaces the file.
func (p *place) write(workloads ...string) {
	brokers := ""
	if p.brokers != nil {
		brokers = `"brokers": [` + strings.Join(p.brokers, ", ") + `],` + "\n"
	}
	p.raw(`{` + brokers + `"workloads": [` + strings.Join(workloads, ",\n") + `]}`)
}

func (p *place) raw(text string) {
	require.NoError(p.t, os.WriteFile(p.file+".new", []byte(text), 0o600))
	require.NoError(p.t, os.Rename(p.file+".new", p.file))
}

func newPlace(t testing.TB, workloads ...string) *place {
	dir, err := os.MkdirTemp("", "agent") // short, and open to other users
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	p := &place{t: t, dir: dir, file: filepath.Join(dir, "workloads.json"), sock: filepath.Join(dir, "s")}
	p.write(workloads...)
	return p
}

// background runs f until the test ends.
func background(t testing.TB, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
}

// serve runs the agent over a CA whose certificates live that long.
func (p *place) serve(life time.Duration) *place {
	t := p.t
	authority, err := ca.New(ca.Config{TrustDomain: exampleOrg, DefaultTTL: life, MaxTTL: life, Backdate: time.Second, JWT: &ca.JWTConfig{}})
	require.NoError(t, err)
	issuer, err := local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) {
		id, err := csr.ID()
		if no := p.refused.Load(); no != nil && *no == id {
			return spiffe.ID{}, &caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: errors.New("the test refuses it")}
		}
		return id, err
	})
	require.NoError(t, err)
	p.manager = must.Get(secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: issuer}))(t)
	validator := must.Get(jwtsvid.NewAgentValidator(p.manager, nil))(t)
	return p.run(workloadagent.Config{
		Source: p.manager, TrustDomain: exampleOrg, IssueJWTSVID: authority.IssueJWTSVID, ValidateJWTSVID: validator.ValidateJWTSVID,
	}, p.manager.Run)
}

// run runs the agent over a source.
func (p *place) run(cfg workloadagent.Config, source func(context.Context) error) *place {
	cfg.File = p.file
	var err error
	if p.api != nil {
		cfg.Node = "node-a"
		p.agent, err = workloadagent.NewOf(cfg, kube.Options{URL: p.api.URL(), Client: p.api.Client()})
	} else {
		p.agent, err = workloadagent.New(cfg)
	}
	require.NoError(p.t, err)
	background(p.t, source)
	background(p.t, p.agent.Run)
	p.t.Cleanup(func() { _ = p.agent.Close() })
	background(p.t, (&unixsocket.Server{Path: p.sock, SocketMode: 0o666, Handler: p.agent}).Run)
	require.Eventually(p.t, func() bool { _, err := os.Stat(p.sock); return err == nil }, passing, often)
	return p
}

// client is a workload in this process.
func (p *place) client() *workloadapi.Client {
	c := must.Get(workloadapi.NewClient("unix://"+p.sock, nil))(p.t)
	p.t.Cleanup(c.CloseIdleConnections)
	return c
}

// updates are what a workload is told: the IDs with hints, or the error.
func (p *place) updates() (<-chan *workloadapi.Update, <-chan error) { return follow(p.t, p.client()) }

func follow(t testing.TB, c *workloadapi.Client) (<-chan *workloadapi.Update, <-chan error) {
	ctx, cancel := context.WithCancel(context.Background())
	updates, errs := make(chan *workloadapi.Update, 100), make(chan error, 100)
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for u, err := range c.WatchX509SVIDs(ctx) {
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				select {
				case errs <- err:
				default: // enough are there
				}
			default:
				updates <- u
			}
		}
	}()
	return updates, errs
}

func told(u *workloadapi.Update) string {
	var all []string
	for _, one := range u.Identities {
		all = append(all, one.SVID.ID().Path()+one.Hint)
	}
	return strings.Join(all, " ")
}

func next[T any](t testing.TB, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(passing):
		require.Fail(t, "nothing came")
		panic("not reached")
	}
}

// me is the rule for the user of this process, with identities.
func me(identities ...string) string {
	return fmt.Sprintf(`{"match": {"uid": %d, "gid": %d}, "identities": [%s]}`, os.Getuid(), os.Getgid(), strings.Join(identities, ", "))
}

func id(path string, more ...string) string {
	return fmt.Sprintf(`{"id": "spiffe://example.org%s"%s}`, path, strings.Join(append([]string{""}, more...), ", "))
}

// One file says what a process gets by the Workload API, by SDS, as tokens and in files.
func TestOneFile(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	out := filepath.Join(p.dir, "out")
	p.write(
		`{"match": {"uid": 4000000}, "identities": [`+id("/other", `"hint": "other"`)+`]}`,
		me(id("/web", `"hint": "main"`, `"audiences": ["db", "cache"]`, `"files": [{"folder": "`+out+`", "key_mode": "0400", "tokens": {"aws.token": "sts.amazonaws.com"}}]`), id("/admin", `"audiences": ["*"]`)),
	)
	p.serve(time.Hour)
	require.NoError(t, p.agent.Ready(t.Context()))
	require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often, "each identity has come")
	updates, _ := p.updates()
	assert.Equal(t, "/webmain /admin", told(next(t, updates)))

	c := p.client()
	web, admin := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/admin")
	tokens := must.Get(c.FetchJWTSVIDs(t.Context(), web, "db"))(t)
	got, _ := must.Get2(c.ValidateJWTSVID(t.Context(), "db", tokens[0].Token()))(t)
	assert.Equal(t, web, got)
	must.Fail(t, must.Err(c.FetchJWTSVIDs(t.Context(), web, "bank")), workloadapi.ErrDenied, `["bank"]`)
	must.Get(c.FetchJWTSVIDs(t.Context(), admin, "bank"))(t)
	tokens, err := c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "bank") // as py-spiffe asks
	require.NoError(t, err)
	require.Len(t, tokens, 1)
	assert.Equal(t, admin, tokens[0].ID)
	_, err = c.FetchJWTSVIDs(t.Context(), spiffe.MustParseID("spiffe://example.org/other"), "db")
	assert.ErrorIs(t, err, workloadapi.ErrDenied)

	for name, want := range map[string]string{
		"default": "/web", "main": "/web", "spiffe://example.org/admin": "/admin", "ROOTCA": "roots", "ALL": "roots", "spiffe://example.org": "roots",
		"spiffe://example.org/other": "", "other": "", "": "",
	} {
		got, err := p.secret(t, name)
		if assert.Equal(t, want, got, "the secret %q", name); want == "" {
			assert.Error(t, err)
		}
	}

	// The draft's layout, and nothing else in it: the key comes first, without headers or text between.
	info := must.Get(os.Stat(filepath.Join(out, "credential-bundle.private-key.x509.pem")))(t)
	assert.Equal(t, fs.FileMode(0o400), info.Mode().Perm())
	data := must.Get(os.ReadFile(filepath.Join(out, "credential-bundle.private-key.x509.pem")))(t)
	assert.Equal(t, []string{"PRIVATE KEY", "CERTIFICATE"}, blocks(t, data))
	assert.Equal(t, web, must.Get(spiffe.ParseSVIDPEM(data, data))(t).ID())
	roots := must.Get(os.ReadFile(filepath.Join(out, "example.org.spiffe-trust-bundle.x509.pem")))(t)
	assert.Equal(t, []string{"CERTIFICATE"}, blocks(t, roots))
	assert.Len(t, must.Get(filepath.Glob(filepath.Join(out, "[^.]*")))(t), 3)
	read, err := filesource.Start(t.Context(), filesource.Config{Folder: out, ID: web})
	require.NoError(t, err, "a program reads the directory")
	defer read.Close()
	must.Get(read.Bundle(exampleOrg))(t)
	token := must.Get(os.ReadFile(filepath.Join(out, "aws.token")))(t)
	got, _ = must.Get2(c.ValidateJWTSVID(t.Context(), "sts.amazonaws.com", string(token)))(t)
	assert.Equal(t, web, got, "an audience that its processes may not have a token for")
	info = must.Get(os.Stat(filepath.Join(out, "aws.token")))(t)
	assert.Equal(t, fs.FileMode(0o400), info.Mode().Perm())
}

// blocks returns the types of the PEM blocks, which have no headers and nothing between them.
func blocks(t *testing.T, data []byte) (types []string) {
	for len(data) > 0 {
		require.True(t, bytes.HasPrefix(data, []byte("-----BEGIN ")), "%s", data)
		var b *pem.Block
		b, data = pem.Decode(data)
		require.NotNil(t, b)
		assert.Empty(t, b.Headers)
		types = append(types, b.Type)
	}
	return types
}

// TestServerName: an Envoy that asks for certificates on demand, as in examples/ENVOY.md, has them by the hints of its
// identities, on one stream.
func TestServerName(t *testing.T) {
	t.Parallel()
	const name = "web.shop.svc.cluster.local"
	p := newPlace(t, me(id("/admin"), id("/web", `"hint": "`+name+`"`))).serve(time.Hour)
	require.Eventually(t, func() bool { path, err := p.secret(t, name); return err == nil && path == "/web" }, passing, often)
	c := sds.UnixClient(p.sock)
	defer c.CloseIdleConnections()
	stream := grpchttp.NewClient(c, "http://localhost", 1<<20).Open(t.Context(), "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources", nil)
	defer stream.Close()
	request := must.Get(proto.Marshal(&envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: []string{name}}))(t)
	require.NoError(t, stream.Send(request))
	message := must.Get(stream.Receive())(t)
	var r envoysds.DeltaDiscoveryResponse
	require.NoError(t, proto.Unmarshal(message, &r))
	require.Len(t, r.GetResources(), 1)
	assert.Equal(t, name, r.GetResources()[0].GetName())
}

// secret asks by SDS, and returns the path of an ID, or "roots".
func (p *place) secret(t *testing.T, name string) (string, error) {
	c := sds.UnixClient(p.sock)
	defer c.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	for s, err := range sds.NewClient(c, "http://localhost").Watch(ctx, name) {
		if err != nil {
			return "", err
		}
		certs, key, ok := s.KeyPair()
		if !ok {
			return "roots", nil
		}
		return must.Get(spiffe.ParseSVIDPEM(certs, key))(t).ID().Path(), nil
	}
	return "", context.Cause(ctx)
}

// A new version of the file takes effect on open streams. An identity that stays keeps its certificate, a bad version changes
// nothing, and a workload that loses its last identity is told so.
func TestFileChanges(t *testing.T) {
	t.Parallel()
	p := newPlace(t, me(id("/web"))).serve(time.Hour)
	updates, errs := p.updates()
	first := next(t, updates)
	require.Equal(t, "/web", told(first))
	kept := first.Identities[0].SVID.Leaf()

	p.write(me(id("/web"), id("/admin", `"hint": "a"`)))
	u := next(t, updates)
	require.Equal(t, "/web /admina", told(u))
	assert.Equal(t, kept, u.Identities[0].SVID.Leaf())

	p.raw(`{"workloads": [` + me(id("/web"), `{"idd": 1}`) + `]}`)
	require.Eventually(t, func() bool { return p.agent.Report().Upstreams[0].Err != nil }, passing, often)
	refused := p.agent.Report().Upstreams[0].Err
	assert.ErrorContains(t, refused, p.file+": line 1, column ")
	assert.ErrorContains(t, refused, `"idd" is not known here: an identity can have audiences, files, hint, id`)
	var metrics strings.Builder
	require.NoError(t, p.agent.Report().Metrics(&metrics))
	assert.Contains(t, metrics.String(), "svidkit_workloadagent_file_refused 1")
	require.NoError(t, os.Remove(p.file))
	again, _ := p.updates()
	assert.Equal(t, "/web /admina", told(next(t, again)), "a new caller has what was in force")

	p.write(me(id("/admin")))
	u = next(t, updates)
	require.Equal(t, "/admin", told(u))
	require.Eventually(t, func() bool { return len(p.manager.Report().Identities) == 1 }, passing, often, "the key of /web is forgotten")
	assert.NoError(t, p.agent.Report().Upstreams[0].Err)

	p.write(strings.Replace(me(id("/admin")), `"uid": `, `"uid": 1`, 1))
	err := next(t, errs)
	for !errors.Is(err, workloadapi.ErrDenied) { // the first call may have come before the identity
		err = next(t, errs)
	}
	require.Empty(t, updates)
	require.Error(t, must.Err(p.secret(t, "ROOTCA")), "nor the roots")

	p.write()
	require.Eventually(t, func() bool { return len(p.manager.Report().Identities) == 0 }, passing, often)
	p.write(me(id("/web")))
	require.Eventually(t, func() bool {
		select {
		case u = <-updates:
			return told(u) == "/web"
		default:
			return false
		}
	}, passing, often)
	assert.NotEqual(t, kept, u.Identities[0].SVID.Leaf())
}

// The kubelet changes the file of a ConfigMap by a link that it swaps, and the agent takes that over.
func TestFileOfAConfigMap(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	version := func(name string, workloads ...string) {
		p.file = filepath.Join(p.dir, "..v"+name, "workloads.json")
		require.NoError(t, os.Mkdir(filepath.Dir(p.file), 0o755))
		p.write(workloads...)
		require.NoError(t, os.Symlink("..v"+name, filepath.Join(p.dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(p.dir, "..data_tmp"), filepath.Join(p.dir, "..data")))
	}
	version("1", me(id("/web")))
	p.file = filepath.Join(p.dir, "link.json")
	require.NoError(t, os.Symlink("..data/workloads.json", p.file))
	p.serve(time.Hour)
	updates, _ := p.updates()
	require.Equal(t, "/web", told(next(t, updates)))
	version("2", me(id("/web"), id("/admin")))
	require.NoError(t, os.RemoveAll(filepath.Join(p.dir, "..v1")))
	require.Equal(t, "/web /admin", told(next(t, updates)))
}

// An identity that the CA refuses takes neither the others of its workload away nor their renewals, and comes when the CA
// grants it.
func TestIdentityThatDoesNotCome(t *testing.T) {
	t.Parallel()
	p := newPlace(t, me(id("/refused"), id("/web")))
	no := spiffe.MustParseID("spiffe://example.org/refused")
	p.refused.Store(&no)
	p.serve(4 * time.Second)
	require.NoError(t, p.agent.Ready(t.Context()))
	updates, errs := p.updates()
	first := next(t, updates)
	require.Equal(t, "/web", told(first))
	assert.ErrorContains(t, p.agent.Report().Problems[0], "spiffe://example.org/refused")
	for {
		u := next(t, updates)
		require.Equal(t, "/web", told(u))
		if u.Identities[0].SVID.NotAfter().After(first.Identities[0].SVID.NotAfter()) {
			break
		}
	}
	require.Empty(t, errs)
	p.refused.Store(nil)
	for u := next(t, updates); told(u) != "/refused /web"; u = next(t, updates) {
		require.Equal(t, "/web", told(u))
	}
	noneDenied(t, errs)

	alone := newPlace(t, me(id("/refused")))
	alone.refused.Store(&no)
	alone.serve(time.Hour)
	_, errs = alone.updates()
	require.NotErrorIs(t, next(t, errs), workloadapi.ErrDenied, "it may come: nothing is taken back")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, alone.agent.Ready(ctx), spiffe.ErrNotReady)
	require.ErrorIs(t, alone.agent.Report().NotReady, spiffe.ErrNotReady)
	alone.refused.Store(nil)
	require.NoError(t, alone.agent.Ready(t.Context()))
}

// Identities can come from another agent, such as SPIRE's, which can take them back.
func TestFromAgent(t *testing.T) {
	t.Parallel()
	home := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, home, "/agent", "/web")
	src := must.Get(workloadapi.New(api.Config()))(t)
	p := newPlace(t, me(id("/web"), id("/unknown")))
	p.run(workloadagent.Config{Source: upstream{src, sdssource.FromIdentity(src)}}, src.Run)
	updates, errs := p.updates()
	first := next(t, updates)
	require.Equal(t, "/web", told(first))
	api.Rotate()
	u := next(t, updates)
	require.Equal(t, "/web", told(u))
	require.NotEqual(t, first.Identities[0].SVID.Leaf(), u.Identities[0].SVID.Leaf())
	_, err := p.client().FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db")
	require.ErrorIs(t, err, errors.ErrUnsupported)
	api.Deny()
	require.Eventually(t, func() bool { return errors.Is(next(t, errs), workloadapi.ErrDenied) }, passing, often, "it is taken back")
}

// A directory that an operator has made for a group, as README.md of the program says, gives its group to the files, with the
// modes of the file.
func TestFilesForAGroup(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root can give a directory to another group")
	}
	p := newPlace(t)
	out := filepath.Join(p.dir, "out")
	require.NoError(t, os.Mkdir(out, 0o750))
	require.NoError(t, os.Chown(out, 0, 4242))
	require.NoError(t, os.Chmod(out, fs.ModeSetgid|0o750))
	p.write(`{"identities": [` + id("/batch", `"files": [{"folder": "`+out+`", "layout": "split", "mode": "0440", "key_mode": "0640"}]`) + `]}`)
	p.serve(time.Hour)
	check := func(name string, mode fs.FileMode) bool {
		info, err := os.Stat(filepath.Join(out, name))
		return err == nil && info.Mode() == mode && info.Sys().(*syscall.Stat_t).Gid == 4242 && info.Sys().(*syscall.Stat_t).Uid == 0
	}
	require.Eventually(t, func() bool { return check("key.pem", 0o640) }, passing, often)
	for _, name := range []string{"cert-chain.pem", "root-cert.pem"} { // which follow the key
		require.Eventually(t, func() bool { return check(name, 0o440) }, passing, often)
	}
	cmd := exec.CommandContext(t.Context(), "/bin/cat", filepath.Join(out, "key.pem"))
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4241, Gid: 4242}}
	read, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", read)

	p.write()
	require.Eventually(t, func() bool { return len(p.agent.Report().Upstreams) == 1 }, passing, often, "it is written no more")
	assert.True(t, check("key.pem", 0o640), "and stays")
}

// New refuses what it can never serve.
func TestNew(t *testing.T) {
	t.Parallel()
	p := newPlace(t, me(id("/web")))
	m, err := secretcache.New(secretcache.Config{TrustDomain: spiffe.MustParseTrustDomain("other.test"), CA: noCA{}})
	require.NoError(t, err)
	_, err = workloadagent.New(workloadagent.Config{File: p.file, Source: m})
	require.ErrorContains(t, err, `not in the trust domain "other.test"`)
	require.Empty(t, m.Report().Identities)
	_, err = workloadagent.New(workloadagent.Config{File: p.file + "x", Source: m})
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.Error(t, must.Err(workloadagent.New(workloadagent.Config{})))
	require.NoError(t, os.Chmod(p.file, 0o666))
	require.ErrorContains(t, must.Err(workloadagent.New(workloadagent.Config{File: p.file, Source: m})), "chmod")
}

type noCA struct{ caclient.CA }

const workloadSocket, workloadUpdates = "WORKLOADAGENT_SOCKET", "WORKLOADAGENT_UPDATES"

// TestWorkload runs as another process if its variable is set: it prints what it gets, as often as the other variable says.
func TestWorkload(t *testing.T) {
	address := os.Getenv(workloadSocket)
	if address == "" {
		t.Skip("it is a part of TestSelectors")
	}
	c := must.Get(workloadapi.NewClient(address, nil))(t)
	left, _ := strconv.Atoi(os.Getenv(workloadUpdates))
	for u, err := range c.WatchX509SVIDs(t.Context()) {
		switch {
		case err == nil:
			fmt.Println("IDENTITIES", told(u))
		case errors.Is(err, workloadapi.ErrDenied):
			fmt.Println("IDENTITIES none")
		default:
			continue
		}
		if left--; left <= 0 {
			break
		}
	}
}

// controlGroup makes a control group, and returns the file by which processes come into it.
func controlGroup(t *testing.T, name string) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/pids"} {
		try := filepath.Join(root, name)
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil || os.MkdirAll(try, 0o755) != nil {
			continue
		}
		t.Cleanup(func() { _ = os.Remove(try) })
		group := filepath.Join(try, "cgroup.procs")
		if exec.CommandContext(t.Context(), "sh", "-c", "echo $$ > "+group).Run() == nil {
			return group
		}
	}
	t.Skip("no control groups can be made here")
	return ""
}

// A process of a pod has what the API server says that its pod may have, from the moment that it says so. A pod of another node
// is none.
func TestPodsOfTheNode(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root can make control groups")
	}
	p := newPlace(t,
		`{"match": {"namespace": "shop", "account": "cart"}, "identities": [`+id("/cart")+`]}`,
		`{"match": {"namespace": "shop", "labels": {"tier": "gold"}}, "identities": [`+id("/gold")+`]}`,
	)
	p.api = kubetest.Start(t)
	client := must.Get(kube.New(kube.Options{URL: p.api.URL(), Client: p.api.Client()}))(t)
	const path = "/api/v1/namespaces/shop/pods"
	made := func(name, node, account string) (uid string) {
		var o struct{ Metadata kube.ObjectMeta }
		require.NoError(t, client.Create(t.Context(), path, map[string]any{
			"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name}, "spec": map[string]any{"nodeName": node, "serviceAccountName": account},
		}, &o))
		return o.Metadata.UID
	}
	// start runs a process in a pod, and returns the lines that it prints.
	start := func(uid string, updates int) *bufio.Scanner {
		group := controlGroup(t, "kubepods/pod"+uid)
		ctx, cancel := context.WithTimeout(t.Context(), 2*passing)
		t.Cleanup(cancel)
		cmd := exec.CommandContext(ctx, "sh", "-c", "echo $$ > "+group+" && exec "+os.Args[0]+" -test.run='^TestWorkload$' -test.v=false")
		cmd.Env = append(os.Environ(), workloadSocket+"=unix://"+p.sock, workloadUpdates+"="+strconv.Itoa(updates))
		out := must.Get(cmd.StdoutPipe())(t)
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return bufio.NewScanner(out)
	}
	line := func(s *bufio.Scanner) string {
		require.True(t, s.Scan(), "%v", s.Err())
		return s.Text()
	}
	cart, other, elsewhere := made("cart", "node-a", "cart"), made("other", "node-a", ""), made("elsewhere", "node-b", "cart")
	p.serve(time.Hour)
	require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often)
	assert.Equal(t, "IDENTITIES /cart", line(start(cart, 1)))
	assert.Equal(t, "IDENTITIES none", line(start(other, 1)))
	assert.True(t, workloadagent.KnowsPod(p.agent, other))
	assert.False(t, workloadagent.KnowsPod(p.agent, elsewhere))

	// What the API server says later takes effect on an open stream, and in a request that waits for it.
	open := start(cart, 3)
	require.Equal(t, "IDENTITIES /cart", line(open))
	require.NoError(t, client.Patch(t.Context(), path+"/cart", map[string]any{"metadata": map[string]any{"labels": map[string]string{"tier": "gold"}}}))
	require.Equal(t, "IDENTITIES /cart /gold", line(open))
	require.NoError(t, client.Patch(t.Context(), path+"/cart", map[string]any{"metadata": map[string]any{"labels": map[string]string{"tier": "tin"}}}))
	require.Equal(t, "IDENTITIES /cart", line(open))
	late := start(elsewhere, 1)
	time.Sleep(300 * time.Millisecond) // so that it usually asks before
	require.NoError(t, client.Patch(t.Context(), path+"/elsewhere", map[string]any{"spec": map[string]any{"nodeName": "node-a"}}))
	assert.Equal(t, "IDENTITIES /cart", line(late))
}

// Without the right to list pods the log says what to do, and the report that something is missing.
func TestNoRightToPods(t *testing.T) {
	t.Parallel()
	p := newPlace(t, me(id("/web")))
	p.api = kubetest.Start(t)
	p.api.Faults(func(*http.Request) *kubetest.Fault {
		return &kubetest.Fault{Code: http.StatusForbidden, Reason: "Forbidden"}
	})
	var logs programtest.Log
	m, err := secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: spiffetest.NewCA(t, "example.org")})
	require.NoError(t, err)
	p.run(workloadagent.Config{Source: m, TrustDomain: exampleOrg, Logger: slog.New(slog.NewTextHandler(&logs, nil))}, m.Run)
	require.NoError(t, p.agent.Ready(t.Context()), "the others have theirs")
	require.Eventually(t, func() bool { return strings.Contains(logs.String(), "may list and watch pods") }, passing, often)
	assert.Contains(t, logs.String(), "new pods get nothing by their namespaces")
	var problems []string
	for _, err := range p.agent.Report().Problems {
		problems = append(problems, err.Error())
	}
	assert.Contains(t, strings.Join(problems, "\n"), "the API server has not told node node-a of the pods yet")
}

// A process has the identities of the rules that it meets in all they name: its user, its program, and its control group.
func TestSelectors(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root can be other users")
	}
	p := newPlace(t)
	data := must.Get(os.ReadFile("/proc/self/exe"))(t)
	program := func(name string) string {
		path := filepath.Join(p.dir, name)
		require.NoError(t, os.WriteFile(path, data, 0o755))
		return path
	}
	web, db := program("web"), program("db")
	gone := program("gone")
	rule := func(match, path string) string {
		return `{"match": {` + match + `}, "identities": [` + id(path) + `]}`
	}
	p.write(
		rule(`"uid": 4242`, "/user"),
		rule(`"gid": 4243`, "/group"),
		rule(fmt.Sprintf(`"uid": 0, "executable": %q`, web), "/root"),
		rule(fmt.Sprintf(`"uid": 4242, "executable": %q`, web), "/web"),
		rule(fmt.Sprintf(`"uid": 4242, "executable": %q`, db), "/db"),
		rule(fmt.Sprintf(`"gid": 4241, "executable": %q`, gone), "/gone"),
		rule(`"unit": "web.service"`, "/unit"),
		rule(`"pod": "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22"`, "/pod"),
	)
	p.serve(time.Hour)
	require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often)
	for _, test := range []struct {
		uid, gid uint32
		program  string
		want     string
	}{
		{4242, 4242, web, "/user /web"},
		{4242, 4243, db, "/user /group /db"},
		{4241, 4241, db, "none"},
		{4241, 4241, web, "none"},
		{0, 0, web, "/root"},
		{4241, 4241, gone, "/gone"},
	} {
		cmd := exec.CommandContext(t.Context(), test.program, "-test.run=^TestWorkload$")
		cmd.Env = append(os.Environ(), workloadSocket+"=unix://"+p.sock)
		cmd.Dir = p.dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: test.uid, Gid: test.gid}}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		assert.Contains(t, string(out), "IDENTITIES "+test.want+"\n", "%+v", test)
	}

	// The same path in another mount namespace is another program, whatever the link of the kernel says.
	if _, err := exec.LookPath("unshare"); err == nil {
		cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", fmt.Sprintf("mount --bind %s %s && exec %s -test.run='^TestWorkload$'", db, web, web))
		cmd.Env, cmd.Dir = append(os.Environ(), workloadSocket+"=unix://"+p.sock), p.dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Skipf("no mount namespace here: %s", out)
		}
		assert.Contains(t, string(out), "IDENTITIES none\n")
	}
}

// Callers that no kernel vouches for get nothing, and nor does a name of SDS.
func TestNoPeer(t *testing.T) {
	t.Parallel()
	p := newPlace(t, me(id("/web"))).serve(time.Hour)
	require.NoError(t, p.agent.Ready(t.Context()))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	background(t, (&unixsocket.Server{Listener: l, Handler: p.agent}).Run)
	c := must.Get(workloadapi.NewClient("tcp://"+l.Addr().String(), nil))(t)
	t.Cleanup(c.CloseIdleConnections)
	for _, err := range c.WatchX509SVIDs(t.Context()) {
		require.ErrorIs(t, err, workloadapi.ErrDenied)
		break
	}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	plain := &http.Client{Transport: &http.Transport{Protocols: protocols}}
	t.Cleanup(plain.CloseIdleConnections)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	for s, err := range sds.NewClient(plain, "http://"+l.Addr().String()).Watch(ctx, "ROOTCA") {
		require.Error(t, err, "%v", s)
		break
	}
}

// An agent that is told nothing of the cluster's pods says so of a file that selects by what the cluster says.
func TestNoPods(t *testing.T) {
	t.Parallel()
	p := newPlace(t, `{"match": {"namespace": "shop"}, "identities": [`+id("/cart")+`]}`)
	m, err := secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: spiffetest.NewCA(t, "example.org")})
	require.NoError(t, err)
	_, err = workloadagent.New(workloadagent.Config{File: p.file, Source: m, TrustDomain: exampleOrg})
	require.ErrorContains(t, err, "this agent does not know the pods of the cluster, as workload-agent does with -node: select by pod")
}

// upstream is another agent, with its identities as secrets.
type upstream struct {
	*workloadapi.Source
	secrets
}

type secrets = sds.Source
