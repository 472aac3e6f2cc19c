package nodeagent

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	dataFile    = "data.json"
	contextFile = "context.json"
	secretFile  = "secret" // of the node; handles are made with it
	secretSize  = 32       // bytes
	maxVolume   = 64 << 10 // bytes per file
)

// Volumes is a node's directory, such as /var/athenz/volumes, in which the agent and the volume driver keep their
// records. Both run as the same user, or as root: other users can read nothing in it. It is safe for concurrent use,
// also by several processes.
// concurrent use, by several processes, too.
// The first [Volumes.Add] creates the node's secret, in the file secret. Without it the handles of existing volumes
// can no longer be found by their paths.
// are there cannot be found by their paths any more.
type Volumes string

type volumeData struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"` // of the pod, if the path contains it
}

// podIn returns the pod's UID in a kubelet path, or "".
func podIn(path string) string {
	_, rest, _ := strings.Cut(path, "/pods/")
	uid, _, _ := strings.Cut(rest, "/")
	if len(uid) != 36 || strings.Trim(uid, "-0123456789abcdef") != "" {
		return ""
	}
	return uid
}

// Add records that a volume was mounted for a pod, and returns the volume's handle. Volume drivers call it. The pod
// proves itself to the agent with the handle, which cannot be guessed without the node's secret. If the path contains
// the pod's UID, as the kubelet's paths do, the handle gives nothing to a later pod with the same name.
//
// The driver mounts the subdirectory mount of the handle's directory at the path: the pod finds the handle there, in
// the file id. Add forgets an earlier volume at the path, so that the pod can take its first identity again.
func (v Volumes) Add(mountPath, namespace, pod string) (handle string, err error) {
	if v == "" {
		return "", errors.New("nodeagent: add volume: there is no directory for it")
	}
	if !filepath.IsAbs(mountPath) || !kube.ValidLabel(namespace) || !kube.ValidName(pod) {
		return "", fmt.Errorf("nodeagent: add volume: the path %.200q is not absolute, or %.100q and %.100q are "+
			"not the names of a namespace and a pod", mountPath, namespace, pod)
	}
	text, err := json.Marshal(volumeData{namespace, pod, podIn(mountPath)})
	if err == nil {
		handle, err = v.handle(mountPath)
	}
	if err == nil {
		err = v.use(handle, func(f *store.Folder) error {
			return errors.Join(f.Remove(contextFile), f.Write(dataFile, text))
		})
	}
	if err == nil {
		err = v.writeID(handle)
	}
	if err != nil {
		return "", fmt.Errorf("nodeagent: add volume: %w", err)
	}
	return handle, nil
}

// handle returns the handle of the volume at a path. It creates the node's secret if there is none.
func (v Volumes) handle(mountPath string) (handle string, err error) {
	err = store.New(string(v), "agent", func(error) {}).Use(func(f *store.Folder) error {
		secret, err := f.Read(secretFile, secretSize, true)
		if errors.Is(err, fs.ErrNotExist) {
			secret = make([]byte, secretSize)
			_, _ = rand.Read(secret) // never fails
			err = f.Write(secretFile, secret)
		}
		if err == nil && len(secret) != secretSize {
			err = fmt.Errorf("%s: the secret of the node has %d bytes, not %d", filepath.Join(string(v), secretFile),
				len(secret), secretSize)
		}
		handle = agentapi.Handle(secret, mountPath)
		return err
	})
	return handle, err
}

// writeID writes the handle's file, which each user in the pod can read.
func (v Volumes) writeID(handle string) error {
	root, err := private.OpenDir(filepath.Join(string(v), handle), private.Options{})
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Mkdir("mount", 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// Only this user may enter the directories above; the pod sees nothing else.
	return root.WriteFile("mount/id", []byte(handle), 0o644)
}

// Remove forgets the volume at a path, and all records of its pod. It is no error if there is none. The driver must
// first unmount everything that it has mounted there, such as mount/connect.
func (v Volumes) Remove(mountPath string) error {
	if v == "" {
		return errors.New("nodeagent: remove volume: there is no directory for it")
	}
	if _, err := os.Stat(filepath.Join(string(v), secretFile)); errors.Is(err, fs.ErrNotExist) {
		return nil // there is no volume
	}
	handle, err := v.handle(mountPath)
	if err != nil {
		return fmt.Errorf("nodeagent: remove volume: %w", err)
	}
	// Remove the files one by one: a remaining mount then fails instead of being emptied. A crash may leave drafts.
	for _, name := range []string{dataFile, dataFile + ".new", contextFile, contextFile + ".new", "mount/id",
		"mount/connect", "mount", ""} {
		err := os.Remove(filepath.Join(string(v), handle, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("nodeagent: remove volume: %w", err)
		}
	}
	return nil
}

func (v Volumes) use(handle string, f func(*store.Folder) error) error {
	return store.New(filepath.Join(string(v), handle), "agent", func(error) {}).Use(f)
}

// there reports whether a volume with the handle exists.
func (v Volumes) there(handle string) bool {
	_, err := os.Stat(filepath.Join(string(v), handle, dataFile))
	return err == nil
}

// data returns the pod of a volume.
func (v Volumes) data(handle string) (d volumeData, err error) {
	err = v.read(handle, dataFile, &d)
	if err == nil && (!kube.ValidLabel(d.Namespace) || !kube.ValidName(d.Name)) {
		err = errors.New("the data of the volume does not name a pod")
	}
	return d, err
}

func (v Volumes) read(handle, name string, into any) error {
	if !v.there(handle) {
		return fs.ErrNotExist
	}
	return v.use(handle, func(f *store.Folder) error {
		data, err := f.Read(name, maxVolume, false)
		if err == nil {
			err = json.Unmarshal(data, into)
		}
		return err
	})
}

// volumeContext is the agent's record of an instance that has an identity.
type volumeContext struct {
	Domain          string
	Service         string
	ProviderService string
	SANNames        []string
	SANIPs          []net.IP
	SANURIs         []*url.URL
	InstanceID      string

	// The fields below are not in the original's file.
	Delivered bool      // an identity has reached the pod
	Serials   []string  // in hexadecimal, of the newest certificate and of the one presented for it
	Expires   time.Time // the end of the newest certificate that has reached the pod

	ends time.Time // the end of the certificate about to be given
}

func newContext(i athenzname.Instance) (*volumeContext, error) {
	c := &volumeContext{
		Domain: i.Service.Domain, Service: i.Service.Name, ProviderService: i.Provider.String(), InstanceID: i.ID,
		SANNames: []string{i.Service.DNSName(i.Suffix), i.InstanceName()},
	}
	c.setIPs(i)
	if !i.SPIFFE.IsZero() {
		c.SANURIs = []*url.URL{i.SPIFFE.URL()}
	}
	return c, i.Check()
}

func (c *volumeContext) setIPs(i athenzname.Instance) {
	c.SANIPs = nil
	for _, ip := range i.IPs {
		c.SANIPs = append(c.SANIPs, ip.AsSlice())
	}
}

// instance returns the recorded instance.
func (c *volumeContext) instance(suffix string) (athenzname.Instance, error) {
	provider, err := athenzname.ParseService(c.ProviderService)
	if err != nil {
		return athenzname.Instance{}, err
	}
	i := athenzname.Instance{Provider: provider, Service: athenzname.Service{Domain: c.Domain, Name: c.Service},
		ID: c.InstanceID, Suffix: suffix}
	for _, text := range c.SANIPs {
		ip, _ := netip.AddrFromSlice(text)
		i.IPs = append(i.IPs, ip.Unmap())
	}
	for _, u := range c.SANURIs {
		if u == nil {
			return i, errors.New("the context of the volume has an empty URI")
		}
		if i.SPIFFE, err = spiffe.ParseID(u.String()); err != nil {
			return i, err
		}
	}
	return i, i.Check()
}

func (v Volumes) context(handle string) (*volumeContext, error) {
	c := new(volumeContext)
	return c, v.read(handle, contextFile, c)
}

func (v Volumes) save(handle string, c *volumeContext) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if !v.there(handle) {
		return fs.ErrNotExist // the pod has gone
	}
	return v.use(handle, func(f *store.Folder) error { return f.Write(contextFile, data) })
}
