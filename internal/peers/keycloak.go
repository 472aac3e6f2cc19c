package peers

import (
	"archive/zip"
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// KeycloakVersion is the version of Keycloak, which comes from Maven and needs Java 17 or later.
const KeycloakVersion = "26.4.0"

const keycloak = "keycloak" // as a peer

// keycloakDist is Keycloak, built with what the tests turn on.
func keycloakDist() *peer {
	return &peer{keycloak + "-" + KeycloakVersion + "/tls", func(path string) error {
		scratch := path + ".zip"
		defer os.RemoveAll(scratch)
		if err := run(exec.Command("mvn", "-q", "-B", "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy",
			"-Dartifact=org.keycloak:keycloak-quarkus-dist:"+KeycloakVersion+":zip", "-DoutputDirectory="+scratch)); err != nil {
			return err
		}
		archive := filepath.Join(scratch, "keycloak-quarkus-dist-"+KeycloakVersion+".zip")
		if err := unzip(archive, "keycloak-"+KeycloakVersion, path); err != nil {
			return err
		}
		return run(exec.Command(filepath.Join(path, "bin", "kc.sh"), "build", "--db=dev-mem",
			"--features=spiffe,client-auth-federated", "--health-enabled=false", "--https-client-auth=request"))
	}}
}

// unzip writes a directory of an archive to another place.
func unzip(archive, folder, to string) error {
	z, err := zip.OpenReader(archive)
	if err != nil {
		return err
	}
	defer z.Close()
	for _, f := range z.File {
		name, err := filepath.Rel(folder, filepath.FromSlash(f.Name))
		if err != nil || !filepath.IsLocal(name) {
			return fmt.Errorf("the archive has the file %q", f.Name)
		}
		if err := unzipFile(f, filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

func unzipFile(f *zip.File, path string) error {
	if f.FileInfo().IsDir() {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	in, err := f.Open()
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, f.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err = io.Copy(out, in); err != nil {
		_ = out.Close()
		return err
	}
	return out.Close()
}

// A Keycloak is one on loopback, with and without TLS, that keeps everything in memory.
type Keycloak struct {
	URL   string
	TLS   string         // its URL with TLS, where it asks for certificates of clients
	Roots *x509.CertPool // of that

	password, token string // of the administrator
}

// NewKeycloak starts a Keycloak that ends with the test. With TLS it takes clients of the authorities in PEM.
func NewKeycloak(t testing.TB, clients []byte) *Keycloak {
	t.Helper()
	if os.Getenv(modeEnv) != "require" {
		if _, err := exec.LookPath("java"); err != nil {
			t.Skip("peers: there is no Java, which Keycloak runs on")
		}
	}
	path, ports, dir := Program(t, keycloak), FreePorts(t, 2), t.TempDir()
	k := &Keycloak{URL: listenURL(ports[0]), TLS: "https://" + loopback(ports[1]), Roots: x509.NewCertPool(),
		password: "of-the-admin"}
	web := httptest.NewUnstartedServer(nil)
	web.StartTLS() // for its certificate, which is for loopback
	web.Close()
	k.Roots.AddCert(web.Certificate())
	key, err := x509.MarshalPKCS8PrivateKey(web.TLS.Certificates[0].PrivateKey)
	require.NoError(t, err)
	file := func(name string) string { return filepath.Join(dir, name) }
	for name, data := range map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw}),
		"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), "clients.pem": clients,
	} {
		require.NoError(t, os.WriteFile(file(name), data, 0o600))
	}
	// As kc.sh does, which would leave it behind when it is killed.
	cmd := exec.Command("java", "-Xmx512m", "-Dkc.home.dir="+path,
		"-Djboss.server.config.dir="+filepath.Join(path, "conf"),
		"-Djava.util.logging.manager=org.jboss.logmanager.LogManager",
		"-Djava.util.concurrent.ForkJoinPool.common.threadFactory=io.quarkus.bootstrap.forkjoin.QuarkusForkJoinWorkerThreadFactory",
		"--add-opens=java.base/java.util=ALL-UNNAMED", "--add-opens=java.base/java.util.concurrent=ALL-UNNAMED",
		"--add-opens=java.base/java.security=ALL-UNNAMED",
		"-cp", filepath.Join(path, "lib", "quarkus-run.jar"), "io.quarkus.bootstrap.runner.QuarkusEntryPoint", "start", "--optimized",
		"--cache=local", "--http-enabled=true",
		"--hostname-strict=false", "--http-host=127.0.0.1", fmt.Sprint("--http-port=", ports[0]),
		"--https-certificate-file="+file("tls.crt"), "--https-certificate-key-file="+file("tls.key"),
		fmt.Sprint("--https-port=", ports[1]), "--https-trust-store-file="+file("clients.pem"))
	cmd.Env = append(os.Environ(), "KC_BOOTSTRAP_ADMIN_USERNAME=admin", "KC_BOOTSTRAP_ADMIN_PASSWORD="+k.password)
	Start(t, file("log"), cmd).Ready(t, func() error {
		status, answer, err := k.TokenRequest("master", url.Values{
			"grant_type": {"password"}, "client_id": {"admin-cli"}, "username": {"admin"}, "password": {k.password},
		})
		var got struct {
			Token string `json:"access_token"`
		}
		if err == nil && status == http.StatusOK {
			err = json.Unmarshal(answer, &got)
		}
		if k.token = got.Token; err == nil && k.token == "" {
			err = fmt.Errorf("%d: %s", status, answer)
		}
		return err
	})
	return k
}

// Do has the administrator create something.
func (k *Keycloak) Do(t testing.TB, path string, body any) {
	t.Helper()
	data, err := json.Marshal(body)
	require.NoError(t, err)
	r, err := http.NewRequest(http.MethodPost, k.URL+"/admin/realms"+path, bytes.NewReader(data))
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer "+k.token)
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer resp.Body.Close() // all of it is read
	answer, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, resp.StatusCode, "%s: %s", path, answer)
}

// Issuer returns a realm as it names itself, and TokenURL its token endpoint.
func (k *Keycloak) Issuer(realm string) string { return k.URL + "/realms/" + realm }

// TokenURL returns the token endpoint of a realm.
func (k *Keycloak) TokenURL(realm string) string {
	return k.Issuer(realm) + "/protocol/openid-connect/token"
}

// TokenRequest sends a form to the token endpoint of a realm.
func (k *Keycloak) TokenRequest(realm string, form url.Values) (int, []byte, error) {
	resp, err := http.PostForm(k.TokenURL(realm), form)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close() // all of it is read
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}
