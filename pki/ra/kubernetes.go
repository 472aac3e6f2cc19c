package ra

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	apiVersion = "certificates.k8s.io/v1"
	kind       = "CertificateSigningRequest"

	firstPause, lastPause = 50 * time.Millisecond, 2 * time.Second // between polls
	answerTime            = 10 * time.Second                       // for one poll
)

// requests is the path of all requests.
func requests() string {
	return k8s.Path("apis", "certificates.k8s.io", "v1", "certificatesigningrequests")
}

// object is a CertificateSigningRequest.
type object struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   k8s.ObjectMeta `json:"metadata"`
	Spec       spec           `json:"spec"`
	Status     struct {
		Conditions  []condition `json:"conditions,omitempty"`
		Certificate []byte      `json:"certificate,omitempty"` // PEM
	} `json:"status,omitzero"`
}

type spec struct {
	Request           []byte   `json:"request"` // PEM
	SignerName        string   `json:"signerName"`
	ExpirationSeconds int32    `json:"expirationSeconds,omitempty"`
	Usages            []string `json:"usages"`
}

type condition struct {
	Type               string `json:"type"`
	Status             string `json:"status"`
	Reason             string `json:"reason,omitempty"`
	Message            string `json:"message,omitempty"`
	LastUpdateTime     string `json:"lastUpdateTime,omitempty"`
	LastTransitionTime string `json:"lastTransitionTime,omitempty"`
}

// condition returns the condition of the type, if it holds.
func (o *object) condition(typ string) (condition, bool) {
	i := slices.IndexFunc(o.Status.Conditions, func(c condition) bool { return c.Type == typ && c.Status == "True" })
	if i < 0 {
		return condition{}, false
	}
	return o.Status.Conditions[i], true
}

// job is one request to the API in progress.
type job struct {
	a    *RA
	name string
	spec spec
	uid  string // of the object that was created
}

// obtain returns the signer's answer in PEM.
func (a *RA) obtain(ctx context.Context, r *ca.Request, signer string) (answer []byte, f *ca.SignError) {
	j := &job{a: a, name: "csr-workload-" + strings.ToLower(rand.Text()), spec: spec{
		Request:    r.CSR.PEM(),
		SignerName: signer,
		Usages:     []string{"digital signature", "key encipherment", "server auth", "client auth"},
	}}
	if r.TTL > 0 {
		j.spec.ExpirationSeconds = int32(r.TTL / time.Second) // MaxTTL fits
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout,
		fmt.Errorf("no certificate within %v: does the signer %q run?", timeout, signer))
	defer cancel()
	o, err := j.create(ctx)
	switch {
	case err == nil, k8s.MayHaveLanded(err), k8s.AlreadyExists(err):
		// The object exists, or may exist soon. An existing object is ours, as its name cannot be guessed: a proxy on
		// the way to the API server sent the request twice.
		defer j.remove(ctx)
	}
	if err != nil {
		return nil, j.failure(ctx, "create", err)
	}
	return j.follow(ctx, o)
}

// create makes the object. We choose its name, so that it can be deleted even if we never learn that it was created.
func (j *job) create(ctx context.Context) (*object, error) {
	question := &object{APIVersion: apiVersion, Kind: kind, Metadata: k8s.ObjectMeta{Name: j.name}, Spec: j.spec}
	o := &object{}
	return o, j.a.api.Create(ctx, requests(), question, o)
}

// remove deletes the object, even if ctx is done. As the object may still be on its way, it tries three times more if
// it does not find it.
func (j *job) remove(ctx context.Context) {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), cleanUp,
		fmt.Errorf("not done within %v", cleanUp))
	defer cancel()
	absent := 0
	for pause := firstPause; ; pause *= 2 {
		err := j.a.api.Delete(ctx, j.path())
		missing := k8s.NotFound(err)
		if missing {
			absent++
		}
		if err == nil || absent > 3 {
			return
		}
		if !missing && !passing(err) || renew.Sleep(ctx, pause) != nil {
			j.a.cfg.Logger.Warn("certificate signing request not deleted, Kubernetes does so within a day",
				slog.String("name", j.name), slog.Any("err", err))
			return
		}
	}
}

func (j *job) path() string { return requests() + k8s.Path(j.name) }

// follow takes the object from its creation to the certificate. It pauses after each step, so that no answer of the
// API server, such as an approval that does not last, makes it loop without a rest.
func (j *job) follow(ctx context.Context, o *object) ([]byte, *ca.SignError) {
	for pause := firstPause; ; {
		if err := j.check(o); err != nil {
			return nil, fail(ca.ErrGeneration, "%w", err)
		}
		for _, bad := range []string{"Denied", "Failed"} {
			if c, ok := o.condition(bad); ok {
				return nil, fail(ca.ErrGeneration, "the request was %s: %s: %s", strings.ToLower(bad), said(c.Reason),
					said(c.Message))
			}
		}
		if len(o.Status.Certificate) > 0 {
			return o.Status.Certificate, nil
		}
		doing, err := "follow", error(nil)
		if _, ok := o.condition("Approved"); !ok {
			doing, err = "approve", j.approve(ctx, o)
		}
		for o = nil; o == nil; pause = min(2*pause, lastPause) {
			if err != nil && !passing(err) && !k8s.Conflict(err) || renew.Sleep(ctx, pause) != nil {
				return nil, j.failure(ctx, doing, err)
			}
			doing = "read"
			o, err = j.get(ctx)
		}
	}
}

func (j *job) get(ctx context.Context) (*object, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	o := &object{}
	if err := j.a.api.Get(ctx, j.path(), nil, o); err != nil {
		return nil, err
	}
	return o, nil
}

func (j *job) approve(ctx context.Context, o *object) error {
	o.Status.Conditions = append(o.Status.Conditions, condition{
		Type: "Approved", Status: "True", Reason: "Granted",
		Message:        "every name was granted to the caller by the registration authority",
		LastUpdateTime: time.Now().UTC().Format(time.RFC3339),
	})
	return j.a.api.Update(ctx, j.path()+"/approval", o, &object{})
}

// check reports whether an object is still the one that was created: only that may be approved, and only its answer
// counts.
func (j *job) check(o *object) error {
	j.uid = cmp.Or(j.uid, o.Metadata.UID)
	switch {
	case o.APIVersion != apiVersion || o.Kind != kind || o.Metadata.Name != j.name || o.Metadata.UID == "" ||
		o.Metadata.ResourceVersion == "":
		return fmt.Errorf("the API server answered with another object than a %s of %s with our name", kind,
			apiVersion)
	case o.Metadata.UID != j.uid:
		return errors.New("the request was replaced before it was answered")
	case !bytes.Equal(o.Spec.Request, j.spec.Request) || o.Spec.SignerName != j.spec.SignerName ||
		o.Spec.ExpirationSeconds != j.spec.ExpirationSeconds || !slices.Equal(o.Spec.Usages, j.spec.Usages):
		return errors.New("the request is not as we sent it: does an admission webhook change it?")
	}
	return nil
}

// failure returns the SignError for an error of the API.
func (j *job) failure(ctx context.Context, doing string, err error) *ca.SignError {
	if ctx.Err() != nil {
		if cause := context.Cause(ctx); err == nil || errors.Is(err, cause) {
			err = cause
		} else {
			err = fmt.Errorf("%w (%w)", cause, err)
		}
		return fail(spiffe.ErrNotReady, "%s the request: %w", doing, err)
	}
	f := fail(ca.ErrGeneration, "%s the request: %w", doing, err)
	if e, ok := errors.AsType[*k8s.StatusError](err); ok {
		f.RetryAfter = e.RetryAfter
		switch {
		case e.Code == http.StatusTooManyRequests:
			f.Kind = ca.ErrLimit
		case e.Code == http.StatusUnauthorized: // until our token has rotated
			f.Kind = spiffe.ErrNotReady
		case e.Code == http.StatusForbidden:
			f.Err = fmt.Errorf("%w; let the service account of this program create, get and delete "+
				"certificatesigningrequests, "+
				"update certificatesigningrequests/approval, and approve signers named %s, all in the "+
				"group certificates.k8s.io", f.Err, j.spec.SignerName)
		}
	}
	if f.Kind == ca.ErrGeneration && passing(err) {
		f.Kind = spiffe.ErrNotReady
	}
	return f
}

// passing reports whether the same request may succeed soon: the server did not answer, or reports a failure of its
// own.
func passing(err error) bool {
	if e, ok := errors.AsType[*k8s.StatusError](err); ok {
		return e.Code >= 500 || e.Code == http.StatusTooManyRequests || e.Code == http.StatusRequestTimeout
	}
	return err != nil
}

// said returns a signer's or approver's text, for an error.
func said(s string) string { return cmp.Or(k8s.OneLine(s, 300), "no reason given") }
