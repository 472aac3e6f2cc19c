package caconfig

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
)

// component names the events' reporter, and the Deployment that the certifier's events belong to.
const component = "linkerd-identity"

const (
	maxWaiting   = 256 // events; further ones are only counted in the log
	eventTimeout = 10 * time.Second
	checkIssuer  = 5 * time.Second
)

// recorder reports what happens at Linkerd's API as Kubernetes Events, as Linkerd's certifier does. Events about a
// certificate belong to its service account, others to the Deployment linkerd-identity. For each reason and object it
// sends at most 25 events at once and then one in 5 minutes, and 20 events a second in all, so that renewing proxies
// do not fill the cluster's store. The log counts the rest.
type recorder struct {
	api       *kube.Client
	namespace string // of the control plane
	instance  string // identifies this process
	queue     chan event
	limits    *limit.Limiter
	log       *ratelog.Log
}

type event struct {
	linkerd.Event
	at time.Time
}

func newRecorder(api *kube.Client, namespace string, log *slog.Logger) *recorder {
	host, _ := os.Hostname()
	return &recorder{
		api: api, namespace: namespace, instance: cmp.Or(host, component), queue: make(chan event, maxWaiting),
		limits: limit.New(limit.Options{Rate: 20, Burst: 200, CallerRate: 1.0 / 300,
			CallerBurst: 25}), log: ratelog.New(log, 0),
	}
}

// record takes an event, for linkerd.Options.Events. It does not block.
func (r *recorder) record(ctx context.Context, e linkerd.Event) {
	ctx = context.WithoutCancel(ctx) // the event happened even if the client has gone
	if err := r.limits.Acquire(ctx, e.Reason+" "+e.Namespace+"/"+e.ServiceAccount); err != nil {
		r.log.Log(slog.LevelInfo, "caconfig: event not reported", "there are too many", slog.String("event", e.Reason))
		return
	}
	r.limits.Release()
	select {
	case r.queue <- event{e, time.Now()}:
	default:
		r.log.Warn("caconfig: event not reported", "the API server is too slow", slog.String("event", e.Reason))
	}
}

// run sends the events until ctx is done. The function refused returns why new issuer files are not in use, or nil;
// each new reason is an event.
func (r *recorder) run(ctx context.Context, refused func() error) {
	ticker := time.NewTicker(checkIssuer)
	defer ticker.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-r.queue:
			r.send(ctx, e)
		case now := <-ticker.C:
			why := ""
			if err := refused(); err != nil {
				why = kube.OneLine(err.Error(), 500)
			}
			if why != told && why != "" {
				r.send(ctx, event{linkerd.Event{Reason: "IssuerUpdateSkipped", Warning: true,
					Message: "the issuer before stays in use: " + why}, now})
			}
			told = why
		}
	}
}

// send creates the event, without retries: the log has it as well.
func (r *recorder) send(ctx context.Context, e event) {
	type reference struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Namespace  string `json:"namespace"`
		Name       string `json:"name"`
	}
	object := reference{"apps/v1", "Deployment", r.namespace, component}
	if e.ServiceAccount != "" {
		object = reference{"v1", "ServiceAccount", e.Namespace, e.ServiceAccount}
	}
	kind := "Normal"
	if e.Warning {
		kind = "Warning"
	}
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	at := e.at.UTC().Truncate(time.Second)
	err := r.api.Create(ctx, kube.Path("api", "v1", "namespaces", object.Namespace, "events"), map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata": map[string]string{"name": fmt.Sprintf("%s.%x", object.Name, e.at.UnixNano()),
			"namespace": object.Namespace},
		"involvedObject": object,
		// The API server allows 1 kB.
		"reason": e.Reason, "message": kube.OneLine(e.Message, 1000), "type": kind,
		"source":         map[string]string{"component": component},
		"firstTimestamp": at, "lastTimestamp": at, "count": 1,
		"reportingComponent": component, "reportingInstance": r.instance,
	}, nil)
	if err != nil && ctx.Err() == nil {
		r.log.Warn("caconfig: event not reported",
			"the API server has refused it; the service account needs the verb create "+
				"for events", slog.String("event", e.Reason), slog.Any("err", err))
	}
}
