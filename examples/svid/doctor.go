package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var doctorCommand = command{
	"doctor", "", `go through everything between a workload and its identity

It looks at the environment, the socket, the permission to use it, the identity,
the trust bundle, the time that is left and the clock, one line each, with the
remedy for what failed. What cannot be tried is skipped, and the reason given.
Run it as the user, and in the container, of the workload. Without an agent it
looks at the files in SPIFFE_CREDENTIAL_FOLDER. For the clock it asks
the agent for a JWT-SVID with an audience of its own, which is neither shown nor
kept. The exit code is 1 if a step fails.`,
	doctor,
}

const folderEnv = "SPIFFE_CREDENTIAL_FOLDER"

// usualSockets are the usual addresses of the Workload API.
var usualSockets = []string{
	"/run/spire/agent/public/api.sock", "/run/spire/sockets/agent.sock", "/tmp/spire-agent/public/api.sock",
	"/run/secrets/workload-spiffe-uds/socket", "/var/run/secrets/workload-spiffe-uds/socket",
	"/spiffe-workload-api/spire-agent.sock",
}

const (
	clockSkew   = time.Minute // tolerated by validators of tokens
	sdsTime     = time.Second // within which a server without SDS refuses it
	lateRenewal = 0.75        // of its life; an identity should be renewed before
	unavailable = 14          // gRPC's code of an agent that has to ask its server, and cannot
)

// patient is the examination of a workload, step by step. A failed step ends the steps that need it.
type patient struct {
	*app
	ctx      context.Context
	address  string
	target   string // from the address: a path, or a host and port; or the directory of files
	network  string
	client   *workloadapi.Client
	update   *workloadapi.Update
	svid     *spiffe.SVID
	failedAt string // the step that later steps need
	checks   []check

	algorithms spiffe.Algorithms
}

func doctor(a *app, ctx context.Context, fs *flag.FlagSet, args []string) error {
	p := &patient{app: a}
	fs.StringVar(&p.address, "socket", "", "the `ADDRESS` of the Workload API, in place of "+workloadapi.SocketEnv)
	timeout := fs.Duration("timeout", 10*time.Second, "how long the agent may take for each step")
	program.Algorithms(fs, &p.algorithms, "peers allow")
	if err := parse(fs, args, 0); err != nil {
		return err
	}
	if *timeout <= 0 {
		return program.Misused("-timeout is not more than 0")
	}
	for _, step := range []struct {
		name string
		do   func() check
	}{
		{"environment", p.environment},
		{"socket", p.socket},
		{"permission", p.permission},
		{"identity", p.identity},
		{"bundle", p.bundle},
		{"expiry", p.expiry},
		{"clock", p.clock},
	} {
		c := check{Result: skipped, Detail: "needs the step " + p.failedAt}
		if p.failedAt == "" {
			var cancel context.CancelFunc
			p.ctx, cancel = context.WithTimeoutCause(ctx, *timeout, fmt.Errorf("no answer in %s", *timeout))
			c = step.do()
			cancel()
		}
		c.Name = step.name
		if c.Result == failed && slices.Contains([]string{"environment", "socket", "permission", "identity"},
			step.name) {
			p.failedAt = step.name
		}
		p.checks = append(p.checks, c)
	}
	if p.client != nil {
		p.client.CloseIdleConnections()
	}
	if err := a.print(record{{"checks", p.checks}}); err != nil {
		return err
	}
	return verdict(p.checks)
}

// environment finds the address of the Workload API.
func (p *patient) environment() check {
	where := "-socket"
	if p.address == "" {
		p.address, where = p.getenv(workloadapi.SocketEnv), workloadapi.SocketEnv
	}
	if p.target = p.getenv(folderEnv); p.address == "" && p.target != "" {
		p.network = "files"
		return check{Result: ok, Detail: folderEnv + " is " + p.target}
	}
	if p.address == "" {
		c := check{Result: failed, Detail: workloadapi.SocketEnv + " is not set",
			Remedy: "set it to the address of the agent, such as unix://" + usualSockets[0]}
		for _, path := range usualSockets {
			if info, err := os.Stat(path); err == nil && info.Mode()&fs.ModeSocket != 0 {
				c.Remedy = "there is a socket: set it to unix://" + path
				break
			}
		}
		return c
	}
	var err error
	if p.client, err = workloadapi.NewClient(p.address, nil); err != nil {
		// The error includes the remedy.
		return check{Result: failed, Detail: where + ": " + strings.TrimPrefix(err.Error(), "workloadapi: ")}
	}
	u, err := url.Parse(p.address)
	if err != nil { // not after NewClient
		return check{Result: failed, Detail: where + ": " + err.Error()}
	}
	if p.network, p.target = strings.ToLower(u.Scheme), u.Host; p.network == "unix" {
		p.target = u.Path
		if runtime.GOOS == "windows" && len(p.target) > 2 && p.target[2] == ':' {
			p.target = p.target[1:] // a drive
		}
	}
	return check{Result: ok, Detail: where + " is " + p.address}
}

// socket checks the socket.
func (p *patient) socket() check {
	if p.network == "tcp" || p.network == "files" {
		return check{Result: skipped, Detail: "the address is not one of a file"}
	}
	info, err := os.Stat(p.target)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return check{Result: failed, Detail: "there is nothing at " + p.target,
			Remedy: "start the agent, or mount the directory of its socket into this container"}
	case errors.Is(err, fs.ErrPermission):
		folder := closed(p.target)
		return check{Result: failed, Detail: fmt.Sprintf("%v: %s", err, modeOf(folder)),
			Remedy: "let this user pass the directory: chmod o+x " + folder}
	case err != nil:
		return check{Result: failed, Detail: err.Error()}
	case info.Mode()&fs.ModeSocket == 0:
		return check{
			Result: failed, Detail: fmt.Sprintf("%s is not a socket (%v)", p.target, info.Mode()),
			Remedy: "a mount of a socket that was not there yet makes a directory: mount the directory above it " +
				"instead",
		}
	}
	return check{Result: ok, Detail: fmt.Sprintf("%s (%v)", p.target, info.Mode())}
}

// closed returns the directory above path that this user may not enter.
func closed(path string) string {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
	}
}

// modeOf returns the path and the mode of a file or directory.
func modeOf(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s has mode %04o (%v)", path, info.Mode().Perm(), info.Mode())
}

// permission connects, or reads the files.
func (p *patient) permission() check {
	if p.network == "files" {
		src, err := filesource.Start(p.ctx, filesource.Config{Folder: p.target})
		if err != nil {
			return check{Result: failed, Detail: strings.TrimPrefix(err.Error(), "filesource: "),
				Remedy: "mount a volume with podCertificate and clusterTrustBundle there: see examples/KUBERNETES.md"}
		}
		defer src.Close()
		svid, _ := src.SVID() // Start has waited for it
		p.update = &workloadapi.Update{Identities: []workloadapi.Identity{{SVID: svid}}, Bundles: src.Bundles()}
		return check{Result: ok, Detail: fmt.Sprintf("user %d may read the files", os.Getuid())}
	}
	conn, err := new(net.Dialer).DialContext(p.ctx, p.network, p.target)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return check{
			Result: failed, Detail: fmt.Sprintf("user %d may not connect: %s; %s", os.Getuid(), modeOf(p.target),
				modeOf(filepath.Dir(p.target))),
			Remedy: "a socket needs write permission: run as a user that has it, or have the agent widen its mode",
		}
	case err != nil && p.network == "unix":
		return check{Result: failed, Detail: err.Error(),
			Remedy: "the socket was left behind by an agent that is gone: start the agent"}
	case err != nil:
		return check{Result: failed, Detail: err.Error(), Remedy: "see that the agent listens there"}
	}
	_ = conn.Close()
	return check{Result: ok, Detail: fmt.Sprintf("user %d may connect", os.Getuid())}
}

// identity requests the identities.
func (p *patient) identity() check {
	var last error
	if p.client != nil { // otherwise files had it
		for update, err := range p.client.WatchX509SVIDs(p.ctx) {
			if last = err; err == nil {
				p.update = update
				break
			}
			if errors.Is(err, workloadapi.ErrDenied) || errors.Is(err, workloadapi.ErrBadResponse) || otherAPI(err) {
				break
			}
		}
	}
	if p.update == nil {
		c := check{Result: failed, Remedy: "see the log of the agent"}
		switch {
		case errors.Is(last, workloadapi.ErrDenied):
			c.Remedy = fmt.Sprintf("register this workload: the agent sees user %d, process %d", os.Getuid(),
				os.Getpid())
		case otherAPI(last) && p.isSDS():
			c.Detail = "this is SDS, not the Workload API"
			c.Remedy = "an Envoy uses this address as it is; for other programs set the address of the Workload " +
				"API, which the operator of the agent knows"
			return c
		case otherAPI(last):
			c.Remedy = "the server at this address has another API: set the address of the Workload API"
		case last == nil:
			last = context.Cause(p.ctx)
			c.Remedy = "the agent is up and silent: see its log, and whether it reaches its server"
		}
		c.Detail = strings.TrimPrefix(last.Error(), "workloadapi: ")
		return c
	}
	p.svid = p.update.Identities[0].SVID
	var ids []string
	for _, one := range p.update.Identities {
		id := one.SVID.ID().String()
		if one.Hint != "" {
			id += fmt.Sprintf(" (hint %q)", one.Hint)
		}
		if other := one.SVID.Alternative(); other != nil {
			id += " (also with a key of " + keyName(other.Leaf()) + ")"
		}
		ids = append(ids, id)
	}
	return check{Result: ok, Detail: strings.Join(ids, ", ")}
}

// otherAPI reports whether a server lacks the Workload API, by the gRPC code or HTTP's 404.
func otherAPI(err error) bool {
	return errors.Is(err, errors.ErrUnsupported) || err != nil && strings.Contains(err.Error(),
		": unimplemented: ")
}

// isSDS reports whether a server that refuses the Workload API offers the Secret Discovery Service: it answers a
// stream with a secret, or stays silent while there is none. Any other server refuses the stream.
func (p *patient) isSDS() bool {
	if p.network != "unix" {
		return false
	}
	c := sds.UnixClient(p.target)
	defer c.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(p.ctx, sdsTime)
	defer cancel()
	for _, err := range sds.NewClient(c, "http://localhost").Watch(ctx, "default") {
		return err == nil
	}
	return p.ctx.Err() == nil
}

// bundle verifies the identity by its bundle, as a peer would.
func (p *patient) bundle() check {
	j := &judgement{bundles: p.update.Bundles, role: spiffe.AnyRole, algorithms: p.algorithms}
	for svid := p.svid; svid != nil; svid = svid.Alternative() {
		checks, err := j.chain(svid.Chain())
		if err != nil {
			return check{Result: failed, Detail: err.Error()}
		}
		for _, c := range checks {
			if c.Result == failed {
				c.Remedy = strings.Trim(c.Remedy+"; peers refuse this identity: see the agent and its server", "; ")
				return c
			}
		}
		j.algorithms = spiffe.AnyAlgorithm() // the alternative is for peers that allow it
	}
	var all []string
	for b := range p.update.Bundles.All() {
		all = append(all, fmt.Sprintf("%s (%d for X.509-SVIDs)", b.TrustDomain(), len(b.Contents().X509Authorities)))
	}
	c := check{Result: ok, Detail: "authorities of " + strings.Join(all, ", ")}
	if len(p.update.Skipped) > 0 {
		c.Result, c.Detail, c.Remedy = failed, c.Detail+"; not taken over: "+inner(
			p.update.Skipped[0]), "see the log of the agent"
	}
	return c
}

// expiry checks the remaining time.
func (p *patient) expiry() check {
	now, from, end := time.Now(), p.svid.Leaf().NotBefore, p.svid.NotAfter()
	life, left := end.Sub(from), end.Sub(now)
	c := check{Result: ok, Detail: fmt.Sprintf("%s of %s are left", span(left), span(life))}
	switch {
	case left <= 0:
		c.Result, c.Detail = failed, fmt.Sprintf("the identity has expired %s ago", span(-left))
		c.Remedy = "the agent does not get a new one: see whether it reaches its server, and compare the clocks"
	case now.Sub(from) > time.Duration(lateRenewal*float64(life)):
		c.Result = failed
		c.Remedy = "the agent ought to have renewed it: see whether it reaches its server"
	}
	return c
}

// clock compares this machine's clock with the issuer's, by a fresh token, or without one by the certificate.
func (p *patient) clock() check {
	now := time.Now()
	if early := p.svid.Leaf().NotBefore.Sub(now); early > 0 {
		return check{Result: failed, Detail: fmt.Sprintf("the identity becomes valid only in %s", span(early)),
			Remedy: "this clock is slow: set it by NTP"}
	}
	sure := check{Result: ok, Detail: fmt.Sprintf("the identity became valid %s ago; no token to compare with",
		span(now.Sub(p.svid.Leaf().NotBefore)))}
	if p.client == nil {
		return sure
	}
	tokens, err := p.client.FetchJWTSVIDs(p.ctx, p.svid.ID(), "svid-doctor-"+rand.Text()) // no cache has it
	if e, _ := errors.AsType[*workloadapi.Error](err); p.ctx.Err() != nil || e != nil && e.Code == unavailable {
		return check{Result: failed, Detail: "no token to compare with: " + strings.TrimPrefix(err.Error(),
			"workloadapi: "), Remedy: "the agent gets none, and in time no new identity: see whether it reaches its server"}
	}
	if err != nil { // the agent has no tokens, or none for such an audience
		return sure
	}
	_, claims := payload(tokens[0].Token())
	issued := claims.Issued.time()
	if issued.IsZero() {
		return check{Result: skipped, Detail: "the token of the agent does not say when it was issued"}
	}
	fast := now.Sub(issued).Truncate(time.Second)
	switch {
	case fast > clockSkew:
		return check{Result: failed, Detail: fmt.Sprintf("this clock is %s ahead of the issuer's", fast),
			Remedy: "set both by NTP: peers refuse what they take for expired"}
	case fast < -clockSkew:
		return check{Result: failed, Detail: fmt.Sprintf("this clock is %s behind the issuer's", -fast),
			Remedy: "set both by NTP: what is new is not valid here yet"}
	}
	return check{Result: ok, Detail: fmt.Sprintf("less than %s from the issuer's", fast.Abs()+time.Second)}
}
