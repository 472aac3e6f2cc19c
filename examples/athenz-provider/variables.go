package main

import (
	"errors"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/settings"
)

const athenzs, cluster, here = "Athenz", "cluster configuration", "this program" // origins of names

var variables = []settings.Variable{
	program.Provider,
	program.Suffix,
	program.AdminDomain,
	program.SystemNamespaces,
	program.TrustDomain,
	program.Var("PROVIDER_ADDR", ":4443", "address of the callback that ZTS calls, or off", here, program.IsAddr),
	program.Var("SIGNING_ADDR", ":4444", "address of the signing service that the nodes call, or off", here,
		program.IsAddr),
	program.Var("CERT_FILE", "", "certificate with its intermediates, in PEM, whose common name is "+
		"PROVIDER_SERVICE; required without SERVICE_KEY_DIR", here, nil),
	program.Var("KEY_FILE", "", "its key, in PEM; required without SERVICE_KEY_DIR", here, nil),
	program.Var(
		"SERVICE_KEY_DIR", "", "directory with service.key, the key that PROVIDER_SERVICE has registered at Athenz, "+
			"in PEM, and service.version, its ID, "+
			"such as /var/tls/athenz/private: the certificate is obtained from ZTS with it, and renewed, in the "+
			"place of CERT_FILE and KEY_FILE", athenzs, nil,
	),
	program.Var("ZTS_ENDPOINT", "", "URL of ZTS, without a path; required with SERVICE_KEY_DIR", cluster,
		program.IsAPI),
	program.Var("SERVER_CA_CERT", "", "file of the CA certificates of ZTS itself, in PEM; required with "+
		"PROVIDER_ADDR or SERVICE_KEY_DIR", athenzs, nil),
	program.Var("SERVICE_CA_CERT", "", "file of the CA certificates of what ZTS issues, and of the nodes, in PEM; "+
		"required", cluster, nil),
	program.Var("ZTS_NAME", "", "common name of ZTS, such as zts.example.cloud; required with PROVIDER_ADDR", here,
		program.AreCommonNames),
	program.List(program.Var(
		"NODE_NAMES", "", "common names of the nodes that may have documents signed, such as k8s.admin.k8s-node, "+
			"with commas between; "+
			"required with SIGNING_ADDR", here, program.AreCommonNames,
	)),
	program.Var("KUBERNETES_API", "", "URL of the API server; not set: that of the cluster that the program runs in",
		here, program.IsAPI),
	program.Var(
		"USED_DOCUMENTS", "", "ConfigMap, as NAMESPACE/NAME, in which the replicas of the provider note which "+
			"documents were used; "+
			"not set: each replica remembers that by itself", here, program.IsObject,
	),
	program.Var("PRIVATE_KEY_DIR", "/var/keys/private",
		"directory of the private keys, in PEM, one file for each version: SECRET_NAME.v1 and so on", here, nil),
	program.Var("PUBLIC_KEY_DIR", "/var/keys/public", "directory of the public keys, likewise", here, nil),
	program.Var("SECRET_NAME", "athenz-init-secret", "name of the key", here, program.IsDNSName),
	program.Var("TOKEN_EXPIRY", "5m", "lifetime of a document, at most 15m", athenzs, isExpiry),
	program.HealthAddr,
	program.LogLevel,
}

func isExpiry(s string) error {
	if d, err := time.ParseDuration(s); err != nil || d < time.Second || d > 15*time.Minute {
		return errors.New("set it to a time from 1s to 15m")
	}
	return nil
}
