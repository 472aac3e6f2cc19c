package linkerdproxy

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

// Names of variables. Pairs are the first design's name and the current one.
const (
	prefix = "LINKERD2_PROXY_IDENTITY_"

	envBlob, envAnchors         = prefix + "TRUST_ANCHORS_BLOB", prefix + "TRUST_ANCHORS"
	envStoreDir, envDir         = prefix + "STORE_DIR", prefix + "DIR"
	envTokenFile                = prefix + "TOKEN_FILE"
	envLocal, envLocalName      = "LINKERD2_PROXY_LOCAL_IDENTITY_NAME", prefix + "LOCAL_NAME"
	envLocalShort               = "LINKERD2_PROXY_LOCAL_IDENTITY"
	envServerID, envServerName  = prefix + "SERVER_ID", prefix + "SERVER_NAME"
	envAddr, envSvcAddr         = prefix + "ADDR", prefix + "SVC_ADDR"
	envIdentity, envSvcName     = prefix + "IDENTITY", prefix + "SVC_NAME"
	envDstAddr, envDstSvcAddr   = "LINKERD2_PROXY_DESTINATION_ADDR", "LINKERD2_PROXY_DESTINATION_SVC_ADDR"
	envDstIdentity              = "LINKERD2_PROXY_DESTINATION_IDENTITY"
	envDstSvcName               = "LINKERD2_PROXY_DESTINATION_SVC_NAME"
	envPolicyAddr, envPolicy    = "LINKERD2_PROXY_POLICY_SVC_ADDR", "LINKERD2_PROXY_POLICY_SVC_NAME"
	envKeyFile, envCSRFile      = prefix + "KEY_FILE", prefix + "CSR_FILE"
	envAnchorsFile              = prefix + "TRUST_ANCHORS_FILE"
	envMinRefresh               = prefix + "MIN_REFRESH"
	envMaxRefresh               = prefix + "MAX_REFRESH"
	envRequireTLS               = "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS"
	envRequireIdentity          = "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_IDENTITY"
	firstDesign, today, removed = "first design", "today", "removed by the first design"
)

// variables are the variables that a proxy reads.
var variables = settings.Table{
	Prefixes: []string{prefix, "LINKERD2_PROXY_LOCAL_IDENTITY"},
	Variables: []settings.Variable{
		{Name: envLocal, Check: checkName, Doc: "identity of the workload; a proxy without one, under any of its " +
			"names, has no identity", Origin: firstDesign},
		{Name: envLocalShort, Check: checkName, Doc: "another name for " + envLocal, Origin: firstDesign},
		{Name: envBlob, Check: checkBlob, Doc: "trust anchors: PEM in base64", Origin: firstDesign},
		{Name: "LINKERD_PROXY_TRUST_ANCHORS_BLOB", Check: instead(envBlob), Doc: "refused: a slip for " + envBlob,
			Origin: firstDesign},
		{Name: envTokenFile, Form: settings.Path,
			Doc: "token of the service account, or the directory with the file token; required", Origin: firstDesign +
				", " + today},
		{Name: envStoreDir, Form: settings.Path,
			Doc: "directory in memory that gets key.der, csr.p8 and trust-anchors.pem", Origin: firstDesign},
		{Name: envAddr, Doc: "certifier: host or host:port, port 8080 if there is none", Origin: firstDesign},
		{Name: envIdentity, Doc: "name of the certifier; not to be set if it is on this host", Origin: firstDesign},
		{Name: envDstAddr, Doc: "destination service, which says where requests without a route go, port 8086 if " +
			"there is none", Origin: firstDesign},
		{Name: envDstIdentity, Doc: "name of the destination service; not to be set if it is on this host",
			Origin: firstDesign},
		{Name: envKeyFile, Form: settings.Path,
			Doc: "key that another process has made, in the place of a store; with the next two", Origin: firstDesign},
		{Name: envCSRFile, Form: settings.Path, Doc: "its signing request", Origin: firstDesign},
		{Name: envAnchorsFile, Form: settings.Path, Doc: "trust anchors in PEM", Origin: firstDesign},
		{Name: "LINKERD2_PROXY_POD_NAMESPACE", Unused: true, Doc: "the name of the workload has it", Origin: removed},
		{Name: "LINKERD2_PROXY_TLS_*", Unused: true, Doc: "of the TLS before identities", Origin: removed},

		{Name: envLocalName, Check: checkName, Doc: "identity of the workload", Origin: today},
		{Name: envServerID, Doc: "identity of the workload, where " + envLocalName + " is not set", Origin: today},
		{Name: envServerName, Doc: "its server name, which is the same", Origin: today},
		{Name: envAnchors, Check: checkAnchors, Doc: "trust anchors in PEM", Origin: today},
		{Name: envDir, Form: settings.Path, Doc: "directory in memory that gets key.p8 and csr.der", Origin: today},
		{Name: envSvcAddr, Doc: "certifier: host:port", Origin: today},
		{Name: envSvcName, Doc: "name of the certifier; ignored if it is on this host", Origin: today},
		{
			Name: envMinRefresh, Default: "10s", Check: checkMinRefresh, Origin: today,
			Doc: "shortest time between requests to the certifier: digits and ms, s, m, h or d, at least 100ms; 0 " +
				"means 1s",
		},
		{Name: envMaxRefresh, Default: "24h", Check: checkPeriod, Doc: "longest time", Origin: today},
		{Name: envDstSvcAddr, Doc: "destination service: host:port", Origin: today},
		{Name: envDstSvcName, Doc: "its name; ignored if it is on this host", Origin: today},
		{Name: envPolicyAddr, Doc: "policy service, for the program's policies", Origin: today},
		{Name: envPolicy, Doc: "its name; ignored if it is on this host", Origin: today},
		{Name: envRequireTLS, Form: settings.List,
			Doc: "ports and ranges of ports of the application that need TLS, as in 8080,9000-9010", Origin: today},
		{Name: envRequireIdentity, Form: settings.List, Doc: "those that need a client with an identity",
			Origin: today},
		{Name: prefix + "DISABLED", Check: refused(
			"an identity cannot be disabled so; unset it: a proxy that is given no name has none"), Doc: "refused, " +
			"whatever its value: without an identity is a proxy that is given no name", Origin: today},
		{Name: prefix + "SPIRE_WORKLOAD_API_ADDRESS", Check: noSPIRE,
			Doc: "refused: an identity from SPIRE is a SPIFFE ID, which package workloadapi obtains", Origin: today},
		{Name: prefix + "SPIRE_SOCKET", Check: noSPIRE, Doc: "refused likewise", Origin: today},
		{Name: "_pod_*", Unused: true, Doc: "parts of the name of the workload, for the injector's substitutions",
			Origin: today},
		{Name: "_l5d_*", Unused: true, Doc: "likewise, of the mesh", Origin: today},
	},
}

func refused(why string) func(string) error { return func(string) error { return errors.New(why) } }

func instead(name string) func(string) error { return refused("set " + name + " instead") }

var noSPIRE = refused("this proxy takes no identity from SPIRE; unset it, or use a program that obtains SPIFFE IDs")

func checkName(value string) error {
	_, err := meshOf(value)
	return err
}

func checkBlob(value string) error {
	data, err := base64.StdEncoding.DecodeString(value)
	if err != nil {
		return errors.New("the trust anchors are not in base64; set it to the output of base64 for the PEM file")
	}
	return checkAnchors(string(data))
}

func checkAnchors(value string) error {
	if _, err := parseAnchors([]byte(value)); err != nil {
		return fmt.Errorf("the trust anchors: %w", err)
	}
	return nil
}

// parsePeriod parses a duration like Linkerd's proxies: digits and a unit, or a bare 0.
func parsePeriod(value string) (time.Duration, error) {
	digits := strings.TrimRight(value, "abcdefghijklmnopqrstuvwxyz")
	unit, ok := map[string]time.Duration{"ms": time.Millisecond, "s": time.Second, "m": time.Minute, "h": time.Hour,
		"d": 24 * time.Hour}[value[len(digits):]]
	if value == "0" {
		unit, ok = time.Nanosecond, true
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || !ok || n > uint64(math.MaxInt64/unit) {
		return 0, errors.New("set it to digits and one of ms, s, m, h and d, such as 10s")
	}
	return time.Duration(n) * unit, nil // bounded above
}

func checkPeriod(value string) error {
	_, err := parsePeriod(value)
	return err
}

func checkMinRefresh(value string) error {
	d, err := parsePeriod(value)
	if err == nil && d > 0 && d < leastRefresh {
		err = fmt.Errorf("the certifier would be asked every %v while there is no certificate; set it to %v or more",
			d, leastRefresh)
	}
	return err
}

// Environment is the injector's configuration of a proxy. The Name of the Config is empty for a proxy without an
// identity.
type Environment struct {
	Config

	// Destination and Policy are other services of the control plane. Their Addr is empty if they are not set.
	Destination, Policy Service

	// RequireTLS lists the application's ports that require mutual TLS, and RequireIdentity those that also require a
	// client identity, sorted.
	RequireTLS, RequireIdentity []int
}

// FromEnviron reads an environment in the form of os.Environ. It accepts the names of the protocol's first design and
// the current ones, and refuses contradictory values. log gets names that are probably misspelled (Warn); it becomes
// the Logger of the Config, and may be nil. The error has a line for each bad variable, with the remedy. It reads no
// file.
//
// If no variable names the workload, as in a pod whose identity is disabled, the Config has no Name: the proxy has no
// identity, and must not call [New]. Variables that only a proxy with an identity needs must then be unset.
//
// [WriteEnviron] lists the variables.
func FromEnviron(environ []string, log *slog.Logger) (*Environment, error) {
	values, err := variables.Read(environ)
	if err != nil {
		return nil, fmt.Errorf("linkerdproxy: %w", err)
	}
	r := &reader{Values: values}
	e := r.environment()
	if r.bad != nil {
		return nil, fmt.Errorf("linkerdproxy: %w", errors.Join(r.bad...))
	}
	e.Logger = log
	if unknown := values.Unknown(); log != nil && len(unknown) > 0 {
		log.Warn("linkerdproxy: environment variables of a name that is not known, perhaps a misspelled one", "names",
			strings.Join(unknown, " "))
	}
	return e, nil
}

// WriteEnviron writes the variables that [FromEnviron] reads, for a program's -h or, as a Markdown table, for its
// documentation.
func WriteEnviron(w io.Writer, markdown bool) error { return variables.Write(w, markdown) }

// reader reads well-formed values, and collects the errors about their combination.
type reader struct {
	*settings.Values
	bad []error
}

func (r *reader) reject(name, format string, args ...any) {
	r.bad = append(r.bad, r.Reject(name, fmt.Errorf(format, args...)))
}

// one returns the value of the first set name, and that name. If two are set, they must have the same value.
func (r *reader) one(names ...string) (value, name string) {
	name = names[0]
	for _, n := range names {
		switch v := r.Text(n); {
		case v == "":
		case value == "":
			value, name = v, n
		case v != value:
			r.reject(n, "%s has another value; set one of them", name)
		}
	}
	return value, name
}

// required returns the value of a variable that must be set.
func (r *reader) required(names ...string) string {
	value, name := r.one(names...)
	if value == "" {
		r.reject(name, "it is not set, and is required")
	}
	return value
}

func (r *reader) environment() *Environment {
	e := new(Environment)
	if !slices.ContainsFunc([]string{envLocal, envLocalShort, envLocalName, envServerID, envServerName}, r.Set) {
		r.without(e)
		return e
	}
	r.name(&e.Config)
	mesh, _ := meshOf(e.Name)
	e.TokenFile = r.required(envTokenFile)
	e.Certifier = r.service(mesh, "8080", true, envAddr, envIdentity, envSvcAddr, envSvcName)
	if want, err := mesh.Certifier(); err == nil && e.Certifier.Name != "" && e.Certifier.Name != want {
		_, name := r.one(envIdentity, envSvcName)
		r.reject(name, "want %q, the certifier of the mesh that %q belongs to", want, e.Name)
	}
	e.Destination = r.service(mesh, "8086", false, envDstAddr, envDstIdentity, envDstSvcAddr, envDstSvcName)
	e.Policy = r.service(mesh, "8090", false, "", "", envPolicyAddr, envPolicy)
	r.store(&e.Config)
	e.MinRefresh, _ = parsePeriod(r.Text(envMinRefresh))
	e.MaxRefresh, _ = parsePeriod(r.Text(envMaxRefresh))
	e.MinRefresh = cmp.Or(e.MinRefresh, noMinRefresh) // in Config, 0 means the default
	if e.MaxRefresh < e.MinRefresh {
		r.reject(envMaxRefresh, "it is less than %s, %v", envMinRefresh, e.MinRefresh)
	}
	e.RequireTLS, e.RequireIdentity = r.ports(envRequireTLS), r.ports(envRequireIdentity)
	return e
}

// without reads the environment of a proxy without an identity. Variables that need an identity must be unset.
func (r *reader) without(e *Environment) {
	half := slices.DeleteFunc([]string{
		envBlob, envAnchors, envTokenFile, envStoreDir, envDir, envAddr, envSvcAddr, envIdentity, envSvcName,
		envDstIdentity, envDstSvcName,
		envPolicy, envKeyFile, envCSRFile, envAnchorsFile, envRequireTLS, envRequireIdentity,
	}, func(name string) bool { return !r.Set(name) })
	if len(half) > 0 {
		r.reject(envLocal, "it is not set, and is required with %s; a proxy without an identity has none of them",
			strings.Join(half, ", "))
	}
	e.Destination.Addr, _ = r.one(envDstAddr, envDstSvcAddr)
	e.Policy.Addr = r.Text(envPolicyAddr)
}

func (r *reader) name(c *Config) {
	id, serverName := r.Text(envServerID), r.Text(envServerName)
	if name, _ := r.one(envLocal, envLocalShort, envLocalName); name != "" || id == "" && serverName == "" {
		c.Name = r.required(envLocal, envLocalShort, envLocalName)
		return
	}
	switch {
	case id != serverName:
		r.reject(envServerID, "it is not %s, %q; set both to the DNS name of the workload", envServerName, serverName)
	default:
		if err := checkName(id); err != nil {
			r.reject(envServerID, "%w", err)
		}
	}
	c.Name = id
}

// service reads a service by its first-design and current names.
func (r *reader) service(mesh linkerdname.Mesh, port string, required bool, addrName, identityName, svcAddrName,
	svcName string) (s Service) {
	addrs, names := []string{svcAddrName}, []string{svcName}
	if addrName != "" {
		addrs, names = []string{addrName, svcAddrName}, []string{identityName, svcName}
	}
	s.Addr, addrName = r.one(addrs...)
	s.Name, identityName = r.one(names...)
	switch {
	case s.Addr == "" && required:
		r.reject(addrName, "it is not set, and is required")
		return s
	case s.Addr == "" && s.Name != "":
		r.reject(addrName, "it is not set, and %s is", identityName)
		return s
	case s.Addr == "":
		return s
	}
	if at, err := (Service{Addr: s.Addr}).parse(port, true); err == nil && at.loopback && identityName == svcName {
		s.Name = ""
	}
	if _, err := s.parse(port, true); err != nil {
		r.reject(addrName, "%w", err)
	}
	if s.Name != "" && mesh.TrustDomain != "" {
		if _, _, err := mesh.Parse(s.Name); err != nil {
			r.reject(identityName, "%w", err)
		}
	}
	return s
}

// store reads the place of the key, and the trust anchors.
func (r *reader) store(c *Config) {
	files := []string{envKeyFile, envCSRFile, envAnchorsFile}
	if slices.ContainsFunc(files, r.Set) { // another process has read the rest
		for _, name := range files {
			r.required(name)
		}
		c.KeyFile, c.CSRFile, c.AnchorsFile = r.Text(envKeyFile), r.Text(envCSRFile), r.Text(envAnchorsFile)
		return
	}
	c.Dir = r.required(envStoreDir, envDir)
	c.CurrentNames = !r.Set(envStoreDir)
	switch blob, text := r.Text(envBlob), r.Text(envAnchors); {
	case blob != "" && text != "":
		r.reject(envAnchors, "%s is set, too; set one of them", envBlob)
	case blob != "":
		c.Anchors, _ = base64.StdEncoding.DecodeString(blob) // already checked
	case text != "":
		c.Anchors = []byte(text)
	default:
		r.reject(envBlob, "it is not set, and is required")
	}
}

// ports parses a list of ports and ranges.
func (r *reader) ports(name string) (ports []int) {
	var listed [1 << 16]bool // a list may repeat ports
	for _, text := range r.List(name) {
		low, high, ranged := strings.Cut(text, "-")
		if !ranged {
			high = low
		}
		a, err1 := strconv.ParseUint(low, 10, 16)
		b, err2 := strconv.ParseUint(high, 10, 16)
		if err1 != nil || err2 != nil || a == 0 || b < a {
			r.reject(name, "%.100q is not a port or a range of ports", text)
			return nil
		}
		for p := a; p <= b; p++ {
			listed[p] = true
		}
	}
	for p, ok := range listed {
		if ok {
			ports = append(ports, p)
		}
	}
	return ports
}

// tokenFile returns the token file of a setting: the first design names the directory.
func tokenFile(name string) string {
	if info, err := os.Stat(name); err == nil && info.IsDir() {
		return filepath.Join(name, "token")
	}
	return name
}
