package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/sds/istioagent"
)

// elsewhere says what replaces the other commands of Istio's image.
var elsewhere = map[string]string{
	"istio-iptables": "the rules of the pod's network are set by Istio's own image: leave the image of the " +
		"container istio-init or istio-validation as it is, " +
		"or use Istio's CNI plugin",
	"istio-clean-iptables": "the rules of the pod's network are removed by Istio's own image",
	"ztunnel":              "ztunnel is a program with an image of its own; this is for sidecars and gateways",
	"waypoint":             "waypoints are run by Istio's own image; this is for sidecars and gateways",
	"version":              "the flag -version prints the version",
}

// command runs wait or request, and refuses any other command.
func command(ctx context.Context, args []string, out io.Writer) error {
	switch args[0] {
	case "wait":
		return waitReady(ctx, args[1:], out)
	case "request":
		return request(ctx, args[1:], out)
	}
	return program.Misused("%s: %s", args[0], cmp.Or(elsewhere[args[0]],
		"it is not understood; the commands are proxy, wait and request, and flags begin with a hyphen"))
}

// waitReady polls Envoy until it is ready. Pods that hold the application until then call it as a hook.
func waitReady(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("agent wait", flag.ContinueOnError)
	url := flags.String("url", "http://localhost:15021/healthz/ready", "`URL` to ask")
	timeout := flags.Uint("timeoutSeconds", 60, "`seconds` to wait")
	period := flags.Uint("periodMillis", 500, "`milliseconds` between requests")
	each := flags.Uint("requestTimeoutMillis", 500, "`milliseconds` for a request")
	if err := program.Parse(flags, args, out, program.Help{Doc: "It ends when the proxy is ready."}); err != nil {
		return err
	}
	client := &http.Client{Timeout: time.Duration(*each) * time.Millisecond}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(*timeout)*time.Second)
	defer cancel()
	for {
		_, err := fetch(ctx, client, http.MethodGet, *url, "", io.Discard)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(time.Duration(*period) * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait: the proxy is not ready after %d s: %w", *timeout, err)
		}
	}
}

// request sends a request to a port of the agent or of Envoy, and prints the answer. Pods drain by this hook.
func request(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("agent request", flag.ContinueOnError)
	port := flags.Uint("debug-port", 15000, "`port` of localhost")
	if err := program.ParseFlags(flags, args, out, program.Help{Args: "METHOD PATH [BODY]"}); err != nil {
		return err
	}
	if flags.NArg() < 2 || flags.NArg() > 3 {
		return program.Misused("it is request [--debug-port=PORT] METHOD PATH [BODY]: a method and a path are needed")
	}
	url := fmt.Sprintf("http://localhost:%d/%s", *port, strings.TrimPrefix(flags.Arg(1), "/"))
	code, err := fetch(ctx, &http.Client{Timeout: time.Minute}, flags.Arg(0), url, flags.Arg(2), out)
	if code == http.StatusNotFound { // as with Istio's agent: the hook must not fail
		err = nil
	}
	return err
}

// fetch sends a request, and copies the body of a successful answer.
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
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // the server's reason
		return resp.StatusCode, fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, bytes.TrimSpace(text))
	}
	_, err = io.Copy(out, io.LimitReader(resp.Body, 64<<20))
	return resp.StatusCode, err
}

// proxy is the command proxy: the agent together with an Envoy, as in a pod. The zero proxy is the agent alone.
type proxy struct {
	role, domain, logLevel, logLevels string
	level                             slog.Level
	unused, format                    []string // flags that we ignore, and Envoy's flags for its log format

	envoy   bool // run an Envoy
	cfg     istioagent.Config
	environ []string
	client  *http.Client
	app     appProbes
	pages   []string // URLs of metrics other than the agent's
}

// newProxy parses the arguments of the command proxy, as the injector writes them.
func newProxy(args []string, o *options, out io.Writer) (*proxy, error) {
	refuse := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	p := &proxy{role: "sidecar", client: &http.Client{Timeout: 3 * time.Second, CheckRedirect: refuse}}
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		p.role, args = args[0], args[1:]
	}
	if p.role != "sidecar" && p.role != "router" {
		return nil, program.Misused("proxy %s: %s", p.role,
			cmp.Or(elsewhere[p.role], "it is proxy sidecar or proxy router"))
	}
	flags := flag.NewFlagSet("agent proxy", flag.ContinueOnError)
	flags.StringVar(&p.domain, "domain", "", "DNS `domain` of the node (default NAMESPACE.svc.cluster.local)")
	flags.StringVar(&p.logLevel, "proxyLogLevel", "warning", "`level` of Envoy's log")
	flags.StringVar(&p.logLevels, "proxyComponentLogLevel", "misc:error",
		"`levels` of the log of parts of Envoy, such as misc:error")
	flags.BoolFunc("log_as_json", "write each line as JSON, those of Envoy too", func(string) error {
		o.LogFormat, p.format = "json", []string{"--log-format",
			`{"time":"%Y-%m-%dT%T.%f%z","level":"%l","msg":"%j","logger":"envoy %n"}`}
		return nil
	})
	flags.Func("log_output_level", "`level` of the agent's log, such as default:info; scopes but default are those "+
		"of Istio's agent", p.setLevel)
	for name, why := range map[string]string{
		"stsPort":        "the agent exchanges its own token, and is no token service",
		"outlierLogPath": "customConfigFile in PROXY_CONFIG names a bootstrap that may have it",
	} {
		flags.Func(name, "not used: "+why, func(string) error {
			p.unused = append(p.unused, "the flag --"+name+" is not used: "+why)
			return nil
		})
	}
	return p, program.Parse(flags, args, out, program.Help{})
}

// setLevel sets the level of the agent's log.
func (p *proxy) setLevel(text string) error {
	for part := range strings.SplitSeq(text, ",") {
		level := strings.TrimPrefix(strings.TrimPrefix(part, "default:"), "all:")
		switch {
		case strings.Contains(level, ":"): // a scope of Istio's
		case level == "none", level == "fatal":
			p.level = slog.LevelError + 1
		case p.level.UnmarshalText([]byte(level)) != nil:
			return fmt.Errorf("the level %q is not none, fatal, error, warn, info or debug", level)
		}
	}
	return nil
}

// configure applies the arguments on top of the environment, and returns the address of the status port.
func (p *proxy) configure(cfg *istioagent.Config, environ []string) (status string, err error) {
	e := &cfg.Envoy
	e.Started, e.Role, e.Domain = true, p.role, p.domain
	p.envoy = !e.Disabled
	for _, note := range p.unused {
		cfg.Logger.Info("agent: " + note)
	}
	p.cfg, p.environ = *cfg, environ
	if err := p.configureApp(); err != nil || e.StatusPort == 0 {
		return "", err
	}
	return fmt.Sprint(":", e.StatusPort), nil
}

// run runs the agent and Envoy until ctx is done, and then drains Envoy for as long as the agent drains. It fails if
// Envoy ends earlier.
func (p *proxy) run(ctx context.Context, agent *istioagent.Agent, out io.Writer) error {
	if !p.envoy {
		return agent.Run(ctx)
	}
	envoy, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	cmd, err := p.start(envoy, agent, out)
	if err != nil {
		return errors.Join(err, agent.Close())
	}
	ran, ended := make(chan error, 1), make(chan error, 1)
	go func() { ran <- agent.Run(ctx) }()
	go func() { ended <- cmp.Or(cmd.Wait(), errors.New("it has ended by itself")) }()
	for draining := agent.Draining(); ; {
		select {
		case <-draining:
			draining = nil
			p.drain(envoy)
		case err := <-ran:
			stop()
			<-ended
			return err
		case err := <-ended:
			if ctx.Err() != nil { // both were told to end
				return <-ran
			}
			return fmt.Errorf("the Envoy: %w", err) // at once: nothing is left to drain
		}
	}
}

// start writes the bootstrap and starts Envoy, which is told to end when ctx is done.
func (p *proxy) start(ctx context.Context, agent *istioagent.Agent, out io.Writer) (*exec.Cmd, error) {
	e := p.cfg.Envoy
	config := cmp.Or(e.ConfigFile, filepath.Join(e.Dir, "envoy-rev.json"))
	if !filepath.IsAbs(config) {
		config = filepath.Join(p.cfg.Root, config)
	}
	if e.ConfigFile == "" {
		if err := errors.Join(os.MkdirAll(filepath.Dir(config), 0o700), writeBootstrap(agent, config)); err != nil {
			return nil, fmt.Errorf("bootstrap of Envoy: %w", err)
		}
	}
	version := "v4"
	if strings.Contains(getenv(p.environ, "INSTANCE_IP"), ":") {
		version = "v6"
	}
	args := []string{
		"-c", config, "--drain-time-s", strconv.Itoa(int(e.DrainTime.Seconds())),
		"--drain-strategy", "immediate", "--disable-hot-restart",
		"--allow-unknown-static-fields", "--local-address-ip-version", version, "--file-flush-interval-msec", "1000",
		"--log-level", p.logLevel, "--component-log-level", p.logLevels,
	}
	args = append(args, p.format...)
	if e.Concurrency > 0 {
		args = append(args, "--concurrency", strconv.Itoa(e.Concurrency))
	}
	cmd := exec.CommandContext(ctx, cmp.Or(e.Path, "envoy"), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second // then Envoy is killed
	cmd.Env, cmd.Stdout, cmd.Stderr = p.environ, out, out
	p.cfg.Logger.Info("agent: Envoy starts, with its defaults for statistics, tracing and limits",
		slog.String("command", cmd.String()))
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("the Envoy: %w; set binaryPath in PROXY_CONFIG to it, or DISABLE_ENVOY=true if "+
			"there is none", err)
	}
	return cmd, nil
}

// admin returns a URL of Envoy's admin interface.
func (p *proxy) admin(path string) string {
	return fmt.Sprintf("http://127.0.0.1:%d%s", p.cfg.Envoy.AdminPort, path)
}

// drain makes Envoy tell its clients to reconnect elsewhere: inbound clients, or at a gateway all of them.
func (p *proxy) drain(ctx context.Context) {
	query := "?inboundonly&graceful&skip_exit"
	if p.role == "router" {
		query = "?graceful&skip_exit"
	}
	p.cfg.Logger.Info("agent: Envoy drains")
	if _, err := fetch(ctx, p.client, http.MethodPost, p.admin("/drain_listeners"+query), "", io.Discard); err != nil {
		p.cfg.Logger.Warn("agent: Envoy does not drain", slog.Any("err", err))
	}
}

// serveReady reports whether the agent is ready and Envoy is live with configuration from the control plane.
func (p *proxy) serveReady(agent http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := p.ready(r.Context()); err != nil {
			http.Error(w, "Envoy is not ready: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		agent.ServeHTTP(w, r)
	})
}

func (p *proxy) ready(ctx context.Context) error {
	if !p.envoy {
		return nil
	}
	_, err := fetch(ctx, p.client, http.MethodGet, p.admin("/ready"), "", io.Discard)
	if err != nil || !p.cfg.Envoy.XDS || p.cfg.Envoy.ConfigFile != "" {
		return err
	}
	var stats bytes.Buffer
	_, err = fetch(ctx, p.client, http.MethodGet,
		p.admin("/stats?filter=^(listener_manager.lds|cluster_manager.cds).update_success$"), "", &stats)
	if err == nil && (strings.Count(stats.String(), ":") < 2 || strings.Contains(stats.String(), ": 0")) {
		err = errors.New("it has accepted no configuration of the control plane")
	}
	return err
}
