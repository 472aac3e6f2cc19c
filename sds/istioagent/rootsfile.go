package istioagent

import (
	"fmt"
	"path"
)

const etcRoots = mounted + "/" + rootsName

// caRootsFile returns the file with the roots that vouch for the CA, or "" for the roots of the host. As in Istio's
// agent, the first rule that applies decides:
//
//  1. CA_ROOT_CA=SYSTEM: the roots of the host;
//  2. CA_ROOT_CA: that file;
//  3. PILOT_CERT_PROVIDER=custom: ./etc/certs/root-cert.pem;
//  4. PROV_CERT: root-cert.pem in that directory, whether it exists or not;
//  5. PILOT_CERT_PROVIDER=none: an error;
//  6. otherwise ./var/run/secrets/istio/root-cert.pem.
//
// If the file of rule 2, 3 or 6 does not exist, the error names the variable to set.
func (c *Config) caRootsFile() (string, error) {
	if c.text("CA_ROOT_CA") == "" && c.text("PILOT_CERT_PROVIDER") == "custom" {
		return c.existing(etcRoots, "PILOT_CERT_PROVIDER is custom", "CA_ROOT_CA")
	}
	return c.rootsFile("CA_ROOT_CA", c.text("CA_ROOT_CA"))
}

// xdsRootsFile is caRootsFile for the control plane:
//
//  1. XDS_ROOT_CA=SYSTEM: the roots of the host;
//  2. XDS_ROOT_CA: that file;
//  3. ./etc/certs/root-cert.pem, if it exists;
//  4. PROV_CERT: root-cert.pem in that directory, whether it exists or not;
//  5. FILE_MOUNTED_CERTS=true: the mounted roots;
//  6. PILOT_CERT_PROVIDER=none: an error;
//  7. otherwise ./var/run/secrets/istio/root-cert.pem.
//
// It is an error if the file of rule 2 or 7 does not exist.
func (c *Config) xdsRootsFile() (string, error) {
	switch {
	case c.text("XDS_ROOT_CA") != "":
	case c.isFile(etcRoots):
		return etcRoots, nil
	case c.text("PROV_CERT") == "" && c.v.Bool("FILE_MOUNTED_CERTS"):
		return c.mountedRoots, nil
	}
	return c.rootsFile("XDS_ROOT_CA", c.text("XDS_ROOT_CA"))
}

// rootsFile applies the rules common to both connections.
func (c *Config) rootsFile(variable, file string) (string, error) {
	switch {
	case file == "SYSTEM":
		return "", nil
	case file != "":
		return c.existing(file, variable+" names it", variable)
	case c.text("PROV_CERT") != "":
		return path.Join(c.text("PROV_CERT"), rootsName), nil
	case c.text("PILOT_CERT_PROVIDER") == "none":
		return "", fmt.Errorf("roots: PILOT_CERT_PROVIDER is none: set %s to the file with the roots, "+
			"or to SYSTEM for those of the host", variable)
	}
	return c.existing(podRoots, "it is the default", variable)
}

func (c *Config) existing(file, why, variable string) (string, error) {
	if !c.isFile(file) {
		return "", fmt.Errorf("roots: there is no regular file %s, and %s: set %s to the file with the roots, "+
			"or to SYSTEM for those of the host", file, why, variable)
	}
	return file, nil
}
