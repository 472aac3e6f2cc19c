// Kubelet is what nodes do for the certificates of their pods, by the kubelet's own managers: it asks for certificates, renews them, and
// writes volumes.
//
//	kubelet SERVER ROOTS-FILE TOKENS-FOLDER VOLUMES-FOLDER NODE...
//
// Each NODE has its token in a file of that name. Volumes are written every second, and not every minute as by a kubelet. SIGUSR1 sets the
// clock of the managers forty minutes ahead, or back again.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/kubernetes/pkg/kubelet/clustertrustbundle"
	"k8s.io/kubernetes/pkg/kubelet/podcertificate"
	"k8s.io/kubernetes/pkg/volume/util"
	"k8s.io/utils/clock"
)

// ahead is a clock that can run ahead.
type ahead struct {
	clock.RealClock
	by atomic.Int64
}

func (a *ahead) Now() time.Time { return a.RealClock.Now().Add(time.Duration(a.by.Load())) }

// pods are those of a node.
type pods struct{ store cache.Indexer }

func (p pods) GetPods() (all []*corev1.Pod) {
	for _, o := range p.store.List() {
		all = append(all, o.(*corev1.Pod))
	}
	return all
}

func (p pods) GetPodByUID(uid types.UID) (*corev1.Pod, bool) {
	for _, pod := range p.GetPods() {
		if pod.UID == uid {
			return pod, true
		}
	}
	return nil, false
}

type node struct {
	pods
	certificates *podcertificate.IssuingManager
	bundles      clustertrustbundle.Manager
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	server, roots, tokens, volumes := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	clock := new(ahead)
	var nodes []*node
	for _, name := range os.Args[5:] {
		n, err := start(ctx, &rest.Config{
			Host: server, TLSClientConfig: rest.TLSClientConfig{CAFile: roots}, BearerTokenFile: filepath.Join(tokens, name), QPS: 50, Burst: 100,
			UserAgent: "kubelet " + name, // so that each has a connection of its own
		}, name, clock)
		if err != nil {
			log.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	leap := make(chan os.Signal, 1)
	signal.Notify(leap, syscall.SIGUSR1)
	tick := time.NewTicker(time.Second)
	for {
		select {
		case <-ctx.Done():
			return
		case <-leap:
			clock.by.Store(int64(40*time.Minute) - clock.by.Load())
			for _, n := range nodes {
				for _, p := range n.GetPods() {
					n.certificates.TrackPod(ctx, p)
				}
			}
		case <-tick.C:
			for _, n := range nodes {
				for _, p := range n.GetPods() {
					n.write(ctx, p, volumes)
				}
			}
		}
	}
}

// start starts the managers of a node.
func start(ctx context.Context, cfg *rest.Config, name string, clock clock.WithTicker) (*node, error) {
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	only := func(field string) informers.SharedInformerFactory {
		return informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = field + "=" + name }))
	}
	mine, self := only("spec.nodeName"), only("metadata.name")
	n := &node{pods: pods{mine.Core().V1().Pods().Informer().GetIndexer()}, bundles: clustertrustbundle.NewLazyInformerManager(ctx, client, 256)}
	n.certificates = podcertificate.NewIssuingManager(client, n.pods, &record.FakeRecorder{}, mine.Certificates().V1().PodCertificateRequests(),
		self.Core().V1().Nodes(), types.NodeName(name), clock)
	_, err = mine.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { n.certificates.TrackPod(ctx, o.(*corev1.Pod)) },
		DeleteFunc: func(o any) {
			if p, ok := o.(*corev1.Pod); ok {
				n.certificates.ForgetPod(ctx, p)
			}
		},
	})
	if err != nil {
		return nil, err
	}
	mine.Start(ctx.Done())
	self.Start(ctx.Done())
	go n.certificates.Run(ctx)
	return n, nil
}

// write writes the projected volumes of a pod whose sources are all there, as the kubelet's volume plugin does.
func (n *node) write(ctx context.Context, pod *corev1.Pod, folder string) {
volumes:
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		payload := map[string]util.FileProjection{}
		for i, s := range v.Projected.Sources {
			switch {
			case s.PodCertificate != nil:
				key, chain, err := n.certificates.GetPodCertificateCredentialBundle(ctx, pod.Namespace, pod.Name, string(pod.UID), v.Name, i)
				if err != nil {
					continue volumes
				}
				payload[s.PodCertificate.CredentialBundlePath] = util.FileProjection{Data: append(key, chain...), Mode: 0o600}
			case s.ClusterTrustBundle != nil:
				var roots []byte
				var err error
				if b := s.ClusterTrustBundle; b.Name != nil {
					roots, err = n.bundles.GetTrustAnchorsByName(ctx, *b.Name, false)
				} else {
					roots, err = n.bundles.GetTrustAnchorsBySigner(ctx, *b.SignerName, b.LabelSelector, false)
				}
				if err != nil {
					continue volumes
				}
				payload[s.ClusterTrustBundle.Path] = util.FileProjection{Data: roots, Mode: 0o644}
			}
		}
		dir := filepath.Join(folder, pod.Namespace, pod.Name, v.Name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			log.Fatal(err)
		}
		w, err := util.NewAtomicWriter(dir, pod.Name)
		if err == nil {
			err = w.Write(payload, nil)
		}
		if err != nil {
			log.Print(err)
		}
	}
}
