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
	secretFile  = "secret" // of the node, which handles are made with
	secretSize  = 32       // bytes
	maxVolume   = 64 << 10 // bytes of a file
)

// Volumes is the folder of a node, such as /var/athenz/volumes, in which the agent and the driver of the volumes keep
// what they know of them. Both run as the same user, or as root: other users can read nothing in it. It is safe for
// concurrent use, by several processes, too.
//
// The first [Volumes.Add] makes a secret of the node in the file secret. Without it the handles of the volumes that
// are there cannot be found by their paths any more.
type Volumes string

type volumeData struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"` // of the pod, if the path has it
}

// podIn returns the UID of the pod in a path of the kubelet, or "".
func podIn(path string) string {
	_, rest, _ := strings.Cut(path, "/pods/")
	uid, _, _ := strings.Cut(rest, "/")
	if len(uid) != 36 || strings.Trim(uid, "-0123456789abcdef") != "" {
		return ""
	}
	return uid
}

// Add notes that a volume was mounted for a pod, for a driver of volumes to call, and returns its handle. The pod proves
// itself to the agent with the handle, which cannot be guessed without the secret of the node. If the path has the UID
// of the pod, as paths of the kubelet have, the handle gives nothing to a later pod of the same name.
//
// The folder mount in the folder of the handle is what the driver mounts at the path: the pod finds the handle there,
// in the file id. A volume that was there before is forgotten, so that the pod can take its identity again.
func (v Volumes) Add(mountPath, namespace, pod string) (handle string, err error) {
	if v == "" {
		return "", errors.New("nodeagent: add volume: there is no folder for it")
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

// handle returns the handle of the volume at a path. It makes the secret of the node, if there is none yet.
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

// writeID makes what the pod sees, which each user in it can read.
func (v Volumes) writeID(handle string) error {
	root, err := private.OpenDir(filepath.Join(string(v), handle), private.Options{})
	if err != nil {
		return err
	}
	defer root.Close() // only a name
	if err := root.Mkdir("mount", 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// above it only this user may enter, and the pod has nothing else
	return root.WriteFile("mount/id", []byte(handle), 0o644)
}

// Remove forgets the volume that was mounted at a path, with what the agent knows of the pod. One that is not there is
// forgotten already. What the driver has mounted into it, at mount/connect for example, has to be unmounted before.
func (v Volumes) Remove(mountPath string) error {
	if v == "" {
		return errors.New("nodeagent: remove volume: there is no folder for it")
	}
	if _, err := os.Stat(filepath.Join(string(v), secretFile)); errors.Is(err, fs.ErrNotExist) {
		return nil // there is no volume
	}
	handle, err := v.handle(mountPath)
	if err != nil {
		return fmt.Errorf("nodeagent: remove volume: %w", err)
	}
	// One by one: what is still mounted is an error, and not deleted through the mount. A crash leaves drafts of the
	// files.
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

// there reports whether there is a volume with the handle.
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

// volumeContext is what the agent knows of an instance that has an identity.
type volumeContext struct {
	Domain          string
	Service         string
	ProviderService string
	SANNames        []string
	SANIPs          []net.IP
	SANURIs         []*url.URL
	InstanceID      string

	// What follows is not in the file of the original.
	Delivered bool      // an identity has reached the pod
	Serials   []string  // in hexadecimal, of the newest certificate and of the one that it was made with
	Expires   time.Time // when the newest certificate does that has reached the pod

	ends time.Time // when the one does that is to be given now
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

// instance returns the instance, which the agent with this suffix has written down.
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
