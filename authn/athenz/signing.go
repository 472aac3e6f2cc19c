package athenz

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

const (
	maxBody        = 64 << 10 // bytes of a request
	signingTimeout = 10 * time.Second
)

// signRequest is the body of a request to a signing service.
type signRequest struct {
	Subject struct {
		ID      string `json:"ID"`
		Domain  string `json:"Domain"`
		Service string `json:"Service"`
		IP      string `json:"IP"`
	} `json:"subject"`
}

type signAnswer struct {
	JWT string `json:"jwt"`
}

// NewSigningHandler returns a signing service. POST /v1/jwt signs a document for a proven caller, such as an agent
// with a [ClientCertificate]. It signs for any pod that the caller names, because the callers are the agents of all
// nodes. GET /healthz needs no proof. The logger gets refusals and failures; nil means no logs.
func NewSigningHandler(s Signer, callers authn.Authenticator, logger *slog.Logger) (http.Handler, error) {
	if s == nil || callers == nil {
		return nil, errors.New("athenz: new signing handler: the signer or the authenticator of the callers is " +
			"missing")
	}
	logger = ratelog.Patient(logger)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", jsonapi.Healthy)
	mux.Handle("POST /v1/jwt", authn.Require(callers, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		serveSigning(w, r, s, logger)
	}), logger))
	return mux, nil
}

func serveSigning(w http.ResponseWriter, r *http.Request, s Signer, logger *slog.Logger) {
	var in signRequest
	if err := readBody(w, r, &in); err != nil {
		http.Error(w, "the body is not the JSON of a request", http.StatusBadRequest)
		return
	}
	namespace, pod, _ := strings.Cut(in.Subject.ID, "/")
	ip, _ := netip.ParseAddr(in.Subject.IP) // a Signer refuses the zero address
	service := athenzname.Service{Domain: in.Subject.Domain, Name: in.Subject.Service}
	text, err := s(r.Context(), PodSubject{namespace, pod, service, ip})
	if err == nil {
		jsonapi.Write(w, signAnswer{text})
		return
	}
	logger.LogAttrs(r.Context(), slog.LevelWarn, "identity document not signed", slog.Any("err", err),
		slog.String("caller", callerName(r)))
	if errors.Is(err, ErrDocument) {
		http.Error(w, "the subject is incomplete or not valid", http.StatusInternalServerError)
		return
	}
	http.Error(w, "the document could not be signed", http.StatusInternalServerError)
}

func callerName(r *http.Request) string {
	if c, ok := authn.CallerFromContext(r.Context()); ok {
		return c.String()
	}
	return ""
}

// readBody reads JSON of at most 64 KiB.
func readBody(w http.ResponseWriter, r *http.Request, into any) error {
	data, err := conns.ReadBody(w, r, maxBody)
	if err != nil {
		return err
	}
	return json.Unmarshal(data, into)
}

// toServer returns a copy of the client that follows no redirects, for a server at an https address.
func toServer(address string, client *http.Client) (*http.Client, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" ||
		client == nil {
		return nil, errors.New("the address has to be an https URL without a query, and there has to be a client")
	}
	c := *client
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &c, nil
}

// NewSigningClient returns a Signer that calls the signing service at an https address without a path, and waits at
// most 10 seconds. The client proves this program by its certificate and decides which server is trusted; it is
// copied, and follows no redirects.
func NewSigningClient(address string, client *http.Client) (Signer, error) {
	c, err := toServer(address, client)
	if err != nil {
		return nil, fmt.Errorf("athenz: new signing client: %w", err)
	}
	address = strings.TrimRight(address, "/") + "/v1/jwt"
	return func(ctx context.Context, subject PodSubject) (string, error) {
		text, err := askToSign(ctx, c, address, subject)
		if err != nil {
			return "", fmt.Errorf("athenz: ask the signing service: %w", err)
		}
		return text, nil
	}, nil
}

func askToSign(ctx context.Context, client *http.Client, address string, subject PodSubject) (string, error) {
	if err := subject.check(); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, signingTimeout)
	defer cancel()
	var in signRequest
	in.Subject.ID, in.Subject.IP = subject.Namespace+"/"+subject.Pod, subject.IP.String()
	in.Subject.Domain, in.Subject.Service = subject.Service.Domain, subject.Service.Name
	var out signAnswer
	if err := jsonapi.Call(ctx, client, http.MethodPost, address, in, &out); err != nil {
		return "", err
	}
	if _, err := jws.Parse(out.JWT); err != nil {
		return "", fmt.Errorf("the answer has no document: %w", err)
	}
	return out.JWT, nil
}
