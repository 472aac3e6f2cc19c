package inject

import (
	"encoding/json"
	"errors"
	"log/slog"
	"mime"
	"net/http"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/strictjson"
)

// Limits on requests of API servers, which accept objects of up to 3 MiB.
const (
	maxReview  = 8 << 20 // bytes
	maxReviews = 16      // at the same time
	maxWaiting = 256     // further ones in the queue

	maxReading = 256 << 20 // bytes of reviews being read
	maxPeer    = 32 << 20  // of one peer
)

// ServeHTTP answers an AdmissionReview (admission.k8s.io/v1) of the API server, for CREATE and UPDATE of any kind. It
// changes nothing for an update of a pod, as Kubernetes then allows no other variables and volumes. Nor does it for a
// subresource, such as the status, or for an object that is being deleted, which would stay forever. A refusal's
// message tells its reason to the requesting user. The surrounding server must use TLS, with a certificate that the
// webhook configuration trusts; to accept only the API server, it verifies the client's certificate.
//
// The configuration should have failurePolicy Fail: a pod that bypasses the webhook has no identity and cannot be
// reached over TLS. It should exempt the webhook's own namespace, or a cluster that has lost the webhook cannot start
// it again.
func (in *Injector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "an AdmissionReview is sent with POST", http.StatusMethodNotAllowed)
		return
	}
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		http.Error(w, "an AdmissionReview is application/json", http.StatusUnsupportedMediaType)
		return
	}
	body, code := in.body(w, r)
	if code != 0 {
		w.Header().Set("Connection", "close")
		http.Error(w, "the request cannot be read", code)
		return
	}
	if err := in.reviews.Acquire(r.Context(), ""); err != nil {
		http.Error(w, "there are too many requests", http.StatusServiceUnavailable)
		return
	}
	defer in.reviews.Release()
	strict, d := strictjson.NewReader(body), &decoder{}
	strict.Skip()
	if err := strict.End(); err != nil {
		http.Error(w, "the AdmissionReview: "+err.Error(), http.StatusBadRequest)
		return
	}
	review := d.tree("review", body)
	request := d.member(review, "request")
	version, kind := d.text(review, "apiVersion"), d.text(review, "kind")
	uid, namespace := d.text(request, "uid"), d.text(request, "namespace")
	about := subject{
		operation: d.text(request, "operation"), pod: d.text(d.member(request, "kind"),
			"kind") == "Pod", part: d.text(request, "subResource"),
		// Read the old object: callers can set it in the new one.
		ends: d.text(d.member(d.member(request, "oldObject"), "metadata"), "deletionTimestamp") != "",
	}
	switch {
	case d.err != nil:
		http.Error(w, "the AdmissionReview: "+d.err.Error(), http.StatusBadRequest)
		return
	case version != "admission.k8s.io/v1" || kind != "AdmissionReview" || uid == "":
		http.Error(w, "this is no AdmissionReview of admission.k8s.io/v1 with a request", http.StatusBadRequest)
		return
	}
	answer := response{UID: uid, Allowed: true}
	got, err := in.judge(request["object"], namespace, about)
	switch {
	case err != nil:
		answer.Allowed = false
		answer.Status = &status{Code: http.StatusForbidden, Message: kube.OneLine(err.Error(), 1000)}
		if !errors.Is(err, ErrRefused) {
			answer.Status.Code = http.StatusBadRequest
		}
		in.cfg.Logger.LogAttrs(r.Context(), slog.LevelInfo, "inject: object refused",
			slog.String("why", answer.Status.Message))
	case got.Patch != nil:
		answer.Patch, answer.PatchType = got.Patch, "JSONPatch"
	}
	w.Header().Set("Content-Type", "application/json")
	// The client has gone.
	_ = json.NewEncoder(w).Encode(map[string]any{"apiVersion": version, "kind": kind, "response": answer})
}

// body reads a review. It takes no slot meanwhile, so that slow senders do not delay the API server. The code is 0 on
// success.
func (in *Injector) body(w http.ResponseWriter, r *http.Request) (data []byte, code int) {
	size := r.ContentLength
	switch {
	case size > maxReview:
		return nil, http.StatusRequestEntityTooLarge
	case size < 0:
		size = maxReview
	}
	from := peerkey.FromContext(peerkey.WithRequest(r.Context(), r))
	if err := in.reading.Take(from, int(size)); err != nil {
		return nil, http.StatusServiceUnavailable
	}
	defer in.reading.Give(from, int(size))
	data, err := conns.ReadBody(w, r, maxReview)
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return nil, http.StatusRequestEntityTooLarge
	}
	if err != nil {
		return nil, http.StatusBadRequest
	}
	return data, 0
}

// subject is the operation and its object.
type subject struct {
	operation string
	pod, ends bool   // ends: the object is being deleted
	part      string // subresource
}

// judge calls Inject for objects that can change. A pod's containers change only through its ephemeralcontainers,
// which are checked but not patched.
func (in *Injector) judge(data []byte, namespace string, s subject) (*Injection, error) {
	update := s.operation == "UPDATE"
	switch {
	case update && s.pod && s.part == "ephemeralcontainers":
	case s.operation != "CREATE" && !update, s.part != "", update && (s.pod || s.ends):
		return &Injection{}, nil
	default:
		return in.Inject(data, namespace)
	}
	o, err := in.read(data, namespace)
	if err != nil {
		return nil, err
	}
	if o.proxy == nil {
		return &Injection{}, nil
	}
	return &Injection{}, in.guard(o)
}

// response is the answer of an AdmissionReview.
type response struct {
	UID       string  `json:"uid"`
	Allowed   bool    `json:"allowed"`
	Status    *status `json:"status,omitempty"`
	Patch     []byte  `json:"patch,omitempty"` // base64
	PatchType string  `json:"patchType,omitempty"`
}

type status struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}
