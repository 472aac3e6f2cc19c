package kubetest

import (
	"bytes"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
)

const maxBody = 3 << 20 // bytes of a request, as API servers have it

// resource is a kind of objects.
type resource struct {
	group, version, plural, kind string
	namespaced                   bool
	fields                       []string // further selectable ones, beside metadata.name and metadata.namespace
	subresources                 []string // of PUT
	check                        func(old, o object, subresource string) error
}

func (r *resource) apiVersion() string {
	if r.group == "" {
		return r.version
	}
	return r.group + "/" + r.version
}

// qualified is the name of the resource in messages.
func (r *resource) qualified() string {
	if r.group == "" {
		return r.plural
	}
	return r.plural + "." + r.group
}

var resources = []*resource{
	{version: "v1", plural: "secrets", kind: "Secret", namespaced: true, fields: []string{"type"}, check: checkSecret},
	{version: "v1", plural: "namespaces", kind: "Namespace"},
	{version: "v1", plural: "configmaps", kind: "ConfigMap", namespaced: true},
	{version: "v1", plural: "events", kind: "Event", namespaced: true, fields: []string{"reason", "type"}},
	{version: "v1", plural: "serviceaccounts", kind: "ServiceAccount", namespaced: true},
	{version: "v1", plural: "pods", kind: "Pod", namespaced: true,
		fields: []string{"spec.nodeName", "spec.serviceAccountName", "status.phase"}},
	{
		group: "certificates.k8s.io", version: "v1", plural: "certificatesigningrequests",
		kind:   "CertificateSigningRequest",
		fields: []string{"spec.signerName"}, subresources: []string{"approval", "status"}, check: checkCSR,
	},
	{
		group: "certificates.k8s.io", version: "v1", plural: "podcertificaterequests",
		kind: "PodCertificateRequest", namespaced: true,
		fields: []string{"spec.signerName", "spec.podName", "spec.nodeName"}, subresources: []string{"status"},
		check: checkPodCertificate,
	},
	{
		group: "certificates.k8s.io", version: "v1", plural: "clustertrustbundles", kind: "ClusterTrustBundle",
		fields: []string{"spec.signerName"},
		check:  checkTrustBundle,
	},
}

// target is what a path names.
type target struct {
	*resource
	namespace, name, subresource string
	everywhere                   bool // a namespaced resource in all namespaces
}

// parsePath reads a path such as /api/v1/namespaces/NS/secrets/NAME.
func parsePath(path string) (target, bool) {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	var group, version string
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		version, parts = parts[1], parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		group, version, parts = parts[1], parts[2], parts[3:]
	default:
		return target{}, false
	}
	var t target
	if parts[0] == "namespaces" && len(parts) >= 3 {
		t.namespace, parts = parts[1], parts[2:]
	}
	for _, r := range resources {
		if r.group == group && r.version == version && r.plural == parts[0] {
			t.resource = r
		}
	}
	if t.resource == nil || len(parts) > 3 || !t.namespaced && t.namespace != "" {
		return target{}, false
	}
	if len(parts) > 1 {
		t.name = parts[1]
	}
	if len(parts) > 2 {
		t.subresource = parts[2]
	}
	if slices.Contains(parts, "") {
		return target{}, false
	}
	t.everywhere = t.namespaced && t.namespace == ""
	return t, !(t.everywhere && t.name != "")
}

// serve carries a request out.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, body []byte) {
	code, answer, err := s.carryOut(w, r, body)
	if e, ok := err.(*status); ok {
		write(w, e)
	} else if answer != nil {
		writeJSON(w, code, answer)
	}
}

// carryOut returns an error that is always a *status, or an answer, or neither if it has answered.
func (s *Server) carryOut(w http.ResponseWriter, r *http.Request, body []byte) (int, any, error) {
	if o, ok, err := s.review(r, body); ok {
		return http.StatusCreated, o, err
	}
	t, ok := parsePath(r.URL.Path)
	if !ok {
		return 0, nil, failure(http.StatusNotFound, "NotFound", "the server could not find the requested resource")
	}
	q := r.URL.Query()
	switch {
	case r.Method == http.MethodGet && t.name == "":
		sel, err := parseSelection(t, q)
		if err != nil {
			return 0, nil, err
		}
		if isWatch(r) {
			return 0, nil, s.store.watch(w, r, t, sel)
		}
		list, err := s.store.list(t, sel, q.Get("limit"), q.Get("continue"))
		return http.StatusOK, list, err
	case r.Method == http.MethodGet && t.subresource == "":
		o, err := s.store.get(t)
		return http.StatusOK, o, err
	case r.Method == http.MethodPost && t.name == "" && !t.everywhere:
		in, err := readObject(r, t, body)
		if err != nil {
			return 0, nil, err
		}
		o, err := s.store.create(t, in)
		return http.StatusCreated, o, err
	case r.Method == http.MethodPut && t.name != "" &&
		(t.subresource == "" || slices.Contains(t.subresources, t.subresource)):
		in, err := readObject(r, t, body)
		if err != nil {
			return 0, nil, err
		}
		o, err := s.store.update(t, in)
		return http.StatusOK, o, err
	case r.Method == http.MethodPatch && t.name != "" &&
		(t.subresource == "" || t.subresource == "status" && slices.Contains(t.subresources, "status")):
		if r.Header.Get("Content-Type") != "application/merge-patch+json" {
			return 0, nil, failure(http.StatusUnsupportedMediaType, "UnsupportedMediaType",
				"the body of the request was in an unknown format - accepted media types include: "+
					"application/merge-patch+json")
		}
		patch, err := decodeObject(body)
		if err != nil {
			return 0, nil, err
		}
		o, err := s.store.patch(t, patch)
		return http.StatusOK, o, err
	case r.Method == http.MethodDelete && t.name != "" && t.subresource == "":
		var options struct {
			Preconditions struct{ UID, ResourceVersion string } `json:"preconditions"`
		}
		if len(body) > 0 && json.Unmarshal(body, &options) != nil {
			return 0, nil, failure(http.StatusBadRequest, "BadRequest", "the body is not DeleteOptions")
		}
		if err := s.store.delete(t, options.Preconditions.UID, options.Preconditions.ResourceVersion); err != nil {
			return 0, nil, err
		}
		return http.StatusOK, (&status{code: http.StatusOK}).object(), nil
	}
	return 0, nil, failure(http.StatusMethodNotAllowed, "MethodNotAllowed",
		"the server does not allow this method on the requested resource")
}

// readObject reads the object in a request and checks that it is for the target.
func readObject(r *http.Request, t target, body []byte) (object, error) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return nil, failure(http.StatusUnsupportedMediaType, "UnsupportedMediaType",
			"the body of the request was in an unknown format - accepted media types include: application/json")
	}
	o, err := decodeObject(body)
	if err != nil {
		return nil, err
	}
	if k, ok := o["kind"]; ok && k != t.kind {
		return nil, failure(http.StatusBadRequest, "BadRequest", "%v in version %q cannot be handled as a %s",
			k, t.apiVersion(), t.kind)
	}
	if v, ok := o["apiVersion"]; ok && v != t.apiVersion() {
		return nil, failure(http.StatusBadRequest, "BadRequest", "%s in version %q cannot be handled as a %s",
			t.kind, v, t.kind)
	}
	o["kind"], o["apiVersion"] = t.kind, t.apiVersion()
	meta := o.meta()
	if ns, _ := meta["namespace"].(string); ns != "" && ns != t.namespace {
		return nil, failure(http.StatusBadRequest, "BadRequest",
			"the namespace of the provided object does not match the namespace sent on the request")
	}
	if t.namespaced {
		meta["namespace"] = t.namespace
	}
	if n := o.text("metadata", "name"); t.name != "" && n != t.name {
		return nil, failure(http.StatusBadRequest, "BadRequest",
			"the name of the object (%s) does not match the name on the URL (%s)", n, t.name)
	}
	return o, nil
}

func decodeObject(body []byte) (object, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var o object
	if err := d.Decode(&o); err != nil || o == nil {
		return nil, failure(http.StatusBadRequest, "BadRequest",
			"the object provided is unrecognized: not a JSON object")
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, failure(http.StatusBadRequest, "BadRequest",
			"the object provided is unrecognized: something follows it")
	}
	for _, name := range []string{"metadata", "spec", "status", "data"} {
		if v, ok := o[name]; ok && v != nil {
			if _, ok := v.(map[string]any); !ok {
				return nil, failure(http.StatusBadRequest, "BadRequest", "%s is not an object", name)
			}
		}
	}
	return o, nil
}
