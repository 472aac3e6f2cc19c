// Package broker speaks the SPIFFE Broker API, by which a trusted component of the infrastructure gets the identities
// of workloads that it represents: a proxy that ends TLS for all workloads of a node, a CSI driver, a deployment tool.
// It implements the SPIFFE Broker API and the SPIFFE Broker Endpoint as of revision
// 665a28f3253ecdce59f26f3ef29c0d6408b37c3d of the standards. They are Incubating: if they change, so will this
// package.
//
// The component is the broker. It names a workload by a [Reference], and gets a source of the workload's identities,
// which renews them until the workload ends:
//
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: own, Peers: own, Allow: spiffe.AllowIDs(agent)})
//	…
//	client, err := broker.NewClient(os.Getenv(broker.SocketEnv), endpoint)
//	…
//	workload, err := client.For(broker.Reference{PID: 4711})
//	…
//	src, err := workloadapi.Start(ctx, workloadapi.Config{Client: workload})
//
// The server is a [Handler] in front of a handler of the Workload API. It knows its callers by their X.509-SVIDs,
// gives nothing to a broker without a [Grant], and looks up each workload itself:
//
//	handler, err := broker.NewHandler(workload, broker.Options{Grant: func(id spiffe.ID) *broker.Grant { … }})
//	…
//	server := &unixsocket.Server{Path: "/run/identity/broker.sock", Handler: handler, Serve: endpoint.Serve}
//
// Both sides speak mutual TLS, by a spiffetls.Endpoint each, on Unix sockets too. The policy of the client's Endpoint
// names the server's ID, because a server with another one could send it false identities and bundles.
//
// # What is a workload
//
// A process, by its PID: the server finds out what it is, as it does for a process that calls the Workload API itself.
// A PID means something on one machine and in one PID namespace. So a [Client] sends PIDs to Unix sockets only, and a
// server takes them only from processes in its own namespace. A later process with the same PID is another workload,
// for both sides.
//
// An object of Kubernetes, by its type and its name, UID or both: which objects there are, and which identities they
// have, is up to [Options].Resolve.
//
// # When a workload ends
//
// The server ends the streams with NotFound. The source of a client then returns errors that wrap
// [spiffe.ErrNotReady], its Run returns an error that wraps [ErrEnded], and it does not begin again. A broker that has
// written identities to files, or handed them on, must remove them then. While the server does not answer, a client
// keeps its identities, as it does with the Workload API.
//
// # What must not be mixed
//
// The identities and bundles of a workload are for operations of that workload alone: a proxy verifies the peers of a
// workload with the bundles of its own source, and presents no identity of another workload.
package broker

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"

	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// SocketEnv is the name of the environment variable in which an operator tells brokers the address of the Broker API
// (SPIFFE Broker Endpoint, section 4). This package does not read it: see [NewClient].
const SocketEnv = "SPIFFE_BROKER_SOCKET"

// ErrEnded says that the server knows of no such workload, because it has ended or never was (gRPC's NotFound). It is
// also workloadapi.ErrDenied, because it withdraws what was received for the workload.
var ErrEnded = workloadwire.ErrEnded

const (
	service = "/spiffe.broker.API/"
	header  = "broker.spiffe.io"

	typePID    = "type.googleapis.com/spiffe.broker.WorkloadPIDReference"
	typeObject = "type.googleapis.com/spiffe.broker.KubernetesObjectReference"
)

// methods has the methods of the Broker API by those of the Workload API, whose responses they have.
var methods = map[string]string{
	workloadwire.FetchX509SVID:    "SubscribeToX509SVID",
	workloadwire.FetchX509Bundles: "SubscribeToX509Bundles",
	workloadwire.FetchJWTSVID:     "FetchJWTSVID",
	workloadwire.FetchJWTBundles:  "SubscribeToJWTBundles",
}

// Reference names a workload. Set either PID or Object. Vendors' types of references are not supported.
type Reference struct {
	PID    int32  // of a process on this machine; positive
	Object Object // of Kubernetes
}

// Object names an object of Kubernetes by its name, its UID or both. With both, they must mean one object.
type Object struct {
	Plural    string // of its resource, such as "pods" or "serviceaccounts"
	Group     string // such as "apps"; "core" for the group without a name
	Namespace string // "" for an object of the cluster
	Name      string
	UID       string // in lower case, with hyphens
}

// Kind returns what a [Grant] has in References for r: "pid", or the plural of an object's resource with its group,
// such as "deployments.apps", or without the group "core", such as "pods".
func (r Reference) Kind() string {
	switch {
	case r.Object == Object{}:
		return "pid"
	case r.Object.Group == "core":
		return r.Object.Plural
	}
	return r.Object.Plural + "." + r.Object.Group
}

// String returns the kind and the name of r, for logs. It is not to be parsed.
func (r Reference) String() string {
	if r.Object == (Object{}) {
		return fmt.Sprintf("pid %d", r.PID)
	}
	o := r.Object
	return fmt.Sprintf("%s %q in namespace %q with UID %q", r.Kind(), o.Name, o.Namespace, o.UID)
}

var (
	uidForm = regexp.MustCompile(`^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?$`)
	// a DNS name, whose last label is no number (RFC 1123 section 2.1)
	hostForm = regexp.MustCompile(`^(?i)([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\.)*[a-z]([-a-z0-9]{0,61}[a-z0-9])?\.?$`)
	nameForm = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)
)

// check returns an error for a reference that names no workload.
func (r Reference) check() error {
	o := r.Object
	switch {
	case r.PID < 0 || (r.PID == 0) == (o == Object{}):
		return errors.New("a reference has either a positive PID or an Object")
	case r.PID > 0:
		return nil
	case o.Name == "" && (o.UID == "" || o.Namespace != ""):
		return errors.New("an object has a name or a UID, and a namespace only beside a name")
	case !nameForm.MatchString(o.Plural) || !nameForm.MatchString(o.Group) || !uidForm.MatchString(o.UID) ||
		!nameForm.MatchString(cmp.Or(o.Namespace, "none")) || !nameForm.MatchString(cmp.Or(o.Name, "none")):
		return errors.New(`the plural, group ("core" for pods), namespace, name or UID is none of Kubernetes`)
	}
	return nil
}
