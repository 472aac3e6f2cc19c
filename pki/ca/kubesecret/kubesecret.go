// Package kubesecret keeps the record of a certificate authority in a Kubernetes Secret, which all replicas of the CA
// share. [New] makes a [Store] for package ca:
//
//	store, err := kubesecret.New(kubesecret.Options{})
//	…
//	authority, err := ca.Open(ctx, cfg, store)
//
// The Secret has the name, type and items that Istio's CA uses. So a cluster can move from one to the other and keep
// its root: we adopt Istio's Secret, and Istio can read ours. Only one of the two may run at a time: Istio's CA does
// not know of a rotation in four steps.
//
// # Concurrent writers
//
// Each write replaces the version of the Secret that was read, or creates it if there was none. The API server
// refuses all but one of several racing writes; the others get [ca.ErrConflict]. Reads go to the cluster's own store,
// not to a cache.
//
// # What it leaves alone
//
// The record consists of Istio's five names (ca-cert.pem, ca-key.pem, cert-chain.pem, key.pem and root-cert.pem) and
// every name that begins with svidkit-. Other data, labels, annotations and owners belong to other programs, and stay
// as they are.
//
// # Rights
//
// The service account of the CA needs these rules in a Role of the namespace:
//
//	rules:
//	- {apiGroups: [""], resources: [secrets], resourceNames: [istio-ca-secret], verbs: [get, update]}
//	- {apiGroups: [""], resources: [secrets], verbs: [create]}
//
// RBAC cannot limit create to a name. Instead of granting the second rule, an operator may create the Secret once,
// with the right type and empty. A client that may read the Secret can sign for the whole trust domain.
package kubesecret

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki/ca"
)

// The names of Secrets, and their type, as in Istio.
const (
	defaultName = "istio-ca-secret"
	caCerts     = "cacerts"
	secretType  = "istio.io/ca-root"
)

const (
	mark = "istio-generated" // a name in the data of cacerts
	ours = "svidkit-"        // the prefix of names that are not Istio's
)

// istios are Istio's names that belong to the record.
var istios = []string{"ca-cert.pem", "ca-key.pem", "cert-chain.pem", "key.pem", "root-cert.pem"}

// Options configures a [Store]. A zero field means its default.
type Options struct {
	// Name is the Secret's name; empty means istio-ca-secret, Istio's name for a self-signed CA. In cacerts, Istio
	// looks for a CA that an operator has made: with that name a Store creates the Secret with the mark
	// istio-generated, and refuses one without the mark.
	Name string

	Namespace string // of the Secret; empty means the namespace of this process's pod

	// APIServer is the URL of the API server, and HTTPClient authenticates this process to it. Empty and nil mean
	// this process's cluster and the service account of its pod, whose token is read again for each request.
	// Unencrypted http is only for loopback addresses, and needs a client.
	APIServer  string
	HTTPClient *http.Client
}

// redacted is the printed form of a Store.
type redacted = redact.Text

// Store is a [ca.Store] in one Secret. [New] makes one. It keeps nothing in memory, does not retry, and is safe for
// concurrent use. The version of its records is the resourceVersion of the Secret.
type Store struct {
	redacted
	client          *kube.Client
	namespace, name string
}

var _ ca.Store = (*Store)(nil)

// New checks the options. It sends nothing.
func New(o Options) (*Store, error) {
	o.Name = cmp.Or(o.Name, defaultName)
	if !kube.ValidName(o.Name) {
		return nil, fmt.Errorf("kubesecret: invalid Options: Name %q cannot be that of a Secret", o.Name)
	}
	if o.Namespace == "" {
		ns, err := kube.Namespace()
		if errors.Is(err, fs.ErrNotExist) {
			return nil, errors.New("kubesecret: invalid Options: this process is not in a pod, so set Namespace")
		} else if err != nil {
			return nil, fmt.Errorf("kubesecret: %w", err)
		}
		o.Namespace = ns
	}
	if !kube.ValidLabel(o.Namespace) {
		return nil, fmt.Errorf("kubesecret: invalid Options: Namespace %q cannot be that of a Secret", o.Namespace)
	}
	client, err := kube.New(kube.Options{URL: o.APIServer, Client: o.HTTPClient})
	if err != nil {
		return nil, fmt.Errorf("kubesecret: invalid Options: %w", err)
	}
	return &Store{
		redacted: redact.New("kubesecret.Store(" + o.Namespace + "/" + o.Name + ")"),
		client:   client, namespace: o.Namespace, name: o.Name,
	}, nil
}

// Load implements [ca.Store]. Without a deadline in ctx it takes at most ten seconds. A Secret without any value of a
// record counts as none: the error wraps [ca.ErrNoRecord]. If its type, or being immutable, makes the Secret unfit to
// keep a CA in, the error wraps [ca.ErrUnfit], which ends [ca.Open] at once. Other errors may pass, even a missing
// right: a Role may come after the pod.
func (s *Store) Load(ctx context.Context) (ca.Record, error) {
	o, err := s.get(ctx)
	if kube.NotFound(err) {
		return ca.Record{}, fmt.Errorf("kubesecret: load %s: %w", s.title(), ca.ErrNoRecord)
	}
	if err == nil && !o.holdsRecord() {
		err = fmt.Errorf("%w: the Secret is there, and empty", ca.ErrNoRecord)
	}
	if err != nil {
		return ca.Record{}, fmt.Errorf("kubesecret: load %s: %w", s.title(), s.remedy("get", err))
	}
	maps.DeleteFunc(o.Data, func(name string, _ []byte) bool { return !inRecord(name) })
	return ca.NewRecord(o.Metadata.ResourceVersion, o.Data), nil
}

// Save implements [ca.Store]. Without a deadline in ctx each of its two requests takes at most ten seconds. All names
// in the record must be Istio's, or begin with svidkit-. If it is unknown whether the Secret was written, the error
// says so: load it again.
func (s *Store) Save(ctx context.Context, r ca.Record) (string, error) {
	version, err := s.save(ctx, r)
	if err != nil {
		return "", fmt.Errorf("kubesecret: save %s: %w", s.title(), err)
	}
	return version, nil
}

func (s *Store) save(ctx context.Context, r ca.Record) (string, error) {
	for name := range r.Data() {
		if !inRecord(name) {
			return "", fmt.Errorf("the name %.64q is not one of a record", name)
		}
	}
	o, err := s.get(ctx)
	switch {
	case kube.NotFound(err) && r.Version == "":
		return s.create(ctx, r)
	case kube.NotFound(err):
		return "", fmt.Errorf("%w: the Secret was deleted", ca.ErrConflict)
	case err != nil:
		return "", s.remedy("get", err)
	case r.Version == "" && o.holdsRecord():
		return "", fmt.Errorf("%w: the Secret exists, with resourceVersion %s", ca.ErrConflict,
			o.Metadata.ResourceVersion)
	case r.Version != "" && r.Version != o.Metadata.ResourceVersion:
		return "", fmt.Errorf("%w: resourceVersion %s was to be replaced, there is %s", ca.ErrConflict, r.Version,
			o.Metadata.ResourceVersion)
	}
	body := map[string]any{}
	for name, member := range o.members {
		body[name] = member
	}
	body["data"] = s.data(o, r)
	var answer object
	err = s.client.Update(ctx, s.path(), body, &answer)
	switch {
	case kube.Conflict(err) || kube.AlreadyExists(err):
		return "", fmt.Errorf("%w: resourceVersion %s is not there any more", ca.ErrConflict,
			o.Metadata.ResourceVersion)
	case kube.NotFound(err):
		return "", fmt.Errorf("%w: the Secret was deleted", ca.ErrConflict)
	}
	return s.outcome(answer, "update", err)
}

// create makes the Secret.
func (s *Store) create(ctx context.Context, r ca.Record) (string, error) {
	body := map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": secretType, "data": s.data(new(object), r),
		"metadata": kube.ObjectMeta{Name: s.name, Namespace: s.namespace},
	}
	var answer object
	err := s.client.Create(ctx, kube.Path("api", "v1", "namespaces", s.namespace, "secrets"), body, &answer)
	switch {
	case kube.AlreadyExists(err) || kube.Conflict(err):
		return "", fmt.Errorf("%w: the Secret exists by now", ca.ErrConflict)
	case kube.NotFound(err):
		return "", fmt.Errorf("is there a namespace %q? %w", s.namespace, err)
	}
	return s.outcome(answer, "create", err)
}

// outcome returns the result of a change.
func (s *Store) outcome(w object, verb string, err error) (string, error) {
	switch {
	case err != nil && kube.MayHaveLanded(err):
		return "", fmt.Errorf("it is not known whether the Secret was written, so load it again: %w", err)
	case err != nil:
		return "", s.remedy(verb, err)
	case w.Metadata.ResourceVersion == "":
		return "", errors.New("the Secret was written, and the API server does not say as which " +
			"version: load it again")
	}
	return w.Metadata.ResourceVersion, nil
}

// remedy says what to do about an error.
func (s *Store) remedy(verb string, err error) error {
	if !kube.Forbidden(err) {
		return err
	}
	return fmt.Errorf("the service account may not %s the Secret: bind it to a Role in namespace %q with the verbs "+
		"get, create and update for secrets: %w", verb, s.namespace, err)
}

func (s *Store) path() string {
	return kube.Path("api", "v1", "namespaces", s.namespace, "secrets", s.name)
}

// get reads the Secret and checks that it can keep a CA.
func (s *Store) get(ctx context.Context) (*object, error) {
	o := &object{}
	if err := s.client.Get(ctx, s.path(), nil, o); err != nil {
		return nil, err
	}
	switch {
	case o.Kind != "Secret" || o.Metadata.Name != s.name || o.Metadata.Namespace != s.namespace ||
		o.Metadata.ResourceVersion == "":
		return nil, errors.New("the API server answered with something else: is its URL right?")
	case o.Type != secretType:
		return nil, fmt.Errorf("%w: the Secret has the type %.64q, not %q: use another name, or delete "+
			"it if it is not needed", ca.ErrUnfit, o.Type, secretType)
	case o.Immutable:
		return nil, fmt.Errorf("%w: the Secret is immutable, so a root in it could never be replaced: "+
			"create it anew without that", ca.ErrUnfit)
	case s.name == caCerts && o.holdsRecord() && !o.marked():
		return nil, fmt.Errorf("%w: the Secret has no %s in it, so an operator has made this CA: load it as a "+
			"plugged-in CA, from the files of a volume", ca.ErrUnfit, mark)
	}
	return o, nil
}

// object is a Secret with all its members.
type object struct {
	members   map[string]json.RawMessage
	Kind      string            `json:"kind"`
	Type      string            `json:"type"`
	Immutable bool              `json:"immutable"`
	Metadata  kube.ObjectMeta   `json:"metadata"`
	Data      map[string][]byte `json:"data"`
}

// UnmarshalJSON implements [json.Unmarshaler].
func (o *object) UnmarshalJSON(b []byte) error {
	type known object
	*o = object{}
	return cmp.Or(json.Unmarshal(b, (*known)(o)), json.Unmarshal(b, &o.members))
}

// inRecord reports whether name belongs to a record.
func inRecord(name string) bool {
	return slices.Contains(istios, name) || strings.HasPrefix(name, ours)
}

// holdsRecord reports whether there is any value of a record. A Secret that was only created so that RBAC can name it
// has none.
func (o *object) holdsRecord() bool {
	for name, value := range o.Data {
		if inRecord(name) && len(value) > 0 {
			return true
		}
	}
	return false
}

func (o *object) marked() bool {
	_, ok := o.Data[mark]
	return ok
}

// data returns the data of the Secret with another record. All other data stays.
func (s *Store) data(o *object, r ca.Record) map[string][]byte {
	data := map[string][]byte{}
	maps.Copy(data, o.Data)
	maps.DeleteFunc(data, func(name string, _ []byte) bool { return inRecord(name) })
	for name, value := range r.Data() {
		data[name] = append([]byte{}, value...) // never null
	}
	if s.name == caCerts && !o.marked() {
		data[mark] = []byte{}
	}
	return data
}

func (s *Store) title() string { return "Secret " + s.namespace + "/" + s.name }
