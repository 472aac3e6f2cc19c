package kube

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// StatusError is a refusal or failure answered by an API server.
type StatusError struct {
	Code    int    // the HTTP status
	Reason  string // such as "AlreadyExists" or "Forbidden"; may be empty
	Message string // for people; at most 512 bytes, without control characters and without the request's secrets

	// RetryAfter is how long the server asks its clients to wait, at most an hour; 0 if it does not say.
	RetryAfter time.Duration
}

func (e *StatusError) Error() string {
	text := strings.TrimSpace(strconv.Itoa(e.Code) + " " + cmp.Or(e.Reason, http.StatusText(e.Code)))
	if e.Message != "" {
		text += ": " + e.Message
	}
	return text
}

// Wish returns how long the API server that refused a request asks to wait; 0 if it does not say.
func Wish(err error) time.Duration {
	return statusOf(err).RetryAfter
}

// NotFound reports whether an API server says that there is no such object. It is false for a 404 from a proxy or a
// wrong URL, which knows nothing about objects.
func NotFound(err error) bool {
	e := statusOf(err)
	return e.Code == http.StatusNotFound && e.Reason == "NotFound"
}

// Forbidden reports whether err says that the caller's RBAC rights do not suffice.
func Forbidden(err error) bool { return statusOf(err).Code == http.StatusForbidden }

// AlreadyExists reports whether err says that an object with the name exists already.
func AlreadyExists(err error) bool {
	e := statusOf(err)
	return e.Code == http.StatusConflict && e.Reason == "AlreadyExists"
}

// Conflict reports whether err says that the object has changed since it was read, or that a precondition does not
// hold. It is false for [AlreadyExists].
func Conflict(err error) bool {
	return statusOf(err).Code == http.StatusConflict && !AlreadyExists(err)
}

// Gone reports whether err says that the resourceVersion to watch from is too old, so that the caller must list
// again.
func Gone(err error) bool {
	e := statusOf(err)
	return e.Code == http.StatusGone || e.Reason == "Expired" || e.Reason == "Gone"
}

func statusOf(err error) StatusError {
	if e, ok := errors.AsType[*StatusError](err); ok {
		return *e
	}
	return StatusError{}
}

// MayHaveLanded reports whether the change that failed with err may have taken effect: the connection broke or the
// time ran out after it was sent, the server failed on it, or its answer could not be read. Callers that need to know
// must read the object. It is false for nil, for a refused request, and for a request that was never sent.
func MayHaveLanded(err error) bool {
	if e, ok := errors.AsType[*StatusError](err); ok {
		return e.Code >= 500 || e.Code == http.StatusRequestTimeout
	}
	e, ok := errors.AsType[*requestError](err)
	return ok && e.sent
}

// requestError names the failed request.
type requestError struct {
	method, path string
	sent         bool // it may have reached the server
	err          error
}

func (e *requestError) Error() string {
	return "kube: " + e.method + " " + e.path + ": " + e.err.Error()
}
func (e *requestError) Unwrap() error { return e.err }

// refused reads the answer to an unsuccessful request.
func (x *exchange) refused(response *http.Response) error {
	e := &StatusError{Code: response.StatusCode, RetryAfter: RetryAfter(response.Header)}
	switch {
	case response.StatusCode/100 == 3:
		e.Message = "redirects are refused: give the URL of the API server itself"
	case isJSON(response.Header):
		data, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
		if err == nil && len(data) <= maxAnswer {
			e.fill(data, x)
		}
	}
	return x.fail(true, e)
}

// fill takes the fields of a Status object, if data is one. It keeps the code, if there is one.
func (e *StatusError) fill(data []byte, x *exchange) {
	var s struct {
		Kind    string `json:"kind"`
		Message string `json:"message"`
		Reason  string `json:"reason"`
		Code    int    `json:"code"`
		Details struct {
			RetryAfterSeconds int64 `json:"retryAfterSeconds"`
		} `json:"details"`
	}
	if json.Unmarshal(data, &s) == nil && s.Kind == "Status" {
		e.Reason, e.Message = OneLine(x.redact(s.Reason), 64), OneLine(x.redact(s.Message), 512)
		if e.RetryAfter == 0 {
			e.RetryAfter = seconds(s.Details.RetryAfterSeconds)
		}
		if e.Code == 0 && s.Code >= 100 && s.Code <= 999 {
			e.Code = s.Code
		}
	}
	if e.Code == 0 {
		e.Code = http.StatusInternalServerError
	}
}

// redact makes a message fit for a log, because admission webhooks and proxies may quote the request. The secrets of
// the request are the bearer token, and the token or data in the body, encoded or not. It also removes words that are
// too long for a label. A word consists of the characters of a bearer token.
func (x *exchange) redact(message string) string {
	var b strings.Builder
	for message != "" {
		n := strings.IndexFunc(message, func(c rune) bool { return !bearer.TokenRune(c) })
		switch {
		case n < 0:
			n = len(message)
		case n == 0:
			_, n = utf8.DecodeRuneInString(message)
		}
		if n >= 64 {
			b.WriteString("[redacted]")
		} else {
			b.WriteString(message[:n])
		}
		message = message[n:]
	}
	return bearer.Redact(b.String(), x.secrets()...)
}

// secrets returns the texts that must not be in an error of the request. A text of less than 16 bytes is not a secret.
func (x *exchange) secrets() []string {
	var body struct {
		Spec struct {
			Token string `json:"token"`
		} `json:"spec"`
		Data map[string]string `json:"data"`
	}
	_ = json.Unmarshal(x.body, &body) // an unreadable body has no such members
	all := []string{x.token, body.Spec.Token}
	for _, v := range body.Data {
		all = append(all, v)
		if plain, err := base64.StdEncoding.DecodeString(v); err == nil {
			all = append(all, string(plain))
			all = slices.AppendSeq(all, strings.FieldsSeq(string(plain))) // the lines of PEM
		}
	}
	return slices.DeleteFunc(all, func(s string) bool { return len(s) < 16 })
}

// OneLine makes an untrusted text fit for one line of a log, of at most limit bytes.
func OneLine(s string, limit int) string {
	s = strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(s, "\uFFFD"))
	s = strings.TrimSpace(s)
	if len(s) <= limit {
		return s
	}
	n := limit - len("…")
	for !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// RetryAfter returns how long a server asks its clients to wait, at most an hour: seconds or a date (RFC 9110 section
// 10.2.3). It is 0 if the server does not say.
func RetryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	// an out-of-range number becomes the largest one
	if n, err := strconv.ParseInt(v, 10, 64); err == nil || errors.Is(err, strconv.ErrRange) {
		return seconds(n)
	}
	if at, err := http.ParseTime(v); err == nil {
		return min(max(time.Until(at), 0), time.Hour)
	}
	return 0
}

func seconds(n int64) time.Duration {
	return time.Duration(min(max(n, 0), int64(time.Hour/time.Second))) * time.Second
}
