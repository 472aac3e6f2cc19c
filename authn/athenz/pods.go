package athenz

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/kube"
)

// Pod is a pod as Kubernetes reports it.
type Pod struct {
	Namespace, Name, UID string
	ServiceAccount       string
	IP                   netip.Addr   // the primary address; zero if there is none yet
	IPs                  []netip.Addr // all addresses, including IP
	Phase                string       // such as "Running"
	Deleting             bool         // its deletion was requested
}

// PodSource returns a pod as it is now. The error wraps [ErrNoPod] if there is none. [NewKubelet] and [NewAPIServer]
// return one. It must be safe for concurrent use.
type PodSource func(ctx context.Context, namespace, name string) (*Pod, error)

// maxPods is the maximum size, in bytes, of a kubelet's list of the pods on its node.
const maxPods = 32 << 20

func newPod(o *kube.Pod) *Pod {
	p := &Pod{
		Namespace: o.Metadata.Namespace, Name: o.Metadata.Name, UID: o.Metadata.UID,
		// A static pod has no account, and the kubelet does not fill it in.
		ServiceAccount: cmp.Or(o.Spec.ServiceAccountName, "default"),
		Phase:          o.Status.Phase, Deleting: o.Metadata.DeletionTimestamp != nil,
	}
	p.IP, _ = netip.ParseAddr(o.Status.PodIP)
	if p.IP.IsValid() {
		p.IPs = append(p.IPs, p.IP)
	}
	for _, text := range o.Status.PodIPs {
		if ip, err := netip.ParseAddr(text.IP); err == nil && !slices.Contains(p.IPs, ip) {
			p.IPs = append(p.IPs, ip)
		}
	}
	return p
}

// NewKubelet returns a PodSource that asks the kubelet of a node about the node's pods. The address is the kubelet's
// API, such as https://127.0.0.1:10250. The API without authentication, http://127.0.0.1:10255, is used only if the
// address says so, and only on this machine. A nil client presents the service account token of this process and
// trusts the CA of its cluster. The account needs the right to get nodes/pods, or nodes/proxy before Kubernetes 1.33.
func NewKubelet(address string, client *http.Client) (PodSource, error) {
	if address == "" {
		return nil, errors.New("athenz: new kubelet: the address is empty: give that of the kubelet, such as " +
			"https://127.0.0.1:10250")
	}
	api, err := kube.New(kube.Options{URL: address, Client: withoutTLS(address, client), MaxAnswer: maxPods})
	if err != nil {
		return nil, fmt.Errorf("athenz: new kubelet: %w", err)
	}
	return func(ctx context.Context, namespace, name string) (*Pod, error) {
		var list struct {
			Items []kube.Pod `json:"items"`
		}
		if err := api.Get(ctx, "/pods", nil, &list); err != nil {
			if kube.Forbidden(err) {
				err = fmt.Errorf("%w; bind a ClusterRole that may get nodes/pods, or nodes/proxy before Kubernetes "+
					"1.33, to the service account of this program", err)
			}
			return nil, fmt.Errorf("athenz: ask the kubelet about its pods: %w", err)
		}
		var found *Pod
		for i := range list.Items {
			// A pod that has ended may still be listed beside its successor with the same name.
			if o := &list.Items[i]; o.Metadata.Namespace == namespace && o.Metadata.Name == name &&
				(found == nil || kube.PodEnded(found.Phase, found.Deleting) != "") {
				found = newPod(o)
			}
		}
		if found != nil {
			return found, nil
		}
		return nil, fmt.Errorf("athenz: pod %.64q in namespace %.64q on this node: %w", name, namespace, ErrNoPod)
	}, nil
}

// withoutTLS returns the client for an address. If none is given and the address is http, it presents no token.
func withoutTLS(address string, client *http.Client) *http.Client {
	if client == nil && strings.HasPrefix(address, "http://") {
		return new(http.Client)
	}
	return client
}

// NewAPIServer returns a PodSource that asks an API server at each call. This program needs the right to get pods. An
// empty address means the cluster that it runs in. A nil client presents the token of its service account, except
// over http, which must be an address of this machine, such as kubectl proxy.
func NewAPIServer(address string, client *http.Client) (PodSource, error) {
	api, err := kube.New(kube.Options{URL: address, Client: withoutTLS(address, client)})
	if err != nil {
		return nil, fmt.Errorf("athenz: new API server: %w", err)
	}
	return func(ctx context.Context, namespace, name string) (*Pod, error) {
		var pod kube.Pod
		err := ErrNoPod // for what is no name in Kubernetes
		if kube.ValidLabel(namespace) && kube.ValidName(name) {
			pod, err = api.Pod(ctx, namespace, name)
		}
		if kube.NotFound(err) {
			err = ErrNoPod
		}
		if err != nil {
			return nil, fmt.Errorf("athenz: pod %.64q in namespace %.64q: %w", name, namespace, err)
		}
		return newPod(&pod), nil
	}, nil
}
