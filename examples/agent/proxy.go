package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/sds/istioagent"
)

// elsewhere says who does what the other commands of Istio's image do.
var elsewhere = map[string]string{
	"istio-iptables": "the rules of the pod's network are set by Istio's own image: leave the image of the container istio-init or istio-validation as it is, " +
		"or use Istio's CNI plugin",
	"istio-clean-iptables": "the rules of the pod's network are removed by Istio's own image",
	"ztunnel":              "ztunnel is a program of its own, with an image of its own; this is for sidecars and gateways",
	"waypoint":             "waypoints are run by Istio's own image; this is for sidecars and gateways",
	"version":              "the flag -version prints the version",
}

// command runs wait or request, and refuses what is no command.
func command(ctx context.Context, args []string, out io.Writer) error {
	switch args[0] {
	case "wait":
		return waitReady(ctx, args[1:])
	case "request":
		return request(ctx, args[1:], out)
	}
	if instead, ok := elsewhere[args[0]]; ok {
		return misused("%s: %s", args[0], instead)
	}
	return misused("%q is not understood; the commands are proxy, wait and request, and flags begin with a hyphen", args[0])
}

// pilotFlags are flags as pilot-agent takes them: --NAME=VALUE or --NAME VALUE, or --NAME for those that need no value.
// Those that are not known are in unknown, as pilot-agent accepts them.
func pilotFlags(args, known, bools []string) (values map[string]string, rest, unknown []string, err error) {
	values = make(map[string]string)
	for ; len(args) > 0; args = args[1:] {
		name, value, given := strings.Cut(strings.TrimLeft(args[0], "-"), "=")
		switch isKnown := slices.Contains(known, name); {
		case args[0] == "" || args[0][0] != '-':
			rest = append(rest, args[0])
			continue
		case given:
		case slices.Contains(bools, name):
			value = "true"
		case len(args) > 1 && (isKnown || !strings.HasPrefix(args[1], "-")):
			value, args = args[1], args[1:]
		case isKnown:
			return nil, nil, nil, misused("the flag --%s needs a value", name)
		}
		if values[name] = value; !slices.Contains(known, name) && !slices.Contains(bools, name) {
			unknown = append(unknown, name)
		}
	}
	return values, rest, unknown, nil
}

// number returns a flag that is a number which is not negative.
func number(values map[string]string, name string, otherwise int) (int, error) {
	text, ok := values[name]
	if !ok {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, misused("the flag --%s is %q, and has to be a whole number that is not negative", name, text)
	}
	return n, nil
}

// waitReady asks whether the Envoy is ready, until it is: the hook of pods that hold the application until then.
func waitReady(ctx context.Context, args []string) error {
	values, rest, unknown, err := pilotFlags(args, []string{"timeoutSeconds", "requestTimeoutMillis", "periodMillis", "url"}, nil)
	if err == nil && len(rest)+len(unknown) > 0 {
		err = misused("wait: %q is not understood; the flags are --timeoutSeconds, --requestTimeoutMillis, --periodMillis and --url", append(rest, unknown...))
	}
	timeout, err1 := number(values, "timeoutSeconds", 60)
	each, err2 := number(values, "requestTimeoutMillis", 500)
	period, err3 := number(values, "periodMillis", 500)
	if err := cmp.Or(err, err1, err2, err3); err != nil {
		return err
	}
	url := cmp.Or(values["url"], "http://localhost:15021/healthz/ready")
	client := &http.Client{Timeout: time.Duration(each) * time.Millisecond}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(timeout)*time.Second)
	defer cancel()
	for {
		_, err := fetch(ctx, client, http.MethodGet, url, "", io.Discard)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(time.Duration(period) * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait: the proxy is not ready after %d s: %w", timeout, err)
		}
	}
}

// request sends a request to a port of the agent or the Envoy, and prints the answer: the hook by which pods drain.
func request(ctx context.Context, args []string, out io.Writer) error {
	values, rest, unknown, err := pilotFlags(args, []string{"debug-port"}, nil)
	if err != nil {
		return err
	}
	port := cmp.Or(values["debug-port"], "15000")
	switch {
	case len(unknown) > 0 || len(rest) < 2 || len(rest) > 3:
		return misused("request: it is request [--debug-port=PORT] METHOD PATH [BODY]")
	case !slices.Contains([]string{"15000", "15004", "15020", "15021"}, port):
		return misused("request: --debug-port is %q, and has to be 15000, 15004, 15020 or 15021", port)
	}
	url := "http://localhost:" + port + "/" + strings.TrimPrefix(rest[1], "/")
	code, err := fetch(ctx, &http.Client{Timeout: time.Minute}, rest[0], url, strings.Join(rest[2:], ""), out)
	if code == http.StatusNotFound { // as with pilot-agent
		err = nil
	}
	return err
}

// fetch sends a request, and copies the body of a good answer.
func fetch(ctx context.Context, client *http.Client, method, url, body string, out io.Writer) (code int, err error) {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // what the server says
		return resp.StatusCode, fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, bytes.TrimSpace(text))
	}
	_, err = io.Copy(out, io.LimitReader(resp.Body, 64<<20))
	return resp.StatusCode, err
}

// proxy is the command proxy: the agent with an Envoy, as it is in a pod.
type proxy struct {
	args         map[string]string
	unused       []string // flags
	router, json bool
	level        slog.Level

	cfg     istioagent.Config
	environ []string
	client  *http.Client
	log     *slog.Logger
	got     atomic.Bool // the Envoy has had its configuration
}

// newProxy reads the arguments of the command proxy.
func newProxy(args []string) (*proxy, error) {
	p := &proxy{client: &http.Client{Timeout: 3 * time.Second}}
	known := []string{"domain", "proxyLogLevel", "proxyComponentLogLevel", "log_output_level", "serviceCluster", "concurrency"}
	without := []string{"meshConfig", "stsPort", "tokenManagerPlugin", "templateFile", "outlierLogPath", "log_target", "log_stacktrace_level", "log_caller"}
	values, rest, unknown, err := pilotFlags(args, append(known, without...), []string{"log_as_json", "profiling"})
	if err != nil {
		return nil, err
	}
	for _, name := range append(without, "profiling") {
		if _, given := values[name]; given {
			unknown = append(unknown, name)
		}
	}
	p.args, p.unused = values, unknown
	switch role := strings.Join(rest, " "); role {
	case "", "sidecar":
	case "router":
		p.router = true
	default:
		return nil, misused("proxy %s: %s", role, cmp.Or(elsewhere[role], "it is proxy sidecar or proxy router"))
	}
	p.json = values["log_as_json"] == "true"
	for part := range strings.SplitSeq(values["log_output_level"], ",") {
		scope, level, ok := strings.Cut(part, ":")
		if !ok {
			scope, level = "default", scope
		}
		if scope == "default" && level != "" { // other scopes are those of Istio's agent
			switch level {
			case "none", "fatal":
				p.level = slog.LevelError + 1
			default:
				if err := p.level.UnmarshalText([]byte(level)); err != nil {
					return nil, misused("--log_output_level is %q: the level %q is not none, error, warn, info or debug", values["log_output_level"], level)
				}
			}
		}
	}
	return p, nil
}

// configure completes what the environment says by the arguments, and returns the address of the status port.
func (p *proxy) configure(cfg *istioagent.Config, environ []string) (status string, err error) {
	e := &cfg.Envoy
	e.Started, e.Router, e.Domain, e.Cluster = true, p.router, p.args["domain"], cmp.Or(p.args["serviceCluster"], e.Cluster)
	if e.Concurrency, err = number(p.args, "concurrency", e.Concurrency); err != nil {
		return "", err
	}
	for _, name := range p.unused {
		cfg.Unused = append(cfg.Unused, "the flag --"+name+" is not used")
	}
	if p.cfg, p.log, p.environ = *cfg, cfg.Logger, environ; e.StatusPort == 0 {
		return "", nil
	}
	return fmt.Sprint(":", e.StatusPort), nil
}

// run runs the agent and the Envoy until ctx is done, and then has the Envoy drain for as long as the agent does. It is an
// error if the Envoy ends before.
func (p *proxy) run(ctx context.Context, agent *istioagent.Agent, out io.Writer) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	ran := make(chan error, 1)
	go func() { ran <- agent.Run(inner) }()
	if p.cfg.Envoy.Disabled {
		return <-ran
	}
	cmd, err := p.start(agent, out)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmp.Or(cmd.Wait(), errors.New("it has ended by itself")) }()
	stop := sync.OnceFunc(func() {
		if cmd.Process.Signal(syscall.SIGTERM) != nil { // as on Windows
			_ = cmd.Process.Kill()
		}
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			_ = cmd.Process.Kill()
			<-ended
		}
	})
	select {
	case err = <-ran:
		stop()
		return err
	case err = <-ended:
	case <-agent.Draining():
		p.drain(ctx)
		select {
		case err = <-ran:
			stop()
			return err
		case err = <-ended:
		}
	}
	if ctx.Err() != nil { // both were told to end
		return <-ran
	}
	return fmt.Errorf("Envoy: %w", err) // at once, as there is nothing to drain
}

// start writes the bootstrap and starts the Envoy.
func (p *proxy) start(agent *istioagent.Agent, out io.Writer) (*exec.Cmd, error) {
	e := p.cfg.Envoy
	config := p.path(e.ConfigFile)
	if e.ConfigFile == "" {
		var b bytes.Buffer
		if err := agent.Bootstrap(&b); err != nil {
			return nil, err
		}
		config = filepath.Join(p.path(p.cfg.ConfigPath), "envoy-rev.json")
		if err := replace(config, b.Bytes()); err != nil {
			return nil, fmt.Errorf("bootstrap of Envoy: %w", err)
		}
	}
	version, level, components := "v4", "", []string{}
	if ip := net.ParseIP(p.cfg.Address); ip != nil && ip.To4() == nil {
		version = "v6"
	}
	for part := range strings.SplitSeq(cmp.Or(p.args["proxyLogLevel"], "warning"), ",") {
		if strings.Contains(part, ":") {
			components = append(components, part)
		} else {
			level = part
		}
	}
	args := []string{
		"-c", config, "--drain-time-s", strconv.Itoa(int(e.DrainTime.Seconds())), "--drain-strategy", "immediate", "--disable-hot-restart",
		"--allow-unknown-static-fields", "--local-address-ip-version", version, "--file-flush-interval-msec", "1000", "--log-level", cmp.Or(level, "warning"),
	}
	if text := cmp.Or(strings.Join(components, ","), p.args["proxyComponentLogLevel"]); text != "" {
		args = append(args, "--component-log-level", text)
	}
	if e.Concurrency > 0 {
		args = append(args, "--concurrency", strconv.Itoa(e.Concurrency))
	}
	if e.Override != "" {
		more, err := os.ReadFile(p.path(e.Override))
		if err != nil {
			return nil, fmt.Errorf("ISTIO_BOOTSTRAP_OVERRIDE: %w", err)
		}
		host := p.variable("HOST_IP")
		if strings.Contains(host, ":") {
			host = "[" + host + "]"
		}
		args = append(args, "--config-yaml", strings.ReplaceAll(string(more), "$(HOST_IP)", host))
	}
	cmd := exec.Command(cmp.Or(e.Path, "envoy"), args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(slices.Clone(e.Environ), p.environ...), out, out
	p.log.Info("agent: Envoy starts", slog.String("command", cmd.String()))
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("Envoy: %w; set binaryPath in PROXY_CONFIG or the variable ENVOY_PATH to it, or DISABLE_ENVOY=true if there is none", err)
	}
	return cmd, nil
}

// variable returns the value of a variable.
func (p *proxy) variable(name string) (value string) {
	for _, line := range p.environ {
		if v, ok := strings.CutPrefix(line, name+"="); ok {
			value = v
		}
	}
	return value
}

// path returns a path as the agent uses it.
func (p *proxy) path(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(p.cfg.Root, name)
}

// replace writes a file that appears as a whole.
func replace(name string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(name), ".envoy-*.json")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // unless it was renamed
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

// admin returns a URL of the Envoy's admin interface.
func (p *proxy) admin(path string) string {
	return fmt.Sprintf("http://127.0.0.1:%d%s", p.cfg.Envoy.AdminPort, path)
}

// drain has the Envoy tell its clients to go elsewhere: those that come in, or all of them at a gateway.
func (p *proxy) drain(ctx context.Context) {
	query := "?inboundonly&graceful&skip_exit"
	if p.router {
		query = "?graceful&skip_exit"
	}
	p.log.Info("agent: Envoy drains")
	if _, err := fetch(context.WithoutCancel(ctx), p.client, http.MethodPost, p.admin("/drain_listeners"+query), "", io.Discard); err != nil {
		p.log.Warn("agent: Envoy does not drain", slog.Any("err", err))
	}
}

// serveReady answers for the agent and the Envoy: that has to be live, with the control plane's configuration once.
func (p *proxy) serveReady(agent http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var stats bytes.Buffer
		_, err := fetch(r.Context(), p.client, http.MethodGet, p.admin("/ready"), "", io.Discard)
		if err == nil && p.cfg.XDS && p.cfg.Envoy.ConfigFile == "" && !p.got.Load() {
			_, err = fetch(r.Context(), p.client, http.MethodGet, p.admin("/stats?filter=^(listener_manager.lds|cluster_manager.cds).update_success$"), "", &stats)
			if err == nil && (strings.Count(stats.String(), ":") < 2 || strings.Contains(stats.String(), ": 0")) {
				err = errors.New("it has accepted no configuration of the control plane")
			}
			p.got.Store(err == nil)
		}
		if err != nil {
			http.Error(w, "Envoy is not ready: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		agent.ServeHTTP(w, r)
	})
}
