package istioagent

import (
	"fmt"
	"path"
)

const mountedRoots = "./etc/certs/root-cert.pem"

// caRootsFile returns the file with the roots that vouch for Istio's CA, as Istio's agent finds it from its environment:
//
//  1. CA_ROOT_CA=SYSTEM: the roots of the host, for which file is empty;
//  2. CA_ROOT_CA: that file;
//  3. PILOT_CERT_PROVIDER=custom: ./etc/certs/root-cert.pem;
//  4. PROV_CERT: root-cert.pem in that folder, whether it exists or not;
//  5. PILOT_CERT_PROVIDER=none: an error;
//  6. otherwise ./var/run/secrets/istio/root-cert.pem.
//
// It looks at nothing but what getenv and exists return: exists reports whether there is a regular file with the name. A
// file of the rules 2, 3 and 6 that does not exist is an error, which names the variable to set.
func caRootsFile(getenv func(string) string, exists func(file string) bool) (file string, err error) {
	if getenv("CA_ROOT_CA") == "" && getenv("PILOT_CERT_PROVIDER") == "custom" {
		return existing(mountedRoots, "PILOT_CERT_PROVIDER is custom", "CA_ROOT_CA", exists)
	}
	return rootsFile("CA_ROOT_CA", getenv, exists)
}

// xdsRootsFile returns the file with the roots that vouch for the server of the agent's xDS connection:
//
//  1. XDS_ROOT_CA=SYSTEM: the roots of the host, for which file is empty;
//  2. XDS_ROOT_CA: that file;
//  3. ./etc/certs/root-cert.pem, if it exists;
//  4. PROV_CERT: root-cert.pem in that folder, whether it exists or not;
//  5. FILE_MOUNTED_CERTS=true: the file in ISTIO_META_TLS_CLIENT_ROOT_CERT, which has to be set;
//  6. PILOT_CERT_PROVIDER=none: an error;
//  7. otherwise ./var/run/secrets/istio/root-cert.pem.
//
// A file of the rules 2 and 7 that does not exist is an error. The rest is as with caRootsFile.
func xdsRootsFile(getenv func(string) string, exists func(file string) bool) (file string, err error) {
	if getenv("XDS_ROOT_CA") == "" {
		if exists(mountedRoots) {
			return mountedRoots, nil
		}
		if getenv("PROV_CERT") == "" && getenv("FILE_MOUNTED_CERTS") == "true" {
			if file = getenv("ISTIO_META_TLS_CLIENT_ROOT_CERT"); file == "" {
				return "", fmt.Errorf("roots: FILE_MOUNTED_CERTS is true: set ISTIO_META_TLS_CLIENT_ROOT_CERT to the file with the roots")
			}
			return file, nil
		}
	}
	return rootsFile("XDS_ROOT_CA", getenv, exists)
}

// rootsFile follows the rules that both connections have.
func rootsFile(variable string, getenv func(string) string, exists func(file string) bool) (string, error) {
	switch file := getenv(variable); file {
	case "SYSTEM":
		return "", nil
	case "":
	default:
		return existing(file, variable+" names it", variable, exists)
	}
	if dir := getenv("PROV_CERT"); dir != "" {
		return path.Join(dir, "root-cert.pem"), nil
	}
	if getenv("PILOT_CERT_PROVIDER") == "none" {
		return "", fmt.Errorf("roots: PILOT_CERT_PROVIDER is none: set %s to the file with the roots, or to SYSTEM for those of the host", variable)
	}
	return existing(podRoots, "it is the default", variable, exists)
}

func existing(file, why, variable string, exists func(file string) bool) (string, error) {
	if !exists(file) {
		return "", fmt.Errorf("roots: there is no regular file %s, and %s: set %s to the file with the roots, or to SYSTEM for those of the host", file, why, variable)
	}
	return file, nil
}
