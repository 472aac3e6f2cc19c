package main

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const athenzs, here = "Athenz", "this program" // where names come from

var variables = []variable{
	{"MODE", "init", "init gets the first identity and ends, refresh keeps it fresh", athenzs, oneOf("init", "refresh")},
	{"ENDPOINT", "unix:///identity/connect/agent.sock", "socket of the node's agent", athenzs, isUnix},
	{"ID_FILE", "/identity/id", "file with the handle of the pod's volume", here, nil},
	{"KEY_FILE", "/tls/service.key", "gets the key; in the folder of CERT_FILE and CA_CERT_FILE", athenzs, nil},
	{"CERT_FILE", "/tls/service.cert", "gets the certificate", athenzs, nil},
	{"CA_CERT_FILE", "/tls/cacert.pem", "gets the CA certificates", athenzs, nil},
	{"TOKEN_FILE", "/tokens/ntoken", "gets the service token", here, nil},
	{"REFRESH_INTERVAL", "1h", "time between refreshes, give or take a tenth", athenzs, isInterval},
	{"HEALTH_ADDR", "127.0.0.1:9080", "address of /ready, /live and /metrics, or off", here, isAddr},
	{"LOG_LEVEL", "info", "least level of what is logged: debug, info, warn, error", athenzs, oneOf("debug", "info", "warn", "error")},
}

func isUnix(s string) error {
	path, ok := strings.CutPrefix(s, "unix://")
	if !ok || !filepath.IsAbs(path) {
		return errors.New("set it to the address of a Unix socket, such as unix:///identity/connect/agent.sock")
	}
	return nil
}

func isInterval(s string) error {
	if d, err := time.ParseDuration(s); err != nil || d < time.Minute {
		return errors.New("set it to a minute or more, such as 1h")
	}
	return nil
}

const off = "off" // in the place of an address

func isAddr(s string) error {
	_, port, err := net.SplitHostPort(s)
	if n, bad := strconv.ParseUint(port, 10, 16); s != off && (err != nil || bad != nil || n > 65535) {
		return errors.New("set it to HOST:PORT with a number for the port, such as 127.0.0.1:9080, or to off")
	}
	return nil
}

// oneOf returns a check for choices.
func oneOf(choices ...string) func(string) error {
	return func(s string) error {
		if !slices.Contains(choices, s) {
			return fmt.Errorf("set it to one of %s", strings.Join(choices, ", "))
		}
		return nil
	}
}
